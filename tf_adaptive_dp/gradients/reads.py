"""Where a graph reads a variable, and what happens to the value on its way to the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp.gradients.layout.analysis import Layouts
from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Rows
from tf_adaptive_dp.gradients.layout.names import SHAPE_ONLY
from tf_adaptive_dp.gradients.layout.sizes import static_value
from tf_adaptive_dp.gradients.view import View


class Read(NamedTuple):
    """A place where a variable meets the data.

    Attributes:
      op: the operation in which it does.
      index: the input of it that comes from the variable.
      view: how that input is made from the variable; `None` if by more than a rearrangement.
    """

    op: tf.Operation
    index: int
    view: View | None


def handle_in(graph: tf.Graph, variable: tf.Variable) -> tf.Tensor | None:
    """The tensor that stands for a variable in a graph, or `None` if the graph does not use it."""
    outside = variable.handle
    if getattr(outside, "graph", None) is graph:
        return outside
    outer = getattr(graph, "outer_graph", None)
    inherited = None if outer is None else handle_in(outer, variable)
    for external, internal in getattr(graph, "captures", ()):
        if external is outside or external is inherited:
            return internal
    return None


def consumers(ops: Iterable[tf.Operation]) -> dict:
    """Which operations use a tensor, and as which of their inputs."""
    found: dict = {}
    for op in ops:
        for index, tensor in enumerate(op.inputs):
            found.setdefault(tensor.ref(), []).append((op, index))
    return found


def _next_view(view: View, op: tf.Operation) -> View | None:
    """The view after an operation that only rearranges, else `None`."""
    shape = op.outputs[0].shape
    if op.type in ("Identity", "Cast", "ReadVariableOp"):
        return view if op.outputs[0].dtype.is_floating else None
    if op.type in ("Reshape", "ExpandDims", "Squeeze") and shape.is_fully_defined():
        return view.reshape(shape)
    if op.type == "Transpose" and static_value(op.inputs[1]) is not None:
        return view.transpose(static_value(op.inputs[1]))
    return view.negate() if op.type == "Neg" else None


def find_reads(
    handle: tf.Tensor, shape: tf.TensorShape, uses: dict, layouts: Layouts, stop: set
) -> list[Read]:
    """Follows a variable until it meets the data.

    Args:
      handle: what stands for the variable in the graph.
      shape: that of the variable.
      uses: what `consumers` found among the operations that the loss is computed from.
      layouts: where the batch axis of each tensor is.
      stop: references to tensors at which the search ends.

    Returns:
      The reads; several for a variable that is used in several places.
    """
    reads, seen = [], set()
    pending: list = [(handle, View(tuple(shape.as_list())))]
    while pending:
        tensor, view = pending.pop()
        if tensor.ref() in seen or tensor.ref() in stop:
            continue
        seen.add(tensor.ref())
        for op, index in uses.get(tensor.ref(), ()):
            if op.type in SHAPE_ONLY or not op.outputs:
                continue
            if any(isinstance(layouts[t], (BatchAxis, Rows)) for t in op.outputs):
                reads.append(Read(op, index, view))
                continue
            after = None if view is None or index > 0 else _next_view(view, op)
            pending += [(t, after) for t in op.outputs]
    return reads
