"""Marks on the results of private releases, where searches for data end."""

from __future__ import annotations

import tensorflow as tf


def mark_released(tensor: tf.Tensor, complete: tf.Tensor | bool = True) -> tf.Tensor:
    """Marks a symbolic tensor as the result of a private release.

    Guarantee: none by itself. Everything computed from a marked tensor counts as free of private
    data. So only the mechanism may call this, on what it has released.

    Args:
      tensor: the released value.
      complete: whether the release has taken place; with gradient accumulation, a tensor tells.

    Returns:
      The same tensor.
    """
    tensor._released_by_mechanism = complete
    return tensor


def vouch_for(tensor: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | tf.IndexedSlices | None:
    """Returns a copy of a tensor for which the user vouches that it needs no private release.

    Args:
      tensor: returned unchanged if it is the result of a release.
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
    """Whether the release behind a tensor has taken place; `None` if there is none."""
    return getattr(tensor, "_released_by_mechanism", None)


def is_released(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the result of a private release, or the user vouched for it."""
    return completion(tensor) is not None or getattr(tensor, "_vouched_for", False)
