"""Searches a training step once more when all of it has been traced.

`minimize` sees what was traced before it. What comes later in the step, and how the function in
which it was called is used by others, shows only when the outermost function is complete. This
module is told so by TensorFlow's `FuncGraph`, by way of two of its private properties: `variables`
is set once, at the end of the trace, and `saveable` is asked whenever a function is called within
another one, traced for it or not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.framework import func_graph

from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state_within
from tf_adaptive_dp.gradients.batch_axis.nested import refuse_mixed_arguments
from tf_adaptive_dp.gradients.frames import Frame


def search_when_complete(loss: tf.Tensor) -> None:
    """Has all functions around a loss searched at the ends of their traces.

    The error for what is found then comes from the call of the function that is traced, and
    nothing of it has been run.

    Args:
      loss: [B], symbolic; its gradients are to be released.
    """
    if _remember("_private_losses", loss):
        _watch_from(loss.graph)


def search_sums_when_complete(sums: Iterable[tf.Tensor]) -> None:
    """Has the search for state begin at sums of gradients too.

    A gradient may read state that its loss does not, in a custom gradient.

    Args:
      sums: are to be released.
    """
    for tensor in sums:
        if not hasattr(tensor, "numpy"):
            _remember("_private_sums", tensor)


def _remember(attribute: str, tensor: tf.Tensor) -> bool:
    """Notes a tensor with its function, if it is in one; by name, so that both can be freed."""
    graph = tensor.graph
    if isinstance(graph, func_graph.FuncGraph):
        setattr(graph, attribute, [*getattr(graph, attribute, ()), tensor.name])
        return True
    return False


def releases_within(graph: tf.Graph) -> bool:
    """Whether a function, or one that it calls, computes gradients to be released."""
    return bool(_noted("_private_losses", list(Frame(graph).all_within())))


def _noted(attribute: str, frames: list[Frame]) -> list[tuple[Frame, tf.Tensor]]:
    return [
        (frame, frame.graph.get_tensor_by_name(name))
        for frame in frames
        for name in getattr(frame.graph, attribute, ())
    ]


def _watch_from(graph: tf.Graph) -> None:
    """Watches a function and those around it."""
    while isinstance(graph, func_graph.FuncGraph):
        if not getattr(graph, "is_watched", False):
            graph.__class__ = _watched(type(graph))
        graph = graph.outer_graph


@functools.cache
def _watched(kind: type[func_graph.FuncGraph]) -> type[func_graph.FuncGraph]:
    """The class of graphs of one kind that tell when they are complete, and when called."""

    class Watched(kind):
        is_watched = True

        @property
        def variables(self):
            return super().variables

        @variables.setter
        def variables(self, variables):
            kind.variables.fset(self, variables)
            _search(self)

        @property
        def saveable(self):
            caller = tf.compat.v1.get_default_graph()
            if caller is not self:
                _watch_from(caller)
            return super().saveable

    Watched.__name__ = Watched.__qualname__ = kind.__name__
    return Watched


def _search(graph: func_graph.FuncGraph) -> None:
    """Searches a function that is complete; branches and loops with the function around them."""
    if graph.is_control_flow_graph and isinstance(graph.outer_graph, func_graph.FuncGraph):
        return
    root = Frame(graph)
    frames = list(root.all_within())
    losses = _noted("_private_losses", frames)
    if losses:
        refuse_state_within(root, [*losses, *_noted("_private_sums", frames)])
    if not isinstance(graph.outer_graph, func_graph.FuncGraph):
        for frame, loss in losses:
            refuse_mixed_arguments(frame, loss)
