"""Scores by which trials are compared, and strategies that decide how many trials run.

References:
  - Liu and Talwar, "Private Selection from Private Candidates" (2019), arXiv:1811.07971.
  - Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy" (2022),
    arXiv:2110.03620.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Protocol, runtime_checkable

import dp_accounting
import numpy as np

from tf_adaptive_dp import checks
from tf_adaptive_dp.mechanism.secure_noise import on_grid
from tf_adaptive_dp.tuning import search_epsilon, trial_count_distributions
from tf_adaptive_dp.tuning.conversion import DEFAULT_ACCOUNTING, Accounting


@runtime_checkable
class Score(Protocol):
    """What the validation data of a search are, and what the score of a trial costs."""

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of one released score."""

    def released(self, score: float) -> float:
        """The score of a trial as it may be released. Call it once per trial."""

    @property
    def sentence(self) -> str:
        """The sentence about the score in the privacy statement."""


@dataclasses.dataclass(frozen=True)
class PublicScore:
    """Scores on public validation data, at no cost in privacy.

    Guarantee: relies on the caller's statement that no validation example is private.

    Example:
      >>> from tf_adaptive_dp.tuning.strategies import PublicScore
      >>> PublicScore().event
      NoOpDpEvent()
    """

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of one released score."""
        return dp_accounting.NoOpDpEvent()

    def released(self, score: float) -> float:
        """Returns the score unchanged."""
        return float(score)

    @property
    def sentence(self) -> str:
        """The sentence about the score in the privacy statement."""
        return "Trials were compared on public validation data, at no cost in privacy."


@dataclasses.dataclass(frozen=True)
class NoisyScore:
    """Scores on private validation data, each released with independent Gaussian noise.

    released = score + N(0, (noise_multiplier · sensitivity)²), on a grid that does not depend on
    the score (see `mechanism.secure_noise.on_grid`), since it is published in full precision.

    Guarantee: each released score is the Gaussian mechanism `event`, for adding or removing one
    validation example, provided that this changes a score by at most `sensitivity`. The score must
    therefore be finite for every data set: noise does not hide a score that is not finite, and a
    search ranks it last. Compose the event with the training of the trial, even if training and
    validation examples are disjoint.

    Args:
      noise_multiplier: standard deviation of the noise / `sensitivity`, greater than 0.
      sensitivity: maximum change of the score by one example, greater than 0. For accuracy it is
        1 / number of validation examples.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    Example:
      >>> from tf_adaptive_dp.tuning.strategies import NoisyScore
      >>> NoisyScore(noise_multiplier=10.0, sensitivity=1 / 5_000).event
      GaussianDpEvent(noise_multiplier=10.0)
    """

    noise_multiplier: float
    sensitivity: float

    def __post_init__(self) -> None:
        checks.keep(self, checks.number, "noise_multiplier", 0, strict=True)
        checks.keep(self, checks.number, "sensitivity", 0, strict=True)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of one released score."""
        return dp_accounting.GaussianDpEvent(float(self.noise_multiplier))

    def released(self, score: float) -> float:
        """Returns the score with fresh noise. Call it once per trial.

        Raises:
          ValueError: if the score is not finite. Use a score that is finite for every data set, for
            example by clipping the contribution of each example.
        """
        if not math.isfinite(score):
            raise ValueError(
                "`score` must be finite for every data set, since noise does not hide a score that "
                "is not finite. Clip the contribution of each example to the score. Received: "
                f"score={score!r}"
            )
        stddev = self.noise_multiplier * self.sensitivity
        return float(on_grid(np.array([score], np.float64), stddev, self.sensitivity)[0])

    @property
    def sentence(self) -> str:
        """The sentence about the score in the privacy statement."""
        return (
            "Trials were compared on private validation data, by scores with Gaussian noise of "
            f"standard deviation {self.noise_multiplier * self.sensitivity:g} (noise multiplier "
            f"{self.noise_multiplier:g}, sensitivity {self.sensitivity:g}). Epsilon includes them."
        )


