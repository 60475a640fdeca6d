"""Padding of our Poisson batches that contributes to a release is refused, or counted."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.mechanism import padding
from tf_adaptive_dp.validation import check_per_example

N, SIGMA = 200, 4.0
SAMPLING = dp.PoissonSampling(0.2, 80, 1_000)
SQUARES = tf.keras.losses.MeanSquaredError(reduction="none")


def drawn(steps=3, **kwargs):
    random = np.random.default_rng(0)
    data = random.normal(size=[N, 2]).astype(np.float32), random.normal(size=[N, 1])
    return dp.poisson_batches(data, SAMPLING, **kwargs).take(steps)


def squares(y, outputs):
    return tf.reduce_mean((tf.cast(y, outputs.dtype) - outputs) ** 2, axis=1)


def of_keras(y, outputs, weights):
    return tf.reshape(SQUARES(y, outputs, weights), [-1])


# Losses of a custom loop: labels, outputs, weights and a penalty of each example.
CONTRIBUTE = {
    "weights ignored": lambda y, outputs, w, penalty: squares(y, outputs),
    "penalty beside a product": lambda y, outputs, w, penalty: squares(y, outputs) * w + penalty,
    "penalty beside a product of doubles": lambda y, outputs, w, penalty: (
        tf.cast(tf.cast(squares(y, outputs), tf.float64) * tf.cast(w, tf.float64), tf.float32)
        + penalty
    ),
    "penalty beside tf.where": lambda y, outputs, w, penalty: (
        tf.where(w > 0, squares(y, outputs) * w, 0.0) + penalty
    ),
    "weights of another power": lambda y, outputs, w, penalty: squares(y, outputs) * tf.exp(w),
    "a scalar": lambda y, outputs, w, penalty: (
        tf.reduce_mean(squares(y, outputs) * w) + tf.reduce_mean(penalty)
    ),
}
EXACT = {
    "all times weights": lambda y, outputs, w, penalty: (squares(y, outputs) + penalty) * w,
    "tf.where around all": lambda y, outputs, w, penalty: tf.where(
        w > 0, squares(y, outputs) + penalty, 0.0
    ),
    "Keras's loss": lambda y, outputs, w, penalty: of_keras(y, outputs, w) + penalty,
    "a scalar": lambda y, outputs, w, penalty: tf.reduce_mean((squares(y, outputs) + penalty) * w),
}


def runner(loss, jit=False, through=lambda w: w, signature=None, **kwargs):
    """The optimizer, its variable, and a step of a custom loop."""
    optimizer = dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0, learning_rate=0.1, **kwargs)
    kernel = tf.Variable([[0.5], [-0.3]])

    @tf.function(jit_compile=jit, reduce_retracing=True, input_signature=signature)
    def step(x, y, w):
        with tf.GradientTape() as tape:
            outputs = tf.matmul(x, kernel) + tf.reduce_sum(kernel)
            losses = loss(y, outputs, w, tf.reduce_sum(outputs**2, axis=1))
        optimizer.minimize(losses, [kernel], tape)

    def run(batches):
        for x, y, w in batches:
            step(x, y, through(w))

    return optimizer, kernel, run


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CONTRIBUTE)
def test_padding_that_contributes_is_refused_before_the_release(name):
    optimizer, kernel, run = runner(CONTRIBUTE[name])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
        run(drawn())
    assert optimizer.ledger.segments == []
    np.testing.assert_array_equal(kernel, np.float32([[0.5], [-0.3]]))


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CONTRIBUTE)
def test_where_assertions_are_dropped_it_counts_twice(name):
    optimizer, _, run = runner(CONTRIBUTE[name], jit=True)
    run(drawn())
    assert optimizer.ledger.segments == [(SIGMA / 2, 40.0, 3)]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_padding_that_contributes_nothing_costs_nothing(name, jit):
    optimizer, _, run = runner(EXACT[name], jit=jit)
    run(drawn())
    assert optimizer.ledger.segments == [(SIGMA, 40.0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "through",
    [
        lambda w: w[:, tf.newaxis],
        lambda w: tf.cast(w, tf.float16),
        lambda w: tf.cast(w, tf.float64) * 3,
    ],
)
def test_weights_are_known_in_other_forms(through, jit):
    loss = CONTRIBUTE["weights ignored"]
    optimizer, _, run = runner(loss, jit=jit, through=through)
    if jit:
        run(drawn())
        assert optimizer.ledger.segments == [(SIGMA / 2, 40.0, 3)]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes"):
            run(drawn())


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("rows", [80, None])
def test_weights_are_known_if_either_they_or_the_losses_do_not_show_their_size(rows):
    """As of a model with a fixed batch size, or of batches that Python changed."""
    shapes = [rows, 2], [rows, 1], [80 if rows is None else None]
    dtypes = tf.float32, tf.float64, tf.float32
    signature = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    _, _, run = runner(CONTRIBUTE["weights ignored"], signature=signature)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes"):
        run(drawn())


@pytest.mark.slow
def test_one_part_of_a_batch_with_padding_that_contributes_makes_the_release_count_twice():
    def loss(y, outputs, w, penalty):
        return tf.where(tf.equal(y[:, 0], 7.0), squares(y, outputs), squares(y, outputs) * w)

    optimizer, _, run = runner(loss, jit=True, gradient_accumulation_steps=2)
    parts = list(drawn(4, gradient_accumulation_steps=2))
    x, y, w = parts[1]
    parts[1] = x, tf.where(w[:, tf.newaxis] > 0, y, tf.constant(7.0, y.dtype)), w
    run(parts)
    assert optimizer.ledger.segments == [(SIGMA / 2, 40.0, 1), (SIGMA, 40.0, 1)]


def test_one_more_example_in_the_place_of_padding_moves_the_sum_by_more_than_the_bound():
    # What the ledger counts is what happens: without noise, C = 1, the sum moves by up to 2.
    optimizer, kernel, run = runner(
        lambda y, outputs, w, penalty: 100 * tf.reshape(outputs, [-1]), jit=True
    )
    optimizer.noise_multiplier = 0.0
    x = np.zeros([80, 2], np.float32)
    x[:, 0] = 9.0  # the padding pulls one way, the example that joins the other
    y, weights = np.zeros([80, 1]), np.float32(40 * [-0.0] + 40 * [0.0])
    sums = []
    for joined in (False, True):
        kernel.assign([[0.5], [-0.3]])
        if joined:
            x[0], weights[0] = [-11.0, -2.0], 1.0
        run([(x, y, weights)])
        sums.append((np.float32([[0.5], [-0.3]]) - kernel.numpy()) / 0.1 * 40)
    assert 1.9 < np.linalg.norm(sums[1] - sums[0]) < 2.0001
    assert optimizer.ledger.segments == [(0.0, 40.0, 2)]


OURS = 40 * [0.0, -0.0]


@pytest.mark.parametrize(
    "zeros",
    [
        80 * [0.0],  # the weights of another sampler
        40 * [0.0],  # which are as many as random signs might leave without a mark
        80 * [-0.0],  # labels times -1
        79 * [0.0] + [-0.0],
        5 * [0.0, -0.0],  # of a batch too small to tell
    ],
)
def test_other_zeros_are_no_padding(zeros):
    def is_ours(zeros):
        return bool(padding.is_ours(tf.constant(np.float32(zeros + len(zeros) * [1.0]))))

    assert is_ours(OURS) and not is_ours(zeros)


def test_users_have_fewer_places_than_rows():
    """Which of 12 users are padding is known by less than which of 48 examples are."""
    weights = tf.constant(np.float32(12 * [0.0, -0.0] + 24 * [1.0]))
    assert padding.is_ours(weights) and not padding.is_ours(weights, rows_per_unit=4)
    assert padding.is_ours(tf.constant(np.float32(OURS + 80 * [1.0])), rows_per_unit=4)


class LeavesOneOutputUnweighted(tf.keras.Model):
    """Padding contributes to the loss of an output."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        a, b = (squares(y[name], y_pred[name]) for name in ("a", "b"))
        return tf.reduce_mean(a * sample_weight["a"] + b)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [tf.keras.Model, LeavesOneOutputUnweighted])
