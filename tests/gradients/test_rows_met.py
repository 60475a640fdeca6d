"""Parameters that are repeated over the batch before they meet it: exact, and never mixed."""

import functools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tf_adaptive_dp.errors import NotPrivateError

pytestmark = pytest.mark.filterwarnings("ignore:No rule covers", "ignore:Under eager execution")
MODES = ("graph", "graph of fixed size")
# All sizes are equal, that of the batch too, so that sizes say nothing about axes.
N = 4
X, TABLE = zoo.floats(N, N, N), zoo.floats(N, N, seed=1)
WEIGHTS = np.linspace(0.0, 2.0, N).astype("float32")


def size(x):
    """The batch size, as Keras has it: a number if it is known."""
    return tf.shape(x)[0] if x.shape[0] is None else x.shape[0]


def repeated(x, p):
    return tf.broadcast_to(p, [size(x), N, N])


def in_function(function, *arguments):
    return tf.function(function, autograph=False)(*arguments)


def merged(function, x, p):
    """`function` of tensors whose batch axis holds the positions, too."""
    return tf.reshape(function(*(tf.reshape(t, [-1, N]) for t in (x, p))), [-1, N, N])


def loop_with_kernel(x, p):
    """Returns the state of a loop, and the kernel that it hands through."""
    body = lambda i, state, k: (i + 1, tf.tanh(state * k), k)  # noqa: E731
    return tf.while_loop(lambda i, *_: i < 2, body, [0, x, p])[1:]


FAST = {
    "broadcast_to, added": lambda x, p: x + repeated(x, p),
    "tile, concatenated": lambda x, p: tf.concat([tf.tile(p[None], [size(x), 1, 1]), x], 1),
    "repeat": lambda x, p: x * tf.repeat(p[None], size(x), axis=0),
    "ones times": lambda x, p: x * (tf.ones([size(x), 1, 1]) * p),
    "zeros plus": lambda x, p: tf.concat([tf.zeros([size(x), 1, 1]) + p, x], 1),
    "ones_like": lambda x, p: tf.concat([tf.ones_like(x) * p, x], 2),
    "fill": lambda x, p: x * tf.fill([size(x), 1, 1], tf.reduce_sum(p)),
    "einsum of ones": lambda x, p: x * tf.einsum("b,td->btd", tf.ones([size(x)]), p),
    "two tokens, concatenated first": lambda x, p: tf.concat(
        [tf.concat([repeated(x, p), tf.tile(p[None, :1], [size(x), 1, 1])], 1), x], 1
    ),
    "stacked": lambda x, p: tf.stack([repeated(x, p), x], 1),
    "merged with the batch": lambda x, p: merged(tf.multiply, x, repeated(x, p)),
    "a kernel and a table": lambda x, p: tf.matmul(
        x, tf.matmul(repeated(x, p), tf.tanh(p)), transpose_b=True
    ),
    "computed before": lambda x, p: x * repeated(x, tf.nn.softmax(p)),
    "used without repeating, too": lambda x, p: x * repeated(x, p) + tf.sin(p) * x,
    "copies along the width": lambda x, p: tf.concat(
        [x, tf.tile(p[None], [size(x), 2, 3])[:, :, :N]], 1
    ),
    "copies within the batch axis": lambda x, p: tf.reshape(
        tf.reshape(tf.tile(x, [1, 3, 1]), [-1, N]) * tf.tile(p, [3 * size(x), 1]), [-1, 3 * N, N]
    ),
    "one number, copied": lambda x, p: x * tf.tile(p[:1, :1][None], [size(x), N, N]),
    "with noise": lambda x, p: x + 0.0 * tf.random.normal([size(x), N, N]) * p + p,
    "unstacked": lambda x, p: x * tf.unstack(tf.stack([repeated(x, p), 2.0 * repeated(x, p)]))[1],
    "split": lambda x, p: x * tf.split(tf.tile(p[None], [size(x), 1, 2]), 2, axis=2)[1],
}
# The examples do not have rows of their own, whatever the shape says.
SHARED = {
    "mean over the rows": lambda x, p: x * tf.reduce_mean(repeated(x, p), axis=0),
    "rows and their mean": lambda x, p: (
        x * repeated(x, p) + tf.reduce_mean(repeated(x, p), axis=0) * x
    ),
    "one tensor used in both ways": lambda x, p: (
        lambda t: x * t + tf.reduce_mean(t, axis=0) * tf.sin(x)
    )(repeated(x, p)),
    "each example with every row": lambda x, p: tf.reduce_mean(
        tf.einsum("btd,cud->btcu", x, repeated(x, p)), axis=2
    ),
    "reversed": lambda x, p: x * repeated(x, p)[::-1],
    "twice as many rows": lambda x, p: x * tf.tile(p[None], [2 * size(x), 1, 1])[: size(x)],
    "gathered": lambda x, p: x * tf.gather(repeated(x, p), tf.zeros([size(x)], tf.int32)),
}
# Functions that return a variable, or something computed from it, beside the data.
RETURNED = {
    "a kernel": lambda x, p: (lambda y, k: tf.tanh(y) + x @ k)(
        *in_function(lambda x: (tf.tanh(x @ p), 2.0 * p), x)
    ),
    "a repeated table": lambda x, p: (lambda y, t: y + tf.tanh(x * t))(
        *in_function(lambda x: (tf.tanh(x * p), repeated(x, p)), x)
    ),
    "a kernel of a loop": lambda x, p: (lambda y, k: y * k)(*loop_with_kernel(x, p)),
}


@functools.cache
def problem(function):
    table = tf.Variable(TABLE)

    def losses(x):
        out = tf.tanh(0.3 * function(x, table))
        return tf.reduce_sum(out * tf.range(1.0, out.shape[-1] + 1), range(1, out.shape.rank))

    return zoo.Problem([table], losses, (X,))


