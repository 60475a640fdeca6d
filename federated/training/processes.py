"""Federated averaging with the papers' client optimizers, with and without user-level privacy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, Union

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp
from federated.clients.client_work import build_client_work
from federated.clients.keras_models import with_tff_models
from federated.clients.preconditioner import ClientPreconditioner
from federated.clients.tff_types import check_optimizer
from federated.privacy.user_ledger import UserLedger
from federated.privacy.user_level import UserLevelPrivacy
from federated.training import grouped
from tf_adaptive_dp import checks

Model = Union[
    Callable[[], Union[tff.learning.models.VariableModel, tf.keras.Model]],
    tff.learning.models.FunctionalModel,
]


class PrivateLearningProcess(tff.learning.templates.LearningProcess):
    """A learning process that knows the privacy of its rounds.

    Attributes:
      privacy: the `UserLevelPrivacy` of each round.
      side_information: the side information of an optimizer or of the preconditioner, with its
        provenance; or `None`.
    """

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        privacy: UserLevelPrivacy,
        side_information: Any = None,
    ):
        super().__init__(
            process.initialize,
            process.next,
            process.get_model_weights,
            process.set_model_weights,
            get_hparams_fn=process.get_hparams,
            set_hparams_fn=process.set_hparams,
        )
        self.privacy = privacy
        self.side_information = side_information

    def new_ledger(self) -> UserLedger:
        """Makes an empty ledger for a run of this process.

        Guarantee: unless the side information is public, the ledger holds the event that released
        it.
        """
        return UserLedger(self.privacy, self.side_information)


def build_adaptive_fed_avg(
    model_fn: Model,
    client_optimizer: tff.learning.optimizers.Optimizer | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    *,
    weighted: bool = True,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    clients_per_group: int | str = "auto",
    input_spec: Any = None,
) -> tff.learning.templates.LearningProcess:
    """Builds federated averaging whose clients adapt their learning rates, without privacy.

    Each client of a round runs ADADP from the server's weights θ, and the server takes the mean of
    their weights,

        θ ← θ - Σₖ wₖ (θ - θₖ) / Σₖ wₖ,    wₖ: number of examples of client k, or 1.

    A round without examples leaves θ unchanged.

    Guarantee: none; this is not private. The mean and the metrics are exact, without clipping or
    noise, so everything that `next` returns may reveal a client's data. `build_dp_fed_avg` has
    user-level privacy.

    Args:
      model_fn: a function that returns a new model at each call: a
        `tff.learning.models.VariableModel`, or a Sequential or functional Keras model, compiled
        with its loss and metrics. Or a `tff.learning.models.FunctionalModel`.
      client_optimizer: the clients' optimizer; `None` takes `build_adadp()`.
      server_optimizer: applied to the mean update; `None` takes SGD with learning rate 1.
      weighted: whether to weight clients by their number of examples.
      model_distributor: `None` takes a plain broadcast.
      model_aggregator: `None` takes the mean.
      metrics_aggregator: the aggregator of the clients' metrics; `None` takes
        `tff.learning.metrics.sum_then_finalize`.
      clients_per_group: the largest number of clients that are trained one after another in one
        computation of TFF, which costs far less than a separate computation for each; the result is
        the same up to rounding. `"auto"` chooses it by the size of the cohort, but 1 if
        `model_aggregator`, `model_distributor` or `metrics_aggregator` is given, which may tell
        clients apart.
      input_spec: the `element_spec` of a client's batches, (x, y), such as
        `client_data.element_type_structure`; only for compiled Keras models.

    Returns:
      A learning process. Its metrics have `client_work`: `train`, and `optimizer` with the clients'
      learning rates.

    Raises:
      TypeError: if `model_fn`, `model_aggregator` or an optimizer is something else.
      ValueError: if a Keras model has something that TFF's models lack, or `clients_per_group` is
        impossible.

    References:
      Koskela and Honkela (2018), "Learning Rate Adaptation for Federated and Differentially Private
      Learning", arXiv:1809.03832: "Adaptive federated averaging algorithm".
    """
    model_fn = with_tff_models(model_fn, input_spec)
    if client_optimizer is None:
        client_optimizer = build_adadp()
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    in_groups = _in_groups(
        clients_per_group,
        model_aggregator=model_aggregator,
        model_distributor=model_distributor,
        metrics_aggregator=metrics_aggregator,
    )
    if model_aggregator is None:
        model_aggregator = tff.aggregators.MeanFactory(no_nan_division=True)
    if not isinstance(model_aggregator, tff.aggregators.WeightedAggregationFactory):
        raise TypeError(
            "`model_aggregator` must be a `tff.aggregators.WeightedAggregationFactory`; "
            "`tff.aggregators.as_weighted_aggregator` makes one from an unweighted factory. For "
            "privacy, use `build_dp_fed_avg`. Received: "
            f"model_aggregator={model_aggregator!r}"
        )
    by_examples = tff.learning.ClientWeighting.NUM_EXAMPLES
    weighting = by_examples if weighted else tff.learning.ClientWeighting.UNIFORM
    client_work = build_client_work(
        model_fn, client_optimizer, weighting, metrics_aggregator=metrics_aggregator
    )
    process, parts = _composed(
        model_fn, client_work, model_aggregator, server_optimizer, model_distributor
    )
    if not in_groups:
        return process
    rounds = grouped.build_grouped_next(
        model_fn,
        client_optimizer,
        weighting,
        process.next,
        parts,
        grouped.mean(parts.update_type),
    )
    return _with_next(process, grouped.GroupedRounds(process.next, rounds, clients_per_group))


def build_dp_fed_avg(
    model_fn: Model,
    client_optimizer: tff.learning.optimizers.Optimizer,
    privacy: UserLevelPrivacy,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    *,
    preconditioner: ClientPreconditioner | None = None,
    client_metrics: bool = False,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    clients_per_group: int | str = "auto",
    input_spec: Any = None,
) -> PrivateLearningProcess:
    """Builds federated averaging with user-level differential privacy.

    In each round the server sends its weights θ to the cohort. Each client trains on its own data
    with `client_optimizer` and sends Δₖ = θ - θₖ. Then

        Δ = (Σₖ clip(Δₖ) + noise) / clients_per_round,    θ ← server_optimizer(θ, Δ).

    Side information can enter at one of three places (AdaDPS, section 6.2):
    - at the clients, `client_optimizer=build_adadps(A)` divides the gradient of each minibatch by
      A. The paper finds this better.
    - before clipping, `preconditioner=A` divides the whole update by A,
      Δ = (Σₖ clip(Δₖ / A) + noise) / clients_per_round, as AdaDPS does with gradients.
    - after the noise, `server_optimizer=build_adadps(A)`, which divides the noise too.
    In the first two places A is a constant within a round, so clip and noise stay the same.

    Guarantee: that of `UserLevelPrivacy` for everything that `next` returns, including the state
    (except with mechanism="tree" or "banded", where the state is secret), whatever the model and
    the optimizers do, if `client_metrics` is false and the optimizers hold no private data. To
    compute ε, record each round in `process.new_ledger()` and call `federated.epsilon_spent`. A
    round that is run again counts again.

    Args:
      model_fn: a function that returns a new model at each call: a
        `tff.learning.models.VariableModel`, or a Sequential or functional Keras model, compiled
        with its loss and metrics. Or a `tff.learning.models.FunctionalModel`. Initial weights must
        not come from the private data.
      client_optimizer: the clients' optimizer, such as `build_adadps(...)` or `build_adadp()`.
      privacy: the privacy of each round. Draw the cohorts with
        `federated.privacy.client_sampling`.
      server_optimizer: `None` takes SGD with learning rate 1 and momentum 0.9, as in the AdaDPS
        paper.
      preconditioner: A for whole updates.
      client_metrics: whether to return the metrics of the clients' training too (`client_work`:
        `train`, and `optimizer` if the client optimizer reports). These are exact averages over the
        cohort without noise, so they are NOT private: for experiments on public data only. By
        default `client_work` has an empty `train`.
      model_distributor: `None` takes a plain broadcast.
      metrics_aggregator: the aggregator of the clients' metrics; `None` takes
        `tff.learning.metrics.sum_then_finalize`.
      clients_per_group: see `build_adaptive_fed_avg`. Each client's update is still clipped on its
        own, and the noise is the same. `"auto"` takes 1 if `model_distributor` is given, or
        `metrics_aggregator` with `client_metrics`.
      input_spec: the `element_spec` of a client's batches, (x, y), such as
        `client_data.element_type_structure`; only for compiled Keras models.

    Returns:
      A learning process. Its metrics have `aggregator`, with the clip of the next round, which is
      private like the model.

    Raises:
      TypeError: if `privacy`, `preconditioner` or an optimizer is something else.
      ValueError: if there is side information in two places, or `clients_per_group` is impossible.
    """
    model_fn = with_tff_models(model_fn, input_spec)
    factory = checks.instance("privacy", privacy, UserLevelPrivacy).aggregator()
    if preconditioner is not None:
        if not isinstance(preconditioner, ClientPreconditioner):
            raise TypeError(
                "`preconditioner` must be a `ClientPreconditioner`, which states its provenance. "
                f"Received: preconditioner={preconditioner!r}"
            )
        factory = _PreconditionedFactory(preconditioner, factory)
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(learning_rate=1.0, momentum=0.9)
    side_information = _the_one_side_information(client_optimizer, preconditioner, server_optimizer)
    in_groups = _in_groups(
        clients_per_group,
        model_distributor=model_distributor,
        metrics_aggregator=metrics_aggregator if client_metrics else None,
    )
    weighting = tff.learning.ClientWeighting.UNIFORM
    client_work = build_client_work(
        model_fn, client_optimizer, weighting, metrics_aggregator=metrics_aggregator
    )
    if not client_metrics:
        client_work = _without_measurements(client_work)
    weighted = tff.aggregators.as_weighted_aggregator(factory)  # which ignores the weights
    process, parts = _composed(model_fn, client_work, weighted, server_optimizer, model_distributor)
    if in_groups:
        query = privacy.query_for(parts.update_type)
        rounds = grouped.build_grouped_next(
            model_fn,
            client_optimizer,
            weighting,
            process.next,
            parts,
            grouped.noisy_sum(query, parts.update_type, preconditioner),
            measured=client_metrics,
        )
        rounds = grouped.GroupedRounds(process.next, rounds, clients_per_group)
        process = _with_next(process, rounds)
    return PrivateLearningProcess(process, privacy, side_information)


def _in_groups(clients_per_group: int | str, **given: Any) -> bool:
    """Whether to compute clients in groups, where `given` may tell them apart unless it is `None`.

    Raises:
      TypeError, ValueError: if `clients_per_group` is neither `"auto"` nor an integer above 0, or
        asks for groups where there cannot be any.
    """
    automatic = isinstance(clients_per_group, str)
    if automatic:
        checks.choice("clients_per_group", clients_per_group, ("auto",))
    elif checks.integer("clients_per_group", clients_per_group, 1) == 1:
        return False
    custom = [name for name, value in given.items() if value is not None]
    if custom and not automatic:
        raise ValueError(
            "`clients_per_group` must be 1 or 'auto' with a "
            f"{' and a '.join(f'`{name}`' for name in custom)} of your own, which may want to see "
            f"single clients. Received: clients_per_group={clients_per_group!r}"
        )
    return not custom


def _the_one_side_information(
    client_optimizer: Any, preconditioner: ClientPreconditioner | None, server_optimizer: Any
) -> Any:
    possible = {
        "client_optimizer": getattr(client_optimizer, "side_information", None),
        "preconditioner": preconditioner,
        "server_optimizer": getattr(server_optimizer, "side_information", None),
    }
    used = {name: found for name, found in possible.items() if found is not None}
    if len(used) > 1:
        raise ValueError(
            "Side information can be in one of `client_optimizer`, `preconditioner` and "
            "`server_optimizer` only, since the ledger records one provenance. Received: "
            + ", ".join(f"{name} with {found.description!r}" for name, found in used.items())
        )
    return next(iter(used.values()), None)


class _PreconditionedFactory(tff.aggregators.UnweightedAggregationFactory):
    """Divides each client's update by A before `inner` sees it."""

    def __init__(
        self,
        preconditioner: ClientPreconditioner,
        inner: tff.aggregators.UnweightedAggregationFactory,
    ):
        self._preconditioner = preconditioner
        self._inner = inner

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """See the base class."""
        inner = self._inner.create(value_type)

        @tff.tensorflow.computation(value_type)
        def divided(update: Any) -> Any:
            parts = self._preconditioner.precondition(tf.nest.flatten(update))
            return tf.nest.pack_sequence_as(update, parts)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state: Any, updates: Any) -> Any:
            return inner.next(state, tff.federated_map(divided, updates))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def _without_measurements(
    client_work: tff.learning.templates.ClientWorkProcess,
) -> tff.learning.templates.ClientWorkProcess:
    @tff.federated_computation(*client_work.next.type_signature.parameter)
    def next_fn(state: Any, weights: Any, client_data: Any) -> Any:
        output = client_work.next(state, weights, client_data)
        # `tff.learning.programs.train_model` takes `train` out of it.
        empty: dict[str, dict] = collections.OrderedDict(train=collections.OrderedDict())
        nothing = tff.federated_value(empty, tff.SERVER)
        return tff.templates.MeasuredProcessOutput(output.state, output.result, nothing)

    return tff.learning.templates.ClientWorkProcess(
        client_work.initialize,
        next_fn,
        get_hparams_fn=client_work.get_hparams,
        set_hparams_fn=client_work.set_hparams,
    )


