"""Keras models and layers: what is inside, and flags that Keras keeps to itself."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, internal_module, keras

# In Keras 3 `BatchNormalization(synchronized=True)` is what the second one was.
BATCH_NORMALIZATIONS: tuple[type[tf.keras.layers.Layer], ...] = (
    (keras.layers.BatchNormalization,)
    if GENERATION == 3
    else (keras.layers.BatchNormalization, keras.layers.experimental.SyncBatchNormalization)
)


def inner_layers(layer: tf.keras.layers.Layer) -> Iterator[tf.keras.layers.Layer]:
    """The layers that a layer or a model holds itself, in their order."""
    return layer._flatten_layers(recursive=False, include_self=False)


def layers_within(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """All layers inside a model, those inside of other layers too."""
    if GENERATION == 3:
        return list(model._flatten_layers(include_self=False))
    metric = keras.metrics.Metric  # which is a layer in Keras 2
    return [
        part
        for part in model.submodules
        if isinstance(part, keras.layers.Layer) and not isinstance(part, metric)
    ]


def variables_so_far(model: tf.keras.Model, *, trained: bool = False) -> list[tf.Variable]:
    """The variables of a model, of which parts may not be built yet.

    Keras 2 raises an error for those of a Sequential model that is not built.

    Args:
      model: any.
      trained: whether to list those only that training changes by gradients.
    """
    name = "trainable_variables" if trained else "variables"
    if model.built:
        return list(getattr(model, name))
    parts = [p for p in layers_within(model) if p.built or not isinstance(p, keras.Model)]
    return list({id(v): v for part in parts for v in getattr(part, name)}.values())


def is_compiled(model: tf.keras.Model) -> bool:
    """Whether `model.compile` was called."""
    return model.compiled if GENERATION == 3 else model._is_compiled


def is_clonable(layer: tf.keras.layers.Layer) -> bool:
    """Whether `tf.keras.models.clone_model` can copy a layer: a Sequential or functional model."""
    if isinstance(layer, keras.Sequential):
        return True
    if GENERATION == 3:
        return isinstance(layer, internal_module("models.functional").Functional)
    return isinstance(layer, keras.Model) and layer._is_graph_network


def is_called_once(layer: tf.keras.layers.Layer) -> bool:
    """Whether a layer, or another operation of a functional model, is called exactly once.

    Then `layer.input` and `layer.output` are those of this call.
    """
    return len(layer._inbound_nodes) == 1


def clone(
    model: tf.keras.Model, clone_function: Callable[[tf.keras.layers.Layer], Any]
) -> tf.keras.Model:
    """Copies a model that `is_clonable`. The copy is not compiled.

    Keras 3 also copies the layers of models inside, so that shared layers stay shared.

    Args:
      model: a Sequential or functional model.
      clone_function: copies a layer, or another operation of the model in Keras 3.
    """
    if GENERATION == 2:
        return keras.models.clone_model(model, clone_function=clone_function)
    return _cloned(model, clone_function, {})


def _cloned(
    model: tf.keras.Model,
    clone_function: Callable[[tf.keras.layers.Layer], Any],
    copies: dict[int, Any],
) -> tf.keras.Model:
    """Copies a model and the models inside, which `recursive=True` would not call by `_call`.

    Args:
      model: a Sequential or functional model, which Keras would compile again.
      clone_function: copies anything else.
      copies: the copies so far, by the identity of what was copied.
    """

    def copied(layer: Any) -> Any:
        if id(layer) not in copies:
            copy = _cloned(layer, clone_function, copies) if is_clonable(layer) else None
            copies[id(layer)] = clone_function(layer) if copy is None else copy
        return copies[id(layer)]

    call = None if isinstance(model, keras.Sequential) else _call
    was_compiled, model.compiled = model.compiled, False
    try:
        return keras.models.clone_model(model, clone_function=copied, call_function=call)
    finally:
        model.compiled = was_compiled


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer as the one was called that it may replace, which can take a mask."""
    taken = inspect.signature(layer.call).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        untaken = {"mask", "training"} - set(taken)
        kwargs = {name: value for name, value in kwargs.items() if name not in untaken}
    return layer(*args, **kwargs)


def input_shape(layer: tf.keras.layers.Layer) -> list[int | None] | None:
    """The shape that a layer with one input was built for; `None` if Keras did not keep it."""
    if GENERATION == 3:
        shape = (layer.get_build_config() or {}).get("input_shape")
        return None if shape is None else list(shape)
    try:
        return list(layer.get_input_shape_at(0))
    except (AttributeError, RuntimeError):  # never called on symbolic inputs
        return None


def own_attributes(layer: tf.keras.layers.Layer) -> list[tuple[str, Any]]:
    """The attributes of a layer, without those in which Keras lists the layers inside."""
    return [
        (name, value)
        for name, value in vars(layer).items()
        if not name.startswith("_self_") and name not in ("_layers", "_functional")
    ]


def replace_attribute(layer: tf.keras.layers.Layer, name: str, value: Any) -> None:
    """Sets an attribute that held layers, which Keras 3 would still count as inside."""
    if GENERATION == 3:
        for old in tf.nest.flatten(getattr(layer, name)):
            layer._tracker.untrack(old)
    setattr(layer, name, value)


