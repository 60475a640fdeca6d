"""Public values that differ from row to row of the batch.

One more example moves others to other rows. A public value that differs from row to row, such as a
weight for row i, would then change the gradients of the others, although it mixes no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, LOOPS, ancestors, layer_name, static_value
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    AXIS_0,
    ELEMENTWISE,
    REDUCTIONS,
    TRAILING,
    product_terms,
)
from tf_adaptive_dp.gradients.batch_axis.randomness import DRAWS, Draws
from tf_adaptive_dp.gradients.batch_axis.reshaping import find_axis, source_axis
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis

_SLOT = (
    "A value depends on which row of the batch an example is in. One more example would move "
    "others to other rows, and so change their gradients. Received: {op} ({type}) in layer "
    "{layer!r}, which combines the data with {source} ({source_type}), whose entries differ from "
    "row to row, or may. Pass the value as part of the batch, or make it the same for all rows."
)
_SEEDED = (
    "Random numbers with a known seed are tied to the row of the batch, and can be predicted. "
    "Received: {op} ({type}) in layer {layer!r}, which uses the numbers "
    "of {source} ({source_type}). {fix}"
)


class TiedValue(NamedTuple):
    """An operation that combines data with a value that is tied to rows.

    Attributes:
      op: the operation.
      source: the operation that the value comes from.
      fix: how to fix the seed of random numbers; `None` for other values.
    """

    op: tf.Operation
    source: tf.Operation
    fix: str | None = None

    def __str__(self) -> str:
        return (_SLOT if self.fix is None else _SEEDED).format(
            op=self.op.name,
            type=self.op.type,
            layer=layer_name(self.op),
            source=self.source.name,
            source_type=self.source.type,
            fix=self.fix,
        )


class Demand(NamedTuple):
    """A value that must be the same for all examples.

    Attributes:
      batch_axes: the batch axes of its graph.
      tensor: the value.
      place: which of its axes will meet the batch; `None` if that is unknown.
    """

    batch_axes: BatchAxes
    tensor: tf.Tensor
    place: BatchAxis | None


def refuse_slots(loss: tf.Tensor, batch_axes: BatchAxes) -> Draws:
    """Refuses public values that are tied to rows and meet the data.

    Guarantee: in an accepted step, example i has the same gradient in every row, for the same
    random numbers. These are drawn independently and alike for all rows, anew in each step, and no
    one knows them (`Draws.renew` sees to that). So the distribution of the others' gradients does
    not change if an example joins: each example can take its random numbers along to its new row,
    where they are equally likely.

    The search asks, for every operation that combines data with public values, which entries of the
    public ones meet the batch axis. It follows these back to their origin. Axes of length 1,
    constants that are equal along the axis, `tf.fill` and the like are the same for all rows. All
    else counts as tied to rows.

    Args:
      loss: [B], symbolic, accepted by `refuse`.
      batch_axes: the result of `follow`.

    Returns:
      The random numbers that differ from row to row.

    Raises:
      NotPrivateError: if there is such a value. The message names the operation, its layer, the
        origin of the value, and a fix.
    """
    draws = Draws(loss.graph)
    for tied in find_slots(ancestors([loss, *batch_axes.custom_gradients]), batch_axes, draws):
        raise NotPrivateError(str(tied))
    return draws


def find_slots(
    ops: Iterable[tf.Operation], batch_axes: BatchAxes, draws: Draws
) -> Iterator[TiedValue]:
    """Yields what `refuse_slots` refuses; records random numbers in `draws`."""
    proven: set = set()
    for op, inside in _with_bodies(ops, batch_axes):
        for index, output in enumerate(op.outputs):
            place = inside[output]
            if not inside.depends(output) or not isinstance(place, BatchAxis):
                continue
            fix = draws.refusal(op, inside) if op.type in DRAWS else None
            if fix is not None:
                yield TiedValue(op, op, fix)
                continue
            public = [d for d in _demands(op, index, place, inside) or () if not _is_data(d)]
            found = disprove(public, proven, draws)
            if found is not None:
                yield TiedValue(op, *found)


def _with_bodies(
    ops: Iterable[tf.Operation], batch_axes: BatchAxes
) -> Iterator[tuple[tf.Operation, BatchAxes]]:
    for op in ops:
        for graph, inside in batch_axes.bodies_of(op).values():
            tensors = [*graph.outputs, *inside.custom_gradients]
            yield from _with_bodies(ancestors(tensors), inside)
        yield op, batch_axes


def _is_data(demand: Demand) -> bool:
    return demand.batch_axes.depends(demand.tensor)


def disprove(
    demands: list[Demand], proven: set, draws: Draws
) -> tuple[tf.Operation, str | None] | None:
    """The origin of a value that fails a demand, with a fix if it is random; grows `proven`."""
    pending, seen = list(demands), set()
    while pending:
        demand = pending.pop()
        batch_axes, tensor, place = demand
        key = (batch_axes.number, tensor.ref(), place)
        if _is_settled(tensor, place) or key in seen or key in proven:
            continue
        seen.add(key)
        op = tensor.op
        if place is None or batch_axes.depends(tensor):
            return op, None
        same = _is_uniform_constant(tensor, place)
        if same is not None:
            if not same:
                return op, None
        elif op.type in DRAWS:
            fix = draws.refusal(op, batch_axes)
            if fix is not None:
                return op, fix
            pending += [Demand(batch_axes, t, p) for t, p in _parameters(op, place)]
        else:
            wanted = _demands(op, tensor.value_index, place, batch_axes)
            if wanted is None or any(
                d.place is None and not _is_settled(d.tensor, None) for d in wanted
            ):
                return op, None
            pending += wanted
    proven |= seen
    return None


def _is_settled(tensor: tf.Tensor, place: BatchAxis | None) -> bool:
    """Whether the axis that meets the batch is missing or has length 1."""
    rank = tensor.shape.rank
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    if place is None or rank is None:
        return rank == 0
    return place.axis < 0 or rank == 0 or (place.axis < rank and tensor.shape[place.axis] == 1)


def _is_uniform_constant(tensor: tf.Tensor, place: BatchAxis) -> bool | None:
    """Whether a constant is the same for all examples; `None` if the tensor is not constant."""
    value = None if tensor.dtype == tf.variant else constant_of(tensor)
    if value is None:
        return None
    outer, inner = place.outer.static, place.inner.static
    rows = np.moveaxis(value, place.axis, 0)
    if outer is None or inner is None or len(rows) % (outer * inner):
        return _equal(rows, rows[:1])
    rows = rows.reshape([outer, -1, inner, *rows.shape[1:]])
    return _equal(rows, rows[:, :1])


def _equal(rows: np.ndarray, first: np.ndarray) -> bool:
    """Whether all rows are equal to the first; NaN, with which kernels fill, equals NaN."""
    return bool(((rows == first) | ((rows != rows) & (first != first))).all())


def constant_of(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a constant, also of one that functions capture from outside; else `None`."""
    while tensor.op.type == "Placeholder":
        captured = {i.ref(): e for e, i in graphs.captures(tensor.graph)}
        outside = captured.get(tensor.ref())
        if outside is None or outside.dtype == tf.resource:
            return None
        if not graphs.is_symbolic(outside):
            return outside.numpy() if hasattr(outside, "numpy") else None
        tensor = outside
    return static_value(tensor) if tensor.shape.is_fully_defined() else None


