"""Each update rule against NumPy: the same data, the same noise, several steps."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.trajectories import (
    B0,
    BATCH,
    SIGMA,
    STEPS,
    W0,
    C,
    Reference,
    arguments,
    assert_trajectory,
    run,
)


def adadp_reference(
    eta,
    tolerance,
    keep,
    discard,
    frozen_after=None,
    decay=0.1,
    tolerance_decay=0.0,
    initial_factor=1.0,
):
    reference, theta = Reference(), np.append(W0, B0).astype(np.float64)
    points, rates, below, k = [], [], set(), 0
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
            tol = tolerance / np.sqrt(1 + tolerance_decay * (k // 2))
            if discard and error > tol:
                theta = start
            below.add(error <= tol)
            first = initial_factor if len(below) == 1 else 1.0
            next_eta = eta = eta * min(max(tol / error, min(0.9, 1 / first)), max(1.1, first))
        points.append(theta)
        rates.append(next_eta)
    return np.array(points), rates


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("keep", ["half_steps", "euler"])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("tolerance", [0.02, 0.12, 10.0])
def test_adadp_follows_algorithm_2(keep, discard, tolerance):
    expected, rates = adadp_reference(0.4, tolerance, keep, discard)
    optimizer = dp.ADADP(
        **arguments(),
        learning_rate=0.4,
        tolerance=tolerance,
        tolerance_decay=0.0,
        initial_factor=1.0,
        keep=keep,
        discard=discard,
    )
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("tolerance", [0.02, 0.12, 10.0])
def test_adadp_searches_until_it_has_met_the_tolerance_from_both_sides(tolerance):
    expected, rates = adadp_reference(0.4, tolerance, "half_steps", False, initial_factor=2.0)
    assert rates != adadp_reference(0.4, tolerance, "half_steps", False)[1]
    optimizer = dp.ADADP(**arguments(), learning_rate=0.4, tolerance=tolerance, tolerance_decay=0.0)
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("discard", [False, True])
def test_adadp_lowers_its_tolerance_step_by_step(discard):
    expected, rates = adadp_reference(0.4, 0.12, "half_steps", discard, tolerance_decay=0.5)
    constant, _ = adadp_reference(0.4, 0.12, "half_steps", discard)
    assert np.max(np.abs(expected - constant)) > 1e-3
    optimizer = dp.ADADP(
        **arguments(),
        learning_rate=0.4,
        tolerance=0.12,
        tolerance_decay=0.5,
        initial_factor=1.0,
        discard=discard,
    )
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


@pytest.mark.slow
def test_adadp_takes_a_tolerance_that_fits_the_number_of_parameters():
    defaults = {"tolerance_decay": 0.005, "initial_factor": 2.0}
    expected, _ = adadp_reference(0.4, np.sqrt(4) / 50, "half_steps", True, **defaults)
    assert_trajectory(dp.ADADP(**arguments(), learning_rate=0.4, discard=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("frozen_after", [0, 2, 3])
def test_adadp_freezes_and_decays(frozen_after):
    expected, rates = adadp_reference(0.4, 0.12, "half_steps", False, frozen_after)
    optimizer = dp.ADADP(
        **arguments(),
        learning_rate=0.4,
        tolerance=0.12,
        tolerance_decay=0.0,
        initial_factor=1.0,
        freeze_learning_rate_after=frozen_after,
    )
    assert_trajectory(optimizer, expected)
    assert float(optimizer.learning_rate) == pytest.approx(rates[-1], rel=1e-5)


@pytest.mark.slow
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
    optimizer = dp.ADADP(**arguments(), learning_rate=0.4, tolerance=0.12, tolerance_decay=0.0)
    run(optimizer, 2)
    points, _ = adadp_reference(0.4, 0.12, "half_steps", False)
    euler = adadp_reference(0.4, 0.12, "euler", False)[0][1]
    error = np.linalg.norm((points[1] - euler) / np.maximum(1, np.abs(points[1])))
    assert optimizer.last_error == pytest.approx(error, rel=1e-4)
    assert optimizer.acceptance == float(error <= 0.12)


@pytest.mark.parametrize("initial_factor, up, down", [(1.0, 1.1, 0.9), (2.0, 2.0, 0.5)])
@pytest.mark.parametrize("gradient", [0.0, float("inf"), 1e30])
def test_adadp_keeps_a_finite_learning_rate(gradient, initial_factor, up, down):
    optimizer = dp.ADADP(1.0, 0.0, learning_rate=0.1, tolerance=0.3, initial_factor=initial_factor)
    factor = down if gradient else up
    w = tf.Variable([1.0, 2.0])
    optimizer.build([w])
    for k in range(2):
        g = tf.constant([gradient if k else 0.0, 0.0])
        optimizer.apply_gradients([(g, w)], non_private_gradients=True)
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * factor, rel=1e-6)


def rate_after_a_pair(arguments, num_parameters, norm):
    """The rate of a loaded ADADP after a pair of gradients, 0 and one of this norm."""
    optimizer = dp.ADADP.from_config(dp.ADADP(1.0, 2.0, **arguments).get_config())
    w = tf.Variable(tf.zeros([num_parameters]))
    optimizer.build([w])
    for size in (0.0, norm):
        g = tf.fill([num_parameters], size / num_parameters**0.5)
        optimizer.apply_gradients([(g, w)], non_private_gradients=True)
    return float(optimizer.learning_rate)


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        ({}, 1.0),
        ({"normalized_inputs": True}, 0.5),
        ({"normalized_inputs": True, "tolerance": 0.6}, 0.6),
    ],
)
def test_adadp_starts_at_a_smaller_tolerance_if_inputs_are_normalized(arguments, tolerance):
    rate = rate_after_a_pair(arguments, num_parameters=10_000, norm=16.0)  # err = η / 2 · 16 = 0.8
    assert rate == pytest.approx(0.1 * tolerance / 0.8, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        ({"normalized_inputs": True}, 1.0),
        ({"num_steps": 300}, 1.0),
        ({"normalized_inputs": True, "num_steps": 300}, 2.0),
        ({"normalized_inputs": True, "num_steps": 300, "tolerance": 1.5}, 1.5),
    ],
)
def test_adadp_starts_at_a_larger_tolerance_in_short_runs_of_large_models(arguments, tolerance):
    rate = rate_after_a_pair(arguments, num_parameters=40_000, norm=32.0)  # err = η / 2 · 32 = 1.6
    assert rate == pytest.approx(0.1 * tolerance / 1.6, rel=1e-5)


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


@pytest.mark.slow_after(1)
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


@pytest.mark.slow_after(1)
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

        def minimize(self, loss, var_list, tape=None):  # which Keras 3 does not have
            self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    expected = run(Mean(learning_rate=0.05))
    actual = run(private(l2_norm_clip=1e9, noise_multiplier=0.0, learning_rate=0.05))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def noisy_reference(step):
    """Points of θ ← θ − step(G), with the noisy mean gradients G of DP-SGD."""
    reference, theta, points = Reference(), np.append(W0, B0).astype(np.float64), []
    for k in range(STEPS):
        theta = theta - step(reference.gradient(theta, k))
        points.append(theta)
    return np.array(points)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.9, 0.5])
def test_dp_rmsprop_divides_by_the_moments_of_noisy_gradients(beta):
    # AdaDPS, section 6.1: v ← β·v + (1 − β)·G², θ ← θ − α·G / √(v + ε).
    v = np.zeros(4)

    def step(g):
        v[:] = beta * v + (1 - beta) * g**2
        return 0.05 * g / np.sqrt(v + 1e-3)

    optimizer = dp.DPRMSprop(**arguments(), learning_rate=0.05, rho=beta, epsilon=1e-3)
    assert_trajectory(optimizer, noisy_reference(step))


@pytest.mark.slow
def test_dp_adagrad_divides_by_the_sum_of_squared_noisy_gradients():
    # v ← v + G², from zero; Keras begins at 0.1 unless told otherwise.
    def points(start):
        v = np.full(4, start)

        def step(g):
            v[:] = v + g**2
            return 0.3 * g / np.sqrt(v + 1e-7)

        return noisy_reference(step)

    kwargs = {**arguments(), "learning_rate": 0.3}
    assert_trajectory(dp.DPAdagrad(**kwargs, initial_accumulator_value=0.0), points(0.0))
    assert_trajectory(dp.DPAdagrad(**kwargs), points(0.1))
    assert np.abs(points(0.0) - points(0.1)).max() > 0.1


@pytest.mark.parametrize("loss_scale", [1e-6, 1.0, 1e6])
def test_adadp_steps_by_units_of_a_clip_norm_that_follows_the_gradients(loss_scale):
    """C grows by up to a tenth in each step, which η could not make up for."""
    clipping = dp.AdaptiveClipping(count_noise_multiplier=1e-6)
    optimizer = dp.ADADP(3 * loss_scale, 1e-7, clipping=clipping, expected_batch_size=2)
    w, clips = tf.Variable([0.0]), []
    for _ in range(2):
        clips.append(optimizer.l2_norm_clip / loss_scale)
        with tf.GradientTape() as tape:
            loss = loss_scale * tf.constant([-30.0, -50.0]) * w
        optimizer.minimize(loss, [w], tape)
    assert clips == pytest.approx([3.0, 3.0 * np.exp(0.1)], rel=1e-4)
    np.testing.assert_allclose(w, [0.1], rtol=1e-4)  # two half steps of η = 0.1