def _composed(
    model_fn: Model,
    client_work: tff.learning.templates.ClientWorkProcess,
    model_aggregator: tff.aggregators.WeightedAggregationFactory,
    server_optimizer: tff.learning.optimizers.Optimizer,
    model_distributor: tff.learning.templates.DistributionProcess | None,
) -> tuple[tff.learning.templates.LearningProcess, grouped.ServerParts]:
    """Composes distributor, clients, aggregator and server optimizer to a learning process."""
    check_optimizer("server_optimizer", server_optimizer)

    @tff.tensorflow.computation
    def initial_weights() -> Any:
        # Of a `FunctionalModel`, or of a compiled Keras model.
        if not hasattr(model_fn, "initial_weights"):
            return tff.learning.models.ModelWeights.from_model(model_fn())
        # The containers are those of the models' variables.
        kind = tuple if isinstance(model_fn, tff.learning.models.FunctionalModel) else list
        trainable, fixed = (
            kind(map(tf.convert_to_tensor, weights)) for weights in model_fn.initial_weights
        )
        return tff.learning.models.ModelWeights(trainable, fixed)

    weights_type = initial_weights.type_signature.result
    # Before the finalizer: privacy says which types of weights it takes.
    aggregator = model_aggregator.create(weights_type.trainable, tff.TensorType(np.float32))
    if model_distributor is None:
        model_distributor = tff.learning.templates.build_broadcast_process(weights_type)
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        server_optimizer, weights_type
    )
    process = tff.learning.templates.compose_learning_process(
        initial_weights,
        model_distributor,
        client_work,
        aggregator,
        finalizer,
    )
    return process, grouped.ServerParts(model_distributor, finalizer, weights_type.trainable)


def _with_next(
    process: tff.learning.templates.LearningProcess, next_fn: tff.Computation
) -> tff.learning.templates.LearningProcess:
    return tff.learning.templates.LearningProcess(
        process.initialize,
        next_fn,
        process.get_model_weights,
        process.set_model_weights,
        get_hparams_fn=process.get_hparams,
        set_hparams_fn=process.set_hparams,
    )
