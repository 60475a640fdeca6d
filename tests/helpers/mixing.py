"""Ways to mix the examples of a batch, as functions of hidden values; for `gradients/test_mixing`.

Each takes h [B, 4], y [B] (floats) and k [B] (integers) of a batch with B = 4, so that sizes say
nothing about axes, and returns a tensor with the batch as axis 0.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
GLOBAL = tf.Variable(np.linspace(-1, 1, 4).astype("float32"), trainable=False)
PERMUTATION = tf.constant([2, 0, 3, 1])
LIST = tf.TensorSpec([4], tf.float32)


def carried(h):
    """A loop over the examples that carries a state."""
    return tf.scan(lambda state, row: 0.5 * state + row, h)


@tf.custom_gradient
def centred_gradient(h):
    """The identity, whose gradient is centred over the batch."""
    return tf.identity(h), lambda d: d - tf.reduce_mean(d, axis=0)


def in_loop(h):
    return tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, h - tf.reduce_mean(h, 0)), [0, h]
    )[1]


def as_long_as_the_batch_says(h):
    return tf.while_loop(
        lambda i, h: tf.reduce_sum(h**2) < 99.0, lambda i, h: (i + 1, 1.2 * h), [0, h]
    )[1]


def loop_that_moves_the_batch(h):
    """Exchanges axes in each round, so that the batch is on axis 0 in every second one only."""
    return tf.while_loop(
        lambda i, h: i < 3,
        lambda i, h: (i + 1, tf.transpose(h)),
        [0, h],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, None])],
    )[1]


def array_of_examples(h):
    array = tf.TensorArray(tf.float32, 4).unstack(h)
    return h + array.read(0)


def in_function(h):
    return tf.function(lambda h: h - tf.reduce_mean(h, 0))(h)


def gradient_in_function(h):
    return tf.function(centred_gradient)(h)


def partition(h, k):
    parts = tf.dynamic_partition(h, tf.cast(k, tf.int32) % 2, 2)
    return h + tf.reduce_sum(parts[0], 0)


def contrastive(h):
    z = tf.nn.l2_normalize(h, axis=1)
    scores = tf.matmul(z, z, transpose_b=True)
    return tf.nn.log_softmax(scores - 9.0 * tf.eye(tf.shape(h)[0]))


def merged(h):
    pairs = tf.reshape(h, [-1, 8])
    return tf.repeat(pairs, 2, axis=0)


def microbatched(h):
    means = tf.reduce_mean(tf.reshape(tf.reduce_sum(h**2, 1), [2, -1]), axis=1)
    return tf.repeat(means, 2)


def moments(h):
    mean, variance = tf.nn.moments(h, axes=[0])
    return tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)


def rnn_over_batch(h):
    cell = layers.SimpleRNN(4, return_sequences=True, kernel_initializer="ones")
    return cell(h[tf.newaxis])[0]


def pooled_over_batch(h):
    return h - layers.GlobalAveragePooling1D()(h[tf.newaxis])


def assigned(h):
    GLOBAL.assign(tf.reduce_mean(h, 0))
    return h - GLOBAL


def assigned_in_function(h):
    tf.function(lambda m: GLOBAL.assign(m))(tf.reduce_mean(h, 0))
    return h - GLOBAL


def assigned_in_branch(h):
    tf.cond(
        tf.reduce_any(PERMUTATION > 0),
        lambda: GLOBAL.assign(tf.reduce_mean(h, 0)),
        lambda: GLOBAL.read_value(),
    )
    return h - GLOBAL


def doubled(h, y):
    """Rows twice, behind each other, against lengths twice, beside each other."""
    lengths = tf.cast(tf.abs(y) * 2.0, tf.int32) % 4 + 1
    twice = tf.reshape(tf.stack([lengths, lengths], axis=1), [-1])
    return tf.split(tf.reverse_sequence(tf.concat([h, h], 0), twice, 1, 0), 2)[0] * GLOBAL


def solved(h):
    """A triangular system for each example beside a public axis of length B before it."""
    matrix = tf.einsum("bi,bj->bij", h, h) + 3.0 * tf.eye(4)
    right = tf.reshape(tf.cast(PERMUTATION, tf.float32), [4, 1, 1, 1]) * tf.ones([4, 1])
    return tf.reduce_sum(tf.linalg.triangular_solve(matrix, right), axis=1)


def longest(h, y, least, most):
    """Times the length of what `tf.math.bincount` counts, between two bounds."""
    numbers = tf.cast(1.5 * tf.abs(y), tf.int32)[:, tf.newaxis]
    counts = tf.math.bincount(numbers, minlength=least, maxlength=most, axis=-1)
    return h * tf.reduce_sum(tf.ones_like(counts[:1], tf.float32))


def positive(h, y):
    """The rows whose y is positive; one at least."""
    return tf.boolean_mask(h, (y > 0) | (y < -2))


MIXING = {
    "softmax": lambda h, y, k: tf.nn.softmax(h, axis=0),
    "log_softmax": lambda h, y, k: tf.nn.log_softmax(h, axis=0),
    "Softmax layer": lambda h, y, k: layers.Softmax(axis=0)(h),
    "scores of all pairs": lambda h, y, k: tf.matmul(h, h, transpose_b=True),
    "covariance": lambda h, y, k: tf.matmul(h, h, transpose_a=True),
    "attention": lambda h, y, k: tf.nn.softmax(tf.matmul(h, h, transpose_b=True)) @ h,
    "Attention layer": lambda h, y, k: layers.Attention()([h[tf.newaxis], h[tf.newaxis]])[0],
    "einsum over the batch": lambda h, y, k: h + tf.einsum("bi->i", h),
    "einsum of pairs": lambda h, y, k: tf.einsum("bi,cj->bij", h, h),
    "einsum with ellipsis": lambda h, y, k: tf.einsum("...i,cj->...j", h, h),
    "tensordot": lambda h, y, k: tf.tensordot(h, h, [[0], [0]]),
    "a shape from the data": lambda h, y, k: tf.broadcast_to(
        h[:, None, None, :1], tf.cast(k, tf.int32) * [0, 1, 1, 1] + [4, 1, 1, 1]
    ),
    "reverse": lambda h, y, k: h * tf.reverse(h, [0]),
    "roll": lambda h, y, k: h * tf.roll(h, 1, 0),
    "roll by a step of the data": lambda h, y, k: tf.roll(h, k, axis=[1, 1, 1, 1]) * GLOBAL,
    "cumsum": lambda h, y, k: tf.cumsum(h),
    "cumprod": lambda h, y, k: tf.math.cumprod(h),
    "cumulative_logsumexp": lambda h, y, k: tf.math.cumulative_logsumexp(h),
    "sort": lambda h, y, k: tf.sort(h, axis=0),
    "argsort": lambda h, y, k: h * tf.cast(tf.argsort(h, axis=0), tf.float32),
    "top_k": lambda h, y, k: h * tf.math.top_k(tf.transpose(h), 1).values[:, 0],
    "argmax": lambda h, y, k: h * tf.cast(tf.argmax(h, 0), tf.float32),
    "unique": lambda h, y, k: h * tf.cast(tf.unique(k)[1][:, tf.newaxis], tf.float32),
    "segment_sum": lambda h, y, k: h + tf.math.segment_sum(h, tf.sort(k))[:1],
    "unsorted_segment_mean": lambda h, y, k: tf.math.unsorted_segment_mean(h, k, 4),
    "bincount": lambda h, y, k: (
        h * tf.cast(tf.math.bincount(tf.cast(k, tf.int32), minlength=4), tf.float32)
    ),
    "length of bincount": lambda h, y, k: longest(h, y, 2, 4),
    "length of bincount, in close bounds": lambda h, y, k: longest(h, y, 2, 3),
    "bitcast": lambda h, y, k: (
        h * tf.cast(tf.bitcast(tf.cast(9 * tf.transpose(h), tf.int8), tf.int32), tf.float32) / 2**31
    ),
    "reversed slice": lambda h, y, k: h * h[::-1],
    "first example": lambda h, y, k: h - h[:1],
    "last example": lambda h, y, k: h - h[-1],
    "every second example": lambda h, y, k: h - tf.reduce_sum(h[::2], 0),
    "neighbours": lambda h, y, k: h + tf.pad(h[1:] - h[:-1], [[1, 0], [0, 0]]),
    "slice": lambda h, y, k: h - tf.slice(h, [0, 0], [1, 4]),
    "gather": lambda h, y, k: tf.gather(h, PERMUTATION),
    "gather by the data": lambda h, y, k: tf.gather(h, k),
    "gather_nd": lambda h, y, k: tf.gather_nd(h, PERMUTATION[:, tf.newaxis]),
    "segments of examples": lambda h, y, k: tf.math.unsorted_segment_sum(h, [0, 1, 0, 2], 4),
    "segments by the data": lambda h, y, k: tf.transpose(
        tf.math.unsorted_segment_sum(tf.transpose(h), k, 4)
    ),
    "boolean_mask": lambda h, y, k: h + tf.reduce_sum(positive(h, y), 0),
    "rows of boolean_mask": lambda h, y, k: h / tf.cast(tf.shape(positive(h, y))[0], tf.float32),
    "ones like rows of boolean_mask": lambda h, y, k: (
        h / tf.reduce_sum(tf.ones_like(positive(h, y)[:, 0]))
    ),
    "where": lambda h, y, k: h / tf.cast(tf.shape(tf.where(y > 0))[0] + 1, tf.float32),
    "dynamic_partition": lambda h, y, k: partition(h, k),
    "scatter_nd": lambda h, y, k: tf.scatter_nd(k[:, tf.newaxis], h, [4, 4]),
    "tensor_scatter": lambda h, y, k: tf.tensor_scatter_nd_add(h, k[:, tf.newaxis], h),
    "concat of rolled": lambda h, y, k: tf.concat([h, tf.roll(h, 1, 0)], axis=1),
    "stack of pairs": lambda h, y, k: tf.stack([h, tf.transpose(h)], axis=2),
    "reshape to another order": lambda h, y, k: tf.reduce_sum(tf.reshape(h, [4, -1]), 0),
    "reshape of two examples": lambda h, y, k: merged(h),
    "transpose, then reduce": lambda h, y, k: tf.reduce_sum(tf.transpose(h), axis=1),
    "transpose, then softmax": lambda h, y, k: tf.nn.softmax(tf.transpose(h)),
    "broadcast of [B] and [B, 1]": lambda h, y, k: (y - h[:, :1]) ** 2,
    "all pairs": lambda h, y, k: tf.reduce_sum((h[:, tf.newaxis] - h[tf.newaxis]) ** 2, 2),
    "tiles and repeats": lambda h, y, k: tf.reshape(tf.tile(h, [4, 1]), [4, -1, 4]) * h,
    "moments": lambda h, y, k: moments(h),
    "norm over all": lambda h, y, k: h / tf.norm(h),
    "clip_by_norm over all": lambda h, y, k: tf.clip_by_norm(h, 1.0),
    "maximum over all": lambda h, y, k: h / tf.reduce_max(tf.abs(h)),
    "weights that sum to 1": lambda h, y, k: tf.reduce_sum(h**2, 1) * y / tf.reduce_sum(y),
    "number of positive labels": lambda h, y, k: (
        h / tf.cast(tf.math.count_nonzero(y > 0) + 1, tf.float32)
    ),
    "contrastive loss": lambda h, y, k: contrastive(h),
    "Hinge, which looks whether all labels are binary": lambda h, y, k: tf.keras.losses.hinge(
        tf.cast(k % 3, tf.float32)[:, tf.newaxis], h
    ),
    "mask from the batch": lambda h, y, k: h * tf.cast(h > tf.reduce_mean(h), tf.float32),
    "stopped mean": lambda h, y, k: h - tf.stop_gradient(tf.reduce_mean(h, 0)),
    "mixup": lambda h, y, k: 0.7 * h + 0.3 * tf.reverse(h, [0]),
    "shuffle": lambda h, y, k: h * tf.random.shuffle(h),
    "cond of the batch": lambda h, y, k: tf.cond(tf.reduce_sum(y) > 0, lambda: h, lambda: -h + 2),
    "cond of one example": lambda h, y, k: tf.cond(y[-1] > 0, lambda: h, lambda: -h + 2),
    "loop of the batch": lambda h, y, k: as_long_as_the_batch_says(h),
    "in a branch": lambda h, y, k: tf.cond(
        GLOBAL[3] > -9, lambda: h - tf.reduce_mean(h, 0), lambda: h
    ),
    "in a loop": lambda h, y, k: in_loop(h),
    "loop that exchanges axes": lambda h, y, k: loop_that_moves_the_batch(h),
    "in a function": lambda h, y, k: in_function(h),
    "scan": lambda h, y, k: carried(h),
    "TensorArray": lambda h, y, k: array_of_examples(h),
    "RNN over the batch": lambda h, y, k: rnn_over_batch(h),
    "pooling over the batch": lambda h, y, k: pooled_over_batch(h),
    "convolution over the batch": lambda h, y, k: tf.nn.conv1d(
        h[tf.newaxis], tf.ones([2, 4, 4]), 1, "SAME"
    )[0],
    "py_function": lambda h, y, k: (
        h
        + tf.ensure_shape(
            tf.py_function(lambda y: tf.reverse(y, [0]), [y[:, tf.newaxis]], tf.float32), [None, 1]
        )
    ),
    "custom gradient": lambda h, y, k: centred_gradient(h) ** 2,
    "custom gradient in a function": lambda h, y, k: gradient_in_function(h) ** 2,
    "BatchNormalization": lambda h, y, k: layers.BatchNormalization()(h, training=True),
    "BatchNormalization on axis 1 of images": lambda h, y, k: layers.BatchNormalization(axis=1)(
        tf.reshape(h, [-1, 2, 2, 1]), training=True
    ),
    "synchronized BatchNormalization": lambda h, y, k: layers.BatchNormalization(synchronized=True)(
        h, training=True
    ),
    "LayerNormalization over the batch": lambda h, y, k: layers.LayerNormalization(axis=0)(h),
    "GroupNormalization over the batch": lambda h, y, k: tf.transpose(
        layers.GroupNormalization(1)(tf.transpose(h)[tf.newaxis])[0]
    ),
    "UnitNormalization over the batch": lambda h, y, k: layers.UnitNormalization(axis=0)(h),
    "FFT": lambda h, y, k: tf.abs(
        tf.transpose(tf.signal.fft(tf.cast(tf.transpose(h), tf.complex64)))
    ),
    "band of diagonals": lambda h, y, k: tf.linalg.diag(h, k=(0, 3)),
    "lower band of diagonals": lambda h, y, k: tf.linalg.diag(h, k=(-3, 0)),
    "solve": lambda h, y, k: h @ tf.linalg.inv(tf.matmul(h, h, transpose_a=True) + tf.eye(4)),
    "triangular_solve": lambda h, y, k: solved(h),
    "reverse_sequence": lambda h, y, k: doubled(h, y),
    "by hand in microbatches": lambda h, y, k: microbatched(h),
    "assigned": lambda h, y, k: assigned(h),
    "assigned in a function": lambda h, y, k: assigned_in_function(h),
    "assigned in a branch": lambda h, y, k: assigned_in_branch(h),
}

# Keras and TensorFlow build them for a batch of known size only.
FIXED = {
    "LayerNormalization over the batch",
    "GroupNormalization over the batch",
    "band of diagonals",
    "lower band of diagonals",
}
