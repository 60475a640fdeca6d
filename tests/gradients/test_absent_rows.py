"""A row of sample weight 0 contributes nothing, also by terms of the loss that have no weights."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.gradients.api import per_example_gradients

layers = tf.keras.layers
SIZE = 5
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.0, 0.5], "float32")
OTHER = np.array([0.0, 0.0, 1.0, 3.0, 0.0], "float32")
MEAN_SQUARE = tf.keras.losses.MeanSquaredError()
# Keras 3 cannot add a loss vector and the terms of `add_loss`, each of which it sums.
SQUARES = MEAN_SQUARE if GENERATION == 3 else tf.keras.losses.MeanSquaredError(reduction="none")
# Keras divides masked losses by the valid entries of the batch, unless it sums them.
SUM_OF_SQUARES = tf.keras.losses.MeanSquaredError(reduction="sum") if GENERATION == 3 else SQUARES


class Latent(layers.Layer):
    """Adds the KL term of a Gaussian, one entry per example; their mean with Keras 3."""

    def __init__(self, through=lambda kl: kl, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.through = layers.Dense(2, bias_initializer="ones"), through

    def call(self, x):
        mean = self.dense(x)
        kl = self.through(0.5 * tf.reduce_sum(mean**2, axis=-1))
        self.add_loss(tf.reduce_mean(kl) if GENERATION == 3 else kl)
        return mean


def kl_of(model, x):
    return 0.5 * tf.reduce_sum(model.get_layer("latent").dense(x) ** 2, axis=-1)


def layered(through=lambda kl: kl):
    inputs = tf.keras.Input([3])
    hidden = Latent(through, name="latent")(inputs)
    return tf.keras.Model(inputs, layers.Dense(1, name="a")(hidden))


def functional():
    inputs = tf.keras.Input([3])
    dense = layers.Dense(2, bias_initializer="ones")
    mean = dense(inputs)
    model = tf.keras.Model(inputs, layers.Dense(1, name="a")(mean))
    model.add_loss(0.5 * tf.reduce_sum(mean**2, axis=-1))
    model.kl = lambda x: 0.5 * tf.reduce_sum(dense(x) ** 2, axis=-1)
    return model


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.latent, self.a = Latent(name="latent"), layers.Dense(1)

    def call(self, x):
        return self.a(self.latent(x))


class Own(tf.keras.Model):
    """As users write it who have regularization, too."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        penalty = 0.1 * tf.reduce_sum(self.get_layer("a").kernel ** 2)
        with tf.name_scope("mine"):
            losses = self.loss(y, y_pred, sample_weight)
        return 2.0 * losses + tf.add_n(self.losses) + penalty


def two_outputs(kind=tf.keras.Model):
    inputs = tf.keras.Input([3])
    hidden = Latent(name="latent")(inputs)
    return kind(inputs, [layers.Dense(1, name="a")(hidden), layers.Dense(1, name="b")(hidden)])


def masked():
    """Keras multiplies the sample weights by the mask of the third row, whose inputs are zeros."""
    inputs = tf.keras.Input([3])
    hidden = Latent(name="latent")(layers.Masking()(inputs))
    return tf.keras.Model(inputs, layers.Dense(1, name="a")(hidden))


def in_object(kl):
    """The term goes through a loss object of Keras, inside of the layer."""
    return tf.keras.losses.MeanAbsoluteError(reduction="none")(
        tf.zeros_like(kl)[:, None], kl[:, None]
    )


def data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=[SIZE, 3]).astype("float32")
    return x, rng.normal(size=[SIZE, 1]).astype("float32")


def norms_of(model, batch, method="auto", jit_compile=False, fixed=False):
    """[B], of the gradients that the library finds in a step of Keras."""
    x, y, weights = batch

    def one_step_on_data(data):  # the name and the argument of the train step of Keras 3
        x, y, weights = data
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), weights)
        source = per_example_gradients(loss, model.trainable_variables, tape, method)
        return source.squared_norms(), source.weighted_sum(tf.ones_like(source.example_losses))

    def spec(array):
        return tf.TensorSpec([len(array) if fixed else None, *array.shape[1:]], array.dtype)

    specs = tf.nest.map_structure(spec, batch)
    step = tf.function(one_step_on_data, jit_compile=jit_compile).get_concrete_function(specs)
    squares, sums = step(*map(tf.constant, tf.nest.flatten(batch)))
    return np.sqrt(squares), [s.numpy() for s in sums]


