"""Which noise a budget allows: the arithmetic behind `PrivacyPlan`."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Union

import dp_accounting

from tf_adaptive_dp.accounting import calibration
from tf_adaptive_dp.accounting.noise_strategies import (
    BandedNoise,
    IndependentNoise,
    NoiseStrategy,
    prefix_error,
)
from tf_adaptive_dp.accounting.releases import Releases
from tf_adaptive_dp.sampling.cyclic import CyclicPoissonSampling
from tf_adaptive_dp.sampling.fixed_order import FixedOrder
from tf_adaptive_dp.sampling.poisson import PoissonSampling

SamplingOfPlan = Union[PoissonSampling, CyclicPoissonSampling, FixedOrder]

_BANDS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class NoiseBudget:
    """A privacy budget, and the size of the data that it is for.

    Attributes:
      delta: δ.
      num_units: the number of examples, or of users: the public size of what batches are drawn
        from.
      accountant: `"pld"` or `"rdp"`.
      other_events: what else the budget pays for.
      examples_per_user: k, if users are drawn, or `None`.
      user_reduction: see `PoissonSampling`.
    """

    delta: float
    num_units: int
    accountant: str
    other_events: tuple[dp_accounting.DpEvent, ...]
    examples_per_user: int | None
    user_reduction: str

    def sampling(self, batch_size: int, epochs: int, noise: NoiseStrategy) -> SamplingOfPlan:
        """The sampling of a run.

        Args:
          batch_size: L.
          epochs: the number of epochs, each of round(`num_units` / `batch_size`) steps; without
            bands each is a pass, of floor(`num_units` / `batch_size`) steps.
          noise: the noise strategy, whose bands are the groups that take turns.

        Raises:
          ValueError: if the data are too few for a batch, or for one of each group.
        """
        if noise.bands is None:
            return self._one_order(batch_size, epochs, noise)
        steps = max(1, round(self.num_units / batch_size)) * epochs
        of_run = batch_size, self.num_units, steps
        if noise.bands > 1:
            return CyclicPoissonSampling.for_batch_size(*of_run, noise.bands)
        of_users: dict[str, Any] = {
            "examples_per_user": self.examples_per_user,
            "user_reduction": self.user_reduction,
        }
        return PoissonSampling.for_batch_size(*of_run, **of_users)

    def _one_order(self, batch_size: int, epochs: int, noise: NoiseStrategy) -> FixedOrder:
        """Passes in one order, the only batches for which noise without bands is accounted for."""
        if batch_size > self.num_units:
            raise ValueError(
                "`batch_size` must be at most `num_examples`: with this noise each epoch is a pass "
                f"over the data in whole batches. Received: batch_size={batch_size!r}, "
                f"num_examples={self.num_units!r}, noise={noise!r}"
            )
        return FixedOrder(batch_size, steps=self.num_units // batch_size * epochs)

    def epsilon(
        self,
        sampling: SamplingOfPlan,
        noise: NoiseStrategy,
        noise_multiplier: float,
        steps: int | None = None,
        accountant: str | None = None,
    ) -> float:
        """ε after some steps of a sampling.

        Args:
          sampling: how batches are drawn.
          noise: the strategy of the noise.
          noise_multiplier: σ.
          steps: the number of steps; `None` for all.
          accountant: `"rdp"` or `"pld"`; `None` for that of the budget.
        """
        size = sampling.expected_batch_size(self.num_units)
        planned = Releases(
            [(noise_multiplier, size, sampling.steps if steps is None else steps)],
            self.other_events,
            noise=noise,
            examples_per_user=sampling.examples_per_user,
        )
        accountant = accountant or self.accountant
        return sampling.epsilon_spent(planned, self.num_units, self.delta, accountant=accountant)

    def least_noise(self, epsilon: float, sampling: SamplingOfPlan, noise: NoiseStrategy) -> float:
        """The smallest noise multiplier for a sampling and a noise strategy, up to 0.1%.

        Args:
          epsilon: ε of all steps, and of the budget's other events.
          sampling: how batches are drawn.
          noise: the strategy of the noise.

        Raises:
          ValueError: if no noise meets the budget.
        """
        spent = functools.partial(self.epsilon, sampling, noise)
        by_rdp = functools.partial(spent, accountant="rdp")
        found = calibration.least_noise(
            spent,
            epsilon,
            1e-3,
            guess=self._guess(epsilon, sampling, noise),
            resembling=None if self.accountant == "rdp" else by_rdp,
        )
        if found is None:
            raise ValueError(
                "No noise multiplier meets the budget. Allow more `epsilon` or `delta`, or plan "
                f"fewer `epochs` or smaller batches. Received: epsilon={epsilon!r}, "
                f"delta={self.delta!r}, sampling={sampling!r}, noise={noise!r}, "
                f"other_events={self.other_events!r}"
            )
        return found

    def best_strategy(self, epsilon: float, batch_size: int, epochs: int) -> NoiseStrategy:
        """The strategy with the least noise in sums of steps, among those that allow sampling.

        Args:
          epsilon: ε of all steps, and of the budget's other events.
          batch_size: the expected batch size.
          epochs: the number of epochs.

        Returns:
          Independent noise, or a `BandedNoise` of 2 to 32 bands.
        """
        best: NoiseStrategy = IndependentNoise()
        least, guess, factor = math.inf, None, 2.0
        for bands in _BANDS:
            if bands * batch_size > self.num_units:
                break
            noise: NoiseStrategy = best if bands == 1 else BandedNoise(bands)
            sampling = self.sampling(batch_size, epochs, noise)
            spent = functools.partial(self.epsilon, sampling, noise, accountant="rdp")
            if guess is None:
                guess = self._guess(epsilon, sampling, noise)
            # 1% is enough to compare, and more bands need little more noise: few evaluations.
            found = calibration.least_noise(spent, epsilon, 1e-2, guess=guess, factor=factor)
            if found is None:
                break
            error = found * prefix_error(noise, sampling.steps)
            if error >= least:  # from here on, amplification fades faster than the sums gain
                break
            best, least, guess, factor = noise, error, 1.2 * found, 1.3
        return best

    def describe_noise(self, sampling: SamplingOfPlan, noise: NoiseStrategy) -> list[str]:
        """Compares the noise in sums of steps with independent noise; empty if that is used."""
        if noise.is_independent:
            return []
        alone = IndependentNoise()
        left = prefix_error(noise, sampling.steps) / prefix_error(alone, sampling.steps)
        compared = "with this multiplier"
        if noise.bands is None:
            # At the same epsilon the multipliers are proportional to the sensitivities.
            left *= sampling.equivalent_sensitivity(noise, self.num_units)
            left /= sampling.equivalent_sensitivity(alone, self.num_units)
            compared = "at the same epsilon and order"
        return [f"cumulative noise: {left:.2f} times that of independent noise {compared}"]

    def _guess(self, epsilon: float, sampling: SamplingOfPlan, noise: NoiseStrategy) -> float:
        """The noise multiplier if all steps were one Gaussian mechanism, which they are nearly."""
        moved = sampling.equivalent_sensitivity(noise, self.num_units)
        return moved * math.sqrt(-2 * math.log(self.delta)) / epsilon
