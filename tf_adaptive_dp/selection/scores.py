"""What the score of a trial, by which trials are compared, costs."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.mechanism import noise


@dataclasses.dataclass(frozen=True)
class PublicScore:
    """Scores on public validation data: they cost nothing.

    Guarantee: rests on the caller's word that no validation example is private.

    Example:
      >>> from tf_adaptive_dp.selection.scores import PublicScore
      >>> PublicScore().event
      NoOpDpEvent()
    """

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What a score releases."""
        return dp_accounting.NoOpDpEvent()

    def released(self, score: float) -> float:
        """The score as it is."""
        return float(score)

    @property
    def sentence(self) -> str:
        """For the privacy statement."""
        return "Trials were compared on public validation data, which cost no privacy."


@dataclasses.dataclass(frozen=True)
class NoisyScore:
    """Scores on private validation data, each released with Gaussian noise of its own.

    released = score + N(0, (noise_multiplier · sensitivity)²).

    Guarantee: `event`, a Gaussian mechanism, for adding or removing one validation example, if that
    changes a score by at most `sensitivity`. So the score must be finite for all data sets: noise
    does not hide one that is not, and a search counts it as the worst. Compose the event with the
    training of the trial, also if training and validation examples are disjoint.

    Args:
      noise_multiplier: standard deviation of the noise / `sensitivity`, greater than 0.
      sensitivity: the most by which one example changes the score, greater than 0; for accuracy
        1 / number of validation examples.

    Raises:
      TypeError, ValueError: if an argument is not a number of the range above.

    Example:
      >>> from tf_adaptive_dp.selection.scores import NoisyScore
      >>> NoisyScore(noise_multiplier=10.0, sensitivity=1 / 5_000).event
      GaussianDpEvent(noise_multiplier=10.0)
    """

    noise_multiplier: float
    sensitivity: float

    def __post_init__(self):
        checks.number("noise_multiplier", self.noise_multiplier, 0, strict=True)
        checks.number("sensitivity", self.sensitivity, 0, strict=True)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What a score releases."""
        return dp_accounting.GaussianDpEvent(float(self.noise_multiplier))

    def released(self, score: float) -> float:
        """The score with fresh noise, other at each call: call it once for each trial.

        Raises:
          ValueError: if the score is not finite, which noise would not hide. Take a score that is
            finite for all data sets, by clipping what each example adds to it.
        """
        if not math.isfinite(score):
            raise ValueError(
                "`score` must be finite for all data sets, since noise does not hide one that is "
                f"not: clip what each example adds to it. Received: score={score!r}"
            )
        drawn = float(noise.fresh_normal_numbers(1)[0])
        return float(score) + self.noise_multiplier * self.sensitivity * drawn

    @property
    def sentence(self) -> str:
        """For the privacy statement."""
        return (
            "Trials were compared on private validation data by scores with Gaussian noise of "
            f"standard deviation {self.noise_multiplier * self.sensitivity:g} (noise multiplier "
            f"{self.noise_multiplier:g}, sensitivity {self.sensitivity:g}); epsilon includes them."
        )


@dataclasses.dataclass(frozen=True)
class FreeScore:
    """Scores on private validation data that are used without noise, as in the paper.

    Guarantee: none for the validation data. ε covers the training data alone, and only if no
    example is in both. For comparisons with the paper.

    Example:
      >>> from tf_adaptive_dp.selection.scores import FreeScore
      >>> "NOT PRIVATE" in FreeScore().sentence
      True
    """

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Nothing that is accounted for."""
        return dp_accounting.NoOpDpEvent()

    def released(self, score: float) -> float:
        """The score as it is."""
        return float(score)

    @property
    def sentence(self) -> str:
        """For the privacy statement."""
        return (
            "NOT PRIVATE for the validation data: trials were compared by scores without noise, "
            "and epsilon does not cover the examples that the scores were computed from. It holds "
            "for the training examples, if none of them is a validation example."
        )
