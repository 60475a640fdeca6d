"""Embeddings: rows of a table."""

from __future__ import annotations

import math

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.contributions import SparseGradient, VariableContribution
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule


@register_rule("ResourceGather", "GatherV2")
def gather(context: RuleContext) -> VariableContribution | None:
    """δ at the ids of each example; the rows of a repeated id add up."""
    op = context.op
    ids, output, shape = op.inputs[1], op.outputs[0], context.view.shapes[-1]
    axis = static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if context.index != 0 or op.get_attr("batch_dims") != 0 or axis != 0:
        return None
    width = math.prod(shape[1:])
    ids, delta = context.rows(ids), context.rows(context.delta, like=output)
    dynamic = tf.shape(ids)
    front = dynamic[0] if ids.shape[0] is None else ids.shape[0]
    times = ids.shape[1:].num_elements()
    times = tf.reduce_prod(dynamic[1:]) if times is None else times
    form = SparseGradient(
        (shape[0], width), tf.reshape(ids, [front, times]), tf.reshape(delta, [front, times, width])
    )
    return context.contribute(form, context.view.reshape([shape[0], width]))
