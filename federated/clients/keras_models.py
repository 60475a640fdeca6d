"""Compiled Keras models as the models that TFF's processes train."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_adaptive_dp.accounting.ledger import has_ledger

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

    A compiled model keeps its layers, its loss and its metrics. Its optimizer is not used: clients
    and server have optimizers of TFF. The processes of this package start from its weights. TFF's
    own algorithms start from new ones: put `ModelWeights(*initial_weights)` into their first state
    with `process.set_model_weights`.

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a loss that is a lambda, which is not read there
            # Here and not in TFF's graph, where the optimizer's numbers have no values.
            settings = model.get_compile_config()

    def of_tff() -> tff.learning.models.VariableModel:
        return _converted(model, settings, input_spec)

    with tf.Graph().as_default():  # errors come now
        model_of_tff = of_tff()
        _require_layers_that_tff_calls(model_of_tff)
        _require_metrics_that_tff_resets(model_of_tff)
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
    if has_ledger(model.optimizer):
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
    _check_outputs(model, _labels(input_spec))
    _check_lookups(model)
    _check_adapted(model)
    same = _cloned(model)
    if len(same.weights) != len(model.weights) or len(same.losses) != len(model.losses):
        raise TypeError(
            "`model_fn` must return a model whose variables and losses all belong to its layers; "
            "call `add_loss` in the `build` of a layer, with a function of its weights, "
            f"{_BY_HAND}. Received: {model!r}"
        )
    _require_equal_outputs(model, same)


def _check_outputs(model: tf.keras.Model, labels: Any) -> None:
    """Raises ValueError unless TFF can pair outputs with labels, which it does by their numbers."""
    count = len(model.outputs)
    by_name = isinstance(model.output, Mapping)
    if by_name or (
        count > 1
        and not isinstance(labels, tff.Type)
        and not (isinstance(labels, (list, tuple)) and len(labels) == count)
    ):
        raise ValueError(
            "A model with several outputs must return them as a list, and `input_spec` must have "
            "a tuple of labels, one for each output in the same order. Make such batches with "
            "`client_data.preprocess(lambda dataset: dataset.map(lambda x, y: (x, (y['a'], "
            f"y['b']))))`. Received: outputs {model.output!r}, labels {labels!r}"
        )


def _check_lookups(model: tf.keras.Model) -> None:
    """Raises TypeError for layers that Keras cannot make anew in the graph of a client."""
    for layer in _layers(model, tf.keras.layers.TextVectorization):  # it holds a `StringLookup`
        raise TypeError(
            "`model_fn` must return a model without `TextVectorization`, which Keras cannot make "
            "in the graph of a client. Split texts into words in the clients' data sets, and take "
            f"a `StringLookup(vocabulary=...)` in the model. Received: the layer {layer.name!r}"
        )
    for kind in (tf.keras.layers.StringLookup, tf.keras.layers.IntegerLookup):
        for layer in _layers(model, kind):
            config = layer.get_config()
            if config["output_mode"] != "int" and not config["pad_to_max_tokens"]:
                raise TypeError(
                    f"A `{kind.__name__}` whose outputs are as wide as its vocabulary must know "
                    "this width, since Keras makes the layer anew in the graph of a client: pass "
                    "`max_tokens` and `pad_to_max_tokens=True`, or leave `output_mode` out and "
                    "take a `CategoryEncoding` next. Received: "
                    f"output_mode={config['output_mode']!r} in the layer {layer.name!r}"
                )


def _check_adapted(model: tf.keras.Model) -> None:
    """Raises TypeError if a layer was adapted in a way that its configuration does not have."""
    names = {
        "StringLookup": "vocabulary",
        "IntegerLookup": "vocabulary",
        "Discretization": "bin_boundaries",
    }
    for kind, name in names.items():
        for layer in _layers(model, getattr(tf.keras.layers, kind)):
            if layer.get_config().get(name) is None:
                raise TypeError(
                    f"A `{kind}` must be made with `{name}=`, since every client makes the layer "
                    f"anew: what `adapt` found is not part of its settings. Pass `{name}=` in "
                    "`model_fn`, such as what `get_vocabulary()` or `bin_boundaries` of an "
                    f"adapted layer gives. Received: {name}=None in the layer {layer.name!r}"
                )


def _require_equal_outputs(model: tf.keras.Model, same: tf.keras.Model) -> None:
    """Raises TypeError if a copy with equal weights computes something else from fixed numbers.

    Nothing is compared where the model is random, or does not take such numbers.
    """
    if any(getattr(i, "type_spec", None) is None or _is_composite(i) for i in model.inputs):
        return
    batch = tf.nest.pack_sequence_as(model.input, [_fixed_numbers(i) for i in model.inputs])
    try:
        expected, again = (tf.nest.flatten(model(batch, training=False)) for _ in range(2))
    except Exception:  # it may need other shapes, or other words
        return
    same.set_weights(model.get_weights())
    found = tf.nest.flatten(same(batch, training=False))
    if _are_close(expected, again) and not _are_close(expected, found):
        raise TypeError(
            "`model_fn` must return a model that is the same when Keras makes its layers anew from "
            "their `get_config()` and gives them its weights, since every client makes a new one. "
            "This one is not: a layer keeps something else, such as what it learned from data "
            f"(`adapt`). Let `get_config()` of that layer return it, {_BY_HAND}. Received: "
            f"{model!r}"
        )


def _is_composite(value: Any) -> bool:
    return not isinstance(value.type_spec, tf.TensorSpec)  # ragged or sparse


def _fixed_numbers(of: Any) -> tf.Tensor:
    """Two rows for an input of a model."""
    shape = [2, *(8 if size is None else size for size in of.shape[1:])]
    numbers = np.linspace(0.0, 1.0, math.prod(shape)).reshape(shape)
    if of.dtype == tf.string:
        return tf.fill(shape, "a")
    if not of.dtype.is_floating:  # indices that every embedding has
        numbers = np.round(numbers)
    return tf.cast(numbers, of.dtype)


def _are_close(first: list[Any], second: list[Any]) -> bool:
    # NumPy compares no bfloat16, which `mixed_bfloat16` gives.
    pairs = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(first, second))
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in pairs)


def _require_layers_that_tff_calls(model: tff.learning.models.VariableModel) -> None:
    """Raises TypeError or ValueError if TFF cannot compute loss and metrics in its graph.

    Its `forward_pass` adds the losses of the layers outside of the graph that calls these. Keras
    converts no control flow of its own layers there. And metrics whose variables come with the
    first batch have none where TFF computes their results.
    """
    before = {metric.name: len(metric.variables) for metric in model.get_metrics()}
    try:
        for spec in (model.input_spec, _of_two_rows(model.input_spec)):
            tf.function(model.forward_pass).get_concrete_function(spec)
    except (TypeError, ValueError) as error:
        if type(error).__name__ == "InaccessibleTensorError":  # which has no public name
            raise TypeError(
                "`model_fn` must return a model whose layers add no losses that depend on a "
                "batch, which TFF cannot find: leave out `activity_regularizer` and calls of "
                "`add_loss` in the `call` of a layer. Regularizers of weights are added. Or write "
                "a `tff.learning.models.VariableModel` whose `forward_pass` adds such a loss. "
                f"Received: {str(error).strip().splitlines()[-1]}"
            ) from error
        if "Python control flow" not in str(error):
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                "`model_fn` must return a model whose loss and metrics can be computed from "
                "batches of `input_spec`. If x and y have no axis for the batch there, batch the "
                "clients' data sets, as with "
                "`client_data.preprocess(lambda dataset: dataset.batch(16))`. Labels in one-hot "
                "form need a loss that is not sparse, and numbers of classes a sparse one. "
                f"Received: {str(error).strip().splitlines()[-1].strip()}, for "
                f"input_spec={model.input_spec!r}"
            ) from error
        raise TypeError(
            "`model_fn` must return a model whose layers decide nothing by the value of a tensor "
            "with `if` or `while`, which Keras cannot convert in TFF's graph. Leave the layer out "
            "(`UnitNormalization`, or a `kernel_constraint`, bounds weights too), or write it "
            f"with `tf.cond` and `tf.where`. Received: {_layer_that_raised(error)}"
        ) from None
    late = [m.name for m in model.get_metrics() if len(m.variables) != before[m.name]]
    if late:
        raise TypeError(
            "The metrics of the model that `model_fn` returns must create their variables in "
            f"`__init__`, since TFF computes their results without a batch; {_BY_HAND}. Received: "
            f"variables that come with the first batch in the metrics {', '.join(late)}"
        )


def _of_two_rows(spec: Any) -> Any:
    """The spec of batches of two rows, whose shapes show more before any data are read.

    Whether a sparse loss got labels in one-hot form shows only by the number of rows.
    """
    parts = tf.nest.flatten(spec)
    if not all(part.shape.rank and part.shape[0] is None for part in parts):
        return spec
    return tf.nest.map_structure(lambda s: tf.TensorSpec([2, *s.shape[1:]], s.dtype), spec)


def _layer_that_raised(error: BaseException) -> str:
    """The innermost layer among the calls that led to an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    layers = [owner for owner in owners if isinstance(owner, tf.keras.layers.Layer)]
    if not layers:
        return str(error).strip().splitlines()[-1]
    return f"the layer {layers[-1].name!r}, a `{type(layers[-1]).__name__}`"


