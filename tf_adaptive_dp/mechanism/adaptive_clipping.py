"""A clip norm that follows a quantile of the gradients' norms, privately."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.mechanism.clipping import Clipping, clip_weights, total_norms

# Far beyond any use; float32 holds the squares of such norms.
SMALLEST, LARGEST = 1e-12, 1e12


@tf.keras.saving.register_keras_serializable("tf_adaptive_dp")
@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(Clipping):
    """Moves the clip norm C towards a quantile of the norms (Andrew et al. 2021, Algorithm 1).

    Each release also counts, with noise of its own, how many examples lie within C:

        b̃ = 1/2 + (Σᵢ (1[‖gᵢ‖ ≤ C] − 1/2) + N(0, σ_b²)) / L,   C ← C · exp(−η·(b̃ − γ))

    and the gradients get σ_Δ = σ / √(1 − (σ / 2σ_b)²), a little more than σ.

    Guarantee: both releases together are one Gaussian mechanism with the noise multiplier σ,
    1/σ² = 1/σ_Δ² + 1/(2σ_b)² (Theorem 1 there), and that is what the ledger holds. C is computed
    from noisy counts, so it may be published. An absent example (padding) counts neither way.

    Attributes:
      target_quantile: γ, in [0, 1]: the share of examples that should lie within C.
      learning_rate: η > 0.
      count_noise_multiplier: σ_b, the standard deviation of the noise in the count, above σ/2.
        `None` takes L/20, as the paper does, or σ if that is more.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.

    >>> AdaptiveClipping(target_quantile=0.7).target_quantile
    0.7
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float | None = None

    def __post_init__(self):
        if checks.number("target_quantile", self.target_quantile, 0) > 1:
            raise ValueError(
                "`target_quantile` must be at most 1. Received: "
                f"target_quantile={self.target_quantile!r}"
            )
        checks.number("learning_rate", self.learning_rate, 0, strict=True)
        if self.count_noise_multiplier is not None:
            checks.number("count_noise_multiplier", self.count_noise_multiplier, 0, strict=True)

    def check_noise(self, noise_multiplier: float) -> None:
        """Raises ValueError if no noise is left for the gradients at this σ."""
        count_noise = self.count_noise_multiplier
        if count_noise is not None and noise_multiplier >= 2 * count_noise:
            raise ValueError(
                "`count_noise_multiplier` must be above half of `noise_multiplier`: the count "
                "alone would cost more than both may. Received: "
                f"count_noise_multiplier={count_noise}, noise_multiplier={noise_multiplier}"
            )

    def weights(self, norms, layers, l2_norm_clip):
        """As in flat clipping, with the present C."""
        del layers
        return clip_weights(total_norms(norms), l2_norm_clip)

    def count(
        self, squared_norms: tf.Tensor, present: tf.Tensor, l2_norm_clip: tf.Tensor
    ) -> tf.Tensor:
        """Σᵢ (1[‖gᵢ‖ ≤ C] − 1/2) over the examples that are present.

        Guarantee: one example changes it by 1/2 at most.

        Args:
          squared_norms: [R], ‖gᵢ‖².
          present: [R], whether there is an example at all.
          l2_norm_clip: scalar, C.
        """
        within = tf.sqrt(squared_norms) <= tf.cast(l2_norm_clip, tf.float32)
        return tf.reduce_sum(tf.where(present, tf.where(within, 0.5, -0.5), 0.0))

    def split_noise(
        self, noise_multiplier: tf.Tensor, batch_size: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """(σ_Δ, σ_b) for σ and L, float64 scalars; both 0 for σ = 0."""
        sigma = tf.cast(noise_multiplier, tf.float64)
        if self.count_noise_multiplier is None:
            count_noise = tf.maximum(tf.cast(batch_size, tf.float64) / 20, sigma)
        else:
            count_noise = tf.constant(self.count_noise_multiplier, tf.float64)
        gradient_noise = sigma / tf.sqrt(1 - tf.square(sigma / (2 * count_noise)))
        return gradient_noise, tf.where(sigma > 0, count_noise, 0.0)

    def next_clip(
        self, l2_norm_clip: tf.Tensor, noisy_count: tf.Tensor, batch_size: tf.Tensor
    ) -> tf.Tensor:
        """C of the next step, float64.

        Args:
          l2_norm_clip: scalar, C.
          noisy_count: scalar, `count` with its noise.
          batch_size: scalar, L.
        """
        share = 0.5 + tf.cast(noisy_count, tf.float64) / tf.cast(batch_size, tf.float64)
        factor = tf.exp(-self.learning_rate * (share - self.target_quantile))
        return tf.clip_by_value(tf.cast(l2_norm_clip, tf.float64) * factor, SMALLEST, LARGEST)
