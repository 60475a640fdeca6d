"""`PrivacyPlan.fit` pads batches by a few rows only, if nothing can tell how many they have."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp import planned_training
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.padding import is_ours
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.datasets import as_dataset
from tf_adaptive_dp.sampling.sources import open_source
from tf_adaptive_dp.sampling.users import UserRecords

N, L, KEY = 400, 40, draws.new_key(5)
X, Y = catalogue.data(N)
NUMBERS = {"delta": 1e-4, "num_examples": N, "batch_size": L, "epochs": 1, "accountant": "rdp"}
IDS = np.arange(N) // 4


def planned(**kwargs):
    return PrivacyPlan(noise_multiplier=1.0, **{**NUMBERS, **kwargs})


def model_of(plan, make=catalogue.mlp, loss=None, **kwargs):
    model = make()
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.1)
    model.compile(optimizer, loss or catalogue.loss(), **kwargs)
    return model


def batches_of(sampling, equal_rows, data=(X, Y), users=None):
    source = open_source(data, None)
    return as_dataset(source, sampling, 0, KEY, 1, masked=True, users=users, equal_rows=equal_rows)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("size", [8, 12, 60])
def test_a_batch_has_a_few_rows_more_than_were_drawn(size):
    sampling = dp.PoissonSampling.for_batch_size(size, N, steps=60)
    kinds = [batches_of(sampling, equal_rows) for equal_rows in (True, False)]
    seen = set()
    for equal, few in zip(*(kind.as_numpy_iterator() for kind in kinds), strict=True):
        drawn = [sorted(map(tuple, x[w > 0].tolist())) for x, _, w in (equal, few)]
        assert drawn[0] == drawn[1]
        rows = len(few[2])
        assert rows == min(sampling.rows, max(40, -(-(len(drawn[1]) + 12) // 8) * 8))
        assert len(few[0]) == len(few[1]) == rows <= len(equal[2]) == sampling.rows
        assert not few[2][few[2] <= 0].any() and is_ours(tf.constant(few[2]))
        seen.add(rows)
    assert len(seen) > 2 or size < 60


def test_some_padding_is_marked_even_if_chance_marks_none(monkeypatch):
    """Otherwise a batch with 12 rows of padding would not look like one of ours once in 4,096."""
    monkeypatch.setattr(np, "unpackbits", lambda words: np.zeros(8 * words.size, np.uint8))
    sampling = dp.PoissonSampling.for_batch_size(L, N, steps=5)
    for equal_rows in True, False:
        for *_, weights in batches_of(sampling, equal_rows).as_numpy_iterator():
            assert np.signbit(weights).sum() == (not equal_rows)


@pytest.mark.in_turns
@pytest.mark.parametrize("users", [None, UserRecords(IDS)], ids=["examples", "users"])
def test_the_sums_are_those_of_batches_with_equal_rows(users):
    """The clipped sum of a step does not depend on how much padding there is."""
    per_user = {} if users is None else {"examples_per_user": 4}
    n = N if users is None else users.num_users
    sampling = dp.PoissonSampling.for_batch_size(L, n, steps=6, **per_user)
    weights = []
    for equal_rows in True, False:
        model = catalogue.mlp()
        optimizer = dp.DPSGD(2.0, 0.0, learning_rate=0.3, expected_batch_size=float(L), **per_user)
        model.compile(optimizer, catalogue.loss())
        optimizer.expect_rows(None if equal_rows else sampling.rows)
        begun = model.get_weights()
        batches = batches_of(sampling, equal_rows, users=users)
        model.fit(batches, steps_per_epoch=6, shuffle=False, verbose=0)
        assert optimizer.rows_per_batch == sampling.rows
        assert optimizer.ledger.checks[0].checked == 6
        weights.append(model.get_weights())
    moved = max(np.abs(a - b).max() for a, b in zip(weights[0], begun))
    for equal, few in zip(*weights):
        np.testing.assert_allclose(few, equal, rtol=0, atol=2e-6)
    assert moved > 0.05


def test_the_number_of_rows_is_not_kept():
    """What an optimizer saves is the room of the batches, which is public."""
    plan = planned()
    model = model_of(plan)
    plan.fit(model, X, Y, verbose=0)
    optimizer = model.optimizer
    (kept,) = [v for v in optimizer.variables if "fixed_batch_size" in getattr(v, "path", v.name)]
    room = plan.sampling.max_batch_size
    assert int(tf.convert_to_tensor(kept)) == room > plan.sampling.places_for(L)
    assert optimizer.rows_per_batch == plan.sampling.rows
    assert plan.sampling.as_drawn(optimizer) is plan.sampling
    assert "batches were drawn by Poisson sampling" in " ".join(plan.statement().split())


class Reshaped(keras.Model):
    """Needs to know the number of rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return tf.reshape(self.dense(x), [x.shape[0], 3])


