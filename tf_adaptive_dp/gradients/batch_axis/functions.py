"""Follows the batch axis into the bodies of functions, branches and loops."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    BRANCHES,
    CALLS,
    LOOPS,
    ancestors,
    behind_identities,
    bodies,
    static_value,
)
from tf_adaptive_dp.gradients.batch_axis.custom_gradients import refuse_custom_gradients
from tf_adaptive_dp.gradients.batch_axis.operations import register_layout, run
from tf_adaptive_dp.gradients.batch_axis.ragged import TO_LONGEST
from tf_adaptive_dp.gradients.batch_axis.sizes import Size
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    CrossExample,
    DataIndependent,
    Layout,
    OneExample,
    Rows,
    Value,
)

_BY_PLACE = "decides by where in the batch an example is"


def of_function(
    batch_axes: BatchAxes,
    graph: tf.Graph,
    arguments: Sequence[Value],
    call: tf.Operation,
    role: str,
    given: Sequence[tf.Tensor | None] = (),
    counters: Sequence[tf.Tensor] = (),
    is_loop: bool = False,
) -> list[Value]:
    """The layouts of a function's outputs; `DataIndependent` for those without data.

    Args:
      batch_axes: the batch axes of the graph that contains the call.
      graph: the body of the function.
      arguments: the layouts of its arguments.
      call: the operation that runs it.
      role: which of the functions of that operation it is.
      given: see `BatchAxes.inside`.
      counters: see `BatchAxes.inside`.
      is_loop: see `BatchAxes.inside`.
    """
    inside = batch_axes.inside(graph, arguments, given, counters, is_loop)
    batch_axes.remember(call, role, graph, inside)
    ops = ancestors(graph.outputs)
    run(ops, inside)
    with graph.as_default():
        refuse_custom_gradients(ops, inside)
    return [_leaving(t, inside) for t in graph.outputs]


def _leaving(tensor: tf.Tensor, inside: BatchAxes) -> Value:
    """The layout of an output; the index of an example is known only inside of the function."""
    value = inside.value(tensor)
    if isinstance(value, OneExample) and value.loop is tensor.graph:
        return CrossExample(tensor.op, "takes what belongs to one example out of its iteration")
    return value


def _values(op: tf.Operation, batch_axes: BatchAxes) -> list[Value]:
    return [batch_axes.value(t) for t in op.inputs]


def join(op: tf.Operation, one: Value, other: Value) -> Value:
    """The layout of a value that comes from either of two places."""
    publics = [v for v in (one, other) if isinstance(v, DataIndependent)]
    tied = frozenset().union(*(v.tied for v in publics))
    a = one.layout if isinstance(one, DataIndependent) else one
    b = other.layout if isinstance(other, DataIndependent) else other
    if a != b and Rows() in (a, b):
        a, b = _unless_rows(op, one), _unless_rows(op, other)
    if isinstance(a, CrossExample) or isinstance(b, CrossExample):
        joined = a if isinstance(a, CrossExample) else b
    elif a is None or b is None or a == b:
        joined = b if a is None else a
    else:
        joined = CrossExample(op, "has examples on one axis first and on another later")
    if len(publics) == 2:
        return DataIndependent(joined, tied)
    return CrossExample(op, _BY_PLACE, is_certain=False) if _is_told(joined, tied) else joined


def _unless_rows(op: tf.Operation, value: Value) -> Layout:
    """The layout of one of two lists that differ; a list without data can still become another."""
    if isinstance(value, DataIndependent):
        return None if value.layout == Rows() else value.layout
    return (
        CrossExample(op, "has a list of examples, and another one later")
        if value == Rows()
        else value
    )


def _is_told(value: Value, tied: frozenset[tf.Graph]) -> bool:
    """Whether a choice that changes from iteration to iteration reveals the example's place."""
    return value.loop in tied if isinstance(value, OneExample) else value == Rows() and bool(tied)


def _chosen(op: tf.Operation, value: Value, choice: Value) -> Value:
    """The layout of a value that a choice selects: a branch, or the length of a loop."""
    if isinstance(choice, DataIndependent):
        if isinstance(value, DataIndependent):
            return value._replace(tied=value.tied | choice.tied)
        return (
            CrossExample(op, _BY_PLACE, is_certain=False) if _is_told(value, choice.tied) else value
        )
    if isinstance(value, DataIndependent):
        return (
            CrossExample(op, _BY_PLACE, is_certain=False)
            if _is_told(choice, value.tied)
            else choice
        )
    return value if value == choice else CrossExample(op, "lets one example decide for other ones")


