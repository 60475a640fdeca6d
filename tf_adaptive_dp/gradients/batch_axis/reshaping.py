"""What operations such as reshapes and slices do to the batch axis."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.axis_maps import has_mask, slots
from tf_adaptive_dp.gradients.batch_axis.operations import (
    move,
    moved,
    register_layout,
    register_moves,
    sum_to_operand,
    unless_cross_example,
)
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size, product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, OneExample, Value

_ACROSS = "works across the batch axis"


def find_axis(
    batch_size: Size, outer: Size, inner: Size, target: Sequence[Size | None]
) -> BatchAxis | None:
    """Finds the batch axis after a reshape.

    Flattened to [outer, B, inner], the data are the same before and after it.

    Args:
      batch_size: B.
      outer: the number of entries outside of the batch axis, over all axes.
      inner: the number of entries inside of it.
      target: the new shape; one entry may be unknown.

    Returns:
      The axis, or `None` if none is certain to hold the batch.

    >>> find_axis(Size(1, ("batch",)), ONE, Size(12), [None, Size(4)])
    BatchAxis(axis=0, outer=Size(number=1, unknowns=()), inner=Size(number=3, unknowns=()))
    """
    total = product([outer, batch_size, inner])
    if target.count(None) == 1:
        rest = total.over(product(s for s in target if s is not None))
        target = [rest if s is None else s for s in target]
    sizes = [s for s in target if s is not None]
    if len(sizes) < len(target):
        return None
    for axis, size in enumerate(sizes):
        outside = outer.over(product(sizes[:axis]))
        inside = inner.over(product(sizes[axis + 1 :]))
        if outside is None or inside is None or size == ONE != batch_size:
            continue
        if product([outside, batch_size, inside]) == size:
            return BatchAxis(axis, outside, inside)
    return None


@register_layout("Reshape")
@unless_cross_example
def reshape(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Finds the batch from the number of entries outside and inside of it."""
    tensor, output = op.inputs[0], op.outputs[0]
    layout = batch_axes[tensor]
    if tensor.op.type == "Sum" and sum_to_operand(tensor.op, batch_axes):
        return layout  # it has the shape already
    if not isinstance(layout, BatchAxis) or tensor.shape.rank is None or output.shape.rank is None:
        return CrossExample(
            op, "reshapes to a shape that is unknown while tracing", is_certain=False
        )
    sizes = [batch_axes.size(tensor, a) for a in range(tensor.shape.rank)]
    target = batch_axes.entries(op.inputs[1])
    target = [known if n is None else Size(n) for n, known in zip(output.shape, target)]
    found = find_axis(
        batch_axes.batch_size,
        product([*sizes[: layout.axis], layout.outer]),
        product([layout.inner, *sizes[layout.axis + 1 :]]),
        target,
    )
    return found or CrossExample(
        op, "reshapes so that the examples cannot be told apart for certain", is_certain=False
    )


