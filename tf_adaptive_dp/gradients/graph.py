"""Walks over the operations of one graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

import tensorflow as tf


def layer_name(op: tf.Operation) -> str:
    """The name of the layer that made an operation, from the operation's name scope."""
    return "/".join(op.name.split("/")[:-1]) or op.name


def ancestors(
    tensors: Iterable[tf.Tensor], stop: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> list[tf.Operation]:
    """The operations that tensors of one graph are computed from, in the order of creation.

    Args:
      tensors: where the walk begins; their own operations are among the result.
      stop: whether the walk ends at a tensor, without the operation that computes it.
    """
    tensors = list(tensors)
    seen, stack = set(), list(tensors)
    while stack:
        tensor = stack.pop()
        if tensor.op not in seen and not stop(tensor):
            seen.add(tensor.op)
            stack += tensor.op.inputs
    return [op for op in tensors[0].graph.get_operations() if op in seen] if tensors else []


def behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a chain of `Identity` operations passes on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
