"""What products of tensors do to the batch axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Mixed
from tf_adaptive_dp.gradients.layout.operations import register_layout, unless_mixed

if TYPE_CHECKING:
    pass


def product_terms(op: tf.Operation) -> tuple[list[str], str]:
    """A product of tensors as in `tf.einsum`: the letters of each input, and of the output."""
    if op.type == "Einsum":
        return _einsum_terms(op)
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    ranks = [t.shape.rank for t in op.inputs]
    stack = "abcdefgh"[: max(ranks) - 2]
    terms = [
        stack[len(stack) - (rank - 2) :] + (last[::-1] if op.get_attr(flip) else last)
        for rank, last, flip in zip(ranks, ("nk", "km"), names)
    ]
    return terms, stack + "nm"


def _einsum_terms(op: tf.Operation) -> tuple[list[str], str]:
    """The letters of an equation, ellipses written out."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    left, result = equation.split("->")
    terms = left.split(",")
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    hidden = [
        t.shape.rank - len(term) + 3 if "..." in term else 0 for t, term in zip(op.inputs, terms)
    ]
    letters = unused[: max(hidden)]
    terms = [
        term.replace("...", "".join(letters[len(letters) - count :]))
        for term, count in zip(terms, hidden)
    ]
    return terms, result.replace("...", "".join(letters))


@register_layout("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
@unless_mixed
def tensor_product(op, layouts):
    """The letter of the batch must stay, and be the same in all inputs of the data."""
    if any(t.shape.rank is None for t in op.inputs):
        return Mixed(op, "has an unknown rank")
    terms, result = product_terms(op)
    letters = set()
    for tensor, term in zip(op.inputs, terms):
        layout = layouts[tensor]
        if layouts.depends(tensor):
            letters.add((term[layout.axis], layout.outer, layout.inner))
    if len(letters) > 1:
        return Mixed(op, "multiplies each example with every other one")
    letter, outer, inner = letters.pop()
    if letter not in result:
        return Mixed(op, "sums over the batch axis")
    return BatchAxis(result.index(letter), outer, inner)
