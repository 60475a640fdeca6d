"""AdaDPS: private SGD that preconditions gradients with side information before clipping."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import SideInformation

ORDERS = ("precondition_first", "noise_first")


@register
@fill_docstring
class AdaDPS(DPOptimizer, tf.keras.optimizers.SGD):
    """Private SGD that preconditions gradients with side information before clipping them.

    AdaDPS divides each example's gradient by the preconditioner A and then clips the result:

        gᵢ ← gᵢ / A
        G = (Σᵢ clip(gᵢ, C) + N(0, σ²C²·I)) / L
        θ ← θ − α·G

    This makes coordinates comparable, so that the noise affects each one in proportion to what it
    carries. The Adam form also mixes in a public first moment m: gᵢ ← (β·gᵢ + (1 − β)·m) / A. Terms
    of the loss that belong to no example, such as regularization, are scaled like gradients.

    Guarantee: clipping comes after preconditioning, so the sensitivity is C for every A. A must not
    come from the private data. Side information states its provenance; if that is a separate
    private release, ε includes it. With `order="noise_first"` A is applied to the released
    gradient, which is post-processing.

    Args:
      side_information: `token_frequencies(...)`, `tf_idf(...)`, another `FixedPreconditioner`, or
        `PublicGradients`. Also pass `PublicGradients` to `fit` as a callback.
      {{mechanism_args}}
      order: `"precondition_first"` is AdaDPS. `"noise_first"` clips and noises plain gradients and
        divides G by A, which is the baseline `DPRPub`.
      learning_rate: α, a number or a schedule.
      **kwargs: the arguments of `tf.keras.optimizers.SGD`, such as `momentum`, which applies to
        G / A.

    Raises:
      {{raises}}

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        Algorithm 1.

    >>> from tf_adaptive_dp.side_information import FixedPreconditioner
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
        order: str = "precondition_first",
        learning_rate: Any = 0.01,
        name: str = "AdaDPS",
        **kwargs: Any,
    ):
        checks.choice("order", order, ORDERS)
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            side_information=Preconditioning(
                check_side_information(side_information),
                before_clipping=order == "precondition_first",
            ),
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )
        self.order = order

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, *rate: Any) -> None:
        """Takes the SGD step of one variable: θ ← θ − α·G, or θ − α·G / A if noise comes first.

        Args:
          gradient: G, its noisy mean gradient; with `"precondition_first"` A is in it already.
          variable: the variable.
          *rate: the learning rate, which Keras 3 passes.
        """
        if not self._preconditioning.before_clipping:
            gradient = self._preconditioning.apply(self, gradient, variable)
        super().update_step(gradient, variable, *rate)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {**super().get_config(), "order": self.order}