def asked(function, mode, method):
    """A function to norms and weighted sums, by one way to compute gradients."""

    def ask(x, weights):
        source = zoo.source(problem(function), x, method=method)
        return source.squared_norms(), source.weighted_sum(weights)[0]

    return zoo.in_mode(mode, ask, (X, WEIGHTS))


def check(function, mode, method, sizes=(N,)):
    compiled = asked(function, mode, method)
    (rows,) = zoo.batch_of_one_gradients(problem(function))
    for count in sizes:
        norms, total = compiled(X[:count], WEIGHTS[:count])
        np.testing.assert_allclose(norms, squared_norms([rows[:count]]), rtol=1e-4)
        expected = np.tensordot(WEIGHTS[:count], rows[:count], axes=1)
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turns
@pytest.mark.slow_after(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAST)
def test_repeated_parameters_are_exact_and_need_no_jacobian(name, mode):
    check(FAST[name], mode, "traced", sizes=(N, 1) if mode == "graph" else (N,))


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHARED)
def test_rows_that_meet_several_examples_do_not_count_as_one_examples(name, mode):
    check(SHARED[name], mode, "auto")


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RETURNED)
def test_what_functions_return_of_a_variable_counts(name, mode):
    check(RETURNED[name], mode, "auto")


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_gradient_that_mixes_rows_without_data_does_not_mix_examples(mode):
    @tf.custom_gradient
    def averaged(t):
        return tf.identity(t), lambda d: tf.zeros_like(d) + tf.reduce_mean(d, 0, keepdims=True)

    def function(x, p):
        return x * averaged(repeated(x, p))

    def plain(x, p):  # the mean over the rows, repeated, sums to the same
        return x * repeated(x, p)

    norms, total = asked(function, mode, "auto")(X, WEIGHTS)
    (rows,) = zoo.batch_of_one_gradients(problem(plain))
    np.testing.assert_allclose(norms, squared_norms([rows]), rtol=1e-4)
    np.testing.assert_allclose(total, np.tensordot(WEIGHTS, rows, axes=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_share_the_rows_of_their_examples(mode):
    for name in ("copies within the batch axis", "broadcast_to, added"):
        shared = problem(FAST[name])

        def ask(x, shared=shared):
            return zoo.source(shared, x, num_microbatches=2).squared_norms()

        (rows,) = zoo.batch_of_one_gradients(shared)
        pairs = rows.reshape(2, N // 2, N, N).mean(axis=1)
        norms = zoo.in_mode(mode, ask, (X,))(X)
        np.testing.assert_allclose(norms, squared_norms([pairs]), rtol=1e-4)


def mean_and_back(t, axis):
    return tf.broadcast_to(tf.reduce_mean(t, axis, keepdims=True), tf.shape(t))


# From [N, N, N] to [N, N, N], all of the same sizes.
STEPS = {
    **{f"transpose {o}": functools.partial(tf.transpose, perm=o) for o in ([1, 0, 2], [2, 1, 0])},
    "transpose [0, 2, 1]": functools.partial(tf.transpose, perm=[0, 2, 1]),
    **{f"reverse {a}": lambda t, a=a: tf.reverse(t, [a]) for a in (0, 1)},
    **{f"mean {a}": lambda t, a=a: mean_and_back(t, a) for a in (0, 1)},
    **{f"roll {a}": lambda t, a=a: tf.roll(t, 1, a) for a in (0, 2)},
    "slice": lambda t: tf.concat([t, t], 0)[N // 2 : N // 2 + N],
    "whole slice": lambda t: t[0:N],
    "backwards": lambda t: t[::-1],
    "cumsum": lambda t: tf.cumsum(t, 1),
    "merge": lambda t: tf.reshape(tf.sin(tf.reshape(t, [-1, N])), [-1, N, N]),
    "merge otherwise": lambda t: tf.reshape(tf.reshape(t, [N, -1])[:, ::-1], [-1, N, N]),
    "tile and split": lambda t: tf.split(tf.tile(t, [2, 1, 1]), 2, 0)[1],
    "tile within": lambda t: tf.reshape(tf.tile(t, [1, 2, 1]), [-1, 2, N, N])[:, 1],
    "unstack": lambda t: tf.stack(tf.unstack(t, axis=1), axis=1),
    "product": lambda t: tf.matmul(t, tf.transpose(t, [1, 0, 2])),
    "softmax": lambda t: tf.nn.softmax(t, axis=-1),
    "halves": lambda t: tf.concat(tf.split(t, 2, axis=0)[::-1], axis=0),
}
MEETINGS = {
    "times": lambda x, t: x * t,
    "matmul": lambda x, t: tf.matmul(x, t),
    "beside": lambda x, t: tf.concat([x, t], axis=1),
    "all pairs": lambda x, t: tf.einsum("btd,cud->btcu", x, t),
    "twice": lambda x, t: x * t + tf.matmul(x, tf.transpose(t, [1, 2, 0])),
}


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    meeting=st.sampled_from(sorted(MEETINGS)),
    mode=st.sampled_from(MODES),
)
def test_whatever_happens_to_repeated_parameters_the_gradients_are_those_of_the_jacobian(
    steps, meeting, mode
):
    def function(x, p):
        t = repeated(x, p)
        for step in steps:
            t = STEPS[step](t)
        t = tf.ensure_shape(t, [x.shape[0], N, N])
        return MEETINGS[meeting](x, t)

    try:
        expected = asked(function, mode, "materialized")(X, WEIGHTS)
    except NotPrivateError:
        hypothesis.reject()
    for ours, reference in zip(asked(function, mode, "auto")(X, WEIGHTS), expected):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)
