"""Per-example gradients are those of batches of one, or there is an error that says why not."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gradients_asked import answers, check, figures, squared_norms
from tf_adaptive_dp.gradients.api import microbatch_means, per_example_gradients

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


MATERIALIZED = [
    "MLP",
    "CNN",
    "depthwise and separable",
    "embedding with repeated ids",
    "normalized images",
    "frozen BatchNormalization",
    "LSTM",
    "MultiHeadAttention",
    "layer used twice",
    "tied weights",
    "two outputs",
    "sample weights",
]


# What `gradients="auto"` makes of the whole zoo is in `test_traced`.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", MATERIALIZED)
def test_materialized_norms_and_sums_equal_a_loop_over_batches_of_one(name, mode):
    problem, (scale, shift, weights) = zoo.problem(name), figures(name)

    def ask(*batch):
        source = zoo.source(problem, *batch, method="materialized")
        return answers(source, scale, shift, tf.constant(weights))

    actual = zoo.in_mode(mode, ask, problem.batch)(*problem.batch)
    check(actual, zoo.rows(name), scale, shift, weights, tolerance=1e-5)


def test_examples_of_sample_weight_zero_have_gradient_zero():
    assert (np.flatnonzero(squared_norms(zoo.rows("sample weights")) == 0) == [1, 4]).all()
    problem = zoo.problem("sample weights")
    norms = zoo.source(problem, *map(tf.constant, problem.batch)).squared_norms().numpy()
    assert (np.flatnonzero(norms == 0) == [1, 4]).all()


@tf.custom_gradient
def nan_slope(x):
    """The identity, whose gradient is NaN above 1 for an example that takes part in the loss."""
    return x, lambda upstream: tf.where((x > 1) & (upstream != 0), np.nan, upstream)


@both_modes
def test_weight_zero_means_zero_even_for_a_gradient_that_is_nan(mode):
    w = tf.Variable([1.0])
    x = np.array([0.5, 2.0, 0.25], "float32")

    def step(x):
        with tf.GradientTape() as tape:
            loss = nan_slope(x * w)
        source = per_example_gradients(loss, [w], tape)
        return source.squared_norms(), source.weighted_sum(tf.constant([1.0, 0.0, 1.0]))[0]

    norms, total = zoo.in_mode(mode, step, [x])(x)
    np.testing.assert_array_equal(norms, [0.25, np.nan, 0.0625])
    np.testing.assert_array_equal(total, [0.75])


@both_modes
def test_variables_that_the_loss_does_not_depend_on_give_none_and_add_nothing(mode):
    w, unused = tf.Variable([2.0, 3.0]), tf.Variable([5.0])
    x = np.array([[3.0, 4.0]], "float32")
    sums = []

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w, axis=1)
        source = per_example_gradients(loss, [unused, w], tape)
        sums[:] = source.weighted_sum(tf.constant([1.0]))
        shift = [tf.constant([100.0]), tf.ones([2])]
        return source.squared_norms(), source.squared_norms([[50.0], [3.0, 3.0]], shift)

    plain, scaled_and_shifted = zoo.in_mode(mode, step, [x])(x)
    assert sums[0] is None and sums[1] is not None
    np.testing.assert_allclose(plain, [25.0])
    np.testing.assert_allclose(scaled_and_shifted, [9 * (16 + 25)], rtol=1e-5)


@both_modes
def test_a_loss_that_depends_on_no_variable_is_an_error(mode):
    w = tf.Variable([2.0], name="lonely")

    def step(x):
        with tf.GradientTape() as tape:
            loss = x * 2.0
        return per_example_gradients(loss, [w], tape).squared_norms()

    x = np.ones([3], "float32")
    with pytest.raises(ValueError, match="depends on none of the variables. Received: lonely"):
        zoo.in_mode(mode, step, [x])(x)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@both_modes
def test_materialized_an_example_that_is_not_finite_stops_the_step(mode, bad):
    w = tf.Variable(tf.ones([6, 2]))
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=1.0, gradients="materialized")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ w), axis=1)
        optimizer.minimize(loss, [w], tape)

    x = zoo.floats(4, 6)
    x[2, 3] = bad
    run = zoo.in_mode(mode, step, [x])
    with pytest.raises(tf.errors.InvalidArgumentError, match="nothing was released"):
        run(x)
    np.testing.assert_array_equal(w, np.ones([6, 2]))
    assert optimizer.ledger.segments == []
    x[2, 3] = 0.0
    run(x)
    assert optimizer.ledger.segments == [(1.0, 4.0, 1)]
    assert np.abs(w.numpy() - 1).max() > 0


def test_a_step_that_failed_in_a_graph_is_no_iteration():
    w = tf.Variable([1.0])
    optimizer = dp.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, gradients="materialized")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = x * w**2
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(tf.errors.InvalidArgumentError, match="nothing was released"):
        step(tf.constant([1.0, np.nan, 1.0]))
    assert int(optimizer.iterations) == optimizer.ledger.num_releases == 0


def test_xla_cannot_stop_at_nan_so_it_warns_and_counts_a_release_without_privacy(monkeypatch):
    w = tf.Variable([[1.0], [1.0]])
    mechanism = zoo.make_mechanism(noise_multiplier=1.5)
    monkeypatch.setattr(mechanism.generator, "add_to", lambda sums, *_: sums)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.square(x @ w)[:, 0]
        source = per_example_gradients(loss, [w], tape, "materialized")
        return mechanism.release(source, tf.shape(x)[0])[0]

    x = np.array([[1.0, 2.0], [np.nan, 1.0], [3.0, 4.0]], "float32")
    with pytest.warns(UserWarning, match="cannot stop at a batch in which an example is NaN"):
        compiled = zoo.in_mode("xla", step, [x])
        released = compiled(x)
    np.testing.assert_array_equal(released, [[0.0], [0.0]])
    # Without the example the sum would be another one by far more than the clip norm.
    assert [s.noise_multiplier for s in mechanism.ledger.segments] == [0.0]
    compiled(np.ones_like(x))
    of_finite = mechanism.ledger.segments[-1]
    assert (of_finite.noise_multiplier, of_finite.num_releases) == (1.5, 1)


@both_modes
def test_a_lone_example_that_is_nan_counts_as_zero(mode):
    w = tf.Variable([[1.0], [1.0]])
    mechanism = zoo.make_mechanism()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.square(x @ w)[:, 0]
        return mechanism.release(per_example_gradients(loss, [w], tape), tf.shape(x)[0])[0]

    x = np.array([[np.nan, 2.0]], "float32")
    np.testing.assert_array_equal(zoo.in_mode(mode, step, [x])(x), [[0.0], [0.0]])
    assert mechanism.ledger.num_releases == 1


@both_modes
def test_a_batch_without_examples_has_norms_of_length_0_and_sums_of_zero(mode):
    problem = zoo.problem("MLP")

    def step(*batch):
        source = zoo.source(problem, *batch)
        return source.squared_norms(), source.weighted_sum(tf.zeros([0]))

    empty = [a[:0] for a in problem.batch]
    norms, sums = zoo.in_mode(mode, step, problem.batch)(*empty)
    assert norms.shape == [0]
    for total, variable in zip(sums, problem.variables):
        np.testing.assert_array_equal(total, np.zeros(variable.shape))


def test_eager_execution_warns_that_it_cannot_check_the_whole_model():
    problem = zoo.problem("MLP")
    with pytest.warns(UserWarning, match="Under eager execution only the backward pass"):
        zoo.source(problem, *map(tf.constant, problem.batch))


def test_a_variable_of_float64_gets_a_gradient_that_it_can_take():
    w = tf.Variable(tf.ones([2], tf.float64))
    optimizer = dp.DPSGD(l2_norm_clip=10.0, noise_multiplier=0.0, learning_rate=1.0)
    with tf.GradientTape() as tape:
        loss = tf.linalg.matvec(tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64), w)
    optimizer.minimize(loss, [w], tape)
    np.testing.assert_allclose(w, [1 - 2.0, 1 - 3.0])


LOSSES = {
    "rank 2": (lambda x: x[:, :, 0], r"a loss of shape \(.*, 3\). Reduce axis 1 in the loss"),
    "rank 3": (lambda x: x, r"a loss of shape \(.*, 3, 2\). Reduce axes 1 to 2 in the loss"),
}


@both_modes
@pytest.mark.parametrize("loss, message", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_vector_is_refused(loss, message, mode):
    w = tf.Variable(1.0)
    x = np.ones([4, 3, 2], "float32")

    def step(x):
        with tf.GradientTape() as tape:
            value = loss(x * w)
        return per_example_gradients(value, [w], tape).squared_norms()

    with pytest.raises(dp.NotPrivateError, match=message):
        zoo.in_mode(mode, step, [x])(x)


def test_a_scalar_is_refused_under_eager_execution():
    w = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.ones([4]) * w)
    with pytest.raises(dp.NotPrivateError, match='a scalar loss. Train in a compiled step.*"none"'):
        per_example_gradients(loss, [w], tape)


def test_a_loss_of_unknown_rank_is_refused():
    w = tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def step(x):
        with tf.GradientTape() as tape:
            loss = x * w
        return per_example_gradients(loss, [w], tape).squared_norms()

    with pytest.raises(dp.NotPrivateError, match=r"unknown rank.*tf.ensure_shape\(loss, \[None\]"):
        step(tf.ones([3]))


def test_ways_of_computing_that_do_not_exist_are_refused():
    w = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = w * 2.0
    message = "`gradients` must be one of 'auto', .* Received: gradients='jacobian'"
    with pytest.raises(ValueError, match=message):
        per_example_gradients(loss, [w], tape, "jacobian")
    with pytest.raises(ValueError, match=message):
        dp.DPSGD(1.0, 1.0, gradients="jacobian")


def test_traced_gradients_need_a_compiled_step():
    w = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = w * 2.0
    with pytest.raises(ValueError, match="need a compiled step.*under eager execution"):
        per_example_gradients(loss, [w], tape, "traced")


@pytest.mark.parametrize("method", ["auto", "materialized"])
def test_ways_of_computing_that_exist_agree(method):
    w = tf.Variable([3.0])
    with tf.GradientTape() as tape:
        loss = tf.constant([1.0, 2.0]) * w
    source = per_example_gradients(loss, [w], tape, method)
    np.testing.assert_allclose(source.squared_norms(), [1.0, 4.0])


def test_microbatches_are_neighbours_and_take_the_mean():
    loss = tf.constant([1.0, 3.0, 10.0, 20.0, 7.0, 7.0])
    np.testing.assert_allclose(microbatch_means(loss, 3), [2.0, 15.0, 7.0])
    np.testing.assert_allclose(microbatch_means(loss, 1), [8.0])
    np.testing.assert_allclose(microbatch_means(loss, 6), loss)


def test_microbatches_must_divide_the_batch():
    message = r"`num_microbatches` must divide the batch\. .*drop_remainder.*Received: 4"
    with pytest.raises(ValueError, match=f"{message} for a batch of 6 examples"):
        microbatch_means(tf.zeros([6]), 4)
    step = tf.function(
        lambda loss: microbatch_means(loss, 4), input_signature=[tf.TensorSpec([None])]
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        step(tf.zeros([6]))
    assert step(tf.zeros([8])).shape == [4]
