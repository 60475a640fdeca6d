"""Whole processes: what a round does to the server's weights, what it returns, and learning."""

import collections

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp, build_adadps
from federated.clients.preconditioner import ClientPreconditioner
from federated.privacy.client_sampling import ClientSampler, EveryClient, ShuffledEpochs
from federated.privacy.user_epsilon import epsilon_spent, privacy_statement
from federated.privacy.user_level import UserLevelPrivacy
from federated.training.processes import (
    PrivateLearningProcess,
    _the_one_side_information,
    build_adaptive_fed_avg,
    build_dp_fed_avg,
)
from federated.training.program import train
from federated.training.saved_states import SavedStates
from tests.helpers.gaussianity import assert_gaussian

SPEC = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
SGD = tff.learning.optimizers.build_sgdm(learning_rate=0.25)
TRUE = np.array([[1.0], [-2.0]], np.float32)


pytestmark = pytest.mark.usefixtures("context")


def keras_model(size=2):
    zeros = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return tf.keras.Sequential([tf.keras.Input([size]), zeros])


def model_fn():
    return tff.learning.models.from_keras_model(
        keras_model(), loss=tf.keras.losses.MeanSquaredError(), input_spec=SPEC
    )


def functional_model(size=2):
    return tff.learning.models.functional_model_from_keras(
        lambda: keras_model(size),
        tf.keras.losses.MeanSquaredError(),
        (tf.TensorSpec([None, size]), tf.TensorSpec([None, 1])),
        collections.OrderedDict,
    )


def client(x, y, batch_size=100):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def client_of(seed, examples=40, batch_size=10):
    x = np.random.default_rng(seed).normal(size=[examples, 2]).astype(np.float32)
    return client(x, x @ TRUE, batch_size)


NOBODY = client(np.zeros([0, 2]), np.zeros([0, 1]))
BROKEN = client([[np.nan, 1.0]], [[1.0]])
NEVER_FINITE = client(np.full([40, 2], np.nan), np.zeros([40, 1]), batch_size=10)


