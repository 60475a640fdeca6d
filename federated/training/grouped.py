"""Rounds whose clients are computed in groups: the same rounds, for a tenth of the time.

TFF prepares a graph and a data set for each client, which takes ten times as long as the arithmetic
of a small client. Here a TFF client is a group of clients, whose serialized data sets it receives
in one string. A loop in its graph trains them one after another, each from the server's weights and
with a new optimizer state, and adds their updates up. Clipping, dividing by a preconditioner and
weighting happen in this loop, per client; what leaves a group are sums.

This is possible where the server needs nothing but sums over clients: the mean, and all DP queries
of this library. The state of a process is the same with and without groups, so they can take turns.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from federated.clients.client_work import (
    build_update,
    describe_model,
    next_hparams,
)
from federated.clients.preconditioner import ClientPreconditioner
from federated.clients.tff_types import made_model
from federated.privacy.dp_queries import (
    SumOfGroups,
    TreeState,
    with_idle_nodes,
    without_idle_nodes,
)
from federated.training.group_data import (
    MESSAGE,
    ReceivedClients,
    SerializedClient,
    groups_of,
    iterate_received,
    message,
    nodes_of,
    received_spec,
    serialized_client,
)

_MOST_CLIENTS = 64  # of a group, unless asked for more: a group costs as much as 10 such clients
_GROUPS_PER_CORE = 2  # so that one slow group does not leave the other cores idle for long


class GroupSum(NamedTuple):
    """How a group adds up what its clients send, and what the server does with the sums.

    Attributes:
      process: the server's part. `next` takes its state, and a value and a weight of each group.
      derive: called inside a federated computation with the state of `process`; returns what `add`
        needs from the server.
      zero: returns the sums of no clients.
      add: maps what `derive` returned, the sums so far and a client's
        `tff.learning.templates.ClientResult` to the sums with this client.
      finish: maps the sums of a group to its value and weight.
    """

    process: tff.templates.AggregationProcess
    derive: Callable[[Any], Any]
    zero: Callable[[], Any]
    add: Callable[[Any, Any, Any], Any]
    finish: Callable[[Any], tuple[Any, Any]]


class ServerParts(NamedTuple):
    """The parts of a composed process that are the same with and without groups.

    Attributes:
      distributor: sends the weights.
      finalizer: applies the aggregated update.
      update_type: the TFF type of a client's update.
    """

    distributor: tff.learning.templates.DistributionProcess
    finalizer: tff.learning.templates.FinalizerProcess
    update_type: tff.Type


def mean(update_type: tff.Type) -> GroupSum:
    """The weighted mean of the clients' updates, as `tff.aggregators.MeanFactory` computes it.

    A group sends the mean of its clients with the sum of their weights, and zeros if that is 0.

    Args:
      update_type: the TFF type of an update.
    """
    factory = tff.aggregators.MeanFactory(no_nan_division=True)

    def zero() -> tuple:
        return _zeros(tff.types.type_to_tf_tensor_specs(update_type)), tf.zeros([])

    def add(_: Any, sums: tuple, result: Any) -> tuple:
        weight = result.update_weight

        def added(so_far: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
            return so_far + tf.cast(weight, update.dtype) * update

        return tf.nest.map_structure(added, sums[0], result.update), sums[1] + weight

    def finish(sums: tuple) -> tuple:
        update, weight = sums

        def divided(total: tf.Tensor) -> tf.Tensor:
            return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

        return tf.nest.map_structure(divided, update), weight

    return GroupSum(
        factory.create(update_type, tff.TensorType(np.float32)),
        derive=lambda state: tff.federated_value(0.0, tff.SERVER),  # nothing
        zero=zero,
        add=add,
        finish=finish,
    )


def noisy_sum(
    query: tfp.SumAggregationDPQuery,
    update_type: tff.Type,
    preconditioner: ClientPreconditioner | None = None,
) -> GroupSum:
    """The sum that a DP query clips and adds noise to.

    Guarantee: that of the query. Each client's update goes through `query.accumulate_record` on its
    own (after it was divided by the preconditioner), so it is clipped, counted, and replaced by
    zeros if it is not finite, as if it had been sent alone. See `SumOfGroups` for the noise.

    Args:
      query: a query for sums.
      update_type: the TFF type of an update.
      preconditioner: divides each update before it is clipped.
    """
    specs = tff.types.type_to_tf_tensor_specs(update_type)

    def zero() -> Any:
        return query.initial_sample_state(specs)

    sums_type = tff.tensorflow.computation(zero).type_signature.result
    factory = tff.aggregators.DifferentiallyPrivateFactory(SumOfGroups(query))
    weighted = tff.aggregators.as_weighted_aggregator(factory)  # which ignores the weights
    process = weighted.create(sums_type, tff.TensorType(np.float32))
    state_type = process.initialize.type_signature.result.member
    params = tff.tensorflow.computation(query.derive_sample_params, state_type.query_state)

    def add(params: Any, sums: Any, result: Any) -> Any:
        update = result.update
        if preconditioner is not None:
            parts = preconditioner.precondition(tf.nest.flatten(update))
            update = tf.nest.pack_sequence_as(update, parts)
        return query.accumulate_record(params, sums, update)

    return GroupSum(
        process,
        derive=lambda state: tff.federated_map(params, state.query_state),
        zero=zero,
        add=add,
        finish=lambda sums: (sums, tf.zeros([])),
    )


class GroupedRounds(tff.Computation):
    """The `next` of a learning process that computes clients in groups.

    It takes the same arguments and returns the same as the `next` of the process without groups,
    whose type signature it has, up to the order in which floating-point numbers are added.

    Nodes of the tree mechanism that a round neither reads nor writes stay in this process, so the
    cost of a round hardly depends on the number of levels of the tree.

    Clients' data that are not a list of `tf.data.Dataset`s (such as lists of elements), and calls
    inside another computation, run without groups.

    Attributes:
      single: `next` without groups.
      grouped: `next` with groups, see `message`.

    Args:
      single: `next` without groups.
      grouped: `next` with the serialized data sets of groups instead of the clients' data sets.
      clients_per_group: the largest number of clients of a group, or `"auto"`.
    """

    def __init__(
        self, single: tff.Computation, grouped: tff.Computation, clients_per_group: int | str
    ):
        self.single, self.grouped = single, grouped
        self._clients_per_group = clients_per_group

    @property
    def type_signature(self) -> tff.FunctionType:
        """The types of `next` without groups."""
        return self.single.type_signature

    def __hash__(self) -> int:
        return hash(self.single)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a round of a state and the clients' data."""
        given = dict(zip(("state", "client_data"), args), **kwargs)
        data: Any = given.get("client_data")
        usable = isinstance(data, (list, tuple)) and tf.executing_eagerly()
        if len(given) != 2 or not usable or not all(isinstance(d, tf.data.Dataset) for d in data):
            return self.single(*args, **kwargs)
        clients = self._serialized(data)
        number = num_groups(len(clients), self._clients_per_group)
        with contextlib.ExitStack() as files:  # closed when the round is computed
            in_files = files if self._context_reads_files() else None
            messages = [message(group, in_files) for group in groups_of(clients, number)]
            state: Any = given["state"]
            tree = _tree_of(state)
            if tree is None:
                return self.grouped(state, messages)
            output = self.grouped(_with_tree(state, without_idle_nodes(tree)), messages)
            after: Any = _tree_of(output.state)
            whole = with_idle_nodes(tree, after)
            return tff.learning.templates.LearningProcessOutput(
                _with_tree(output.state, whole), output.metrics
            )

    @staticmethod
    def _context_reads_files() -> bool:
        return getattr(tff.framework.get_context_stack().current, "reads_own_files", False)

    def _serialized(self, datasets: Sequence[tf.data.Dataset]) -> list[SerializedClient]:
        expected = self.type_signature.parameter[1].member
        for dataset in datasets:
            expected.check_assignable_from(
                tff.SequenceType(tff.types.tensorflow_to_type(dataset.element_spec))
            )
        # The workers wait for this, and TensorFlow releases Python's lock while it copies.
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return list(threads.map(serialized_client, datasets))


