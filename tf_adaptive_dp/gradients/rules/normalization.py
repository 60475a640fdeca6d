"""Scale and offset of normalization with frozen statistics.

Those of LayerNormalization and GroupNormalization are elementwise (see `elementwise`).
"""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.gradients.contributions import DenseGradient, VariableContribution
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule


@register_rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(context: RuleContext) -> VariableContribution | None:
    """Σ δ·x̂ for the scale and Σ δ for the offset, where the statistics are given."""
    op, rank = context.op, context.delta.shape.rank
    if op.get_attr("is_training") or context.index not in (1, 2):
        return None
    channels = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    axis = context.batch_axes[op.outputs[0]].axis
    if axis == channels:
        return None
    entries = tf.cast(context.delta, tf.float32)
    if context.index == 1:
        mean, variance = (
            tf.reshape(t, [-1 if a == channels else 1 for a in range(rank)]) for t in op.inputs[3:5]
        )
        x = tf.cast(op.inputs[0], tf.float32)
        entries *= (x - mean) * tf.math.rsqrt(variance + op.get_attr("epsilon"))
    rows = context.rows(entries, like=op.outputs[0])
    place = 2 + channels - (axis < channels)
    gone = [a for a in range(1, rank + 1) if a != place]
    return context.contribute(
        DenseGradient(op.inputs[context.index].shape, tf.reduce_sum(rows, axis=gone))
    )
