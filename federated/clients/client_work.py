"""The work of a client in a round: train on its data and send the change of the weights.

This is like TFF's `build_model_delta_client_work`, which discards the optimizer's state at the end
of local training. Here, an optimizer with a `report` method reports on its state first.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.keras_models import with_tff_models
from federated.clients.tff_types import check_optimizer, made_model
from tf_adaptive_dp import checks

# `next` of an optimizer.
NextWeights = Callable[[Any, Any, Any], tuple]
ModelFn = Callable[[], Union[tff.learning.models.VariableModel, tf.keras.Model]]
REDUCE = tff.learning.LoopImplementation.DATASET_REDUCE


class Steps(NamedTuple):
    """What a client does with its batches: functions from a state and a batch to the next state.

    Attributes:
      any: for a batch at any place.
      in_turn: for the first batch, the second, and so on, then for the first of the next turn. So
        an optimizer that treats batches differently needs no branch, which costs time at each of
        them.
    """

    any: Callable[[tuple, Any], tuple]
    in_turn: Sequence[Callable[[tuple, Any], tuple]]


# Takes steps on the batches of a data set, from a start; returns the last state.
Loop = Callable[[tf.data.Dataset, tuple, Steps], tuple]


def build_client_work(
    model_fn: ModelFn | tff.learning.models.FunctionalModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    weighting: tff.learning.ClientWeighting,
    metrics_aggregator: Callable[..., Any] | None = None,
    loop_implementation: tff.learning.LoopImplementation = REDUCE,
    input_spec: Any = None,
) -> tff.learning.templates.ClientWorkProcess:
    """Builds local training; a client's update is the weights before minus the weights after.

    A client whose update is not finite sends zeros with weight 0 and no metrics. A client without
    data sends zeros, with weight 0, or 1 under `ClientWeighting.UNIFORM`. A round without clients
    is valid. Clients keep no state between rounds: each round creates a new optimizer state, with
    the hyperparameters in the state of this process (`get_hparams`, `set_hparams`). An optimizer
    with a method `next_hparams` says which ones follow them after a round, whatever the clients
    did.

    Measurements: `train` has the model's metrics. `optimizer` exists if the client optimizer has a
    `report` method (see `build_adadp`), and aggregates over the clients that judged a step and sent
    a finite update (see `summary`). If a step is discarded because its loss was not finite, the
    weights stay finite but the metric does not.

    Guarantee: none. Measurements are exact aggregates of the clients' data, without noise.
    Releasing them is outside the privacy statement. They never affect the weights.

    Args:
      model_fn: a function that returns a new model at each call: a
        `tff.learning.models.VariableModel`, or a Sequential or functional Keras model, compiled
        with its loss and metrics. Or a `tff.learning.models.FunctionalModel`.
      client_optimizer: the optimizer of local training.
      weighting: the weight of a client's update: `NUM_EXAMPLES` or `UNIFORM`.
      metrics_aggregator: maps a model's metric finalizers to a computation that aggregates its
        metrics; `None` takes `tff.learning.metrics.sum_then_finalize`.
      loop_implementation: how the training loop iterates over a client's data set.
      input_spec: the `element_spec` of a client's batches, (x, y), such as
        `client_data.element_type_structure`; only for compiled Keras models.

    Returns:
      A `tff.learning.templates.ClientWorkProcess`. Its state is the optimizer's hyperparameters.

    Raises:
      TypeError: if an argument has the wrong type.
    """
    check_optimizer("client_optimizer", client_optimizer)
    checks.instance("weighting", weighting, tff.learning.ClientWeighting)
    checks.instance("loop_implementation", loop_implementation, type(REDUCE))
    model_fn = with_tff_models(model_fn, input_spec)
    loop: Loop = iterate
    if loop_implementation is REDUCE:
        loop = _reduce
    described = describe_model(model_fn, metrics_aggregator)
    weights_type, data_type = described.weights_type, tff.SequenceType(described.batch_type)

    @tff.tensorflow.computation
    def initial_hparams() -> Any:
        specs = tff.types.type_to_tf_tensor_specs(weights_type.trainable)
        return client_optimizer.get_hparams(client_optimizer.initialize(specs))

    @tff.tensorflow.computation(initial_hparams.type_signature.result, weights_type, data_type)
    def client_update(hparams: Any, initial_weights: Any, dataset: tf.data.Dataset) -> tuple:
        update = build_update(made_model(model_fn), client_optimizer, weighting, loop)
        return update(hparams, initial_weights, dataset)

    following = next_hparams(client_optimizer, initial_hparams.type_signature.result)
    return _build_process(initial_hparams, client_update, following, described.measure)


def next_hparams(
    optimizer: tff.learning.optimizers.Optimizer, hparams_type: tff.Type
) -> tff.Computation:
    """What follows the hyperparameters of a round: the same ones, unless the optimizer says more.

    Args:
      optimizer: the optimizer of local training.
      hparams_type: the TFF type of its hyperparameters.
    """
    following = getattr(optimizer, "next_hparams", lambda hparams: hparams)
    return tff.tensorflow.computation(following, hparams_type)


class ModelDescription(NamedTuple):
    """What the computations around a model need to know of it.

    Attributes:
      weights_type: the TFF type of its weights, as `tff.learning.models.ModelWeights`.
      batch_type: the TFF type of a batch.
      measure: called inside a federated computation with the clients' metrics and their parts of
        the report (see `build_update`); returns the measurements of the round.
    """

    weights_type: tff.Type
    batch_type: tff.Type
    measure: Callable[[Any, Any], Any]


def describe_model(
    model_fn: ModelFn | tff.learning.models.FunctionalModel,
    metrics_aggregator: Callable[..., Any] | None,
) -> ModelDescription:
    """Describes a model; for the arguments see `build_client_work`."""
    with tf.Graph().as_default():  # keeps the model's variables out of the caller's graph
        model = made_model(model_fn)
        functional = isinstance(model, tff.learning.models.FunctionalModel)
        finalizers = model.finalize_metrics if functional else model.metric_finalizers()
        aggregate = (metrics_aggregator or tff.learning.metrics.sum_then_finalize)(finalizers)
        batch_type = tff.types.tensorflow_to_type(model.input_spec)
        return ModelDescription(_weights_type(model), batch_type, _measurements(aggregate))


def build_update(
    model: tff.learning.models.VariableModel | tff.learning.models.FunctionalModel,
    optimizer: tff.learning.optimizers.Optimizer,
    weighting: tff.learning.ClientWeighting,
    loop: Loop,
) -> tf.types.experimental.GenericFunction:
    """Builds what one client computes; called in the graph that computes it.

    Args:
      model: the model, made in this graph.
      optimizer: the optimizer of local training.
      weighting: the weight of a client's update.
      loop: takes steps on the batches of a data set, from a start, and returns the last state.

    Returns:
      A `tf.function` of the optimizer's hyperparameters, the weights that the client received, and
      its data set. It returns the client's `tff.learning.templates.ClientResult`, its metrics
      before finalization, and its part of the report (see `contribution`; empty without a report).
    """
    if isinstance(model, tff.learning.models.FunctionalModel):
        train = _training_of_functional(model, optimizer, loop)
    else:
        train = _training_of_variables(model, optimizer, loop)
    return _build_update(train, optimizer, weighting)


def _build_process(
    initial_hparams: tff.Computation,
    client_update: tff.Computation,
    following: tff.Computation,
    measure: Callable[[Any, Any], Any],
) -> tff.learning.templates.ClientWorkProcess:
    """Builds the federated computations around a client's own computation."""
    hparams_type, weights_type, data_type = client_update.type_signature.parameter

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_eval(initial_hparams, tff.SERVER)

    @tff.federated_computation(
        tff.FederatedType(hparams_type, tff.SERVER),
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_round(hparams: Any, weights: Any, client_data: Any) -> Any:
        result, metrics, reports = tff.federated_map(
            client_update, (tff.federated_broadcast(hparams), weights, client_data)
        )
        return tff.templates.MeasuredProcessOutput(
            tff.federated_map(following, hparams), result, measure(metrics, reports)
        )

    @tff.tensorflow.computation(hparams_type)
    def get_hparams(state: Any) -> Any:
        return state

    @tff.tensorflow.computation(hparams_type, hparams_type)
    def set_hparams(state: Any, hparams: Any) -> Any:
        del state
        return hparams

    return tff.learning.templates.ClientWorkProcess(
        initialize, next_round, get_hparams_fn=get_hparams, set_hparams_fn=set_hparams
    )


def _measurements(aggregate_metrics: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Builds, inside a federated computation, what a round reports of its clients."""

    def measure(metrics: Any, reports: Any) -> Any:
        measurements = collections.OrderedDict(train=aggregate_metrics(metrics))
        sums_type = reports.type_signature.member
        if len(sums_type) > 0:
            summarize = tff.tensorflow.computation(summary, sums_type)
            measurements["optimizer"] = tff.federated_map(summarize, tff.federated_sum(reports))
        return tff.federated_zip(measurements)

    return measure


def _build_update(
    train: Callable[..., tuple],
    optimizer: tff.learning.optimizers.Optimizer,
    weighting: tff.learning.ClientWeighting,
) -> tf.types.experimental.GenericFunction:
    """Builds a client's computation: its weighted update, its metrics, its part of the report."""

    @tf.function
    def client_update(hparams: Any, initial_weights: Any, dataset: tf.data.Dataset) -> tuple:
        trained, num_examples, optimizer_state, metrics_of = train(
            hparams, initial_weights, dataset
        )
        update = tf.nest.map_structure(tf.subtract, initial_weights.trainable, trained)
        finite = tf.reduce_all(
            [True] + [tf.reduce_all(tf.math.is_finite(t)) for t in tf.nest.flatten(update)]
        )
        # A branch: 0 times infinity is NaN, and `where` takes as long as a training step.
        update = tf.cond(
            finite, lambda: update, lambda: tf.nest.map_structure(tf.zeros_like, update)
        )
        by_examples = weighting is tff.learning.ClientWeighting.NUM_EXAMPLES
        weight = tf.cast(num_examples, tf.float32) if by_examples else tf.constant(1.0)
        report = collections.OrderedDict()
        if hasattr(optimizer, "report"):
            report = contribution(optimizer.report(optimizer_state), finite)
        result = tff.learning.templates.ClientResult(update, tf.where(finite, weight, 0.0))
        return result, metrics_of(finite), report

    return client_update


def _training_of_variables(
    model: tff.learning.models.VariableModel,
    optimizer: tff.learning.optimizers.Optimizer,
    loop: Loop,
) -> Callable[..., tuple]:
    """Builds local training of a `VariableModel`, whose variables hold weights and metrics."""
    weights = tff.learning.models.ModelWeights.from_model(model)

    def train(hparams: Any, initial_weights: Any, dataset: tf.data.Dataset) -> tuple:
        tf.nest.map_structure(lambda v, t: v.assign(t), weights, initial_weights)
        variables = tuple(tf.nest.flatten(weights.trainable))

        def step(next_weights: NextWeights, state: tuple, batch: Any) -> tuple:
            num_examples, optimizer_state = state
            with tf.GradientTape() as tape:
                output = model.forward_pass(batch, training=True)
            gradients = tuple(tape.gradient(output.loss, variables))
            optimizer_state, updated = next_weights(optimizer_state, variables, gradients)
            for variable, value in zip(variables, updated):
                variable.assign(value)
            examples = output.num_examples
            if examples is None:
                examples = tf.shape(output.predictions)[0]
            return num_examples + tf.cast(examples, tf.int64), optimizer_state

        start = (tf.zeros([], tf.int64), _initial_state(optimizer, hparams, variables))
        num_examples, optimizer_state = loop(dataset, start, _steps(optimizer, step))
        trained = tf.nest.map_structure(lambda v: v.read_value(), weights.trainable)

        def metrics_of(finite: tf.Tensor) -> Any:
            if not finite:
                model.reset_metrics()
            return model.report_local_unfinalized_metrics()

        return trained, num_examples, optimizer_state, metrics_of

    return train


def _training_of_functional(
    model: tff.learning.models.FunctionalModel,
    optimizer: tff.learning.optimizers.Optimizer,
    loop: Loop,
) -> Callable[..., tuple]:
    """Builds local training of a `FunctionalModel`, whose weights and metrics are tensors."""

    def train(hparams: Any, initial_weights: Any, dataset: tf.data.Dataset) -> tuple:
        fixed = initial_weights.non_trainable

        def step(next_weights: NextWeights, state: tuple, batch: Any) -> tuple:
            trainable, optimizer_state, metrics_state, num_examples = state
            x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
            with tf.GradientTape() as tape:
                tape.watch(trainable)
                output = model.predict_on_batch((trainable, fixed), x, training=True)
                loss = model.loss(output=output, label=y)
            gradients = tape.gradient(loss, trainable)
            optimizer_state, trainable = next_weights(optimizer_state, trainable, gradients)
            examples = tf.shape(tf.nest.flatten(output)[0])[0]
            metrics_state = model.update_metrics_state(
                metrics_state,
                labels=y,
                batch_output=tff.learning.models.BatchOutput(
                    loss=loss, predictions=output, num_examples=examples
                ),
            )
            num_examples += tf.cast(examples, tf.int64)
            return trainable, optimizer_state, metrics_state, num_examples

        start = (
            initial_weights.trainable,
            _initial_state(optimizer, hparams, initial_weights.trainable),
            model.initialize_metrics_state(),
            tf.zeros([], tf.int64),
        )
        trained, optimizer_state, metrics_state, num_examples = loop(
            dataset, start, _steps(optimizer, step)
        )

        def metrics_of(finite: tf.Tensor) -> Any:
            return tf.nest.map_structure(
                lambda after, before: tf.where(finite, after, before),
                metrics_state,
                model.initialize_metrics_state(),
            )

        return trained, num_examples, optimizer_state, metrics_of

    return train


def _initial_state(optimizer: tff.learning.optimizers.Optimizer, hparams: Any, weights: Any) -> Any:
    specs = tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, w.dtype), weights)
    return optimizer.set_hparams(optimizer.initialize(specs), hparams)


