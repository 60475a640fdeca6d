"""A `PrivacyPlan` with `user_ids`: the unit is a person, from the noise to the report."""

import json
import re

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.accounting import BandedNoise, epsilon
from tf_adaptive_dp.auditing import Canaries
from tf_adaptive_dp.callbacks import run_directory
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.validation import check_per_example, validate

NUM_USERS, K, DELTA = 40, 3, 1e-3
# User u has 1 to 5 records.
IDS = np.repeat(np.arange(NUM_USERS), np.arange(NUM_USERS) % 5 + 1)
N = len(IDS)
X, Y = catalogue.data(N)
NUMBERS = {"delta": DELTA, "batch_size": 8, "epochs": 2, "accountant": "rdp"}
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def planned(**kwargs):
    users = {"user_ids": IDS, "examples_per_user": K}
    return PrivacyPlan(**{**NUMBERS, **users, "noise_multiplier": 1.0, **kwargs})


def model_of(plan, optimizer=dp.DPSGD, **kwargs):
    model = catalogue.mlp()
    model.compile(plan.optimizer(optimizer, **kwargs), LOSS, metrics=["accuracy"])
    return model


@pytest.mark.slow_on(2)
def test_the_population_is_the_users():
    plan = planned()
    assert (plan.num_users, plan.num_examples, plan.steps_per_epoch) == (NUM_USERS, N, 5)
    assert plan.epsilon == pytest.approx(epsilon(1.0, 8 / NUM_USERS, 10, DELTA), rel=1e-6)
    # Example-level accounting of the same batches would say far less.
    assert plan.epsilon > 1.5 * epsilon(1.0, 8 / N, 10, DELTA)
    least = planned(noise_multiplier=None, epsilon=2.0).noise_multiplier
    assert epsilon(least, 8 / NUM_USERS, 10, DELTA) <= 2.0
    assert epsilon(0.998 * least, 8 / NUM_USERS, 10, DELTA) > 2.0
    assert "num_users=40" in repr(plan) and "num_examples" not in repr(plan)
    described = plan.describe()
    users, rows = plan.sampling.max_batch_size, plan.sampling.rows
    assert "for each of 40 users" in described and "Batches average 8 users, with" in described
    assert f"room for {users} users with 3 rows each ({rows} rows)" in described
    offers = plan.recommend(batch_sizes=[4, 8], epochs=[2])
    assert {offer.steps for offer in offers} == {10, 20}


def test_a_directory_keeps_what_must_not_change():
    def kept(**kwargs):
        plan = planned(**kwargs)
        return plan._settings(), plan._training._fingerprint(None).of(b"salt")

    (settings, digest), moved = kept(), IDS.copy()
    moved[1] = 0
    assert kept() == (settings, digest) and kept(user_ids=moved)[1] != digest
    for name, value in {"examples_per_user": 2, "user_reduction": "sum", "delta": 2e-3}.items():
        changed = kept(**{name: value})[0]
        assert changed[name] == value and settings[name] != value
    event = kept(other_events=[dp_accounting.GaussianDpEvent(9.0)])[0]["other_events"]
    assert event != settings["other_events"]


@pytest.mark.parametrize("noise", [BandedNoise(2), "best"])
def test_correlated_noise_is_refused(noise):
    with pytest.raises(ValueError, match="proven for examples as the unit, not for users"):
        planned(noise=noise, noise_multiplier=None, epsilon=2.0)
    if noise != "best":
        with pytest.raises(ValueError, match="`examples_per_user` out, or the noise independent"):
            dp.DPSGD(1.0, 1.0, expected_batch_size=8, noise=noise, examples_per_user=K)