class OfLatents(keras.Model):
    """Its `call` takes something else than the data of its `train_step`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6)

    def call(self, latents):
        return self.dense(latents)

    def train_step(self, data):
        raise NotImplementedError


def without_input():
    return keras.Sequential([keras.layers.Dense(3)])


def of_32_rows():
    return keras.Sequential([keras.Input(batch_shape=[32, 6]), keras.layers.Dense(3)])


# The model, what it is compiled with, what else the plan and its optimizer get, and the answer.
ASKED = {
    "by default": (catalogue.mlp, {}, {}, {}, False),
    "eagerly": (catalogue.mlp, {"run_eagerly": True}, {}, {}, True),
    "under XLA": (catalogue.mlp, {"jit_compile": True}, {}, {}, True),
    "with a known size": (of_32_rows, {}, {}, {}, True),
    "that reshapes": (Reshaped, {}, {}, {}, True),
    "without an input": (without_input, {}, {}, {}, False),
    "with a step of its own": (OfLatents, {}, {}, {}, True),
    "in parts": (catalogue.mlp, {}, {}, {"gradient_accumulation_steps": 2}, True),
    "correlated noise": (catalogue.mlp, {}, {"noise": BandedNoise(3)}, {}, True),
}


class Asked(Exception):
    """Carries what was asked for."""


def asked_by(plan, model, monkeypatch, **kwargs):
    """Whether `fit` asks for equal rows."""

    def note(*args, equal_rows, **kwargs):
        raise Asked(equal_rows)

    with monkeypatch.context() as patched, pytest.raises(Asked) as asked:
        patched.setattr(planned_training, "as_dataset", note)
        plan.fit(model, X, Y, verbose=0, **kwargs)
    return asked.value.args[0]


@pytest.mark.parametrize("case", ASKED)
def test_rows_differ_only_where_nothing_can_depend_on_them(case, monkeypatch):
    make, compiled, of_plan, of_optimizer, expected = ASKED[case]
    plan, model = planned(**of_plan), make()
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.1, **of_optimizer)
    model.compile(optimizer, catalogue.loss(), **compiled)
    assert asked_by(plan, model, monkeypatch) == expected
    assert not (isinstance(model, OfLatents) and model.dense.built)  # by inputs it is not made for
    assert asked_by(plan, model, monkeypatch, equal_rows=True)


def test_rows_are_equal_on_replicas_and_where_all_functions_run_eagerly(monkeypatch):
    plan = planned()
    model = model_of(plan)
    tf.config.run_functions_eagerly(True)
    try:
        assert asked_by(plan, model, monkeypatch)
    finally:
        tf.config.run_functions_eagerly(False)
    with catalogue.mirrored().scope():
        model = model_of(plan)
    assert asked_by(plan, model, monkeypatch)


def test_a_model_that_needs_to_know_its_rows_trains():
    plan = planned()
    model = model_of(plan, Reshaped)
    plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == plan.steps


@pytest.mark.slow_on(3)
def test_a_strategy_with_one_device_trains_in_few_rows():
    """Its variables are mirrored ones, which metrics cannot change within a branch."""
    plan = planned()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = model_of(plan, metrics=["accuracy"])
    history = plan.fit(model, X, Y, verbose=0).history
    assert 0 < history["accuracy"][0] <= 1
    assert model.optimizer.ledger.checks[0].checked == plan.steps


class Sized(keras.layers.Layer):
    """Multiplies by what depends on the number of rows, or on the row."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), name="kept", initializer="ones", trainable=False, dtype="float32"
        )

    def call(self, x):
        rows = tf.shape(x)[0]
        if self.how == "the row":
            return x * tf.cast(tf.range(rows), tf.float32)[:, tf.newaxis]
        if self.how == "the size":
            return x * tf.cast(rows, tf.float32) / 40
        before = tf.identity(tf.convert_to_tensor(self.kept))
        self.kept.assign(tf.cast(rows, tf.float32) / 40)
        return x * before


