"""The privacy plan of a search: its budget, the batches and the length of every trial."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dp_accounting

from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.releases import Releases, Segment
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.tuning import budgets
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.strategies import Score, Strategy


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a search may spend in total.

    Attributes:
      epsilon: ε of the whole search.
      delta: δ of the whole search.
      accountant: `"rdp"` or `"pld"`.
    """

    epsilon: float
    delta: float
    accountant: str


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of every trial.

    Attributes:
      num_examples: the size of the training set, a public constant.
      sampling: how batches are drawn; see `privacy_statement`, except for subsets of a fixed size.
      batch_size: L, the expected batch size.

    Raises:
      ValueError: if the batch size exceeds the number of examples.
    """

    num_examples: int
    sampling: Sampling | str
    batch_size: float

    def __post_init__(self) -> None:
        if self.batch_size > self.num_examples:
            raise ValueError(
                "`expected_batch_size` of the optimizer must be at most `num_examples`. Received: "
                f"expected_batch_size={self.batch_size:g}, num_examples={self.num_examples}"
            )

    def max_participations(self, releases: int) -> int:
        """In how many of these releases one example takes part, if a pass begins with the first."""
        return composition.max_participations(
            [Segment(1.0, self.batch_size, releases)], self.num_examples
        )[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length of every trial.

    Attributes:
      epochs: the number of epochs.
      steps_per_epoch: calls of the optimizer in an epoch, a multiple of `parts`.
      parts: the optimizer's `gradient_accumulation_steps`.
      epoch_is_pass: whether each epoch is known to have every example once.

    Raises:
      ValueError: if an epoch does not hold whole batches.
    """

    epochs: int
    steps_per_epoch: int
    parts: int = 1
    epoch_is_pass: bool = False

    def __post_init__(self) -> None:
        if self.steps_per_epoch % self.parts:
            raise ValueError(
                "An epoch must hold whole batches: let the number of steps in an epoch be a "
                "multiple of the optimizer's `gradient_accumulation_steps`. Received: "
                f"{self.steps_per_epoch} steps, gradient_accumulation_steps={self.parts}"
            )

    @property
    def releases(self) -> int:
        """The number of noisy gradients that each trial may release."""
        return self.epochs * self.steps_per_epoch // self.parts


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """The privacy of a search: trials that are alike, a strategy and a score.

    Guarantee: the search is (ε, δ)-DP within `budget`, in the sense of `privacy_statement` for the
    sampling, if the strategy's conditions are kept and no trial releases more than
    `schedule.releases` noisy gradients, each with the noise multiplier `noise_multiplier()` and the
    expected batch size of `batches`. Poisson batches that are truncated take their part of δ: with
    η of `PoissonSampling` for one trial, some of K trials overflows with probability at most
    E[K]·η, whatever the trials' results. So δ = δ₀ + e^ε·E[K]·η by the argument there.

    Attributes:
      strategy: a `Composition`, `LiuTalwar` or `RepeatAndSelect`.
      score: a `PublicScore`, `NoisyScore` or `UnprotectedScore`.
      budget: what the search may spend.
      batches: the batches of every trial.
      schedule: the length of every trial.

    Raises:
      ValueError: if these do not go together.
    """

    strategy: Strategy
    score: Score
    budget: Budget
    batches: Batches
    schedule: Schedule

    def __post_init__(self) -> None:
        sampling = self.batches.sampling
        if isinstance(sampling, Sampling):
            sampling.check_ledger(self._ledger(1.0), self.batches.num_examples)
        if self._delta_for_noise() <= 0:
            raise ValueError(
                "Batches overflow so often, in all trials together, that no `delta` is left. Make "
                "`max_batch_size` of the sampling larger. Received: "
                f"delta={self.budget.delta!r}, sampling={sampling!r}"
            )

    def describe(self) -> dict[str, Any]:
        """Everything that must stay the same when the search is resumed, as plain JSON."""
        # `epoch_is_pass` follows from the others and the number of rows, which the search notes.
        return {
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "num_examples": self.batches.num_examples,
            "accountant": self.budget.accountant,
            "batch_size": self.batches.batch_size,
            "parts": self.schedule.parts,
            "epochs": self.schedule.epochs,
            "steps_per_epoch": self.schedule.steps_per_epoch,
            "strategy": repr(self.strategy),
            "score": repr(self.score),
            "sampling": repr(self.batches.sampling),
        }

    def noise_multiplier(self) -> float:
        """The smallest noise multiplier, rounded up, that keeps the search within its budget.

        Raises:
          ValueError: if there is none.
        """
        return budgets.noise_multiplier_for_selection(
            self.strategy,
            self._event,
            self.budget.epsilon,
            self._delta_for_noise(),
            accounting=Accounting(self.budget.accountant),
        )

    def epsilon_spent(self, noise_multiplier: float) -> float:
        """ε of the search at `budget.delta`."""
        return self.strategy.epsilon(
            self._event(noise_multiplier),
            self._delta_for_noise(),
            accounting=Accounting(self.budget.accountant),
        )

    def epsilon_of_one(self, noise_multiplier: float) -> float:
        """ε of training one trial, as if it were the only one."""
        return sampling_epsilon.epsilon_spent(
            self.batches.sampling,
            self._ledger(noise_multiplier),
            self.batches.num_examples,
            self.budget.delta,
            accountant=self.budget.accountant,
        )

    def epsilon_without_amplification(self, noise_multiplier: float, resumed: int = 0) -> float:
        """ε of the search if all that is known is that a pass has each example once.

        See `composition.epsilon_without_amplification` for a single trial.

        Args:
          noise_multiplier: noise multiplier of every trial.
          resumed: how often a trial was resumed after a pass that was not finished, whose examples
            may occur again in the next one. It counts only for strategies that release all trials.
            For the others each epoch counts as the beginning of a pass, the worst case, so that the
            result does not depend on interruptions.
        """
        schedule = self.schedule
        if self.strategy.releases_all:
            times = self.batches.max_participations(schedule.releases) + resumed
        elif schedule.epoch_is_pass:
            times = schedule.epochs
        else:
            in_epoch = self.batches.max_participations(schedule.releases // schedule.epochs)
            times = schedule.epochs * in_epoch
        release = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.SelfComposedDpEvent(release, times)
        return self.strategy.epsilon(
            self._with_score(event),
            self.budget.delta,
            accounting=Accounting(self.budget.accountant),
        )

    def _ledger(self, noise_multiplier: float) -> Releases:
        """The releases of one trial."""
        size, releases = self.batches.batch_size, self.schedule.releases
        return Releases([Segment(noise_multiplier, size, releases)])

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        ledger = self._ledger(noise_multiplier)
        return self._with_score(composition.dp_event(ledger, self.batches.num_examples))

    def _with_score(self, training: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        builder = dp_accounting.DpEventBuilder()
        builder.compose(training)
        builder.compose(self.score.event)
        return builder.build()

    def _delta_for_noise(self) -> float:
        sampling, budget = self.batches.sampling, self.budget
        if not isinstance(sampling, PoissonSampling):
            return budget.delta
        releases = math.ceil(self.schedule.releases * self.strategy.expected_trials)
        return sampling.delta_for_noise(
            budget.epsilon, self.batches.num_examples, budget.delta, releases
        )
