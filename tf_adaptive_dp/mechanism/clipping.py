"""Clipping: from the norms of per-example gradients to the weights that bound them, and the bound.

Flat, automatic, per-layer and adaptive clipping are frozen objects of public values. A gradient
source gives the squared norms and takes the weights, so no per-example gradient is ever held.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.mechanism.batch_sizes import hyperparameter
from tf_adaptive_dp.mechanism.histograms import Histograms

# The range of C. It is far wider than any use, and float32 holds the squares of such norms.
SMALLEST, LARGEST = 1e-12, 1e12
# In place of a number: the first batches measure C.
MEASURED = "measured"
# A measured C in units of the upper quartile of the norms: most gradients are clipped, which suits
# private training, at the start and after most of them have shrunk.
_CLIP_PER_NORM = 0.1


def clip_weights(
    squared_norms: tf.Tensor, l2_norm_clip: tf.Tensor, method: str = "flat", gamma: float = 0.01
) -> tf.Tensor:
    """Weights wᵢ for which every wᵢ·gᵢ has an L2 norm of at most `l2_norm_clip`.

    - `"flat"`: wᵢ = min(1, C / ‖gᵢ‖), as in DP-SGD.
    - `"automatic"`: wᵢ = C / (‖gᵢ‖ + γ), which normalizes gradients, so that C only scales the
      learning rate.

    Guarantee: ‖wᵢ·gᵢ‖ ≤ C for every example, to float32 rounding, whatever the other examples are.
    An example gets the weight 0 if its norm is NaN, infinite or too large for float32.

    Args:
      squared_norms: [B], ‖gᵢ‖².
      l2_norm_clip: scalar, C ≥ 1e-12. Squares of smaller norms vanish in float32.
      method: `"flat"` or `"automatic"`.
      gamma: γ > 0 of automatic clipping.

    Returns:
      [B], the weights in float32.

    References:
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.
      - Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and
        Stronger" (2022), arXiv:2206.07136.

    >>> clip_weights([0.0, 4.0, float("nan")], 1.0).numpy()
    array([1. , 0.5, 0. ], dtype=float32)
    """
    squared_norms = tf.cast(squared_norms, tf.float32)
    l2_norm_clip = tf.cast(l2_norm_clip, tf.float32)
    norms = tf.sqrt(squared_norms)
    if method == "flat":
        # The share of a layer may be 0 in float32, and 0/0 would not be a weight.
        weights = tf.where(norms > 0, tf.minimum(1.0, l2_norm_clip / norms), 1.0)
    else:
        weights = l2_norm_clip / (norms + gamma)
    return tf.where(tf.math.is_finite(squared_norms), weights, 0.0)


def total_norms(norms: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """[R], ‖gᵢ‖² over all variables, from the squared norms of each variable's part."""
    return tf.add_n([n for n in norms if n is not None])


class Clipping(abc.ABC):
    """A way to bound gradients, defined by public values only."""

    def get_config(self) -> dict:
        """The arguments that make the same clipping."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses

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
        """The weights that bound each example's gradient.

        Guarantee: the weighted gradient of each example has an L2 norm of at most C over all
        variables together. An example that is not finite gets the weight 0 for all of them.

        Args:
          norms: for each variable [R], ‖gᵢ‖² of its part; `None` if it has no gradient.
          layers: the layer that each variable belongs to.
          l2_norm_clip: scalar, C.

        Returns:
          [R], or one such tensor per variable.
        """


@dataclasses.dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clips the gradient for all variables as one vector.

    Attributes:
      method: `"flat"` or `"automatic"`, see `clip_weights`.
    """

    method: str = "flat"

    def weights(
        self,
        norms: Sequence[tf.Tensor | None],
        layers: Sequence[str],
        l2_norm_clip: tf.Tensor,
    ) -> tf.Tensor:
        """The weights from the norm over all variables; see `Clipping`."""
        del layers
        return clip_weights(total_norms(norms), l2_norm_clip, self.method)


