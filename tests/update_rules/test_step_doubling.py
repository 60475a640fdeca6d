"""The pure functions of ADADP against NumPy, and at the ends of what they can be given."""

import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_adaptive_dp.update_rules.step_doubling import (
    StepDoublingSettings,
    adapted_learning_rate,
    decayed_learning_rate,
    decayed_tolerance,
    default_tolerance,
    error_estimate,
    error_of_sums,
    factor_bounds,
    next_tolerance,
    share_of_step,
    suggest_tolerance,
)

NAN, INF = float("nan"), float("inf")
SMALLEST_NORMAL, LARGEST = np.finfo("float32").tiny, np.finfo("float32").max


def test_the_error_is_relative_above_1_and_absolute_below_over_all_variables():
    generator = np.random.default_rng(0)
    tilde = [generator.normal(0, 3, s) for s in [(4, 3), (5,), ()]]
    hat = [generator.normal(0, 3, t.shape) for t in tilde]
    expected = np.sqrt(
        sum((((t - h) / np.maximum(1, np.abs(t))) ** 2).sum() for t, h in zip(tilde, hat))
    )
    actual = error_estimate([tf.constant(t) for t in tilde], [tf.constant(h) for h in hat])
    assert actual.dtype == tf.float32
    assert float(actual) == pytest.approx(expected, rel=1e-5)


ERRORS = {
    "equal points": ([5.0, -7.0], [5.0, -7.0], 0.0),
    "relative to the half-step point": ([10.0], [0.0], 1.0),
    "not to the Euler point": ([0.0], [10.0], 10.0),
    "negative": ([-4.0], [0.0], 1.0),
    "two entries": ([0.0, 0.0], [3.0, 4.0], 5.0),
    "large numbers": ([1e30], [0.0], 1.0),
    "the largest numbers count as 2¹²⁰": ([3e38], [0.0], 3e38 / 2**120),
    "an infinite half-step point": ([INF], [0.0], INF),
    "an infinite Euler point": ([0.0], [INF], INF),
    "NaN": ([NAN], [0.0], NAN),
}


@pytest.mark.parametrize("others", [0, 2**15], ids=["small", "large"])
@pytest.mark.parametrize("tilde, hat, expected", ERRORS.values(), ids=ERRORS)
def test_errors_of_simple_points(tilde, hat, expected, others):
    """Also as parts of a large variable, where the division is left out if no weight exceeds 1."""
    tilde, hat = (tf.constant(np.pad(np.float32(p), [0, others])) for p in (tilde, hat))
    # TensorFlow's reciprocals of large numbers are off by up to .025%.
    np.testing.assert_allclose(error_estimate([tilde], [hat]).numpy(), expected, rtol=3e-4)


