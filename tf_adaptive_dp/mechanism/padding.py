"""Finds the padding of our Poisson batches, which must not contribute to a release.

Random bits decide whether a padding row has the weight 0.0 or -0.0 (`draws.Sampling.place`), which
arithmetic does not distinguish. So a vector of weights shows that it comes from our samplers,
whatever `map` did to the examples. A step that lets padding contribute replaces its gradient by
that of an example when one more example joins a batch, which moves the clipped sum by up to 2C.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp._keras.weighted_losses import sample_weights_of_step
from tf_adaptive_dp.gradients.batch_axis.analysis import feeds

# Among 10,000 draws, two share a number with probability at most 5e7 / 2⁴⁰.
BITS = 40
# Among n random signs, the two kinds differ by more than 7√n with probability 5e-11 (Hoeffding).
_DEVIATION = 7.0


def may_be_weights(tensor: tf.Tensor) -> bool:
    """Whether a tensor may hold the weights of our batches."""
    return tensor.shape.rank == 1 and tensor.dtype.is_floating


def is_ours(weights: tf.Tensor, rows_per_unit: int = 1) -> tf.Tensor:
    """Whether the zeros of a vector have the random signs of our padding.

    Args:
      weights: [B], float32.
      rows_per_unit: the number of neighboring rows that are placed together: those of a user.

    Returns:
      A bool scalar. It is false if the signs and places of the zeros amount to less than `BITS`
      random bits, as in small batches, and if they do not look random.
    """
    absent = tf.equal(weights, 0.0)
    padding = tf.reduce_sum(tf.cast(absent, tf.float32))
    places, empty = tf.size(weights), padding
    if rows_per_unit > 1:
        places //= rows_per_unit
        of_places = tf.reshape(absent[: places * rows_per_unit], [-1, rows_per_unit])
        empty = tf.reduce_sum(tf.cast(tf.reduce_all(of_places, axis=1), tf.float32))
    size = tf.cast(places, tf.float32)
    log_ways = tf.math.lgamma(size + 1) - tf.math.lgamma(empty + 1)
    log_ways -= tf.math.lgamma(size - empty + 1)
    bits = padding + log_ways / math.log(2)
    marked = tf.reduce_sum(tf.cast(absent & (tf.bitcast(weights, tf.int32) < 0), tf.float32))
    looks_random = tf.abs(2 * marked - padding) <= _DEVIATION * tf.sqrt(padding)
    return (bits >= BITS) & (marked > 0) & looks_random


def rows_of_padding(losses: tf.Tensor, rows_per_unit: int = 1) -> tf.Tensor | None:
    """Which rows of a batch are padding.

    Weights count even if the loss does not depend on them: a step that receives them and ignores
    them is the worst case.

    Args:
      losses: [B], the losses of examples.
      rows_per_unit: see `is_ours`.

    Returns:
      [B], bool; all false unless the batch comes from our samplers. `None` if nobody can tell:
      under eager execution, and if the step receives nothing that may be weights.
    """
    if tf.executing_eagerly():
        return None
    graph = losses.graph
    known = sample_weights_of_step(graph)
    if known is None:
        if not feeds(ancestors([losses]), graph):  # no data, no examples
            return None
        known = feeds(graph.get_operations(), graph)
    size = losses.shape[0]
    columns = [_column(t) for t in known if t is not None and t.shape.rank in (1, 2)]
    weights = [t for t in columns if may_be_weights(t) and t.shape[0] in (size, None)]
    if not weights:
        return None
    found = [_padding_in(tf.cast(w, tf.float32), losses, rows_per_unit) for w in weights]
    return tf.reduce_any(found, axis=0)


def _column(tensor: tf.Tensor) -> tf.Tensor:
    return tensor[:, 0] if tensor.shape.rank == 2 and tensor.shape[1] == 1 else tensor


def _padding_in(weights: tf.Tensor, losses: tf.Tensor, rows_per_unit: int) -> tf.Tensor:
    size = tf.shape(losses)[0]
    ours = is_ours(weights, rows_per_unit) & tf.equal(tf.size(weights), size)
    # Something else that is fed may have another number of rows.
    fitted = tf.pad(weights[:size], [[0, tf.maximum(size - tf.size(weights), 0)]])
    return ours & tf.equal(tf.ensure_shape(fitted, losses.shape), 0.0)
