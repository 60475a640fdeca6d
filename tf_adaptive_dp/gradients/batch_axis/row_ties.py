"""Public values that differ from row to row of the batch.

One more example moves others to other rows. A public value that differs from row to row, such as a
weight for row i, would then change the gradients of the others, although it mixes no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, LOOPS, ancestors, place_of, static_value
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis import origins
from tf_adaptive_dp.gradients.batch_axis.randomness import DRAWS, Draws
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis

_TIED = (
    "A value depends on which row of the batch an example is in. One more example would move "
    "others to other rows, and so change their gradients. Received: {op} ({type}) {place}, "
    "which combines the data with {source} ({source_type}), whose entries differ from "
    "row to row, or may. Pass the value as part of the batch, or make it the same for all rows."
)
_SEEDED = (
    "Random numbers with a known seed are tied to the row of the batch, and can be predicted. "
    "Received: {op} ({type}) {place}, which uses the numbers "
    "of {source} ({source_type}). {fix}"
)


class TiedValue(NamedTuple):
    """An operation that combines data with a value that is tied to rows.

    Attributes:
      op: the operation.
      source: the operation that the value comes from.
      fix: how to fix the seed of random numbers; `None` for other values.
    """

    op: tf.Operation
    source: tf.Operation
    fix: str | None = None

    def __str__(self) -> str:
        return (_TIED if self.fix is None else _SEEDED).format(
            op=self.op.name,
            type=self.op.type,
            place=place_of(self.op),
            source=self.source.name,
            source_type=self.source.type,
            fix=self.fix,
        )


class Demand(NamedTuple):
    """A value that must be the same for all examples.

    Attributes:
      batch_axes: the batch axes of its graph.
      tensor: the value.
      place: which of its axes will meet the batch; `None` if that is unknown.
    """

    batch_axes: BatchAxes
    tensor: tf.Tensor
    place: BatchAxis | None


def refuse_row_ties(loss: tf.Tensor, batch_axes: BatchAxes) -> Draws:
    """Refuses public values that are tied to rows and meet the data.

    Guarantee: in an accepted step, example i has the same gradient in every row, for the same
    random numbers. These are drawn independently and alike for all rows, anew in each step, and no
    one knows them (`Draws.renew` sees to that). So the distribution of the other examples'
    gradients does not change if an example joins: each example can take its random numbers along to
    its new row, where they are equally likely.

    The search asks, for every operation that combines data with public values, which entries of the
    public ones meet the batch axis. It follows these back to their origin. Axes of length 1,
    constants that are equal along the axis, `tf.fill` and the like are the same for all rows. All
    else counts as tied to rows.

    Args:
      loss: [B], symbolic, accepted by `refuse`.
      batch_axes: the result of `follow`.

    Returns:
      The random numbers that differ from row to row.

    Raises:
      NotPrivateError: if there is such a value. The message names the operation, its layer, the
        origin of the value, and a fix.
    """
    draws = Draws(loss.graph)
    for tied in find_row_ties(ancestors([loss, *batch_axes.custom_gradients]), batch_axes, draws):
        raise NotPrivateError(str(tied))
    return draws


def find_row_ties(
    ops: Iterable[tf.Operation], batch_axes: BatchAxes, draws: Draws
) -> Iterator[TiedValue]:
    """Yields what `refuse_row_ties` refuses; records random numbers in `draws`."""
    proven: set = set()
    for op, inside in _with_bodies(ops, batch_axes):
        for index, output in enumerate(op.outputs):
            place = inside[output]
            if not inside.depends(output) or not isinstance(place, BatchAxis):
                continue
            fix = draws.refusal(op, inside) if op.type in DRAWS else None
            if fix is not None:
                yield TiedValue(op, op, fix)
                continue
            public = [d for d in _demands(op, index, place, inside) or () if not _is_data(d)]
            found = disprove(public, proven, draws)
            if found is not None:
                yield TiedValue(op, *found)


def _with_bodies(
    ops: Iterable[tf.Operation], batch_axes: BatchAxes
) -> Iterator[tuple[tf.Operation, BatchAxes]]:
    for op in ops:
        for graph, inside in batch_axes.bodies_of(op).values():
            tensors = [*graph.outputs, *inside.custom_gradients]
            yield from _with_bodies(ancestors(tensors), inside)
        yield op, batch_axes


def _is_data(demand: Demand) -> bool:
    return demand.batch_axes.depends(demand.tensor)


def disprove(
    demands: list[Demand], proven: set, draws: Draws
) -> tuple[tf.Operation, str | None] | None:
    """The origin of a value that fails a demand, with a fix if it is random; grows `proven`."""
    pending, seen = list(demands), set()
    while pending:
        demand = pending.pop()
        batch_axes, tensor, place = demand
        key = (batch_axes.number, tensor.ref(), place)
        if _is_settled(tensor, place) or key in seen or key in proven:
            continue
        seen.add(key)
        op = tensor.op
        if place is None or batch_axes.depends(tensor):
            return op, None
        same = _is_uniform_constant(tensor, place)
        if same is not None:
            if not same:
                return op, None
        elif op.type in DRAWS:
            fix = draws.refusal(op, batch_axes)
            if fix is not None:
                return op, fix
            pending += [Demand(batch_axes, t, p) for t, p in origins.parameters(op, place)]
        else:
            wanted = _demands(op, tensor.value_index, place, batch_axes)
            if wanted is None or any(
                d.place is None and not _is_settled(d.tensor, None) for d in wanted
            ):
                return op, None
            pending += wanted
    proven |= seen
    return None


def _is_settled(tensor: tf.Tensor, place: BatchAxis | None) -> bool:
    """Whether the axis that meets the batch is missing or has length 1."""
    rank = tensor.shape.rank
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    if place is None or rank is None:
        return rank == 0
    return place.axis < 0 or rank == 0 or (place.axis < rank and tensor.shape[place.axis] == 1)


def _is_uniform_constant(tensor: tf.Tensor, place: BatchAxis) -> bool | None:
    """Whether a constant is the same for all examples; `None` if the tensor is not constant."""
    value = None if tensor.dtype == tf.variant else constant_of(tensor)
    if value is None:
        return None
    outer, inner = place.outer.static, place.inner.static
    rows = np.moveaxis(value, place.axis, 0)
    if outer is None or inner is None or len(rows) % (outer * inner):
        return _equal(rows, rows[:1])
    rows = rows.reshape([outer, -1, inner, *rows.shape[1:]])
    return _equal(rows, rows[:, :1])


def _equal(rows: np.ndarray, first: np.ndarray) -> bool:
    """Whether all rows are equal to the first; NaN, with which kernels fill, equals NaN."""
    return bool(((rows == first) | ((rows != rows) & (first != first))).all())


def constant_of(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a constant, also of one that functions capture from outside; else `None`."""
    while tensor.op.type == "Placeholder":
        captured = {i.ref(): e for e, i in graphs.captures(tensor.graph)}
        outside = captured.get(tensor.ref())
        if outside is None or outside.dtype == tf.resource:
            return None
        if not graphs.is_symbolic(outside):
            return outside.numpy() if hasattr(outside, "numpy") else None
        tensor = outside
    return static_value(tensor) if tensor.shape.is_fully_defined() else None


