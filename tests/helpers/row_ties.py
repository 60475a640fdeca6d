"""Values that are tied to rows, and ones that are not; for `gradients/batch_axis/test_row_ties`.

Each function takes x [B, 4] and losses [B] with B = 4, so that sizes say nothing about axes, and
returns losses.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
WEIGHTS = np.linspace(-2, 2, 9).astype("float32")
VARIABLE = tf.Variable(WEIGHTS, trainable=False)
CAPTURED = tf.constant(WEIGHTS)
EQUAL = tf.constant(np.full(9, 0.7, "float32"))


def size(x):
    return tf.shape(x)[0]


def floats(x):
    return tf.cast(x, tf.float32)


def rows(x):
    """-1, 0, 1, …"""
    return floats(tf.range(size(x))) - 1.0


def solved(x, right):
    """[B, 4], public: the solutions of a system for each row, whose number is no longer known."""
    left = tf.eye(4, batch_shape=[size(x)]) + 0.1
    return tf.reshape(tf.linalg.solve(left, right[:, None, None] * tf.ones([4, 1])), [-1, 4])


def of_one_row(row):
    """[1, B], as far as the graph tells [?, B]."""
    return tf.ones([tf.shape(tf.where(VARIABLE > 1.9))[0], 1]) * row


def in_branch(x, loss):
    on = VARIABLE[0] < 0
    return tf.cond(on, lambda: loss * rows(x), lambda: loss)


def public_in_branch(x, loss):
    return loss * tf.cond(VARIABLE[0] < 0, lambda: rows(x), lambda: tf.ones([size(x)]))


def before_a_loop(x, loss):
    """The state of a loop is public at first."""
    body = lambda i, state: (i + 1, state + 0.5 * loss * (state + 1.0))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, [0, rows(x)])[1]


def loop_of_blocks(x, loss, state):
    """The rows of example i are i, B + i and 2 B + i, which a public state of 3 B rows hides."""
    flat = tf.reshape(tf.stack([loss, 2.0 * loss, 3.0 * loss]), [3 * size(x)])
    body = lambda i, s: (i + 1, s + 0.1 * flat * (s + 1.0))  # noqa: E731
    end = tf.while_loop(lambda i, _: i < 2, body, [0, state])[1]
    return tf.reduce_sum(tf.reshape(end, [3, size(x)]), axis=0)


def in_a_loop(x, loss):
    """The state of a loop is the same for all rows at first."""

    def body(i, state, total):
        return i + 1, state + rows(x), total + loss * state

    return tf.while_loop(lambda i, *_: i < 2, body, [0, tf.zeros([size(x)]), loss])[2]


def list_of_weights(x, loss):
    array = tf.TensorArray(tf.float32, 2, element_shape=[None]).unstack(
        tf.stack([rows(x), rows(x)])
    )
    body = lambda i, total: (i + 1, total + loss * array.read(i))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, [0, loss])[1]


@tf.custom_gradient
def scaled_by_row(loss):
    return tf.identity(loss), lambda d: d * rows(d)


def fixed(weights):
    """One for each row: a variable or constant of the size of the batch, if that is known."""
    return lambda x, loss: loss * weights[: size(x) if x.shape[0] is None else x.shape[0]]


def noise(x, seed):
    return tf.random.stateless_normal([size(x)], seed)


TIED = {
    "range": lambda x, loss: loss * rows(x),
    # As if the rows of an example were neighbors, all examples would get the same numbers.
    "before a loop of blocks": lambda x, loss: loop_of_blocks(
        x, loss, tf.tile(tf.constant([1.0, 2.0, 3.0]), [size(x)])
    ),
    "cumsum of ones": lambda x, loss: loss * (tf.cumsum(tf.ones_like(loss)) - 2.0),
    "weights of a constant": fixed(CAPTURED),
    "weights of an array": lambda x, loss: loss * tf.slice(tf.constant(WEIGHTS), [0], [size(x)]),
    "weights of a variable": fixed(VARIABLE),
    "weights by gather": lambda x, loss: loss * tf.gather(VARIABLE, tf.range(size(x))),
    "stateless noise": lambda x, loss: loss * noise(x, [1, 2]),
    "stateless noise of a public seed": lambda x, loss: (
        loss * noise(x, tf.cast(VARIABLE[:2], tf.int32))
    ),
    "eye": lambda x, loss: loss * tf.eye(size(x), 4)[:, 2],
    "band": lambda x, loss: (
        loss * tf.reduce_sum(tf.linalg.band_part(tf.ones([size(x), 4]), 0, -1), axis=1)
    ),
    "linspace": lambda x, loss: loss * tf.linspace(-1.0, 1.0, size(x)),
    "argsort": lambda x, loss: loss * floats(tf.argsort(tf.abs(rows(x) - 1.2))),
    "reverse": lambda x, loss: loss * tf.reverse(rows(x), [0]),
    "one_hot": lambda x, loss: loss * tf.one_hot(tf.range(size(x)) % 4, 4)[:, 1],
    "positions of the batch": lambda x, loss: loss * tf.reduce_sum(rows(x)[:, None] * x, axis=1),
    "beside the data": lambda x, loss: tf.reduce_prod(tf.stack([loss, rows(x)], 1), axis=1),
    "concat": lambda x, loss: tf.reduce_prod(
        tf.concat([x[:, :1], rows(x)[:, None], loss[:, None]], axis=1), axis=1
    ),
    "where": lambda x, loss: tf.where(tf.range(size(x)) % 2 == 0, loss, -loss),
    "einsum": lambda x, loss: tf.einsum("b,b->b", loss, rows(x)),
    "batch_dims": lambda x, loss: loss * tf.gather(x, tf.range(size(x)) % 4, batch_dims=1),
    "picked by row": lambda x, loss: (
        loss * tf.gather(VARIABLE, tf.argmax(x, 1, tf.int32) + tf.range(4))
    ),
    "a function": lambda x, loss: tf.function(lambda loss: loss * rows(loss))(loss),
    "a function of rows": lambda x, loss: tf.function(lambda loss, r: loss * r)(loss, rows(x)),
    "a public function": lambda x, loss: loss * tf.function(rows)(x),
    "a branch": in_branch,
    "a branch without data": public_in_branch,
    "the state before a loop": before_a_loop,
    "the state in a loop": in_a_loop,
    "a list": list_of_weights,
    "vectorized_map": lambda x, loss: tf.vectorized_map(
        lambda pair: pair[0] * floats(pair[1]), (loss, tf.range(size(x)))
    ),
    "custom gradient": lambda x, loss: scaled_by_row(loss),
    "repeated": lambda x, loss: loss * tf.repeat([-1.0, 0.5], (size(x) + 1) // 2)[: size(x)],
    "order of noise": lambda x, loss: loss * tf.sort(tf.random.normal([size(x)])),
    "sum of noise": lambda x, loss: loss * tf.cumsum(tf.random.normal([size(x)])),
    "repeated along the width": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.repeat(rows(x)[:, None], 4, axis=1), axis=1)
    ),
    "an initial state": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.matmul(rows(x)[:, None], VARIABLE[None, :4]), axis=1)
    ),
    "a slice of noise": lambda x, loss: loss * (tf.random.normal([size(x) + 1])[1:] + rows(x)),
    "bitcast": lambda x, loss: loss * tf.bitcast(tf.bitcast(rows(x), tf.int32), tf.float32),
    "a stack of numbers": lambda x, loss: loss * tf.stack([VARIABLE[k] for k in range(4)]),
    "solutions": lambda x, loss: loss + tf.reduce_sum(x * solved(x, rows(x)), axis=1),
    "squeeze of an unknown length": lambda x, loss: loss * tf.squeeze(of_one_row(rows(x)), axis=0),
    "squeeze of unknown axes": lambda x, loss: (
        loss * tf.ensure_shape(tf.squeeze(of_one_row(rows(x))), [None])
    ),
    "one_hot of a number": lambda x, loss: loss * tf.one_hot(tf.cast(VARIABLE[4], tf.int32), 4),
}

SAME = {
    # As TensorFlow's deterministic kernel of the sparse cross-entropy does.
    "a constant of NaN": lambda x, out: tf.where(
        out > 1e30, tf.fill([4], float("nan")) if x.shape[0] else float("nan"), out
    ),
    "range that picks": lambda x, loss: tf.gather(loss, tf.range(size(x))),
    "range of a width": lambda x, loss: loss + tf.reduce_sum(x * floats(tf.range(4)), axis=1),
    "constants of a width": lambda x, loss: loss + tf.reduce_sum(x * WEIGHTS[:4], axis=1),
    "variable of a width": lambda x, loss: loss + tf.reduce_sum(x * VARIABLE[:4], axis=1),
    "ones and zeros": lambda x, loss: loss * (tf.ones([size(x)]) + tf.zeros_like(loss)),
    "fill": lambda x, loss: loss * tf.fill([size(x)], VARIABLE[0]),
    "broadcast": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.broadcast_to(VARIABLE[:4], tf.shape(x)), axis=1)
    ),
    "tile": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.tile(VARIABLE[None, :4], [size(x), 1]), axis=1)
    ),
    "repeat": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.repeat(VARIABLE[None, :4], size(x), axis=0), axis=1)
    ),
    "squeeze of an unknown length": lambda x, loss: (
        loss * tf.squeeze(of_one_row(tf.ones([size(x)])), axis=0)
    ),
    "equal constants": fixed(EQUAL),
    "a stack of one number": lambda x, loss: loss * tf.stack([VARIABLE[0]] * 4),
    "positions in merged axes": lambda x, loss: (
        loss
        + tf.reduce_sum(
            tf.reshape(tf.reshape(x, [-1, 1]) * tf.tile(VARIABLE[:4, None], [size(x), 1]), [-1, 4]),
            axis=1,
        )
    ),
    "cumsum along the width": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.cumsum(tf.ones_like(x), axis=1), axis=1)
    ),
    "mask of a width": lambda x, loss: (
        loss
        + tf.reduce_sum(
            tf.linalg.matvec(tf.linalg.band_part(tf.ones([size(x), 4, 4]), -1, 0), x), axis=1
        )
    ),
    "state before a loop of blocks": lambda x, loss: loop_of_blocks(
        x, loss, tf.zeros([3 * size(x)])
    ),
    "state before a loop": lambda x, loss: tf.while_loop(
        lambda i, _: i < 2, lambda i, s: (i + 1, s + loss), [0, tf.zeros([size(x)])]
    )[1],
    "batch_dims": lambda x, loss: (
        loss + tf.reduce_sum(tf.gather(x, tf.argmax(x, 1, tf.int32)[:, None], batch_dims=1), axis=1)
    ),
    "noise": lambda x, loss: loss + 0.0 * tf.reduce_sum(x * tf.random.normal(tf.shape(x)), axis=1),
    "stateless number for all": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.random.stateless_uniform([1, 4], [1, 2]), axis=1)
    ),
    "seed for all": lambda x, loss: loss * (1.0 + 0.0 * tf.random.normal([], seed=3)),
    "a function": lambda x, loss: tf.function(lambda x: loss * tf.ones([size(x)]))(x),
    "eye of an example": lambda x, loss: (
        loss + tf.linalg.trace(x[:, :, None] * tf.eye(4, batch_shape=[size(x)]))
    ),
    "repeated along the width": lambda x, loss: (
        loss
        + tf.reduce_sum(
            x * tf.repeat(tf.fill([size(x), 1], VARIABLE[0]) * VARIABLE[1], 4, axis=1), axis=1
        )
    ),
    "repeated noise": lambda x, loss: (
        loss + 0.0 * tf.reduce_sum(x * tf.repeat(tf.random.normal([size(x)])[:, None], 4, 1), 1)
    ),
    "initial state": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.matmul(tf.ones([size(x), 1]), VARIABLE[None, :4]), axis=1)
    ),
    "bitcast": lambda x, loss: loss * tf.bitcast(tf.bitcast(tf.ones([size(x)]), tf.int32), x.dtype),
    "solutions": lambda x, loss: loss + tf.reduce_sum(x * solved(x, tf.ones([size(x)])), axis=1),
    "random solutions": lambda x, loss: (
        loss + 0.0 * tf.reduce_sum(x * solved(x, tf.random.normal([size(x)])), axis=1)
    ),
    "position embedding": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.gather(VARIABLE, tf.range(tf.shape(x)[1])), axis=1)
    ),
    "sequence_mask": lambda x, loss: (
        loss + tf.reduce_sum(x * tf.sequence_mask(tf.fill([size(x)], 3), 4, tf.float32), axis=1)
    ),
}
