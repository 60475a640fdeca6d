"""What the graph of a loss gives away: do the examples of the batch stay apart?"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError

_REDUCTIONS = {"Mean", "Sum", "Prod", "Max", "Min", "EuclideanNorm"}
_SHAPE_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
_UNCHANGED = {"Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "StopGradient"}
_SCALINGS = {"Mul", "RealDiv", "DivNoNan"}
_SUMS = {"Add", "AddV2", "AddN", "Sub"}

_BATCH_NORMALIZATION = (
    "BatchNormalization in training mode mixes the examples of a batch, so no example has a "
    "gradient of its own. Received: layer {layer!r}. Replace it by "
    "`tf.keras.layers.GroupNormalization` or `LayerNormalization`, or freeze it "
    "(`layer.trainable = False`)."
)
_REDUCED = (
    "An operation reduces over the batch axis, so the examples of a batch mix and none has a "
    "gradient of its own. Received: {op}. If this is batch normalization, replace it by "
    "`tf.keras.layers.GroupNormalization` or `LayerNormalization`; otherwise keep axis 0 of the "
    "data out of the reduction."
)
_SHARED = (
    "A term that all examples share is added to the loss vector, so it would be clipped with each "
    "example's gradient, also for padding. Received: {op}. Take regularization losses out of the "
    "loss and use the optimizer's `weight_decay` instead."
)


def in_xla() -> bool:
    """Whether the code that is being traced will be compiled by XLA (`jit_compile=True`)."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def _layer(op: tf.Operation) -> str:
    """The name of the layer that made an operation, from the operation's name scope."""
    return "/".join(op.name.split("/")[:-1]) or op.name


def _ancestors(op: tf.Operation) -> list[tf.Operation]:
    """The operations that `op` is computed from, itself included, in the order of creation."""
    seen, stack = {op}, [op]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.op not in seen:
                seen.add(tensor.op)
                stack.append(tensor.op)
    return [o for o in op.graph.get_operations() if o in seen]


def _data_dependent(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Those of `ops` (in the order of creation) whose values depend on the batch."""
    dependent = set()
    for op in ops:
        if op.type in _SHAPE_ONLY:
            continue
        fed = op.type in ("Placeholder", "IteratorGetNext") and any(
            t.dtype not in (tf.resource, tf.variant) for t in op.outputs
        )
        if fed or any(t.op in dependent for t in op.inputs):
            dependent.add(op)
    return dependent


def _reduces_axis_0(op: tf.Operation, batch_size: int | None) -> bool:
    tensor, axes = op.inputs[0], tf.get_static_value(op.inputs[1])
    if tensor.shape.rank in (None, 0) or axes is None or tensor.shape[0] != batch_size:
        return False
    return any(axis % tensor.shape.rank == 0 for axis in axes.reshape(-1).tolist())


def _normalizes_batch(op: tf.Operation, data: tf.Tensor) -> bool:
    """Whether a fused operation takes batch statistics: Keras's LayerNormalization uses it too.

    That one puts each example into a channel of its own and leaves one row.
    """
    return op.get_attr("is_training") and data.shape[:1] != [1]


def refuse_mixed_examples(loss: tf.Tensor) -> None:
    """Refuses a loss vector whose entries depend on more than their own example.

    Looks at the forward graph for training-mode batch normalization, for reductions over the
    batch axis, and for scalars added to the whole vector.

    Args:
      loss: [B], a symbolic tensor.

    Raises:
      NotPrivateError: naming the layer or the operation, and the cure.
    """
    ops = _ancestors(loss.op)
    dependent = _data_dependent(ops)
    for op in ops:
        if op.type.startswith("FusedBatchNorm") and _normalizes_batch(op, op.inputs[0]):
            raise NotPrivateError(_BATCH_NORMALIZATION.format(layer=_layer(op)))
        if op.type in _REDUCTIONS and op in dependent and _reduces_axis_0(op, loss.shape[0]):
            raise NotPrivateError(_REDUCED.format(op=op.name))
    _refuse_shared_terms(loss, dependent)


def _refuse_shared_terms(loss: tf.Tensor, dependent: set[tf.Operation]) -> None:
    """Follows the loss back through sums and scalings, and refuses terms without an example."""

    def is_shared(term: tf.Tensor) -> bool:
        trained = any(o.type == "ReadVariableOp" for o in _ancestors(term.op))
        one_for_all = term.shape.rank == 0 or (
            term.shape.rank == 1 and term.shape[0] == 1 != loss.shape[0]
        )
        # A scalar, or a vector such as `tf.fill([B], penalty)` that no data went into.
        return (one_for_all and (trained or term.op in dependent)) or (
            trained and term.op not in dependent
        )

    stack = [loss]
    while stack:
        op = stack.pop().op
        if op.type in _SUMS:
            for term in op.inputs:
                if is_shared(term):
                    raise NotPrivateError(_SHARED.format(op=term.op.name))
                stack.append(term)
        elif op.type in _UNCHANGED:
            stack.append(op.inputs[0])
        elif op.type in _SCALINGS and any(t.shape.rank == 0 for t in op.inputs):
            # Only by one number for all. A factor for each example ends the search: below it are
            # sums such as ⟨x, w⟩ + b times the label, and a weight of zero makes padding absent.
            stack.extend(t for t in op.inputs if t.shape.rank != 0)


def _is_number(tensor: tf.Tensor) -> bool:
    """Whether a tensor is one number for all examples, or says axes and shapes."""
    return tensor.shape.rank == 0 or tensor.dtype.is_integer


def refuse_mixed_rows(cotangent: tf.Tensor, batch_size: int) -> None:
    """The same check where no forward graph exists, on the backward pass of one example.

    Under eager execution only the backward pass is traced, by the Jacobian. In it, batch
    statistics show as a tensor without batch axis that is spread over the batch again, and a
    shared term of the loss as the cotangent summed to a scalar.

    Args:
      cotangent: [B], the unit vector that the backward pass starts from.
      batch_size: B.

    Raises:
      NotPrivateError: as `refuse_mixed_examples`.
    """
    # What depends on the cotangent; True while nothing of the example has been multiplied in.
    bare: dict[tf.Operation, bool] = {cotangent.op: True}
    for op in cotangent.graph.get_operations():
        if op.type.startswith("FusedBatchNormGrad") and _normalizes_batch(op, op.inputs[1]):
            raise NotPrivateError(_BATCH_NORMALIZATION.format(layer=_layer(op)))
        sources = [t for t in op.inputs if t.op in bare]
        if not sources or op in bare:
            continue
        bare[op] = all(bare.get(t.op, _is_number(t)) for t in op.inputs)
        shape, rank = op.outputs[0].shape, op.outputs[0].shape.rank
        if op.type == "Sum" and bare[op] and rank == 0 and batch_size > 1:
            raise NotPrivateError(_SHARED.format(op=op.name))
        if op.type in ("BroadcastTo", "Tile") and rank and shape[0] == batch_size > 1:
            source = op.inputs[0].shape
            if op.inputs[0].op in bare and (source.rank < rank or source[0] == 1):
                raise NotPrivateError(_REDUCED.format(op=op.name))