@register_layout(*CALLS)
def call(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """A `tf.function` within the step."""
    ((role, body),) = bodies(op).items()
    return of_function(batch_axes, body, _values(op, batch_axes), op, role, op.inputs)


@register_layout(*BRANCHES)
def branches(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """One of several functions; the choice must not depend on the data of other examples."""
    choice = batch_axes.value(op.inputs[0])
    if not isinstance(choice, (DataIndependent, OneExample)):
        return CrossExample(op, "takes one decision for all examples, from the data")
    found: list[Value] = []
    for role, branch in bodies(op).items():
        values, given = _values(op, batch_axes)[1:], op.inputs[1:]
        one = of_function(batch_axes, branch, values, op, role, given)
        found = [join(op, a, b) for a, b in zip(found, one)] if found else one
    return [_chosen(op, value, choice) for value in found]


@register_layout(*LOOPS)
def loop(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """A loop; its length must not depend on the data of other examples."""
    state = _values(op, batch_axes)
    graphs = bodies(op)
    body, condition = graphs["body"], graphs["cond"]
    same = [is_passed_on(body, k) for k in range(len(state))]
    given = [t if fixed else None for t, fixed in zip(op.inputs, same)]
    counters = _counters_of_examples(op, body, condition, given, batch_axes)
    while True:  # each pass makes a layout known, mixed or dependent, or is the last
        inside = [v if same[k] else _changing(v, body, k) for k, v in enumerate(state)]
        found = of_function(batch_axes, body, inside, op, "body", given, counters, is_loop=True)
        ends = [_after(value, body, k) for k, value in enumerate(found)]
        after = [join(op, *_by_data(a, b)) for a, b in zip(state, ends)]
        if after == state:
            break
        state = after
    (choice,) = of_function(batch_axes, condition, state, op, "cond", given)
    if isinstance(choice, CrossExample) and choice.why == TO_LONGEST:
        return choice  # the loop visits the words of a batch, as that of a recurrent layer does
    if not isinstance(choice, (DataIndependent, OneExample)):
        mixed = (v for v in _values(op, batch_axes) if isinstance(v, CrossExample))
        return next(mixed, CrossExample(op, "is a loop whose length depends on the data"))
    return [v if fixed else _chosen(op, v, choice) for v, fixed in zip(state, same)]


def is_passed_on(body: tf.Graph, k: int) -> bool:
    """Whether loop variable `k` keeps its value."""
    return behind_identities(body.outputs[k]) is body.inputs[k]


def _changing(value: Value, body: tf.Graph, k: int) -> Value:
    """The layout of a loop variable in the body; the elements of a list have their own."""
    if not isinstance(value, DataIndependent) or body.inputs[k].dtype == tf.variant:
        return value
    return value._replace(tied=value.tied | {body})


def _after(value: Value, body: tf.Graph, k: int) -> Value:
    """The layout of a loop variable after the loop: its last value is the same for all examples."""
    if not isinstance(value, DataIndependent) or body.inputs[k].dtype == tf.variant:
        return value
    return value._replace(tied=value.tied - {body})


def _by_data(one: Value, other: Value) -> tuple[Value, Value]:
    """Two values of a loop variable, without the batch axis of a public one if the other has data.

    Zeros for 5 B rows may belong to the examples in blocks of 5 or 5 times in turn: only the data
    tell. `row_ties` then demands that the public value is the same for all examples on that axis.
    """
    return _unless_placed_by(other, one), _unless_placed_by(one, other)


def _unless_placed_by(data: Value, value: Value) -> Value:
    """A value, or a public one without its batch axis if the other value has one from the data."""
    if not isinstance(value, DataIndependent) or not isinstance(value.layout, BatchAxis):
        return value
    return value._replace(layout=None) if isinstance(data, BatchAxis) else value


def _counters_of_examples(
    op: tf.Operation,
    body: tf.Graph,
    condition: tf.Graph,
    given: Sequence[tf.Tensor | None],
    batch_axes: BatchAxes,
) -> list[tf.Tensor]:
    """The loop variables that count from 0 to B − 1, if the loop runs once for each example."""
    counters = []
    for counter, limit in comparisons(condition.outputs[0]) or ():
        places = [k for k, t in enumerate(condition.inputs) if t is counter]
        if not places or not _counts_up(op, body, places[0], given):
            return []
        limit = behind_identities(limit)
        outside = [t for t, i in zip(given, condition.inputs) if i is limit and t is not None]
        number = static_value(limit)
        sizes = [Size(int(number))] if number is not None else []
        if batch_axes.batch_size not in [*sizes, *(batch_axes.entries(t)[0] for t in outside)]:
            return []
        counters.append(body.inputs[places[0]])
    return counters


def comparisons(condition: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]] | None:
    """What the condition of a loop compares, if it only wants counters to be below limits.

    Returns:
      Pairs (counter, limit); `None` for any other condition.
    """
    op = behind_identities(condition).op
    if op.type == "Less":
        return [(behind_identities(op.inputs[0]), op.inputs[1])]
    if op.type != "LogicalAnd":
        return None
    left, right = map(comparisons, op.inputs)
    return None if left is None or right is None else left + right


def increment(body: tf.Graph, k: int) -> tf.Tensor | None:
    """What each iteration adds to loop variable `k`, if it does nothing else to it."""
    op = behind_identities(body.outputs[k]).op
    terms = [behind_identities(t) for t in op.inputs]
    if op.type not in ("Add", "AddV2") or all(t is not body.inputs[k] for t in terms):
        return None
    return terms[0] if terms[1] is body.inputs[k] else terms[1]


def _counts_up(op: tf.Operation, body: tf.Graph, k: int, given: Sequence[tf.Tensor | None]) -> bool:
    """Whether a loop variable starts at 0 and grows by 1 in each iteration."""
    step = increment(body, k)
    if step is None or static_value(op.inputs[k]) != 0:
        return False
    outside = [t for t, i in zip(given, body.inputs) if i is step and t is not None]
    return static_value(outside[0] if outside else step) == 1