def expected(model, batch, losses):
    """Norms and sums of gradients of one row at a time, without rows that are absent."""
    rows = []
    for i in range(len(batch[0])):
        row = tf.nest.map_structure(lambda a, i=i: tf.constant(a[i : i + 1]), batch)
        with tf.GradientTape() as tape:
            loss = losses(model, *row)[0]
        present = any(np.any(w) for w in tf.nest.flatten(row[2]))
        variables = [native(v) for v in model.trainable_variables]
        found = tape.gradient(loss, variables, unconnected_gradients="zero")
        rows.append([g.numpy() * present for g in found])
    norms = [np.sqrt(sum(np.sum(g**2) for g in row)) for row in rows]
    return norms, [np.sum(column, axis=0) for column in zip(*rows)]


def weighed(model, x, y, weights, scale=1.0):
    kl = model.kl(x) if hasattr(model, "kl") else kl_of(model, x)
    return scale * tf.reduce_mean((model(x) - y) ** 2, axis=-1) * weights + kl


def subclassed_losses(model, x, y, weights):
    mean = model.latent.dense(x)
    squares = tf.reduce_mean((model.a(mean) - y) ** 2, axis=-1)
    return squares * weights + 0.5 * tf.reduce_sum(mean**2, axis=-1)


def weighed_twice(model, x, y, weights):
    squares = [tf.reduce_mean((p - t) ** 2, axis=-1) for p, t in zip(model(x), y)]
    return 3 * squares[0] * weights[0] + squares[1] * weights[1] + kl_of(model, x)


def as_own(model):
    return Own(model.inputs, model.outputs[0])


def weighed_masked(model, x, y, weights):
    weights *= tf.cast(tf.reduce_any(x != 0, axis=1), tf.float32)
    # A sum of losses counts for the number of examples times the mean of the other term.
    return weighed(model, x, y, weights, scale=SIZE if GENERATION == 3 else 1.0)


# Model, arguments of `compile`, sample weights, and the loss vector of the batch.
MODELS = {
    "layer": lambda: (layered(), {}, WEIGHTS, weighed),
    "functional": lambda: (functional(), {}, WEIGHTS, weighed),
    "subclassed": lambda: (Subclassed(), {}, WEIGHTS, subclassed_losses),
    "Keras's loss in a layer": lambda: (layered(in_object), {}, WEIGHTS, weighed),
    "weights of rank 2": lambda: (
        *(layered(), {}, WEIGHTS[:, np.newaxis]),
        lambda model, x, y, w: weighed(model, x, y, w[:, 0]),
    ),
    "whole numbers": lambda: (
        *(layered(), {}, (2 * WEIGHTS).astype("int32")),
        lambda model, x, y, w: weighed(model, x, y, tf.cast(w, tf.float32)),
    ),
    "two outputs": lambda: (
        *(two_outputs(), {"loss_weights": [3.0, 1.0]}, (WEIGHTS, OTHER)),
        weighed_twice,
    ),
    "one weight for two outputs": lambda: (
        *(two_outputs(), {"loss_weights": [3.0, 1.0]}, WEIGHTS),
        lambda model, x, y, w: weighed_twice(model, x, y, (w, w)),
    ),
    "compute_loss": lambda: (
        *(as_own(layered()), {}, WEIGHTS),
        lambda *of: weighed(*of, scale=2.0),
    ),
    "mask": lambda: (masked(), {}, WEIGHTS, weighed_masked),
}


def made(name):
    """The model, a batch, and the losses of the batch."""
    if name == "functional" and GENERATION == 3:
        pytest.skip("Models of Keras 3 have no symbolic `add_loss`")
    tf.keras.utils.set_random_seed(3)
    model, kwargs, weights, losses = MODELS[name]()
    loss = SUM_OF_SQUARES if name == "mask" else SQUARES
    model.compile(
        dp.DPSGD(1.0, 0.0), loss=[loss] * len(model.outputs) if "two" in name else loss, **kwargs
    )
    x, y = data()
    if name == "mask":
        x[2] = 0.0
    model(x)
    return model, (x, (y, y[::-1].copy()) if "two" in name else y, weights), losses


