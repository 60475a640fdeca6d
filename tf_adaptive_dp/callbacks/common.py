"""Checks of a model's optimizer that the callbacks share."""

from __future__ import annotations

import warnings

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling.draws import Sampling


def private_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    """Returns the optimizer of a model, which must be private, or raises TypeError."""
    optimizer = getattr(model, "optimizer", None)  # before `fit` there is no model
    if not hasattr(optimizer, "ledger"):
        raise TypeError(
            "The model must be compiled with an optimizer of tf_adaptive_dp, and the callback must "
            f"be passed to `fit`. Received: optimizer={optimizer!r}"
        )
    return optimizer


def refuse_batch_over_two_passes(
    optimizer: tf.keras.optimizers.Optimizer, sampling: Sampling | str
) -> None:
    """Rejects batches with parts from two epochs: an example in both has a sensitivity of 2C."""
    if isinstance(sampling, str) and sampling != "poisson" and optimizer.unfinished_parts:
        raise NotPrivateError(
            "An accumulated batch must not reach from one pass over the data into the next, where "
            f"an example could join it twice. Received: {optimizer.unfinished_parts} parts of "
            f"{optimizer.parts_per_batch} at the end of an epoch. Make the number of "
            "steps per epoch a multiple of `gradient_accumulation_steps` (`steps_per_epoch`, "
            "`drop_remainder`), or draw batches with a sampling of tf_adaptive_dp."
        )


def begin_batches_anew(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Drops the parts of a batch in which an earlier run stopped, so that others do not join."""
    if optimizer.unfinished_parts:
        warnings.warn(
            f"Training stopped in the middle of a batch: {optimizer.unfinished_parts} of "
            f"{optimizer.parts_per_batch} parts are dropped. Nothing of them was "
            "released.",
            stacklevel=3,
        )
        optimizer.drop_unfinished_parts()
