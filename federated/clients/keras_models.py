"""Compiled models of Keras as the models that TFF's processes train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

_BY_HAND = (
    "or write `tff.learning.models.from_keras_model(new_keras_model(), loss=..., input_spec=..., "
    "metrics=[...])` in `model_fn`, where the model of Keras is not compiled"
)
# What Keras means by these depends on the shapes of labels and predictions.
_SHORT_NAMES = {"accuracy": "Accuracy", "acc": "Accuracy"} | {
    name: "Crossentropy" for name in ("crossentropy", "ce")
}


def with_tff_models(model_fn: Any, input_spec: Any = None) -> Any:
    """Makes a `model_fn` that returns compiled models of Keras return TFF's models.

    A compiled model keeps its layers, loss and metrics. Its optimizer is not used: clients and
    server have optimizers of TFF.

    Args:
      model_fn: What was passed for it. Only a function is changed.
      input_spec: The `element_spec` of a client's batches, (x, y).

    Returns:
      A function whose models of Keras became `tff.learning.models.VariableModel`s; anything else it
      returns is left as it is. Other values are returned unchanged.
    """
    if isinstance(model_fn, (tff.learning.models.FunctionalModel, tf.keras.Model)):
        return model_fn
    if not callable(model_fn) or hasattr(model_fn, "of_keras"):
        return model_fn

    def made() -> Any:
        model = model_fn()
        return _converted(model, input_spec) if _is_compiled(model) else model

    made.of_keras = model_fn  # type: ignore[attr-defined]
    return made


def _is_compiled(model: Any) -> bool:
    return isinstance(model, tf.keras.Model) and model.optimizer is not None


def _converted(model: tf.keras.Model, input_spec: Any) -> tff.learning.models.VariableModel:
    """The model of TFF with the layers, loss and metrics of a compiled model."""
    if input_spec is None:
        raise TypeError(
            "`model_fn` returns a compiled model of Keras, which does not say what its labels are "
            "like. Pass `input_spec=client_data.element_type_structure`, the `element_spec` of a "
            f"client's batches, too. Received: input_spec={input_spec!r}"
        )
    if hasattr(model.optimizer, "ledger"):
        raise TypeError(
            "The model that `model_fn` returns must not be compiled with an optimizer of "
            "`tf_adaptive_dp`: clients train with `client_optimizer`, and its privacy would not "
            "be applied. Compile it with `model.compile(loss=..., metrics=...)`. Received: "
            f"optimizer={model.optimizer!r}"
        )
    if len(input_spec) != 2:
        raise ValueError(
            f"`input_spec` must have two parts, x and y. Received: input_spec={input_spec!r}"
        )
    labels = input_spec["y"] if isinstance(input_spec, Mapping) else input_spec[1]
    settings = model.get_compile_config()
    loss = _losses(model)
    many = isinstance(loss, list)
    weights = settings.get("loss_weights")
    if isinstance(weights, Mapping):
        weights = [weights[name] for name in model.output_names]
    if settings.get("weighted_metrics") or (weights is not None and not many):
        raise ValueError(
            "`model_fn` must return a model without `weighted_metrics`, and without `loss_weights` "
            f"if it has one output: compile it without them, {_BY_HAND}. Received: {settings!r}"
        )
    return tff.learning.models.from_keras_model(
        _not_compiled(model),
        loss=loss,
        input_spec=input_spec,
        loss_weights=None if weights is None else [float(weight) for weight in weights],
        metrics=_metrics(settings.get("metrics"), model, labels),
    )


def _not_compiled(model: tf.keras.Model) -> tf.keras.Model:
    """A model of the same layers and variables that is not compiled."""
    if not getattr(model, "inputs", None):
        raise TypeError(
            "`model_fn` must return a Sequential model with an `Input`, or a functional one. A "
            f"subclass of `tf.keras.Model` does not say its inputs. Received: {model!r}"
        )
    same = tf.keras.Model(model.inputs, model.outputs)
    if len(same.weights) != len(model.weights) or len(same.losses) != len(model.losses):
        raise TypeError(
            "`model_fn` must return a model whose variables and losses all lie between its inputs "
            f"and its outputs; call `add_loss` in a layer, {_BY_HAND}. Received: {model!r}"
        )
    return same


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
    """The class of Keras for a name such as "mse" or "MeanSquaredError"; `None` if there is none."""
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
        f"`tf.keras.metrics`, in one list; {_BY_HAND}. Received: {compiled!r}"
    )


def _kind(predictions: tuple, labels: tf.TensorSpec) -> str:
    """Which accuracy or cross-entropy Keras takes for labels and predictions of these shapes."""
    if predictions[-1] == 1:
        return "Binary"
    if labels.shape.rank < len(predictions) or labels.shape[-1] == 1:
        return "SparseCategorical"
    return "Categorical"
