"""The reference source: every per-example gradient as a tensor of its own, [B, ...]."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp.gradients import graph


class MaterializedGradients:
    """Per-example gradients from the vectorized Jacobian of the loss vector.

    Row i of the Jacobian is one backward pass with the i-th unit vector as cotangent, vectorized
    over i as in TF Privacy's vectorized optimizers. Right for whatever TensorFlow can
    differentiate; time and memory grow with B times the number of parameters.

    Guarantee: the gradients are exact. One limit: the backward passes share the activations of
    the batch, so one example that is not finite makes the others' gradients NaN too (0·NaN =
    NaN). Dropping them all would be an effect of one example that the noise does not cover; so a
    batch with more than one such gradient is an error, and nothing is released. XLA knows no such
    errors: there all of them count as zero, and a warning says so when the step is traced.
    """

    def __init__(self, loss: tf.Tensor, variables: Sequence[tf.Variable], tape: tf.GradientTape):
        """Computes the Jacobian; see `per_example_gradients` for the arguments."""
        eager = tf.executing_eagerly()
        batch_size = loss.shape[0] if loss.shape[0] is not None else tf.shape(loss)[0]
        connected: list[bool] = []

        @tf.autograph.experimental.do_not_convert
        def row(i: tf.Tensor) -> list[tf.Tensor]:
            cotangent = tf.one_hot(i, batch_size, dtype=loss.dtype)
            gradients = tape.gradient(loss, variables, output_gradients=cotangent)
            if eager:
                graph.refuse_mixed_rows(cotangent, batch_size)
            connected[:] = [g is not None for g in gradients]
            return [tf.convert_to_tensor(g) for g in gradients if g is not None]

        jacobian = iter(tf.vectorized_map(row, tf.range(batch_size)))
        self._shapes = [tf.shape(v) for v in variables]
        # [B, size] each; `None` where the loss does not depend on the variable.
        self._rows = [
            tf.reshape(next(jacobian), [batch_size, tf.size(v)]) if there else None
            for v, there in zip(variables, connected)
        ]
        if not any(connected):
            names = ", ".join(v.name for v in variables)
            raise ValueError(f"The loss depends on none of the variables. Received: {names}")
        self._refuse_spoilt_batch()

    def _refuse_spoilt_batch(self) -> None:
        if graph.in_xla():
            warnings.warn(
                'Under `jit_compile=True` the source `gradients="materialized"` cannot stop at a '
                "batch in which an example is NaN or infinite; it then counts the whole batch as "
                "zero, which the privacy guarantee does not cover. Make sure that inputs are "
                "finite.",
                stacklevel=2,
            )
            return
        spoilt = tf.math.count_nonzero(~tf.math.is_finite(self.squared_norms()))
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
            self._rows = [None if r is None else tf.identity(r) for r in self._rows]

    def squared_norms(
        self, scale: Sequence[tf.Tensor] | None = None, shift: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """‖(gᵢ + shift) ∘ scale‖² over all variables, in float32.

        Args:
          scale: one tensor a variable, or `None` for ones.
          shift: one tensor a variable, or `None` for zeros.

        Returns:
          [B].
        """
        total = 0.0
        for k, rows in enumerate(self._rows):
            if rows is None:
                continue
            rows = tf.cast(rows, tf.float32)
            if shift is not None:
                rows += tf.reshape(shift[k], [1, -1])
            if scale is not None:
                rows *= tf.reshape(scale[k], [1, -1])
            total += tf.reduce_sum(tf.square(rows), axis=1)
        return total

    def weighted_sum(self, weights: tf.Tensor) -> list[tf.Tensor | None]:
        """Σᵢ weightsᵢ·gᵢ; an example of weight 0 adds exactly 0, also if its gradient is NaN.

        Args:
          weights: [B].

        Returns:
          One tensor a variable, `None` where the loss does not depend on the variable.
        """
        sums = []
        for rows, shape in zip(self._rows, self._shapes):
            if rows is None:
                sums.append(None)
                continue
            weighted = tf.math.multiply_no_nan(
                tf.cast(rows, tf.float32), tf.cast(weights, tf.float32)[:, tf.newaxis]
            )
            sums.append(tf.reshape(tf.reduce_sum(weighted, axis=0), shape))
        return sums
