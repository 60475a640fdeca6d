"""Marks of the tensors that a private release gave, where searches for data end."""

from __future__ import annotations

import tensorflow as tf


def mark_released(tensor: tf.Tensor, complete: tf.Tensor | bool = True) -> tf.Tensor:
    """Says of a symbolic tensor that a private release gave it.

    Guarantee: none by itself. What is computed from a marked tensor counts as free of the data,
    so only the mechanism may call it, on what it has released.

    Args:
      tensor: what was released.
      complete: whether the release has taken place, which parts of a batch leave open.

    Returns:
      The same tensor.
    """
    tensor._released_by_mechanism = complete
    return tensor


def vouch_for(tensor: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | tf.IndexedSlices | None:
    """A copy of a tensor of which the user says that it needs no release.

    Args:
      tensor: is left as it is if a release gave it.
    """
    if tensor is None or completion(tensor) is not None:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(
            vouch_for(tensor.values), vouch_for(tensor.indices), tensor.dense_shape
        )
    copy = tf.identity(tensor)
    copy._vouched_for = True
    return copy


def completion(tensor: tf.Tensor) -> tf.Tensor | bool | None:
    """Whether the release that gave a tensor has taken place; `None` if none gave it."""
    return getattr(tensor, "_released_by_mechanism", None)


def is_released(tensor: tf.Tensor) -> bool:
    """Whether a private release gave a tensor, or the user vouches for it."""
    return completion(tensor) is not None or getattr(tensor, "_vouched_for", False)
