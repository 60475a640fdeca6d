"""From a privacy budget to the noise that it takes."""

from __future__ import annotations

import functools
import math
from typing import Callable

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition

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
    most `epsilon`: (ε, δ)-DP for adding or removing one example under Poisson sampling, an
    approximation if batches are shuffled.

    Args:
      epsilon: the budget, greater than 0.
      delta: δ, in (0, 1); should be well below 1 / number of examples.
      sampling_probability: expected batch size / number of examples, in (0, 1].
      steps: number of releases (noisy gradients), at least 1. An iteration of ADADP is two.
      accountant: `"rdp"` or `"pld"`, see `accounting.epsilon`.
      tolerance: by which part the result may exceed the least noise that will do, in (0, 1).

    Returns:
      The noise multiplier: standard deviation of the noise / L2 sensitivity.

    Raises:
      TypeError, ValueError: if an argument is not a number of the range above, or if no noise
        multiplier up to a million meets the budget.

    Example:
      >>> from tf_adaptive_dp.accounting.calibration import noise_multiplier_for
      >>> noise_multiplier_for(epsilon=1.0, delta=1e-5, sampling_probability=0.01, steps=1_000)
      1.5133
    """
    checks.number("epsilon", epsilon, 0, strict=True)
    composition.check_probability("delta", delta)
    composition.check_probability("sampling_probability", sampling_probability, or_one=True)
    checks.integer("steps", steps, 1)
    composition.check_probability("tolerance", tolerance)

    @functools.cache  # PLD takes a second a time
    def spent(noise_multiplier: float) -> float:
        return composition.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    def overspends(noise_multiplier: float) -> bool:
        return spent(noise_multiplier) > epsilon

    # ε of the Gaussian that many releases tend to; near the solution, where PLD is cheapest.
    guess = sampling_probability * math.sqrt(-2 * steps * math.log(delta)) / epsilon
    low, high = bracket(overspends, guess)
    if overspends(high):
        raise ValueError(
            f"No noise multiplier up to {high:g} meets the budget; allow more `epsilon` or "
            f"`delta`, or take fewer `steps` or smaller batches. Received: epsilon={epsilon!r}, "
            f"delta={delta!r}, sampling_probability={sampling_probability!r}, steps={steps!r}, "
            f"accountant={accountant!r}"
        )
    noise_multiplier = dp_accounting.calibrate_dp_mechanism(
        lambda: _Accountant(spent),
        dp_accounting.GaussianDpEvent,
        epsilon,
        delta,
        dp_accounting.ExplicitBracketInterval(low, high),
        tol=tolerance / 4 * low,
    )
    return rounded_up(noise_multiplier, tolerance / 2, overspends)


class _Accountant:
    """What `calibrate_dp_mechanism` asks of an accountant, answered by `accounting.epsilon`.

    dp_accounting's own would take gigabytes (PLD) or fail (RDP) at some ends of the bracket.
    """

    ledger = dp_accounting.NoOpDpEvent()

    def __init__(self, spent: Callable[[float], float]):
        self._spent = spent
        self._noise_multiplier = math.inf

    def compose(self, event: dp_accounting.GaussianDpEvent) -> _Accountant:
        self._noise_multiplier = event.noise_multiplier
        return self

    def get_epsilon(self, target_delta: float) -> float:
        del target_delta  # the one that `spent` knows
        return self._spent(self._noise_multiplier)


def bracket(overspends: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """Two numbers, one twice the other, of which only the smaller overspends.

    If nothing is enough, the larger is the largest noise multiplier there is and overspends too.
    """
    largest = composition.MAX_NOISE_MULTIPLIER
    high = min(max(guess, composition.MIN_NOISE_MULTIPLIER), largest)
    while high < largest and overspends(high):
        high = min(2 * high, largest)
    # Ends, because below the smallest noise multiplier that is accounted for ε is infinite.
    while not overspends(high / 2):
        high /= 2
    return high / 2, high


def rounded_up(value: float, part: float, overspends: Callable[[float], bool]) -> float:
    """`value` rounded up by at most `part` of it, to a number that does not overspend."""
    digits = math.ceil(-math.log10(part * value))
    unit = 10.0**-digits
    rounded = round(math.ceil(value / unit) * unit, digits)
    # The decimal number's float may lie just below `value`.
    while overspends(rounded):
        rounded = round(rounded + unit, digits)
    return rounded
