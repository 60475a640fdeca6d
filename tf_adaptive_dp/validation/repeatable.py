"""Runs a model to inspect it, and restores its state afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_adaptive_dp._keras.layers import (
    RandomGenerator,
    global_generators,
    random_generators,
    variables_so_far,
)
from tf_adaptive_dp._keras.models import metric_variables
from tf_adaptive_dp._keras.process_state import global_seed_kept
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.validation.layer_findings import named_layers


@contextlib.contextmanager
def unchanged(model: tf.keras.Model) -> Iterator[None]:
    """Restores the variables of a model, and TensorFlow's seed, at the end.

    Variables that the model does not track keep what the model wrote to them.

    Args:
      model: must be built.
    """
    before = [(v, tf.identity(v)) for v in state_of(model)]
    seeds = [(g, g.seed) for g in _generators(model)]
    try:
        with global_seed_kept():
            reset(model, 0)
            yield
    finally:
        for variable, value in before:
            variable.assign(value)
        for generator, seed in seeds:
            generator.seed = seed


def reset(model: tf.keras.Model, seed: int) -> None:
    """Seeds the random numbers of the next run; call it within `unchanged`.

    Args:
      model: its layers may have generators of their own.
      seed: any number.
    """
    tf.random.set_seed(seed)
    for generator in _generators(model):
        generator.restart(seed)


def state_of(model: tf.keras.Model) -> list[tf.Variable]:
    """All variables that a run of a model may change, as far as the model tracks them.

    Besides weights and metrics these are the states of its random generators and of its recurrent
    layers.

    Args:
      model: those of its variables that are not made yet are left out.
    """
    found = {id(v): v for v in (*variables_so_far(model), *metric_variables(model))}
    for generator in _generators(model):
        if generator.state is not None:
            found[id(generator.state)] = generator.state
    for _, layer in named_layers(model):
        states = getattr(layer, "states", None) if isinstance(layer, tf.keras.layers.RNN) else None
        for state in map(native, tf.nest.flatten(states)):
            if isinstance(state, tf.Variable):
                found[id(state)] = state
    # Keras 2 counts the vocabularies of lookup layers as variables.
    return [v for v in found.values() if isinstance(native(v), tf.Variable)]


def _generators(model: tf.keras.Model) -> list[RandomGenerator]:
    layers = [model, *(layer for _, layer in named_layers(model))]
    return [*global_generators(), *(g for layer in layers for g in random_generators(layer))]
