"""The only place where privacy noise is drawn."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Callable

import tensorflow as tf


class GaussianNoise:
    """Independent Gaussian noise for a list of tensors, one draw a release.

    The numbers come from TensorFlow's counter-based generator (Philox on CPU and GPU), keyed with
    64 bits of the operating system's entropy. That is a good statistical generator, not a
    cryptographic one.

    Guarantee: with `seed=None` no two releases share noise. The key is made anew for every object,
    also for a copy and for a run that was restored from a checkpoint; within one object a counter
    separates the releases, and it is saved. With a `seed` the noise can be repeated by anyone who
    knows the seed: for tests only.
    """

    def __init__(self, add_variable: Callable[..., tf.Variable], seed: int | None = None):
        """Creates the counter.

        Args:
          add_variable: makes a variable that is saved with the optimizer.
          seed: `None` for the operating system's entropy.
        """
        self.seed = seed
        self._key = self._new_key()
        self._counter = add_variable([], dtype=tf.int64, name="noise_counter")

    def _new_key(self) -> int:
        if self.seed is not None:
            return self.seed
        return int.from_bytes(os.urandom(8), "little", signed=True)

    def __deepcopy__(self, memo: dict) -> GaussianNoise:
        """A copy has a key of its own; otherwise both would draw the same noise."""
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.seed = self.seed
        duplicate._key = duplicate._new_key()
        duplicate._counter = copy.deepcopy(self._counter, memo)
        return duplicate

    def draw(self, shapes: Sequence[tf.Tensor], stddev: tf.Tensor) -> list[tf.Tensor]:
        """Draws the noise of one release and counts it.

        Args:
          shapes: the shape of each tensor wanted.
          stddev: scalar, `noise_multiplier · l2_norm_clip`.

        Returns:
          float32 tensors, each entry from N(0, stddev²), all independent.
        """
        counter = tf.convert_to_tensor(self._counter.assign_add(1))
        # One draw for all variables: cheaper, and no two variables can share a stream.
        sizes = [tf.reduce_prod(shape) for shape in shapes]
        normal = tf.random.stateless_normal(
            [tf.add_n(sizes)], seed=tf.stack([tf.constant(self._key, tf.int64), counter])
        )
        parts = tf.split(normal * tf.cast(stddev, tf.float32), sizes)
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]
