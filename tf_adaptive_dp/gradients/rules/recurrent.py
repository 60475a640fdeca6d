"""Per-example gradients of variables that functions and loops use, such as recurrent layers.

A function is replaced by copies of its operations. A loop runs once more, with zeros added to the
results of the operations that use variables: the gradients of these zeros are δ in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    CALLS,
    LOOPS,
    TensorReference,
    ancestors,
    behind_identities,
    bodies,
    function_attributes,
    overrides_gradient,
    scope_of,
    static_value,
)
from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.batch_axis.functions import comparisons, increment
from tf_adaptive_dp.gradients.batch_axis.operation_types import REPEATABLE, SHAPE_ONLY
from tf_adaptive_dp.gradients.batch_axis.operations import run
from tf_adaptive_dp.gradients.batch_axis.sizes import Size, evaluate
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    Rows,
    static_or_dynamic_shape,
)
from tf_adaptive_dp.gradients.rows_met import RowsMet
from tf_adaptive_dp.gradients.rules.registry import RULES
from tf_adaptive_dp.gradients.variable_uses import VariableUse, consumers_of, find_uses


class NotReplayable(Exception):
    """Running a body again might give other values or gradients."""


def has_effects(op: tf.Operation) -> bool:
    """Whether an operation may draw random numbers or write to a variable."""
    if op.type in CALLS | LOOPS:
        return any(has_effects(o) for g in bodies(op).values() for o in g.get_operations())
    return op.op_def.is_stateful and op.type not in REPEATABLE


def copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Adds the same operation, on other inputs, to the current graph.

    Raises:
      NotReplayable: for an operation that runs functions, such as a branch; for one with a custom
        gradient, which may use tensors of the original; or if the inputs do not fit.
    """
    attributes = op.node_def.attr
    if function_attributes(op.type) or overrides_gradient(op):
        raise NotReplayable
    attributes = {name: a for name, a in attributes.items() if not name.startswith("_")}
    graph = tf.compat.v1.get_default_graph()
    try:
        return graph.create_op(op.type, inputs, [t.dtype for t in op.outputs], attrs=attributes)
    except ValueError as error:
        raise NotReplayable from error


