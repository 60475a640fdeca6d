"""Each rule on shapes, strides, paddings and equations drawn at random."""

import functools
import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.helpers import zoo
from tf_adaptive_dp.errors import NotPrivateError

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
# Each example is a function that is traced: half a second.
few = hypothesis.settings(max_examples=8, phases=[hypothesis.Phase.generate])
sizes = st.integers(1, 4)


def check(function, x, *kernels, free=False, reference=None, method="traced"):
    """Compares norms and sums of a function of x and variables, in a batch of unknown size.

    Args:
      function: of x and variables.
      x: the batch.
      *kernels: first values of the variables.
      free: whether axis 1 is of unknown size, too.
      reference: what the gradients are taken of that it is compared with.
      method: of computing gradients.
    """
    variables = [tf.Variable(k) for k in kernels]

    def losses(x, function=function):
        out = tf.tanh(0.3 * function(x, *variables))
        if out.shape.rank == 1:
            return out
        uneven = tf.cast(tf.range(tf.shape(out)[-1]), tf.float32) * 0.3 + 0.5
        return tf.reduce_sum(uneven * out, axis=list(range(1, out.shape.rank)))

    problem = zoo.Problem(variables, losses, (x,))
    truth = functools.partial(losses, function=reference or function)
    rows = zoo.batch_of_one_gradients(problem._replace(losses=truth))
    weights = np.linspace(0.0, 2.0, len(x)).astype("float32")

    def ask(x):
        source = zoo.source(problem, x, method=method)
        return source.squared_norms(), source.weighted_sum(weights)

    norms, sums = zoo.in_mode("graph", ask, (x,), free)(x)
    np.testing.assert_allclose(norms, sum((r.reshape(len(r), -1) ** 2).sum(1) for r in rows), 1e-4)
    for total, r in zip(sums, rows):
        np.testing.assert_allclose(
            total, np.tensordot(weights, r, axes=1), 1e-4, 1e-5 * max(1.0, np.abs(r).max())
        )


def spatial(data, rank, low=1, high=3):
    return [data.draw(st.integers(low, high)) for _ in range(rank)]


def draw_convolution(data, rank):
    """Kernel sizes, strides, dilations (strides or dilations are 1), padding, input sizes."""
    kernel, strides, dilations = spatial(data, rank), spatial(data, rank), spatial(data, rank)
    if data.draw(st.booleans()):
        strides = [1] * rank
    else:
        dilations = [1] * rank
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    extent = [r + data.draw(st.integers(0, 3)) for r in reach]
    return kernel, strides, dilations, data.draw(st.sampled_from(["SAME", "VALID"])), extent


@pytest.mark.slow_on(3)
@few
@hypothesis.given(data=st.data(), rank=st.integers(1, 3), channels=sizes, filters=sizes)
def test_convolutions(data, rank, channels, filters):
    kernel, strides, dilations, padding, extent = draw_convolution(data, rank)
    check(
        lambda x, k: tf.nn.convolution(x, k, strides, padding, dilations=dilations),
        zoo.floats(3, *extent, channels),
        zoo.floats(*kernel, channels, filters, seed=1),
    )


@pytest.mark.slow
@few
@hypothesis.given(data=st.data(), groups=st.integers(1, 3), channels=sizes, filters=sizes)
def test_convolutions_in_groups_with_explicit_padding(data, groups, channels, filters):
    kernel, strides, _, _, extent = draw_convolution(data, 2)
    padding = [
        [0, 0],
        *([data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))] for _ in "ab"),
    ]

    def convolve(x, k):
        return tf.nn.conv2d(x, k, strides, [*padding, [0, 0]])

    def by_group(x, k):  # TensorFlow cannot compute every gradient of grouped convolutions
        parts = zip(tf.split(x, groups, 3), tf.split(k, groups, 3))
        return tf.concat([convolve(*p) for p in parts], axis=3)

    x = zoo.floats(3, *extent, groups * channels)
    kernel = zoo.floats(*kernel, channels, groups * filters, seed=1)
    check(convolve, x, kernel, reference=by_group)


@pytest.mark.slow_on(2)
@few
@hypothesis.given(data=st.data(), channels=sizes, multiplier=sizes)
def test_depthwise_convolutions(data, channels, multiplier):
    kernel, strides, dilations, padding, extent = draw_convolution(data, 2)
    strides = [1, strides[0], strides[0], 1]
    check(
        lambda x, k: tf.nn.depthwise_conv2d(x, k, strides, padding, dilations=dilations),
        zoo.floats(3, *extent, channels),
        zoo.floats(*kernel, channels, multiplier, seed=1),
    )


