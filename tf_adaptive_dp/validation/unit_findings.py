"""Findings about inputs and targets in raw units, on which private training learns little.

They are warnings, and they look only where the answer is plain: at losses of Keras by their name,
and at models with trained layers that get the inputs as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.layers import is_called_once, is_clonable
from tf_adaptive_dp.normalization import PrivateNormalization
from tf_adaptive_dp.validation.findings import Finding

_LAYERS = tf.keras.layers
# Losses that grow with the units of the targets.
_OF_UNITS = {
    "mse",
    "meansquarederror",
    "mae",
    "meanabsoluteerror",
    "huber",
    "huberloss",
    "logcosh",
}
_LARGE, _SMALL = 100.0, 0.1
_TOO_LARGE = 1e10  # whose fourth power is beyond float32
_LARGE_WEIGHT = 1.001
_FAR_APART = 1000.0
# Layers that leave the units of their inputs as they are.
_KEEP_UNITS = (
    _LAYERS.InputLayer,
    _LAYERS.Flatten,
    _LAYERS.Reshape,
    _LAYERS.Permute,
    _LAYERS.Dropout,
    _LAYERS.GaussianNoise,
    _LAYERS.ZeroPadding2D,
    _LAYERS.MaxPooling2D,
    _LAYERS.AveragePooling2D,
)
_READ_UNITS = (
    _LAYERS.Dense,
    _LAYERS.Conv1D,
    _LAYERS.Conv2D,
    _LAYERS.Conv3D,
    _LAYERS.RNN,
)


def unit_findings(model: tf.keras.Model, loss: Any, batch: tuple) -> list[Finding]:
    """Warns of targets, inputs and weights whose magnitudes leave nothing to learn under noise.

    Args:
      model: the model; it is not called, and need not be built.
      loss: what it is compiled with.
      batch: x, y and possibly sample weights, each a nest of tensors.
    """
    targets = batch[1] if len(batch) > 1 else None
    weights = batch[2] if len(batch) > 2 else None
    return [*_of_targets(model, loss, targets), *_of_inputs(model, batch[0]), *_of_weights(weights)]


def _of_targets(model: tf.keras.Model, loss: Any, targets: Any) -> list[Finding]:
    losses, parts = tf.nest.flatten(loss), tf.nest.flatten(targets)
    if len(losses) != len(parts) or isinstance(loss, dict) != isinstance(targets, dict):
        return []
    numbers = [_numbers(part) for of, part in zip(losses, parts) if _grows_with_units(of)]
    there = [part for part in numbers if part is not None]
    offset, scale = 0.0, 1.0
    if len(parts) == len(there) == 1:
        offset, scale = _last_rescaling(model, there[0].shape[-1])
    largest = max((_largest(part - offset) for part in there), default=0.0)
    if max((_largest((part - offset) / scale) for part in there), default=0.0) > _LARGE:
        what = (
            f"Targets have magnitudes up to {largest:.2g}, and the loss grows with their units: "
            "nearly all gradients are clipped, so the model cannot reach targets of that size in a "
            "few steps, and its other outputs learn little."
        )
        fix = (
            "Let the model's last layer scale its predictions (`plan.denormalization(y)` of a plan "
            "with `normalize_targets=True`, or `keras.layers.Rescaling` with public constants), or "
            "scale the targets to a magnitude of about 1 by public constants; see "
            "docs/how-to/units.md."
        )
    elif largest > _TOO_LARGE:
        what = (
            f"Targets have magnitudes up to {largest:.2g}, and the loss grows with their units: "
            "the squares of gradients exceed the range of float32, so they count as zero."
        )
        fix = "Divide the targets by a public constant; see docs/how-to/units.md."
    elif 0 < largest < _SMALL and not _learns_units(model):
        what = (
            f"Targets have magnitudes of at most {largest:.2g}, and the loss shrinks with their "
            "units: gradients are far smaller than `l2_norm_clip`, and the noise is as large as "
            "ever, so the model learns little."
        )
        fix = (
            "Multiply the targets by a public constant that gives them a magnitude of about 1, or "
            'let the first batches find the clip norm (`l2_norm_clip="measured"`); see '
            "docs/how-to/units.md."
        )
    else:
        return []
    return [Finding("units", "batch", what, fix, "warning")]


def _last_rescaling(model: tf.keras.Model, num_columns: int) -> tuple[Any, Any]:
    """The offset and the scale of the last layer, if it only rescales; else 0 and 1.

    Args:
      model: the model.
      num_columns: the size of the last axis of the targets, for which they must be.
    """
    last = model.layers[-1] if is_clonable(model) and model.layers else None
    found: tuple = (0.0, 1.0)
    if isinstance(last, PrivateNormalization) and last.invert and last.built:
        found = tuple(last.get_weights()[:2])
    elif isinstance(last, _LAYERS.Rescaling) and np.all(last.scale):
        found = last.offset, last.scale
    return found if all(np.shape(v) in ((), (1,), (num_columns,)) for v in found) else (0.0, 1.0)


def _learns_units(model: tf.keras.Model) -> bool:
    """Whether the optimizer learns how large gradients are."""
    return getattr(getattr(model, "optimizer", None), "learns_units", False)


def _grows_with_units(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return name.replace("_", "").lower() in _OF_UNITS


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def _of_inputs(model: tf.keras.Model, inputs: Any) -> list[Finding]:
    found = []
    for reader, read in _read_as_given(model, inputs).items():
        columns = np.concatenate([_magnitudes(part) for part in read])
        if not columns.size:
            continue
        smallest, largest = float(np.min(columns)), float(np.max(columns))
        if largest >= _FAR_APART * smallest:
            what = f"Features differ in magnitude, from {smallest:.2g} to {largest:.2g}, and"
        elif np.median(columns) > _LARGE:
            what = f"Inputs have magnitudes up to {largest:.2g}, and"
        else:
            continue
        found.append(
            Finding(
                "units",
                "batch",
                f"{what} {reader} gets them as they are. Noise and clipping are the same for all "
                "weights, so little is learned from inputs in raw units.",
                "Normalize them privately (`plan.normalization(x)` of a plan with "
                "`normalize_inputs=True`), or by public constants (`keras.layers.Rescaling`); see "
                "docs/how-to/units.md.",
                "warning",
            )
        )
    return found


def _of_weights(weights: Any) -> list[Finding]:
    parts = [_numbers(part) for part in tf.nest.flatten(weights)]
    largest = max((_largest(part) for part in parts if part is not None), default=0.0)
    if largest < _LARGE_WEIGHT:
        return []
    return [
        Finding(
            "units",
            "batch",
            f"Sample or class weights go up to {largest:.2g}. Gradients are weighted before they "
            "are clipped, so a weight above 1 has hardly any effect where they are clipped anyway.",
            "Divide all weights by the largest one, which should not depend on private data.",
            "warning",
        )
    ]


def small_weight_findings(model: tf.keras.Model, weights: Any) -> list[Finding]:
    """Warns of weights that are all so small that gradients are lost in the noise.

    Args:
      model: see `unit_findings`.
      weights: the sample weights of all examples, or the weights of all classes: the largest may
        be that of a rare class.
    """
    parts = [_numbers(part) for part in tf.nest.flatten(weights)]
    largest = max((_largest(part) for part in parts if part is not None), default=0.0)
    if not 0 < largest < _SMALL or _learns_units(model):
        return []
    return [
        Finding(
            "units",
            "batch",
            f"Sample or class weights are at most {largest:.2g}. Gradients are weighted before "
            "they are clipped, so they are far smaller than `l2_norm_clip`, and the noise is as "
            "large as ever: the model learns little.",
            "Divide all weights by the largest one, which should not depend on private data; see "
            "docs/how-to/class-weights.md.",
            "warning",
        )
    ]


def _read_as_given(model: tf.keras.Model, inputs: Any) -> dict[str, list[np.ndarray]]:
    """The inputs that trained layers get as they are, by the names of these layers.

    Anything unknown may normalize: a layer of the user's own, a model inside, or arithmetic.
    """
    if not is_clonable(model):  # layers come in no particular order
        return {}
    if isinstance(model, tf.keras.Sequential):
        reader, given = _first_reader(model), _numbers(inputs)
        return {} if reader is None or given is None else {reader: [given]}
    # By the tensors of the model that hold them.
    as_given = {id(of): [part] for of, part in _given_to(model, inputs) if part is not None}
    read = {}
    for layer in getattr(model, "operations", model.layers):  # arithmetic too, on Keras 3
        if not is_called_once(layer) or isinstance(layer, _LAYERS.InputLayer):
            continue
        parts = [part for of in tf.nest.flatten(layer.input) for part in as_given.get(id(of), ())]
        if parts and isinstance(layer, (*_KEEP_UNITS, _LAYERS.Concatenate)):
            as_given[id(layer.output)] = parts
        elif parts and _reads_units(layer):
            read[layer.name] = parts
    return read


def _given_to(model: tf.keras.Model, inputs: Any) -> Iterator[tuple[Any, np.ndarray | None]]:
    """The inputs of a functional model, and what each of them is given, if it is numbers."""
    if isinstance(inputs, dict):
        for of in model.inputs:
            yield of, _numbers(inputs.get(of.name))
    else:
        parts = tf.nest.flatten(inputs)
        if len(parts) == len(model.inputs):
            yield from zip(model.inputs, map(_numbers, parts))


def _numbers(tensor: Any) -> np.ndarray | None:
    """The values of a tensor, if they are numbers."""
    if not tf.is_tensor(tensor) or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return None
    values = tf.cast(tensor, tf.float64).numpy()
    return values[:, None] if values.ndim == 1 else values


def _first_reader(model: tf.keras.Sequential) -> str | None:
    """The name of the layer that gets a model's inputs, if it is trained and nothing comes before.

    Anything unknown may normalize.
    """
    for layer in model.layers:
        if not isinstance(layer, _KEEP_UNITS):
            return layer.name if _reads_units(layer) else None
    return None


def _reads_units(layer: tf.keras.layers.Layer) -> bool:
    if not isinstance(layer, _READ_UNITS) or not layer.trainable:
        return False
    return not layer.built or bool(layer.trainable_variables)


def _magnitudes(inputs: np.ndarray) -> np.ndarray:
    """The largest magnitude of each feature that is often present; of images, of each channel.

    A rare feature may be small by chance in a few examples.
    """
    if inputs.ndim < 2 or len(inputs) < 4:
        return np.zeros(0)
    values = np.abs(inputs).reshape(len(inputs), -1, inputs.shape[-1])
    values = np.where(np.isfinite(values), values, 0.0).max(axis=1)
    often = np.count_nonzero(values, axis=0) >= len(values) / 2
    return values.max(axis=0)[often]