def test_an_example_without_a_label_for_one_output_is_no_padding(kind):
    random = np.random.default_rng(0)
    y = {name: random.normal(size=[N, 1]).astype("float32") for name in "ab"}
    weights = {"a": np.ones(N, "float32"), "b": np.float32(np.arange(N) % 2)}
    inputs = tf.keras.Input([2])
    model = kind(
        inputs,
        {name: tf.keras.layers.Dense(1, bias_initializer="ones", name=name)(inputs) for name in y},
    )
    model.compile(dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0), loss={"a": "mse", "b": "mse"})
    x = random.normal(size=[N, 2]).astype("float32")
    batches = dp.poisson_batches((x, y, weights), SAMPLING).take(3)
    if kind is tf.keras.Model:
        model.fit(batches, verbose=0)
        assert model.optimizer.ledger.segments == [(SIGMA, 40.0, 3)]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
            model.fit(batches, verbose=0)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("lost", [False, True])
def test_marks_show_padding_where_another_output_has_lost_its_zeros(lost):
    """Some rows at least, which is enough to refuse the step."""
    zeros = np.tile(np.float32([0.0, -0.0]), 20)
    whole = np.concatenate([zeros, np.ones(40, "float32")])
    shifted = np.roll(whole, 40)

    @tf.function
    def padded(a, b):
        return padding.rows_of_padding(a * 0 + tf.ones_like(b), 1)

    found = padded(whole, shifted if lost else whole).numpy()
    assert found[:40].sum() == (20 if lost else 40)


