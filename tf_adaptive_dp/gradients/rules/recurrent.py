"""The bodies of functions and loops, and a loop that is run once more to learn of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    CALLS,
    LOOPS,
    bodies,
    function_attributes,
    overrides_gradient,
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
from tf_adaptive_dp.gradients.graph import ancestors, behind_identities, layer_name
from tf_adaptive_dp.gradients.rules.registry import RULES
from tf_adaptive_dp.gradients.variable_uses import VariableUse, consumers, find_uses


class NotReplayable(Exception):
    """A body that is not known to give the same values and gradients if it is run again."""


def has_effects(op: tf.Operation) -> bool:
    """Whether an operation may draw random numbers or write to a variable."""
    if op.type in CALLS | LOOPS:
        return any(has_effects(o) for g in bodies(op).values() for o in g.get_operations())
    return op.op_def.is_stateful and op.type not in REPEATABLE


def copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """The same operation on other inputs, in the current graph.

    Raises:
      NotReplayable: for branches and the like, which have bodies of their own; for an operation
        with a gradient of its own, which may use tensors of the original; if inputs do not fit.
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
    """The first step of a loop: the part that depends on what changes from step to step.

    Attributes:
      before: what changes, before the step.
      after: the same after it.
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
        self._uses = consumers(self.ops)

    def changes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has another value in each step."""
        return tensor.ref() in self._changing

    def sum_of(self, term: tf.Tensor) -> tf.Tensor:
        """The sum that a tensor is a term of, if it is nothing else: δ is the same for both.

        All products of a cell that are added up then share their zeros.
        """
        while True:
            uses = self._uses.get(term.ref(), ())
            if len(uses) != 1 or any(t is term for t in self.after):
                return term
            ((op, index),) = uses
            added = op.type in ("Add", "AddV2", "Identity") or op.type == "BiasAdd" and index == 0
            if not added or op.outputs[0].shape.as_list() != term.shape.as_list():
                return term
            term = op.outputs[0]


class Loop:
    """A loop that is run once more, with zeros added at its reads and their inputs kept.

    Attributes:
      length: the number of steps.
      zeros: for each read in the first step, the zeros [length, ...] that were added in all steps
        to its output, or to a sum of it. Their gradient is δ of the output.
      stacks: from references to inputs of reads to their values in all steps, [length, ...].
      final: what changes in a step, after the last one.
    """

    def __init__(
        self,
        step: Step,
        reads: Iterable[tf.Operation],
        start: Sequence[tf.Tensor],
        length: tf.Tensor | int,
        batch_axes: BatchAxes,
        trained: Callable[[tf.Tensor], bool],
    ):
        """Builds the loop.

        Args:
          step: the first step.
          reads: the operations of it that read variables.
          start: what changes, before the first step.
          length: the number of steps.
          batch_axes: of the tensors of the first step.
          trained: whether a tensor of it is made from variables alone.
        """
        self.length, self.zeros = length, {}
        self._step, self._trained = step, trained
        kept, added = {}, {}
        for op in reads:
            if any(step.changes(t) != isinstance(batch_axes[t], BatchAxis) for t in op.inputs):
                raise NotReplayable  # such as a kernel that is another one in each step
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

    def _run(self, start, lists: dict, kept: Sequence[tf.Tensor]) -> tuple[list, list]:
        step, length = self._step, self.length

        @tf.autograph.experimental.do_not_convert
        def body(time, states, arrays):
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
            # XLA wants to know how much the backward pass will have to store.
            maximum_iterations=length if in_xla() else None,
            parallel_iterations=32,
        )
        return final, arrays

    def _now(self, tensor: tf.Tensor, values: dict) -> tf.Tensor:
        """What stands for a tensor of the first step in the present one."""
        key = tensor.ref()
        if key not in values and tensor.op.type == "Const":
            values[key] = copy(tensor.op, []).outputs[0]  # its value stays known, say of an axis
        elif key not in values and self._trained(tensor) and tensor.dtype != tf.resource:
            # Nobody asks for gradients for variables that are summed over examples.
            values[key] = tf.stop_gradient(tensor)
        return values.get(key, tensor)


