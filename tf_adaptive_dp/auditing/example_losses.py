"""The losses of the examples, of which an audit makes its scores."""

from __future__ import annotations

import copy
from typing import Callable

import tensorflow as tf

Loss = Callable[..., tf.Tensor]


class PerExampleLoss(tf.keras.losses.Loss):
    """Makes a function of (y_true, y_pred) a Keras loss that does not reduce over the batch.

    Args:
      function: returns one entry per example.
      name: the name of the loss.
    """

    def __init__(self, function: Loss, name: str | None = None):
        super().__init__(reduction="none", name=name)
        self.function = function

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the losses of the examples; Keras calls this."""
        return self.function(y_true, y_pred)


def loss_of_examples(loss: str | Loss) -> Loss:
    """Takes the reduction over the batch off a loss.

    `fit` takes a reduced loss apart itself. Audits look at the losses of examples.

    Args:
      loss: the loss as passed to `model.compile`.

    Returns:
      The same loss, with one entry per example.

    Raises:
      TypeError: if it is not a loss.
      ValueError: if Keras has no loss of that name.
    """
    if isinstance(loss, str):
        return PerExampleLoss(tf.keras.losses.get(loss), loss)
    if isinstance(loss, tf.keras.losses.Loss):
        if loss.reduction == "none":
            return loss
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"
        return unreduced
    if not callable(loss):
        raise TypeError(
            "`loss` must be a Keras loss or a function of (y_true, y_pred); for a model of several "
            f"outputs, a function that adds their losses. Received: loss={loss!r}"
        )
    return PerExampleLoss(loss, getattr(loss, "__name__", type(loss).__name__))