@pytest.mark.slow_on(2)
def test_what_is_said_of_a_run_is_said_of_users(tmp_path):
    plan = planned()
    model = model_of(plan, learning_rate=0.1)
    optimizer = model.optimizer
    assert (optimizer.examples_per_user, optimizer.expected_batch_size) == (K, 8.0)
    history = plan.fit(model, X, Y, directory=tmp_path / "run", verbose=0)
    assert optimizer.ledger.segments == [(1.0, 8.0, 10)]
    (known,) = optimizer.ledger.checks
    assert (known.checked, known.repeated) == (10, 0)
    assert history.history["epsilon"][-1] == pytest.approx(plan.epsilon)
    text = " ".join(plan.statement().split())
    for said in (
        "Unit: one user. Adjacency: data sets that differ by adding or removing one user.",
        "Each user joined each batch independently with probability 0.2",
        "a proven upper bound",
        "expected batch size 8 of 40 users",
        "the number of users, which is treated as public",
        "it covers all examples of one person together",
        "At most 3 examples of a user were in a batch",
    ):
        assert said in text
    assert "one example" not in text and str(N) not in text
    with pytest.raises(ValueError, match="`max_examples_per_user` belongs to a statement about ex"):
        plan.statement(max_examples_per_user=3)
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["privacy"]["unit"] == "user" and report["privacy"]["num_examples"] == NUM_USERS
    assert "| training users | 40 |" in (tmp_path / "run/report.md").read_text()
    assert "for each of 40 users" in (tmp_path / "run/report.html").read_text()
    # Neither the plan's settings nor the report say how many examples there are. Digits of a loss
    # or of a coordinate may be the same by chance, so a number of its own counts.
    says_so = re.compile(rf"(?<![\w.]){N}(?!\w|\.\d)")
    assert says_so.search(f'"num_examples": {N},') and says_so.search(f"of {N} examples.")
    for name in ("plan.json", "report.json", "report.md", "report.html"):
        assert not says_so.search((tmp_path / "run" / name).read_text()), name


@pytest.mark.slow
def test_a_matching_report_without_users_says_examples():
    plan = PrivacyPlan(**NUMBERS, num_examples=N, noise_multiplier=1.0)
    plan.fit(model_of(plan, learning_rate=0.1), X, Y, verbose=0)
    assert "one example" in plan.statement() and "one user" not in plan.statement()


class Interrupt(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.slow_on(2)
def test_a_run_resumes_with_the_same_users_only(tmp_path):
    def run(*callbacks, **kwargs):
        plan = planned(**kwargs)
        model = model_of(plan, dp.ADADP)
        plan.fit(model, X, Y, directory=tmp_path, callbacks=callbacks, verbose=0)
        return model

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt())
    moved = IDS.copy()
    moved[1] = 0
    with pytest.raises(ValueError, match="must assign the examples as they did when the run began"):
        run(user_ids=moved)
    with pytest.raises(ValueError, match="another plan.*examples_per_user=2 instead of 3"):
        run(examples_per_user=2)
    with pytest.raises(ValueError, match="another plan.*user_reduction='sum' instead of 'mean'"):
        run(user_reduction="sum")
    kept = tmp_path / "user_ids_NOT_PRIVATE.json"
    text = kept.read_text()
    kept.unlink()
    with pytest.raises(ValueError, match="cannot continue without `user_ids_NOT_PRIVATE.json`"):
        run()
    kept.write_text(text)
    # Other names for the same users are the same users.
    assert run(user_ids=IDS + 100).optimizer.ledger.segments == [(1.0, 8.0, 10)]


@pytest.mark.slow
def test_a_plan_of_examples_cannot_go_on_with_users_nor_the_reverse(tmp_path):
    run_directory.RunDirectory(tmp_path, planned()._settings(), 10).close()
    plan = PrivacyPlan(**{**NUMBERS, "num_examples": N, "noise_multiplier": 1.0})
    with pytest.raises(ValueError, match="another plan"):
        plan.fit(model_of(plan), X, Y, directory=tmp_path, verbose=0)


BAD = {
    "no k": ({"examples_per_user": None}, ValueError, "`user_ids` and `examples_per_user` belong"),
    "no ids": ({"user_ids": None, "num_examples": N}, ValueError, "Received: no `user_ids`"),
    "neither, and no number": (
        {"user_ids": None, "examples_per_user": None},
        TypeError,
        "`num_examples` must be a whole number",
    ),
    "k of 0": ({"examples_per_user": 0}, ValueError, "`examples_per_user` must be at least 1"),
    "other length": ({"num_examples": N + 1}, ValueError, f"{N} ids, num_examples={N + 1}"),
    "floats": ({"user_ids": IDS + 0.5}, TypeError, "whole numbers or strings"),
    "several": ({"user_ids": np.stack([IDS, IDS], 1)}, ValueError, "Drop such records"),
    "reduction": ({"user_reduction": "median"}, ValueError, "`user_reduction`"),
    "more than all users": ({"batch_size": 41}, ValueError, "`batch_size` must be at most"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        planned(**arguments)


def test_optimizers_and_data_of_another_unit_are_refused():
    plan, model = planned(), catalogue.mlp()
    with pytest.raises(TypeError, match="`examples_per_user` is set by .*examples_per_user=2"):
        plan.optimizer(dp.DPSGD, examples_per_user=2)
    for of_users in ({}, {"examples_per_user": 2}):
        model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8.0, **of_users), LOSS)
        with pytest.raises(ValueError, match="must have the same unit"):
            plan.fit(model, X, Y)
    examples = PrivacyPlan(**NUMBERS, num_examples=N, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="must have the same unit"):
        examples.fit(model_of(plan), X, Y)
    with pytest.raises(ValueError, match=r"`len\(user_ids\)` must be .*7 examples"):
        plan.batches(X[:7], Y[:7])


