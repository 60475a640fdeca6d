"""What is tied to the row of an example is refused: one example more moves the others' rows."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import row_ties, zoo

layers = tf.keras.layers
MODES = ("graph", "graph of fixed size")
KERNEL = tf.Variable(zoo.floats(4, seed=2))
X = zoo.floats(4, 4)


def problem(function, x=X):
    def losses(x):
        return function(x, tf.linalg.matvec(x, KERNEL))

    return zoo.Problem([KERNEL], losses, (x,))


def search(problem, mode):
    def step(x):
        return zoo.source(problem, x).squared_norms()

    return zoo.in_mode(mode, step, problem.batch).get_concrete_function()


@pytest.mark.in_turns
@pytest.mark.slow_after(27)
@pytest.mark.parametrize("name", row_ties.TIED)
def test_what_is_tied_to_rows_is_refused(name):
    for mode in MODES:
        with pytest.raises(dp.NotPrivateError, match="row of the batch|affect each other|mix"):
            search(problem(row_ties.TIED[name]), mode)


@pytest.mark.in_turns
@pytest.mark.slow_after(7)
@pytest.mark.parametrize("name", row_ties.SAME)
def test_what_is_the_same_in_all_rows_is_accepted_and_exact(name):
    same = problem(row_ties.SAME[name])
    expected = (zoo.batch_of_one_gradients(same)[0] ** 2).sum(axis=1)
    for mode in MODES:
        np.testing.assert_allclose(search(same, mode)(tf.constant(X)), expected, rtol=1e-4)


SIGNS = np.tile([1.0, -1.0], 140).astype("float32")
# What the issue measured: each multiplies losses by signs that go by row.
MEASURED = {
    "range": lambda x: 1.0 - 2.0 * row_ties.floats(tf.range(row_ties.size(x)) % 2),
    "cumsum of ones": lambda x: tf.cos(np.pi * tf.cumsum(tf.ones_like(x[:, 0]))),
    "weights by row": lambda x: tf.constant(SIGNS)[: row_ties.size(x)],
    "stateless noise": lambda x: tf.sign(tf.random.stateless_normal([row_ties.size(x)], [1, 2])),
    "Dropout after set_random_seed": lambda x: tf.nn.dropout(tf.ones_like(x[:, 0]), 0.5),
}


def clipped_sum(function, x):
    """Σ gᵢ / max(1, ‖gᵢ‖) without noise, by plain TensorFlow on the whole batch."""
    tf.random.set_seed(5)
    rows = tf.constant(function(tf.constant(x)))[:, None] * x  # of losses that are linear
    return (rows / tf.maximum(1.0, tf.norm(rows, axis=1, keepdims=True))).numpy().sum(axis=0)


@pytest.mark.in_turns
@pytest.mark.parametrize("name", MEASURED)
def test_one_example_more_moves_the_sum_by_more_than_the_bound_and_is_refused(name):
    tf.random.set_seed(5)
    values = np.array(MEASURED[name](tf.ones([256, 4])))
    x = np.where(values[:, None] > 0, 9.0, -9.0).astype("float32") * np.ones([1, 4], "float32")
    after, before = (clipped_sum(MEASURED[name], batch) for batch in (x, x[1:]))
    tf.random.set_seed(None)
    assert np.linalg.norm(after - before) > 60.0  # at most 1, if rows did not matter
    seeded = name.startswith("Dropout")
    tied = problem(lambda x, loss: loss * MEASURED[name](x), x)
    for mode in MODES:
        if seeded:  # accepted, and drawn with a seed that nobody knows
            found = []
            for _ in range(2):
                tf.random.set_seed(5)
                step = search(tied, mode)
                found.append([step(tf.constant(x)).numpy() for _ in range(2)])
            tf.random.set_seed(None)
            drawn = np.reshape(found, [4, 256]) > 0
            assert 90 < drawn.sum(axis=1).min() and drawn.sum(axis=1).max() < 166
            assert len({tuple(d) for d in drawn}) == 4
        else:
            with pytest.raises(dp.NotPrivateError, match="row of the batch"):
                search(tied, mode)


def seeded_step(layer, x):
    """A compiled step with a layer that was made with a known seed."""
    tf.keras.utils.set_random_seed(7)
    made, w = layer(), tf.Variable(tf.ones([]))

    @tf.function(input_signature=[tf.TensorSpec([None, *x.shape[1:]])])
    def step(x):
        with tf.GradientTape() as tape:
            outputs = made(x, training=True)
            losses = w * tf.reduce_sum(outputs, axis=list(range(1, x.shape.rank)))
        return losses, zoo.per_example_gradients(losses, [w], tape).squared_norms()

    return step


def masks(layer, x):
    """What the layer lets through, in two programs with two steps each."""
    found = []
    for _ in range(2):
        step = seeded_step(layer, x)
        for _ in range(2):
            losses, squares = step(tf.constant(x))
            np.testing.assert_allclose(squares, losses**2, rtol=1e-4)  # of one and the same draw
            found.append(losses.numpy())
    tf.random.set_seed(None)
    return found


class Hidden(layers.Layer):
    """A generator of its own, drawn from in a function."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)
        self.function = tf.function(lambda x: x * self.generator.uniform(tf.shape(x)))

    def call(self, x):
        return self.function(x)


