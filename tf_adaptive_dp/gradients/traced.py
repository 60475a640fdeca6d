"""The fast source: per-example gradients from one ordinary backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors, has_custom_gradient, place_of
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.gradients.batch_axis.operation_types import ELEMENTWISE
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.contributions import (
    DenseGradient,
    SummedContribution,
    VariableContribution,
)
from tf_adaptive_dp.gradients.jacobian import (
    JacobianWarning,
    jacobian_rows,
    refuse_grouped_convolutions,
)
from tf_adaptive_dp.gradients.recomputed import (
    deltas_within,
    recomputed_calls,
    without_arguments,
)
from tf_adaptive_dp.gradients.rows_met import RowsMet
from tf_adaptive_dp.gradients.rules import RULES, RuleContext
from tf_adaptive_dp.gradients.rules.recurrent import outputs_of, unfold
from tf_adaptive_dp.gradients.source import PerExampleGradients
from tf_adaptive_dp.gradients.variable_uses import (
    AxisTransform,
    VariableUse,
    consumers_of,
    find_uses,
    handle_in,
)


class TracedGradients(PerExampleGradients):
    """Per-example gradients from the operations that use the variables.

    Inside a `tf.function` the loss knows its graph. This source finds the operations that use each
    variable, and one backward pass gives the gradients δ of their outputs. A rule for the type of
    the operation then computes norms and weighted sums from its inputs and δ (see `rules`). Only
    variables that no rule covers need their Jacobian.

    Guarantee: the gradients are exact up to float32 rounding. Where rules apply, examples stay
    apart: a NaN or infinite example gets a norm that is not finite, and changes nothing for the
    others. For variables that need the Jacobian, the limit of `MaterializedGradients` holds.
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
        paths: Sequence[str] | None = None,
    ):
        """Runs the backward pass.

        Args:
          loss: [R], one entry per example, microbatch or user.
          variables: the variables to differentiate with respect to.
          tape: the tape that recorded `loss`.
          batch_axes: the batch axes of everything that the loss is computed from.
          examples_per_row: 1, or as many as a user has; `None` for microbatches.
          penalties: terms of the loss to leave out.
          only_rules: whether a variable that no rule covers is an error.
          paths: what messages call the variables; by default what TensorFlow calls them.
        """
        self.ranks = [v.shape.rank for v in variables]
        self._paths = [path_of(v) for v in variables] if paths is None else list(paths)
        self._num_rows = tf.shape(loss)[0] if loss.shape[0] is None else loss.shape[0]
        self._per_row = examples_per_row
        self._batch_axes = batch_axes
        ops = ancestors([loss])
        consumers = consumers_of(ops)
        # A custom gradient may bypass the operations before it on the way to a variable.
        custom = [t for op in ops if has_custom_gradient(op) for t in op.inputs]
        self._recomputed = set(ancestors(custom))
        self._handles = [handle_in(loss.graph, v) for v in variables]

        def find(consumers: dict) -> tuple[RowsMet, list[list[VariableUse]]]:
            met = RowsMet(consumers, batch_axes, {t.ref() for t in penalties})
            return met, [
                [] if h is None else find_uses(h, v.shape, consumers, batch_axes, met)
                for h, v in zip(self._handles, variables)
            ]

        met, uses = find(consumers)
        calls = recomputed_calls(ops, loss, consumers)
        met_within, within = find(without_arguments(consumers, calls)) if calls else (met, uses)
        wanted = [t for us in [*uses, *within] for u in us for t in outputs_of(u.op)]
        wanted += [t for call in calls for t in call.op.outputs]
        outputs = list({t.ref(): t for t in wanted}.values())
        # One backward pass. Variables are among the targets to learn which ones the tape recorded.
        found = tape.gradient(loss, [*outputs, *variables])
        deltas = {
            t.ref(): None if d is None else tf.convert_to_tensor(d) for t, d in zip(outputs, found)
        }
        inside = deltas_within(calls, self._handles, within, deltas) if calls else None
        if inside is not None:
            met, uses = met_within, within
            deltas.update(inside)
        uses = unfold(uses, self._handles, variables, deltas, batch_axes, met)
        # A variable that only penalties use has no per-example gradients.
        connected = [
            d is not None and (handle is None or bool(us))
            for d, handle, us in zip(found[len(outputs) :], self._handles, uses)
        ]
        self.connected = connected
        self._totals = [
            self._total(handle, us, deltas) if there else None
            for handle, us, there in zip(self._handles, uses, connected)
        ]
        self._fall_back(loss, variables, uses, penalties, only_rules)

    def _total(
        self, handle: tf.Tensor, uses: Sequence[VariableUse], deltas: dict
    ) -> SummedContribution | None:
        """What rules contribute to a variable, or `None` if they do not cover all of its uses."""
        parts: list[VariableContribution] = []
        computed: list[tuple[tf.Tensor, VariableContribution]] = []
        for use in uses:
            delta = deltas[use.op.outputs[0].ref()]
            if delta is None and len(use.op.outputs) == 1 and use.op not in self._recomputed:
                continue
            part = None if delta is None else self._ask(use, delta)
            if part is None:
                return None
            if use.view is None:
                computed.append((use.op.inputs[use.index], part))
            else:
                parts.append(part)
        if computed:
            through = _through(computed, handle)
            if through is None:
                return None
            parts.append(through)
        return SummedContribution(parts) if parts else None

    def _ask(self, use: VariableUse, delta: tf.Tensor) -> VariableContribution | None:
        tensor, view = use.op.inputs[use.index], use.view
        rule = RULES.get(use.op.type)
        # Contributions are real. Only elementwise rules can handle unknown sizes.
        known = view is not None or tensor.shape.is_fully_defined() or use.op.type in ELEMENTWISE
        if rule is None or not known or not delta.dtype.is_floating:
            return None
        return rule(
            RuleContext(
                use.op,
                use.index,
                view or AxisTransform(tuple(tensor.shape.as_list())),
                delta,
                self._batch_axes,
                self._num_rows,
                self._per_row,
                use.places,
            )
        )

    def _fall_back(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        uses: Sequence[Sequence[VariableUse]],
        penalties: Sequence[tf.Tensor],
        only_rules: bool,
    ) -> None:
        """Computes the Jacobian for variables that no rule covers."""
        left = [
            k
            for k, (total, there) in enumerate(zip(self._totals, self.connected))
            if there and total is None
        ]
        if not left:
            return
        names = "; ".join(_describe(self._paths[k], uses[k]) for k in left)
        message = f"No rule covers the per-example gradients of some variables. Received: {names}. "
        if only_rules:
            raise ValueError(
                message + 'Pass `gradients="auto"`, which takes the Jacobian for them, or register '
                "a rule (`tf_adaptive_dp.gradients.register_rule`)."
            )
        taken = f"{message}Their Jacobian is taken instead, which is slow."
        found = JacobianWarning(taken, [variables[k] for k in left])
        warnings.warn(found, stacklevel=level_of_caller())
        rows = jacobian_rows(loss, [variables[k] for k in left], penalties)
        for k, part in zip(left, rows):
            if part is None:  # XLA keeps `tf.gradients` from the graph that computed the loss
                raise ValueError(
                    f"{message}XLA cannot take their Jacobian instead: compile with "
                    "`jit_compile=False`, or register a rule "
                    "(`tf_adaptive_dp.gradients.register_rule`)."
                )
            view = AxisTransform(tuple(variables[k].shape.as_list()))
            self._totals[k] = SummedContribution(
                [VariableContribution(DenseGradient(view.shape, part), view)]
            )

    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        return self._total_of(k).squared_norms(scale, shift)

    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        return self._total_of(k).weighted_sum(weights)

    def _total_of(self, k: int) -> SummedContribution:
        total = self._totals[k]
        if total is None:
            raise ValueError(f"The loss does not depend on the variable. Received: k={k}")
        return total


