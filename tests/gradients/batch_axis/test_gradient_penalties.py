"""A loss that depends on the gradient of the model's output for its inputs (double backprop)."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tf_adaptive_dp.errors import NotPrivateError

layers = tf.keras.layers
raw = tf.raw_ops
pytestmark = pytest.mark.filterwarnings("ignore:No rule covers")
IMAGE = (5, 5, 1)


def stack(shape, *hidden):
    """By the shape of an example: a model that ends in two layers that are not linear."""
    return shape, lambda: tf.keras.Sequential(
        [*(f() for f in hidden), layers.Flatten(), layers.Dense(3, "tanh"), layers.Dense(2)]
    )


def convolution(*hidden):
    return stack(IMAGE, lambda: layers.Conv2D(2, 2, activation="softplus"), *hidden)


MODELS = {
    "dense, softplus": stack((4,), lambda: layers.Dense(4, "softplus")),
    "dense, relu": stack((4,), lambda: layers.Dense(4, "relu")),
    "dense, gelu": stack((4,), lambda: layers.Dense(4, "gelu")),
    "sequences": stack((3, 2), lambda: layers.Dense(4, lambda x: x * tf.sigmoid(x))),
    "average pooling": convolution(lambda: layers.AveragePooling2D(2)),
    "maximum pooling": convolution(lambda: layers.MaxPooling2D(2)),
    "global average": convolution(layers.GlobalAveragePooling2D),
    "global maximum": convolution(layers.GlobalMaxPooling2D),
    "depthwise": convolution(lambda: layers.DepthwiseConv2D(2)),
    "transposed": convolution(lambda: layers.Conv2DTranspose(2, 2, 2), layers.LeakyReLU),
    "LayerNormalization": stack((4,), lambda: layers.Dense(4), layers.LayerNormalization),
    "LayerNormalization of images": convolution(layers.LayerNormalization),
    "GroupNormalization": stack(
        (4,), lambda: layers.Dense(4), lambda: layers.GroupNormalization(2)
    ),
    "frozen BatchNormalization": convolution(lambda: layers.BatchNormalization(trainable=False)),
}


def by_tape(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
    return outputs, tape.gradient(outputs, x)


def penalized(shape, make, gradient=by_tape):
    """The squared norm of the gradient for each example's inputs, added to its loss."""
    tf.keras.utils.set_random_seed(3)
    model = make()
    model.build([None, *shape])

    def losses(x):
        outputs, slope = gradient(model, x)
        slope = tf.reshape(slope, [tf.shape(x)[0], -1])
        return tf.reduce_sum(outputs**2, 1) + (tf.norm(slope, axis=1) - 1.0) ** 2

    return zoo.Problem(model.trainable_variables, losses, (zoo.floats(4, *shape),))


def norms_and_counting(problem, mode="graph"):
    counts = []

    @tf.autograph.experimental.do_not_convert
    def step(x):
        source = zoo.source(problem, x)
        counts.append(source.loss.counts_batch)
        return source.squared_norms()

    return zoo.in_mode(mode, step, problem.batch)(*problem.batch), counts[0]


def assert_exact(problem):
    """Of unknown size, with an expected batch size: the size must not enter the loss."""
    found, counts = norms_and_counting(problem)
    assert not counts
    rows = zoo.batch_of_one_gradients(problem)
    assert all(r.any() for r in rows[:1])
    np.testing.assert_allclose(found, squared_norms(rows), rtol=2e-4)


