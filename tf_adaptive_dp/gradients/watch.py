"""Searches a training step once more when its trace is complete.

`minimize` sees only what was traced before it. The rest of the step, and how other functions use
the one that calls `minimize`, shows only when the outermost function is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.callers import running_models
from tf_adaptive_dp._keras.graphs import is_symbolic, outer_graph
from tf_adaptive_dp._keras.models import trained_weights, untrained_weights
from tf_adaptive_dp._keras.tracebacks import level_of_caller, short_traceback
from tf_adaptive_dp._keras.tracing import call_when_complete, is_function
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.hidden import (
    data_within,
    refuse_state_within,
    written_from_data,
)
from tf_adaptive_dp.gradients.batch_axis.nested import refuse_mixed_arguments
from tf_adaptive_dp.gradients.frames import Frame

_SHARED = (
    "Two replicas compute their losses from the same data, so an example would count once for each "
    "of them, and epsilon would not hold. Received: {name}. Give each replica examples of its own: "
    "train with `fit`, or take batches from `strategy.experimental_distribute_dataset`. "
    "(`train_on_batch` and `strategy.run(step, args=(batch,))` hand one batch to all replicas.) "
    "Public constants may be captured from outside of the step."
)
_NO_DATA = (
    "The loss of a replica depends on no input of the step, so the library cannot tell whether the "
    "replicas have examples of their own. Received: {name}. Pass the batch to `strategy.run` as an "
    "argument, from a distributed data set."
)
_SEVERAL_OPTIMIZERS = (
    "Two optimizers release gradients of the same batch. The epsilon of each ledger alone is too "
    "small, and so is that of both added up: there is one draw, so both releases count as one with "
    "noise multiplier 1 / sqrt(1 / a**2 + 1 / b**2). docs/privacy.md, 'Several optimizers on one "
    "model', shows how to account for it. Received: {names}, whose losses depend on {data}. With "
    "one optimizer for all variables, this is not necessary."
)

_STATISTICS = (
    "The training step writes data of its batches into weights that are saved with the model but "
    "not trained: {names}. They are statistics of private data without noise, and ε does not cover "
    "them. Leave them out, keep them in a metric, or reset them before you share the model."
)
_NOT_RELEASED = (
    "The training step changes trainable weights by data of its batches instead of by released "
    "gradients: {names}. They are trained without clipping and noise, and ε does not cover them. "
    "Let the private optimizer train them too, or keep private data out of their loss."
)


def search_when_complete(loss: tf.Tensor, has_private_size: bool) -> None:
    """Searches all functions around a loss at the end of their traces.

    Errors then come from the call of the function that is being traced, before any of it has run.

    Args:
      loss: symbolic; the loss whose gradients will be released, of each example or in all.
      has_private_size: whether the number of examples is random, and the graph does not know it.
    """
    if _remember("_private_losses", loss, has_private_size):
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            _remember("_replicas_of_losses", loss, int(tf.get_static_value(replica)))
        call_when_complete(loss.graph, _search)


def note_optimizer(loss: tf.Tensor, optimizer: Any) -> None:
    """Notes whose release a loss leads to; a warning tells if another optimizer shares its data.

    Args:
      loss: the loss that the optimizer was given; nothing is noted of an eager one.
      optimizer: the optimizer.
    """
    if is_symbolic(loss):
        others = getattr(loss.graph, "_optimizers_of_losses", {}).get(loss.name, ())
        _remember("_optimizers_of_losses", loss, (*others, (id(optimizer), optimizer.name)))


def search_sums_when_complete(sums: Iterable[tf.Tensor]) -> None:
    """Adds sums of gradients to the starting points of the search for state.

    A custom gradient may read state that the loss does not read.

    Args:
      sums: the sums that will be released.
    """
    for tensor in sums:
        if is_symbolic(tensor):
            _remember("_private_sums", tensor)


def _remember(attribute: str, tensor: tf.Tensor, value: Any = None) -> bool:
    """Notes a tensor on its function, if any, with a value; by name, so that both can be freed."""
    graph = tensor.graph
    if is_function(graph):
        setattr(graph, attribute, {**getattr(graph, attribute, {}), tensor.name: value})
        return True
    return False


def releases_within(graph: tf.Graph) -> bool:
    """Whether a function, or one that it calls, computes gradients for a release."""
    return bool(_noted("_private_losses", list(Frame(graph).all_within())))


def _noted(attribute: str, frames: list[Frame]) -> list[tuple[Frame, tf.Tensor]]:
    return [(frame, tensor) for frame, tensor, _ in _noted_values(attribute, frames)]


def _noted_values(attribute: str, frames: list[Frame]) -> list[tuple[Frame, tf.Tensor, Any]]:
    return [
        (frame, frame.graph.get_tensor_by_name(name), value)
        for frame in frames
        for name, value in getattr(frame.graph, attribute, {}).items()
    ]


@short_traceback
def _search(graph: tf.Graph) -> None:
    """Searches a function that is complete."""
    root = Frame(graph)
    frames = list(root.all_within())
    noted = _noted_values("_private_losses", frames)
    losses = [(frame, loss) for frame, loss, _ in noted]
    if losses:
        has_private_size = any(is_private for _, _, is_private in noted)
        starts = [*losses, *_noted("_private_sums", frames)]
        refuse_state_within(root, starts, has_private_size)
    if not is_function(outer_graph(graph)):
        for frame, loss in losses:
            refuse_mixed_arguments(frame, loss)
        _refuse_shared_data(root, frames)
        _warn_of_several_optimizers(root, frames)
        if losses:
            _warn_of_unreleased_data(root)


def _warn_of_unreleased_data(root: Frame) -> None:
    """Warns if the step writes data into weights, other than by a release.

    These are the weights of models that are running, and trainable variables that the step reads.
    """
    models = running_models()
    untrained = [v for model in models for v in untrained_weights(model)]
    trained = [v for model in models for v in trained_weights(model)]
    trained += sorted((v for v in root.graph.variables if v.trainable), key=path_of)
    kept = {id(v) for v in untrained}
    distinct = {id(v): v for v in trained if id(v) not in kept}
    for message, weights in (_STATISTICS, untrained), (_NOT_RELEASED, distinct.values()):
        found = written_from_data(root, weights)
        if found:
            names = ", ".join(path_of(variable) for variable in found)
            warnings.warn(message.format(names=names), stacklevel=level_of_caller())


def _warn_of_several_optimizers(root: Frame, frames: list[Frame]) -> None:
    """Warns if losses of different optimizers depend on the same data."""
    noted = [
        (optimizer, frame, loss)
        for frame, loss, optimizers in _noted_values("_optimizers_of_losses", frames)
        for optimizer in optimizers
    ]
    if len({optimizer for optimizer, _, _ in noted}) < 2:
        return
    shared = _shared((owner, data_within(frame, loss)) for owner, frame, loss in noted)
    if shared is not None:
        names = " and ".join(repr(name) for _, name in shared.owners)
        message = _SEVERAL_OPTIMIZERS.format(names=names, data=shared.data.name)
        warnings.warn(message, stacklevel=level_of_caller())


def _refuse_shared_data(root: Frame, frames: list[Frame]) -> None:
    """Refuses replicas whose losses depend on the same data, all in one graph.

    Whatever one replica clips, the others would release once more. It makes no difference whether
    they got the same batch or exchange activations.
    """
    data_of_losses = []
    for frame, loss, replica in _noted_values("_replicas_of_losses", frames):
        found = data_within(frame, loss)
        if not found:
            raise NotPrivateError(_NO_DATA.format(name=loss.name))
        data_of_losses.append((replica, found))
    shared = _shared(data_of_losses)
    if shared is not None:
        raise NotPrivateError(_SHARED.format(name=shared.data.name))


class _Shared(NamedTuple):
    """A tensor of data on which losses of two owners depend."""

    data: tf.Tensor
    owners: tuple[Any, Any]


def _shared(data_of_losses: Iterable[tuple[Any, dict[Hashable, tf.Tensor]]]) -> _Shared | None:
    """The first tensor on which losses of two owners depend, if there is one.

    Args:
      data_of_losses: for each loss its owner and what `data_within` found.
    """
    owners: dict[Hashable, Any] = {}
    for owner, data in data_of_losses:
        for key, tensor in data.items():
            first = owners.setdefault(key, owner)
            if first != owner:
                return _Shared(tensor, (first, owner))
    return None
