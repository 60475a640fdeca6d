"""Client optimizers: against the Keras optimizers, NumPy, and what they promise."""

import collections
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_adaptive_dp as dp
from federated.clients.client_optimizers import LEARNING_RATE, TOLERANCE, build_adadp, build_adadps
from federated.clients.preconditioner import ClientPreconditioner
from federated.privacy.side_information import SideInformation
from tests.helpers.client_updates import linear_data, linear_gradient, numpy_adadp
from tf_adaptive_dp.side_information.provenance import events

# A network of 3-4-1 with tanh; sizes of gradients differ between the variables.
RNG = np.random.default_rng(3)
START = [RNG.normal(size=shape).astype(np.float32) for shape in [(3, 4), (4,), (4, 1), (1,)]]
NAMES = ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]
BATCHES = [
    (RNG.normal(size=(6, 3)).astype(np.float32), RNG.normal(size=(6, 1)).astype(np.float32))
    for _ in range(16)
]
A = {
    "hidden/kernel": [[0.25], [1.0], [4.0]],
    "out/kernel": RNG.uniform(0.5, 2, size=(4, 1)).tolist(),
}
FIXED = dp.side_information.FixedPreconditioner(A, provenance="public")
NO_PRIVACY = {"l2_norm_clip": 1e9, "noise_multiplier": 0.0}


def losses(weights, batch):
    x, y = batch
    kernel, bias, out_kernel, out_bias = weights
    hidden = tf.tanh(tf.matmul(x, kernel) + bias)
    return tf.reduce_sum((tf.matmul(hidden, out_kernel) + out_bias - y) ** 2, axis=1)


def keras_run(optimizer):
    """All points, and η after each minibatch."""
    weights = [tf.Variable(w, name=name) for w, name in zip(START, NAMES)]
    points, rates = [], []

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = losses(weights, (x, y))
        optimizer.minimize(loss, weights, tape)

    optimizer.build(weights)
    for x, y in BATCHES:
        step(tf.constant(x), tf.constant(y))
        points.append([w.numpy() for w in weights])
        rates.append(float(optimizer.learning_rate.numpy()))
    return points, rates


def client_run(optimizer, batches=None, in_turn=False):
    """All points and states."""
    weights = tuple(tf.constant(w) for w in START)
    functions = optimizer.next_in_turn if in_turn else (optimizer.next,)
    state = optimizer.initialize(tuple(tf.TensorSpec(w.shape, w.dtype) for w in START))
    points, states = [], []
    for k, batch in enumerate(BATCHES if batches is None else batches):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(losses(weights, batch))
        next_weights = functions[k % len(functions)]
        state, weights = next_weights(state, weights, tape.gradient(loss, weights))
        points.append([w.numpy() for w in weights])
        states.append(state)
    return points, states


def assert_same_points(actual, expected, rtol=2e-5, atol=2e-6):
    assert len(actual) == len(expected)
    for step, (ours, theirs) in enumerate(zip(actual, expected)):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"minibatch {step}")


