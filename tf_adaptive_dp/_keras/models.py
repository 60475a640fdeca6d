"""What the library reads from compiled Keras models, and tells Keras about its callbacks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, internal_module, keras
from tf_adaptive_dp._keras.graphs import spec_of_replicas
from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp._keras.variables import native, uncounted_variables


def uncounted_loss_of_step(model: tf.keras.Model, batch: Any) -> tf.Tensor:
    """The loss of a batch in training mode, as `loss_of_step`; the model's metrics do not count it.

    Args:
      model: a built and compiled model.
      batch: x, (x, y) or (x, y, sample_weight).

    Returns:
      What Keras makes of the losses of examples: their mean, or their sum or [B] if their
      `reduction` says so.
    """
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    before = {id(v): (v, tf.identity(v)) for v in metric_variables(model)}
    outputs = model(x, training=True)
    # The loss keeps running means for the progress line; it creates them when it is built.
    of_model = _losses_of(model)
    if of_model is not None and not of_model.built:
        of_model.build(*((y, outputs) if GENERATION == 3 else (outputs,)))
    for v in metric_variables(model):
        before.setdefault(id(v), (v, tf.identity(v)))
    loss = _loss_of_outputs(model, (x, y, outputs, sample_weight), training=True)
    for state, value in before.values():
        state.assign(value)
    return loss


def start_at_epoch(model: tf.keras.Model, epoch: int) -> None:
    """Has the call of `fit` that has just begun start with a later epoch, in Keras 3.

    Args:
      model: the model that is trained.
      epoch: the first epoch, counted from 0.
    """
    model._initial_epoch = epoch


def steps_per_call(model: tf.keras.Model) -> int:
    """How many training steps one call of the model's training function makes."""
    if GENERATION == 3:
        return int(model.steps_per_execution)
    steps = model._steps_per_execution
    # A mirrored variable is no number of its own.
    return 1 if steps is None else int(tf.convert_to_tensor(steps))


def overruns_epochs(steps_per_call: int, steps_per_epoch: int) -> bool:
    """Whether the last call of an epoch makes more steps than are left, if the data allow it.

    Args:
      steps_per_call: see the function of that name.
      steps_per_epoch: that of `fit`.
    """
    return GENERATION == 3 and bool(steps_per_epoch % steps_per_call)


def tunes_steps_per_call(model: tf.keras.Model) -> bool:
    """Whether Keras changes `steps_per_call` on its own while it trains."""
    return getattr(model, "enable_tune_steps_per_execution", False)


def became_of_graphs(model: tf.keras.Model) -> bool:
    """Whether Keras 2 turned the classes of an existing model into those of TensorFlow 1.

    A model that is made in a `tf.Graph`, as TFF makes each one, does so to the classes of all
    models and layers of its kinds, and those that were made outside of it no longer work.
    """
    kinds = {kind for part in (model, *model.submodules) for kind in type(part).__mro__}
    return any(kind.__module__.endswith("_v1") for kind in kinds)


def allow_tensors_as_logs(callback: tf.keras.callbacks.Callback) -> None:
    """Spares a callback that does not read `logs` the wait for their values in each step.

    Keras 3 always waits for a callback that acts on batches.
    """
    callback._supports_tf_logs = True


def have_metrics_made_outside(model: keras.Model) -> None:
    """Spares the step of a model a second trace, which making its metrics would cause.

    Keras makes the means of the losses of several outputs before the step of the optimizer, and
    metrics that were compiled by name after it.

    Args:
      model: a compiled model; nothing is done for one on several replicas.
    """
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return
    for container in (_metrics_of(model), _losses_of(model)):
        if container is not None and not container.built:
            _build_outside(container)


def takes_any_number_of_rows(model: keras.Model, x: Any) -> bool:
    """Whether a model can be called on batches of which only the shape of one row is known.

    The call makes the weights of a model that has none yet. A model that fails for another reason
    than its rows fails again where it is trained.

    Args:
      model: the model.
      x: specifications of the inputs, [None, ...].
    """
    inputs = getattr(model, "inputs", None)
    if inputs:
        return all(tensor.shape[0] is None for tensor in inputs)
    try:
        _result_for(lambda x: model(x, training=False), x)
    except Exception:  # of whatever kind the model's own code raises
        return False
    return True


