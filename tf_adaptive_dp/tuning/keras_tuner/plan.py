"""What every trial of a search may spend, and what all of them spend together."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dp_accounting

from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.ledger import Releases
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.tuning import budgets
from tf_adaptive_dp.tuning.conversion import Accounting


@dataclasses.dataclass(frozen=True)
class Plan:
    """The privacy of a search: trials that are alike, a strategy and a score.

    Guarantee: if no trial releases more than `releases` noisy gradients, each with the noise
    multiplier `noise_multiplier()` and expected batch size `batch_size`, and the strategy's
    conditions are kept, then the search is (`epsilon`, `delta`)-DP in the sense of
    `privacy_statement` for the sampling. Poisson batches that are truncated take their part of δ:
    with η of `PoissonSampling` for one trial, some of K trials overflows with probability E[K]·η at
    most, whatever the trials' results, so δ = δ₀ + e^ε·E[K]·η by the argument there.

    Attributes:
      strategy: one of `strategies`.
      score: one of `scores`.
      epsilon: of the whole search.
      delta: of the whole search.
      num_examples: of the training set, a public constant.
      sampling: how batches are drawn; see `privacy_statement`, subsets of fixed size excepted.
      accountant: `"rdp"` or `"pld"`.
      batch_size: L, the expected batch size of every trial.
      parts: the optimizer's `gradient_accumulation_steps`.
      epochs: of every trial.
      steps_per_epoch: calls of the optimizer in an epoch, a multiple of `parts`.
      epoch_is_pass: whether each epoch is known to have every example once.

    Raises:
      ValueError: if these do not go together.
    """

    strategy: Any
    score: Any
    epsilon: float
    delta: float
    num_examples: int
    sampling: Sampling | str
    accountant: str
    batch_size: float
    parts: int
    epochs: int
    steps_per_epoch: int
    epoch_is_pass: bool = False

    def __post_init__(self):
        if self.batch_size > self.num_examples:
            raise ValueError(
                "`expected_batch_size` of the optimizer must be at most `num_examples`. Received: "
                f"expected_batch_size={self.batch_size:g}, num_examples={self.num_examples}"
            )
        if self.steps_per_epoch % self.parts:
            raise ValueError(
                "An epoch must hold whole batches: let the number of steps in an epoch be a "
                "multiple of the optimizer's `gradient_accumulation_steps`. Received: "
                f"{self.steps_per_epoch} steps, gradient_accumulation_steps={self.parts}"
            )
        if isinstance(self.sampling, Sampling):
            self.sampling.check_ledger(self._ledger(1.0), self.num_examples)
        if self._delta_for_noise() <= 0:
            raise ValueError(
                "Batches overflow so often, in all trials together, that no `delta` is left. Make "
                "`max_batch_size` of the sampling larger. Received: "
                f"delta={self.delta!r}, sampling={self.sampling!r}"
            )

    @property
    def releases(self) -> int:
        """Noisy gradients that each trial may release."""
        return self.epochs * self.steps_per_epoch // self.parts

    def describe(self) -> dict[str, Any]:
        """What may not change when the search goes on, as plain JSON."""
        # `epoch_is_pass` follows from the others and the number of rows, which the search notes.
        described = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("strategy", "score", "sampling", "epoch_is_pass")
        }
        for name in ("strategy", "score", "sampling"):
            described[name] = repr(getattr(self, name))
        return described

    def noise_multiplier(self) -> float:
        """The least noise, rounded up, with which the search stays within its budget.

        Raises:
          ValueError: if none does.
        """
        return budgets.noise_multiplier_for_selection(
            self.strategy,
            self._event,
            self.epsilon,
            self._delta_for_noise(),
            accounting=Accounting(self.accountant),
        )

    def epsilon_spent(self, noise_multiplier: float) -> float:
        """ε of the search at `delta`."""
        return self.strategy.epsilon(
            self._event(noise_multiplier),
            self._delta_for_noise(),
            accounting=Accounting(self.accountant),
        )

    def epsilon_of_one(self, noise_multiplier: float) -> float:
        """ε of the training of one trial alone, as if it had been the only one."""
        return sampling_epsilon.epsilon_spent(
            self.sampling,
            self._ledger(noise_multiplier),
            self.num_examples,
            self.delta,
            accountant=self.accountant,
        )

    def epsilon_without_amplification(self, noise_multiplier: float, resumed: int = 0) -> float:
        """ε of the search if all that is known of the batches is that a pass has each example once.

        See `passes.epsilon_without_amplification`, of a single trial.

        Args:
          noise_multiplier: of every trial.
          resumed: how often any trial was gone on with after a pass that was not finished, and that
            counts: an example may have been in it and in the next one. Only of strategies that
            release all trials; for the others each epoch counts as if a pass began with it, as it
            does at most, so that the result does not tell of interruptions.
        """
        if self.strategy.releases_all:
            times = self._occurrences(self.releases) + resumed
        else:
            in_epoch = self._occurrences(self.releases // self.epochs)
            times = self.epochs * (1 if self.epoch_is_pass else in_epoch)
        release = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.SelfComposedDpEvent(release, times)
        return self.strategy.epsilon(
            self._with_score(event), self.delta, accounting=Accounting(self.accountant)
        )

    def _occurrences(self, releases: int) -> int:
        """In how many of these releases one example is, if a pass begins with the first."""
        return composition.max_participations(
            [(1.0, self.batch_size, releases)], self.num_examples
        )[0]

    def _ledger(self, noise_multiplier: float) -> Releases:
        """The releases of one trial."""
        return Releases([(noise_multiplier, self.batch_size, self.releases)])

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        ledger = self._ledger(noise_multiplier)
        return self._with_score(composition.dp_event(ledger, self.num_examples))

    def _with_score(self, training: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        builder = dp_accounting.DpEventBuilder()
        builder.compose(training)
        builder.compose(self.score.event)
        return builder.build()

    def _delta_for_noise(self) -> float:
        if not isinstance(self.sampling, PoissonSampling):
            return self.delta
        releases = math.ceil(self.releases * self.strategy.expected_trials)
        return self.sampling.delta_for_noise(self.epsilon, self.num_examples, self.delta, releases)
