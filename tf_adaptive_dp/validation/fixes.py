"""Copies a model and replaces the layers that have a safe replacement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.layers import (
    clone,
    copy_trainable,
    input_shape,
    is_clonable,
    own_attributes,
    own_weights,
    replace_attribute,
)
from tf_adaptive_dp.validation.layer_findings import (
    keeps_state,
    named_layers,
    takes_batch_statistics,
)

_LAYERS = tf.keras.layers


def repaired_model(model: tf.keras.Model, inputs: Any) -> tf.keras.Model:
    """Copies a model with group instead of batch normalization and without kept states.

    Other layers keep their names and weights. Group normalizations take over gamma and beta. A
    batch normalization that was trained before is frozen instead: its moving averages are part of
    what the model has learned. The copy is not compiled.

    Args:
      model: a built model; it does not change.
      inputs: the inputs of one batch, on which a subclassed model is built.

    Returns:
      The copy. It contains layers without a safe replacement unchanged.

    Raises:
      TypeError: if the copy would have another class.
      ValueError: if the copy would not share weights that layers of the model share.
      Exception: whatever the model's own `get_config` and `from_config` raise. A model of a custom
        class needs both to be repaired.
    """
    repaired = _copy(model)
    if not repaired.built:
        repaired(inputs, training=False)
    _copy_weights(model, repaired)
    if type(repaired) is not type(model):
        raise TypeError(f"Keras copies a {type(model).__name__} as a {type(repaired).__name__}.")
    frozen = {
        id(variable)
        for _, layer in named_layers(model)
        if _is_to_freeze(layer)
        for variable in layer.trainable_variables
    }
    counts = len(model.trainable_variables) - len(frozen), len(repaired.trainable_variables)
    if counts[0] != counts[1]:
        raise ValueError(
            f"Layers share weights that the copy would not share: it has {counts[1]} trainable "
            f"variables instead of {counts[0]}."
        )
    return repaired


def _is_to_freeze(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer takes batch statistics and has moving averages of earlier training."""
    if not takes_batch_statistics(layer) or not layer.built:
        return False
    mean, variance = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    return bool(np.any(mean != 0) or np.any(variance != 1))


def group_normalization(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer | None:
    """Makes the group normalization that replaces a batch normalization.

    There are gcd(32, channels) groups if an example has several positions per channel, as in
    images. The output of a dense layer has only one, where a group might hold a single number,
    which normalizes to zero; so all channels form one group.

    Args:
      layer: a built batch normalization.

    Returns:
      The layer, or `None` if no replacement is safe.
    """
    axes = list(layer.axis) if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    if not layer.built or len(axes) != 1:
        return None
    axis = axes[0] % layer.input_spec.ndim
    channels = layer.moving_mean.shape[0]
    groups = math.gcd(32, channels) if _positions(layer, axis) != 1 else 1
    if groups == 1 == channels and _positions(layer, axis) == 1:
        return None
    config = layer.get_config()
    names = (
        "name trainable dtype epsilon center scale beta_initializer gamma_initializer "
        "beta_regularizer gamma_regularizer beta_constraint gamma_constraint"
    ).split()
    kept = {name: config[name] for name in names}
    return _LAYERS.GroupNormalization(groups=groups, axis=axis, **kept)


def why_left(layer: tf.keras.layers.Layer) -> str:
    """Says why a repaired copy still has a batch normalization, and what to do.

    Args:
      layer: one that takes batch statistics.
    """
    if isinstance(layer.axis, (list, tuple)) and len(layer.axis) > 1:
        why = "it normalizes several axes, which GroupNormalization cannot"
    elif layer.built and layer.moving_mean.shape[0] == 1:
        why = "a single channel without positions would be normalized to 0"
    else:
        why = "it found no safe replacement"
    return f"`fix=True` left it: {why}. Remove the layer, or replace it yourself."


def _positions(layer: tf.keras.layers.Layer, axis: int) -> int | None:
    """The number of positions per channel in an example; `None` if it is unknown."""
    shape = input_shape(layer) or [None] * layer.input_spec.ndim
    others = [n for a, n in enumerate(shape) if a not in (0, axis)]
    known = [n for n in others if n is not None]
    return math.prod(known) if len(known) == len(others) else None


def is_defective(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer or model contains a layer of a kind that has a replacement."""
    layers = [layer, *(inner for _, inner in named_layers(layer))]
    return any(takes_batch_statistics(each) or keeps_state(each) for each in layers)


def _copy(layer: Any) -> Any:
    """Copies a layer; an operation that is no layer, as Keras 3 has them, holds nothing to fix."""
    if not isinstance(layer, _LAYERS.Layer):
        return layer.__class__.from_config(layer.get_config())
    if takes_batch_statistics(layer) and not _is_to_freeze(layer):
        replacement = group_normalization(layer)
        if replacement is not None:
            return replacement
    if is_clonable(layer):
        return clone(layer, _copy)
    new = layer.__class__.from_config(layer.get_config())
    if is_defective(layer):
        if keeps_state(new):
            new.stateful = False
        for name, value in _children(layer):
            if any(map(is_defective, _layers_in(value))):
                inside = tf.nest.map_structure(_copied_inside, value, getattr(new, name))
                replace_attribute(new, name, inside)
    return new


def _copied_inside(old: Any, new: Any) -> Any:
    return _copy(old) if isinstance(old, tf.keras.layers.Layer) and is_defective(old) else new


def _children(layer: tf.keras.layers.Layer) -> Iterator[tuple[str, object]]:
    """Yields the attributes that hold layers, alone or in lists and dicts."""
    for name, value in own_attributes(layer):
        if list(_layers_in(value)):
            yield name, value


def _layers_in(value: Any) -> Iterator[tf.keras.layers.Layer]:
    if isinstance(value, (tf.keras.layers.Layer, list, tuple, dict)):
        yield from (v for v in tf.nest.flatten(value) if isinstance(v, tf.keras.layers.Layer))


def _copy_weights(old: tf.keras.layers.Layer, new: tf.keras.layers.Layer) -> None:
    # Not `trainable = ...`, which would thaw frozen layers inside.
    copy_trainable(old, new)
    if takes_batch_statistics(old) and isinstance(new, _LAYERS.GroupNormalization):
        for name in ("gamma", "beta"):
            if getattr(old, name) is not None:
                getattr(new, name).assign(getattr(old, name))
    elif not is_defective(old):
        for (_, inner), (_, copied) in zip(named_layers(old), named_layers(new)):
            copy_trainable(inner, copied)
        new.set_weights(old.get_weights())
    elif is_clonable(old):
        for layer in old.layers:
            if not isinstance(layer, _LAYERS.InputLayer):  # which Keras 3 names anew
                _copy_weights(layer, new.get_layer(layer.name))
    else:
        for source, target in zip(own_weights(old), own_weights(new)):
            target.assign(source)
        if _is_to_freeze(old):
            new.trainable = False
        for name, value in _children(old):
            for source, target in zip(_layers_in(value), _layers_in(getattr(new, name))):
                _copy_weights(source, target)