def has_generators(layers: Iterable[Any]) -> bool:
    """Whether a layer holds a `tf.random.Generator`.

    What it draws later depends on how much it has drawn, and so on the number of rows.

    Args:
      layers: those of a model, and the model.
    """
    values = (value for layer in layers for value in vars(layer).values())
    return any(isinstance(value, tf.random.Generator) for value in values)


def have_weights_made_outside(model: keras.Model, x: Any) -> None:
    """Spares the step of a model that is not built a second trace, as making weights would cause.

    Args:
      model: a model whose step calls it on the inputs; nothing is done for one on several replicas.
      x: specifications of the inputs.
    """
    if not model.built and model.distribute_strategy.num_replicas_in_sync == 1:
        _result_for(lambda x: model(x, training=False), x)


def _result_for(function: Callable[..., Any], *specs: Any) -> Any:
    """What a function returns for tensors of these specifications, without their values."""
    if GENERATION == 2:
        traced = tf.function(function, autograph=False)
        return traced.get_concrete_function(*specs).structured_outputs
    given = tf.nest.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, dtype=spec.dtype.name), specs
    )
    return internal_module("backend").compute_output_spec(function, *given)


def _build_outside(container: Any) -> None:
    """Has the metrics in a container made without being counted as variables of the step."""
    build, own = container.build, vars(container).get("build")
    if hasattr(build, "is_outside"):
        return

    @functools.wraps(build)
    def build_outside(*args: Any, **kwargs: Any) -> None:
        if own is None:
            del container.build
        else:
            container.build = own
        with uncounted_variables():
            build(*args, **kwargs)

    build_outside.is_outside = True  # type: ignore[attr-defined]
    container.build = build_outside


