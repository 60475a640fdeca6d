"""AdaDPS: gradients are preconditioned with side information before they are clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp.optimizers.dp_optimizer import ARGUMENTS, PACKAGE, RAISES, DPOptimizer
from tf_adaptive_dp.side_information.provenance import (
    SideInformation,
    deserialize,
    events,
    serialize,
)


@tf.keras.saving.register_keras_serializable(PACKAGE)
class AdaDPS(DPOptimizer, tf.keras.optimizers.SGD):
    __doc__ = f"""Private SGD on gradients that side information made comparable beforehand.

    Each example's gradient is divided by the preconditioner A before it is clipped ("Private
    Adaptive Optimization with Side Information", Algorithm 1):

        gᵢ ← gᵢ / A,   G = (Σᵢ clip(gᵢ, C) + N(0, σ²C²·I)) / L,   θ ← θ − α·G

    so that noise falls on all coordinates in proportion to what they carry. In the Adam form a
    public first moment m is mixed in: gᵢ ← (β·gᵢ + (1 − β)·m) / A.

    Guarantee: clipping comes after preconditioning, so the sensitivity is C whatever A is. A must
    not come from the private data: side information says where it comes from, and if that was a
    private release of its own, ε includes it.

    Args:
      side_information: `FixedPreconditioner` or `PublicGradients`.
{ARGUMENTS}
      learning_rate: α, a number or a schedule.
      **kwargs: those of `tf.keras.optimizers.SGD`, `momentum` among them.
{RAISES}

    >>> from tf_adaptive_dp import FixedPreconditioner
    >>> side_information = FixedPreconditioner(lambda v: 0.5, provenance="public")
    >>> optimizer = AdaDPS(side_information, l2_norm_clip=1.0, noise_multiplier=1.1)
    >>> optimizer.side_information.provenance
    'public'
    """

    def __init__(
        self,
        side_information: SideInformation,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: Any = 0.01,
        name: str = "AdaDPS",
        **kwargs,
    ):
        if (
            isinstance(side_information, dict) and "config" in side_information
        ):  # from a saved configuration
            side_information = deserialize(side_information)
        if not isinstance(side_information, SideInformation):
            raise TypeError(
                "`side_information` must be a `FixedPreconditioner` or `PublicGradients`, which "
                "say where it comes from. Received: side_information="
                f"{side_information!r}"
            )
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )
        self.side_information = side_information
        self.ledger.other_events = events(side_information.provenance)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the side information's state for each variable.

        Args:
          var_list: the variables to train.
        """
        if not getattr(self, "_built", False):
            self.side_information_state = self.side_information.build(
                var_list, self.add_variable_from_reference
            )
        super().build(var_list)

    def _precondition(self, variables: Sequence[tf.Variable]) -> tuple[list, list | None]:
        indices = [self._index_dict[self._var_key(v)] for v in variables]
        return self.side_information.scale_and_shift(self.side_information_state, indices)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {
            **super().get_config(),
            "side_information": serialize(self.side_information),
        }
