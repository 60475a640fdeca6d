"""Custom gradients that mix the examples of a batch.

With respect to a tensor of the batch, a custom gradient must have its batch axis. With respect to a
variable it is a sum over the examples, whose terms must stay apart. Either must be 0 for an example
where the gradient that arrives for it is 0. Otherwise padding would contribute, and every row of a
Jacobian would hold the gradients of all examples, since 0 arrives for all but one.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    ancestors,
    gradient_function,
    has_custom_gradient,
    is_recomputation,
    place_of,
    run_again,
    static_value,
)
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    PRODUCTS,
    SHAPE_ONLY,
    SUMS,
    VARIABLE_READS,
    product_terms,
)
from tf_adaptive_dp.gradients.batch_axis.operations import run
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, Layout, OneExample

_GRADIENT = (
    "A custom gradient mixes the examples of a batch, so none has a gradient of its own. Received: "
    "{op} {place}, whose gradient {why}. Let it treat each example by itself."
)
_OF_BATCH = (
    "is not known to be 0 for the examples whose incoming gradient is 0, such as padding: {found} "
    "({type}); multiply it by the incoming gradient"
)
_OF_VARIABLE = (
    "with respect to a variable is not known to be a sum over the examples, each term of which is "
    "a multiple of the gradient that arrives for its example: {found} ({type})"
)

_MOVES = set(
    """
    Cast CheckNumerics EnsureShape ExpandDims Identity Neg PreventGradient Reshape Squeeze
    StopGradient Sum Transpose
    """.split()
)
_QUOTIENTS = {"DivNoNan", "RealDiv"}
# They are 0 where an input is, if the bounds times these signs are not negative.
_BOUNDS = {"ClipByValue": (-1, 1), "Maximum": (-1,), "Minimum": (1,)}
# They are 0 where this input is 0.
_ZERO_WITH = {
    **dict.fromkeys((*_MOVES, *_QUOTIENTS), 0),
    **dict.fromkeys("BroadcastTo GatherV2 Mean Pad Slice StridedSlice Tile".split(), 0),
    **dict.fromkeys("Abs Asinh Atan Elu Erf Relu Round Sign Sin Sinh Sqrt Square Tanh".split(), 0),
    **dict.fromkeys("EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad".split(), 0),
    **dict.fromkeys("SoftplusGrad SoftsignGrad".split(), 0),
    **dict.fromkeys("InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad".split(), 1),
}


def refuse_custom_gradients(ops: Iterable[tf.Operation], batch_axes: BatchAxes) -> None:
    """Refuses custom gradients (`tf.custom_gradient`) that mix examples.

    Args:
      ops: the operations that the loss is computed from.
      batch_axes: the batch axis of each tensor.

    Raises:
      NotPrivateError: if there is one; the message names the operation.
    """
    for op in ops:
        if not has_custom_gradient(op) or not any(batch_axes.depends(t) for t in op.inputs):
            continue
        if is_recomputation(op):
            _check_again(op, batch_axes)
            continue
        upstream, gradients = _tried(op, batch_axes)
        for tensor, gradient in zip(op.inputs, gradients):
            if gradient is None:
                continue
            expected = batch_axes[tensor]
            if isinstance(expected, (BatchAxis, OneExample)):
                _compare(op, expected, batch_axes[gradient])
                _check_absence(op, gradient, upstream, batch_axes)
            elif _may_be_trained(tensor):
                _check_sum(op, gradient, upstream, batch_axes)


def _tried(
    op: tf.Operation, batch_axes: BatchAxes
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Calls a custom gradient on trial, and follows the batch axis through what it computes.

    Returns:
      The gradients that arrive, one for each output, and what is computed from them, for each
      input; `None` if it has no gradient.
    """
    before = len(op.graph.get_operations())
    upstream = [tf.identity(tf.zeros_like(t)) for t in op.outputs]
    for tensor, output in zip(upstream, op.outputs):
        batch_axes.set(tensor, batch_axes[output], batch_axes.depends(output))
    returned = gradient_function(op)(op, *upstream)
    gradients = [None if g is None else tf.convert_to_tensor(g) for g in returned]
    found = [g for g in gradients if g is not None]
    batch_axes.trials.update(op.graph.get_operations()[before:])
    batch_axes.custom_gradients += found
    run(ancestors(found), batch_axes)
    return upstream, gradients


def _check_again(op: tf.Operation, batch_axes: BatchAxes) -> None:
    """Refuses a function that mixes examples when its gradient runs it again.

    The gradient is TensorFlow's own of what that run computes, so its operations keep examples
    apart if those of the run do.
    """
    before = len(op.graph.get_operations())
    results = run_again(op)
    made = op.graph.get_operations()[before:]
    batch_axes.trials.update(made)
    batch_axes.custom_gradients += results
    ops = ancestors(results)
    run(ops, batch_axes)
    for result, output in zip(results, op.outputs):
        if not isinstance(batch_axes[output], CrossExample):  # else the loss may not use it
            _compare(op, batch_axes[output], batch_axes[result])
    new = set(made)
    refuse_custom_gradients([o for o in ops if o in new], batch_axes)


def _compare(op: tf.Operation, expected: Layout, actual: Layout) -> None:
    if actual not in (None, expected):
        why = actual.why if isinstance(actual, CrossExample) else "moves the batch axis"
        raise NotPrivateError(_GRADIENT.format(op=op.name, place=place_of(op), why=why))


