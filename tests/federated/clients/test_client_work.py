"""The work of clients: against TFF's own, NumPy, and clients that have nothing or break."""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import federated
import tf_adaptive_dp
from federated.clients import client_work
from federated.clients.client_optimizers import build_adadp, build_adadps
from federated.clients.client_work import build_client_work
from federated.clients.preconditioner import ClientPreconditioner
from federated.training.group_data import serialized_client
from tests.helpers.client_updates import linear_data, linear_gradient, numpy_adadp

SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
BY_EXAMPLES = tff.learning.ClientWeighting.NUM_EXAMPLES
UNIFORM = tff.learning.ClientWeighting.UNIFORM
ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
ADADP = {"learning_rate": 0.4, "tolerance": 0.3}
OF_THE_PAPER = {**ADADP, "discard": True}
START = np.array([1.0, 1.0, 1.0, 0.0])


pytestmark = pytest.mark.usefixtures("context")


def keras_model():
    return tf.keras.Sequential(
        [tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")]
    )


def model_fn():
    return tff.learning.models.from_keras_model(
        keras_model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=SPEC,
        metrics=[tf.keras.metrics.MeanAbsoluteError("distance")],
    )


def functional_model():
    return tff.learning.models.functional_model_from_keras(
        keras_model,
        tf.keras.losses.MeanSquaredError(),
        SPEC,
        lambda: collections.OrderedDict(distance=tf.keras.metrics.MeanAbsoluteError()),
    )


def datasets(*clients):
    """Client data that a computation can take: batches have equal sizes, or there are none."""
    made = []
    for batches in clients:
        size = len(batches[0][0]) if batches else 1
        x = np.concatenate([b[0] for b in batches] or [np.zeros((0, 3), np.float32)])
        y = np.concatenate([b[1] for b in batches] or [np.zeros((0, 1), np.float32)])
        made.append(tf.data.Dataset.from_tensor_slices((x, y)).batch(size))
    return made


def averaging(model, work):
    """Federated averaging with our client work, the server adding the mean of the updates."""
    functional = isinstance(model, tff.learning.models.FunctionalModel)

    @tff.tensorflow.computation
    def initial_weights():
        if not functional:
            return tff.learning.models.ModelWeights.from_model(model())
        trainable, rest = model.initial_weights
        return tff.learning.models.ModelWeights(
            tuple(map(tf.convert_to_tensor, trainable)), tuple(map(tf.convert_to_tensor, rest))
        )

    weights_type = initial_weights.type_signature.result
    return tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        work,
        tff.aggregators.MeanFactory().create(weights_type.trainable, tff.TensorType(np.float32)),
        tff.learning.templates.build_apply_optimizer_finalizer(
            tff.learning.optimizers.build_sgdm(1.0), weights_type
        ),
    )


def flat(state):
    kernel, bias = state.global_model_weights.trainable
    return np.append(kernel, bias)


def clients_of(*num_batches, batch_size=4):
    return [linear_data(n, batch_size, seed=k) for k, n in enumerate(num_batches)]


CLIENTS = clients_of(8, 12, 5)


def with_nan(batches, which):
    batches = [(x.copy(), y) for x, y in batches]
    batches[which][0][0, 0] = np.nan
    return batches


def expected_round(clients, **arguments):
    """The mean of NumPy's client updates by number of examples, and what each client tells."""
    ends, told, sizes = [], [], []
    for batches in clients:
        gradients = [linear_gradient(b) for b in batches]
        eta = arguments["learning_rate"]
        rest = {name: value for name, value in arguments.items() if name != "learning_rate"}
        points, report = numpy_adadp(START, gradients, eta, **rest)
        ends.append(points[-1])
        told.append(report)
        sizes.append(sum(len(x) for x, _ in batches))
    return np.average(ends, axis=0, weights=sizes), told


def assert_reported(measured, told):
    logs = np.log10([t["eta"] for t in told])
    assert measured["clients"] == len(told)
    assert measured["log10_learning_rate_mean"] == pytest.approx(logs.mean(), abs=1e-5)
    assert measured["log10_learning_rate_stddev"] == pytest.approx(logs.std(), abs=1e-5)
    edges = [-np.inf, *np.log10(client_work.LEARNING_RATE_EDGES), np.inf]
    np.testing.assert_array_equal(measured["learning_rate_histogram"], np.histogram(logs, edges)[0])
    share = sum(t["discarded"] for t in told) / sum(t["judged"] for t in told)
    assert measured["discarded_share"] == pytest.approx(share)


