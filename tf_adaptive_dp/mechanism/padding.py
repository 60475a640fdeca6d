"""Finds the padding of our Poisson batches, which must not contribute to a release.

Random bits decide whether a padding row has the weight 0.0 or -0.0 (`draws.Sampling.place`), which
arithmetic does not distinguish. So a vector of weights shows that it comes from our samplers,
whatever `map` did to the examples. If padding contributes to a step, an example that joins the
batch replaces the gradient of a padding row by its own, which moves the clipped sum by up to 2C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.callers import is_in_train_step_of_users
from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp._keras.weighted_losses import (
    labels_of_step,
    sample_weights_of_step,
    weighs_losses,
)
from tf_adaptive_dp.accounting import batch_order
from tf_adaptive_dp.gradients.batch_axis.analysis import feeds, of_this_replica

# Among 10,000 draws, two share a number with probability at most 5e7 / 2⁴⁰.
BITS = 40
# Among n random signs, the two kinds differ by more than 7√n with probability 5e-11 (Hoeffding).
_DEVIATION = 7.0


def vector_of_weights(tensor: tf.Tensor) -> tf.Tensor | None:
    """[B], what may be the weights of our batches; `None` if the tensor cannot hold them.

    Args:
      tensor: weights may have further axes of size 1, as those of losses of tokens have.
    """
    if (
        not tensor.dtype.is_floating
        or not tensor.shape.rank
        or any(n != 1 for n in tensor.shape[1:])
    ):
        return None
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def weights_of_rows(tensor: tf.Tensor) -> tf.Tensor | None:
    """As `vector_of_weights`, and also for a weight for each token, [B, T].

    Some tokens of an example may have weight 0. All those of padding have, with one sign.
    """
    if not tensor.dtype.is_floating or tensor.shape.rank != 2 or tensor.shape[1] == 1:
        return vector_of_weights(tensor)
    is_zero = tf.reduce_all(tf.equal(tensor, 0), axis=1)
    return tf.where(is_zero, tensor[:, 0], tf.ones_like(tensor[:, 0]))


def sample_weights_among(fed: Sequence[tf.Tensor], graph: tf.Graph) -> list[tf.Tensor]:
    """Those inputs of a step that its graph shows to be sample weights, of any shape."""
    known = sample_weights_of_step(graph)
    if known is None:
        return [tensor for tensor in fed if weighs_losses(tensor)]
    return [tensor for tensor in known if tensor is not None]


def has_weights(fed: Sequence[tf.Tensor], graph: tf.Graph) -> bool:
    """Whether a step receives what may be the weights of our batches.

    Args:
      fed: its inputs.
      graph: that of the step.
    """
    vectors = [t.shape.rank == 1 and t.dtype.is_floating for t in fed]
    return any(vectors) or bool(sample_weights_among(fed, graph))


def fit_to_rows(values: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Cuts or pads a vector to one entry per loss; inputs of unknown size may have others.

    Args:
      values: [N], numbers of the rows of an input.
      losses: [B], the losses of examples.

    Returns:
      [B]; what is missing is 0.
    """
    if values.shape[0] is not None and values.shape[0] == losses.shape[0]:
        return values
    size = tf.shape(losses)[0]
    values = values[:size]
    return tf.pad(values, [[0, size - tf.size(values)]])


def marks_in(weights: tf.Tensor) -> tf.Tensor:
    """[B], bool: the zeros of a float32 vector that have a negative sign."""
    return tf.equal(weights, 0.0) & (tf.bitcast(weights, tf.int32) < 0)


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
    marked = tf.reduce_sum(tf.cast(marks_in(weights), tf.float32))
    looks_random = tf.abs(2 * marked - padding) <= _DEVIATION * tf.sqrt(padding)
    return (bits >= BITS) & (marked > 0) & looks_random


class Order(NamedTuple):
    """Which step and groups a batch was drawn for, as the marks of its padding show it.

    Attributes:
      shown: bool scalar, whether they show anything.
      code: int64 scalar, see `accounting.batch_order`.
    """

    shown: tf.Tensor
    code: tf.Tensor

    def groups_at(self, step: tf.Tensor, period: int) -> tf.Tensor:
        """The code of the groups of a batch that was drawn for a step, an int64 scalar.

        If it was drawn for another one, this is another number in each step, and usually no code.

        Args:
          step: int64 scalar, the number of the step.
          period: the number of groups of the sampling.
        """
        step = tf.bitwise.bitwise_and(step, tf.constant(2**batch_order.BITS - 1, tf.int64))
        period_code = tf.constant(batch_order.code_of_period(period), tf.int64)
        return tf.bitwise.bitwise_xor(self.code, tf.bitwise.bitwise_xor(step, period_code))


def order_in(weights: tf.Tensor) -> Order:
    """Reads the step that the weights of a batch show.

    Args:
      weights: [B], float32.
    """
    if weights.shape[0] is None:
        return Order(tf.constant(False), tf.constant(0, tf.int64))
    marks = marks_in(weights)
    of_rows = tf.constant(batch_order.patterns(weights.shape[0]), tf.float32)
    parity = tf.cast(
        tf.linalg.matvec(of_rows, tf.cast(marks, tf.float32), transpose_a=True), tf.int64
    )
    bits = tf.bitwise.bitwise_and(parity, tf.constant(1, tf.int64))
    code = tf.reduce_sum(bits * (1 << np.arange(batch_order.BITS)))
    return Order(is_ours(weights), code)


def rows_of_padding(losses: tf.Tensor, rows_per_unit: int = 1) -> tf.Tensor | None:
    """Which rows of a batch are padding.

    Weights count even if the loss does not depend on them: a step that receives them and ignores
    them is the worst case. Where each output has weights of its own, an example may have weight 0
    for some of them, as one with a missing label has. Padding has weight 0 for all.

    Args:
      losses: [B], the losses of examples.
      rows_per_unit: see `is_ours`.

    Returns:
      [B], bool; all false unless the batch comes from our samplers. `None` if that is unknown:
      under eager execution, and if the step receives nothing that may be weights.
    """
    if tf.executing_eagerly():
        return None
    graph = losses.graph
    known = sample_weights_of_step(graph) or []
    unpacks_itself = is_in_train_step_of_users()
    if not known and not feeds(ancestors([losses]), graph):  # no data, no examples
        return None
    if unpacks_itself or not known:
        # The weights may be anything but labels, which can have zeros of both signs.
        labels = [] if unpacks_itself else labels_of_step(graph)
        fed = feeds(graph.get_operations(), graph)
        known = [*known, *(t for t in fed if all(t is not other for other in (*known, *labels)))]
    # The marks in the batch of another replica say nothing about the rows of this one.
    known = of_this_replica([t for t in known if t is not None], losses)
    vectors = [weights_of_rows(t) for t in known]
    # Either may show its size when the other does not; the step compares them.
    weights = [v for v in vectors if v is not None and v.shape.is_compatible_with(losses.shape)]
    if not weights:
        return None
    weights = [tf.cast(w, tf.float32) for w in weights]
    ours = tf.stack([is_ours(w, rows_per_unit) & (tf.size(w) == tf.size(losses)) for w in weights])
    fitted = tf.stack([fit_to_rows(w, losses) for w in weights])
    # The marks alone show half of the padding, also where some vector has lost its zeros.
    ours = ours[:, tf.newaxis]
    marked = tf.reduce_any(ours & marks_in(fitted), axis=0)
    in_all = tf.reduce_all(~ours | tf.equal(fitted, 0.0), axis=0) & tf.reduce_any(ours, axis=0)
    return tf.ensure_shape(marked | in_all, losses.shape)
