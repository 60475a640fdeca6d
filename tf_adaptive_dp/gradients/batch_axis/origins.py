"""Where an axis of an output comes from: one rule for each operation type.

The rules of `operations` find the batch axis of an output from those of the inputs. These go the
other way, from an axis of an output back to the axes of the inputs, also of public values.
"""

from __future__ import annotations

from typing import Callable, Optional

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    AXIS_0,
    ELEMENTWISE,
    PRODUCTS,
    REDUCTIONS,
    TRAILING,
    product_terms,
    trailing_axes,
)
from tf_adaptive_dp.gradients.batch_axis.reshaping import find_axis, source_axis
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
    return None if rule is None else rule(op, index, place, batch_axes)


def has_sources(op: tf.Operation) -> bool:
    """Whether there is a rule for an operation."""
    return op.type in _RULES


def _rule(*op_types: str) -> Callable[[SourceRule], SourceRule]:
    def register(rule: SourceRule) -> SourceRule:
        _RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


@_rule(*ELEMENTWISE)
def _elementwise(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.outputs[0].shape.rank
    if len(op.inputs) == 1:
        return [(op.inputs[0], place)]
    if rank is None or any(t.shape.rank is None for t in op.inputs):
        return [(t, None) for t in op.inputs]
    return [(t, place.at(place.axis - rank + t.shape.rank)) for t in op.inputs]


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


@_rule("Bitcast")
def _bitcast(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    ranks = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    split = None in ranks or place.axis >= min(ranks)
    return [(op.inputs[0], None if split else place)]


@_rule("IdentityN")
def _each(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[index], place)]


@_rule("Select")
def _select(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    condition = [] if op.inputs[0].shape.rank == 1 and place.axis > 0 else [(op.inputs[0], place)]
    return [*condition, *((t, place) for t in op.inputs[1:])]


@_rule("BroadcastTo")
def _broadcast(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    ranks = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    return [(op.inputs[0], None if None in ranks else place.at(place.axis + ranks[0] - ranks[1]))]


@_rule("Tile")
def _tile(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    (source, _), axis = op.inputs, place.axis
    times = batch_axes.entries(op.inputs[1])[axis]
    length = batch_axes.size(source, axis)
    if times == ONE:
        return [(source, place)]
    if place.inner.over(length) is not None:
        return []  # whole copies within an example
    outer = None if times is None else place.outer.over(times)
    return [(source, place.at(axis)._replace(outer=outer) if outer else BatchAxis(axis))]


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


@_rule("ExpandDims", "Squeeze")
def _length_1(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source, axis = op.inputs[0], place.axis
    rank = source.shape.rank
    if rank is None:
        return [(source, None)]
    if op.type == "ExpandDims":
        new = static_value(op.inputs[1])
        return [
            (source, None if new is None else place.at(axis - (new.item() % (rank + 1) < axis)))
        ]
    gone = {a % rank for a in op.get_attr("squeeze_dims")}
    if not gone and None in source.shape.as_list():
        return [(source, None)]  # any of these axes may go
    gone = gone or {a for a in range(rank) if source.shape[a] == 1}
    kept = [a for a in range(rank) if a not in gone]
    return [(source, place.at(kept[axis]) if axis < len(kept) else None)]


@_rule("Transpose")
def _transpose(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    order = static_value(op.inputs[1])
    return [(op.inputs[0], None if order is None else place.at(int(order[place.axis])))]


@_rule("ConcatV2")
def _concat(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    parts, axis = op.inputs[:-1], static_value(op.inputs[-1])
    if axis is None or int(axis) % op.outputs[0].shape.rank != place.axis:
        return [(t, None if axis is None else place) for t in parts]
    wanted = []
    for part in parts:
        outer = batch_axes.size(part, place.axis).over(
            product([batch_axes.batch_size, place.inner])
        )
        wanted.append((part, outer and place._replace(outer=outer)))
    return wanted


@_rule("Pack")
def _pack(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources | None:
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    if axis == place.axis:  # one input per row
        return [] if len({t.ref() for t in op.inputs}) == 1 else None
    return [(t, place.at(place.axis - (axis < place.axis))) for t in op.inputs]


@_rule("Unpack")
def _unpack(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    return [(op.inputs[0], place.at(place.axis + (axis <= place.axis)))]


@_rule("Split", "SplitV")
def _split(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source = op.inputs[1 if op.type == "Split" else 0]
    axis = static_value(op.inputs[0 if op.type == "Split" else 2])
    cut = axis is None or int(axis) % source.shape.rank == place.axis
    return [(source, _of_equal_rows(place) if cut else place)]


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
    source = op.inputs[0]
    if source.shape.rank is None or static_value(op.inputs[3]) is None:
        return [(source, None)]
    axis = source_axis(op, place.axis)
    if axis is None:
        return []  # a new one, of length 1
    whole = batch_axes.size(source, axis) == batch_axes.size(op.outputs[0], place.axis)
    return [(source, place.at(axis) if whole else BatchAxis(axis))]


@_rule("Pad", "PadV2", "MirrorPad")
def _pad(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    paddings = static_value(op.inputs[1])
    known = paddings is not None and not paddings[place.axis].any()
    return [(op.inputs[0], place if known else None)]


@_rule(*REDUCTIONS, "ArgMax", "ArgMin")
def _reduction(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source, axes = op.inputs[0], static_value(op.inputs[1])
    rank = source.shape.rank
    if axes is None or rank is None:
        return [(source, None)]
    gone = {int(a) % rank for a in axes.reshape(-1)}
    if op.type in REDUCTIONS and op.get_attr("keep_dims"):
        return [] if place.axis in gone else [(source, place)]
    return [(source, place.at([a for a in range(rank) if a not in gone][place.axis]))]


@_rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _along(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    axes, rank = static_value(op.inputs[2 if op.type == "Roll" else 1]), op.inputs[0].shape.rank
    across = axes is None or place.axis in {int(a) % rank for a in axes.reshape(-1)}
    return [(op.inputs[0], None if across else place)]


@_rule("ReverseSequence")
def _reverse_sequence(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    lengths = [(op.inputs[1], place.at(0))] if place.axis == op.get_attr("batch_dim") else []
    return [(op.inputs[0], None if place.axis == op.get_attr("seq_dim") else place), *lengths]


# The inputs other than the first that have the same leading axes.
_BESIDE = {
    **dict.fromkeys(
        "MatrixSolve MatrixTriangularSolve MatrixSolveLs BandedTriangularSolve "
        "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 TridiagonalSolve "
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits InTopK InTopKV2 "
        "ImageProjectiveTransformV2 ImageProjectiveTransformV3".split(),
        (1,),
    ),
    "TridiagonalMatMul": (1, 2, 3),
    "DenseBincount": (2,),
}


@_rule(*TRAILING)
def _trailing(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[0].shape.rank
    across = rank is None or place.axis >= rank - trailing_axes(op)
    taken = [op.inputs[k] for k in (0, *_BESIDE.get(op.type, ()))]
    return [(t, None if across else place) for t in taken]


@_rule(*AXIS_0, "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DenseBincount")
def _axis_0(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    first = {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2}.get(op.type, 0)
    taken = [op.inputs[k] for k in (first, *_BESIDE.get(op.type, ()))]
    return [(t, None if place.axis else place) for t in taken]


@_rule("BiasAdd")
def _bias_add(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[0].shape.rank
    if rank is None:
        return [(t, None) for t in op.inputs]
    channels = 1 if op.get_attr("data_format") == b"NCHW" else rank - 1
    bias = [(op.inputs[1], place.at(0))] if place.axis == channels else []
    return [(op.inputs[0], place), *bias]


@_rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _fused_batch_norm(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    data, scales = op.inputs[0], op.inputs[1:]
    channels = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else data.shape.rank - 1
    if index:  # statistics of the channels
        return [(data, place.at(channels)), *((t, place) for t in scales)]
    of_channels = place.axis == channels
    across = op.get_attr("is_training") and not of_channels
    return [(data, None if across else place), *((t, place.at(0)) for t in scales if of_channels)]


@_rule(*PRODUCTS)
def _product(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    if any(t.shape.rank is None for t in op.inputs):
        return [(t, None) for t in op.inputs]
    terms, result = product_terms(op)
    letter = result[place.axis]
    return [
        (t, place.at(term.index(letter))) for t, term in zip(op.inputs, terms) if letter in term
    ]


@_rule("OneHot")
def _one_hot(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources | None:
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    if axis == place.axis:
        return None  # it picks a row
    return [(op.inputs[0], place.at(place.axis - (axis < place.axis)))]


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


@_rule("LookupTableFindV2")
def _lookup(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[1], place)]


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
