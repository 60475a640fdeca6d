"""What a process takes from its clients beside its private sum is found in its computation."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from federated.clients.client_optimizers import build_adadp
from federated.privacy.process_releases import check_releases
from federated.privacy.user_ledger import UserLedger
from federated.privacy.user_level import UserLevelPrivacy
from federated.training.processes import build_dp_fed_avg
from tests.helpers import real_rounds
from tf_adaptive_dp.errors import NotPrivateError

ALGORITHMS = tff.learning.algorithms
MOMENTUM = tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
PRIVACY = UserLevelPrivacy(1.0, 3, 12, clip=0.5)


def weighted(privacy):
    return tff.aggregators.as_weighted_aggregator(privacy.aggregator())


def ours(privacy, **options):
    return build_dp_fed_avg(real_rounds.model_fn, build_adadp(), privacy, **options)


SOUND = {
    "groups": ours,
    "metrics": lambda p: ours(p, client_metrics=True, clients_per_group=1),
    "unweighted": lambda p: ALGORITHMS.build_unweighted_fed_avg(
        real_rounds.model_fn, MOMENTUM, MOMENTUM, model_aggregator=p.aggregator()
    ),
    "weighted": lambda p: ALGORITHMS.build_weighted_fed_avg(
        real_rounds.model_fn, MOMENTUM, model_aggregator=weighted(p)
    ),
    "sgd": lambda p: ALGORITHMS.build_fed_sgd(
        real_rounds.model_fn, MOMENTUM, model_aggregator=weighted(p)
    ),
    "prox": lambda p: ALGORITHMS.build_unweighted_fed_prox(
        real_rounds.model_fn, 0.1, MOMENTUM, model_aggregator=p.aggregator()
    ),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("mechanism", ["gaussian", "tree", "banded"])
@pytest.mark.parametrize("build", SOUND.values(), ids=SOUND)
def test_processes_whose_updates_go_through_the_aggregator_are_accepted(context, build, mechanism):
    assert check_releases(build(real_rounds.privacy(mechanism)))


@pytest.mark.parametrize("kind", ["unweighted", "weighted"])
def test_mime_is_refused_as_it_sends_exact_gradients(context, kind):
    aggregator = weighted(PRIVACY) if kind == "weighted" else PRIVACY.aggregator()
    build = getattr(ALGORITHMS, f"build_{kind}_mime_lite")
    process = build(real_rounds.model_fn, MOMENTUM, model_aggregator=aggregator)
    with pytest.raises(NotPrivateError, match="Mime.* exact sums in state.client_work$"):
        check_releases(process)


def weighted_mean(update):
    weight = tff.tensorflow.computation(lambda u: tf.norm(u), tff.TensorType(np.float32, [2]))
    return tff.federated_mean(update, tff.federated_map(weight, update))


def aggregate(update):
    zeros = tff.tensorflow.computation(lambda: tf.zeros([2]))
    add = tff.tensorflow.computation(lambda a, b: a + b, [zeros.type_signature.result] * 2)
    same = tff.tensorflow.computation(lambda a: a, zeros.type_signature.result)
    return tff.federated_aggregate(update, zeros(), add, add, same)


def with_another_sum(where, added_up=tff.federated_sum):
    """A process whose `next` adds up what no aggregator clips, and puts it somewhere."""
    inner = PRIVACY.aggregator().create(tff.TensorType(np.float32, [2]))
    weights = tff.tensorflow.computation(lambda: tf.zeros([2]))

    @tff.federated_computation
    def initialize():
        model = tff.federated_eval(weights, tff.SERVER)
        state = collections.OrderedDict(model=model, aggregator=inner.initialize())
        return tff.federated_zip(state)

    @tff.tensorflow.computation
    def total(data):
        return data.reduce(tf.zeros([2]), lambda a, b: a + b)

    add = tff.tensorflow.computation(lambda a, b: a + b)
    of_aggregator = inner.initialize.type_signature.result.member
    first = tff.tensorflow.computation(
        lambda a, b: a, (of_aggregator, tff.TensorType(np.float32, [2]))
    )
    data_type = tff.FederatedType(tff.SequenceType(tff.TensorType(np.float32, [2])), tff.CLIENTS)

    @tff.federated_computation(initialize.type_signature.result, data_type)
    def next_fn(state, data):
        update = tff.federated_map(total, data)
        exact = added_up(update)
        if where == "clients":  # who see the sum before they send their updates
            update = tff.federated_map(add, (update, tff.federated_broadcast(exact)))
        private = inner.next(state.aggregator, update)
        added = {"model": exact, "both": tff.federated_map(add, (private.result, exact))}
        model = added.get(where, private.result)
        kept = private.state
        if where == "aggregator":
            kept = tff.federated_map(first, (private.state, exact))
        state = collections.OrderedDict(model=model, aggregator=kept)
        nothing = tff.federated_value(0.0, tff.SERVER)
        metrics = collections.OrderedDict(
            client_work=exact, finalizer=exact if where == "finalizer" else nothing
        )
        result = exact if where == "result" else private.result
        return tff.templates.MeasuredProcessOutput(
            tff.federated_zip(state), result, tff.federated_zip(metrics)
        )

    @tff.federated_computation(initialize.type_signature.result, data_type)
    def of_process(state, data):
        output = next_fn(state, data)
        if where == "result":
            return output
        if where == "metrics":
            exact = tff.federated_sum(tff.federated_map(total, data))
            return tff.learning.templates.LearningProcessOutput(output.state, exact)
        return tff.learning.templates.LearningProcessOutput(output.state, output.measurements)

    return collections.namedtuple("Process", "next")(of_process)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("model", "state.model"),
        ("both", "state.model"),
        ("finalizer", "metrics.finalizer"),
        ("metrics", "metrics."),
        ("result", "result, measurements"),
    ],
)
def test_an_exact_sum_is_found_wherever_it_goes(context, where, found):
    with pytest.raises(NotPrivateError, match=f"exact sums in {found}$"):
        check_releases(with_another_sum(where))
    assert check_releases(with_another_sum("nowhere"))  # `client_work` is never protected


@pytest.mark.parametrize("added_up", [weighted_mean, aggregate])
def test_an_exact_sum_is_found_however_it_is_computed(context, added_up):
    with pytest.raises(NotPrivateError, match="exact sums in state.model$"):
        check_releases(with_another_sum("model", added_up))
    assert check_releases(with_another_sum("nowhere", added_up))


@pytest.mark.parametrize("where", ["aggregator", "clients"])
def test_an_exact_sum_behind_the_private_one_is_no_part_of_its_release(context, where):
    with pytest.raises(NotPrivateError, match="must have one private aggregator"):
        check_releases(with_another_sum(where))


def test_a_process_without_a_private_aggregator_is_refused(context):
    process = ALGORITHMS.build_unweighted_fed_avg(real_rounds.model_fn, MOMENTUM)
    with pytest.raises(NotPrivateError, match="one private aggregator.*`state.aggregator`$"):
        check_releases(process)


def test_the_queries_of_tf_privacy_are_refused(context):
    """A client whose update is finite, and its norm is not, turns their sum into NaN."""
    query = tfp.GaussianSumQuery(0.5, 0.5)
    params = query.derive_sample_params(query.initial_global_state())
    assert np.isnan(query.preprocess_record(params, [tf.constant([1e30, 0.0])])[0]).all()
    aggregator = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 3.0, 0.5)
    process = ALGORITHMS.build_unweighted_fed_avg(
        real_rounds.model_fn, MOMENTUM, model_aggregator=aggregator
    )
    UserLedger(PRIVACY).check_noise(process.initialize())  # of the stated size
    with pytest.raises(NotPrivateError, match="must have the aggregator `privacy.aggregator"):
        check_releases(process)


def test_of_a_python_function_nothing_is_known():
    process = collections.namedtuple("Process", "next")(lambda state, data: state)
    assert not check_releases(process)