def bound(side_information=FIXED):
    specs = [tf.TensorSpec(w.shape, w.dtype, name) for w, name in zip(START, NAMES)]
    return ClientPreconditioner.from_side_information(side_information, specs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("keep", ["half_steps", "euler"])
@pytest.mark.parametrize("discard", [True, False])
def test_adadp_is_the_keras_optimizer_without_clipping_and_noise(discard, keep):
    arguments = {"learning_rate": 0.35, "tolerance": 0.2, "discard": discard, "keep": keep}
    paper = {"tolerance_decay": 0.0, "initial_factor": 1.0}
    keras = dp.ADADP(**NO_PRIVACY, **paper, **arguments)
    points, rates = keras_run(keras)
    client = build_adadp(**arguments, shorten=False)
    client_points, states = client_run(client)
    assert_same_points(client_points, points)
    np.testing.assert_allclose([s[LEARNING_RATE] for s in states], rates, rtol=1e-5)
    report = client.report(states[-1])
    assert report["judged_steps"] == 8
    above = round(8 * (1 - keras.acceptance))
    assert 1 <= above <= 7  # both branches were taken
    assert report["discarded_steps"] == (above if discard else 0)


@pytest.mark.parametrize("broken", [None, 4, 7])
@pytest.mark.parametrize(
    "make",
    [
        build_adadp,
        lambda: build_adadp(1.0, 0.1, discard=True, tolerance_decay=0),
        lambda: build_adadp(0.35, keep="euler", shorten=False),
        lambda: build_adadps(bound(), build_adadp(2.0, 0.05)),
    ],
    ids=["defaults", "paper", "euler", "AdaDPS"],
)
def test_in_turn_it_makes_the_same_steps(make, broken):
    batches = list(BATCHES)
    if broken is not None:
        batches[broken] = (np.full([6, 3], np.inf, np.float32), BATCHES[broken][1])
    points, states = client_run(make(), batches)
    in_turn, states_in_turn = client_run(make(), batches, in_turn=True)
    before = broken or len(batches)  # what it was at the broken one is not finite
    assert_same_points(in_turn[:before], points[:before])
    assert_same_points(in_turn[9:], points[9:])
    for state, expected in zip(states_in_turn[1::2], states[1::2]):
        tf.nest.assert_same_structure(state, expected)
        ours, theirs = make().report(state), make().report(expected)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)


def test_a_model_without_weights_takes_no_step():
    optimizer = build_adadp()
    for functions in ((optimizer.next,) * 2, optimizer.next_in_turn):
        state = optimizer.initialize([])
        for next_weights in functions:
            state, weights = next_weights(state, [], [])
        assert weights == [] and optimizer.report(state)["discarded_steps"] == 0
        tf.nest.assert_same_structure(state, optimizer.initialize([]))


ABOVE = {
    "discarded": {"discard": True},
    "shortened": {"discard": False, "shorten": True},
    "taken": {"discard": False, "shorten": False},
}


@pytest.mark.parametrize("keep", ["half_steps", "euler"])
@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("num_batches", [12, 13])
def test_adadp_is_algorithm_1(num_batches, above, keep):
    batches = linear_data(num_batches, 4, seed=1)
    gradients = [linear_gradient(batch) for batch in batches]
    arguments = {"tolerance": 0.5, "alpha_min": 0.8, "alpha_max": 1.2, **ABOVE[above]}
    expected, told = numpy_adadp(np.zeros(4), gradients, eta=0.4, keep=keep, **arguments)
    optimizer = build_adadp(learning_rate=0.4, keep=keep, **arguments)
    w = tf.zeros([4])
    state = optimizer.initialize(tf.TensorSpec([4]))
    for gradient, point in zip(gradients, expected):
        state, w = optimizer.next(state, w, tf.constant(gradient(w.numpy()), tf.float32))
        np.testing.assert_allclose(w, point, rtol=1e-4, atol=1e-5)
    report = optimizer.report(state)
    np.testing.assert_allclose(report["learning_rate"], told["eta"], rtol=1e-4)
    assert report["judged_steps"] == told["judged"] == 6
    assert report["discarded_steps"] == told["discarded"]
    assert (told["discarded"] > 0) == (above == "discarded")
    assert min(told["errors"]) < 0.5 < max(told["errors"])


