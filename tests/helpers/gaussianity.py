"""Tests of a distribution, which accept the right scale and reject 2/3 and 3/2 of it."""

import itertools

import numpy as np
import scipy.special
import scipy.stats
import tensorflow as tf

RARE = 1e-6


def fits(sample, stddev):
    normalized = np.ravel(sample) / stddev
    return scipy.stats.kstest(normalized, scipy.special.ndtr).pvalue > RARE


def assert_gaussian(sample, stddev):
    # With 1,024 numbers 2/3 of the scale is accepted once in 700 times.
    assert np.size(sample) >= 2000
    assert fits(sample, stddev)
    assert not fits(sample, stddev * 2 / 3)
    assert not fits(sample, stddev * 3 / 2)


def assert_uncorrelated(a, b):
    """Neither the numbers nor their sizes go together."""
    for x, y in itertools.product([a, a**2], [b, b**2]):
        assert abs(np.corrcoef(x, y)[0, 1]) < 6 / np.sqrt(len(a))


def assert_independent(a, b):
    """Neither correlated nor parts of one stream, shifted."""
    a, b = np.ravel(a), np.ravel(b)
    assert_uncorrelated(a, b)
    assert len(np.intersect1d(a, b)) < 0.01 * len(a)


def drawn(noise, shapes, stddev=1.0):
    """The noise of one release."""
    return noise.add_to([tf.zeros(shape) for shape in shapes], stddev, sensitivity=1.0)
