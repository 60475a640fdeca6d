"""What the library reads from graphs, and edits in them, through TensorFlow's internals."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp._keras import graphs


def operations(function, *arguments):
    """The operations of a function by type."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return {op.type: op for op in graph.get_operations()}


BODIES = {
    "PartitionedCall": (lambda x: tf.function(lambda x: 2.0 * x)(x), ["f"]),
    "StatelessIf": (
        lambda x: tf.cond(x > 0, lambda: x, lambda: -x),
        ["then_branch", "else_branch"],
    ),
    "StatelessWhile": (
        lambda x: tf.while_loop(lambda x: x < 9.0, lambda x: (2.0 * x,), [x])[0],
        ["cond", "body"],
    ),
    "StatelessCase": (
        lambda x: tf.switch_case(tf.cast(x, tf.int32), [lambda: x, lambda: -x, lambda: 2.0 * x]),
        ["branches:0", "branches:1", "branches:2"],
    ),
    "Sin": (tf.sin, []),
}


@pytest.mark.parametrize("op_type", BODIES)
def test_bodies_are_found_by_role(op_type):
    function, roles = BODIES[op_type]
    op = operations(function, tf.TensorSpec([]))[op_type]
    found = graphs.bodies(op)
    assert sorted(found) == sorted(roles)
    for role, graph in found.items():
        places = len(op.inputs) - (op_type in graphs.BRANCHES)
        assert len(graph.inputs) == places, role
        assert len(graph.outputs) == (1 if role == "cond" else len(op.outputs)), role


def test_what_an_operation_may_do_is_known_by_its_type():
    assert graphs.is_stateful("AssignVariableOp") and graphs.takes_resources("AssignVariableOp")
    assert graphs.is_stateful("RandomUniform") and not graphs.takes_resources("RandomUniform")
    assert graphs.is_stateful("MatMul") is False
    assert graphs.is_stateful("NoSuchOperation") is None


def test_custom_gradients_are_seen():
    @tf.custom_gradient
    def custom(x):
        return tf.identity(x), lambda d: 3.0 * d

    op = operations(custom, tf.TensorSpec([2]))["IdentityN"]
    assert graphs.has_custom_gradient(op)
    with op.graph.as_default():
        upstream = [tf.zeros_like(t) for t in op.outputs]
        *_, gradient = graphs.gradient_function(op)(op, *upstream)
    assert gradient.op.type == "Mul" and any(t is upstream[0] for t in gradient.op.inputs)
    plain = operations(lambda x: tf.raw_ops.IdentityN(input=[x]), tf.TensorSpec([2]))["IdentityN"]
    assert not graphs.has_custom_gradient(plain)


def test_a_seed_that_was_cleared_repeats_nothing():
    def draw(x):
        y = tf.random.uniform([4], seed=1)
        graphs.clear_seed(next(o for o in y.graph.get_operations() if o.type == "RandomUniform"))
        return x + y

    tf.random.set_seed(7)
    first = tf.function(draw, autograph=False)(0.0)
    tf.random.set_seed(7)
    assert np.all(first != tf.function(draw, autograph=False)(0.0))


def test_a_hidden_variable_is_in_no_list_of_variables_and_lives_with_its_graph():
    made = []

    @tf.function(autograph=False)
    def step(x):
        graph = tf.compat.v1.get_default_graph()
        made.append(graphs.hidden_variable(graph, np.int64([1, 2, 3])))
        handle = graph.capture(made[0].handle)
        assert graphs.size_of_variable(handle) == 3
        return x

    step(1.0)
    assert step.get_concrete_function(1.0).variables == ()
    np.testing.assert_array_equal(made[0], [1, 2, 3])


class Centered(tf.keras.layers.Layer):
    def call(self, x):
        return x - tf.nn.moments(x, 0)[0]


def test_layers_are_named_as_the_user_named_them():
    inner = tf.keras.Sequential([tf.keras.Input([3]), Centered(name="dense_1")], name="block")
    layers = [tf.keras.Input([3]), Centered(name="dense"), Centered(name="dense_1"), inner]
    model = tf.keras.Sequential(layers, name="model_2")

    @tf.function(autograph=False)
    def called(x):
        return inner(model(x))

    graph = called.get_concrete_function(tf.TensorSpec([None, 3])).graph
    means = [op for op in graph.get_operations() if op.type == "Mean"]
    assert list(dict.fromkeys(graphs.layer_path(op.name) for op in means)) == [
        "model_2/dense",
        "model_2/dense_1",
        "model_2/block/dense_1",
        "block/dense_1",
    ]
    assert graphs.place_of(means[0]) == "in layer 'model_2/dense'"
    other = operations(tf.sin, tf.TensorSpec([]))["Sin"]
    assert graphs.place_of(other) == "outside of layers"


class RunningMean(tf.keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=[shape[-1]], trainable=False)

    def call(self, x):
        self.mean.assign(tf.reduce_mean(x, 0))
        return x - self.mean


def test_the_line_of_an_operation_is_that_of_the_user_and_not_of_keras():
    layer = RunningMean()
    layer.build([None, 3])
    op = operations(layer, tf.TensorSpec([None, 3]))["AssignVariableOp"]
    file, line = graphs.line_of(op)
    with open(file) as lines:
        assert "self.mean.assign(" in lines.readlines()[line - 1]
