"""Whatever mixes the examples of a batch is refused, also where sizes and values hide it."""

import pytest
import tensorflow as tf

from tests.helpers import mixing, zoo
from tests.helpers.linear_problem import BATCH, MODES, linear, mixes, search
from tf_adaptive_dp.errors import NotPrivateError


@pytest.mark.in_turns
@pytest.mark.slow_after(27)
@pytest.mark.parametrize("name", mixing.MIXING)
def test_what_mixes_examples_is_refused(name):
    problem = linear(mixing.MIXING[name])
    assert mixes(problem)
    for mode in MODES[name in mixing.FIXED :]:
        with pytest.raises(NotPrivateError, match="affect each other|mix"):
            search(problem, mode)


def norms(losses, signature, *batch):
    """In a compiled step, of a batch whose shapes are given."""
    problem = zoo.Problem([KERNEL], losses, batch)

    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    return tf.function(step, input_signature=[tf.TensorSpec(s) for s in signature])(*batch)


KERNEL = tf.Variable(zoo.floats(4, seed=2))
X, ANY = zoo.floats(4, 4), [None, None, 4]


def scores(h):
    return tf.linalg.matvec(h, KERNEL)


def test_unknown_lengths_in_two_calls_of_a_function_are_not_taken_for_equal():
    flat = tf.function(
        lambda s: tf.reshape(s, [-1, 4]), input_signature=[tf.TensorSpec([None, None, 4])]
    )

    def losses(a, b):
        first, _ = tf.split(tf.concat([flat(a), flat(b)], axis=0), 2)
        return tf.reduce_sum(scores(tf.reshape(first, [tf.shape(a)[0], -1, 4])) ** 2, axis=1)

    with pytest.raises(NotPrivateError):
        norms(losses, [ANY, ANY], zoo.floats(4, 2, 4), zoo.floats(4, 6, 4))


OVER_ROWS = {
    "max pooling": lambda h: tf.raw_ops.MaxPool(
        input=h, ksize=[2, 1, 1, 1], strides=[1, 1, 1, 1], padding="SAME"
    ),
    "max pooling, steps": lambda h: tf.raw_ops.MaxPoolV2(
        input=h, ksize=[2, 1, 1, 1], strides=[1, 1, 1, 1], padding="SAME"
    ),
    "max pooling in 3D": lambda h: tf.raw_ops.MaxPool3D(
        input=h[:, None], ksize=[2, 1, 1, 1, 1], strides=[1, 1, 1, 1, 1], padding="SAME"
    )[:, 0],
    "place of the maximum": lambda h: tf.cast(
        tf.nn.max_pool_with_argmax(h, 2, 1, "SAME", include_batch_in_index=True)[1], tf.float32
    ),
}


@pytest.mark.parametrize("name", OVER_ROWS)
def test_pooling_that_knows_other_rows_is_refused(name):
    def losses(x):
        return tf.reduce_sum(tf.cos(OVER_ROWS[name](tf.reshape(x, [-1, 4, 1, 1])))[..., 0, 0], 1)

    with pytest.raises(NotPrivateError):
        norms(lambda x: losses(x) * scores(x), [[None, 4]], X)


def images(x):
    return tf.reshape(x, [-1, 2, 2, 1])


# Each takes x [2, 4] and sizes [2] that are computed from it: of one example, and of the other.
SIZES_OF_OUTPUTS = {
    "resize": lambda x, k: tf.raw_ops.ResizeBilinear(images=images(x), size=k),
    "resize to the nearest": lambda x, k: tf.raw_ops.ResizeNearestNeighbor(
        images=images(x), size=k
    ),
    "projective transform": lambda x, k: tf.raw_ops.ImageProjectiveTransformV3(
        images=images(x),
        transforms=tf.constant([[1.0, 0, 0, 0, 1, 0, 0, 0]]),
        output_shape=k,
        fill_value=0.0,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    ),
    "crops": lambda x, k: tf.raw_ops.BatchToSpaceND(
        input=tf.pad(x, [[0, 0], [0, 9]])[:, :, None], block_shape=[1], crops=k[None]
    ),
    "paddings": lambda x, k: tf.raw_ops.SpaceToBatchND(
        input=x[:, :, None], block_shape=[1], paddings=k[None]
    ),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", SIZES_OF_OUTPUTS)
@pytest.mark.parametrize("rows", [None, 2])
def test_sizes_that_are_computed_from_two_examples_are_refused(name, rows):
    def losses(x):
        sizes = 1 + tf.cast(tf.abs(x[:, 0]), tf.int32)
        out = SIZES_OF_OUTPUTS[name](x, sizes)
        return tf.reduce_sum(tf.reshape(out, [tf.shape(x)[0], -1]), 1) * scores(x)

    with pytest.raises(NotPrivateError):
        norms(losses, [[rows, 4]], X[:2])


def test_pooling_within_examples_is_accepted():
    def losses(x):
        pooled = tf.nn.max_pool2d(tf.reshape(x * KERNEL, [-1, 4, 1, 1]), [2, 1], 1, "SAME")
        return tf.reduce_sum(pooled[..., 0, 0] ** 2, 1)

    assert (norms(losses, [[None, 4]], X).numpy() > 0).all()


def test_a_diagonal_that_picks_another_column_for_each_row_is_refused():
    def losses(x):
        return tf.einsum("bb->b", x) * scores(x)

    with pytest.raises(NotPrivateError):
        norms(losses, [[4, 4]], X)


def test_an_axis_that_may_be_broadcast_has_no_known_length():
    def losses(x, lengths):
        wide = tf.reshape(x + lengths, [-1, tf.shape(x)[1]])  # [4·5, 1], not [4, 1]
        return tf.reduce_sum(wide * KERNEL[0], axis=1)

    try:
        found = norms(losses, [[None, None]] * 2, X[:, :1], zoo.floats(4, 5))
    except NotPrivateError:
        return
    assert found.shape == [4]  # a loss of 20 entries would give each example five times the bound


@pytest.mark.parametrize("depth", ["constant", "argument of an outer function"])
def test_data_that_a_function_captures_is_data(depth):
    def step(x, y):
        @tf.function
        def inner(y):
            problem = zoo.Problem(
                [KERNEL], lambda y: (scores(x - tf.reduce_mean(x, 0)) - y) ** 2, ()
            )
            return zoo.source(problem, y).squared_norms()

        return inner(y)

    step = step if depth == "constant" else tf.function(step)
    with pytest.raises(NotPrivateError):
        step(tf.constant(X), tf.constant(BATCH[1]))


def test_data_that_is_drawn_from_a_variable_is_data():
    everything = tf.Variable(zoo.floats(20, 4), trainable=False)

    def losses():
        x = tf.gather(everything, tf.random.uniform([4], maxval=20, dtype=tf.int32))
        return scores(x - tf.reduce_mean(x, 0)) ** 2

    with pytest.raises(NotPrivateError):
        norms(losses, [])


def test_data_whose_axis_0_is_not_the_batch_is_refused():
    def losses(x, centers):
        return scores(x - tf.reduce_sum(centers, 0))

    with pytest.raises(NotPrivateError, match="does not have the batch as axis 0"):
        norms(losses, [[4, 4], [3, 4]], X, X[:3])
