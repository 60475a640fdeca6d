"""A loss that depends on how many examples a batch of random size has, in whatever way."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import row_ties, zoo
from tests.helpers.row_ties import floats, size

KERNEL = tf.Variable(zoo.floats(4, seed=2))
ROTATION = tf.keras.layers.RandomRotation(0.1, seed=1)
TABLE = tf.Variable(tf.ones([9]), trainable=False)


def repeated(x, loss):
    """Adds something for each example."""
    return (
        loss * tf.while_loop(lambda i, _: i < size(x), lambda i, s: (i + 1, s + 1.0), [0, 0.0])[1]
    )


def in_body(x, loss):
    n = tf.shape(x)
    return tf.while_loop(lambda i, _: i < 2, lambda i, s: (i + 1, s * floats(n[0])), [0, loss])[1]


@tf.custom_gradient
def divided(loss):
    return tf.identity(loss), lambda d: d / floats(tf.shape(d)[0])


COUNTING = {
    "where": lambda x, loss: tf.where(size(x) <= 32, 1.0, -1.0) * loss,
    "cond": lambda x, loss: tf.cond(size(x) <= 32, lambda: loss, lambda: -loss),
    "case": lambda x, loss: tf.switch_case(size(x) % 2, [lambda: loss, lambda: -loss]),
    "one_hot": lambda x, loss: loss * tf.one_hot(size(x) % 2, 2)[0],
    "gather": lambda x, loss: loss * tf.gather(TABLE, size(x)),
    "gather of a constant": lambda x, loss: loss * tf.constant([1.0, 2.0])[size(x) % 2],
    "while": repeated,
    "matmul of ones": lambda x, loss: (
        loss * tf.matmul(tf.ones([1, size(x)]), tf.ones([size(x), 1]))[0, 0]
    ),
    "einsum of ones": lambda x, loss: (
        loss * tf.einsum("i,i->", tf.ones([size(x)]), tf.ones_like(loss))
    ),
    "sum of ones by a matmul with the data": lambda x, loss: (
        loss * tf.matmul(x[:, None, :1] * tf.ones([4, 1]), tf.ones([1, size(x)]))[:, 0, 0]
    ),
    "sum over an axis of that length": lambda x, loss: tf.reduce_sum(
        loss[:, None] * tf.ones([1, size(x)]), axis=1
    ),
    "segments of an axis of that length": lambda x, loss: tf.math.unsorted_segment_sum(
        tf.ones([size(x), 1]) * loss, tf.zeros([size(x)], tf.int32), 1
    )[0],
    "mean of ones": lambda x, loss: loss * tf.reduce_mean(tf.ones([size(x)])),
    "softmax of ones": lambda x, loss: loss * tf.nn.softmax(tf.ones([size(x)]))[0],
    "maximum of a range": lambda x, loss: loss * floats(tf.reduce_max(tf.range(size(x)))),
    "last of a range": lambda x, loss: loss * floats(tf.range(size(x))[-1]),
    "last of a slice": lambda x, loss: loss * TABLE[: size(x)][-1],
    "sum of a slice": lambda x, loss: loss * tf.reduce_sum(tf.slice(TABLE, [0], [size(x)])),
    "size": lambda x, loss: loss * floats(tf.size(x)),
    "size of ones": lambda x, loss: loss * floats(tf.size(tf.ones([size(x)]))),
    "size of a range": lambda x, loss: loss * floats(tf.shape(tf.range(size(x)))[0]),
    "of the loss": lambda x, loss: loss * floats(tf.size(loss) > 32),
    "string": lambda x, loss: (
        loss * tf.strings.to_number(tf.strings.as_string(size(x)) + tf.constant("0"))
    ),
    "hash": lambda x, loss: (
        loss * floats(tf.strings.to_hash_bucket_fast(tf.strings.as_string(size(x)), 7))
    ),
    "seed": lambda x, loss: loss * tf.random.stateless_uniform([], [size(x), 1]),
    "bounds of noise": lambda x, loss: loss * tf.random.uniform([], 0.0, floats(size(x))),
    "function": lambda x, loss: tf.function(lambda loss: loss / floats(size(loss)))(loss),
    "argument of a function": lambda x, loss: tf.function(lambda n: loss * n)(floats(size(x))),
    "predicate in a function": lambda x, loss: tf.function(
        lambda loss, n: tf.cond(n > 32, lambda: loss, lambda: -loss)
    )(loss, size(x)),
    "body of a loop": in_body,
    "branch": lambda x, loss: tf.cond(TABLE[0] > 0, lambda: loss / floats(size(x)), lambda: loss),
    "unstacked shape": lambda x, loss: loss * floats(tf.unstack(tf.shape(x))[0]),
    "entry of as many as nobody knows": lambda x, loss: (
        loss * floats(tf.tile(tf.shape(x)[:1], [tf.argmax(TABLE) + 1])[0])
    ),
    "parity": lambda x, loss: loss * floats(tf.equal(size(x) % 2, 0)),
    "list": lambda x, loss: (
        loss
        * floats(tf.TensorArray(tf.float32, size(x), dynamic_size=True, element_shape=[]).size())
    ),
    "unique": lambda x, loss: loss * floats(tf.reduce_max(tf.unique(tf.range(size(x)))[1])),
    "linspace": lambda x, loss: loss * tf.linspace(0.0, 1.0, size(x))[1],
    "custom gradient": lambda x, loss: divided(loss),
    "custom gradient in a function": lambda x, loss: tf.function(divided)(loss),
    "scan": lambda x, loss: loss * tf.scan(lambda s, _: s + 1.0, tf.range(size(x)), 0.0)[-1],
}


def lengths_in_a_loop(x, loss):
    """A shape is an argument of the body, which looks at the width alone."""
    n = tf.shape(x)
    body = lambda i, s: (i + 1, s + loss / floats(n[1]) + tf.zeros([n[0]]))  # noqa: E731
    return tf.while_loop(lambda i, _: i < n[1], body, [0, tf.zeros([size(x)])])[1]


NOT_COUNTING = {
    **row_ties.SAME,
    "width": lambda x, loss: loss / floats(tf.shape(x)[1]),
    "unstacked width": lambda x, loss: loss / floats(tf.unstack(tf.shape(x))[1]),
    "predicate of the width": lambda x, loss: tf.cond(
        tf.shape(x)[1] > 2, lambda: loss, lambda: -loss
    ),
    "shape as an argument": lambda x, loss: tf.function(lambda n: loss / floats(n[1]))(tf.shape(x)),
    "shape in a loop": lengths_in_a_loop,
    "rank": lambda x, loss: loss / floats(tf.rank(x)),
    "reshape": lambda x, loss: tf.reduce_mean(
        tf.reshape(tf.reshape(x, [4 * size(x)]), [size(x), 4]) * loss[:, None], axis=1
    ),
    "reshape to what is left": lambda x, loss: tf.reduce_mean(
        tf.reshape(x[:, :2] * loss[:, None], [size(x), -1]), axis=1
    ),
    "joined on a width": lambda x, loss: tf.reduce_mean(
        tf.concat([x, tf.tile(TABLE[None, :2], [size(x), 1])], axis=1) * loss[:, None], axis=1
    ),
    "augmentation": lambda x, loss: tf.reduce_mean(
        ROTATION(tf.reshape(x, [-1, 2, 2, 1]), training=True) * loss[:, None, None, None], [1, 2, 3]
    ),
    "a column of noise": lambda x, loss: tf.reduce_mean(
        x * tf.random.normal([size(x)])[:, None] * loss[:, None], axis=1
    ),
    "assertion": lambda x, loss: (
        tf.ensure_shape(loss, [None])
        * tf.cast(tf.debugging.assert_positive(size(x)) is None or True, tf.float32)
    ),
}


def source(function, x_shape=(None, 4), batch=row_ties.WEIGHTS):
    found = []

    @tf.function(input_signature=[tf.TensorSpec(x_shape)], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = function(x, tf.linalg.matvec(x, KERNEL))
        found.append(zoo.per_example_gradients(loss, [KERNEL], tape))
        return loss

    step.get_concrete_function()
    return found[0]


@pytest.mark.in_turns
@pytest.mark.slow_after(18)
@pytest.mark.parametrize("name", COUNTING)
def test_what_depends_on_the_size_of_the_batch_counts(name):
    assert source(COUNTING[name]).loss.counts_batch


@pytest.mark.in_turns
@pytest.mark.slow_after(12)
@pytest.mark.parametrize("name", NOT_COUNTING)
def test_what_says_how_long_axes_are_does_not_count(name):
    assert not source(NOT_COUNTING[name]).loss.counts_batch
    if name not in (
        "positions in merged axes",
        "reshape",
        "augmentation",
    ):  # their width has to be known
        assert not source(NOT_COUNTING[name], (None, None)).loss.counts_batch


@pytest.mark.parametrize("name", ["where", "while", "matmul of ones", "function"])
def test_nothing_counts_in_batches_of_one_size(name):
    assert not source(COUNTING[name], (8, 4)).loss.counts_batch


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["where", "cond", "one_hot", "predicate in a function"])
def test_one_example_more_moves_the_sum_by_more_than_the_bound_and_is_refused(name):
    def clipped_sum(x):
        with tf.GradientTape() as tape:
            x = tf.constant(x)
            w = tf.Variable(tf.ones([4]))
            factor = tf.reduce_mean(COUNTING[name](x, tf.ones([len(x)])))
            loss = factor * tf.linalg.matvec(x, w)
        rows = tape.jacobian(loss, w)
        return (rows / tf.maximum(1.0, tf.norm(rows, axis=1, keepdims=True))).numpy().sum(axis=0)

    x = np.full([33, 4], 9.0, "float32")
    change = np.linalg.norm(clipped_sum(x) - clipped_sum(x[1:]))
    assert change > 30.0  # 65 where signs change, at most 1 if the size did not matter
    w, optimizer = tf.Variable(tf.ones([4])), dp.DPSGD(1.0, 0.0, expected_batch_size=32)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = COUNTING[name](x, tf.linalg.matvec(x, w))
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(dp.NotPrivateError, match="depends on the number of examples"):
        step.get_concrete_function()
