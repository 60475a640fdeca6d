"""Ways to choose among trials, what each costs and how many trials it makes; what scores cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting.composition import check_probability
from tf_adaptive_dp.mechanism import noise
from tf_adaptive_dp.tuning import search_epsilon, trial_count_distributions


@dataclasses.dataclass(frozen=True)
class PublicScore:
    """Scores on public validation data: they cost nothing.

    Guarantee: rests on the caller's word that no validation example is private.

    Example:
      >>> from tf_adaptive_dp.tuning.strategies import PublicScore
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
        return "Trials were compared on public validation data, at no cost in privacy."


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
      >>> from tf_adaptive_dp.tuning.strategies import NoisyScore
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
            "Trials were compared on private validation data, by scores with Gaussian noise of "
            f"standard deviation {self.noise_multiplier * self.sensitivity:g} (noise multiplier "
            f"{self.noise_multiplier:g}, sensitivity {self.sensitivity:g}). Epsilon includes them."
        )


@dataclasses.dataclass(frozen=True)
class UnprotectedScore:
    """Scores on private validation data that are used without noise, as in the paper.

    Guarantee: none for the validation data. ε covers the training data alone, and only if no
    example is in both. For comparisons with the paper.

    Example:
      >>> from tf_adaptive_dp.tuning.strategies import UnprotectedScore
      >>> "NOT PRIVATE" in UnprotectedScore().sentence
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
            "and epsilon does not cover the validation examples. It covers the training examples, "
            "provided that none of them is also a validation example."
        )


class Strategy(Protocol):
    """What all strategies answer."""

    name: ClassVar[str]
    """`"composition"`, `"liu_talwar"` or `"repeat_and_select"`."""

    releases_all: ClassVar[bool]
    """Whether every trial may be shown, or the winner alone."""

    @property
    def expected_trials(self) -> float:
        """Mean number of trials."""

    @property
    def max_trials(self) -> int | None:
        """The most trials that are made; `None`: there is no bound."""

    def epsilon(
        self,
        trial: dp_accounting.DpEvent,
        delta: float,
        *,
        accountant: str = "rdp",
        conversion: str = "improved",
        orders: Sequence[float] | None = None,
    ) -> float:
        """ε of the whole search; arguments as of `accounting.composition_epsilon`."""

    def draw_num_trials(self) -> int:
        """How many trials to make: to be drawn once, kept secret and adhered to."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A fixed number of trials, each released.

    Guarantee: as `accounting.composition_epsilon`. Nothing need be hidden, and trials may be chosen
    one by one in the light of the others.

    Args:
      num_trials: K, at least 1.

    Raises:
      TypeError, ValueError: if it is none.

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

    def __post_init__(self):
        checks.integer("num_trials", self.num_trials, 1)

    @property
    def expected_trials(self) -> float:
        """K."""
        return float(self.num_trials)

    @property
    def max_trials(self) -> int | None:
        """K."""
        return int(self.num_trials)

    def epsilon(self, trial: dp_accounting.DpEvent, delta: float, **keywords: Any) -> float:
        """`accounting.composition_epsilon`."""
        return search_epsilon.composition_epsilon(trial, self.num_trials, delta, **keywords)

    def draw_num_trials(self) -> int:
        """K."""
        return int(self.num_trials)


@dataclasses.dataclass(frozen=True)
class LiuTalwar:
    """Random stopping: after each trial a secret coin ends the search with probability γ.

    Guarantee: as `accounting.liu_talwar_epsilon`, under the conditions that it names. The winner
    alone may be shown.

    Args:
      gamma: γ, in (0, 1].
      delta_2: δ₂, in (0, 1) and below the δ asked for: the search ends after ⌈log(1/δ₂) / γ⌉ trials
        at the latest. `accounting.best_delta_2` gives the one with the smallest ε.

    Raises:
      ValueError: if an argument is not of the range above.

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

    def __post_init__(self):
        check_probability("gamma", self.gamma, or_one=True)
        check_probability("delta_2", self.delta_2)

    @property
    def expected_trials(self) -> float:
        """E min(geometric(γ), hard stop) = (1 - (1 - γ)^hard stop) / γ."""
        if self.gamma == 1:
            return 1.0
        return -math.expm1(self.max_trials * math.log1p(-self.gamma)) / self.gamma

    @property
    def max_trials(self) -> int | None:
        """The hard stop, ⌈log(1/δ₂) / γ⌉; one trial with γ = 1."""
        return (
            1 if self.gamma == 1 else trial_count_distributions.hard_stop(self.gamma, self.delta_2)
        )

    def epsilon(self, trial: dp_accounting.DpEvent, delta: float, **keywords: Any) -> float:
        """`accounting.liu_talwar_epsilon`."""
        return search_epsilon.liu_talwar_epsilon(
            trial, self.gamma, delta, delta_2=self.delta_2, **keywords
        )

    def draw_num_trials(self) -> int:
        """min(geometric(γ), hard stop), by secret coins; at least 1."""
        return trial_count_distributions.draw_geometric(self.gamma, self.max_trials)


@dataclasses.dataclass(frozen=True)
class RepeatAndSelect:
    """A random number of trials, drawn beforehand, of which the best is shown.

    Guarantee: as `accounting.repeat_and_select_epsilon`, under the conditions that it names. The
    winner alone may be shown.

    Args:
      mean_trials: mean number of trials, at least 1.
      shape: η > -1 of the truncated negative binomial law: 1 is the geometric law, 0 the
        logarithmic one, `math.inf` Poisson, by which no trial at all may be made. With the same
        mean a smaller one makes fewer trials most of the time, and once in a while very many.

    Raises:
      TypeError, ValueError: if an argument is not of the range above.

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

    def __post_init__(self):
        checks.number("mean_trials", self.mean_trials, 1)
        search_epsilon.check_shape(self.shape)

    @property
    def expected_trials(self) -> float:
        """The mean, of the law that is drawn from."""
        return float(self.mean_trials)

    @property
    def max_trials(self) -> int | None:
        """`None`: any number may come up; one with a mean of 1, unless the law is Poisson."""
        return 1 if self.mean_trials == 1 and not math.isinf(self.shape) else None

    def epsilon(self, trial: dp_accounting.DpEvent, delta: float, **keywords: Any) -> float:
        """`accounting.repeat_and_select_epsilon`."""
        return search_epsilon.repeat_and_select_epsilon(
            trial, self.mean_trials, delta, shape=self.shape, **keywords
        )

    def draw_num_trials(self) -> int:
        """A number with the strategy's law; at least 1, or with Poisson at least 0."""
        return trial_count_distributions.draw(self.mean_trials, self.shape)
