"""PDA-DPMD: private gradients mixed with public ones."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import deserialize, serialize
from tf_adaptive_dp.side_information.public_gradients import PublicGradients


@register
class CosineMixing(tf.keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of Amid et al. for `PDADPMD`: private gradients first, public ones last.

        αₜ = cos(π·t / (2K)) for t < K, and 0 from step K on

    Args:
      num_steps: K, such as the number of steps of the whole run.

    Raises:
      TypeError, ValueError: if `num_steps` is not a whole number of at least 1.

    References:
      - Amid et al., "Public Data-Assisted Mirror Descent for Private Model Training" (2021),
        arXiv:2112.00193.

    >>> schedule = CosineMixing(100)
    >>> print(f"{schedule(0):.3f} {schedule(50):.3f} {schedule(200):.3f}")
    1.000 0.707 0.000
    """

    def __init__(self, num_steps: int):
        self.num_steps = checks.integer("num_steps", num_steps, 1)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """αₜ as a float32 scalar.

        Args:
          step: t, the steps taken so far.
        """
        share = tf.minimum(tf.cast(step, tf.float32) / self.num_steps, 1.0)
        return tf.maximum(tf.cos(math.pi / 2 * share), 0.0)

    def get_config(self) -> dict:
        """The arguments that make the same schedule."""
        return {"num_steps": self.num_steps}


@register
@fill_docstring
class PDADPMD(DPOptimizer, tf.keras.optimizers.SGD):
    """PDA-DPMD: mixes private gradients with gradients on public data.

    This is the practical form of public data-assisted mirror descent, which the AdaDPS paper uses
    as a baseline (section 6.1.1). With the noisy mean gradient G of `DPSGD`, and the gradient g of
    the mean loss on a public batch at the same weights:

        θ ← θ − η·(αₜ·G + (1 − αₜ)·g)

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger.
    Mixing it with public gradients is post-processing.

    Args:
      side_information: `PublicGradients` with `rule="gradient"`. Also pass it to `fit` as a
        callback.
      {{mechanism_args}}
      mixing: α, a number from 0 to 1 or a schedule. The paper uses `CosineMixing(num_steps)`.
        Values of a schedule are clipped to [0, 1].
      learning_rate: η, a number or a schedule.
      **kwargs: the arguments of `tf.keras.optimizers.SGD`, such as `momentum`.

    Raises:
      {{raises}}

    References:
      - Amid et al., "Public Data-Assisted Mirror Descent for Private Model Training" (2021),
        arXiv:2112.00193.
      - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963.

    >>> public = PublicGradients(None, rule="gradient", provenance="public")
    >>> optimizer = PDADPMD(public, 1.0, 1.1, mixing=CosineMixing(1_000))
    >>> optimizer.mixing.num_steps
    1000
    """

    def __init__(
        self,
        side_information: PublicGradients,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        mixing: float | tf.keras.optimizers.schedules.LearningRateSchedule,
        learning_rate: Any = 0.01,
        name: str = "PDADPMD",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            side_information=Preconditioning(
                check_side_information(side_information, rule="gradient"), before_clipping=False
            ),
            learning_rate=learning_rate,
            name=name,
            **kwargs,
        )
        self.mixing = _check_mixing(mixing)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, *rate: Any) -> None:
        """Takes the SGD step of one variable along αₜ·G + (1 − αₜ)·g.

        Args:
          gradient: G, its noisy mean gradient.
          variable: the variable.
          *rate: the learning rate, which Keras 3 passes.
        """
        alpha = self.mixing
        if isinstance(alpha, tf.keras.optimizers.schedules.LearningRateSchedule):
            alpha = tf.clip_by_value(alpha(self.iterations), 0.0, 1.0)
        alpha = tf.cast(alpha, gradient.dtype)
        _, public = self._preconditioning.scale_and_shift(self, [variable])
        if public is None:
            raise ValueError("`side_information` must give public gradients. Received: none")
        mixed = alpha * gradient + (1 - alpha) * tf.cast(public[0], gradient.dtype)
        super().update_step(mixed, variable, *rate)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {**super().get_config(), "mixing": _serialize_mixing(self.mixing)}


def _serialize_mixing(
    mixing: float | tf.keras.optimizers.schedules.LearningRateSchedule,
) -> float | dict:
    """Describes a schedule by the name it is registered under, which Keras's old formats lose."""
    if not isinstance(mixing, tf.keras.optimizers.schedules.LearningRateSchedule):
        return mixing
    name = keras.saving.get_registered_name(type(mixing))
    if keras.saving.get_registered_object(name) is type(mixing):
        return serialize(mixing)
    return tf.keras.optimizers.schedules.serialize(mixing)


def _check_mixing(mixing: Any) -> float | tf.keras.optimizers.schedules.LearningRateSchedule:
    if isinstance(mixing, dict):  # from a saved configuration
        by_keras = "class_name" in mixing
        read = tf.keras.optimizers.schedules.deserialize if by_keras else deserialize
        mixing = read(mixing)
    if isinstance(mixing, tf.keras.optimizers.schedules.LearningRateSchedule):
        return mixing
    mixing = checks.number("mixing", mixing, 0)
    if mixing > 1:
        raise ValueError(f"`mixing` must be at most 1. Received: mixing={mixing!r}")
    return mixing
