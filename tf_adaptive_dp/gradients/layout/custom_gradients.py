"""Custom gradients that mix the examples of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.graph import ancestors, layer_name
from tf_adaptive_dp.gradients.layout.batch_axis import BatchAxis, Mixed, OneExample

if TYPE_CHECKING:
    from tf_adaptive_dp.gradients.layout.analysis import Layouts

_GRADIENT = (
    "A custom gradient mixes the examples of a batch, so none has a gradient of its own. Received: "
    "{op} in layer {layer!r}, whose gradient {why}. Let it treat each example by itself."
)


def refuse_custom_gradients(ops: Iterable[tf.Operation], layouts: Layouts) -> None:
    """Refuses gradients of the user's own (`tf.custom_gradient`) that mix examples.

    Args:
      ops: what the loss is computed from.
      layouts: where the batch axis of each tensor is.

    Raises:
      NotPrivateError: naming the operation.
    """
    for op in ops:
        if not has_custom_gradient(op) or not any(layouts.depends(t) for t in op.inputs):
            continue
        function = framework_ops.get_gradient_function(op)
        upstream = [tf.identity(tf.zeros_like(t)) for t in op.outputs]
        for tensor, output in zip(upstream, op.outputs):
            layouts.set(tensor, layouts[output], layouts.depends(output))
        found = function(op, *upstream)
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        layouts.custom_gradients += [g for g in found if g is not None]
        layouts.run(ancestors([g for g in found if g is not None]))
        for tensor, gradient in zip(op.inputs, found):
            if gradient is not None and isinstance(layouts[tensor], (BatchAxis, OneExample)):
                _compare(op, layouts[tensor], layouts[gradient])


def has_custom_gradient(op: tf.Operation) -> bool:
    """Whether an operation stands for a function with `tf.custom_gradient`."""
    if op.type != "IdentityN":
        return False
    try:
        return b"CustomGradient" in op.get_attr("_gradient_op_type")
    except ValueError:
        return False


def _compare(op: tf.Operation, expected: BatchAxis | OneExample, actual) -> None:
    if actual not in (None, expected):
        why = actual.why if isinstance(actual, Mixed) else "moves the batch axis"
        raise NotPrivateError(_GRADIENT.format(op=op.name, layer=layer_name(op), why=why))