def in_unknown_orders():
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    out_of_order = tf.data.Options()
    out_of_order.deterministic = False
    yield "shuffled", examples.shuffle(N).prefetch(1)
    yield "shuffled before", examples.shuffle(N).map(lambda x, y: (x, y)).cache()
    numbers = tf.data.Dataset.range(N).shuffle(9)
    yield "one part", tf.data.Dataset.zip((numbers, tf.data.Dataset.range(N)))
    yield "not deterministic", examples.with_options(out_of_order)
    parallel = {"num_parallel_calls": 2, "deterministic": False}
    yield "a map that is not", examples.map(lambda x, y: (x, y), **parallel)


@pytest.mark.parametrize("data", [pytest.param(d, id=name) for name, d in in_unknown_orders()])
def test_examples_in_an_unknown_order_are_refused(data):
    plan, model = planned(), model_of(planned(), learning_rate=0.1)
    with pytest.raises(ValueError, match="must come in a known order"):
        plan.fit(model, data)
    with pytest.raises(ValueError, match="must come in a known order"):
        dp.poisson_batches(data, plan.sampling, user_ids=IDS)
    assert model.optimizer.ledger.num_releases == 0


def test_a_dataset_in_its_own_order_has_the_users_of_its_places():
    examples = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x, y)).prefetch(1)
    batches = [planned().batches(*data, key=bytes(32)) for data in ((X, Y), (examples,))]
    for a, b in zip(*(next(iter(of)) for of in batches)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("callback", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_callbacks_refuse_shuffled_batches_of_an_optimizer_of_users(callback):
    arguments = {"num_examples": N, "delta": DELTA, "full_passes": False}
    if callback is dp.PrivacyBudget:
        arguments["epsilon"] = 5.0
    model = model_of(planned(), learning_rate=0.1)
    with pytest.raises(ValueError, match="must have the same unit"):
        model.fit(X, Y, batch_size=9, callbacks=[callback(**arguments)], verbose=0)
    assert model.optimizer.ledger.num_releases == 0


def test_a_monitor_with_the_number_of_examples_is_refused():
    plan = planned()
    model = model_of(plan, learning_rate=0.1)
    batches = plan.batches(X, Y)
    monitor = dp.PrivacyMonitor(N, DELTA, sampling=plan.sampling)
    with pytest.raises(ValueError, match="must be the number of users.*: 40. Received"):
        model.fit(batches, steps_per_epoch=2, callbacks=[monitor], verbose=0)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{"gradient_accumulation_steps": 2}, {"clipping": "adaptive"}])
def test_accumulated_and_adaptive_steps_count_once(kwargs):
    plan = planned()
    model = model_of(plan, learning_rate=0.1, **kwargs)
    plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 10)]


@pytest.mark.slow
def test_untuned_sgd_measures_users():
    plan = planned(noise_multiplier=0.6, batch_size=20, epochs=7)
    model = model_of(plan, dp.UntunedSGD)
    plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.gradient_norms is not None
    assert model.optimizer.ledger.num_releases == 14


def gradients_of_people(model, x, y, ids, user_reduction):
    """The gradient of each person, from a batch that holds nothing but that person's texts."""
    each = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    trained = model.trainable_variables
    variables = [v if isinstance(v, tf.Variable) else v.value for v in trained]
    found = []
    for user in np.unique(ids):
        with tf.GradientTape() as tape:
            of_texts = tf.reduce_mean(each(y[ids == user], model(x[ids == user])), axis=1)
            reduce = tf.reduce_mean if user_reduction == "mean" else tf.reduce_sum
            loss = reduce(of_texts)
        found.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, variables)])
    return found


