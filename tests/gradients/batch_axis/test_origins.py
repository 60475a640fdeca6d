"""Where an axis comes from: an output is equal for all examples if its sources are."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tf_adaptive_dp.gradients.batch_axis import origins
from tf_adaptive_dp.gradients.batch_axis.sizes import Size
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis

PICKS = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0], "int32")
# The type of the operation, a function with it, and its inputs or their shapes.
CASES = {
    "Tile": (lambda x: tf.tile(x, [2, 3]), [4, 2]),
    "Tile of one axis": (lambda x: tf.tile(x, [1, 2]), [6, 2]),
    "Reshape": (lambda x: tf.reshape(x, [4, 6]), [12, 2]),
    "Reshape to any length": (lambda x: tf.reshape(x, [3, -1]), [6, 4]),
    "Slice": (lambda x: tf.slice(x, [1, 0], [4, 3]), [6, 3]),
    "StridedSlice": (lambda x: x[:, None, 1:], [4, 5]),
    "StridedSlice backwards": (lambda x: x[::-1, 0], [4, 3]),
    "ConcatV2": (lambda x, y: tf.concat([x, y], 0), [4, 2], [2, 2]),
    "Split": (lambda x: tf.split(x, 2)[0], [8, 3]),
    "Pack": (lambda x, y: tf.stack([x, y], axis=1), [4, 3], [4, 3]),
    "Unpack": (lambda x: tf.unstack(x, 2, axis=1)[0], [4, 2, 3]),
    "Squeeze": (lambda x: tf.squeeze(x, [0]), [1, 4]),
    "ExpandDims": (lambda x: tf.expand_dims(x, 1), [4, 3]),
    "Transpose": (lambda x: tf.transpose(x, [1, 0]), [4, 3]),
    "Mul": (lambda x, y: x * y, [4, 3], [3]),
    "Sum": (lambda x: tf.reduce_sum(x, 0), [2, 4]),
    "GatherV2": (lambda x, y: tf.gather(x, y, axis=1), [4, 2], PICKS),
    "GatherV2 in rows": (
        lambda x, y: tf.gather(x, y, axis=1, batch_dims=1),
        *([4, 2], PICKS.reshape(4, 3)),
    ),
    "MatMul": (tf.matmul, [4, 3], [3, 6]),
}


def places(shape, batch_size):
    """Every batch axis that a tensor of this shape may have."""
    for axis, length in enumerate(shape):
        for outer in range(1, length + 1):
            inner, rest = divmod(length, outer * batch_size)
            if inner and not rest:
                yield BatchAxis(axis, Size(outer), Size(inner))


def in_blocks(value, place):
    outer, inner = place.outer.static, place.inner.static
    rows = np.moveaxis(value, place.axis, 0)
    return rows.reshape([outer, -1, inner, *rows.shape[1:]])


def made_equal(value, place):
    """The value with the entries of the first example for all of them."""
    if not 0 <= place.axis < value.ndim:
        return value
    blocks = in_blocks(value, place)
    moved = np.moveaxis(value, place.axis, 0).shape
    rows = np.broadcast_to(blocks[:, :1], blocks.shape).reshape(moved)
    return np.moveaxis(rows, 0, place.axis)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("name", CASES)
def test_an_output_of_equal_sources_is_equal(name):
    function, *given = CASES[name]
    values = [zoo.floats(*v, seed=k) if isinstance(v, list) else v for k, v in enumerate(given)]
    known = [tf.TensorSpec(v.shape, v.dtype) for v in values]
    unknown = [tf.TensorSpec([None] * v.ndim, v.dtype) for v in values]
    num_known = 0
    for specs in (known, unknown):
        traced = tf.function(function, autograph=False).get_concrete_function(*specs)
        (op,) = (op for op in traced.graph.get_operations() if op.type == name.split()[0])
        shape = traced(*map(tf.constant, values)).shape
        for batch_size in (2, 3):
            for place in places(shape, batch_size):
                found = origins.sources(op, 0, place, BatchAxes(batch_size))
                if found is None or any(p is None for _, p in found):
                    continue
                wanted = {id(t): p for t, p in found}
                equal = [
                    made_equal(v, wanted[id(t)]) if id(t) in wanted else v
                    for t, v in zip(traced.inputs, values)
                ]
                output = traced(*map(tf.constant, equal)).numpy()
                blocks = in_blocks(output, place)
                np.testing.assert_allclose(blocks, np.broadcast_to(blocks[:, :1], blocks.shape))
                num_known += 1
    assert num_known