def test_the_defaults_shorten_and_those_of_the_paper_discard():
    gradients = [lambda theta, k=k: np.full(4, -1.5 * (k % 3)) for k in range(12)]
    for arguments in ({}, {"tolerance": 0.1, "discard": True}):  # within one round
        expected, told = numpy_adadp(np.zeros(4), gradients, **arguments)
        optimizer = build_adadp(**arguments)
        state, w = optimizer.initialize(tf.TensorSpec([4])), tf.zeros([4])
        for gradient, point in zip(gradients, expected):
            state, w = optimizer.next(state, w, tf.constant(gradient(0), tf.float32))
            np.testing.assert_allclose(w, point, rtol=1e-5)
        assert optimizer.report(state)["discarded_steps"] == told["discarded"]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    curvature=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4),
    eta=st.floats(1e-3, 1e4),
    tolerance=st.floats(1e-3, 1e2),
    broken=st.sampled_from([None, np.nan, np.inf, 1e38]),
)
def test_discard_never_moves_on_an_error_above_the_tolerance(curvature, eta, tolerance, broken):
    size = len(curvature)
    curvature = tf.constant(curvature, tf.float32)
    optimizer = build_adadp(learning_rate=eta, tolerance=tolerance, discard=True)
    w = tf.ones([size])
    state = optimizer.initialize(tf.TensorSpec([size]))
    for step in range(8):
        gradient = curvature * w * (1.0 + 0.3 * step)
        if step == 5 and broken is not None:
            gradient = gradient + broken
        before, point = state, w.numpy()
        if step % 2 == 0:
            start = point
        half = (w - tf.cast(state[LEARNING_RATE] / 2, tf.float32) * gradient).numpy()
        state, w = optimizer.next(state, w, gradient)
        if step % 2 == 0:
            continue
        with np.errstate(all="ignore"):
            euler = start - 2 * (start - point)
            distance = (half - euler) / np.clip(np.abs(half), 1, 2.0**120)
            error = np.sqrt(np.sum(np.square(distance.astype(np.float64))))
        if np.isnan(error) or error > tolerance * (1 + 1e-4):
            np.testing.assert_array_equal(w, start)
            assert state[LEARNING_RATE] < before[LEARNING_RATE]
            assert state["discarded"] == before["discarded"] + 1
        elif error < tolerance * (1 - 1e-4):
            np.testing.assert_array_equal(w, half)
            assert state["discarded"] == before["discarded"]
        assert np.isfinite(w).all() and np.isfinite(state[LEARNING_RATE])


@settings(max_examples=30)
@given(
    eta=st.floats(1e-3, 1e6),
    tolerance=st.floats(1e-3, 1e2),
    gradients=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2),
)
def test_a_step_that_is_shortened_keeps_its_direction_and_has_the_error_of_the_tolerance(
    eta, tolerance, gradients
):
    first, second = (np.array([1.0, 0.5]) * g for g in gradients)
    optimizer = build_adadp(learning_rate=eta, tolerance=tolerance)
    state, w = optimizer.initialize(tf.TensorSpec([2])), tf.zeros([2])
    for gradient in (first, second):
        state, w = optimizer.next(state, w, tf.constant(gradient, tf.float32))
    whole = -eta / 2 * (first + second)
    difference = eta / 2 * (first - second)
    error = np.linalg.norm(difference / np.maximum(1, np.abs(whole)))
    share = min(1.0, tolerance / error) if error else 1.0
    np.testing.assert_allclose(w, share * whole, rtol=1e-3, atol=1e-5 * tolerance)
    assert share * error <= tolerance * (1 + 1e-6)
    assert optimizer.report(state)["discarded_steps"] == 0


