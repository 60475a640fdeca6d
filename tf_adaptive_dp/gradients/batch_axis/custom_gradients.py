"""Custom gradients that mix the examples of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    ancestors,
    gradient_function,
    has_custom_gradient,
    layer_name,
)
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.operations import run
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, Layout, OneExample

_GRADIENT = (
    "A custom gradient mixes the examples of a batch, so none has a gradient of its own. Received: "
    "{op} in layer {layer!r}, whose gradient {why}. Let it treat each example by itself."
)


def refuse_custom_gradients(ops: Iterable[tf.Operation], batch_axes: BatchAxes) -> None:
    """Refuses custom gradients (`tf.custom_gradient`) that mix examples.

    Args:
      ops: the operations that the loss is computed from.
      batch_axes: the batch axis of each tensor.

    Raises:
      NotPrivateError: if there is one; the message names the operation.
    """
    for op in ops:
        if not has_custom_gradient(op) or not any(batch_axes.depends(t) for t in op.inputs):
            continue
        function = gradient_function(op)
        before = len(op.graph.get_operations())
        upstream = [tf.identity(tf.zeros_like(t)) for t in op.outputs]
        for tensor, output in zip(upstream, op.outputs):
            batch_axes.set(tensor, batch_axes[output], batch_axes.depends(output))
        found = function(op, *upstream)
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        batch_axes.trials.update(op.graph.get_operations()[before:])
        batch_axes.custom_gradients += [g for g in found if g is not None]
        run(ancestors([g for g in found if g is not None]), batch_axes)
        for tensor, gradient in zip(op.inputs, found):
            expected = batch_axes[tensor]
            if gradient is not None and isinstance(expected, (BatchAxis, OneExample)):
                _compare(op, expected, batch_axes[gradient])


def _compare(op: tf.Operation, expected: Layout, actual: Layout) -> None:
    if actual not in (None, expected):
        why = actual.why if isinstance(actual, CrossExample) else "moves the batch axis"
        raise NotPrivateError(_GRADIENT.format(op=op.name, layer=layer_name(op), why=why))
