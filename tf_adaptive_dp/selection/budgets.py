"""From a privacy budget for a search to the noise, or the number of trials, that it allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Callable

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.privacy import accounting as privacy_accounting
from tf_adaptive_dp.privacy import calibration
from tf_adaptive_dp.selection import accounting
from tf_adaptive_dp.selection import conversion as convert
from tf_adaptive_dp.selection.strategies import Strategy

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
      >>> from tf_adaptive_dp.selection.budgets import noise_multiplier_for_selection
      >>> from tf_adaptive_dp.selection.strategies import RepeatAndSelect
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
      >>> from tf_adaptive_dp.selection.budgets import num_trials_for_budget
      >>> num_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      6
    """
    _check_budget(epsilon)

    def spent(num_trials: int, method: str) -> float:
        return accounting.composition_epsilon(
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
      >>> from tf_adaptive_dp.selection.budgets import gamma_for_budget
      >>> gamma_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=2.5, delta=1e-5)
      0.01567
    """
    _check_budget(epsilon)
    keywords = {"accountant": accountant, "conversion": conversion, "orders": orders}

    def spent(gamma: float) -> float:
        return accounting.liu_talwar_epsilon(trial, gamma, delta, delta_2=delta_2, **keywords)

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
      >>> from tf_adaptive_dp.selection.budgets import mean_trials_for_budget
      >>> mean_trials_for_budget(dp_accounting.GaussianDpEvent(10.0), epsilon=1.0, delta=1e-5)
      42.94
    """
    _check_budget(epsilon)
    keywords = {"shape": shape, "conversion": conversion, "orders": orders}

    def spent(mean: float, method: str) -> float:
        return accounting.repeat_and_select_epsilon(
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
