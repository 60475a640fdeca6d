"""What operations such as reshapes and slices do to the batch axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.operations import (
    register_layout,
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
    layout, rank = batch_axes[op.inputs[0]], op.inputs[0].shape.rank
    if rank is None:
        return CrossExample(op, "has an unknown rank", is_certain=False)
    if op.type == "ExpandDims":
        new = static_value(op.inputs[1])
        if not isinstance(layout, BatchAxis) or new is None:
            return CrossExample(op, "adds an axis that is unknown while tracing", is_certain=False)
        return layout.at(layout.axis + (new.item() % (rank + 1) <= layout.axis))
    gone = {a % rank for a in op.get_attr("squeeze_dims")}
    gone = gone or {a for a in range(rank) if op.inputs[0].shape[a] == 1}
    if not isinstance(layout, BatchAxis) or layout.axis in gone or op.outputs[0].shape.rank is None:
        return CrossExample(op, "removes the batch axis")
    return layout.at(layout.axis - sum(a < layout.axis for a in gone))


@register_layout("Transpose")
@unless_cross_example
def transpose(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Exchanges axes."""
    layout, order = batch_axes[op.inputs[0]], static_value(op.inputs[1])
    if not isinstance(layout, BatchAxis) or order is None:
        return CrossExample(op, "exchanges axes that are unknown while tracing", is_certain=False)
    return layout.at(order.tolist().index(layout.axis))


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
    layout, axis = places.pop(), op.get_attr("axis") % op.outputs[0].shape.rank
    if places:
        return CrossExample(op, "puts examples beside other ones")
    return layout.at(layout.axis + (axis <= layout.axis))


@register_layout("Unpack")
@unless_cross_example
def unpack(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Splits an axis into one tensor per entry."""
    layout, axis = batch_axes.axis_of(op.inputs[0]), op.get_attr("axis") % op.inputs[0].shape.rank
    if axis == layout.axis:
        return CrossExample(op, "takes the batch apart")
    return layout.at(layout.axis - (axis < layout.axis))


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


class _Slot(NamedTuple):
    """What a `StridedSlice` does to one axis.

    Attributes:
      kind: `"new"` for an axis that it adds, `"shrink"` for one of which it takes one entry,
        `"slice"`, and `"whole"` for one under an ellipsis or after the last index.
      k: the place in the brackets that says so.
      source: the axis of the input; that which follows, if it is new.
      target: the axis of the output; that which follows, if it shrinks.
    """

    kind: str
    k: int
    source: int
    target: int


def _mask(op: tf.Operation, name: str, bit: int) -> bool:
    return bool(op.get_attr(f"{name}_mask") & 1 << bit)


def _kind(op: tf.Operation, k: int) -> str:
    if _mask(op, "ellipsis", k):
        return "ellipsis"
    if _mask(op, "new_axis", k):
        return "new"
    return "shrink" if _mask(op, "shrink_axis", k) else "slice"


def _slots(op: tf.Operation) -> Iterator[_Slot]:
    """The axes of a `StridedSlice` in order; its strides and the input's rank must be known."""
    rank, count = op.inputs[0].shape.rank, len(static_value(op.inputs[3]))
    kinds = [_kind(op, k) for k in range(count)]
    indexed = sum(kind in ("shrink", "slice") for kind in kinds)
    if "ellipsis" not in kinds:
        kinds.append("ellipsis")  # axes after the last index stay whole
    source = target = 0
    for k, kind in enumerate(kinds):
        if kind == "ellipsis":
            for _ in range(rank - indexed):
                yield _Slot("whole", k, source, target)
                source, target = source + 1, target + 1
            continue
        yield _Slot(kind, k, source, target)
        source, target = source + (kind != "new"), target + (kind != "shrink")


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
    of_input = (slot for slot in _slots(op) if slot.kind != "new")
    kind, k, source, target = next(slot for slot in of_input if slot.source == layout.axis)
    if kind == "whole":
        return layout.at(target)
    from_start, to_end = _mask(op, "begin", k), _mask(op, "end", k)
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


def source_axis(op: tf.Operation, axis: int) -> int | None:
    """Maps an axis of the output of a `StridedSlice` to the axis of its input.

    Args:
      op: the operation; the rank of its input must be known.
      axis: the axis of the output, counted from the front.

    Returns:
      `None` for an axis that is new.
    """
    of_output = [slot for slot in _slots(op) if slot.kind != "shrink"]
    return None if of_output[axis].kind == "new" else of_output[axis].source


def whole_axes(op: tf.Operation) -> set[int]:
    """The axes of the input of a `StridedSlice` that its attributes say it takes whole."""
    strides = static_value(op.inputs[3])
    if strides is None:
        return set()

    def is_whole(kind: str, k: int) -> bool:
        from_start_to_end = _mask(op, "begin", k) and _mask(op, "end", k) and strides[k] == 1
        return kind == "slice" and from_start_to_end

    return {s.source for s in _slots(op) if s.kind == "whole" or is_whole(s.kind, s.k)}


@register_layout("Pad", "PadV2", "MirrorPad")
@unless_cross_example
def pad(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Adds entries, but none along the batch axis."""
    layout, paddings = batch_axes[op.inputs[0]], static_value(op.inputs[1])
    if not isinstance(layout, BatchAxis) or paddings is None or paddings[layout.axis].any():
        return CrossExample(
            op, "adds rows to the batch, or a number of entries that depends on the data"
        )
    return layout


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