def test_labels_are_no_weights_where_fit_knows_them():
    # With Keras 3, zeros of both signs among the labels do not matter, as `fit` passes the weights.
    if GENERATION == 2:
        pytest.skip("Keras 2 does not tell weights and labels apart")
    random = np.random.default_rng(0)
    x = random.normal(size=[128, 6]).astype(np.float32)
    y = np.float32(64 * [1.0] + 32 * [0.0, -0.0])
    model = tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, SIGMA), loss="mse")
    model.fit(x, y, batch_size=128, verbose=0)
    assert model.optimizer.ledger.segments == [(SIGMA, 128.0, 1)]


class Forgetful(tf.keras.Model):
    """As users write it who forget about weights."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return tf.reduce_mean(tf.reduce_sum((y_pred - tf.cast(y, y_pred.dtype)) ** 2, axis=-1))


@pytest.mark.in_turns
@pytest.mark.parametrize("compile_with", [{}, {"jit_compile": True}])
def test_a_compute_loss_that_drops_the_weights_is_refused_in_fit(compile_with):
    inputs = tf.keras.Input([2])
    model = Forgetful(inputs, tf.keras.layers.Dense(1, bias_initializer="ones")(inputs))
    model.compile(dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0), loss="mse", **compile_with)
    if compile_with:
        model.fit(drawn(), verbose=0)
        assert model.optimizer.ledger.segments == [(SIGMA / 2, 40.0, 3)]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
            model.fit(drawn(), verbose=0)
        assert model.optimizer.ledger.segments == []


class Endpoint(tf.keras.layers.Layer):
    """A loss as a layer; the regularization of the activity before it lacks the weights."""

    def call(self, outputs, y, w):
        self.add_loss(tf.reduce_mean(squares(y, outputs) * w))
        return outputs


class UnpacksItself(tf.keras.Model):
    """Takes (x, w, y) or ((x, w), y)."""

    def train_step(self, data):
        (x, w), y = data if len(data) == 2 else (data[:2], data[2])
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            losses = squares(y, outputs) * w + tf.reduce_sum(outputs**2, axis=1)
        self.optimizer.minimize(losses, self.trainable_variables, tape)
        return {"loss": tf.reduce_mean(losses)}


def endpoint():
    inputs = {"x": tf.keras.Input([2], name="x"), "y": tf.keras.Input([1], name="y")}
    inputs["w"] = tf.keras.Input([], name="w")
    hidden = tf.keras.layers.Dense(1, activity_regularizer="l2", bias_initializer="ones")
    return tf.keras.Model(inputs, Endpoint()(hidden(inputs["x"]), inputs["y"], inputs["w"]))


def unpacking():
    inputs = tf.keras.Input([2])
    return UnpacksItself(inputs, tf.keras.layers.Dense(1, bias_initializer="ones")(inputs))


def as_float(y):
    return tf.cast(y, tf.float32)


ELSEWHERE = {
    "a dict": (endpoint, lambda x, y, w: {"x": x, "y": as_float(y), "w": w}),
    "in the place of labels": (unpacking, lambda x, y, w: (x, w, y)),
    "inputs and labels": (
        endpoint,
        lambda x, y, w: ({"x": x, "y": as_float(y), "w": w}, as_float(y)),
    ),
    "inputs of an own step": (unpacking, lambda x, y, w: ((x, w), y)),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("jit", [False, True])
def test_fit_looks_for_the_weights_wherever_they_are_in_a_batch(place, jit):
    """With Keras 3, `fit` looked for them in the third place only."""
    if GENERATION == 2 and place == "inputs and labels":
        pytest.skip("Keras 2 wants a loss for labels, or multiplies it by the labels here")
    make, mapping = ELSEWHERE[place]
    model = make()
    model.compile(dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0), jit_compile=jit)
    batches = drawn().map(mapping)
    if jit:
        model.fit(batches, verbose=0)
        assert model.optimizer.ledger.segments == [(SIGMA / 2, 40.0, 3)]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
            model.fit(batches, verbose=0)
        assert model.optimizer.ledger.segments == []


OF_TOKENS = np.random.default_rng(1).integers(2, size=[N, 3])
OTHER_WEIGHTS = {
    "of tokens": OF_TOKENS.astype("float32"),
    "whole numbers of tokens": OF_TOKENS,
    "whole numbers": 1 + OF_TOKENS[:, 0],
    "truth values": OF_TOKENS[:, 0] > 0,
}


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("user_ids", [None, np.arange(N) // 2], ids=["examples", "users"])
@pytest.mark.parametrize("weights", OTHER_WEIGHTS)
def test_padding_is_known_by_weights_of_tokens_and_by_whole_numbers(weights, user_ids):
    random = np.random.default_rng(0)
    x, y = random.normal(size=[N, 2]).astype("float32"), random.normal(size=[N, 3, 1])
    k = None if user_ids is None else 2
    sampling = dp.PoissonSampling(0.2, 80, 1_000, examples_per_user=k)
    size = sampling.expected_batch_size(N // (k or 1))
    for forgets in (False, True):
        inputs = tf.keras.Input([2])
        outputs = tf.keras.layers.Dense(3, bias_initializer="ones")(inputs)
        outputs = tf.keras.layers.Reshape([3, 1])(outputs)
        model = (Forgetful if forgets else tf.keras.Model)(inputs, outputs)
        optimizer = dp.DPSGD(1.0, SIGMA, expected_batch_size=size, examples_per_user=k)
        model.compile(optimizer, loss="mse")
        data = x, y, OTHER_WEIGHTS[weights]
        if data[2].ndim == 1 and GENERATION == 3:
            data = (*data[:2], data[2][:, np.newaxis])  # as losses of tokens need them there
        batches = dp.poisson_batches(data, sampling, user_ids=user_ids).take(3)
        if not forgets:
            model.fit(batches, verbose=0)
            assert optimizer.ledger.segments == [(SIGMA, size, 3)]
            assert [(c.checked, c.repeated) for c in optimizer.ledger.checks] == [(3, 0)]
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
            model.fit(batches, verbose=0)
        assert optimizer.ledger.segments == []


@pytest.mark.slow_on(2)
def test_validation_says_the_same_as_fit():
    (batch,) = drawn(1)
    inputs = tf.keras.Input([2])
    model = Forgetful(inputs, tf.keras.layers.Dense(1, bias_initializer="ones")(inputs))
    model.compile(dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0), loss="mse")
    assert "Padding contributes to the loss" in str(dp.validate(model, batch))
    with pytest.raises(dp.NotPrivateError, match="Padding contributes to the loss"):
        check_per_example(model, batch)
    ordinary = tf.keras.Model(inputs, model.outputs[0])
    ordinary.compile(dp.DPSGD(1.0, SIGMA, expected_batch_size=40.0), loss="mse")
    assert dp.validate(ordinary, batch).ok
