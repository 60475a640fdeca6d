"""The scales of rows: what noise is taken off, what floor it leaves, and what they are free of."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.update_rules import row_scales

RNG = np.random.default_rng(2)


def energies(mean, noise, plain_noise=0.0):
    mean, noise = tf.constant(mean, tf.float32), tf.constant(noise, tf.float32)
    return row_scales.energies(mean, noise, plain_noise * tf.ones_like(noise))


def scales(mean, noise):
    return row_scales.row_scales(energies(mean, noise)).numpy()


def test_without_noise_all_rows_get_the_same_energy_and_keep_the_sum():
    mean = RNG.normal(size=[7, 4]) * 10.0 ** np.arange(-3, 4)[:, None]
    after = scales(mean, np.zeros([7, 1])) * mean
    energy = np.mean(after**2, axis=1)
    np.testing.assert_allclose(energy, np.mean(mean**2), rtol=1e-4)


def test_the_unit_of_an_input_cancels():
    mean, units = RNG.normal(size=[5, 3]), 10.0 ** np.arange(-2, 3)[:, None]
    plain, rescaled = scales(mean, np.zeros([5, 1])), scales(mean * units, np.zeros([5, 1]))
    ratio = rescaled * units / plain  # A ∘ units is A, up to one factor
    np.testing.assert_allclose(ratio, np.full([5, 1], ratio[0, 0]), rtol=1e-4)


@pytest.mark.parametrize("outputs", [1, 2, 10])
@pytest.mark.parametrize("wrong", [2 / 3, 1.0, 3 / 2])
def test_the_noise_is_taken_off_and_no_other_amount(outputs, wrong):
    rows, signal, noise = 100_000, 6.0, 1.5
    mean = signal + wrong * noise * RNG.normal(size=[rows, outputs])
    found = float(tf.reduce_mean(energies(mean, np.full([rows, 1], noise**2))))
    assert (found == pytest.approx(signal**2, rel=0.01)) == (wrong == 1)


@pytest.mark.parametrize("outputs", [1, 2, 10, 1000])
def test_of_pure_noise_the_scales_stay_near_one(outputs):
    # Draws of its own: a bound on the largest of 1,000 fails for some, whichever test came before.
    mean = np.random.default_rng(outputs).normal(size=[1000, outputs])
    found = scales(mean, np.ones([1000, 1]))
    # v is the floor, or what the largest of 1,000 squares has above that.
    assert found.max() < 1.4 and found.min() > 0.3
    assert np.median(found) == found.max()  # most are at the floor


def test_rows_that_were_raised_before_are_raised_no_further_than_all_releases_allow():
    mean, noise = np.array([[5.0, 5.0], [0.0, 0.0]]), np.array([[1.0], [1e-4]])
    np.testing.assert_allclose(energies(mean, noise, 0.25)[1], 0.25)
    np.testing.assert_allclose(energies(mean, noise, 1e-6)[1], 1e-4)


def test_rows_below_the_noise_are_not_raised_above_it():
    mean = np.array([[100.0, 100.0], [1e-9, 0.0]])
    found = scales(mean, np.ones([2, 1]))
    np.testing.assert_allclose(found[1] / found[0], np.sqrt(1e4 - 1), rtol=1e-3)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-18, 1e15, np.inf, np.nan])
def test_scales_are_always_numbers(size):
    mean = np.full([4, 2], size)
    mean[2] = 0.0
    for noise in (0.0, 1e-36):
        found = scales(mean, np.full([4, 1], noise))
        assert np.isfinite(found).all() and (found > 0).all()
