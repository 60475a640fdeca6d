"""Which way of paying for a search is cheapest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.privacy import calibration
from tf_adaptive_dp.privacy.accounting import check_probability
from tf_adaptive_dp.selection import accounting, budgets, laws
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
      offers: by ε, or with a budget by the noise that a trial needs. All try the best candidate
        with the chance that was asked for, unless the mean number of trials was given instead.
      besides: ways that spread the number of trials more widely, with the mean of the geometric
        law. They are cheaper, but try the best candidate with a smaller chance, so they are not
        compared with the others.
      space_size: number of candidates.
      delta: δ of all of them.
      budget: ε that was asked for; `None` if the trial was given.
      chance: probability that was asked for; `None` if the mean number of trials was given.
    """

    offers: tuple[Offer, ...]
    besides: tuple[Offer, ...]
    space_size: int
    delta: float
    budget: float | None
    chance: float | None

    @property
    def best(self) -> Offer:
        """The cheapest."""
        return self.offers[0]

    def __str__(self) -> str:
        asked = "" if self.chance is None else f", the best of them tried with {self.chance:.0%}"
        lines = [
            f"{self.space_size} candidates{asked}, δ = {self.delta:g}",
            "",
            "| way to pay | trials on average | at most | shown | best candidate tried "
            "| noise multiplier | ε |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(self._row(offer) for offer in (*self.offers, *self.besides)),
            "",
            f"The last {len(self.besides)} are not compared with the others: their number of "
            "trials is spread more widely, and the best candidate tried less often.",
        ]
        return "\n".join(lines)

    def _row(self, offer: Offer) -> str:
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
        return f"| {' | '.join(cells)} |"

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
    chance: float = 0.9,
    mean_trials: float | None = None,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> Recommendation:
    """Compares what it costs to search a space of candidates.

    Compared are ways that try the best candidate of the space with an equal `chance`: composition
    of as many candidates, each tried once; random stopping (Liu and Talwar) with the best hard
    stop; repeat-and-select by the geometric and by the Poisson law. The last three draw each
    trial's candidate from the whole space, each alike, so that for 90% they make 9 times as many
    trials on average as there are candidates (Poisson: 2.3 times). What is saved is privacy, not
    time; it grows with the number of candidates. Of few of them composition is cheaper.

    Repeat-and-select with η = 0.1 and η = 0, the logarithmic law, is listed besides, with as many
    trials on average as by the geometric law: these are cheaper still, but the best candidate is
    tried less often, as the table says.

    Guarantee: every offer is (ε, δ)-DP for adding or removing one example, under the conditions of
    its own way: `accounting.composition_epsilon`, `liu_talwar_epsilon`,
    `repeat_and_select_epsilon`.

    Args:
      trial: the event of one trial, to compare ε; or, with `epsilon`, a function from a noise
        multiplier to it, to compare the noise that each way needs.
      space_size: number of candidates, at least 1.
      delta: δ, in (0, 1).
      epsilon: the budget of the whole search, greater than 0.
      chance: probability, in (0, 1), with which the best candidate is to be among those that are
        tried, at least.
      mean_trials: instead of `chance`: of the ways with a random number of trials, at least 1;
        composition then tries all candidates.
      accountant: `"rdp"`, or `"pld"`, tighter and slower.
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
      >>> step = dp_accounting.PoissonSampledDpEvent(
      ...     100 / 1_800, dp_accounting.GaussianDpEvent(noise_multiplier=2.0)
      ... )
      >>> trial = dp_accounting.SelfComposedDpEvent(step, 90)
      >>> found = recommend(trial, space_size=40, delta=1e-5)
      >>> for offer in (*found.offers, *found.besides):
      ...     print(f"{offer.label}: epsilon {offer.epsilon:.2f}, chance {offer.chance:.0%}")
      repeat and select, geometric: epsilon 3.74, chance 90%
      composition: epsilon 8.86, chance 90%
      random stopping (Liu-Talwar): epsilon 9.50, chance 90%
      repeat and select, Poisson: epsilon 9.77, chance 90%
      repeat and select, η = 0.1: epsilon 3.01, chance 61%
      repeat and select, logarithmic: epsilon 2.93, chance 54%
      >>> recommend(trial, space_size=4, delta=1e-5).best.label
      'composition'
      >>> found = recommend(dp_accounting.GaussianDpEvent, 40, delta=1e-5, epsilon=1.0)
      >>> found.best.label, found.best.noise_multiplier
      ('repeat and select, geometric', 11.762)
    """
    checks.integer("space_size", space_size, 1)
    check_probability("delta", delta)
    check_probability("chance", chance)
    if mean_trials is not None:
        checks.number("mean_trials", mean_trials, 1)
    if epsilon is None:
        convert.checked_event("trial", trial)
    elif isinstance(trial, dp_accounting.DpEvent) or not callable(trial):
        raise TypeError(
            "`trial` must be a function from a noise multiplier to an event if `epsilon` is given. "
            f"Received: trial={trial!r}"
        )
    keywords = {"accountant": accountant, "conversion": conversion, "orders": orders}

    def offer(label: str, strategy: Strategy) -> Offer:
        tried = chance_of(strategy, space_size)
        if epsilon is None:
            return Offer(label, strategy, strategy.epsilon(trial, delta, **keywords), None, tried)
        noise = budgets.least_noise(strategy, trial, epsilon, delta, **keywords)
        spent = math.inf if noise is None else strategy.epsilon(trial(noise), delta, **keywords)
        return Offer(label, strategy, spent, noise, tried)

    ranked, spread = _strategies(int(space_size), delta, chance, mean_trials)
    offers = [offer(label, strategy) for label, strategy in ranked.items()]
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
    besides = tuple(offer(label, strategy) for label, strategy in spread.items())
    asked = chance if mean_trials is None else None
    return Recommendation(tuple(offers), besides, int(space_size), delta, epsilon, asked)


