"""What products of tensors do to the batch axis."""

from __future__ import annotations

from tf_adaptive_dp.gradients.batch_axis.operation_types import product_terms
from tf_adaptive_dp.gradients.batch_axis.operations import register_layout, unless_cross_example
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample


@register_layout("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
@unless_cross_example
def tensor_product(op, batch_axes):
    """The letter of the batch must remain, and be the same in all inputs with data."""
    if any(t.shape.rank is None for t in op.inputs):
        return CrossExample(op, "has an unknown rank")
    terms, result = product_terms(op)
    letters = set()
    for tensor, term in zip(op.inputs, terms):
        layout = batch_axes[tensor]
        if batch_axes.depends(tensor):
            letters.add((term[layout.axis], layout.outer, layout.inner))
    if len(letters) > 1:
        return CrossExample(op, "multiplies each example with every other one")
    letter, outer, inner = letters.pop()
    if letter not in result:
        return CrossExample(op, "sums over the batch axis")
    return BatchAxis(result.index(letter), outer, inner)