def leave_padding_out_of_metrics(model: keras.Model) -> None:
    """Lets metrics that were compiled without weights count the rows that have a weight.

    The padding of Poisson batches has weight 0, and metrics would count it. Without weights in the
    data, as in validation, the values stay the same. Under XLA, which cannot select rows, the
    metrics are weighted.

    Args:
      model: a compiled model.
    """
    container = _metrics_of(model)
    if container is None or not container._user_metrics:
        return
    if container.built:
        _give_weights_to_all_metrics(container)
        return
    build = container.build

    def build_and_give(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        _give_weights_to_all_metrics(container)

    build_and_give.leaves_padding_out = True  # type: ignore[attr-defined]
    container.build = build_and_give


def metrics_without_weights(model: keras.Model) -> list[str]:
    """The names of the metrics that count rows of weight 0.

    Args:
      model: a compiled model, or what takes its place in a loop of the user's own.
    """
    container = _metrics_of(model)
    if container is None or hasattr(container.build, "leaves_padding_out"):
        return []
    if container.built:
        of_outputs = container._flat_metrics if GENERATION == 3 else container._metrics
        return [metric.name for metrics in of_outputs for metric in _listed(metrics)]
    given = [metric for metric in tf.nest.flatten(container._user_metrics) if metric is not None]
    return [m if isinstance(m, str) else getattr(m, "name", repr(m)) for m in given]


def _metrics_of(model: keras.Model) -> Any:
    """What holds the metrics of a compiled model; `None` if there is none."""
    name = "_compile_metrics" if GENERATION == 3 else "compiled_metrics"
    return getattr(model, name, None)


def _losses_of(model: keras.Model) -> Any:
    """What holds the losses of a compiled model, and their means; `None` if there is none."""
    return getattr(model, "_compile_loss" if GENERATION == 3 else "compiled_loss", None)


def _give_weights_to_all_metrics(container: Any) -> None:
    """Moves the metrics of a container to those that get weights, by which they then select rows.

    Their names and their order stay the same.

    Args:
      container: what holds the metrics of a compiled model, after they have been made.
    """
    keras3 = GENERATION == 3
    names = [f"_flat{kind}" if keras3 else kind for kind in ("_metrics", "_weighted_metrics")]
    without, weighted = (getattr(container, name) for name in names)
    for output, (own, others) in enumerate(zip(without, weighted)):
        plain, weighing = (_listed(metrics) for metrics in (own, others))
        if not plain:
            continue
        for metric in plain:
            _leave_rows_without_weight_out(metric)
        together = [*plain, *weighing]
        if keras3:
            together = type(own)(together, name=own.name, output_name=own.output_name)
        without[output], weighted[output] = None if keras3 else [None], together


def _listed(metrics: Any) -> list[keras.metrics.Metric]:
    """The metrics of one output, without the places of those that are missing."""
    return [metric for metric in getattr(metrics, "metrics", metrics) or () if metric is not None]


def _leave_rows_without_weight_out(metric: keras.metrics.Metric) -> None:
    """Has a metric count the rows of a batch that have a weight."""
    update_state = metric.update_state

    def update(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None:
            return update_state(y_true, y_pred)
        if in_xla():  # which knows no shapes that depend on values
            try:
                return update_state(y_true, y_pred, sample_weight=sample_weight)
            except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
                raise ValueError(
                    "Under XLA a metric must take one sample weight for each example, since "
                    f"padding has weight 0. Received: {metric.name!r}, which does not. Let it "
                    "return one value per example, or compile the model with `jit_compile=False`."
                ) from error
        weights = tf.convert_to_tensor(sample_weight)
        there = tf.reduce_any(tf.reshape(weights != 0, [tf.shape(weights)[0], -1]), axis=1)

        def update_with_rows() -> tf.Tensor:
            update_state(tf.boolean_mask(y_true, there), tf.boolean_mask(y_pred, there))
            return tf.constant(0)

        if GENERATION == 3 and tf.distribute.has_strategy():
            # There, replicas meet to add up what a metric counts, which they cannot in a branch.
            return update_with_rows()
        # The mean over an empty batch is no number.
        return tf.cond(tf.reduce_any(there), update_with_rows, lambda: tf.constant(0))

    metric.update_state = update


def give_weights_axes_of_losses(model: keras.Model, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Lets one weight per example weigh losses with more axes, such as those of tokens, [B, T].

    Keras 2 does so by itself for one more axis, but not for those of images. Keras 3 would align
    weights [B] with the last axis.

    Args:
      model: a compiled model.
      batches: (x, y, sample_weight).

    Returns:
      The batches with weights [B, 1, ...] for each output that has several losses per example.
      Where it is unknown which target belongs to which output, a model was compiled without a loss,
      or has no `call`, since its `train_step` does all of it, the batches are as they were.
    """
    x, y, given = batches.element_spec
    aligned = 2 if GENERATION == 3 else 3  # axes of targets
    targets = [spec for spec in tf.nest.flatten(y) if isinstance(spec, tf.TensorSpec)]
    if all(len(spec.shape) < aligned for spec in targets):  # also if there are none
        return batches
    if not model.loss or type(model).call is keras.Model.call:
        return batches
    ranks = _ranks_of_losses(model, x, y)
    if max((rank for rank, _ in ranks.values()), default=0) < 2:
        return batches
    each_has_own = tf.nest.is_nested(given)
    if each_has_own and (isinstance(given, dict) != isinstance(y, dict) or len(given) < len(y)):
        return batches  # Keras says what does not fit

    def expanded(x: Any, y: Any, weights: Any) -> tuple:
        by_key = _by_key(weights)
        of_targets = [by_key[key if each_has_own else None] for key in _by_key(y)]
        wide = {}
        for output, (rank, target) in ranks.items():
            own = of_targets[target]
            wide[output] = tf.reshape(own, [-1, *[1] * (rank - 1)]) if own.shape.rank == 1 else own
        if None in wide:  # a single output
            return x, y, wide[None]
        if all(isinstance(output, str) for output in wide):
            return x, y, wide
        # Outputs without a target have weights, too, which nothing reads.
        return x, y, tuple(wide.get(k, of_targets[0]) for k in range(max(wide) + 1))

    return batches.map(expanded)


def _ranks_of_losses(model: keras.Model, x: Any, y: Any) -> dict[Any, tuple[int, int]]:
    """The number of axes of the loss of each output before Keras reduces it.

    Args:
      model: a compiled model.
      x: specifications of inputs.
      y: those of targets.

    Returns:
      By the key of each output that has a target: the number of axes of its loss, and the place of
      the target in the flattened `y`. It is empty where targets and outputs do not fit.
    """
    targets = tf.nest.flatten(y)
    places: dict[Any, int] = {}

    def losses(x: Any, targets: Sequence[Any]) -> list[Any]:
        outputs = model(x, training=True)
        by_key = _by_key(outputs)
        of_outputs = _losses_of_outputs(model, outputs)
        places.update(_places_of_targets(model, y, outputs, of_outputs))
        return [
            _unreduced(of_outputs[key], targets[place], by_key[key])
            for key, place in places.items()
        ]

    found = _result_for(losses, x, targets)
    return {key: (len(loss.shape), place) for (key, place), loss in zip(places.items(), found)}


def _by_key(values: Any) -> dict[Any, Any]:
    """Outputs, or what belongs to each, by name or place; `None` is the key of a single one."""
    if isinstance(values, dict):
        return dict(sorted(values.items()))
    return dict(enumerate(values)) if isinstance(values, (list, tuple)) else {None: values}


def _places_of_targets(
    model: keras.Model, y: Any, outputs: Any, losses: dict[Any, Any]
) -> dict[Any, int]:
    """Which of the flattened targets belongs to which output, as Keras pairs them.

    Args:
      model: a compiled model.
      y: the targets, or what has their structure.
      outputs: the outputs of the model.
      losses: what `_losses_of_outputs` found.

    Returns:
      The places in the order of the outputs; none for outputs without a target. It is empty where
      the two do not fit.
    """
    of_targets, keys = _by_key(y), list(losses)
    if any(tf.nest.is_nested(v) for v in (*of_targets.values(), *_by_key(outputs).values())):
        return {}
    places = {key: place for place, key in enumerate(of_targets)}
    if isinstance(y, dict):
        names = keys if isinstance(outputs, dict) else getattr(model, "output_names", keys)
        if not set(places) <= set(names):
            return {}
        return {key: places[name] for key, name in zip(keys, names) if name in places}
    if len(keys) != len(places):  # then the targets are those of the outputs that have a loss
        keys = [key for key in keys if losses[key] is not None]
    return dict(zip(keys, range(len(keys)))) if len(keys) == len(places) else {}


def _losses_of_outputs(model: keras.Model, outputs: Any) -> dict[Any, Any]:
    """What `model.compile` got as the loss of each output, by the keys of the outputs."""
    keys, loss = list(_by_key(outputs)), model.loss
    if isinstance(loss, dict):
        named = isinstance(outputs, dict) or not hasattr(model, "output_names")
        names = keys if named else model.output_names
        return {key: loss.get(name) for key, name in zip(keys, names)}
    parts = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    if len(parts) != len(keys):
        parts = [parts[0] if len(parts) == 1 else None] * len(keys)
    return dict(zip(keys, parts))


def _unreduced(loss: Any, target: Any, output: Any) -> Any:
    """The loss of an output as it is before Keras reduces it.

    Most losses reduce the last axis of what is predicted. `Dice`, and functions of the user's own,
    may reduce all axes but the first.
    """
    if len(output.shape) < 3 or loss is None or isinstance(loss, dict):
        return output[..., 0] if len(output.shape) > 1 else output
    of_keras = keras.losses.get(loss)
    if isinstance(of_keras, keras.losses.Loss):
        return of_keras.call(target, output)
    if GENERATION == 2:
        return of_keras(target, output)
    return internal_module("losses.losses").LossFunctionWrapper(of_keras).call(target, output)


def traced_step(model: tf.keras.Model, specs: tuple) -> tf.Graph:
    """The graph of the function of a batch that `fit` would compile for a model, traced anew.

    Args:
      model: a compiled model.
      specs: those of a batch, (x,), (x, y) or (x, y, sample_weight). On several replicas each has
        a batch of its own.
    """
    strategy = model.distribute_strategy

    def one_step_on_data(data: tuple) -> Any:
        return strategy.run(model.train_step, args=(data,))

    if GENERATION == 3:  # which converts nothing by AutoGraph
        one_step_on_data = tf.autograph.experimental.do_not_convert(one_step_on_data)
    step = tf.function(one_step_on_data, jit_compile=model.jit_compile or None)
    given = specs
    if strategy.num_replicas_in_sync > 1:
        num_here = len(strategy.extended.worker_devices)
        given = tf.nest.map_structure(lambda spec: spec_of_replicas(spec, num_here), specs)
    return step.get_concrete_function(given).graph


def loss_of_step(model: tf.keras.Model, batch: tuple, training: bool) -> tf.Tensor:
    """The loss of a training step as Keras computes it, with all that is added to it.

    Args:
      model: a compiled model.
      batch: (x,), (x, y) or (x, y, sample_weight).
      training: whether the model runs in training mode.
    """
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=training)
    return _loss_of_outputs(model, (x, y, outputs, sample_weight), training)


def _loss_of_outputs(model: tf.keras.Model, values: tuple, training: bool) -> tf.Tensor:
    """The loss of a training step from (x, y, outputs, sample_weight)."""
    x, y, outputs, sample_weight = values
    if GENERATION == 3:
        return model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=training
        )
    strategy, replica = model.distribute_strategy, tf.distribute.get_replica_context()
    if strategy.num_replicas_in_sync == 1 or (replica and replica.strategy is strategy):
        return model.compute_loss(x, y, outputs, sample_weight)
    # Only a replica may write the running means of the progress line.
    with tf.distribute.ReplicaContext(strategy, 0):
        return model.compute_loss(x, y, outputs, sample_weight)


class _CompiledLike(tf.keras.Model):
    """Calls another model, so that this can be compiled while the other one stays as it is."""

    def __init__(self, model: tf.keras.Model):
        super().__init__(name=model.name, dtype=model.dtype_policy)
        self.inner = model
        self.built = True

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.inner(x, training=training)


def compiled_with(model: tf.keras.Model, loss: Any, loss_weights: Any = None) -> tf.keras.Model:
    """A model that shares the layers of another one, and is compiled with a loss.

    Args:
      model: a built model; it does not change.
      loss: as `model.compile` takes it.
      loss_weights: likewise.
    """
    shared = _CompiledLike(model)
    shared.compile(optimizer="sgd", loss=loss, loss_weights=loss_weights)
    return shared


def loss_weights_of(model: tf.keras.Model) -> Any:
    """The argument `loss_weights` that a model was compiled with."""
    return getattr(_losses_of(model), "_user_loss_weights", None)


def untrained_weights(model: tf.keras.Model) -> list[tf.Variable]:
    """The weights that are saved with a model but not trained, without the state of metrics."""
    if GENERATION == 3:
        return [native(v) for v in model.non_trainable_weights]
    try:
        weights = model.non_trainable_weights
    except ValueError:  # Keras 2 knows none of a model that is not built
        return []
    # Those that the model does not list, too.
    metrics = [p for p in model.submodules if isinstance(p, keras.metrics.Metric)]
    of_metrics = {id(v) for metric in metrics for v in metric.variables}
    # A vocabulary is among the weights, but it is no variable.
    return [v for v in weights if isinstance(v, tf.Variable) and id(v) not in of_metrics]


def trained_weights(model: tf.keras.Model) -> list[tf.Variable]:
    """The weights of a model that are trainable; none of one that is not built."""
    try:
        return [native(v) for v in model.trainable_weights]
    except ValueError:  # as Keras 2 raises
        return []


def metric_variables(model: tf.keras.Model) -> list[tf.Variable]:
    """The state of a model's metrics, those of its loss included."""
    return [native(v) for metric in model.metrics for v in metric.variables]


def forget_saved_metrics(model: tf.keras.Model) -> None:
    """Resets metrics where saved models hold their state: raw sums over the last epoch.

    Keras 2 saves it in `.keras` and `.weights.h5` files and in SavedModels, Keras 3 nowhere.

    Args:
      model: one whose epoch is over, so that the logs have the values of its metrics. Callbacks of
        loops that the user wrote may have an object in its place that has no metrics.
    """
    if GENERATION == 2 and isinstance(model, tf.keras.Model):
        model.reset_metrics()