@pytest.fixture(scope="module")
def adadp():
    work = build_client_work(model_fn, build_adadp(**ADADP), BY_EXAMPLES)
    return averaging(model_fn, work)


@pytest.fixture(scope="module")
def functional_adadp():
    model = functional_model()
    return averaging(model, build_client_work(model, build_adadp(**ADADP), BY_EXAMPLES))


@pytest.fixture(scope="module")
def sgd():
    optimizer = tff.learning.optimizers.build_sgdm(0.05)
    return averaging(model_fn, build_client_work(model_fn, optimizer, BY_EXAMPLES))


@pytest.mark.parametrize("arguments", [ADADP, OF_THE_PAPER], ids=["default", "paper"])
def test_a_round_is_that_of_numpy_and_so_are_its_measurements(adadp, arguments):
    if arguments is OF_THE_PAPER:
        work = build_client_work(model_fn, build_adadp(**arguments), BY_EXAMPLES)
        adadp = averaging(model_fn, work)
    output = adadp.next(adadp.initialize(), datasets(*CLIENTS))
    weights, told = expected_round(CLIENTS, **arguments)
    assert (sum(t["discarded"] for t in told) > 0) == (arguments is OF_THE_PAPER)
    assert max(error for t in told for error in t["errors"]) > arguments["tolerance"]
    assert len({t["eta"] for t in told}) == 3
    np.testing.assert_allclose(flat(output.state), weights, rtol=1e-4, atol=1e-5)
    assert_reported(output.metrics["client_work"]["optimizer"], told)


@pytest.mark.slow
def test_a_functional_model_does_the_same(adadp, functional_adadp):
    outputs = [p.next(p.initialize(), datasets(*CLIENTS)) for p in (adadp, functional_adadp)]
    np.testing.assert_allclose(*(flat(o.state) for o in outputs), rtol=1e-5)
    ours, theirs = (o.metrics["client_work"] for o in outputs)
    assert ours["train"]["distance"] == pytest.approx(theirs["train"]["distance"])
    for key, value in ours["optimizer"].items():
        np.testing.assert_allclose(value, theirs["optimizer"][key], rtol=1e-5)


def test_clients_begin_each_round_with_the_same_learning_rate_and_a_smaller_tolerance(adadp):
    first = adadp.next(adadp.initialize(), datasets(*CLIENTS))
    before, after = (
        adadp.get_hparams(state)["client_work"] for state in (adadp.initialize(), first.state)
    )
    assert after.pop("tolerance") == pytest.approx(before.pop("tolerance") / np.sqrt(2))
    assert after == before
    # It is the tolerance that the next round uses.
    second = adadp.next(first.state, datasets(*CLIENTS)).state
    hparams = adadp.get_hparams(first.state)
    hparams["client_work"]["tolerance"] = 0.3
    same = adadp.set_hparams(first.state, hparams)
    assert np.abs(flat(adadp.next(same, datasets(*CLIENTS)).state) - flat(second)).max() > 1e-3


def test_hyperparameters_of_the_state_reach_the_clients(adadp, functional_adadp):
    for process in (adadp, functional_adadp):
        state = process.initialize()
        hparams = process.get_hparams(state)
        assert hparams["client_work"]["learning_rate"] == pytest.approx(0.4)
        hparams["client_work"]["learning_rate"] = 0.05
        output = process.next(process.set_hparams(state, hparams), datasets(*CLIENTS))
        weights, told = expected_round(CLIENTS, learning_rate=0.05, tolerance=0.3)
        np.testing.assert_allclose(flat(output.state), weights, rtol=1e-4, atol=1e-5)
        assert_reported(output.metrics["client_work"]["optimizer"], told)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["variables", "functional"])
