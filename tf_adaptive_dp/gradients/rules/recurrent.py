"""Recurrent layers, and whatever else hides its reads of variables in a function or a loop.

A read inside of a loop is a product x_t W in each step. The loop is run once more, with zeros ε_t
added to the products and the x_t kept; one backward pass gives the gradients for all ε_t, which
are the δ_t of the products. A copy of the product on all x_t, with time beside the batch, then
stands for the read, and the rule for its type answers as for a layer that is applied to each
element of a sequence. A read inside of a function is one after all, in a copy of its body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_adaptive_dp.gradients.graph import ancestors, layer_name
from tf_adaptive_dp.gradients.layout import operations
from tf_adaptive_dp.gradients.layout.analysis import Layouts
from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Rows, static_or_dynamic_shape
from tf_adaptive_dp.gradients.layout.names import SHAPE_ONLY
from tf_adaptive_dp.gradients.layout.sizes import Size, evaluate, static_value
from tf_adaptive_dp.gradients.reads import Read, consumers, find_reads
from tf_adaptive_dp.gradients.rules.loops import (
    CALLS,
    LOOPS,
    Loop,
    NotReplayable,
    Step,
    bodies,
    comparisons,
    copy,
    has_effects,
    increment,
    layouts_inside,
    opaque,
    split_states,
)
from tf_adaptive_dp.gradients.rules.registry import RULES

# They are told the size of their output, and would be told a wrong one with time beside the batch.
_SIZED = {"BroadcastTo", "Tile", "Conv2DBackpropInput", "Conv3DBackpropInputV2"}


def outputs_of(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of a read at which δ is needed."""
    return list(op.outputs) if op.type in CALLS | LOOPS else [op.outputs[0]]


