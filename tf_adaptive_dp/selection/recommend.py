"""Which way of paying for a search is cheapest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.privacy.accounting import check_probability
from tf_adaptive_dp.selection import accounting, budgets
from tf_adaptive_dp.selection import conversion as convert
from tf_adaptive_dp.selection.strategies import (
    Composition,
    LiuTalwar,
    RepeatAndSelect,
    Strategy,
)


@dataclasses.dataclass(frozen=True)
class Offer:
    """One way to pay.

    Attributes:
      label: its name, in words.
      strategy: what to search with.
      epsilon: ε of the whole search.
      noise_multiplier: of a trial; `None` if the trial was given, or if none meets the budget.
      chance: probability that the best candidate of the space is tried at all.
    """

    label: str
    strategy: Strategy
    epsilon: float
    noise_multiplier: float | None
    chance: float


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Ways to pay for a search, the cheapest first; `str()` gives a table in Markdown.

    Attributes:
      offers: by ε, or with a budget by the noise that a trial needs.
      space_size: number of candidates.
      delta: δ of all of them.
      budget: ε that was asked for; `None` if the trial was given.
    """

    offers: tuple[Offer, ...]
    space_size: int
    delta: float
    budget: float | None

    @property
    def best(self) -> Offer:
        """The cheapest."""
        return self.offers[0]

    def __str__(self) -> str:
        lines = [
            f"{self.space_size} candidates, δ = {self.delta:g}",
            "",
            "| way to pay | trials on average | at most | shown | best candidate tried "
            "| noise multiplier | ε |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for offer in self.offers:
            strategy, noise = offer.strategy, offer.noise_multiplier
            cells = (
                offer.label,
                f"{strategy.expected_trials:.4g}",
                "no bound" if strategy.max_trials is None else str(strategy.max_trials),
                "all trials" if strategy.releases_all else "the winner",
                f"{100 * offer.chance:.0f}%",
                "as given" if self.budget is None else "none" if noise is None else f"{noise:g}",
                f"{offer.epsilon:.4g}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def plot(self) -> Any:
        """A bar for each way to pay: ε, or with a budget the noise multiplier that it needs.

        Needs matplotlib (`pip install matplotlib`).

        Returns:
          A `matplotlib.figure.Figure`.
        """
        from matplotlib.figure import Figure  # an extra

        by_noise = self.budget is not None
        shown = [o for o in self.offers if not by_noise or o.noise_multiplier is not None]
        figure = Figure(figsize=(7, 0.6 * len(shown) + 1.2), layout="constrained")
        axes = figure.subplots()
        axes.barh(
            [offer.label for offer in shown],
            [offer.noise_multiplier if by_noise else offer.epsilon for offer in shown],
        )
        axes.invert_yaxis()
        axes.set_xlabel(f"noise multiplier of a trial for ε = {self.budget:g}" if by_noise else "ε")
        axes.set_title(f"{self.space_size} candidates, δ = {self.delta:g}")
        return figure


def recommend(
    trial: dp_accounting.DpEvent | Callable[[float], dp_accounting.DpEvent],
    space_size: int,
    delta: float,
    *,
    epsilon: float | None = None,
    mean_trials: float | None = None,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> Recommendation:
    """Compares what it costs to search a space of candidates.

    Compared are: composition, each candidate tried once; random stopping (Liu and Talwar) with
    γ = 1 / `mean_trials` and the best hard stop; repeat-and-select with that mean, by the geometric
    and by the Poisson law. The last three draw each trial's candidate from the whole space, each
    alike, so that with a mean of `space_size` a certain candidate is tried with about 1/2
    (geometric) or 63% (Poisson) only; the table says it.

    Guarantee: every offer is (ε, δ)-DP for adding or removing one example, under the conditions of
    its own way: `accounting.composition_epsilon`, `liu_talwar_epsilon`,
    `repeat_and_select_epsilon`.

    Args:
      trial: the event of one trial, to compare ε; or, with `epsilon`, a function from a noise
        multiplier to it, to compare the noise that each way needs.
      space_size: number of candidates, at least 1.
      delta: δ, in (0, 1).
      epsilon: the budget of the whole search, greater than 0.
      mean_trials: of the ways with a random number of trials, at least 1; `None`: `space_size`.
      accountant: see `accounting.composition_epsilon`; repeat-and-select is always by RDP.
      conversion: see `accounting.composition_epsilon`.
      orders: see `accounting.composition_epsilon`.

    Returns:
      The offers, the cheapest first.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above, or if the budget cannot be met
        by any of them.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.selection.recommend import recommend
      >>> found = recommend(dp_accounting.GaussianDpEvent(10.0), space_size=40, delta=1e-5)
      >>> for offer in found.offers:
      ...     print(f"{offer.label}: {offer.epsilon:.3f}")
      repeat and select, geometric: 0.993
      repeat and select, Poisson: 1.984
      random stopping (Liu-Talwar): 2.384
      composition: 2.814
      >>> found = recommend(dp_accounting.GaussianDpEvent, 40, delta=1e-5, epsilon=1.0)
      >>> found.best.label, found.best.noise_multiplier
      ('repeat and select, geometric', 9.934)
    """
    checks.integer("space_size", space_size, 1)
    check_probability("delta", delta)
    mean = checks.number("mean_trials", space_size if mean_trials is None else mean_trials, 1)
    if epsilon is None:
        convert.checked_event("trial", trial)
    elif isinstance(trial, dp_accounting.DpEvent) or not callable(trial):
        raise TypeError(
            "`trial` must be a function from a noise multiplier to an event if `epsilon` is given. "
            f"Received: trial={trial!r}"
        )

    def offer(label: str, strategy: Strategy, chance: float) -> Offer:
        by = "rdp" if isinstance(strategy, RepeatAndSelect) else accountant
        keywords = {"accountant": by, "conversion": conversion, "orders": orders}
        if epsilon is None:
            return Offer(label, strategy, strategy.epsilon(trial, delta, **keywords), None, chance)
        noise = budgets.least_noise(strategy, trial, epsilon, delta, **keywords)
        spent = math.inf if noise is None else strategy.epsilon(trial(noise), delta, **keywords)
        return Offer(label, strategy, spent, noise, chance)

    stopping = LiuTalwar(1 / mean, accounting.best_delta_2(1 / mean, delta))
    by_geometric, by_poisson = RepeatAndSelect(mean), RepeatAndSelect(mean, math.inf)
    offers = [
        offer("composition", Composition(space_size), 1.0),
        offer("random stopping (Liu-Talwar)", stopping, _chance_stopping(stopping, space_size)),
        offer("repeat and select, geometric", by_geometric, _chance_geometric(mean, space_size)),
        offer("repeat and select, Poisson", by_poisson, -math.expm1(-mean / space_size)),
    ]
    if epsilon is None:
        offers.sort(key=lambda o: o.epsilon)
    else:
        offers.sort(key=lambda o: math.inf if o.noise_multiplier is None else o.noise_multiplier)
        if offers[0].noise_multiplier is None:
            raise ValueError(
                budgets.NO_NOISE.format(
                    f"space_size={space_size!r}, epsilon={epsilon!r}, delta={delta!r}"
                )
            )
    return Recommendation(tuple(offers), int(space_size), delta, epsilon)


def _chance_geometric(mean: float, space_size: int) -> float:
    """1 - E z^K for a geometric K, where z = 1 - 1 / space_size is to miss a candidate once."""
    gamma, missed = 1 / mean, 1 - 1 / space_size
    return 1 - gamma * missed / (1 - (1 - gamma) * missed)


def _chance_stopping(stopping: LiuTalwar, space_size: int) -> float:
    """The same for a geometric K that is cut off at the hard stop."""
    gamma, missed, last = stopping.gamma, 1 - 1 / space_size, stopping.max_trials
    going_on = (1 - gamma) * missed
    stopped = gamma * missed * (1 - going_on ** (last - 1)) / (1 - going_on)
    return 1 - stopped - missed * going_on ** (last - 1)
