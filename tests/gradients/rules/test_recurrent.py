"""Recurrent layers, functions and loops: per-example gradients without a Jacobian."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.api import per_example_gradients

layers = tf.keras.layers
# Sequences of several lengths, one with a gap.
UNEVEN = np.array([[1, 2, 0, 0, 0], [3, 1, 2, 2, 0], [4, 4, 4, 1, 2], [1, 0, 2, 0, 0]])


def model(*stack, data=None):
    """A classifier with these layers; the same weights each time."""

    def make():
        tf.keras.utils.set_random_seed(3)
        x = zoo.floats(4, 5, 2) if data is None else data
        return zoo.classifier(tf.keras.Sequential([*(f() for f in stack), layers.Dense(3)]), x)

    return make


def masked(layer):
    return model(lambda: layers.Embedding(5, 3, mask_zero=True), layer, data=UNEVEN)


def functional(call):
    def layer():
        inputs = tf.keras.Input([None, 2])
        return tf.keras.Model(inputs, call(inputs))

    return model(layer)


def all_outputs(x):
    sequence, h, c = layers.LSTM(3, return_sequences=True, return_state=True)(x)
    last = layers.LSTM(3)(sequence, initial_state=[h, c])
    return layers.Concatenate()([last, sequence[:, 2]])


def twice(layer):
    def call(x):
        shared = layer()
        return shared(x) + shared(2.0 * x[:, ::-1])

    return functional(call)


class Cell(layers.Layer):
    """Reads entry by entry, from a table, and in a product; some reads are used twice."""

    state_size = [3, 3]

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=[shape[-1], 3])
        self.scale = self.add_weight(name="scale", shape=[3])
        self.shift = self.add_weight(name="shift", shape=[])
        self.table = self.add_weight(name="table", shape=[2, 3])

    def call(self, x, states):
        rows = tf.gather(self.table, tf.cast(x[:, 0] > 0, tf.int32))
        product, gate = x @ self.kernel, self.scale * states[0]
        h = tf.tanh(product + gate + self.shift + rows + 0.5 * states[1]) * gate
        return h + 1.0, [h, product]


class Hidden(layers.Layer):
    """A layer whose weights are read in a `tf.function` of its own."""

    def __init__(self, body, lstm=False):
        super().__init__()
        self.body = body
        self.lstm = layers.LSTM(2) if lstm else None

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=[shape[-1], 4])
        self.recurrent = self.add_weight(name="recurrent", shape=[4, 4])
        self.bias = self.add_weight(name="bias", shape=[4])
        if self.lstm is not None:  # Keras 3 takes weights that the function creates for constants
            self.lstm.build(shape)

    def compute_output_shape(self, shape):
        return shape[0], 4

    @tf.function
    def call(self, x):
        return self.body(self, x)


def affine(layer, x):
    return (x @ layer.kernel) @ layer.recurrent + layer.bias


def hidden(body, **kwargs):
    return model(lambda: Hidden(body, **kwargs))


def over_range(layer, x, start=None, growth=1.0):
    h = tf.zeros([tf.shape(x)[0], 4]) if start is None else start
    for t in tf.range(tf.shape(x)[1]):
        kernel = layer.kernel if growth == 1.0 else layer.kernel * growth ** tf.cast(t, tf.float32)
        h = tf.tanh(x[:, t] @ kernel + h @ layer.recurrent + layer.bias)
    return h


def some_steps(layer, x):
    """Reads before and in the loop, and a loop that ends for its maximum of iterations."""
    sequence = tf.tanh(x @ layer.kernel)

    def step(t, h):
        h = tf.gather(sequence, t, axis=1) + h @ tf.transpose(layer.recurrent)
        return t + 1, tf.tanh(h) * tf.nn.relu(layer.bias)

    start = tf.ones([tf.shape(x)[0], 4])
    return tf.while_loop(lambda t, h: t < 5, step, [1, start], maximum_iterations=3)[1]


RECURRENT = {
    "LSTM": model(lambda: layers.LSTM(3, dropout=0.0)),
    "stacked, backwards": model(
        lambda: layers.LSTM(3, return_sequences=True, go_backwards=True), lambda: layers.GRU(2)
    ),
    "masked GRU, backwards": masked(lambda: layers.GRU(3, go_backwards=True)),
    "masked, bidirectional": masked(lambda: layers.Bidirectional(layers.LSTM(3))),
    "all outputs": functional(all_outputs),
    "the state alone": functional(lambda x: layers.LSTM(3, return_state=True)(x)[2]),
    "shared": twice(lambda: layers.GRU(3)),
    "several loops": model(
        lambda: layers.SimpleRNN(3, return_sequences=True, use_bias=False),
        lambda: layers.GRU(2, activation="relu", reset_after=False, implementation=1),
    ),
    "masked, stacked cells": masked(
        lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)], go_backwards=True)
    ),
    "own cell": model(lambda: layers.RNN(Cell())),
    "ConvLSTM": model(
        lambda: layers.Reshape([5, 2, 1]), lambda: layers.ConvLSTM1D(2, 2), layers.Flatten
    ),
    "function": hidden(
        lambda layer, x: tf.reduce_sum(tf.tanh(affine(layer, x)) @ layer.recurrent, axis=1)
    ),
    "shared function with a loop": twice(lambda: Hidden(over_range)),
    "LSTM in a function": hidden(lambda layer, x: affine(layer, layer.lstm(x)), lstm=True),
    "function with reads around a loop": hidden(some_steps),
}
if GENERATION == 2:  # layers of Keras 3 have no such argument
    RECURRENT["time major"] = functional(
        lambda x: layers.LSTM(3, time_major=True)(tf.transpose(x, [1, 0, 2]))
    )
UNCOVERED = {
    "a start made of variables": hidden(
        lambda layer, x: over_range(layer, x, tf.ones([tf.shape(x)[0], 4]) @ layer.recurrent)
    ),
    "another kernel in each step": hidden(lambda layer, x: over_range(layer, x, growth=0.9)),
    "a gradient of its own": hidden(lambda layer, x: tf.nn.silu(affine(layer, x[:, 0]))),
    "branches": hidden(lambda layer, x: affine(layer, x[:, 0] if tf.size(x) > 2 else x[:, 1])),
    "random numbers": hidden(lambda layer, x: affine(layer, tf.nn.dropout(x[:, 0], 0.5))),
    "writing to a variable": hidden(
        lambda layer, x: affine(layer, x[:, 0]) * layer.bias.assign_add(tf.ones([4]))
    ),
}
RECURRENT_DROPOUT = model(lambda: layers.LSTM(3, recurrent_dropout=0.5))
if GENERATION == 2:  # it draws a mask in each step; Keras 3 draws one before the loop
    UNCOVERED["recurrent dropout"] = RECURRENT_DROPOUT
MODES = {
    "stacked, backwards": "unknown length",
    "shared function with a loop": "unknown length",
    "own cell": "graph of fixed size",
    "masked GRU, backwards": "xla",
}


def compiled(function, batch, mode="graph"):
    """Without AutoGraph, which takes longer than all else here."""
    function = tf.autograph.experimental.do_not_convert(function)
    if mode == "unknown length":
        signature = [tf.TensorSpec([None, None, 2]), tf.TensorSpec([None], tf.int64)]
        return tf.function(function, input_signature=signature)
    return zoo.in_mode(mode, function, batch)


def assert_exact(problem, mode="graph", method="traced"):
    rows = zoo.batch_of_one_gradients(problem)
    generator = np.random.default_rng(4)
    scale = [generator.uniform(0.3, 3.0, r.shape[1:]).astype("float32") for r in rows]
    shift = [generator.normal(0.0, 0.3, r.shape[1:]).astype("float32") for r in rows]
    weights = np.array([0.5, 0.0, 2.0, 1.0], "float32")

    def all_of_it(*batch):
        source = zoo.source(problem, *batch, method=method)
        return (
            source.squared_norms(),
            source.squared_norms(scale, shift),
            *source.weighted_sum(weights),
        )

    plain, both, *sums = compiled(all_of_it, problem.batch, mode)(*problem.batch)
    changed = [(r + b) * a for r, a, b in zip(rows, scale, shift)]
    np.testing.assert_allclose(plain, squared_norms(rows), rtol=1e-5)
    np.testing.assert_allclose(both, squared_norms(changed), rtol=1e-5)
    size = max(np.abs(r).max() for r in rows)
    for actual, r in zip(sums, rows):
        expected = np.tensordot(weights.astype("float64"), r, axes=1)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * size)


QUICK = ["LSTM", "masked GRU, backwards", "several loops", "own cell", "ConvLSTM", "function"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECURRENT]
)
def test_rules_give_the_gradients_of_batches_of_one(name):
    assert_exact(RECURRENT[name](), MODES.get(name, "graph"))


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False] + [True] * (GENERATION == 3))
def test_dropout_is_drawn_once(recurrent):
    tf.random.set_seed(None)
    problem = RECURRENT_DROPOUT() if recurrent else model(lambda: layers.LSTM(3, dropout=0.5))()

    def step(*batch):
        with tf.GradientTape(persistent=True) as tape:
            loss = problem.losses(*batch)
        expected = tape.gradient(loss, problem.variables)
        source = per_example_gradients(loss, problem.variables, tape, "traced")
        return expected, source.weighted_sum(tf.ones([4]))

    for a, b in zip(*compiled(step, problem.batch)(*problem.batch)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", UNCOVERED)
def test_no_rule_covers_what_is_not_understood_or_would_differ_if_run_again(name):
    problem = UNCOVERED[name]()
    tf.random.set_seed(None)  # else random numbers are refused for the seed of the weights
    run = compiled(lambda *batch: zoo.source(problem, *batch, method="traced"), problem.batch)
    with pytest.raises(
        ValueError, match="No rule covers.*kernel, read by|writes data of the batch"
    ):
        run(*problem.batch)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["a gradient of its own", "a start made of variables"])
def test_what_no_rule_covers_is_left_to_the_jacobian(name):
    with pytest.warns(UserWarning, match="No rule covers.*kernel, read by"):
        assert_exact(UNCOVERED[name](), method="auto")


def test_a_variable_that_was_written_after_its_read_is_not_read_again():
    layer = Hidden(lambda layer, x: affine(layer, x[:, 0]))
    layer.build([None, 2])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x), axis=1)
        layer.bias.assign_add(tf.ones([4]))
        per_example_gradients(loss, layer.trainable_variables, tape, "traced")

    with pytest.raises(ValueError, match="No rule covers.*bias, read by"):
        compiled(step, [zoo.floats(4, 5, 2)])(zoo.floats(4, 5, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LSTM", "own cell"])
def test_an_example_that_is_nan_or_not_there_changes_nothing_for_the_others(name):
    problem = RECURRENT[name]()
    x, y = problem.batch
    ones, weights = np.ones(4, "float32"), tf.constant([1.0, 1.0, 0.0, 1.0])

    def step(factor, *batch):
        with tf.GradientTape() as tape:
            loss = problem.losses(*batch) * factor
        source = per_example_gradients(loss, problem.variables, tape, "traced")
        return [source.squared_norms(), *source.weighted_sum(weights[: tf.shape(factor)[0]])]

    run = compiled(step, [ones, x, y])
    norms, *sums = run(ones, x, y)
    assert all((total.numpy() == 0).all() for total in run(ones[:0], x[:0], y[:0])[1:])
    spoilt_x, spoilt_factor = x.copy(), ones.copy()
    spoilt_x[2, 3, 0] = spoilt_factor[2] = np.nan
    for batch in ((ones, spoilt_x, y), (spoilt_factor, x, y)):
        spoilt_norms, *spoilt_sums = run(*batch)
        assert (np.isnan(spoilt_norms) == [False, False, True, False]).all()
        np.testing.assert_array_equal(spoilt_norms[:2], norms[:2])
        for a, b in zip(spoilt_sums, sums):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_microbatches_take_the_mean_over_examples_and_steps():
    problem = RECURRENT["LSTM"]()
    rows = [r.reshape(2, 2, *r.shape[1:]).mean(axis=1) for r in zoo.batch_of_one_gradients(problem)]

    def step(*batch):
        return zoo.source(problem, *batch, method="traced", num_microbatches=2).squared_norms()

    norms = compiled(step, problem.batch)(*problem.batch)
    np.testing.assert_allclose(norms, squared_norms(rows), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    [{"steps_per_execution": 2}, pytest.param({"jit_compile": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_fit_without_noise_and_clipping_is_fit_with_sgd(compiled):
    def trained(optimizer, reduction):
        tf.keras.utils.set_random_seed(3)
        net = tf.keras.Sequential([layers.LSTM(3), layers.Dense(3)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
        net.compile(optimizer, loss, **compiled)
        net.fit(zoo.floats(8, 5, 2), zoo.labels(8), batch_size=4, shuffle=False, verbose=0)
        return net.get_weights()

    private = dp.DPSGD(1e6, 0.0, learning_rate=0.5, gradients="traced")
    expected = trained(tf.keras.optimizers.SGD(0.5), "sum_over_batch_size")
    for a, b in zip(trained(private, "none"), expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
