"""Trajectories to compare with NumPy: small problems, and the noise that a seed gives."""

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.gaussianity import drawn
from tf_adaptive_dp.mechanism.noise import GaussianNoise

C, SIGMA, BATCH, STEPS, SEED = 0.7, 0.3, 4, 7, 11
W0 = np.array([1.5, -2.0, 0.25], np.float32)
B0 = np.float32(0.5)
DATA = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype(np.float32)


def run(optimizer, num_steps=STEPS):
    """Minimises ½‖w − x‖² + ½(b − x₀)², with gradients w − x and b − x₀; returns all points."""
    w, b = tf.Variable(W0, name="w"), tf.Variable(B0, name="b")
    points = []
    for x in DATA[:num_steps]:
        with tf.GradientTape() as tape:
            loss = 0.5 * tf.reduce_sum((w - x) ** 2, axis=1) + 0.5 * (b - x[:, 0]) ** 2
        optimizer.minimize(loss, [w, b], tape)
        points.append(np.append(w.numpy(), b.numpy()))
    return np.array(points)


class Reference:
    """Noisy mean gradients in NumPy, with the noise that a seeded optimizer draws."""

    def __init__(self, precondition=lambda g, k: g, noise_multiplier=SIGMA):
        self.noise = GaussianNoise(lambda shape, dtype, name: tf.Variable(0, dtype=dtype), SEED)
        self.precondition, self.sigma = precondition, noise_multiplier

    def gradient(self, theta, k):
        x = DATA[k]
        rows = np.concatenate([theta[:3] - x, theta[3:] - x[:, :1]], axis=1)
        rows = self.precondition(rows, k)
        rows = rows * np.minimum(1, C / np.linalg.norm(rows, axis=1, keepdims=True))
        w, b = drawn(self.noise, [[3], []], self.sigma * C)
        return (rows.sum(0) + np.append(w.numpy(), b.numpy())) / BATCH


def arguments(**kwargs):
    return {"l2_norm_clip": C, "noise_multiplier": SIGMA, "seed": SEED, **kwargs}


def assert_trajectory(optimizer, expected):
    np.testing.assert_allclose(run(optimizer, len(expected)), expected, rtol=2e-5, atol=1e-6)


# A linear model that predicts 1 on private data and 0 on public data, which come in twos.
PUBLIC = np.random.default_rng(4).normal(size=(STEPS, 2, 3)).astype(np.float32)
START = np.random.default_rng(5).normal(size=3).astype(np.float32)


def public_gradients(rule, **kwargs):
    """The side information of `run_with_public`."""
    data = tf.data.Dataset.from_tensor_slices((PUBLIC, np.zeros((STEPS, 2), np.float32)))
    return dp.side_information.PublicGradients(data, rule, provenance="public", **kwargs)


def run_with_public(optimizer, **compile_with):
    """Fits the linear model; returns the weights after each step (or execution)."""
    inputs = tf.keras.Input([3])
    layer = tf.keras.layers.Dense(
        1, use_bias=False, kernel_initializer=lambda *a, **k: START[:, None]
    )
    model = tf.keras.Model(inputs, layer(inputs))
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(optimizer, **{"loss": loss, **compile_with})
    points = []
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: points.append(layer.kernel.numpy()[:, 0].copy())
    )
    y = np.ones((STEPS * BATCH, 1), np.float32)
    callbacks = [optimizer.side_information, note]
    model.fit(DATA.reshape(-1, 3), y, BATCH, 1, 0, callbacks, shuffle=False)
    return np.array(points)


class PublicReference:
    """Gradients of the linear model in NumPy, and the noise of a seeded optimizer."""

    def __init__(self):
        self.noise = GaussianNoise(lambda shape, dtype, name: tf.Variable(0, dtype=dtype), SEED)

    def public(self, theta, k):
        """The mean gradient on public batch k."""
        return (2 * (PUBLIC[k] @ theta)[:, None] * PUBLIC[k]).mean(0)

    def rows(self, theta, k):
        """The gradient of each private example of batch k."""
        return 2 * (DATA[k] @ theta - 1)[:, None] * DATA[k]

    def released(self, rows):
        """Their noisy mean after clipping."""
        rows = rows * np.minimum(1, C / np.linalg.norm(rows, axis=1, keepdims=True))
        (z,) = drawn(self.noise, [[3, 1]], SIGMA * C)
        return (rows.sum(0) + z.numpy()[:, 0]) / BATCH
