"""Noise from the operating system's cryptographic generator, safe against floating point."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.graph import in_xla
from tf_adaptive_dp.gradients.released import mark_released
from tf_adaptive_dp.mechanism import replicas

# Steps of the grid in units of C/√d; 2 to the power of this.
_FINENESS = 26
# √(-2 log 2⁻⁵⁴), beyond which Box and Muller's method gives nothing.
_LARGEST_NUMBER = 8.66


def _normal_numbers(size: int) -> np.ndarray:
    """[size] from N(0, 1), float64: Box and Muller's method on 53 random bits each."""
    pairs = -(-size // 2)
    words = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
    u = (words + 0.5) * 2.0**-53  # never 0 or 1
    radius, angle = np.sqrt(-2.0 * np.log(u[0])), 2.0 * math.pi * u[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


class SecureNoise:
    """Gaussian noise that neither its generator nor its last bits give away.

    Guarantee:
    - The bits come from `os.urandom`, the cryptographic generator of the operating system. Nobody
      can foretell or repeat them; there is no seed, and nothing to save.
    - What is released lies on a grid of step g = 2^⌊log₂(C·2⁻²⁶/√d)⌋ for d numbers, whatever the
      data are: the sum s is rounded to the grid, the noise z as well, and both are added exactly
      (as int64 multiples of g; more noise than 2⁵³·g, up to which float64 holds every multiple, is
      refused). Since s is on the grid, s + round(z) = round(s + z): post-processing of the Gaussian
      mechanism in real numbers, and so is the rounding of the result to float32. So the set of
      possible results tells nothing, which is what the attack of Mironov (2012) lives on.
    - Rounding moves s by g/2 a coordinate, which raises the sensitivity to C + g·√d at most; the
      noise is made larger by the same factor, 1 + 2⁻²⁶.
    Not covered: the rounding of float32 while the clipped sum itself is computed, and differences
    in time. The logarithm and the sine of the C library are exact to about 2⁻⁵², not perfectly.
    """

    seed = None

    def __init__(self, add_variable: Callable[..., tf.Variable]):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
        """
        self._counter = add_variable([], dtype=tf.int64, name="noise_counter")

    def add_to(
        self, sums: Sequence[tf.Tensor], stddev: tf.Tensor, sensitivity: tf.Tensor
    ) -> list[tf.Tensor]:
        """Adds the noise of one release.

        Args:
          sums: float32 tensors.
          stddev: scalar, that of each entry.
          sensitivity: scalar, how much one example can change the sums, in L2 norm.

        Returns:
          float32 tensors.

        Raises:
          NotPrivateError: where it cannot be had: under XLA, and on several replicas.
        """
        if in_xla():
            raise NotPrivateError(
                "XLA cannot call the operating system's generator. Received: secure_noise=True "
                "under `jit_compile=True`. Train without `jit_compile`."
            )
        if replicas.num_replicas() > 1:
            raise NotPrivateError(
                "The sum over replicas is rounded after the noise, which secure noise is to "
                "prevent. Received: secure_noise=True under a strategy of several replicas. Train "
                "on one."
            )
        self._counter.assign_add(1)
        sizes = [tf.size(s) for s in sums]
        flat = tf.concat([tf.reshape(s, [-1]) for s in sums], axis=0)
        noisy = tf.numpy_function(_release, [flat, stddev, sensitivity], tf.float32)
        mark_released(noisy)  # Python keeps nothing of it
        parts = tf.split(tf.ensure_shape(noisy, flat.shape), sizes)
        return [tf.reshape(part, tf.shape(s)) for part, s in zip(parts, sums)]


def _release(flat: np.ndarray, stddev: float, sensitivity: float) -> np.ndarray:
    """Sums and noise on the grid, exactly added, as float32."""
    if not flat.size:
        return flat
    fineness = 2.0**-_FINENESS
    grid = 2.0 ** math.floor(math.log2(float(sensitivity) * fineness / math.sqrt(flat.size)))
    unit = float(stddev) * (1 + fineness) / grid
    if unit * _LARGEST_NUMBER >= 2.0**53:
        raise ValueError(
            "So much noise has no exact place on the grid of secure noise. Received: a standard "
            f"deviation of {float(stddev):g} for a sensitivity of {float(sensitivity):g} and "
            f"{flat.size} numbers. Use less, or train without `secure_noise`."
        )
    # Dividing by a power of two is exact; so are sums of int64.
    steps = np.rint(flat.astype(np.float64) / grid).astype(np.int64)
    steps += np.rint(unit * _normal_numbers(flat.size)).astype(np.int64)
    return (steps * grid).astype(np.float32)
