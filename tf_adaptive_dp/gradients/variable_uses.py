"""Where a graph combines variables with data, and how it rearranges their entries before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import TensorReference, static_value
from tf_adaptive_dp.gradients.batch_axis.operation_types import SHAPE_ONLY
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, Rows
from tf_adaptive_dp.gradients.rows_met import RowsMet


class AxisTransform(NamedTuple):
    """A view of a variable: transposed, reshaped or negated, so that norms stay the same.

    Attributes:
      shape: the shape of the variable.
      steps: the steps in order: ("transpose", order), ("reshape", shape) or ("negate",).

    >>> view = AxisTransform((2, 3)).transpose([1, 0]).reshape([1, 3, 2])
    >>> view.apply(tf.ones([2, 3])).shape, view.invert(tf.ones([5, 1, 3, 2]), 1).shape
    (TensorShape([1, 3, 2]), TensorShape([5, 2, 3]))
    """

    shape: tuple[int, ...]
    steps: tuple[tuple, ...] = ()

    def transpose(self, order: Sequence[int]) -> AxisTransform:
        """The view with its axes in another order."""
        return self._with("transpose", tuple(int(a) for a in order))

    def reshape(self, shape: Sequence[int]) -> AxisTransform:
        """The view in another shape."""
        return self._with("reshape", tuple(int(n) for n in shape))

    def negate(self) -> AxisTransform:
        """The view times −1."""
        return self._with("negate")

    def _with(self, *step: object) -> AxisTransform:
        return self._replace(steps=(*self.steps, step))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape before each step and after the last."""
        shapes = [self.shape]
        for kind, *argument in self.steps:
            before = shapes[-1]
            if kind == "transpose":
                shapes.append(tuple(before[a] for a in argument[0]))
            else:
                shapes.append(argument[0] if kind == "reshape" else before)
        return shapes

    def apply(self, tensor: tf.Tensor) -> tf.Tensor:
        """Transforms a tensor from the variable to the view.

        Args:
          tensor: has the shape of the variable, or broadcasts to it.

        Returns:
          The tensor in the view, or one that broadcasts to it: axes of length 1 keep that length
          where the view allows.
        """
        if not tensor.shape.is_fully_defined() and None not in self.shape:
            tensor = tf.broadcast_to(tensor, self.shape)
        missing = len(self.shape) - tensor.shape.rank
        if missing:
            tensor = tf.reshape(tensor, [1] * missing + tensor.shape.as_list())
        for (kind, *argument), before in zip(self.steps, self.shapes):
            if kind == "negate":
                tensor = -tensor
            elif kind == "reshape":
                tensor = _reshape(tensor, before, argument[0])
            else:
                tensor = tf.transpose(tensor, argument[0])
        return tensor

    def invert(self, tensor: tf.Tensor, leading: int = 0) -> tf.Tensor:
        """Transforms a tensor from the view back to the variable.

        Args:
          tensor: has `leading` axes, then those of the view.
          leading: how many axes at the front stay as they are.
        """
        front = tf.shape(tensor)[:leading] if leading else []
        for (kind, *argument), before in zip(reversed(self.steps), reversed(self.shapes[:-1])):
            if kind == "negate":
                tensor = -tensor
            elif kind == "reshape":
                tensor = tf.reshape(tensor, tf.concat([front, before], 0) if leading else before)
            else:
                back = np.argsort(argument[0]) + leading
                tensor = tf.transpose(tensor, [*range(leading), *back])
        return tensor


