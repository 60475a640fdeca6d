"""Per-example gradients, and what users need to teach the library their own operations."""

from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.gradients.batch_axis.operations import register_layout
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample
from tf_adaptive_dp.gradients.contributions import DenseGradient, OuterGradient, SparseGradient
from tf_adaptive_dp.gradients.rules import RuleContext, register_rule

__all__ = [
    "BatchAxis",
    "CrossExample",
    "DenseGradient",
    "OuterGradient",
    "RuleContext",
    "SparseGradient",
    "per_example_gradients",
    "register_layout",
    "register_rule",
]
