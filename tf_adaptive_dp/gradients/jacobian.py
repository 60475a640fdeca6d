"""The reference source: every per-example gradient as a tensor of its own, [B, ...]."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp.gradients import graph
from tf_adaptive_dp.gradients.contributions import dense_norms, weigh_rows
from tf_adaptive_dp.gradients.source import PerExampleGradients


def jacobian_rows(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    penalties: Sequence[tf.Tensor] = (),
    tape: tf.GradientTape | None = None,
) -> list[tf.Tensor | None]:
    """The vectorized Jacobian of a loss vector.

    Row i is one backward pass with the i-th unit vector as cotangent, vectorized over i as in TF
    Privacy's vectorized optimizers.

    Guarantee: the rows are exact. One limit: the backward passes share the activations of the
    batch, so one example that is not finite makes the others' gradients NaN too (0·NaN = NaN).
    Dropping them all would be an effect of one example that the noise does not cover; so a batch
    with more than one such gradient is an error, and nothing is released. XLA knows no such
    errors: there all of them count as zero, and a warning says so when the step is traced.

    Args:
      loss: [B].
      variables: what to differentiate for.
      penalties: terms of the loss that are to be left out; in a graph only.
      tape: the tape that recorded `loss`; in a graph it can be left out.

    Returns:
      [B, ...the variable's shape] each, float32; `None` where the loss does not depend on it.
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
            graph.refuse_mixed_rows(cotangent, batch_size)
        graph.refuse_grouped_convolutions(cotangent.graph.get_operations()[before:])
        connected[:] = [g is not None for g in gradients]
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in gradients if g is not None]

    jacobian = _refuse_spoilt_batch(list(tf.vectorized_map(row, tf.range(batch_size))))
    rows = iter(jacobian)
    return [
        tf.reshape(next(rows), tf.concat([[batch_size], tf.shape(v)], 0)) if there else None
        for v, there in zip(variables, connected)
    ]


def _refuse_spoilt_batch(jacobian: list[tf.Tensor]) -> list[tf.Tensor]:
    if graph.in_xla():
        warnings.warn(
            'Under `jit_compile=True` the source `gradients="materialized"` cannot stop at a '
            "batch in which an example is NaN or infinite; it then counts the whole batch as "
            "zero, which the privacy guarantee does not cover. Make sure that inputs are "
            "finite.",
            stacklevel=2,
        )
        return jacobian
    finite = [tf.reduce_all(tf.math.is_finite(r), axis=range(1, r.shape.rank)) for r in jacobian]
    spoilt = tf.math.count_nonzero(~tf.reduce_all(finite, axis=0)) if finite else tf.constant(0)
    check = tf.debugging.Assert(
        spoilt <= 1,
        [
            "The gradients of",
            spoilt,
            "examples of this batch are NaN or infinite. With materialized gradients one "
            "example that is not finite spoils the others, so it cannot be dropped alone, and "
            "nothing was released. Remove examples with NaN or infinite values from the data.",
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        return [tf.identity(r) for r in jacobian]


class MaterializedGradients(PerExampleGradients):
    """Per-example gradients from `jacobian_rows`, for all variables.

    Right for whatever TensorFlow can differentiate; time and memory grow with B times the number
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
        self._rows = jacobian_rows(loss, variables, penalties, None if penalties else tape)
        self.connected = [r is not None for r in self._rows]

    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        return dense_norms(self._rows[k], scale, shift)

    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(weigh_rows(self._rows[k], weights), axis=0)