@pytest.mark.parametrize("broken", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("when", [0, 1])
def test_a_step_without_a_finite_error_is_discarded_and_what_follows_is_not(broken, when):
    optimizer = build_adadp(learning_rate=8.0)
    state, w = optimizer.initialize(tf.TensorSpec([1])), tf.constant([3.0])
    for step in range(2):
        gradient = [broken] if step == when else [1.0]
        state, w = optimizer.next(state, w, tf.constant(gradient))
    assert w.numpy() == [3.0] and float(state[LEARNING_RATE]) == pytest.approx(7.2)
    assert optimizer.report(state)["discarded_steps"] == 1
    for _ in range(2):  # err = 0
        state, w = optimizer.next(state, w, tf.constant([0.125]))
    np.testing.assert_allclose(w, [3.0 - 7.2 / 8], rtol=1e-6)
    assert optimizer.report(state)["discarded_steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "of_its_own"),
    [
        ("build_unweighted_fed_avg", {}),
        ("build_weighted_fed_prox", {"proximal_strength": 0.1}),
    ],
)
def test_algorithms_of_tff_take_it_as_their_client_optimizer(algorithm, of_its_own, context):
    def model_fn():
        model = tf.keras.Sequential(
            [tf.keras.Input([2]), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
        loss = tf.keras.losses.MeanSquaredError()
        return tff.learning.models.from_keras_model(model, loss, spec)

    known = ClientPreconditioner.from_arrays([[[2.0], [0.5]], None], provenance="public")
    optimizer = build_adadps(known, build_adadp())
    build = getattr(tff.learning.algorithms, algorithm)
    process = build(model_fn, client_optimizer_fn=optimizer, **of_its_own)
    state, losses = process.initialize(), []
    x = np.random.default_rng(0).normal(size=[40, 2]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] + 1)).batch(5)
    for _ in range(4):
        output = process.next(state, [data, data])
        state = output.state
        losses.append(output.metrics["client_work"]["train"]["loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_an_odd_number_of_minibatches_ends_on_the_half_step():
    optimizer = build_adadp(learning_rate=0.2)
    state = optimizer.initialize(tf.TensorSpec([1]))
    state, w = optimizer.next(state, tf.zeros([1]), tf.constant([-1.0]))
    assert float(w[0]) == pytest.approx(0.1)
    assert optimizer.report(state)["judged_steps"] == 0
    assert float(state[LEARNING_RATE]) == pytest.approx(0.2)


def test_the_hyperparameters_are_those_of_the_state():
    optimizer = build_adadp(0.2, 0.3, alpha_min=0.5, alpha_max=2.0, discard=True)
    state = optimizer.initialize(tf.TensorSpec([1]))
    hparams = optimizer.get_hparams(state)
    assert dict(hparams) == {
        tff.learning.optimizers.LEARNING_RATE_KEY: 0.2,
        "tolerance": 0.3,
        "alpha_min": 0.5,
        "alpha_max": 2.0,
    }
    changed = collections.OrderedDict(hparams, learning_rate=1.0, tolerance=0.01, alpha_min=0.6)
    state = optimizer.set_hparams(state, changed)
    assert optimizer.get_hparams(state) == changed
    w = tf.zeros([1])
    for gradient in ([-1.0], [-2.0]):  # err = 0.5
        state, w = optimizer.next(state, w, tf.constant(gradient))
    assert w.numpy() == 0 and float(state[LEARNING_RATE]) == pytest.approx(0.6)
    with pytest.raises(KeyError, match="momentum"):
        optimizer.set_hparams(state, {"momentum": 0.9})


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_the_tolerance_falls_from_round_to_round(decay):
    optimizer = build_adadp(0.2, 0.3, alpha_min=0.5, tolerance_decay=decay)
    first = optimizer.get_hparams(optimizer.initialize(tf.TensorSpec([1])))
    hparams = first
    for r in range(1, 200):
        hparams = optimizer.next_hparams(hparams)
        assert float(hparams["tolerance"]) == pytest.approx(0.3 / np.sqrt(1 + decay * r), rel=1e-5)
        assert {**hparams, "tolerance": 0.3} == dict(first)
    if decay == 0:
        assert hparams["tolerance"] == np.float32(0.3)


def test_a_tolerance_that_was_set_stays_a_positive_number():
    optimizer = build_adadp()
    for tolerance in (1e-30, 1e30):
        hparams = collections.OrderedDict(tolerance=tolerance)
        for _ in range(3):
            hparams = optimizer.next_hparams(hparams)
            assert 0 < float(hparams["tolerance"]) <= tolerance * (1 + 1e-6)


@pytest.mark.slow
def test_the_learning_rate_may_be_a_tensor():
    eager = build_adadp(learning_rate=tf.constant(0.25, tf.float64))
    assert eager.initialize(tf.TensorSpec([]))[LEARNING_RATE] == 0.25

    @tf.function
    def one_step(rate):
        optimizer = build_adadp(learning_rate=rate)
        state = optimizer.initialize(tf.TensorSpec([]))
        return optimizer.next(state, tf.zeros([]), tf.constant(-1.0))[1]

    assert float(one_step(tf.constant(0.5, tf.float64))) == pytest.approx(0.25)


def test_weights_may_be_any_nest_of_mixed_types_with_sparse_and_missing_gradients():
    values = {
        "a": [tf.ones([2], tf.float16), tf.ones([], tf.float64)],
        "b": (tf.ones([3, 1]), tf.constant([5.0])),
    }
    specs = tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), values)
    optimizer = build_adadp(learning_rate=0.5, tolerance=1.0)
    state = optimizer.initialize(specs)
    slices = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    gradients = {"a": [tf.ones([2], tf.float16), tf.ones([], tf.float64)], "b": (slices, None)}
    for _ in range(2):
        state, values = optimizer.next(state, values, gradients)
    tf.nest.assert_same_structure(values, specs)
    assert [v.dtype for v in tf.nest.flatten(values)] == [s.dtype for s in tf.nest.flatten(specs)]
    np.testing.assert_array_equal(values["a"][0], [0.5, 0.5])
    np.testing.assert_array_equal(values["b"][0], [[1.0], [0.0], [1.0]])
    np.testing.assert_array_equal(values["b"][1], [5.0])


def test_a_model_of_which_nothing_is_trained_stays():
    optimizer = build_adadp()
    _, weights = optimizer.next(optimizer.initialize(()), (), ())
    assert weights == ()


def test_weights_and_gradients_and_state_must_fit():
    optimizer = build_adadp()
    state = optimizer.initialize(tf.TensorSpec([2]))
    with pytest.raises(ValueError, match="same structure"):
        optimizer.next(state, tf.zeros([2]), [tf.zeros([2])])
    with pytest.raises(ValueError, match="`specs`"):
        optimizer.next(state, tf.zeros([3]), tf.zeros([3]))
    with pytest.raises(ValueError, match="`specs`"):
        optimizer.next(state, [tf.zeros([2])], [tf.zeros([2])])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"learning_rate": 0.0}, "`learning_rate` must be finite and greater than 0"),
        ({"learning_rate": "fast"}, "`learning_rate` must be a number"),
        ({"learning_rate": tf.constant(-1.0)}, "`learning_rate` must be finite"),
        ({"tolerance": 0}, "`tolerance` must be finite and greater than 0"),
        ({"tolerance": float("nan")}, "`tolerance` must be finite"),
        ({"tolerance_decay": -1}, "`tolerance_decay` must be finite and at least 0"),
        ({"alpha_min": 0.0}, "`alpha_min` must be finite and greater than 0"),
        ({"alpha_min": 1.5}, "`alpha_min` must be at most 1"),
        ({"alpha_max": 0.5}, "`alpha_max` must be finite and at least 1"),
        ({"discard": 1}, "`discard` must be True or False"),
        ({"shorten": 1}, "`shorten` must be True or False"),
        ({"keep": "both"}, "`keep` must be one of 'half_steps', 'euler'"),
    ],
)
def test_adadp_refuses_bad_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build_adadp(**arguments)


