"""Evaluation of models in the simulation programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def evaluator(model: tf.keras.Model, test: tf.data.Dataset) -> Callable[[Any], dict[str, float]]:
    """Makes the `evaluate` of `federated.train`: loss and accuracy on test data.

    Args:
      model: a model of the trained network, which returns logits; its weights are overwritten.
      test: batches of inputs and classes.
    """
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )

    def evaluate(weights: Any) -> dict[str, float]:
        weights.assign_weights_to(model)
        return model.evaluate(test, verbose=0, return_dict=True)

    return evaluate
