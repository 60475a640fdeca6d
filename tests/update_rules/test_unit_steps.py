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
    [(2.3, 0.1, 1.0), (2.3, 4.0, 8.0), (0.02, 0.0, 0.03), (-0.02, 0.0, 0.03), (0.0, 0.0, 1.0)],
)
def test_the_unit_of_the_loss(median, spread, unit):
    assert float(unit_steps.unit_of_loss(*float64(median, spread), 0.3)) == pytest.approx(unit)


def test_the_spread_of_losses_counts_alike_at_any_depth():
    median, spread = float64(2.3, 9.0)
    for kappa in (unit_steps.default_kappa([[5, 5]] * depth) for depth in (1, 2, 3, 4)):
        unit = unit_steps.unit_of_loss(median, spread, kappa)
        assert kappa * float(unit) == pytest.approx(0.6 * 9)


def test_deeper_models_get_less_noise_and_vectors_do_not_count():
    linear = unit_steps.default_kappa([[4, 2], [2]])
    mlp = unit_steps.default_kappa([[3, 3, 1, 2], [2], [8, 2], [2], [2]])
    assert (linear, mlp) == (pytest.approx(1.4), pytest.approx(1.4 / 2**1.25))
    assert unit_steps.default_kappa([[5]]) == linear
    assert unit_steps.default_kappa([[2, 2]] * 50) == unit_steps.default_kappa([[2, 2]] * 4)


def test_models_of_many_parameters_get_less_noise_down_to_a_bound():
    assert unit_steps.default_kappa([[784, 10], [10]]) == pytest.approx(50 / 7850**0.5)
    assert unit_steps.default_kappa([[10_000, 50]]) == 0.35
    assert unit_steps.default_kappa([[1000, 1000]] * 4) == pytest.approx(1.4 / 4**1.25)