@dataclasses.dataclass(frozen=True)
class UnprotectedScore:
    """Scores on private validation data, used without noise.

    Mohapatra et al. 2021 use such scores (arXiv:2111.04906); this class is for
    comparisons with that paper.

    Guarantee: none for the validation data. ε covers only the training data, and only if no example
    is in both sets.

    Example:
      >>> from tf_adaptive_dp.tuning.strategies import UnprotectedScore
      >>> "NOT PRIVATE" in UnprotectedScore().sentence
      True
    """

    @property
    def event(self) -> dp_accounting.DpEvent:
        """No event: the accounting ignores these scores."""
        return dp_accounting.NoOpDpEvent()

    def released(self, score: float) -> float:
        """Returns the score unchanged."""
        return float(score)

    @property
    def sentence(self) -> str:
        """The sentence about the score in the privacy statement."""
        return (
            "NOT PRIVATE for the validation data: trials were compared by scores without noise, "
            "and epsilon does not cover the validation examples. It covers the training examples, "
            "provided that none of them is also a validation example."
        )


class Strategy(Protocol):
    """How many trials a search runs, what it releases and what it costs."""

    name: ClassVar[str]
    """`"composition"`, `"liu_talwar"` or `"repeat_and_select"`."""

    releases_all: ClassVar[bool]
    """Whether every trial may be shown, or only the winner."""

    @property
    def expected_trials(self) -> float:
        """Mean number of trials."""

    @property
    def max_trials(self) -> int | None:
        """Maximum number of trials; `None` if there is none."""

    def epsilon(
        self,
        trial: dp_accounting.DpEvent,
        delta: float,
        *,
        accounting: Accounting = DEFAULT_ACCOUNTING,
    ) -> float:
        """ε of the whole search; for the arguments see `composition_epsilon`."""

    def draw_num_trials(self) -> int:
        """Draws the number of trials: call it once, keep it secret and run exactly that many."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A fixed number of trials, all of which are released.

    Guarantee: that of `composition_epsilon`. Nothing needs to stay secret, and the choice of a
    trial may depend on earlier results.

    Args:
      num_trials: K, at least 1.

    Raises:
      TypeError, ValueError: if `num_trials` has the wrong type or is out of range.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.strategies import Composition
      >>> strategy = Composition(num_trials=4)
      >>> round(strategy.epsilon(dp_accounting.GaussianDpEvent(10.0), delta=1e-5), 3)
      0.795
      >>> strategy.draw_num_trials()
      4
    """

    name: ClassVar[str] = "composition"
    releases_all: ClassVar[bool] = True

    num_trials: int

    def __post_init__(self) -> None:
        checks.keep(self, checks.integer, "num_trials", 1)

    @property
    def expected_trials(self) -> float:
        """K."""
        return float(self.num_trials)

    @property
    def max_trials(self) -> int:
        """K."""
        return int(self.num_trials)

    def epsilon(
        self,
        trial: dp_accounting.DpEvent,
        delta: float,
        *,
        accounting: Accounting = DEFAULT_ACCOUNTING,
    ) -> float:
        """ε of `composition_epsilon`."""
        return search_epsilon.composition_epsilon(
            trial, self.num_trials, delta, accounting=accounting
        )

    def draw_num_trials(self) -> int:
        """K."""
        return int(self.num_trials)


