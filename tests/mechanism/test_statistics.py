"""The figures for monitoring agree with NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.mechanism.statistics import GradientStatistics


def summary(norms, clip=1.0):
    statistics = GradientStatistics()
    statistics.record(tf.constant(np.square(norms), tf.float32), clip)
    return statistics.summary()


@pytest.mark.in_turns
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_quantiles_and_the_clipped_share_over_many_batches(mode, scale):
    statistics = GradientStatistics()
    record = statistics.record
    if mode != "eager":
        record = tf.function(record, jit_compile=mode == "xla")
    norms = scale * np.random.default_rng(0).lognormal(size=[20, 50])
    for batch in norms:
        record(tf.constant(batch**2, tf.float32), tf.constant(scale, tf.float64))
    actual = statistics.summary()
    assert actual.num_examples == 1000
    assert actual.clipped_share == np.mean(norms > scale)
    assert actual.num_non_finite == 0
    for q, value in actual.norm_quantiles.items():
        assert value == pytest.approx(np.quantile(norms, q), rel=0.06)
    assert list(actual.norm_quantiles) == [0.1, 0.5, 0.9]


@pytest.mark.parametrize("norm", [2e-6, 0.01, 0.99, 1.0, 7.3, 9e5])
def test_a_quantile_is_off_by_four_percent_at_most(norm):
    assert summary([norm]).norm_quantiles[0.5] == pytest.approx(norm, rel=0.04)


def test_padding_does_not_count():
    actual = summary([0.0, 3.0, 0.0, 0.5, 0.0])
    assert actual.num_examples == 2
    assert actual.clipped_share == 0.5


def test_gradients_that_are_not_finite_are_counted_apart():
    actual = summary([np.nan, 3.0, np.inf, 0.5, -np.inf])
    assert (actual.num_examples, actual.num_non_finite) == (2, 3)
    assert actual.clipped_share == 0.5
    assert actual.norm_quantiles[0.9] == pytest.approx(3.0, rel=0.04)


def test_a_norm_equal_to_the_bound_is_not_clipped():
    assert summary([2.0, 4.0], clip=2.0).clipped_share == 0.5


@pytest.mark.parametrize("norm, edge", [(1e-9, 1e-6), (1e9, 1e6)])
def test_norms_beyond_the_histogram_fall_into_its_last_bins(norm, edge):
    actual = summary([norm])
    assert actual.num_examples == 1
    assert actual.norm_quantiles[0.5] == pytest.approx(edge, rel=0.04)


def test_nothing_recorded_gives_zeros():
    actual = GradientStatistics().summary()
    assert actual == (0, 0.0, {0.1: 0.0, 0.5: 0.0, 0.9: 0.0}, 0)


def test_reset_starts_anew_and_only_when_asked():
    statistics = GradientStatistics()
    statistics.record(tf.constant([4.0, np.nan]), 1.0)
    assert statistics.summary() == statistics.summary(reset=True)
    assert statistics.summary() == GradientStatistics().summary()
    statistics.record(tf.constant([0.25]), 1.0)
    assert statistics.summary()[:2] == (1, 0.0)