@keras.saving.register_keras_serializable("tf_adaptive_dp")
@dataclasses.dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """Clips each layer's part of a gradient to a bound of its own.

        C_l = C · share_l / √(Σ share²),   w_il = min(1, C_l / ‖g_il‖)

    Guarantee: Σ C_l² = C², so an example's whole gradient stays within C = `l2_norm_clip`. Noise
    and accounting are those of flat clipping. Layers that the loss does not reach use no part of C.
    An example counts as zero in all layers if its part for one layer is not finite.

    Attributes:
      shares: the share of each layer by the layer's name, which is the part before the last "/" in
        the names of its variables (`variable.path` in Keras 3). Its last parts are enough if no
        other layer's name ends with them. `None` gives all layers equal shares.

    Raises:
      TypeError, ValueError: if a share is not a number above 0; in training, if the shares do not
        name exactly the layers that are trained.

    References:
      - McMahan et al., "A General Approach to Adding Differential Privacy to Iterative Training
        Procedures" (2018), arXiv:1812.06210, section 3.

    >>> PerLayerClipping({"dense": 1.0, "dense_1": 2.0}).shares["dense_1"]
    2.0
    """

    shares: dict[str, float] | None = None

    def __post_init__(self) -> None:
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

    def weights(
        self,
        norms: Sequence[tf.Tensor | None],
        layers: Sequence[str],
        l2_norm_clip: tf.Tensor,
    ) -> list[tf.Tensor | None]:
        """The weights from the norm over the variables of each layer; see `Clipping`."""
        of_layer = {
            layer: total_norms([n for n, of in zip(norms, layers) if of == layer])
            for layer in dict.fromkeys(of for n, of in zip(norms, layers) if n is not None)
        }
        shares = self._shares_of(list(of_layer), layers)
        whole = math.hypot(*shares.values())  # their squares may be too large for a float
        finite = tf.cast(tf.math.is_finite(total_norms(list(of_layer.values()))), tf.float32)
        bounds = {
            layer: tf.cast(l2_norm_clip, tf.float32) * (s / whole) for layer, s in shares.items()
        }
        found = {k: clip_weights(n, bounds[k]) * finite for k, n in of_layer.items()}
        return [None if n is None else found[of] for n, of in zip(norms, layers)]

    def _shares_of(self, reached: list[str], layers: Sequence[str]) -> dict[str, float]:
        """The shares of the layers that the loss reaches, among all that are trained."""
        if self.shares is None:
            return dict.fromkeys(reached, 1.0)
        by_layer = checks.by_path("shares", "layer", self.shares, layers)
        missing = [layer for layer in reached if layer not in by_layer]
        if missing:
            raise ValueError(
                "`shares` must name every layer that is trained. Received: shares for "
                f"{', '.join(self.shares)}; missing: {', '.join(missing)}"
            )
        return {layer: by_layer[layer] for layer in reached}


@keras.saving.register_keras_serializable("tf_adaptive_dp")
@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(Clipping):
    """Moves the clip norm C towards a quantile of the gradients' norms.

    Each release also counts how many examples lie within C, with noise of its own:

        b̃ = 1/2 + (Σᵢ (1[‖gᵢ‖ ≤ C] − 1/2) + N(0, σ_b²)) / L,   C ← C · exp(−η·(b̃ − γ))

    In return, the gradients get slightly more noise than σ: σ_Δ = σ / √(1 − (σ / 2σ_b)²).

    Guarantee: the two releases together are one Gaussian mechanism with the noise multiplier σ,
    since 1/σ² = 1/σ_Δ² + 1/(2σ_b)² (Theorem 1 of the paper). The ledger records σ. C depends on
    noisy counts only, so it may be published. Padding is not counted either way.

    Attributes:
      target_quantile: γ in [0, 1], the share of examples that should lie within C.
      learning_rate: η > 0.
      count_noise_multiplier: σ_b, the standard deviation of the noise in the count, above σ/2.
        `None` uses the larger of σ and L/20, the value in the paper.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range.

    References:
      - Andrew et al., "Differentially Private Learning with Adaptive Clipping" (2019),
        arXiv:1905.03871, Algorithm 1.

    >>> AdaptiveClipping(target_quantile=0.7).target_quantile
    0.7
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        checks.keep(self, checks.number, "target_quantile", 0)
        if self.target_quantile > 1:
            raise ValueError(
                "`target_quantile` must be at most 1. Received: "
                f"target_quantile={self.target_quantile!r}"
            )
        checks.keep(self, checks.number, "learning_rate", 0, strict=True)
        if self.count_noise_multiplier is not None:
            checks.keep(self, checks.number, "count_noise_multiplier", 0, strict=True)

    def check_noise(self, noise_multiplier: float) -> None:
        """Raises ValueError if the count alone would use up the privacy of this σ."""
        count_noise = self.count_noise_multiplier
        if count_noise is not None and noise_multiplier >= 2 * count_noise:
            raise ValueError(
                "`count_noise_multiplier` must be above half of `noise_multiplier`. Otherwise the "
                "count alone would cost more than both releases are allowed to. Received: "
                f"count_noise_multiplier={count_noise}, noise_multiplier={noise_multiplier}"
            )

    def weights(
        self,
        norms: Sequence[tf.Tensor | None],
        layers: Sequence[str],
        l2_norm_clip: tf.Tensor,
    ) -> tf.Tensor:
        """The weights of flat clipping with the present C; see `Clipping`."""
        del layers
        return clip_weights(total_norms(norms), l2_norm_clip)

    def count(
        self, squared_norms: tf.Tensor, present: tf.Tensor, l2_norm_clip: tf.Tensor
    ) -> tf.Tensor:
        """Σᵢ (1[‖gᵢ‖ ≤ C] − 1/2) over the examples that are present.

        Guarantee: adding or removing one example changes it by at most 1/2.

        Args:
          squared_norms: [R], ‖gᵢ‖².
          present: [R], whether the row is an example, and not padding.
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


