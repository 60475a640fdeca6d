"""Rounds in groups against the same rounds client by client: results, clip, noise and ledger."""

import collections
import os

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp, build_adadps
from federated.clients.preconditioner import ClientPreconditioner
from federated.privacy.client_sampling import PoissonSampling
from federated.privacy.user_epsilon import epsilon_spent
from federated.privacy.user_level import UserLevelPrivacy
from federated.training.grouped import GroupedRounds
from federated.training.processes import build_adaptive_fed_avg, build_dp_fed_avg
from tests.federated.training.test_processes import (
    BROKEN,
    DATA,
    NOBODY,
    SGD,
    client,
    client_of,
    functional_model,
    model_fn,
    weights,
)
from tests.helpers.gaussianity import assert_gaussian

pytestmark = pytest.mark.usefixtures("context")

A = ClientPreconditioner.from_arrays([[[4.0], [0.5]]], provenance="public")
OPTIMIZERS = {
    "sgd": SGD,
    "adadp": build_adadp(),
    "adadps": build_adadps(A, build_adadp(tolerance=0.3, discard=True)),
    "momentum": tff.learning.optimizers.build_sgdm(0.1, momentum=0.9),
}
PRIVACY = {
    "gaussian": {"clip": 0.6},
    "adaptive": {"clip": "adaptive", "initial_clip": 0.6},
    "tree": {"clip": 0.6, "mechanism": "tree"},
    "banded": {"clip": 0.6, "mechanism": "banded", "bands": 3},
}
# Of different sizes, so first and last in their groups: no data, whole and partial batches, an
# update above the clip, one that is NaN at once, and one that overflows.
HUGE = client(np.full([70, 2], 1e30), np.ones([70, 1]), batch_size=10)
COHORT = [
    *(client(x, y) for x, y in DATA),
    NOBODY,
    BROKEN,
    HUGE,
    *(client_of(seed, examples=10 * seed + 5) for seed in range(4)),
]


def private(model, optimizer, mechanism, noise_multiplier=0.0, **kwargs):
    privacy = UserLevelPrivacy(noise_multiplier, 5, 20, **PRIVACY[mechanism])
    return build_dp_fed_avg(model, optimizer, privacy, client_metrics=True, **kwargs)


def in_groups(process, clients_per_group):
    return GroupedRounds(process.next.single, process.next.grouped, clients_per_group)


def assert_same(output, expected):
    tf.nest.assert_same_structure(output.metrics, expected.metrics)
    pairs = [(output.metrics, expected.metrics), (output.state, expected.state)]
    for a, b in [(a, b) for x, y in pairs for a, b in zip(*map(tf.nest.flatten, (x, y)))]:
        assert np.asarray(a).dtype == np.asarray(b).dtype
        if np.asarray(a).dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


def assert_groups_change_nothing(process, cohort=COHORT):
    types = [f.type_signature.result for f in (process.next.grouped, process.next.single)]
    assert types[0].is_equivalent_to(types[1])
    state = start = process.initialize()
    for clients_per_group in (4, 100):
        output = in_groups(process, clients_per_group)(state, cohort)
        expected = process.next.single(start, cohort)
        assert_same(output, expected)
        state, start = output.state, expected.state
    before = process.get_model_weights(process.initialize())
    pairs = zip(process.get_model_weights(state).trainable, before.trainable)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3
    # Their states are of one kind.
    assert_same(process.next(start, []), process.next.single(state, []))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", [functional_model(), model_fn], ids=["functional", "keras"])
@pytest.mark.parametrize(
    "mechanism, optimizer",
    [
        ("adaptive", "adadp"),
        *(("gaussian", name) for name in OPTIMIZERS),
        *(("tree", name) for name in OPTIMIZERS),
        ("banded", "adadp"),
        *(("adaptive", name) for name in OPTIMIZERS if name != "adadp"),
    ],
)
def test_a_private_round_is_the_same_in_groups(model, mechanism, optimizer):
    assert_groups_change_nothing(private(model, OPTIMIZERS[optimizer], mechanism))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", PRIVACY)
