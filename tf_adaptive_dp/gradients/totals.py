"""The gradient of a variable as a whole, out of what all its reads contribute."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp.gradients.contributions import Contribution, Dense, Outer, Sparse, in_chunks
from tf_adaptive_dp.gradients.view import View


class Viewed:
    """A contribution, asked and answering in the shape of the variable."""

    def __init__(self, contribution: Contribution, view: View):
        self.contribution, self.view = contribution, view
        self.shape, self.tensors = view.shape, contribution.tensors

    def of(self, *tensors: tf.Tensor) -> tf.Tensor:
        """The gradients of some examples, [b, *shape]."""
        return self.view.invert(self.contribution.of(*tensors), leading=1)

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """[B], ‖(gᵢ + shift) ∘ scale‖²; both may be tensors that broadcast to the variable."""
        if shift is not None and shift.shape != self.shape:
            shift = tf.broadcast_to(shift, self.shape)
        return self.contribution.squared_norms(
            *(None if t is None else self.view.apply(t) for t in (scale, shift))
        )

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Σᵢ weightsᵢ·gᵢ."""
        return self.view.invert(self.contribution.weighted_sum(weights))


class Total:
    """The sum of several contributions to one variable: shared layers, tied weights."""

    def __init__(self, parts: Sequence[Viewed]):
        self.parts = _joined(parts)

    def squared_norms(self, scale: tf.Tensor | None, shift: tf.Tensor | None) -> tf.Tensor:
        """[B], ‖(gᵢ + shift) ∘ scale‖²; contributions add before the norm."""
        if len(self.parts) == 1:
            return self.parts[0].squared_norms(scale, shift)
        return in_chunks(self.parts, scale, shift)

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """Σᵢ weightsᵢ·gᵢ."""
        return tf.add_n([p.weighted_sum(weights) for p in self.parts])


def _joined(parts: Sequence[Viewed]) -> list[Viewed]:
    """Joins contributions of one form and view, as if they were further time steps."""
    groups: dict = {}
    for part in parts:
        groups.setdefault((type(part.contribution), part.view), []).append(part)
    joined = []
    for (form, view), same in groups.items():
        if len(same) == 1:
            joined += same
        elif form is Dense:
            rows = tf.add_n([p.tensors[0] for p in same])
            joined.append(Viewed(Dense(same[0].contribution.shape, rows), view))
        elif form in (Outer, Sparse):
            tensors = [tf.concat(t, axis=1) for t in zip(*(p.tensors for p in same))]
            arguments = [same[0].contribution.shape] * (form is Sparse) + tensors
            joined.append(Viewed(form(*arguments), view))
        else:
            joined += same
    return joined
