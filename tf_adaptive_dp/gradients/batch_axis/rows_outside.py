"""Whether a gather with `batch_dims` has an index outside of its row.

TensorFlow's gradient of such a gather adds the number of the row to each index, and checks nothing:
an index outside of its row leads to another one, which may be another example's.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis

_SAME_NUMBERS = frozenset(
    {"BroadcastTo", "ExpandDims", "Identity", "Reshape", "Squeeze", "Tile", "Transpose"}
)


def batch_dims_of(op: tf.Operation) -> int:
    """How many leading axes the table and the indices of a gather share."""
    batch_dims = 0 if op.type == "Gather" else op.get_attr("batch_dims")
    return batch_dims % op.inputs[1].shape.rank if batch_dims < 0 else batch_dims


def rows_outside(ops: Iterable[tf.Operation], batch_axes: BatchAxes) -> tf.Tensor | None:
    """Which examples have an index outside of their row, in a gather with `batch_dims`.

    Without their losses the gradients of others are right, unless they are not finite.

    Args:
      ops: the operations that the loss is computed from.
      batch_axes: the batch axis of each tensor.

    Returns:
      [B], bool; `None` if there is no such gather, or none whose indices may lie outside.
    """
    found = []
    for op in ops:
        if op.type != "GatherV2" or not batch_dims_of(op):
            continue
        layout = batch_axes[op.outputs[0]]
        if isinstance(layout, BatchAxis) and layout.axis < batch_dims_of(op):
            if not stays_within(op):
                found.append(_outside(op, layout))
    return tf.reduce_any(tf.stack(found), axis=0) if found else None


def _outside(op: tf.Operation, layout: BatchAxis) -> tf.Tensor:
    table, indices, axis = op.inputs
    size = tf.cast(tf.shape(table)[static_value(axis)], indices.dtype)
    outside = (indices < 0) | (indices >= size)
    others = [a for a in range(indices.shape.rank) if a != layout.axis]
    by_example = tf.reshape(
        tf.reduce_any(outside, others), [layout.outer.static, -1, layout.inner.static]
    )
    return tf.reduce_any(by_example, axis=[0, 2])


def stays_within(op: tf.Operation) -> bool:
    """Whether the graph tells that all indices of a gather lie within their row."""
    if op.type != "GatherV2":
        return False
    size = op.inputs[0].shape[int(static_value(op.inputs[2]))]
    return size is not None and _are_below(op.inputs[1], size)


def _are_below(indices: tf.Tensor, size: int) -> bool:
    """Whether numbers lie between 0 and size − 1, whatever the data."""
    value, op = static_value(indices), indices.op
    if value is not None:
        return bool(((value >= 0) & (value < size)).all())
    if op.type in _SAME_NUMBERS or (op.type == "Cast" and _casts_below(op, size)):
        return _are_below(op.inputs[0], size)
    if op.type in ("ArgMax", "ArgMin"):
        source, axis = op.inputs[0], static_value(op.inputs[1])
        length = None if axis is None or source.shape.rank is None else source.shape[int(axis)]
        return length is not None and length <= size
    if op.type == "TopKV2" and indices is op.outputs[1] and op.inputs[0].shape.rank is not None:
        length = op.inputs[0].shape[-1]
        return length is not None and length <= size
    if op.type == "FloorMod":
        divisor = static_value(op.inputs[1])
        return divisor is not None and bool(((divisor > 0) & (divisor <= size)).all())
    if op.type == "Minimum":
        return any(
            _at_most(a, size - 1) and _at_least_0(a) and _at_least_0(b) for a, b in _both_ways(op)
        )
    if op.type == "Maximum":
        return any(
            _at_least_0(a) and _at_most(a, size - 1) and _at_most(b, size - 1)
            for a, b in _both_ways(op)
        )
    return False


def _casts_below(op: tf.Operation, size: int) -> bool:
    """Whether a cast keeps whole numbers between 0 and size − 1: NaN is no number."""
    source, to = op.inputs[0].dtype, op.outputs[0].dtype
    return source.is_integer and to.is_integer and to.max >= size - 1


def _both_ways(op: tf.Operation) -> list[tuple[tf.Tensor, tf.Tensor]]:
    a, b = op.inputs
    return [(a, b), (b, a)]


def _at_most(tensor: tf.Tensor, bound: int) -> bool:
    """Whether numbers are static, or a minimum with static ones, and at most a bound."""
    if tensor.op.type in _SAME_NUMBERS:
        return _at_most(tensor.op.inputs[0], bound)
    value = static_value(tensor)
    if value is not None:
        return bool((value <= bound).all())
    return tensor.op.type == "Minimum" and any(_at_most(t, bound) for t in tensor.op.inputs)


def _at_least_0(tensor: tf.Tensor) -> bool:
    """Whether numbers are static, or a maximum with static ones, and not negative."""
    if tensor.op.type in _SAME_NUMBERS:
        return _at_least_0(tensor.op.inputs[0])
    value = static_value(tensor)
    if value is not None:
        return bool((value >= 0).all())
    return tensor.op.type == "Maximum" and any(_at_least_0(t) for t in tensor.op.inputs)