# Strides, dilations and padding. Only in XLA does the operation itself dilate; elsewhere TensorFlow
# moves blocks to the batch axis.
DEPTHWISE = [
    (strides, dilations, padding)
    for padding in ("SAME", "VALID")
    for strides, dilations in ((1, (1, 1)), (2, (1, 1)), (4, (1, 1)), (1, (2, 1)), (1, (2, 3)))
]


def channels_last(x, kernel, stride, dilations, padding):
    return tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], padding, dilations=dilations)


def channels_last_in_xla(x, kernel, stride, dilations, padding):
    return tf.raw_ops.DepthwiseConv2dNative(
        input=x,
        filter=kernel,
        strides=[1, stride, stride, 1],
        padding=padding,
        dilations=[1, *dilations, 1],
    )


def channels_first_in_xla(x, kernel, stride, dilations, padding):
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=tf.transpose(x, [0, 3, 1, 2]),
        filter=kernel,
        strides=[1, 1, stride, stride],
        padding=padding,
        data_format="NCHW",
        dilations=[1, 1, *dilations],
    )
    return tf.transpose(y, [0, 2, 3, 1])


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "convolve, shape",
    [
        (channels_last, [None, 8, 9, 2]),
        (channels_last, [None, None, None, 2]),
        (channels_last_in_xla, [None, 8, 9, 2]),
        (channels_first_in_xla, [None, 8, 9, 2]),
    ],
    ids=["graph", "graph of any size", "xla", "xla, channels first"],
)
@pytest.mark.parametrize("multiplier", [1, 2, 3, 4])
def test_depthwise_convolutions_of_every_kind(convolve, shape, multiplier):
    x = zoo.floats(3, 8, 9, 2)
    kernels = [zoo.floats(3, 2, 2, multiplier, seed=k) for k in range(len(DEPTHWISE))]
    variables = [tf.Variable(k) for k in kernels]

    def losses(x, convolve=convolve):
        total = 0.0
        for kernel, kind in zip(variables, DEPTHWISE):
            y = convolve(x, kernel, *kind)
            size = tf.shape(y)[1:]
            places = tf.reshape(tf.range(tf.reduce_prod(size)), size)
            total += tf.reduce_sum(tf.sin(tf.cast(places, tf.float32)) * tf.tanh(y), [1, 2, 3])
        return total

    problem = zoo.Problem(variables, losses, (x,))
    truth = functools.partial(losses, convolve=channels_last)
    rows = zoo.batch_of_one_gradients(problem._replace(losses=truth))

    def ask(x, weights):
        source = zoo.source(problem, x, method="traced")
        return source.variable_norms(), source.weighted_sum(weights)

    signature = [tf.TensorSpec(shape), tf.TensorSpec([None])]
    answer = tf.function(ask, signature, jit_compile=convolve != channels_last, autograph=False)
    weights = np.array([0.5, 0.0, 2.0], "float32")
    norms, sums = answer(x, weights)
    for kind, found, total, row in zip(DEPTHWISE, norms, sums, rows):
        expected = (row**2).sum((1, 2, 3, 4))
        np.testing.assert_allclose(found, expected, 1e-4, err_msg=str(kind))
        expected = np.tensordot(weights, row, 1)
        np.testing.assert_allclose(total, expected, 1e-4, 1e-4, err_msg=str(kind))


