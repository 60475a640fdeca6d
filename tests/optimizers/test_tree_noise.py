"""What TF Privacy's tests of its DP-FTRL optimizer ask, of our optimizers with `TreeNoise`.

They are the thirteen tests of `dp_optimizer_keras_test.py` (TF Privacy 0.9) whose optimizers
include `DPFTRLTreeAggregationOptimizer`; each test here names those that it answers to, with other
models and numbers. Three things differ:

- A tree begins anew after `steps_per_tree` steps, `restart_period` there; there is no
  `restart_warmup`, which makes the first tree shorter.
- Examples are clipped one by one: no epsilon is proven for microbatches with correlated noise.
- With accumulation a batch in parts is one release with the noise of one. There each part has
  noise of its own.
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting import TreeNoise
from tf_adaptive_dp.sampling import FixedOrder

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")

# A tree for all steps, a new tree in every step, and two kinds of restarts.
TREES = [TreeNoise(1_000), TreeNoise(1), TreeNoise(2), TreeNoise(7)]
each = pytest.mark.parametrize("noise", TREES, ids=repr)
X = np.random.default_rng(0).normal(size=[6, 3]).astype("float32")
Y = np.random.default_rng(1).normal(size=[6, 2]).astype("float32")


def make(noise, clip=1e3, sigma=0.0, optimizer=dp.DPSGD, **kwargs):
    return optimizer(clip, sigma, noise=noise, **{"learning_rate": 1.0, **kwargs})


def variables():
    return [tf.Variable(tf.ones([3])), tf.Variable(tf.zeros([2]))]


def losses(v):
    """[6], half the squared distances of two vectors from points."""
    return 0.5 * (tf.reduce_sum((v[0] - X) ** 2, 1) + tf.reduce_sum((v[1] - Y) ** 2, 1))


def gradients_of_examples():
    """[6, 5], by hand: how far the vectors are from the points."""
    return np.concatenate([1 - X, 0 - Y], axis=1)


def mean_of_clipped(clip):
    rows = gradients_of_examples()
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.split((rows * np.minimum(1, clip / norms)).mean(axis=0), [3])


def assert_released(pairs, expected, v):
    assert [variable is own for (_, variable), own in zip(pairs, v)] == [True, True]
    for (gradient, _), wanted in zip(pairs, expected):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_after(2)
@each
@pytest.mark.parametrize("optimizer", [dp.DPSGD, dp.DPAdam])
def test_without_noise_a_loss_function_gives_the_mean_gradient(noise, optimizer):
    """DPTreeAggregationOptimizerComputeGradientsTest.testBaselineWithCallableLossNoNoise."""
    v, made = variables(), make(noise, optimizer=optimizer)
    for _ in range(4):  # over the ends of trees
        pairs = made.compute_gradients(lambda: losses(v), v)
        assert_released(pairs, mean_of_clipped(1e3), v)
    assert made.ledger.num_releases == 4


@pytest.mark.slow_on(2)
@each
def test_without_noise_a_loss_tensor_gives_the_mean_gradient(noise):
    """DPTreeAggregationOptimizerComputeGradientsTest.testBaselineWithTensorLossNoNoise."""
    v, made = variables(), make(noise)
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = losses(v)
        pairs = made.compute_gradients(loss, v, tape)
        assert_released(pairs, mean_of_clipped(1e3), v)
    with pytest.raises(ValueError, match="`tape` must be the tape"):
        made.compute_gradients(losses(v), v)


def test_one_variable_is_clipped():
    """DPOptimizerComputeGradientsTest.testClippingNorm."""
    v, points = tf.Variable([0.0, 0.0]), np.array([[3.0, 4.0], [-0.3, 0.4]], "float32")
    made = make(TREES[0], clip=1.0)
    ((gradient, _),) = made.compute_gradients(
        lambda: 0.5 * tf.reduce_sum((v - points) ** 2, 1), [v]
    )
    np.testing.assert_allclose(gradient, [(-0.6 + 0.3) / 2, (-0.8 - 0.4) / 2], rtol=1e-6)


@each
@pytest.mark.parametrize("clip", [0.5, 1.7])
def test_several_variables_are_clipped_together(noise, clip):
    """DPOptimizerComputeGradientsTest.testClippingNormMultipleVariables."""
    norms = np.linalg.norm(gradients_of_examples(), axis=1)
    assert (norms > clip).sum() >= 3
    v = variables()
    pairs = make(noise, clip=clip).compute_gradients(lambda: losses(v), v)
    assert_released(pairs, mean_of_clipped(clip), v)


@pytest.mark.parametrize("clip, sigma", [(2.0, 4.0), (8.0, 0.5)])
@each
def test_the_noise_of_the_first_step_is_that_of_a_node(noise, clip, sigma):
    """DPOptimizerComputeGradientsTest.testNoiseMultiplier."""
    w = tf.Variable(tf.zeros([20_000]))
    made = make(noise, clip, sigma)
    ((gradient, _),) = made.compute_gradients(lambda: 0.0 * w[:4], [w])
    assert_gaussian(gradient.numpy(), clip * sigma / 4)  # rejects 2/3 and 3/2 of it
    assert made.ledger.segments == [(sigma, 4.0, 1)]


def linear_model(optimizer, size=4):
    model = keras.Sequential(
        [keras.Input([size]), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@each
def test_without_noise_a_linear_model_is_learned(noise):
    """testBaselineNoNoise of DPOptimizerGetGradientsTest and DPTreeAggregationGetGradientsTest."""
    kernel, bias = np.array([[-2.0], [1.0], [3.0], [0.5]]), 4.0
    x = np.random.default_rng(2).normal(size=[800, 4]).astype("float32")
    model = linear_model(make(noise, learning_rate=0.05))
    model.fit(x, x @ kernel + bias, batch_size=8, epochs=2, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], kernel, atol=0.01)
    np.testing.assert_allclose(model.get_weights()[1], bias, atol=0.01)


def test_in_fit_one_step_is_clipped():
    """DPOptimizerGetGradientsTest.testClippingNorm."""
    x, y = np.array([[2.0, 0.0, 0.0, 1.0]], "float32"), np.array([[5.0]], "float32")
    steps = []
    for clip in (1e6, 0.5):
        model = linear_model(make(TREES[0], clip=clip))
        model.fit(x, y, batch_size=1, verbose=0)
        steps.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    free, clipped = steps
    assert np.linalg.norm(free) > 5
    np.testing.assert_allclose(clipped, 0.5 * free / np.linalg.norm(free), rtol=1e-5)


@pytest.mark.slow_after(1)
@each
def test_in_fit_steps_and_their_sums_have_the_noise_of_the_tree(noise):
    """DPOptimizerGetGradientsTest.testNoiseMultiplier, and the steps after the first one."""
    size, steps, clip, sigma = 5_000, 7, 8.0, 4.0
    model = linear_model(make(noise, clip, sigma, learning_rate=1.0), size)
    x, y = np.zeros([16, size], "float32"), np.zeros([16, 1], "float32")
    before, moved = model.get_weights()[0], []
    for _ in range(steps):
        model.fit(x, y, batch_size=16, verbose=0)
        now = model.get_weights()[0]
        moved.append(before - now)
        before = now
    for found, deviation in zip(moved, noise.deviations(steps)):
        assert_gaussian(found, deviation * clip * sigma / 16)
    assert_gaussian(now, noise.sum_deviations(steps)[-1] * clip * sigma / 16)


@pytest.mark.parametrize("optimizer", [dp.DPSGD, dp.DPAdam])
def test_gradients_that_were_not_released_are_refused(optimizer):
    """testRaisesOnNoCallOfComputeGradients and testRaisesOnNoCallOfGetGradients."""
    v, made = variables(), make(TREES[0], optimizer=optimizer)
    with pytest.raises(dp.NotPrivateError, match="clipped and noised by this library"):
        made.apply_gradients([(tf.ones([3]), v[0]), (tf.ones([2]), v[1])])
    assert not v[1].numpy().any() and made.ledger.num_releases == 0
    made.apply_gradients(made.compute_gradients(lambda: losses(v), v))
    assert v[1].numpy().all()


@pytest.mark.slow_on(2)
@each
def test_parts_of_a_batch_move_nothing_until_it_is_complete(noise):
    """DPTreeAggregationGetGradientsTest.testLargeBatchEmulationNoNoise."""
    w, b = tf.Variable([1.0, -1.0]), tf.Variable([0.5])
    ones = tf.ones([2, 1])
    made = make(noise, gradient_accumulation_steps=2)
    parts = np.array([[[2.0, 0.0], [0.0, 4.0]], [[6.0, 2.0], [4.0, 2.0]]], "float32")
    for batch in range(3):
        before = w.numpy(), b.numpy()
        for k, part in enumerate(parts):
            np.testing.assert_array_equal(w, before[0])
            assert made.ledger.num_releases == batch and made.unfinished_parts == k
            made.minimize(lambda p=part: tf.linalg.matvec(p, w) + tf.linalg.matvec(ones, b), [w, b])
        # The means over both parts: of the inputs, and of 1.
        np.testing.assert_allclose(w, before[0] - [3.0, 2.0], rtol=1e-6)
        np.testing.assert_allclose(b, before[1] - 1, rtol=1e-6)
    assert made.ledger.segments == [(0.0, 4.0, 3)]


@pytest.mark.in_turns
@pytest.mark.parametrize("parts", [1, 2, 4])
@each
def test_as_often_as_a_batch_is_complete_there_is_one_release_with_its_noise(noise, parts):
    """DPTreeAggregationGetGradientsTest.testLargeBatchEmulation."""
    w = tf.Variable(tf.zeros([20_000]))
    made = make(noise, 2.0, 1.5, gradient_accumulation_steps=parts, expected_batch_size=8.0)
    for _ in range(parts):
        assert not w.numpy().any()
        made.minimize(lambda: 0.0 * w[:2], [w])
    assert_gaussian(w.numpy(), 2.0 * 1.5 / 8)
    assert made.ledger.segments == [(1.5, 8.0, 1)]


def test_epsilon_is_that_of_one_gaussian_on_the_nodes_above_a_step():
    """Its accountant is tested beside ours in tests/accounting/test_noise_strategies.py."""
    order = FixedOrder(8, steps=100)
    made = make(TreeNoise(100), 1.0, 6.0, expected_batch_size=8.0)
    made.ledger.restore([(6.0, 8.0, 100)])
    spent = order.epsilon_spent(made, 800, 1e-5)
    alone = dp.accounting.epsilon(6.0 / np.sqrt(7), 1.0, 1, 1e-5)  # 2^6 ≤ 100 < 2^7
    assert spent == pytest.approx(alone, rel=1e-6)