def test_a_preconditioner_of_updates_comes_before_each_clip(mechanism):
    process = private(functional_model(), SGD, mechanism, preconditioner=A)
    assert_groups_change_nothing(process)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("weighted", [True, False])
def test_an_adaptive_average_is_the_same_in_groups(optimizer, weighted):
    process = build_adaptive_fed_avg(
        functional_model() if weighted else model_fn, OPTIMIZERS[optimizer], weighted=weighted
    )
    assert_groups_change_nothing(process)
    for nobody in ([NOBODY, BROKEN], [BROKEN]):
        state = process.next(process.initialize(), nobody).state
        np.testing.assert_array_equal(weights(process, state), 0.0)


def test_an_average_of_float64_layers_is_the_same_in_groups():
    def wide_model():
        layer = tf.keras.layers.Dense(1, kernel_initializer="zeros", dtype="float64")
        model = tf.keras.Sequential([tf.keras.Input([2]), layer])
        model.compile(loss="mse")
        return model

    process = build_adaptive_fed_avg(wide_model, SGD, input_spec=COHORT[0].element_spec)
    assert_groups_change_nothing(process, COHORT[:4])


class Counting(tff.learning.models.VariableModel):
    """A model that remembers in a variable of its own what it has seen, and learns from that.

    Args:
      late: Whether the variable is made by the first step.
    """

    def __init__(self, late=False):
        self._inner = model_fn()
        self._seen = None if late else self._new()

    def _new(self):
        return tf.Variable(1.0, trainable=False)

    def forward_pass(self, batch, training=True):
        if self._seen is None:
            self._seen = self._new()
        output = self._inner.forward_pass((self._seen * batch[0], batch[1]), training)
        self._seen.assign_add(tf.reduce_sum(tf.abs(batch[0])))
        return output

    def predict_on_batch(self, x, training=True):
        return self._inner.predict_on_batch(x, training)

    def __getattribute__(self, name):
        own = {"forward_pass", "predict_on_batch", "__class__"}
        own |= {"_inner", "_seen", "_new", "_table", "_generator"}
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)


Counting.__abstractmethods__ = frozenset()


class Tabulating(Counting):
    """Remembers it in a table."""

    def __init__(self, kind):
        self._inner, self._seen = model_fn(), self._new()
        self._table = kind()

    def forward_pass(self, batch, training=True):
        key = tf.constant(1, tf.int64)
        seen = self._table.lookup(key)
        if isinstance(self._table, tf.lookup.experimental.DenseHashTable):
            self._table.insert(key, seen + 1)
        return self._inner.forward_pass((seen * batch[0], batch[1]), training)


def changing_table():
    return tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 1.0, -1, -2)


def constant_table():
    keys, values = tf.constant([1, 2], tf.int64), tf.constant([3.0, 4.0])
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("late", [False, True])
def test_what_a_model_remembers_of_one_client_the_next_one_does_not_see(late):
    process = build_adaptive_fed_avg(lambda: Counting(late), SGD)
    assert_groups_change_nothing(process, COHORT[:2] + COHORT[-2:])


def test_a_client_of_a_model_that_remembers_moves_the_sum_by_the_clip_at_most():
    process = private(lambda: Counting(late=True), SGD, "gaussian")
    others = [client_of(seed) for seed in range(3)]
    large = client(*(1e4 * np.asarray(a) for a in DATA[1]))
    for next_fn in (in_groups(process, 100), process.next.single):
        states = [next_fn(process.initialize(), c).state for c in (others, [large, *others])]
        after = [weights(process, state) for state in states]
        assert 5 * np.linalg.norm(after[0] - after[1]) == pytest.approx(0.6, rel=1e-4)


def test_a_table_that_a_client_could_write_into_is_refused_in_groups():
    with pytest.raises(ValueError, match="`model_fn` must return .*clients_per_group=1.*HashTable"):
        private(lambda: Tabulating(changing_table), SGD, "gaussian")
    private(lambda: Tabulating(changing_table), SGD, "gaussian", clients_per_group=1)