def _describe(path: str, uses: Sequence[VariableUse]) -> str:
    types = sorted({u.op.type for u in uses}) or ["no operation that was found"]
    places = sorted({place_of(u.op) for u in uses})
    return " ".join([f"{path}, read by {', '.join(types)}", ", ".join(places)]).rstrip()


class _Unconnected(Exception):
    """TensorFlow has no gradient through a tensor, for example behind `stop_gradient`."""


def _through(
    parts: Sequence[tuple[tf.Tensor, VariableContribution]], handle: tf.Tensor
) -> VariableContribution | None:
    """Propagates gradients of tensors that were computed from a variable back to the variable.

    Examples are the kernel of a weight-normalized layer, or the gates that a kernel is split into.
    This takes one small backward pass per example, from all these tensors to the variable alone.

    Args:
      parts: each tensor with its per-example gradients.
      handle: the tensor that stands for the variable in the graph.

    Returns:
      `None` if one of the tensors has no gradient with respect to the variable. The caller then
      needs the Jacobian.

    Raises:
      NotPrivateError: if TensorFlow would vectorize a gradient wrongly.
    """
    tensors = [tensor for tensor, _ in parts]

    @tf.autograph.experimental.do_not_convert
    def back(rows: list[tf.Tensor]) -> tf.Tensor:
        upstream = [tf.cast(tf.reshape(r, tf.shape(t)), t.dtype) for r, t in zip(rows, tensors)]
        graph = upstream[0].graph
        before = len(graph.get_operations())
        found = tf.gradients(tensors, handle, grad_ys=upstream)[0]
        if found is None:
            raise _Unconnected
        refuse_grouped_convolutions(graph.get_operations()[before:])
        return tf.convert_to_tensor(found)

    try:
        rows = tf.vectorized_map(back, [part.of(*part.tensors) for _, part in parts])
    except _Unconnected:
        return None
    view = AxisTransform(tuple(rows.shape[1:].as_list()))
    return VariableContribution(DenseGradient(view.shape, rows), view)
