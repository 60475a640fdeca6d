"""What the callbacks ask of a model's optimizer."""

from __future__ import annotations

import warnings

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling.draws import Sampling


def private_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    """The optimizer of a model, which must be one of ours."""
    optimizer = getattr(model, "optimizer", None)  # no model before the callback is in `fit`
    if not hasattr(optimizer, "ledger"):
        raise TypeError(
            "The model must be compiled with an optimizer of tf_adaptive_dp, and the callback be "
            f"passed to `fit`. Received: optimizer={optimizer!r}"
        )
    return optimizer


def refuse_batch_over_two_passes(optimizer, sampling: Sampling | str) -> None:
    """A batch whose parts come from two passes may hold an example twice: a sensitivity of 2C."""
    if isinstance(sampling, str) and sampling != "poisson" and optimizer.unfinished_parts:
        raise NotPrivateError(
            "An accumulated batch must not reach from one pass over the data into the next, where "
            f"an example could join it twice. Received: {optimizer.unfinished_parts} parts of "
            f"{optimizer.gradient_accumulation_steps} at the end of an epoch. Let the number of "
            "steps an epoch be a multiple of `gradient_accumulation_steps` (`steps_per_epoch`, "
            "`drop_remainder`), or draw batches with a sampling of tf_adaptive_dp."
        )


def begin_batches_anew(optimizer) -> None:
    """A run that stopped inside a batch left parts of it; others must not join them."""
    if optimizer.unfinished_parts:
        warnings.warn(
            f"Training stopped in the middle of a batch: {optimizer.unfinished_parts} of "
            f"{optimizer.gradient_accumulation_steps} parts are dropped. Nothing of them was "
            "released.",
            stacklevel=3,
        )
        optimizer.drop_unfinished_parts()
