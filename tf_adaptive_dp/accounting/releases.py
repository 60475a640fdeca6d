"""Records of releases: their parameters and batches, and what one more release changes in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp.accounting.noise_strategies import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.accounting.terms import checked_events

MAX_SEGMENTS = 64  # of a `Ledger`


class Segment(NamedTuple):
    """Consecutive releases with the same parameters.

    The unit of privacy is an example, or a user (`Ledger.examples_per_user`).

    Attributes:
      noise_multiplier: standard deviation of the noise divided by the L2 sensitivity under
        adding or removing one unit.
      batch_size: the expected batch size, a public constant, in units.
      num_releases: number of noisy gradients released with these parameters.
    """

    noise_multiplier: float
    batch_size: float
    num_releases: int

    def merged(self, other: Segment) -> Segment:
        """All releases of two segments, each with the worse parameters, as `segment_for` merges."""
        return Segment(
            min(self.noise_multiplier, other.noise_multiplier),
            max(self.batch_size, other.batch_size),
            self.num_releases + other.num_releases,
        )


class BatchChecks(NamedTuple):
    """What is known about the batches of a segment.

    Attributes:
      checked: number of releases whose batch was identified, so that a repetition would be noticed.
      repeated: number of releases on a batch that had been released before, entirely or in part.
      nearest: the smallest number of releases between two uses of a batch; 0 if no batch was used
        twice.
      declared: the optimizer's expected batch size, given or that of the first batch, if others
        were larger than it allows; the segment then has the size that was seen. Otherwise 0.
    """

    checked: int = 0
    repeated: int = 0
    nearest: int = 0
    declared: float = 0.0

    def merged(self, other: BatchChecks) -> BatchChecks:
        """What is known about the batches of two segments that were merged."""
        return BatchChecks(
            self.checked + other.checked,
            self.repeated + other.repeated,
            min((n for n in (self.nearest, other.nearest) if n), default=0),
            max(self.declared, other.declared),
        )


class Contents(NamedTuple):
    """What a `Ledger` holds at one time.

    Attributes:
      segments: the releases.
      checks: what is known about the batches of each segment.
    """

    segments: list[Segment]
    checks: list[BatchChecks]

    @property
    def num_releases(self) -> int:
        """The number of noisy gradients released so far."""
        return sum(segment.num_releases for segment in self.segments)

    def size_that_counts(self, batch_size: float) -> float:
        """The batch size of the next release: `batch_size`, or the larger one that was seen."""
        if self.checks and self.checks[-1].declared == batch_size:
            return max(batch_size, self.segments[-1].batch_size)
        return batch_size


@dataclasses.dataclass(frozen=True)
class Releases:
    """A fixed record of releases, with the same attributes as a `Ledger`.

    Use it to account for releases that no optimizer recorded, such as planned ones.

    Attributes:
      segments: releases in order; plain tuples of the fields of `Segment` also work.
      other_events: `dp_accounting.DpEvent`s spent in addition to the releases.
      checks: what is known about the batches of each segment. Nothing is known about the batches
        of segments without an entry.
      noise: how the noise of a release depends on that of earlier ones.
      examples_per_user: see `Ledger`.
      chosen_by_search: see `Ledger`.

    Raises:
      TypeError: if `other_events` is not a list of events, or another list is none.

    >>> Releases([(2.0, 200.0, 6_000)]).segments
    [(2.0, 200.0, 6000)]
    """

    segments: Sequence[Segment | tuple[float, float, int]] = ()
    other_events: tuple = ()
    checks: Sequence[BatchChecks] = ()
    noise: NoiseStrategy = IndependentNoise()
    examples_per_user: int | None = None
    chosen_by_search: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "other_events", checked_events(self.other_events))
        # They are read several times for one ε, and an iterator would be empty from then on.
        for name in ("segments", "checks"):
            value = getattr(self, name)
            if not isinstance(value, Iterable):
                raise TypeError(f"`{name}` must be a list. Received: {name}={value!r}")
            if not isinstance(value, (list, tuple)):
                object.__setattr__(self, name, tuple(value))


def joined(
    segments: Sequence[Segment],
    checks_of: Sequence[BatchChecks],
    at_most: int = MAX_SEGMENTS,
) -> tuple[list[Segment], list[BatchChecks]]:
    """As many segments as there is room for: the last ones become one of the worst of all.

    Args:
      segments: a value of `Ledger.segments`.
      checks_of: a value of `Ledger.checks`.
      at_most: how many segments there may be, at least 1.

    >>> joined([Segment(2.0, 10.0, 3), Segment(1.0, 5.0, 1)], [BatchChecks()] * 2, at_most=1)[0]
    [Segment(noise_multiplier=1.0, batch_size=10.0, num_releases=4)]
    """
    kept, known = list(segments[:at_most]), list(checks_of[:at_most])
    for segment in segments[at_most:]:
        kept[-1] = kept[-1].merged(segment)
    for of_segment in checks_of[at_most:]:
        known[-1] = known[-1].merged(of_segment)
    return kept, known


def segment_for(
    noise_multiplier: tf.Tensor,
    declared: tf.Tensor,
    seen: tf.Tensor,
    parameters: tf.Tensor,
    checks_before: tf.Tensor,
    counts: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The segment that a release belongs to: its number, its parameters, and the size seen.

    It is the last one, if that has the same parameters or there is no room for another. The
    batch size is the larger one of an earlier batch, if that was too large for the same
    `declared` size.

    Args:
      noise_multiplier: that of the release.
      declared: its expected batch size.
      seen: the number of rows of its batch, if that is beyond doubt larger; else `declared`.
      parameters: [MAX_SEGMENTS, 2], the noise multiplier and batch size of each segment.
      checks_before: [MAX_SEGMENTS, 4], the `BatchChecks` of each segment.
      counts: [MAX_SEGMENTS], the releases of each segment.
    """
    used = tf.math.count_nonzero(counts)
    last = tf.maximum(used - 1, 0)
    last_noise, last_size = tf.unstack(tf.gather(parameters, last))
    *_, declared_before = tf.unstack(tf.gather(checks_before, last))
    any_before = used > 0
    wrong_before = any_before & tf.equal(declared_before, declared)
    seen = tf.where(wrong_before, tf.maximum(seen, last_size), seen)
    same = any_before & tf.equal(last_noise, noise_multiplier) & tf.equal(last_size, seen)
    full = ~same & tf.equal(used, counts.shape[0])
    noise = tf.where(full, tf.minimum(last_noise, noise_multiplier), noise_multiplier)
    size = tf.where(full, tf.maximum(last_size, seen), seen)
    return tf.where(same | full, last, used), tf.stack([noise, size]), seen


def checks_after(
    row: tf.Tensor, checked: tf.Tensor, distance: tf.Tensor, declared: tf.Tensor
) -> tf.Tensor:
    """The `BatchChecks` of a segment, a float64 vector, after one more release."""
    distance = tf.cast(distance, tf.float64)
    again = distance > 0
    known, repeated, nearest, declared_before = tf.unstack(row)
    nearer = again & (tf.equal(nearest, 0) | (distance < nearest))
    return tf.stack(
        [
            known + tf.cast(checked, tf.float64),
            repeated + tf.cast(again, tf.float64),
            tf.where(nearer, distance, nearest),
            tf.maximum(declared_before, declared),
        ]
    )
