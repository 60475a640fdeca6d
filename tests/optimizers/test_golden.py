"""Each update rule against NumPy: the same data, the same noise, several steps."""

import numpy as np
import pytest
import tensorflow as tf
from gaussianity import drawn

import tf_adaptive_dp as dp
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


def adadp_reference(eta, tolerance, keep, discard, frozen_after=None, decay=0.1):
    reference, theta = Reference(), np.append(W0, B0).astype(np.float64)
    points, rates, k = [], [], 0
    frozen_eta = None
    for k in range(STEPS):
        g = reference.gradient(theta, k)
        if frozen_after is not None and k >= frozen_after:
            frozen_eta = eta if frozen_eta is None else frozen_eta
            theta = theta - frozen_eta / (1 + decay * (k - frozen_after)) * g
            next_eta = frozen_eta / (1 + decay * (k + 1 - frozen_after))
        elif k % 2 == 0:
            start, euler = theta, theta - eta * g
            theta, next_eta = theta - eta / 2 * g, eta
        else:
            tilde = theta - eta / 2 * g
            error = np.linalg.norm((tilde - euler) / np.maximum(1, np.abs(tilde)))
            theta = tilde if keep == "half_steps" else euler
            if discard and error > tolerance:
                theta = start
            next_eta = eta = eta * min(max(tolerance / error, 0.9), 1.1)
        points.append(theta)
        rates.append(next_eta)
    return np.array(points), rates


@pytest.mark.parametrize("keep", ["half_steps", "euler"])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("tolerance", [0.02, 0.12, 10.0])
def test_adadp_follows_algorithm_2(keep, discard, tolerance):
    expected, rates = adadp_reference(0.4, tolerance, keep, discard)
    optimizer = dp.ADADP(
        **arguments(), learning_rate=0.4, tolerance=tolerance, keep=keep, discard=discard
    )
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


@pytest.mark.parametrize("frozen_after", [0, 2, 3])
def test_adadp_freezes_and_decays(frozen_after):
    expected, rates = adadp_reference(0.4, 0.12, "half_steps", False, frozen_after)
    optimizer = dp.ADADP(
        **arguments(), learning_rate=0.4, tolerance=0.12, freeze_learning_rate_after=frozen_after
    )
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


def test_adadp_counts_the_freeze_in_epochs_if_told_their_length():
    rates = []
    for k in range(1, STEPS + 1):
        optimizer = dp.ADADP(
            **arguments(), learning_rate=0.4, freeze_learning_rate_after=1, steps_per_epoch=3
        )
        run(optimizer, k)
        rates.append(float(optimizer.learning_rate))
    frozen = rates[2]
    np.testing.assert_allclose(rates[2:], [frozen] * 3 + [frozen / 1.1] * 2, rtol=1e-6)


def test_adadp_judges_the_pair_over_all_variables_together():
    optimizer = dp.ADADP(**arguments(), learning_rate=0.4, tolerance=0.12)
    run(optimizer, 2)
    points, _ = adadp_reference(0.4, 0.12, "half_steps", False)
    euler = adadp_reference(0.4, 0.12, "euler", False)[0][1]
    error = np.linalg.norm((points[1] - euler) / np.maximum(1, np.abs(points[1])))
    assert optimizer.last_error == pytest.approx(error, rel=1e-4)
    assert optimizer.acceptance == float(error <= 0.12)


@pytest.mark.parametrize("gradient, factor", [(0.0, 1.1), (float("inf"), 0.9), (1e30, 0.9)])
def test_adadp_keeps_a_finite_learning_rate(gradient, factor):
    optimizer = dp.ADADP(1.0, 0.0, learning_rate=0.1)
    w = tf.Variable([1.0, 2.0])
    optimizer.build([w])
    for k in range(2):
        g = tf.constant([gradient if k else 0.0, 0.0])
        optimizer.apply_gradients([(g, w)], non_private_gradients=True)
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * factor, rel=1e-6)


