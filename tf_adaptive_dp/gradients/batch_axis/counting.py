"""Losses that depend on the number of examples in the batch.

If that number is random, one more example would change such a loss for all others. The batch size
may determine the length of an axis, but must not become a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    BRANCHES,
    CALLS,
    LOOPS,
    ancestors,
    behind_identities,
    static_value,
)
from tf_adaptive_dp.gradients.batch_axis.analysis import is_element
from tf_adaptive_dp.gradients.batch_axis.axis_maps import (
    SAME,
    UNKNOWN,
    Origin,
    axis_maps,
    sliced_axes,
    whole_axes,
)
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    AXIS_0,
    ELEMENTWISE,
    PRODUCTS,
    RANDOM,
    REDUCTIONS,
    SEGMENTS,
    SHAPE_ONLY,
    TRAILING,
    trailing_axes,
)
from tf_adaptive_dp.gradients.batch_axis.operations import is_bound
from tf_adaptive_dp.gradients.batch_axis.randomness import DRAWS
from tf_adaptive_dp.gradients.batch_axis.sizes import Entries, Size, evaluate
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, Rows

# Inputs that only determine the lengths of axes.
_LENGTHS = {
    **dict.fromkeys((*RANDOM, *DRAWS), {0}),
    "AvgPool3DGrad": {0},
    "AvgPoolGrad": {0},
    "BroadcastTo": {1},
    "Conv2DBackpropInput": {0},
    "Conv3DBackpropInputV2": {0},
    "DepthwiseConv2dNativeBackpropInput": {0},
    "EmptyTensorList": {0, 1},
    "Fill": {0},
    "Multinomial": {1},
    "OneHot": {1},
    "Range": {1},
    "Reshape": {1},
    "RngReadAndSkip": {2},
    "Slice": {2},
    "StridedSlice": {2},
    "TensorListFromTensor": {1},
    "TensorListGather": {2},
    "TensorListGetItem": {2},
    "TensorListReserve": {0, 1},
    "TensorListResize": {1},
    "TensorListStack": {1},
    "Tile": {1},
}
# What these operations compute from one entry does not depend on the number of others.
_ENTRY_BY_ENTRY = {
    *(*ELEMENTWISE, *_LENGTHS, *AXIS_0),
    *"BiasAdd Bitcast ConcatV2 Const ExpandDims IdentityN MirrorPad Pack Pad PadV2".split(),
    *"Select Squeeze TensorListPopBack TensorListPushBack TensorListSetItem Transpose".split(),
    *"FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Unpack".split(),
}
# They combine the entries along an axis that ends there, see `axis_maps`.
_COMBINE = REDUCTIONS | PRODUCTS
_COMBINE |= {"ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll"}
_TARGETS = {**dict.fromkeys((*RANDOM, *DRAWS, "Fill"), 0), "BroadcastTo": 1, "Slice": 2}


def counts_batch(
    loss: tf.Tensor, batch_axes: BatchAxes, penalties: Sequence[tf.Tensor] = ()
) -> bool:
    """Whether a loss, a penalty or a custom gradient may depend on the batch size.

    Guarantee: if this returns `False`, entry i of the loss is the same function of example i for
    every batch size, as far as the graph tells. Every value computed from the size counts, whatever
    its type, unless it only determines the length of an axis. Decisions and lengths of loops count
    for their results. So do sums and selections along an axis whose length depends on the size.
    The search does not follow the size into variables, nor into whether a step fails.

    Args:
      loss: [B], symbolic, accepted by `refuse`.
      batch_axes: the result of `follow`.
      penalties: numbers whose gradients are released as they are.
    """
    if not batch_axes.batch_size.unknowns:
        return False
    found = _Counting(batch_axes)
    results = [loss, *penalties, *batch_axes.custom_gradients]
    found.run(ancestors(results))
    return any(map(found.counts, results)) or found.in_gradients


class _Counting:
    """What depends on the batch size, in one graph.

    Attributes:
      in_gradients: whether a custom gradient in a body does.
    """

    def __init__(self, batch_axes: BatchAxes, outside: _Counting | None = None):
        self.batch_axes = batch_axes
        self.in_gradients = False
        self._outside = outside
        self._fed: dict = {}
        self._values: set = set()
        self._wide: dict = {}
        # Unknown lengths that depend on the size of the batch.
        self._lengths: set = {"batch"} if outside is None else outside._lengths

    def counts(self, tensor: tf.Tensor) -> bool:
        """Whether the values of a tensor depend on the batch size."""
        return tensor.ref() in self._values

    def wide(self, tensor: tf.Tensor) -> frozenset[int]:
        """The axes whose length depends on it, other than the batch axis of data."""
        return self._wide.get(tensor.ref(), frozenset())

    def entries(self, tensor: tf.Tensor) -> Entries:
        """Does the same as `BatchAxes.entries`, and follows arguments of functions."""
        return evaluate(tensor, self.batch_axes.size, self._given)

    def run(self, ops: Iterable[tf.Operation]) -> None:
        """Processes operations, given in the order of creation."""
        for op in ops:
            if op.type in CALLS | BRANCHES and not is_element(op):
                self._call(op)
            elif op.type in LOOPS:
                self._loop(op)
            elif not all(t.ref() in self._wide for t in op.outputs):
                for tensor in op.outputs:
                    self.enter(tensor, self._counts(op, tensor), self._wide_axes(op, tensor))

    def enter(self, tensor: tf.Tensor, counts: bool, wide: frozenset[int]) -> None:
        """Records what is known about a tensor."""
        if counts:
            self._values.add(tensor.ref())
        self._wide[tensor.ref()] = wide
        for axis in wide:
            if tensor.shape.rank and 0 <= axis < tensor.shape.rank:
                size = self.batch_axes.size(tensor, axis)
                self._lengths.update(size.unknowns if _is_own(size, tensor, axis) else ())

    def _given(self, tensor: tf.Tensor) -> Entries | None:
        """The entries of an argument of a function."""
        source = self._fed.get(tensor.ref())
        if source is None or self._outside is None:
            return None
        return self._outside.entries(source)

    def _depends(self, size: Size) -> bool:
        return any(unknown in self._lengths for unknown in size.unknowns)

    def _counts(self, op: tf.Operation, output: tf.Tensor) -> bool:
        if op.type in ("Rank", "ZerosLike", "OnesLike", "Const"):
            return False
        if op.type == "Equal" and op.inputs[0] is op.inputs[1] and op.inputs[0].dtype.is_integer:
            return False
        if is_bound(op):
            return False
        if op.type in SHAPE_ONLY:
            return self._shape_counts(op, output)
        if op.type == "BroadcastGradientArgs":
            # These are the axes along which one of two shapes has length 1. So has a batch of one,
            # but summing an axis of length 1 changes nothing.
            return False
        given = [t for k, t in enumerate(op.inputs) if k not in _LENGTHS.get(op.type, ())]
        if any(map(self.counts, given)):
            entries = self.entries(output) if _may_be_shape(output) else []
            return not entries or any(e is None or self._depends(e) for e in entries)
        return self._joins_wide_axes(op, output)

    def _shape_counts(self, op: tf.Operation, output: tf.Tensor) -> bool:
        tensor = op.inputs[output.value_index]
        if tensor.shape.rank is None:
            return True
        return any(self._depends(self.batch_axes.size(tensor, a)) for a in range(tensor.shape.rank))

    def _joins_wide_axes(self, op: tf.Operation, output: tf.Tensor) -> bool:
        """Whether an operation combines or picks entries along an axis of such a length."""
        if not any(map(self.wide, op.inputs)):
            return False
        if op.type in _COMBINE:
            is_unknown = any(m is UNKNOWN for m in (axis_maps(op) or {}).values())
            return is_unknown or None in self._targets(op)
        wide, rank = self.wide(op.inputs[0]), op.inputs[0].shape.rank
        if op.type in TRAILING:
            last = trailing_axes(op)
            return any(a >= t.shape.rank - last for t in op.inputs for a in self.wide(t))
        if op.type == "GatherV2":
            axis = static_value(op.inputs[2])
            return axis is None or int(axis) % rank in wide
        if op.type in SEGMENTS:
            reduced = op.inputs[1].shape.rank
            return reduced is None or any(a < reduced for a in wide)
        if op.type in ("Slice", "StridedSlice"):
            return self._picks(op, output)
        if op.type in ("Split", "SplitV"):
            return True
        if any(map(self.batch_axes.depends, op.inputs)):
            return False  # the rule for its batch axis knows how its inputs meet
        return op.type not in _ENTRY_BY_ENTRY

    def _targets(self, op: tf.Operation) -> set[int | None]:
        """The axes of the output that axes of such a length become; `None` for those that end."""
        maps = (axis_maps(op) or {}).items()
        return {of_input.target(a) for k, of_input in maps for a in self.wide(op.inputs[k])}

    def _picks(self, op: tf.Operation, output: tf.Tensor) -> bool:
        source, rank = op.inputs[0], output.shape.rank
        kept = SAME if op.type == "Slice" else sliced_axes(op)
        size = self.batch_axes.size
        sources = [(kept.source(b), b) for b in range(rank)]
        places = [(a, b) for a, b in sources if not isinstance(a, Origin)]
        whole = {a for a, b in places if size(source, a) == size(output, b)}
        if op.type == "StridedSlice":
            whole |= whole_axes(op)
        return bool(self.wide(source) - whole)

    def _wide_axes(self, op: tf.Operation, output: tf.Tensor) -> frozenset[int]:
        """The axes of an output whose length depends on the batch size."""
        if output.dtype == tf.variant or op.type.startswith("TensorList"):
            return self._wide_axes_of_list(op)
        if op.type == "BroadcastGradientArgs":
            return frozenset()
        layout, rank = self.batch_axes[output], output.shape.rank
        own = layout.axis if isinstance(layout, BatchAxis) else None
        if rank is None:
            return frozenset([0] if any(map(self.wide, op.inputs)) else [])
        unsettled = [a for a in range(rank) if output.shape[a] is None]
        if self.batch_axes.depends(output):
            unsettled = [a for a in unsettled if a != own]
        return frozenset(a for a in unsettled if self._is_wide(op, output, a, own))

    def _is_wide(self, op: tf.Operation, output: tf.Tensor, axis: int, own: int | None) -> bool:
        """Whether the length of an axis may depend on the batch size."""
        size = self.batch_axes.size(output, axis)
        if self._depends(size):
            return True
        if not _is_own(size, output, axis):
            return False  # the length of another axis, which does not
        if op.type in ELEMENTWISE | PRODUCTS:
            return axis in self._targets(op)
        if op.type in _TARGETS:
            entries = self.entries(op.inputs[_TARGETS[op.type]])
            entry = entries[axis] if axis < len(entries) else None
            if entry is not None:
                return self._depends(entry)
        return self._widens(op, own)

    def _widens(self, op: tf.Operation, own: int | None) -> bool:
        """Whether anything but the batch axes of inputs may determine such a length."""
        if any(map(self.counts, op.inputs)):
            return True
        for tensor in op.inputs:
            layout = self.batch_axes[tensor]
            batch = {layout.axis} if own is not None and isinstance(layout, BatchAxis) else set()
            if self.wide(tensor) - batch:
                return True
        return False

    def _wide_axes_of_list(self, op: tf.Operation) -> frozenset[int]:
        """The axes of the elements; -1 stands for their number."""
        shift = {"TensorListFromTensor": -1, "TensorListStack": 1, "TensorListGather": 1}
        axes = {a + shift.get(op.type, 0) for t in op.inputs for a in self.wide(t)}
        if op.type in ("TensorListReserve", "TensorListResize") and self.counts(op.inputs[1]):
            axes.add(-1)
        is_list, layout = op.outputs[0].dtype == tf.variant, self.batch_axes[op.outputs[0]]
        if self.batch_axes.depends(op.outputs[0]) and isinstance(layout, BatchAxis):
            axes.discard(layout.axis)
        return frozenset(a for a in axes if a >= 0 or is_list)

    def _inside(
        self,
        body: tf.Graph,
        inside: BatchAxes,
        arguments: Sequence[tuple[bool, frozenset[int]]],
        fed: Sequence[tf.Tensor | None],
    ) -> _Counting:
        """Processes a body, given (counts, wide axes) per argument, and the arguments passed on."""
        found = _Counting(inside, self)
        for k, (tensor, (counts, wide)) in enumerate(zip(body.inputs, arguments)):
            # The index of an example is its own, however many others there are.
            found.enter(tensor, counts and inside.example_at(tensor) is None, wide)
            if fed[k] is not None:
                found._fed[tensor.ref()] = fed[k]
        results = [*body.outputs, *inside.custom_gradients]
        found.run(ancestors(results))
        self.in_gradients |= found.in_gradients
        self.in_gradients |= any(map(found.counts, inside.custom_gradients))
        return found

    def _call(self, op: tf.Operation) -> None:
        inputs = op.inputs[1:] if op.type in BRANCHES else list(op.inputs)
        decided = op.type in BRANCHES and self.counts(op.inputs[0])
        arguments = [(self.counts(t), self.wide(t)) for t in inputs]
        bodies = self.batch_axes.bodies_of(op).values()
        inside = [(g, self._inside(g, where, arguments, inputs)) for g, where in bodies]
        for k, tensor in enumerate(op.outputs):
            ends = [(found, graph.outputs[k]) for graph, found in inside]
            counts = not ends or decided or any(found.counts(t) for found, t in ends)
            wide = frozenset(a for found, t in ends for a in found.wide(t))
            self.enter(tensor, counts, wide)

    def _loop(self, op: tf.Operation) -> None:
        """Processes the body until nothing changes any more."""
        bodies = self.batch_axes.bodies_of(op)
        state = [(self.counts(t), self.wide(t)) for t in op.inputs]
        if set(bodies) == {"body", "cond"}:
            (body, of_body), (condition, of_condition) = bodies["body"], bodies["cond"]
            same = [behind_identities(b) is a for a, b in zip(body.inputs, body.outputs)]
            fed = [t if unchanged else None for t, unchanged in zip(op.inputs, same)]
            while True:
                inside = self._inside(body, of_body, state, fed)
                test = self._inside(condition, of_condition, state, fed)
                as_long = test.counts(condition.outputs[0])
                # A list of the examples has one element per iteration, and no more.
                own = [
                    unchanged or self.batch_axes[t] == Rows()
                    for t, unchanged in zip(op.outputs, same)
                ]
                after = [
                    (a or inside.counts(t) or (as_long and not keeps), b | inside.wide(t))
                    for (a, b), t, keeps in zip(state, body.outputs, own)
                ]
                if after == state:
                    break
                state = after
        else:
            state = [(True, wide) for _, wide in state]
        for tensor, (counts, wide) in zip(op.outputs, state):
            self.enter(tensor, counts, wide)


def _may_be_shape(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_integer and tensor.shape.rank in (0, 1)


def _is_own(size: Size, tensor: tf.Tensor, axis: int) -> bool:
    """Whether a length is unknown, and not that of another tensor."""
    return len(size.unknowns) == 1 and size.unknowns[0].endswith(f":{tensor.name}[{axis}]")
