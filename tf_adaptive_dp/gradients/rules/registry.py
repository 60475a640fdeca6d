"""The registry of rules, and what a rule receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Callable, Optional

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import TensorReference
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, by_example
from tf_adaptive_dp.gradients.contributions import Contribution, VariableContribution
from tf_adaptive_dp.gradients.variable_uses import AxisTransform


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """An operation that uses a variable, as a rule sees it.

    Attributes:
      op: the operation; in its first output, rows belong to examples.
      index: which of its inputs is the variable.
      view: the view of the variable that this input is.
      delta: the gradient of the loss with respect to the operation's first output, in its shape.
      batch_axes: the batch axis of each tensor.
      num_rows: the number of rows to return: B, or the number of microbatches or users.
      examples_per_row: 1, or as many as a user has; `None` for microbatches.
      places: the batch axes of the inputs and outputs of the operation that do not depend on the
        data, by reference.
    """

    op: tf.Operation
    index: int
    view: AxisTransform
    delta: tf.Tensor
    batch_axes: BatchAxes
    num_rows: tf.Tensor | int
    examples_per_row: int | None
    places: Mapping[TensorReference, BatchAxis] = dataclasses.field(default_factory=dict)

    def axis_of(self, tensor: tf.Tensor) -> BatchAxis:
        """The batch axis of an input or output of the operation."""
        return self.places.get(tensor.ref()) or self.batch_axes.axis_of(tensor)

    def rows(self, tensor: tf.Tensor, like: tf.Tensor | None = None) -> tf.Tensor:
        """Moves the examples to axis 0.

        Args:
          tensor: has a batch axis.
          like: a tensor of the graph with the same batch axis, if `tensor` is new.

        Returns:
          [num_rows, T, ...the other axes], where T entries of each row shared the batch axis.
        """
        layout = self.axis_of(tensor if like is None else like)
        return by_example(tensor, layout, self.num_rows, self.examples_per_row)

    def delta_rows(self) -> tf.Tensor:
        """Returns `delta` with the examples on axis 0, as `rows` does."""
        return self.rows(self.delta, like=self.op.outputs[0])

    def contribute(
        self, contribution: Contribution, view: AxisTransform | None = None
    ) -> VariableContribution:
        """Makes what a rule returns from a contribution in a view, by default `self.view`."""
        return VariableContribution(contribution, view or self.view)


# Maps a use of a variable to what it contributes, or to `None` if the rule does not cover it.
GradientRule = Callable[[RuleContext], Optional[VariableContribution]]
RULES: dict[str, GradientRule] = {}


def register_rule(*op_types: str) -> Callable[[GradientRule], GradientRule]:
    """Registers the per-example gradients of operations, for `gradients="auto"` and `"traced"`.

    Guarantee: the library trusts rules with the norms that it clips. A rule must return the
    gradient of each example with respect to input `context.index` of `context.op`. Test yours with
    `tf_adaptive_dp.validation.check_per_example`.

    Args:
      *op_types: names as in `tf.Operation.type`.

    Returns:
      A decorator for `rule(context)`, which returns `context.contribute(contribution)`, or `None`
      for a case that it does not cover. It replaces an earlier rule for the same operation.
    """

    def register(rule: GradientRule) -> GradientRule:
        RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return register