@pytest.mark.parametrize("largest", [0.999, 1.0, 1.001, -1.001, 3.0, -3.0])
def test_a_large_variable_has_the_error_of_its_parts(largest):
    generator = np.random.default_rng(0)
    tilde = np.float32(generator.uniform(-0.99, 0.99, [200, 200]))
    tilde[3, 5] = largest
    hat = np.float32(tilde + generator.normal(0, 0.01, tilde.shape))
    hat[3, 5] = largest - 4
    whole = error_estimate([tf.constant(tilde)], [tf.constant(hat)])
    parts = error_estimate(*([tf.constant(row) for row in point] for point in (tilde, hat)))
    assert float(whole) == pytest.approx(float(parts), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_points_of_other_types_are_compared_in_float32(dtype):
    actual = error_estimate([tf.constant([3.0, 0.5], dtype)], [tf.constant([0.0, 0.5], dtype)])
    assert actual.dtype == tf.float32 and float(actual) == 1.0


@pytest.mark.parametrize(
    "error, expected",
    [
        (1.9, 0.4),  # nothing but noise
        (1.0, 0.4),  # less than its expectation
        (5.0, math.hypot(math.sqrt(25 - 1.9**2), 0.4)),
        (1e6, 1e6),
        (INF, INF),
        (NAN, NAN),
    ],
)
def test_the_error_of_sums_is_what_noise_does_not_explain_and_what_stays_of_it(error, expected):
    actual = error_of_sums(tf.constant(error), tf.constant(2.0), in_difference=0.95, in_sums=0.2)
    assert actual.dtype == tf.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@hypothesis.given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_independent_noise_needs_no_correction(error, noise):
    actual = error_of_sums(tf.constant(error), tf.constant(noise), in_difference=1.0, in_sums=1.0)
    np.testing.assert_allclose(actual, max(error, noise), rtol=1e-5, atol=1e-18)


@pytest.mark.parametrize("error", [1e-6, 0.5, 0.92, 1.0, 1.07, 2.0, 1e6])
@pytest.mark.parametrize("tolerance", [0.3, 1.0, 1.05])
@pytest.mark.parametrize("bounds", [(0.9, 1.1), (0.5, 2.0), (1.0, 1.0)])
def test_the_learning_rate_follows_tolerance_over_error_within_bounds(error, tolerance, bounds):
    actual = adapted_learning_rate(0.2, error, tolerance, *bounds)
    assert actual.dtype == tf.float32
    assert float(actual) == pytest.approx(0.2 * np.clip(tolerance / error, *bounds), rel=1e-6)


def test_the_bounds_are_those_of_the_paper_unless_said_otherwise():
    assert float(adapted_learning_rate(1.0, 100.0, 1.0)) == pytest.approx(0.9)
    assert float(adapted_learning_rate(1.0, 0.01, 1.0)) == pytest.approx(1.1)


@pytest.mark.parametrize("error, factor", [(0.0, 1.1), (INF, 0.9), (NAN, 0.9)])
@pytest.mark.parametrize("compiled", [False, True])
def test_errors_without_a_finite_quotient(error, factor, compiled):
    function = tf.function(adapted_learning_rate) if compiled else adapted_learning_rate
    actual = function(tf.constant(0.2), tf.constant(error), 0.5)
    assert float(actual) == pytest.approx(0.2 * factor)


@pytest.mark.parametrize("tolerance", [0.3, 1.0])
@pytest.mark.parametrize("error", [0.0, 1e-6, 0.3, 0.92, 1.0, 7.0, 1e6])
def test_the_share_of_a_step_brings_its_error_down_to_the_tolerance(error, tolerance):
    share = share_of_step(tf.constant(error), tolerance)
    assert share.dtype == tf.float32
    assert float(share) * error == pytest.approx(min(error, tolerance), rel=1e-6)
    assert (float(share) == 1.0) == (error <= tolerance)


@pytest.mark.parametrize("error", [INF, NAN])
def test_nothing_is_left_of_a_step_without_a_finite_error(error):
    assert float(share_of_step(tf.constant(error), 0.5)) == 0.0


@hypothesis.given(
    learning_rate=st.floats(min_value=0),
    error=st.floats(min_value=0) | st.just(NAN),
    tolerance=st.floats(1e-30, 1e30),
)
def test_the_learning_rate_always_is_a_normal_number(learning_rate, error, tolerance):
    with np.errstate(over="ignore"):
        learning_rate, error = np.float32(learning_rate), np.float32(error)
    actual = adapted_learning_rate(learning_rate, error, tolerance).numpy()
    assert SMALLEST_NORMAL <= actual <= LARGEST


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("error, limit", [(INF, 1.2e-38), (0.0, 3.4e38)])
def test_the_learning_rate_stops_at_the_ends_and_comes_back(error, limit):
    rate = tf.constant(1.0)
    step = tf.function(adapted_learning_rate)
    for _ in range(1000):
        rate = step(rate, tf.constant(error), 1.0)
    assert float(rate) == pytest.approx(limit, rel=1e-6)
    back = step(rate, tf.constant(0.0 if error else INF), 1.0)
    assert float(back) == pytest.approx(limit * (0.9 if error == 0 else 1.1), rel=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1, 2.5, 1e6])
def test_decay_step_by_step_equals_the_closed_form(decay):
    rate = tf.constant(0.3)
    for k in range(50):
        rate = decayed_learning_rate(rate, tf.constant(k), tf.constant(k + 1), decay)
        assert float(rate) == pytest.approx(0.3 / (1 + decay * (k + 1)), rel=1e-4)


def test_decay_over_several_epochs_at_once_or_none():
    assert float(decayed_learning_rate(0.3, 2, 7, 0.1)) == pytest.approx(0.3 * 1.2 / 1.7)
    assert float(decayed_learning_rate(0.3, 4, 4, 0.1)) == pytest.approx(0.3)
    assert decayed_learning_rate(0.3, tf.constant(1, tf.int64), 2, 0.1).dtype == tf.float32


@pytest.mark.parametrize("num_steps", [1, 7, 100_000])
@pytest.mark.parametrize("num_parameters", [1, 269_322, 10**9])
def test_the_suggested_tolerance_keeps_the_noise_of_a_run_at_1(num_steps, num_parameters):
    tolerance = suggest_tolerance(num_steps, num_parameters)
    assert isinstance(tolerance, float)
    assert np.sqrt(2 * num_steps) * tolerance / np.sqrt(num_parameters) == pytest.approx(1.0)
    smaller = suggest_tolerance(num_steps, num_parameters, noise=0.05)
    assert smaller == pytest.approx(0.05 * tolerance)