def _steps(
    optimizer: tff.learning.optimizers.Optimizer,
    step: Callable[[NextWeights, tuple, Any], tuple],
) -> Steps:
    """A step of training with `next` of an optimizer, and with its `next_in_turn` if it has one."""
    in_turn = getattr(optimizer, "next_in_turn", (optimizer.next,))
    return Steps(
        functools.partial(step, optimizer.next), [functools.partial(step, f) for f in in_turn]
    )


def _reduce(dataset: tf.data.Dataset, start: tuple, steps: Steps) -> tuple:
    return dataset.reduce(start, steps.any)


def iterate(
    dataset: tf.data.Dataset,
    start: tuple,
    steps: Steps,
    in_thread: tf.Tensor | None = None,
) -> tuple:
    """Takes a step on each batch; inside a graph it costs a client far less than `reduce` does.

    A `for` over the data set would become a loop with a branch in it, through which each tensor of
    the state goes at each batch.

    Args:
      dataset: the batches.
      start: the state before the first one.
      steps: what to do with each.
      in_thread: how many of the first batches the thread that trains computes itself, instead of
        waiting for another one: no more than there are, and none if the data set calls functions.

    Returns:
      The last state.
    """
    batches = iter(dataset)
    specs = tf.nest.flatten(dataset.element_spec)
    tensors_only = all(isinstance(spec, tf.TensorSpec) for spec in specs)

    def fetched(k: tf.Tensor) -> tf.experimental.Optional:
        if in_thread is None or not tensors_only:
            return batches.get_next_as_optional()
        return tf.cond(
            k < in_thread,
            lambda: tf.experimental.Optional.from_value(_next_in_thread(batches)),
            batches.get_next_as_optional,
        )

    def fetched_turn(k: tf.Tensor) -> list[tf.experimental.Optional]:
        return [fetched(k + place) for place in range(len(steps.in_turn))]

    state, k = start, tf.constant(0, tf.int64)
    turn = fetched_turn(k)
    while turn[-1].has_value():
        for step, batch in zip(steps.in_turn, turn):
            state = step(state, batch.get_value())
        k += len(steps.in_turn)
        turn = fetched_turn(k)
    for batch in turn[:-1]:  # the last turn may end early
        if batch.has_value():
            state = steps.any(state, batch.get_value())
    return state


