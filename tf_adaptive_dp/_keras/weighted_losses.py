"""How Keras multiplies losses by sample weights, as the graph of a step shows it.

Keras 2 does so in a name scope of its own. Keras 3 does not, but its train step shows which of its
arguments are sample weights. In a custom loop with Keras 3, an argument that multiplies in the
scope of a loss is taken for sample weights.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.callers import batch_of_step
from tf_adaptive_dp._keras.generation import GENERATION

# `losses_utils.compute_weighted_loss` of Keras 2.
_WEIGHTED_LOSS = re.compile(r"weighted_loss(_\d+)?")
# `CompileLoss` of Keras 3, which holds the losses of all outputs.
_COMPILE_LOSS = re.compile(r"(^|/)compile_loss(_\d+)?/")
# What Keras 2 does with sample weights before they multiply losses.
_SAME_VALUES = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze")
# The train step of Keras 3; its argument is a batch.
_STEP = "one_step_on_data"

# Whether the name of a multiplication tells that its factor is sample weights.
NAMES_WEIGHTS: bool = GENERATION == 2


def multiplies_losses(op: tf.Operation, scope: str, is_known: bool) -> bool:
    """Whether an operation may be the one that multiplies losses by sample weights.

    Args:
      op: any operation.
      scope: the name scope of the step.
      is_known: whether `sample_weights_of_step` tells which arguments are sample weights.
    """
    scopes = _within(op, scope).split("/")[:-1]
    if op.type != "Mul" or not scopes:
        return False
    if NAMES_WEIGHTS:
        return _WEIGHTED_LOSS.fullmatch(scopes[-1]) is not None
    of_loss = is_known or len(scopes) == 1 or is_loss_of_output(op, scope)
    return of_loss and op.inputs[1].shape.rank != 0 and (is_known or not _is_term_of_loss(op))


def _is_term_of_loss(op: tf.Operation) -> bool:
    """Whether a product is a term of the loss itself, such as logits times labels.

    Then the scope of the loss goes on to add it up; Keras multiplies by sample weights last.
    """
    scope = op.name.rpartition("/")[0]
    users = [u for u in op.outputs[0].consumers() if u.name.startswith(f"{scope}/")]
    return any(u.type in ("Add", "AddV2", "AddN", "Sub") for u in users)


def is_loss_of_output(op: tf.Operation, scope: str) -> bool:
    """Whether an operation belongs to the loss of an output, and not to a layer.

    Args:
      op: the operation that made the losses of the examples.
      scope: the name scope of the step.
    """
    name = _within(op, scope)
    if NAMES_WEIGHTS:
        return multiplies_losses(op, scope, True) and name.count("/") == 2
    return _COMPILE_LOSS.search(name) is not None


def _within(op: tf.Operation, scope: str) -> str:
    return op.name.removeprefix(f"{scope}/") if scope else op.name


def weighs_losses(tensor: tf.Tensor) -> bool:
    """Whether the graph shows that an input is sample weights, of any shape; in Keras 2 alone."""
    pending = list(tensor.consumers()) if NAMES_WEIGHTS else []
    while pending:
        op = pending.pop()
        if op.type == "Mul" and multiplies_losses(op, "", True):
            return True
        if op.type in _SAME_VALUES:
            pending += op.outputs[0].consumers()
    return False


def sample_weights_of_step(graph: tf.Graph) -> list[tf.Tensor | None] | None:
    """The arguments of Keras 3's train step that are sample weights.

    Args:
      graph: a graph.

    Returns:
      One tensor for each output that has weights of its own, or one for all; `None` for each output
      without. The whole is `None` if the graph is no such step, or its batch is no tuple: weights
      may be in any part of it then.
    """
    data = _batch_of_step(graph)
    if not isinstance(data, tuple):
        return None
    return [] if len(data) < 3 else _arguments(graph, data, 2)


def labels_of_step(graph: tf.Graph) -> list[tf.Tensor]:
    """The arguments of Keras 3's train step that Keras takes for labels.

    Args:
      graph: a graph.
    """
    data = _batch_of_step(graph)
    if not isinstance(data, tuple) or len(data) < 2:
        return []
    return [label for label in _arguments(graph, data, 1) if label is not None]


def weights_without_targets() -> tf.Tensor | None:
    """The sample weights of the step's batch, if it is (x, None, sample_weight); else `None`."""
    batch = batch_of_step()
    if not isinstance(batch, tuple) or len(batch) != 3 or batch[1] is not None:
        return None
    return batch[2] if tf.is_tensor(batch[2]) else None


def _batch_of_step(graph: tf.Graph) -> Any:
    """The specifications of a batch; `None` if the graph is no train step of Keras 3."""
    if NAMES_WEIGHTS or _STEP not in getattr(graph, "name", ""):
        return None
    (data, *_), _ = graph.structured_input_signature
    return data


def _arguments(graph: tf.Graph, data: tuple, part: int) -> list[tf.Tensor | None]:
    """The tensors of one part of a batch, `None` where its specification is."""
    before = tf.nest.flatten(data[:part], expand_composites=True)
    arguments = iter(graph.inputs[sum(spec is not None for spec in before) :])
    specs = tf.nest.flatten(data[part], expand_composites=True)
    return [None if spec is None else next(arguments) for spec in specs]
