"""The questions to a gradient source, and the right answers from true gradients."""

import functools

import numpy as np

from tests.helpers import zoo


def squared_norms(rows):
    """[B], from gradients [B, ...], one array per variable."""
    return sum((r**2).sum(axis=tuple(range(1, r.ndim))) for r in rows)


@functools.cache
def figures(name):
    """Scale, shift and weights for the model of that name, the same each time."""
    rows, generator = zoo.rows(name), np.random.default_rng(4)
    scale = [generator.uniform(0.3, 3.0, r.shape[1:]).astype("float32") for r in rows]
    shift = [generator.normal(0.0, 0.3, r.shape[1:]).astype("float32") for r in rows]
    weights = generator.uniform(0.1, 2.0, len(rows[0])).astype("float32")
    weights[1] = 0.0
    return scale, shift, weights


def answers(source, scale, shift, weights):
    """What a source says."""
    return {
        "plain": source.squared_norms(),
        "scaled": source.squared_norms(scale=scale),
        "shifted": source.squared_norms(shift=shift),
        "both": source.squared_norms(scale, shift),
        "sums": source.weighted_sum(weights),
    }


def check(actual, rows, scale, shift, weights, tolerance):
    """Compares answers with those of true gradients."""
    expected = {
        "plain": squared_norms(rows),
        "scaled": squared_norms([r * a for r, a in zip(rows, scale)]),
        "shifted": squared_norms([r + b for r, b in zip(rows, shift)]),
        "both": squared_norms([(r + b) * a for r, a, b in zip(rows, scale, shift)]),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=tolerance, err_msg=key)
    size = max((np.abs(r).max() for r in rows if r.size), default=1.0)
    for gradient, r in zip(actual["sums"], rows):
        total = np.tensordot(weights.astype("float64"), r, axes=1)
        np.testing.assert_allclose(gradient, total, rtol=tolerance, atol=tolerance * size)