def _strategies(
    space_size: int, delta: float, chance: float, mean_trials: float | None
) -> tuple[dict[str, Strategy], dict[str, Strategy]]:
    """What is compared, and what is listed besides."""

    def stopping(mean: float) -> LiuTalwar:
        return LiuTalwar(1 / mean, accounting.best_delta_2(1 / mean, delta))

    def with_chance(make: Callable[[float], Strategy]) -> Strategy:
        if mean_trials is not None:
            return make(mean_trials)
        return make(_least_mean(lambda mean: chance_of(make(mean), space_size) >= chance))

    # A hair less, against the rounding of chance * space_size.
    distinct = space_size if mean_trials else max(1, math.ceil(chance * space_size * (1 - 1e-12)))
    geometric = with_chance(RepeatAndSelect)
    ranked = {
        "composition": Composition(distinct),
        "random stopping (Liu-Talwar)": with_chance(stopping),
        "repeat and select, geometric": geometric,
        "repeat and select, Poisson": with_chance(lambda mean: RepeatAndSelect(mean, math.inf)),
    }
    spread = {
        "repeat and select, η = 0.1": RepeatAndSelect(geometric.mean_trials, 0.1),
        "repeat and select, logarithmic": RepeatAndSelect(geometric.mean_trials, 0.0),
    }
    return ranked, spread


def _least_mean(suffices: Callable[[float], bool]) -> float:
    """The least mean number of trials that suffices, rounded up to four digits."""
    low, high = 1.0, 1.0
    while not suffices(high):
        low, high = high, 2 * high
    while high > low * (1 + 1e-6):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return calibration.rounded_up(high, 1e-3, lambda mean: not suffices(mean))


def chance_of(strategy: Strategy, space_size: int) -> float:
    """Probability that a certain candidate of the space is tried at all.

    Args:
      strategy: composition tries distinct candidates, the others draw with replacement.
      space_size: number of candidates.
    """
    if isinstance(strategy, Composition):
        return min(1.0, strategy.num_trials / space_size)
    missed = 1 - 1 / space_size
    if isinstance(strategy, RepeatAndSelect):
        return 1 - laws.generating_function(strategy.mean_trials, strategy.shape, missed)
    gamma, last = strategy.gamma, strategy.max_trials
    going_on = (1 - gamma) * missed
    stopped = gamma * missed * (1 - going_on ** (last - 1)) / (1 - going_on)
    return 1 - stopped - missed * going_on ** (last - 1)
