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

    def spent(noise_multiplier: float, accountant: str = accountant) -> float:
        return composition.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    # The composition of many releases tends to this Gaussian.
    guess = sampling_probability * math.sqrt(-2 * steps * math.log(delta)) / epsilon
    by_rdp = None if accountant == "rdp" else functools.partial(spent, accountant="rdp")
    found = least_noise(spent, epsilon, tolerance, guess=guess, resembling=by_rdp)
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
    resembling: Callable[[float], float] | None = None,
) -> float | None:
    """The smallest noise multiplier with `spent(noise_multiplier)` ≤ `epsilon`, rounded up.

    A slow `spent`, such as that of PLD, is evaluated about three times instead of six if a fast
    function `resembling` it is known, such as that of RDP: the search then follows `resembling`,
    times the ratio of both where they were compared. The result is held to `spent` in any case.

    Guarantee: `spent(result)` is at most `epsilon`.

    Args:
      spent: ε of a noise multiplier, decreasing; called once for each value.
      epsilon: the budget, greater than 0.
      tolerance: maximum relative excess over the smallest sufficient noise multiplier.
      guess: where to begin.
      factor: step of the search for a bracket, above 1.
      resembling: a fast function, decreasing, whose ratio to `spent` changes little.

    Returns:
      The noise multiplier, or `None` if none up to `accountants.MAX_NOISE_MULTIPLIER` suffices.
    """
    spent = functools.cache(spent)
    if resembling is not None:
        led_to = _by_resemblance(spent, resembling, epsilon, tolerance, guess, factor)
        if led_to is not None:
            return led_to

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


_MOST_COMPARISONS = 6  # about what the search without resemblance needs; three are usual
_FAR = 0.1  # the difference of logarithms of σ up to which a trend of the ratio is believed


def _by_resemblance(
    spent: Callable[[float], float],
    resembling: Callable[[float], float],
    epsilon: float,
    tolerance: float,
    guess: float,
    factor: float,
) -> float | None:
    """What `least_noise` returns, or `None` if the resemblance does not lead to it."""
    resembling = functools.cache(resembling)
    compared: list[tuple[float, float]] = []  # the logarithms of σ and of the ratio, the last two

    def predicted(noise_multiplier: float) -> float:
        if not compared:
            return resembling(noise_multiplier)
        (other, other_ratio), (last, last_ratio) = compared[0], compared[-1]
        trend = (last_ratio - other_ratio) / (last - other) if last != other else 0.0
        distance = min(max(math.log(noise_multiplier) - last, -_FAR), _FAR)
        return resembling(noise_multiplier) * math.exp(last_ratio + trend * distance)

    for _ in range(_MOST_COMPARISONS):
        found = least_noise(predicted, epsilon, tolerance, guess=guess, factor=factor)
        if found is None:
            return None
        exact, like = spent(found), resembling(found)
        if not (0 < exact < math.inf and 0 < like < math.inf):
            return None
        compared[:-1] = []
        compared.append((math.log(found), math.log(exact / like)))
        # The prediction is right at `found` now, so it can tell whether less noise would suffice.
        if exact <= epsilon < predicted(found / (1 + tolerance)):
            return found
        guess, factor = found, 1.1
    return None


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