def _reshape(tensor: tf.Tensor, before: Sequence[int], after: Sequence[int]) -> tf.Tensor:
    """Reshapes a tensor that broadcasts to `before` into one that broadcasts to `after`."""
    if tensor.shape == before or 0 in before:
        return tf.reshape(tf.broadcast_to(tensor, before), after)
    wide, result = [], []
    for of_before, of_after in _blocks(before, after):
        lengths = [tensor.shape[a] for a in of_before]
        full = any(n != 1 for n in lengths)
        wide += [before[a] if full else 1 for a in of_before]
        result += [after[a] if full else 1 for a in of_after]
    return tf.reshape(tf.broadcast_to(tensor, wide), result)


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pairs up the smallest groups of neighboring axes that a reshape maps to each other."""
    blocks, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, other, sizes = i, j, [1, 1]
        if i < len(before):
            sizes[0], i = before[i], i + 1
        if j < len(after):
            sizes[1], j = after[j], j + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0], i = sizes[0] * before[i], i + 1
            else:
                sizes[1], j = sizes[1] * after[j], j + 1
        blocks.append((list(range(start, i)), list(range(other, j))))
    return blocks


@dataclasses.dataclass(frozen=True)
class VariableUse:
    """An operation that combines a variable with the data, or repeats it for each example.

    Attributes:
      op: the operation.
      index: which of its inputs comes from the variable.
      view: the view of the variable that this input is; `None` if more was done than rearranging.
      places: the batch axes of the inputs and outputs of the operation, by reference.
    """

    op: tf.Operation
    index: int
    view: AxisTransform | None
    places: Mapping[TensorReference, BatchAxis]


def handle_in(graph: tf.Graph, variable: tf.Variable) -> tf.Tensor | None:
    """The tensor that stands for a variable in a graph, or `None` if the graph does not use it."""
    outside = variable.handle
    if getattr(outside, "graph", None) is graph:
        return outside
    outer = graphs.outer_graph(graph)
    inherited = None if outer is None else handle_in(outer, variable)
    for external, internal in graphs.captures(graph):
        if external is outside or external is inherited:
            return internal
    return None


def consumers_of(ops: Iterable[tf.Operation]) -> dict:
    """Maps a reference to each tensor to the operations that take it, with the input's index."""
    found: dict = {}
    for op in ops:
        for index, tensor in enumerate(op.inputs):
            found.setdefault(tensor.ref(), []).append((op, index))
    return found


def _next_view(view: AxisTransform, op: tf.Operation) -> AxisTransform | None:
    """The view after an operation, or `None` if it does more than rearrange."""
    shape = op.outputs[0].shape
    if op.type in ("Identity", "Cast", "ReadVariableOp"):
        return view if op.outputs[0].dtype.is_floating else None
    if op.type in ("Reshape", "ExpandDims", "Squeeze") and shape.is_fully_defined():
        return view.reshape(shape)
    if op.type == "Transpose" and static_value(op.inputs[1]) is not None:
        return view.transpose(static_value(op.inputs[1]))
    return view.negate() if op.type == "Neg" else None


def find_uses(
    handle: tf.Tensor, shape: tf.TensorShape, consumers: dict, batch_axes: BatchAxes, met: RowsMet
) -> list[VariableUse]:
    """Follows a variable to the operations from which on examples have entries of their own.

    Guarantee: in the first output of each of these operations, rows belong to examples, as `places`
    says, and every way from the variable to the loss of an example leads through one of them.

    Args:
      handle: the tensor that stands for the variable in the graph.
      shape: the shape of the variable.
      consumers: the result of `consumers_of` for the operations that the loss is computed from.
      batch_axes: the batch axis of each tensor.
      met: which rows of tensors without data the examples meet.

    Returns:
      One entry per use.
    """
    uses, seen = [], set()
    pending: list = [(handle, AxisTransform(tuple(shape.as_list())))]

    def has_examples(tensor: tf.Tensor) -> bool:
        if batch_axes[tensor] == Rows() or batch_axes.depends(tensor):
            return isinstance(batch_axes[tensor], (BatchAxis, Rows))
        return isinstance(met.of(tensor), BatchAxis)

    while pending:
        tensor, view = pending.pop()
        if tensor.ref() in seen or met.is_shared_term(tensor):
            continue
        seen.add(tensor.ref())
        for op, index in consumers.get(tensor.ref(), ()):
            if op.type in SHAPE_ONLY or not op.outputs:
                continue
            if any(map(has_examples, op.outputs)):
                uses.append(VariableUse(op, index, view, met.places(op)))
                continue
            after = None if view is None or index > 0 else _next_view(view, op)
            pending += [(t, after) for t in op.outputs]
    return uses