@pytest.mark.in_turns
@pytest.mark.parametrize("user_reduction", ["mean", "sum"])
def test_the_gradient_of_a_person_with_texts_is_clipped_once(user_reduction):
    # The losses have an entry for each token, [B, T]; a text counts with the mean over its tokens.
    num_users, length, words, sigma = 6, 4, 7, 1e-3
    ids = np.repeat(np.arange(num_users), [1, 2, 2, 1, 2, 1])
    random = np.random.default_rng(0)
    x, y = random.integers(words, size=[2, len(ids), length])
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [tf.keras.Input([length], dtype="int32"), layers.Embedding(words, 3), layers.Dense(words)]
    )
    found = gradients_of_people(model, x, y, ids, user_reduction)
    norms = [np.sqrt(sum((g**2).sum() for g in of_one)) for of_one in found]
    clip = float(np.median([norms[user] for user in (1, 2, 4)]))  # of those with two texts
    factors = np.minimum(1, clip / np.array(norms)) / num_users
    expected = [sum(f * g for f, g in zip(factors, of_all)) for of_all in zip(*found)]
    plan = PrivacyPlan(
        noise_multiplier=sigma,
        **{"delta": DELTA, "user_ids": ids, "examples_per_user": 2, "batch_size": num_users},
        **{"epochs": 1, "accountant": "rdp", "user_reduction": user_reduction},
    )
    model.compile(plan.optimizer(dp.DPSGD, l2_norm_clip=clip, learning_rate=1.0), LOSS)
    before = model.get_weights()
    plan.fit(model, x, y, verbose=0)
    noise = sigma * clip / num_users
    for a, b, wanted in zip(before, model.get_weights(), expected):
        np.testing.assert_allclose(a - b, wanted, rtol=1e-4, atol=7 * noise)
        assert np.abs(wanted).max() > 20 * noise
    assert model.optimizer.ledger.segments == [(sigma, num_users, 1)]


def grouped_batch(plan):
    return next(iter(plan.batches(X, Y)))


@pytest.mark.slow
def test_validation_takes_users():
    plan = planned()
    model = model_of(plan, learning_rate=0.1)
    batch = grouped_batch(plan)
    report = validate(model, batch)
    assert report.ok, report.findings
    assert "users match those of batches of one" in report.probed
    found = check_per_example(model, batch, examples_per_user=K)
    assert found.norm_error < 1e-5 and found.sum_error < 1e-5
    assert found.num_examples == plan.sampling.max_batch_size
    rows = [t[: 2 * K + 1] for t in batch]
    report = validate(model, tuple(rows))
    assert any("examples_per_user=3 does not divide" in f.what for f in report.findings)
    with pytest.raises(ValueError, match="rows for each of two users"):
        check_per_example(model, tuple(rows), examples_per_user=K)


@pytest.mark.slow
def test_validation_finds_padding_of_users_that_contributes():
    plan = planned()
    model = model_of(plan, learning_rate=0.1)

    def ignores_weights(y, outputs):
        return tf.keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    x, y, weights = grouped_batch(plan)
    some = (x, y, tf.where(weights == 0, weights, tf.ones_like(weights)))
    check_per_example(model, some, loss=ignores_weights, examples_per_user=K)

    class Ignores(tf.keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
            return tf.reduce_mean(ignores_weights(y, y_pred))

    bad = Ignores([tf.keras.Input(X.shape[1:]), tf.keras.layers.Dense(3)])
    bad.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), LOSS)
    with pytest.raises(
        dp.NotPrivateError, match="Padding contributes to the loss: rows of weight 0"
    ):
        check_per_example(bad, (x, y, weights), examples_per_user=K)


def test_canaries_are_users_of_their_own():
    canaries = Canaries(np.zeros([20, *X.shape[1:]]), np.zeros(20, Y.dtype), seed=1)
    mixed = canaries.mix((X, Y))
    ids = canaries.mix_user_ids(IDS)
    assert len(ids) == len(mixed[0]) == N + canaries.included.sum()
    plan = planned(user_ids=ids)
    assert plan.num_users == NUM_USERS + canaries.included.sum()
    assert len(set(ids[N:])) == canaries.included.sum() and not set(ids[:N]) & set(ids[N:])
    with pytest.raises(ValueError, match="Drop such records"):
        canaries.mix_user_ids([[1, 2], [3, 4]])
