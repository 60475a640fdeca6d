"""What lists of tensors (`tf.TensorArray`) do to the batch axis.

The layout of a list is that of its elements, which must all have the same one. Two layouts occur in
loops over the examples only: `Rows` for a list whose element i belongs to example i, and
`OneExample` for a list that belongs to the example of the current iteration. The positions and the
number of elements must not depend on the data of other examples.
"""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.operations import (
    LayoutRule,
    one_example,
    register_layout,
    unless_cross_example,
)
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    CrossExample,
    DataIndependent,
    OneExample,
    Rows,
    Value,
)

_BY_INDEX = "picks elements by index"
_BESIDE = "puts examples beside other ones"


def _unless_one_example(rule: LayoutRule) -> LayoutRule:
    """Lets `rule` handle only what is not mixed already and does not belong to one example."""

    def wrapped(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
        if _of_one_example(op, batch_axes):
            return one_example(op, batch_axes)
        return rule(op, batch_axes)

    return unless_cross_example(wrapped)


def _of_one_example(op: tf.Operation, batch_axes: BatchAxes) -> bool:
    """Whether data of one example of a loop goes in, and no list with the data of all."""
    places = [batch_axes[t] for t in op.inputs if batch_axes.depends(t)]
    return Rows() not in places and any(isinstance(p, OneExample) for p in places)


@register_layout("TensorListReserve")
@_unless_one_example
def reserve(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """An empty list, with room for one element per example or for another number."""
    if any(map(batch_axes.depends, op.inputs)):
        return CrossExample(op, "has a length that depends on the data")
    return Rows() if batch_axes.entries(op.inputs[1])[0] == batch_axes.batch_size else None


@register_layout("TensorListFromTensor")
@_unless_one_example
def from_tensor(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Splits axis 0, such as that of time. If axis 0 is the batch, each element is an example."""
    layout = batch_axes[op.inputs[0]]
    if layout == BatchAxis() and batch_axes.depends(op.inputs[0]):
        return Rows()
    if not isinstance(layout, BatchAxis) or layout.axis == 0:
        return CrossExample(op, "takes the batch apart")
    return layout.at(layout.axis - 1)


@register_layout("TensorListStack", "TensorListGather")
@_unless_one_example
def to_tensor(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """All elements, or those at public indices, on a new axis 0."""
    layout, stacks = batch_axes[op.inputs[0]], op.type == "TensorListStack"
    if not any(map(batch_axes.depends, op.inputs)):
        has_batch = stacks and layout == Rows() and batch_axes.batch_size.unknowns
        return BatchAxis() if has_batch else None
    if stacks and layout == Rows() and not batch_axes.depends(op.inputs[1]):
        return BatchAxis()
    if not isinstance(layout, BatchAxis) or any(map(batch_axes.depends, op.inputs[1:])):
        return CrossExample(op, _BY_INDEX)
    return layout.at(layout.axis + 1)


@register_layout("TensorListGetItem", "TensorListResize", "TensorListPopBack")
@_unless_one_example
def take(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """An element, or a list of fewer or more of them."""
    layout, public = batch_axes[op.inputs[0]], not any(map(batch_axes.depends, op.inputs[1:]))
    if layout == Rows() and public and op.type == "TensorListGetItem":
        return batch_axes.example_at(op.inputs[1]) or CrossExample(op, _BY_INDEX)
    return layout if isinstance(layout, BatchAxis) and public else CrossExample(op, _BY_INDEX)


@register_layout("TensorListPushBack")
@_unless_one_example
def push(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """The new element must have the layout of the others."""
    return _one_layout(op, batch_axes, op.inputs[1])


@register_layout("TensorListSetItem")
@unless_cross_example
def set_item(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """The new element must have the layout of the others, or belong to the example of its index."""
    handle, index, item = op.inputs
    tied = batch_axes.tied(handle) | batch_axes.tied(item)
    if not any(map(batch_axes.depends, op.inputs)):
        return DataIndependent(Rows() if batch_axes[handle] == Rows() else None, tied)
    if batch_axes[handle] == Rows() and _is_own(item, index, batch_axes):
        return CrossExample(op, "has elements that depend on where they are") if tied else Rows()
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    if batch_axes.depends(index):
        return CrossExample(op, _BESIDE)
    if batch_axes[handle] == Rows() and batch_axes.depends(handle):
        return CrossExample(op, _BESIDE) if batch_axes.depends(item) or tied else Rows()
    return _one_layout(op, batch_axes, item)


def _is_own(item: tf.Tensor, index: tf.Tensor, batch_axes: BatchAxes) -> bool:
    """Whether an element belongs to the example whose number is `index`."""
    own = batch_axes.example_at(index)
    return own is not None and batch_axes.depends(item) and batch_axes[item] == own


def _one_layout(op: tf.Operation, batch_axes: BatchAxes, item: tf.Tensor) -> Value:
    """The common layout of a list and a new element; an empty list has none yet."""
    found = {batch_axes[t] for t in (op.inputs[0], item) if batch_axes[t] is not None}
    if not batch_axes.depends(op.inputs[0]):
        found.discard(Rows())
    return found.pop() if len(found) == 1 else CrossExample(op, _BESIDE)
