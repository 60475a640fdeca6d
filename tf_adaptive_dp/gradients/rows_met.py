"""Which rows of a value without data each example meets, such as those of a repeated token."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Union

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import TensorReference, overrides_gradient, static_value
from tf_adaptive_dp.gradients.batch_axis.axis_maps import (
    ABSENT,
    Origin,
    axis_maps,
    sliced_axes,
    whole_axes,
)
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    AXIS_0,
    ELEMENTWISE,
    PRODUCTS,
    REDUCTIONS,
    SHAPE_ONLY,
)
from tf_adaptive_dp.gradients.batch_axis.origins import before_tile, sources
from tf_adaptive_dp.gradients.batch_axis.sizes import product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis


class Unclear(enum.Enum):
    """Uses of a tensor give its rows to different examples, or in a way that is not understood."""

    UNCLEAR = enum.auto()


UNCLEAR = Unclear.UNCLEAR

# A batch axis: its entries each meet the example that they belong to. `None`: all examples may meet
# all entries.
Met = Union[BatchAxis, None, Unclear]

# The rules of `row_ties` ask what must be equal in all rows. For these operations they say more:
# entry i of the input goes to entry i of the output alone. (Others may permute rows or pick some.)
_IN_PLACE = {
    *(ELEMENTWISE | REDUCTIONS | AXIS_0 | PRODUCTS),
    *("BiasAdd", "BroadcastTo", "Conv2DBackpropInput", "Conv3DBackpropInputV2", "ConcatV2"),
    *("Cumprod", "Cumsum", "ExpandDims", "FusedBatchNorm", "FusedBatchNormV2"),
    *("FusedBatchNormV3", "GatherV2", "IdentityN", "LogSoftmax", "Pack", "Pad", "PadV2"),
    *("ResourceGather", "Reshape", "Select", "Softmax", "Squeeze", "Transpose", "Unpack"),
}


class RowsMet:
    """Finds the axis of a data-independent tensor along which each example meets rows of its own.

    A class token is repeated for each example, p ─► [B, 1, D]. Row i of δ, the gradient of the loss
    with respect to the repeated token, then belongs to example i, if row i meets nothing but
    example i on all ways to the loss. Only these ways show it: B may equal any other size, and rows
    that were repeated B times may well be transposed or averaged later.

    Guarantee: if `of(tensor)` is a batch axis, then loss i depends on those entries of the tensor
    only that this axis gives to example i. By induction, from the loss backwards: a tensor with
    data has a batch axis, which `batch_axis` vouches for; each operation that takes the tensor
    passes entry i on to entry i; and all of them agree about the axis.
    """

    def __init__(
        self,
        consumers: dict,
        batch_axes: BatchAxes,
        stop: set[TensorReference],
        ends: Mapping[TensorReference, Met] | None = None,
    ):
        """Takes what is known about a graph.

        Args:
          consumers: the result of `consumers_of` for the operations that the loss is computed from.
          batch_axes: the batch axis of each tensor.
          stop: references to terms of the loss that all examples share.
          ends: what is known about tensors that are used outside of this graph.
        """
        self._consumers, self._batch_axes = consumers, batch_axes
        self._stop = frozenset(stop)
        self._found: dict[TensorReference, Met] = {**dict.fromkeys(stop), **(ends or {})}
        self._given = frozenset(self._found)

    def is_shared_term(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is a term of the loss that all examples share."""
        return tensor.ref() in self._stop

    def is_used(self, tensor: tf.Tensor) -> bool:
        """Whether a value of a tensor is used on the way to the loss."""
        return tensor.ref() in self._given or bool(self._uses(tensor))

    def of(self, tensor: tf.Tensor) -> Met:
        """Finds the batch axis of a tensor without data, by all its uses."""
        pending = [tensor]
        while pending:  # a stack, since chains of operations may be longer than Python's
            last = pending[-1]
            open_ = [] if last.ref() in self._found else self._open(last)
            pending += open_
            if not open_:
                pending.pop()
                if last.ref() not in self._found:
                    self._found[last.ref()] = self._of_uses(last)
        return self._found[tensor.ref()]

    def layout(self, tensor: tf.Tensor) -> Met:
        """The batch axis of a tensor, with data or without."""
        if not self._batch_axes.depends(tensor):
            return self.of(tensor)
        layout = self._batch_axes[tensor]
        return layout if isinstance(layout, BatchAxis) else UNCLEAR

    def at(self, op: tf.Operation, index: int) -> Met:
        """Finds how the examples meet an input of an operation."""
        if overrides_gradient(op):
            return UNCLEAR  # δ reaches the input by another way
        met = {self._in_input(op, index, t, self.layout(t)) for t in op.outputs if self._counts(t)}
        return _agreed(met)

    def places(self, op: tf.Operation) -> dict[TensorReference, BatchAxis]:
        """The batch axes of the inputs and outputs of an operation, in this operation."""
        found = {t.ref(): self.layout(t) for t in op.outputs}
        for index, tensor in enumerate(op.inputs):
            if not self._batch_axes.depends(tensor):
                found[tensor.ref()] = self.at(op, index)
        return {key: place for key, place in found.items() if isinstance(place, BatchAxis)}

    def _uses(self, tensor: tf.Tensor) -> list[tuple[tf.Operation, int]]:
        uses = self._consumers.get(tensor.ref(), ())
        return [(op, index) for op, index in uses if op.type not in SHAPE_ONLY]

    def _counts(self, output: tf.Tensor) -> bool:
        """Whether the loss may be computed from an output."""
        if self._batch_axes.depends(output) and isinstance(self._batch_axes[output], BatchAxis):
            return True
        return self.is_used(output)

    def _open(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """The tensors without data that are to be found first."""
        outputs = [t for op, _ in self._uses(tensor) for t in op.outputs]
        return [
            t for t in outputs if not self._batch_axes.depends(t) and t.ref() not in self._found
        ]

    def _of_uses(self, tensor: tf.Tensor) -> Met:
        met = _agreed({self.at(op, index) for op, index in self._uses(tensor)})
        if not isinstance(met, BatchAxis):
            return met
        expected = product([self._batch_axes.batch_size, met.outer, met.inner]).static
        length = tensor.shape[met.axis]
        return met if None in (expected, length) or expected == length else UNCLEAR

    def _in_input(self, op: tf.Operation, index: int, output: tf.Tensor, place: Met) -> Met:
        """How the examples meet an input, if they meet an output as `place` says."""
        tensor = op.inputs[index]
        if not isinstance(place, BatchAxis):
            return place
        if tensor.shape.rank is None or output.shape.rank is None:
            return UNCLEAR
        if op.type in _MOVES:
            found = [_MOVES[op.type](op, place, self._batch_axes)]
        elif op.type in _IN_PLACE:
            of_op = sources(op, output.value_index, place, self._batch_axes) or []
            found = [UNCLEAR if p is None else p for t, p in of_op if t is tensor]
        else:
            return UNCLEAR
        return _agreed({_unless_shared(tensor, p) for p in found})


def _unless_shared(tensor: tf.Tensor, place: Met) -> Met:
    """`None` if the axis is missing or has length 1, so that one entry meets all examples."""
    if not isinstance(place, BatchAxis):
        return place
    return None if place.axis < 0 or tensor.shape[place.axis] == 1 else place


def _agreed(met: set[Met]) -> Met:
    """What all uses say."""
    if not met:
        return None
    return met.pop() if len(met) == 1 else UNCLEAR


def _tile(op: tf.Operation, place: BatchAxis, batch_axes: BatchAxes) -> Met:
    """Copies go to all examples, unless a copy has rows for all of them."""
    found = before_tile(op, place, batch_axes)
    if isinstance(found, Origin):
        return None if found is ABSENT else UNCLEAR
    return found


def _cut(op: tf.Operation, place: BatchAxis, batch_axes: BatchAxes) -> Met:
    """Along the batch axis, nothing may be cut off, and the order must stay."""
    axis = place.axis
    if op.type == "StridedSlice":
        strides, source = static_value(op.inputs[3]), sliced_axes(op).source(place.axis)
        if strides is None:
            return UNCLEAR
        if isinstance(source, int) and source in whole_axes(op):
            return place.at(source)
        if (strides != 1).any():
            return UNCLEAR
        if isinstance(source, Origin):
            return None  # a new axis
        axis = source
    sizes = batch_axes.size(op.inputs[0], axis), batch_axes.size(op.outputs[0], place.axis)
    return place.at(axis) if sizes[0] == sizes[1] else UNCLEAR


def _split(op: tf.Operation, place: BatchAxis, batch_axes: BatchAxes) -> Met:
    (of_input,) = (axis_maps(op) or {}).values()
    return UNCLEAR if isinstance(of_input.source(place.axis), Origin) else place


# From an operation with one differentiable input and the axis of its output to that of its input.
_MOVES = {
    "Tile": _tile,
    **dict.fromkeys(("Slice", "StridedSlice"), _cut),
    **dict.fromkeys(("Split", "SplitV"), _split),
}
