"""The recurrences of AdaDPS against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.update_rules.second_moment import RULES, next_second_moment, preconditioner

NEXT = {
    "rmsprop": lambda v, g, beta: beta * v + (1 - beta) * g**2,
    "adam": lambda v, g, beta: beta * v + (1 - beta) * g**2,
    "adagrad": lambda v, g, beta: v + g**2,
}


def test_the_list_of_rules_is_complete():
    assert set(RULES) == set(NEXT)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("rule", RULES)
def test_recurrences_over_many_steps(rule, beta):
    generator = np.random.default_rng(0)
    actual, expected = tf.zeros([3, 2]), np.zeros([3, 2])
    for _ in range(20):
        gradient = generator.normal(0, 2, [3, 2])
        actual = next_second_moment(rule, actual, tf.constant(gradient, tf.float32), beta)
        expected = NEXT[rule](expected, gradient, beta)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-10, 1e-8, 0.5])
def test_the_preconditioner_has_epsilon_inside_the_root(epsilon):
    moment = np.array([0.0, 1e-12, 1e-6, 0.25, 100.0])
    actual = preconditioner(tf.constant(moment, tf.float32), epsilon)
    np.testing.assert_allclose(actual, np.sqrt(moment + epsilon), rtol=1e-6)
    assert (actual.numpy() > 0).all()
