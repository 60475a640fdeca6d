"""The fast source: per-example gradients from one ordinary backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import has_custom_gradient
from tf_adaptive_dp.gradients.batch_axis.operation_types import ELEMENTWISE
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.contributions import (
    DenseGradient,
    SummedContribution,
    VariableContribution,
)
from tf_adaptive_dp.gradients.graph import ancestors, layer_name
from tf_adaptive_dp.gradients.jacobian import jacobian_rows
from tf_adaptive_dp.gradients.rules import RULES, RuleContext
from tf_adaptive_dp.gradients.rules.recurrent import outputs_of, unfold
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.gradients.variable_uses import (
    AxisTransform,
    VariableUse,
    consumers,
    find_uses,
    handle_in,
)


class TracedGradients(PerExampleGradients):
    """Per-example gradients from the inputs and output gradients of the operations that read them.

    Inside a `tf.function` the loss knows the graph that it came from. For each variable the
    operations that read it are found; one backward pass gives the gradients δ at their outputs,
    and a rule for the type of the operation gives norms and weighted sums from its inputs and δ
    (`rules`). A variable that no rule covers is answered for by the Jacobian, for that variable
    alone.

    Guarantee: the gradients are exact, to the rounding of float32, and the examples stay apart
    where rules answer: one that is NaN or infinite gets a norm that is not finite, and changes
    nothing for the others. For variables of the Jacobian the limit of `MaterializedGradients`
    holds.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        tape: tf.GradientTape,
        batch_axes: BatchAxes,
        *,
        examples_per_row: int | None = 1,
        penalties: Sequence[tf.Tensor] = (),
        only_rules: bool = False,
    ):
        """Differentiates.

        Args:
          loss: [R], one entry an example or a microbatch.
          variables: what to differentiate for.
          tape: the tape that recorded `loss`.
          batch_axes: of the loss of the examples.
          examples_per_row: 1, or `None` for microbatches.
          penalties: terms of the loss that are to be left out.
          only_rules: make it an error if a variable is not covered by rules.
        """
        self._num_rows = tf.shape(loss)[0] if loss.shape[0] is None else loss.shape[0]
        self._per_row = examples_per_row
        self._layouts = batch_axes
        ops = ancestors([loss])
        self._uses = consumers(ops)
        # A custom gradient may reach variables in a way of its own, past the operations before it.
        custom = [t for op in ops if has_custom_gradient(op) for t in op.inputs]
        self._recomputed = set(ancestors(custom))
        stop = {t.ref() for t in penalties}
        self._handles = [handle_in(loss.graph, v) for v in variables]
        reads = [
            [] if h is None else find_uses(h, v.shape, self._uses, batch_axes, stop)
            for h, v in zip(self._handles, variables)
        ]
        outputs = list({t.ref(): t for rs in reads for r in rs for t in outputs_of(r.op)}.values())
        # One pass for all: the variables among its targets tell what the tape has recorded.
        found = tape.gradient(loss, [*outputs, *variables])
        deltas = {
            t.ref(): None if d is None else tf.convert_to_tensor(d) for t, d in zip(outputs, found)
        }
        reads = unfold(reads, self._handles, variables, deltas, batch_axes)
        # A variable that only penalties read has no per-example gradients.
        connected = [
            d is not None and (handle is None or bool(rs))
            for d, handle, rs in zip(found[len(outputs) :], self._handles, reads)
        ]
        self.connected = connected
        self._totals = [
            self._total(handle, rs, deltas) if there else None
            for handle, rs, there in zip(self._handles, reads, connected)
        ]
        self._fall_back(loss, variables, tape, reads, penalties, only_rules)

    def _total(
        self, handle: tf.Tensor, reads: Sequence[VariableUse], deltas: dict
    ) -> SummedContribution | None:
        """What rules say of a variable, or `None` if they do not cover all of its reads."""
        parts, computed = [], []
        for read in reads:
            delta = deltas[read.op.outputs[0].ref()]
            if delta is None and len(read.op.outputs) == 1 and read.op not in self._recomputed:
                continue
            part = None if delta is None else self._ask(read, delta)
            if part is None:
                return None
            if read.view is None:
                computed.append((read.op.inputs[read.index], part))
            else:
                parts.append(part)
        if computed:
            parts.append(_through(computed, handle))
        return SummedContribution(parts) if parts and None not in parts else None

    def _ask(self, read: VariableUse, delta: tf.Tensor) -> VariableContribution | None:
        tensor, view = read.op.inputs[read.index], read.view
        rule = RULES.get(read.op.type)
        # Contributions are real; an unknown size is for entry by entry only.
        known = view is not None or tensor.shape.is_fully_defined() or read.op.type in ELEMENTWISE
        if rule is None or not known or not delta.dtype.is_floating:
            return None
        return rule(
            RuleContext(
                read.op,
                read.index,
                view or AxisTransform(tuple(tensor.shape.as_list())),
                delta,
                self._layouts,
                self._num_rows,
                self._per_row,
            )
        )

    def _fall_back(self, loss, variables, tape, reads, penalties, only_rules) -> None:
        """Takes the Jacobian for variables that rules do not cover."""
        left = [
            k
            for k, (total, there) in enumerate(zip(self._totals, self.connected))
            if there and total is None
        ]
        if not left:
            return
        names = "; ".join(_describe(variables[k], reads[k]) for k in left)
        message = f"No rule covers the per-example gradients of some variables. Received: {names}. "
        if only_rules:
            raise ValueError(
                message + 'Pass `gradients="auto"`, which takes the Jacobian for them, or register '
                "a rule (`tf_adaptive_dp.gradients.register_rule`)."
            )
        warnings.warn(message + "Their Jacobian is taken instead, which is slow.", stacklevel=2)
        rows = jacobian_rows(loss, [variables[k] for k in left], penalties)
        for k, part in zip(left, rows):
            view = AxisTransform(tuple(variables[k].shape.as_list()))
            self._totals[k] = SummedContribution(
                [VariableContribution(DenseGradient(view.shape, part), view)]
            )

    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        return self._totals[k].squared_norms(scale, shift)

    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        return self._totals[k].weighted_sum(weights)