def test_a_round_without_clients_changes_nothing(adadp, functional_adadp, kind):
    process = adadp if kind == "variables" else functional_adadp
    output = process.next(process.initialize(), [])
    np.testing.assert_array_equal(flat(output.state), START)
    measured = output.metrics["client_work"]["optimizer"]
    assert measured["clients"] == 0 and measured["learning_rate_histogram"].sum() == 0
    for key in ("log10_learning_rate_mean", "log10_learning_rate_stddev", "discarded_share"):
        assert np.isnan(measured[key])
    after = process.next(output.state, datasets(*CLIENTS))
    assert np.isfinite(flat(after.state)).all()


@pytest.mark.parametrize("kind", ["variables", "functional"])
def test_a_client_without_data_counts_nowhere(adadp, functional_adadp, kind):
    process = adadp if kind == "variables" else functional_adadp
    output = process.next(process.initialize(), datasets(*CLIENTS, []))
    weights, told = expected_round(CLIENTS, **ADADP)
    np.testing.assert_allclose(flat(output.state), weights, rtol=1e-4, atol=1e-5)
    assert_reported(output.metrics["client_work"]["optimizer"], told)


def test_a_client_of_one_minibatch_moves_but_judged_no_step(adadp):
    clients = clients_of(8, 1)
    output = adadp.next(adadp.initialize(), datasets(*clients))
    weights, told = expected_round(clients, **ADADP)
    np.testing.assert_allclose(flat(output.state), weights, rtol=1e-4, atol=1e-5)
    assert_reported(output.metrics["client_work"]["optimizer"], told[:1])


@pytest.mark.parametrize("kind", ["variables", "functional"])
def test_a_client_whose_update_is_not_finite_counts_nowhere(adadp, functional_adadp, kind):
    process = adadp if kind == "variables" else functional_adadp
    # The last minibatch has no partner that could have the step discarded.
    output = process.next(process.initialize(), datasets(*CLIENTS, with_nan(CLIENTS[2], -1)))
    without = process.next(process.initialize(), datasets(*CLIENTS))
    np.testing.assert_array_equal(flat(output.state), flat(without.state))
    for part in ("train", "optimizer"):
        for key, value in output.metrics["client_work"][part].items():
            np.testing.assert_allclose(value, without.metrics["client_work"][part][key])


def test_a_discarded_step_keeps_a_client_with_nan_finite(adadp):
    clients = [CLIENTS[0], with_nan(CLIENTS[1], 3)]
    output = adadp.next(adadp.initialize(), datasets(*clients))
    weights, told = expected_round(clients, **ADADP)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(flat(output.state), weights, rtol=1e-4, atol=1e-5)
    assert_reported(output.metrics["client_work"]["optimizer"], told)
    assert np.isnan(output.metrics["client_work"]["train"]["loss"])


def test_only_clients_that_are_not_finite_change_nothing(sgd):
    output = sgd.next(sgd.initialize(), datasets(with_nan(CLIENTS[0], 0)))
    np.testing.assert_array_equal(flat(output.state), START)
    assert output.metrics["client_work"]["train"]["num_examples"] == 0
    assert "optimizer" not in output.metrics["client_work"]


@pytest.mark.slow
@pytest.mark.parametrize("kind, weighting", [("variables", BY_EXAMPLES), ("functional", UNIFORM)])
def test_with_sgd_a_round_is_that_of_tff(kind, weighting):
    model = model_fn if kind == "variables" else functional_model()
    optimizer = tff.learning.optimizers.build_sgdm(0.05, momentum=0.9)
    theirs = tff.learning.algorithms.build_weighted_fed_avg(
        model, optimizer, client_weighting=weighting
    )
    ours = averaging(model, build_client_work(model, optimizer, weighting))
    clients = datasets(*CLIENTS, with_nan(CLIENTS[0], 2), [])
    states = [p.initialize() for p in (ours, theirs)]
    for _ in range(2):
        outputs = [p.next(s, clients) for p, s in zip((ours, theirs), states)]
        states = [o.state for o in outputs]
        np.testing.assert_array_equal(*(flat(s) for s in states))
        a, b = (o.metrics["client_work"]["train"] for o in outputs)
        assert dict(a) == dict(b)
    assert np.abs(flat(states[0]) - START).max() > 0.1


@pytest.mark.slow
def test_adadp_is_a_client_optimizer_for_tff_as_well(adadp):
    process = tff.learning.algorithms.build_weighted_fed_avg(model_fn, build_adadp(**ADADP))
    outputs = [p.next(p.initialize(), datasets(*CLIENTS)) for p in (process, adadp)]
    np.testing.assert_array_equal(*(flat(o.state) for o in outputs))


