"""Where an axis of an output comes from.

The rules of `operations` find the batch axis of an output from those of the inputs. Here it goes
the other way, from an axis of an output back to the axes of the inputs, also of public values.
Operations without a rule here have `axis_maps`.
"""

from __future__ import annotations

from typing import Callable, Optional

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.axis_maps import (
    ABSENT,
    MIXED,
    Origin,
    axis_maps,
    sliced_axes,
)
from tf_adaptive_dp.gradients.batch_axis.reshaping import find_axis
from tf_adaptive_dp.gradients.batch_axis.rows_outside import batch_dims_of
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis

# Inputs of an operation, each with the axis that meets the batch; `None` if that is unknown.
Sources = list[tuple[tf.Tensor, Optional[BatchAxis]]]
# Maps an operation and an axis of one output to the inputs and axes that it is computed from.
# `None` if the entries of the output are tied to rows, or may be.
SourceRule = Callable[[tf.Operation, int, BatchAxis, BatchAxes], Optional[Sources]]
_RULES: dict[str, SourceRule] = {}


def sources(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources | None:
    """Finds the inputs, and their axes, that an axis of an output comes from.

    Args:
      op: the operation.
      index: which of its outputs.
      place: the axis of the output.
      batch_axes: the batch axes of its graph.

    Returns:
      Inputs without entries of that axis are left out, and an unknown axis is `None`; `None` if
      there is no rule for the operation, or if its output is tied to rows whatever its inputs are.
    """
    rule = _RULES.get(op.type)
    if rule is not None:
        return rule(op, index, place, batch_axes)
    return None if axis_maps(op, index) is None else _mapped(op, index, place)


def _mapped(op: tf.Operation, index: int, place: BatchAxis) -> Sources:
    """What the `axis_maps` of an operation say."""
    found: Sources = []
    for k, of_input in (axis_maps(op, index) or {}).items():
        axis = of_input.source(place.axis)
        if axis is not ABSENT:
            found.append((op.inputs[k], None if isinstance(axis, Origin) else place.at(axis)))
    return found


def has_sources(op: tf.Operation) -> bool:
    """Whether it is known where the axes of an operation's outputs come from."""
    return op.type in _RULES or axis_maps(op) is not None


def _rule(*op_types: str) -> Callable[[SourceRule], SourceRule]:
    def register(rule: SourceRule) -> SourceRule:
        _RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


@_rule("Fill", "ZerosLike", "OnesLike", "TensorListReserve", "EmptyTensorList")
def _uniform(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return []


def parameters(op: tf.Operation, place: BatchAxis) -> Sources:
    """The parameters of a distribution, such as rates, which broadcast to the output."""
    rank = op.outputs[0].shape.rank
    given = [t for t in op.inputs[1:] if t.dtype.is_floating]
    if rank is None or any(t.shape.rank is None for t in given):
        return [(t, None) for t in given]
    return [(t, place.at(place.axis - rank + t.shape.rank)) for t in given]


def before_tile(op: tf.Operation, place: BatchAxis, batch_axes: BatchAxes) -> BatchAxis | Origin:
    """How the batch meets the input of a `Tile`.

    Returns:
      `ABSENT` if each example gets whole copies of the axis; `MIXED` if the graph does not tell.
    """
    times = batch_axes.entries(op.inputs[1])[place.axis]
    if times == ONE:
        return place
    if place.inner.over(batch_axes.size(op.inputs[0], place.axis)) is not None:
        return ABSENT
    outer = None if times is None else place.outer.over(times)
    return place._replace(outer=outer) if outer else MIXED


@_rule("Tile")
def _tile(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    found = before_tile(op, place, batch_axes)
    if found is ABSENT:
        return []
    return [(op.inputs[0], _of_equal_rows(place) if isinstance(found, Origin) else found)]


@_rule("Reshape")
def _reshape(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source, output = op.inputs[0], op.outputs[0]
    if source.op.type in ("Fill", "ZerosLike", "OnesLike") or source.shape.num_elements() == 1:
        return []
    if source.shape.rank is None or output.shape.rank is None:
        return [(source, None)]
    entries = source.shape[1:].num_elements()
    if place.axis == 0 and entries is not None and entries == output.shape[1:].num_elements():
        return [(source, place)]  # row i keeps its entries, however many rows there are
    sizes = [batch_axes.size(output, a) for a in range(output.shape.rank)]
    found = find_axis(
        batch_axes.batch_size,
        product([*sizes[: place.axis], place.outer]),
        product([place.inner, *sizes[place.axis + 1 :]]),
        [batch_axes.size(source, a) for a in range(source.shape.rank)],
    )
    return [(source, found)]


@_rule("ConcatV2")
def _concat(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    mapped = _mapped(op, index, place)
    if static_value(op.inputs[-1]) is None or any(found for _, found in mapped):
        return mapped
    batch_size = batch_axes.batch_size
    wanted: Sources = []
    for part, _ in mapped:  # joined along that axis
        outer = batch_axes.size(part, place.axis).over(product([batch_size, place.inner]))
        wanted.append((part, outer and place._replace(outer=outer)))
    return wanted


@_rule("Pack")
def _pack(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources | None:
    mapped = _mapped(op, index, place)
    if op.outputs[0].shape.rank is None or any(found for _, found in mapped):
        return mapped
    return [] if len({t.ref() for t in op.inputs}) == 1 else None  # one input per row


@_rule("Split", "SplitV")
def _split(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(t, found or _of_equal_rows(place)) for t, found in _mapped(op, index, place)]


def _of_equal_rows(place: BatchAxis) -> BatchAxis:
    """Requires all rows to be equal, since it is unknown which ones are picked."""
    return BatchAxis(place.axis)


@_rule("Slice")
def _slice(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    whole = batch_axes.size(op.inputs[0], place.axis) == batch_axes.size(op.outputs[0], place.axis)
    return [(op.inputs[0], place if whole else _of_equal_rows(place))]


@_rule("StridedSlice")
def _strided_slice(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    source, axis = op.inputs[0], sliced_axes(op).source(place.axis)
    if isinstance(axis, Origin):
        return [] if axis is ABSENT else [(source, None)]  # absent: a new one, of length 1
    whole = batch_axes.size(source, axis) == batch_axes.size(op.outputs[0], place.axis)
    return [(source, place.at(axis) if whole else BatchAxis(axis))]


@_rule("OneHot")
def _one_hot(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources | None:
    mapped = _mapped(op, index, place)
    return mapped if any(found for _, found in mapped) else None  # else it picks a row


@_rule("GatherV2", "Gather", "ResourceGather")
def _gather(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    table, indices = op.inputs[:2]
    axis = static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if axis is None or indices.shape.rank is None or table.shape.rank is None:
        return [(t, None) for t in (table, indices)]
    axis = int(axis) % table.shape.rank if op.type == "GatherV2" else 0
    shared = batch_dims_of(op)
    rows = batch_axes[table]
    if not shared and batch_axes.depends(table) and rows == BatchAxis(axis):
        return []  # rows of the batch at indices 0 to B - 1; others are refused
    own = None if op.type == "ResourceGather" else place  # a variable has no batch axis
    if place.axis < shared:
        return [(table, own), (indices, place)]
    if place.axis < axis:
        return [(table, own)]
    if place.axis < axis + indices.shape.rank - shared:
        return [(indices, place.at(place.axis - axis + shared))]
    return [(table, own and own.at(place.axis - indices.shape.rank + shared + 1))]


@_rule("GatherNd", "ResourceGatherNd")
def _gather_nd(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[1].shape.rank
    inside = rank is not None and place.axis < rank - 1
    return [(op.inputs[1] if inside else op.inputs[0], place if inside else None)]


@_rule("TensorListFromTensor")
def _list_from_tensor(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    return [(op.inputs[0], place.at(place.axis + 1))]


@_rule("TensorListStack", "TensorListGather")
def _list_to_tensor(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    return [(op.inputs[0], place.at(place.axis - 1) if place.axis else None)]


@_rule("TensorListGetItem", "TensorListResize", "TensorListPopBack")
def _list(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[0], place)]


@_rule("TensorListSetItem", "TensorListPushBack")
def _list_with_item(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    item = op.inputs[2 if op.type == "TensorListSetItem" else 1]
    return [(op.inputs[0], place), (item, place)]