class Step:
    """The part of a loop's first step that depends on the loop variables that change.

    Attributes:
      before: the values of these variables before the step.
      after: their values after it.
      ops: the operations in between.
    """

    def __init__(
        self,
        before: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor],
        ops: Iterable[tf.Operation],
    ):
        self.before, self.after, self.ops = before, after, []
        self._changing = {t.ref() for t in before}
        for op in ops:
            if any(map(self.changes, op.inputs)):
                self.ops.append(op)
                self._changing |= {t.ref() for t in op.outputs}
        self._consumers = consumers_of(self.ops)

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may have another value in each step."""
        return tensor.ref() in self._changing

    def sum_of(self, term: tf.Tensor) -> tf.Tensor:
        """The sum that a tensor is used in, if it is used nowhere else; both have the same δ.

        All products that a cell adds up can then share their zeros.
        """
        while True:
            uses = self._consumers.get(term.ref(), ())
            if len(uses) != 1 or any(t is term for t in self.after):
                return term
            ((op, index),) = uses
            added = op.type in ("Add", "AddV2", "Identity") or op.type == "BiasAdd" and index == 0
            if not added or op.outputs[0].shape.as_list() != term.shape.as_list():
                return term
            term = op.outputs[0]


class Loop:
    """A loop that runs once more, with zeros added where it uses variables.

    Attributes:
      length: the number of steps.
      zeros: maps each operation of the first step that uses a variable to the zeros
        [length, ...] that were added to its output in all steps, or to a sum that contains it.
        The gradient of the zeros is δ of the output.
      stacks: maps references to inputs of these operations to their values in all steps,
        [length, ...].
      final: the loop variables that change, after the last step.
    """

    def __init__(
        self,
        step: Step,
        uses: Iterable[tf.Operation],
        start: Sequence[tf.Tensor],
        length: tf.Tensor | int,
        batch_axes: BatchAxes,
        trained: Callable[[tf.Tensor], bool],
    ):
        """Builds the loop.

        Args:
          step: the first step.
          uses: its operations that combine variables with data.
          start: the loop variables that change, before the first step.
          length: the number of steps.
          batch_axes: the batch axes of the tensors of the first step.
          trained: whether one of these tensors is computed from variables alone.
        """
        self.length, self.zeros = length, {}
        self._step, self._trained = step, trained
        kept: dict[TensorReference, tf.Tensor] = {}
        added: dict[tf.Operation, tf.Tensor] = {}
        for op in uses:
            if any(step.changes(t) != isinstance(batch_axes[t], BatchAxis) for t in op.inputs):
                raise NotReplayable  # such as a kernel that changes from step to step
            total = step.sum_of(op.outputs[0])
            if total.op not in added:
                added[total.op] = _zeros(total, length, batch_axes)
            self.zeros[op] = added[total.op]
            kept.update((t.ref(), t) for t in op.inputs if step.changes(t))
        lists = {
            op: _array(zeros.dtype, zeros.shape[1:], length).unstack(zeros)
            for op, zeros in added.items()
        }
        self.final, arrays = self._run(start, lists, list(kept.values()))
        self.stacks = {key: a.stack() for key, a in zip(kept, arrays)}

    def _run(
        self,
        start: Sequence[tf.Tensor],
        lists: dict[tf.Operation, tf.TensorArray],
        kept: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.TensorArray]]:
        step, length = self._step, self.length

        @tf.autograph.experimental.do_not_convert
        def body(
            time: tf.Tensor, states: list[tf.Tensor], arrays: list[tf.TensorArray]
        ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.TensorArray]]:
            values = dict(zip((t.ref() for t in step.before), states))
            for op in step.ops:
                outputs = list(copy(op, [self._now(t, values) for t in op.inputs]).outputs)
                if op in lists:
                    outputs[0] += lists[op].read(time)
                values.update(zip((t.ref() for t in op.outputs), outputs))
            arrays = [
                a.write(time, tf.stop_gradient(self._now(t, values))) for a, t in zip(arrays, kept)
            ]
            return time + 1, [self._now(t, values) for t in step.after], arrays

        arrays = [_array(t.dtype, t.shape, length) for t in kept]
        shapes = [t.shape for t in step.before], [tf.TensorShape(None) for _ in arrays]
        _, final, arrays = tf.while_loop(
            lambda time, *_: time < length,
            body,
            (tf.constant(0), list(start), arrays),
            shape_invariants=(tf.TensorShape([]), *shapes),
            # XLA needs to know how much the backward pass stores.
            maximum_iterations=length if in_xla() else None,
            parallel_iterations=32,
        )
        return final, arrays

    def _now(self, tensor: tf.Tensor, values: dict) -> tf.Tensor:
        """The tensor of the current step that corresponds to one of the first step."""
        key = tensor.ref()
        if key not in values and tensor.op.type == "Const":
            values[key] = copy(tensor.op, []).outputs[0]  # so that it stays static
        elif key not in values and self._trained(tensor) and tensor.dtype != tf.resource:
            # No one needs the gradients of variables summed over the examples.
            values[key] = tf.stop_gradient(tensor)
        return values.get(key, tensor)


def _zeros(like: tf.Tensor, length: tf.Tensor | int, batch_axes: BatchAxes) -> tf.Tensor:
    """Zeros [length, ...]."""
    layout, rank = batch_axes[like], like.shape.rank
    if not isinstance(layout, BatchAxis) or rank is None:
        raise NotReplayable
    if None in [n for axis, n in enumerate(like.shape) if axis != layout.axis]:
        raise NotReplayable  # the shape might change from step to step
    zeros = tf.zeros(tf.concat([[length], tf.shape(like)], axis=0), like.dtype)
    return tf.ensure_shape(zeros, [None, *like.shape])


def _array(dtype: tf.DType, shape: tf.TensorShape, length: tf.Tensor | int) -> tf.TensorArray:
    return tf.TensorArray(dtype, length, clear_after_read=False, element_shape=shape)


def batch_axes_inside(
    body: tf.Graph, arguments: Sequence, outputs: Sequence[tf.Tensor], where: BatchAxes
) -> BatchAxes:
    """The batch axes of everything that some outputs of a body are computed from.

    Args:
      body: the graph that an operation runs.
      arguments: the layouts of its arguments; `DataIndependent` if they do not depend on the data.
      outputs: some of its outputs.
      where: the batch axes of the graph that contains the operation.
    """
    inside = where.inside(body, arguments)
    run(ancestors(outputs), inside)
    return inside


def opaque(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """The first value of a loop variable, with no more static knowledge than later values have."""
    if tensor.dtype == tf.variant:
        return tf.identity(tensor)
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def split_states(body: tf.Graph, wanted: Iterable[int]) -> tuple[list[int], list[int]]:
    """Splits loop variables into those that stay the same and those that matter for some results.

    Returns:
      The places of the ones that stay the same, and of the ones that change and matter.
    """
    place = {t.ref(): k for k, t in enumerate(body.inputs)}
    same = [
        k for k, (a, b) in enumerate(zip(body.inputs, body.outputs)) if behind_identities(b) is a
    ]
    changing, pending = set(), list(wanted)
    while pending:
        k = pending.pop()
        if k not in changing and k not in same:
            changing.add(k)
            tensors = [t for op in ancestors([body.outputs[k]]) for t in op.outputs]
            pending += [place[t.ref()] for t in tensors if t.ref() in place]
    return same, sorted(changing)


# Their outputs do not depend on the values of their inputs.
_WITHOUT_VALUES = {*SHAPE_ONLY, "OnesLike", "ZerosLike"}
# An input gives the size of their output, which is wrong once time is merged into the batch axis.
_SIZED = {"BroadcastTo", "Tile", "Conv2DBackpropInput", "Conv3DBackpropInputV2"}


def outputs_of(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of an operation that uses a variable whose δ is needed."""
    return list(op.outputs) if op.type in CALLS | LOOPS else [op.outputs[0]]


