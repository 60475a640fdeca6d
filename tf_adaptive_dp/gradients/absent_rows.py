"""Padding: rows with weight zero in the loss are left out of all of its terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp._keras.weighted_losses import (
    NAMES_WEIGHTS,
    is_loss_of_output,
    multiplies_losses,
    sample_weights_of_step,
    weights_without_targets,
)
from tf_adaptive_dp.gradients.batch_axis.analysis import feeds
from tf_adaptive_dp.gradients.batch_axis.operation_types import SCALINGS, SUMS, UNCHANGED
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes

PADDING_CONTRIBUTES = (
    "Padding contributes to the loss: rows of weight 0 have gradients. Epsilon would not hold, "
    "since an example that joins the batch takes the place of a row of padding. Multiply the "
    "finished loss vector by the weights, as in `(losses + penalties) * sample_weight`, and pass "
    "`sample_weight` on in a `compute_loss` of your own. If no vector of this step holds sample "
    "weights, but one contains −0.0, add 0.0 to it: −0.0 is the mark of padding."
)


def find_present(
    losses: Sequence[tf.Tensor], total: tf.Tensor, batch_axes: BatchAxes
) -> tf.Tensor | None:
    """Finds which rows count as examples, if some term of the loss ignores sample weights.

    Keras multiplies the losses of outputs by sample weights, but not the terms of `add_loss`. Rows
    of weight 0 are the padding of Poisson batches. So a row is absent if the loss of every output
    has weight 0 there, and then the other terms must leave it out too. Keras's graph tells which
    factors are sample weights: a label that happens to multiply the loss is none, and neither is a
    mask that a layer computed (`Masking`). If the loss of an output has no sample weights, all rows
    are present. If the batch has no targets, there is no such loss, and a loss that reads no sample
    weights leaves out the rows where they are 0.

    Args:
      losses: the tensors that make up the loss: the loss vector, or the terms of a scalar.
      total: the loss that the step computed, whose name scope is that of the step.
      batch_axes: the batch axes of everything that the loss is computed from.

    Returns:
      [B], bool; `None` if all rows are present, or if all terms have sample weights.
    """
    of_step = weights_without_targets()
    if of_step is not None and not _reads(total, of_step):
        return _nonzero(of_step)
    search = _WeightSearch(total, batch_axes)
    weights: dict = {}
    unweighted = False
    for term in _terms(losses, search):
        found, beside = search.weights(term), search.is_loss_of_output(term)
        if beside and not found:
            return None
        if found and (beside or all(map(_is_fed, found))):
            weights[term.ref()] = found
        else:
            unweighted = True
            for product in (op.outputs[0] for op in ancestors([term]) if op.type == "Mul"):
                found = search.weights(product)
                if found and all(map(_is_fed, found)):
                    weights[product.ref()] = found
    if not (weights and unweighted) or search.some_output_has_none:
        return None
    rows = [tf.reduce_all([_nonzero(w) for w in product], axis=0) for product in weights.values()]
    return tf.reduce_any(rows, axis=0)


class _WeightSearch:
    """What is known about the sample weights of one step.

    Args:
      total: the loss that the step computed.
      batch_axes: the batch axes of everything that the loss is computed from.
    """

    def __init__(self, total: tf.Tensor, batch_axes: BatchAxes):
        self.batch_axes = batch_axes
        self._scope = total.op.name.rpartition("/")[0]
        self._known = sample_weights_of_step(total.graph)

    @property
    def some_output_has_none(self) -> bool:
        """Whether the step is known to get no weights for an output."""
        return any(w is None for w in self._known or ())

    def is_loss_of_output(self, losses: tf.Tensor) -> bool:
        """Whether losses are those of an output, and not a term that a layer added."""
        return is_loss_of_output(losses.op, self._scope)

    def ends_at(self, losses: tf.Tensor) -> bool:
        """Whether to stop here: Keras multiplied by sample weights, or by 1 if there are none."""
        named = NAMES_WEIGHTS and self._multiplies(losses.op)
        return named or bool(self.weights(losses))

    def weights(self, losses: tf.Tensor) -> list[tf.Tensor]:
        """The factors of losses that are sample weights, without constants and masks of layers."""
        if not self._multiplies(losses.op):
            return []
        found = list(_factors(losses.op.inputs[1], self.batch_axes))
        return found if NAMES_WEIGHTS or all(map(self._may_be_weights, found)) else []

    def _multiplies(self, op: tf.Operation) -> bool:
        return multiplies_losses(op, self._scope, self._known is not None)

    def _may_be_weights(self, tensor: tf.Tensor) -> bool:
        if self._known is None:
            return _is_fed(tensor)
        return any(tensor is w for w in self._known)


def _terms(losses: Iterable[tf.Tensor], search: _WeightSearch) -> Iterator[tf.Tensor]:
    """The terms of losses that depend on the data, without scalar factors."""
    batch_axes = search.batch_axes
    pending = [loss for loss in losses if batch_axes.depends(loss)]
    while pending:
        tensor = pending.pop()
        op = tensor.op
        if op.type in SUMS:
            pending += [t for t in op.inputs if batch_axes.depends(t)]
        elif op.type in (*UNCHANGED, "Neg"):
            pending.append(op.inputs[0])
        elif search.ends_at(tensor):
            yield tensor
        elif op.type in SCALINGS and op.inputs[1].shape.rank == 0:
            pending.append(op.inputs[0])
        elif op.type == "Mul" and op.inputs[0].shape.rank == 0:
            pending.append(op.inputs[1])
        else:
            yield tensor


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


def _reads(loss: tf.Tensor, weights: tf.Tensor) -> bool:
    return any(tensor is weights for op in ancestors([loss]) for tensor in op.inputs)


def _is_fed(tensor: tf.Tensor) -> bool:
    return any(tensor is t for t in feeds([tensor.op], tensor.graph))


def _nonzero(weights: tf.Tensor) -> tf.Tensor:
    present = weights if weights.dtype == tf.bool else weights != 0
    # Weights may be those of the entries of each example: [B, T].
    return tf.reduce_any(tf.reshape(present, [tf.shape(present)[0], -1]), axis=1)
