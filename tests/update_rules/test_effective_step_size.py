"""The pure functions of DPAdamWOSM against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.update_rules.effective_step_size import (
    bias_correction,
    effective_step_size,
    first_moment,
)


@pytest.mark.parametrize("learning_rate", [1e-30, 0.001, 5.0])
@pytest.mark.parametrize("noise_stddev", [0.0, 1e-9, 0.008, 100.0])
@pytest.mark.parametrize("epsilon", [1e-8, 0.5])
def test_the_step_size_is_the_limit_of_adam(learning_rate, noise_stddev, epsilon):
    actual = effective_step_size(learning_rate, tf.constant(noise_stddev, tf.float64), epsilon)
    assert actual.dtype == tf.float32
    assert float(actual) == pytest.approx(learning_rate / (noise_stddev + epsilon), rel=1e-5)


def test_the_step_size_is_where_adam_under_noise_alone_arrives():
    # Theorem 3 in numbers: the root of Adam's corrected second moment of noise is its deviation.
    generator = np.random.default_rng(0)
    stddev, second_moment = 0.008, 0.0
    for _ in range(20_000):
        second_moment = 0.999 * second_moment + 0.001 * generator.normal(0, stddev) ** 2
    adam = 0.001 / (np.sqrt(second_moment) + 1e-8)
    assert float(effective_step_size(0.001, stddev, 1e-8)) == pytest.approx(adam, rel=0.05)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_the_first_moment_is_an_exponential_average(beta):
    moment, gradient = np.array([1.0, -2.0, 0.0]), np.array([3.0, 5.0, -1.0])
    actual = first_moment(tf.constant(moment, tf.float32), tf.constant(gradient, tf.float32), beta)
    np.testing.assert_allclose(actual, beta * moment + (1 - beta) * gradient, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("num_steps", [1, 2, 10, 1_000, 10**7])
def test_the_correction_undoes_the_start_at_zero(beta, num_steps):
    actual = bias_correction(beta, tf.constant(num_steps, tf.int64))
    assert actual.dtype == tf.float32
    assert float(actual) == pytest.approx(1 - beta**num_steps, rel=1e-4)


def test_a_corrected_moment_of_a_constant_gradient_is_that_gradient():
    moment = tf.zeros([2])
    for t in range(1, 20):
        moment = first_moment(moment, tf.constant([3.0, -4.0]), 0.9)
        np.testing.assert_allclose(moment / bias_correction(0.9, t), [3.0, -4.0], rtol=1e-5)
