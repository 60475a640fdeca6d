"""Biases, scales, and all else that combines a variable with data elementwise.

This includes frozen normalization, whose statistics do not depend on the batch.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.operation_types import ELEMENTWISE
from tf_adaptive_dp.gradients.batch_axis.sizes import Size
from tf_adaptive_dp.gradients.batch_axis.values import static_or_dynamic_shape
from tf_adaptive_dp.gradients.contributions import DenseGradient, VariableContribution
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule


def summed_rows(context: RuleContext, entries: tf.Tensor) -> VariableContribution | None:
    """Sums over the axes along which the variable was broadcast, except for the examples.

    Args:
      context: the use of the variable.
      entries: the gradient with respect to the variable at each entry of the output.
    """
    output, shape = context.op.outputs[0], context.op.inputs[context.index].shape
    rank, axis = output.shape.rank, context.axis_of(output).axis
    aligned = [1] * (rank - shape.rank) + shape.as_list()
    if aligned[axis] != 1:
        return None  # the variable has a row for each example
    rows = context.rows(entries, like=output)
    others = [a for a in range(rank) if a != axis]
    gone = [1] + [2 + k for k, a in enumerate(others) if aligned[a] == 1]
    return context.contribute(DenseGradient(shape.as_list(), tf.reduce_sum(rows, axis=gone)))


@register_rule("BiasAdd")
def bias_add(context: RuleContext) -> VariableContribution | None:
    """δ, summed over all positions."""
    channels = 1 if context.op.get_attr("data_format") == b"NCHW" else context.delta.shape.rank - 1
    return _summed_positions(context, context.delta, channels) if context.index == 1 else None


@register_rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(context: RuleContext) -> VariableContribution | None:
    """Σ δ·x̂ for the scale and Σ δ for the offset, where the statistics are given."""
    op, rank = context.op, context.delta.shape.rank
    if op.get_attr("is_training") or context.index not in (1, 2):
        return None
    channels = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    entries = tf.cast(context.delta, tf.float32)
    if context.index == 1:
        mean, variance = (
            tf.reshape(t, [-1 if a == channels else 1 for a in range(rank)]) for t in op.inputs[3:5]
        )
        x = tf.cast(op.inputs[0], tf.float32)
        entries *= (x - mean) * tf.math.rsqrt(variance + op.get_attr("epsilon"))
    return _summed_positions(context, entries, channels)


def _summed_positions(
    context: RuleContext, entries: tf.Tensor, channels: int
) -> VariableContribution | None:
    """Sums over all axes but the channels and the examples; `None` if these are one axis."""
    axis, rank = context.axis_of(context.op.outputs[0]).axis, entries.shape.rank
    if axis == channels:
        return None
    rows = context.rows(entries, like=context.op.outputs[0])
    place = 2 + channels - (axis < channels)
    gone = [a for a in range(1, rank + 1) if a != place]
    return context.contribute(
        DenseGradient(context.op.inputs[context.index].shape, tf.reduce_sum(rows, axis=gone))
    )


# Bounds of quantization must be single numbers, so they cannot be broadcast.
_BOUNDS = {t for t in ELEMENTWISE if t.startswith("FakeQuantWithMinMaxVars")}


@register_rule(*(ELEMENTWISE - {"AddN", "IdentityN"} - _BOUNDS))
def elementwise(context: RuleContext) -> VariableContribution | None:
    """The derivative of the operation at each entry, times δ.

    Once the variable is broadcast to the shape of the output, TensorFlow's own gradient gives these
    products without summing any.
    """
    op, output = context.op, context.op.outputs[0]
    if op.type in ("Add", "AddV2"):
        return summed_rows(context, context.delta)
    if op.type == "Sub":
        return summed_rows(context, context.delta if context.index == 0 else -context.delta)
    inputs = list(op.inputs)
    spread = inputs[context.index] = tf.broadcast_to(inputs[context.index], tf.shape(output))
    again = op.graph.create_op(
        op.type, inputs, [t.dtype for t in op.outputs], attrs=dict(op.node_def.attr)
    )
    entries = tf.gradients(again.outputs[0], spread, grad_ys=context.delta)[0]
    return None if entries is None else summed_rows(context, entries)


@register_rule("BroadcastTo")
def broadcast(context: RuleContext) -> VariableContribution | None:
    """A variable that is repeated for each example, such as a class token."""
    return summed_rows(context, context.delta) if context.index == 0 else None


@register_rule("Fill")
def fill(context: RuleContext) -> VariableContribution | None:
    """One number, repeated for each example."""
    return summed_rows(context, context.delta) if context.index == 1 else None


@register_rule("Tile")
def tile(context: RuleContext) -> VariableContribution | None:
    """Whole copies of a variable for each example, one or several, along any axes.

    Along an axis of n entries, entry k of the copies is a copy of entry k mod n.
    """
    shape, axis = context.op.inputs[0].shape.as_list(), context.axis_of(context.op.outputs[0])
    if context.index != 0 or 0 in shape or axis.inner.over(Size(shape[axis.axis])) is None:
        return None
    rows = context.delta_rows()  # [B, T, ...the other axes]
    order = [axis.axis, *(a for a in range(len(shape)) if a != axis.axis)]
    num_rows, *lengths = static_or_dynamic_shape(rows)
    pairs = [[length // shape[a], shape[a]] for length, a in zip(lengths, order)]
    copies = tf.reshape(rows, [num_rows, *itertools.chain(*pairs)])
    once = tf.reduce_sum(copies, axis=list(range(1, 2 * len(shape), 2)))
    back = [0, *(1 + order.index(a) for a in range(len(shape)))]
    return context.contribute(DenseGradient(shape, tf.transpose(once, back)))
