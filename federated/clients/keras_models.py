"""Compiled Keras models as the models that TFF's processes train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

_BY_HAND = (
    "or write `tff.learning.models.from_keras_model(new_keras_model(), loss=..., input_spec=..., "
    "metrics=[...])` in `model_fn`, where the Keras model is not compiled"
)
# What Keras means by these depends on the shapes of labels and predictions.
_SHORT_NAMES = {"accuracy": "Accuracy", "acc": "Accuracy"} | {
    name: "Crossentropy" for name in ("crossentropy", "ce")
}


def with_tff_models(model_fn: Any, input_spec: Any = None) -> Any:
    """Makes a `model_fn` that returns compiled Keras models return TFF's models.

    A compiled model keeps its layers, its weights, its loss and its metrics. Its optimizer is not
    used: clients and server have optimizers of TFF.

    Args:
      model_fn: what was passed for it. A function is called once.
      input_spec: the `element_spec` of a client's batches, (x, y).

    Returns:
      A function that makes a `tff.learning.models.VariableModel`, with the attribute
      `initial_weights`: the arrays of the model's trainable and of its other weights. If `model_fn`
      is no function that returns a compiled Keras model: `model_fn` itself.

    Raises:
      TypeError, ValueError: if the compiled model has something that TFF's models lack.
    """
    if isinstance(model_fn, (tff.learning.models.FunctionalModel, tf.keras.Model)):
        return model_fn
    if not callable(model_fn) or hasattr(model_fn, "initial_weights"):
        return model_fn
    with tf.init_scope():  # not in a graph, where weights have no values
        model = model_fn()
        if isinstance(model, tff.learning.models.FunctionalModel):
            raise TypeError(
                "`model_fn` must be the `tff.learning.models.FunctionalModel` itself, not a "
                "function that returns it, which TFF would call in a graph: pass what it returns. "
                f"Received: model_fn={model_fn!r}"
            )
        if not isinstance(model, tf.keras.Model) or model.optimizer is None:
            return model_fn
        _check(model, input_spec)

    def of_tff() -> tff.learning.models.VariableModel:
        return _converted(model, input_spec)

    with tf.Graph().as_default():
        of_tff()  # errors come now
    of_tff.initial_weights = (  # type: ignore[attr-defined]
        [weight.numpy() for weight in model.trainable_weights],
        [weight.numpy() for weight in model.non_trainable_weights],
    )
    return of_tff


def _check(model: tf.keras.Model, input_spec: Any) -> None:
    if input_spec is None:
        raise TypeError(
            "`model_fn` returns a compiled Keras model, which does not say what its labels look "
            "like. Pass `input_spec=client_data.element_type_structure`, the `element_spec` of a "
            f"client's batches, too. Received: input_spec={input_spec!r}"
        )
    _check_spec(input_spec)
    if hasattr(model.optimizer, "ledger"):
        raise TypeError(
            "The model that `model_fn` returns must not be compiled with an optimizer of "
            "`tf_adaptive_dp`: clients train with `client_optimizer`, and its privacy would not "
            "be applied. Compile it with `model.compile(loss=..., metrics=...)`. Received: "
            f"optimizer={model.optimizer!r}"
        )
    if not getattr(model, "inputs", None):
        raise TypeError(
            "`model_fn` must return a Sequential model with an `Input`, or a functional one. A "
            f"subclass of `tf.keras.Model` does not state its inputs. Received: {model!r}"
        )
    same = tf.keras.models.clone_model(model)
    if len(same.weights) != len(model.weights) or len(same.losses) != len(model.losses):
        raise TypeError(
            "`model_fn` must return a model whose variables and losses all belong to its layers; "
            f"call `add_loss` in a layer, {_BY_HAND}. Received: {model!r}"
        )


def _check_spec(input_spec: Any) -> None:
    if not isinstance(input_spec, (tuple, Mapping, tff.Type)):
        raise TypeError(
            "`input_spec` must be the `element_spec` of a client's batches, a tuple (x, y) or a "
            "mapping with the keys x and y: `client_data.element_type_structure` of a "
            "`ClientData`, `dataset.element_spec` of a `tf.data.Dataset`. Received: "
            f"input_spec={input_spec!r}"
        )
    keys = {"x", "y"} if isinstance(input_spec, Mapping) else None
    if len(input_spec) != 2 or (keys is not None and set(input_spec) != keys):
        raise ValueError(
            "`input_spec` must have two parts, x and y. Make such batches, as with "
            "`client_data.preprocess(lambda dataset: dataset.map(lambda b: (b['pixels'], "
            f"b['label'])))`. Received: input_spec={input_spec!r}"
        )


def _converted(model: tf.keras.Model, input_spec: Any) -> tff.learning.models.VariableModel:
    """A new TFF model like a compiled Keras model, in the default graph."""
    labels = input_spec["y"] if isinstance(input_spec, Mapping) else input_spec[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loss that is a lambda, which is not read from here
        settings = model.get_compile_config()
    loss = _losses(model)
    weights = settings["loss_weights"]
    if isinstance(weights, Mapping):
        weights = [weights[name] for name in model.output_names]
    weighted = settings["weighted_metrics"] or []
    if weighted or (weights is not None and not isinstance(loss, list)):
        shown = ", ".join(map(_shown, weighted if isinstance(weighted, list) else [weighted]))
        raise ValueError(
            "`model_fn` must return a model without `weighted_metrics`, and without `loss_weights` "
            f"if it has one output: compile it without them, {_BY_HAND}. Received: "
            f"loss_weights={weights!r}, weighted_metrics=[{shown}]"
        )
    return tff.learning.models.from_keras_model(
        tf.keras.models.clone_model(model),
        loss=loss,
        input_spec=input_spec,
        loss_weights=None if weights is None else [float(weight) for weight in weights],
        metrics=_metrics(settings["metrics"], model, labels),
    )


def _losses(model: tf.keras.Model) -> Any:
    """The compiled loss as a `Loss`, or as a list of them for a model with several outputs."""
    loss, outputs = model.loss, len(model.outputs)
    if isinstance(loss, Mapping):
        loss = [loss.get(name) for name in model.output_names]
    if not isinstance(loss, (list, tuple)):
        loss = [loss] * outputs
    made = [_loss(one) for one in loss]
    return made if outputs > 1 else made[0]


def _loss(loss: Any) -> tf.keras.losses.Loss:
    if isinstance(loss, tf.keras.losses.Loss):
        return loss
    found = _class_of(loss, tf.keras.losses)
    if found is not None:
        return found()
    if callable(loss):
        return _FunctionLoss(loss)
    raise ValueError(
        f"The model that `model_fn` returns must be compiled with a loss. Received: loss={loss!r}"
    )


class _FunctionLoss(tf.keras.losses.Loss):
    """A loss that was given as a function of labels and predictions."""

    def __init__(self, function: Callable[..., tf.Tensor]):
        super().__init__(name=getattr(function, "__name__", "loss"))
        self._function = function

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return self._function(y_true, y_pred)


def _class_of(name: Any, module: Any) -> Any:
    """The class of Keras of a name such as "mse" or "MeanSquaredError"; else `None`."""
    if not isinstance(name, str):
        return None
    if isinstance(getattr(module, name, None), type):
        return getattr(module, name)
    try:
        function = module.get(name)  # which knows the short names
    except ValueError:
        return None
    words = getattr(function, "__name__", "").split("_")
    return getattr(module, "".join(word.capitalize() for word in words), None)


def _metrics(compiled: Any, model: tf.keras.Model, labels: Any) -> list[tf.keras.metrics.Metric]:
    """New metrics like the compiled ones, of the names that Keras would show."""
    if compiled is None:
        return []
    compiled = [compiled] if isinstance(compiled, (str, Mapping)) else list(compiled)
    return [_metric(one, model, labels) for one in compiled]


def _metric(compiled: Any, model: tf.keras.Model, labels: Any) -> tf.keras.metrics.Metric:
    if isinstance(compiled, str):
        name = compiled
        if name in _SHORT_NAMES and len(model.outputs) == 1:
            name = _kind(model.output_shape, labels) + _SHORT_NAMES[name]
        found = _class_of(name, tf.keras.metrics)
        if found is not None:
            return found(name=compiled)
    elif isinstance(compiled, Mapping) and "class_name" in compiled:
        made = tf.keras.metrics.deserialize(dict(compiled))
        if isinstance(made, tf.keras.metrics.Metric):
            return made
    raise ValueError(
        "The metrics of the model that `model_fn` returns must be names or objects of "
        f"`tf.keras.metrics`, in one list; {_BY_HAND}. Received: {_shown(compiled)}"
    )


def _shown(compiled: Any) -> str:
    """A compiled metric in an error; of a function Keras has the bytecode, which says nothing."""
    kind = compiled.get("class_name") if isinstance(compiled, Mapping) else None
    if kind == "function":
        return f"the function {compiled['config']!r}"
    return "a lambda" if kind == "__lambda__" else repr(compiled)


def _kind(predictions: tuple, labels: tf.TensorSpec) -> str:
    """Which accuracy or cross-entropy Keras takes for labels and predictions of these shapes."""
    if predictions[-1] == 1:
        return "Binary"
    if labels.shape.rank < len(predictions) or labels.shape[-1] == 1:
        return "SparseCategorical"
    return "Categorical"