def gradient(x, y):
    """Of the mean squared error at zero weights."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return -2 * x.T @ y / len(x)


DATA = [([[1.0, 0.0], [0.0, 2.0]], [[1.0], [1.0]]), ([[10.0, -20.0]], [[100.0]])]


def weights(process, state):
    return np.asarray(process.get_model_weights(state).trainable[0])


def clipped(update, clip):
    return update * min(1.0, clip / np.linalg.norm(update))


@pytest.fixture(scope="module", params=[model_fn, functional_model()], ids=["keras", "functional"])
def noiseless(request):
    """A process without noise whose server has a momentum of 0.9 and a learning rate of 1."""
    privacy = UserLevelPrivacy(0.0, 5, 20, clip=0.6)
    return build_dp_fed_avg(request.param, SGD, privacy)


@pytest.mark.slow_after(1)
def test_a_round_applies_the_average_of_clipped_updates_with_momentum(noiseless):
    clients = [client(x, y) for x, y in DATA]
    updates = [0.25 * gradient(x, y) for x, y in DATA]
    assert np.linalg.norm(updates[0]) < 0.6 < np.linalg.norm(updates[1])
    average = sum(clipped(update, 0.6) for update in updates) / 5
    output = noiseless.next(noiseless.initialize(), [*clients, NOBODY, BROKEN])
    np.testing.assert_allclose(weights(noiseless, output.state), -average, rtol=1e-5)
    # A round of nobody goes on with the momentum of the last one.
    after = noiseless.next(output.state, [])
    np.testing.assert_allclose(weights(noiseless, after.state), -1.9 * average, rtol=1e-5)
    # Weights of clients play no part: more of the same data is the same mean gradient.
    x, y = DATA[0]
    many = noiseless.next(noiseless.initialize(), [client(x * 7, y * 7), clients[1]])
    np.testing.assert_allclose(weights(noiseless, many.state), -average, rtol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_a_whole_client_moves_the_model_by_the_clip_at_most_and_by_no_less(mechanism):
    privacy = UserLevelPrivacy(0.0, 5, 20, clip=0.6, mechanism=mechanism)
    sgd = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    process = build_dp_fed_avg(model_fn, SGD, privacy, server_optimizer=sgd)
    others = [client_of(seed) for seed in range(3)]

    def after(clients):
        return weights(process, process.next(process.initialize(), clients).state)

    def moved(one):
        return 5 * np.linalg.norm(after([*others, one]) - after(others))

    with_much = [client_of(9, examples=400), client(*(1e4 * np.asarray(a) for a in DATA[1]))]
    for one in with_much:
        assert moved(one) == pytest.approx(0.6, rel=1e-4)
    assert 0 < moved(client([[0.1, 0.0]], [[1.0]])) < 0.1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "tolerance, discard, data, warns",
    [
        (1e-9, True, client_of(1), True),
        (1e-9, False, client_of(1), False),
        (1e9, False, NEVER_FINITE, True),
    ],
)
def test_rounds_without_an_accepted_step_are_pointed_out(
    tmp_path, recwarn, tolerance, discard, data, warns
):
    process = build_adaptive_fed_avg(model_fn, build_adadp(tolerance=tolerance, discard=discard))
    sampler = ClientSampler(["one"], EveryClient())
    train(process, lambda name: data, sampler, 2, tmp_path)
    told = [str(w.message) for w in recwarn if "accepted no step in 2 rounds" in str(w.message)]
    assert bool(told) == warns


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", [(np.zeros([4, 3]), np.zeros([4, 1])), {"x": [1.0], "y": [2.0]}])
def test_data_of_another_type_cost_no_round(tmp_path, rows):
    process = build_dp_fed_avg(model_fn, SGD, UserLevelPrivacy(1.0, 1, 1, clip=1.0))
    sampler = ClientSampler(["one"], EveryClient())

    def run(dataset):
        return train(process, lambda name: dataset, sampler, 1, tmp_path)

    wrong = tf.data.Dataset.from_tensor_slices(rows).batch(2)
    with pytest.raises(TypeError, match="`client_data` must give.*'one', expected.*not begun"):
        run(wrong)
    assert run(client(*DATA[0])).ledger.num_releases == 1


@pytest.mark.slow
def test_nothing_without_noise_is_returned_unless_asked_for(noiseless):
    output = noiseless.next(noiseless.initialize(), [client(*DATA[0])])
    assert output.metrics["client_work"] == {"train": {}}
    privacy = UserLevelPrivacy(0.0, 5, 20, clip=0.6)
    talking = build_dp_fed_avg(model_fn, build_adadp(), privacy, client_metrics=True)
    output = talking.next(talking.initialize(), [client(*DATA[0])])
    assert output.metrics["client_work"]["train"]["num_examples"] == 2
    assert "learning_rate_histogram" in output.metrics["client_work"]["optimizer"]
    output = talking.next(output.state, [])
    assert np.isfinite(weights(talking, output.state)).all()


@pytest.mark.slow_after(1)  # the functional model has no metrics to return
def test_no_way_to_compute_a_round_can_return_what_was_not_asked_for(noiseless):
    for way in (noiseless.next.single, noiseless.next.grouped):
        metrics = way.type_signature.result.metrics.member
        assert str(metrics.client_work) == "<train=<>>"


def test_noise_of_a_round_reaches_the_model_with_its_stated_size():
    privacy = UserLevelPrivacy(1.5, 4, 20, clip=2.0)
    model = functional_model(size=20_000)
    sgd = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    process = build_dp_fed_avg(model, SGD, privacy, server_optimizer=sgd)
    output = process.next(process.initialize(), [])
    assert_gaussian(weights(process, output.state), 2.0 * 1.5 / 4)
    ledger = process.new_ledger()
    ledger.record(output.state)
    assert ledger.segments == [(1.5, 4.0, 1)]
    again = process.next(output.state, []).state
    assert_gaussian(weights(process, again) - weights(process, output.state), 2.0 * 1.5 / 4)


@pytest.mark.slow
def test_noise_of_a_tree_cancels_over_the_rounds_of_a_whole_process():
    """As it would not if TFF drew it once for the result and once more for the next state."""
    privacy = UserLevelPrivacy(1.5, 4, 9, clip=2.0, mechanism="tree")
    sgd = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    process = build_dp_fed_avg(functional_model(size=20_000), SGD, privacy, server_optimizer=sgd)
    ledger, state, start = process.new_ledger(), process.initialize(), 0.0
    for variance in (1, 1 / 1.5, 1, 1 / 1.5):
        state = process.next(state, []).state
        ledger.record(state)
        # Since the beginning of the pass, which has two rounds.
        assert_gaussian(weights(process, state) - start, 2.0 * 1.5 / 4 * np.sqrt(variance))
        if variance < 1:
            start = weights(process, state)
    assert ledger.trees == {2: 2}


@pytest.mark.slow
def test_a_tree_that_is_saved_and_loaded_each_round_takes_back_its_noise(
    tmp_path,
):
    """Rounds 3, 5 and 7 leave nodes alone, and those after them need these nodes as they were."""
    privacy = UserLevelPrivacy(1.5, 4, 35, clip=2.0, mechanism="tree")  # 8 rounds per pass
    sgd = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    process = build_dp_fed_avg(functional_model(size=20_000), SGD, privacy, server_optimizer=sgd)
    saved, initial = SavedStates(tmp_path), process.initialize()
    state, start = initial, 0.0
    for number in range(1, 10):
        state = process.next(state, []).state
        saved.save(number, state, {})
        state, _ = SavedStates(tmp_path).load(number, initial)
        rounds = (number - 1) % 8 + 1
        parts = [1 / (2 - 0.5**k) for k in range(4) if rounds >> k & 1]
        assert_gaussian(weights(process, state) - start, 2.0 * 1.5 / 4 * np.sqrt(sum(parts)))
        if rounds == 8:
            start = weights(process, state)


@pytest.mark.slow
def test_preconditioning_the_whole_update_divides_it_before_it_is_clipped():
    privacy = UserLevelPrivacy(0.0, 5, 20, clip=0.6)
    event = dp_accounting.GaussianDpEvent(5.0)
    a = np.array([[4.0], [0.5]])
    preconditioner = ClientPreconditioner.from_arrays([a], provenance=event, description="norms")
    process = build_dp_fed_avg(model_fn, SGD, privacy, preconditioner=preconditioner)
    output = process.next(process.initialize(), [client(x, y) for x, y in DATA])
    average = sum(clipped(0.25 * gradient(x, y) / a, 0.6) for x, y in DATA) / 5
    np.testing.assert_allclose(weights(process, output.state), -average, rtol=1e-5)
    ledger = process.new_ledger()
    assert ledger.other_events == (event,)
    assert "norms, released by GaussianDpEvent" in " ".join(
        privacy_statement(ledger, 1e-3, sampling=ShuffledEpochs(5, steps=1)).split()
    )


@pytest.mark.slow_after(1)
def test_side_information_reaches_the_ledger_from_each_place(noiseless):
    event = dp_accounting.GaussianDpEvent(5.0)
    informed = ClientPreconditioner.from_arrays([None], provenance=event)
    optimizer = build_adadps(informed, SGD)
    for places in ((optimizer, None, SGD), (SGD, informed, SGD), (SGD, None, optimizer)):
        found = _the_one_side_information(*places)
        ledger = PrivateLearningProcess(noiseless, noiseless.privacy, found).new_ledger()
        assert ledger.other_events == (event,)
    assert _the_one_side_information(SGD, None, SGD) is None
    for places in ((optimizer, informed, SGD), (SGD, informed, optimizer)):
        with pytest.raises(ValueError, match="in one of .*'fixed preconditioner', .* with 'fixed"):
            _the_one_side_information(*places)


@pytest.mark.slow
def test_side_information_is_in_one_place_and_in_the_ledger():
    privacy = UserLevelPrivacy(1.0, 5, 20, clip=0.6)
    event = dp_accounting.GaussianDpEvent(5.0)
    preconditioner = ClientPreconditioner.from_arrays([None], provenance=event)
    at_clients = build_adadps(preconditioner, SGD)
    process = build_dp_fed_avg(model_fn, at_clients, privacy)
    assert process.new_ledger().other_events == (event,)
    process = build_dp_fed_avg(model_fn, SGD, privacy, server_optimizer=at_clients)
    assert process.new_ledger().other_events == (event,)
    for places in ({"preconditioner": preconditioner}, {"server_optimizer": at_clients}):
        with pytest.raises(ValueError, match="in one of .* client_optimizer with 'fixed precond"):
            build_dp_fed_avg(model_fn, at_clients, privacy, **places)
    with pytest.raises(ValueError, match="preconditioner with .*, server_optimizer with"):
        build_dp_fed_avg(model_fn, SGD, privacy, at_clients, preconditioner=preconditioner)
    with pytest.raises(TypeError, match="`preconditioner` must be a `ClientPreconditioner`"):
        build_dp_fed_avg(model_fn, SGD, privacy, preconditioner=[2.0])
    for wrong in (tf.keras.optimizers.SGD(1.0), lambda: SGD):
        with pytest.raises(TypeError, match="`server_optimizer` must be a `tff.learning.opt"):
            build_dp_fed_avg(model_fn, SGD, privacy, server_optimizer=wrong)
    with pytest.raises(TypeError, match="`privacy` must be a `UserLevelPrivacy`"):
        build_dp_fed_avg(model_fn, SGD, None)


def test_an_aggregator_without_weights_is_refused_in_words():
    aggregator = UserLevelPrivacy(1.0, 5, 20, clip=0.6).aggregator()
    with pytest.raises(TypeError, match="`model_aggregator` must be .* `build_dp_fed_avg`"):
        build_adaptive_fed_avg(model_fn, model_aggregator=aggregator)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_adaptive_averaging_is_the_mean_of_the_clients_models(weighted):
    """One minibatch a client: ADADP's first half step, of η/2 = 0.05."""
    process = build_adaptive_fed_avg(model_fn, weighted=weighted)
    output = process.next(process.initialize(), [client(x, y) for x, y in DATA])
    share = [2 / 3, 1 / 3] if weighted else [1 / 2, 1 / 2]
    mean = sum(w * -0.05 * gradient(x, y) for w, (x, y) in zip(share, DATA))
    np.testing.assert_allclose(weights(process, output.state), mean, rtol=1e-5)
    for nobody in ([], [NOBODY], [BROKEN]):
        state = process.next(output.state, nobody).state
        np.testing.assert_array_equal(weights(process, state), weights(process, output.state))
    if weighted:
        state = process.initialize()
        for _ in range(8):
            state, metrics = process.next(state, [client_of(k) for k in range(3)])
        assert np.linalg.norm(weights(process, state) - TRUE) < 0.5 * np.linalg.norm(TRUE)
        assert metrics["client_work"]["optimizer"]["clients"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("mechanism, clip", [("gaussian", "adaptive"), ("tree", 0.5)])
def test_private_rounds_learn_and_are_counted(mechanism, clip):
    names = [f"client {k}" for k in range(20)]
    privacy = UserLevelPrivacy(0.2, 8, 20, clip=clip, mechanism=mechanism, initial_clip=0.5)
    process = build_dp_fed_avg(functional_model(), build_adadp(), privacy)
    if mechanism == "gaussian":
        sampler = ClientSampler.poisson(names, privacy, num_rounds=12, key=bytes(32))
    else:
        sampler = ClientSampler(names, ShuffledEpochs(8, steps=12), bytes(32)).checked(privacy)
    ledger, state = process.new_ledger(), process.initialize()
    errors = []
    for step in range(12):
        clients = [client_of(names.index(name)) for name in sampler.cohort(step)]
        state = process.next(state, clients).state
        ledger.record(state)
        errors.append(np.linalg.norm(weights(process, state) - TRUE))
    assert min(errors[6:]) < 0.5 * np.linalg.norm(TRUE), errors
    assert ledger.num_releases == 12
    if mechanism == "gaussian":
        assert ledger.segments == [(0.2, 8.0, 12)]
    else:
        assert ledger.trees == {2: 6}
    assert 0 < epsilon_spent(ledger, 1e-2, sampling=sampler.sampling) < np.inf


@pytest.mark.slow
def test_every_client_in_every_round_can_be_private_too():
    privacy = UserLevelPrivacy(2.0, 3, 3, clip=1.0)
    process = build_dp_fed_avg(functional_model(), build_adadp(), privacy)
    sampler = ClientSampler(["a", "b", "c"], EveryClient()).checked(privacy)
    cohort = [client_of(k) for k, _ in enumerate(sampler.cohort(0))]
    ledger = process.new_ledger()
    ledger.record(process.next(process.initialize(), cohort).state)
    # Without amplification; the tightest accountant is the default.
    expected = dp_accounting.pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(2.0))
    spent = epsilon_spent(ledger, 1e-2, sampling=sampler.sampling)
    assert spent == pytest.approx(expected.get_epsilon(1e-2), rel=1e-3)


@pytest.mark.slow
def test_secure_aggregation_needs_the_context_that_tff_has_for_testing_it(context):
    aggregator = tff.learning.secure_aggregator(zeroing=False, clipping=False)
    secure = build_adaptive_fed_avg(model_fn, SGD, model_aggregator=aggregator)
    plain = build_adaptive_fed_avg(model_fn, SGD)
    clients = [client_of(seed) for seed in range(3)]
    expected = weights(plain, plain.next(plain.initialize(), clients).state)
    state = secure.initialize()
    with pytest.raises(NotImplementedError, match="Leave out `secure_aggregator"):
        secure.next(state, clients)
    ours = tff.framework.get_context_stack().current
    try:
        tff.backends.test.set_sync_test_cpp_execution_context()
        found = weights(secure, secure.next(state, clients).state)
    finally:
        tff.framework.set_default_context(ours)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected).max() > 0.1
