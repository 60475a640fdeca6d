"""Statistics of the raw gradients, for monitoring. NOT private."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.variables import local_copies

# The histogram of norms has equal steps of log10, from 1e-6 to 1e6.
_LOWEST, _HIGHEST, _BINS = -6.0, 6.0, 384


class GradientSummary(NamedTuple):
    """Statistics of the gradients of some steps. NOT private.

    Attributes:
      num_examples: the number of examples with a nonzero gradient; padding has gradient zero.
      clipped_share: the share of these whose norm exceeded `l2_norm_clip`.
      norm_quantiles: the quantiles 0.1, 0.5 and 0.9 of their norms, to about 4%.
      num_non_finite: the number of examples whose gradient was NaN or infinite, or left out because
        of an index outside of its row (see `LossOfStep.outside`). They count as zero.
    """

    num_examples: int
    clipped_share: float
    norm_quantiles: dict[float, float]
    num_non_finite: int


class GradientStatistics:
    """Running statistics of per-example gradients. NOT private; neither saved nor restored.

    On several replicas they cover the examples that this process has seen.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._histogram = tf.Variable(tf.zeros([_BINS], tf.int64), trainable=False)
            self._counts = tf.Variable(tf.zeros([2], tf.int64), trainable=False)

    def record(
        self,
        squared_norms: tf.Tensor,
        l2_norm_clip: tf.Tensor,
        left_out: tf.Tensor | None = None,
    ) -> None:
        """Adds the examples of one batch.

        Args:
          squared_norms: [B], ‖gᵢ‖² before clipping.
          l2_norm_clip: scalar.
          left_out: bool, the examples whose gradient was left out; `None` for nobody.
        """
        finite = tf.math.is_finite(squared_norms)
        counted = finite & (squared_norms > 0)
        norms = tf.sqrt(tf.where(counted, squared_norms, 1.0))
        position = (tf.math.log(norms) / np.log(10.0) - _LOWEST) / (_HIGHEST - _LOWEST) * _BINS
        bins = tf.clip_by_value(tf.cast(position, tf.int32), 0, _BINS - 1)
        # A one-hot matrix [B, _BINS] would dominate the cost.
        self._histogram.assign_add(
            tf.math.unsorted_segment_sum(tf.cast(counted, tf.int64), bins, _BINS)
        )
        clipped = counted & (norms > tf.cast(l2_norm_clip, norms.dtype))
        counts = tf.math.count_nonzero(tf.stack([clipped, ~finite]), axis=1)
        if left_out is not None:
            counts += tf.stack([tf.constant(0, tf.int64), tf.math.count_nonzero(left_out)])
        self._counts.assign_add(counts)

    def summary(self, *, reset: bool = False) -> GradientSummary:
        """The statistics since the last reset.

        Args:
          reset: whether to reset afterwards.
        """
        histogram = sum(v.numpy() for v in local_copies(self._histogram))
        clipped, non_finite = (int(n) for n in sum(v.numpy() for v in local_copies(self._counts)))
        if reset:
            self._histogram.assign(tf.zeros_like(self._histogram))
            self._counts.assign(tf.zeros_like(self._counts))
        total = int(histogram.sum())
        share = np.cumsum(histogram) / max(total, 1)
        step = (_HIGHEST - _LOWEST) / _BINS
        quantiles = {
            q: float(10 ** (_LOWEST + step * (np.searchsorted(share, q) + 0.5))) if total else 0.0
            for q in (0.1, 0.5, 0.9)
        }
        return GradientSummary(total, clipped / max(total, 1), quantiles, non_finite)