BASES = {
    "sgd": (
        lambda: tff.learning.optimizers.build_sgdm(0.1),
        lambda: dp.AdaDPS(FIXED, **NO_PRIVACY, learning_rate=0.1),
    ),
    "momentum": (
        lambda: tff.learning.optimizers.build_sgdm(0.05, momentum=0.9),
        lambda: dp.AdaDPS(FIXED, **NO_PRIVACY, learning_rate=0.05, momentum=0.9),
    ),
    "adam": (
        lambda: tff.learning.optimizers.build_adam(0.05, epsilon=1e-3),
        lambda: dp.DPAdam(**NO_PRIVACY, side_information=FIXED, learning_rate=0.05, epsilon=1e-3),
    ),
    "adadp": (
        lambda: build_adadp(0.2, 0.2, shorten=False),
        lambda: dp.ADADP(
            **NO_PRIVACY,
            side_information=FIXED,
            learning_rate=0.2,
            tolerance=0.2,
            tolerance_decay=0.0,
            initial_factor=1.0,
        ),
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", BASES)
def test_adadps_is_the_keras_optimizer_with_the_same_side_information(name):
    base, keras = (make() for make in BASES[name])
    expected, _ = keras_run(keras)
    points, _ = client_run(build_adadps(bound(), base))
    assert_same_points(points, expected)
    plain, _ = client_run(base)
    assert np.abs(plain[-1][0] - points[-1][0]).max() > 1e-2  # A matters


def test_adadps_takes_sgd_at_a_tenth_without_a_base():
    points, _ = client_run(build_adadps(bound()))
    expected, _ = client_run(build_adadps(bound(), tff.learning.optimizers.build_sgdm(0.1)))
    assert_same_points(points, expected, rtol=0, atol=0)


def test_adadps_hands_on_hyperparameters_and_report():
    optimizer = build_adadps(bound(), build_adadp(0.2))
    _, states = client_run(optimizer, BATCHES[:4])
    assert optimizer.report(states[-1])["judged_steps"] == 2
    hparams = optimizer.get_hparams(states[-1])
    assert list(hparams) == ["learning_rate", "tolerance", "alpha_min", "alpha_max"]
    hparams[TOLERANCE] = 7.0
    state = optimizer.set_hparams(states[-1], hparams)
    assert optimizer.get_hparams(state)[TOLERANCE] == 7.0
    assert optimizer.next_hparams(hparams) == build_adadp(0.2).next_hparams(hparams)
    plain = build_adadps(bound())
    assert not hasattr(plain, "report") and not hasattr(plain, "next_hparams")


def test_provenance_is_asked_for_and_reaches_statement_and_epsilon():
    with pytest.raises(dp.NotPrivateError, match="`provenance`"):
        ClientPreconditioner.from_arrays([None])
    with pytest.raises(dp.NotPrivateError, match="`provenance`"):
        ClientPreconditioner((None,))
    with pytest.raises(dp.NotPrivateError, match="`provenance`"):
        SideInformation("word counts", None)
    for wrong in (1.0, np.ones(2), [[1.0]], ([2.0],), (np.array(["a"]),), (np.array([True]),)):
        with pytest.raises(TypeError, match="`scales` must be"):
            ClientPreconditioner(wrong, "public")
    for wrong in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="`scales` must be positive and finite"):
            ClientPreconditioner((None, np.array([1.0, wrong])), "public")
    for make in (
        lambda text: ClientPreconditioner((None,), "public", text),
        lambda text: SideInformation(text, "public"),
    ):
        with pytest.raises(TypeError, match="`description` must be"):
            make(5)
    release = dp_accounting.GaussianDpEvent(5.0)
    statements = {}
    for name, provenance in [
        ("public", "public"),
        ("released", release),
        ("unprotected", dp_accounting.NonPrivateDpEvent()),
    ]:
        if name == "unprotected":
            with pytest.warns(UserWarning, match="NOT PRIVATE"):
                made = dp.side_information.FixedPreconditioner(A, provenance=provenance)
                optimizer = build_adadps(bound(made))
        else:
            optimizer = build_adadps(
                bound(dp.side_information.FixedPreconditioner(A, provenance=provenance))
            )
        information = optimizer.side_information
        assert information.provenance == provenance
        ledger = SimpleNamespace(
            segments=[(1.0, 10.0, 50)],
            other_events=events(information.provenance),
            side_information=information,
        )
        statements[name] = dp.privacy_statement(ledger, 1_000, 1e-4, sampling="poisson")
    assert "fixed preconditioner, public" in statements["public"]
    assert "included in epsilon" in statements["released"]
    assert "NOT PRIVATE" in statements["unprotected"]
    assert "NOT PRIVATE" not in statements["public"] + statements["released"]


def test_nothing_hides_the_side_information():
    optimizer = build_adadps(bound())
    with pytest.raises(KeyError, match="learning rate"):
        tff.learning.optimizers.schedule_learning_rate(optimizer, lambda k: 0.1).initialize(
            tf.TensorSpec([])
        )
    with pytest.raises(ValueError, match="`base` must not have side information"):
        build_adadps(bound(), optimizer)
    base = tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(), lambda k: 0.1
    )
    scheduled = build_adadps(bound(), base)
    assert scheduled.side_information.provenance == "public"
    assert_same_points(client_run(scheduled)[0], client_run(optimizer)[0])


