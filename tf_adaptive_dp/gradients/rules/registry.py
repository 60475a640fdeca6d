"""The list of rules, and what a rule is given."""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import by_example
from tf_adaptive_dp.gradients.contributions import Contribution, VariableContribution
from tf_adaptive_dp.gradients.variable_uses import AxisTransform


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """A place where an operation reads a variable.

    Attributes:
      op: the operation; its first output depends on the data.
      index: which of its inputs is the variable.
      view: how that input is made from the variable.
      delta: the gradient of the loss for the operation's first output, in the shape of it.
      batch_axes: where the batch axis of each tensor is.
      num_rows: the number of rows wanted, B or the number of microbatches.
      examples_per_row: 1, or `None` for microbatches.
    """

    op: tf.Operation
    index: int
    view: AxisTransform
    delta: tf.Tensor
    batch_axes: BatchAxes
    num_rows: tf.Tensor | int
    examples_per_row: int | None

    def rows(self, tensor: tf.Tensor, like: tf.Tensor | None = None) -> tf.Tensor:
        """[num_rows, T, ...the other axes]: the examples on axis 0, T of them in an axis before.

        Args:
          tensor: with a batch axis.
          like: a tensor of the graph that has the same batch axis, if `tensor` is a new one.
        """
        layout = self.batch_axes[tensor if like is None else like]
        return by_example(tensor, layout, self.num_rows, self.examples_per_row)

    def delta_rows(self) -> tf.Tensor:
        """`delta` with the examples on axis 0."""
        return self.rows(self.delta, like=self.op.outputs[0])

    def contribute(
        self, contribution: Contribution, view: AxisTransform | None = None
    ) -> VariableContribution:
        """What a rule returns: a contribution in the view `view` of the variable."""
        return VariableContribution(contribution, view or self.view)


# From a site to what it contributes, or `None` if the rule does not cover it.
Rule = Callable[[RuleContext], Optional[VariableContribution]]
RULES: dict[str, Rule] = {}


def register_rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Registers the per-example gradients of operations, for `gradients="auto"` and `"traced"`.

    Guarantee: a rule is trusted with the norms that are clipped. What it returns must be the
    gradient of each example for the input `context.index` of `context.op`; prove it with
    `tf_adaptive_dp.validation.check_per_example`.

    Args:
      *op_types: names as in `tf.Operation.type`.

    Returns:
      A decorator for `rule(context)`, which returns `context.contribute(contribution)` or `None`
      for a case that it does not cover. An earlier rule for the same operation is replaced.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register
