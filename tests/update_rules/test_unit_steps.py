"""The formulas of scales, unit and step size."""

import pytest
import tensorflow as tf

from tf_adaptive_dp.update_rules import unit_steps


def float64(*values):
    return [tf.constant(value, tf.float64) for value in values]


def test_typical_gradients_get_a_norm_of_ten_of_which_vectors_have_a_tenth():
    (norms,) = float64([4.0, 3e-5, 7e3])
    parts = unit_steps.scales(norms, [2, 1, 4]) * norms
    assert float(tf.norm(parts)) == pytest.approx(10)
    assert (parts / parts[0]).numpy() == pytest.approx([1, 0.1, 1])


def test_without_any_norm_nothing_is_scaled():
    (norms,) = float64([0.0, 0.0])
    assert unit_steps.scales(norms, [2, 1]).numpy() == pytest.approx([1, 1])


def test_steps_fall_with_the_noise_and_their_number_and_grow_with_the_unit():
    for t, s, u in ((1, 0.1, 1.0), (90, 0.1, 1.0), (90, 0.01, 3.0)):
        noise, unit = float64(s, u)
        step = unit_steps.step_size(tf.constant(t), noise, unit, 0.3)
        assert float(step) == pytest.approx(u * min(0.3 / (10 * s * (t + 10) ** 0.5), 1))


@pytest.mark.parametrize(
    "median, spread, unit",
    [(2.3, 0.1, 1.0), (2.3, 4.0, 7.0), (0.02, 0.0, 0.03), (-0.02, 0.0, 0.03), (0.0, 0.0, 1.0)],
)
def test_the_unit_of_the_loss(median, spread, unit):
    assert float(unit_steps.unit_of_loss(*float64(median, spread))) == pytest.approx(unit)
