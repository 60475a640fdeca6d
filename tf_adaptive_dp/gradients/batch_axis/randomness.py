"""Random numbers of the model, such as dropout masks, that differ from row to row.

Numbers drawn with a known seed are tied to rows and can be predicted. Where the graph of the step
allows it, they are drawn with a secret seed instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, LOOPS, ancestors
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
# Where operations take a seed, and not a key and a counter that were made from one.
_SEED_OF = {
    "StatelessRandomGetKeyCounter": 0,
    "StatelessRandomGetKeyCounterAlg": 0,
    **dict.fromkeys(
        """
        StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
        StatelessRandomNormal StatelessRandomPoisson StatelessRandomUniform
        StatelessRandomUniformFullInt StatelessRandomUniformInt StatelessTruncatedNormal
        """.split(),
        1,
    ),
}

# These turn the state of a generator, or other random numbers, into a key.
_ON_THE_WAY = set(
    """
    AddV2 Bitcast BitwiseXor Cast ConcatV2 ExpandDims GatherV2 Identity Pack Reshape Slice Squeeze
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomUniformFullIntV2
    StridedSlice Unpack
    """.split()
)
# These turn a variable, such as the counter of a `keras.random.SeedGenerator`, into a seed.
_OF_COUNTERS = set(
    """
    AddV2 Bitcast BitwiseXor Cast ConcatV2 Const ExpandDims FloorMod GatherV2 Identity Mul Pack
    Reshape Slice Squeeze StatelessRandomGetAlg StatelessRandomGetKeyCounter
    StatelessRandomUniformFullIntV2 StridedSlice Sub Unpack
    """.split()
)

_INNER = (
    "In a `tf.function` inside of the step the library cannot replace the seed. Set seeds for "
    "initializers only, and call `tf.random.set_seed(None)` before the first step; or draw the "
    "numbers outside of that function."
)
_INNER_SEED = (
    "In a `tf.function`, a loop or a branch inside of the step the library cannot replace the "
    "seed: draw the numbers outside of it, in the step."
)
_IN_GRADIENT = (
    "In a custom gradient, such as that of `keras.remat`, the library cannot replace the seed: "
    "draw the numbers in the forward pass, and use them in the gradient. Leave layers that draw "
    "numbers, such as Dropout, out of what is computed again."
)
_DETERMINISM = (
    "`tf.config.experimental.enable_op_determinism` forbids secret seeds: train without it."
)
_KNOWN = (
    "Draw with functions such as `tf.random.uniform`, with a `tf.random.Generator`, or with a seed "
    "from an integer variable, whose seeds the library replaces by secret ones; or draw one value "
    "for all rows."
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
        self._seeds: dict = {}

    @property
    def replaces_any(self) -> bool:
        """Whether `renew` replaces any seed or state of a generator."""
        return bool(self._seeded or self._states or self._seeds)

    def refusal(self, op: tf.Operation, batch_axes: BatchAxes) -> str | None:
        """How to fix an operation that draws with a known seed; `None` if `renew` replaces it.

        Args:
          op: an operation of one of the types `DRAWS`.
          batch_axes: the batch axes of its graph.
        """
        if op.type in _OF_KEY:
            return self._refusal_of_key(op, batch_axes)
        if not (op.get_attr("seed") or op.get_attr("seed2")):
            return None
        if graphs.must_be_deterministic():
            return _DETERMINISM
        if _is_on_trial(op, batch_axes):
            return _IN_GRADIENT
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
            size = graphs.size_of_variable(state)
            secret = self._graph.capture(_secret_words(self._graph, size).handle)
            for op in state.consumers():
                if op.type == "RngReadAndSkip" or op.type in CALLS | BRANCHES | LOOPS:
                    for k, tensor in enumerate(op.inputs):
                        if tensor is state:
                            graphs.replace_input(op, k, secret)
        self._renew_seeds()

    def _renew_seeds(self) -> None:
        """Replaces seeds where they are used, so that the variables go on as they would.

        Draws with one and the same seed still get the same numbers, as a model may rely on that.
        Variables with the same value get different seeds.
        """
        if not self._seeds:
            return
        secret = self._graph.capture(_secret_words(self._graph, _WORDS_OF_STATE).handle)
        for seed in self._seeds.values():
            users = [o for o in seed.consumers() if o.type in _SEED_OF]
            # What surrounds `minimize` may wait for the draws, so the seed must not wait for it.
            with self._graph.as_default(), tf.control_dependencies(None):
                drawn = _drawn_seed(secret, seed)
            for op in users:
                graphs.replace_input(op, _SEED_OF[op.type], drawn)

    def _refusal_of_key(self, draw: tf.Operation, batch_axes: BatchAxes) -> str | None:
        """`refusal` of an operation that draws with a key.

        The key may be made from several numbers. One that is new in each step is enough.
        """
        fix = _KNOWN
        pending, seen = [(draw, batch_axes)], set()
        while pending:
            op, where = pending.pop()
            if (where.number, op) in seen:
                continue
            seen.add((where.number, op))
            found = self._refusal_of_source(op, where, fix)
            if found is None:
                return None
            fix = found
            if op.type == "Placeholder":
                pending += [(t.op, outside) for t, outside in _fed(op.outputs[0], where)]
            elif op is draw:
                pending.append((op.inputs[_OF_KEY[op.type]].op, where))
            elif op.type in _ON_THE_WAY:
                pending += [(t.op, where) for t in op.inputs]
        return fix

    def _refusal_of_source(self, op: tf.Operation, where: BatchAxes, known: str) -> str | None:
        """`refusal` of an operation that a key is made from.

        Args:
          op: the operation.
          where: the batch axes of its graph.
          known: what to return if the operation says nothing about the key.
        """
        if op.type == "NonDeterministicInts":
            return None
        if op.type in _SEEDED:
            return self.refusal(op, where)
        if op.type == "RngReadAndSkip":
            if _is_on_trial(op, where):
                return _IN_GRADIENT
            return None if self._is_renewable(op.inputs[0], where) else known
        if op.type in _SEED_OF and _is_of_counters(op.inputs[_SEED_OF[op.type]]):
            return self._refusal_of_seed(op, where)
        return known

    def _refusal_of_seed(self, op: tf.Operation, where: BatchAxes) -> str | None:
        """`refusal` of an operation that takes a seed, if that comes from variables."""
        if graphs.must_be_deterministic():
            return _DETERMINISM
        if where.caller is not None:
            return _INNER_SEED
        seed = op.inputs[_SEED_OF[op.type]]
        if not self._captures(h for o in ancestors([seed]) for h in o.inputs):
            return _KNOWN
        if _is_on_trial(op, where):
            return _IN_GRADIENT
        self._seeds[seed.ref()] = seed
        return None

    def _captures(self, tensors: Iterable[tf.Tensor]) -> bool:
        """Whether the graph captures all handles among the tensors from outside."""
        captured = {i.ref() for _, i in graphs.captures(self._graph)}
        return all(t.ref() in captured for t in tensors if t.dtype == tf.resource)

    def _is_renewable(self, state: tf.Tensor, where: BatchAxes) -> bool:
        """Whether the state of a generator can be replaced; if so, `renew` will."""
        while where.caller is not None:
            found = _fed(state, where)
            if not found:
                return False
            state, where = found[0]
        if not self._captures([state]) or not all(
            _only_draws(op, state, where) for op in state.consumers()
        ):
            return False
        self._states[state.ref()] = state
        return True


def _is_of_counters(seed: tf.Tensor) -> bool:
    """Whether a seed is made from integer variables, and otherwise from constants only.

    A constant seed asks for the same numbers in every step, so it is not replaced.
    """
    reads, pending, seen = False, [seed.op], set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "ReadVariableOp" and op.outputs[0].dtype.is_integer:
            reads = True
        elif op.type in _OF_COUNTERS:
            pending += [t.op for t in op.inputs]
        else:
            return False
    return reads


def _is_on_trial(op: tf.Operation, batch_axes: BatchAxes) -> bool:
    """Whether an operation belongs to a custom gradient, which will be traced once more.

    What is replaced there now would be gone then.
    """
    while op not in batch_axes.trials:
        if batch_axes.caller is None:
            return False
        batch_axes, op = batch_axes.caller
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
    """The value that a caller passes for an argument.

    For a loop variable it is the first one, if the loop makes the next ones from it; else nothing.
    """
    if batch_axes.caller is None:
        return []
    outside, call = batch_axes.caller
    first = 1 if call.type in BRANCHES else 0
    places = [k for k, t in enumerate(tensor.graph.inputs) if t is tensor]
    if call.type in LOOPS:
        body, _ = outside.bodies_of(call)["body"]
        places = [k for k in places if _is_made_from(body.outputs[k], body.inputs[k])]
    return [(call.inputs[first + k], outside) for k in places]


def _is_made_from(tensor: tf.Tensor, source: tf.Tensor) -> bool:
    """Whether a key, or a state, is made from another one of the same graph."""
    return source.op in ancestors(
        [tensor], stop=lambda t: t is not source and t.op.type not in _ON_THE_WAY
    )


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


def _secret_words(graph: tf.Graph, count: int) -> tf.Variable:
    """Words from the operating system in a variable that nothing tracks or saves."""
    return graphs.hidden_variable(graph, np.frombuffer(os.urandom(8 * count), np.int64))


# The layout of TensorFlow's generators: a counter of two words, then the key.
_WORDS_OF_STATE = 3


def _drawn_seed(state: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws a seed of the type of another one from the generator with a state; moves it on."""
    algorithm = tf.random.Algorithm.PHILOX.value
    words = tf.bitcast(
        tf.raw_ops.RngReadAndSkip(resource=state, alg=algorithm, delta=tf.constant(1, tf.uint64)),
        tf.uint64,
    )
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2], key=words[2:], counter=words[:2], alg=algorithm, dtype=seed.dtype
    )
