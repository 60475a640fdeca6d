"""Loss terms that all examples share, such as regularization: kept out of what is clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    SCALINGS,
    SHAPE_ONLY,
    SUMS,
    UNCHANGED,
    VARIABLE_READS,
)
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes

_NOT_ONE_NUMBER = (
    "One term of the loss does not depend on the data but is added to every example's loss, so it "
    "would be clipped, too. Received: {op}, of shape {shape}. Add it to the loss vector as one "
    "number, so that its gradient is added after the noise, or use the optimizer's `weight_decay`."
)
_SCALED = (
    "A term of the loss that does not depend on the data is multiplied by a variable. Received: "
    "{op}. Add the term to the loss after the multiplication."
)
_USED_TWICE = (
    "A term of the loss that does not depend on the data is also used elsewhere in the loss, by "
    "{use}. The gradient of the term is added after the noise, but that of the other use is "
    "clipped like the examples', so both must be told apart. Received: {op}. Add "
    "`tf.identity(term)` to the loss instead of the term."
)


class Penalty(NamedTuple):
    """A term of the loss that all examples share.

    Attributes:
      term: one number.
      factor: its factor in the loss, a number or a scalar tensor.
    """

    term: tf.Tensor
    factor: tf.Tensor | float


def is_trained(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from a variable."""
    return any(op.type in VARIABLE_READS for op in ancestors([tensor]))


def find_penalties(loss: tf.Tensor, batch_axes: BatchAxes) -> list[Penalty]:
    """Finds the terms of a loss that depend on variables but not on the data.

    It follows the loss back through sums and scalings.

    Args:
      loss: [B].
      batch_axes: the batch axes of everything that the loss is computed from.

    Raises:
      NotPrivateError: if such a term is not one number, if a variable scales it, or if the loss
        depends on it in another way, too.
    """
    found: list[Penalty] = []
    added: set[tuple[tf.Operation, int]] = set()
    pending = [_Part(loss, 1.0, True)] if batch_axes.depends(loss) else []
    while pending:
        part = pending.pop()
        op = part.tensor.op
        if op.type not in SUMS:
            pending += _behind_scaling(part)
            continue
        for k, term in enumerate(op.inputs):
            factor = -part.factor if op.type == "Sub" and k == 1 else part.factor
            if batch_axes.depends(term):
                pending.append(_Part(term, factor, part.exact))
            elif is_trained(term):
                _check(term, part.exact)
                found.append(Penalty(term, factor))
                added.add((op, k))
    if found:
        _refuse_other_uses(loss, {p.term.ref() for p in found}, added)
    return found


class _Part(NamedTuple):
    """A part of the loss that depends on the data.

    Attributes:
      tensor: what may be a sum with penalties among its terms.
      factor: its factor in the loss, as that of a `Penalty`.
      exact: whether no variable is among its factors.
    """

    tensor: tf.Tensor
    factor: tf.Tensor | float
    exact: bool


def _behind_scaling(part: _Part) -> list[_Part]:
    """What a part is, up to one factor for all examples; nothing where the search ends.

    A factor for each example ends it: a weight of zero makes padding absent, and what it multiplies
    are sums such as ⟨x, w⟩ + b.
    """
    op = part.tensor.op
    if op.type in UNCHANGED:
        return [part._replace(tensor=op.inputs[0])]
    if op.type in SCALINGS and op.inputs[1].shape.rank == 0:
        rest, number = op.inputs[0], op.inputs[1]
    elif op.type == "Mul" and op.inputs[0].shape.rank == 0:
        number, rest = op.inputs[0], op.inputs[1]
    else:
        return []
    number = tf.cast(number, tf.float32)
    factor = part.factor * number if op.type == "Mul" else part.factor / number
    return [_Part(rest, factor, part.exact and not is_trained(number))]


def _refuse_other_uses(loss: tf.Tensor, terms: set, added: set[tuple[tf.Operation, int]]) -> None:
    """Refuses a loss that depends on a penalty in another way than by adding it.

    Args:
      loss: [B].
      terms: references to the penalties.
      added: the operations that add one, and as which of their inputs.
    """
    for op in ancestors([loss], stop=lambda tensor: tensor.ref() in terms):
        for k, tensor in enumerate(op.inputs):
            if tensor.ref() in terms and (op, k) not in added and op.type not in SHAPE_ONLY:
                raise NotPrivateError(_USED_TWICE.format(op=tensor.op.name, use=op.name))


def _check(term: tf.Tensor, exact: bool) -> None:
    if term.shape.num_elements() != 1:
        raise NotPrivateError(_NOT_ONE_NUMBER.format(op=term.op.name, shape=term.shape))
    if not exact:
        raise NotPrivateError(_SCALED.format(op=term.op.name))


def penalty_gradients(
    penalties: Sequence[Penalty], variables: Sequence[tf.Variable]
) -> list[tf.Tensor | None]:
    """Differentiates the sum of all penalties, which depends on no example.

    Args:
      penalties: the result of `find_penalties`.
      variables: the variables to differentiate with respect to.

    Returns:
      One float32 tensor per variable, or `None` where no penalty depends on it.
    """
    if not penalties:
        return [None] * len(variables)
    upstream = [tf.fill(tf.shape(p.term), tf.cast(p.factor, p.term.dtype)) for p in penalties]
    gradients = tf.gradients([p.term for p in penalties], list(variables), grad_ys=upstream)
    return [None if g is None else tf.cast(tf.convert_to_tensor(g), tf.float32) for g in gradients]