@dataclasses.dataclass(frozen=True)
class LiuTalwar:
    """Random stopping: after each trial a secret coin ends the search with probability γ.

    Guarantee: that of `liu_talwar_epsilon`, under its conditions. Only the winner may be shown.

    Args:
      gamma: γ, in (0, 1].
      delta_2: δ₂, in (0, 1) and below the δ of the search, which ends after at most
        ⌈log(1/δ₂) / γ⌉ trials. `best_delta_2` computes the δ₂ with the smallest ε.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.strategies import LiuTalwar
      >>> strategy = LiuTalwar(gamma=0.1)
      >>> round(strategy.epsilon(dp_accounting.GaussianDpEvent(10.0), delta=1e-5), 3)
      2.362
      >>> round(strategy.expected_trials, 3), strategy.max_trials
      (10.0, 461)
      >>> 1 <= strategy.draw_num_trials() <= 461
      True
    """

    name: ClassVar[str] = "liu_talwar"
    releases_all: ClassVar[bool] = False

    gamma: float
    delta_2: float = 1e-20

    def __post_init__(self) -> None:
        checks.keep(self, checks.probability, "gamma", or_one=True)
        checks.keep(self, checks.probability, "delta_2")

    @property
    def expected_trials(self) -> float:
        """E min(geometric(γ), hard stop) = (1 - (1 - γ)^hard stop) / γ."""
        if self.gamma == 1:
            return 1.0
        return -math.expm1(self.max_trials * math.log1p(-self.gamma)) / self.gamma

    @property
    def max_trials(self) -> int:
        """The hard stop, ⌈log(1/δ₂) / γ⌉; one trial with γ = 1."""
        return (
            1 if self.gamma == 1 else trial_count_distributions.hard_stop(self.gamma, self.delta_2)
        )

    def epsilon(
        self,
        trial: dp_accounting.DpEvent,
        delta: float,
        *,
        accounting: Accounting = DEFAULT_ACCOUNTING,
    ) -> float:
        """ε of `liu_talwar_epsilon`."""
        return search_epsilon.liu_talwar_epsilon(
            trial, self.gamma, delta, delta_2=self.delta_2, accounting=accounting
        )

    def draw_num_trials(self) -> int:
        """Draws min(geometric(γ), hard stop), at least 1, with secret coins."""
        return trial_count_distributions.draw_geometric(self.gamma, self.max_trials)


@dataclasses.dataclass(frozen=True)
class RepeatAndSelect:
    """A random number of trials, drawn in advance; only the best one is shown.

    Guarantee: that of `repeat_and_select_epsilon`, under its conditions.

    Args:
      mean_trials: mean number of trials, at least 1.
      shape: η > -1 of the truncated negative binomial distribution: 1 is geometric, 0 logarithmic,
        and `math.inf` Poisson, which may draw no trial at all. With the same mean, a smaller shape
        usually draws fewer trials, and occasionally very many.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.strategies import RepeatAndSelect
      >>> strategy = RepeatAndSelect(mean_trials=10)
      >>> round(strategy.epsilon(dp_accounting.GaussianDpEvent(10.0), delta=1e-5), 3)
      0.849
      >>> strategy.draw_num_trials() >= 1
      True
    """

    name: ClassVar[str] = "repeat_and_select"
    releases_all: ClassVar[bool] = False

    mean_trials: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        checks.keep(self, checks.number, "mean_trials", 1)
        search_epsilon.check_shape(self.shape)

    @property
    def expected_trials(self) -> float:
        """The mean of the distribution."""
        return float(self.mean_trials)

    @property
    def max_trials(self) -> int | None:
        """`None`, since any number may be drawn; 1 for a mean of 1, except for Poisson."""
        return 1 if self.mean_trials == 1 and not math.isinf(self.shape) else None

    def epsilon(
        self,
        trial: dp_accounting.DpEvent,
        delta: float,
        *,
        accounting: Accounting = DEFAULT_ACCOUNTING,
    ) -> float:
        """ε of `repeat_and_select_epsilon`."""
        return search_epsilon.repeat_and_select_epsilon(
            trial, self.mean_trials, delta, shape=self.shape, accounting=accounting
        )

    def draw_num_trials(self) -> int:
        """Draws the number of trials: at least 1, or at least 0 for Poisson."""
        return trial_count_distributions.draw(self.mean_trials, self.shape)