QUICK = ["dense, softplus", "sequences", "maximum pooling", "LayerNormalization"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_penalties_on_gradients_for_the_inputs_are_exact(name):
    assert_exact(penalized(*MODELS[name]))


def of_sum(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
        total = tf.reduce_sum(outputs)
    return outputs, tape.gradient(total, x)


@pytest.mark.slow
def test_the_sum_over_a_batch_may_be_differentiated():
    assert_exact(penalized(*MODELS["dense, gelu"], gradient=of_sum))


def of_mean(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
        mean = tf.reduce_mean(outputs)
    return outputs, tape.gradient(mean, x)


@pytest.mark.slow
def test_the_mean_over_a_batch_divides_by_its_size():
    _, counts = norms_and_counting(penalized(*MODELS["dense, softplus"], gradient=of_mean))
    assert counts


def shared_input(model, x):
    """The gradient for what is added to all examples."""
    shift = tf.zeros(x.shape[1:])
    with tf.GradientTape() as tape:
        tape.watch(shift)
        outputs = model(x * (1.0 + shift))
    return outputs, tf.ones_like(x) * tape.gradient(outputs, shift)


def summed(model, x):
    outputs, slope = by_tape(model, x)
    return outputs, slope + tf.reduce_sum(slope, axis=0)


def reshaped_otherwise(model, x, keepdims=False):
    """The sum of a broadcast operand's gradient, of a tensor that has its axes in another order."""
    size = tf.shape(x)[0]
    slope = by_tape(model, x)[1]
    shape = tf.stack([4, size])
    axes = raw.BroadcastGradientArgs(s0=shape, s1=shape).r0
    return slope, tf.transpose(tf.reshape(tf.reduce_sum(slope, axes, keepdims), shape))


def reshaped_to_more(model, x, keepdims=False):
    slope = by_tape(model, x)[1]
    shape = tf.stack([tf.shape(x)[0], 4])
    axes = raw.BroadcastGradientArgs(s0=shape, s1=shape).r0
    total = tf.reduce_sum(slope, axes, keepdims)
    pairs = tf.reshape(tf.reshape(total, [-1, 8]), [-1, 2, 4])
    return slope, tf.reshape(tf.reverse(pairs, [1]), shape)


def of_broadcast(model, x, read=False):
    """The gradient of an operand of lower rank, as TensorFlow 2.21 writes it for any product."""
    slope = by_tape(model, x)[1]
    shape = tf.shape(slope)
    axes = raw.BroadcastGradientArgs(s0=shape, s1=tf.concat([[2], shape], 0)).r0
    total = tf.reduce_sum(tf.stack([slope, 2 * slope]), axes, keepdims=True)
    if read:  # the shape is [1, B, 4]
        _ = tf.reshape(slope, tf.shape(total)[1:])
    return model(x), tf.reshape(total, shape)


MIXING = {
    "for what all share": shared_input,
    "reshaped otherwise, axes kept": functools.partial(reshaped_otherwise, keepdims=True),
    "reshaped to pairs, axes kept": functools.partial(reshaped_to_more, keepdims=True),
    "its shape is read": functools.partial(of_broadcast, read=True),
    "summed": summed,
    "reshaped otherwise": reshaped_otherwise,
    "reshaped to pairs": reshaped_to_more,
}


@pytest.mark.slow_on(3)
def test_the_gradient_of_an_operand_of_lower_rank_is_exact():
    assert_exact(penalized(*MODELS["dense, softplus"], gradient=of_broadcast))


@pytest.mark.in_turns
@pytest.mark.parametrize("mode", ["graph", "graph of fixed size"])
@pytest.mark.parametrize("name", MIXING)
def test_gradients_that_mix_examples_are_refused(name, mode):
    with pytest.raises(NotPrivateError, match="affect each other|mix"):
        norms_and_counting(penalized(*MODELS["dense, softplus"], gradient=MIXING[name]), mode)


def test_the_gradient_of_normalization_over_the_batch_is_refused():
    shape, make = stack((4,), lambda: layers.Dense(4))
    scale, shift = tf.ones([4]), tf.zeros([4])

    def normalized(model, x):
        def apply(x):
            h = model.layers[0](x)[:, tf.newaxis, tf.newaxis]
            h, mean, variance, *spaces = raw.FusedBatchNormV3(
                x=h, scale=scale, offset=shift, mean=[], variance=[], is_training=True
            )
            return h[:, 0, 0]

        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = apply(x)
        slope = tape.gradient(outputs, x)
        return model(x), slope

    with pytest.raises(NotPrivateError, match="BatchNormalization in training mode"):
        norms_and_counting(penalized(shape, make, normalized))
