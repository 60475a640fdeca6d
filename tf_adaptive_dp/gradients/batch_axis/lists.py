"""What lists of tensors (`tf.TensorArray`) do to the batch axis.

A list stands for its elements, which all have one layout; or it has one element for each example
(`Rows`), or belongs to one example in a loop over them (`OneExample`). The positions of elements,
and how many there are, must not depend on the data of other examples.
"""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.gradients.batch_axis.operations import (
    Layout,
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
)

_BY_INDEX = "picks elements by index"
_BESIDE = "puts examples beside other ones"


def _of_one_example(op: tf.Operation, batch_axes: BatchAxes) -> bool:
    """Whether the data of it belong to an example of a loop, and no list of all is among them."""
    places = [batch_axes[t] for t in op.inputs if batch_axes.depends(t)]
    return Rows() not in places and any(isinstance(p, OneExample) for p in places)


@register_layout("TensorListReserve")
@unless_cross_example
def reserved(op, batch_axes):
    """Empty, with room for as many elements as the batch has examples, or another number."""
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    if any(map(batch_axes.depends, op.inputs)):
        return CrossExample(op, "has a length that depends on the data")
    return Rows() if batch_axes.entries(op.inputs[1])[0] == batch_axes.batch_size else None


@register_layout("TensorListFromTensor")
@unless_cross_example
def list_from_tensor(op, batch_axes):
    """The axis of time is gone; or that of the batch, which the list then stands for."""
    layout = batch_axes[op.inputs[0]]
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    if layout == BatchAxis() and batch_axes.depends(op.inputs[0]):
        return Rows()
    if layout is None or layout.axis == 0:
        return CrossExample(op, "takes the batch apart")
    return layout.at(layout.axis - 1)


@register_layout("TensorListStack")
@unless_cross_example
def stacked(op, batch_axes):
    """The elements on a new axis 0."""
    if not any(map(batch_axes.depends, op.inputs)):
        counts = batch_axes[op.inputs[0]] == Rows() and batch_axes.batch_size.unknowns
        return BatchAxis() if counts else None
    if batch_axes[op.inputs[0]] == Rows() and not batch_axes.depends(op.inputs[1]):
        return BatchAxis()
    return gathered(op, batch_axes)


@register_layout("TensorListGather")
@unless_cross_example
def gathered(op, batch_axes):
    """Elements at public indices on a new axis 0."""
    layout = batch_axes[op.inputs[0]]
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    if not isinstance(layout, BatchAxis) or any(map(batch_axes.depends, op.inputs[1:])):
        return CrossExample(op, _BY_INDEX)
    return layout.at(layout.axis + 1)


@register_layout("TensorListGetItem", "TensorListResize", "TensorListPopBack")
@unless_cross_example
def list_item(op, batch_axes):
    """An element has the layout that the list has, or belongs to the example of its number."""
    layout, public = batch_axes[op.inputs[0]], not any(map(batch_axes.depends, op.inputs[1:]))
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    if layout == Rows() and public and op.type == "TensorListGetItem":
        return batch_axes.example_at(op.inputs[1]) or CrossExample(op, _BY_INDEX)
    return layout if isinstance(layout, BatchAxis) and public else CrossExample(op, _BY_INDEX)


@register_layout("TensorListPushBack")
@unless_cross_example
def list_with_last(op, batch_axes):
    """All elements must have one layout."""
    if _of_one_example(op, batch_axes):
        return one_example(op, batch_axes)
    return _one_layout(op, batch_axes, op.inputs[1])


@register_layout("TensorListSetItem")
@unless_cross_example
def list_with_item(op, batch_axes):
    """All elements must have one layout, or each belong to the example of its number."""
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
    """Whether an element belongs to the example of that number."""
    own = batch_axes.example_at(index)
    return own is not None and batch_axes.depends(item) and batch_axes[item] == own


def _one_layout(op: tf.Operation, batch_axes: BatchAxes, item: tf.Tensor) -> Layout:
    """That of the elements; an empty list has none yet."""
    found = {batch_axes[t] for t in (op.inputs[0], item) if batch_axes[t] is not None}
    if not batch_axes.depends(op.inputs[0]):
        found.discard(Rows())
    return found.pop() if len(found) == 1 else CrossExample(op, _BESIDE)