def unfold(
    uses: Sequence[list[VariableUse]],
    handles: Sequence[tf.Tensor | None],
    variables: Sequence[tf.Variable],
    deltas: dict[TensorReference, tf.Tensor | None],
    batch_axes: BatchAxes,
    met: RowsMet,
) -> list[list[VariableUse]]:
    """Replaces uses of variables by functions and loops by the uses inside of these.

    Guarantee: a body runs again only if that gives the same values: it draws no random numbers,
    and no variable that it reads was written since. Otherwise, or if something in the body is not
    understood, the use stays as it is, and no rule covers it.

    Args:
      uses: the uses of each variable.
      handles: the tensors that stand for the variables in the graph.
      variables: the variables.
      deltas: gradients of the loss by reference to an output of an operation; the gradients for
        the new uses are added.
      batch_axes: the batch axis of each tensor; the batch axes of copies are added.
      met: which rows of tensors without data the examples meet.

    Returns:
      The uses of each variable.
    """
    uses = list(uses)
    for op in dict.fromkeys(u.op for us in uses for u in us if u.op.type in CALLS | LOOPS):
        wanted = [k for k, t in enumerate(op.outputs) if deltas.get(t.ref()) is not None]
        replay = _Replay(batch_axes, [h for h in handles if h is not None])
        stand_ins = {}
        try:
            if wanted:  # otherwise the loss does not depend on it
                with tf.name_scope(f"{scope_of(op)}/"):
                    stand_ins = _stand_ins(op, wanted, replay, deltas, batch_axes, met)
        except NotReplayable:
            continue
        paths = ancestors([t for t in op.inputs if replay.trained(t)])
        consumers = consumers_of([*paths, *replay.ops])
        if replay.loses_variables(consumers):
            continue
        inner = RowsMet(consumers, batch_axes, set(), replay.ends)
        for k, (handle, variable) in enumerate(zip(handles, variables)):
            others = [u for u in uses[k] if u.op is not op]
            if len(others) < len(uses[k]):
                inside = find_uses(handle, variable.shape, consumers, batch_axes, inner)
                if all(u.op in stand_ins for u in inside):
                    uses[k] = others + [dataclasses.replace(u, op=stand_ins[u.op]) for u in inside]
    return uses