def test_preconditioners_of_positions_and_of_names_are_the_same():
    named = bound()
    arrays = [A.get(name) for name in NAMES]
    placed = ClientPreconditioner.from_arrays(arrays, provenance="public")
    for a, b in zip(placed.scales, named.scales):
        np.testing.assert_array_equal(1.0 if a is None else a, b)


def test_side_information_with_other_numbers_or_shapes_is_another_one():
    arrays = ([[1.0, 2.0]], [[1.0, 3.0]], [[[1.0], [2.0]]], [[1.0, 2.0], None], [None, [1.0, 2.0]])
    made = [ClientPreconditioner.from_arrays(a, provenance="public") for a in arrays]
    assert len({one.digest for one in made}) == len(made)
    again = ClientPreconditioner.from_arrays(arrays[0], provenance="public")
    assert SideInformation.of(again) == SideInformation.of(made[0]) != SideInformation.of(made[1])


def test_token_frequencies_are_bound_to_the_first_kernel_of_a_keras_model():
    model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])
    counts = dp.side_information.token_frequencies([3, 1, 0, 0], provenance="public")
    made = ClientPreconditioner.from_side_information(counts, model)
    np.testing.assert_array_equal(made.scales[0], [[0.25], [0.5], [1.0], [1.0]])
    assert made.description == "token frequencies"
    gradients = made.precondition([tf.ones([4, 2]), None])
    np.testing.assert_array_equal(gradients[0], np.repeat(made.scales[0], 2, axis=1))
    assert gradients[1] is None


def test_preconditioners_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="trainable weight 1' must be positive"):
        ClientPreconditioner.from_arrays([None, [1.0, -1.0]], provenance="public")
    with pytest.raises(TypeError, match="`arrays` must be a sequence"):
        ClientPreconditioner.from_arrays({"w": [1.0]}, provenance="public")
    with pytest.raises(TypeError, match="the same at every step"):
        ClientPreconditioner.from_side_information("public", [])
    made = ClientPreconditioner.from_arrays([np.ones([3])], provenance="public")
    optimizer = build_adadps(made)
    with pytest.raises(ValueError, match="trainable weight 0 must broadcast"):
        optimizer.next(optimizer.initialize([tf.TensorSpec([2])]), [tf.ones([2])], [tf.ones([2])])
    two = [tf.ones([3])] * 2
    with pytest.raises(ValueError, match="1 for 2 weights"):
        optimizer.next(optimizer.initialize([tf.TensorSpec([3])] * 2), two, two)
    with pytest.raises(TypeError, match="which states the provenance of A:"):
        build_adadps([np.ones([3])])
    with pytest.raises(TypeError, match="`base` must be"):
        build_adadps(made, 0.1)