def test_depthwise_convolutions_add_up_half_precision_in_single():
    """Sums of 4,624 integers are exact in float32, and beyond float16's."""
    x = np.random.default_rng(0).integers(0, 4, [2, 70, 70, 3]).astype("float16")
    kernel = tf.Variable(tf.zeros([3, 3, 3, 1]))

    def losses(x):
        y = tf.nn.depthwise_conv2d(x, tf.cast(kernel, tf.float16), [1] * 4, "VALID")
        return tf.reduce_sum(tf.cast(y, tf.float32), [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (x,))

    def ask(x):
        return zoo.source(problem, x, method="traced").weighted_sum(tf.constant([0.0, 1.0]))

    (total,) = zoo.in_mode("graph", ask, (x,))(x)
    rows = [
        [x[1, i : i + 68, j : j + 68].sum((0, 1), "float64") for j in range(3)] for i in range(3)
    ]
    np.testing.assert_array_equal(total[..., 0], rows)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_what_an_example_adds_through_a_depthwise_convolution_is_bounded_where_terms_cancel(mode):
    kernel, rng = tf.Variable(zoo.floats(3, 3, 4, 2)), np.random.default_rng(0)
    signs = rng.permutation(np.repeat([1.0, -1.0], 128)).reshape(1, 16, 16, 1)
    delta = np.repeat(signs * rng.normal(size=8), 4, axis=0).astype("float32")
    deviations = np.reshape([1e-2, 1e-4, 1e-6, 0.0], [4, 1, 1, 1])
    x = (rng.normal(size=4) + deviations * rng.normal(size=[4, 18, 18, 4])).astype("float32")

    def losses(x, delta):
        y = tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "VALID")
        return tf.reduce_sum(y * delta, [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (x, delta))

    def clipped(*batch):
        source = zoo.source(problem, *batch, method="traced")
        factors = tf.math.divide_no_nan(1.0, tf.sqrt(source.squared_norms()))
        return [source.weighted_sum(factors * tf.one_hot(i, 4))[0] for i in range(4)]

    for total in zoo.in_mode(mode, clipped, problem.batch)(*problem.batch):
        assert np.linalg.norm(total) <= 1 + 1e-5


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_convolutions_make_no_patches(multiplier, batch_size):
    """Nothing in the graph is much larger than the input, with 5·5 entries for each of its own."""
    x, kernel = zoo.floats(4, 12, 12, 6), tf.Variable(zoo.floats(5, 5, 6, multiplier))

    def losses(x):
        return tf.reduce_sum(tf.tanh(tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "SAME")), [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (x,))

    def ask(x):
        source = zoo.source(problem, x, method="traced")
        return source.squared_norms(), source.weighted_sum(tf.ones(4))

    answer = tf.function(ask, [tf.TensorSpec([batch_size, 12, 12, 6])], autograph=False)
    graph = answer.get_concrete_function().graph
    shapes = [t.shape for op in graph.get_operations() for t in op.outputs]
    sizes = [math.prod(n or 4 for n in s) for s in shapes if s.rank is not None]
    assert 1 <= max(sizes) / (multiplier * x.size) < 2  # padded by two on each side


@pytest.mark.slow_on(3)
@few
@hypothesis.given(data=st.data(), rank=st.integers(1, 3), channels=sizes, filters=sizes)
def test_transposed_convolutions(data, rank, channels, filters):
    kernel, strides, _, padding, extent = draw_convolution(data, rank)
    if padding == "SAME":
        sizes = [n * s - data.draw(st.integers(0, s - 1)) for n, s in zip(extent, strides)]
    else:
        sizes = [(n - 1) * s + max(k, s) for n, s, k in zip(extent, strides, kernel)]
    check(
        lambda x, k: tf.nn.conv_transpose(
            x, k, [tf.shape(x)[0], *sizes, filters], strides, padding
        ),
        zoo.floats(3, *extent, channels),
        zoo.floats(*kernel, filters, channels, seed=1),
    )


@pytest.mark.slow_on(2)
@few
@hypothesis.given(data=st.data())
def test_einsum_equations(data):
    """Letters: b the batch, t u of x alone, g h in all, n p summed, m q of the kernel alone."""
    size = dict(zip("btughnpmq", (3, 2, 3, 2, 2, 3, 2, 4, 2)))
    drawn = {c for c in "tughnpmq" if data.draw(st.booleans())} | set(
        data.draw(st.sampled_from("nm"))
    )
    alone = drawn & set(data.draw(st.sampled_from(["", "t"])))  # summed, and not in the kernel
    of_x = data.draw(st.permutations(sorted({"b"} | drawn & set("tughnp"))))
    of_k = data.draw(st.permutations(sorted(drawn & set("ghnpmq"))))
    out = data.draw(st.permutations(sorted({"b"} | drawn & set("tughmq") - alone)))
    terms = ["".join(of_x), "".join(of_k)]
    flip = data.draw(st.booleans())
    equation = f"{','.join(terms[::-1] if flip else terms)}->{''.join(out)}"
    back = [out.index("b"), *(a for a, c in enumerate(out) if c != "b")]

    def function(x, k):
        x = tf.transpose(x, [sorted(of_x).index(c) for c in of_x])
        return tf.transpose(tf.einsum(equation, *((k, x) if flip else (x, k))), back)

    x = zoo.floats(*(size[c] for c in sorted(of_x)))
    hypothesis.assume(of_k)
    check(function, x, zoo.floats(*(size[c] for c in of_k), seed=1))


@pytest.mark.slow_on(3)
@few
@hypothesis.given(
    flips=st.tuples(st.booleans(), st.booleans(), st.booleans()), n=sizes, m=sizes, t=sizes
)
def test_products_of_transposed_matrices(flips, n, m, t):
    of_x, of_k, kernel_first = flips

    def product(x, k):
        if kernel_first:
            return tf.matmul(k, x, transpose_a=of_k, transpose_b=of_x)
        return tf.matmul(x, k, transpose_a=of_x, transpose_b=of_k)

    # The axis of x that is summed over is its last, unless x is first and transposed, or second.
    summed = t if of_x != kernel_first else n
    kernel = (m, summed) if of_k != kernel_first else (summed, m)
    if kernel_first:
        kernel = (summed, m) if of_k else (m, summed)
    check(product, zoo.floats(3, t, n), zoo.floats(*kernel, seed=1))


@pytest.mark.in_turns
@pytest.mark.parametrize("lengths", [(5, 1), (1, 5)])
@pytest.mark.parametrize("product", ["einsum", "matmul"])
def test_products_that_broadcast_an_axis_of_unknown_length(product, lengths):
    def function(x, kernel):
        return tf.einsum("...ij,...jk->...ik", x, kernel) if einsum else tf.matmul(x, kernel)

    (of_x, of_k), einsum = lengths, product == "einsum"
    x, kernel = zoo.floats(3, of_x, 2, 3), zoo.floats(of_k, 3, 2, seed=1)
    with pytest.warns(UserWarning, match="No rule covers"):  # the length of x may be 1, or not
        check(function, x, kernel, free=True, method="auto")


@pytest.mark.in_turns
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["x first", "kernel first", "einsum", "computed", "heads"])
def test_products_with_a_kernel_that_all_examples_share(kind, batch_size):
    """Such as learned queries [1, T, n], which meet the keys of each example."""

    def function(x, kernel):
        if kind == "computed":  # as by the layers that make queries of learned latents
            kernel = tf.nn.softmax(2.0 * kernel) + tf.matmul(kernel, kernel, transpose_b=True)
        if kind == "x first":
            return tf.matmul(x, kernel, transpose_b=True)
        if kind == "einsum":
            return tf.einsum("...ij,...kj->...ik", x, kernel)
        return tf.matmul(kernel, x, transpose_b=True)

    heads = (2,) if kind == "heads" else ()
    x = zoo.floats(batch_size, *heads, 2, 3)
    check(function, x, zoo.floats(1, *heads, 3, 3, seed=1), free=kind == "computed")


