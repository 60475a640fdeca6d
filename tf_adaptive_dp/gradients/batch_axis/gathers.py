"""What operations that gather or scatter rows, or reduce them by segments, do to the batch axis."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.axis_maps import whole_axes
from tf_adaptive_dp.gradients.batch_axis.operation_types import SEGMENTS
from tf_adaptive_dp.gradients.batch_axis.operations import (
    PICKED,
    register_layout,
    unless_cross_example,
)
from tf_adaptive_dp.gradients.batch_axis.rows_outside import batch_dims_of, stays_within
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, Value

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
            return CrossExample(
                op, "gathers along an axis that is unknown while tracing", is_certain=False
            )
        axis = int(axis) % table.shape.rank
    if indices.shape.rank is None:
        return CrossExample(op, "has indices of unknown rank", is_certain=False)
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


def _of_rows(op: tf.Operation, layout: BatchAxis, batch_axes: BatchAxes) -> Value:
    """Entries of each row at indices of its own, whose gradient `rows_outside` can save.

    The forward pass stays in the row, or fails.
    """
    sizes = (layout.outer.static, layout.inner.static)
    if op.type != "GatherV2" or batch_axes.caller is not None or None in sizes:
        if not stays_within(op):
            return CrossExample(op, _MAY_STRAY)
    return layout


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


@register_layout(*SEGMENTS)
@unless_cross_example
def segments(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Reduces rows of each example, such as the nodes of a graph, by public segment ids.

    The leading axes, as many as the ids have, become one. All others are kept, and each of their
    entries is reduced on its own, in the backward pass too.
    """
    rows, ids = op.inputs[:2]
    if any(map(batch_axes.depends, op.inputs[1:])):
        return CrossExample(op, "has segments that depend on the data")
    if ids.shape.rank is None:
        return CrossExample(op, "has segments of unknown rank", is_certain=False)
    layout = batch_axes.axis_of(rows)
    if layout.axis < ids.shape.rank:
        return CrossExample(op, "reduces over the batch axis")
    return layout.at(layout.axis - ids.shape.rank + 1)


_ELSEWHERE = "puts examples into the rows of others"
_SCATTERS = [f"TensorScatter{name}" for name in ("Add", "Max", "Min", "Sub", "Update")]


@register_layout("Where", "DynamicPartition")
@unless_cross_example
def pick(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Some rows, as of `tf.boolean_mask`, of which it is unknown where they go."""
    return CrossExample(op, PICKED, is_certain=False)


@register_layout("DynamicStitch", "ParallelDynamicStitch")
@unless_cross_example
def stitch(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Rows at given places, such as those that `tf.dynamic_partition` took them from."""
    half = len(op.inputs) // 2
    for places, rows in zip(op.inputs[:half], op.inputs[half:]):
        if _moves_rows(places, places.shape.rank, rows, batch_axes):
            return CrossExample(op, _ELSEWHERE)
    return CrossExample(op, "joins rows by places that may not be their own", is_certain=False)


@register_layout("ScatterNd", *_SCATTERS)
@unless_cross_example
def scatter(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Rows, or entries of rows, at given places."""
    indices, updates = op.inputs[:2] if op.type == "ScatterNd" else op.inputs[1:]
    rank = indices.shape.rank
    if rank and indices.shape[-1] == 1 and _moves_rows(indices, rank - 1, updates, batch_axes):
        return CrossExample(op, _ELSEWHERE)
    return CrossExample(op, "writes to places that may be in any row", is_certain=False)


def _moves_rows(
    places: tf.Tensor, rank: int | None, rows: tf.Tensor, batch_axes: BatchAxes
) -> bool:
    """Whether rows of examples go to other places than their own for certain.

    Args:
      places: where each of the rows goes, on axis 0.
      rank: the number of axes of the rows that it places.
      rows: what it places.
      batch_axes: the batch axes of its graph.
    """
    if rank is None:
        return False
    if batch_axes.depends(places):
        return True  # the examples themselves say where they go
    if not batch_axes.depends(rows) or batch_axes.axis_of(rows).axis >= rank:
        return False
    return not _are_own_places(places, batch_axes)


def _are_own_places(places: tf.Tensor, batch_axes: BatchAxes) -> bool:
    """Whether places are 0, 1, …, B − 1, of any rank."""
    value, size = static_value(places), batch_axes.batch_size.static
    if value is not None and size is not None:
        return np.array_equal(np.ravel(value), np.arange(size))
    while not _is_range_of_batch(places, batch_axes):
        op = places.op
        adds_axes = op.type == "StridedSlice" and op.get_attr("new_axis_mask")
        if op.type not in ("Cast", "ExpandDims", "Identity", "Reshape") and not (
            adds_axes and op.inputs[0].shape.rank == 1 and whole_axes(op) == {0}
        ):
            return False
        places = op.inputs[0]
    return True


@register_layout(
    *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "HistogramFixedWidth")
)
@unless_cross_example
def whole_batch(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Compares or counts all values."""
    return CrossExample(op, "works across the batch axis")


@register_layout("LookupTableFindV2")
@unless_cross_example
def lookup(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """One value per key."""
    return batch_axes[op.inputs[1]]
