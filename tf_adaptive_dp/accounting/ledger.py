"""The ledger: how many noisy gradients were released, and with what parameters."""

from __future__ import annotations

import dataclasses
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


class Checks(NamedTuple):
    """What is known of the batches of a segment's releases.

    Attributes:
      checked: releases whose batch had a number that told it from all others.
      repeated: releases on a batch that had been released before, in all or in part.
      nearest: the least number of releases from one use of a batch to the next; 0 if none
        was used again.
      declared: the expected batch size that the optimizer had been given, if batches were larger
        than that by far; the segment then has the size seen. Otherwise 0.
    """

    checked: int = 0
    repeated: int = 0
    nearest: int = 0
    declared: float = 0.0


@dataclasses.dataclass(frozen=True)
class Releases:
    """A fixed record of releases, with the same attributes as a `Ledger`.

    Use it to account for releases that no optimizer recorded, such as planned ones.

    Attributes:
      segments: releases in order; plain tuples of the fields of `Segment` also work.
      other_events: `dp_accounting.DpEvent`s spent in addition to the releases.
      checks: what is known about the batches of each segment. Nothing is known about the batches
        of segments without an entry.

    >>> Releases([(2.0, 200.0, 6_000)]).segments
    [(2.0, 200.0, 6000)]
    """

    segments: Sequence[Segment | tuple[float, float, int]] = ()
    other_events: tuple = ()
    checks: Sequence[Checks] = ()


def wrong_size(declared: float, seen: float) -> str:
    """What to say of batches that are larger than they were said to be."""
    return (
        f"The batches hold far more examples than `expected_batch_size`={declared:g} says, so that "
        f"ε would be too small: it is computed for {seen:g} rows. Pass the true expected "
        "size to the optimizer; the noisy sum is divided by it, too. Received: "
        f"expected_batch_size={declared:g}, batches of {seen:g} rows"
    )


class Ledger:
    """Counts the releases of an optimizer, inside the graph and in variables that are saved.

    A release whose parameters differ from the last one's opens a new segment.

    Guarantee: every release is counted, with a noise multiplier that is at most and a batch size
    that is at least the one used; so an ε computed from the ledger never is too small. Both are
    exact for the first `MAX_SEGMENTS` segments; later ones are merged into the last, which then
    keeps its smallest noise multiplier and its largest batch size. `checks` say of the batches
    whether they were used before, for which ε counts them.

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
        self._checks = add_variable(
            [self.MAX_SEGMENTS, len(Checks._fields)], dtype=tf.float64, name="ledger_checks"
        )
        self.other_events: tuple = ()
        self.restorations = 0

    def record(
        self,
        noise_multiplier: tf.Tensor,
        batch_size: tf.Tensor,
        *,
        checked: tf.Tensor | bool = False,
        distance: tf.Tensor | int = 0,
        size_seen: tf.Tensor | float = 0.0,
    ) -> tf.Tensor:
        """Counts one release; the work of a few scalars, inside a graph or outside.

        Threads take turns at it, see `mechanism.turns`.

        Args:
          noise_multiplier: scalar, see `Segment`.
          batch_size: scalar, see `Segment`.
          checked: whether its batch had a number of its own, or of an earlier release.
          distance: how many releases ago its batch was released before; 0 if it was not.
          size_seen: rows of the batch, if there were more examples than `batch_size` allows, or 0.
            From then on it is the batch size that counts, as long as `batch_size` stays.

        Returns:
          [MAX_SEGMENTS], the counts, for what has to wait until the release is counted.
        """
        parameters, counts = self._parameters.read_value(), self._counts.read_value()
        checks_before = self._checks.read_value()
        used = tf.math.count_nonzero(counts)
        last = tf.gather(parameters, tf.maximum(used - 1, 0))
        declared = tf.cast(batch_size, tf.float64)
        seen = tf.maximum(declared, tf.cast(size_seen, tf.float64))
        wrong_before = tf.gather(checks_before, tf.maximum(used - 1, 0))[3] == declared
        seen = tf.where((used > 0) & wrong_before, tf.maximum(seen, last[1]), seen)
        current = tf.stack([tf.cast(noise_multiplier, tf.float64), seen])
        same = (used > 0) & tf.reduce_all(last == current)
        full = ~same & (used == self.MAX_SEGMENTS)
        worst = tf.stack([tf.minimum(last[0], current[0]), tf.maximum(last[1], current[1])])
        index = tf.where(same | full, used - 1, used)
        here = tf.range(self.MAX_SEGMENTS, dtype=tf.int64) == index
        row = tf.where(full, worst, current)
        checks_now = _added(
            *(tf.gather(checks_before, index), checked, distance),
            tf.where(seen > declared, declared, tf.zeros_like(declared)),
        )
        written = [
            self._parameters.assign(tf.where(here[:, tf.newaxis], row, parameters)),
            self._checks.assign(tf.where(here[:, tf.newaxis], checks_now, checks_before)),
        ]
        with tf.control_dependencies([tf.convert_to_tensor(variable) for variable in written]):
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

    @property
    def checks(self) -> list[Checks]:
        """What is known of the batches of each of `segments`."""
        return [
            Checks(int(checked), int(repeated), int(nearest), declared)
            for (checked, repeated, nearest, declared), count in zip(
                self._checks.numpy().tolist(), self._counts.numpy().tolist()
            )
            if count
        ]

    def size_that_counts(self, batch_size: float) -> float:
        """The batch size of the next release: `batch_size`, or the larger one that was seen."""
        checks_of, segments = self.checks, self.segments
        if checks_of and checks_of[-1].declared == batch_size:
            return max(batch_size, segments[-1].batch_size)
        return batch_size

    def restore(
        self, segments: Sequence[Sequence[float]], checks_of: Sequence[Sequence[float]] = ()
    ) -> None:
        """Replaces what is recorded.

        Args:
          segments: as the property `segments` gave them.
          checks_of: as the property `checks` gave them; of segments that it lacks nothing is known.

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
        known = np.zeros(self._checks.shape)
        for row, values in enumerate(checks_of[: len(segments)]):
            known[row] = [checks.number("checks", value, 0) for value in Checks(*values)]
        self._parameters.assign(parameters)
        self._counts.assign(counts)
        self._checks.assign(known)
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


def _added(row: tf.Tensor, checked, distance, declared: tf.Tensor) -> tf.Tensor:
    """The `Checks` of a segment, a float64 vector, after one more release."""
    distance = tf.cast(distance, tf.float64)
    again = distance > 0
    nearest = tf.where(again & ((row[2] == 0) | (distance < row[2])), distance, row[2])
    counts = row[:2] + tf.stack([tf.cast(checked, tf.float64), tf.cast(again, tf.float64)])
    return tf.concat([counts, [nearest, tf.maximum(row[3], declared)]], 0)
