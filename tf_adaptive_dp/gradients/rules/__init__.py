"""Per-example gradients of single operations, one function for each kind of operation."""

from tf_adaptive_dp.gradients.rules import (  # noqa: F401 (they register themselves)
    convolution,
    elementwise,
    embedding,
    product,
)
from tf_adaptive_dp.gradients.rules.registry import RULES, GradientRule, RuleContext, register_rule

__all__ = ["RULES", "GradientRule", "RuleContext", "register_rule"]