def _zeros(like: tf.Tensor, length: tf.Tensor | int, batch_axes: BatchAxes) -> tf.Tensor:
    """[length, ...]."""
    layout, rank = batch_axes[like], like.shape.rank
    if not isinstance(layout, BatchAxis) or rank is None:
        raise NotReplayable
    if None in [n for axis, n in enumerate(like.shape) if axis != layout.axis]:
        raise NotReplayable  # the shape might be another one in each step
    zeros = tf.zeros(tf.concat([[length], tf.shape(like)], axis=0), like.dtype)
    return tf.ensure_shape(zeros, [None, *like.shape])


def _array(dtype: tf.DType, shape: tf.TensorShape, length: tf.Tensor | int) -> tf.TensorArray:
    return tf.TensorArray(dtype, length, clear_after_read=False, element_shape=shape)


def batch_axes_inside(
    body: tf.Graph, arguments: Sequence, outputs: Sequence[tf.Tensor], where: BatchAxes
) -> BatchAxes:
    """The layouts of what outputs of a body are computed from.

    Args:
      body: of an operation.
      arguments: the layouts of its arguments; `DataIndependent` if they do not depend on the data.
      outputs: some of its outputs.
      where: the layouts of the graph that the operation is in.
    """
    inside = where.inside(body, arguments)
    run(ancestors(outputs), inside)
    return inside


