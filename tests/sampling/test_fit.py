"""`fit` trains on the batches, and its callbacks know them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.sampled import DELTA, N, fake_ledger
from tf_adaptive_dp.accounting.composition import epsilon


def fit(sampling, dataset=None, monitor=None, expected=None, steps=5, epochs=2, n=N, **kwargs):
    model = catalogue.mlp()
    expected = sampling.expected_batch_size(n) if expected is None else expected
    optimizer = dp.DPSGD(
        1.0, 1.0, learning_rate=0.1, expected_batch_size=expected or None, **kwargs
    )
    model.compile(optimizer, loss=catalogue.loss())
    x, y = catalogue.data()
    copies = -(-n // len(x))
    x, y = np.tile(x, [copies, 1])[:n], np.tile(y, copies)[:n]
    if dataset is None:
        dataset = dp.poisson_batches((x, y), sampling)
    monitor = monitor or dp.PrivacyMonitor(n, DELTA, sampling=sampling)
    history = model.fit(
        dataset if isinstance(dataset, tf.data.Dataset) else dataset((x, y)),
        steps_per_epoch=steps,
        epochs=epochs,
        verbose=0,
        callbacks=[monitor],
    ).history
    return model, monitor, history


def assert_trains_on_each(datasets, expected_batch_size):
    """One model for all: each `fit` looks at its data, and the step is traced once."""
    model = catalogue.compiled("DPSGD", expected_batch_size=expected_batch_size)
    for k, dataset in enumerate(datasets.values()):
        model.fit(dataset.take(1), verbose=0)
        assert model.optimizer.ledger.num_releases == k + 1


def test_fit_releases_poisson_batches_and_says_so():
    sampling = dp.PoissonSampling.for_batch_size(20, N, steps=10)
    model, monitor, history = fit(sampling)
    assert model.optimizer.ledger.segments == [(1.0, 20.0, 10)]
    expected = [epsilon(1.0, 20 / N, steps, DELTA) for steps in (5, 10)]
    np.testing.assert_allclose(history["epsilon"], expected, rtol=1e-6)
    assert "with probability 0.02" in " ".join(monitor.statement().split())


def test_fit_counts_truncation():
    sampling = dp.PoissonSampling(0.02, 40, steps=10)
    _, monitor, history = fit(sampling)
    assert history["epsilon"][-1] > epsilon(1.0, 0.02, 10, DELTA) * 1.0001
    assert history["epsilon"][-1] == monitor.epsilon()


def test_a_sampling_with_more_room_than_the_one_that_drew_does_not_lower_epsilon():
    """2.97 was called proven where, as batches were truncated, there was no ε."""
    drew = dp.PoissonSampling(0.02, 22, steps=10)
    model, *_ = fit(drew, monitor=dp.PrivacyMonitor(N, DELTA, sampling="poisson"))
    assert drew.epsilon_spent(model.optimizer, N, DELTA) == math.inf
    claimed = dp.PoissonSampling.for_batch_size(20, N, steps=10)
    assert claimed.epsilon_spent(model.optimizer, N, DELTA) == math.inf
    text = " ".join(dp.privacy_statement(model.optimizer, N, DELTA, sampling=claimed).split())
    assert "truncating batches to 22 examples costs more than delta" in text


def test_empty_batches_are_released_too():
    sampling = dp.PoissonSampling(1e-6, 8, steps=4, seed=1)
    model, _, _ = fit(sampling, steps=2)
    assert model.optimizer.ledger.segments == [(1.0, pytest.approx(1e-3), 4)]
    for weights in model.get_weights():
        assert np.isfinite(weights).all()


def is_not_empty(x, y, weights=1.0):
    del x, y
    return tf.reduce_any(weights > 0)


CHOOSING = {
    "filter": lambda drawn: drawn.filter(is_not_empty),
    "filter before other methods": lambda drawn: drawn.filter(is_not_empty).map(lambda *b: b),
    "take_while": lambda drawn: drawn.take_while(is_not_empty),
    "ignore_errors": lambda drawn: drawn.apply(tf.data.experimental.ignore_errors()),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", CHOOSING)
def test_batches_may_not_be_left_out_by_what_they_hold(way):
    """Without the empty batches, one more example makes one more release: epsilon is infinite."""
    sampling = dp.PoissonSampling.for_batch_size(2, N, steps=10)
    (of_all, chosen) = (lambda data: dp.poisson_batches(data, sampling)), CHOOSING[way]
    with pytest.raises(dp.NotPrivateError, match=f"`{way.split()[0]}` after its examples"):
        fit(sampling, lambda data: chosen(of_all(data)))
    model, monitor, _ = fit(sampling, of_all, steps=1)
    trained = model.optimizer.ledger.num_releases
    x, y = catalogue.data()
    with pytest.raises(dp.NotPrivateError, match="must not depend on what it holds"):
        model.fit(chosen(of_all((x, y))), verbose=0, callbacks=[monitor])
    assert model.optimizer.ledger.num_releases == trained


@pytest.mark.parametrize("divided", [False, True])
def test_on_replicas_batches_may_not_be_left_out_either(divided):
    """A data set that the user gave to the strategy was not looked at."""
    strategy = catalogue.mirrored()
    with strategy.scope():
        model = catalogue.compiled("DPSGD", expected_batch_size=8)
    batches = tf.data.Dataset.from_tensor_slices(catalogue.data()).batch(8, drop_remainder=True)
    chosen = batches.filter(lambda x, y: tf.reduce_sum(x) > 0)
    if divided:
        chosen = strategy.experimental_distribute_dataset(chosen)
    with pytest.raises(dp.NotPrivateError, match="`filter` after its examples were batched"):
        model.fit(chosen, verbose=0, steps_per_epoch=2)
    assert not model.optimizer.ledger.num_releases


@pytest.mark.slow_on(2)
def test_batches_may_be_chosen_by_their_size_and_number_and_examples_by_anything():
    x, y = catalogue.data()
    single = tf.data.Dataset.from_tensor_slices((x, y))
    several = {
        "size": single.batch(5).filter(lambda x, y: tf.shape(x)[0] == 5),
        "number": single.batch(5).enumerate().filter(lambda i, b: i == 0).map(lambda i, b: b),
        "examples": single.filter(lambda x, y: x[0] < 9.0).batch(5, drop_remainder=True),
    }
    assert_trains_on_each(several, expected_batch_size=5)


TIES = {
    "take_while": lambda single: single.take_while(lambda x, y: x[0] < 9.0),
    "scan": lambda single: single.scan(0.0, lambda s, e: (s + e[0][0], (e[0] - s, e[1]))),
    "scan, then map": lambda single: single.scan(
        (0.0, 0), lambda s, e: ((s[0], s[1] + tf.cast(e[1], tf.int32)), e)
    ).map(lambda *e: e),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", TIES)
def test_no_example_may_change_what_becomes_of_the_others(way):
    """One more example, at which `take_while` ends, would take away all that come after it."""
    single = TIES[way](tf.data.Dataset.from_tensor_slices(catalogue.data()))
    method = way.split(",")[0]
    for data in (single.batch(4, drop_remainder=True), single.shuffle(9).batch(4)):
        model = catalogue.compiled("DPSGD", expected_batch_size=4)
        with pytest.raises(dp.NotPrivateError, match=f"No example may change .* `{method}`"):
            model.fit(data, verbose=0)
        assert not model.optimizer.ledger.num_releases
    sampling = dp.PoissonSampling.for_batch_size(2, N, steps=10)
    with pytest.raises(dp.NotPrivateError, match=f"No example may change .* `{method}`"):
        dp.poisson_batches(single, sampling)


def test_examples_may_be_counted_and_cut_off_by_public_facts():
    single = tf.data.Dataset.from_tensor_slices(catalogue.data())
    public = tf.Variable(1.0)
    counted = single.scan(0, lambda k, e: (k + 1, (e[0] + tf.cast(k, tf.float32), e[1])))
    cut_off = single.take_while(lambda *_: public > 0.0)
    several = {"counted": counted.batch(4), "cut off": cut_off.batch(4)}
    assert_trains_on_each(several, expected_batch_size=4)


def of_many_lengths():
    """Examples of one to four rows."""
    random = np.random.default_rng(0)

    def examples():
        for i in range(24):
            yield random.normal(size=[1 + i % 4, 6]).astype("float32"), i % 3

    signature = tf.TensorSpec([None, 6]), tf.TensorSpec([], tf.int32)
    return tf.data.Dataset.from_generator(examples, output_signature=signature)


BY_LENGTH = {
    "group_by_window": lambda examples: examples.bucket_by_sequence_length(
        lambda x, y: tf.shape(x)[0], [3], [4, 4]
    ),
    "padded_batch": lambda examples: examples.padded_batch(4),
}


@pytest.mark.parametrize("way", BY_LENGTH)
def test_the_length_of_an_example_may_change_nothing_for_others(way):
    data = BY_LENGTH[way](of_many_lengths()).map(lambda x, y: (x[:, 0], y))
    model = catalogue.compiled("DPSGD", expected_batch_size=4)
    with pytest.raises(dp.NotPrivateError, match=f"No example may change .* `{way}`, wh"):
        model.fit(data, verbose=0)
    assert not model.optimizer.ledger.num_releases


def test_examples_may_be_padded_to_a_public_length():
    data = of_many_lengths().padded_batch(4, padded_shapes=([4, 6], []))
    model = catalogue.compiled("DPSGD", expected_batch_size=4)
    model.fit(data.map(lambda x, y: (x[:, 0], y)), verbose=0)
    assert model.optimizer.ledger.num_releases == 6


def of_class(single, k):
    return single.filter(lambda x, y: tf.cast(y, tf.int32) == k)


def changed(*example):
    x, y = example
    return 2.0 * x, y


def blended(one, other):
    return 0.5 * (one[0] + other[0]), one[1]


Dataset = tf.data.Dataset
COPYING = {
    "repeat": lambda single: single.shuffle(9).repeat().batch(5),
    "repeat, then shuffle": lambda single: single.repeat(2).shuffle(9).batch(4),
    "repeat of classes": lambda single: Dataset.sample_from_datasets(
        [of_class(single, k).repeat() for k in range(2)]
    ).batch(4),
    "sample_from_datasets": lambda single: Dataset.sample_from_datasets(
        [single, single.map(changed)]
    ).batch(4),
    "concatenate": lambda single: single.concatenate(single.map(changed)).shuffle(9).batch(4),
    "zip": lambda single: Dataset.zip((single, single.shuffle(9))).map(blended).batch(4),
    "zip of batches of equal arrays": lambda single: Dataset.zip(
        (
            Dataset.from_tensor_slices(catalogue.data()).shuffle(9).batch(4),
            Dataset.from_tensor_slices(catalogue.data()).shuffle(9).batch(4),
        )
    ).map(blended),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("way", COPYING)
def test_no_batch_may_hold_an_example_several_times(way):
    """Each copy is clipped on its own, so that the example moves the sum by several times C."""
    single = Dataset.from_tensor_slices(catalogue.data())
    model = catalogue.compiled("DPSGD", expected_batch_size=4)
    method = re.split("[ ,]", way)[0]
    with pytest.raises(dp.NotPrivateError, match=f"several times.* `{method}`"):
        model.fit(COPYING[way](single).take(3), verbose=0)
    assert not model.optimizer.ledger.num_releases


@pytest.mark.slow_on(2)
def test_batches_may_be_made_of_parts_of_the_data_in_many_ways():
    x, y = catalogue.data()
    single, of_x, of_y = map(Dataset.from_tensor_slices, ((x, y), x, y))
    in_turn = Dataset.range(2).repeat()
    several = {
        "passes of whole batches": single.shuffle(9).repeat().batch(4),
        "batches that repeat": single.batch(4).repeat(),
        "classes": Dataset.sample_from_datasets([of_class(single, k) for k in range(2)]).batch(4),
        "halves": Dataset.choose_from_datasets(
            [single.shard(2, k) for k in range(2)], in_turn
        ).batch(4),
        "parts": single.take(5).concatenate(single.skip(5)).batch(4),
        "x beside y": Dataset.zip((of_x, of_y)).shuffle(9).batch(4),
        "x beside y of one data set": Dataset.zip(
            (single.map(lambda *e: e[0]), single.map(lambda *e: e[1]))
        ).batch(4),
        "beside other data": Dataset.zip((single, Dataset.from_tensor_slices(x[:3]).repeat()))
        .map(lambda e, public: (e[0] + public, e[1]))
        .batch(4),
        "windows": tf.keras.utils.timeseries_dataset_from_array(x[:, 0], y, 6, batch_size=4),
    }
    assert_trains_on_each(several, expected_batch_size=4)


MAPS_THAT_MIX = {
    "Mean": lambda x, *more: (x - tf.reduce_mean(x, axis=0), *more),
    "picks examples by index": lambda x, *more: (
        x + tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))),
        *more,
    ),
    "moves": lambda x, *more: (tf.roll(x, 1, axis=0), *more),
    "puts examples into the rows of others": lambda x, *more: (tf.random.shuffle(x), *more),
    "other rows": lambda *batch: tuple(tf.repeat(part, 2, axis=0) for part in batch),
    "rows of others by a known seed": lambda *batch: (
        *batch[:-1],
        tf.random.experimental.stateless_shuffle(batch[-1], [1, 2]),
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("way", MAPS_THAT_MIX)
def test_a_map_of_batches_may_not_mix_their_rows(way):
    """Clipping bounds what is in one row; one example may be in several of these."""
    x, y = catalogue.data()
    of_fit = Dataset.from_tensor_slices((x, y)).batch(4)
    drawn = dp.poisson_batches((x, y), dp.PoissonSampling(0.1, 20, steps=4))
    known = {"moves": "Roll", "other rows": "returns other rows"}
    why = known.get(way, way.removesuffix(" by a known seed"))
    for batches in (of_fit, drawn):
        model = catalogue.compiled("DPSGD", expected_batch_size=len(x) * 0.1)
        with pytest.raises(dp.NotPrivateError, match=f"`map` of batches .*{why}"):
            model.fit(batches.map(MAPS_THAT_MIX[way]).prefetch(1), verbose=0)
        assert not model.optimizer.ledger.num_releases


def test_examples_may_not_be_mixed_in_batches_that_are_taken_apart_again():
    batches = Dataset.from_tensor_slices(catalogue.data()).batch(8)
    sampling = dp.PoissonSampling.for_batch_size(4, 32, steps=3)
    mixed = batches.map(MAPS_THAT_MIX["Mean"]).unbatch()
    with pytest.raises(dp.NotPrivateError, match="`map` of batches .*Mean"):
        dp.poisson_batches(mixed, sampling)
    model = catalogue.compiled("DPSGD", expected_batch_size=4)
    with pytest.raises(dp.NotPrivateError, match="`map` of batches .*Mean"):
        model.fit(mixed.shuffle(9).batch(4), verbose=0)
    alone = batches.map(changed).unbatch().map(lambda x, y: (x - tf.reduce_mean(x), y))
    assert dp.poisson_batches(alone, sampling).element_spec
    model.fit(alone.batch(4).take(1), verbose=0)
    assert model.optimizer.ledger.num_releases == 1


def test_a_map_of_batches_may_not_pad_to_the_longest_example():
    batches = of_many_lengths().ragged_batch(4).map(lambda x, y: (x.to_tensor()[:, 0], y))
    model = catalogue.compiled("DPSGD", expected_batch_size=4)
    with pytest.raises(dp.NotPrivateError, match="pads all examples to the longest of the batch"):
        model.fit(batches, verbose=0)


@pytest.mark.slow_on(2)
def test_a_map_of_batches_may_change_each_row_alone():
    def in_python(x):
        return x * np.float32(2)

    maps = {
        "numbers": lambda x, y: (2.0 * x / tf.norm(x, axis=1, keepdims=True), y),
        "noise": lambda x, y: (x + tf.random.normal(tf.shape(x)), y),
        "weights": lambda x, y: (x, y, tf.gather(tf.constant([1.0, 0.5, 0.2]), y)),
        "a loop over rows": lambda x, y: (tf.map_fn(lambda e: e + tf.random.uniform([]), x), y),
        "a block": lambda x, y: (
            tf.ensure_shape(tf.image.random_crop(x, [tf.shape(x)[0], 6]), x.shape),
            y,
        ),
        "a choice": lambda x, y: (tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: -x), y),
        "another shape": lambda x, y: (tf.reshape(tf.reshape(x, [-1, 2, 3]), [-1, 6]), y),
        "unknown shapes": lambda x, y: (
            tf.ensure_shape(
                tf.reshape(tf.numpy_function(in_python, [x], x.dtype), [-1, 6]), x.shape
            ),
            y,
        ),
        "Python": lambda x, y: (
            tf.ensure_shape(tf.numpy_function(in_python, [x], x.dtype), x.shape),
            y,
        ),
    }
    batches = Dataset.from_tensor_slices(catalogue.data()).batch(4)
    changed = {name: batches.map(change) for name, change in maps.items()}
    assert_trains_on_each(changed, expected_batch_size=4)


@pytest.mark.slow_on(3)
def test_padding_changes_no_gradient():
    x, y = catalogue.data()
    results = []
    for rows in (16, 40):
        tf.keras.utils.set_random_seed(1)
        sampling = dp.PoissonSampling(0.5, rows, 1, seed=3)
        batch = next(iter(dp.poisson_batches((x[:16], y[:16]), sampling)))
        model = catalogue.mlp()
        optimizer = dp.DPSGD(1.0, 0.0, learning_rate=1.0, expected_batch_size=8.0)
        model.compile(optimizer, loss=catalogue.loss())
        model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
        results.append(model.get_weights())
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_fixed_and_shuffled_batches_are_accounted_for_as_such():
    fixed, shuffled = dp.sampling.FixedSizeSampling(20, 10), dp.sampling.ShuffledEpochs(20, 10)
    for expected in (None, 0):  # as it is, and taken from the first batch
        _, _, history = fit(
            fixed, lambda d: dp.sampling.fixed_size_batches(d, fixed), expected=expected
        )
        ledger = fake_ledger((1.0, 20.0, 10))
        assert history["epsilon"][-1] == fixed.epsilon_spent(ledger, N, DELTA)
        _, monitor, history = fit(
            shuffled, lambda d: dp.sampling.shuffled_batches(d, shuffled), expected=expected
        )
        assert history["epsilon"][-1] == pytest.approx(epsilon(1.0, 20 / N, 10, DELTA))
        assert "customary approximation" in " ".join(monitor.statement().split())


GOOD = dp.PoissonSampling(0.02, 60, 10)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"expected": 30.0}, "must have `expected_batch_size=20.0`.*expected_batch_size=30.0"),
        ({"expected": 0}, "must have `expected_batch_size=20.0`.*expected_batch_size=None"),
        (
            {"sampling": dp.PoissonSampling(0.02, 20, 10)},
            "overflow so often that ε is infinite.*`PoissonSampling.for_batch_size`",
        ),
        (
            {"dataset": lambda d: tf.data.Dataset.from_tensor_slices(d).shuffle(N).batch(20)},
            "batches of 20 rows, but those of the sampling have 60",
        ),
        ({"steps": 6}, "released 12 noisy gradients, .*draws only 10 batches.*`steps_per_epoch`"),
    ],
)
def test_the_monitor_refuses_a_sampling_that_was_not_used(kwargs, message):
    kwargs = {"sampling": GOOD, **kwargs}
    if kwargs.get("steps") == 6:
        more = dp.PoissonSampling(0.02, 60, 12)
        kwargs["dataset"] = lambda d: dp.poisson_batches(d, more)
    with pytest.raises(ValueError, match=message):
        fit(**kwargs)


def test_microbatches_are_refused_before_the_first_step():
    with pytest.raises(ValueError, match="without `num_microbatches`"):
        fit(GOOD, num_microbatches=10)


def test_the_budget_counts_what_the_monitor_counts():
    sampling = dp.PoissonSampling(0.02, 34, steps=50)
    limit = sampling.epsilon_spent(fake_ledger((1.0, 20.0, 7)), N, DELTA) * (1 + 1e-9)
    assert epsilon(1.0, 0.02, 8, DELTA) < limit < math.inf  # more would fit without truncation
    model = catalogue.mlp()
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1, expected_batch_size=20.0)
    model.compile(optimizer, loss=catalogue.loss())
    x, y = (np.repeat(part, 32, axis=0)[:N] for part in catalogue.data())
    budget = dp.PrivacyBudget(limit, DELTA, N, sampling=sampling)
    model.fit(dp.poisson_batches((x, y), sampling), epochs=1, verbose=0, callbacks=[budget])
    assert model.optimizer.ledger.num_releases == 7


REPEATS = {
    "broadcast_to": lambda token, count: tf.broadcast_to(token, [count, *token.shape[1:]]),
    "tile": lambda token, count: tf.tile(token, [count, 1, 1]),
    "repeat": lambda token, count: tf.repeat(token, count, axis=0),
    "ones times": lambda token, count: tf.ones([count, 1, 1]) * token,
}


class Tokens(tf.keras.layers.Layer):
    """Puts a class token first, and adds position embeddings as a table and as weights."""

    def __init__(self, repeat):
        super().__init__()
        self.repeat = repeat
        self.table = tf.keras.layers.Embedding(4, 4)

    def build(self, shape):
        self.token = self.add_weight(name="token", shape=[1, 1, 4], initializer="normal")
        self.places = self.add_weight(name="places", shape=[1, 4, 4], initializer="normal")
        super().build(shape)

    def call(self, x):
        token = self.repeat(tf.convert_to_tensor(self.token), tf.shape(x)[0])
        return tf.concat([token, x], 1) + self.places + self.table(tf.range(4))


def with_tokens(name):
    """A small transformer whose class token alone is classified."""
    tf.keras.utils.set_random_seed(1)
    layers, inputs = tf.keras.layers, tf.keras.Input([3, 4])
    x = Tokens(REPEATS[name])(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return tf.keras.Model(inputs, layers.Dense(3)(x[:, 0]))


def gradients_alone(model, weights, x, y):
    """The gradients that Keras's own SGD steps along in batches of one, from these weights."""
    for i in range(len(x)):
        model.set_weights(weights)
        model.train_on_batch(x[i : i + 1], y[i : i + 1])
        yield [np.float64(a) - b for a, b in zip(weights, model.get_weights())]


