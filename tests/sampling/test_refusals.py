"""Samplings say what they are, and refuse what contradicts them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import HAS_TF_PRIVACY
from tests.helpers.sampled import DELTA, N, fake_ledger, numbered, records, to_pair
from tf_adaptive_dp.sampling import datasets, sampling_epsilon


def words(sampling, ledger=None, **kwargs):
    ledger = fake_ledger((2.0, 100.0, 50), checks=[(50,)]) if ledger is None else ledger
    return " ".join(dp.privacy_statement(ledger, N, DELTA, sampling=sampling, **kwargs).split())


def test_a_label_of_poisson_batches_has_no_microbatches_either():
    ledger = fake_ledger((2.0, 100.0, 50))
    optimizer = SimpleNamespace(ledger=ledger, num_microbatches=10)
    sampling_epsilon.epsilon_spent("shuffled", optimizer, N, DELTA)
    for ask in (
        lambda: sampling_epsilon.epsilon_spent("poisson", optimizer, N, DELTA),
        lambda: words("poisson", optimizer),
        lambda: sampling_epsilon.releases_left("poisson", optimizer, 2.0, 100.0, N, 4.0, DELTA),
    ):
        with pytest.raises(ValueError, match="without `num_microbatches`"):
            ask()


@pytest.mark.parametrize("jobs", [{"worker": 2}, {"chief": 1, "worker": 1}])
def test_several_workers_are_refused(monkeypatch, jobs):
    sampling = dp.PoissonSampling(0.5, 8, 3)

    def with_tasks(jobs):
        cluster = {job: [f"localhost:{number}" for number in range(n)] for job, n in jobs.items()}
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        return dp.poisson_batches(numbered(12), sampling)

    with_tasks({"worker": 1})
    with pytest.raises(dp.NotPrivateError, match="Received: 2 workers in TF_CONFIG"):
        with_tasks(jobs)


@pytest.mark.parametrize("secret", [{"key": bytes(32)}, {}])
def test_batches_that_come_again_are_known_through_methods_of_the_dataset(secret):
    made = dp.poisson_batches(numbered(12), dp.PoissonSampling(0.5, 8, 3), **secret)
    both = tf.data.Dataset.zip((tf.data.Dataset.range(9), made.map(lambda *rows: rows[0])))
    for dataset in (made, made.prefetch(1), both.take(2)):
        assert datasets.is_repeatable(dataset) == bool(secret)


def test_the_statement_says_which_sampling_was_used():
    text = words(dp.PoissonSampling(0.1, 190, 50))
    assert "drawn by Poisson sampling, for which this epsilon is a proven upper bound" in text
    assert (
        "with probability 0.1. Draws of more than 190 examples were subsampled uniformly to" in text
    )
    assert ("TF Privacy's statement" in text) == HAS_TF_PRIVACY
    assert "subsampled" not in words(dp.PoissonSampling(0.1, N + 1, 50))
    assert "NOT AMPLIFIED" not in text
    for sampling in (
        dp.PoissonSampling(0.1, 190, 50, seed=3),
        dp.sampling.ShuffledEpochs(100, 50, seed=3),
    ):
        text = words(sampling)
        assert "NOT AMPLIFIED: the batches were drawn with seed 3" in text
        assert "is a proven upper bound" not in text
    truncated = dp.PoissonSampling(0.1, 150, 50)
    spent = truncated.epsilon_spent(fake_ledger((2.0, 100.0, 50)), N, DELTA)
    text = words(truncated)
    assert f"epsilon = {math.ceil(spent * 1e4) / 1e4:.4f} " in text
    assert "TF Privacy's statement" not in text  # it knows of no truncation
    for fixed in ("fixed", dp.sampling.FixedSizeSampling(100, 50)):
        text = words(fixed)
        spent = sampling_epsilon.epsilon_spent(fixed, fake_ledger((2.0, 100.0, 50)), N, DELTA)
        assert f"epsilon = {math.ceil(spent * 1e4) / 1e4:.4f} " in text
        assert "in which one example replaces another" in text
        assert (
            "adding or removing one" not in text
            and "independent random subsets of a fixed size" in text
        )
        assert "TF Privacy's statement" not in text
    # A label is taken on trust, and the statement says so.
    stated = "batches are stated to have come from shuffling"
    assert stated in words("shuffled")
    epochs = dp.sampling.ShuffledEpochs(100, 50)
    assert words(epochs) == words("shuffled")  # nobody drew by it
    dp.sampling.shuffled_batches(numbered(N), epochs)
    came = words("shuffled").replace("are stated to have come", "came")
    assert words(epochs).split() == came.split()


POISSON = dict(sampling_probability=0.1, max_batch_size=150, steps=50)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sampling_probability": 0}, ValueError, r"`sampling_probability` must be in \(0, 1\]"),
        ({"sampling_probability": 1.5}, ValueError, "Received: sampling_probability=1.5"),
        ({"sampling_probability": math.nan}, ValueError, "Received: sampling_probability=nan"),
        ({"max_batch_size": 0}, ValueError, "`max_batch_size` must be at least 1. Received: max"),
        ({"max_batch_size": 9.5}, TypeError, "`max_batch_size` must be a whole number"),
        ({"steps": 0}, ValueError, "`steps` must be at least 1. Received: steps=0"),
        ({"seed": -1}, ValueError, "`seed` must be at least 0. Received: seed=-1"),
        ({"seed": "x"}, TypeError, "`seed` must be a whole number. Received: seed='x'"),
    ],
)
def test_samplings_refuse(change, error, message):
    with pytest.raises(error, match=message):
        dp.PoissonSampling(**{**POISSON, **change})
    change = {k: v for k, v in change.items() if k in ("steps", "seed")}
    if change:
        for make in (dp.sampling.FixedSizeSampling, dp.sampling.ShuffledEpochs):
            with pytest.raises(error, match=message):
                make(**{"batch_size": 8, "steps": 3, **change})


def test_samplings_are_frozen_values():
    sampling = dp.PoissonSampling(**POISSON)
    with pytest.raises(AttributeError):
        sampling.steps = 3
    assert sampling == dp.PoissonSampling(**POISSON) and hash(sampling)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        dp.sampling.FixedSizeSampling(0, 1)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        dp.sampling.ShuffledEpochs(0, 1)
    with pytest.raises(ValueError, match="`batch_size` must be at most `num_examples`"):
        dp.PoissonSampling.for_batch_size(11, 10, 5)


FEW = dp.PoissonSampling(0.3, 9, 5, seed=1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dp.poisson_batches(5, FEW), TypeError, "`data` must be a tuple .*Received: int"),
        (lambda: dp.poisson_batches({"a": 1}, FEW), TypeError, "`data` must be .*Received: dict"),
        (lambda: dp.poisson_batches(([1], [2]), FEW), TypeError, "np.asarray.*'int', 'int'"),
        (
            lambda: dp.poisson_batches((np.array([1, "a"], object), np.ones(2)), FEW),
            TypeError,
            "Convert a table .* an array with objects of type int",
        ),
        (
            lambda: dp.poisson_batches((np.array([1, 2.5], object), np.ones(2)), FEW),
            TypeError,
            r'Convert it .*astype\("float32"\)`.* dtype object, with numbers',
        ),
        (lambda: dp.poisson_batches([], FEW), ValueError, "`data` must hold at least one example"),
        (lambda: dp.poisson_batches(numbered(0), FEW), ValueError, "at least one example"),
        (lambda: dp.poisson_batches(records(), FEW), TypeError, "`preprocess`.*Received: dict"),
        (
            lambda: dp.poisson_batches((np.ones(3), np.ones(4)), FEW),
            ValueError,
            r"share their first axis. Received: lengths \[3, 4\]",
        ),
        (lambda: dp.poisson_batches(numbered(), "poisson"), TypeError, "must be a PoissonSampling"),
        (
            lambda: dp.poisson_batches(numbered(), dp.sampling.FixedSizeSampling(3, 3)),
            TypeError,
            "must be a PoissonSampling or a CyclicPoissonSampling. Received",
        ),
        (
            lambda: dp.poisson_batches(numbered(), FEW, start_step=5),
            ValueError,
            "`start_step` must be below the `steps`.*start_step=5, steps=5",
        ),
        (lambda: dp.poisson_batches(numbered(), FEW, start_step=-1), ValueError, "`start_step`"),
        (
            lambda: dp.poisson_batches(numbered(), FEW, key=b"short"),
            ValueError,
            "must be 32 bytes.*Received: bytes of length 5",
        ),
        (
            lambda: dp.poisson_batches(numbered(), FEW, preprocess=to_pair),
            ValueError,
            "`preprocess` is for sources of single examples",
        ),
        (
            lambda: dp.poisson_batches(numbered(), FEW, padding=(np.ones(2), np.int64(0))),
            ValueError,
            r"`padding` must be one example.*shape \(2,\) instead of \(1,\)",
        ),
        (
            lambda: dp.sampling.fixed_size_batches(
                numbered(3), dp.sampling.FixedSizeSampling(4, 1)
            ),
            ValueError,
            "make `batch_size` smaller. Received: 3 examples, batch_size=4",
        ),
        (
            lambda: dp.sampling.shuffled_batches(numbered(3), dp.sampling.ShuffledEpochs(4, 1)),
            ValueError,
            "make `batch_size` smaller",
        ),
    ],
)
def test_batches_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()


SINGLE = tf.data.Dataset.from_tensor_slices(numbered(4))
GIVING_COPIES = {
    "repeat": SINGLE.repeat(3),
    "repeat before other transformations": SINGLE.repeat(2).map(lambda *e: e).shuffle(8),
    "a part of an endless repetition": SINGLE.repeat().take(10),
    "concatenated with itself": SINGLE.concatenate(SINGLE),
    "beside its changed examples": SINGLE.concatenate(SINGLE.map(lambda x, y: (-x, y))),
    "beside some of its examples": SINGLE.concatenate(SINGLE.take(2)),
    "sampled from twice": tf.data.Dataset.sample_from_datasets([SINGLE, SINGLE.map(lambda *e: e)]),
    "blended with itself": tf.data.Dataset.zip((SINGLE, SINGLE.shuffle(4))).map(
        lambda one, other: (one[0] + other[0], one[1])
    ),
    "repeated beside others": tf.data.Dataset.zip((SINGLE.repeat(2), tf.data.Dataset.range(8))).map(
        lambda e, i: e
    ),
    "one example, repeated": tf.data.Dataset.from_tensors((np.ones(2), 1)).repeat(4),
    "one example, repeated in parts": tf.data.Dataset.zip(
        tuple(tf.data.Dataset.from_tensors(part).repeat(4) for part in (np.ones(2), 1))
    ),
}


@pytest.mark.parametrize("kind", GIVING_COPIES)
def test_datasets_that_give_examples_several_times_are_refused(kind):
    with pytest.raises(ValueError, match="`data` must give each example once.*`repeat`"):
        dp.poisson_batches(GIVING_COPIES[kind], FEW)


def test_parts_of_a_data_set_may_be_joined():
    parts = [SINGLE.shard(2, k) for k in range(2)]
    for data in (
        parts[0].concatenate(parts[1]),
        tf.data.Dataset.choose_from_datasets(parts, tf.data.Dataset.range(2).repeat()),
        tf.data.Dataset.zip((SINGLE.map(lambda x, y: x), SINGLE.map(lambda x, y: y))),
    ):
        assert dp.poisson_batches(data, FEW).element_spec


def test_examples_that_each_have_a_copy_are_named_wherever_the_copies_come_from():
    many, drawn = numbered(30), dp.PoissonSampling.for_batch_size(5, num_examples=60, steps=1)
    single = tf.data.Dataset.from_tensor_slices(many)

    def twice():
        for _ in range(2):
            yield from zip(*many)

    several = {
        "arrays": tuple(np.concatenate([a, a]) for a in many),
        "generator": tf.data.Dataset.from_generator(
            twice, output_signature=tuple(tf.TensorSpec(a.shape[1:], a.dtype) for a in many)
        ),
    }
    for name, data in several.items():
        with pytest.warns(UserWarning, match="each example 2 times") as found:
            dp.poisson_batches(data, drawn)
        ours = {w.filename for w in found if w.category is UserWarning}
        assert ours == {__file__}, name
    for data in (
        single.flat_map(lambda *e: tf.data.Dataset.from_tensors(e).repeat(2)),
        single.batch(5).flat_map(lambda *e: tf.data.Dataset.from_tensor_slices(e).repeat(2)),
    ):
        with pytest.raises(ValueError, match="`data` must give each example once.*`repeat`"):
            dp.poisson_batches(data, drawn)


@pytest.mark.filterwarnings("error")
def test_examples_that_are_alike_by_chance_are_no_copies():
    features = np.random.default_rng(0).integers(0, 2, [3_000, 6])
    alike = (features.astype(np.float32), features[:, 0])  # 64 different rows, each some 47 times
    few = tuple(np.repeat(a, 2, axis=0) for a in numbered(9))
    almost = tuple(np.concatenate([a, a[:-1]]) for a in numbered(30))
    nothing = np.zeros([90, 2]), np.zeros([90, 0])
    for data in (alike, few, almost, numbered(30), nothing):
        n = len(data[0])
        dp.poisson_batches(data, dp.PoissonSampling.for_batch_size(2, num_examples=n, steps=1))


@pytest.mark.filterwarnings("error")
def test_windows_of_a_time_series_are_no_copies():
    # Keras puts the positions of all windows, one value that is repeated, beside each of them.
    series = np.arange(30.0)
    windows = tf.keras.utils.timeseries_dataset_from_array(
        series, series[3:], sequence_length=3, batch_size=8
    )
    batches = dp.poisson_batches(
        windows.unbatch(), dp.PoissonSampling.for_batch_size(20, num_examples=27, steps=1)
    )
    x, y, weight = next(iter(batches))
    drawn = x.numpy()[weight.numpy() > 0]
    np.testing.assert_array_equal(drawn, y.numpy()[weight.numpy() > 0, None] - [3, 2, 1])
    assert len(drawn) == len(set(drawn[:, 0])) > 0


def test_datasets_in_parts_are_accepted():
    parts = SINGLE.take(1).concatenate(SINGLE.skip(1)).repeat(1)
    (inputs, _, _) = next(iter(dp.poisson_batches(parts, FEW)))
    assert len(inputs) == 9


def test_examples_of_other_shapes_are_refused_and_not_broadcast():
    examples = [(np.ones(4, np.float32), 0)] + [(np.ones(1, np.float32), 0)] * 20
    with pytest.raises(tf.errors.InvalidArgumentError, match="the shapes of the first one"):
        list(dp.poisson_batches(examples, dp.PoissonSampling(0.9, 30, 1, seed=1)))


@pytest.mark.parametrize(
    ("sampling", "ledger", "kwargs", "message"),
    [
        (dp.PoissonSampling(0.2, 300, 50), None, {}, "`expected_batch_size=200.0`"),
        (dp.PoissonSampling(0.1 * (1 - 1e-6), 300, 50), None, {}, "`expected_batch_size=99.99"),
        (dp.PoissonSampling(0.1, 300, 49), None, {}, "released 50 noisy .*only 49 batches"),
        (
            dp.PoissonSampling(0.1, 300, 50),
            SimpleNamespace(ledger=fake_ledger((2.0, 100.0, 1)), num_microbatches=10),
            {},
            "without `num_microbatches`. Received: num_microbatches=10",
        ),
        (dp.sampling.FixedSizeSampling(99, 50), None, {}, "with batch size 100.0, .* has 99.0"),
        (dp.sampling.ShuffledEpochs(99, 50), None, {}, "with batch size 100.0, .* has 99.0"),
        ("fixed", fake_ledger((2.0, 99.5, 5)), {}, "a whole number of examples"),
        (
            "fixed",
            fake_ledger((2.0, 99.0, 5), other_events=(dp_accounting.GaussianDpEvent(1.0),)),
            {},
            "The ledger's `other_events` hold for adding or removing",
        ),
        ("sorted", None, {}, "`sampling` must be one of 'shuffled', 'poisson', 'fixed'"),
    ],
)
def test_ledgers_that_contradict_the_sampling_are_refused(sampling, ledger, kwargs, message):
    with pytest.raises(ValueError, match=message):
        words(sampling, ledger, **kwargs)