def _demands(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    """What must be the same for all examples so that an output is; `None` if that is unknown."""
    if op.type in _BODIES:
        return _BODIES[op.type](op, index, place, batch_axes)
    if op.type in _SOURCES:
        found = sources(op, index, place, batch_axes)
        return None if found is None else [Demand(batch_axes, t, p) for t, p in found]
    # The rule for the batch axis vouches for inputs without one.
    if not batch_axes.depends(op.outputs[index]):
        return None
    layouts = [(t, batch_axes[t]) for t in op.inputs]
    return [Demand(batch_axes, t, p) for t, p in layouts if isinstance(p, BatchAxis)]


# Inputs of an operation, each with the axis that meets the batch; `None` if that is unknown.
Sources = list[tuple[tf.Tensor, Optional[BatchAxis]]]
# Maps an operation and an axis of one output to the inputs and axes that it is computed from.
# `None` if the entries of the output are tied to rows, or may be.
SourceRule = Callable[[tf.Operation, int, BatchAxis, BatchAxes], Optional[Sources]]
_SOURCES: dict[str, SourceRule] = {}


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
    rule = _SOURCES.get(op.type)
    return None if rule is None else rule(op, index, place, batch_axes)


def _sources(*op_types: str) -> Callable[[SourceRule], SourceRule]:
    def register(rule: SourceRule) -> SourceRule:
        _SOURCES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


@_sources(*ELEMENTWISE)
def _elementwise(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.outputs[0].shape.rank
    if len(op.inputs) == 1:
        return [(op.inputs[0], place)]
    if rank is None or any(t.shape.rank is None for t in op.inputs):
        return [(t, None) for t in op.inputs]
    return [(t, place.at(place.axis - rank + t.shape.rank)) for t in op.inputs]


@_sources("Fill", "ZerosLike", "OnesLike", "TensorListReserve", "EmptyTensorList")
def _uniform(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return []


def _parameters(op: tf.Operation, place: BatchAxis) -> Sources:
    """The parameters of a distribution, such as rates, which broadcast to the output."""
    rank = op.outputs[0].shape.rank
    given = [t for t in op.inputs[1:] if t.dtype.is_floating]
    if rank is None or any(t.shape.rank is None for t in given):
        return [(t, None) for t in given]
    return [(t, place.at(place.axis - rank + t.shape.rank)) for t in given]


@_sources("Bitcast")
def _bitcast(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    ranks = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    split = None in ranks or place.axis >= min(ranks)
    return [(op.inputs[0], None if split else place)]


@_sources("IdentityN")
def _each(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[index], place)]


@_sources("Select")
def _select(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    condition = [] if op.inputs[0].shape.rank == 1 and place.axis > 0 else [(op.inputs[0], place)]
    return [*condition, *((t, place) for t in op.inputs[1:])]


@_sources("BroadcastTo")
def _broadcast(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    ranks = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    return [(op.inputs[0], None if None in ranks else place.at(place.axis + ranks[0] - ranks[1]))]


@_sources("Tile")
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


@_sources("Reshape")
def _reshape(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source, output = op.inputs[0], op.outputs[0]
    if source.op.type in ("Fill", "ZerosLike", "OnesLike") or source.shape.num_elements() == 1:
        return []
    if source.shape.rank is None or output.shape.rank is None:
        return [(source, None)]
    sizes = [batch_axes.size(output, a) for a in range(output.shape.rank)]
    found = find_axis(
        batch_axes.batch_size,
        product([*sizes[: place.axis], place.outer]),
        product([place.inner, *sizes[place.axis + 1 :]]),
        [batch_axes.size(source, a) for a in range(source.shape.rank)],
    )
    return [(source, found)]


@_sources("ExpandDims", "Squeeze")
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
    kept = [a for a in range(rank) if a not in (gone or {a}) or source.shape[a] != 1]
    return [(source, place.at(kept[axis]) if axis < len(kept) else None)]


@_sources("Transpose")
def _transpose(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    order = static_value(op.inputs[1])
    return [(op.inputs[0], None if order is None else place.at(int(order[place.axis])))]


@_sources("ConcatV2")
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


@_sources("Pack")
def _pack(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources | None:
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    if axis == place.axis:  # one input per row
        return [] if len({t.ref() for t in op.inputs}) == 1 else None
    return [(t, place.at(place.axis - (axis < place.axis))) for t in op.inputs]


@_sources("Unpack")
def _unpack(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    return [(op.inputs[0], place.at(place.axis + (axis <= place.axis)))]


@_sources("Split", "SplitV")
def _split(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source = op.inputs[1 if op.type == "Split" else 0]
    axis = static_value(op.inputs[0 if op.type == "Split" else 2])
    cut = axis is None or int(axis) % source.shape.rank == place.axis
    return [(source, _of_equal_rows(place) if cut else place)]


def _of_equal_rows(place: BatchAxis) -> BatchAxis:
    """Requires all rows to be equal, since it is unknown which ones are picked."""
    return BatchAxis(place.axis)


@_sources("Slice")
def _slice(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    whole = batch_axes.size(op.inputs[0], place.axis) == batch_axes.size(op.outputs[0], place.axis)
    return [(op.inputs[0], place if whole else _of_equal_rows(place))]


@_sources("StridedSlice")
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


@_sources("Pad", "PadV2", "MirrorPad")
def _pad(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    paddings = static_value(op.inputs[1])
    known = paddings is not None and not paddings[place.axis].any()
    return [(op.inputs[0], place if known else None)]


@_sources(*REDUCTIONS, "ArgMax", "ArgMin")
def _reduction(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    source, axes = op.inputs[0], static_value(op.inputs[1])
    rank = source.shape.rank
    if axes is None or rank is None:
        return [(source, None)]
    gone = {int(a) % rank for a in axes.reshape(-1)}
    if op.type in REDUCTIONS and op.get_attr("keep_dims"):
        return [] if place.axis in gone else [(source, place)]
    return [(source, place.at([a for a in range(rank) if a not in gone][place.axis]))]


@_sources("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _along(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    axes, rank = static_value(op.inputs[2 if op.type == "Roll" else 1]), op.inputs[0].shape.rank
    across = axes is None or place.axis in {int(a) % rank for a in axes.reshape(-1)}
    return [(op.inputs[0], None if across else place)]


@_sources("ReverseSequence")
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


@_sources(*TRAILING)
def _trailing(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[0].shape.rank
    across = rank is None or place.axis >= rank - TRAILING[op.type]
    taken = [op.inputs[k] for k in (0, *_BESIDE.get(op.type, ()))]
    return [(t, None if across else place) for t in taken]


@_sources(*AXIS_0, "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DenseBincount")
def _axis_0(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    first = {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2}.get(op.type, 0)
    taken = [op.inputs[k] for k in (first, *_BESIDE.get(op.type, ()))]
    return [(t, None if place.axis else place) for t in taken]


@_sources("BiasAdd")
def _bias_add(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[0].shape.rank
    if rank is None:
        return [(t, None) for t in op.inputs]
    channels = 1 if op.get_attr("data_format") == b"NCHW" else rank - 1
    bias = [(op.inputs[1], place.at(0))] if place.axis == channels else []
    return [(op.inputs[0], place), *bias]


@_sources("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
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


@_sources("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
def _product(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    if any(t.shape.rank is None for t in op.inputs):
        return [(t, None) for t in op.inputs]
    terms, result = product_terms(op)
    letter = result[place.axis]
    return [
        (t, place.at(term.index(letter))) for t, term in zip(op.inputs, terms) if letter in term
    ]


@_sources("OneHot")
def _one_hot(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources | None:
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    if axis == place.axis:
        return None  # it picks a row
    return [(op.inputs[0], place.at(place.axis - (axis < place.axis)))]


@_sources("GatherV2", "Gather", "ResourceGather")
def _gather(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    table, indices = op.inputs[:2]
    axis = static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if axis is None or indices.shape.rank is None or table.shape.rank is None:
        return [(t, None) for t in (table, indices)]
    axis = int(axis) % table.shape.rank if op.type == "GatherV2" else 0
    shared = op.get_attr("batch_dims") if op.type != "Gather" else 0
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


@_sources("GatherNd", "ResourceGatherNd")
def _gather_nd(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    rank = op.inputs[1].shape.rank
    inside = rank is not None and place.axis < rank - 1
    return [(op.inputs[1] if inside else op.inputs[0], place if inside else None)]


@_sources("LookupTableFindV2")
def _lookup(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[1], place)]


@_sources("TensorListFromTensor")
def _list_from_tensor(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    return [(op.inputs[0], place.at(place.axis + 1))]


@_sources("TensorListStack", "TensorListGather")
def _list_to_tensor(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    return [(op.inputs[0], place.at(place.axis - 1) if place.axis else None)]


@_sources("TensorListGetItem", "TensorListResize", "TensorListPopBack")
def _list(op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes) -> Sources:
    return [(op.inputs[0], place)]


@_sources("TensorListSetItem", "TensorListPushBack")
def _list_with_item(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> Sources:
    item = op.inputs[2 if op.type == "TensorListSetItem" else 1]
    return [(op.inputs[0], place), (item, place)]


def _of_bodies(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    bodies = batch_axes.bodies_of(op)
    found = [Demand(inside, g.outputs[index], place) for g, inside in bodies.values()]
    return found or None


def _of_loop(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    bodies = batch_axes.bodies_of(op)
    if "body" not in bodies:
        return None
    graph, inside = bodies["body"]
    return [
        Demand(batch_axes, op.inputs[index], place),
        Demand(inside, graph.outputs[index], place),
    ]


def _of_argument(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    """The value that a caller passes for an argument, in each step if it is a loop."""
    argument = op.outputs[0]
    if batch_axes.caller is not None:
        outside, call = batch_axes.caller
        k = next((k for k, t in enumerate(op.graph.inputs) if t is argument), None)
        if k is None:
            return None
        if call.type in LOOPS:
            return _of_loop(call, k, place, outside)
        first = 1 if call.type in BRANCHES else 0
        return [Demand(outside, call.inputs[first + k], place)]
    if batch_axes.depends(argument):
        return []  # where the data comes in
    captured = {i.ref(): e for e, i in graphs.captures(op.graph)}
    source = captured.get(argument.ref())
    # It belongs to an outer function, whose data are data here.
    return [Demand(batch_axes, source, place)] if graphs.is_symbolic(source) else None


_BODIES = {
    **dict.fromkeys((*CALLS, *BRANCHES), _of_bodies),
    **dict.fromkeys(LOOPS, _of_loop),
    "Placeholder": _of_argument,
}
