"""Finds losses that ignore sample weights, to which the padding of Poisson batches contributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.models import give_weights_axes_of_losses
from tf_adaptive_dp._keras.tracebacks import raised
from tf_adaptive_dp.validation.findings import Finding
from tf_adaptive_dp.validation.per_example import losses_of_step

_FIX = (
    "Pass `sample_weight` to `self.loss` in a `compute_loss` of your own, or multiply the finished "
    "loss vector by it."
)
_UNKNOWN = (
    "Whether rows of sample weight 0 have gradients, as padding must not, is not known: the loss "
    "fails if examples have weights. "
)


def padding_findings(model: tf.keras.Model, optimizer: Any, batch: tuple) -> list[Finding]:
    """Looks at the gradients of rows that have sample weight 0, as padding has.

    Only random batches have padding, and they need `expected_batch_size`. It is an error if the
    optimizer is known to get such batches, since the first step would fail.

    Args:
      model: compiled, with a step that was accepted; call it within `unchanged`.
      optimizer: the one to train with.
      batch: nests of tensors.
    """
    expected = getattr(optimizer, "expected_batch_size", None)
    if expected is None or len(batch) < 2 or batch[1] is None:
        return []
    try:
        contributes = _padding_contributes(
            model, batch, expected, getattr(optimizer, "examples_per_user", None) or 1
        )
    except Exception as error:  # noqa: BLE001, whatever a user's model raises on weights
        return [Finding("padding", "loss", f"{_UNKNOWN}{raised(error)}", _FIX, "warning")]
    if not contributes:
        return []
    certain = optimizer.expects_padding
    what = "Rows of sample weight 0 have gradients, so the loss ignores the weights. "
    what += "Batches of a plan" if certain else "Batches of `poisson_batches` or of a plan"
    what += " are padded with such rows, and the first step on them fails."
    return [Finding("padding", "loss", what, _FIX, "error" if certain else "warning")]


def _padding_contributes(
    model: tf.keras.Model, batch: tuple, expected_batch_size: float, num_rows: int
) -> bool:
    """Whether the last rows of a batch have gradients although their weights are 0."""
    size = int(tf.nest.flatten(batch)[0].shape[0])
    present = np.arange(size) < size - num_rows
    padded = _weighted(model, batch, present)
    losses = losses_of_step(model, expected_batch_size)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(losses(padded, True)[size - num_rows :])
    gradients = tape.gradient(value, model.trainable_variables)
    found = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    return any(np.any((g := each.numpy()) != 0) and np.all(np.isfinite(g)) for each in found)


def _weighted(model: tf.keras.Model, batch: tuple, present: np.ndarray) -> tuple:
    """The batch as a plan gives it to `fit`, with weight 0 in all rows but the `present` ones."""
    x, y, *given = batch
    if given and given[0] is not None:

        def masked(weights: tf.Tensor) -> tf.Tensor:
            mask = np.reshape(present, [-1] + [1] * (weights.shape.rank - 1))
            return weights * tf.cast(mask, weights.dtype)

        return x, y, tf.nest.map_structure(masked, given[0])
    weights = tf.constant(present, tf.float32)
    one = tf.data.Dataset.from_tensors((x, y, weights))
    return next(iter(give_weights_axes_of_losses(model, one)))
