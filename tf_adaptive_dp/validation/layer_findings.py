"""Inspects the layers of a model without running them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras.layers import BATCH_NORMALIZATIONS, inner_layers, was_adapted
from tf_adaptive_dp._keras.variables import native, path_of
from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.normalization import (
    OF_OTHER_UNIT,
    normalizations_in,
    of_other_unit,
    unpaid_in,
    words_of,
)
from tf_adaptive_dp.validation.findings import Finding

_LAYERS = tf.keras.layers


def named_layers(model: tf.keras.layers.Layer) -> Iterator[tuple[str, tf.keras.layers.Layer]]:
    """Walks over all layers in a model, including nested and wrapped ones, each once.

    Args:
      model: a model or a layer.

    Yields:
      The path (names joined by "/") and the layer.
    """
    seen: set[int] = set()

    def walk(
        parent: tf.keras.layers.Layer, prefix: str
    ) -> Iterator[tuple[str, tf.keras.layers.Layer]]:
        for layer in inner_layers(parent):
            if isinstance(layer, _LAYERS.Layer) and id(layer) not in seen:
                seen.add(id(layer))
                yield prefix + layer.name, layer
                yield from walk(layer, f"{prefix}{layer.name}/")

    yield from walk(model, "")


def path_finder(model: tf.keras.Model) -> Callable[[str], str | None]:
    """Makes a function that finds the layer of an operation or a variable.

    Args:
      model: the model that contains the layers.

    Returns:
      A function that maps a name to the path of the innermost layer in whose name scope it lies, or
      to `None`.
    """
    paths = [path for path, _ in named_layers(model)]

    @functools.cache
    def find(scope: str) -> str | None:
        # A layer that is called twice in one graph gets a scope with a number.
        for name in (scope, re.sub(r"_\d+(?=/|$)", "", scope)):
            inside = [path for path in paths if f"/{path}/" in f"/{name}/"]
            if inside:
                return max(inside, key=len)
        return None

    return lambda name: find(name.rpartition("/")[0])


def has_own(model: tf.keras.Model, method: str) -> bool:
    """Whether the class of a model overrides a method of `tf.keras.Model`."""
    return getattr(type(model), method) is not getattr(tf.keras.Model, method)


def needs_targets(model: tf.keras.Model, loss: Any) -> bool:
    """Whether the training step of a compiled model is Keras's own, and compares with targets.

    Args:
      model: the model.
      loss: what it is compiled with.
    """
    methods = ("train_step", "compute_loss", "make_train_function")
    if any(has_own(model, method) for method in methods):
        return False
    return any(part is not None for part in tf.nest.flatten(loss))


def takes_batch_statistics(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer normalizes by the statistics of the batch when the model trains."""
    return isinstance(layer, BATCH_NORMALIZATIONS) and layer.trainable


def keeps_state(layer: tf.keras.layers.Layer) -> bool:
    """Whether a recurrent layer carries its state from one batch to the next."""
    return isinstance(layer, _LAYERS.RNN) and bool(layer.stateful)


def regularizer_findings(model: tf.keras.Model) -> list[Finding]:
    """Names the layers whose regularizers Keras cannot add to a loss vector.

    Args:
      model: a built model; it is not called.
    """
    return [f for path, layer in named_layers(model) for f in _regularizers(path, layer)]


def layer_findings(model: tf.keras.Model) -> list[Finding]:
    """Inspects the layers and variables of a model.

    Args:
      model: a built model; it is not called.
    """
    found = [finding for path, layer in named_layers(model) for finding in _of_layer(path, layer)]
    found += adapted_findings(model)
    if not model.trainable_variables:
        found.append(
            Finding(
                "variables",
                "model",
                "It has no trainable variables, so there is nothing to train.",
                "Set `trainable = True` on the layers to train.",
            )
        )
    return found + [
        Finding(
            "variables",
            path_finder(model)(path_of(variable)) or "model",
            f"The trainable variable {path_of(variable)} has type {native(variable).dtype.name}; "
            "gradients of this type cannot be clipped.",
            "Create it with `trainable=False`, or train its real and imaginary parts.",
        )
        for variable in model.trainable_variables
        if not native(variable).dtype.is_floating
    ]


