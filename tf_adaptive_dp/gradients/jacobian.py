"""The reference source: it computes every per-example gradient as a tensor [B, ...]."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import bodies, place_of, static_value
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.contributions import dense_norms, weigh_rows
from tf_adaptive_dp.gradients.source import PerExampleGradients

_BATCH_NORMALIZATION = (
    "BatchNormalization in training mode mixes the examples of a batch, so no example has a "
    "gradient of its own. Received: {op} {place}. Replace it by "
    "`tf.keras.layers.GroupNormalization` or `LayerNormalization`, or freeze it "
    "(`layer.trainable = False`)."
)
_REDUCED = (
    "An operation reduces over the batch axis, so examples in a batch affect each other and "
    "none has a gradient of its own. Received: {op}. If this is batch normalization, replace it by "
    "`tf.keras.layers.GroupNormalization` or `LayerNormalization`; otherwise keep axis 0 of the "
    "data out of the reduction."
)
_SHARED = (
    "A term that all examples share is added to the loss vector, so it would be clipped with each "
    "example's gradient, also for padding. Received: {op}. A compiled step (without "
    "`run_eagerly`) adds it after the noise; or use the optimizer's `weight_decay` instead."
)


class JacobianWarning(UserWarning):
    """Says that the Jacobian of some variables is taken, since no rule covers them.

    Attributes:
      variables: these variables.
    """

    def __init__(self, message: str, variables: Sequence[tf.Variable]):
        super().__init__(message)
        self.variables = list(variables)


def jacobian_rows(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    penalties: Sequence[tf.Tensor] = (),
    tape: tf.GradientTape | None = None,
) -> list[tf.Tensor | None]:
    """Computes the vectorized Jacobian of a loss vector.

    Row i is one backward pass with the i-th unit vector as cotangent, vectorized over i as in TF
    Privacy's vectorized optimizers.

    Guarantee: the rows are exact. One limit: the backward passes share the activations of the
    batch, so one example that is not finite makes the others' gradients NaN too (0·NaN = NaN).
    Dropping all of them would be an effect of one example that the noise does not cover. So a batch
    with more than one such gradient is an error, and nothing is released. XLA cannot raise errors:
    there all of these gradients count as zero, and the ledger holds a release without privacy. A
    warning says so when the step is traced.

    Args:
      loss: [B].
      variables: the variables to differentiate with respect to.
      penalties: terms of the loss to leave out; in a graph only.
      tape: the tape that recorded `loss`; optional in a graph.

    Returns:
      One float32 tensor [B, ...the variable's shape] per variable, or `None` where the loss does
      not depend on it.
    """
    eager = tf.executing_eagerly()
    batch_size = loss.shape[0] if loss.shape[0] is not None else tf.shape(loss)[0]
    connected: list[bool] = []

    @tf.autograph.experimental.do_not_convert
    def row(i: tf.Tensor) -> list[tf.Tensor]:
        cotangent = tf.one_hot(i, batch_size, dtype=loss.dtype)
        before = len(cotangent.graph.get_operations())
        if tape is None:
            gradients = tf.gradients(
                loss, variables, grad_ys=cotangent, stop_gradients=list(penalties)
            )
        else:
            gradients = tape.gradient(loss, variables, output_gradients=cotangent)
        if eager:
            refuse_mixed_rows(cotangent, batch_size)
        refuse_grouped_convolutions(cotangent.graph.get_operations()[before:])
        connected[:] = [g is not None for g in gradients]
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in gradients if g is not None]

    jacobian = _refuse_spoiled_batch(list(tf.vectorized_map(row, tf.range(batch_size))))
    rows = iter(jacobian)
    return [
        tf.reshape(next(rows), tf.concat([[batch_size], tf.shape(v)], 0)) if there else None
        for v, there in zip(variables, connected)
    ]


def _refuse_spoiled_batch(jacobian: list[tf.Tensor]) -> list[tf.Tensor]:
    if in_xla():
        warnings.warn(
            'Under `jit_compile=True` the source `gradients="materialized"` cannot stop at a '
            "batch in which an example is NaN or infinite. It then counts the whole batch as "
            "zero, which the noise does not hide, so epsilon becomes infinite. Make sure that all "
            "inputs are finite.",
            stacklevel=level_of_caller(),
        )
        return jacobian
    finite = [tf.reduce_all(tf.math.is_finite(r), axis=range(1, r.shape.rank)) for r in jacobian]
    not_finite = tf.math.count_nonzero(~tf.reduce_all(finite, axis=0)) if finite else tf.constant(0)
    check = tf.debugging.Assert(
        not_finite <= 1,
        [
            "The gradients of",
            not_finite,
            "examples of this batch are NaN or infinite. With materialized gradients one "
            "example that is not finite spoils the others and cannot be dropped alone, so "
            "nothing was released. Remove examples with NaN or infinite values from the data.",
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        return [tf.identity(r) for r in jacobian]


def _normalizes_batch(op: tf.Operation, data: tf.Tensor) -> bool:
    """Whether a fused operation normalizes over the batch.

    Keras's LayerNormalization uses the same operation, with each example as a channel of one row.
    """
    return op.get_attr("is_training") and data.shape[:1] != [1]


def _is_number(tensor: tf.Tensor) -> bool:
    """Whether a tensor is one number for all examples, or holds axes or shapes."""
    return tensor.shape.rank == 0 or tensor.dtype.is_integer


def _sums_all_axes(op: tf.Operation) -> bool:
    """Whether a sum leaves one number; releases of TensorFlow differ in whether it keeps axes."""
    if not op.get_attr("keep_dims"):
        return op.outputs[0].shape.rank == 0
    rank, axes = op.inputs[0].shape.rank, static_value(op.inputs[1])
    if rank is None or axes is None:
        return True  # for all that is known
    return len({int(axis) % rank for axis in axes.reshape(-1)}) == rank


def refuse_mixed_rows(cotangent: tf.Tensor, batch_size: int) -> None:
    """Searches the backward pass of one example for operations that mix the batch.

    Under eager execution there is no forward graph: only the Jacobian traces the backward pass.
    There, batch statistics appear as a tensor without a batch axis that is broadcast over the batch
    again, and a shared loss term as the cotangent summed to a scalar.

    Args:
      cotangent: [B], the unit vector that the backward pass starts from.
      batch_size: B.

    Raises:
      NotPrivateError: naming the operation that mixes examples.
    """
    # What depends on the cotangent; True as long as no value of the example was multiplied in.
    bare: dict[tf.Operation, bool] = {cotangent.op: True}
    for op in cotangent.graph.get_operations():
        if op.type.startswith("FusedBatchNormGrad") and _normalizes_batch(op, op.inputs[1]):
            raise NotPrivateError(_BATCH_NORMALIZATION.format(op=op.name, place=place_of(op)))
        sources = [t for t in op.inputs if t.op in bare]
        if not sources or op in bare:
            continue
        bare[op] = all(bare.get(t.op, _is_number(t)) for t in op.inputs)
        shape, rank = op.outputs[0].shape, op.outputs[0].shape.rank
        if op.type == "Sum" and bare[op] and _sums_all_axes(op) and batch_size > 1:
            raise NotPrivateError(_SHARED.format(op=op.name))
        if op.type in ("BroadcastTo", "Tile") and rank and shape[0] == batch_size > 1:
            source = op.inputs[0].shape
            if op.inputs[0].op in bare and (source.rank < rank or source[0] == 1):
                raise NotPrivateError(_REDUCED.format(op=op.name))


def refuse_grouped_convolutions(ops: Iterable[tf.Operation]) -> None:
    """Refuses backward passes that TensorFlow vectorizes wrongly over examples.

    `tf.vectorized_map` mistakes the gradient of a grouped convolution for that of an ordinary one.

    Args:
      ops: the operations of one backward pass.

    Raises:
      NotPrivateError: if there is a grouped convolution among them.
    """
    for op in ops:
        if op.type in ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"):
            images = op.outputs[0] if op.type == "Conv2DBackpropInput" else op.inputs[0]
            weights = op.outputs[0] if op.type == "Conv2DBackpropFilter" else op.inputs[1]
            last = op.get_attr("data_format") == b"NHWC"
            channels = images.shape[-1 if last else 1] if images.shape.rank else None
            taken = weights.shape[-2] if weights.shape.rank else None
            if channels != taken and None not in (channels, taken):
                raise NotPrivateError(
                    "TensorFlow cannot vectorize the gradient of grouped convolutions. Received: "
                    f"{op.name}. Use `groups=1`, one convolution per group of channels, or "
                    "`DepthwiseConv2D`."
                )
        for body in bodies(op).values():
            refuse_grouped_convolutions(body.get_operations())


class MaterializedGradients(PerExampleGradients):
    """Per-example gradients from `jacobian_rows`, for all variables.

    It handles all that TensorFlow can differentiate. Time and memory grow with B times the number
    of parameters.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        tape: tf.GradientTape,
        penalties: Sequence[tf.Tensor] = (),
    ):
        """Computes the Jacobian; see `jacobian_rows` for the arguments."""
        self.ranks = [v.shape.rank for v in variables]
        self.spoils_others = in_xla()
        self._rows = jacobian_rows(loss, variables, penalties, None if penalties else tape)
        self.connected = [r is not None for r in self._rows]

    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        return dense_norms(self._rows[k], scale, shift)

    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(weigh_rows(self._rows[k], weights), axis=0)