def _repeats(op: tf.Operation) -> bool:
    """Whether an operation would give the same results if it ran again now."""
    if any(has_effects(o) for g in bodies(op).values() for o in g.get_operations()):
        return False
    ops = op.graph.get_operations()
    later = set(ops[ops.index(op) + 1 :])
    handles = [t for t in op.inputs if t.dtype == tf.resource]
    return not any(c in later and has_effects(c) for t in handles for c in t.consumers())


def _stand_ins(
    op: tf.Operation,
    wanted: Sequence[int],
    replay: _Replay,
    deltas: dict[TensorReference, tf.Tensor | None],
    batch_axes: BatchAxes,
    met: RowsMet,
) -> dict[tf.Operation, tf.Operation]:
    """Maps copies of operations that use variables to the ones whose rules apply; adds their δ."""
    if not _repeats(op):
        raise NotReplayable
    outputs = replay.run(op, wanted)
    for k, output in zip(wanted, outputs):
        before = op.outputs[k]
        if batch_axes.depends(before) or not met.is_used(before):
            continue  # such as the handle of a variable, which loops return
        if replay.reads_variables(output):
            place = met.of(before)
            if not isinstance(place, BatchAxis):
                raise NotReplayable  # such as a kernel, which meets the data outside
            replay.ends[output.ref()] = place
    uses = [new for new in replay.ops if replay.uses_variable(new)]
    loops = {use: loop for loop in replay.loops for use in loop.zeros}
    if any(u.type not in RULES or (u in loops and u.type in _SIZED) for u in uses):
        raise NotReplayable
    found = tf.gradients(
        outputs,
        [loops[u].zeros[u] if u in loops else u.outputs[0] for u in uses],
        grad_ys=[deltas[op.outputs[k].ref()] for k in wanted],
    )
    stand_ins = {}
    for use, delta in zip(uses, found):
        stand_in = use
        if delta is not None:
            delta = tf.convert_to_tensor(delta)
            if use in loops:
                stand_in, delta = _over_time(use, loops[use], delta, batch_axes)
        stand_ins[use] = stand_in
        deltas[stand_in.outputs[0].ref()] = delta
    return stand_ins


def _over_time(
    use: tf.Operation, loop: Loop, delta: tf.Tensor, batch_axes: BatchAxes
) -> tuple[tf.Operation, tf.Tensor]:
    """One operation that does what `use` does in all steps of a loop, and δ of its output."""
    length = loop.length
    steps = Size(length) if isinstance(length, int) else Size(1, (f"{use.name}/steps",))
    stacks = [loop.stacks.get(t.ref()) for t in use.inputs]
    inputs = [
        t if stack is None else _merged(stack, steps, batch_axes, like=t)
        for t, stack in zip(use.inputs, stacks)
    ]
    stand_in = copy(use, inputs)
    operations.apply(stand_in, batch_axes)
    delta = _merged(delta, steps, batch_axes, like=use.outputs[0])
    if batch_axes[stand_in.outputs[0]] != batch_axes[delta]:
        raise NotReplayable
    return stand_in, delta


def _merged(stack: tf.Tensor, steps: Size, batch_axes: BatchAxes, like: tf.Tensor) -> tf.Tensor:
    """Reshapes [T, ...B, ...] to [...B·T, ...]: time becomes the inner part of the batch axis."""
    layout = batch_axes.axis_of(like)
    axis, rank = layout.axis, like.shape.rank
    stack = tf.ensure_shape(stack, [steps.static, *like.shape])
    order = [*range(1, axis + 2), 0, *range(axis + 2, rank + 1)]
    length, *shape = static_or_dynamic_shape(stack)
    shape[axis] *= length
    merged = tf.reshape(tf.transpose(stack, order), shape)
    batch_axes.set(merged, layout._replace(inner=layout.inner.times(steps)), True)
    return merged


