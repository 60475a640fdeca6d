"""Functions, branches and loops: the batch axis is followed into their bodies."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util_v2

from tf_adaptive_dp.gradients.graph import find_function
from tf_adaptive_dp.gradients.layout.batch_axis import Mixed, Public
from tf_adaptive_dp.gradients.layout.operations import Layout, register_layout


def _body(op: tf.Operation, name: str) -> tf.Graph:
    """The graph of a function that an operation calls."""
    graph = find_function(op.graph, name)
    if graph is not None:
        return graph  # with the shapes of variables
    inputs = op.inputs[1:] if "If" in op.type or "Case" in op.type else op.inputs
    return control_flow_util_v2.get_func_graph(op, [t.shape for t in inputs], name)


def _values(op: tf.Operation, layouts) -> list:
    return [layouts.value(t) for t in op.inputs]


def join(op: tf.Operation, one: Layout, other: Layout) -> Layout:
    """What is known of a value that comes from either of two places."""
    public = isinstance(one, Public) and isinstance(other, Public)
    a, b = (v.layout if isinstance(v, Public) else v for v in (one, other))
    if isinstance(a, Mixed) or isinstance(b, Mixed):
        joined = a if isinstance(a, Mixed) else b
    elif a is None or b is None or a == b:
        joined = a or b
    else:
        joined = Mixed(op, "has examples on one axis first and on another later")
    return Public(joined) if public else joined


@register_layout("PartitionedCall", "StatefulPartitionedCall")
def call(op, layouts):
    """A `tf.function` within the step."""
    return layouts.of_function(_body(op, op.get_attr("f").name), _values(op, layouts))


@register_layout("If", "StatelessIf", "Case", "StatelessCase")
def branches(op, layouts):
    """One of several functions; which one must not depend on the data."""
    if layouts.depends(op.inputs[0]):
        return Mixed(op, "takes one decision for all examples, from the data")
    if op.type.endswith("Case"):
        names = [f.name for f in op.get_attr("branches")]
    else:
        names = [op.get_attr(f"{b}_branch").name for b in ("then", "else")]
    found = None
    for name in names:
        one = layouts.of_function(_body(op, name), _values(op, layouts)[1:])
        found = one if found is None else [join(op, a, b) for a, b in zip(found, one)]
    return found


@register_layout("While", "StatelessWhile")
def loop(op, layouts):
    """A loop; its length must not depend on the data."""
    state = _values(op, layouts)
    body = _body(op, op.get_attr("body").name)
    while True:  # each round makes some layout known, or mixed, or dependent; or it is the last
        after = [join(op, a, b) for a, b in zip(state, layouts.of_function(body, state))]
        if after == state:
            break
        state = after
    condition = layouts.of_function(_body(op, op.get_attr("cond").name), state)
    if not isinstance(condition[0], Public):
        return Mixed(op, "is a loop whose length depends on the data")
    return state
