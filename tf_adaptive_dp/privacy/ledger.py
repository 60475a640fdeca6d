"""The ledger: how many noisy gradients were released, and with what parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks


class Segment(NamedTuple):
    """Releases in a row that share their parameters.

    Attributes:
      noise_multiplier: standard deviation of the noise divided by the L2 sensitivity under
        adding or removing one example.
      batch_size: the expected batch size, a public constant, in examples.
      num_releases: how many noisy gradients were released so.
    """

    noise_multiplier: float
    batch_size: float
    num_releases: int


class Ledger:
    """Counts the releases of an optimizer, inside the graph and in variables that are saved.

    A release whose parameters differ from the last one's opens a new segment.

    Guarantee: every release is counted, with a noise multiplier that is at most and a batch size
    that is at least the one used; so an ε computed from the ledger never is too small. Both are
    exact for the first `MAX_SEGMENTS` segments; later ones are merged into the last, which then
    keeps its smallest noise multiplier and its largest batch size.

    Attributes:
      other_events: `dp_accounting.DpEvent`s that were spent beside the gradients, such as side
        information that was itself released with privacy.
      restorations: how often `restore` replaced what is recorded; not saved.
    """

    MAX_SEGMENTS = 64

    def __init__(self, add_variable: Callable[..., tf.Variable]):
        """Creates the ledger's variables.

        Args:
          add_variable: makes a variable that is saved with the optimizer, as
            `tf.keras.optimizers.Optimizer.add_variable` does.
        """
        self._parameters = add_variable(
            [self.MAX_SEGMENTS, 2], dtype=tf.float64, name="ledger_parameters"
        )
        self._counts = add_variable([self.MAX_SEGMENTS], dtype=tf.int64, name="ledger_counts")
        self.other_events: tuple = ()
        self.restorations = 0

    def record(self, noise_multiplier: tf.Tensor, batch_size: tf.Tensor) -> tf.Tensor:
        """Counts one release; the work of a few scalars, inside a graph or outside.

        Threads take turns at it, see `mechanism.turns`.

        Args:
          noise_multiplier: scalar, see `Segment`.
          batch_size: scalar, see `Segment`.

        Returns:
          [MAX_SEGMENTS], the counts, for what has to wait until the release is counted.
        """
        current = tf.stack([tf.cast(noise_multiplier, tf.float64), tf.cast(batch_size, tf.float64)])
        parameters, counts = self._parameters.read_value(), self._counts.read_value()
        used = tf.math.count_nonzero(counts)
        last = tf.gather(parameters, tf.maximum(used - 1, 0))
        same = (used > 0) & tf.reduce_all(last == current)
        full = ~same & (used == self.MAX_SEGMENTS)
        worst = tf.stack([tf.minimum(last[0], current[0]), tf.maximum(last[1], current[1])])
        index = tf.where(same | full, used - 1, used)
        here = tf.range(self.MAX_SEGMENTS, dtype=tf.int64) == index
        row = tf.where(full, worst, current)
        entered = tf.convert_to_tensor(
            self._parameters.assign(tf.where(here[:, tf.newaxis], row, parameters))
        )
        with tf.control_dependencies([entered]):
            return tf.convert_to_tensor(self._counts.assign_add(tf.cast(here, tf.int64)))

    @property
    def segments(self) -> list[Segment]:
        """What was released so far, oldest first."""
        return [
            Segment(*parameters, count)
            for parameters, count in zip(
                self._parameters.numpy().tolist(), self._counts.numpy().tolist()
            )
            if count
        ]

    def restore(self, segments: Sequence[Sequence[float]]) -> None:
        """Replaces what is recorded.

        Args:
          segments: as the property `segments` gave them.

        Raises:
          TypeError, ValueError: if they are no segments, or too many; then nothing changes.
        """
        if len(segments) > self.MAX_SEGMENTS:
            raise ValueError(
                f"`segments` must be at most {self.MAX_SEGMENTS}. Received: {len(segments)}"
            )
        parameters = np.zeros(self._parameters.shape)
        counts = np.zeros(self._counts.shape, np.int64)
        for row, (noise_multiplier, batch_size, count) in enumerate(segments):
            parameters[row, 0] = checks.number("noise_multiplier", noise_multiplier, 0)
            parameters[row, 1] = checks.number("batch_size", batch_size, 0, strict=True)
            counts[row] = checks.integer("num_releases", count, 0)
        self._parameters.assign(parameters)
        self._counts.assign(counts)
        self.restorations += 1

    @classmethod
    def extended(cls, segments: Sequence[Segment], more: Segment) -> list[Segment]:
        """What `record` makes of a ledger in `more.num_releases` calls, as a plain list.

        Guarantee: that of the class.

        Args:
          segments: as the property `segments` gave them.
          more: the releases to add.
        """
        *before, last = segments or [more._replace(num_releases=0)]
        count = last.num_releases + more.num_releases
        if last[:2] == more[:2]:
            return [*before, last._replace(num_releases=count)]
        if len(segments) < cls.MAX_SEGMENTS:
            return [*segments, more]
        noise_multiplier = min(last.noise_multiplier, more.noise_multiplier)
        return [*before, Segment(noise_multiplier, max(last.batch_size, more.batch_size), count)]

    @classmethod
    def extends(cls, segments: Sequence[Segment], earlier: Sequence[Segment]) -> bool:
        """Whether `earlier` releases and further ones give `segments`.

        Args:
          segments: as the property `segments` gave them.
          earlier: likewise, of the same run at an earlier time.
        """
        if not earlier or len(earlier) > len(segments):
            return not earlier
        *before, last = earlier
        now = segments[len(before)]
        same = last[:2] == now[:2] and last.num_releases <= now.num_releases
        merged = (
            len(earlier) == cls.MAX_SEGMENTS
            and last.noise_multiplier >= now.noise_multiplier
            and last.batch_size <= now.batch_size
            and last.num_releases < now.num_releases
        )
        return before == list(segments[: len(before)]) and (same or merged)

    @property
    def num_releases(self) -> int:
        """How many noisy gradients were released so far."""
        return int(self._counts.numpy().sum())