def _require_metrics_that_tff_resets(model: tff.learning.models.VariableModel) -> None:
    """Raises TypeError for a metric whose `reset_state` does not work in TFF's graph."""
    for metric in model.get_metrics():
        try:
            tf.function(metric.reset_state).get_concrete_function()
        except RuntimeError as error:  # of `keras.backend.set_value`, which wants a session
            raise TypeError(
                "The metrics of the model that `model_fn` returns must reset their state by "
                "`variable.assign(tf.zeros_like(variable))`, since TFF does so in a graph; "
                f"{_BY_HAND}. Received: the metric {metric.name!r}, a `{type(metric).__name__}`, "
                f"whose `reset_state` raises: {str(error).strip().splitlines()[-1]}"
            ) from error


def _check_spec(input_spec: Any) -> None:
    if not isinstance(input_spec, (tuple, Mapping, tff.Type)):
        raise TypeError(
            "`input_spec` must be the `element_spec` of a client's batches, a tuple (x, y) or a "
            "mapping with the keys x and y: `client_data.element_type_structure` of a "
            "`ClientData`, `dataset.element_spec` of a `tf.data.Dataset`. Received: "
            f"input_spec={input_spec!r}"
        )
    if not isinstance(input_spec, tff.Type) and not all(
        isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(input_spec)
    ):
        raise TypeError(
            "`input_spec` must have dense tensors only, since TFF sends no ragged and no sparse "
            "ones to clients. Pad short rows, as with `dataset.padded_batch` or "
            "`dataset.map(lambda x, y: (x.to_tensor(), y))`, and take a model with dense inputs. "
            f"Received: input_spec={input_spec!r}"
        )
    keys = {"x", "y"} if isinstance(input_spec, Mapping) else None
    if len(input_spec) != 2 or (keys is not None and set(input_spec) != keys):
        raise ValueError(
            "`input_spec` must have two parts, x and y. Make such batches, as with "
            "`client_data.preprocess(lambda dataset: dataset.map(lambda b: (b['pixels'], "
            "b['label'])))`. TFF's models take no sample weights: make each a part of y that the "
            f"loss reads. Received: input_spec={input_spec!r}"
        )