def _describe(variable: tf.Variable, reads: Sequence[VariableUse]) -> str:
    types = sorted({r.op.type for r in reads}) or ["no operation that was found"]
    layers = sorted({layer_name(r.op) for r in reads}) or ["unknown"]
    return f"{variable.name}, read by {', '.join(types)} in layer {', '.join(layers)}"


class _Unconnected(Exception):
    """A tensor through which TensorFlow has no gradient, such as behind `stop_gradient`."""


def _through(
    parts: Sequence[tuple[tf.Tensor, VariableContribution]], handle: tf.Tensor
) -> VariableContribution | None:
    """Takes gradients for tensors that were computed from a variable on to the variable.

    Such as the kernel of a weight-normalised layer, or the gates that a kernel is split into: one
    small backward pass for each example, from all these tensors to the variable only.

    Args:
      parts: each tensor, and the gradients for it.
      handle: what stands for the variable in the graph.

    Returns:
      `None` if one of the tensors has no gradient for the variable: the Jacobian knows.
    """
    tensors = [tensor for tensor, _ in parts]

    @tf.autograph.experimental.do_not_convert
    def back(rows):
        upstream = [tf.cast(tf.reshape(r, tf.shape(t)), t.dtype) for r, t in zip(rows, tensors)]
        found = tf.gradients(tensors, handle, grad_ys=upstream)[0]
        if found is None:
            raise _Unconnected
        return tf.convert_to_tensor(found)

    try:
        rows = tf.vectorized_map(back, [part.of(*part.tensors) for _, part in parts])
    except _Unconnected:
        return None
    view = AxisTransform(tuple(rows.shape[1:].as_list()))
    return VariableContribution(DenseGradient(view.shape, rows), view)
