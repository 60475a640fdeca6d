"""Follows the batch axis through a graph, and finds what mixes examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import ancestors, place_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis import (  # noqa: F401 - they register their rules
    functions,
    gathers,
    lists,
    operations,
    ragged,
    reshaping,
)
from tf_adaptive_dp.gradients.batch_axis.advice import advice
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    ELEMENTS,
    SHAPE_ONLY,
    holds_sizes,
)
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    CrossExample,
)
from tf_adaptive_dp.gradients.released import is_released

_SOURCES = ("Placeholder", *sorted(ELEMENTS))
_OPAQUE_TYPES = (tf.resource, tf.variant)
# Why data has no batch axis.
NO_BATCH_AXIS = "does not have the batch as axis 0, has no static shape, or is sparse or ragged"


def feeds(ops: Iterable[tf.Operation], graph: tf.Graph) -> list[tf.Tensor]:
    """Finds the tensors through which data enters a graph.

    Arguments are data, except for scalars. A tensor captured from an outer function is data if it
    is computed from data there; one captured from outside of all functions is constant. Everything
    in an element of a data set is data: a scalar may have been computed from the batch, and a
    sparse or ragged batch is a `variant`.

    Args:
      ops: operations of the graph.
      graph: the graph.
    """
    captured = {internal.ref(): external for external, internal in graphs.captures(graph)}

    def is_data(tensor: tf.Tensor, of_element: bool) -> bool:
        if tensor.ref() in captured:
            return tensor.dtype not in _OPAQUE_TYPES and comes_from_data(captured[tensor.ref()])
        if of_element:
            return tensor.dtype != tf.resource
        return tensor.dtype not in _OPAQUE_TYPES and tensor.shape.rank != 0

    found = []
    for op in ops:
        of_element = is_element(op)
        if of_element or op.type == "Placeholder":
            found += [t for t in op.outputs if is_data(t, of_element)]
    return found


def comes_from_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from the data, other than by a private release.

    How large a batch is does not count as data, as in `hidden.refuse_state`.
    """
    seen, stack = set(), [(tensor, False)]
    while stack:
        tensor, only_sizes = stack.pop()
        known = only_sizes and tensor.shape.is_fully_defined()
        if not graphs.is_symbolic(tensor) or known or is_released(tensor):
            continue
        if (tensor.ref(), only_sizes) in seen:
            continue
        seen.add((tensor.ref(), only_sizes))
        if tensor.op.type in SHAPE_ONLY:
            stack += [(t, True) for t in tensor.op.inputs]
        elif not only_sizes:
            if feeds([tensor.op], tensor.graph):
                return True
            stack += [(t, False) for t in tensor.op.inputs]
        elif tensor.op.type == "Placeholder":
            captured = {inner.ref(): outer for outer, inner in graphs.captures(tensor.graph)}
            stack += [(captured[tensor.ref()], True)] if tensor.ref() in captured else []
        elif not is_element(tensor.op):
            stack += holds_sizes(tensor.op)
    return False


def _takes_an_element(op: tf.Operation) -> bool:
    """Whether a branch takes a batch from a distributed data set, or an empty one at its end."""
    return op.type in ("If", "StatelessIf") and any(map(_is_next, op.inputs))


