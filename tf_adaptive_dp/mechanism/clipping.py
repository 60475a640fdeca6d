"""From the norms of per-example gradients to the weights that bound them."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks

METHODS = ("flat", "automatic")


def clip_weights(
    squared_norms: tf.Tensor, l2_norm_clip: tf.Tensor, method: str = "flat", gamma: float = 0.01
) -> tf.Tensor:
    """Weights wᵢ such that each wᵢ·gᵢ has an L2 norm of at most `l2_norm_clip`.

    - `"flat"`: wᵢ = min(1, C / ‖gᵢ‖), as in DP-SGD (Abadi et al. 2016).
    - `"automatic"`: wᵢ = C / (‖gᵢ‖ + γ), the normalised clipping of Bu et al. (2023), in which C
      only scales the learning rate.

    Guarantee: ‖wᵢ·gᵢ‖ ≤ C for every example (to float32 rounding), whatever the other examples
    are. An example whose norm is NaN or infinite, or too large for float32, gets the weight 0.

    Args:
      squared_norms: [B], ‖gᵢ‖².
      l2_norm_clip: scalar, C ≥ 1e-12 (float32 loses the squares of smaller norms).
      method: `"flat"` or `"automatic"`.
      gamma: γ > 0 of automatic clipping.

    Returns:
      [B] weights, float32.

    >>> clip_weights([0.0, 4.0, float("nan")], 1.0).numpy()
    array([1. , 0.5, 0. ], dtype=float32)
    """
    squared_norms = tf.cast(squared_norms, tf.float32)
    l2_norm_clip = tf.cast(l2_norm_clip, tf.float32)
    norms = tf.sqrt(squared_norms)
    if method == "flat":
        weights = tf.minimum(1.0, l2_norm_clip / norms)
    else:
        weights = l2_norm_clip / (norms + gamma)
    return tf.where(tf.math.is_finite(squared_norms), weights, 0.0)


def total_norms(norms: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """[R], ‖gᵢ‖² over all variables, from those of each."""
    return tf.add_n([n for n in norms if n is not None])


class Clipping(abc.ABC):
    """A way to bound gradients; frozen, of public values only."""

    def get_config(self) -> dict:
        """The arguments that make the same clipping."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict) -> Clipping:
        """Makes the clipping that `get_config` described."""
        return cls(**config)

    @abc.abstractmethod
    def weights(
        self,
        norms: Sequence[tf.Tensor | None],
        layers: Sequence[str],
        l2_norm_clip: tf.Tensor,
    ) -> tf.Tensor | list[tf.Tensor | None]:
        """The weights of the examples.

        Guarantee: the weighted gradient of each example has an L2 norm of at most C over all
        variables together; an example that is not finite gets the weight 0 for all of them.

        Args:
          norms: [R] a variable, ‖gᵢ‖² of its part, `None` without a gradient.
          layers: the layer that each variable belongs to.
          l2_norm_clip: scalar, C.

        Returns:
          [R], or one such tensor a variable.
        """


@dataclasses.dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clips the gradient for all variables as one vector; see `clip_weights`."""

    method: str = "flat"

    def weights(self, norms, layers, l2_norm_clip):
        """By the norm over all variables."""
        del layers
        return clip_weights(total_norms(norms), l2_norm_clip, self.method)


@tf.keras.saving.register_keras_serializable("tf_adaptive_dp")
@dataclasses.dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """Clips the part of each layer to a bound of its own (McMahan et al. 2018, section 3).

        C_l = C · share_l / √(Σ share²),   w_il = min(1, C_l / ‖g_il‖)

    Guarantee: Σ C_l² = C², so an example's whole gradient stays within C = `l2_norm_clip`, and the
    noise and its accounting are those of flat clipping. Layers that the loss does not reach use
    nothing of C. An example with one part that is not finite counts as zero in all layers.

    Attributes:
      shares: the share of each layer, by its name: what stands before the last "/" in the names of
        its variables. `None` gives all the same.

    Raises:
      TypeError, ValueError: for shares that are not numbers above 0, and in training if they are
        not those of the layers that are trained.

    >>> PerLayerClipping({"dense": 1.0, "dense_1": 2.0}).shares["dense_1"]
    2.0
    """

    shares: dict[str, float] | None = None

    def __post_init__(self):
        if self.shares is None:
            return
        is_dict = isinstance(self.shares, dict) and all(isinstance(k, str) for k in self.shares)
        if not is_dict or not self.shares:
            raise TypeError(
                "`shares` must be a dictionary from the names of layers to numbers. Received: "
                f"shares={self.shares!r}"
            )
        for layer, share in self.shares.items():
            checks.number(f"shares[{layer!r}]", share, 0, strict=True)

    def weights(self, norms, layers, l2_norm_clip):
        """By the norm over the variables of each layer."""
        of_layer = {
            layer: total_norms([n for n, of in zip(norms, layers) if of == layer])
            for layer in dict.fromkeys(of for n, of in zip(norms, layers) if n is not None)
        }
        self._refuse_unknown(layers)
        shares = self._shares_of(list(of_layer))
        whole = math.hypot(*shares.values())  # whose squares may be too large for a float
        finite = tf.cast(tf.math.is_finite(total_norms(list(of_layer.values()))), tf.float32)
        bounds = {
            layer: tf.cast(l2_norm_clip, tf.float32) * (s / whole) for layer, s in shares.items()
        }
        found = {k: clip_weights(n, bounds[k]) * finite for k, n in of_layer.items()}
        return [None if n is None else found[of] for n, of in zip(norms, layers)]

    def _refuse_unknown(self, layers: Sequence[str]) -> None:
        unknown = [layer for layer in self.shares or () if layer not in layers]
        if unknown:
            raise ValueError(
                "`shares` names layers that are not trained. Received: shares for "
                f"{', '.join(unknown)}; there are {', '.join(dict.fromkeys(layers))}"
            )

    def _shares_of(self, layers: list[str]) -> dict[str, float]:
        if self.shares is None:
            return dict.fromkeys(layers, 1.0)
        missing = [layer for layer in layers if layer not in self.shares]
        if missing:
            raise ValueError(
                "`shares` must name every layer that is trained. Received: shares for "
                f"{', '.join(self.shares)}; missing: {', '.join(missing)}"
            )
        return {layer: self.shares[layer] for layer in layers}


def serialize(clipping: Clipping) -> str | dict:
    """What makes the same clipping again: its name, or a Keras configuration."""
    if isinstance(clipping, FlatClipping):
        return clipping.method
    return tf.keras.saving.serialize_keras_object(clipping)


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
