"""What all sources of per-example gradients answer."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf


class PerExampleGradients(abc.ABC):
    """Per-example gradients gᵢ, known by their norms and weighted sums only.

    Attributes:
      connected: whether the loss depends on each variable.
      penalty_gradients: gradients of the terms of the loss that no example owns, one tensor or
        `None` a variable.
      counts_batch: whether the loss depends on how many examples a batch of unknown size has.
      loss_scale: what the loss was multiplied by, a power of two, so that gradients in float16
        do not vanish; undone in all answers, exactly.
    """

    connected: list[bool]
    penalty_gradients: list[tf.Tensor | None]
    counts_batch: bool
    loss_scale: float = 1.0

    @abc.abstractmethod
    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """[R], ‖(gᵢ + shift) ∘ scale‖² of one variable, of the scaled loss."""

    @abc.abstractmethod
    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        """Σᵢ weightsᵢ·gᵢ of one variable, of the scaled loss."""

    def variable_norms(
        self, scale: Sequence[tf.Tensor] | None = None, shift: Sequence[tf.Tensor] | None = None
    ) -> list[tf.Tensor | None]:
        """‖(gᵢ + shift) ∘ scale‖² of each variable, in float32.

        Args:
          scale: one tensor a variable that has its shape or broadcasts to it, or `None` for ones.
            One of shape [V, 1] for a kernel [V, K] costs far less than one of [V, K].
          shift: likewise, or `None` for zeros.

        Returns:
          [R] a variable, `None` where the loss does not depend on the variable.
        """
        found = []
        for k, there in enumerate(self.connected):
            a = None if scale is None else tf.cast(scale[k], tf.float32)
            b = None if shift is None else tf.cast(shift[k], tf.float32) * self.loss_scale
            found.append(_over(self._norms_of(k, a, b), self.loss_scale**2) if there else None)
        return found

    def squared_norms(
        self, scale: Sequence[tf.Tensor] | None = None, shift: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """‖(gᵢ + shift) ∘ scale‖² over all variables, in float32.

        Args:
          scale: as for `variable_norms`.
          shift: as for `variable_norms`.

        Returns:
          [R].
        """
        return tf.add_n([n for n in self.variable_norms(scale, shift) if n is not None])

    def weighted_sum(self, weights: tf.Tensor | Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Σᵢ weightsᵢ·gᵢ; an example of weight 0 adds exactly 0, also if its gradient is NaN.

        Args:
          weights: [R], or one such tensor a variable.

        Returns:
          One float32 tensor a variable, `None` where the loss does not depend on the variable.
        """
        each, scale = isinstance(weights, (list, tuple)), self.loss_scale
        return [
            _over(self._sum_of(k, tf.cast(weights[k] if each else weights, tf.float32)), scale)
            if there
            else None
            for k, there in enumerate(self.connected)
        ]


def _over(tensor: tf.Tensor, scale: float) -> tf.Tensor:
    return tensor if scale == 1 else tensor / scale
