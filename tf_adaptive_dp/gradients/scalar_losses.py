"""Walks a scalar loss back to the losses of the examples that it is the sum or the mean of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors, place_of, static_value
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.batch_axis.analysis import refuse_independent, refuse_mixed
from tf_adaptive_dp.gradients.batch_axis.operation_types import SCALINGS, SUMS
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size, product
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, by_example
from tf_adaptive_dp.gradients.penalties import Penalty, is_trained

# Operations that keep the sum over all entries.
_KEEP = {"Identity", "Cast", "CheckNumerics", "EnsureShape", "Reshape", "Squeeze", "ExpandDims"}
_KEEP |= {"Transpose"}
_ADDITIONS = SUMS | {"Neg"}
_REDUCTIONS = {"Sum", "Mean"}
_JOINS = {"Pack", "ConcatV2"}

_NO_SUM = (
    "The loss is not a sum or a mean over examples, so they have no gradients of their own. "
    "Received: {op} ({type}) {place}, which {why}. {fix}"
)
_ONE_PER_EXAMPLE = (
    "Return a sum or a mean of one loss per example, or the losses of the examples themselves "
    '(`reduction="none"`).'
)
_OWN_COUNT = (
    "If a layer masks entries (`mask_zero=True`), or the loss ignores them (`ignore_class`), give "
    'the Keras loss `reduction="sum"`, which adds up the valid entries of each example. For a mean '
    "over them, divide the losses of each example by a count of its own: "
    "`tf.math.divide_no_nan(tf.reduce_sum(mask * loss, axis=1), tf.reduce_sum(mask, axis=1))`, "
    'with the losses of a Keras loss that has `reduction="none"`.'
)
_DICE = (
    "Give the Keras loss the axes of one example, such as `Dice(axis=(1, 2, 3))` for images: by "
    "default it is one number for the whole batch."
)
_OF_ROOT = (
    "The root of a mean over the batch is no mean over examples: train on the mean itself, such as "
    '`loss="mse"`, and report the root as a metric (`RootMeanSquaredError`).'
)


class ExampleLosses(NamedTuple):
    """The losses of examples, as `example_losses` finds them.

    Attributes:
      vector: [B], the loss of each example.
      terms: the tensors with a batch axis whose entries a scalar adds up; else the vector.
      penalties: the terms of a scalar that all examples share. The vector has none of them, but
        may have others, see `find_penalties`.
    """

    vector: tf.Tensor
    terms: list[tf.Tensor]
    penalties: list[Penalty]


class _Term(NamedTuple):
    """The sum of all entries of `tensor`, times `sign` and `factors`, over `divisor`.

    Attributes:
      tensor: of any shape.
      sign: 1 or -1.
      factors: numbers that do not depend on the data; a variable may be among them.
      divisor: the product of all divisors that are sizes or whole numbers.
    """

    tensor: tf.Tensor
    sign: float = 1.0
    factors: tuple[tf.Tensor, ...] = ()
    divisor: Size = ONE

    def scale(self, tensor: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by the sign and the factors."""
        for factor in self.factors:
            tensor *= tf.cast(factor, tensor.dtype)
        return -tensor if self.sign < 0 else tensor


def example_losses(
    loss: tf.Tensor,
    batch_axes: BatchAxes,
    is_one_example: bool,
    expected_batch_size: float | None = None,
) -> ExampleLosses:
    """The losses of examples in a loss that passed `check_loss`: a vector, or a scalar.

    Args:
      loss: a symbolic tensor, whose tape is open.
      batch_axes: the batch axes of everything that the loss is computed from.
      is_one_example: see `take_apart`.
      expected_batch_size: see `take_apart`.

    Raises:
      NotPrivateError: see `take_apart`.
    """
    if loss.shape.rank == 0:
        return take_apart(loss, batch_axes, is_one_example, expected_batch_size)
    return ExampleLosses(loss, [loss], [])


