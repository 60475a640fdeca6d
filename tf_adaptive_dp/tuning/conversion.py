"""From the event of a trial to its Rényi divergences, and from these to ε.

All of this module speaks of one adjacency: one example added or removed.
"""

from __future__ import annotations

import collections
import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import rdp

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition

ACCOUNTANTS = ("rdp", "pld")
CONVERSIONS = ("improved", "classical")

# The orders that reproduce the numbers of "The Role of Adaptive Optimizers for Honest Private
# Hyperparameter Selection".
CLASSICAL_ORDERS = tuple(range(2, 201))

# dp_accounting knows few orders between 64 and 512, where searches of small ε have their best: with
# δ = 1e-7, 10,000 steps on 450,000 examples cost 0.51 by random stopping with these, 0.86 without.
IMPROVED_ORDERS = tuple(sorted({*rdp.RdpAccountant().orders, *range(64, 513, 8), 768, 1024}))

# Below it 1 / (order - 1) and what is divided by it lose their digits.
_MIN_ORDER = 1.01


def checked_event(name: str, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns `event`, or raises TypeError if it is no `DpEvent`."""
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(
            f"`{name}` must be a `dp_accounting.DpEvent`, all that one trial releases composed. "
            f"Received: {name}={event!r}"
        )
    return event


def checked_orders(orders: Sequence[float] | None, conversion: str) -> tuple[float, ...]:
    """The orders to account with, ascending; `None`: those that belong to the conversion.

    Raises:
      TypeError, ValueError: if there is none, or one is not a number above 1.01.
    """
    checks.choice("conversion", conversion, CONVERSIONS)
    if orders is None:
        known = CLASSICAL_ORDERS if conversion == "classical" else IMPROVED_ORDERS
        return tuple(float(order) for order in known)
    if isinstance(orders, str) or not isinstance(orders, Iterable):
        raise TypeError(f"`orders` must be a sequence of numbers. Received: orders={orders!r}")
    found = {checks.number("orders", order, _MIN_ORDER, strict=True) for order in orders}
    if not found:
        raise ValueError("`orders` must hold at least one order. Received: orders=()")
    return tuple(sorted(found))


def renyi_divergences(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Upper bounds on the Rényi divergences of an event, one for each order.

    Guarantee: of neighbours that differ in one example, in both directions. A divergence that
    dp_accounting knows no better than to `accounting.RDP_PRECISION` counts for at least that, and
    one that it cannot tell (NaN) as infinite. All are zero only for an event without releases.

    Args:
      event: what is released.
      orders: above 1.

    Returns:
      [len(orders)], ≥ 0, `math.inf` where there is no bound.

    Raises:
      dp_accounting.UnsupportedEventError: for an event that RDP lacks.
      TypeError, ValueError: if a noise multiplier or a probability in it is none.

    Example:
      >>> import dp_accounting
      >>> renyi_divergences(dp_accounting.GaussianDpEvent(2.0), (2.0, 8.0))
      array([0.25, 1.  ])
    """
    counts, others = _releases(event)
    total = np.zeros(len(orders))
    for (noise_multiplier, sampling_probability), count in counts.items():
        total += count * _of_gaussian(noise_multiplier, sampling_probability, orders)
    for other, count in others:
        total += count * _of_other(other, orders)
    total[np.isnan(total)] = math.inf
    return total


def epsilon_from(
    divergences: np.ndarray, orders: tuple[float, ...], delta: float, conversion: str
) -> float:
    """ε at δ from Rényi divergences r(α) at some orders α.

    "classical": min over α of r(α) + log(1/δ) / (α - 1) (Mironov 2017, Proposition 3);
    "improved": min over α of r(α) + log(1 - 1/α) - log(δ α) / (α - 1), as dp_accounting.

    Args:
      divergences: [len(orders)], ≥ 0.
      orders: above 1.
      delta: δ in [0, 1); 0 stands for one too small for a float.
      conversion: `"improved"` or `"classical"`.

    Returns:
      ε ≥ 0: 0.0 if all divergences are zero, `math.inf` if none of them is finite.

    Example:
      >>> round(epsilon_from(np.array([0.25, 1.0]), (2.0, 8.0), 1e-5, "classical"), 3)
      2.645
      >>> round(epsilon_from(np.array([0.25, 1.0]), (2.0, 8.0), 1e-5, "improved"), 3)
      2.214
    """
    if not np.any(divergences):
        return 0.0
    if delta == 0:
        return math.inf
    if conversion == "classical":
        return float(np.min(divergences - math.log(delta) / (np.array(orders) - 1)))
    return float(rdp.compute_epsilon(orders, divergences, delta)[0])


def delta_from(divergences: np.ndarray, orders: tuple[float, ...], epsilon: float) -> float:
    """δ at ε from Rényi divergences, what "improved" gives solved for δ.

    The least over α of exp((α - 1)(r(α) - ε + log(1 - 1/α))) / α and √(1 - exp(-r(α))).
    """
    alpha = np.array(orders)
    exponents = (alpha - 1) * (divergences - epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    by_kl = np.sqrt(-np.expm1(-divergences))
    return float(min(math.exp(min(np.min(exponents), 0.0)), np.min(by_kl)))


def epsilon_of(
    event: dp_accounting.DpEvent,
    delta: float,
    *,
    accountant: str,
    conversion: str,
    orders: Sequence[float] | None,
) -> float:
    """ε of an event, released as a whole.

    `conversion` and `orders` are those of RDP. "pld" gives the smaller of RDP's ε and that of
    privacy loss distributions; the latter is left out where it would need minutes or gigabytes
    (see `accounting.epsilon`) and for δ below 1e-9, which its arithmetic does not reach.

    Guarantee: (ε, δ)-DP for adding or removing one example.
    """
    checks.choice("accountant", accountant, ACCOUNTANTS)
    checked = checked_orders(orders, conversion)
    bound = epsilon_from(renyi_divergences(event, checked), checked, delta, conversion)
    too_small = delta < composition.PLD_MIN_DELTA
    if accountant == "rdp" or too_small or not 0 < bound < math.inf:
        return bound
    counts, others = _releases(event)
    composed = [dp_accounting.SelfComposedDpEvent(other, count) for other, count in others]
    return min(bound, composition.composed_epsilon(counts, composed, delta, "pld"))


class TrialProfile:
    """The privacy profile of a trial: δ by PLD, and ε by PLD or RDP, whichever is smaller.

    No δ by PLD is below 1e-9, which its arithmetic does not reach, and no ε at such a δ is PLD's.

    Guarantee: for adding or removing one example, both ways.
    """

    def __init__(
        self,
        event: dp_accounting.DpEvent,
        divergences: np.ndarray,
        orders: tuple[float, ...],
        conversion: str,
    ):
        """Composes the privacy loss distributions of all that is in a trial.

        Args:
          event: the trial.
          divergences: its Rényi divergences at these orders.
          orders: above 1.
          conversion: from RDP to ε.

        Raises:
          dp_accounting.UnsupportedEventError: for an event that PLD lacks.
        """
        self._rdp = divergences, orders
        self._conversion = conversion
        counts, others = _releases(event)
        parts = tuple(dp_accounting.SelfComposedDpEvent(other, count) for other, count in others)
        self._pld = _composed_pld(tuple(sorted(counts.items())), parts)

    def delta(self, epsilons: np.ndarray) -> np.ndarray:
        """δ at each ε ≥ 0, given in ascending order: it falls, and is convex in e^ε."""
        return np.maximum(self._pld.get_delta(epsilons), composition.PLD_MIN_DELTA)

    def epsilon(self, delta: float) -> float:
        """ε ≥ 0 at δ in (0, 1)."""
        bound = epsilon_from(*self._rdp, delta, self._conversion)
        if delta < composition.PLD_MIN_DELTA:
            return bound
        return min(bound, float(self._pld.get_epsilon(delta)))


def profile(
    event: dp_accounting.DpEvent,
    divergences: np.ndarray,
    orders: tuple[float, ...],
    delta: float,
    conversion: str,
) -> TrialProfile | None:
    """The privacy profile of a trial by RDP and PLD, or `None` where RDP has to do.

    That is so where PLD would need minutes or gigabytes, and, with a warning, for events that it
    lacks.

    Args:
      event: the trial.
      divergences: its Rényi divergences at these orders.
      orders: above 1.
      delta: δ of the search.
      conversion: from RDP to ε.
    """
    bound = epsilon_from(divergences, orders, delta, conversion)
    if not 0 < bound < math.inf or composition.pld_is_too_costly(_releases(event)[0], bound):
        return None
    try:
        return TrialProfile(event, divergences, orders, conversion)
    except dp_accounting.UnsupportedEventError as error:
        warnings.warn(
            f"PLD lacks an event of the trial, so epsilon is RDP's: {error}", stacklevel=2
        )
        return None


@functools.lru_cache(maxsize=4)
def _composed_pld(counts: tuple, others: tuple) -> Any:
    return composition.composed_pld(dict(counts), others)


def _releases(
    event: dp_accounting.DpEvent,
) -> tuple[composition.Counts, list[tuple[dp_accounting.DpEvent, int]]]:
    """Gaussians, Poisson-sampled or not, by their parameters; and what else there is, each counted.

    Whatever releases nothing is in neither.
    """
    counts: composition.Counts = collections.Counter()
    others = []

    def add(part: dp_accounting.DpEvent, count: int) -> None:
        probability, inner = 1.0, part
        if isinstance(part, dp_accounting.PoissonSampledDpEvent):
            probability, inner = part.sampling_probability, part.event
            if probability != 0:
                composition.check_probability("sampling_probability", probability, or_one=True)
        if count == 0 or probability == 0 or isinstance(inner, dp_accounting.NoOpDpEvent):
            return
        if isinstance(part, dp_accounting.SelfComposedDpEvent):
            add(part.event, count * checks.integer("count", part.count, 0))
        elif isinstance(part, dp_accounting.ComposedDpEvent):
            for each in part.events:
                add(each, count)
        elif isinstance(inner, dp_accounting.GaussianDpEvent):
            noise_multiplier = checks.number("noise_multiplier", inner.noise_multiplier, 0)
            counts[noise_multiplier, float(probability)] += count
        else:
            others.append((part, count))

    add(event, 1)
    return counts, others


@functools.lru_cache(maxsize=1024)
def _of_gaussian(
    noise_multiplier: float, sampling_probability: float, orders: tuple[float, ...]
) -> np.ndarray:
    if noise_multiplier < composition.MIN_NOISE_MULTIPLIER:
        return np.full(len(orders), math.inf)
    event = dp_accounting.GaussianDpEvent(min(noise_multiplier, composition.MAX_NOISE_MULTIPLIER))
    if sampling_probability != 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return _of_other(event, orders)


def _of_other(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    try:
        known = rdp.RdpAccountant(orders).compose(event).rdp
    except ZeroDivisionError:  # a Laplace mechanism without noise
        known = np.full(len(orders), math.inf)
    return np.maximum(known, composition.RDP_PRECISION)