MESSAGES = {
    "the row": "depends on which row of the batch",
    "the size": r"depends on the number of examples.*plan.fit\(..., equal_rows=True\)",
    "the size before": "or the size of the batch, which is random",
}


@pytest.mark.in_turns
@pytest.mark.parametrize("how", MESSAGES)
def test_nothing_may_depend_on_the_number_of_rows(how):
    def make():
        return keras.Sequential([keras.Input([6]), Sized(how), keras.layers.Dense(3)])

    plan = planned()
    model = model_of(plan, make)
    with pytest.raises(NotPrivateError, match=MESSAGES[how]):
        plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == 0
    if how != "the row":  # all batches have one number of rows, which is public
        plan.fit(model, X, Y, verbose=0, equal_rows=True)
        assert model.optimizer.ledger.num_releases == plan.steps


class Noisy(keras.layers.Layer):
    """Draws for each row; its generator goes on by as many numbers as the rows take."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def test_a_generator_may_not_tell_later_batches_how_many_rows_there_were(monkeypatch):
    def make():
        return keras.Sequential([keras.Input([6]), Noisy(), keras.layers.Dense(3)])

    plan = planned()
    model = model_of(plan, make)
    assert asked_by(plan, model, monkeypatch)
    plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == plan.steps


def step_of(model, how):
    """A step of one's own on batches of equal rows, eager or traced for their number."""

    def step(x, y, weights):
        with tf.GradientTape() as tape:
            losses = catalogue.loss()(y, model(x, training=True), sample_weight=weights)
        return model.optimizer.minimize(losses, model.trainable_variables, tape=tape)

    return tf.function(step) if how == "traced" else step


@pytest.mark.in_turns
@pytest.mark.parametrize("how", ["traced", "eager"])
def test_a_step_that_knows_its_rows_is_refused_while_they_differ(how):
    plan, model = planned(), catalogue.mlp()
    model.optimizer = optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.1)
    batch = next(iter(plan.batches(X, Y)))
    optimizer.expect_rows(plan.sampling.rows)
    with pytest.raises(NotPrivateError, match="different numbers of rows, which are private"):
        step_of(model, how)(*batch)
    assert optimizer.ledger.num_releases == 0
    optimizer.expect_rows(None)
    step_of(model, how)(*batch)
    assert optimizer.ledger.num_releases == 1


@pytest.mark.parametrize(
    "kwargs", [{}, {"expected_batch_size": 8.0, "gradient_accumulation_steps": 2}]
)
def test_rows_may_not_differ_where_their_number_divides(kwargs):
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1, **kwargs)
    with pytest.raises(ValueError, match="differ in their number of rows need"):
        optimizer.expect_rows(40)


def test_only_undivided_poisson_batches_may_differ():
    sampling = dp.PoissonSampling(0.1, 64, 4)
    with pytest.raises(ValueError, match="Only undivided Poisson batches"):
        as_dataset(open_source((X, Y), None), sampling, 0, KEY, 2, masked=True, equal_rows=False)
