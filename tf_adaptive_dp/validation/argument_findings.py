"""Findings about the values of the loss, the optimizer and the batch, each on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.validation.findings import Finding


def optimizer_findings(optimizer: Any, batch_size: int | None) -> list[Finding]:
    """Inspects an optimizer.

    Args:
      optimizer: the optimizer as passed to `model.compile`.
      batch_size: B, or `None` if it is unknown.
    """
    found = []

    def add(kind: str, what: str, fix: str, severity: str = "error") -> None:
        found.append(Finding(kind, "optimizer", what, fix, severity))

    inside = getattr(optimizer, "inner_optimizer", optimizer)
    if inside is not optimizer:
        add(
            "loss scaling",
            "LossScaleOptimizer multiplies the loss before gradients are clipped.",
            "Use the inner optimizer: those of tf_adaptive_dp scale the loss themselves.",
        )
        optimizer = inside
    if not has_ledger(optimizer):
        add(
            "not private",
            f"{optimizer!r} clips nothing and adds no noise.",
            "Use an optimizer of tf_adaptive_dp, or make one with `make_dp_optimizer_class`.",
        )
        return found
    if optimizer.noise_multiplier == 0:
        add("no noise", "noise_multiplier=0 gives no privacy.", "Use `noise_multiplier_for`.")
    groups, expected = optimizer.num_microbatches, optimizer.expected_batch_size
    if groups is not None and expected is not None:
        add(
            "microbatches",
            f"num_microbatches={groups} is set together with expected_batch_size={expected:g}, but "
            "microbatches need batches of one fixed size.",
            "Drop `num_microbatches`, or use batches of one size without `expected_batch_size`.",
            "warning",
        )
    if None not in (groups, batch_size) and batch_size % groups:
        add(
            "microbatches",
            f"num_microbatches={groups} does not divide the batch of {batch_size} examples.",
            "Choose a divisor, or drop it.",
        )
    of_user = optimizer.examples_per_user
    if None not in (of_user, batch_size) and batch_size % of_user:
        add(
            "users",
            f"examples_per_user={of_user} does not divide the batch of {batch_size} rows.",
            "Validate a batch of the plan (`plan.batches(...)`), whose rows are grouped by user.",
        )
    return found


def clip_findings(optimizer: Any, norms: np.ndarray) -> list[Finding]:
    """Checks whether the clip norm is out of proportion to the gradients.

    Args:
      optimizer: any optimizer.
      norms: [B], the norms of the per-example gradients.
    """
    clip = getattr(optimizer, "l2_norm_clip", None)
    largest = float(np.max(norms, initial=0.0, where=np.isfinite(norms)))
    if clip is None or not 0 < 100 * largest < clip:
        return []
    return [
        Finding(
            "clip norm",
            "optimizer",
            f"l2_norm_clip={clip:g} is more than 100 times the largest gradient of the batch "
            f"({largest:.2g}), so the noise is far larger than necessary.",
            "Lower it to about the size of the gradients. But this number comes from private data: "
            "choose by experience, or on public data.",
            "warning",
        )
    ]


def batch_findings(batch: tuple) -> list[Finding]:
    """Checks a batch; an error means that it cannot be examined further.

    Args:
      batch: x, y and possibly sample weights, each a nest of tensors.
    """
    sizes = {tuple(t.shape[:1]) for t in tf.nest.flatten(batch) if t is not None}
    if len(sizes) != 1 or sizes == {()}:
        what = f"Its tensors differ in the size of axis 0: {sorted(sizes)}."
        return [Finding("batch", "batch", what, "Axis 0 of each must be the examples.")]
    num_examples = next(iter(sizes))[0]
    if num_examples < 2:
        what = f"It has {num_examples} examples, too few to see whether examples mix."
        return [Finding("batch", "batch", what, "Pass at least two examples.")]
    return [
        Finding(
            "not finite",
            "batch",
            f"{name} of examples {_few(rows)} has NaN or infinite entries; the gradients of such "
            "examples count as zero.",
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
        if tensor is not None and tensor.dtype.is_floating:
            rows = np.reshape(tf.cast(tensor, tf.float64).numpy(), [num_examples, -1])
            bad |= ~np.isfinite(rows).all(axis=1)
    return np.flatnonzero(bad)


def _few(rows: np.ndarray) -> str:
    """Formats indices for a message, at most five."""
    return ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")


def loss_value_findings(values: tf.Tensor, batch: tuple) -> list[Finding]:
    """Looks for losses that are not finite although the data are.

    Args:
      values: the losses, [B].
      batch: see `batch_findings`.
    """
    data_is_finite = not any(_not_finite(part, len(values)).size for part in batch)
    rows = np.flatnonzero(~np.isfinite(tf.cast(values, tf.float64).numpy()))
    if not data_is_finite or not rows.size:
        return []
    return [
        Finding(
            "not finite",
            "loss",
            f"The losses of examples {_few(rows)} are NaN or infinite although the batch is "
            "finite; their gradients count as zero.",
            "Check whether labels are out of range, or whether the model overflows.",
        )
    ]