def _is_next(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "IteratorGetNextAsOptional"


def _computes_more(op: tf.Operation) -> bool:
    """Whether such a branch takes other data too, with which it may mix the element."""
    return _takes_an_element(op) and any(
        comes_from_data(t) for t in op.inputs if not _is_next(t) and t.dtype != tf.resource
    )


def is_element(op: tf.Operation) -> bool:
    """Whether an operation returns an element of a data set, not an optional of the step's own."""
    if op.type == "OptionalGetValue":
        return all(o.type != "OptionalFromValue" for o in ancestors(op.inputs))
    return op.type in ELEMENTS or _takes_an_element(op)


def of_this_replica(tensors: Sequence[tf.Tensor], loss: tf.Tensor) -> list[tf.Tensor]:
    """Leaves out the inputs of a step that belong to the batches of other replicas.

    One graph receives the batches of all replicas. Those inputs that a loss reads show which batch
    is its own. Where they do not, nothing is left out.

    Args:
      tensors: inputs of the step; this replica may ignore those that are its own.
      loss: that of this replica.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return list(tensors)
    read = {t.ref() for op in ancestors([loss]) for t in op.inputs}
    num_parts = len(strategy.extended.worker_devices)
    by_replica = graphs.parts_of_replicas(loss.graph)
    elements: dict[tuple, list[list[tf.Tensor]]] = {}
    for op in loss.graph.get_operations():
        outputs = list(op.outputs)
        if _takes_an_element(op) and len(outputs) % num_parts == 0:
            # The parts of an element follow each other, and each is there for every replica.
            by_replica.append([outputs[k::num_parts] for k in range(num_parts)])
        elif is_element(op):  # one operation per replica
            alike = (op.type, *((t.dtype, t.shape.rank) for t in outputs))
            elements.setdefault(alike, []).append(outputs)

    def is_read(part: Sequence[tf.Tensor]) -> bool:
        return any(t.ref() in read for t in part)

    others: list[tf.Tensor] = []
    own = {k for parts in by_replica for k, part in enumerate(parts) if is_read(part)}
    if len(own) == 1:
        for parts in by_replica:
            others += (t for k, part in enumerate(parts) if k not in own for t in part)
    for parts in elements.values():
        if any(map(is_read, parts)):
            others += (t for part in parts if not is_read(part) for t in part)
    left_out = {t.ref() for t in others}
    return [t for t in tensors if t.ref() not in left_out]


def _axis_0(tensor: tf.Tensor) -> int | None:
    return tensor.shape[0] if tensor.shape.rank else None


def follow(loss: tf.Tensor) -> tuple[BatchAxes, bool]:
    """Finds the batch axes of everything that a loss is computed from, and refuses nothing.

    Inputs of the step (arguments of the `tf.function`, elements of a data set) count as data with
    the batch as axis 0, and scalar arguments as settings. What the step captures from outside
    counts as public constants, unless there are no inputs.

    Args:
      loss: symbolic, of any shape.

    Returns:
      The batch axes, and whether it is a batch of one example.
    """
    batch_axes, ops, is_one = enter_sources(loss)
    operations.run(ops, batch_axes)
    return batch_axes, is_one


def enter_sources(loss: tf.Tensor) -> tuple[BatchAxes, list[tf.Operation], bool]:
    """Finds the batch axes of the inputs of the step, and the operations from there to the loss.

    Args:
      loss: symbolic, of any shape.

    Returns:
      Both, and whether it is a batch of one example.
    """
    ops = ancestors([loss])
    sources = feeds(ops, loss.graph)
    if not sources:
        sources = [
            t
            for op in ops
            if op.type in (*_SOURCES, "Const")
            for t in op.outputs
            if t.dtype not in _OPAQUE_TYPES and t.shape.rank and t.shape[0] == _axis_0(loss)
        ]
    sizes = [_axis_0(t) for t in sources if t.shape.rank != 0]
    size = next((n for n in (_axis_0(loss), *sizes) if n is not None), None)
    # A size that only the loss has proves nothing about the data.
    known = None if None in sizes else size
    batch_axes = BatchAxes(known)
    parts = {t.ref() for t in graphs.parts_of_composites(loss.graph)}
    parts |= {t.ref() for op in ops if is_element(op) for t in graphs.parts_in_element(op)}
    for tensor in sources:
        fits = tensor.shape.rank and tensor.shape[0] in (None, size)
        fits = fits and tensor.ref() not in parts and not _computes_more(tensor.op)
        batch_axes.set(
            tensor, BatchAxis() if fits else CrossExample(tensor.op, NO_BATCH_AXIS), dependent=True
        )
    # Beside other replicas, an example is not alone: they may exchange activations.
    alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return batch_axes, ops, alone and known == 1 and set(sizes) == {1}


def refuse(loss: tf.Tensor, batch_axes: BatchAxes) -> None:
    """Refuses a loss vector unless entry i belongs to example i.

    Args:
      loss: [B], symbolic.
      batch_axes: the result of `follow`.

    Raises:
      NotPrivateError: if entry i of the loss may depend on more than example i. The message names
        the operation that mixes examples, its layer and a fix.
    """
    layout = batch_axes[loss]
    if not batch_axes.depends(loss):
        refuse_independent(loss)
    if isinstance(layout, CrossExample):
        refuse_mixed(layout)
    if layout != BatchAxis():
        raise NotPrivateError(
            "The entries of the loss are not the examples of the batch. Received: a loss vector "
            f"{loss.name} with {layout}. Return one entry per example, in their order."
        )


def mixed_rows(batch: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> CrossExample | None:
    """Finds what mixes the rows of a batch in a function that changes it, such as one of `map`.

    Scalars count as public. It finds what mixes for certain: nothing of what the search does not
    know, such as Python or unknown shapes, or of what has no batch axis, such as ragged rows.

    Args:
      batch: the arguments of the function.
      results: what it returns, each with one row for each of the batch, or independent of it.

    Returns:
      An operation of the function, and why; or `None`.
    """
    sizes = [_axis_0(t) for t in batch if t.shape.rank]
    batch_axes = BatchAxes(sizes[0] if len(set(sizes)) == 1 else None)
    for tensor in batch:
        if tensor.dtype in _OPAQUE_TYPES:
            batch_axes.set(
                tensor,
                CrossExample(tensor.op, "has unknown rows", is_certain=False),
                dependent=True,
            )
        elif tensor.shape.rank != 0:
            batch_axes.set(tensor, BatchAxis(), dependent=True)
    ops = ancestors(results)
    operations.run(ops, batch_axes)
    for tensor in results:
        layout = batch_axes[tensor]
        if not batch_axes.depends(tensor):
            continue
        if isinstance(layout, CrossExample) and layout.is_certain:
            return layout
        if isinstance(layout, BatchAxis) and layout != BatchAxis():
            return CrossExample(tensor.op, "returns other rows than those of the batch")
    padded = [
        op for op in ops if op.type == "RaggedTensorToTensor" and batch_axes.depends(op.outputs[0])
    ]
    return next(
        (CrossExample(op, ragged.TO_LONGEST) for op in padded if ragged.pads_to_longest(op)), None
    )


def has_other_rows(loss: tf.Tensor, batch_axes: BatchAxes) -> tf.Tensor | None:
    """Whether the loss has a different number of rows than the data, seen when the step runs.

    While tracing, an axis of unknown length that meets one of N rows counts as one of N. If it
    turns out to have length 1, the only example is repeated N times.

    Args:
      loss: [B], symbolic, accepted by `refuse`.
      batch_axes: the result of `follow`.

    Returns:
      A bool scalar; `None` if all sizes are known while tracing.
    """
    ops = ancestors([loss], stop=lambda tensor: tensor.op.type in SHAPE_ONLY)
    # One element may hold the batches of all replicas; this loss reads its own.
    read = {t.ref() for op in ops for t in op.inputs}
    rows = [
        tf.shape(tensor)[0]
        for tensor in feeds(ops, loss.graph)
        if tensor.ref() in read and batch_axes[tensor] == BatchAxis()
        if None in (tensor.shape[0], loss.shape[0])
    ]
    return tf.reduce_any(tf.stack(rows) != tf.shape(loss)[0]) if rows else None


def refuse_independent(loss: tf.Tensor) -> NoReturn:
    """Raises the error for a loss that depends on no data."""
    raise NotPrivateError(
        "The loss does not depend on any input of the step, so the library cannot tell the "
        f"examples apart. Received: {loss.name}. Pass the batch to the `tf.function` "
        "as arguments, or read it from a data set."
    )


def refuse_mixed(layout: CrossExample) -> NoReturn:
    """Raises the error for examples that mix."""
    raise NotPrivateError(
        "Examples in a batch affect each other, so none has a gradient of its own. Received: "
        f"{layout.op.name} ({layout.op.type}) {place_of(layout.op)}, which {layout.why}. "
        f"{advice(layout.op, layout.why)}"
    )
