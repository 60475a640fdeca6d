"""Clipped gradients never exceed the bound, whatever their norms are."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_adaptive_dp.mechanism.clipping import clip_weights

every_method = pytest.mark.parametrize("method", ["flat", "automatic"])
# Squared norms; below 2⁻¹²⁶ float32 has no normal numbers, which hardware may take for 0.
squares = st.just(0.0) | st.floats(2.0**-120, 2.0**120)
BAD = [np.nan, np.inf, 1e39]


def weights(squared_norms, clip, **kwargs):
    with np.errstate(over="ignore"):
        squared_norms = np.asarray(squared_norms, "float64").astype("float32")
    return clip_weights(squared_norms, clip, **kwargs).numpy()


@pytest.mark.parametrize("clip", [0.01, 1.0, 30.0])
def test_flat_weights_shorten_what_is_longer_than_the_bound(clip):
    norms = np.array([0.0, 1e-6, 0.009, 0.5, 1.0, 7.0, 31.0, 1e4])
    expected = np.minimum(1, clip / np.maximum(norms, 1e-30))
    np.testing.assert_allclose(weights(norms**2, clip), expected, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.01, 1.0])
@pytest.mark.parametrize("clip", [0.01, 1.0, 30.0])
def test_automatic_weights_normalise(clip, gamma):
    norms = np.array([0.0, 1e-6, 0.009, 0.5, 1.0, 7.0, 31.0, 1e4])
    actual = weights(norms**2, clip, method="automatic", gamma=gamma)
    np.testing.assert_allclose(actual, clip / (norms + gamma), rtol=1e-6)


def test_automatic_clipping_adds_a_hundredth_unless_said_otherwise():
    np.testing.assert_allclose(weights([1.0], 1.0, method="automatic"), [1 / 1.01])


@every_method
@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e3])
def test_the_bound_holds_for_norms_of_all_magnitudes(clip, method):
    norms = 10 ** np.random.default_rng(0).uniform(-20, 20, 20_000)
    clipped = norms * weights(norms**2, clip, method=method)
    assert clipped.max() <= clip * (1 + 1e-6)
    # Norms whose square is too large for float32 count as zero; all below it reach the bound.
    assert (clipped[norms > 1.9e19] == 0).all()
    long = (norms > 100 * clip) & (norms > 1000) & (norms < 1.8e19)
    np.testing.assert_allclose(clipped[long], clip, rtol=1e-4)


@every_method
@pytest.mark.parametrize("bad", BAD)
def test_norms_that_are_not_finite_get_weight_zero(bad, method):
    actual = weights([4.0, bad, 4.0], 1.0, method=method)
    assert actual[1] == 0 and actual[0] == actual[2] > 0


@every_method
@hypothesis.given(
    squared_norms=st.lists(squares | st.sampled_from(BAD), min_size=1, max_size=8),
    clip=st.floats(1e-9, 1e9),
)
def test_each_weight_bounds_its_own_gradient_and_ignores_the_others(squared_norms, clip, method):
    together = weights(squared_norms, clip, method=method)
    alone = [weights([s], clip, method=method)[0] for s in squared_norms]
    np.testing.assert_array_equal(together, alone)
    assert np.isfinite(together).all() and (together >= 0).all()
    finite = np.array(squared_norms) < 3e38
    assert (together[~finite] == 0).all()
    lengths = together[finite] * np.sqrt(np.array(squared_norms)[finite])
    assert (lengths <= clip * (1 + 1e-6)).all()
    if method == "flat":
        assert (together <= 1).all()


@every_method
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_compiled_weights_are_those_of_eager_execution(mode, method):
    squared_norms = [0.0, 1e-12, 0.25, 9.0, 1e12, np.nan, np.inf]
    compiled = tf.function(lambda s: clip_weights(s, 0.7, method), jit_compile=mode == "xla")
    actual = compiled(tf.constant(squared_norms))
    np.testing.assert_allclose(actual, weights(squared_norms, 0.7, method=method), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_weights_are_float32_whatever_the_norms_are(dtype):
    actual = clip_weights(tf.constant([4.0], dtype), tf.constant(1.0, tf.float64))
    assert actual.dtype == tf.float32
    np.testing.assert_allclose(actual, [0.5])


def test_a_batch_without_examples_has_no_weights():
    assert weights([], 1.0).shape == (0,)
