"""DPAdamWOSM: Adam without second moments, whose limit under noise is known in advance.

These are pure functions of tensors.

References:
  - Mohapatra et al., "The Role of Adaptive Optimizers for Honest Private Hyperparameter Selection"
    (2021), arXiv:2111.04906, section 6.
"""

from __future__ import annotations

import tensorflow as tf


def effective_step_size(
    learning_rate: tf.Tensor, noise_stddev: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Theorem 3: the step size that DPAdam converges to, α / (σC/L + ξ).

    Args:
      learning_rate: α.
      noise_stddev: σC/L, the standard deviation of the noise in the mean gradient.
      epsilon: ξ.

    Returns:
      Scalar, float32.

    >>> print(f"{effective_step_size(0.001, 4.0 * 0.5 / 250, 1e-8).numpy():.4f}")
    0.1250
    """
    return tf.cast(learning_rate, tf.float32) / (tf.cast(noise_stddev, tf.float32) + epsilon)


def first_moment(moment: tf.Tensor, gradient: tf.Tensor, beta: float) -> tf.Tensor:
    """m ← β·m + (1 − β)·g.

    Args:
      moment: m.
      gradient: g, of the same shape.
      beta: β in [0, 1).

    Returns:
      The next m.
    """
    return beta * moment + (1.0 - beta) * gradient


def bias_correction(beta: float, num_steps: tf.Tensor) -> tf.Tensor:
    """The divisor 1 − βᵗ of a moment that started at zero, after t steps.

    Args:
      beta: β in [0, 1).
      num_steps: t ≥ 1.

    Returns:
      Scalar, float32.
    """
    return 1.0 - tf.pow(tf.cast(beta, tf.float32), tf.cast(num_steps, tf.float32))
