"""Which axis of which input becomes which axis of an output: one statement per operation type.

The rules of `operations` and `reshaping` ask where the batch axis of an input goes, those of
`origins` where an axis of an output comes from, and `counting` along which axes entries are
combined. An operation that keeps its axes apart needs one map here for all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from typing import Callable, NamedTuple, Union

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


class Origin(enum.Enum):
    """Where an axis of an output comes from, if not from one axis of an input."""

    ABSENT = "the input has no such axis: all entries of the output get the same of it"
    MIXED = "an entry may come from several entries of the input, or from another one"


ABSENT, MIXED = Origin.ABSENT, Origin.MIXED


class Shifted(NamedTuple):
    """An input all of whose axes become axes of the output, in their order, the last ones.

    Attributes:
      by: how many axes the output has before them.
    """

    by: int = 0

    def source(self, axis: int) -> int | Origin:
        """The axis of the input that an axis of the output comes from."""
        return axis - self.by if axis >= self.by else ABSENT

    def target(self, axis: int) -> int | None:
        """The axis of the output that an axis of the input becomes."""
        return axis + self.by


class Moved(NamedTuple):
    """An input some of whose axes become axes of the output.

    Attributes:
      pairs: axes of the input, each with the axis of the output whose entry i is computed from
        entry i of the input alone.
      others: where the other axes of the output come from.
    """

    pairs: tuple[tuple[int, int], ...]
    others: Origin

    def source(self, axis: int) -> int | Origin:
        """The axis of the input that an axis of the output comes from."""
        return next((a for a, b in self.pairs if b == axis), self.others)

    def target(self, axis: int) -> int | None:
        """The axis of the output that an axis of the input becomes; `None` if it is none."""
        return next((b for a, b in self.pairs if a == axis), None)


AxisMap = Union[Shifted, Moved]
# By the number of the input. Those that are left out make no difference between the entries of an
# output, such as the filter of a convolution.
AxisMaps = dict[int, AxisMap]

SAME: AxisMap = Shifted()
# The graph does not tell: a rank, or an axis, is unknown while tracing.
UNKNOWN = Moved((), MIXED)
_MAPS: dict[str, Callable[[tf.Operation, int], AxisMaps]] = {}


def axis_maps(op: tf.Operation, index: int = 0) -> AxisMaps | None:
    """The maps from the inputs of an operation to one of its outputs.

    Args:
      op: the operation.
      index: which of its outputs.

    Returns:
      `None` if there are none for its type.
    """
    found = _MAPS.get(op.type)
    return None if found is None else found(op, index)


def _maps_of(*op_types: str) -> Callable:
    """Registers the maps of operation types, by a function of the operation and the output."""

    def register(maps: Callable[[tf.Operation, int], AxisMaps]) -> Callable:
        _MAPS.update(dict.fromkeys(op_types, maps))
        return maps

    return register


def _map_of_first(*op_types: str) -> Callable:
    """Registers the map of operation types of which no input but the first has one."""

    def register(of_first: Callable[[tf.Operation], AxisMap]) -> Callable:
        _MAPS.update(dict.fromkeys(op_types, lambda op, _: {0: of_first(op)}))
        return of_first

    return register


def _kept(axes: Iterable[int], others: Origin = MIXED) -> Moved:
    """That of an input whose named axes stay, and whose others are worked on as a whole."""
    return Moved(tuple((a, a) for a in axes), others)


def _all_but(rank: int | None, axis: int) -> Moved:
    return UNKNOWN if rank is None else _kept(a for a in range(rank) if a != axis % rank)


def _without(rank: int, gone: Collection[int]) -> Moved:
    """That of an input some of whose axes go away."""
    kept = (a for a in range(rank) if a not in gone)
    return Moved(tuple((a, b) for b, a in enumerate(kept)), MIXED)


def _with_new_axis(rank: int, new: int, of_new: Origin) -> Moved:
    """That of an input to which one axis is added."""
    return Moved(tuple((a, a + (new <= a)) for a in range(rank)), of_new)


def _named_axes(op: tf.Operation, k: int) -> set[int] | None:
    """The axes of the first input that input `k` names; `None` if the graph does not tell."""
    axes, rank = static_value(op.inputs[k]), op.inputs[0].shape.rank
    return None if axes is None or rank is None else {int(a) % rank for a in axes.reshape(-1)}


def channel_axis(op: tf.Operation, data: tf.Tensor) -> int:
    """The axis of channels of data in the format of an operation; their rank must be known."""
    first = op.get_attr("data_format") in (b"NCHW", b"NCDHW")
    return 1 if first else data.shape.rank - 1


def _aligned(op: tf.Operation, k: int) -> AxisMap:
    """That of an input which is broadcast: shapes are aligned from the right."""
    ranks = op.inputs[k].shape.rank, op.outputs[0].shape.rank
    return UNKNOWN if None in ranks else Shifted(ranks[1] - ranks[0])


@_maps_of(*ELEMENTWISE)
def _elementwise(op: tf.Operation, index: int) -> AxisMaps:
    if len(op.inputs) == 1:
        return {0: SAME}
    return {k: _aligned(op, k) for k in range(len(op.inputs))}


@_map_of_first("BroadcastTo")
def _broadcast(op: tf.Operation) -> AxisMap:
    return _aligned(op, 0)


@_map_of_first("Bitcast")
def _bitcast(op: tf.Operation) -> AxisMap:
    """A smaller type adds a last axis, a larger one takes it away."""
    ranks = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    return UNKNOWN if None in ranks else _kept(range(min(ranks)))


@_maps_of("IdentityN")
def _each(op: tf.Operation, index: int) -> AxisMaps:
    return {index: SAME}


@_maps_of("LookupTableFindV2")
def _lookup(op: tf.Operation, index: int) -> AxisMaps:
    return {1: SAME}


@_maps_of("Select")
def _select(op: tf.Operation, index: int) -> AxisMaps:
    """The older `where` does not broadcast, but the condition may be a vector over axis 0."""
    return {0: _kept([0], ABSENT) if op.inputs[0].shape.rank == 1 else SAME, 1: SAME, 2: SAME}


@_map_of_first("ExpandDims")
def _expand_dims(op: tf.Operation) -> AxisMap:
    rank, new = op.inputs[0].shape.rank, static_value(op.inputs[1])
    if rank is None or new is None:
        return UNKNOWN
    return _with_new_axis(rank, new.item() % (rank + 1), ABSENT)


@_map_of_first("Squeeze")
def _squeeze(op: tf.Operation) -> AxisMap:
    shape = op.inputs[0].shape
    if shape.rank is None:
        return UNKNOWN
    gone = {a % shape.rank for a in op.get_attr("squeeze_dims")}
    if not gone:
        gone = {a for a, n in enumerate(shape) if n == 1}
        if op.outputs[0].shape.rank != shape.rank - len(gone):
            return UNKNOWN  # axes of unknown length may go, too
    return _without(shape.rank, gone)


@_map_of_first("Transpose")
def _transpose(op: tf.Operation) -> AxisMap:
    order = static_value(op.inputs[1])
    return (
        UNKNOWN if order is None else Moved(tuple((int(a), b) for b, a in enumerate(order)), MIXED)
    )


@_maps_of("ConcatV2")
def _concat(op: tf.Operation, index: int) -> AxisMaps:
    axis = static_value(op.inputs[-1])
    of_each = UNKNOWN if axis is None else _all_but(op.outputs[0].shape.rank, int(axis))
    return dict.fromkeys(range(len(op.inputs) - 1), of_each)


@_maps_of("Split", "SplitV")
def _split(op: tf.Operation, index: int) -> AxisMaps:
    source, by = (1, 0) if op.type == "Split" else (0, 2)
    axis = static_value(op.inputs[by])
    return {source: UNKNOWN if axis is None else _all_but(op.inputs[source].shape.rank, int(axis))}


@_maps_of("Pack")
def _pack(op: tf.Operation, index: int) -> AxisMaps:
    rank, new = op.outputs[0].shape.rank, op.get_attr("axis")
    of_each = UNKNOWN if rank is None else _with_new_axis(rank - 1, new % rank, MIXED)
    return dict.fromkeys(range(len(op.inputs)), of_each)


@_map_of_first("Unpack")
def _unpack(op: tf.Operation) -> AxisMap:
    rank = op.inputs[0].shape.rank
    return UNKNOWN if rank is None else _without(rank, [op.get_attr("axis") % rank])


@_map_of_first("OneHot")
def _one_hot(op: tf.Operation) -> AxisMap:
    rank, new = op.outputs[0].shape.rank, op.get_attr("axis")
    return UNKNOWN if rank is None else _with_new_axis(rank - 1, new % rank, MIXED)


@_map_of_first("Pad", "PadV2", "MirrorPad")
def _pad(op: tf.Operation) -> AxisMap:
    paddings = static_value(op.inputs[1])
    if paddings is None:
        return UNKNOWN
    return _kept(a for a, around in enumerate(paddings) if not around.any())


@_map_of_first(*REDUCTIONS, "ArgMax", "ArgMin", "ReduceJoin")
def _reduction(op: tf.Operation) -> AxisMap:
    gone, rank = _named_axes(op, 1), op.inputs[0].shape.rank
    if gone is None:
        return UNKNOWN
    if not op.type.startswith("Arg") and op.get_attr("keep_dims"):
        return _kept((a for a in range(rank) if a not in gone), ABSENT)
    return _without(rank, gone)


@_map_of_first("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _along(op: tf.Operation) -> AxisMap:
    axes = _named_axes(op, 2 if op.type == "Roll" else 1)
    if axes is None:
        return UNKNOWN
    return _kept(a for a in range(op.inputs[0].shape.rank) if a not in axes)


@_maps_of("ReverseSequence")
def _reverse_sequence(op: tf.Operation, index: int) -> AxisMaps:
    """Reverses the first entries along one axis, a number for each entry of another."""
    of_data = _all_but(op.inputs[0].shape.rank, op.get_attr("seq_dim"))
    return {0: of_data, 1: Moved(((0, op.get_attr("batch_dim")),), ABSENT)}


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


@_maps_of(*TRAILING)
def _trailing(op: tf.Operation, index: int) -> AxisMaps:
    rank = op.inputs[0].shape.rank
    of_each = UNKNOWN if rank is None else _kept(range(rank - trailing_axes(op)))
    return dict.fromkeys((0, *_BESIDE.get(op.type, ())), of_each)


@_maps_of(*AXIS_0, "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DenseBincount")
def _axis_0(op: tf.Operation, index: int) -> AxisMaps:
    first = {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2}.get(op.type, 0)
    return dict.fromkeys((first, *_BESIDE.get(op.type, ())), _kept([0]))


@_maps_of("BiasAdd")
def _bias_add(op: tf.Operation, index: int) -> AxisMaps:
    if op.inputs[0].shape.rank is None:
        return {0: UNKNOWN, 1: UNKNOWN}
    return {0: SAME, 1: Moved(((0, channel_axis(op, op.inputs[0])),), ABSENT)}


@_maps_of("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _fused_batch_norm(op: tf.Operation, index: int) -> AxisMaps:
    channels, of_data, of_scales = channel_axis(op, op.inputs[0]), SAME, SAME
    if index:  # statistics of the channels
        of_data = Moved(((channels, 0),), MIXED)
    else:
        of_scales = Moved(((0, channels),), ABSENT)
        if op.get_attr("is_training"):
            of_data = _kept([channels])
    return {0: of_data, **dict.fromkeys(range(1, len(op.inputs)), of_scales)}


@_maps_of(*PRODUCTS)
def _product(op: tf.Operation, index: int) -> AxisMaps:
    if any(t.shape.rank is None for t in op.inputs):
        return dict.fromkeys(range(len(op.inputs)), UNKNOWN)
    terms, result = product_terms(op)
    pairs = [[(a, result.index(x)) for a, x in enumerate(t) if x in result] for t in terms]
    return {k: Moved(tuple(of_input), ABSENT) for k, of_input in enumerate(pairs)}


# --- the axes of a `StridedSlice` -----------------------------------------------------------------


class Slot(NamedTuple):
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


def has_mask(op: tf.Operation, name: str, k: int) -> bool:
    """Whether a mask of a `StridedSlice` has a bit for place `k` in the brackets."""
    return bool(op.get_attr(f"{name}_mask") & 1 << k)


def _kind(op: tf.Operation, k: int) -> str:
    if has_mask(op, "ellipsis", k):
        return "ellipsis"
    if has_mask(op, "new_axis", k):
        return "new"
    return "shrink" if has_mask(op, "shrink_axis", k) else "slice"


def slots(op: tf.Operation) -> Iterator[Slot]:
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
                yield Slot("whole", k, source, target)
                source, target = source + 1, target + 1
            continue
        yield Slot(kind, k, source, target)
        source, target = source + (kind != "new"), target + (kind != "shrink")


def sliced_axes(op: tf.Operation) -> AxisMap:
    """Which axis of the input of a `StridedSlice` becomes which of the output, in part or whole.

    It is none of the `axis_maps`: where an axis is cut, entry i need not come from entry i.
    """
    if op.inputs[0].shape.rank is None or static_value(op.inputs[3]) is None:
        return UNKNOWN
    kept = (s for s in slots(op) if s.kind in ("whole", "slice"))
    return Moved(tuple((s.source, s.target) for s in kept), ABSENT)


def whole_axes(op: tf.Operation) -> set[int]:
    """The axes of the input of a `StridedSlice` that its attributes say it takes whole."""
    strides = static_value(op.inputs[3])
    if strides is None:
        return set()

    def is_whole(kind: str, k: int) -> bool:
        from_start_to_end = has_mask(op, "begin", k) and has_mask(op, "end", k) and strides[k] == 1
        return kind == "slice" and from_start_to_end

    return {s.source for s in slots(op) if s.kind == "whole" or is_whole(s.kind, s.k)}