@pytest.mark.parametrize(
    "size, expected",
    [(1, 0.02), (100, 0.2), (2_500, 1.0), (268_800, 1.0), (1_080_000, 2.0), (27_000_000, 10.0)],
)
def test_the_default_tolerance_is_1_but_for_few_and_for_many_parameters(size, expected):
    assert float(default_tolerance(size)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "size, sigma, expected",
    [
        (1, 8.0, 0.02),
        (100, 1.0, 0.2),
        (2_500, 0.5, 0.25),
        (10_000, 2.0, 0.5),
        (10_000, 9.0, 1.0),
        (20_000, 0.5, 0.2721655),
        (20_000, 4.5, 0.75),
        (30_000, 0.5, 0.5625),
        (40_000, 0.5, 1.0),
        (270_000, 1.0, 1.0),
        (1_080_000, 8.0, 2.0),
    ],
)
def test_the_default_tolerance_for_normalized_inputs(size, sigma, expected):
    found = default_tolerance(size, True, tf.constant(sigma))
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "size, num_steps, factor",
    [
        (39_999, 100, 1.0),
        (40_000, 100, 2.6321480),
        (270_000, 300, 2.0),
        (1_080_000, 700, 1.6182134),
        (270_000, 4_800, 1.0),
        (270_000, 10**6, 1.0),
    ],
)
def test_the_default_tolerance_of_large_networks_is_larger_in_short_runs(size, num_steps, factor):
    of_long_runs = float(default_tolerance(size, True, 2.0))
    of_run = float(default_tolerance(size, True, 2.0, num_steps))
    assert of_run / of_long_runs == pytest.approx(factor, rel=1e-6)
    assert float(default_tolerance(size, False, 2.0, num_steps)) == float(default_tolerance(size))


def test_the_decayed_tolerance_lets_noise_grow_like_a_logarithm():
    steps = np.arange(200_000)
    tolerances = decayed_tolerance(2.0, tf.constant(steps), 0.01).numpy()
    assert tolerances[0] == 2.0
    assert tolerances[300] == pytest.approx(1.0, rel=1e-6)
    noise = np.sqrt(np.sum(tolerances.astype(float) ** 2))
    assert noise == pytest.approx(2.0 * np.sqrt(np.log(1 + 0.01 * len(steps)) / 0.01), rel=1e-3)
    np.testing.assert_array_equal(decayed_tolerance(2.0, tf.constant(steps), 0.0), 2.0)


BAD = {
    "no steps": ((0, 5), ValueError, "`num_steps` must be at least 1. Received: num_steps=0"),
    "no parameters": ((5, 0), ValueError, "`num_parameters` must be at least 1. Received: .*=0"),
    "negative": ((-3, 5), ValueError, "`num_steps` must be at least 1. Received: num_steps=-3"),
    "a fraction": ((5, 2.5), TypeError, "`num_parameters` must be a whole number. .*=2.5"),
    "a bool": ((True, 5), TypeError, "`num_steps` must be a whole number. .*=True"),
    "no noise": ((5, 5, 0.0), ValueError, "`noise` must be .*greater than 0. Received: noise=0"),
    "a string": (("5", 5), TypeError, "`num_steps` must be a whole number. .*='5'"),
}


@pytest.mark.parametrize("arguments, error, message", BAD.values(), ids=BAD)
def test_a_tolerance_for_nothing_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        suggest_tolerance(*arguments)


@pytest.mark.parametrize("judged, accepted", [(1, 0), (1, 1), (7, 7), (7, 0)])
@pytest.mark.parametrize("initial_factor, expected", [(2.0, (0.5, 2.0)), (1.05, (0.9, 1.1))])
def test_a_search_widens_the_bounds_and_never_narrows_them(
    judged, accepted, initial_factor, expected
):
    found = factor_bounds(judged, accepted, 0.9, 1.1, initial_factor)
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("judged, accepted", [(2, 1), (9, 1), (9, 8)])
def test_the_search_ends_once_errors_were_on_both_sides(judged, accepted):
    np.testing.assert_allclose(factor_bounds(judged, accepted, 0.8, 1.3, 2.0), [0.8, 1.3])


@pytest.mark.parametrize("decay", [0.0, 0.005, 1.0, 30.0])
def test_the_tolerance_falls_alike_from_its_start_and_from_the_last_one(decay):
    tolerance = tf.constant(0.3)
    for step in range(40):
        np.testing.assert_allclose(tolerance, decayed_tolerance(0.3, step, decay), rtol=1e-5)
        tolerance = next_tolerance(tolerance, 0.3, decay)
    # Both forms decay, if they do, by far more than the rounding that is allowed above.
    assert float(tolerance) == pytest.approx(0.3 / (1 + 40 * decay) ** 0.5, rel=1e-5)


SETTINGS = {
    "tolerance": 0.3,
    "tolerance_decay": 1,
    "alpha_min": 0.9,
    "alpha_max": 1.1,
    "keep": "euler",
    "discard": False,
}


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"tolerance": 0.0}, ValueError),
        ({"tolerance_decay": -0.1}, ValueError),
        ({"alpha_min": 0.0}, ValueError),
        ({"alpha_min": 1.01}, ValueError),
        ({"alpha_max": 0.99}, ValueError),
        ({"keep": "start"}, ValueError),
        ({"discard": 1}, TypeError),
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong, error):
    (name,) = wrong
    with pytest.raises(error, match=f"`{name}`.*Received: {name}="):
        StepDoublingSettings(**{**SETTINGS, **wrong})


def test_settings_are_plain_numbers_and_a_tolerance_may_wait_for_the_model():
    settings = StepDoublingSettings(**{**SETTINGS, "alpha_min": 1, "tolerance": None})
    assert settings.tolerance is None
    assert all(isinstance(x, float) for x in (settings.alpha_min, settings.tolerance_decay))