def opaque(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """The first value of a state, of which no more is known than of the later ones."""
    if tensor.dtype == tf.variant:
        return tf.identity(tensor)
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def split_states(body: tf.Graph, wanted: Iterable[int]) -> tuple[list[int], list[int]]:
    """Which loop variables stay the same, and which change and matter for some of the results."""
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


# They are told the size of their output, and would be told a wrong one with time beside the batch.
_SIZED = {"BroadcastTo", "Tile", "Conv2DBackpropInput", "Conv3DBackpropInputV2"}


def outputs_of(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of a read at which δ is needed."""
    return list(op.outputs) if op.type in CALLS | LOOPS else [op.outputs[0]]


def unfold(
    reads: Sequence[list[VariableUse]],
    handles: Sequence[tf.Tensor | None],
    variables: Sequence[tf.Variable],
    deltas: dict,
    batch_axes: BatchAxes,
) -> list[list[VariableUse]]:
    """Replaces reads by functions and loops by the reads inside of them.

    Guarantee: a body is run again only if that gives the same values: it draws no random numbers,
    and the variables that it reads were not written since. If that is not certain, or something
    in it is not understood, the read stays what it is, and no rule covers it.

    Args:
      reads: of each variable.
      handles: what stands for the variables in the graph.
      variables: the variables.
      deltas: gradients of the loss by reference to an output of a read; those of the new reads
        are entered.
      batch_axes: where the batch axis of each tensor is; that of copies is entered.

    Returns:
      The reads of each variable.
    """
    reads = list(reads)
    for op in dict.fromkeys(r.op for rs in reads for r in rs if r.op.type in CALLS | LOOPS):
        wanted = [k for k, t in enumerate(op.outputs) if deltas.get(t.ref()) is not None]
        replay = _Replay(batch_axes, [h for h in handles if h is not None])
        sites = {}
        try:
            if wanted:  # otherwise the loss does not depend on it
                with tf.name_scope(f"{layer_name(op)}/"):
                    sites = _sites(op, wanted, replay, deltas, batch_axes)
        except NotReplayable:
            continue
        paths = ancestors([t for t in op.inputs if replay.trained(t)])
        uses = consumers([*paths, *replay.ops])
        for k, (handle, variable) in enumerate(zip(handles, variables)):
            others = [r for r in reads[k] if r.op is not op]
            if len(others) < len(reads[k]):
                inside = find_uses(handle, variable.shape, uses, batch_axes, set())
                if all(r.op in sites for r in inside):
                    reads[k] = others + [r._replace(op=sites[r.op]) for r in inside]
    return reads


def _repeats(op: tf.Operation) -> bool:
    """Whether an operation would do the same if it ran now."""
    if any(has_effects(o) for g in bodies(op).values() for o in g.get_operations()):
        return False
    ops = op.graph.get_operations()
    later = set(ops[ops.index(op) + 1 :])
    handles = [t for t in op.inputs if t.dtype == tf.resource]
    return not any(c in later and has_effects(c) for t in handles for c in t.consumers())


def _sites(op, wanted, replay: _Replay, deltas: dict, batch_axes: BatchAxes) -> dict:
    """From the reads in a copy to the operations that stand for them; enters δ of those."""
    if not _repeats(op):
        raise NotReplayable
    outputs = replay.run(op, wanted)
    reads = [new for new in replay.ops if replay.is_read(new)]
    loops = {read: loop for loop in replay.loops for read in loop.zeros}
    if any(r.type not in RULES or (r in loops and r.type in _SIZED) for r in reads):
        raise NotReplayable
    found = tf.gradients(
        outputs,
        [loops[r].zeros[r] if r in loops else r.outputs[0] for r in reads],
        grad_ys=[deltas[op.outputs[k].ref()] for k in wanted],
    )
    sites = {}
    for read, delta in zip(reads, found):
        context = read
        if delta is not None:
            delta = tf.convert_to_tensor(delta)
            if read in loops:
                context, delta = _over_time(read, loops[read], delta, batch_axes)
        sites[read] = context
        deltas[context.outputs[0].ref()] = delta
    return sites


def _over_time(
    read: tf.Operation, loop: Loop, delta: tf.Tensor, batch_axes: BatchAxes
) -> tuple[tf.Operation, tf.Tensor]:
    """A read on what it reads in all steps, and δ at its output."""
    length = loop.length
    steps = Size(length) if isinstance(length, int) else Size(1, (f"{read.name}/steps",))
    stacks = [loop.stacks.get(t.ref()) for t in read.inputs]
    inputs = [
        t if stack is None else _merged(stack, steps, batch_axes, like=t)
        for t, stack in zip(read.inputs, stacks)
    ]
    context = copy(read, inputs)
    operations.apply(context, batch_axes)
    delta = _merged(delta, steps, batch_axes, like=read.outputs[0])
    if batch_axes[context.outputs[0]] != batch_axes[delta]:
        raise NotReplayable
    return context, delta


def _merged(stack: tf.Tensor, steps: Size, batch_axes: BatchAxes, like: tf.Tensor) -> tf.Tensor:
    """From [T, ...B, ...] to [...B·T, ...]: time as the inner part of the batch axis."""
    layout = batch_axes[like]
    axis, rank = layout.axis, like.shape.rank
    stack = tf.ensure_shape(stack, [steps.static, *like.shape])
    order = [*range(1, axis + 2), 0, *range(axis + 2, rank + 1)]
    length, *shape = static_or_dynamic_shape(stack)
    shape[axis] *= length
    merged = tf.reshape(tf.transpose(stack, order), shape)
    batch_axes.set(merged, layout._replace(inner=layout.inner.times(steps)), True)
    return merged


class _Replay:
    """Copies of what one operation with a body computes, in the graph of the step.

    Calls are dissolved into their operations, and loops are built again. The first step of each
    loop is copied before it as well: never run but for its shapes, it shows what a step does, and
    what in it is the same in all steps.

    Attributes:
      ops: the copies.
      loops: the loops.
    """

    def __init__(self, batch_axes: BatchAxes, handles: Iterable[tf.Tensor]):
        """Takes the layouts of the graph of the step, and the handles of variables in it."""
        self.ops: list[tf.Operation] = []
        self.loops: list[Loop] = []
        self._layouts = batch_axes
        self._handles = {h.ref() for h in handles}
        self._trained: set = set()
        self._in_loop = False

    def run(self, op: tf.Operation, wanted: Sequence[int]) -> list[tf.Tensor]:
        """Computes some outputs of an operation of the graph of the step again."""
        for tensor in op.inputs:
            sources = {t.ref() for o in ancestors([tensor]) for t in o.outputs}
            if self._handles & sources and not self._has_batch(tensor):
                self._trained.add(tensor.ref())
        found = self._run(op, list(op.inputs), self._layouts, wanted)
        return [found[k] for k in wanted]

    def trained(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is made from variables alone."""
        return tensor.ref() in self._trained

    def is_read(self, op: tf.Operation) -> bool:
        """Whether variables meet the data in a copy."""
        return any(map(self._has_batch, op.outputs)) and any(map(self.trained, op.inputs))

    def _has_batch(self, tensor: tf.Tensor) -> bool:
        return isinstance(self._layouts[tensor], BatchAxis)

    def _run(self, op, inputs, where: BatchAxes, wanted) -> dict[int, tf.Tensor]:
        """Outputs of a call or a loop on other inputs; `where` has the layouts of the original."""
        if op.type in LOOPS:
            return self._loop(op, inputs, where, wanted)
        (body,) = bodies(op).values()
        outputs = [body.outputs[k] for k in wanted]
        inside = batch_axes_inside(body, [where.value(t) for t in op.inputs], outputs, where)
        values = {t.ref(): new for t, new in zip(body.inputs, inputs)}
        self._inline(outputs, values, inside)
        return {k: values[t.ref()] for k, t in zip(wanted, outputs)}

    def _inline(self, wanted: Sequence[tf.Tensor], values: dict, where: BatchAxes) -> None:
        """Copies what tensors of a body are computed from; enters the copies into `values`."""
        ops = ancestors(wanted)
        used = {t.ref() for t in wanted} | {t.ref() for op in ops for t in op.inputs}
        for op in ops:
            if all(t.ref() in values for t in op.outputs):
                continue
            # A loop has inputs for the backward pass, which it was given later and we do not need.
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
        """Notes the layout of a copy, and whether it is made from variables alone."""
        self._layouts.set(new, where[old], where.depends(old))
        if not self._has_batch(new) and new.op.type not in SHAPE_ONLY:
            if any(map(self.trained, new.op.inputs)):
                self._trained.add(new.ref())

    def _loop(self, op, inputs, where: BatchAxes, wanted) -> dict[int, tf.Tensor]:
        if self._in_loop or any(where[t] == Rows() for t in [*op.inputs, *op.outputs]):
            raise NotReplayable  # a loop in a loop, or over the examples themselves
        graphs = bodies(op)
        body, condition = graphs["body"], graphs["cond"]
        same, changing = split_states(body, wanted)
        start = [inputs[k] for k in changing]
        if any(t is None or self.trained(t) for t in start):
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
        reads = filter(self.is_read, step.ops)
        loop = Loop(step, reads, start, length, self._layouts, self.trained)
        self.loops.append(loop)
        found = dict(zip(changing, loop.final))
        return {k: found[k] if k in found else inputs[k] for k in wanted}

    def _length(self, condition, body, inputs, same: Sequence[int]) -> tf.Tensor | int:
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
            if one is None or not one.dtype.is_integer or static_value(one) != 1:
                raise NotReplayable
            self._inline([limit], known, BatchAxes(None))
            end, start = (self._number(t) for t in (known[limit.ref()], inputs[k]))
            lengths.append(end - start)
        if all(isinstance(n, int) for n in lengths):
            return max(0, min(lengths))
        return tf.maximum(0, tf.reduce_min(tf.stack(lengths)))

    def _number(self, tensor: tf.Tensor) -> tf.Tensor | int:
        size = evaluate(tensor, self._layouts.size)[0]
        known = None if size is None else size.static
        return tf.cast(tensor, tf.int32) if known is None else known
