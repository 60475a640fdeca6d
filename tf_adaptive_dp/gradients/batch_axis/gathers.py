"""What operations that gather rows of a table do to the batch axis."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.operations import register_layout, unless_cross_example
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, Value

_SAME_NUMBERS = frozenset(
    {"BroadcastTo", "ExpandDims", "Identity", "Reshape", "Squeeze", "Tile", "Transpose"}
)
_MAY_STRAY = (
    "may reach other examples in the backward pass, where an index outside of its row leads to "
    "another row, and whether there is one cannot be checked here. Clip the indices by a known "
    "size, as in `tf.clip_by_value(indices, 0, n - 1)`, or gather outside of inner functions"
)


@register_layout("OneHot")
@unless_cross_example
def one_hot(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """A new axis of classes."""
    layout, axis = batch_axes[op.inputs[0]], op.get_attr("axis")
    if not isinstance(layout, BatchAxis):
        return CrossExample(op, "has values that depend on the data")
    return layout.at(layout.axis + (0 <= axis <= layout.axis))


@register_layout("ResourceGather", "GatherV2", "Gather")
@unless_cross_example
def gather(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Rows of a table, or entries of each example (`batch_dims`)."""
    table, indices = op.inputs[:2]
    axis = 0
    if op.type == "GatherV2":
        axis = static_value(op.inputs[2])
        if axis is None or table.shape.rank is None:
            return CrossExample(op, "gathers along an axis that is unknown while tracing")
        axis = int(axis) % table.shape.rank
    if indices.shape.rank is None:
        return CrossExample(op, "has indices of unknown rank")
    batch_dims = batch_dims_of(op)
    of_table = batch_axes.axis_of(table) if batch_axes.depends(table) else None
    of_indices = batch_axes.axis_of(indices) if batch_axes.depends(indices) else None
    if of_table is not None and axis == of_table.axis and batch_dims == 0:
        if _is_range_of_batch(indices, batch_axes):  # how `tf.vectorized_map` takes its elements
            return of_table
    at_counter = batch_axes.example_at(indices)
    if at_counter and batch_axes[table] == BatchAxis(axis) and batch_dims == 0:
        return at_counter
    if of_table is None:
        of_indices = batch_axes.axis_of(indices)
        if of_indices.axis < batch_dims:
            return _of_rows(op, of_indices, batch_axes)
        return of_indices.at(of_indices.axis + axis - batch_dims)
    if of_table.axis < batch_dims and of_indices in (None, of_table):
        return _of_rows(op, of_table, batch_axes)
    if of_indices is None and batch_dims <= of_table.axis < axis:
        return of_table
    if of_indices is None and of_table.axis > axis:
        return of_table.at(of_table.axis + indices.shape.rank - batch_dims - 1)
    return CrossExample(op, "picks examples by index")


def batch_dims_of(op: tf.Operation) -> int:
    """How many leading axes the table and the indices of a gather share."""
    batch_dims = 0 if op.type == "Gather" else op.get_attr("batch_dims")
    return batch_dims % op.inputs[1].shape.rank if batch_dims < 0 else batch_dims


def _of_rows(op: tf.Operation, layout: BatchAxis, batch_axes: BatchAxes) -> Value:
    """Entries of each row at indices of its own, whose gradient `rows_outside` can save.

    TensorFlow's gradient adds the number of the row to each index, and checks nothing. The forward
    pass stays in the row, or fails.
    """
    sizes = (layout.outer.static, layout.inner.static)
    if op.type != "GatherV2" or batch_axes.caller is not None or None in sizes:
        if not _stays_within(op):
            return CrossExample(op, _MAY_STRAY)
    return layout


def rows_outside(ops: Iterable[tf.Operation], batch_axes: BatchAxes) -> tf.Tensor | None:
    """Which examples have an index outside of their row, in a gather with `batch_dims`.

    Without their losses the gradients of others are right, unless they are not finite: see
    `_of_rows`.

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
            if not _stays_within(op):
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


def _stays_within(op: tf.Operation) -> bool:
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
    if op.type in _SAME_NUMBERS or op.type == "Cast":  # which keeps numbers below a size
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


def _is_range_of_batch(indices: tf.Tensor, batch_axes: BatchAxes) -> bool:
    """Whether indices are 0, 1, …, B − 1."""
    op = indices.op
    if batch_axes.depends(indices) or indices.shape.rank != 1:
        return False
    if op.type == "Reshape" and op.inputs[0].shape.rank == 1:
        return _is_range_of_batch(op.inputs[0], batch_axes)
    if op.type == "SelectV2" and _is_more_than_one(op.inputs[0], batch_axes):
        return static_value(op.inputs[2]) == 0 and _is_range_of_batch(op.inputs[1], batch_axes)
    if op.type != "Range":
        return False
    start, limit, step = (batch_axes.entries(t)[0] for t in op.inputs)
    return (start, limit, step) == (Size(0), batch_axes.batch_size, ONE)


def _is_more_than_one(condition: tf.Tensor, batch_axes: BatchAxes) -> bool:
    """Whether a condition is B > 1, so that 0 instead of the range of B changes nothing."""
    op = condition.op
    if op.type != "Greater" or condition.shape.rank != 0 or static_value(op.inputs[1]) != 1:
        return False
    return batch_axes.entries(op.inputs[0])[0] == batch_axes.batch_size


@register_layout("GatherNd", "ResourceGatherNd")
@unless_cross_example
def gather_nd(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Entries of a public table at indices from the data; the last axis is the index."""
    table, indices = op.inputs
    if batch_axes.depends(table):
        return CrossExample(op, "picks examples by index")
    layout = batch_axes.axis_of(indices)
    if layout.axis == indices.shape.rank - 1:
        return CrossExample(op, "picks examples by index")
    return layout


@register_layout("LookupTableFindV2")
@unless_cross_example
def lookup(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """One value per key."""
    return batch_axes[op.inputs[1]]
