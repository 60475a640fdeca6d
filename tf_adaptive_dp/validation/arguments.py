"""Findings about the loss, the optimizer and the batch by themselves."""

from __future__ import annotations

import copy
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.validation.report import Finding

Loss = Callable[..., tf.Tensor]


class PerExampleLoss(tf.keras.losses.Loss):
    """A function of (y_true, y_pred) as a Keras loss that does not reduce over the batch.

    Args:
      function: returns one entry an example.
      name: of the loss.
    """

    def __init__(self, function: Loss, name: str | None = None):
        super().__init__(reduction="none", name=name)
        self.function = function

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """What the function returns; called by Keras."""
        return self.function(y_true, y_pred)


def loss_findings(loss: str | Loss) -> tuple[list[Finding], Loss]:
    """What a loss says of itself.

    Args:
      loss: as it is passed to `model.compile`.

    Returns:
      The findings, and the same loss without a reduction over the batch.

    Raises:
      TypeError: if it is no loss.
      ValueError: if Keras knows no loss of that name.
    """
    if isinstance(loss, str):
        found = Finding(
            "loss",
            "loss",
            f"The loss {loss!r}, given by name, is averaged over the batch by Keras.",
            'Pass the loss object with `reduction="none"` (`fix=True` offers one).',
        )
        return [found], PerExampleLoss(tf.keras.losses.get(loss), loss)
    if isinstance(loss, tf.keras.losses.Loss):
        if loss.reduction == "none":
            return [], loss
        found = Finding(
            "loss",
            "loss",
            f"{type(loss).__name__} has reduction={loss.reduction!r}, so the losses of single "
            "examples are lost.",
            'Create it with `reduction="none"` (`fix=True` offers it).',
        )
        repaired = copy.copy(loss)
        repaired.reduction = "none"
        return [found], repaired
    if not callable(loss):
        raise TypeError(
            "`loss` must be a Keras loss or a function of (y_true, y_pred); for a model of several "
            f"outputs, a function that adds their losses. Received: loss={loss!r}"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    found = Finding(
        "loss",
        "loss",
        f"{name} is a plain function, which `model.compile` wraps so that it is averaged over the "
        "batch; in a training loop of your own it is right.",
        'Pass a `tf.keras.losses.Loss` with `reduction="none"` to `compile` (`fix=True` offers '
        "one).",
        "warning",
    )
    return [found], PerExampleLoss(loss, name)


def optimizer_findings(optimizer: Any, batch_size: int | None) -> list[Finding]:
    """What an optimizer says of itself.

    Args:
      optimizer: as it is passed to `model.compile`.
      batch_size: B, or `None` if that is not clear.
    """
    found = []

    def add(kind, what, cure, severity="error"):
        found.append(Finding(kind, "optimizer", what, cure, severity))

    inside = getattr(optimizer, "inner_optimizer", optimizer)
    if inside is not optimizer:
        add(
            "loss scaling",
            "LossScaleOptimizer multiplies the loss before gradients are clipped.",
            "Use the optimizer alone: those of tf_adaptive_dp scale the loss themselves.",
        )
        optimizer = inside
    if not hasattr(optimizer, "ledger"):
        add(
            "not private",
            f"{optimizer!r} clips nothing and adds no noise.",
            "Use an optimizer of tf_adaptive_dp, or `make_dp_optimizer_class` for any of Keras's.",
        )
        return found
    if optimizer.noise_multiplier == 0:
        add("no noise", "noise_multiplier=0 gives no privacy.", "Use `noise_multiplier_for`.")
    groups, expected = optimizer.num_microbatches, optimizer.expected_batch_size
    if groups is not None and expected is not None:
        add(
            "microbatches",
            f"num_microbatches={groups} is set together with expected_batch_size={expected:g}: "
            "groups of a batch need all batches to have one size.",
            "Leave out `num_microbatches`, or batches of random size and `expected_batch_size`.",
            "warning",
        )
    if None not in (groups, batch_size) and batch_size % groups:
        add(
            "microbatches",
            f"num_microbatches={groups} does not divide the batch of {batch_size} examples.",
            "Choose a divisor, or leave it out.",
        )
    return found


def clip_findings(optimizer: Any, norms: np.ndarray) -> list[Finding]:
    """Whether the clip norm is out of proportion to the gradients.

    Args:
      optimizer: with or without `l2_norm_clip`.
      norms: [B], the norms of the gradients of examples.
    """
    clip = getattr(optimizer, "l2_norm_clip", None)
    largest = np.max(norms, initial=0.0, where=np.isfinite(norms))
    if clip is None or not 0 < 100 * largest < clip:
        return []
    return [
        Finding(
            "clip norm",
            "optimizer",
            f"l2_norm_clip={clip:g} is more than 100 times the largest gradient of the batch "
            f"({largest:.2g}), so the noise is far larger than it need be.",
            "Lower it to about the size of the gradients. This figure is of private data: choose "
            "by experience, or on public data.",
            "warning",
        )
    ]


def batch_findings(batch: tuple) -> list[Finding]:
    """Whether a batch can be examined at all; errors mean that it cannot.

    Args:
      batch: x, y and maybe sample weights, nests of tensors.
    """
    sizes = {tuple(t.shape[:1]) for t in tf.nest.flatten(batch)}
    if len(sizes) != 1 or sizes == {()}:
        what = f"Its tensors differ in the size of axis 0: {sorted(sizes)}."
        return [Finding("batch", "batch", what, "Axis 0 of each must be the examples.")]
    num_examples = next(iter(sizes))[0]
    if num_examples < 2:
        what = f"It has {num_examples} examples, in which nothing can mix."
        return [Finding("batch", "batch", what, "Pass two examples or more.")]
    return [
        Finding(
            "not finite",
            "batch",
            f"{name} of examples {_few(rows)} has entries that are NaN or infinite; the gradients "
            "of such examples count as zero.",
            "Remove or replace them.",
            "warning",
        )
        for name, part in zip(("x", "y", "sample_weight"), batch)
        for rows in [_not_finite(part, num_examples)]
        if rows.size
    ]


def _not_finite(part: Any, num_examples: int) -> np.ndarray:
    bad = np.zeros(num_examples, bool)
    for tensor in tf.nest.flatten(part):
        if tensor.dtype.is_floating:
            rows = np.reshape(tf.cast(tensor, tf.float64).numpy(), [num_examples, -1])
            bad |= ~np.isfinite(rows).all(axis=1)
    return np.flatnonzero(bad)


def _few(rows: np.ndarray) -> str:
    """Indices for a message, not more than five."""
    return ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")


def loss_value_findings(values: tf.Tensor, batch: tuple) -> list[Finding]:
    """Losses that are not finite where the data are.

    Args:
      values: [B].
      batch: as for `batch_findings`.
    """
    data_is_finite = not any(_not_finite(part, len(values)).size for part in batch)
    rows = np.flatnonzero(~np.isfinite(tf.cast(values, tf.float64).numpy()))
    if not data_is_finite or not rows.size:
        return []
    return [
        Finding(
            "not finite",
            "loss",
            f"The losses of examples {_few(rows)} are NaN or infinite though the batch is finite; "
            "their gradients count as zero.",
            "Look whether labels are out of range, or whether the model overflows.",
        )
    ]
