"""Searches a training step once more when all of it has been traced.

`minimize` sees what was traced before it. What comes later in the step, and how the function in
which it was called is used by others, shows only when the outermost function is complete.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import is_symbolic, outer_graph
from tf_adaptive_dp._keras.tracing import call_when_complete, is_function
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
        call_when_complete(loss.graph, _search)


def search_sums_when_complete(sums: Iterable[tf.Tensor]) -> None:
    """Has the search for state begin at sums of gradients too.

    A gradient may read state that its loss does not, in a custom gradient.

    Args:
      sums: are to be released.
    """
    for tensor in sums:
        if is_symbolic(tensor):
            _remember("_private_sums", tensor)


def _remember(attribute: str, tensor: tf.Tensor) -> bool:
    """Notes a tensor with its function, if it is in one; by name, so that both can be freed."""
    graph = tensor.graph
    if is_function(graph):
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
