"""Random numbers of the model, such as the masks of Dropout, that each row gets for itself.

Numbers from a seed that is known belong to a row and can be foreseen. They are drawn with a seed
that nobody knows instead, where the graph of the step allows it.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import config
from tensorflow.python.ops import control_flow_util_v2, resource_variable_ops

from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.graph import find_function

# They take their seeds as attributes, and draw anew in each step.
_SEEDED = set(
    """
    Multinomial RandomGamma RandomPoissonV2 RandomStandardNormal
    RandomUniform RandomUniformInt TruncatedNormal
    """.split()
)
# They draw the same for the same key or seed, the input at this place.
_OF_KEY = {
    **dict.fromkeys(
        """
        StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
        StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
        StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
        StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
        StatelessTruncatedNormal StatelessTruncatedNormalV2
        """.split(),
        1,
    ),
}
DRAWS = _SEEDED | set(_OF_KEY)

# A key is made by these from the state of a generator or from other random numbers.
_ON_THE_WAY = set(
    """
    AddV2 Bitcast BitwiseXor Cast ConcatV2 ExpandDims GatherV2 Identity Pack Reshape Slice Squeeze
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomUniformFullIntV2
    StridedSlice Unpack
    """.split()
)
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}

_INNER = (
    "In a `tf.function` inside of the step the seed cannot be replaced. Set seeds for initializers "
    "only, and call `tf.random.set_seed(None)` before the first step; or draw the numbers outside "
    "of that function."
)
_DETERMINISM = (
    "`tf.config.experimental.enable_op_determinism` forbids any other seed: train without it."
)
_KNOWN = (
    "Draw with `tf.random.uniform` and its like or a `tf.random.Generator`, whose seeds the "
    "library replaces by secret ones; or draw one value for all rows."
)


class Draws:
    """Random numbers in the graph of a step that rows get for themselves.

    Guarantee: after `renew`, those that were not refused are drawn anew in each step, each entry
    independently, from entropy of the process or the operating system that no seed of the user, no
    graph and no checkpoint tells.
    """

    def __init__(self, graph: tf.Graph):
        """Takes the graph of the step."""
        self._graph = graph
        self._seeded: list[tf.Operation] = []
        # Functions in which they are, and the attributes that name these, from the inside out.
        self._remade: dict[tuple[tf.Operation, str], tf.Graph] = {}
        self._states: dict = {}

    @property
    def replaces_any(self) -> bool:
        """Whether there are seeds, or states of generators, that have to be renewed."""
        return bool(self._seeded or self._states)

    def refusal(self, op: tf.Operation, batch_axes: BatchAxes) -> str | None:
        """What to do about an operation that draws with a known seed; `None` if it is renewed.

        Args:
          op: its type is one of `DRAWS`.
          batch_axes: of the graph that it is in.
        """
        if op.type in _OF_KEY:
            return None if self._is_fresh(op.inputs[_OF_KEY[op.type]], batch_axes) else _KNOWN
        if not (op.get_attr("seed") or op.get_attr("seed2")):
            return None
        if config.is_op_determinism_enabled():
            return _DETERMINISM
        path = _path(batch_axes)
        if path is None:
            return _INNER
        self._seeded.append(op)
        for key in path:  # to the end, behind all that is inside
            self._remade.pop(key, None)
        self._remade.update(path)
        return None

    def renew(self) -> None:
        """Replaces seeds and the states of generators by secret ones, in this graph alone."""
        for op in self._seeded:
            for name in ("seed", "seed2"):  # 0 and 0: from the entropy of the process
                op._set_attr(name, attr_value_pb2.AttrValue(i=0))
        for (call, attribute), body in self._remade.items():
            body.name = control_flow_util_v2.unique_fn_name(call.name, attribute)
            call._set_func_attr(attribute, control_flow_util_v2.create_new_tf_function(body))
        for state in self._states.values():
            secret = self._graph.capture(_secret_state(self._graph, state).handle)
            for op in state.consumers():
                if op.type == "RngReadAndSkip" or op.type in _CALLS | _BRANCHES | _LOOPS:
                    for k, tensor in enumerate(op.inputs):
                        if tensor is state:
                            op._update_input(k, secret)

    def _is_fresh(self, key: tf.Tensor, batch_axes: BatchAxes) -> bool:
        """Whether something that is new in each step went into a key."""
        pending, seen = [(key, batch_axes)], set()
        while pending:
            tensor, where = pending.pop()
            op = tensor.op
            if (where.number, tensor.ref()) in seen:
                continue
            seen.add((where.number, tensor.ref()))
            if op.type == "NonDeterministicInts":
                return True
            if op.type in _SEEDED and self.refusal(op, where) is None:
                return True
            if op.type == "RngReadAndSkip" and self._is_renewable(op.inputs[0], where):
                return True
            if op.type == "Placeholder":
                pending += _fed(tensor, where)
            elif op.type in _ON_THE_WAY:
                pending += [(t, where) for t in op.inputs]
        return False

    def _is_renewable(self, state: tf.Tensor, where: BatchAxes) -> bool:
        """Whether the state of a generator can be replaced; enters it then."""
        while where.caller is not None:
            found = _fed(state, where)
            if not found:
                return False
            state, where = found[0]
        captured = any(i is state for _, i in getattr(self._graph, "captures", ()))
        if not captured or not all(_only_draws(op, state, where) for op in state.consumers()):
            return False
        self._states[state.ref()] = state
        return True


def _path(batch_axes: BatchAxes) -> dict[tuple[tf.Operation, str], tf.Graph] | None:
    """The loops and branches around a body, the innermost first, or `None` if others are around.

    They are functions of this graph alone. One that the user made (`tf.function`) may run
    elsewhere, or have been made ready for its gradient.
    """
    found = {}
    while batch_axes.caller is not None:
        outside, call = batch_axes.caller
        bodies = outside.bodies_of(call).items()
        role = next((r for r, (_, inside) in bodies if inside is batch_axes), None)
        attribute = _ATTRIBUTES.get((call.type.removeprefix("Stateless"), role))
        if attribute is None:
            return None
        graph = outside.bodies_of(call)[role][0]
        if find_function(call.graph, call.get_attr(attribute).name) is not graph:
            return None
        found[call, attribute] = graph
        batch_axes = outside
    return found


_ATTRIBUTES = {
    ("While", "body"): "body",
    ("While", "cond"): "cond",
    ("If", "branch 0"): "then_branch",
    ("If", "branch 1"): "else_branch",
}


def _fed(tensor: tf.Tensor, batch_axes: BatchAxes) -> list[tuple[tf.Tensor, BatchAxes]]:
    """What an argument of a function is given first."""
    if batch_axes.caller is None:
        return []
    outside, call = batch_axes.caller
    first = 1 if call.type in _BRANCHES else 0
    places = [k for k, t in enumerate(tensor.graph.inputs) if t is tensor]
    return [(call.inputs[first + k], outside) for k in places]


def _only_draws(op: tf.Operation, state: tf.Tensor, where: BatchAxes) -> bool:
    """Whether an operation does nothing to the state of a generator but draw with it.

    In the graph of the step itself others may have the state, since they keep it when it is
    replaced where numbers are drawn.
    """
    if op.type not in _CALLS | _BRANCHES | _LOOPS:
        return where.caller is None or op.type in ("RngReadAndSkip", "Identity")
    first = 1 if op.type in _BRANCHES else 0
    bodies = where.bodies_of(op)
    return bool(bodies) and all(
        _only_draws(inner, graph.inputs[k - first], inside)
        for graph, inside in bodies.values()
        for k, tensor in enumerate(op.inputs)
        if tensor is state
        for inner in graph.inputs[k - first].consumers()
    )


def _secret_state(graph: tf.Graph, state: tf.Tensor) -> tf.Variable:
    """A state that nothing tracks or saves; it lives as long as the graph."""
    (described,) = resource_variable_ops.get_eager_safe_handle_data(state).shape_and_type
    size = tf.TensorShape(described.shape).num_elements()
    bits = np.frombuffer(os.urandom(8 * size), np.int64)
    with tf.init_scope():
        secret = resource_variable_ops.ResourceVariable(bits, trainable=False, name="state")
    graph.secret_states = [*getattr(graph, "secret_states", ()), secret]
    return secret
