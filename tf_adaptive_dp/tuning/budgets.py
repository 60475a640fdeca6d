"""Noise and numbers of trials that fit a budget, and a comparison of ways to pay for a search."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, TypeVar, Union

import dp_accounting
from scipy import optimize

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, calibration, composition
from tf_adaptive_dp.tuning import search_epsilon, trial_count_distributions
from tf_adaptive_dp.tuning.conversion import DEFAULT_ACCOUNTING, Accounting, checked_event
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect, Strategy
from tf_adaptive_dp.wording import format_delta

# The strategies whose distribution of trials is known.
KnownStrategy = Union[Composition, LiuTalwar, RepeatAndSelect]
_S = TypeVar("_S", Composition, LiuTalwar, RepeatAndSelect)

# The largest mean number of trials that a budget is searched for.
MAX_TRIALS = composition.MAX_RELEASES

_NO_NOISE = (
    f"No noise multiplier up to {accountants.MAX_NOISE_MULTIPLIER:g} meets the budget; allow more "
    "`epsilon` or `delta`, or fewer trials. Check whether a part of the trial, such as its score, "
    "costs the same at any noise multiplier. Received: {}"
)


def noise_multiplier_for_selection(
    strategy: Strategy,
    make_trial: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    accounting: Accounting = DEFAULT_ACCOUNTING,
    tolerance: float = 1e-3,
) -> float:
    """Smallest noise multiplier of a trial that keeps a search within a privacy budget.

    Rounds up to a short decimal number, so that a value copied from a printout does not overspend.

    Guarantee: `strategy.epsilon(make_trial(result), delta, …)` is at most `epsilon`, in the sense
    and under the conditions of that strategy.

    Args:
      strategy: a strategy, see `strategies`.
      make_trial: returns the event of a trial for a noise multiplier. The cost of the event must
        decrease with the noise multiplier.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      accounting: how ε is computed, see `Accounting`.
      tolerance: maximum relative excess over the smallest sufficient noise multiplier, in (0, 1).

    Returns:
      The noise multiplier.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if no noise
        multiplier from 1e-6 to a million meets the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import noise_multiplier_for_selection
      >>> from tf_adaptive_dp.tuning.strategies import RepeatAndSelect
      >>> noise_multiplier_for_selection(
      ...     RepeatAndSelect(mean_trials=10), dp_accounting.GaussianDpEvent, 1.0, delta=1e-5
      ... )
      8.519
    """
    found = _least_noise(strategy, make_trial, epsilon, delta, accounting, tolerance)
    if found is None:
        raise ValueError(
            _NO_NOISE.format(f"strategy={strategy!r}, epsilon={epsilon!r}, delta={delta!r}")
        )
    return found


def _least_noise(
    strategy: Strategy,
    make_trial: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    accounting: Accounting,
    tolerance: float = 1e-3,
) -> float | None:
    """`noise_multiplier_for_selection`, or `None` if no noise multiplier meets the budget."""
    _check_budget(epsilon)
    if not callable(getattr(strategy, "epsilon", None)):
        raise TypeError(
            "`strategy` must be a strategy of `tf_adaptive_dp.tuning`, such as `RepeatAndSelect`. "
            f"Received: strategy={strategy!r}"
        )
    checks.instance("accounting", accounting, Accounting)
    delta = checks.probability("delta", delta)
    tolerance = checks.probability("tolerance", tolerance)
    if isinstance(make_trial, dp_accounting.DpEvent) or not callable(make_trial):
        raise TypeError(
            "`make_trial` must be a function from a noise multiplier to a `dp_accounting.DpEvent`. "
            f"Received: make_trial={make_trial!r}"
        )

    def spent(noise_multiplier: float, accounting: Accounting = accounting) -> float:
        # This also bounds the search from below if trials cost nothing.
        if noise_multiplier < accountants.MIN_NOISE_MULTIPLIER:
            return math.inf
        trial = checked_event("make_trial(noise_multiplier)", make_trial(noise_multiplier))
        return strategy.epsilon(trial, delta, accounting=accounting)

    by_rdp = functools.partial(spent, accounting=accounting.by_rdp())
    return calibration.least_noise(
        spent, epsilon, tolerance, resembling=by_rdp if accounting.uses_pld else None
    )


def num_trials_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> int:
    """Largest number of trials that composition allows: the largest K with ε(K) ≤ `epsilon`.

    Guarantee: that of `composition_epsilon` for K trials. K + 1 would overspend, unless K is 2**31,
    where the search stops.

    Args:
      trial: one trial, or the most expensive one.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      accounting: how ε is computed, see `Accounting`.

    Returns:
      K ≥ 1.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if
        a single trial costs more than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import num_trials_for_budget
      >>> num_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      6
    """
    _check_budget(epsilon)

    def fits(num_trials: int, accountant: str) -> bool:
        by = dataclasses.replace(accounting, accountant=accountant)
        spent = search_epsilon.composition_epsilon(trial, num_trials, delta, accounting=by)
        return spent <= epsilon

    alone = search_epsilon.composition_epsilon(trial, 1, delta, accounting=accounting)
    _check_first_trial(alone, epsilon, "composition")
    found = composition.largest_within(fits, accounting.accountant, composition.largest, 0)
    return max(found, 1)


def gamma_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    delta_2: float | None = 1e-20,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> float:
    """Smallest γ of random stopping that a budget allows: the smallest γ with ε(γ) ≤ `epsilon`.

    Rounds up to four digits. Random stopping runs 1 / γ trials on average.

    Guarantee: that of `liu_talwar_epsilon` for this γ and `delta_2`.

    Args:
      trial: one trial, or the most expensive one of the search space.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      delta_2: see `liu_talwar_epsilon`.
      accounting: how ε is computed, see `Accounting`.

    Returns:
      γ, from 2**-31, where the search stops, to 1.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if
        even γ = 1 costs more than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import gamma_for_budget
      >>> gamma_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=2.5, delta=1e-5)
      0.01567
    """
    _check_budget(epsilon)

    @functools.cache
    def spent(gamma: float) -> float:
        return search_epsilon.liu_talwar_epsilon(
            trial, gamma, delta, delta_2=delta_2, accounting=accounting
        )

    _check_first_trial(spent(1.0), epsilon, "random stopping with gamma=1")
    trials = _largest_mean(lambda mean: spent(1 / mean) <= epsilon)
    return _four_digits(1 / trials, math.ceil, lambda gamma: gamma == 1 or spent(gamma) <= epsilon)


def mean_trials_for_budget(
    trial: dp_accounting.DpEvent,
    epsilon: float,
    delta: float,
    *,
    shape: float = 1.0,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> float:
    """Largest mean number of trials that repeat-and-select allows within a budget.

    Rounds down to four digits.

    Guarantee: that of `repeat_and_select_epsilon` for this mean and `shape`.

    Args:
      trial: one trial, or the most expensive one of the search space.
      epsilon: the budget of the whole search, greater than 0.
      delta: δ, in (0, 1).
      shape: see `repeat_and_select_epsilon`.
      accounting: how ε is computed, see `Accounting`.

    Returns:
      The mean, from 1 to 2**31, where the search stops.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if
        even a mean of 1 costs more than the budget.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.budgets import mean_trials_for_budget
      >>> mean_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      42.94
    """
    _check_budget(epsilon)

    @functools.cache
    def spent(mean: float, accountant: str) -> float:
        by = dataclasses.replace(accounting, accountant=accountant)
        return search_epsilon.repeat_and_select_epsilon(
            trial, mean, delta, shape=shape, accounting=by
        )

    def fits(mean: float, accountant: str) -> bool:
        return spent(mean, accountant) <= epsilon

    def search(fits: Callable[[float], bool], low: float) -> float:
        # A mean of 1 may fit by PLD only.
        return _largest_mean(fits, low) if low > 1 or fits(1.0) else low

    chosen = checks.instance("accounting", accounting, Accounting).accountant
    _check_first_trial(spent(1.0, chosen), epsilon, "repeat-and-select with a mean of 1")
    found = composition.largest_within(fits, chosen, search, 1.0)
    return _four_digits(found, math.floor, lambda mean: mean == 1 or fits(mean, chosen))


def _check_budget(epsilon: float) -> None:
    checks.number("epsilon", epsilon, 0, strict=True)


def _check_first_trial(spent: float, epsilon: float, what: str) -> None:
    if spent > epsilon:
        raise ValueError(
            f"No trial fits the budget: {what} alone costs {spent:.4g}. Allow more `epsilon` or "
            f"`delta`, or train with more noise or fewer steps. Received: epsilon={epsilon!r}"
        )


def _largest_mean(fits: Callable[[float], bool], low: float = 1.0) -> float:
    """The largest mean from `low`, which fits, to `MAX_TRIALS` that fits, up to 1e-6 of it."""
    high = 2 * low
    while high < MAX_TRIALS and fits(high):
        low, high = high, 2 * high
    high = min(high, float(MAX_TRIALS))
    if fits(high):
        return high
    return _boundary(fits, low, high)


def _boundary(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a monotone condition changes between `low` and `high`, up to 1e-6 of it."""
    return optimize.bisect(lambda x: 1.0 if holds(x) else -1.0, low, high, xtol=1e-6 * low)


