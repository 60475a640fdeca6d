"""What a model is made of, so that a search that goes on can tell whether it still is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_adaptive_dp.durable import journal


def described(model: tf.keras.Model) -> dict[str, Any]:
    """Kinds of layers, shapes of weights and kind of optimizer, as plain JSON.

    What it does not tell: rates and other numbers, activations, losses, how layers are connected,
    and the weights of layers that are built in training only.

    Args:
      model: compiled.
    """
    layers = [
        part
        for part in model.submodules
        if isinstance(part, tf.keras.layers.Layer) and not isinstance(part, tf.keras.metrics.Metric)
    ]
    weights = model.weights if model.built else []
    return {
        "layers": [type(layer).__name__ for layer in layers],
        "weights": [
            [weight.shape.as_list(), tf.as_dtype(weight.dtype).name, bool(weight.trainable)]
            for weight in weights
        ],
        "optimizer": type(model.optimizer).__name__,
    }


def compare(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raises ValueError if a candidate's model is no longer the one that the search began with.

    Args:
      before: `described` when the search began.
      now: `described` now.
      where: the project.
    """
    journal.compare(
        before,
        now,
        "`build_model` makes another model of the same hyperparameters than when the search began, "
        "and all candidates have to come from one space. Nothing was trained with it. Undo the "
        "change to go on, or begin anew with another `project_name`; what was spent is spent.",
        where,
    )
