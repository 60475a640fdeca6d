"""Searches a training step once more when its trace is complete.

`minimize` sees only what was traced before it. The rest of the step, and how other functions use
the one that calls `minimize`, shows only when the outermost function is complete.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import is_symbolic, outer_graph
from tf_adaptive_dp._keras.tracebacks import short_traceback
from tf_adaptive_dp._keras.tracing import call_when_complete, is_function
from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state_within
from tf_adaptive_dp.gradients.batch_axis.nested import refuse_mixed_arguments
from tf_adaptive_dp.gradients.frames import Frame


def search_when_complete(loss: tf.Tensor) -> None:
    """Searches all functions around a loss at the end of their traces.

    Errors then come from the call of the function that is being traced, before any of it has run.

    Args:
      loss: symbolic; the loss whose gradients will be released, of each example or in all.
    """
    if _remember("_private_losses", loss):
        call_when_complete(loss.graph, _search)


def search_sums_when_complete(sums: Iterable[tf.Tensor]) -> None:
    """Adds sums of gradients to the starting points of the search for state.

    A custom gradient may read state that the loss does not read.

    Args:
      sums: the sums that will be released.
    """
    for tensor in sums:
        if is_symbolic(tensor):
            _remember("_private_sums", tensor)


def _remember(attribute: str, tensor: tf.Tensor) -> bool:
    """Notes a tensor on its function, if any; by name, so that both can be freed."""
    graph = tensor.graph
    if is_function(graph):
        setattr(graph, attribute, [*getattr(graph, attribute, ()), tensor.name])
        return True
    return False


def releases_within(graph: tf.Graph) -> bool:
    """Whether a function, or one that it calls, computes gradients for a release."""
    return bool(_noted("_private_losses", list(Frame(graph).all_within())))


def _noted(attribute: str, frames: list[Frame]) -> list[tuple[Frame, tf.Tensor]]:
    return [
        (frame, frame.graph.get_tensor_by_name(name))
        for frame in frames
        for name in getattr(frame.graph, attribute, ())
    ]


@short_traceback
def _search(graph: tf.Graph) -> None:
    """Searches a function that is complete."""
    root = Frame(graph)
    frames = list(root.all_within())
    losses = _noted("_private_losses", frames)
    if losses:
        refuse_state_within(root, [*losses, *_noted("_private_sums", frames)])
    if not is_function(outer_graph(graph)):
        for frame, loss in losses:
            refuse_mixed_arguments(frame, loss)