@pytest.mark.slow
@few
@hypothesis.given(n=sizes, m=sizes, free=st.booleans(), seed=st.integers(0, 99))
def test_tables(n, m, free, seed):
    ids = np.random.default_rng(seed).integers(0, n, [3, 4])
    check(
        lambda ids, a, b: tf.gather(a, ids) + tf.gather(tf.transpose(b), ids[:, ::-1]),
        ids,
        zoo.floats(n, m),
        zoo.floats(m, n, seed=1),
        free=free,
    )


ELEMENTWISE = {
    "multiply": lambda x, k: x * k,
    "divide": lambda x, k: x / (3.0 + k**2),
    "divided": lambda x, k: k / (3.0 + x**2),
    "power": lambda x, k: tf.pow(1.0 + x**2, k),
    "maximum": lambda x, k: tf.maximum(x, k),
    "minimum": lambda x, k: tf.minimum(k, x),
    "difference": lambda x, k: k - x,
    "squared_difference": lambda x, k: tf.math.squared_difference(k, x),
    "where": lambda x, k: tf.where(x > 0, k, x * k),
    "clip": lambda x, k: tf.clip_by_value(x, -tf.abs(k) - 0.1, tf.abs(k) + 0.1),
    "atan2": lambda x, k: tf.atan2(x, k),
    "xlogy": lambda x, k: tf.math.xlogy(k, 1.0 + x**2),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operations_on_entries(name):
    for shape in ((3, 4), (3, 1), ()):
        check(ELEMENTWISE[name], zoo.floats(3, 3, 4), zoo.floats(*shape, seed=1))


@pytest.mark.filterwarnings("ignore:No rule covers")
def test_real_kernels_of_complex_products():
    def function(x, k):
        return tf.abs(tf.matmul(tf.complex(x, x**2), tf.cast(k, tf.complex64)))

    check(function, zoo.floats(3, 4), zoo.floats(4, 2, seed=1), method="auto")


@pytest.mark.filterwarnings("ignore:No rule covers")
def test_kernels_of_real_and_imaginary_parts():
    def function(x, a, b):
        return tf.abs(tf.matmul(tf.complex(x, x**2), tf.complex(a, b)))

    kernels = zoo.floats(4, 2, seed=1), zoo.floats(4, 2, seed=2)
    check(function, zoo.floats(3, 4), *kernels, method="auto")


def test_bounds_of_quantization_are_trained():
    def function(x, low, high):
        return tf.quantization.fake_quant_with_min_max_vars(x, -tf.exp(low), tf.exp(high))

    with pytest.warns(UserWarning, match="No rule covers"):
        check(function, 3 * zoo.floats(3, 4), np.float32(0), np.float32(0), method="auto")


def test_a_variable_that_only_a_penalty_reads_has_no_gradients():
    w, other = tf.Variable(zoo.floats(4)), tf.Variable([1.0, 2.0])

    def losses(x):
        return tf.linalg.matvec(x, w) + tf.nn.l2_loss(other)

    problem = zoo.Problem([w, other], losses, (zoo.floats(3, 4),))

    def ask(x):
        source = zoo.source(problem, x)
        return source.squared_norms(), source.penalty_gradients[1]

    norms, penalty = zoo.in_mode("graph", ask, problem.batch)(*problem.batch)
    np.testing.assert_allclose(norms, (problem.batch[0] ** 2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(penalty, [1.0, 2.0])


def test_an_operation_without_a_rule_falls_back_with_a_warning_or_an_error():
    kernel = tf.Variable(zoo.floats(2, 2, 3))

    def losses(x):
        x = tf.nn.dilation2d(x, kernel, [1] * 4, "SAME", "NHWC", [1] * 4)
        return tf.reduce_sum(x**2, [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (zoo.floats(3, 4, 4, 3),))
    ask = zoo.in_mode("graph", lambda x: zoo.source(problem, x).squared_norms(), problem.batch)
    with pytest.warns(UserWarning, match="No rule covers.*read by Dilation2D.*which is slow"):
        norms = ask(*problem.batch)
    rows = zoo.batch_of_one_gradients(problem)[0]
    np.testing.assert_allclose(norms, (rows.reshape(3, -1) ** 2).sum(1), rtol=1e-5)
    only = zoo.in_mode("graph", lambda x: zoo.source(problem, x, method="traced"), problem.batch)
    with pytest.raises(ValueError, match='No rule covers.*`gradients="auto"`'):
        only.get_concrete_function()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_jacobian_of_convolutions_in_groups_is_refused_for_tensorflow_gets_it_wrong(mode):
    kernel = tf.Variable(zoo.floats(3, 3, 2, 4))

    def losses(x):
        return tf.reduce_sum(tf.nn.conv2d(x, kernel, 1, "SAME") ** 2, [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (zoo.floats(3, 5, 5, 4),))

    def step(x):
        return zoo.source(problem, x, method="materialized").squared_norms()

    with pytest.raises(NotPrivateError, match="grouped convolutions"):
        zoo.in_mode(mode, step, problem.batch)(*problem.batch)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_kernel_that_a_convolution_in_groups_computes_is_refused(groups, mode):
    table, kernel = (
        tf.constant(zoo.floats(3, 3, 2, 4)),
        tf.Variable(zoo.floats(1, 1, 4 // groups, 4)),
    )

    def losses(x):  # the kernel takes the rows of the table for images
        computed = tf.nn.conv2d(table, kernel, 1, "SAME")
        return tf.reduce_sum(tf.nn.conv2d(x, computed, 1, "SAME") ** 2, [1, 2, 3])

    problem = zoo.Problem([kernel], losses, (zoo.floats(3, 5, 5, 2),))
    ask = zoo.in_mode(mode, lambda x: zoo.source(problem, x).squared_norms(), problem.batch)
    if groups == 2:
        with pytest.raises(NotPrivateError, match="grouped convolutions"):
            ask(*problem.batch)
        return
    (rows,) = zoo.batch_of_one_gradients(problem)
    expected = (rows.reshape(3, -1) ** 2).sum(1)
    np.testing.assert_allclose(ask(*problem.batch), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:No rule covers")
@pytest.mark.parametrize("mode", ["graph", "graph of fixed size"])
def test_convolutions_in_groups_that_keras_hides_in_a_function_are_not_answered_wrongly(mode):
    layer = tf.keras.layers.Conv2D(6, 3, groups=2)
    layer.build((None, 5, 5, 4))
    problem = zoo.Problem(
        layer.trainable_variables,
        lambda x: tf.reduce_sum(layer(x) ** 2, [1, 2, 3]),
        (zoo.floats(3, 5, 5, 4),),
    )
    ask = zoo.in_mode(mode, lambda x: zoo.source(problem, x).squared_norms(), problem.batch)
    try:
        norms = ask(*problem.batch)
    except NotPrivateError:
        return
    rows = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms, sum((r.reshape(3, -1) ** 2).sum(1) for r in rows), 1e-5)
