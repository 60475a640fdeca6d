"""How the simulation programs judge a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def evaluator(model: tf.keras.Model, test: tf.data.Dataset) -> Callable[[Any], dict[str, float]]:
    """What `federated.train` takes as `evaluate`: loss and accuracy on test data.

    Args:
      model: of the same network as the one that is trained, with logits for each class; its weights
        are overwritten.
      test: batches of inputs and classes.
    """
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )

    def evaluate(weights: Any) -> dict[str, float]:
        weights.assign_weights_to(model)
        return model.evaluate(test, verbose=0, return_dict=True)

    return evaluate
