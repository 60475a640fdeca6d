"""Models of the kinds that Keras's own examples show train privately with one changed argument.

The optimizer is the one argument. A step must be that of the clipped gradients of batches of one,
which Keras's own SGD takes, and it must not need a Jacobian.
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import kinds_of_models
from tests.helpers.kinds_of_models import KINDS, B

CLIP = 0.05


def rows(data, which):
    return tf.nest.map_structure(lambda array: array[which], data)


def clipped_by_hand(model, x, y):
    """The mean of the clipped gradients that SGD of rate 1 steps along in batches of one."""
    start, total = model.get_weights(), 0.0
    for i in range(B):
        model.set_weights(start)
        model.train_on_batch(rows(x, slice(i, i + 1)), rows(y, slice(i, i + 1)))
        gradient = [a - b for a, b in zip(start, model.get_weights())]
        norm = np.sqrt(sum(np.sum(g.astype("float64") ** 2) for g in gradient))
        step = np.concatenate([np.ravel(g) for g in gradient]) * min(1, CLIP / norm)
        total = total + step / B
    return total


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", KINDS)
def test_the_optimizer_is_the_only_change(make):
    tf.keras.utils.set_random_seed(1)
    model, arguments, x, y = make()
    start = model.get_weights()
    model.compile(tf.keras.optimizers.SGD(1.0), **arguments)
    expected = clipped_by_hand(model, x, y)
    model.set_weights(start)
    optimizer = dp.DPSGD(CLIP, 0.0, learning_rate=1.0, gradients="traced")
    model.compile(optimizer, **arguments)
    model.fit(x, y, batch_size=B, verbose=0)
    moved = np.concatenate([np.ravel(a - b) for a, b in zip(start, model.get_weights())])
    np.testing.assert_allclose(moved, expected, atol=3e-6)
    assert np.linalg.norm(expected) > CLIP / 10
    assert optimizer.ledger.segments == [(0.0, float(B), 1)]


@pytest.mark.slow
def test_a_variational_autoencoder_draws_in_each_step(monkeypatch):
    monkeypatch.setattr(kinds_of_models.VariationalAutoencoder, "spread", 1.0)
    model, arguments, x, y = kinds_of_models.variational_autoencoder()
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1, gradients="traced"), **arguments)
    model.fit(x, y, batch_size=B, epochs=2, verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, float(B), 2)]
    assert all(np.isfinite(w).all() for w in model.get_weights())
