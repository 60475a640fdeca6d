"""ADADP with correlated noise: its error holds the noise that stays in sums of steps, no more."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.accounting.noise_strategies import (
    BandedNoise,
    IndependentNoise,
    ToeplitzNoise,
    TreeNoise,
)

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
SIZE, ROWS = 100_000, 20
STRATEGIES = {"banded": BandedNoise(4), "own": ToeplitzNoise((3.0, 2.0, 2.0))}
each = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def adadp(noise, noise_multiplier=1.3, **kwargs):
    arguments = {"l2_norm_clip": 0.5, "expected_batch_size": ROWS, "tolerance_decay": 0.0}
    return dp.ADADP(noise_multiplier=noise_multiplier, noise=noise, **{**arguments, **kwargs})


def errors_of(optimizer, pairs, start=0.0, gradients=(0.0, 0.0)):
    """err of each pair of minibatches and its η; the gradients have these norms, before C.

    The noise moves the weights so little that they stay near `start`.
    """
    direction = np.zeros([ROWS, SIZE], "float32")
    direction[:, 0] = 1.0
    variable = tf.Variable(tf.fill([SIZE], start))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, variable)
        optimizer.minimize(loss, [variable], tape)

    found = []
    for _ in range(pairs):
        rate = float(optimizer.learning_rate.numpy())
        for gradient in gradients:
            step(gradient * direction)
        found.append((optimizer.last_error, rate))
    return found


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("start, relative", [(0.0, 1.0), (5.0, 0.2)])
@each
def test_the_error_of_noise_alone_is_that_of_sums(strategy, start, relative):
    """That of independent noise is twice as large, and that of the difference five times."""
    optimizer = adadp(strategy, tolerance=1e-3, learning_rate=1e-3, initial_factor=1.0)
    for error, rate in errors_of(optimizer, 12, start)[6:]:
        independent = rate / math.sqrt(2) * 1.3 * 0.5 / ROWS * math.sqrt(SIZE) * relative
        assert error == pytest.approx(strategy.drift_deviation() * independent, rel=0.15)


@pytest.mark.slow_on(2)
@each
def test_the_rate_is_that_of_independent_noise_with_as_much_of_it_in_sums(strategy):
    """And not that of 2/3 or 3/2 of this noise, to which the rate is in inverse proportion."""

    def settled(noise, sigma):
        return errors_of(adadp(noise, sigma, tolerance=0.01), 30)[-1][1]

    rate = settled(strategy, 1.3)
    of_sums = settled(IndependentNoise(), 1.3 * strategy.drift_deviation())
    assert rate == pytest.approx(of_sums, rel=0.15)
    assert not any(rate * other == pytest.approx(of_sums, rel=0.15) for other in (2 / 3, 3 / 2))


@pytest.mark.in_turns
@each
def test_a_difference_that_noise_does_not_explain_still_counts(strategy):
    """Gradients of norm C = 1 that turn around at each minibatch differ by 2."""
    optimizer = adadp(
        strategy, 0.01, l2_norm_clip=1.0, learning_rate=1e-3, tolerance=1.0, initial_factor=1.0
    )
    for error, rate in errors_of(optimizer, 8, gradients=(1.0, -1.0))[4:]:
        assert error == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("noise", [TreeNoise(8), ToeplitzNoise((2, 2, 1, 1))], ids=repr)
def test_noise_that_differs_from_step_to_step_is_refused(noise):
    with pytest.raises(ValueError, match="`noise` must be IndependentNoise.*Received: noise="):
        adadp(noise)


def test_a_configuration_keeps_the_noise():
    again = dp.ADADP.from_config(adadp(BandedNoise(4)).get_config())
    assert again.noise == BandedNoise(4)
