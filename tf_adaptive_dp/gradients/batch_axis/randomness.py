"""Random numbers of the model, such as dropout masks, that differ from row to row.

Numbers drawn with a known seed are tied to rows and can be predicted. Where the graph of the step
allows it, they are drawn with a secret seed instead.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, LOOPS
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes

# Their seeds are attributes, and they draw anew in each step.
_SEEDED = set(
    """
    Multinomial RandomGamma RandomPoissonV2 RandomStandardNormal
    RandomUniform RandomUniformInt TruncatedNormal
    """.split()
)
# They draw the same numbers for the same key or seed, which is the input at this index.
_OF_KEY = dict.fromkeys(
    """
    StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
    StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
    StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2
    """.split(),
    1,
)
DRAWS = _SEEDED | set(_OF_KEY)

# These turn the state of a generator, or other random numbers, into a key.
_ON_THE_WAY = set(
    """
    AddV2 Bitcast BitwiseXor Cast ConcatV2 ExpandDims GatherV2 Identity Pack Reshape Slice Squeeze
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomUniformFullIntV2
    StridedSlice Unpack
    """.split()
)

_INNER = (
    "In a `tf.function` inside of the step the library cannot replace the seed. Set seeds for "
    "initializers only, and call `tf.random.set_seed(None)` before the first step; or draw the "
    "numbers outside of that function."
)
_DETERMINISM = (
    "`tf.config.experimental.enable_op_determinism` forbids secret seeds: train without it."
)
_KNOWN = (
    "Draw with functions such as `tf.random.uniform` or with a `tf.random.Generator`, whose seeds "
    "the library replaces by secret ones; or draw one value for all rows."
)


class Draws:
    """Random numbers in the graph of a step that differ from row to row.

    Guarantee: after `renew`, those that were not refused are drawn anew in each step, each entry
    independently, from entropy of the process or the operating system. No seed of the user, no
    graph and no checkpoint reveals it.
    """

    def __init__(self, graph: tf.Graph):
        """Takes the graph of the step."""
        self._graph = graph
        self._seeded: list[tf.Operation] = []
        # Functions in which they are, and their roles there, from the inside out.
        self._remade: dict[tuple[tf.Operation, str], tf.Graph] = {}
        self._states: dict = {}

    @property
    def replaces_any(self) -> bool:
        """Whether `renew` replaces any seed or state of a generator."""
        return bool(self._seeded or self._states)

    def refusal(self, op: tf.Operation, batch_axes: BatchAxes) -> str | None:
        """How to fix an operation that draws with a known seed; `None` if `renew` replaces it.

        Args:
          op: an operation of one of the types `DRAWS`.
          batch_axes: the batch axes of its graph.
        """
        if op.type in _OF_KEY:
            return None if self._is_fresh(op.inputs[_OF_KEY[op.type]], batch_axes) else _KNOWN
        if not (op.get_attr("seed") or op.get_attr("seed2")):
            return None
        if graphs.must_be_deterministic():
            return _DETERMINISM
        path = _path(batch_axes)
        if path is None:
            return _INNER
        self._seeded.append(op)
        for key in path:  # moves to the end, after everything inside
            self._remade.pop(key, None)
        self._remade.update(path)
        return None

    def renew(self) -> None:
        """Replaces seeds and states of generators by secret ones, in this graph only."""
        for op in self._seeded:
            graphs.clear_seed(op)
        for (call, role), body in self._remade.items():
            graphs.replace_body(call, role, body)
        for state in self._states.values():
            secret = self._graph.capture(_secret_state(self._graph, state).handle)
            for op in state.consumers():
                if op.type == "RngReadAndSkip" or op.type in CALLS | BRANCHES | LOOPS:
                    for k, tensor in enumerate(op.inputs):
                        if tensor is state:
                            graphs.replace_input(op, k, secret)

    def _is_fresh(self, key: tf.Tensor, batch_axes: BatchAxes) -> bool:
        """Whether a key is made from something that is new in each step."""
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
        """Whether the state of a generator can be replaced; if so, `renew` will."""
        while where.caller is not None:
            found = _fed(state, where)
            if not found:
                return False
            state, where = found[0]
        captured = any(i is state for _, i in graphs.captures(self._graph))
        if not captured or not all(_only_draws(op, state, where) for op in state.consumers()):
            return False
        self._states[state.ref()] = state
        return True


def _path(batch_axes: BatchAxes) -> dict[tuple[tf.Operation, str], tf.Graph] | None:
    """The loops and branches around a body, innermost first; `None` if a call is among them.

    Loops and branches belong to this graph only. A `tf.function` may run elsewhere too, or have its
    gradient function already.
    """
    found = {}
    while batch_axes.caller is not None:
        outside, call = batch_axes.caller
        bodies = outside.bodies_of(call).items()
        role = next((r for r, (_, inside) in bodies if inside is batch_axes), None)
        if role not in _OF_THE_GRAPH:
            return None
        graph = outside.bodies_of(call)[role][0]
        if graphs.find_function(call.graph, call.get_attr(role).name) is not graph:
            return None
        found[call, role] = graph
        batch_axes = outside
    return found


_OF_THE_GRAPH = {"body", "cond", "then_branch", "else_branch"}


def _fed(tensor: tf.Tensor, batch_axes: BatchAxes) -> list[tuple[tf.Tensor, BatchAxes]]:
    """The value that a caller passes for an argument; the first one for a loop variable."""
    if batch_axes.caller is None:
        return []
    outside, call = batch_axes.caller
    first = 1 if call.type in BRANCHES else 0
    places = [k for k, t in enumerate(tensor.graph.inputs) if t is tensor]
    return [(call.inputs[first + k], outside) for k in places]


def _only_draws(op: tf.Operation, state: tf.Tensor, where: BatchAxes) -> bool:
    """Whether an operation only draws with the state of a generator.

    In the graph of the step itself, other operations may use the state: they keep it when the
    draws get another one.
    """
    if op.type not in CALLS | BRANCHES | LOOPS:
        return where.caller is None or op.type in ("RngReadAndSkip", "Identity")
    first = 1 if op.type in BRANCHES else 0
    bodies = where.bodies_of(op)
    return bool(bodies) and all(
        _only_draws(inner, graph.inputs[k - first], inside)
        for graph, inside in bodies.values()
        for k, tensor in enumerate(op.inputs)
        if tensor is state
        for inner in graph.inputs[k - first].consumers()
    )


def _secret_state(graph: tf.Graph, state: tf.Tensor) -> tf.Variable:
    """A state of the same size, from the operating system, that nothing tracks or saves."""
    bits = os.urandom(8 * graphs.size_of_variable(state))
    return graphs.hidden_variable(graph, np.frombuffer(bits, np.int64))
