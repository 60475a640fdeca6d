"""Side information: where it comes from, what it may be, when it is refreshed."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.api import per_example_gradients


@pytest.mark.parametrize("provenance", [None, "private", 1.0])
def test_side_information_must_say_where_it_comes_from(provenance):
    with pytest.raises(dp.NotPrivateError, match="`provenance` must say where"):
        dp.side_information.FixedPreconditioner({}, provenance=provenance)
    with pytest.raises(dp.NotPrivateError, match="`provenance` must say where"):
        dp.side_information.PublicGradients(catalogue.PUBLIC, provenance=provenance)


def test_the_event_of_a_private_release_joins_the_ledger():
    event = dp_accounting.GaussianDpEvent(3.0)
    fixed = dp.side_information.FixedPreconditioner({}, provenance=event)
    assert dp.AdaDPS(fixed, 1.0, 1.0).ledger.other_events == (event,)
    public = dp.side_information.FixedPreconditioner({}, provenance="public")
    assert dp.AdaDPS(public, 1.0, 1.0).ledger.other_events == ()
    with pytest.raises(ValueError, match="cannot be saved"):
        dp.AdaDPS(fixed, 1.0, 1.0).get_config()


@pytest.mark.parametrize(
    "preconditioners, match",
    [
        ({"hidden/kernel": -np.ones([6, 5])}, "hidden/kernel' must be positive.*Received: -1.0"),
        ({"hidden/kernel": [float("nan")]}, "hidden/kernel' must be positive.*Received: nan"),
        ({"hidden/kernel": np.ones([4])}, r"must broadcast to \(6, 5\)"),
        ({"hiden/kernel": 1.0}, r"not trained.*hiden/kernel"),
        ({"kernel": 1.0}, r"must mean one variable.*'kernel': \['.*hidden/kernel', '.*logits/ker"),
        (lambda v: 0.0, "must be positive"),
    ],
)
def test_fixed_preconditioners_must_fit(preconditioners, match):
    model = catalogue.mlp()
    fixed = dp.side_information.FixedPreconditioner(preconditioners, provenance="public")
    with pytest.raises(ValueError, match=match):
        dp.AdaDPS(fixed, 1.0, 1.0).build(model.trainable_variables)


def test_fixed_preconditioners_must_be_arrays_or_a_function():
    with pytest.raises(TypeError, match="dict of arrays"):
        dp.side_information.FixedPreconditioner([1.0], provenance="public")


def whole_name(variable):
    return variable.path if GENERATION == 3 else variable.name


@pytest.mark.parametrize("name", [whole_name, "hidden/kernel:0", "hidden/kernel"])
def test_fixed_preconditioners_are_found_by_name_and_broadcast(name):
    model = catalogue.mlp()
    rows = np.arange(1.0, 7.0)[:, None]
    name = name(model.trainable_variables[0]) if callable(name) else name
    fixed = dp.side_information.FixedPreconditioner({name: rows}, provenance="public")
    optimizer = dp.AdaDPS(fixed, 1.0, 1.0)
    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables[:2]
    scales, shift = optimizer._preconditioning.scale_and_shift(optimizer, variables)
    np.testing.assert_allclose(scales[0], 1 / rows, rtol=1e-6)  # one number a row, no more
    np.testing.assert_allclose(np.broadcast_to(scales[1], [5]), np.ones(5))
    assert shift is None


def test_an_unregistered_function_cannot_be_saved():
    fixed = dp.side_information.FixedPreconditioner(lambda v: 1.0, provenance="public")
    with pytest.raises(ValueError, match="register_keras_serializable"):
        dp.AdaDPS(fixed, 1.0, 1.0).get_config()


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("every, refreshes", [(1, 8), (2, 4), (3, 4), (10, 2)])
def test_public_statistics_are_refreshed_every_so_many_minibatches(every, refreshes):
    public = dp.side_information.PublicGradients(catalogue.PUBLIC, every=every, provenance="public")
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(public, 1.0, 1.0), loss=catalogue.loss())
    catalogue.fit(model, epochs=2)  # 4 minibatches an epoch; each epoch begins with a refresh
    ((num_refreshes,), *_) = model.optimizer.side_information_state
    assert float(num_refreshes) == refreshes


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("run_eagerly", catalogue.EAGERLY)
def test_statistics_of_nothing_are_not_used(run_eagerly):
    public = dp.side_information.PublicGradients(catalogue.PUBLIC, provenance="public")
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(public, 1.0, 1.0), loss=catalogue.loss(), run_eagerly=run_eagerly)
    x, y = catalogue.data()
    start = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has seen no public data"):
        model.fit(x, y, 8, verbose=0)
    for a, b in zip(model.get_weights(), start):
        np.testing.assert_array_equal(a, b)


def test_public_data_leaves_no_trace_in_the_training_loss():
    public = dp.side_information.PublicGradients(
        catalogue.PUBLIC.map(lambda x, y: (1000 * x, y)), provenance="public"
    )
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(public, 1.0, 1.0, learning_rate=1e-9), loss=catalogue.loss())
    x, y = catalogue.data()
    model.evaluate(x, y, verbose=0)
    expected = model.evaluate(x, y, verbose=0)
    history = catalogue.fit(model).history
    assert history["loss"][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_loaded_optimizer_asks_for_its_public_data(tmp_path):
    model = catalogue.mlp()
    model.compile(catalogue.make("AdaDPS rmsprop"), loss=catalogue.loss())
    catalogue.fit(model)
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="side_information.dataset"):
        catalogue.fit(loaded)
    loaded.optimizer.side_information.dataset = catalogue.PUBLIC
    catalogue.fit(loaded)
    assert loaded.optimizer.ledger.num_releases == 8


def test_the_callback_and_the_optimizer_must_share_the_object():
    model = catalogue.mlp()
    model.compile(catalogue.make("AdaDPS rmsprop"), loss=catalogue.loss())
    other = dp.side_information.PublicGradients(catalogue.PUBLIC, provenance="public")
    x, y = catalogue.data()
    with pytest.raises(ValueError, match="must be the one that holds this"):
        model.fit(x, y, 8, verbose=0, callbacks=[other])


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        ({"dataset": [1, 2]}, TypeError, "`dataset` must be a `tf.data.Dataset`"),
        ({"rule": "sgd"}, ValueError, "`rule` must be one of"),
        ({"beta": 1.0}, ValueError, "`beta` must be below 1"),
        ({"beta": -0.1}, ValueError, "`beta`"),
        ({"epsilon": 0.0}, ValueError, "`epsilon`.*greater than 0"),
        ({"every": 0}, ValueError, "`every`.*at least 1"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, match):
    with pytest.raises(error, match=match):
        dp.side_information.PublicGradients(
            **{"dataset": catalogue.PUBLIC, "provenance": "public", **kwargs}
        )


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("gradients", ["traced", "materialized"])
@pytest.mark.parametrize("shape", [[], [1, 1], [1, 1000]])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_gradients_that_only_the_preconditioner_makes_large_are_clipped(gradients, shape, clipping):
    # Their squares are no float32 numbers; divided by A they have norms of 3.2.
    w = tf.Variable(tf.zeros([1, 1000]), name="w")
    fixed = dp.side_information.FixedPreconditioner(
        lambda variable: np.full(shape, 1e-19, "f"), provenance="public"
    )
    optimizer = dp.DPSGD(
        *(1.0, 0.0),
        learning_rate=1.0,
        expected_batch_size=1,
        gradients=gradients,
        clipping=clipping,
        side_information=fixed,
    )

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w, axis=1)
        optimizer.minimize(loss, [w], tape)

    step(tf.fill([1, 1000], 1e-20))
    assert 0.0 < np.linalg.norm(w.numpy().astype("float64")) <= 1.0 + 1e-6


@pytest.mark.parametrize("gradients", ["traced", "materialized"])
@pytest.mark.parametrize("shape", [[], [1, 1], [1, 1000]])
def test_an_absent_example_stays_absent_whatever_the_preconditioner(gradients, shape):
    # Or the weights of padding would seem to be ignored, and it would count as an example.
    w = tf.Variable(tf.zeros([1, 1000]), name="w")

    @tf.function
    def squared_norms(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w, axis=1)
        return per_example_gradients(loss, [w], tape, gradients).squared_norms(
            [tf.fill(shape, 1e9)]
        )

    norms = squared_norms(tf.concat([tf.zeros([1, 1000]), tf.ones([1, 1000])], 0)).numpy()
    assert norms[0] == 0.0 < norms[1]
