"""Products of tensors: dense layers, `EinsumDense`, attention."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    PRODUCTS,
    broadcast_terms,
    product_terms,
)
from tf_adaptive_dp.gradients.batch_axis.values import static_or_dynamic_shape
from tf_adaptive_dp.gradients.contributions import OuterGradient, VariableContribution
from tf_adaptive_dp.gradients.rules.registry import RuleContext, register_rule


class _Letters(NamedTuple):
    """The letters of a product besides the batch, by the tensors that have them.

    Attributes:
      groups: those of the kernel, the other factor and the output.
      summed: those of the kernel and the other factor only.
      new: those of the kernel and the output only.
      times: those of the other factor and the output only.
      alone: those of the other factor only.
    """

    groups: list[str]
    summed: list[str]
    new: list[str]
    times: list[str]
    alone: list[str]


@register_rule(*PRODUCTS)
def product(context: RuleContext) -> VariableContribution | None:
    """g = Σ_t x_t δ_tᵀ, where t stands for the letters that the kernel lacks.

    A letter of the kernel belongs to the other factor (n, summed over), to the output (m), or to
    both (a group g). A kernel may have the letter of the batch, with length 1: all examples meet
    its only entry, as with the learned queries [1, T, n] of a Perceiver.
    """
    op, kernel = context.op, context.op.inputs[context.index]
    if len(op.inputs) != 2 or op.inputs[0] is op.inputs[1]:
        return None
    terms, result = product_terms(op)
    other = 1 - context.index
    x, of_x, of_kernel = op.inputs[other], terms[other], terms[context.index]
    batch = result[context.axis_of(op.outputs[0]).axis]
    size = dict(zip(of_kernel, kernel.shape))
    may_be_broadcast = broadcast_terms(op)
    is_shared = batch in may_be_broadcast and size.get(batch) == 1
    if is_shared:
        del size[batch]
    letters = _letters(of_x, "".join(size) if is_shared else of_kernel, result, batch)
    fit = (
        _has_lengths(tensor, term, size, may_be_broadcast)
        for tensor, term in ((x, of_x), (op.outputs[0], result))
    )
    if letters is None or not all(fit):
        return None
    groups, summed, new, times, alone = letters
    rows = _arrange(context.rows(x), of_x, batch, [alone, times, groups, summed])
    rows = tf.reduce_sum(rows, axis=2) if alone else rows[:, :, 0]
    delta = _arrange(context.delta_rows(), result, batch, [times, groups, new])
    blocks = [math.prod(size[c] for c in block) for block in (groups, summed, new)]
    order = [of_kernel.index(c) for c in [*groups, *summed, *new, *([batch] if is_shared else [])]]
    form = OuterGradient(
        _merge_times(rows, blocks[0], blocks[1]), _merge_times(delta, blocks[0], blocks[2])
    )
    return context.contribute(form, context.view.transpose(order).reshape(blocks))


def _letters(of_x: str, of_kernel: str, result: str, batch: str) -> _Letters | None:
    """Sorts the letters of a product; `None` if the rule does not cover it."""
    if any(len(set(term)) < len(term) for term in (of_x, of_kernel, result)):
        return None
    if batch in of_kernel or batch not in of_x or not set(of_kernel) <= set(of_x) | set(result):
        return None
    return _Letters(
        groups=[c for c in of_kernel if c in of_x and c in result],
        summed=[c for c in of_kernel if c in of_x and c not in result],
        new=[c for c in of_kernel if c not in of_x],
        times=[c for c in of_x if c in result and c not in of_kernel and c != batch],
        alone=[c for c in of_x if c not in result and c not in of_kernel],
    )


def _has_lengths(
    tensor: tf.Tensor, term: str, size: dict[str, int], may_be_broadcast: Collection[str]
) -> bool:
    """Whether a tensor is as long along the letters of the kernel as the kernel is.

    Where a length is unknown, it may turn out to be 1, so that the tensor is broadcast.
    """
    return all(
        size.get(c, n) == n or (n is None and c not in may_be_broadcast)
        for c, n in zip(term, tensor.shape)
    )


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