def take_apart(
    total: tf.Tensor,
    batch_axes: BatchAxes,
    is_one_example: bool = False,
    expected_batch_size: float | None = None,
) -> ExampleLosses:
    """Takes a scalar loss apart into the losses of examples.

    It undoes sums, means, constant factors and additions until it reaches tensors with a batch
    axis, and terms without data. If the scalar is a mean over the batch, its examples' losses are
    those whose mean it is; if it is a sum, those whose sum it is. If some terms are means and
    others are sums, the sums are multiplied by the expected batch size (without one, by the size of
    the batch), so that the mean of all examples' losses is the scalar.

    Guarantee: every entry of every tensor that the scalar adds up is in exactly one entry of the
    result, that of its example.

    Args:
      total: a symbolic scalar, whose tape is open.
      batch_axes: the batch axes of everything that the scalar is computed from; those of `vector`
        are added.
      is_one_example: whether it is a batch of one example, to which the scalar belongs.
      expected_batch_size: the public number by which sums of gradients will be divided.

    Raises:
      NotPrivateError: if the scalar is not a sum or a mean over examples. The message names the
        operation, its layer and a fix.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if is_one_example:
        vector = tf.reshape(total, [1]) * replicas
        return ExampleLosses(vector, [total], [])
    data: list[_Term] = []
    shared: list[_Term] = []
    for term in _terms(total, batch_axes):
        (data if batch_axes.depends(term.tensor) else shared).append(term)
    if not data:
        refuse_independent(total)
    means: list[tf.Tensor] = []
    sums: list[tf.Tensor] = []
    for term in data:
        each, is_mean = _of_each_example(term, batch_axes, expected_batch_size, replicas)
        (means if is_mean else sums).append(tf.cast(each, total.dtype))
    divisor = expected_batch_size
    if divisor is None:
        first = (means or sums)[0]
        divisor = replicas * (first.shape[0] or tf.cast(tf.shape(first)[0], total.dtype))
    if means:
        sums = [each * tf.cast(divisor, each.dtype) for each in sums]
    factor = replicas if means else replicas / divisor
    vector = tf.add_n([*means, *sums])
    operations.run(ancestors([vector]), batch_axes)
    return ExampleLosses(
        vector,
        [term.tensor for term in data],
        [Penalty(_shared_number(term), factor) for term in shared],
    )


def _terms(total: tf.Tensor, batch_axes: BatchAxes) -> Iterator[_Term]:
    """The tensors with a batch axis that a scalar adds up, and its terms without data."""
    pending = [_Term(total)]
    while pending:
        term = pending.pop()
        tensor = term.tensor
        if not tensor.dtype.is_floating:
            continue  # counts and decisions have no gradient
        if not batch_axes.depends(tensor):
            if is_trained(tensor):
                yield term
        elif isinstance(batch_axes[tensor], BatchAxis):
            yield term
        else:
            pending += _undone(term, batch_axes)


def _undone(term: _Term, batch_axes: BatchAxes) -> list[_Term]:
    """The terms that the operation behind a term of mixed examples adds up."""
    op = term.tensor.op
    if op.type in _KEEP:
        return [term._replace(tensor=op.inputs[0])]
    if op.type in _REDUCTIONS:
        return [_unreduced(term, batch_axes)]
    if op.type in _JOINS:
        parts = op.inputs[:-1] if op.type == "ConcatV2" else op.inputs
        return [term._replace(tensor=t) for t in parts]
    if op.type in _ADDITIONS:
        return _addends(term, batch_axes)
    if op.type in SCALINGS:
        return [_unscaled(term, batch_axes)]
    if op.type == "L2Loss":
        squares = tf.square(op.inputs[0]) / 2
        operations.run(ancestors([squares]), batch_axes)
        return [term._replace(tensor=squares)]
    if op.type == "StopGradient":
        return []
    if term.tensor.shape.num_elements() != 1:
        _refuse_mixed(term.tensor, batch_axes)
    fix = _OF_ROOT if op.type == "Sqrt" else _ONE_PER_EXAMPLE
    raise _no_sum(op, "is not a sum, a mean or a multiplication by a constant", fix)


def _no_sum(op: tf.Operation, why: str, fix: str = _ONE_PER_EXAMPLE) -> NotPrivateError:
    return NotPrivateError(
        _NO_SUM.format(op=op.name, type=op.type, why=why, place=place_of(op), fix=fix)
    )


def _refuse_mixed(tensor: tf.Tensor, batch_axes: BatchAxes) -> None:
    layout = batch_axes[tensor]
    if isinstance(layout, CrossExample):
        refuse_mixed(layout)


def _unreduced(term: _Term, batch_axes: BatchAxes) -> _Term:
    op = term.tensor.op
    tensor = op.inputs[0]
    if op.type == "Sum":
        return term._replace(tensor=tensor)
    axes = static_value(op.inputs[1])
    if axes is None and tensor.shape.rank is not None and term.tensor.shape.num_elements() == 1:
        axes = np.arange(tensor.shape.rank)
    if axes is None or tensor.shape.rank is None:
        raise _no_sum(op, "takes the mean over axes that are unknown while tracing")
    sizes = {int(a) % tensor.shape.rank for a in axes.reshape(-1)}
    divisor = product(batch_axes.size(tensor, a) for a in sizes)
    return term._replace(tensor=tensor, divisor=term.divisor.times(divisor))


def _addends(term: _Term, batch_axes: BatchAxes) -> list[_Term]:
    op, found = term.tensor.op, []
    for k, tensor in enumerate(op.inputs):
        count: Size | None = term.divisor
        if tensor.shape.num_elements() == 1 != term.tensor.shape.num_elements():
            # It is added to each entry.
            count = None
            if term.tensor.shape.rank is not None:
                count = term.divisor.over(batch_axes.num_entries(term.tensor))
        elif not tensor.shape.is_compatible_with(term.tensor.shape):
            count = None
        if count is None:
            raise _no_sum(op, "adds tensors of different shapes")
        negative = op.type == "Neg" or (op.type == "Sub" and k == 1)
        sign = -term.sign if negative else term.sign
        found.append(term._replace(tensor=tensor, sign=sign, divisor=count))
    return found


def _unscaled(term: _Term, batch_axes: BatchAxes) -> _Term:
    """Notes the number that a tensor is multiplied with or divided by."""
    op = term.tensor.op
    tensor, number = op.inputs
    if op.type == "Mul" and not batch_axes.depends(tensor):
        tensor, number = number, tensor
    verb = "multiplies" if op.type == "Mul" else "divides"
    if batch_axes.depends(number):
        if term.tensor.shape.num_elements() != 1:
            _refuse_mixed(tensor if batch_axes.depends(tensor) else term.tensor, batch_axes)
            layout = batch_axes[term.tensor]
            if isinstance(layout, CrossExample) and layout.op is op:  # not what the number is of
                refuse_mixed(layout)
            if "every other one" in getattr(batch_axes[number], "why", ""):  # it is no count
                _refuse_mixed(number, batch_axes)
        if batch_axes[number] == batch_axes[tensor]:  # it is the size of what mixed before
            list(_terms(tensor, batch_axes))  # which may know more of what mixed, and refuse it
            _refuse_mixed(tensor, batch_axes)
        why = f"{verb} by numbers that depend on the examples of the batch"
        raise _no_sum(op, why, _DICE if "dice" in op.name.split("/") else _OWN_COUNT)
    if number.shape.num_elements() != 1:
        raise _no_sum(op, f"{verb} by several numbers after a sum over the batch")
    count = _whole_divisor(number, op.type, batch_axes)
    if count is not None:
        return term._replace(tensor=tensor, divisor=term.divisor.times(count))
    factor = tf.cast(tf.reshape(number, []), tf.float32)
    if op.type != "Mul":
        factor = tf.math.divide_no_nan(1.0, factor)
    return term._replace(tensor=tensor, factors=(*term.factors, factor))


def _whole_divisor(number: tf.Tensor, op_type: str, batch_axes: BatchAxes) -> Size | None:
    """The size or the whole number that is divided by, possibly by multiplying with 1/n."""
    value = static_value(number)
    if value is None:
        return None if op_type == "Mul" else batch_axes.entries(number)[0]
    value = float(value.reshape(()))
    if op_type == "Mul":
        value = 1 / value if value else math.inf
    whole = round(value) if math.isfinite(value) else 0
    return Size(whole) if whole >= 1 and abs(value - whole) <= 1e-6 * whole else None


def _of_each_example(
    term: _Term, batch_axes: BatchAxes, expected_batch_size: float | None, replicas: int
) -> tuple[tf.Tensor, bool]:
    """Sums the entries of each example.

    Returns:
      [B], and whether the term was divided by the number of examples, which is undone.
    """
    rows = _rows(term.tensor, batch_axes)
    axes = list(range(1, rows.shape.rank))
    count = term.divisor
    # Keras divides by the number of entries, whose other sizes need not be known.
    over_entries = count.over(batch_axes.num_entries(term.tensor))
    if over_entries is not None and over_entries.static:
        each = tf.reduce_mean(rows, axis=axes) if axes else rows
        return term.scale(each) * (replicas / over_entries.static), True
    each = term.scale(tf.reduce_sum(rows, axis=axes) if axes else rows)
    over_batch = count.over(batch_axes.batch_size)
    if over_batch is not None and over_batch.static:
        return each * (replicas / over_batch.static), True
    if count.static is None:
        raise _no_sum(
            term.tensor.op,
            "is summed and then divided by a count that is neither the number of examples nor "
            "that of all their entries",
        )
    if expected_batch_size is not None and count.static % expected_batch_size == 0:
        return each * (expected_batch_size / count.static), True
    return each / count.static, False


def _rows(tensor: tf.Tensor, batch_axes: BatchAxes) -> tf.Tensor:
    """Moves the examples to axis 0: [B, ...]."""
    layout = batch_axes.axis_of(tensor)
    if layout == BatchAxis():
        return tensor
    size = batch_axes.batch_size.static
    if size is None:
        blocks = layout.outer.times(layout.inner).static
        if blocks is None:
            raise _no_sum(tensor.op, "has a batch axis whose length is unknown while tracing")
        size = tf.shape(tensor)[layout.axis] // blocks
    return by_example(tensor, layout, size, 1)


def _shared_number(term: _Term) -> tf.Tensor:
    """The value of a term without data, as one number."""
    if term.divisor.static is None:
        raise _no_sum(
            term.tensor.op, "does not depend on the data, and is divided by the size of the batch"
        )
    return term.scale(tf.reduce_sum(term.tensor)) / term.divisor.static
