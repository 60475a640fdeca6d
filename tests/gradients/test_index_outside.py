"""Indices outside of their row, which TensorFlow's gradient of a gather takes for other rows.

On CPUs the forward pass fails without XLA, so the steps here are compiled by XLA.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.gradients.batch_axis.rows_outside import stays_within

B, T = 6, 3
ROWS = np.ones([B, T, 2], np.float32) * np.float32([1, 0])
LABELS = np.float32([-1, -1, -1, -1, -1, 100])
# Those of the last example lead to each of the others.
FAR = np.zeros([B, 5], np.int32)
FAR[-1] = -1 - T * np.arange(5)
GATHERS = {
    "batch_dims": lambda h, ids: tf.gather(h, ids, axis=1, batch_dims=1),
    "negative batch_dims": lambda h, ids: tf.gather(h, ids, axis=1, batch_dims=-1),
    "rows of a public table": lambda h, ids: tf.gather(
        tf.ones_like(ROWS) * tf.reduce_sum(h, [1, 2])[:, None, None], ids, axis=1, batch_dims=1
    ),
}
if hasattr(keras, "ops"):
    GATHERS["take_along_axis"] = lambda h, ids: keras.ops.take_along_axis(h, ids[:, :, None], 1)


def released(losses_of, present, ids=FAR, rows=ROWS, optimizer=None, jit_compile=True, **kwargs):
    """The sum of clipped gradients of a step, with the last example or without it."""
    w = tf.Variable(tf.ones([2, 1]))
    if optimizer is None:
        optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1, learning_rate=1.0, **kwargs)
    weight = np.float32([1, 1, 1, 1, 1, present])

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(x, ids, y, weight):
        with tf.GradientTape() as tape:
            found = losses_of(x @ w, ids)
            losses = tf.reduce_sum(tf.reshape(found, [B, -1]), 1) * y * weight
        optimizer.minimize(losses, [w], tape)

    step(rows.astype(np.float32), ids, LABELS, weight)
    return 1 - w.numpy().ravel()


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("gradients", ["auto", "materialized"])
@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS)
def test_an_example_moves_the_sum_by_the_clip_at_most(gather, gradients):
    with_it, without = (released(gather, p, gradients=gradients) for p in (1, 0))
    assert np.linalg.norm(with_it - without) <= 1 + 1e-5
    np.testing.assert_allclose(without, [-5, 0], atol=1e-5)
    np.testing.assert_allclose(with_it, [-5, 0], atol=1e-5)  # it has no gradient of its own


@pytest.mark.slow_on(2)
def test_who_is_left_out_is_counted_with_those_whose_gradient_is_not_finite():
    optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1)
    released(GATHERS["batch_dims"], 1, optimizer=optimizer)
    summary = optimizer.statistics.summary()
    assert (summary.num_examples, summary.num_non_finite) == (B - 1, 1)


@pytest.mark.slow_on(3)
def test_indices_within_their_rows_change_nothing():
    ids = np.random.default_rng(0).integers(T, size=[B, 5]).astype(np.int32)
    x = np.random.default_rng(1).normal(size=ROWS.shape)
    found = released(GATHERS["batch_dims"], 1, ids, x)
    each = np.einsum("bkd->bd", np.take_along_axis(x, ids[..., None], 1)) * LABELS[:, None]
    expected = (each / np.maximum(np.linalg.norm(each, axis=1), 1)[:, None]).sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow_on(2)
def test_a_gradient_that_is_not_finite_counts_as_one_without_noise():
    # 0 times infinity is NaN, which the index of the last example takes to the others.
    rows = ROWS.copy()
    rows[-1] = 0.0
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=1)
    released(
        lambda h, ids: tf.gather(tf.sqrt(h), ids, axis=1, batch_dims=1), 1, FAR, rows, optimizer
    )
    assert optimizer.ledger.segments[-1].noise_multiplier == 0
    fine = dp.DPSGD(1.0, 1.0, expected_batch_size=1)
    released(
        lambda h, ids: tf.gather(tf.sqrt(h), ids, axis=1, batch_dims=1),
        1,
        np.abs(FAR) % T,
        rows,
        fine,
        jit_compile=False,
    )
    assert fine.ledger.segments[-1].noise_multiplier == 1


@pytest.mark.slow_on(2)
def test_a_vectorized_map_needs_them_too():
    def gather(h, ids, clip=lambda i: i):
        return tf.vectorized_map(lambda e: tf.gather(e[0], clip(e[1])), (h, ids))

    with pytest.raises(dp.NotPrivateError, match="Clip the indices by a known size"):
        released(gather, 1)
    within = functools.partial(gather, clip=lambda i: tf.clip_by_value(i, 0, T - 1))
    with_it, without = (released(within, p, jit_compile=False) for p in (1, 0))
    assert np.linalg.norm(with_it - without) <= 1 + 1e-5


INNER = {
    "ids as they are": (lambda ids: ids, False),
    "clipped": (lambda ids: tf.clip_by_value(ids, 0, T - 1), True),
    "clipped from above": (lambda ids: tf.minimum(ids, T - 1), False),
    "clipped too high": (lambda ids: tf.clip_by_value(ids, 0, T), False),
    "clipped below 0": (lambda ids: tf.clip_by_value(ids, -1, T - 1), False),
    "a negative minimum": (lambda ids: tf.minimum(tf.maximum(ids, 0), -1), False),
    "remainders": (lambda ids: ids % T, True),
    "remainders of more": (lambda ids: ids % (T + 1), False),
    "places of maxima": (lambda ids: tf.argmax(tf.one_hot(ids, T), -1, tf.int32), True),
    "places of maxima of more": (lambda ids: tf.argmax(tf.one_hot(ids, 9), -1, tf.int32), False),
    "cast": (lambda ids: tf.cast(tf.clip_by_value(ids, 0, 2), tf.int64)[..., None][..., 0], False),
    "cast after a minimum": (
        lambda ids: tf.maximum(tf.cast(tf.minimum(tf.cast(ids, tf.int64), 2), tf.int32), 0),
        False,  # a cast of large negative numbers may make them positive
    ),
    "cast to more bits": (lambda ids: tf.cast(tf.clip_by_value(ids, 0, T - 1), tf.int64), True),
    "cast from floats": (  # NaN may become any number
        lambda ids: tf.cast(tf.clip_by_value(tf.cast(ids, tf.float32), 0, 2), tf.int32),
        False,
    ),
    "expanded": (lambda ids: tf.squeeze(tf.expand_dims(ids % T, 1), [1]), True),
    "cumulative": (lambda ids: tf.cumsum(ids % T, 1), False),
}


@pytest.mark.parametrize("size, is_known", [(128, True), (129, False)])
def test_a_cast_to_8_bits_may_make_indices_negative(size, is_known):
    @tf.function
    def gather(h, ids):
        small = tf.cast(tf.clip_by_value(ids, 0, size - 1), tf.int8)
        return tf.gather(h, tf.cast(small, tf.int32), axis=1, batch_dims=1)

    graph = gather.get_concrete_function(
        tf.TensorSpec([B, size]), tf.TensorSpec([B, 5], tf.int32)
    ).graph
    (op,) = [op for op in graph.get_operations() if op.type == "GatherV2"]
    assert stays_within(op) == is_known


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("indices, is_known", INNER.values(), ids=INNER)
def test_inner_functions_need_indices_that_are_known_to_be_within(indices, is_known):
    inner = tf.function(lambda h, ids: tf.gather(h, indices(ids), axis=1, batch_dims=1))
    if is_known:
        with_it, without = (released(inner, p, jit_compile=False) for p in (1, 0))
        assert np.linalg.norm(with_it - without) <= 1 + 1e-5
    else:
        with pytest.raises(dp.NotPrivateError, match="Clip the indices by a known size"):
            released(inner, 1, jit_compile=False)


@pytest.mark.slow_on(2)
def test_the_last_state_of_an_empty_sequence_moves_nothing_else_in_fit():
    def trained(present):
        inputs = keras.Input([T, 2]), keras.Input([], dtype="int32")
        last = keras.layers.Lambda(
            lambda z: tf.gather(z[0], z[1] - 1, axis=1, batch_dims=1), output_shape=(1,)
        )
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Model(inputs, last([dense(inputs[0]), inputs[1]]))
        optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1, learning_rate=1.0)
        model.compile(optimizer, "mse", jit_compile=True)
        lengths = np.int32([3, 3, 3, 3, 3, 0])
        weights = np.float32([1, 1, 1, 1, 1, present])
        model.fit([ROWS, lengths], LABELS, B, sample_weight=weights, shuffle=False, verbose=0)
        return model.get_weights()[0].ravel()

    assert np.linalg.norm(trained(1) - trained(0)) <= 1 + 1e-5
