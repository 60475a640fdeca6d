"""Regularizers and what layers add to the loss: exact, once, after the noise if without data."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.variables import native

layers = tf.keras.layers
B, CLIP = 4, 0.05
X, Y = floats(B, 5), np.array([0.0, 1.0, 1.0, 0.0], "float32")
L1L2 = tf.keras.regularizers.L1L2(0.01, 0.02)


class Adds(layers.Layer):
    """Adds a term of its input to the loss."""

    def __init__(self, term):
        super().__init__()
        self.term = term

    def call(self, x):
        self.add_loss(self.term(x))
        return x


class AddsOfModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")
        self.top = layers.Dense(1)

    def call(self, x):
        h = self.hidden(x)
        self.add_loss(tf.reduce_mean(tf.reduce_sum(h**2, axis=1)))
        return self.top(h)


def dense(*hidden, **kwargs):
    return lambda: tf.keras.Sequential(
        [tf.keras.Input([5]), *(make() for make in hidden), layers.Dense(1, **kwargs)]
    )


# Models whose terms are those of variables alone.
SHARED = {
    "kernels and biases of several layers": dense(
        lambda: layers.Dense(4, "tanh", kernel_regularizer="l2", bias_regularizer="l1"),
        lambda: layers.Dense(3, kernel_regularizer=L1L2),
        kernel_regularizer="l2",
    ),
    "orthogonal": dense(
        lambda: layers.Dense(4, kernel_regularizer=tf.keras.regularizers.OrthogonalRegularizer(0.1))
    ),
}
OF_DATA = {
    "activities of several layers": dense(
        lambda: layers.Dense(4, "tanh", activity_regularizer="l2"),
        lambda: layers.Dense(3, activity_regularizer="l2"),
    ),
    "a mean that a layer adds": dense(
        lambda: layers.Dense(4), lambda: Adds(lambda x: tf.reduce_mean(x**2))
    ),
    "what a model adds": AddsOfModel,
}


def step(make, optimizer, y, loss="mse"):
    """How far one step moves each weight."""
    tf.keras.utils.set_random_seed(1)
    model = make()
    model(X[:1])
    before = model.get_weights()
    model.compile(optimizer, loss=loss)
    model.fit(X, y, batch_size=B, verbose=0)
    return [a - b for a, b in zip(before, model.get_weights())]


def without_terms(make):
    """The same model with the same weights, without regularizers."""

    def stripped():
        model = make()
        for layer in model.layers:
            layer.kernel_regularizer = layer.bias_regularizer = None
        copy = tf.keras.Sequential.from_config(model.get_config())
        copy.set_weights(model.get_weights())
        return copy

    return stripped


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("shape", [[B], [B, 1]])
@pytest.mark.parametrize("name", SHARED)
def test_terms_without_data_are_added_once_after_the_noise(name, shape):
    make, y = SHARED[name], Y.reshape(shape)

    def private():
        return dp.DPSGD(CLIP, 2.0, learning_rate=1.0, seed=3, gradients="traced")

    moved, plain = (step(m, private(), y) for m in (make, without_terms(make)))
    tf.keras.utils.set_random_seed(1)
    model = make()
    with tf.GradientTape() as tape:
        model(X[:1])
        total = tf.add_n(model.losses)
    variables = [native(v) for v in model.trainable_variables]
    expected = tape.gradient(total, variables, unconnected_gradients="zero")
    assert max(float(tf.reduce_max(tf.abs(g))) for g in expected) > 1e-3
    for with_terms, without, gradient in zip(moved, plain, expected):
        np.testing.assert_allclose(with_terms - without, gradient, atol=2e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("shape", [[B], [B, 1]])
@pytest.mark.parametrize("name", {**SHARED, **OF_DATA})
def test_a_step_that_clips_nothing_is_that_of_keras(name, shape):
    make, y = {**SHARED, **OF_DATA}[name], Y.reshape(shape)
    private = step(make, dp.DPSGD(1e6, 0.0, learning_rate=1.0, gradients="traced"), y)
    ordinary = step(make, tf.keras.optimizers.SGD(1.0), y)
    for ours, expected in zip(private, ordinary):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["activities of several layers", "a mean that a layer adds"])
def test_terms_of_examples_are_clipped_with_them(name):
    make = OF_DATA[name]
    moved = step(make, dp.DPSGD(CLIP, 0.0, learning_rate=1.0, gradients="traced"), Y)
    norm = np.sqrt(sum(np.sum(m.astype("float64") ** 2) for m in moved))
    assert CLIP / 10 < norm <= CLIP * (1 + 1e-5)
