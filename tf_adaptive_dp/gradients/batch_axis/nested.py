"""Losses in inner functions: what the callers of these functions pass to them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    BRANCHES,
    CALLS,
    DATA_SET_LOOPS,
    LOOPS,
    ancestors,
    parts_in_element,
    parts_of_composites,
    static_value,
)
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis import counting, operations, row_ties
from tf_adaptive_dp.gradients.batch_axis.analysis import NO_BATCH_AXIS, feeds
from tf_adaptive_dp.gradients.batch_axis.functions import join
from tf_adaptive_dp.gradients.batch_axis.randomness import Draws
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    CrossExample,
    DataIndependent,
    Value,
)
from tf_adaptive_dp.gradients.frames import Frame
from tf_adaptive_dp.gradients.released import is_released

_MIXED = (
    "`minimize` is called in an inner function whose argument mixes the examples of the batch "
    "already, so none has a gradient of its own. Received: {argument} of {function!r}, computed "
    "by {op} ({type}), which {why}. Compute it within each example, or before the step from "
    "public data."
)
_MOVED = (
    "`minimize` is called in an inner function whose arguments do not hold the examples of the "
    "step's batch in their order, as axis 0. Received: {argument} of {function!r}. Pass the "
    "batch, or the same rows of all its parts (`x[a:b]`, `y[a:b]`)."
)
_PLACED = (
    "`minimize` is called in an inner function with an argument that depends on the row of an "
    "example in the batch, or on the number of examples. Received: {argument} of {function!r}, "
    "computed by {op} ({type}). Compute it inside the function that calls `minimize`, where the "
    "library can see how it is used."
)


def refuse_mixed_arguments(frame: Frame, loss: tf.Tensor) -> None:
    """Refuses an inner function whose arguments are not the examples of the batch.

    The search within a function takes its arguments for examples, and scalars for settings. This
    checks that they are, through the calls, branches and loops around it, up to the inputs of the
    outermost function.

    Args:
      frame: the call of the function; its outermost frame is that of the whole step.
      loss: [B], in the graph of `frame`, and accepted there.

    Raises:
      NotPrivateError: if an argument that the loss depends on does not hold examples in their
        order; if a scalar depends on the data; or if an argument without data depends on the batch
        size, or differs from row to row.
    """
    if frame.call is None:
        return
    given = [op.outputs[0] for op in ancestors([loss]) if op.type == "Placeholder"]
    given = [t for t in given if t.dtype != tf.resource]
    arguments = _Arguments(_batch_size(frame))
    values = [arguments.value(frame, t) for t in given]
    if all(isinstance(v, DataIndependent) for v in values):
        # There are no inputs: as elsewhere, constants with an axis of length B are the data then.
        rows = _num_rows(frame, loss, given)
        arguments = _Arguments(rows, constants_are_data=True)
        values = [arguments.value(frame, t) for t in given]
    selections = set()
    for tensor, value in zip(given, values):
        if isinstance(value, DataIndependent):
            _refuse_place(frame, tensor, arguments)
            continue
        selection: tuple | None = None
        if feeds([tensor.op], frame.graph):  # the function takes it for rows
            selection = () if value == BatchAxis() else arguments.selection(frame, tensor)
        if selection is None:
            raise _error(frame, tensor, value)
        selections.add(selection)
        if len(selections) > 1:
            raise _error(frame, tensor, None)


def _refuse_place(frame: Frame, tensor: tf.Tensor, arguments: _Arguments) -> None:
    """Refuses an argument without data that depends on the batch size, or differs by row."""
    if row_ties.constant_of(tensor) is not None:
        return  # the search within the function has seen its rows
    op = arguments.source_of_place(frame, tensor)
    if op is not None:
        names = {"argument": tensor.op.name, "function": getattr(frame.graph, "name", "")}
        raise NotPrivateError(_PLACED.format(**names, op=op.name, type=op.type))


def _error(frame: Frame, tensor: tf.Tensor, value: Value | None) -> NotPrivateError:
    names = {"argument": tensor.op.name, "function": getattr(frame.graph, "name", "")}
    if isinstance(value, CrossExample):
        op = value.op
        return NotPrivateError(_MIXED.format(**names, op=op.name, type=op.type, why=value.why))
    return NotPrivateError(_MOVED.format(**names))


def _batch_size(frame: Frame) -> int | None:
    """B at the inputs of the step, if they agree on a known size."""
    sizes: set[int | None] = set()
    place: Frame | None = frame
    while place is not None:
        ops = place.graph.get_operations()
        fed = feeds([o for o in ops if place.call is None or o.type != "Placeholder"], place.graph)
        sizes |= {t.shape[0] for t in fed if t.shape.rank}
        place = place.outer
    return sizes.pop() if len(sizes) == 1 else None


def _num_rows(frame: Frame, loss: tf.Tensor, given: Sequence[tf.Tensor]) -> int | None:
    """B, if the shape of the loss or of an argument tells it."""
    outside = [t for g in given for _, t in frame.origins(g)[0]]
    sizes = [t.shape[0] for t in [loss, *outside] if t.shape.rank]
    return next((n for n in sizes if n is not None), None)


class _Arguments:
    """What the inputs of bodies hold, found by following them outwards as far as necessary."""

    def __init__(self, batch_size: int | None, constants_are_data: bool = False):
        self._batch_size = batch_size
        self._constants_are_data = constants_are_data
        self._loops: dict[tuple[Frame, int], Value] = {}
        self._asked: set[tuple[Frame, int]] = set()

    def value(self, frame: Frame, tensor: tf.Tensor) -> Value:
        """The layout of a tensor; `DataIndependent` if it does not depend on the data."""
        if tensor.op.type == "Placeholder":
            return self._of_input(frame, tensor)
        return self._batch_axes(frame, [tensor]).value(tensor)

    def selection(self, frame: Frame, tensor: tf.Tensor) -> tuple | None:
        """Which rows of the batch a tensor holds; `None` if it is more than a selection of rows."""
        if self.value(frame, tensor) == BatchAxis():
            return ()
        op = tensor.op
        if op.type == "Placeholder":
            if frame.call is None or frame.call.type not in CALLS | BRANCHES:
                return None
            ((outer, given),), _ = frame.origins(tensor)
            return self.selection(outer, given)
        if op.type == "Identity":
            return self.selection(frame, op.inputs[0])
        if op.type == "StridedSlice" and _takes_rows(op):
            source, others = op.inputs[0], list(op.inputs[1:])
        elif op.type == "Split" and static_value(op.inputs[0]) == 0:
            source, others = op.inputs[1], []
        elif op.type == "SplitV" and static_value(op.inputs[2]) == 0:
            source, others = op.inputs[0], [op.inputs[1]]
        else:
            return None
        if any(not isinstance(self.value(frame, t), DataIndependent) for t in others):
            return None
        before = self.selection(frame, source)
        step = (op.type, len(op.outputs), tensor.value_index, *map(_formula, others))
        return None if before is None else (*before, step)

    def source_of_place(self, frame: Frame, tensor: tf.Tensor) -> tf.Operation | None:
        """What makes an argument without data depend on the batch size, or on the row.

        Inside of the function such an argument counts as a setting or as part of the batch, so the
        search there would not find either.
        """
        if tensor.dtype in (tf.resource, tf.variant) or (frame, id(tensor)) in self._asked:
            return None
        self._asked.add((frame, id(tensor)))
        if tensor.op.type == "Placeholder" and frame.call is not None:
            sources = (self.source_of_place(*place) for place in frame.origins(tensor)[0])
            return next((op for op in sources if op is not None), None)
        batch_axes, ops = self._batch_axes(frame, [tensor]), ancestors([tensor], stop=is_released)
        inputs = [op.outputs[0] for op in ops if op.type == "Placeholder"]
        if frame.call is not None:
            for given in inputs:
                if isinstance(self.value(frame, given), DataIndependent):
                    op = self.source_of_place(frame, given)
                    if op is not None:
                        return op
        if counting.counts_batch(tensor, batch_axes):
            return tensor.op
        if tensor.shape.rank == 0:
            return None
        draws = Draws(frame.graph)
        demand = row_ties.Demand(batch_axes, tensor, BatchAxis())
        found = row_ties.disprove([demand], set(), draws)
        return tensor.op if found is not None or draws.replaces_any else None

    def _batch_axes(
        self, frame: Frame, tensors: Sequence[tf.Tensor], inputs: dict[int, Value] | None = None
    ) -> BatchAxes:
        """The batch axes of everything that tensors of a body are computed from."""
        ops = ancestors(tensors, stop=is_released)
        batch_axes = BatchAxes(self._batch_size)
        for op in ops:
            if op.type == "Placeholder":
                (tensor,) = op.outputs
                value = (inputs or {}).get(id(tensor)) or self._of_input(frame, tensor)
                if isinstance(value, DataIndependent):
                    batch_axes.set(tensor, value.layout, False)
                else:
                    batch_axes.set(tensor, value, True)
            elif op.type == "Const" and self._is_data(op.outputs[0]):
                batch_axes.set(op.outputs[0], BatchAxis(), True)
            else:
                for tensor in feeds([op], frame.graph):
                    batch_axes.set(tensor, _fresh(tensor), True)
        operations.run(ops, batch_axes)
        return batch_axes

    def _of_input(self, frame: Frame, tensor: tf.Tensor) -> Value:
        if frame.call is None:
            return self._fed(frame, tensor)
        places, is_element = frame.origins(tensor)
        if frame.call.type in CALLS | BRANCHES:
            return self.value(*places[0])
        loop_state = frame.call.type in LOOPS | DATA_SET_LOOPS and len(places) > 1
        if loop_state:
            return self._of_loop_state(frame, tensor)
        values = [self.value(*p) for p in places if p[1].dtype != tf.resource]
        dependent = [v for v in values if not isinstance(v, DataIndependent)]
        if dependent and len(values) > 1 or dependent and is_element:
            return CrossExample(
                frame.call, "passes the data to a function in an unknown way", is_certain=False
            )
        if is_element:
            return _fresh(tensor)
        return dependent[0] if dependent else DataIndependent()

    def _fed(self, frame: Frame, tensor: tf.Tensor) -> Value:
        """The layout of an argument of the outermost function, or of what it captures."""
        if any(tensor is part for part in parts_of_composites(frame.graph)):
            return CrossExample(tensor.op, NO_BATCH_AXIS)
        _, is_data = frame.origins(tensor)
        return BatchAxis() if is_data or self._is_data(tensor) else DataIndependent()

    def _is_data(self, constant: tf.Tensor) -> bool:
        size = self._batch_size if self._constants_are_data else None
        return size is not None and constant.shape[:1] == [size]

    def _of_loop_state(self, frame: Frame, tensor: tf.Tensor) -> Value:
        """The layout of a loop variable in all iterations."""
        if (frame, id(tensor)) in self._loops:
            return self._loops[frame, id(tensor)]
        body = frame
        if frame.role == "cond" and frame.outer is not None:
            body = frame.outer.bodies(frame.call)["body"]
        place = next(k for k, t in enumerate(frame.graph.inputs) if t is tensor)
        needed: dict[int, tf.Tensor] = {}
        pending = [place]
        while pending:
            k = pending.pop()
            if k in needed:
                continue
            needed[k] = body.graph.outputs[k]
            inside = {
                id(op.outputs[0]) for op in ancestors([needed[k]], stop=is_released) if op.outputs
            }
            pending += [
                j
                for j, t in enumerate(body.graph.inputs[: len(body.graph.outputs)])
                if id(t) in inside and len(body.origins(t)[0]) > 1
            ]
        state = {k: self.value(*body.origins(body.graph.inputs[k])[0][0]) for k in needed}
        while True:  # each pass makes a value known, mixed or dependent, or is the last
            inputs = {id(body.graph.inputs[k]): v for k, v in state.items()}
            batch_axes = self._batch_axes(body, list(needed.values()), inputs)
            after = {k: join(frame.call, v, batch_axes.value(needed[k])) for k, v in state.items()}
            if after == state:
                break
            state = after
        self._loops[frame, id(tensor)] = state[place]
        return state[place]


def _fresh(tensor: tf.Tensor) -> BatchAxis | CrossExample:
    in_part = any(tensor is part for part in parts_in_element(tensor.op))
    fits = tensor.shape.rank and not in_part
    return BatchAxis() if fits else CrossExample(tensor.op, NO_BATCH_AXIS)


def _takes_rows(op: tf.Operation) -> bool:
    """Whether `x[a:b]` is all that a slice does."""
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    one_axis = op.inputs[1].shape.rank == 1 and op.inputs[1].shape[0] == 1
    strides = static_value(op.inputs[3])
    forward = strides is not None and (strides == 1).all()
    return one_axis and forward and not any(op.get_attr(m) for m in masks)


def _formula(tensor: tf.Tensor) -> Hashable:
    """How a small integer tensor is computed; equal for equal formulas of equal values."""
    value = static_value(tensor)
    if value is not None:
        return value.tobytes()
    op = tensor.op
    if op.type in ("Pack", "Mul", "Add", "AddV2", "Sub", "Minimum", "Identity", "FloorDiv"):
        return (op.type, *map(_formula, op.inputs))
    return id(tensor)