def get_clipping(value: Any) -> Clipping:
    """Returns the clipping that an argument stands for, as `tf.keras.losses.get` does for losses.

    Args:
      value: a `Clipping`, its name, or what `serialize` returned.

    Raises:
      ValueError: if there is no clipping of that name.
    """
    if isinstance(value, dict):
        value = keras.saving.deserialize_keras_object(value)
    if isinstance(value, Clipping):
        return value
    named = {
        "flat": FlatClipping("flat"),
        "automatic": FlatClipping("automatic"),
        "per_layer": PerLayerClipping(),
        "adaptive": AdaptiveClipping(),
    }
    return named[checks.choice("clipping", value, tuple(named))]


def serialize(clipping: Clipping) -> str | dict:
    """Describes a clipping for `get_clipping`: by its name, or by a Keras configuration."""
    if isinstance(clipping, FlatClipping):
        return clipping.method
    return keras.saving.serialize_keras_object(clipping)


class ClipNorm:
    """C, the bound on the norm of each example's gradient: given, adaptive or measured.

    Guarantee: a C that is learned depends on released counts only, so it may be published and steps
    may depend on it.

    Attributes:
      is_measured: whether the first batches measure C.

    Args:
      value: C, or `"measured"`.
      clipping: an `AdaptiveClipping` moves C.
      add_variable: makes a variable that is saved with the optimizer.

    Raises:
      TypeError, ValueError: if `value` is neither a number of at least 1e-12 nor `"measured"`.
    """

    def __init__(
        self, value: float | str, clipping: Clipping, add_variable: Callable[..., tf.Variable]
    ):
        self.is_measured = isinstance(value, str) and value == MEASURED
        self._is_adaptive = isinstance(clipping, AdaptiveClipping)
        if self.is_learned:  # C is state, like the weights
            self._clip = add_variable([], dtype=tf.float64, name="l2_norm_clip")
        else:
            self._clip = hyperparameter(1.0)
        if self._is_adaptive:  # and so is the C of the last release
            self._released = add_variable([], dtype=tf.float64, name="released_clip")
        self._assign(1.0 if self.is_measured else value)

    def _assign(self, value: Any) -> None:
        self._clip.assign(checks.number("l2_norm_clip", value, SMALLEST))

    @property
    def value(self) -> float:
        """C of the next release, 1 until a measured one is known; it may be set between steps."""
        return float(self._clip.numpy())

    @value.setter
    def value(self, value: float) -> None:
        self._assign(value)

    @property
    def is_learned(self) -> bool:
        """Whether C comes from released counts: of the first batches, or of each one."""
        return self._is_adaptive or self.is_measured

    def read(self) -> tf.Tensor:
        """C of the next release, a float64 scalar."""
        return self._clip.read_value()

    def of_last_release(self) -> tf.Tensor:
        """C of the last release, a float64 scalar; 0 before the first one of an adaptive C."""
        return (self._released if self._is_adaptive else self._clip).read_value()

    def learned(self) -> tf.Tensor | None:
        """The C of the last gradients if it was learned, scalar; otherwise `None`."""
        if not self.is_learned:
            return None
        released = self.of_last_release()
        return tf.where(released > 0, released, self.read()) if self._is_adaptive else released

    def adapt(
        self, clipping: AdaptiveClipping, used: tf.Tensor, count: tf.Tensor, batch_size: tf.Tensor
    ) -> list[tf.Tensor]:
        """Moves C after a release; callers take turns.

        Args:
          clipping: says how far.
          used: the C that the release clipped to.
          count: scalar, the released count, see `AdaptiveClipping.next_clip`.
          batch_size: scalar, L.

        Returns:
          Tensors that become available when C is written.
        """
        now = self.read()  # other threads may have moved it since
        to = clipping.next_clip(now, count, batch_size)
        written = (self._released.assign(used), self._clip.assign(to))
        return [tf.convert_to_tensor(variable) for variable in written]

    def measure(self, histograms: Histograms) -> tf.Tensor:
        """Sets C from the histograms if they have just become complete; callers take turns.

        Returns:
          A tensor that becomes available when C is written.
        """
        known = histograms.released() & ~histograms.are_open()
        to = tf.clip_by_value(_CLIP_PER_NORM * histograms.sizes().norms[0], SMALLEST, LARGEST)
        return tf.convert_to_tensor(self._clip.assign(tf.where(known, to, self.read())))
