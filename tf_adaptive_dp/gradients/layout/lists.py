"""What lists of tensors (`tf.TensorArray`) do to the batch axis.

A list stands for its elements, which all have one layout; or it has one element for each example
(`Rows`), or belongs to one example in a loop over them (`OneExample`). The positions of elements,
and how many there are, must not depend on the data of other examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Mixed, OneExample, Public, Rows
from tf_adaptive_dp.gradients.layout.operations import (
    Layout,
    one_example,
    register_layout,
    unless_mixed,
)

if TYPE_CHECKING:
    from tf_adaptive_dp.gradients.layout.analysis import Layouts

_BY_INDEX = "picks elements by index"
_BESIDE = "puts examples beside other ones"


def _of_one_example(op: tf.Operation, layouts: Layouts) -> bool:
    """Whether the data of it belong to an example of a loop, and no list of all is among them."""
    places = [layouts[t] for t in op.inputs if layouts.depends(t)]
    return Rows() not in places and any(isinstance(p, OneExample) for p in places)


@register_layout("TensorListReserve")
@unless_mixed
def reserved(op, layouts):
    """Empty, with room for as many elements as the batch has examples, or another number."""
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    if any(map(layouts.depends, op.inputs)):
        return Mixed(op, "has a length that depends on the data")
    return Rows() if layouts.entries(op.inputs[1])[0] == layouts.batch_size else None


@register_layout("TensorListFromTensor")
@unless_mixed
def list_from_tensor(op, layouts):
    """The axis of time is gone; or that of the batch, which the list then stands for."""
    layout = layouts[op.inputs[0]]
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    if layout == BatchAxis() and layouts.depends(op.inputs[0]):
        return Rows()
    if layout is None or layout.axis == 0:
        return Mixed(op, "takes the batch apart")
    return layout.at(layout.axis - 1)


@register_layout("TensorListStack")
@unless_mixed
def stacked(op, layouts):
    """The elements on a new axis 0."""
    if not any(map(layouts.depends, op.inputs)):
        counts = layouts[op.inputs[0]] == Rows() and layouts.batch_size.unknowns
        return BatchAxis() if counts else None
    if layouts[op.inputs[0]] == Rows() and not layouts.depends(op.inputs[1]):
        return BatchAxis()
    return gathered(op, layouts)


@register_layout("TensorListGather")
@unless_mixed
def gathered(op, layouts):
    """Elements at public indices on a new axis 0."""
    layout = layouts[op.inputs[0]]
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    if not isinstance(layout, BatchAxis) or any(map(layouts.depends, op.inputs[1:])):
        return Mixed(op, _BY_INDEX)
    return layout.at(layout.axis + 1)


@register_layout("TensorListGetItem", "TensorListResize", "TensorListPopBack")
@unless_mixed
def list_item(op, layouts):
    """An element has the layout that the list has, or belongs to the example of its number."""
    layout, public = layouts[op.inputs[0]], not any(map(layouts.depends, op.inputs[1:]))
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    if layout == Rows() and public and op.type == "TensorListGetItem":
        return layouts.example_at(op.inputs[1]) or Mixed(op, _BY_INDEX)
    return layout if isinstance(layout, BatchAxis) and public else Mixed(op, _BY_INDEX)


@register_layout("TensorListPushBack")
@unless_mixed
def list_with_last(op, layouts):
    """All elements must have one layout."""
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    return _one_layout(op, layouts, op.inputs[1])


@register_layout("TensorListSetItem")
@unless_mixed
def list_with_item(op, layouts):
    """All elements must have one layout, or each belong to the example of its number."""
    handle, index, item = op.inputs
    tied = layouts.tied(handle) | layouts.tied(item)
    if not any(map(layouts.depends, op.inputs)):
        return Public(Rows() if layouts[handle] == Rows() else None, tied)
    if layouts[handle] == Rows() and _is_own(item, index, layouts):
        return Mixed(op, "has elements that depend on where they are") if tied else Rows()
    if _of_one_example(op, layouts):
        return one_example(op, layouts)
    if layouts.depends(index):
        return Mixed(op, _BESIDE)
    if layouts[handle] == Rows() and layouts.depends(handle):
        return Mixed(op, _BESIDE) if layouts.depends(item) or tied else Rows()
    return _one_layout(op, layouts, item)


def _is_own(item: tf.Tensor, index: tf.Tensor, layouts: Layouts) -> bool:
    """Whether an element belongs to the example of that number."""
    own = layouts.example_at(index)
    return own is not None and layouts.depends(item) and layouts[item] == own


def _one_layout(op: tf.Operation, layouts: Layouts, item: tf.Tensor) -> Layout:
    """That of the elements; an empty list has none yet."""
    found = {layouts[t] for t in (op.inputs[0], item) if layouts[t] is not None}
    if not layouts.depends(op.inputs[0]):
        found.discard(Rows())
    return found.pop() if len(found) == 1 else Mixed(op, _BESIDE)