class InLoop(Hidden):
    def call(self, x):
        body = lambda i, x: (i + 1, x * self.generator.uniform(tf.shape(x)))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 2, body, [0, x])[1]


class InBranch(Hidden):
    def call(self, x):
        drop = lambda x: tf.nn.dropout(x, 0.5, seed=1)  # noqa: E731
        body = lambda i, x: (i + 1, tf.cond(i > 0, lambda: drop(x), lambda: x))  # noqa: E731
        return drop(x) * tf.while_loop(lambda i, x: i < 2, body, [0, x])[1]


SEEDED = {
    "Dropout": lambda: layers.Dropout(0.5),
    "Dropout with a seed": lambda: layers.Dropout(0.5, seed=1),
    "SpatialDropout1D": lambda: tf.keras.Sequential(
        [layers.Reshape([8, 2]), layers.SpatialDropout1D(0.5), layers.Flatten()]
    ),
    "GaussianNoise": lambda: layers.GaussianNoise(1.0),
    "AlphaDropout": lambda: layers.AlphaDropout(0.5),
    "LSTM": lambda: tf.keras.Sequential(
        [layers.Reshape([4, 4]), layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5)]
    ),
    "GRU": lambda: tf.keras.Sequential([layers.Reshape([4, 4]), layers.GRU(3, dropout=0.5)]),
    "a branch in a loop": InBranch,
    "MultiHeadAttention": lambda: tf.keras.Sequential(
        [
            layers.Reshape([4, 4]),
            (lambda attend: layers.Lambda(lambda x: attend(x, x, training=True)))(
                layers.MultiHeadAttention(1, 2, dropout=0.5)
            ),
            layers.Flatten(),
        ]
    ),
    "RandomRotation": lambda: tf.keras.Sequential(
        [layers.Reshape([4, 4, 1]), layers.RandomRotation(0.2, seed=1), layers.Flatten()]
    ),
    "RandomFlip": lambda: tf.keras.Sequential(
        [layers.Reshape([4, 4, 1]), layers.RandomFlip(seed=1), layers.Flatten(), layers.Dense(1)]
    ),
    "a generator in a function": Hidden,
    "a generator in a loop": InLoop,
}


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", SEEDED)
def test_numbers_with_a_known_seed_are_drawn_with_one_that_nobody_knows(name):
    found = masks(SEEDED[name], zoo.floats(32, 16))
    assert len({f.tobytes() for f in found}) == 4


class SeededInFunction(Hidden):
    def __init__(self):
        super().__init__()
        self.function = tf.function(lambda x: tf.nn.dropout(x, 0.5, seed=1))


class ResetInFunction(Hidden):
    def __init__(self):
        super().__init__()

        def draw(x):
            self.generator.state.assign(tf.zeros([3], tf.int64))
            return x * self.generator.uniform(tf.shape(x))

        self.function = tf.function(draw)


class Stateless(layers.Layer):
    def call(self, x):
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])


@pytest.mark.parametrize("layer", [SeededInFunction, ResetInFunction, Stateless])
def test_what_cannot_be_drawn_with_another_seed_is_refused(layer):
    with pytest.raises(dp.NotPrivateError, match="with a known seed|into a variable"):
        masks(layer, X)