def _next_in_thread(batches: tf.data.Iterator) -> Any:
    """The next batch of tensors, computed by the thread that asks for it."""
    [resource] = tf.nest.flatten(batches, expand_composites=True)
    specs = tf.nest.flatten(batches.element_spec)
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=resource,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.nest.pack_sequence_as(batches.element_spec, tensors)


def _weights_type(model: Any) -> tff.Type:
    """The TFF type of the model's weights, as `ModelWeights`."""
    if not isinstance(model, tff.learning.models.FunctionalModel):
        return tff.learning.models.weights_type_from_model(model)
    trainable, non_trainable = (
        tuple(tf.TensorSpec(np.shape(w), np.asarray(w).dtype) for w in weights)
        for weights in model.initial_weights
    )
    return tff.types.tensorflow_to_type(tff.learning.models.ModelWeights(trainable, non_trainable))


# Half decades from 1e-6 to 1e2. The first and the last bucket of the histogram are open-ended.
LEARNING_RATE_EDGES = tuple(10.0 ** (k / 2) for k in range(-12, 5))


def contribution(report: Any, counts: tf.Tensor) -> collections.OrderedDict:
    """The terms that one client adds to the sums behind `summary`.

    A client contributes only if it judged a step, `counts` is true, and its learning rate is finite
    and positive.

    Args:
      report: the result of `optimizer.report(state)`: the scalars `learning_rate`, `judged_steps`
        and `discarded_steps`.
      counts: scalar; whether the client's update counts.

    Returns:
      Tensors to sum over clients.
    """
    rate = tf.cast(report["learning_rate"], tf.float32)
    counts = counts & (report["judged_steps"] > 0) & tf.math.is_finite(rate) & (rate > 0)
    log_rate = tf.math.log(tf.where(counts, tf.cast(rate, tf.float64), 1.0)) / math.log(10)
    bucket = tf.searchsorted(tf.constant(LEARNING_RATE_EDGES), rate[tf.newaxis], side="right")[0]

    def if_counts(value: tf.Tensor) -> tf.Tensor:
        return tf.where(counts, value, tf.zeros_like(value))

    return collections.OrderedDict(
        clients=tf.cast(counts, tf.int32),
        log_rate=log_rate,
        squared_log_rate=tf.square(log_rate),
        histogram=if_counts(tf.one_hot(bucket, len(LEARNING_RATE_EDGES) + 1, dtype=tf.int32)),
        judged_steps=if_counts(tf.cast(report["judged_steps"], tf.float64)),
        discarded_steps=if_counts(tf.cast(report["discarded_steps"], tf.float64)),
    )


def summary(sums: Any) -> collections.OrderedDict:
    """The measurements of a round.

    Args:
      sums: the sum of each entry of `contribution` over the clients of the round.

    Returns:
      `clients`, the number of clients that judged a step; `log10_learning_rate_mean` and
      `log10_learning_rate_stddev` (of the population); `learning_rate_histogram`, the number of
      clients by η in the buckets between `LEARNING_RATE_EDGES`, lower edge included; and
      `discarded_share`, the share of judged steps that were discarded. Without clients the counts
      are 0 and the other figures are NaN.
    """
    clients = tf.cast(sums["clients"], tf.float64)
    mean = sums["log_rate"] / clients
    variance = sums["squared_log_rate"] / clients - tf.square(mean)
    return collections.OrderedDict(
        clients=sums["clients"],
        log10_learning_rate_mean=tf.cast(mean, tf.float32),
        # Rounding may leave a variance below 0; NaN passes through.
        log10_learning_rate_stddev=tf.cast(tf.sqrt(tf.maximum(variance, 0.0)), tf.float32),
        learning_rate_histogram=sums["histogram"],
        discarded_share=tf.cast(sums["discarded_steps"] / sums["judged_steps"], tf.float32),
    )