def norm(gradient):
    return np.sqrt(sum(np.sum(g**2) for g in gradient))


def clipped_sum(gradients, clip):
    """The sum of gradients that are clipped to a norm, one array per variable."""
    shares = [min(1.0, clip / norm(gradient)) for gradient in gradients]
    return [sum(s * g for s, g in zip(shares, column)) for column in zip(*gradients)]


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["traced", "materialized"])
@pytest.mark.parametrize("name", REPEATS)
def test_padding_meets_no_parameter_that_is_repeated_over_the_batch(name, gradients):
    clip, rate, expected_size, steps = 4.0, 0.1, 4.0, 3
    random = np.random.default_rng(0)
    data = random.normal(size=[8, 3, 4]).astype("float32"), random.integers(3, size=8)
    sampling = dp.PoissonSampling(0.5, 12, steps, seed=3)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = with_tokens(name)
    model.compile(tf.keras.optimizers.SGD(1.0), loss)
    start = weights = model.get_weights()
    # Padding is zeros, and would pull at each of these parameters, which come first.
    zeros = np.zeros([1, 3, 4], "float32"), np.zeros([1], "int64")
    (padding,) = gradients_alone(model, start, *zeros)
    assert all(norm([part]) > 0.01 for part in padding[:3])
    norms = []
    for x, y, sample_weight in dp.poisson_batches(data, sampling).as_numpy_iterator():
        present = sample_weight != 0
        assert 0 < present.sum() < len(x)
        found = list(gradients_alone(model, weights, x[present], y[present]))
        norms += map(norm, found)
        step = [rate * part / expected_size for part in clipped_sum(found, clip)]
        weights = [np.float32(a - b) for a, b in zip(weights, step)]
    assert min(norms) < clip < max(norms)
    model.set_weights(start)
    private = {"expected_batch_size": expected_size, "gradients": gradients}
    optimizer = dp.DPSGD(clip, 0.0, learning_rate=rate, **private)
    model.compile(optimizer, loss)
    model.fit(dp.poisson_batches(data, sampling), verbose=0)
    assert optimizer.ledger.segments == [(0.0, expected_size, steps)]
    for actual, expected in zip(model.get_weights(), weights):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_padding_is_a_valid_input_of_layers_with_masks():
    """Rows of zeros would be masked as a whole: their mean is 0/0, and Keras would show NaN."""
    ids = np.tile(np.arange(1, 5), [40, 1])
    model = tf.keras.Sequential(
        [
            tf.keras.Input([4], dtype="int32"),
            tf.keras.layers.Embedding(6, 3, mask_zero=True),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(2),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=10.0), loss=loss)
    batches = dp.poisson_batches((ids, ids[:, 0] % 2), dp.PoissonSampling(0.25, 30, 3))
    assert np.isfinite(model.fit(batches, verbose=0).history["loss"]).all()