def _check_absence(
    op: tf.Operation, gradient: tf.Tensor, upstream: list[tf.Tensor], batch_axes: BatchAxes
) -> None:
    """Refuses a gradient with respect to the batch that remains where no gradient arrives."""
    found = gradient.op
    if batch_axes.depends(gradient) and not _vanishes(gradient, {t.ref() for t in upstream}):
        why = _OF_BATCH.format(found=found.name, type=found.type)
        raise NotPrivateError(_GRADIENT.format(op=op.name, place=place_of(op), why=why))


def _may_be_trained(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from a variable, perhaps one that a caller passes."""
    types = {op.type for op in ancestors([tensor])}
    return bool(types & {*VARIABLE_READS, "Placeholder"})


def _check_sum(
    op: tf.Operation, gradient: tf.Tensor, upstream: list[tf.Tensor], batch_axes: BatchAxes
) -> None:
    """Refuses a gradient with respect to a variable that is not a sum of terms of the examples."""
    zero: set = {t.ref() for t in upstream}
    pending = [gradient]
    while pending:
        tensor = pending.pop()
        if not batch_axes.depends(tensor):
            continue  # the same for all batches
        terms: list[tf.Tensor] | None
        if isinstance(batch_axes[tensor], (BatchAxis, OneExample)):
            terms = [] if _vanishes(tensor, zero) else None
        else:
            terms = _terms(tensor, zero, batch_axes)
        if terms is None:
            why = _OF_VARIABLE.format(found=tensor.op.name, type=tensor.op.type)
            raise NotPrivateError(_GRADIENT.format(op=op.name, place=place_of(op), why=why))
        pending += terms


def _terms(tensor: tf.Tensor, zero: set, batch_axes: BatchAxes) -> list[tf.Tensor] | None:
    """What a sum over examples is made of; `None` if it may be no sum."""
    op = tensor.op
    if op.type in SUMS:
        return list(op.inputs)
    if op.type in _MOVES or op.type == "BiasAddGrad":
        return [op.inputs[0]]
    if op.type in _QUOTIENTS and _is_number(op.inputs[1], batch_axes):
        return [op.inputs[0]]
    if op.type == "Mul":
        numbers = [_is_number(t, batch_axes) for t in op.inputs]
        return [t for t, number in zip(op.inputs, numbers) if not number] if any(numbers) else None
    if op.type in PRODUCTS and all(isinstance(batch_axes[t], BatchAxis) for t in op.inputs):
        summed = _pairs_examples(op, batch_axes) and any(_vanishes(t, zero) for t in op.inputs)
        return [] if summed else None
    return None


def _is_number(tensor: tf.Tensor, batch_axes: BatchAxes) -> bool:
    """Whether a tensor depends on nothing of the batch, nor on its size."""
    return not batch_axes.depends(tensor) and not any(
        op.type in SHAPE_ONLY for op in ancestors([tensor])
    )


def _pairs_examples(op: tf.Operation, batch_axes: BatchAxes) -> bool:
    """Whether a product sums over pairs of one and the same example."""
    if any(not batch_axes.depends(t) or t.shape.rank is None for t in op.inputs):
        return False
    terms, _ = product_terms(op)
    layouts = [batch_axes.axis_of(t) for t in op.inputs]
    return len({(term[at.axis], at.outer, at.inner) for term, at in zip(terms, layouts)}) == 1


def _is_false(condition: tf.Tensor, zero: set) -> bool:
    """Whether a condition asks for what is 0 to differ from 0, besides anything else."""
    op = condition.op
    if op.type == "LogicalAnd":
        return any(_is_false(t, zero) for t in op.inputs)
    return op.type == "NotEqual" and all(_vanishes(t, zero) for t in op.inputs)


def _is_inside(op: tf.Operation) -> bool:
    """Whether 0 is within the bounds that an operation imposes, all of which must be known."""
    values = [static_value(t) for t in op.inputs]
    bounds = [v for v in values if v is not None]
    signs = _BOUNDS[op.type]
    return len(bounds) == len(signs) and all((s * b >= 0).all() for s, b in zip(signs, bounds))


def _vanishes(tensor: tf.Tensor, zero: set) -> bool:
    """Whether a tensor is 0 where the tensors `zero` are; grows `zero`."""
    op = tensor.op
    if tensor.ref() in zero:
        return True
    if op.type in _ZERO_WITH:
        found = _vanishes(op.inputs[_ZERO_WITH[op.type]], zero)
    elif op.type in PRODUCTS or op.type == "Mul":
        found = any(_vanishes(t, zero) for t in op.inputs)
    elif op.type in SUMS or op.type == "Pack":
        found = all(_vanishes(t, zero) for t in op.inputs)
    elif op.type in _BOUNDS:
        found = _is_inside(op) and any(_vanishes(t, zero) for t in op.inputs)
    elif op.type in ("Select", "SelectV2"):
        condition, where_true, where_false = op.inputs
        unchosen = _is_false(condition, zero)
        found = (unchosen or _vanishes(where_true, zero)) and _vanishes(where_false, zero)
    elif op.type == "ConcatV2":
        found = all(_vanishes(t, zero) for t in op.inputs[:-1])
    else:
        value = static_value(tensor) if op.type == "Const" else None
        found = op.type == "ZerosLike" or value is not None and not value.any()
    if found:
        zero.add(tensor.ref())
    return found
