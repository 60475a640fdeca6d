"""`validate` and `fit` agree on every model of the suite: `ok` says whether one step trains."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, kinds_of_models, mixing, row_ties, zoo
from tests.helpers.linear_problem import linear
from tf_adaptive_dp._keras.generation import GENERATION

layers = tf.keras.layers
B = 4
X, Y = zoo.floats(B, 5), np.array([0.0, 1.0, 1.0, 0.0], "float32")


def trains(model, x, y=None, sample_weight=None):
    """Whether `fit` makes a step, and releases once."""
    try:
        model.fit(x, y, sample_weight=sample_weight, batch_size=B, verbose=0, shuffle=False)
    except Exception:  # noqa: BLE001, whatever stops it
        assert model.optimizer.ledger.num_releases == 0
        return False
    assert model.optimizer.ledger.num_releases == 1
    return True


def agree(model, x, y=None, sample_weight=None):
    """Validates, checks that nothing has changed, fits, and compares; returns the report."""
    optimizer = model.optimizer
    weights = [w.copy() for w in model.get_weights()]
    num_variables = len(optimizer.variables)
    report = dp.validate(model, (x, y, sample_weight))
    assert model.optimizer is optimizer and optimizer.ledger.num_releases == 0
    assert len(optimizer.variables) == num_variables
    for before, after in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(before, after)
    assert report.ok == trains(model, x, y, sample_weight), report
    return report


def private(**kwargs):
    return dp.DPSGD(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs})


@pytest.mark.slow
@pytest.mark.parametrize("make", kinds_of_models.KINDS)
def test_kinds_of_models(make):
    tf.keras.utils.set_random_seed(1)
    model, arguments, x, y = make()
    model.compile(private(), **arguments)
    report = agree(model, x, y)
    assert report.ok and "match those of batches of one" in report.probed, report


class OfProblem(tf.keras.Model):
    """Trains the variables of a problem of the tests on its losses."""

    def __init__(self, problem):
        super().__init__()
        self.parts = lambda: problem
        self.built = True

    @property
    def trainable_variables(self):
        return list(self.parts().variables)

    @property
    def trainable_weights(self):
        return list(self.parts().variables)

    def call(self, batch):
        return self.parts().losses(*batch)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return tf.reduce_mean(y_pred)


def of_problem(problem, **kwargs):
    model = OfProblem(problem)
    model.compile(private(**kwargs))
    return agree(model, tuple(np.asarray(part) for part in problem.batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_models_of_the_zoo(name):
    problem = zoo.problem(name)
    if len(problem.batch[0]) != B:
        problem = problem._replace(batch=tuple(part[:B] for part in problem.batch))
    assert of_problem(problem).ok


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", mixing.MIXING)
def test_models_that_mix_examples(name):
    problem = linear(mixing.MIXING[name])

    def squares(*batch):  # whose sum is none over examples, even if that of the losses is
        return problem.losses(*batch) ** 2

    report = of_problem(problem._replace(losses=squares))
    assert not report.ok and "mix" in str(report)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", row_ties.TIED)
def test_models_that_use_the_row(name):
    kernel = tf.Variable(zoo.floats(4, seed=2))

    def losses(x):
        return row_ties.TIED[name](x, tf.linalg.matvec(x, kernel) ** 2)

    of_problem(zoo.Problem([kernel], losses, (zoo.floats(B, 4),)))


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", catalogue.OPTIMIZERS)
def test_optimizers(name):
    model = catalogue.mlp()
    x, y = catalogue.data(B)
    model.compile(catalogue.make(name), loss=tf.keras.losses.SparseCategoricalCrossentropy(True))
    report = dp.validate(model, (x, y))
    assert report.ok, report
    model.fit(x, y, batch_size=B, verbose=0, callbacks=catalogue.callbacks_of(model.optimizer))
    assert model.optimizer.ledger.num_releases == 1


def dense(*hidden, units=1, **kwargs):
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential([tf.keras.Input([5]), *hidden, layers.Dense(units, **kwargs)])


class OwnLoss(tf.keras.Model):
    """Computes its loss without one that it was compiled with."""

    def __init__(self):
        super().__init__()
        self.top = layers.Dense(1)

    def call(self, x):
        return self.top(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return tf.reduce_mean(tf.square(y_pred[:, 0] - (0.5 if y is None else y)))


class AddsAll(tf.keras.Model):
    """Adds all of its loss in `call`."""

    def __init__(self):
        super().__init__()
        self.top = layers.Dense(5)

    def call(self, x):
        out = self.top(x)
        self.add_loss(tf.reduce_mean(tf.square(out - x)))
        return out


def two_outputs():
    inputs = tf.keras.Input([5])
    outputs = [layers.Dense(1, name="one")(inputs), layers.Dense(1, name="two")(inputs)]
    return tf.keras.Model(inputs, outputs)


def adapted():
    words = layers.StringLookup(output_mode="multi_hot")
    words.adapt(np.array([["a"], ["b"], ["c"]]))
    inputs = tf.keras.Input([2], dtype="string")
    return tf.keras.Model(inputs, layers.Dense(1)(words(inputs)))


def images():
    inputs = tf.keras.Input([2, 3, 3, 1])
    return tf.keras.Model(inputs, layers.Dense(1)(inputs))


STRINGS = tf.constant([["a", "b"], ["c", "?"], ["b", "b"], ["a", "c"]])
VIDEOS = zoo.floats(B, 2, 3, 3, 1)
NONE = {"reduction": "none"}
MSE = tf.keras.losses.MeanSquaredError

# Model, arguments of `compile`, x, y, sample weights, and whether it trains (`None`: on one Keras).
CASES = {
    "labels [B] for outputs [B, 1]": (
        *(dense, {"loss": tf.keras.losses.BinaryCrossentropy(from_logits=True)}),
        *(X, Y, None, True),
    ),
    "labels [B] for outputs [B, 1], unreduced": (
        *(dense, {"loss": tf.keras.losses.BinaryCrossentropy(from_logits=True, **NONE)}),
        *(X, Y, None, True),
    ),
    "BatchNormalization": (
        *(lambda: dense(layers.BatchNormalization()), {"loss": "mse"}),
        *(X, Y, None, False),
    ),
    "adapted lookup": (adapted, {"loss": "mse"}, STRINGS, Y, None, True),
    "compute_loss without a loss": (OwnLoss, {}, X, Y, None, True),
    "compute_loss without labels": (OwnLoss, {}, X, None, None, True),
    "add_loss alone": (AddsAll, {}, X, None, None, True),
    "losses in a list": (two_outputs, {"loss": ["mse", "mae"]}, X, [Y, Y], None, True),
    "losses in a dict, with weights": (
        *(two_outputs, {"loss": {"one": "mse", "two": "mae"}, "loss_weights": [1.0, 0.5]}),
        *(X, {"one": Y, "two": Y}, None, None),
    ),
    "images in time": (images, {"loss": "mse"}, VIDEOS, VIDEOS, None, True),
    "images in time, unreduced": (images, {"loss": MSE(**NONE)}, VIDEOS, VIDEOS, None, False),
    "a function that returns one number": (
        *(dense, {"loss": lambda y, z: tf.reduce_mean(tf.square(tf.reshape(y, [-1, 1]) - z))}),
        *(X, Y, None, True),
    ),
    "a function that mixes": (
        *(dense, {"loss": lambda y, z: tf.square(z - tf.reduce_mean(z))}),
        *(X, Y, None, False),
    ),
    "regularizers": (
        lambda: dense(layers.Dense(4, activity_regularizer="l2"), kernel_regularizer="l1"),
        {"loss": "mse"},
        *(X, Y, np.array([1.0, 0.0, 2.0, 1.0]), True),
    ),
    "regularizers, unreduced": (
        *(lambda: dense(kernel_regularizer="l2"), {"loss": MSE(**NONE)}),
        *(X, Y, None, False),
    ),
    "by XLA": (dense, {"loss": "mse", "jit_compile": True}, X, Y, None, True),
    "several steps in one call": (
        *(dense, {"loss": "mse", "steps_per_execution": 2}),
        *(X, Y, None, True),
    ),
    "eagerly": (dense, {"loss": "mse", "run_eagerly": True}, X, Y, None, False),
    "eagerly, unreduced": (
        *(dense, {"loss": MSE(**NONE), "run_eagerly": True}),
        *(X, Y, None, GENERATION == 2),
    ),
    "metrics": (dense, {"loss": "mse", "metrics": ["mae"]}, X, Y, None, True),
    "microbatches": (
        dense,
        {"loss": "mse", "optimizer": {"num_microbatches": 2}},
        X,
        Y,
        None,
        True,
    ),
    "microbatches that do not divide": (
        *(dense, {"loss": "mse", "optimizer": {"num_microbatches": 3}}),
        *(X, Y, None, False),
    ),
    "random batches": (
        *(dense, {"loss": "mse", "optimizer": {"expected_batch_size": 3.5}}),
        *(X, Y, None, True),
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
def test_ways_to_compile(name):
    make, arguments, x, y, weights, ok = CASES[name]
    model = make()
    arguments = dict(arguments)
    model.compile(private(**arguments.pop("optimizer", {})), **arguments)
    if not model.built:
        model(x)
    report = agree(model, x, y, weights)
    assert ok is None or report.ok == ok, report
