"""From the norms of per-example gradients to the weights that bound them."""

from __future__ import annotations

import tensorflow as tf

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
