"""Scales of one number a row or a column: the norms of wide scales, with less work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo

SIZE, WIDTH = 40, 30


def text_model(kind):
    """The first variable has SIZE rows; further ones follow."""
    tf.keras.utils.set_random_seed(2)
    layers = {
        "dense": [tf.keras.layers.Dense(WIDTH)],
        "dense in sequence": [tf.keras.layers.Dense(WIDTH), tf.keras.layers.Flatten()],
        "einsum": [tf.keras.layers.EinsumDense("ab,bcd->acd", [5, 6]), tf.keras.layers.Flatten()],
        "embedding": [
            tf.keras.layers.Embedding(SIZE, WIDTH, input_length=7),
            tf.keras.layers.Flatten(),
        ],
        "convolution": [tf.keras.layers.Conv1D(WIDTH, 2), tf.keras.layers.Flatten()],
    }[kind]
    batch = {
        "embedding": np.random.default_rng(0).integers(0, SIZE, [6, 7]),
        "dense in sequence": zoo.floats(6, 3, SIZE),
        "convolution": zoo.floats(6, 4, SIZE),
    }.get(kind, zoo.floats(6, SIZE))
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(3)])
    model(batch)
    y = zoo.labels(6, 3)
    return zoo.Problem(
        model.trainable_variables,
        lambda x, y: zoo.cross_entropy(y, model(x, training=True)),
        (batch, y),
    )


def narrowed(shape):
    return sorted(set(itertools.product(*((1, n) for n in shape))))


KINDS = ["dense", "dense in sequence", "einsum", "embedding", "convolution"]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Under eager execution")
@pytest.mark.parametrize("mode, method", [("graph", "traced"), ("eager", "materialized")])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_wide_scale_and_of_batches_of_one(kind, mode, method):
    problem = text_model(kind)
    rows = zoo.batch_of_one_gradients(problem)
    generator = np.random.default_rng(4)
    wide_shapes = [tuple(v.shape) for v in problem.variables]
    others = [np.float32(1.5)] * (len(rows) - 1)
    scales = [
        [generator.uniform(0.2, 4.0, narrow).astype("float32"), *others]
        for narrow in narrowed(wide_shapes[0])
    ]
    shift = [0.1 * np.ones(s[-1:], "float32") for s in wide_shapes]

    def ask(*batch):
        source = zoo.source(problem, *batch, method=method)
        return [
            (
                source.squared_norms(scale),
                source.squared_norms([tf.broadcast_to(a, s) for a, s in zip(scale, wide_shapes)]),
                source.squared_norms(scale, shift),
            )
            for scale in scales
        ]

    found = zoo.in_mode(mode, ask, problem.batch)(*problem.batch)
    for scale, (actual, of_wide, of_shifted) in zip(scales, found):
        plain = sum(((r * a) ** 2).reshape(6, -1).sum(1) for r, a in zip(rows, scale))
        parts = zip(rows, scale, shift)
        shifted = sum((((r + b) * a) ** 2).reshape(6, -1).sum(1) for r, a, b in parts)
        np.testing.assert_allclose(actual, plain, rtol=1e-4)
        # Gram forms are raised by what float32 may lose of them, up to 3·120·2⁻²⁴ here.
        np.testing.assert_allclose(actual, of_wide, rtol=3e-5)
        np.testing.assert_allclose(of_shifted, shifted, rtol=1e-4)


PRODUCTS = {"Square", "Mul", "MatMul", "BatchMatMulV2", "Einsum"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["dense", "embedding", "einsum", "dense in sequence"])
@pytest.mark.parametrize("narrow", [True, False])
def test_only_a_wide_scale_of_a_kernel_makes_products_of_its_size(kind, narrow):
    problem = text_model(kind)
    shape = problem.variables[0].shape
    rows = [SIZE] + [1] * (shape.rank - 1) if narrow else shape
    scale = [tf.TensorSpec(rows), *(tf.TensorSpec([]) for _ in problem.variables[1:])]
    batch = [tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in problem.batch]

    @tf.function(input_signature=[scale, *batch])
    def norms(scale, *batch):
        return zoo.source(problem, *batch, method="traced").squared_norms(scale)

    found = norms.get_concrete_function()
    ancestors = tf.compat.v1.graph_util.extract_sub_graph(
        found.graph.as_graph_def(), [found.graph.outputs[0].op.name]
    )
    sizes = {
        output.shape.num_elements()
        for node in ancestors.node
        for output in found.graph.get_operation_by_name(node.name).outputs
        if node.op in PRODUCTS
    }
    kernel = SIZE * WIDTH
    wide_products = bool(sizes & {kernel, len(problem.batch[0]) * kernel})
    assert wide_products == (not narrow and kind != "embedding")  # it needs the rows in use only
