"""DPAdamWOSM: private Adam without second moments, with the step size that Adam converges to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.optimizers import OwnRuleOptimizer, slot_index
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.update_rules import effective_step_size


class FirstMomentOptimizer(OwnRuleOptimizer):
    """Keeps the first moment of each variable: m ← β₁·m + (1 − β₁)·G.

    Attributes:
      beta_1: β₁ in [0, 1).
    """

    beta_1: float

    def set_beta_1(self, beta_1: float) -> None:
        """Sets β₁; raises TypeError or ValueError if it is not in [0, 1)."""
        self.beta_1 = checks.number("beta_1", beta_1, 0)
        if self.beta_1 >= 1:
            raise ValueError(f"`beta_1` must be below 1. Received: beta_1={beta_1!r}")

    def create_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the first moment of each variable.

        Args:
          variables: the variables to train.
        """
        self._moments = [self.add_variable_from_reference(v, "m") for v in variables]

    def next_moment(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Variable:
        """Adds a gradient to the first moment of its variable.

        Args:
          gradient: its noisy mean gradient.
          variable: the variable.
        """
        moment = self._moments[slot_index(self, variable)]
        moment.assign(effective_step_size.first_moment(moment, gradient, self.beta_1))
        return moment

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {**super().get_config(), "beta_1": self.beta_1}


@register
@fill_docstring
class DPAdamWOSM(DPOptimizer, FirstMomentOptimizer):
    """Private Adam without second moments, with the step size that Adam converges to under noise.

    With the noisy mean gradient G of `DPSGD` at step t, whose noise has standard deviation σC/L:

        m ← β₁·m + (1 − β₁)·G
        θ ← θ − α / (σC/L + ξ) · m / (1 − β₁ᵗ)

    L is the expected batch size. With side information G is preconditioned, and its noise has the
    same standard deviation in those coordinates.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    The rest is post-processing.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      learning_rate: α, a number or a schedule.
      beta_1: β₁ in [0, 1).
      epsilon: ξ, at least 0.
      **kwargs: the arguments of `tf.keras.optimizers.Optimizer`, such as `use_ema` and
        `weight_decay`.

    Raises:
      {{raises}}

    References:
      - Mohapatra et al., "The Role of Adaptive Optimizers for Honest Private Hyperparameter
        Selection" (2021), arXiv:2111.04906, Theorem 3 and section 6.

    >>> optimizer = DPAdamWOSM(l2_norm_clip=1.0, noise_multiplier=1.1)
    >>> print(f"{optimizer.learning_rate.numpy():.3f}")
    0.001
    """

    needs_independent_noise = "its step size divides by the standard deviation of independent noise"

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        epsilon: float = 1e-8,
        name: str = "DPAdamWOSM",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )
        _require_noise(noise_multiplier)
        self.set_beta_1(beta_1)
        self.epsilon = checks.number("epsilon", epsilon, 0)

    @property
    def noise_multiplier(self) -> float:
        """σ > 0. Setting it between steps opens a new segment of the ledger."""
        return self._mechanism.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        _require_noise(value)
        self._mechanism.noise_multiplier = value

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Moves one variable: θ ← θ − α / (σC/L + ξ) · m / (1 − β₁ᵗ).

        Args:
          gradient: G, its noisy mean gradient, which becomes part of m first.
          variable: the variable.
        """
        moment = self.next_moment(gradient, variable)
        step = effective_step_size.effective_step_size(
            self.learning_rate, self._mechanism.noise_stddev(), self.epsilon
        ) / effective_step_size.bias_correction(self.beta_1, self.iterations + 1)
        variable.assign_sub(tf.cast(step, variable.dtype) * moment)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {**super().get_config(), "epsilon": self.epsilon}


def _require_noise(noise_multiplier: float) -> None:
    if noise_multiplier == 0:
        raise ValueError(
            "`noise_multiplier` must be greater than 0: the step size is that of Adam under noise. "
            f"Received: noise_multiplier={noise_multiplier!r}"
        )
