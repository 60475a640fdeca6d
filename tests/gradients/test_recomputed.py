"""Functions whose gradient computes them again: what is known within them."""

import pytest
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp.gradients.recomputed import deltas_within, recomputed_calls
from tf_adaptive_dp.gradients.variable_uses import AxisTransform, VariableUse, consumers_of


@pytest.mark.in_turns
@pytest.mark.parametrize("arrives", [True, False])
def test_deltas_are_known_within_a_function_only_where_one_arrives(arrives):
    variable, found = tf.Variable(tf.ones([3, 3])), []

    @tf.function
    def step(x):
        y = tf.recompute_grad(lambda x: tf.tanh(x @ variable))(x)
        loss = tf.reduce_sum(y, axis=1)
        ops = ancestors([loss])
        (call,) = recomputed_calls(ops, loss, consumers_of(ops))
        (product,) = [op for op in call.inside if op.type == "MatMul"]
        uses = [[VariableUse(product, 1, AxisTransform((3, 3)), {})]]
        deltas = dict.fromkeys([product.outputs[0].ref(), *(t.ref() for t in call.op.outputs)])
        if arrives:
            deltas[call.op.outputs[0].ref()] = tf.ones_like(y)
        found.append(deltas_within([call], [product.inputs[1].op.inputs[0]], uses, deltas))
        return loss

    step(tf.ones([2, 3]))
    assert [d is not None for d in (found[0] or {}).values()] == ([True] if arrives else [])
