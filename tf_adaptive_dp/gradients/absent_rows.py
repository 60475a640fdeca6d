"""Padding: rows with weight zero in the loss are left out of all of its terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp.gradients.batch_axis.analysis import feeds
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.penalties import SCALINGS, SUMS, UNCHANGED

# Where Keras multiplies losses by sample weights, `losses_utils.compute_weighted_loss`.
_SCOPE = "weighted_loss"


def find_present(
    losses: Sequence[tf.Tensor], total: tf.Tensor, batch_axes: BatchAxes
) -> tf.Tensor | None:
    """Finds which rows count as examples, if some term of the loss ignores sample weights.

    Keras multiplies the losses of outputs by sample weights, but not the terms of `add_loss`. Rows
    of weight 0 are the padding of Poisson batches. So a row is absent if the loss of every output
    has weight 0 there, and then the other terms must leave it out too. Keras's own name scope tells
    which factors are sample weights: a label that happens to multiply the loss is none, and neither
    is a mask that a layer computed (`Masking`). If the loss of an output has no sample weights, all
    rows are present.

    Args:
      losses: the tensors that make up the loss: the loss vector, or the terms of a scalar.
      total: the loss that the step computed, whose name scope is that of the step.
      batch_axes: the batch axes of everything that the loss is computed from.

    Returns:
      [B], bool; `None` if all rows are present, or if all terms have sample weights.
    """
    scope = total.op.name.rpartition("/")[0]
    weights: dict = {}
    unweighted = False
    for term in _terms(losses, batch_axes):
        found, beside = _weights(term, batch_axes), _is_beside(term.op, scope)
        if _is_weighted(term.op) and beside and not found:
            return None
        if _is_weighted(term.op) and found and (beside or all(map(_is_fed, found))):
            weights[term.ref()] = found
        else:
            unweighted = True
            for product in filter(_is_weighted, ancestors([term])):
                found = _weights(product.outputs[0], batch_axes)
                if found and all(map(_is_fed, found)):
                    weights[product.outputs[0].ref()] = found
    if not (weights and unweighted):
        return None
    rows = [tf.reduce_all([_nonzero(w) for w in product], axis=0) for product in weights.values()]
    return tf.reduce_any(rows, axis=0)


def _terms(losses: Iterable[tf.Tensor], batch_axes: BatchAxes) -> Iterator[tf.Tensor]:
    """The terms of losses that depend on the data, without scalar factors."""
    pending = [loss for loss in losses if batch_axes.depends(loss)]
    while pending:
        tensor = pending.pop()
        op = tensor.op
        if op.type in SUMS:
            pending += [t for t in op.inputs if batch_axes.depends(t)]
        elif op.type in (*UNCHANGED, "Neg"):
            pending.append(op.inputs[0])
        elif op.type in SCALINGS and not _is_weighted(op) and op.inputs[1].shape.rank == 0:
            pending.append(op.inputs[0])
        elif op.type == "Mul" and not _is_weighted(op) and op.inputs[0].shape.rank == 0:
            pending.append(op.inputs[1])
        else:
            yield tensor


def _is_weighted(op: tf.Operation) -> bool:
    """Whether an operation multiplies losses by sample weights."""
    scopes: list[str] = op.name.split("/")[:-1]
    scope = scopes[-1] if scopes else ""
    number = scope.removeprefix(_SCOPE)
    named = scope.startswith(_SCOPE) and (not number or number[1:].isdigit())
    return op.type == "Mul" and named


def _is_beside(op: tf.Operation, scope: str) -> bool:
    """Whether the loss of an output was computed beside the total, and not within a layer."""
    name = op.name[len(scope) + 1 :] if scope and op.name.startswith(f"{scope}/") else op.name
    return name.count("/") == 2


def _weights(tensor: tf.Tensor, batch_axes: BatchAxes) -> list[tf.Tensor]:
    """The factors of sample weights, without constants and masks of layers."""
    return list(_factors(tensor.op.inputs[1], batch_axes)) if _is_weighted(tensor.op) else []


def _factors(tensor: tf.Tensor, batch_axes: BatchAxes) -> Iterator[tf.Tensor]:
    op = tensor.op
    if _is_fed(tensor):
        yield tensor
    elif op.type in UNCHANGED and op.inputs[0].dtype != tf.bool:
        yield from _factors(op.inputs[0], batch_axes)
    elif op.type in UNCHANGED:
        if _is_fed(op.inputs[0]):
            yield op.inputs[0]
    elif op.type == "Mul":
        yield from _factors(op.inputs[0], batch_axes)
        yield from _factors(op.inputs[1], batch_axes)
    elif op.type in SCALINGS:
        yield from _factors(op.inputs[0], batch_axes)
    elif batch_axes.depends(tensor):
        yield tensor


def _is_fed(tensor: tf.Tensor) -> bool:
    return any(tensor is t for t in feeds([tensor.op], tensor.graph))


def _nonzero(weights: tf.Tensor) -> tf.Tensor:
    present = weights if weights.dtype == tf.bool else weights != 0
    # Weights may be those of the entries of each example: [B, T].
    return tf.reduce_any(tf.reshape(present, [tf.shape(present)[0], -1]), axis=1)
