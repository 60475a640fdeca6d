"""Maps of axes: along a mapped axis, an entry of an output depends on one entry of the input."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tf_adaptive_dp.gradients.batch_axis.axis_maps import ABSENT, MIXED, UNKNOWN, axis_maps

raw = tf.raw_ops
SQUARE = [4, 3, 3]
# The type of the operation, a function with it, and the shapes of its inputs.
CASES = {
    "Mul": (lambda x, y: x * y, [4, 3, 2], [3, 1]),
    "Exp": (tf.exp, [4, 3]),
    "SelectV2": (lambda x, y: tf.where([[True], [False], [True]], x, y), [4, 3, 2], [2]),
    "BroadcastTo": (lambda x: tf.broadcast_to(x, [4, 3, 2]), [3, 1]),
    "ExpandDims": (lambda x: tf.expand_dims(x, -2), [4, 3]),
    "Squeeze": (lambda x: tf.squeeze(x, [1]), [4, 1, 3]),
    "Transpose": (lambda x: tf.transpose(x, [2, 0, 1]), [4, 3, 2]),
    "ConcatV2": (lambda x, y: tf.concat([x, y], 1), [4, 3, 2], [4, 1, 2]),
    "Split": (lambda x: tf.split(x, 2, axis=1)[1], [4, 4, 3]),
    "Pack": (lambda x, y: tf.stack([x, y], axis=1), [4, 3], [4, 3]),
    "Unpack": (lambda x: tf.unstack(x, axis=1)[1], [4, 2, 3]),
    "Pad": (lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 0]]), [4, 3, 2]),
    "Sum": (lambda x: tf.reduce_sum(x, [1, -1]), [4, 3, 2, 3]),
    "Mean": (lambda x: tf.reduce_mean(x, 1, keepdims=True), [4, 3, 2]),
    "Cumsum": (lambda x: tf.cumsum(x, axis=1), [4, 3, 2]),
    "ReverseV2": (lambda x: tf.reverse(x, [1]), [4, 3, 2]),
    "Roll": (lambda x: tf.roll(x, 1, axis=-1), [4, 3, 2]),
    "ReverseSequence": (lambda x: tf.reverse_sequence(x, [1, 2, 3, 2], seq_axis=1), [4, 3, 2]),
    "Softmax": (tf.nn.softmax, [4, 3, 2]),
    "MatrixInverse": (tf.linalg.inv, SQUARE),
    "MatrixSolve": (tf.linalg.solve, SQUARE, [4, 3, 2]),
    "MatrixSetDiagV3": (tf.linalg.set_diag, SQUARE, [4, 3]),
    "Conv2D": (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), [4, 3, 3, 2], [2, 2, 2, 3]),
    "BiasAdd": (tf.nn.bias_add, [4, 3, 2], [2]),
    "MatMul": (lambda x, y: tf.matmul(x, y, transpose_a=True), [3, 4], [3, 2]),
    "BatchMatMulV2": (lambda x, y: raw.BatchMatMulV2(x=x, y=y, adj_y=True), [4, 3, 2], [4, 5, 2]),
    "Einsum": (lambda x, y: tf.einsum("bij,jkb->kbi", x, y), [4, 3, 2], [2, 5, 4]),
    "FusedBatchNormV3": (
        lambda x, s, b: tf.compat.v1.nn.fused_batch_norm(x, s, b, is_training=True)[0],
        [4, 2, 3, 2],
        [2],
        [2],
    ),
}


def operation(kind, function, *specs):
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    (op,) = (op for op in traced.graph.get_operations() if op.type == kind)
    return op, [id(t) for t in traced.inputs]


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", CASES)
def test_an_entry_depends_on_one_entry_along_a_mapped_axis(kind):
    function, *shapes = CASES[kind]
    inputs = [tf.constant(zoo.floats(*s, seed=k)) for k, s in enumerate(shapes)]
    op, given = operation(kind, function, *(tf.TensorSpec(s) for s in shapes))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(inputs)
        output = function(*inputs)
    num_mapped = 0
    for k, of_input in axis_maps(op).items():
        if id(op.inputs[k]) not in given:
            continue
        x = inputs[given.index(id(op.inputs[k]))]
        jacobian = tape.jacobian(output, x, experimental_use_pfor=False).numpy()
        for axis in range(output.shape.rank):
            source = of_input.source(axis)
            if source not in (ABSENT, MIXED) and x.shape[source] > 1:
                pairs = np.moveaxis(jacobian, (axis, output.shape.rank + source), (0, 1))
                others = pairs[~np.eye(*pairs.shape[:2], dtype=bool)]
                assert not others.any() and pairs.any()
                assert of_input.target(source) == axis
                num_mapped += 1
    assert num_mapped


def test_what_the_graph_does_not_tell_is_unknown():
    spec = tf.TensorSpec([None, None])
    for kind, function in {
        "Squeeze": tf.squeeze,
        "Sum": lambda x: tf.reduce_sum(x, tf.cast(x[0, :1], tf.int32)),
        "Transpose": lambda x: tf.transpose(x, tf.cast(x[0, :2], tf.int32)),
    }.items():
        op, _ = operation(kind, function, spec)
        assert axis_maps(op) == {0: UNKNOWN}
    op, _ = operation("Squeeze", lambda x: tf.squeeze(x, [0]), spec)
    assert axis_maps(op)[0].source(0) == 1
