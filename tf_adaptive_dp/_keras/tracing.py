"""What is being traced right now, and when the trace of a function ends."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Callable

import tensorflow as tf
from tensorflow.python.framework import func_graph

from tf_adaptive_dp._keras.graphs import outer_graph


def is_recording(tape: tf.GradientTape) -> bool:
    """Whether a tape is open."""
    return tape._recording


class GraphTape:
    """Differentiates in the graph that is being traced, where a step left no tape that is open.

    The sources of gradients ask it what they ask of a `tf.GradientTape`.
    """

    _recording = True

    def gradient(
        self,
        target: tf.Tensor,
        sources: Sequence,
        output_gradients: tf.Tensor | None = None,
    ) -> list[tf.Tensor | None]:
        """The gradients of `target` with respect to `sources`; `None` without a path.

        Args:
          target: a tensor of the default graph.
          sources: tensors of that graph, or variables.
          output_gradients: what the gradients are multiplied by; ones by default.
        """
        return tf.gradients(target, sources, grad_ys=output_gradients)


def in_xla() -> bool:
    """Whether the code that is being traced will be compiled by XLA (`jit_compile=True`)."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = outer_graph(graph)
    return False


def is_function(graph: tf.Graph | None) -> bool:
    """Whether a graph is that of a function: a `tf.function`, a branch, or the body of a loop."""
    return isinstance(graph, func_graph.FuncGraph)


def call_when_complete(graph: tf.Graph, callback: Callable[[tf.Graph], None]) -> None:
    """Has `callback` called with a function at the end of its trace.

    The functions around it are watched too, and so is every function that calls a watched one
    later, for as long as the watched one lives. Branches and loops count as parts of the function
    that they are in. An error that `callback` raises reaches the caller of the function that is
    being traced.

    TensorFlow offers no such hook. Two properties of its function graphs serve as one: `variables`
    is set once, at the end of the trace, and `saveable` is read whenever a function is called
    within another one, whether or not it is traced for that.

    Args:
      graph: ignored if it is not that of a function.
      callback: always the same function, at the top level of a module.
    """
    while is_function(graph):
        if not getattr(graph, "is_watched", False):
            graph.__class__ = _watched(graph.__class__, callback)
        graph = graph.outer_graph


@functools.cache
def _watched(
    kind: type[func_graph.FuncGraph], callback: Callable[[tf.Graph], None]
) -> type[func_graph.FuncGraph]:
    class Watched(kind):
        is_watched = True

        @property
        def variables(self) -> tuple[tf.Variable, ...]:
            return super().variables

        @variables.setter
        def variables(self, variables: Iterable[tf.Variable]) -> None:
            kind.variables.fset(self, variables)
            if not (self.is_control_flow_graph and is_function(self.outer_graph)):
                callback(self)

        @property
        def saveable(self) -> bool:
            caller = tf.compat.v1.get_default_graph()
            if caller is not self:
                call_when_complete(caller, callback)
            return super().saveable

    Watched.__name__ = Watched.__qualname__ = kind.__name__
    return Watched