def dropping(seed):
    layers = [
        tf.keras.Input([2]),
        tf.keras.layers.Dropout(0.5, seed=seed),
        tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(3)),
    ]
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(layers),
        tf.keras.losses.MeanSquaredError(),
        input_spec=client_of(0).element_spec,
    )


def test_seeds_that_a_client_would_move_for_others_are_refused_in_groups():
    # The numbers of a seeded kernel go on where another client's stopped.
    with pytest.raises(ValueError, match="without seeds .*clients_per_group=1.*random_uniform"):
        private(lambda: dropping(seed=1), SGD, "gaussian")
    private(lambda: dropping(seed=1), SGD, "gaussian", clients_per_group=1)
    private(lambda: dropping(seed=None), SGD, "gaussian")


class Drawing(Counting):
    """Multiplies its inputs by random numbers of a generator of its own."""

    def __init__(self, generator):
        self._inner, self._generator = model_fn(), generator()

    def forward_pass(self, batch, training=True):
        factor = self._generator.uniform([], 0.5, 1.5)
        return self._inner.forward_pass((factor * batch[0], batch[1]), training)


def test_a_generator_whose_numbers_clients_of_a_group_would_share_is_refused():
    """Its state was drawn once for the group, and reset before each client."""

    def model():
        return Drawing(tf.random.Generator.from_non_deterministic_state)

    with pytest.raises(ValueError, match="not random, apart.*clients_per_group=1.*StateVar:0'"):
        build_adaptive_fed_avg(model, SGD)
    build_adaptive_fed_avg(model, SGD, clients_per_group=1)


def test_a_generator_with_a_seed_is_the_same_in_groups():
    process = build_adaptive_fed_avg(lambda: Drawing(lambda: tf.random.Generator.from_seed(1)), SGD)
    assert_groups_change_nothing(process, COHORT[:2] + COHORT[-2:])


@pytest.mark.slow
def test_a_constant_table_changes_nothing_in_groups():
    process = build_adaptive_fed_avg(lambda: Tabulating(constant_table), SGD)
    assert_groups_change_nothing(process, COHORT[:2] + COHORT[-2:])


