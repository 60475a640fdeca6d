"""Functions whose gradient computes them again (`tf.recompute_grad`, `keras.remat`).

A call of such a function ends in an `IdentityN`. Its first outputs are the results of the function.
The others, which nothing uses, stand for the arguments of the function and for the variables that
it reads: to these the custom gradient returns what it computes by running the function again. The
operations of the first run are in the graph of the loss, where rules apply to them, but the tape
has no δ of their outputs. Here δ goes from the results of the function through that graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    TensorReference,
    ancestors,
    has_custom_gradient,
    is_recomputation,
)
from tf_adaptive_dp.gradients.rules.recurrent import outputs_of
from tf_adaptive_dp.gradients.variable_uses import VariableUse


class RecomputedCall:
    """One call of a function whose gradient computes it again.

    Attributes:
      op: the `IdentityN` at its end.
      results: the indices of the outputs that the loss is computed from.
      inside: the operations of the function, without those that its arguments are computed from.
    """

    def __init__(self, op: tf.Operation, results: Iterable[int]):
        """Finds the operations of a call.

        Args:
          op: the `IdentityN` at its end.
          results: the indices of the outputs that the loss is computed from.
        """
        self.op, self.results = op, frozenset(results)
        given = {t.ref() for t in self._given}
        ends = [op.inputs[k] for k in sorted(self.results)]
        self.inside = frozenset(ancestors(ends, stop=lambda tensor: tensor.ref() in given))

    @property
    def _given(self) -> list[tf.Tensor]:
        return [t for k, t in enumerate(self.op.inputs) if k not in self.results]

    def reads(self, handle: tf.Tensor) -> bool:
        """Whether the custom gradient has a part for a variable, given by its handle."""
        return any(
            t is handle or (t.op.type == "ReadVariableOp" and t.op.inputs[0] is handle)
            for t in self._given
        )


def recomputed_calls(
    ops: Sequence[tf.Operation], loss: tf.Tensor, consumers: Mapping
) -> list[RecomputedCall]:
    """Finds the calls in the graph of a loss.

    Args:
      ops: the operations that the loss is computed from, in the order of creation.
      loss: the loss.
      consumers: the result of `consumers_of` for these operations.

    Returns:
      The calls, the last one first, so that a call comes before those within its function.
    """
    return [
        RecomputedCall(
            op, [k for k, t in enumerate(op.outputs) if t is loss or t.ref() in consumers]
        )
        for op in reversed(ops)
        if has_custom_gradient(op) and is_recomputation(op)
    ]


def without_arguments(consumers: Mapping, calls: Sequence[RecomputedCall]) -> dict:
    """Leaves out that the `IdentityN` of a call takes arguments and variables too.

    Args:
      consumers: the result of `consumers_of`.
      calls: the calls.
    """
    results = {call.op: call.results for call in calls}
    return {
        tensor: [(op, k) for op, k in found if op not in results or k in results[op]]
        for tensor, found in consumers.items()
    }


def deltas_within(
    calls: Sequence[RecomputedCall],
    handles: Sequence[tf.Tensor | None],
    uses: Sequence[Sequence[VariableUse]],
    deltas: Mapping[TensorReference, tf.Tensor | None],
) -> dict[TensorReference, tf.Tensor | None] | None:
    """The gradients of the outputs of operations that use variables within the functions of calls.

    Args:
      calls: the result of `recomputed_calls`.
      handles: the tensors that stand for the variables in the graph.
      uses: the uses of each variable, found without the arguments of the calls.
      deltas: what the tape has: the gradients of the outputs of all uses and of all calls.

    Returns:
      `None` if this does not account for all that the custom gradients do, for example because the
      function reads a variable in a way that was not found, or because TensorFlow has no gradient
      from a result of the function to the use.
    """
    for call in calls:
        for handle, of_variable in zip(handles, uses):
            is_found = any(u.op in call.inside for u in of_variable)
            if handle is not None and call.reads(handle) and not is_found:
                return None
    users = dict.fromkeys(u.op for us in uses for u in us)
    inside = [op for op in users if any(op in call.inside for call in calls)]
    ends = [t for call in calls for t in call.op.outputs]
    wanted = [t for op in inside for t in outputs_of(op)]
    if any(deltas[t.ref()] is not None for t in wanted):
        return None
    found = {t.ref(): deltas[t.ref()] for t in ends}
    for call in calls:
        pairs = [(call.op.inputs[k], found[call.op.outputs[k].ref()]) for k in call.results]
        pairs = [(tensor, delta) for tensor, delta in pairs if delta is not None]
        own = [t for t in [*wanted, *ends] if t.op in call.inside and found.get(t.ref()) is None]
        if pairs and own:
            results, upstream = zip(*pairs)
            for t, d in zip(own, tf.gradients(list(results), own, grad_ys=list(upstream))):
                found[t.ref()] = None if d is None else tf.convert_to_tensor(d)
    if any(all(found.get(t.ref()) is None for t in outputs_of(op)) for op in inside):
        return None
    return {t.ref(): found.get(t.ref()) for t in wanted}
