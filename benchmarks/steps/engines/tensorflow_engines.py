"""Training steps of Keras 2 or 3: ordinary, private by this library, private by TF Privacy.

All go through `model.compile` and the train function that `fit` calls once a step. A process
imports no library but the one that its engine needs, since its memory is measured too.
"""

from __future__ import annotations

import importlib
from typing import Callable

import numpy as np
import tensorflow as tf

from benchmarks.steps import problems
from benchmarks.steps.engines import keras_models

RATE = 0.01
MEAN = "sum_over_batch_size"
PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}


def keras_sgd(
    problem: problems.Problem, width: int, jit_compile: bool | None = None
) -> tf.keras.Model:
    """The compiled model of ordinary training."""
    model = keras_models.build(problem, width)
    loss = keras_models.loss(problem, MEAN)
    model.compile(tf.keras.optimizers.SGD(RATE), loss, jit_compile=jit_compile)
    return model


def make(engine: str, model: str, batch_size: int, width: int) -> tuple[Callable[[], None], int]:
    """Makes a training step.

    Args:
      engine: a name of `catalogue.ENGINES`.
      model: a name of `problems.PROBLEMS`.
      batch_size: B.
      width: factor of the hidden sizes.

    Returns:
      A function that does one step, and the number of parameters.

    Raises:
      NotSupportedError: if the engine cannot train the model.
    """
    tf.keras.utils.set_random_seed(0)
    problem = problems.PROBLEMS[model]
    data = tf.data.Dataset.from_tensors(problems.make_data(model, batch_size)).repeat()
    # Keras 3 has the last word on `None`, and takes "auto" for it, which is False without a GPU.
    jit_compile = engine.endswith("_xla") or (False if engine.startswith("keras3_") else None)
    if engine.startswith(("keras_sgd", "keras3_sgd")):
        compiled = keras_sgd(problem, width, jit_compile)
    elif engine.startswith("keras3_"):
        own = importlib.import_module("benchmarks.steps.engines.own_engines")
        compiled = own.with_ordinary_loss(problem, width, jit_compile)
    else:
        side = "tf_privacy" if engine.startswith("tfp_") else "own"
        module = importlib.import_module(f"benchmarks.steps.engines.{side}_engines")
        compiled = module.compiled_model(engine, problem, width, data)
    iterator = iter(data)
    # Keras 2 returns it, Keras 3 only keeps it.
    train_function = compiled.make_train_function() or compiled.train_function
    num_parameters = sum(int(np.prod(v.shape)) for v in compiled.trainable_variables)

    def step() -> None:
        train_function(iterator)

    def refresh_and_step() -> None:
        """As the callback of PublicGradients does in `fit`, with a public batch of size B."""
        compiled.optimizer.side_information.update(compiled)
        train_function(iterator)

    return refresh_and_step if engine == "adadps_public" else step, num_parameters
