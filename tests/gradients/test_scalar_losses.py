"""A scalar loss is taken apart into the losses of its examples, exactly, or it is refused."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.api import per_example_gradients

N, T, D = 6, 3, 4
X = floats(N, T, D)
Y = floats(N, T, seed=1)
W = np.array([1, 0, 2, 0.5, 0, 1], "float32")


def squares(x, w):
    """[B, T]"""
    return (tf.linalg.matvec(x, w) - 1.0) ** 2


def each(x, w):
    """[B]"""
    return tf.reduce_sum(squares(x, w), axis=1)


def traced(total, *arguments, dynamic=True, expected_batch_size=None):
    """Squared norms, the sum of gradients and those of penalties, of a scalar loss of (w, *x)."""
    w = tf.Variable(floats(D, seed=2))
    specs = [
        tf.TensorSpec([None if dynamic else a.shape[0], *a.shape[1:]], a.dtype) for a in arguments
    ]

    @tf.function(input_signature=specs, autograph=False)
    def step(*arguments):
        with tf.GradientTape() as tape:
            loss = total(w, *arguments)
        source = per_example_gradients(
            loss, [w], tape, "traced", expected_batch_size=expected_batch_size
        )
        (penalty,) = source.penalty_gradients
        assert not source.loss.counts_batch
        penalty = tf.zeros([D]) if penalty is None else penalty
        sums = source.weighted_sum(tf.ones_like(source.example_losses))
        return source.squared_norms(), sums[0], penalty

    return [r.numpy() for r in step(*arguments)]


def alone(loss, *arguments, scale=1.0):
    """The same from the losses [B] of batches of one."""
    w = tf.Variable(floats(D, seed=2))
    rows = []
    for i in range(N):
        with tf.GradientTape() as tape:
            value = loss(w, *(a[i : i + 1] for a in arguments))
        rows.append(scale * tape.gradient(value, w).numpy())
    return np.sum(np.square(rows), axis=1), np.sum(rows, axis=0)


def mean(t):
    return tf.reduce_mean(t)


# name: (scalar loss of w and x, loss [B] whose gradients are to be clipped)
SUMS = {
    "mean": (lambda w, x: mean(each(x, w)), lambda w, x: each(x, w)),
    "sum": (lambda w, x: tf.reduce_sum(each(x, w)), lambda w, x: each(x, w)),
    "mean over entries": (lambda w, x: mean(squares(x, w)), lambda w, x: each(x, w) / T),
    "sum over entries": (lambda w, x: tf.reduce_sum(squares(x, w)), lambda w, x: each(x, w)),
    "mean of means": (
        lambda w, x: mean(tf.reduce_mean(squares(x, w), axis=0)),
        lambda w, x: each(x, w) / T,
    ),
    "sum over the batch, then mean": (
        lambda w, x: mean(tf.reduce_sum(squares(x, w), axis=0)),
        lambda w, x: each(x, w) / T,
    ),
    "by the size": (
        lambda w, x: D * tf.reduce_sum(squares(x, w)) / tf.cast(tf.size(x), tf.float32),
        lambda w, x: each(x, w) / T,
    ),
    "by the batch size": (
        lambda w, x: tf.reduce_sum(squares(x, w)) / tf.cast(tf.shape(x)[0], tf.float32),
        lambda w, x: each(x, w),
    ),
    "weights and signs": (
        lambda w, x: 3.0 * mean(each(x, w)) - mean(x[:, 0, 0] * w[0]) / 2.0,
        lambda w, x: 3.0 * each(x, w) - x[:, 0, 0] * w[0] / 2.0,
    ),
    "negative": (lambda w, x: -mean(-each(x, w)), lambda w, x: each(x, w)),
    "stacked": (
        lambda w, x: mean(tf.stack([mean(each(x, w)), mean(x[:, 0, 0] * w[0])])),
        lambda w, x: each(x, w) / 2 + x[:, 0, 0] * w[0] / 2,
    ),
    "merged axes": (
        lambda w, x: mean(tf.reshape(squares(x, w), [-1])),
        lambda w, x: each(x, w) / T,
    ),
    "batch behind": (
        lambda w, x: mean(tf.transpose(squares(x, w))),
        lambda w, x: each(x, w) / T,
    ),
    "minus the mean": (
        lambda w, x: mean(2.0 * each(x, w) - mean(each(x, w))),
        lambda w, x: each(x, w),
    ),
    "a learned weight": (
        lambda w, x: tf.exp(w[0]) * mean(each(x, w)),
        lambda w, x: tf.exp(w[0]) * each(x, w),
    ),
    "plus a count": (
        lambda w, x: mean(each(x, w)) + tf.cast(tf.reduce_sum(tf.cast(x > 0, tf.int32)), x.dtype),
        lambda w, x: each(x, w),
    ),
    "statistics without gradient": (
        lambda w, x: mean(each(x, w)) + tf.stop_gradient(tf.reduce_max(each(x, w))),
        lambda w, x: each(x, w),
    ),
}


@pytest.mark.slow_after(11)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_sums_and_means_have_the_gradients_of_batches_of_one(name, dynamic):
    total, loss = SUMS[name]
    norms, sums, penalty = traced(total, X, dynamic=dynamic)
    true_norms, true_sums = alone(loss, X)
    np.testing.assert_allclose(norms, true_norms, rtol=1e-5)
    np.testing.assert_allclose(sums, true_sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(penalty, 0)


def overlap(w, x):
    """As in `Dice` of Keras."""
    with tf.name_scope("dice"):
        return tf.reduce_sum(squares(x, w)) / tf.reduce_sum(squares(x, w) + x[..., 0] ** 2)


def cox(w, x):
    """The partial likelihood of survival analysis."""
    risk, time = each(x, w), x[:, 0, 0]
    at_risk = tf.cast(time[None, :] >= time[:, None], tf.float32)
    return -mean(x[:, 1, 0] * (risk - tf.math.log(tf.reduce_sum(at_risk * tf.exp(risk), axis=1))))


NO_SUMS = {
    "root of the mean": (
        lambda w, x: tf.sqrt(mean(each(x, w))),
        "Sqrt.*not a sum, a mean.*train on the mean itself",
    ),
    "square of the sum": (lambda w, x: tf.reduce_sum(each(x, w)) ** 2, "not a sum, a mean"),
    "product of means": (
        lambda w, x: mean(each(x, w)) * mean(x[:, 0, 0]),
        "multiplies by numbers that depend on the examples",
    ),
    "mean over valid entries": (
        lambda w, x: tf.reduce_sum(squares(x, w)) / tf.reduce_sum(x[:, 0, 0]),
        'divides by numbers that depend.*mask_zero=True.*reduction="sum".*count of.*divide_no_nan',
    ),
    "compared with those at risk": (cox, "combines each example with every other one"),
    "an overlap of the whole batch": (overlap, r"divides by numbers.*`Dice\(axis=\(1, 2, 3\)\)`"),
    "mean of the batch in a nonlinearity": (
        lambda w, x: mean((each(x, w) - mean(each(x, w))) ** 2),
        "[Ee]xamples in a batch affect each other",
    ),
    "normalized by the batch": (
        lambda w, x: mean(each(x / tf.reduce_max(x, axis=0), w)),
        "[Ee]xamples in a batch affect each other.*Max",
    ),
    "one example twice": (
        lambda w, x: mean(tf.concat([each(x, w), each(x[:1], w)], axis=0)),
        "[Ee]xamples in a batch affect each other",
    ),
    "the largest": (lambda w, x: tf.reduce_max(each(x, w)), "Max.*not a sum, a mean"),
    "some of them": (
        lambda w, x: mean(tf.boolean_mask(each(x, w), x[:, 0, 0] > 0)),
        "[Ee]xamples in a batch affect each other",
    ),
    "segments of unequal length": (
        lambda w, x: mean(tf.math.segment_mean(each(x, w), tf.cast(x[:, 0, 0] * 0, tf.int32))),
        "[Ee]xamples in a batch affect each other|not a sum",
    ),
    "without data": (lambda w, x: tf.reduce_sum(w), "does not depend on any input"),
}


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_over_examples_is_refused(name, dynamic):
    total, match = NO_SUMS[name]
    with pytest.raises(dp.NotPrivateError, match=match):
        traced(total, X, dynamic=dynamic)


GATHERED = pytest.mark.skipif(
    GENERATION == 2, reason="Keras 2 gathers the entries of other classes, which is rejected"
)


@pytest.mark.in_turns
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("batch_size", [N, N - 1])  # with the latter, the size is not static
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
@pytest.mark.parametrize("ignored", [None, pytest.param(1, marks=GATHERED)])
def test_a_loss_of_keras_sums_the_entries_that_count(ignored, reduction, batch_size):
    """A layer masks the others, or the loss ignores their class."""
    tokens, targets = np.arange(N * T).reshape(N, T) % 4, np.arange(N * T).reshape(N, T) % 2
    model = tf.keras.Sequential(
        [
            tf.keras.Input([T], dtype="int32"),
            tf.keras.layers.Embedding(4, 3, mask_zero=ignored is None),
            tf.keras.layers.LSTM(3, return_sequences=True),
            tf.keras.layers.Dense(2, "softmax"),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored, reduction=reduction)
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=batch_size), loss)
    if reduction == "sum":
        model.fit(tokens, targets, batch_size=batch_size, verbose=0)
        assert model.optimizer.ledger.num_releases == math.ceil(N / batch_size)
    else:
        match = 'mask_zero=True.*ignore_class.*`reduction="sum"`'
        with pytest.raises(dp.NotPrivateError, match=match):
            model.fit(tokens, targets, batch_size=batch_size, verbose=0)


def test_terms_without_data_are_penalties():
    norms, _, penalty = traced(lambda w, x: mean(each(x, w)) + 3 * tf.reduce_sum(w**2) / 2, X)
    np.testing.assert_allclose(norms, alone(lambda w, x: each(x, w), X)[0], rtol=1e-5)
    np.testing.assert_allclose(penalty, 3 * floats(D, seed=2), rtol=1e-5)


@pytest.mark.parametrize("divisor", [None, 12.0])
def test_beside_a_sum_penalties_are_divided_like_the_sum(divisor):
    def total(w, x):
        return tf.reduce_sum(each(x, w)) + tf.reduce_sum(w**2)

    _, _, penalty = traced(total, X, dynamic=False, expected_batch_size=divisor)
    np.testing.assert_allclose(penalty, 2 * floats(D, seed=2) / (divisor or N), rtol=1e-5)


@pytest.mark.parametrize("dynamic", [True, False])
def test_sums_beside_means_count_as_often_as_the_divisor_says(dynamic):
    def total(w, x):
        return mean(each(x, w)) + tf.reduce_sum(x[:, 0, 0] * w[0])

    norms, sums, _ = traced(total, X, dynamic=dynamic, expected_batch_size=12.0)
    true = alone(lambda w, x: each(x, w) + 12 * x[:, 0, 0] * w[0], X)
    np.testing.assert_allclose(norms, true[0], rtol=1e-5)
    np.testing.assert_allclose(sums, true[1], rtol=1e-5, atol=1e-5)


def test_a_constant_that_is_the_expected_batch_size_divides_like_the_batch():
    norms, _, _ = traced(
        lambda w, x: tf.reduce_sum(each(x, w)) / 24.0, X, dynamic=True, expected_batch_size=12.0
    )
    true = alone(lambda w, x: each(x, w), X, scale=0.5)
    np.testing.assert_allclose(norms, true[0], rtol=1e-5)


COUNTING = {
    "the batch": lambda x: tf.shape(x)[0] + 1,
    "ones": lambda x: tf.size(tf.ones_like(x)) % 7,
    "the batch, as a power": lambda x: tf.cast(tf.shape(x)[0], tf.float32) ** 2,
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_penalty_that_counts_the_batch_is_seen(name):
    w = tf.Variable(floats(D, seed=2))

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            number = tf.cast(COUNTING[name](x), tf.float32)
            loss = mean(each(x, w)) + tf.reduce_sum(w**2) * number
        seen.append(per_example_gradients(loss, [w], tape).loss.counts_batch)

    seen = []
    step(X)
    assert seen == [True]


def test_a_batch_of_one_is_its_own_sum():
    norms, _, _ = traced(lambda w, x: tf.sqrt(mean(each(x, w))), X[:1], dynamic=False)
    w = tf.Variable(floats(D, seed=2))
    with tf.GradientTape() as tape:
        value = tf.sqrt(mean(each(X[:1], w)))
    np.testing.assert_allclose(norms, [np.sum(tape.gradient(value, w) ** 2)], rtol=1e-5)
