"""Noise and numbers of trials that fit a budget, and the cheapest way to pay for a search."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import calibration
from tf_adaptive_dp.accounting import composition as privacy_accounting
from tf_adaptive_dp.accounting.composition import check_probability
from tf_adaptive_dp.tuning import conversion as convert
from tf_adaptive_dp.tuning import search_epsilon, trial_count_distributions
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect, Strategy

# No search of more trials on average is looked for.
MAX_TRIALS = privacy_accounting.MAX_RELEASES

NO_NOISE = (
    f"No noise multiplier up to {privacy_accounting.MAX_NOISE_MULTIPLIER:g} meets the budget; "
    "allow more `epsilon` or `delta`, or fewer trials, and see whether something in a trial costs "
    "as much whatever its noise multiplier is, as a score may. Received: {}"
)


def noise_multiplier_for_selection(
    strategy: Strategy,
    make_trial: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
    tolerance: float = 1e-3,
) -> float:
    """Smallest noise multiplier of a trial that keeps a search within a privacy budget.

    Rounded up to a short decimal number, so that a value copied from a printout does not overspend.

    Guarantee: `strategy.epsilon(make_trial(result), delta, …)` is at most `epsilon`, in the sense
    and under the conditions of that strategy.

    Args:
      strategy: see `strategies`.
      make_trial: from a noise multiplier to the event of a trial with it, which costs the less the
        larger the noise multiplier is.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      accountant: see `accounting.composition_epsilon`.
      conversion: see `accounting.composition_epsilon`.
      orders: see `accounting.composition_epsilon`.
      tolerance: by which part the result may exceed the least noise that will do, in (0, 1).

    Returns:
      The noise multiplier.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above, or if no noise multiplier from
        1e-6 to a million meets the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import noise_multiplier_for_selection
      >>> from tf_adaptive_dp.tuning.strategies import RepeatAndSelect
      >>> noise_multiplier_for_selection(
      ...     RepeatAndSelect(mean_trials=10), dp_accounting.GaussianDpEvent, 1.0, delta=1e-5
      ... )
      8.52
    """
    keywords = {"accountant": accountant, "conversion": conversion, "orders": orders}
    found = least_noise(strategy, make_trial, epsilon, delta, tolerance=tolerance, **keywords)
    if found is None:
        raise ValueError(
            NO_NOISE.format(f"strategy={strategy!r}, epsilon={epsilon!r}, delta={delta!r}")
        )
    return found


def least_noise(
    strategy: Strategy,
    make_trial: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    tolerance: float = 1e-3,
    **keywords: Any,
) -> float | None:
    """`noise_multiplier_for_selection`, or `None` if no noise multiplier meets the budget."""
    _check_budget(epsilon)
    privacy_accounting.check_probability("delta", delta)
    privacy_accounting.check_probability("tolerance", tolerance)
    if isinstance(make_trial, dp_accounting.DpEvent) or not callable(make_trial):
        raise TypeError(
            "`make_trial` must be a function from a noise multiplier to a `dp_accounting.DpEvent`. "
            f"Received: make_trial={make_trial!r}"
        )

    @functools.cache
    def overspends(noise_multiplier: float) -> bool:
        # Also ends the search downwards, for trials that cost nothing.
        if noise_multiplier < privacy_accounting.MIN_NOISE_MULTIPLIER:
            return True
        trial = convert.checked_event("make_trial(noise_multiplier)", make_trial(noise_multiplier))
        return strategy.epsilon(trial, delta, **keywords) > epsilon

    # What is enough noise by RDP is enough by PLD, and PLD takes longest where noise is small.
    enough = None
    if keywords.get("accountant") == "pld":
        by_rdp = {**keywords, "accountant": "rdp"}
        enough = least_noise(strategy, make_trial, epsilon, delta, tolerance=tolerance, **by_rdp)
    if enough is None:
        low, high = calibration.bracket(overspends, 1.0)
    else:
        low, high = 0.8 * enough, enough
        while not overspends(low):
            low, high = 0.8 * low, low
    if overspends(high):
        return None
    while high > low * (1 + tolerance / 4):
        middle = (low + high) / 2
        low, high = (middle, high) if overspends(middle) else (low, middle)
    return calibration.rounded_up(high, tolerance / 2, overspends)


def num_trials_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> int:
    """How many trials composition allows: the largest K with ε(K) ≤ `epsilon`.

    Guarantee: as `accounting.composition_epsilon`, with K trials; K + 1 would overspend (unless K
    is 2**31, where the search stops).

    Args:
      trial: one trial, or the costliest of them.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      accountant: see `accounting.composition_epsilon`.
      conversion: see `accounting.composition_epsilon`.
      orders: see `accounting.composition_epsilon`.

    Returns:
      K ≥ 1.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above, or if a single trial costs
        more than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import num_trials_for_budget
      >>> num_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      6
    """
    _check_budget(epsilon)

    def spent(num_trials: int, method: str) -> float:
        return search_epsilon.composition_epsilon(
            trial, num_trials, delta, accountant=method, conversion=conversion, orders=orders
        )

    _check_first(spent(1, accountant), epsilon, "composition")
    # What fits by RDP fits by PLD, and saves most of PLD's costly evaluations.
    found = privacy_accounting.largest(lambda k: spent(max(k, 1), "rdp") <= epsilon)
    if accountant == "rdp":
        return max(found, 1)
    return max(privacy_accounting.largest(lambda k: spent(k, accountant) <= epsilon, found), 1)


def gamma_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    delta_2: float | None = 1e-20,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """How many trials random stopping allows: the smallest γ with ε(γ) ≤ `epsilon`.

    Rounded up to four digits. 1 / γ trials are made on average.

    Guarantee: as `accounting.liu_talwar_epsilon`, with that γ and `delta_2`.

    Args:
      trial: one trial, or the costliest in the space.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      delta_2: see `accounting.liu_talwar_epsilon`.
      accountant: see `accounting.liu_talwar_epsilon`.
      conversion: see `accounting.composition_epsilon`.
      orders: see `accounting.composition_epsilon`.

    Returns:
      γ, from 2**-31, where the search stops, to 1.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above, or if even γ = 1 costs more
        than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import gamma_for_budget
      >>> gamma_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=2.5, delta=1e-5)
      0.01567
    """
    _check_budget(epsilon)
    keywords = {"accountant": accountant, "conversion": conversion, "orders": orders}

    def spent(gamma: float) -> float:
        return search_epsilon.liu_talwar_epsilon(trial, gamma, delta, delta_2=delta_2, **keywords)

    _check_first(spent(1.0), epsilon, "random stopping with gamma=1")
    trials = _largest_mean(lambda mean: spent(1 / mean) <= epsilon)
    return _short(1 / trials, math.ceil, lambda gamma: gamma == 1 or spent(gamma) <= epsilon)


def mean_trials_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    shape: float = 1.0,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """How many trials repeat-and-select allows: the largest mean with ε(mean) ≤ `epsilon`.

    Rounded down to four digits.

    Guarantee: as `accounting.repeat_and_select_epsilon`, with that mean and `shape`.

    Args:
      trial: one trial, or the costliest in the space.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      shape: see `accounting.repeat_and_select_epsilon`.
      accountant: see `accounting.repeat_and_select_epsilon`.
      conversion: see `accounting.composition_epsilon`.
      orders: see `accounting.composition_epsilon`.

    Returns:
      The mean, from 1 to 2**31, where the search stops.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above, or if even a mean of 1 costs
        more than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import mean_trials_for_budget
      >>> mean_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      42.94
    """
    _check_budget(epsilon)
    keywords = {"shape": shape, "conversion": conversion, "orders": orders}

    def spent(mean: float, method: str) -> float:
        return search_epsilon.repeat_and_select_epsilon(
            trial, mean, delta, accountant=method, **keywords
        )

    _check_first(spent(1.0, accountant), epsilon, "repeat-and-select with a mean of 1")
    # What fits by RDP fits by PLD, and saves most of PLD's costly evaluations.
    found = 1.0
    if spent(1.0, "rdp") <= epsilon:
        found = _largest_mean(lambda mean: spent(mean, "rdp") <= epsilon)
    if accountant != "rdp":
        found = _largest_mean(lambda mean: spent(mean, accountant) <= epsilon, found)
    return _short(found, math.floor, lambda mean: mean == 1 or spent(mean, accountant) <= epsilon)


def _check_budget(epsilon: float) -> None:
    checks.number("epsilon", epsilon, 0, strict=True)


def _check_first(spent: float, epsilon: float, what: str) -> None:
    if spent > epsilon:
        raise ValueError(
            f"No trial fits the budget: {what} costs {spent:.4g} already. Allow more `epsilon` or "
            f"`delta`, or train with more noise or fewer steps. Received: epsilon={epsilon!r}"
        )


def _largest_mean(fits: Callable[[float], bool], low: float = 1.0) -> float:
    """The largest number from `low`, which fits, to `MAX_TRIALS` that fits, to 1e-6 of it."""
    high = 2 * low
    while high < MAX_TRIALS and fits(high):
        low, high = high, 2 * high
    high = min(high, float(MAX_TRIALS))
    if fits(high):
        return high
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _short(value: float, rounding: Callable[[float], int], fits: Callable[[float], bool]) -> float:
    """`value` rounded to four digits in the direction that fits; 1 at the end of the range."""
    digits = 3 - math.floor(math.log10(value))
    steps = rounding(value * 10.0**digits)
    while not fits(found := round(steps * 10.0**-digits, digits)):
        steps += 1 if rounding is math.ceil else -1
    return found


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
      >>> from tf_adaptive_dp.tuning.budgets import recommend
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
        noise = least_noise(strategy, trial, epsilon, delta, **keywords)
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
                NO_NOISE.format(f"space_size={space_size!r}, epsilon={epsilon!r}, delta={delta!r}")
            )
    besides = tuple(offer(label, strategy) for label, strategy in spread.items())
    asked = chance if mean_trials is None else None
    return Recommendation(tuple(offers), besides, int(space_size), delta, epsilon, asked)


def _strategies(
    space_size: int, delta: float, chance: float, mean_trials: float | None
) -> tuple[dict[str, Strategy], dict[str, Strategy]]:
    """What is compared, and what is listed besides."""

    def stopping(mean: float) -> LiuTalwar:
        return LiuTalwar(1 / mean, search_epsilon.best_delta_2(1 / mean, delta))

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
        return 1 - trial_count_distributions.generating_function(
            strategy.mean_trials, strategy.shape, missed
        )
    gamma, last = strategy.gamma, strategy.max_trials
    going_on = (1 - gamma) * missed
    stopped = gamma * missed * (1 - going_on ** (last - 1)) / (1 - going_on)
    return 1 - stopped - missed * going_on ** (last - 1)