def assert_same(found, true):
    (norms, sums), (true_norms, true_sums) = found, true
    np.testing.assert_allclose(norms, true_norms, rtol=1e-5, atol=0)
    for actual, desired in zip(sums, true_sums):
        np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_absent_rows_contribute_nothing_and_others_all(name):
    model, batch, losses = made(name)
    true = expected(model, batch, losses)
    assert np.count_nonzero(true[0]) == (4 if name == "two outputs" else 3)
    assert_same(norms_of(model, batch), true)


@pytest.mark.parametrize(
    "kwargs", [{"method": "materialized"}, {"jit_compile": True, "fixed": True}]
)
def test_absent_rows_are_left_out_in_every_mode(kwargs):
    model, batch, losses = made("layer")
    assert_same(norms_of(model, batch, **kwargs), expected(model, batch, losses))


@pytest.mark.in_turns
@pytest.mark.parametrize("weight", [0.0, 2.0])
@pytest.mark.parametrize("loss", [SQUARES, MEAN_SQUARE])
def test_a_batch_of_one_may_be_absent(loss, weight):
    model, (x, y, _), losses = made("layer")
    model.get_layer("latent").through = tf.reduce_mean if loss is MEAN_SQUARE else tf.identity
    model.compile(dp.DPSGD(1.0, 0.0), loss=loss)
    batch = x[:1], y[:1], np.array([weight], "float32")
    assert_same(norms_of(model, batch, fixed=True), expected(model, batch, losses))


class Product(tf.keras.Model):
    """Labels of 0 and 1 multiply the loss, and are no weights."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        with tf.name_scope("product"):
            products = tf.reshape(-y_pred, [-1]) * y
        products = tf.reduce_mean(products) if GENERATION == 3 else products
        return products + tf.add_n(self.losses)


def test_a_label_that_multiplies_the_loss_is_no_weight():
    model = layered()
    model = Product(model.inputs, model.outputs[0])
    model.compile(dp.DPSGD(1.0, 0.0), loss=SQUARES)
    batch = data()[0], np.array([0, 1, 0, 1, 0], "float32"), np.ones(SIZE, "float32")
    losses = lambda model, x, y, _: -y * tf.reshape(model(x), [-1]) + kl_of(model, x)  # noqa: E731
    assert_same(norms_of(model, batch), expected(model, batch, losses))


def test_without_weights_no_row_is_absent():
    # Nor are the rows that a mask takes out of the loss of the output.
    model, (x, y, _), losses = made("mask")
    ones = np.ones(SIZE, "float32")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return per_example_gradients(loss, model.trainable_variables, tape).squared_norms()

    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    squares = tf.function(step).get_concrete_function(*specs)(tf.constant(x), tf.constant(y))
    norms, _ = expected(model, (x, y, ones), losses)
    assert np.all(norms) and x[2].sum() == 0
    np.testing.assert_allclose(np.sqrt(squares), norms, rtol=1e-5)


def test_a_row_is_present_where_one_output_has_no_weights():
    # As for rows that lack the label of the other output: they are examples all the same.
    model, (x, y, _), _ = made("two outputs")

    def step(x, y, weights):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), (weights, None))
        return per_example_gradients(loss, model.trainable_variables, tape).squared_norms()

    batch = x, y, WEIGHTS
    specs = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]]), batch)
    step = tf.function(step).get_concrete_function(*specs)
    squares = step(*map(tf.constant, tf.nest.flatten(batch)))
    every = np.ones(SIZE, "float32")
    norms, _ = expected(
        model,
        (x, y, (WEIGHTS, every)),
        weighed_twice,
    )
    np.testing.assert_allclose(np.sqrt(squares), norms, rtol=1e-5)


def test_rows_are_absent_in_a_loop_of_ones_own():
    model, (x, y, weights), losses = made("layer")
    model.get_layer("latent").through = tf.reduce_mean

    def step(x, y, weights):
        with tf.GradientTape() as tape:
            loss = MEAN_SQUARE(y, model(x, training=True), weights) + tf.add_n(model.losses)
        return per_example_gradients(loss, model.trainable_variables, tape).squared_norms()

    specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y, weights)]
    squares = tf.function(step).get_concrete_function(*specs)(*map(tf.constant, (x, y, weights)))
    norms, _ = expected(model, (x, y, weights), losses)
    np.testing.assert_allclose(np.sqrt(squares), norms, rtol=1e-5)
