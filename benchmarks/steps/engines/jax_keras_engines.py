"""Training steps of Keras 3 on JAX: ordinary, and private by JAX-Privacy's Keras API."""

from __future__ import annotations

from typing import Callable

import jax
import keras

from benchmarks.steps import problems
from benchmarks.steps.engines import keras_models

RATE = 0.01


def _private(model: keras.Model, batch_size: int) -> keras.Model:
    """Clip norm 1, noise multiplier 1, the sum divided by the batch size."""
    from jax_privacy import keras_api

    config = keras_api.DPKerasConfig(
        epsilon=100.0,  # more than the noise multiplier gives
        delta=1e-5,
        clipping_norm=1.0,
        batch_size=batch_size,
        gradient_accumulation_steps=1,
        train_steps=10_000,
        train_size=60_000,
        noise_multiplier=1.0,
        rescale_to_unit_norm=False,
        seed=0,
    )
    return keras_api.make_private(model, config)


def make(engine: str, model: str, batch_size: int, width: int) -> tuple[Callable[[], None], int]:
    """Makes a training step; see `tensorflow_engines.make`."""
    keras.utils.set_random_seed(0)
    problem = problems.PROBLEMS[model]
    batch = problems.make_data(model, batch_size)
    compiled = keras_models.build(problem, width)
    num_parameters = compiled.count_params()
    if engine == "jax_keras_private":
        compiled = _private(compiled, batch_size)
    optimizer = keras.optimizers.SGD(RATE)
    loss = keras_models.loss(problem, "sum_over_batch_size")
    compiled.compile(optimizer, loss, jit_compile=True)
    compiled.train_on_batch(*batch)  # builds the optimizer and the metrics
    compiled.make_train_function()
    groups = (
        compiled.trainable_variables,
        compiled.non_trainable_variables,
        optimizer.variables,
        compiled.metrics_variables,
    )
    state = tuple([v.value for v in variables] for variables in groups)

    def step() -> None:
        """What `fit` does for a batch: the state stays with JAX."""
        nonlocal state
        _, state = compiled.train_function(state, iter([batch]))
        jax.block_until_ready(state)

    return step, num_parameters
