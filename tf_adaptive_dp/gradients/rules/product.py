"""Products of tensors: dense layers, `EinsumDense`, attention."""

from __future__ import annotations

import math

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    PRODUCTS,
    broadcast_terms,
    product_terms,
)
from tf_adaptive_dp.gradients.batch_axis.values import static_or_dynamic_shape
from tf_adaptive_dp.gradients.contributions import OuterGradient, VariableContribution
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule


@register_rule(*PRODUCTS)
def product(context: RuleContext) -> VariableContribution | None:
    """g = Σ_t x_t δ_tᵀ, where t stands for the letters that the kernel lacks.

    A letter of the kernel belongs to the other factor (n, summed over), to the output (m), or to
    both (a group g).
    """
    op, kernel = context.op, context.op.inputs[context.index]
    if len(op.inputs) != 2 or op.inputs[0] is op.inputs[1]:
        return None
    terms, result = product_terms(op)
    x, of_x, of_kernel = (
        op.inputs[1 - context.index],
        terms[1 - context.index],
        terms[context.index],
    )
    batch = result[context.axis_of(op.outputs[0]).axis]
    if any(len(set(t)) < len(t) for t in (*terms, result)) or batch in of_kernel:
        return None
    if not set(of_kernel) <= set(of_x) | set(result) or batch not in of_x:
        return None
    groups = [c for c in of_kernel if c in of_x and c in result]
    summed = [c for c in of_kernel if c in of_x and c not in result]
    new = [c for c in of_kernel if c not in of_x]
    times = [c for c in of_x if c in result and c not in of_kernel and c != batch]
    alone = [c for c in of_x if c not in result and c not in of_kernel]
    size = dict(zip(of_kernel, kernel.shape))
    may_be_broadcast = broadcast_terms(op)  # where a length is unknown, it may turn out to be 1
    for tensor, term in ((x, of_x), (op.outputs[0], result)):
        for c, n in zip(term, tensor.shape):
            if size.get(c, n) != n and (n is not None or c in may_be_broadcast):
                return None
    rows = _arrange(context.rows(x), of_x, batch, [alone, times, groups, summed])
    if alone:
        rows = tf.reduce_sum(rows, axis=2)
    else:
        rows = rows[:, :, 0]
    delta = _arrange(context.delta_rows(), result, batch, [times, groups, new])
    blocks = [_count(size, block) for block in (groups, summed, new)]
    view = context.view.transpose([of_kernel.index(c) for c in groups + summed + new]).reshape(
        blocks
    )
    form = OuterGradient(
        _merge_times(rows, blocks[0], blocks[1]), _merge_times(delta, blocks[0], blocks[2])
    )
    return context.contribute(form, view)


def _arrange(rows: tf.Tensor, term: str, batch: str, blocks: list[list[str]]) -> tf.Tensor:
    """From [B, T, ...] to [B, T, ...], with one axis for each block of letters."""
    letters = [c for c in term if c != batch]
    order = [0, 1] + [2 + letters.index(c) for block in blocks for c in block]
    if order != list(range(len(order))):
        rows = tf.transpose(rows, order)
    shape, place, sizes = static_or_dynamic_shape(rows), 2, []
    for block in blocks:
        sizes.append(math.prod(shape[place : place + len(block)]))
        place += len(block)
    return tf.reshape(rows, [*shape[:2], *sizes])


def _merge_times(rows: tf.Tensor, groups: int, width: int) -> tf.Tensor:
    """From [B, T, times, G, n] to [B, T·times, G, n]."""
    front, first, second = static_or_dynamic_shape(rows)[:3]
    return tf.reshape(rows, [front, first * second, groups, width])


def _count(size: dict[str, int], letters: list[str]) -> int:
    count = 1
    for letter in letters:
        count *= size[letter]
    return count
