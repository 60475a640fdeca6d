"""Gaussian noise that resists attacks on its generator and on floating-point arithmetic."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.released import mark_released
from tf_adaptive_dp.mechanism import replicas

# The grid has steps of 2⁻²⁶ in units of C/√d, or coarser ones if there is too much noise for them.
_FINENESS = 26
_COARSEST = 10
# √(-2 log 2⁻⁵⁴), the largest number that the Box-Muller method gives.
_LARGEST_NUMBER = 8.66


def _normal_numbers(size: int) -> np.ndarray:
    """[size] numbers from N(0, 1), float64: the Box-Muller method on 53 random bits each."""
    pairs = -(-size // 2)
    words = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
    u = (words + 0.5) * 2.0**-53  # never 0 or 1
    radius, angle = np.sqrt(-2.0 * np.log(u[0])), 2.0 * math.pi * u[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


class SecureNoise:
    """Gaussian noise whose generator and last bits reveal nothing.

    Guarantee:
    - The bits come from `os.urandom`, the cryptographic generator of the operating system. Nobody
      can predict or repeat them. There is no seed, and nothing to save.
    - Released values lie on a grid that does not depend on the data, see `on_grid`. Rounding the
      result to float32 is post-processing.

    Not covered: float32 rounding while the clipped sum is computed, and timing differences. The
    logarithm and the sine of the C library are exact to about 2⁻⁵², not perfectly.

    References:
      - Mironov, "On Significance of the Least Significant Bits for Differential Privacy" (2012),
        CCS '12.
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
          stddev: scalar, the standard deviation of each entry's noise.
          sensitivity: scalar, by how much one example can change the sums in L2 norm.

        Returns:
          float32 tensors.

        Raises:
          NotPrivateError: under XLA and on several replicas, which cannot have secure noise.
        """
        if in_xla():
            raise NotPrivateError(
                "XLA cannot call the operating system's generator. Received: secure_noise=True "
                "under `jit_compile=True`. Train without `jit_compile`."
            )
        if replicas.num_replicas() > 1:
            raise NotPrivateError(
                "Secure noise supports one replica: summing across replicas rounds after the "
                "noise. Received: secure_noise=True under a strategy of several replicas. Train on "
                "one."
            )
        self._counter.assign_add(1)
        sizes = [tf.size(s) for s in sums]
        flat = tf.concat([tf.reshape(s, [-1]) for s in sums], axis=0)
        noisy = tf.numpy_function(_release, [flat, stddev, sensitivity], tf.float32)
        mark_released(noisy)  # Python keeps nothing of it
        parts = tf.split(tf.ensure_shape(noisy, flat.shape), sizes)
        return [tf.reshape(part, tf.shape(s)) for part, s in zip(parts, sums)]


def _release(flat: np.ndarray, stddev: float, sensitivity: float) -> np.ndarray:
    """`on_grid` in float32."""
    return on_grid(flat, float(stddev), float(sensitivity)).astype(np.float32)


def on_grid(values: np.ndarray, stddev: float, sensitivity: float) -> np.ndarray:
    """Adds Gaussian noise whose bits, and those of the result, reveal nothing.

    Guarantee: the Gaussian mechanism with noise multiplier stddev / sensitivity, in computer
    arithmetic, too.

    - The noise comes from `os.urandom`.
    - The result lies on a grid of step g = 2^⌊log₂(sensitivity·2⁻ᶠ/√d)⌋ for d numbers, whatever
      the data; f is 26, or as small as 10 where there is so much noise that float64 would not hold
      every multiple of g. The values s and the noise z are both rounded to the grid and added
      exactly, as int64 multiples of g. Since s is on the grid, round(s + z) = s + round(z) is
      post-processing of the Gaussian mechanism in real numbers. The set of possible results
      therefore reveals nothing, while the attack of Mironov (2012) relies on it.
    - Rounding moves s by up to g/2 per coordinate, which raises the sensitivity by at most g·√d.
      The noise grows by the same factor, 1 + 2⁻ᶠ.

    Args:
      values: floats, of any shape.
      stddev: the standard deviation of each one's noise.
      sensitivity: by how much one example can change the values in L2 norm.

    Returns:
      float64, of the same shape.

    Raises:
      ValueError: if no such grid holds this much noise.
    """
    if not values.size:
        return values
    largest = stddev / sensitivity * math.sqrt(values.size) * _LARGEST_NUMBER
    fineness = min(_FINENESS, 51 - math.ceil(math.log2(max(largest, 1.0))))
    if fineness < _COARSEST:
        raise ValueError(
            "No grid of secure noise can hold this much noise exactly. Received: a standard "
            f"deviation of {stddev:g} for a sensitivity of {sensitivity:g} and {values.size} "
            "numbers. Use less noise, or train without `secure_noise`."
        )
    grid = 2.0 ** math.floor(math.log2(sensitivity * 2.0**-fineness / math.sqrt(values.size)))
    unit = stddev * (1 + 2.0**-fineness) / grid
    # Dividing by a power of two is exact; so are sums of int64. The bound moves neighbors together.
    steps = np.rint(np.clip(values.astype(np.float64) / grid, -(2.0**62), 2.0**62)).astype(np.int64)
    steps += np.rint(unit * _normal_numbers(values.size)).astype(np.int64).reshape(values.shape)
    return steps * grid