def test_adadp_decays_weights_once_a_pair():
    def last(weight_decay):
        optimizer = dp.ADADP(1.0, 0.0, learning_rate=0.1, weight_decay=weight_decay)
        w = tf.Variable([2.0])
        optimizer.build([w])
        for _ in range(2):
            optimizer.apply_gradients([(tf.zeros([1]), w)], non_private_gradients=True)
        return float(w[0])

    assert last(None) == 2.0
    assert last(0.5) == pytest.approx(2.0 * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("kwargs", [{}, {"expected_batch_size": 8.0}, {"num_microbatches": 2}])
def test_dp_adam_wosm_follows_theorem_3(kwargs):
    alpha, beta, xi = 0.02, 0.8, 1e-3
    divisor = {"expected_batch_size": 8, "num_microbatches": 2}.get(next(iter(kwargs), ""), BATCH)
    optimizer = dp.DPAdamWOSM(**arguments(**kwargs), learning_rate=alpha, beta_1=beta, epsilon=xi)
    released = []
    apply = optimizer.apply_gradients

    def spy(grads_and_vars):
        pairs = list(grads_and_vars)
        released.append(np.append(pairs[0][0].numpy(), pairs[1][0].numpy()))
        return apply(pairs)

    optimizer.apply_gradients = spy
    points = run(optimizer)
    theta, m = np.append(W0, B0).astype(np.float64), np.zeros(4)
    for t, (g, point) in enumerate(zip(released, points), start=1):
        m = beta * m + (1 - beta) * g
        theta = theta - alpha / (SIGMA * C / divisor + xi) * m / (1 - beta**t)
        np.testing.assert_allclose(point, theta, rtol=2e-5, atol=1e-6)


def test_the_wosm_step_is_that_of_adam_when_there_is_only_noise():
    # Theorem 3 as a measurement: without gradients, √v̂ of Adam is σC/L in the mean.
    wide = tf.Variable(tf.zeros([20_000]))
    adam = dp.DPAdam(l2_norm_clip=C, noise_multiplier=2.0, seed=3)
    with tf.GradientTape() as tape:
        loss = tf.zeros([50]) * tf.reduce_sum(wide)
    adam.minimize(loss, [wide], tape)
    root = np.sqrt(np.mean(adam._velocities[0].numpy()) / (1 - adam.beta_2))
    assert root == pytest.approx(2.0 * C / 50, rel=0.02)


def test_adadps_divides_before_it_clips():
    a = {"w": np.array([0.5, 2.0, 4.0]), "b:0": 0.25}
    reference = Reference(lambda g, k: g / np.array([0.5, 2.0, 4.0, 0.25]))
    theta, expected = np.append(W0, B0).astype(np.float64), []
    for k in range(STEPS):
        theta = theta - 0.3 * reference.gradient(theta, k)
        expected.append(theta)
    side_information = dp.FixedPreconditioner(a, provenance="public")
    assert_trajectory(dp.AdaDPS(side_information, **arguments(), learning_rate=0.3), expected)


@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "adam"])
def test_adadps_follows_algorithm_1_with_public_gradients(rule):
    beta, epsilon, alpha = 0.8, 1e-3, 0.05
    public = np.random.default_rng(4).normal(size=(STEPS, 2, 3)).astype(np.float32)
    start = np.random.default_rng(5).normal(size=3).astype(np.float32)

    inputs = tf.keras.Input([3])
    layer = tf.keras.layers.Dense(
        1, use_bias=False, kernel_initializer=lambda *a, **k: start[:, None]
    )
    model = tf.keras.Model(inputs, layer(inputs))
    information = dp.PublicGradients(
        tf.data.Dataset.from_tensor_slices((public, np.zeros((STEPS, 2), np.float32))),
        rule,
        beta,
        epsilon,
        provenance="public",
    )
    optimizer = dp.AdaDPS(information, **arguments(), learning_rate=alpha)
    model.compile(optimizer, loss=tf.keras.losses.MeanSquaredError(reduction="none"))
    y = np.ones((STEPS * BATCH, 1), np.float32)
    model.fit(DATA.reshape(-1, 3), y, BATCH, 1, verbose=0, shuffle=False, callbacks=[information])

    noise = GaussianNoise(lambda shape, dtype, name: tf.Variable(0, dtype=dtype), SEED)
    theta, v, m = start.astype(np.float64), np.zeros(3), np.zeros(3)
    for k in range(STEPS):
        g = (2 * (public[k] @ theta)[:, None] * public[k]).mean(0)
        v = v + g**2 if rule == "adagrad" else beta * v + (1 - beta) * g**2
        m = beta * m + (1 - beta) * g
        rows = 2 * (DATA[k] @ theta - 1)[:, None] * DATA[k]
        if rule == "adam":
            rows = beta * rows + (1 - beta) * m
        rows = rows / np.sqrt(v + epsilon)
        rows = rows * np.minimum(1, C / np.linalg.norm(rows, axis=1, keepdims=True))
        (z,) = drawn(noise, [[3, 1]], SIGMA * C)
        theta = theta - alpha * (rows.sum(0) + z.numpy()[:, 0]) / BATCH
    np.testing.assert_allclose(layer.kernel.numpy()[:, 0], theta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "private, stock",
    [
        (dp.DPSGD, tf.keras.optimizers.SGD),
        (dp.DPAdam, tf.keras.optimizers.Adam),
        (dp.DPAdamW, tf.keras.optimizers.AdamW),
        (dp.DPRMSprop, tf.keras.optimizers.RMSprop),
        (dp.DPAdagrad, tf.keras.optimizers.Adagrad),
    ],
)
def test_without_noise_and_with_a_huge_clip_it_is_the_stock_optimizer(private, stock):
    class Mean(stock):
        def compute_gradients(self, loss, var_list, tape=None):
            return list(zip(tape.gradient(loss, var_list, [tf.fill([BATCH], 1 / BATCH)]), var_list))

    expected = run(Mean(learning_rate=0.05))
    actual = run(private(l2_norm_clip=1e9, noise_multiplier=0.0, learning_rate=0.05))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
