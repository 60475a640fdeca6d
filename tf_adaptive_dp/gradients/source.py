"""The interface of all sources of per-example gradients."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class LossOfStep(NamedTuple):
    """What a search of the loss has shown, beside its gradients.

    Attributes:
      of_examples: [B], the loss of each example.
      of_units: [R], the loss whose gradient is clipped as one: that of an example, the mean over a
        microbatch, or the sum over a user's rows.
      scale: the power of two by which it was multiplied to keep float16 gradients from vanishing.
      penalty_gradients: for each variable, the gradient of the terms that all examples share, or
        `None`.
      counts_batch: whether it depends on the number of examples in a batch of unknown size.
      outside: [B], bool, the examples without a gradient because of an index outside of their row
        (see `rows_outside`), which makes gradients of others NaN if one of theirs would not
        be finite; `None` if there are no such indices.
      rows_differ: bool scalar, whether it has a different number of rows than the data, so that an
        example may count several times (see `has_other_rows`); `None` if it cannot.
    """

    of_examples: tf.Tensor
    of_units: tf.Tensor
    scale: float = 1.0
    penalty_gradients: Sequence[tf.Tensor | None] = ()
    counts_batch: bool = False
    outside: tf.Tensor | None = None
    rows_differ: tf.Tensor | None = None


class PerExampleGradients(abc.ABC):
    """Per-example gradients gᵢ, known only by their norms and weighted sums.

    Attributes:
      ranks: the number of axes of each variable.
      connected: for each variable, whether the loss depends on it.
      loss: the `LossOfStep`; `per_example_gradients` sets it. All answers divide by its `scale`,
        which is exact.
      spoils_others: whether one gradient that is not finite may make those of other examples NaN,
        and no error stops such a batch: the Jacobian under XLA.
    """

    ranks: list[int]
    connected: list[bool]
    loss: LossOfStep
    spoils_others: bool = False

    @property
    def example_losses(self) -> tf.Tensor:
        """[B], the loss of each example."""
        return self.loss.of_examples

    @property
    def penalty_gradients(self) -> Sequence[tf.Tensor | None]:
        """For each variable, the gradient of the terms that all examples share, or `None`."""
        return self.loss.penalty_gradients

    @abc.abstractmethod
    def _norms_of(self, k: int, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """[R], ‖(gᵢ + shift) ∘ scale‖² for variable `k`, with gradients of the scaled loss."""

    @abc.abstractmethod
    def _sum_of(self, k: int, weights: tf.Tensor) -> tf.Tensor:
        """Σᵢ weightsᵢ·gᵢ for variable `k`, with gradients of the scaled loss."""

    def variable_norms(
        self, scale: Sequence[tf.Tensor] | None = None, shift: Sequence[tf.Tensor] | None = None
    ) -> list[tf.Tensor | None]:
        """Computes ‖(gᵢ + shift) ∘ scale‖² of each variable, in float32.

        Args:
          scale: one tensor per variable, of its shape or one that broadcasts to it; `None` means
            ones. For a kernel [V, K], a scale [V, 1] is far cheaper than one of shape [V, K], and a
            scalar costs nothing.
          shift: likewise; `None` means zeros.

        Returns:
          [R] per variable, or `None` where the loss does not depend on the variable.
        """
        found: list[tf.Tensor | None] = []
        for k, there in enumerate(self.connected):
            a = None if scale is None else tf.cast(scale[k], tf.float32)
            if a is not None and a.shape.rank == 0:
                # Within the squares: a large A brings back what would have vanished in them.
                a = tf.reshape(a, [1] * self.ranks[k])
            b = None if shift is None else tf.cast(shift[k], tf.float32) * self.loss.scale
            if not there:
                found.append(None)
            else:
                found.append(_over(self._norms_of(k, a, b), self.loss.scale**2))
        return found

    def squared_norms(
        self, scale: Sequence[tf.Tensor] | None = None, shift: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Computes ‖(gᵢ + shift) ∘ scale‖² over all variables, in float32.

        Args:
          scale: as for `variable_norms`.
          shift: as for `variable_norms`.

        Returns:
          [R].
        """
        return tf.add_n([n for n in self.variable_norms(scale, shift) if n is not None])

    def weighted_sum(self, weights: tf.Tensor | Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Computes Σᵢ weightsᵢ·gᵢ.

        Guarantee: an example of weight 0 adds exactly 0, even if its gradient is NaN.

        Args:
          weights: [R], or one such tensor per variable.

        Returns:
          One float32 tensor per variable, or `None` where the loss does not depend on the variable.
        """
        each, scale = isinstance(weights, (list, tuple)), self.loss.scale
        return [
            _over(self._sum_of(k, tf.cast(weights[k] if each else weights, tf.float32)), scale)
            if there
            else None
            for k, there in enumerate(self.connected)
        ]


def _over(tensor: tf.Tensor, scale: float) -> tf.Tensor:
    return tensor if scale == 1 else tensor / scale
