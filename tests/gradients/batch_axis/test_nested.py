"""`minimize` in an inner function: what its arguments hold is found where it is called."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp.gradients import watch

SPEC = [tf.TensorSpec([None, 3]), tf.TensorSpec([None])]
X, Y = floats(8, 3), floats(8)
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def mean(x):
    return tf.reduce_mean(x, axis=0)


def compiled(function, spec=SPEC, **kwargs):
    return tf.function(function, input_signature=spec, autograph=False, **kwargs)


@pytest.fixture(scope="module")
def problem():
    """A step for x, y and a number, and its weights: traced once, called by many."""
    w = tf.Variable([1.0, -1.0, 0.5])
    optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1, learning_rate=1.0)
    optimizer.build([w])

    def step(x, y, number):
        with tf.GradientTape() as tape:
            loss = number * tf.square(tf.linalg.matvec(x, w) - y)
        optimizer.minimize(loss, [w], tape)
        return tf.constant(0)

    inner = compiled(step, [*SPEC, tf.TensorSpec([])])
    inner.get_concrete_function()
    return lambda x, y, number=1.0: inner(x, y, number), w


def loop(rounds, body, state):
    """`body` returns the state after one round."""
    return tf.while_loop(
        lambda i, *s: i < rounds, lambda i, *s: (i + 1, *body(i, *s)), [tf.constant(0), *state]
    )


def scaled_in_a_loop(f, x, y, w):
    def body(i, x, m):
        f(x, y)
        return 0.5 * x, m + mean(x)

    loop(2, body, [x, tf.zeros([3])])


def centred_in_a_loop(f, x, y, w):
    def body(i, x):
        f(x, y)
        return (x - mean(x),)

    loop(2, body, [x])


def number_of_a_loop(f, x, y, w):
    def body(i, m):
        f(x, y, m)
        return (m + tf.reduce_mean(x),)

    loop(2, body, [tf.constant(0.0)])


def chunks(f, x, y, w):
    def body(i):
        f(x[i * 2 : i * 2 + 2], y[i * 2 : i * 2 + 2])
        return ()

    loop(2, body, [])


def parts(f, x, y, w):
    for a, b in zip(tf.split(x, 2), tf.split(y, 2)):
        f(a, b)


def by_way_of_another(prepare):
    return lambda f, x, y, w: tf.function(lambda a, b: f(a, b))(prepare(x), y)


def in_branch(condition):
    return lambda f, x, y, w: tf.cond(condition(x, w), lambda: f(x, y), lambda: 0)


REFUSED = {
    "normalised": lambda f, x, y, w: f(x - mean(x), y),
    "a mean as number": lambda f, x, y, w: f(x, y, tf.reduce_mean(x)),
    "mixup": lambda f, x, y, w: f(0.7 * x + 0.3 * tf.reverse(x, [0]), y),
    "labels in another order": lambda f, x, y, w: f(x, tf.reverse(y, [0])),
    "labels of other rows": lambda f, x, y, w: f(x[:2], y[2:4]),
    "rows of the inputs only": lambda f, x, y, w: f(x[:2], y),
    "rows of the labels only": lambda f, x, y, w: f(x, y[:2]),
    "rows of some parts only": lambda f, x, y, w: f(x[:2], tf.ones([2]) * y[:2]),
    "two levels": by_way_of_another(lambda x: x - mean(x)),
    "centred in a loop": centred_in_a_loop,
    "a number of a loop": number_of_a_loop,
    "the data decides": in_branch(lambda x, w: x[0, 0] > 0),
    # It is random, and whether there is a release would tell it.
    "the size decides": in_branch(lambda x, w: tf.shape(x)[0] > 0),
}
ACCEPTED = {
    "the batch": lambda f, x, y, w: f(x, y),
    "each example by itself": lambda f, x, y, w: f(x / 255.0, tf.abs(y), tf.constant(3.0)),
    "a number of the weights": lambda f, x, y, w: f(x, y, tf.reduce_sum(w)),
    "two levels": by_way_of_another(lambda x: 2.0 * x),
    "halves": lambda f, x, y, w: [f(x[:2], y[:2]), f(x[2:], y[2:])],
    "parts": parts,
    "chunks": chunks,
    "scaled in a loop": scaled_in_a_loop,
    "the weights decide": in_branch(lambda x, w: w[0] > 0),
}


def trace(problem, caller, spec=SPEC, **kwargs):
    inner, w = problem
    compiled(lambda x, y: (caller(inner, x, y, w), 0)[1], spec, **kwargs).get_concrete_function()


# Numbers and rows without data: inside they count as settings, and as part of the batch.
TOLD = {
    "the size": lambda f, x, y, w: f(x, y, tf.cast(tf.shape(x)[0], tf.float32)),
    "the size in a loop": lambda f, x, y, w: loop(
        2, lambda i, n: (f(x, y, n), n + tf.cast(tf.size(y), tf.float32))[1:], [tf.constant(0.0)]
    ),
    "rows of numbers": lambda f, x, y, w: f(x, tf.cast(tf.range(tf.shape(x)[0]), tf.float32)),
    "noise of a known seed": lambda f, x, y, w: f(
        x, tf.random.stateless_normal([tf.shape(x)[0]], [1, 2])
    ),
}
NOT_TOLD = {
    "a setting": lambda f, x, y, w: f(x, y, tf.constant(0.5)),
    "a setting in a loop": lambda f, x, y, w: loop(
        2, lambda i, n: (f(x, y, n), 0.5 * n)[1:], [tf.constant(1.0)]
    ),
    "the same for all rows": lambda f, x, y, w: f(x, tf.ones([tf.shape(x)[0]])),
    "the width": lambda f, x, y, w: f(x, y, tf.cast(tf.shape(x)[1], tf.float32)),
}


@pytest.mark.parametrize("name", TOLD)
def test_arguments_that_tell_the_row_or_the_size_are_refused(problem, name):
    with pytest.raises(dp.NotPrivateError, match="depends on the row"):
        trace(problem, TOLD[name])


@pytest.mark.parametrize("name", NOT_TOLD)
def test_arguments_without_data_that_tell_neither_are_accepted(problem, name):
    trace(problem, NOT_TOLD[name])


@pytest.mark.in_turns
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_not_the_examples_are_refused(problem, name):
    """The step had been traced before, and is not traced again."""
    with pytest.raises(dp.NotPrivateError, match="inner function|writes data of the batch"):
        trace(problem, REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_arguments_that_are_the_examples_are_accepted(problem, name):
    trace(problem, ACCEPTED[name])


def test_xla_around_the_step_changes_nothing(problem):
    with pytest.raises(dp.NotPrivateError, match="x of 'step'.*Mean"):
        trace(problem, REFUSED["normalised"], jit_compile=True)
    trace(problem, ACCEPTED["the batch"], jit_compile=True)


def test_sizes_that_are_known_outside_are_used(problem):
    spec = [tf.TensorSpec([4, 3]), tf.TensorSpec([4])]
    trace(problem, lambda f, x, y, w: f(tf.reshape(tf.reshape(x, [12]), [4, 3]), y), spec)
    trace(problem, REFUSED["the size decides"], spec)
    with pytest.raises(dp.NotPrivateError, match="inner function"):
        trace(problem, lambda f, x, y, w: f(tf.reshape(tf.transpose(x), [4, 3]), y), spec)


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["normalised", "a mean as number", "mixup"])
def test_such_arguments_move_the_sum_beyond_its_bound(problem, name, monkeypatch):
    """Without the search a replaced row moves the clipped sum by more than 2."""
    monkeypatch.setattr(watch, "refuse_mixed_arguments", lambda frame, loss: None)
    inner, w = problem
    step = compiled(lambda x, y: REFUSED[name](inner, x, y, w))
    weights = np.float32([1.0, -1.0, 0.5])

    def clipped_sum(x):
        w.assign(weights)
        step(x, tf.fill([len(x)], 100.0))
        return weights - w.numpy()

    x = np.tile(0.1 * weights, [40, 1])
    replaced = x.copy()
    replaced[0] *= 1e5
    assert np.linalg.norm(clipped_sum(x) - clipped_sum(replaced)) > 3.9


def over_the_data_set(prepare):
    def caller(f, x, y, w):
        for a, b in BATCHES:
            f(prepare(a), b)

    return caller


def over_the_iterator(prepare):
    def caller(f, iterator, y, w):
        for a, b in iterator:
            f(prepare(a), b)

    return caller


@pytest.mark.parametrize("over", [over_the_data_set, over_the_iterator])
def test_loops_over_data_are_followed(problem, over):
    inner, w = problem
    for prepare, right in ((lambda x: 2.0 * x, True), (lambda x: x - mean(x), False)):
        caller = over(prepare)
        step = tf.function(lambda x, y, caller=caller: caller(inner, x, y, w))
        arguments = (iter(BATCHES) if over is over_the_iterator else X, Y)
        if right:
            step.get_concrete_function(*arguments)
        else:
            with pytest.raises(dp.NotPrivateError, match="inner function"):
                step.get_concrete_function(*arguments)


@pytest.mark.slow_on(2)
def test_what_an_inner_function_captures_is_followed():
    w = tf.Variable(tf.ones([3]))
    optimizer = dp.DPSGD(1.0, 0.0)
    optimizer.build([w])

    def outer(prepare):
        def caller(x, y):
            prepared = prepare(x)

            @tf.function(autograph=False)
            def inner(y):
                with tf.GradientTape() as tape:
                    loss = tf.linalg.matvec(prepared, w) + y
                optimizer.minimize(loss, [w], tape)

            inner(y)

        return compiled(caller)

    outer(lambda x: 2.0 * x).get_concrete_function()
    with pytest.raises(dp.NotPrivateError, match="inner function"):
        outer(lambda x: x - mean(x)).get_concrete_function()


class Adds(tf.keras.layers.Layer):
    """Adds a public array, which TensorFlow captures instead of copying if it is large."""

    def __init__(self, array):
        super().__init__()
        self._array = tf.constant(array)

    def call(self, x):
        return x + self._array


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "shape, accepted",
    [((1, 2, 4), True), ((20, 40), True), ((4, 1, 2), False), ((4, 20, 40), False)],
    ids=["small", "large", "small, by row", "large, by row"],
)
def test_a_public_array_of_any_size_may_be_added_unless_it_differs_by_row(shape, accepted):
    layers = tf.keras.layers
    inputs = tf.keras.Input(batch_shape=(4, *shape[-2:]))
    outputs = layers.Dense(1)(layers.Flatten()(Adds(floats(*shape))(inputs)))
    model = tf.keras.Model(inputs, outputs)
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4.0, learning_rate=0.1)
    model.compile(optimizer, loss="mse")
    data = tf.data.Dataset.from_tensor_slices((floats(8, *shape[-2:]), floats(8, 1)))
    batches = data.batch(4, drop_remainder=True)
    if accepted:
        model.fit(batches, verbose=0)
        assert optimizer.ledger.num_releases == 2
        return
    with pytest.raises(dp.NotPrivateError):
        model.fit(batches, verbose=0)
    assert optimizer.ledger.num_releases == 0


def test_constants_are_the_data_if_nothing_is_fed(problem):
    inner, _ = problem
    x, y = tf.constant(X), tf.constant(Y)
    tf.function(lambda: inner(x, y), autograph=False).get_concrete_function()
    with pytest.raises(dp.NotPrivateError, match="inner function"):
        tf.function(lambda: inner(x - mean(x), y), autograph=False).get_concrete_function()