def _four_digits(
    value: float, rounding: Callable[[float], int], fits: Callable[[float], bool]
) -> float:
    """Rounds to four digits, up or down, and on until the result fits."""
    digits = 3 - math.floor(math.log10(value))
    steps = rounding(value * 10.0**digits)
    while not fits(found := round(steps * 10.0**-digits, digits)):
        steps += 1 if rounding is math.ceil else -1
    return found


@dataclasses.dataclass(frozen=True)
class Offer:
    """One way to pay for a search.

    Attributes:
      label: the name of the way.
      strategy: the strategy of the search.
      epsilon: ε of the whole search.
      noise_multiplier: noise multiplier of a trial; `None` if the trial was given, or if no noise
        multiplier meets the budget.
      chance: probability that the best candidate of the search space is tried.
    """

    label: str
    strategy: Strategy
    epsilon: float
    noise_multiplier: float | None
    chance: float


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Ways to pay for a search, the cheapest first; `str()` returns a Markdown table.

    Attributes:
      offers: the ways to pay, sorted by ε, or by the noise that a trial needs if there is a budget.
        All try the best candidate with the requested chance, unless the mean number of trials was
        given instead.
      besides: ways that spread the number of trials more widely, with the mean of the geometric
        distribution. They are cheaper but less likely to try the best candidate, so they are not
        compared with the others.
      space_size: number of candidates.
      delta: δ of every offer.
      budget: the requested ε; `None` if the trial was given.
      chance: the requested probability; `None` if the mean number of trials was given.
    """

    offers: tuple[Offer, ...]
    besides: tuple[Offer, ...]
    space_size: int
    delta: float
    budget: float | None
    chance: float | None

    @property
    def best(self) -> Offer:
        """The cheapest offer."""
        return self.offers[0]

    def __str__(self) -> str:
        asked = "" if self.chance is None else f", the best one tried with {self.chance:.0%} chance"
        lines = [
            f"{self.space_size} candidates{asked}, δ = {format_delta(self.delta)}",
            "",
            "| strategy | trials on average | at most | what is published "
            "| chance of trying the best | noise multiplier | ε |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(self._row(offer) for offer in (*self.offers, *self.besides)),
            "",
            f"The last {len(self.besides)} are not comparable to the others: their number of "
            "trials varies more, and they are less likely to try the best candidate.",
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
        """Plots a bar for each offer: its ε, or the noise multiplier it needs if there is a budget.

        Returns:
          A `matplotlib.figure.Figure`.
        """
        from matplotlib.figure import Figure  # takes a while to import

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
        axes.set_title(f"{self.space_size} candidates, δ = {format_delta(self.delta)}")
        return figure


def recommend(
    trial: dp_accounting.DpEvent | Callable[[float], dp_accounting.DpEvent],
    space_size: int,
    delta: float,
    *,
    epsilon: float | None = None,
    chance: float = 0.9,
    mean_trials: float | None = None,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> Recommendation:
    """Compares what ways to search a space of candidates cost.

    The compared ways try the best candidate of the search space with an equal `chance`: composition
    with enough distinct candidates; random stopping (Liu and Talwar 2019) with the best hard stop;
    and repeat-and-select with the geometric and the Poisson distribution. The last three draw the
    candidate of each trial uniformly from the whole space. For a chance of 90% they therefore run 9
    times as many trials on average as there are candidates (Poisson: 2.3 times). They save privacy,
    not time, and the more candidates there are, the more they save. For few candidates, composition
    is cheaper.

    Repeat-and-select with η = 0.1 and with η = 0, the logarithmic distribution, is listed in
    addition, with the mean number of trials of the geometric distribution. These are cheaper still,
    but less likely to try the best candidate, as the table shows.

    Guarantee: every offer is (ε, δ)-DP for adding or removing one example, under the conditions of
    `composition_epsilon`, `liu_talwar_epsilon` or `repeat_and_select_epsilon`.

    Args:
      trial: the event of one trial, to compare ε. With `epsilon`, a function from a noise
        multiplier to that event, to compare the noise that each way needs.
      space_size: number of candidates, at least 1.
      delta: δ, in (0, 1).
      epsilon: the budget of the whole search, greater than 0.
      chance: minimum probability that the best candidate is tried, in (0, 1).
      mean_trials: mean number of trials of the random ways, at least 1; replaces `chance`.
        Composition then tries all candidates.
      accounting: how ε is computed, see `Accounting`.

    Returns:
      A `Recommendation` with the cheapest offer first.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if no way
        meets the budget.

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
    space_size = checks.integer("space_size", space_size, 1)
    delta = checks.probability("delta", delta)
    chance = checks.probability("chance", chance)
    if mean_trials is not None:
        mean_trials = checks.number("mean_trials", mean_trials, 1)
    if epsilon is None:
        checked_event("trial", trial)
    elif isinstance(trial, dp_accounting.DpEvent) or not callable(trial):
        raise TypeError(
            "`trial` must be a function from a noise multiplier to an event if `epsilon` is given. "
            f"Received: trial={trial!r}"
        )

    def offer(label: str, strategy: KnownStrategy) -> Offer:
        noise, event = None, trial
        if epsilon is not None:
            noise = _least_noise(strategy, trial, epsilon, delta, accounting)
            event = None if noise is None else trial(noise)
        spent = math.inf if event is None else strategy.epsilon(event, delta, accounting=accounting)
        return Offer(label, strategy, spent, noise, chance_of(strategy, space_size))

    ranked, spread = _strategies(int(space_size), delta, chance, mean_trials)
    offers = [offer(label, strategy) for label, strategy in ranked.items()]
    if epsilon is None:
        offers.sort(key=lambda o: o.epsilon)
    else:
        offers.sort(key=lambda o: math.inf if o.noise_multiplier is None else o.noise_multiplier)
        if offers[0].noise_multiplier is None:
            raise ValueError(
                _NO_NOISE.format(f"space_size={space_size!r}, epsilon={epsilon!r}, delta={delta!r}")
            )
    besides = tuple(offer(label, strategy) for label, strategy in spread.items())
    asked = chance if mean_trials is None else None
    return Recommendation(tuple(offers), besides, int(space_size), delta, epsilon, asked)


