"""What each operation does to the batch axis; an operation without a rule counts as mixing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Union

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.axis_maps import (
    UNKNOWN,
    AxisMap,
    axis_maps,
    channel_axis,
)
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    AXIS_0,
    ELEMENTWISE,
    FUNCTIONS,
    KEEP_LENGTH,
    LISTS,
    PRODUCTS,
    RANDOM,
    REDUCTIONS,
    REPEATABLE,
    SHAPE_ONLY,
    TRAILING,
    product_terms,
    trailing_axes,
)
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    CrossExample,
    DataIndependent,
    OneExample,
    Parts,
    Rows,
    Value,
)

# From an operation to the layouts of its outputs, or to one for all of them.
LayoutRule = Callable[[tf.Operation, BatchAxes], Union[Value, list[Value]]]
_RULES: dict[str, LayoutRule] = {}
# For operations on the parts of examples.
_PART_RULES: dict[str, LayoutRule] = {}

_UNKNOWN = (
    "is an operation that is not known to keep the examples apart (if it does, say so with "
    "`tf_adaptive_dp.gradients.register_layout`)"
)
# Where the picked rows then are is unknown. But on axis 0 they are beside each other.
PICKED = "picks some rows of the batch"


def register_layout(*op_types: str) -> Callable[[LayoutRule], LayoutRule]:
    """Registers what operations do to the batch axis.

    Guarantee: rules decide which operations keep the examples of a batch apart. A rule that returns
    a `BatchAxis` vouches that entry i of the output depends only on entry i of the inputs.

    Args:
      *op_types: names as in `tf.Operation.type`.

    Returns:
      A decorator for `rule(op, batch_axes)`, which returns a `BatchAxis` or
      `CrossExample(op, why)`: one for all outputs, or a list of one per output. The library calls
      it only if an input depends on the data.
    """

    def register(rule: LayoutRule) -> LayoutRule:
        _RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


def register_part_rule(*op_types: str) -> Callable[[LayoutRule], LayoutRule]:
    """Registers what operations do to the parts of examples; without a rule they mix.

    Args:
      *op_types: names as in `tf.Operation.type`.

    Returns:
      A decorator for a rule as `register_layout` takes it. The library calls it only if an input
      has the layout `Parts`.
    """

    def register(rule: LayoutRule) -> LayoutRule:
        _PART_RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register


def run(ops: Iterable[tf.Operation], batch_axes: BatchAxes) -> None:
    """Records the outputs of operations, given in the order of creation."""
    for op in ops:
        if any(batch_axes[t] is not None or batch_axes.depends(t) for t in op.outputs):
            continue  # a source
        apply(op, batch_axes)


def apply(op: tf.Operation, batch_axes: BatchAxes) -> None:
    """Records the outputs of an operation whose inputs are known."""
    if op.type in SHAPE_ONLY:
        # A shape reveals data only if a size does, as after `tf.boolean_mask`.
        told = next(
            (m for m in map(batch_axes.__getitem__, op.inputs) if _tells_sizes(op, m)), None
        )
        if isinstance(told, Parts):
            told = CrossExample(op, "counts the parts of all examples")
        for output in op.outputs:
            batch_axes.set(output, told, told is not None)
        return
    dependent = any(batch_axes.depends(t) for t in op.inputs)
    rule = _RULES.get(op.type)
    if _is_in_iteration(op, batch_axes):
        rule = one_example
    elif any(isinstance(batch_axes[t], Parts) for t in op.inputs):
        rule = _PART_RULES.get(op.type, _mixed_parts)
    if not dependent:
        found = rule(op, batch_axes) if rule and op.type in _MAKE_BATCHES else None
    elif rule is None:
        # Functions have rules that look inside. Nothing else without a rule is trusted.
        found = _first_mixed(op, batch_axes) or CrossExample(op, _UNKNOWN, is_certain=False)
    else:
        found = rule(op, batch_axes)
    found = found if isinstance(found, list) else [found] * len(op.outputs)
    tied = _ties(op, batch_axes)
    for output, value in zip(op.outputs, found):
        alike = op.type in ("ZerosLike", "OnesLike") and isinstance(value, BatchAxis)
        values = dependent and not alike
        if isinstance(value, DataIndependent):
            layout, of_output, values = value.layout, value.tied, False
        else:
            layout, of_output = value, tied
        if isinstance(layout, (CrossExample, OneExample)) and not values:
            layout = None
        if values and layout is None:
            layout = CrossExample(op, "makes one value for all examples")
        batch_axes.set(output, layout, values)
        if not values:
            batch_axes.tie(output, of_output)


def _tells_sizes(op: tf.Operation, layout: Value) -> bool:
    if isinstance(layout, OneExample):
        return not all(t.shape.is_fully_defined() for t in op.inputs)
    return isinstance(layout, (CrossExample, Parts))


def _mixed_parts(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    return _first_mixed(op, batch_axes) or CrossExample(op, "mixes the parts of examples")


def _ties(op: tf.Operation, batch_axes: BatchAxes) -> frozenset[tf.Graph]:
    """The loop bodies from whose iteration to iteration public outputs of the operation change."""
    if batch_axes.loops and _has_memory(op):
        return batch_axes.loops
    return frozenset().union(*map(batch_axes.tied, op.inputs))


def _has_memory(op: tf.Operation) -> bool:
    """Whether it may return another value each time that is not random, or has a known seed."""
    if op.type in RANDOM and op.op_def.is_stateful:
        return bool(op.get_attr("seed") or op.get_attr("seed2"))
    return op.op_def.is_stateful and op.type not in REPEATABLE


def _is_in_iteration(op: tf.Operation, batch_axes: BatchAxes) -> bool:
    """Whether it works on single examples of a loop over them, and has no rule for that."""
    return op.type not in _FOLLOWED and any(
        isinstance(batch_axes[t], (Rows, OneExample)) and batch_axes.depends(t) for t in op.inputs
    )


def one_example(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """What is computed from one example alone belongs to it, whatever the operation.

    The operation must do the same each time, and must not learn the place of the example in the
    batch.
    """
    place, *others = {batch_axes[t] for t in op.inputs if batch_axes.depends(t)}
    mixed = _first_mixed(op, batch_axes)
    if mixed or others or not isinstance(place, OneExample):
        return mixed or CrossExample(op, "puts the example of one iteration beside other ones")
    if op.op_def.is_stateful and op.type not in REPEATABLE:
        return CrossExample(op, "may remember the examples of other iterations", is_certain=False)
    if any(place.loop in batch_axes.tied(t) for t in op.inputs):
        return CrossExample(
            op,
            "uses where in the batch an example is, or numbers that depend on it",
            is_certain=False,
        )
    return place


def _first_mixed(op: tf.Operation, batch_axes: BatchAxes) -> CrossExample | None:
    return next(
        (m for m in map(batch_axes.__getitem__, op.inputs) if isinstance(m, CrossExample)), None
    )


def _data(op: tf.Operation, batch_axes: BatchAxes) -> list[tf.Tensor]:
    """The inputs with a batch axis: those that depend on the data, if there are any."""
    placed = [t for t in op.inputs if isinstance(batch_axes[t], BatchAxis)]
    return [t for t in placed if batch_axes.depends(t)] or placed


def unless_cross_example(rule: LayoutRule) -> LayoutRule:
    """Keeps mixed inputs mixed, with the first reason, before it asks `rule`."""

    def wrapped(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
        return _first_mixed(op, batch_axes) or rule(op, batch_axes)

    return wrapped


def move(
    op: tf.Operation,
    batch_axes: BatchAxes,
    *,
    unknown: str,
    across: str = "works across the batch axis",
    is_certain: bool = False,
) -> Value:
    """The batch axis of the first input, where the operation's `axis_maps` say that it goes.

    Args:
      op: one with a map from its first input; the others hold axes, lengths and the like.
      batch_axes: the batch axes of its graph.
      unknown: why it may mix examples where the map is unknown, or another input depends on data.
      across: why it mixes them where the batch axis is worked on as a whole.
      is_certain: see `CrossExample`, for `unknown`.
    """
    layout, of_data = batch_axes[op.inputs[0]], any(map(batch_axes.depends, op.inputs[1:]))
    if not isinstance(layout, BatchAxis) or _map_of(op, 0) is UNKNOWN or of_data:
        return CrossExample(op, unknown, is_certain)
    return moved(op, 0, batch_axes) or CrossExample(op, across)


def moved(op: tf.Operation, k: int, batch_axes: BatchAxes) -> BatchAxis | None:
    """Where the batch axis of input `k` goes; `None` if that is unknown, or it goes away."""
    layout = batch_axes.axis_of(op.inputs[k])
    axis = _map_of(op, k).target(layout.axis)
    return None if axis is None else layout.at(axis)


def _map_of(op: tf.Operation, k: int) -> AxisMap:
    return (axis_maps(op) or {}).get(k, UNKNOWN)


def register_moves(*op_types: str, **why: Any) -> None:
    """Registers operations that only `move` the batch axis, with its arguments."""
    register_layout(*op_types)(unless_cross_example(functools.partial(move, **why)))


@register_layout(*ELEMENTWISE)
@unless_cross_example
def elementwise(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Batch axes must coincide when shapes are aligned from the right."""
    rank = op.outputs[0].shape.rank
    single = not isinstance(batch_axes[op.inputs[0]], BatchAxis)
    if op.type in _SAME and (rank is None or single):
        return batch_axes[op.inputs[0]]
    data = _data(op, batch_axes)
    if rank is None and len(data) == 1:  # other numbers are not broadcast
        if all(t is data[0] or t.shape.rank == 0 for t in op.inputs):
            return batch_axes[data[0]]
    places, of_data = set(), {t.ref() for t in data}
    for k, tensor in enumerate(op.inputs):
        if tensor.ref() in of_data:
            place = moved(op, k, batch_axes)
            if tensor.shape.rank is None or rank is None or place is None:
                return CrossExample(op, "has an unknown rank", is_certain=False)
            places.add(place)
    if len(places) > 1:
        return CrossExample(op, "combines each example with every other one, by broadcasting")
    return places.pop() if places else None