def _labels(input_spec: Any) -> Any:
    return input_spec["y"] if isinstance(input_spec, Mapping) else input_spec[1]


def _converted(
    model: tf.keras.Model, settings: Mapping[str, Any], input_spec: Any
) -> tff.learning.models.VariableModel:
    """A new TFF model like a compiled Keras model, in the default graph."""
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
        _cloned(model),
        loss=loss,
        input_spec=input_spec,
        loss_weights=None if weights is None else [float(weight) for weight in weights],
        metrics=_metrics(settings["metrics"], model, _labels(input_spec)),
    )


def _cloned(model: tf.keras.Model) -> tf.keras.Model:
    """A new model with these layers, and what `adapt` computed for `Normalization`.

    Keras keeps that outside of the weights: a new layer, whatever weights it gets later, computes
    with the zeros and ones that it was built with.
    """
    clone = tf.keras.models.clone_model(model)
    for was, new in zip(*(_layers(m, tf.keras.layers.Normalization) for m in (model, clone))):
        if hasattr(was, "mean"):
            new.mean, new.variance = was.mean.numpy(), was.variance.numpy()
    return clone


def _layers(model: tf.keras.Model, kind: Any) -> list[Any]:
    """All layers of a kind, also those inside of other layers."""
    return [layer for layer in model.submodules if isinstance(layer, kind)]


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
    """The class of Keras of a name such as "mse" or "MeanSquaredError"; else `None`.

    Names of functions and classes differ in more than underscores: `kl_divergence` is that of
    `KLDivergence`, and `log_cosh` that of the loss `LogCosh` and of the metric `LogCoshError`.
    """
    if not isinstance(name, str):
        return None
    function = getattr(module, name, None)
    if isinstance(function, type):
        return function
    try:
        function = function or module.get(name)  # which knows the short names
    except ValueError:
        return None
    words = getattr(function, "__name__", "").replace("_", "").lower()
    classes = {
        kind.lower(): kind for kind in dir(module) if isinstance(getattr(module, kind), type)
    }
    found = classes.get(words) or classes.get(f"{words}error")
    return None if found is None else getattr(module, found)