def own_weights(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """The variables of a layer itself, without those of layers inside."""
    if GENERATION == 3:
        return [*layer._trainable_variables, *layer._non_trainable_variables]
    return layer._trainable_weights + layer._non_trainable_weights


def copy_trainable(source: tf.keras.layers.Layer, target: tf.keras.layers.Layer) -> None:
    """Freezes or thaws one layer as another one is, and no layer inside of it."""
    target._trainable = source._trainable
    if GENERATION == 3:  # where a model counts each variable that is trainable itself
        for variable in target._trainable_variables:
            variable.trainable = source._trainable


def set_dtype_policy(
    layer: tf.keras.layers.Layer, policy: str | tf.keras.mixed_precision.Policy
) -> None:
    """Changes the types in which a layer that has been built computes."""
    if GENERATION == 3:
        layer.dtype_policy = policy
    else:
        layer._set_dtype_policy(policy)


def was_adapted(layer: tf.keras.layers.Layer) -> bool:
    """Whether a preprocessing layer holds what its method `adapt` computed from data."""
    if GENERATION == 2:
        base = keras.layers.experimental.preprocessing.PreprocessingLayer
        return isinstance(layer, base) and layer.is_adapted
    if isinstance(layer, keras.layers.Normalization):
        if layer.input_mean is not None or not layer.built:
            return False
        # What `build` makes of them is no statistic.
        return bool(np.any(layer.adapt_mean) or np.any(np.asarray(layer.adapt_variance) != 1))
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is not None and bool(layer.bin_boundaries)
    lookup = getattr(layer, "_lookup_layer", layer)  # of a TextVectorization
    if not isinstance(lookup, internal_module("layers.preprocessing.index_lookup").IndexLookup):
        return False
    return not lookup._has_input_vocabulary and int(lookup.lookup_table.size()) > 0


def known_tokens(model: tf.keras.Model) -> dict[str, tuple[int, Any]]:
    """A word or number that the model can look up, for inputs whose unknown values it rejects.

    These are the inputs that a lookup layer with `num_oov_indices=0` gets as they are, also within
    a model inside. An input of several such layers has a token that all of them know, if there is
    one.

    Args:
      model: a Sequential or functional model; of others nothing is known.

    Returns:
      For each input by its name, its place among the inputs, and the token.
    """
    vocabularies: dict[int, list[list[Any]]] = {}
    _read_tokens(model, {}, vocabularies)
    found = {}
    for place, tensor in enumerate(_graph_of(model).inputs if vocabularies else ()):
        first, *others = vocabularies.get(id(tensor)) or [[]]
        known = set(first).intersection(*others)
        common = next((token for token in first if token in known), None)
        if common is not None:
            found[tensor.name] = place, common
    return found


def _graph_of(model: tf.keras.Model) -> Any:
    """The functional model that a Sequential one is in Keras 3."""
    return getattr(model, "_functional", None) or model


def _read_tokens(
    model: tf.keras.Model, outer: dict[int, int], found: dict[int, list[list[Any]]]
) -> None:
    """Collects the vocabularies of the lookups that read an input of a model.

    Args:
      model: any.
      outer: the identity of the input of the outermost model for those of this one, by identity.
      found: the vocabularies for each input of the outermost model, by identity.
    """
    if not model.built or not is_clonable(model):
        return
    inputs = getattr(_graph_of(model), "inputs", None) or ()
    names = {id(t): outer.get(id(t), id(t)) for t in inputs}
    lookup = internal_module("layers.preprocessing.index_lookup").IndexLookup
    for layer in model.layers:
        for node in layer._inbound_nodes:
            read = [names.get(id(t)) for t in tf.nest.flatten(node.input_tensors)]
            if is_clonable(layer):
                inner = getattr(_graph_of(layer), "inputs", None) or ()
                if any(read) and len(inner) == len(read):
                    of_inner = {id(t): of for t, of in zip(inner, read) if of is not None}
                    _read_tokens(layer, of_inner, found)
            elif isinstance(layer, lookup) and layer.num_oov_indices == 0 and not layer.invert:
                for of in filter(None, read):
                    tokens = layer.get_vocabulary(include_special_tokens=False)
                    found.setdefault(of, []).append(tokens)


class RandomGenerator:
    """The generator of one layer, as dropout and augmentation have them."""

    def __init__(self, generator: Any):
        self._keras = generator

    @property
    def seed(self) -> int | None:
        """The seed; `None` if the layer was created without one."""
        return self._keras._seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._keras._seed = seed

    @property
    def state(self) -> tf.Variable | None:
        """The state of the `tf.random.Generator` inside; `None` if there is none."""
        inner = getattr(self._keras, "_generator", None)
        return None if inner is None else inner.state

    def restart(self, seed: int) -> None:
        """Makes the next numbers those of a seed, as far as the generator has one."""
        if self.seed is not None:
            self.seed = seed
        if self.state is not None:
            self._keras._generator.reset_from_seed(seed)


class SeedGenerator(RandomGenerator):
    """The generator of one layer in Keras 3, where it is a seed with a counter in a variable."""

    @property
    def seed(self) -> int | None:
        """The seed; `None` if the layer was created without one."""
        return self._keras._initial_seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._keras._initial_seed = seed

    @property
    def state(self) -> tf.Variable:
        """The seed and the counter."""
        return self._keras.state.value

    def restart(self, seed: int) -> None:
        """Makes the next numbers those of a seed."""
        self.state.assign(tf.constant([seed, 0], self.state.dtype))


def random_generators(layer: tf.keras.layers.Layer) -> list[RandomGenerator]:
    """The generators of its own that a layer draws from."""
    if GENERATION == 3:
        return [SeedGenerator(own) for own in layer._seed_generators]
    found = getattr(layer, "_random_generator", None)
    return [RandomGenerator(found)] if hasattr(found, "_seed") else []


def global_generators() -> list[RandomGenerator]:
    """What all layers draw from without a seed, besides TensorFlow's own generator."""
    if GENERATION == 2:
        return []
    before = random.getstate()  # from which Keras takes the seed if the generator is new
    try:
        return [SeedGenerator(internal_module("random.seed_generator").global_seed_generator())]
    finally:
        random.setstate(before)
