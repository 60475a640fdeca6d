"""Whether batches hold more examples than the expected batch size that was declared."""

from __future__ import annotations

import math
from typing import Any, Callable

import tensorflow as tf

# The largest log probability at which a batch counts as too large for the declared expected size.
LOG_FALSE_ALARM = math.log(1e-12)


def log_tail(size: Any, expected: Any, log: Callable) -> Any:
    """Chernoff's bound on log P[a Poisson batch has at least `size` examples], above the mean."""
    return size - expected - size * log(size / expected)


class SizesSeen:
    """Compares batches with the size that was declared, one by one and all together.

    Their sums are private, so they are neither saved nor restored.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            # Examples that were expected, and seen, in all batches of this process.
            self._totals = tf.Variable(tf.zeros([2], tf.float64), trainable=False)

    def add(self, seen: tf.Tensor, expected: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds a batch.

        Guarantee: where the expected sizes are right, Poisson batches are doubted with probability
        at most 2e-12 per batch.

        Args:
          seen: float64 scalar, positive, the number of its examples.
          expected: float64 scalar, L.

        Returns:
          Whether it, or all batches together, held too many examples, a bool scalar; and their
          mean, if L was the same for all.
        """
        now = tf.stack([expected, seen])
        totals = self._totals.assign_add(now, read_value=True)
        expectations, sizes = tf.unstack(tf.stack([now, totals]), axis=1)
        improbable = log_tail(sizes, expectations, tf.math.log) < LOG_FALSE_ALARM
        too_many = tf.reduce_any((sizes > expectations) & improbable)
        return too_many, expected * totals[1] / totals[0]