def _metrics(compiled: Any, model: tf.keras.Model, labels: Any) -> list[Any]:
    """New metrics like the compiled ones, of the names that Keras would show."""
    if compiled is None:
        return []
    if len(model.outputs) > 1:
        return _metrics_of_outputs(compiled, model, labels)
    compiled = [compiled] if isinstance(compiled, (str, Mapping)) else list(compiled)
    predictions = model.outputs[0].shape
    metrics = [_metric(one, predictions, labels) for one in compiled]
    if not any(map(_needs_more_than_its_settings, metrics)):
        return metrics
    return [
        functools.partial(_made, _resettable(type(m)), m.get_config(), labels.shape, predictions)
        for m in metrics
    ]


def _needs_more_than_its_settings(metric: tf.keras.metrics.Metric) -> bool:
    """Whether `_made` has more to do than to make a metric anew, as TFF would."""
    return isinstance(metric, tf.keras.metrics.IoU) or not metric.built


def _made(kind: Any, settings: dict[str, Any], *shapes: tf.TensorShape) -> tf.keras.metrics.Metric:
    """A new metric with all of its variables.

    Args:
      kind: its class.
      settings: what its `get_config` gave.
      *shapes: those of a batch's labels and predictions.
    """
    metric = kind.from_config(settings)
    if not metric.built:  # as `F1Score` and `R2Score`
        metric.build(*shapes)
    return metric


def _resettable(kind: Any) -> Any:
    """The class of a metric, whose `reset_state` must not need a session in a graph."""
    if not issubclass(kind, tf.keras.metrics.IoU):
        return kind

    class Resettable(kind):
        """See `_resettable`."""

        def reset_state(self) -> None:
            for variable in self.variables:
                variable.assign(tf.zeros_like(variable))

    return Resettable


def _metrics_of_outputs(compiled: Any, model: tf.keras.Model, labels: Any) -> list[Callable]:
    """Functions that make the metrics of each output, which TFF gives all outputs together."""
    names = model.output_names
    if isinstance(compiled, Mapping) and "class_name" not in compiled:
        compiled = [compiled.get(name) for name in names]
    elif isinstance(compiled, (list, tuple)) and any(
        isinstance(c, (list, tuple)) for c in compiled
    ):
        compiled = list(compiled)  # those of each output
    else:
        compiled = [compiled] * len(names)
    made: list[Callable] = []
    for index, (name, of_output) in enumerate(zip(names, compiled)):
        several = isinstance(of_output, (list, tuple))
        for one in of_output if several else [] if of_output is None else [of_output]:
            metric = _metric(one, model.outputs[index].shape, labels[index])
            # Keras puts the output's name before that of an object once it was used.
            shown = f"{name}_{metric.name.removeprefix(f'{name}_')}"
            settings = {**metric.get_config(), "name": shown}
            shapes = labels[index].shape, model.outputs[index].shape
            kind = _of_output(_resettable(type(metric)), index)
            made.append(functools.partial(_made, kind, settings, *shapes))
    return made


def _of_output(kind: Any, index: int) -> Any:
    """The class of a metric that reads one of several outputs."""

    class OfOutput(kind):
        """See `_of_output`."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            # Some metrics return an operation, which a `tf.function` must not.
            super().update_state(y_true[index], y_pred[index], sample_weight)

    return OfOutput


def _metric(compiled: Any, predictions: tf.TensorShape, labels: Any) -> tf.keras.metrics.Metric:
    """A new metric like a compiled one, for one output."""
    if isinstance(compiled, str):
        name = compiled
        if name in _SHORT_NAMES:
            name = _kind(predictions, labels) + _SHORT_NAMES[name]
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


def _kind(predictions: tf.TensorShape, labels: tf.TensorSpec) -> str:
    """Which accuracy or cross-entropy Keras takes for labels and predictions of these shapes."""
    if predictions[-1] == 1:
        return "Binary"
    if labels.shape.rank < len(predictions) or labels.shape[-1] == 1:
        return "SparseCategorical"
    return "Categorical"
