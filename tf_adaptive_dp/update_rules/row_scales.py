"""Scales for the rows of kernels, from gradients that were released before.

Let m be the mean of n released gradients of a kernel of [rows, outputs], with A divided out again,
b the variance of its noise, which is known, and b₀ what that would be after all t releases so far
if there had been no A. With r = √(2/outputs), the energy of a row is

    v = ē          where ē = mean over outputs of m² − b  is above 2·r·b,
    v = r·max(b, b₀)   elsewhere

What is left of pure noise has the standard deviation r·b. So rows without a signal that can be seen
get what a row just below the noise would get. Without b₀ they would be raised further each time,
since A lowers their noise. Gradients are then multiplied by

    A = √(mean over rows of v / v)

before they are clipped, which gives all rows the same energy and leaves the whole energy of the
released gradient as it was.

References:
  - Li et al., "Differentially Private Adaptive Optimization with Delayed Preconditioners" (2023),
    arXiv:2212.00309. Its root mean squares per coordinate have a constant in place of the floor.
"""

from __future__ import annotations

import tensorflow as tf

_SIGNIFICANT = 2.0  # standard deviations


def energies(mean: tf.Tensor, noise: tf.Tensor, plain_noise: tf.Tensor) -> tf.Tensor:
    """v, the energy of each row without that of its noise, but not below the floor.

    Args:
      mean: m, [rows, outputs].
      noise: b, [rows, 1], the variance of the noise in each entry of a row of m.
      plain_noise: b₀, [rows, 1].

    Returns:
      [rows, 1].

    >>> mean, one = tf.constant([[3.0, 3.0], [1.5, 1.5], [0.1, 0.1]]), tf.ones([3, 1])
    >>> energies(mean, one, 0.1 * one).numpy().ravel().tolist()
    [8.0, 1.0, 1.0]
    """
    ratio = tf.sqrt(2 / tf.cast(tf.shape(mean)[1], mean.dtype))
    above = tf.reduce_mean(tf.square(mean), axis=1, keepdims=True) - noise
    floor = ratio * tf.maximum(noise, plain_noise)
    return tf.where(above > _SIGNIFICANT * ratio * noise, above, floor)


def row_scales(energy: tf.Tensor) -> tf.Tensor:
    """A, which gives all rows the same energy.

    Args:
      energy: v, [rows, 1], not negative.

    Returns:
      [rows, 1]. Rows without energy, which have neither signal nor noise, get the largest A of the
      others; if there are no others, 1.

    >>> [round(float(a), 2) for a in tf.reshape(row_scales(tf.constant([[8.0], [0.5]])), [-1])]
    [0.73, 2.92]
    """
    # In units of the largest, since squares of small gradients leave the range of float32 soon.
    largest = tf.reduce_max(energy)
    usable = (largest > 0) & tf.math.is_finite(largest)
    relative = energy / tf.where(usable, largest, tf.ones_like(largest))
    there = relative > 0
    smallest = tf.reduce_min(tf.where(there, relative, tf.ones_like(relative)))
    relative = tf.where(there, relative, smallest)
    scales = tf.sqrt(tf.reduce_mean(relative) / relative)
    return tf.where(usable, scales, tf.ones_like(scales))
