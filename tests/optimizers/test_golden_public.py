"""Each optimizer with side information against NumPy: the same data, the same noise."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.trajectories import (
    B0,
    DATA,
    SIGMA,
    START,
    STEPS,
    W0,
    C,
    PublicReference,
    Reference,
    arguments,
    assert_trajectory,
    public_gradients,
    run,
    run_with_public,
)

BETA, EPSILON, ALPHA = 0.8, 1e-3, 0.05
L = DATA.shape[1]
A = np.array([0.5, 2.0, 4.0, 0.25])


def fixed():
    return dp.side_information.FixedPreconditioner({"w": A[:3], "b:0": A[3]}, provenance="public")


def fixed_reference(rule, preconditioner=A):
    """θ after each step of `rule(G, t)`, on gradients divided by A before they are clipped."""
    reference = Reference(lambda g, k: g / preconditioner)
    theta, points = np.append(W0, B0).astype(np.float64), []
    for k in range(STEPS):
        theta = theta - rule(reference.gradient(theta, k), k + 1)
        points.append(theta)
    return np.array(points)


def assert_same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def assert_other(actual, expected):
    """A formula that is not the optimizer's is well apart from it."""
    assert np.abs(np.asarray(actual) - expected)[-1].max() > 1e-3


@pytest.mark.slow_on(2)
def test_adadps_divides_before_it_clips():
    expected = fixed_reference(lambda g, t: 0.3 * g)
    assert_trajectory(dp.AdaDPS(fixed(), **arguments(), learning_rate=0.3), expected)
    assert_other(fixed_reference(lambda g, t: 0.3 * g, A**2), expected)


def momentum():
    m = np.zeros(4)

    def step(g, t):
        m[:] = 0.9 * m + 0.3 * g
        return m.copy()

    return step


def adam():
    m, v = np.zeros(4), np.zeros(4)

    def step(g, t):
        m[:], v[:] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        return 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)

    return step


def wosm():
    m = np.zeros(4)

    def step(g, t):
        m[:] = 0.8 * m + 0.2 * g
        return 0.02 / (SIGMA * C / L + 1e-3) * m / (1 - 0.8**t)

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_class, own, rule",
    [
        (dp.DPSGD, {"learning_rate": 0.3, "momentum": 0.9}, momentum),
        (dp.DPAdam, {"learning_rate": 0.1}, adam),
        (dp.DPAdamWOSM, {"learning_rate": 0.02, "beta_1": 0.8, "epsilon": 1e-3}, wosm),
    ],
)
def test_every_update_rule_takes_preconditioned_gradients(optimizer_class, own, rule):
    optimizer = optimizer_class(**arguments(side_information=fixed()), **own)
    expected = fixed_reference(rule())
    assert_same(run(optimizer), expected)
    assert_other(fixed_reference(rule(), 1.0), expected)


@pytest.mark.slow
def test_adadp_compares_steps_along_preconditioned_gradients():
    reference, theta = Reference(lambda g, k: g / A), np.append(W0, B0).astype(np.float64)
    eta, points = 0.3, []
    for k in range(STEPS):
        g = reference.gradient(theta, k)
        if k % 2 == 0:
            euler = theta - eta * g
            theta = theta - eta / 2 * g
        else:
            theta = theta - eta / 2 * g
            error = np.linalg.norm((theta - euler) / np.maximum(1, np.abs(theta)))
            eta *= min(max(0.07 / error, 0.9), 1.1)
        points.append(theta)
    optimizer = dp.ADADP(
        **arguments(side_information=fixed()),
        learning_rate=0.3,
        tolerance=0.07,
        tolerance_decay=0,
        initial_factor=1.0,
    )
    assert_trajectory(optimizer, points)
    assert float(optimizer.learning_rate) == pytest.approx(eta, rel=1e-5)


def moments(rule):
    """The next (v, m) of public gradients."""

    def step(v, m, g):
        v = v + g**2 if rule == "adagrad" else BETA * v + (1 - BETA) * g**2
        return v, BETA * m + (1 - BETA) * g

    return step


def preconditioned(rule, g, v, m):
    mixed = BETA * g + (1 - BETA) * m if rule == "adam" else g
    return mixed / np.sqrt(v + EPSILON)


def public_reference(rule, order="precondition_first", refreshed=lambda k: True):
    """AdaDPS with public gradients, Algorithm 1, in either order."""
    reference, theta, points = PublicReference(), START.astype(np.float64), []
    v, m, batch = np.zeros(3), np.zeros(3), 0
    for k in range(STEPS):
        if refreshed(k):
            v, m = moments(rule)(v, m, reference.public(theta, batch))
            batch += 1

        rows = reference.rows(theta, k)
        if order == "noise_first":
            theta = theta - ALPHA * preconditioned(rule, reference.released(rows), v, m)
        else:
            rows = preconditioned(rule, rows, v, m)
            theta = theta - ALPHA * reference.released(rows)
        points.append(theta)
    return np.array(points)


def ada_dps(rule, order, every=1):
    information = public_gradients(rule, beta=BETA, epsilon=EPSILON, every=every)
    return dp.AdaDPS(information, **arguments(), learning_rate=ALPHA, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["precondition_first", "noise_first"])
@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "adam"])
def test_adadps_follows_algorithm_1_with_public_gradients(rule, order):
    expected = public_reference(rule, order)
    assert_same(run_with_public(ada_dps(rule, order)), expected)
    other = {"precondition_first": "noise_first", "noise_first": "precondition_first"}[order]
    assert_other(public_reference(rule, other), expected)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("every", [2, 3])
