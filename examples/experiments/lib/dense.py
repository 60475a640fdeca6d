"""The fully connected networks of the ADADP paper, trained with the settings of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import training

Arrays = tuple[np.ndarray, np.ndarray]

LABELS = {"ADADP": "ADADP", "DPAdam": "DP-Adam", "DPSGD": "DP-SGD"}


def make_model(
    hidden_units: Sequence[int], classes: int = 10, input_scale: float | None = None
) -> tf.keras.Model:
    """Makes a network without biases, as in the ADADP authors' code; it returns logits.

    Args:
      hidden_units: The units of each hidden layer.
      classes: The number of outputs.
      input_scale: A factor for inputs such as counts; `None` leaves them unchanged.
    """
    first = [] if input_scale is None else [tf.keras.layers.Rescaling(input_scale)]
    hidden = [tf.keras.layers.Dense(u, activation="relu", use_bias=False) for u in hidden_units]
    return tf.keras.Sequential([*first, *hidden, tf.keras.layers.Dense(classes, use_bias=False)])


def make_optimizer(settings: dict[str, Any]) -> tf.keras.optimizers.Optimizer:
    """Makes the optimizer of a trial.

    Args:
      settings: "optimizer", the name of a class of tf_adaptive_dp; its "l2_norm_clip",
        "noise_multiplier" and "batch_size"; and its other "arguments".
    """
    return getattr(tf_adaptive_dp, settings["optimizer"])(
        l2_norm_clip=settings["l2_norm_clip"],
        noise_multiplier=settings["noise_multiplier"],
        expected_batch_size=settings["batch_size"],
        **settings["arguments"],
    )


def label(settings: dict[str, Any]) -> str:
    """Optimizer and arguments, for a table or a legend."""
    arguments = dict(settings["arguments"])
    words = [LABELS[settings["optimizer"]]]
    if "learning_rate" in arguments:
        words.append(f"rate {arguments['learning_rate']:g}")
    if "tolerance" in arguments:
        words.append(f"constant tolerance {arguments['tolerance']:.3g}")
    if "freeze_learning_rate_after" in arguments:
        words.append(f"rate fixed after epoch {arguments['freeze_learning_rate_after']}")
    return ", ".join(words)


def train(settings: dict[str, Any], train: Arrays, test: Arrays) -> dict[str, Any]:
    """Trains once with privacy.

    Args:
      settings: The settings of `make_optimizer` and `make_model`, and "epochs", "delta" and "seed".
        The seed determines the initial weights; noise and batches never repeat.
      train: Private inputs and labels.
      test: Held-out inputs and labels.

    Returns:
      See `training.fit`.
    """
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    model = make_model(
        settings["hidden_units"], settings.get("classes", 10), settings.get("input_scale")
    )
    model.compile(
        make_optimizer(settings),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        metrics=["accuracy"],
    )
    return training.fit(
        model,
        train,
        test,
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        delta=settings["delta"],
    )
