"""From a privacy budget to the noise multiplier that meets it."""

from __future__ import annotations

import functools
import math
from typing import Callable

from scipy import optimize

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, composition

__all__ = ["noise_multiplier_for"]


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    *,
    accountant: str = "rdp",
    tolerance: float = 1e-3,
) -> float:
    """Smallest noise multiplier that keeps a run within a privacy budget.

    Solves ε(σ, q, steps, δ) = `epsilon` for σ and rounds up to a short decimal number, so that a
    value copied from a printout does not overspend.

    Guarantee: `accounting.epsilon(result, sampling_probability, steps, delta, accountant)` is at
    most `epsilon`. This is (ε, δ)-DP for adding or removing one example under Poisson sampling, and
    an approximation for shuffled batches.

    Args:
      epsilon: the budget, greater than 0.
      delta: δ, in (0, 1); should be well below 1 / number of examples.
      sampling_probability: expected batch size / number of examples, in (0, 1].
      steps: number of releases (noisy gradients), at least 1. An iteration of ADADP makes two.
      accountant: `"rdp"` or `"pld"`, see `accounting.epsilon`.
      tolerance: maximum relative excess over the smallest sufficient noise multiplier, in (0, 1).

    Returns:
      The noise multiplier: standard deviation of the noise / L2 sensitivity.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range, or if no noise
        multiplier up to a million meets the budget.

    Example:
      >>> from tf_adaptive_dp.accounting.calibration import noise_multiplier_for
      >>> noise_multiplier_for(epsilon=1.0, delta=1e-5, sampling_probability=0.01, steps=1_000)
      1.5132
    """
    epsilon = checks.number("epsilon", epsilon, 0, strict=True)
    delta = checks.probability("delta", delta)
    sampling_probability = checks.probability(
        "sampling_probability", sampling_probability, or_one=True
    )
    steps = checks.integer("steps", steps, 1)
    tolerance = checks.probability("tolerance", tolerance)

    def spent(noise_multiplier: float) -> float:
        return composition.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    # The composition of many releases tends to this Gaussian. PLD is cheapest near the solution.
    guess = sampling_probability * math.sqrt(-2 * steps * math.log(delta)) / epsilon
    found = least_noise(spent, epsilon, tolerance, guess=guess)
    if found is None:
        raise ValueError(
            f"No noise multiplier up to {accountants.MAX_NOISE_MULTIPLIER:g} meets the budget; "
            "allow more `epsilon` or `delta`, or take fewer `steps` or smaller batches. Received: "
            f"epsilon={epsilon!r}, delta={delta!r}, "
            f"sampling_probability={sampling_probability!r}, steps={steps!r}, "
            f"accountant={accountant!r}"
        )
    return found


def least_noise(
    spent: Callable[[float], float],
    epsilon: float,
    tolerance: float,
    *,
    guess: float = 1.0,
    factor: float = 2.0,
) -> float | None:
    """The smallest noise multiplier with `spent(noise_multiplier)` ≤ `epsilon`, rounded up.

    Guarantee: `spent(result)` is at most `epsilon`.

    Args:
      spent: ε of a noise multiplier, decreasing; called once for each value.
      epsilon: the budget, greater than 0.
      tolerance: maximum relative excess over the smallest sufficient noise multiplier.
      guess: where to begin.
      factor: step of the search for a bracket, above 1.

    Returns:
      The noise multiplier, or `None` if none up to `accountants.MAX_NOISE_MULTIPLIER` suffices.
    """
    spent = functools.cache(spent)

    def overspends(noise_multiplier: float) -> bool:
        return spent(noise_multiplier) > epsilon

    def log_excess(noise_multiplier: float) -> float:
        # The root finder needs finite values.
        ratio = spent(noise_multiplier) / epsilon
        return min(max(math.log(ratio), -100.0), 100.0) if ratio > 0 else -100.0

    low, high = bracket(overspends, guess, factor)
    if overspends(high):
        return None
    found = optimize.brentq(log_excess, low, high, xtol=tolerance / 4 * low, maxiter=1000)
    return rounded_up(found, tolerance / 2, overspends)


def bracket(
    overspends: Callable[[float], bool], guess: float, factor: float = 2.0
) -> tuple[float, float]:
    """Two noise multipliers, one `factor` times the other; only the smaller one overspends.

    If no noise multiplier suffices, the larger one is the maximum and overspends as well.

    Args:
      overspends: whether a noise multiplier leaves more ε than the budget has; it must if any
        larger one does, and for one that is near 0.
      guess: where to begin.
      factor: above 1.
    """
    largest = accountants.MAX_NOISE_MULTIPLIER
    high = min(max(guess, accountants.MIN_NOISE_MULTIPLIER), largest)
    while high < largest and overspends(high):
        high = min(factor * high, largest)
    # This ends because ε is infinite below the smallest noise multiplier that is accounted for.
    while not overspends(high / factor):
        high /= factor
    return high / factor, high


def rounded_up(value: float, part: float, overspends: Callable[[float], bool]) -> float:
    """Rounds a noise multiplier up, to a short decimal number that does not overspend.

    Args:
      value: the smallest one that does not overspend, or just below that.
      part: how far up, relative to `value`, at most.
      overspends: see `bracket`.
    """
    digits = math.ceil(-math.log10(part * value))
    unit = 10.0**-digits
    rounded = round(math.ceil(value / unit) * unit, digits)
    # The float of the decimal number may lie just below `value`, and `value` below the solution.
    while overspends(rounded):
        rounded = round(rounded + unit, digits)
    return rounded
