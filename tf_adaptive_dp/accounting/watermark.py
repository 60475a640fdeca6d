"""What shows that a ledger was set back, so that it lacks releases that its process recorded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError

# What an optimizer that was set back has to be told; see `Ledger.require_nothing_lost`.
_SET_BACK = (
    "The ledger was set back: it lacks {lost} releases that this process recorded, because an "
    "earlier state was loaded or assigned. What was released stays released, so epsilon would be "
    "too small. If all releases were about the same examples, call `optimizer.ledger.restore("
    "[({noise!r}, {size!r}, {lost}), *optimizer.ledger.segments], [(), "
    "*optimizer.ledger.checks])`. If the missing ones were about other examples, call "
    "`optimizer.ledger.restore(optimizer.ledger.segments, optimizer.ledger.checks)`. To load the "
    "weights of a model alone, leave the optimizer's state out; a `ReleaseLog` before other "
    "callbacks restores the ledger automatically; and `tuning.HonestTuner` accounts for trials of "
    "several settings. Received: {left} releases in the ledger, {lost} fewer than there were"
)


class Watermark(NamedTuple):
    """What a process remembers of its ledger, whatever is loaded or assigned; it is not saved.

    Attributes:
      following: the number of releases that the ledger had after it recorded the last one.
      lost: how many were missing when later ones were recorded.
      least_noise: the smallest noise multiplier that the ledger held.
      largest_size: the largest batch size that it held.
      recorded: how many releases it recorded.
    """

    following: float
    lost: float
    least_noise: float
    largest_size: float
    recorded: float

    def num_lost(self, num_releases: int) -> int:
        """How many releases are missing from a ledger that has so many."""
        return int(self.lost + max(self.following - num_releases, 0))

    def require_nothing_lost(self, num_releases: int) -> None:
        """Raises NotPrivateError if releases are missing from a ledger that has so many."""
        lost = self.num_lost(num_releases)
        if lost:
            noise, size = self.least_noise, self.largest_size
            raise NotPrivateError(
                _SET_BACK.format(lost=lost, noise=noise, size=size, left=num_releases)
            )


AT_THE_START = Watermark(0.0, 0.0, float("inf"), 0.0, 0.0)


def watermark_after(watermark: tf.Tensor, counts: tf.Tensor, parameters: tf.Tensor) -> tf.Tensor:
    """The `Watermark` after one more release.

    Args:
      watermark: float64 vector, the one before.
      counts: [MAX_SEGMENTS], before the release.
      parameters: [MAX_SEGMENTS, 2], after it; zeros where there are no releases.
    """
    following, lost, least_noise, largest_size, recorded = tf.unstack(watermark)
    before = tf.cast(tf.reduce_sum(counts), tf.float64)
    noise, sizes = tf.unstack(parameters, axis=1)
    noise = tf.where(sizes > 0, noise, tf.constant(np.inf, tf.float64))
    return tf.stack(
        [
            before + 1,
            lost + tf.maximum(following - before, 0),
            tf.minimum(least_noise, tf.reduce_min(noise)),
            tf.maximum(largest_size, tf.reduce_max(sizes)),
            recorded + 1,
        ]
    )
