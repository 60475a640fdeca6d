"""A batch of one example that broadcasting repeats: each copy would be clipped on its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp

N = 8
ONE = np.full([1, 3], 10, np.float32)
FIXED_ROWS = {
    "a sum": lambda x: x + tf.zeros([N, 3]),
    "random numbers": lambda x: x + tf.random.normal([N, 3]),
    "broadcast_to": lambda x: tf.broadcast_to(x, [N, 3]),
    "where": lambda x: tf.where(tf.ones([N, 1]) > 0, x, 0.0),
    "a product of matrices": lambda x: tf.matmul(tf.ones([N, 3, 3]), x[..., None])[..., 0],
    "einsum": lambda x: tf.einsum("...i,...ij->...j", x, tf.ones([N, 3, 3])),
}


def train(
    spread, batches, signature=([None, 3],), jit_compile=False, noise_multiplier=0.0, **kwargs
):
    """Releases the sum of the clipped gradients of each batch; returns it with the optimizer."""
    kwargs = dict(expected_batch_size=1, learning_rate=1.0) | kwargs
    optimizer, w = dp.DPSGD(1.0, noise_multiplier, **kwargs), tf.Variable(tf.zeros([3, 1]))

    @tf.function(input_signature=list(map(tf.TensorSpec, signature)), jit_compile=jit_compile)
    def step(*batch):
        with tf.GradientTape() as tape:
            losses = tf.square(spread(*batch) @ w - 100)[:, 0]
        optimizer.minimize(losses, [w], tape)

    for batch in batches:
        step(*batch)
    return np.linalg.norm(w.numpy()), optimizer


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("gradients", ["auto", "materialized"])
@pytest.mark.parametrize("spread", FIXED_ROWS.values(), ids=FIXED_ROWS)
def test_one_example_that_is_repeated_is_not_released(spread, gradients):
    with pytest.raises(tf.errors.InvalidArgumentError, match="a different number of rows"):
        train(spread, [[ONE]], gradients=gradients)


def test_a_step_that_fails_for_a_repeated_example_changes_and_counts_nothing():
    optimizer, w = dp.DPSGD(1.0, 1.0, expected_batch_size=N), tf.Variable(tf.zeros([3, 1]))

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        with tf.GradientTape() as tape:
            losses = tf.square((x + tf.zeros([N, 3])) @ w - 100)[:, 0]
        optimizer.minimize(losses, [w], tape)

    step(np.ones([N, 3], np.float32))
    before = w.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="drop_remainder=True"):
        step(ONE)
    assert optimizer.ledger.num_releases == 1
    np.testing.assert_array_equal(w.numpy(), before)


def test_two_inputs_of_different_lengths_are_not_taken_for_one_batch():
    signature = [None, 3], [None, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match="a different number of rows"):
        train(tf.add, [[ONE, np.zeros([N, 3], np.float32)]], signature)
    moved, _ = train(tf.add, [[ONE, np.zeros([1, 3], np.float32)]], signature)
    assert moved == pytest.approx(1)


@pytest.mark.slow_on(3)
def test_xla_counts_a_repeated_example_as_released_without_noise():
    whole, few = [np.zeros([N, 3], np.float32)], [ONE]
    _, optimizer = train(FIXED_ROWS["a sum"], [whole, few], jit_compile=True, noise_multiplier=2.0)
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [2, 0]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_keras_reports_the_last_batch_of_one_example(jit_compile):
    class ConstantNoise(keras.layers.Layer):  # a hard-coded batch size
        def call(self, x):
            return x + tf.random.normal([N, 3]) * 1e-3

    model = keras.Sequential([keras.layers.Input([3]), ConstantNoise(), keras.layers.Dense(1)])
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=N)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    x = np.ones([N + 1, 3], np.float32)
    model.fit(x[:N], x[:N, :1], batch_size=N, shuffle=False, verbose=0)
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [1]
    if jit_compile:
        model.fit(x, x[:, :1], batch_size=N, shuffle=False, verbose=0)
        assert [s.noise_multiplier for s in optimizer.ledger.segments][-1] == 0
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="a different number of rows"):
            model.fit(x, x[:, :1], batch_size=N, shuffle=False, verbose=0)


def test_an_input_of_another_length_that_only_lends_its_shape_is_no_repetition():
    def padded(x, sizes):
        return x + tf.zeros([1, tf.shape(sizes)[0]])

    moved, _ = train(padded, [[ONE, np.zeros([3], np.float32)]], ([None, 3], [None]))
    assert moved == pytest.approx(1)


@pytest.mark.parametrize("first", ["public", "data"])
def test_an_ellipsis_that_broadcasts_does_not_hide_merged_rows(first):
    def merged(x):
        if first == "public":
            h = tf.einsum("...ij,...jk->...ik", tf.eye(3)[None, None], x)
        else:
            h = tf.einsum("...ij,...jk->...ik", x, tf.eye(3)[None, None])
        return tf.reshape(h, [-1, 3])

    rows = np.ones([2, 5, 1, 3], np.float32) if first == "data" else np.ones([2, 5, 3, 1], "f")
    with pytest.raises(dp.NotPrivateError):
        train(merged, [[rows]], ([None, None, *rows.shape[2:]],))