def test_statistics_stay_between_refreshes(every):
    expected = public_reference("rmsprop", refreshed=lambda k: k % every == 0)
    assert_same(run_with_public(ada_dps("rmsprop", "precondition_first", every)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("every, of_step", [(2, 2), (3, 4)])
def test_statistics_are_refreshed_before_the_execution_in_which_they_are_due(every, of_step):
    expected = public_reference("rmsprop", refreshed=lambda k: k % of_step == 0)
    points = run_with_public(ada_dps("rmsprop", "precondition_first", every), steps_per_execution=2)
    assert_same(points[:3], expected[[1, 3, 5]])


@pytest.mark.slow_on(3)
def test_dp_r_pub_divides_noisy_gradients():
    information = public_gradients("rmsprop", beta=BETA, epsilon=EPSILON)
    optimizer = dp.optimizers.baselines.DPRPub(information, **arguments(), learning_rate=ALPHA)
    assert_same(run_with_public(optimizer), public_reference("rmsprop", "noise_first"))


@pytest.mark.slow
def test_dp_adam_pub_has_momentum_of_noisy_gradients_and_public_second_moments():
    def expected(momentum_first=True, beta_1=0.7):
        reference, theta, points = PublicReference(), START.astype(np.float64), []
        v, m = np.zeros(3), np.zeros(3)
        for k in range(STEPS):
            v, _ = moments("rmsprop")(v, 0.0, reference.public(theta, k))
            g, a = reference.released(reference.rows(theta, k)), np.sqrt(v + EPSILON)
            m = beta_1 * m + (1 - beta_1) * (g if momentum_first else g / a)
            theta = theta - ALPHA * (m / a if momentum_first else m)
            points.append(theta)
        return np.array(points)

    information = public_gradients("rmsprop", beta=BETA, epsilon=EPSILON)
    optimizer = dp.optimizers.baselines.DPAdamPub(
        information, **arguments(), learning_rate=ALPHA, beta_1=0.7
    )
    assert_same(run_with_public(optimizer), expected())
    assert_other(expected(momentum_first=False), expected())
    assert_other(expected(beta_1=0.8), expected())


@tf.keras.utils.register_keras_serializable("tests")
class BeyondConvex(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Values from 1.5 to below zero."""

    def __call__(self, step):
        return 1.5 - 0.5 * tf.cast(step, tf.float32)

    def get_config(self):
        return {}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "mixing, alpha",
    [
        (0.6, lambda t: 0.6),
        (1.0, lambda t: 1.0),
        (0.0, lambda t: 0.0),
        (dp.optimizers.baselines.CosineMixing(5), lambda t: np.cos(np.pi * min(t, 5) / 10)),
        (BeyondConvex(), lambda t: min(max(1.5 - 0.5 * t, 0), 1)),
    ],
)
def test_pda_dpmd_mixes_private_and_public_gradients(mixing, alpha):
    def expected(alpha):
        reference, theta, points = PublicReference(), START.astype(np.float64), []
        for t in range(STEPS):
            g = reference.released(reference.rows(theta, t))
            mixed = alpha(t) * g + (1 - alpha(t)) * reference.public(theta, t)
            theta = theta - 0.1 * mixed
            points.append(theta)
        return np.array(points)

    optimizer = dp.optimizers.baselines.PDADPMD(
        public_gradients("gradient"), **arguments(), learning_rate=0.1, mixing=mixing
    )
    assert_same(run_with_public(optimizer), expected(alpha))
    assert optimizer.ledger.segments == [(SIGMA, L, STEPS)]
    assert_other(expected(lambda t: 1 - alpha(t)), expected(alpha))


@pytest.mark.slow_on(2)
def test_both_minibatches_of_a_step_of_adadp_share_the_statistics():
    def expected(refreshed):
        reference, theta, points = PublicReference(), START.astype(np.float64), []
        v, batch, eta = np.zeros(3), 0, ALPHA
        for k in range(STEPS):
            if refreshed(k):
                v, _ = moments("rmsprop")(v, 0.0, reference.public(theta, batch))
                batch += 1
            g = reference.released(reference.rows(theta, k) / np.sqrt(v + EPSILON))
            if k % 2 == 0:
                euler = theta - eta * g
            theta = theta - eta / 2 * g
            if k % 2 == 1:
                error = np.linalg.norm((theta - euler) / np.maximum(1, np.abs(theta)))
                eta *= min(max(0.1 / error, 0.9), 1.1)
            points.append(theta)
        return np.array(points)

    information = public_gradients("rmsprop", beta=BETA, epsilon=EPSILON)
    optimizer = dp.ADADP(
        **arguments(side_information=information),
        learning_rate=ALPHA,
        tolerance=0.1,
        tolerance_decay=0,
        initial_factor=1.0,
    )
    in_pairs = expected(lambda k: k % 2 == 0)
    assert_same(run_with_public(optimizer), in_pairs)
    assert_other(expected(lambda k: True), in_pairs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reduction", ["none", "sum_over_batch_size"])
@pytest.mark.parametrize("rule", ["rmsprop", "adam"])
def test_adas_is_sgd_on_preconditioned_gradients(rule, reduction):
    reference, theta, expected = PublicReference(), START.astype(np.float64), []
    v, m = np.zeros(3), np.zeros(3)
    for k in range(STEPS):
        v, m = moments(rule)(v, m, reference.public(theta, k))
        theta = theta - ALPHA * preconditioned(rule, reference.rows(theta, k).mean(0), v, m)
        expected.append(theta)
    optimizer = dp.optimizers.baselines.AdaS(
        public_gradients(rule, beta=BETA, epsilon=EPSILON), ALPHA
    )
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    assert_same(run_with_public(optimizer, loss=loss), np.array(expected))