@pytest.mark.slow
def test_batches_with_names_and_loose_shapes():
    spec = collections.OrderedDict(y=tf.TensorSpec([None, 1]), x=tf.TensorSpec([None, 2]))

    def named():
        inner = tf.keras.Sequential(
            [tf.keras.Input([2]), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        return tff.learning.models.from_keras_model(
            inner, tf.keras.losses.MeanSquaredError(), input_spec=spec
        )

    process = build_adaptive_fed_avg(named)
    cohort = [client_of(k).map(lambda x, y: collections.OrderedDict(y=y, x=x)) for k in range(1, 4)]
    cohort.append(cohort[0].unbatch().batch(4, drop_remainder=True).shuffle(9, seed=1).repeat(2))
    assert_groups_change_nothing(process, cohort)


@pytest.fixture(scope="module")
def noisy():
    """20,000 weights, a server that takes the average as it is."""
    privacy = UserLevelPrivacy(1.5, 4, 20, clip=2.0)
    sgd = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    return build_dp_fed_avg(functional_model(20_000), SGD, privacy, server_optimizer=sgd)


def wide(scale, examples=1):
    x = np.zeros([examples, 20_000], np.float32)
    x[:, 7] = scale
    return client(x, np.ones([examples, 1]), batch_size=1)


def test_noise_is_added_once_whatever_the_number_of_groups(noisy):
    nobody = wide(1.0, examples=0)
    found = []
    for number, clients_per_group in [(6, 2), (6, 3), (6, 100)]:
        output = in_groups(noisy, clients_per_group)(noisy.initialize(), [nobody] * number)
        found.append(weights(noisy, output.state))
        assert_gaussian(found[-1], 2.0 * 1.5 / 4)
        # Each round counts one cohort, with what was really added.
        ledger, single = noisy.new_ledger(), noisy.new_ledger()
        ledger.record(output.state)
        single.record(noisy.next.single(noisy.initialize(), [nobody] * number).state)
        assert ledger.to_dict() == single.to_dict()
        assert ledger.segments == [(1.5, 4.0, 1)]
    assert np.abs(np.corrcoef([np.ravel(f) for f in found])[0, 1]) < 0.05
    sampling = PoissonSampling(4 / 20, 21, steps=1)
    spent = [epsilon_spent(of, 1e-3, sampling=sampling) for of in (ledger, single)]
    assert spent[0] == spent[1] > 0


@pytest.fixture(scope="module")
def noiseless():
    return private(model_fn, SGD, "gaussian")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("clients_per_group", [100, 2])
def test_each_client_of_a_group_moves_the_sum_by_the_clip_at_most(noiseless, clients_per_group):
    process, next_fn = noiseless, in_groups(noiseless, clients_per_group)
    others = [client_of(seed) for seed in range(3)]

    def after(clients):
        return weights(process, next_fn(process.initialize(), clients).state)

    def moved(*more):
        return 5 * np.linalg.norm(after([*others, *more]) - after(others))

    large = client(*(1e4 * np.asarray(a) for a in DATA[1]))
    assert moved(large) == pytest.approx(0.6, rel=1e-4)
    # Two clients with the same update: each is clipped, not their sum.
    assert moved(large, large) == pytest.approx(1.2, rel=1e-4)
    assert moved(HUGE) == moved(BROKEN) == moved(NOBODY) == 0


def test_data_travel_in_files_of_this_machine_or_in_messages(noiseless, context, monkeypatch):
    opened = len(os.listdir("/proc/self/fd"))
    found = []
    for reads_own_files in (True, False):
        monkeypatch.setattr(context, "reads_own_files", reads_own_files)
        output = in_groups(noiseless, 2)(noiseless.initialize(), COHORT)
        found.append(weights(noiseless, output.state))
        assert len(os.listdir("/proc/self/fd")) <= opened + 1  # of a connection, perhaps
    np.testing.assert_array_equal(*found)
    assert found[0].any()


def test_lists_of_batches_and_wrong_data(noiseless):
    process = noiseless
    x, y = (np.asarray(a, np.float32) for a in DATA[0])
    listed = process.next(process.initialize(), [[(x, y)]])
    state = process.next(process.initialize(), [client(x, y)]).state
    np.testing.assert_allclose(weights(process, listed.state), weights(process, state))
    with pytest.raises(tff.types.TypeNotAssignableError):
        process.next(process.initialize(), [client_of(1), wide(1.0)])

    @tff.federated_computation(*process.next.type_signature.parameter)
    def within(state, client_data):
        return process.next(state, client_data)

    inside = within(process.initialize(), [client(x, y)])
    np.testing.assert_allclose(weights(process, inside.state), weights(process, state))


def test_groups_are_refused_where_single_clients_may_matter():
    weights_type = tff.types.tensorflow_to_type(
        tff.learning.models.ModelWeights((tf.TensorSpec([2, 1]),), ())
    )
    broadcast = tff.learning.templates.build_broadcast_process(weights_type)
    summed = tff.aggregators.MeanFactory(tff.aggregators.SecureSumFactory(1.0))
    sample = tff.learning.metrics.finalize_then_sample
    given = {
        "model_aggregator": summed,
        "model_distributor": broadcast,
        "metrics_aggregator": sample,
    }
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"`clients_per_group` must be 1.*`{name}` of your"):
            build_adaptive_fed_avg(model_fn, clients_per_group=2, **{name: value})
    with pytest.raises(ValueError, match="`clients_per_group` must be 1.*`metrics_aggregator`"):
        private(model_fn, SGD, "gaussian", clients_per_group=2, metrics_aggregator=sample)
    for wrong in (0, 2.5, "all"):
        with pytest.raises((TypeError, ValueError), match="`clients_per_group` must be"):
            build_adaptive_fed_avg(model_fn, clients_per_group=wrong)
    process = build_adaptive_fed_avg(functional_model(), metrics_aggregator=sample)
    assert not isinstance(process.next, GroupedRounds)