@pytest.mark.slow
def test_adadps_around_adadp_with_the_other_loop():
    scale = np.array([[0.5], [2.0], [1.0]])
    preconditioner = ClientPreconditioner.from_arrays([scale, None], provenance="public")
    optimizer = build_adadps(preconditioner, build_adadp(**ADADP))
    work = build_client_work(model_fn, optimizer, BY_EXAMPLES, loop_implementation=ITERATOR)
    process = averaging(model_fn, work)
    output = process.next(process.initialize(), datasets(CLIENTS[0]))
    a = np.append(scale, 1.0)
    points, told = numpy_adadp(
        START, [lambda w, b=b: linear_gradient(b)(w) / a for b in CLIENTS[0]], 0.4, 0.3
    )
    np.testing.assert_allclose(flat(output.state), points[-1], rtol=1e-4, atol=1e-5)
    assert_reported(output.metrics["client_work"]["optimizer"], [told])


def test_an_optimizer_without_hyperparameters_and_metrics_of_ones_own():
    seen = []

    def aggregator(finalizers):
        seen.append(finalizers)
        return tff.learning.metrics.sum_then_finalize(finalizers)

    optimizer = tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(), lambda k: tf.where(k < 1, 0.1, 0.0)
    )
    process = averaging(
        model_fn, build_client_work(model_fn, optimizer, UNIFORM, metrics_aggregator=aggregator)
    )
    assert len(seen) == 1
    output = process.next(process.initialize(), datasets(CLIENTS[0]))
    expected = START - 0.1 * linear_gradient(CLIENTS[0][0])(START)
    np.testing.assert_allclose(flat(output.state), expected, rtol=1e-5)


def test_reports_are_summed_in_the_right_buckets():
    rates = [1e-9, 0.1, 0.3, 0.4, 1e5, 0.1, np.inf, 0.2]
    judged = [1, 2, 3, 4, 5, 0, 6, 7]
    counts = [True] * 7 + [False]
    contributions = [
        client_work.contribution(
            {"learning_rate": r, "judged_steps": tf.constant(float(j)), "discarded_steps": 1.0},
            tf.constant(c),
        )
        for r, j, c in zip(rates, judged, counts)
    ]
    measured = client_work.summary(tf.nest.map_structure(lambda *t: sum(t), *contributions))
    assert measured["clients"] == 5
    expected = np.zeros(18)
    # 1e-6 begins bucket 1, 0.1 = 1e-6 · √10^10 bucket 11, √0.1 bucket 12.
    expected[[0, 11, 12, 17]] = [1, 2, 1, 1]
    np.testing.assert_array_equal(measured["learning_rate_histogram"], expected)
    logs = np.log10(rates[:5])
    np.testing.assert_allclose(measured["log10_learning_rate_mean"], logs.mean(), rtol=1e-6)
    np.testing.assert_allclose(measured["log10_learning_rate_stddev"], logs.std(), rtol=1e-6)
    assert float(measured["discarded_share"]) == pytest.approx(5 / 15)


@pytest.mark.parametrize(
    "optimizer, cure",
    [
        (tf_adaptive_dp.ADADP(1.0, 1.0), r"client_optimizer=federated.build_adadp\(\)"),
        (tf_adaptive_dp.ADADP, r"client_optimizer=federated.build_adadp\(\)"),
        (tf.keras.optimizers.Adam(), r"client_optimizer=tff.learning.optimizers.build_adam\("),
        (tf.keras.optimizers.Nadam(), r"client_optimizer=tff.learning.optimizers.build_sgdm\("),
    ],
)
def test_an_optimizer_of_keras_is_told_its_counterpart(optimizer, cure):
    with pytest.raises(TypeError, match=f"`client_optimizer` must be.*Write: {cure}.*Received"):
        build_client_work(model_fn, optimizer, UNIFORM)
    line = cure.partition("=")[2].partition("\\")[0]
    assert callable(eval(line, {"tff": tff, "federated": federated}))


