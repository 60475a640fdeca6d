"""What lists of tensors (`tf.TensorArray`) do to the batch axis.

A list stands for its elements, which all have one layout. Their positions, and how many there are,
must not depend on the data: an index is one number for the whole batch.
"""

from __future__ import annotations

from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Mixed
from tf_adaptive_dp.gradients.layout.operations import register_layout, unless_mixed

_BY_INDEX = "picks elements by index"


@register_layout("TensorListFromTensor")
@unless_mixed
def list_from_tensor(op, layouts):
    """The axis of time is gone."""
    layout = layouts[op.inputs[0]]
    if layout is None or layout.axis == 0:
        return Mixed(op, "takes the batch apart")
    return layout.at(layout.axis - 1)


@register_layout("TensorListStack", "TensorListGather")
@unless_mixed
def list_to_tensor(op, layouts):
    """The elements, or those at public indices, on a new axis 0."""
    layout = layouts[op.inputs[0]]
    if not isinstance(layout, BatchAxis) or any(map(layouts.depends, op.inputs[1:])):
        return Mixed(op, _BY_INDEX)
    return layout.at(layout.axis + 1)


@register_layout("TensorListGetItem", "TensorListResize", "TensorListPopBack")
@unless_mixed
def list_item(op, layouts):
    """An element has the layout that the list has."""
    layout = layouts[op.inputs[0]]
    if not isinstance(layout, BatchAxis) or any(map(layouts.depends, op.inputs[1:])):
        return Mixed(op, _BY_INDEX)
    return layout


@register_layout("TensorListSetItem", "TensorListPushBack")
@unless_mixed
def list_with_item(op, layouts):
    """All elements must have one layout."""
    item = op.inputs[2 if op.type == "TensorListSetItem" else 1]
    places = {layouts[t] for t in (op.inputs[0], item) if layouts[t] is not None}
    if len(places) != 1 or (op.type == "TensorListSetItem" and layouts.depends(op.inputs[1])):
        return Mixed(op, "puts examples beside other ones")
    return places.pop()
