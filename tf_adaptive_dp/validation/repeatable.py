"""Running a model for a look at it, so that it is afterwards as it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context

from tf_adaptive_dp.validation.layers import named_layers


@contextlib.contextmanager
def unchanged(model: tf.keras.Model) -> Iterator[None]:
    """Gives a model back its variables, and TensorFlow its seed.

    Variables that the model does not track keep what the model wrote to them.

    Args:
      model: is built already.
    """
    before = [(v, tf.identity(v)) for v in _variables(model)]
    eager = context.context()
    seed, generator = eager._seed, getattr(eager, "_rng", None)
    generators = [(g, g._seed) for g in _generators(model)]
    try:
        reset(model, 0)
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        for layer_generator, layer_seed in generators:
            layer_generator._seed = layer_seed
        eager._seed, eager._rng = seed, generator


def reset(model: tf.keras.Model, seed: int) -> None:
    """Makes the random numbers of the next run those of `seed`, within `unchanged`.

    Args:
      model: whose layers may have generators of their own.
      seed: any number.
    """
    tf.random.set_seed(seed)
    for generator in _generators(model):
        if generator._seed is not None:
            generator._seed = seed
        if getattr(generator, "_generator", None) is not None:
            generator._generator.reset_from_seed(seed)


def _variables(model: tf.keras.Model) -> list[tf.Variable]:
    found = {id(v): v for v in model.variables}
    for generator in _generators(model):
        if getattr(generator, "_generator", None) is not None:
            found[id(generator._generator.state)] = generator._generator.state
    for _, layer in named_layers(model):
        states = getattr(layer, "states", None) if isinstance(layer, tf.keras.layers.RNN) else None
        for state in tf.nest.flatten(states):
            if isinstance(state, tf.Variable):
                found[id(state)] = state
    return list(found.values())


def _generators(model: tf.keras.Model) -> list:
    """Keras's generators of random numbers, as dropout and augmentation have them."""
    layers = [model, *(layer for _, layer in named_layers(model))]
    found = [getattr(layer, "_random_generator", None) for layer in layers]
    return [generator for generator in found if hasattr(generator, "_seed")]