def _tree_of(state: Any) -> TreeState | None:
    """The state of the tree mechanism in that of a process; `None` under another mechanism."""
    query_state = getattr(getattr(state, "aggregator", None), "query_state", None)
    found = getattr(query_state, "numerator_state", None)
    return found if isinstance(found, TreeState) else None


def _with_tree(state: Any, tree: TreeState) -> Any:
    """The state of a process with that of the tree mechanism replaced."""
    aggregator = state.aggregator
    query_state = aggregator.query_state._replace(numerator_state=tree)
    return state._replace(aggregator=aggregator._replace(query_state=query_state))


def num_groups(num_clients: int, clients_per_group: int | str) -> int:
    """The number of groups of a cohort.

    With `"auto"` it is a multiple of the number of cores of all workers, unless there are fewer
    clients. Other machines are assumed to have as many cores as this one. So the number seldom
    changes with the size of the cohort, and every worker has something to do.

    >>> num_groups(1000, 100), num_groups(3, "auto"), num_groups(0, "auto")
    (10, 3, 0)
    """
    if clients_per_group != "auto":
        return -(-num_clients // int(clients_per_group))
    context = tff.framework.get_context_stack().current
    workers = len(getattr(context, "addresses", ())) or 1
    step = _GROUPS_PER_CORE * len(os.sched_getaffinity(0)) * workers
    return min(num_clients, step * -(-num_clients // (step * _MOST_CLIENTS)))


def build_grouped_next(
    model_fn: Any,
    client_optimizer: tff.learning.optimizers.Optimizer,
    weighting: tff.learning.ClientWeighting,
    single: tff.Computation,
    parts: ServerParts,
    group_sum: GroupSum,
    measured: bool = True,
) -> tff.Computation:
    """Builds `next` of a composed learning process for groups.

    Args:
      model_fn: see `federated.build_client_work`.
      client_optimizer: the clients' optimizer.
      weighting: the weight of a client's update.
      single: `next` of the process without groups.
      parts: the other parts of the process.
      group_sum: how updates are added up.
      measured: whether to return the measurements of the clients' training.

    Returns:
      A computation from a state, and a `message` to each group, to a
      `tff.learning.templates.LearningProcessOutput` of the same type as that of `single`.
    """
    described = describe_model(model_fn, None)
    state_type = single.type_signature.parameter[0]
    train = _group_update(model_fn, client_optimizer, weighting, described.batch_type, group_sum)
    following = next_hparams(client_optimizer, state_type.member.client_work)

    @tff.federated_computation(state_type, tff.FederatedType(MESSAGE, tff.CLIENTS))
    def next_fn(state: Any, groups: Any) -> Any:
        sent = parts.distributor.next(state.distributor, state.global_model_weights)
        from_server = tff.federated_zip(
            (state.client_work, group_sum.derive(state.aggregator))  # hyperparameters, and a clip
        )
        argument = tff.federated_zip((tff.federated_broadcast(from_server), sent.result, groups))
        update = tff.tensorflow.computation(train, argument.type_signature.member)
        value, weight, metrics, reports = tff.federated_map(update, argument)
        aggregated = group_sum.process.next(state.aggregator, value, weight)
        finalized = parts.finalizer.next(
            state.finalizer, state.global_model_weights, aggregated.result
        )
        nothing: dict[str, dict] = collections.OrderedDict(train=collections.OrderedDict())
        measurements = collections.OrderedDict(
            distributor=sent.measurements,
            client_work=described.measure(metrics, reports)
            if measured
            else tff.federated_value(nothing, tff.SERVER),
            aggregator=aggregated.measurements,
            finalizer=finalized.measurements,
        )
        after = tff.learning.templates.LearningAlgorithmState(
            global_model_weights=finalized.result,
            distributor=sent.state,
            client_work=tff.federated_map(following, state.client_work),
            aggregator=aggregated.state,
            finalizer=finalized.state,
        )
        return tff.learning.templates.LearningProcessOutput(
            tff.federated_zip(after), tff.federated_zip(measurements)
        )

    return next_fn


def _group_update(
    model_fn: Any,
    optimizer: tff.learning.optimizers.Optimizer,
    weighting: tff.learning.ClientWeighting,
    batch_type: tff.Type,
    group_sum: GroupSum,
) -> Callable[..., tuple]:
    """Builds what a group computes: its value and weight, and the sums of metrics and reports."""
    batch_spec = tff.types.type_to_tf_tensor_specs(batch_type)

    def update(from_server: Any, weights: Any, group: Any) -> tuple:
        hparams, params = from_server
        with _Recorded() as variables:  # also those that are made while the step is traced
            model = made_model(model_fn)
            client_update = build_update(model, optimizer, weighting, iterate_received)
            specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, (hparams, weights))
            traced = client_update.get_concrete_function(*specs, received_spec(batch_spec))
        _require_resettable(traced, variables)
        if not isinstance(model, tff.learning.models.FunctionalModel):
            of_weights = tf.nest.flatten(tff.learning.models.ModelWeights.from_model(model))
            variables = [v for v in variables if not any(v is w for w in of_weights)]
        _require_same_start(variables)

        @tf.function
        def over_clients(hparams: Any, params: Any, weights: Any, group: Any) -> tuple:
            # Metrics, say: a client of its own graph would find them as they are now.
            start = [v.read_value() for v in variables]
            _, metrics, reports = map(_zeros, traced.structured_outputs)
            sums = group_sum.zero()
            clients = ReceivedClients(group, batch_spec)
            for k in tf.range(clients.number):
                for variable, value in zip(variables, start):
                    variable.assign(value)
                result, of_metrics, report = client_update(hparams, weights, clients.data(k))
                sums = group_sum.add(params, sums, result)
                metrics = tf.nest.map_structure(tf.add, metrics, of_metrics)
                reports = tf.nest.map_structure(tf.add, reports, report)
            return (*group_sum.finish(sums), metrics, reports)

        return over_clients(hparams, params, weights, group)

    return update


def _require_resettable(
    client_update: tf.types.experimental.ConcreteFunction, variables: Sequence[tf.Variable]
) -> None:
    """Raises if a client could leave something to the next one of its group.

    Its share of the sum would then depend on the data of others, whom no clip bounds.

    Args:
      client_update: what a client computes.
      variables: those that are reset before each client.
    """
    reset = {id(v.handle) for v in variables}
    constant = ("HashTableV2",)  # whose content cannot change
    kept = [
        tensor.op
        for tensor in client_update.captured_inputs
        if tensor.dtype in (tf.resource, tf.variant) and id(tensor) not in reset
    ]
    found = [(op.type, op.name) for op in kept if op.type not in constant]
    nodes = nodes_of(client_update.graph.as_graph_def())
    # What has a name of this kind outlives the function that makes it.
    found += [(n.op, n.name) for n in nodes if "shared_name" in n.attr and n.op not in constant]
    seeded = [n.name for n in nodes if any(n.attr[s].i for s in ("seed", "seed2") if s in n.attr)]
    if seeded:
        raise ValueError(
            "`model_fn` must return a model without seeds if clients are computed in groups: which "
            "random numbers a client gets would depend on how many others had drawn before. Leave "
            "the seed out, as in `Dropout(0.5)`, or compute each client on its own, "
            "clients_per_group=1. Received: a model with " + ", ".join(map(repr, seeded))
        )
    if found:
        raise ValueError(
            "`model_fn` must return a model that keeps what it remembers in variables that are "
            "made by `model_fn` or by the model's first step, if clients are computed in groups: "
            "what one client leaves, the next one of its group would find. Use such variables, or "
            "compute each client on its own, clients_per_group=1. Received: a model with "
            + ", ".join(f"{kind} {name!r}" for kind, name in found)
        )


def _require_same_start(variables: Sequence[tf.Variable]) -> None:
    """Raises if a client on its own would begin with random values of its own.

    The clients of a group would share them: all would get the random numbers of one generator.

    Args:
      variables: those that are reset before each client.
    """
    random = [(v, op) for v in variables for op in _random_ops(v.initial_value)]
    if random:
        raise ValueError(
            "`model_fn` must return a model whose variables begin with values that are not random, "
            "apart from its weights, if clients are computed in groups: the clients of a group "
            "would share them, and get the same numbers of a `tf.random.Generator`. Draw with "
            "`tf.random.uniform` and the like, or compute each client on its own, "
            "clients_per_group=1. Received: a model with "
            + ", ".join(f"{v.name!r} from {op.type}" for v, op in random)
        )


def _random_ops(value: tf.Tensor) -> list[tf.Operation]:
    """The operations behind a tensor that return something else each time."""
    behind, added = {value.op.name: value.op}, [value.op]
    while added:
        inputs = {tensor.op.name: tensor.op for op in added for tensor in op.inputs}
        added = [op for name, op in inputs.items() if name not in behind]
        behind.update(inputs)
    # Others with a state create variables and read them.
    return [
        op
        for op in behind.values()
        if op.op_def.is_stateful
        and not any(t.dtype == tf.resource for t in [*op.inputs, *op.outputs])
    ]


class _Recorded:
    """Collects the variables that are created in its block."""

    def __enter__(self) -> list[tf.Variable]:
        made: list[tf.Variable] = []

        def creator(create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
            made.append(create(**kwargs))
            return made[-1]

        self._scope = tf.variable_creator_scope(creator)
        self._scope.__enter__()
        return made

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


def _zeros(specs: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