@register_layout("Squeeze", "ExpandDims")
@unless_cross_example
def axes_of_length_1(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Removes or adds axes."""
    if op.inputs[0].shape.rank is None:
        return CrossExample(op, "has an unknown rank", is_certain=False)
    if op.type == "ExpandDims":
        return move(op, batch_axes, unknown="adds an axis that is unknown while tracing")
    why = "removes the batch axis"
    return move(op, batch_axes, unknown=why, across=why, is_certain=True)


register_moves("Transpose", unknown="exchanges axes that are unknown while tracing")


@register_layout("ConcatV2")
@unless_cross_example
def concat(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Joins tensors; along the batch axis, the result is [all of x, all of y]."""
    rank, axis = op.outputs[0].shape.rank, static_value(op.inputs[-1])
    places = {batch_axes.axis_of(t) for t in op.inputs[:-1] if batch_axes.depends(t)}
    if axis is None or rank is None or batch_axes.depends(op.inputs[-1]):
        return CrossExample(
            op, "concatenates along an axis that is unknown while tracing", is_certain=False
        )
    layout = next(iter(places))
    if layout.axis == int(axis) % rank:
        layouts = [batch_axes[t] for t in op.inputs[:-1]]
        found = [p for p in layouts if isinstance(p, BatchAxis)]
        if len(found) < len(layouts) or len({(p.axis, p.inner) for p in found}) > 1:
            return CrossExample(op, "puts other rows beside the examples of the batch")
        outer = [p.outer.static for p in found if p.outer.static is not None]
        if len(outer) < len(found):
            return CrossExample(op, _ACROSS)
        return layout._replace(outer=Size(sum(outer)))
    if len(places) > 1:
        return CrossExample(op, "puts examples beside other ones")
    return layout


@register_layout("Pack")
@unless_cross_example
def pack(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Joins tensors along a new axis."""
    places = {batch_axes.axis_of(t) for t in op.inputs if batch_axes.depends(t)}
    if len(places) > 1:
        return CrossExample(op, "puts examples beside other ones")
    first = next(k for k, t in enumerate(op.inputs) if batch_axes.depends(t))
    return moved(op, first, batch_axes) or CrossExample(op, "has an unknown rank", is_certain=False)


register_moves("Unpack", unknown="has an unknown rank", across="takes the batch apart")


@register_layout("Split", "SplitV")
@unless_cross_example
def split(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Cuts along an axis; along the batch axis, only where a concatenation joined."""
    tensor, axis = (op.inputs[1], op.inputs[0]) if op.type == "Split" else op.inputs[::2]
    layout, axis = batch_axes[tensor], static_value(axis)
    if (
        not isinstance(layout, BatchAxis)
        or axis is None
        or batch_axes.depends(op.inputs[1])
        and op.type == "SplitV"
    ):
        return CrossExample(
            op, "cuts along an axis that is unknown while tracing", is_certain=False
        )
    if int(axis) % tensor.shape.rank != layout.axis:
        return layout
    outer = layout.outer.over(Size(len(op.outputs)))
    return (
        layout._replace(outer=outer) if op.type == "Split" and outer else CrossExample(op, _ACROSS)
    )


@register_layout("Slice")
@unless_cross_example
def slice_(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Cuts out a block."""
    layout, tensor = batch_axes[op.inputs[0]], op.inputs[0]
    if (
        not isinstance(layout, BatchAxis)
        or tensor.shape.rank is None
        or any(map(batch_axes.depends, op.inputs[1:]))
    ):
        return CrossExample(op, "cuts out a block that depends on the data")
    begin, size = (batch_axes.entries(t)[layout.axis] for t in op.inputs[1:])
    given = static_value(op.inputs[2])
    to_end = given is not None and given[layout.axis] == -1
    # A block as long as the batch is the whole batch, wherever it is said to begin.
    whole = size == batch_axes.size(tensor, layout.axis)
    if not (whole or (to_end and begin == Size(0))):
        return CrossExample(op, "takes some examples of the batch")
    return layout


@register_layout("StridedSlice")
@unless_cross_example
def strided_slice(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Python's slices: they must leave the batch axis whole."""
    tensor, layout = op.inputs[0], batch_axes[op.inputs[0]]
    strides = static_value(op.inputs[3])
    if (
        not isinstance(layout, BatchAxis)
        or tensor.shape.rank is None
        or strides is None
        or any(map(batch_axes.depends, op.inputs[1:]))
    ):
        return CrossExample(op, "cuts out a block that depends on the data")
    of_input = (slot for slot in slots(op) if slot.kind != "new")
    kind, k, source, target = next(slot for slot in of_input if slot.source == layout.axis)
    if kind == "whole":
        return layout.at(target)
    from_start, to_end = has_mask(op, "begin", k), has_mask(op, "end", k)
    if kind == "shrink" and not from_start and layout == BatchAxis(layout.axis):
        found = _example_at(op, k, batch_axes)
        if found is not None:
            return found
    begin, end = (batch_axes.entries(t) for t in op.inputs[1:3])
    from_start = from_start or begin[k] == Size(0)
    to_end = to_end or end[k] == batch_axes.size(tensor, source)
    if kind == "shrink" or not from_start or not to_end or strides[k] != 1:
        return CrossExample(op, "takes some examples of the batch")
    return layout.at(target)


def _example_at(op: tf.Operation, k: int, batch_axes: BatchAxes) -> OneExample | None:
    """The example that a slice takes out of the batch, in a loop over the examples."""
    begin, end = op.inputs[1:3]
    if begin.op.type != "Pack" or end.op.type != "Pack":
        return None
    others = [t for b in (begin, end) for j, t in enumerate(b.op.inputs) if j != k]
    return None if any(map(batch_axes.tied, others)) else batch_axes.example_at(begin.op.inputs[k])


_ADDS_ROWS = "adds rows to the batch, or a number of entries that depends on the data"
register_moves("Pad", "PadV2", "MirrorPad", unknown=_ADDS_ROWS, across=_ADDS_ROWS, is_certain=True)


@register_layout("SpaceToBatchND", "BatchToSpaceND")
@unless_cross_example
def space_to_batch(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Moves blocks of space in front of the batch and back, for dilated convolutions."""
    layout, block = batch_axes[op.inputs[0]], static_value(op.inputs[1])
    of_data = any(map(batch_axes.depends, op.inputs[1:]))
    if not isinstance(layout, BatchAxis) or block is None or layout.axis != 0 or of_data:
        return CrossExample(op, _ACROSS)
    blocks = Size(int(block.prod()))
    outer = (
        product([blocks, layout.outer])
        if op.type == "SpaceToBatchND"
        else layout.outer.over(blocks)
    )
    return layout._replace(outer=outer) if outer else CrossExample(op, _ACROSS)