def unfold(
    reads: Sequence[list[Read]],
    handles: Sequence[tf.Tensor | None],
    variables: Sequence[tf.Variable],
    deltas: dict,
    layouts: Layouts,
) -> list[list[Read]]:
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
      layouts: where the batch axis of each tensor is; that of copies is entered.

    Returns:
      The reads of each variable.
    """
    reads = list(reads)
    for op in dict.fromkeys(r.op for rs in reads for r in rs if r.op.type in CALLS | LOOPS):
        wanted = [k for k, t in enumerate(op.outputs) if deltas.get(t.ref()) is not None]
        replay = _Replay(layouts, [h for h in handles if h is not None])
        sites = {}
        try:
            if wanted:  # otherwise the loss does not depend on it
                with tf.name_scope(f"{layer_name(op)}/"):
                    sites = _sites(op, wanted, replay, deltas, layouts)
        except NotReplayable:
            continue
        paths = ancestors([t for t in op.inputs if replay.trained(t)])
        uses = consumers([*paths, *replay.ops])
        for k, (handle, variable) in enumerate(zip(handles, variables)):
            others = [r for r in reads[k] if r.op is not op]
            if len(others) < len(reads[k]):
                inside = find_reads(handle, variable.shape, uses, layouts, set())
                if all(r.op in sites for r in inside):
                    reads[k] = others + [r._replace(op=sites[r.op]) for r in inside]
    return reads


def _repeats(op: tf.Operation) -> bool:
    """Whether an operation would do the same if it ran now."""
    if any(has_effects(o) for g in bodies(op) for o in g.get_operations()):
        return False
    ops = op.graph.get_operations()
    later = set(ops[ops.index(op) + 1 :])
    handles = [t for t in op.inputs if t.dtype == tf.resource]
    return not any(c in later and has_effects(c) for t in handles for c in t.consumers())


def _sites(op, wanted, replay: _Replay, deltas: dict, layouts: Layouts) -> dict:
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
        site = read
        if delta is not None:
            delta = tf.convert_to_tensor(delta)
            if read in loops:
                site, delta = _over_time(read, loops[read], delta, layouts)
        sites[read] = site
        deltas[site.outputs[0].ref()] = delta
    return sites


def _over_time(
    read: tf.Operation, loop: Loop, delta: tf.Tensor, layouts: Layouts
) -> tuple[tf.Operation, tf.Tensor]:
    """A read on what it reads in all steps, and δ at its output."""
    length = loop.length
    steps = Size(length) if isinstance(length, int) else Size(1, (f"{read.name}/steps",))
    stacks = [loop.stacks.get(t.ref()) for t in read.inputs]
    inputs = [
        t if stack is None else _merged(stack, steps, layouts, like=t)
        for t, stack in zip(read.inputs, stacks)
    ]
    site = copy(read, inputs)
    operations.apply(site, layouts)
    delta = _merged(delta, steps, layouts, like=read.outputs[0])
    if layouts[site.outputs[0]] != layouts[delta]:
        raise NotReplayable
    return site, delta


def _merged(stack: tf.Tensor, steps: Size, layouts: Layouts, like: tf.Tensor) -> tf.Tensor:
    """From [T, ...B, ...] to [...B·T, ...]: time as the inner part of the batch axis."""
    layout = layouts[like]
    axis, rank = layout.axis, like.shape.rank
    stack = tf.ensure_shape(stack, [steps.static, *like.shape])
    order = [*range(1, axis + 2), 0, *range(axis + 2, rank + 1)]
    length, *shape = static_or_dynamic_shape(stack)
    shape[axis] *= length
    merged = tf.reshape(tf.transpose(stack, order), shape)
    layouts.set(merged, layout._replace(inner=layout.inner.times(steps)), True)
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

    def __init__(self, layouts: Layouts, handles: Iterable[tf.Tensor]):
        """Takes the layouts of the graph of the step, and the handles of variables in it."""
        self.ops: list[tf.Operation] = []
        self.loops: list[Loop] = []
        self._layouts = layouts
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

    def _run(self, op, inputs, where: Layouts, wanted) -> dict[int, tf.Tensor]:
        """Outputs of a call or a loop on other inputs; `where` has the layouts of the original."""
        if op.type in LOOPS:
            return self._loop(op, inputs, where, wanted)
        (body,) = bodies(op)
        outputs = [body.outputs[k] for k in wanted]
        inside = layouts_inside(body, [where.value(t) for t in op.inputs], outputs, where)
        values = {t.ref(): new for t, new in zip(body.inputs, inputs)}
        self._inline(outputs, values, inside)
        return {k: values[t.ref()] for k, t in zip(wanted, outputs)}

    def _inline(self, wanted: Sequence[tf.Tensor], values: dict, where: Layouts) -> None:
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

    def _enter(self, new: tf.Tensor, old: tf.Tensor, where: Layouts) -> None:
        """Notes the layout of a copy, and whether it is made from variables alone."""
        self._layouts.set(new, where[old], where.depends(old))
        if not self._has_batch(new) and new.op.type not in SHAPE_ONLY:
            if any(map(self.trained, new.op.inputs)):
                self._trained.add(new.ref())

    def _loop(self, op, inputs, where: Layouts, wanted) -> dict[int, tf.Tensor]:
        if self._in_loop or any(where[t] == Rows() for t in [*op.inputs, *op.outputs]):
            raise NotReplayable  # a loop in a loop, or over the examples themselves
        body, condition = bodies(op)
        same, changing = split_states(body, wanted)
        start = [inputs[k] for k in changing]
        if any(t is None or self.trained(t) for t in start):
            raise NotReplayable
        length = self._length(condition, body, inputs, same)
        outputs = [body.outputs[k] for k in changing]
        inside = layouts_inside(body, [where.value(t) for t in op.outputs], outputs, where)
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
        lengths = []
        for counter, limit in comparisons(condition.outputs[0]):
            k = next((k for k, t in enumerate(condition.inputs) if t is counter), None)
            one = None if k is None else increment(body, k)
            place = next((k for k in same if body.inputs[k] is one), None)
            one = one if place is None else inputs[place]
            if one is None or not one.dtype.is_integer or static_value(one) != 1:
                raise NotReplayable
            self._inline([limit], known, Layouts(None))
            end, start = (self._number(t) for t in (known[limit.ref()], inputs[k]))
            lengths.append(end - start)
        if all(isinstance(n, int) for n in lengths):
            return max(0, min(lengths))
        return tf.maximum(0, tf.reduce_min(tf.stack(lengths)))

    def _number(self, tensor: tf.Tensor) -> tf.Tensor | int:
        size = evaluate(tensor, self._layouts.size)[0]
        known = None if size is None else size.static
        return tf.cast(tensor, tf.int32) if known is None else known
