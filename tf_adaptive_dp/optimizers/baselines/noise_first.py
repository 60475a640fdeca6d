"""The baselines of the AdaDPS paper that precondition gradients after adding noise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_adaptive_dp.optimizers.adadps import AdaDPS
from tf_adaptive_dp.optimizers.adam_wosm import FirstMomentOptimizer
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import SideInformation


@register
@fill_docstring
class DPRPub(AdaDPS, sets=("order",)):
    """DP-R-Pub: private RMSProp whose second moment comes from public data.

    The order is the opposite of that in `AdaDPS`: plain gradients gᵢ are clipped and noised, and
    the result is divided by A.

        G = (Σᵢ clip(gᵢ, C) + N(0, σ²C²·I)) / L
        θ ← θ − α·G / A

    Here A = √(v + ε) and v ← β·v + (1 − β)·g² for gradients g on public data: `PublicGradients`
    with `rule="rmsprop"`. The gap between this baseline and `AdaDPS` shows what the order is worth.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    A is public or has its own release, so the division by A is post-processing.

    Args:
      {{public_data_args}}
      {{mechanism_args}}
      learning_rate: α, a number or a schedule.
      **kwargs: the arguments of `tf.keras.optimizers.SGD`, such as `momentum`, which applies to
        G / A.

    Raises:
      {{raises}}

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        section 6.1.1.

    >>> from tf_adaptive_dp.side_information import FixedPreconditioner
    >>> fixed = FixedPreconditioner(lambda v: 0.5, provenance="public")
    >>> DPRPub(fixed, l2_norm_clip=1.0, noise_multiplier=1.1).order
    'noise_first'
    """

    def __init__(
        self,
        side_information: SideInformation,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: Any = 0.01,
        name: str = "DPRPub",
        **kwargs: Any,
    ):
        super().__init__(
            side_information,
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            order="noise_first",
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        config = super().get_config()
        del config["order"]
        return config


@register
@fill_docstring
class DPAdamPub(DPOptimizer, FirstMomentOptimizer):
    """DP-Adam-Pub: private Adam whose second moment comes from public data.

    With the noisy mean gradient G of `DPSGD`:

        m ← β₁·m + (1 − β₁)·G
        θ ← θ − α·m / A

    Here A = √(v + ε) and v ← β₂·v + (1 − β₂)·g² for gradients g on public data:
    `PublicGradients(..., rule="rmsprop", beta=β₂)`. Neither moment is corrected for starting at
    zero. The rule `"adam"`, which has a public first moment μ, gives (β₂·m + (1 − β₂)·μ) / A.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    The rest is post-processing.

    Args:
      {{public_data_args}}
      {{mechanism_args}}
      learning_rate: α, a number or a schedule.
      beta_1: β₁ in [0, 1).
      **kwargs: the arguments of `tf.keras.optimizers.Optimizer`, such as `use_ema` and
        `weight_decay`.

    Raises:
      {{raises}}

    References:
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
        Appendix C.1.

    >>> from tf_adaptive_dp.side_information import FixedPreconditioner
    >>> fixed = FixedPreconditioner(lambda v: 0.5, provenance="public")
    >>> DPAdamPub(fixed, l2_norm_clip=1.0, noise_multiplier=1.1).beta_1
    0.9
    """

    def __init__(
        self,
        side_information: SideInformation,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        name: str = "DPAdamPub",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            side_information=Preconditioning(
                check_side_information(side_information), before_clipping=False
            ),
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )
        self.set_beta_1(beta_1)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Moves one variable: θ ← θ − α·m / A.

        Args:
          gradient: G, its noisy mean gradient, which becomes part of m first.
          variable: the variable.
        """
        moment = self.next_moment(gradient, variable)
        step = tf.cast(self.learning_rate, variable.dtype)
        variable.assign_sub(step * self._preconditioning.apply(self, moment, variable))