class _Replay:
    """Copies of what one operation that runs functions computes, in the graph of the step.

    Calls are inlined, and loops are built again. The first step of each loop is copied before the
    loop as well. Only its shapes are ever used: it shows what a step does, and what is the same in
    all steps.

    Attributes:
      ops: the copies.
      loops: the loops.
      ends: the batch axes of results without data.
    """

    def __init__(self, batch_axes: BatchAxes, handles: Iterable[tf.Tensor]):
        """Takes the batch axes of the graph of the step, and the handles of variables in it."""
        self.ops: list[tf.Operation] = []
        self.loops: list[Loop] = []
        self.ends: dict[TensorReference, BatchAxis] = {}
        self._batch_axes = batch_axes
        self._handles = {h.ref() for h in handles}
        self._trained: set = set()
        self._in_loop = False

    def run(self, op: tf.Operation, wanted: Sequence[int]) -> list[tf.Tensor]:
        """Computes some outputs of an operation in the graph of the step again."""
        for tensor in op.inputs:
            if self.reads_variables(tensor) and not self._has_batch(tensor):
                self._trained.add(tensor.ref())
        found = self._run(op, list(op.inputs), self._batch_axes, wanted)
        return [found[k] for k in wanted]

    def reads_variables(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is computed from variables, and maybe from other values.

        Only values count: zeros in the shape of what was computed from variables do not.
        """
        pending, seen = [tensor], set()
        while pending:
            last = pending.pop()
            if last.ref() in self._handles:
                return True
            if last.ref() not in seen and last.op.type not in _WITHOUT_VALUES:
                seen.add(last.ref())
                pending += last.op.inputs
        return False

    def loses_variables(self, consumers: dict) -> bool:
        """Whether a copy computes something from variables that no copy and no result takes.

        The search for uses would end there, and miss a part of the gradient.
        """
        for op in self.ops:
            open_ends = [t for t in op.outputs if not self._batch_axes.depends(t)]
            taken = any(t.ref() in consumers or t.ref() in self.ends for t in op.outputs)
            if open_ends and not taken and any(map(self.reads_variables, open_ends)):
                return True
        return False

    def trained(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is computed from variables alone."""
        return tensor.ref() in self._trained

    def uses_variable(self, op: tf.Operation) -> bool:
        """Whether a copy combines variables with data."""
        return any(map(self._has_batch, op.outputs)) and any(map(self.trained, op.inputs))

    def _is_repeated(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has rows of variables without data, such as a start for each example.

        The loop that takes it is none of the copies, so nothing would tell which example a row
        belongs to.
        """
        return not self._batch_axes.depends(tensor) and self.reads_variables(tensor)

    def _has_batch(self, tensor: tf.Tensor) -> bool:
        return isinstance(self._batch_axes[tensor], BatchAxis)

    def _run(
        self,
        op: tf.Operation,
        inputs: Sequence[tf.Tensor | None],
        where: BatchAxes,
        wanted: Sequence[int],
    ) -> dict[int, tf.Tensor]:
        """Outputs of a call or a loop on other inputs; `where` is for the original."""
        if op.type in LOOPS:
            return self._loop(op, inputs, where, wanted)
        (body,) = bodies(op).values()
        outputs = [body.outputs[k] for k in wanted]
        inside = batch_axes_inside(body, [where.value(t) for t in op.inputs], outputs, where)
        values = {t.ref(): new for t, new in zip(body.inputs, inputs)}
        self._inline(outputs, values, inside)
        return {k: values[t.ref()] for k, t in zip(wanted, outputs)}

    def _inline(self, wanted: Sequence[tf.Tensor], values: dict, where: BatchAxes) -> None:
        """Copies what tensors of a body are computed from, and adds the copies to `values`."""
        ops = ancestors(wanted)
        used = {t.ref() for t in wanted} | {t.ref() for op in ops for t in op.inputs}
        for op in ops:
            if all(t.ref() in values for t in op.outputs):
                continue
            # The backward pass later gave the loop inputs that are not needed here.
            inputs = [values.get(t.ref()) for t in op.inputs]
            if op.type in CALLS | LOOPS:
                places = [k for k, t in enumerate(op.outputs) if t.ref() in used]
                found = self._run(op, inputs, where, places)
            elif op.type == "Placeholder" or any(t is None for t in inputs):
                raise NotReplayable
            else:
                new = copy(op, inputs)
                self.ops.append(new)
                found = dict(enumerate(new.outputs))
            for k, tensor in found.items():
                values[op.outputs[k].ref()] = tensor
                self._enter(tensor, op.outputs[k], where)

    def _enter(self, new: tf.Tensor, old: tf.Tensor, where: BatchAxes) -> None:
        """Notes the batch axis of a copy, and whether it is computed from variables alone."""
        self._batch_axes.set(new, where[old], where.depends(old))
        if not self._has_batch(new) and new.op.type not in SHAPE_ONLY:
            if any(map(self.trained, new.op.inputs)):
                self._trained.add(new.ref())

    def _loop(
        self,
        op: tf.Operation,
        inputs: Sequence[tf.Tensor | None],
        where: BatchAxes,
        wanted: Sequence[int],
    ) -> dict[int, tf.Tensor]:
        if self._in_loop or any(where[t] == Rows() for t in [*op.inputs, *op.outputs]):
            raise NotReplayable  # a loop in a loop, or over the examples themselves
        graphs = bodies(op)
        body, condition = graphs["body"], graphs["cond"]
        same, changing = split_states(body, wanted)
        start = [inputs[k] for k in changing]
        if any(t is None or self.trained(t) or self._is_repeated(t) for t in start):
            raise NotReplayable
        length = self._length(condition, body, inputs, same)
        outputs = [body.outputs[k] for k in changing]
        inside = batch_axes_inside(body, [where.value(t) for t in op.outputs], outputs, where)
        values = {body.inputs[k].ref(): inputs[k] for k in same}
        before = [opaque(t, op.outputs[k].shape) for t, k in zip(start, changing)]
        for k, state in zip(changing, before):
            values[body.inputs[k].ref()] = state
            self._enter(state, op.outputs[k], where)
        count, self._in_loop = len(self.ops), True
        self._inline(outputs, values, inside)
        self._in_loop = False
        step = Step(before, [values[t.ref()] for t in outputs], self.ops[count:])
        if any(map(self.trained, step.after)):
            raise NotReplayable
        uses = filter(self.uses_variable, step.ops)
        loop = Loop(step, uses, start, length, self._batch_axes, self.trained)
        self.loops.append(loop)
        found = dict(zip(changing, loop.final))
        return {k: found[k] if k in found else inputs[k] for k in wanted}

    def _length(
        self,
        condition: tf.Graph,
        body: tf.Graph,
        inputs: Sequence[tf.Tensor | None],
        same: Sequence[int],
    ) -> tf.Tensor | int:
        """The number of steps of a loop that counts up by 1 to a limit."""
        known = {condition.inputs[k].ref(): inputs[k] for k in same}
        lengths, compared = [], comparisons(condition.outputs[0])
        if compared is None:
            raise NotReplayable
        for counter, limit in compared:
            k = next((k for k, t in enumerate(condition.inputs) if t is counter), None)
            one = None if k is None else increment(body, k)
            place = next((k for k in same if body.inputs[k] is one), None)
            one = one if place is None else inputs[place]
            if k is None or one is None or not one.dtype.is_integer or static_value(one) != 1:
                raise NotReplayable
            self._inline([limit], known, BatchAxes(None))
            end, start = (self._number(t) for t in (known[limit.ref()], inputs[k]))
            lengths.append(end - start)
        if all(isinstance(n, int) for n in lengths):
            return max(0, min(lengths))
        return tf.maximum(0, tf.reduce_min(tf.stack(lengths)))

    def _number(self, tensor: tf.Tensor) -> tf.Tensor | int:
        size = evaluate(tensor, self._batch_axes.size)[0]
        known = None if size is None else size.static
        return tf.cast(tensor, tf.int32) if known is None else known