def test_a_model_of_keras_is_told_how_to_be_wrapped():
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    sgd = tff.learning.optimizers.build_sgdm(0.1)
    for wrong in (model, lambda: model):
        with pytest.raises(TypeError, match=r"`model_fn` must.*from_keras_model\(.*Received"):
            build_client_work(wrong, sgd, UNIFORM)
    with pytest.raises(TypeError, match="`model_fn` must.*which returned 7"):
        build_client_work(lambda: 7, sgd, UNIFORM)


def test_arguments_of_other_types_are_refused():
    sgd = tff.learning.optimizers.build_sgdm(0.1)
    with pytest.raises(TypeError, match="`model_fn` must be"):
        build_client_work(None, sgd, UNIFORM)
    with pytest.raises(TypeError, match="`client_optimizer` must be a `tff.learning.opt"):
        build_client_work(model_fn, tf.keras.optimizers.SGD, UNIFORM)
    with pytest.raises(TypeError, match="the optimizer itself, not a function.*Received"):
        build_client_work(model_fn, lambda: sgd, UNIFORM)
    with pytest.raises(TypeError, match="`weighting` must be"):
        build_client_work(model_fn, sgd, "uniform")
    with pytest.raises(TypeError, match="`loop_implementation` must be"):
        build_client_work(model_fn, sgd, UNIFORM, loop_implementation="reduce")


ROWS = np.arange(21, dtype=np.float32).reshape(7, 3)
PAIRS = tf.data.Dataset.from_tensor_slices((ROWS, np.arange(7)))
LOOPS = {
    "whole and partial batches": PAIRS.batch(3),
    "batches of a static size": PAIRS.batch(3, drop_remainder=True),
    "an unknown number": PAIRS.batch(3).filter(lambda x, y: tf.reduce_sum(y) != 12),
    "fewer than its cardinality says": (
        PAIRS.map(lambda x, y: (tf.debugging.check_numerics(x / tf.cast(y, tf.float32), "0"), y))
        .ignore_errors()
        .batch(3)
    ),
    "several passes": PAIRS.shuffle(7, 3, reshuffle_each_iteration=False).repeat(2).batch(4),
    "empty batches": PAIRS.batch(3).map(lambda x, y: (x[:0], y[:0])),
    "no batch": PAIRS.take(0).batch(3),
    "a mapping of scalars and text": PAIRS.map(
        lambda x, y: {"y": y, "x": (x[0], tf.strings.as_string(y))}
    ),
    "shapes that are not known": tf.data.Dataset.from_generator(
        lambda: iter([(ROWS, 1), (ROWS[0], 2)]),
        output_signature=(tf.TensorSpec(None), tf.TensorSpec([], tf.int64)),
    ),
    "ragged": PAIRS.map(lambda x, y: (x[: y % 3], y)).ragged_batch(3),
    "sparse": PAIRS.batch(3).map(lambda x, y: (tf.sparse.from_dense(x), y)),
}


@pytest.mark.parametrize("data", LOOPS.values(), ids=LOOPS)
def test_each_batch_gets_the_step_of_its_place_once_and_in_order(data):
    def described(batch):
        parts = [getattr(part, "values", part) for part in tf.nest.flatten(batch)]
        texts = [p if p.dtype == tf.string else tf.strings.as_string(p) for p in parts]
        flat = tf.concat([tf.reshape(text, [-1]) for text in texts], axis=0)
        return tf.strings.reduce_join(flat, separator=" ")

    def step(place, state, batch):
        seen, count = state
        return tf.strings.join([seen, described(batch), place]), count + 1

    expected = [described(batch).numpy() for batch in data]
    in_thread = [None, 0]
    if serialized_client(data).in_thread:
        in_thread += [min(1, len(expected)), len(expected)]
    for number, in_turn in itertools.product(in_thread, ["0", "01", "012"]):
        steps = client_work.Steps(
            functools.partial(step, "?"), [functools.partial(step, place) for place in in_turn]
        )
        start = (tf.constant(""), 0)
        seen, count = tf.function(client_work.iterate)(data, start, steps, number)
        whole = len(expected) // len(in_turn)
        places = in_turn * whole + "?" * (len(expected) % len(in_turn))
        assert seen.numpy().decode() == "".join(b.decode() + p for b, p in zip(expected, places))
        assert count == len(expected)
