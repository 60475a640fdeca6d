"""Lists of tensors keep the examples apart where positions do not depend on the data."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tests.helpers.linear_problem import MODES, linear, mixes, search
from tf_adaptive_dp.errors import NotPrivateError

raw = tf.raw_ops
# Where sizes are known they tell nothing: there are as many steps and entries as examples.
REFUSED = pytest.mark.parametrize(
    "mode", ["graph of fixed size", pytest.param("graph", marks=pytest.mark.slow)]
)
SHAPE, TIMES = [-1, 4], 4


def over_time(h):
    """[T, B, 4] with T = B."""
    return tf.stack([h, 2.0 * h, h - 1.0, tf.tanh(h)])


def array(h):
    return tf.TensorArray(tf.float32, TIMES, clear_after_read=False).unstack(over_time(h))


def made(h):
    return raw.TensorListFromTensor(tensor=over_time(h), element_shape=SHAPE)


def item(handle, index=1):
    found = raw.TensorListGetItem(
        input_handle=handle, index=index, element_shape=SHAPE, element_dtype=tf.float32
    )
    return tf.ensure_shape(found, [None, 4])


def stacked(handle, shape=(-1, 4)):
    return raw.TensorListStack(
        input_handle=handle, element_shape=list(shape), element_dtype=tf.float32
    )


def concatenated(handle):
    found = raw.TensorListConcatV2(
        input_handle=handle,
        element_shape=SHAPE,
        leading_dims=tf.zeros([0], tf.int64),
        element_dtype=tf.float32,
    )
    return tf.ensure_shape(found[0], [None, 4])


def rows(h):
    return raw.TensorListFromTensor(tensor=h, element_shape=[4])


def number(k):
    return tf.cast(k, tf.int32)


def length_of(handle):
    return tf.cast(raw.TensorListLength(input_handle=handle), tf.float32)


def exchanged(h):
    """Element 0 has the batch on axis 0, element 1 on axis 1."""
    written = tf.TensorArray(tf.float32, 2, infer_shape=False, clear_after_read=False)
    written = written.write(0, h).write(1, tf.transpose(h))
    return h + tf.ensure_shape(written.read(1), [None, 4])


def alternating(h):
    """A loop that writes each second element with its axes exchanged."""

    def body(t, x, written):
        return t + 1, tf.transpose(x), written.write(t, x)

    written = tf.TensorArray(tf.float32, 2, infer_shape=False, clear_after_read=False)
    any_shape = tf.TensorShape([None, None])
    shapes = [tf.TensorShape([]), any_shape, tf.TensorShape(None)]
    written = tf.while_loop(lambda t, *_: t < 2, body, [0, h, written], shape_invariants=shapes)[2]
    return h + tf.ensure_shape(written.read(1), [None, 4])


def in_optional(h):
    optional = tf.experimental.Optional.from_value(h - tf.reduce_mean(h, 0))
    return h * tf.stop_gradient(tf.ensure_shape(optional.get_value(), [None, 4]))


def in_data_set(h):
    data = tf.data.Dataset.from_tensors(h - tf.reduce_mean(h, 0))
    mean = tf.data.experimental.get_single_element(data)
    return h * tf.stop_gradient(tf.ensure_shape(mean, [None, 4]))


def split(h):
    lengths = tf.constant([1, 3], tf.int64)
    return h + item(raw.TensorListSplit(tensor=h, element_shape=SHAPE, lengths=lengths), 0)[0]


def scattered(h, indices):
    found = raw.TensorListScatterV2(
        tensor=over_time(h), indices=indices, element_shape=SHAPE, num_elements=TIMES
    )
    return item(found)


def scattered_into(h, indices):
    found = raw.TensorListScatterIntoExistingList(
        input_handle=made(h), tensor=over_time(h), indices=indices
    )
    return item(found)


def joined(h):
    """A list of one element for each time, then the whole batch as one element."""
    last = raw.TensorListFromTensor(tensor=h[tf.newaxis], element_shape=SHAPE)
    both = raw.TensorListConcatLists(input_a=made(h), input_b=last, element_dtype=tf.float32)
    return item(both, 4)


MIXING = {
    "gather by the data": lambda h, y, k: tf.reduce_mean(array(h).gather(number(k)), 0),
    "gather by the data, one of them": lambda h, y, k: array(h).gather(number(k))[0],
    "read by the data": lambda h, y, k: array(h).read(number(k[0])),
    "read by a size": lambda h, y, k: array(h).read(tf.shape(tf.boolean_mask(k, k > 1))[0]),
    "write by the data": lambda h, y, k: array(h).write(number(k[0]), 3.0 * h).read(1),
    "write a mean": lambda h, y, k: array(h).write(1, h - tf.reduce_mean(h, 0)).read(1),
    "read by a gradient": lambda h, y, k: item(made(h), tf.argmax(h[:, 0], output_type=tf.int32)),
    "resize by the data": lambda h, y, k: tf.reduce_sum(
        stacked(raw.TensorListResize(input_handle=made(h), size=number(k[0]))), 0
    ),
    "length": lambda h, y, k: h * length_of(rows(tf.boolean_mask(h, h[:, 0] > 0))),
    "length of ones": lambda h, y, k: (
        h * length_of(rows(tf.ones_like(tf.boolean_mask(h, h[:, 0] > 0))))
    ),
    "shape of elements": lambda h, y, k: (
        h
        * tf.cast(
            raw.TensorListElementShape(
                input_handle=raw.TensorListReserve(
                    element_shape=tf.shape(tf.boolean_mask(h, h[:, 0] > 0)),
                    num_elements=1,
                    element_dtype=tf.float32,
                ),
                shape_type=tf.int32,
            ),
            tf.float32,
        )[0]
    ),
    "an example of the batch": lambda h, y, k: h + tf.TensorArray(tf.float32, 4).unstack(h).read(3),
    "the last example": lambda h, y, k: (
        h
        + raw.TensorListPopBack(input_handle=rows(h), element_shape=[4], element_dtype=tf.float32)[
            1
        ]
    ),
    "gather of examples": lambda h, y, k: (
        tf.TensorArray(tf.float32, 4).unstack(h).gather([1, 2, 3, 0])
    ),
    "scatter of examples": lambda h, y, k: stacked(
        raw.TensorListScatterV2(
            tensor=h, indices=[1, 2, 3, 0], element_shape=[4], num_elements=TIMES
        ),
        [4],
    ),
    "scatter by the data": lambda h, y, k: scattered(h, tf.argsort(h[:, 0])),
    "scatter into, by the data": lambda h, y, k: scattered_into(h, tf.argsort(h[:, 0])),
    "split": lambda h, y, k: split(h),
    "concat": lambda h, y, k: concatenated(made(h))[1:5] + h,
    "elements of two layouts": lambda h, y, k: exchanged(h),
    "elements of two layouts in a loop": lambda h, y, k: alternating(h),
    "two lists, one of examples": lambda h, y, k: h + joined(h)[3],
    "optional": lambda h, y, k: in_optional(h),
    "data set": lambda h, y, k: in_data_set(h),
}


@pytest.mark.in_turns
@REFUSED
@pytest.mark.parametrize("name", MIXING)
def test_lists_that_mix_examples_are_refused(name, mode):
    problem = linear(MIXING[name])
    assert mixes(problem)
    with pytest.raises(NotPrivateError, match="affect each other|mix"):
        search(problem, mode)


def written_backwards(h):
    """Read in another order than written, with elements that nobody wrote."""
    written = tf.TensorArray(tf.float32, 6, element_shape=[None, 4], clear_after_read=False)
    for t in (3, 0, 2):
        written = written.write(t, tf.tanh(h * (t + 1.0)))
    return written.read(0) + written.gather([2, 3])[1] * written.read(2)


def pushed_and_popped(h):
    kept = raw.EmptyTensorList(element_shape=SHAPE, max_num_elements=-1, element_dtype=tf.float32)
    kept = raw.TensorListPushBack(input_handle=kept, tensor=h)
    kept = raw.TensorListPushBack(input_handle=kept, tensor=tf.tanh(h))
    _, last = raw.TensorListPopBack(
        input_handle=kept, element_shape=SHAPE, element_dtype=tf.float32
    )
    return last * item(kept, 0)


def over_steps(h, use):
    """A loop over time that writes a list, of which more is read than the last element."""

    def body(t, x, written):
        x = tf.tanh(x * 1.5)
        return t + 1, x, written.write(t, x)

    written = tf.TensorArray(tf.float32, TIMES, element_shape=[None, 4], clear_after_read=False)
    return use(tf.while_loop(lambda t, *_: t < TIMES, body, (0, h, written))[2])


APART = {
    "gather at public positions": lambda h, y, k: tf.reduce_sum(array(h).gather([3, 1]) ** 2, 0),
    "the last first": lambda h, y, k: over_steps(h, lambda a: a.gather([3, 2, 1, 0])[0] - h),
    "stacked, then chosen by each example": lambda h, y, k: over_steps(
        h, lambda a: tf.gather(tf.transpose(a.stack(), [1, 0, 2]), k, axis=1, batch_dims=1)
    ),
    "written backwards": lambda h, y, k: written_backwards(h),
    "pushed and popped": lambda h, y, k: pushed_and_popped(h),
    "shorter than it was": lambda h, y, k: tf.reduce_sum(
        stacked(raw.TensorListResize(input_handle=made(h), size=2)), 0
    ),
    "scan over time": lambda h, y, k: tf.scan(lambda s, x: tf.tanh(s + x), over_time(h))[-1],
    "foldl over time": lambda h, y, k: tf.foldl(lambda s, x: tf.tanh(s + x), over_time(h)),
    "map_fn over time": lambda h, y, k: tf.map_fn(tf.tanh, over_time(h))[1],
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", APART)
def test_lists_that_keep_examples_apart_are_accepted_and_exact(name):
    problem = linear(APART[name])
    expected = squared_norms(zoo.batch_of_one_gradients(problem))

    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    for mode in MODES:
        found = zoo.in_mode(mode, step, problem.batch)(*problem.batch)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def each(h, body, count=None):
    """A loop over the examples by hand, with lists of what they have and what they get."""
    n = tf.shape(h)[0]
    given = tf.TensorArray(tf.float32, n, clear_after_read=False, element_shape=[4]).unstack(h)
    found = tf.TensorArray(tf.float32, n, element_shape=[4], clear_after_read=False)
    times = n if count is None else count
    found = tf.while_loop(
        lambda i, _: i < times, lambda i, a: (i + 1, body(i, given, a)), (0, found)
    )
    return tf.ensure_shape(found[1].stack(), [None, 4])


def size(h):
    return tf.shape(h)[0]


INNER = tf.Variable(zoo.floats(4, 4, seed=9))
EXAMPLES = {
    "map_fn": lambda h, y, k: tf.map_fn(lambda r: tf.tanh(r) * tf.reduce_sum(r), h),
    "a variable inside": lambda h, y, k: tf.map_fn(lambda r: tf.linalg.matvec(INNER, r) * r, h),
    "nested structures, several outputs": lambda h, y, k: tf.map_fn(
        lambda e: ({"a": e[0] * e[1]["y"]}, e[0][:1]),
        (h, {"y": y}),
        fn_output_signature=({"a": tf.float32}, tf.TensorSpec([1])),
    )[0]["a"],
    "one at a time": lambda h, y, k: tf.map_fn(
        tf.function(lambda r: r * r), h, parallel_iterations=1
    ),
    "sizes of its own": lambda h, y, k: tf.map_fn(
        lambda r: tf.reduce_mean(tf.boolean_mask(r, r > tf.reduce_min(r))), h
    )[:, tf.newaxis],
    "a decision of its own": lambda h, y, k: tf.map_fn(
        lambda e: tf.cond(e[1] > 0, lambda: e[0], lambda: tf.tanh(e[0])),
        (h, y),
        fn_output_signature=tf.float32,
    ),
    "a loop of its own": lambda h, y, k: tf.map_fn(
        lambda r: tf.while_loop(
            lambda s: tf.reduce_sum(s**2) < 9.0, lambda s: (1.5 * s,), [r + 0.1]
        )[0],
        h,
    ),
    "scan within": lambda h, y, k: tf.map_fn(
        lambda r: tf.scan(lambda s, e: tf.tanh(s + e), r) * tf.range(4.0), h
    ),
    "map_fn within": lambda h, y, k: tf.map_fn(lambda r: tf.map_fn(lambda e: e * e + r[0], r), h),
    "in a function": lambda h, y, k: tf.function(lambda h: tf.map_fn(lambda r: r * r[0], h))(h),
    "vectorized_map": lambda h, y, k: tf.vectorized_map(lambda r: r * tf.reduce_sum(r), h),
    "vectorized_map of pairs": lambda h, y, k: tf.vectorized_map(
        lambda e: tf.gather(tf.nn.softmax(e[0]), e[1])[tf.newaxis] * e[2], (h, k, y)
    ),
    "vectorized_map of products": lambda h, y, k: tf.vectorized_map(
        lambda r: tf.reshape(tf.reshape(r, [2, 2]) @ INNER[:2, :2] + tf.range(2.0), [-1]), h
    ),
    "by hand": lambda h, y, k: each(h, lambda i, x, a: a.write(i, x.read(i) * h[i] * y[i])),
    "gather by hand": lambda h, y, k: each(h, lambda i, x, a: a.write(i, tf.gather(h**2, i))),
}


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:No rule covers")
@pytest.mark.parametrize("name", EXAMPLES)
def test_loops_over_the_examples_are_accepted_and_exact(name):
    problem = linear(EXAMPLES[name])
    problem = problem._replace(variables=[*problem.variables, INNER][: 1 + ("inside" in name)])
    expected = squared_norms(zoo.batch_of_one_gradients(problem))

    @tf.autograph.experimental.do_not_convert
    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    for mode in MODES:
        found = zoo.in_mode(mode, step, problem.batch)(*problem.batch)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def vectorized(h, index):
    """What `tf.vectorized_map` does, with another index."""
    return tf.gather(h, tf.where(size(h) > 1, index(size(h)), 0))


def carried(h):
    """A sum over the examples before."""
    total = tf.zeros([4])
    written = tf.TensorArray(tf.float32, size(h), element_shape=[4])

    def body(i, total, written):
        total += h[i]
        return i + 1, total, written.write(i, total)

    return tf.while_loop(lambda i, *_: i < size(h), body, (0, total, written))[2].stack()


def before(i):
    return tf.maximum(i - 1, 0)


def all_pairs(h, inner):
    """Two loops over the examples."""
    return tf.map_fn(lambda r: tf.reduce_sum(tf.map_fn(lambda q: inner(q, r), h), 0), h)


def mixed_up(h):
    """The inner loop writes at its own counter what belongs to that of the outer one."""

    def body(i, written):
        return i + 1, tf.while_loop(
            lambda j, _: j < size(h), lambda j, a: (j + 1, a.write(j, h[i])), (0, written)
        )[1]

    written = tf.TensorArray(tf.float32, size(h), element_shape=[4])
    written = tf.while_loop(lambda i, _: i < size(h), body, (0, written))[1]
    return tf.ensure_shape(written.stack(), [None, 4]) + h


ACROSS = {
    "a sum that is carried": lambda h, y, k: carried(h),
    "scan": lambda h, y, k: tf.scan(lambda s, r: s + r, h),
    "foldl": lambda h, y, k: tf.foldl(lambda s, r: s + r, h) * h,
    "foldr": lambda h, y, k: tf.foldr(lambda s, r: s + r, h) * h,
    "the one before": lambda h, y, k: each(
        h, lambda i, x, a: a.write(i, x.read(i) + x.read(before(i)))
    ),
    "the last first": lambda h, y, k: each(h, lambda i, x, a: a.write(i, x.read(size(h) - 1 - i))),
    "the first": lambda h, y, k: each(h, lambda i, x, a: a.write(i, x.read(i) * x.read(0))),
    "a slice of the first": lambda h, y, k: each(h, lambda i, x, a: a.write(i, x.read(i) * h[0])),
    "a permutation": lambda h, y, k: each(
        h, lambda i, x, a: a.write(tf.constant([2, 0, 3, 1])[i], x.read(i))
    ),
    "an index of the data": lambda h, y, k: each(
        h, lambda i, x, a: a.write(i, x.read(number(k[i])))
    ),
    "read what was written": lambda h, y, k: each(
        h, lambda i, x, a: a.write(i, x.read(i) + (a.write(i, x.read(i)).read(before(i))))
    ),
    "the whole batch": lambda h, y, k: each(
        h, lambda i, x, a: a.write(i, x.read(i) * tf.reduce_sum(h, 0))
    ),
    "as often as the data say": lambda h, y, k: (
        h + each(h, lambda i, x, a: a.write(i, x.read(i)), number(k[0]) + 1)
    ),
    "stop at one of them": lambda h, y, k: (
        tf.while_loop(
            lambda i, s: tf.reduce_sum(h[tf.minimum(i, 3)]) < 1.0,
            lambda i, s: (i + 1, s + h[i]),
            (0, tf.zeros([4])),
            maximum_iterations=4,
        )[1]
        * h
    ),
    "vectorized, the one before": lambda h, y, k: (
        h * vectorized(h, lambda n: tf.range(-1, n - 1) % n)
    ),
    "vectorized, half of them": lambda h, y, k: (
        h * tf.repeat(vectorized(h, lambda n: tf.range(0, n, 2)), 2, axis=0)
    ),
    "vectorized, the first if there are more": lambda h, y, k: (
        h * tf.gather(h, tf.where(size(h) > 5, tf.range(size(h)), 0))
    ),
    "two loops, all pairs": lambda h, y, k: all_pairs(h, lambda q, r: q * r),
    "two loops, counters mixed up": lambda h, y, k: mixed_up(h),
}


@pytest.mark.in_turns
@REFUSED
@pytest.mark.parametrize("name", ACROSS)
def test_loops_over_the_examples_that_mix_them_are_refused(name, mode):
    problem = linear(ACROSS[name])
    assert mixes(problem)
    with pytest.raises(NotPrivateError, match="affect each other|mix"):
        search(problem, mode)


WEIGHTS = tf.constant([1.0, 2.0, 3.0, 4.0])
BY_PLACE = {
    "the counter": lambda i, row: row * tf.cast(i, tf.float32),
    "weights": lambda i, row: row * WEIGHTS[i],
    "a branch": lambda i, row: tf.cond(i > 2, lambda: row, lambda: 2.0 - row),
    "a loop": lambda i, row: tf.while_loop(
        lambda j, r: j < i, lambda j, r: (j + 1, r**2), (0, row)
    )[1],
    "a seed": lambda i, row: row * tf.random.stateless_normal([4], tf.stack([0, i])),
    "a known seed": lambda i, row: row * tf.random.normal([4], seed=3),
    "an own slice": lambda i, row: row * row[i],
}


@REFUSED
@pytest.mark.parametrize("name", BY_PLACE)
def test_loops_that_tell_an_example_its_place_in_the_batch_are_refused(name, mode):
    def losses(h, y, k):
        return each(h, lambda i, x, a: a.write(i, BY_PLACE[name](i, x.read(i))))

    with pytest.raises(NotPrivateError, match="where in the batch"):
        search(linear(losses), mode)


def test_a_loop_over_some_of_the_examples_is_refused():
    problem = linear(lambda h, y, k: each(h, lambda i, x, a: a.write(i, x.read(i)), 3))
    with pytest.raises(NotPrivateError, match="picks elements by index"):
        search(problem, "graph of fixed size")
