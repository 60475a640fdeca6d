"""The clipped sums of a batch, before noise: what one example can change of them is bounded here.

`gaussian` releases them: it counts the release in the ledger and adds the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp.gradients.absent_rows import PADDING_CONTRIBUTES
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.mechanism import replicas
from tf_adaptive_dp.mechanism.batch_sizes import assert_true
from tf_adaptive_dp.mechanism.clipping import AdaptiveClipping, Clipping, total_norms
from tf_adaptive_dp.mechanism.histograms import Histograms
from tf_adaptive_dp.mechanism.statistics import GradientStatistics

_INDEX_OUTSIDE = (
    "An example has an index outside of its row, and gradients are not finite: in a gather with "
    "`batch_dims`, one of its own may have made others so. Clip the indices, as in "
    "`tf.clip_by_value(indices, 0, tf.shape(x)[1] - 1)`."
)

_OTHER_ROWS = (
    "The loss has a different number of rows than the batch, so an example would count several "
    "times: a batch of one was combined with a value that has a fixed number of rows, such as "
    "`tf.random.normal([32, 8])`. Give such a value the rows of the batch, `tf.shape(x)[0]`, or "
    "one row, or leave incomplete batches out (`drop_remainder=True`)."
)


class ClippedSums(NamedTuple):
    """What a batch, or a part of one, amounts to.

    Attributes:
      sums: Σᵢ clip(...), float32, of the variables that have gradients, and then the histograms.
      within: the count of `AdaptiveClipping`, or nothing.
      present: how many rows (or microbatches) on all replicas have a nonzero gradient.
      padding: how many of these rows are padding.
      spoiling: how many rows are not finite, if one of them spoils the others; else 0.
      index_outside: how many rows are not finite, if an index outside of a row may be the reason;
        else 0.
      rows_differ: on how many replicas, and in how many parts, the loss has a different number of
        rows than the batch.
      out_of_order: how many parts were drawn for another step; 0 if that was not checked.
      order_unknown: how many parts did not show their step; 0 if that was not checked.
    """

    sums: list[tf.Tensor]
    within: list[tf.Tensor]
    present: tf.Tensor
    padding: tf.Tensor
    spoiling: tf.Tensor
    index_outside: tf.Tensor
    rows_differ: tf.Tensor
    out_of_order: tf.Tensor
    order_unknown: tf.Tensor

    def flat(self) -> list[tf.Tensor]:
        """All tensors, in one list."""
        return [*self.sums, *self.within, *self[2:]]

    def like(self, flat: Sequence[tf.Tensor]) -> ClippedSums:
        """Undoes `flat`."""
        num, end = len(self.sums), len(flat) - len(self[2:])
        return ClippedSums(list(flat[:num]), list(flat[num:end]), *flat[end:])

    def rejects(self) -> list[tf.Operation]:
        """Assertions that fail a step before its sums are released, if C does not bound them.

        XLA drops assertions; see `are_bounded`.
        """
        made = [
            assert_true(tf.equal(self.padding, 0), [PADDING_CONTRIBUTES]),
            assert_true(tf.equal(self.index_outside, 0), [_INDEX_OUTSIDE]),
            assert_true(tf.equal(self.rows_differ, 0), [_OTHER_ROWS]),
        ]
        return [assertion for assertion in made if assertion is not None]

    def are_bounded(self) -> tf.Tensor:
        """Whether one example changes the sums by at most C, a bool scalar.

        It is false if one more example that is not finite would set them to zero, if an index
        outside of a row may have spoiled others, or if the loss has other rows than the batch.
        Padding with gradients leaves it true: an example in its place changes the sums by at most
        2C, which `padding` shows.
        """
        return (
            (self.spoiling <= 1) & tf.equal(self.index_outside, 0) & tf.equal(self.rows_differ, 0)
        )


def clip_and_sum(
    source: PerExampleGradients,
    clip: tf.Tensor,
    clipping: Clipping,
    *,
    scale: Sequence[tf.Tensor] | None,
    shift: Sequence[tf.Tensor] | None,
    layers: Sequence[str],
    places: Sequence[int],
    padding: tf.Tensor | None,
    absent: tf.Tensor | None,
    histograms: Histograms | None,
    statistics: GradientStatistics,
) -> tuple[list[tf.Tensor | None], ClippedSums]:
    """Clips the gradients of a batch, or of a part of one, and adds them up.

    Guarantee: if `are_bounded`, adding or removing one unit of `source` (an example, a microbatch
    or a user) changes `sums` together by at most C in L2 norm, or by at most 2C if padding has
    gradients, and `within` by at most 1. A unit whose gradient is zero or not finite contributes
    exactly zero.

    Args:
      source: gradients of the examples, microbatches or users.
      clip: C, scalar.
      clipping: how each gradient is brought to norm C.
      scale: one tensor per variable, which multiplies gradients before clipping.
      shift: one tensor per variable, which is added to each gradient before that.
      layers: the layer that each variable belongs to, for per-layer clipping.
      places: the number of each variable among those of the optimizer.
      padding: [B], bool, the rows that are padding; `None` if that is unknown.
      absent: the units of `source` that are padding; `None` if that is unknown.
      histograms: take the place of the gradients while they are open; or `None`.
      statistics: record the norms; not private.

    Returns:
      The clipped sum of each variable, or `None` if the loss does not depend on it; and the sums
      that there are, with what else is counted.
    """
    norms = source.variable_norms(scale, shift)
    squared_norms = total_norms(norms)
    weights = clipping.weights(norms, layers, clip)
    each = weights if isinstance(weights, list) else [weights] * len(norms)
    present = squared_norms > 0
    if shift is not None:
        # Without this the shift would let padding contribute.
        unshifted = source.squared_norms()
        present = unshifted > 0
        squared_norms = tf.where(unshifted == 0, 0.0, squared_norms)
        each = [None if w is None else tf.where(present, w, 0.0) for w in each]
    left_out = source.loss.outside
    if left_out is not None and padding is not None:
        left_out &= ~padding
    # Whatever its gradient, padding is nobody's.
    observed = squared_norms if absent is None else tf.where(absent, 0.0, squared_norms)
    statistics.record(observed, clip, left_out)
    counted = []
    if histograms is not None:
        open_now, losses = histograms.are_open(), source.loss.of_units
        each = [None if w is None else tf.where(open_now, 0.0, w) for w in each]
        counted.append(histograms.sum(open_now & present, norms, places, losses, clip))
    sums = _weighted_sums(source, each, scale, shift)
    within = []
    if isinstance(clipping, AdaptiveClipping):
        within.append(clipping.count(squared_norms, present, clip))
    none, outside, differ = tf.zeros([]), source.loss.outside, source.loss.rows_differ
    return sums, ClippedSums(
        sums=[tf.cast(s, tf.float32) for s in sums if s is not None] + counted,
        within=within,
        present=_number_of(present),
        padding=_number_of(tf.constant([False]) if absent is None else absent & present),
        spoiling=_not_finite(squared_norms) if source.spoils_others else none,
        index_outside=none if outside is None else _index_outside(outside, squared_norms),
        rows_differ=none if differ is None else _number_of(differ),
        out_of_order=none,
        order_unknown=none,
    )


def _weighted_sums(
    source: PerExampleGradients,
    weights: Sequence[tf.Tensor | None],
    scale: Sequence[tf.Tensor] | None,
    shift: Sequence[tf.Tensor] | None,
) -> list[tf.Tensor | None]:
    """Σᵢ wᵢ·((gᵢ + shift) ∘ scale) of each variable; `None` if it has no gradient.

    As the source sums gradients only, shift and scale are applied to the sum.
    """
    sums = source.weighted_sum(weights)
    if shift is not None:
        parts = zip(sums, weights, shift)
        sums = [None if s is None else s + tf.reduce_sum(w) * b for s, w, b in parts]
    if scale is not None:
        sums = [None if s is None else s * a for s, a in zip(sums, scale)]
    return sums


def _index_outside(outside: tf.Tensor, squared_norms: tf.Tensor) -> tf.Tensor:
    """How many rows are not finite, if an example has an index outside of its row; else 0."""
    lost = _not_finite(squared_norms)
    return tf.where(_number_of(outside) > 0, lost, tf.zeros_like(lost))


def _not_finite(squared_norms: tf.Tensor) -> tf.Tensor:
    """How many rows have a gradient that is not finite."""
    return _number_of(~tf.math.is_finite(squared_norms))


def _number_of(rows: tf.Tensor) -> tf.Tensor:
    """How many rows on all replicas are true, a float32 scalar."""
    return replicas.total(tf.reduce_sum(tf.cast(rows, tf.float32)))
