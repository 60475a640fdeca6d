"""What operations that take rows of a table do to the batch axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Mixed
from tf_adaptive_dp.gradients.layout.operations import register_layout, unless_mixed
from tf_adaptive_dp.gradients.layout.sizes import ONE, Size, static_value

if TYPE_CHECKING:
    from tf_adaptive_dp.gradients.layout.analysis import Layouts


@register_layout("OneHot")
@unless_mixed
def one_hot(op, layouts):
    """A new axis of classes."""
    layout, axis = layouts[op.inputs[0]], op.get_attr("axis")
    if layout is None:
        return Mixed(op, "has values that depend on the data")
    return layout.at(layout.axis + (0 <= axis <= layout.axis))


@register_layout("ResourceGather", "GatherV2", "Gather")
@unless_mixed
def gather(op, layouts):
    """Rows of a table, or entries of each example (`batch_dims`)."""
    table, indices = op.inputs[:2]
    axis = 0
    if op.type == "GatherV2":
        axis = static_value(op.inputs[2])
        if axis is None or table.shape.rank is None:
            return Mixed(op, "gathers along an axis that is not known beforehand")
        axis = int(axis) % table.shape.rank
    batch_dims = op.get_attr("batch_dims") if op.type != "Gather" else 0
    if indices.shape.rank is None:
        return Mixed(op, "has indices of unknown rank")
    if layouts.depends(table) and axis == layouts[table].axis and batch_dims == 0:
        if _is_range_of_batch(indices, layouts):  # how `tf.vectorized_map` takes its elements
            return layouts[table]
    at_counter = layouts.example_at(indices)
    if at_counter and layouts[table] == BatchAxis(axis) and batch_dims == 0:
        return at_counter
    of_table = layouts[table] if layouts.depends(table) else None
    of_indices = layouts[indices] if layouts.depends(indices) else None
    if of_table is None:
        shift = 0 if of_indices.axis < batch_dims else axis - batch_dims
        return of_indices.at(of_indices.axis + shift)
    aligned = of_table.axis < batch_dims and of_indices in (None, of_table)
    if aligned or (of_indices is None and of_table.axis < axis):
        return of_table
    if of_indices is None and of_table.axis > axis:
        return of_table.at(of_table.axis + indices.shape.rank - batch_dims - 1)
    return Mixed(op, "picks examples by index")


def _is_range_of_batch(indices: tf.Tensor, layouts: Layouts) -> bool:
    """Whether indices are 0, 1, …, B − 1."""
    op = indices.op
    if layouts.depends(indices) or indices.shape.rank != 1:
        return False
    if op.type == "Reshape" and op.inputs[0].shape.rank == 1:
        return _is_range_of_batch(op.inputs[0], layouts)
    if op.type == "SelectV2" and _is_more_than_one(op.inputs[0], layouts):
        return static_value(op.inputs[2]) == 0 and _is_range_of_batch(op.inputs[1], layouts)
    if op.type != "Range":
        return False
    start, limit, step = (layouts.entries(t)[0] for t in op.inputs)
    return (start, limit, step) == (Size(0), layouts.batch_size, ONE)


def _is_more_than_one(condition: tf.Tensor, layouts: Layouts) -> bool:
    """Whether a condition is B > 1, so that 0 instead of the range of B changes nothing."""
    op = condition.op
    if op.type != "Greater" or condition.shape.rank != 0 or static_value(op.inputs[1]) != 1:
        return False
    return layouts.entries(op.inputs[0])[0] == layouts.batch_size


@register_layout("GatherNd", "ResourceGatherNd")
@unless_mixed
def gather_nd(op, layouts):
    """Entries of a public table at indices of the data; the last axis is the index."""
    layout = layouts[op.inputs[1]]
    if layouts.depends(op.inputs[0]) or layout.axis == op.inputs[1].shape.rank - 1:
        return Mixed(op, "picks examples by index")
    return layout


@register_layout("LookupTableFindV2")
@unless_mixed
def lookup(op, layouts):
    """One value for each key."""
    return layouts[op.inputs[1]]