def _strategies(
    space_size: int, delta: float, chance: float, mean_trials: float | None
) -> tuple[dict[str, KnownStrategy], dict[str, KnownStrategy]]:
    """The ways to compare, and those to list in addition."""

    def stopping(mean: float) -> LiuTalwar:
        return LiuTalwar(1 / mean, search_epsilon.best_delta_2(1 / mean, delta))

    def with_chance(make: Callable[[float], _S]) -> _S:
        if mean_trials is not None:
            return make(mean_trials)
        return make(_least_mean(lambda mean: chance_of(make(mean), space_size) >= chance))

    # The factor absorbs the rounding of chance * space_size.
    distinct = space_size if mean_trials else max(1, math.ceil(chance * space_size * (1 - 1e-12)))
    geometric = with_chance(RepeatAndSelect)
    ranked: dict[str, KnownStrategy] = {
        "composition": Composition(distinct),
        "random stopping (Liu-Talwar)": with_chance(stopping),
        "repeat and select, geometric": geometric,
        "repeat and select, Poisson": with_chance(lambda mean: RepeatAndSelect(mean, math.inf)),
    }
    spread: dict[str, KnownStrategy] = {
        "repeat and select, η = 0.1": RepeatAndSelect(geometric.mean_trials, 0.1),
        "repeat and select, logarithmic": RepeatAndSelect(geometric.mean_trials, 0.0),
    }
    return ranked, spread


def _least_mean(suffices: Callable[[float], bool]) -> float:
    """The smallest mean number of trials that suffices, rounded up to four digits."""
    low, high = 1.0, 1.0
    while not suffices(high):
        low, high = high, 2 * high
    found = _boundary(suffices, low, high) if high > low else high
    return calibration.rounded_up(found, 1e-3, lambda mean: not suffices(mean))


def chance_of(strategy: KnownStrategy, space_size: int) -> float:
    """Probability that a given candidate of the search space is tried.

    Args:
      strategy: composition tries distinct candidates; the others draw with replacement.
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