def statistics_findings(model: tf.keras.Model, optimizer: Any) -> list[Finding]:
    """Names a layer whose statistics were released at a cost that the optimizer does not count.

    Args:
      model: a built model; it is not called.
      optimizer: the one to train with.
    """
    if not has_ledger(optimizer):
        return []
    paths = {id(layer): path for path, layer in named_layers(model)}
    other = of_other_unit(normalizations_in(model), optimizer)
    if other is not None:
        fix = "Adapt a new layer with `layer.adapt(x, user_ids)`, or use a plan with `user_ids`."
        return [Finding("statistics", paths[id(other)], OF_OTHER_UNIT, fix)]
    unpaid = unpaid_in(model, optimizer)
    if unpaid is None:
        return []
    return [
        Finding(
            "statistics",
            paths[id(unpaid)],
            f"Its means and deviations were released by {unpaid.dp_event!r}, which is not in the "
            "optimizer's ledger, so epsilon would be too small.",
            "Add it before training (`optimizer.ledger.other_events += (layer.dp_event,)`), or use "
            "a `PrivacyPlan` with `normalize_inputs=True` and its optimizer.",
        )
    ]


def _of_layer(path: str, layer: tf.keras.layers.Layer) -> Iterator[Finding]:
    kind = type(layer).__name__
    if takes_batch_statistics(layer):
        yield Finding(
            "batch statistics",
            path,
            f"{kind} normalizes by the mean and variance of the batch in training, so every "
            "example changes the gradients of all others. Its moving averages are statistics of "
            "private data without noise.",
            "In a pretrained network, freeze it (`layer.trainable = False`). In a new one, replace "
            "it by `tf.keras.layers.GroupNormalization` or `LayerNormalization`. `fix=True` does "
            "either.",
        )
    if isinstance(layer, _LAYERS.SpectralNormalization):
        yield Finding(
            "state",
            path,
            f"{kind} writes to its own kernel in each forward pass, which Keras does not compile "
            "and which the clipped gradient does not contain.",
            "Use the wrapped layer alone, with a `kernel_constraint` to bound its weights.",
        )
    if keeps_state(layer):
        yield Finding(
            "state",
            path,
            f"{kind} has stateful=True: the examples of one batch change the losses of the next.",
            "Use stateful=False (`fix=True` does).",
        )


def adapted_findings(model: tf.keras.Model) -> list[Finding]:
    """Names the layers that hold what Keras's `adapt` computed from data, once for their parts.

    Args:
      model: a model; it is not called.
    """
    return [
        Finding(
            "adapted",
            path,
            f"This {type(layer).__name__} was adapted to data. If that was the private training "
            "data, its statistics are released without noise, and ε does not cover them.",
            f"Adapt it on public data, or {_instead_of_adapting(layer)}.",
            "warning",
        )
        for path, layer in _adapted_layers(model)
    ]


def adapted_warning(model: tf.keras.Model) -> str | None:
    """What to say before training about all layers that were adapted; `None` if there are none.

    Args:
      model: a model; it is not called.
    """
    found = list(_adapted_layers(model))
    if not found:
        return None
    names = ", ".join(f"{path} ({type(layer).__name__})" for path, layer in found)
    others = ", or ".join(dict.fromkeys(_instead_of_adapting(layer) for _, layer in found))
    return (
        f"Layers of the model were adapted to data: {names}. If that was the private training "
        "data, their statistics are released without noise, and ε does not cover them; if they "
        f"came with pretrained weights, this is no concern. Adapt them on public data, or {others}."
    )


def _adapted_layers(model: tf.keras.Model) -> Iterator[tuple[str, tf.keras.layers.Layer]]:
    """The adapted layers, without those inside of other ones, such as the lookup of a text."""
    inside = None
    for path, layer in named_layers(model):  # the parts of a layer follow it
        if was_adapted(layer) and not (inside and path.startswith(inside)):
            inside = f"{path}/"
            yield path, layer


def _instead_of_adapting(layer: tf.keras.layers.Layer) -> str:
    if isinstance(layer, _LAYERS.Normalization):
        words = words_of(layer.invert)
        return (
            f"use `{words.call}` of a `PrivacyPlan` with `{words.argument}=True`, or pass known "
            "`mean` and `variance`"
        )
    if isinstance(layer, _LAYERS.Discretization):
        return "pass known `bin_boundaries`"
    return "pass a known `vocabulary`"


def _regularizers(path: str, layer: tf.keras.layers.Layer) -> Iterator[Finding]:
    names = [
        name
        for name, value in vars(layer).items()
        if name.endswith("_regularizer")
        and not name.endswith("activity_regularizer")
        and isinstance(value, tf.keras.regularizers.Regularizer)
    ]
    if names:
        yield Finding(
            "regularizer",
            path,
            f"Its {', '.join(names)} adds a scalar, which Keras cannot add to a loss vector: `fit` "
            "fails.",
            'Use the loss without `reduction="none"`, or the optimizer\'s `weight_decay`.',
        )