@register_layout("Equal")
def equal(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """An integer always equals itself, which `tf.recompute_grad` compares."""
    if op.inputs[0] is op.inputs[1] and not op.inputs[0].dtype.is_floating:
        return DataIndependent()
    return elementwise(op, batch_axes)


@register_layout("Minimum")
def minimum(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """min(n, max(n, x)) is n, as is the length of `tf.math.bincount` between equal bounds."""
    return DataIndependent() if is_bound(op) else elementwise(op, batch_axes)


def is_bound(op: tf.Operation) -> bool:
    """Whether an operation is min(n, max(n, x)) for a constant n, whatever x is."""
    if op.type != "Minimum":
        return False
    for bound, other in (op.inputs, reversed(op.inputs)):
        length = _whole_number(bound)
        if length is not None and other.op.type == "Maximum" and other.shape.rank == 0:
            if any(_whole_number(t) == length for t in other.op.inputs):
                return True
    return False


def _whole_number(tensor: tf.Tensor) -> int | None:
    """The value of a constant that is one integer."""
    integer = tensor.dtype.is_integer and tensor.shape.rank == 0
    value = static_value(tensor) if integer else None
    return None if value is None else int(value)


@register_layout("IdentityN")
def identity_n(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Each output is an input."""
    return [batch_axes[t] for t in op.inputs]


@register_layout("Select")
@unless_cross_example
def select(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """The older `where` does not broadcast, but the condition may be a vector over axis 0."""
    places = {batch_axes.axis_of(t) for t in _data(op, batch_axes)}
    if len(places) > 1 or (op.inputs[0].shape.rank == 1 and BatchAxis() not in places):
        return CrossExample(op, "combines examples with other ones")
    return places.pop()


@register_layout(*TRAILING)
@unless_cross_example
def trailing(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Works on the last axes as a whole."""
    places = {batch_axes.axis_of(t) for t in _data(op, batch_axes)}
    broadcasts = "Solve" in op.type
    ranks = {t.shape.rank for t in (op.inputs if broadcasts else _data(op, batch_axes))}
    if len(places) > 1 or len(ranks) > 1 or None in ranks:
        return CrossExample(op, "combines examples with other ones")
    layout, rank = places.pop(), ranks.pop()
    if layout.axis >= rank - trailing_axes(op):
        return CrossExample(op, "works across the batch axis")
    return layout


@register_layout(*AXIS_0, "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DenseBincount")
@unless_cross_example
def axis_0(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Axis 0 is the batch for all inputs that have one; filters must not depend on the data."""
    places = {batch_axes.axis_of(t) for t in _data(op, batch_axes)}
    layout = places.pop()
    counts_the_batch = op.type == "DenseBincount" and op.inputs[0].shape.rank != 2
    if places or layout.axis != 0 or counts_the_batch:
        return CrossExample(op, "works across the batch axis")
    if op.type.startswith(("Conv", "Depthwise", "Dilation")) and batch_axes.depends(op.inputs[1]):
        return CrossExample(op, "has a filter that depends on the data")
    if op.type in _SIZE_INPUTS and batch_axes.depends(op.inputs[_SIZE_INPUTS[op.type]]):
        return CrossExample(op, "makes outputs whose size depends on the data")
    if _window_over_axis_0(op):
        return CrossExample(op, "works across the batch axis")
    if op.type == "MaxPoolWithArgmax" and op.get_attr("include_batch_in_index"):
        return CrossExample(op, "returns the place of an example in the batch")
    return layout


# Inputs that hold the size of the output. One of two numbers passes for a batch of two.
_SIZE_INPUTS = {
    **dict.fromkeys("ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor".split(), 1),
    **dict.fromkeys("ImageProjectiveTransformV2 ImageProjectiveTransformV3".split(), 2),
    **dict.fromkeys("Conv2DBackpropInput Conv3DBackpropInputV2".split(), 0),
    **dict.fromkeys("AvgPoolGrad AvgPool3DGrad DepthwiseConv2dNativeBackpropInput".split(), 0),
}


def _window_over_axis_0(op: tf.Operation) -> bool:
    """Whether a pooling window may hold several examples. XLA would compute it; kernels refuse."""
    if op.type == "MaxPoolV2":
        windows = [static_value(t) for t in op.inputs[1:]]
        return any(w is None or w[0] != 1 for w in windows)
    if "Pool" not in op.type:
        return False
    return any(op.get_attr(name)[0] != 1 for name in ("ksize", "strides"))


@register_layout("BiasAdd")
@unless_cross_example
def bias_add(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Adds the same vector to all."""
    if batch_axes.depends(op.inputs[1]):
        return CrossExample(op, "has a bias that depends on the data")
    return batch_axes[op.inputs[0]]


@register_layout("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
@unless_cross_example
def fused_batch_norm(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Training mode normalizes over all axes but the channels; LayerNormalization uses it too."""
    layout = batch_axes[op.inputs[0]]
    if not isinstance(layout, BatchAxis) or any(batch_axes.depends(t) for t in op.inputs[1:]):
        return CrossExample(op, "has scales that depend on the data")
    if not op.get_attr("is_training"):
        return [layout, *[DataIndependent()] * (len(op.outputs) - 1)]  # the given statistics
    if layout.axis != channel_axis(op, op.inputs[0]):
        return CrossExample(op, "is BatchNormalization in training mode")
    return [layout, *[layout.at(0)] * (len(op.outputs) - 1)]


@register_layout(*PRODUCTS)
@unless_cross_example
def tensor_product(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """The letter of the batch must remain, and be the same in all inputs with data."""
    if any(t.shape.rank is None for t in op.inputs):
        return CrossExample(op, "has an unknown rank", is_certain=False)
    terms, result = product_terms(op)
    letters, data = set(), [t.ref() for t in _data(op, batch_axes)]
    for tensor, term in zip(op.inputs, terms):
        if tensor.ref() in data:
            layout = batch_axes.axis_of(tensor)
            if term.count(term[layout.axis]) > 1:
                return CrossExample(op, "picks another entry for each row of the batch")
            letters.add((term[layout.axis], layout.outer, layout.inner))
    if len(letters) > 1:
        return CrossExample(op, "multiplies each example with every other one")
    if not letters:
        return None  # public values without a batch axis
    letter, outer, inner = letters.pop()
    if letter not in result:
        return CrossExample(op, "sums over the batch axis")
    return BatchAxis(result.index(letter), outer, inner)


def sum_to_operand(op: tf.Operation, batch_axes: BatchAxes) -> BatchAxis | None:
    """The batch axis after a sum over the axes along which an operand was broadcast.

    The gradient of `x * y` sums over the axes along which x was broadcast, and reshapes to the
    shape of x. These axes are unknown while tracing. But if x has a batch axis, it is among them
    only if its length is 1, and then summing over it changes nothing. Releases of TensorFlow differ
    in whether the sum keeps these axes, with length 1, until the reshape removes them.

    Args:
      op: a sum over axes that are unknown while tracing.
      batch_axes: the batch axes of its graph.

    Returns:
      The batch axis in the shape of x; `None` for any other sum, and for a sum over the batch.
    """
    tensor, axes = op.inputs
    layout, rank, source = batch_axes[tensor], tensor.shape.rank, axes.op
    if source.type != "BroadcastGradientArgs" or not isinstance(layout, BatchAxis) or rank is None:
        return None
    shape = source.inputs[axes.value_index]
    ranks = [t.shape[0] for t in source.inputs]
    if None in ranks or rank != max(ranks):
        return None
    own, first = batch_axes.entries(shape), rank - ranks[axes.value_index]
    kept = [a for a, size in enumerate(own) if size != ONE]
    if any(own[a] != batch_axes.size(tensor, first + a) for a in kept):
        return None
    users = op.outputs[0].consumers()
    if not (op.get_attr("keep_dims") and first):  # else its axes have other places than those of x
        users = [u for u in users if u.type not in SHAPE_ONLY]
    if any(u.type != "Reshape" or u.inputs[1] is not shape for u in users):
        return None
    return layout.at(layout.axis - first) if layout.axis - first in kept else None


@register_layout(*REDUCTIONS, "ArgMax", "ArgMin", "ReduceJoin")
def reduction(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Axes go away, or stay with length 1."""
    layout, axes = batch_axes[op.inputs[0]], static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if axes is not None and _is_over_rows(axes, rank):
        unknown_rank = rank is None and layout == BatchAxis()
        if unknown_rank or (isinstance(layout, CrossExample) and layout.why == PICKED):
            return CrossExample(op, "reduces over the batch axis")
    return _reduction(op, batch_axes)


def _is_over_rows(axes: np.ndarray, rank: int | None) -> bool:
    """Whether axis 0 is among the axes of a tensor whose rank may be unknown."""
    return any(a == 0 or (rank and int(a) % rank == 0) for a in axes.reshape(-1))


@unless_cross_example
def _reduction(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    if op.type == "Sum" and static_value(op.inputs[1]) is None:
        found = sum_to_operand(op, batch_axes)
        if found:
            return found
    return move(
        op,
        batch_axes,
        unknown="reduces over axes that are unknown while tracing",
        across="reduces over the batch axis",
    )


_OF_DATA = "works along axes, or by steps, that depend on the data"
_ALONG = ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
register_moves(*_ALONG, unknown=_OF_DATA, is_certain=True)
register_moves("Bitcast", unknown="works across the batch axis", is_certain=True)


@register_layout("RandomShuffle", "StatelessShuffle")
@unless_cross_example
def shuffle(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Moves rows of axis 0; the search does not follow a shuffle of anything else."""
    if batch_axes[op.inputs[0]] == BatchAxis():
        return CrossExample(op, "puts examples into the rows of others")
    return CrossExample(op, _UNKNOWN, is_certain=False)


@register_layout("ReverseSequence")
@unless_cross_example
def reverse_sequence(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Reverses the first entries along one axis, a number for each entry of another."""
    axis = op.get_attr("batch_dim")
    data, lengths = op.inputs
    found = {batch_axes.axis_of(data)} if batch_axes.depends(data) else set()
    if batch_axes.depends(lengths):
        of_lengths = batch_axes.axis_of(lengths)
        found.add(of_lengths.at(axis + of_lengths.axis))
    if len(found) > 1 or next(iter(found)).axis != axis or op.get_attr("seq_dim") == axis:
        return CrossExample(op, "works across the batch axis")
    return found.pop()


@register_layout("Fill", *RANDOM)
@unless_cross_example
def new_tensor(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """A tensor of a given shape; batch size in the shape makes it a batch."""
    if any(batch_axes.depends(t) for t in op.inputs):
        return CrossExample(op, "spreads one value over the batch")
    return batch_axes.in_target(batch_axes.entries(op.inputs[0]))


@register_layout("BroadcastTo", "Tile")
@unless_cross_example
def spread(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Repeats along axes; a public value that is repeated B times becomes a batch."""
    layout, tensor = batch_axes[op.inputs[0]], op.inputs[0]
    if batch_axes.depends(op.inputs[1]):
        return CrossExample(op, "makes an output whose shape depends on the data")
    target = batch_axes.entries(op.inputs[1])
    if not isinstance(layout, BatchAxis):
        made = batch_axes.in_target(target)
        if made and op.type == "Tile":
            made = made._replace(inner=product([made.inner, batch_axes.size(tensor, made.axis)]))
        return made
    if op.type == "BroadcastTo":
        return layout.at(layout.axis + len(target) - tensor.shape.rank)
    times = target[layout.axis]
    if times is None:
        return CrossExample(
            op,
            "repeats the batch a number of times that is unknown while tracing",
            is_certain=False,
        )
    return layout._replace(outer=product([times, layout.outer]))


_MAKE_BATCHES = {"Fill", "BroadcastTo", "Tile", *RANDOM, *ELEMENTWISE, *KEEP_LENGTH}
# These follow the batch axis of public values too, such as an initial state or a random mask.
_MAKE_BATCHES |= {"BatchMatMulV2", "Einsum", "ExpandDims", "MatMul", "Reshape", "Squeeze"}
_MAKE_BATCHES |= {"StridedSlice", "Transpose"}
_SAME = {"Identity", "StopGradient", "PreventGradient"}
# Their rules handle single examples in loops, or look into functions.
_FOLLOWED = {*_SAME, "IdentityN", *LISTS, *FUNCTIONS}


# --- gradients inside the loss, as in a penalty on the gradient with respect to the inputs --------

register_layout(
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "DepthwiseConv2dNativeBackpropInput",
    "LRNGrad",
    "MaxPoolGrad",
    "MaxPoolGradV2",
    "MaxPool3DGrad",
    "ResizeBicubicGrad",
    "ResizeBilinearGrad",
    "ResizeNearestNeighborGrad",
)(axis_0)


@register_layout("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
@unless_cross_example
def fused_batch_norm_grad(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """The gradient of a frozen normalization, or of one with the examples as channels."""
    entries = {batch_axes.axis_of(t) for t in op.inputs[:2] if batch_axes.depends(t)}
    scales = {batch_axes.axis_of(t) for t in op.inputs[2:] if batch_axes.depends(t)}
    channels = channel_axis(op, op.inputs[1])
    of_scales = CrossExample(op, "sums over the batch axis")
    if len(entries) == 1:
        layout = entries.pop()
        if layout.axis == channels and scales <= {layout.at(0)}:
            return [layout, *[layout.at(0)] * (len(op.outputs) - 1)]
        if not scales and not op.get_attr("is_training"):
            return [layout, *[of_scales] * (len(op.outputs) - 1)]
    return CrossExample(op, "is BatchNormalization in training mode")