def _demands(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    """What must be the same for all examples so that an output is; `None` if that is unknown."""
    if op.type in _BODIES:
        return _BODIES[op.type](op, index, place, batch_axes)
    if origins.has_sources(op):
        found = origins.sources(op, index, place, batch_axes)
        return None if found is None else [Demand(batch_axes, t, p) for t, p in found]
    # The rule for the batch axis vouches for inputs without one.
    if not batch_axes.depends(op.outputs[index]):
        return None
    places = [(t, batch_axes[t]) for t in op.inputs]
    return [Demand(batch_axes, t, p) for t, p in places if isinstance(p, BatchAxis)]


def _of_bodies(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    bodies = batch_axes.bodies_of(op)
    found = [Demand(inside, g.outputs[index], place) for g, inside in bodies.values()]
    return found or None


def _of_loop(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    bodies = batch_axes.bodies_of(op)
    if "body" not in bodies:
        return None
    graph, inside = bodies["body"]
    return [
        Demand(batch_axes, op.inputs[index], place),
        Demand(inside, graph.outputs[index], place),
    ]


def _of_argument(
    op: tf.Operation, index: int, place: BatchAxis, batch_axes: BatchAxes
) -> list[Demand] | None:
    """The value that a caller passes for an argument, in each step if it is a loop."""
    argument = op.outputs[0]
    if batch_axes.caller is not None:
        outside, call = batch_axes.caller
        k = next((k for k, t in enumerate(op.graph.inputs) if t is argument), None)
        if k is None:
            return None
        if call.type in LOOPS:
            return _of_loop(call, k, place, outside)
        first = 1 if call.type in BRANCHES else 0
        return [Demand(outside, call.inputs[first + k], place)]
    if batch_axes.depends(argument):
        return []  # where the data comes in
    captured = {i.ref(): e for e, i in graphs.captures(op.graph)}
    source = captured.get(argument.ref())
    # It belongs to an outer function, whose data are data here.
    return [Demand(batch_axes, source, place)] if graphs.is_symbolic(source) else None


_BODIES = {
    **dict.fromkeys((*CALLS, *BRANCHES), _of_bodies),
    **dict.fromkeys(LOOPS, _of_loop),
    "Placeholder": _of_argument,
}
