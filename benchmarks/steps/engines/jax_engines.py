"""Training steps of JAX: ordinary, and private by JAX-Privacy, each one jitted function."""

from __future__ import annotations

import functools
from typing import Callable

import jax
import jax.numpy as jnp

from benchmarks.steps import problems
from benchmarks.steps.engines import jax_models

RATE = 0.01


def _ordinary_step(loss: Callable) -> tuple[Callable, None]:
    @jax.jit
    def step(parameters, noise_state, x, y):
        return _updated(parameters, jax.grad(loss)(parameters, x, y)), noise_state

    return step, None


def _private_step(loss: Callable, parameters: dict, batch_size: int) -> tuple[Callable, object]:
    """Clip norm 1, noise multiplier 1, the sum divided by the batch size."""
    import jax_privacy

    clipped_grad = jax_privacy.clipped_grad(
        loss, l2_clip_norm=1.0, batch_argnums=(1, 2), normalize_by=batch_size
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=clipped_grad.sensitivity(), prng_key=jax.random.key(0)
    )

    @jax.jit
    def step(parameters, noise_state, x, y):
        gradients = clipped_grad(parameters, x, y)
        noisy, noise_state = privatizer.update(gradients, noise_state)
        return _updated(parameters, noisy), noise_state

    return step, privatizer.init(parameters)


def _updated(parameters: dict, gradients: dict) -> dict:
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)


def make(engine: str, model: str, batch_size: int, width: int) -> tuple[Callable[[], None], int]:
    """Makes a training step; see `tensorflow_engines.make`."""
    problem = problems.PROBLEMS[model]
    x, y = (jnp.asarray(array) for array in problems.make_data(model, batch_size))
    parameters = jax_models.init(problem, width)
    loss = functools.partial(jax_models.mean_loss, problem)
    if engine == "jax_sgd":
        compiled, noise_state = _ordinary_step(loss)
    else:
        compiled, noise_state = _private_step(loss, parameters, batch_size)
    state = [parameters, noise_state]

    def step() -> None:
        state[:] = jax.block_until_ready(compiled(*state, x, y))

    return step, sum(p.size for p in jax.tree.leaves(parameters))
