"""Describes the structure of a model, so that a resumed search can tell if it has changed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp.durable import journal


def described(model: tf.keras.Model) -> dict[str, Any]:
    """Types of layers, shapes of weights and type of the optimizer, as plain JSON.

    It leaves out rates and other numbers, activations, losses, the connections of layers, and the
    weights of layers that are only built in training.

    Args:
      model: a compiled model.
    """
    weights = model.weights if model.built else []
    return {
        "layers": [type(layer).__name__ for layer in layers_within(model)],
        "weights": [
            [list(weight.shape), tf.as_dtype(weight.dtype).name, bool(weight.trainable)]
            for weight in weights
        ],
        "optimizer": type(model.optimizer).__name__,
    }


def compare(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raises ValueError if a candidate's model is no longer the one that the search began with.

    Args:
      before: `described` when the search began.
      now: `described` now.
      where: the folder of the project.
    """
    journal.compare(
        before,
        now,
        "`build_model` no longer makes the same model from the same hyperparameters as when the "
        "search began, but all candidates must come from one space. Nothing was trained with it. "
        "Undo the change to resume, or start over with another `project_name`; what was spent "
        "stays spent.",
        where,
    )
