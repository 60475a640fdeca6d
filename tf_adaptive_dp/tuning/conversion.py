"""From the event of a trial to its Rényi divergences, and from these to ε.

This module uses add/remove adjacency throughout: neighboring data sets differ by one example.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants

CONVERSIONS = ("improved", "classical")

# These orders reproduce the values of Mohapatra et al. 2021.
CLASSICAL_ORDERS = tuple(range(2, 201))

# dp_accounting has few orders between 64 and 512, where the best order of searches with small ε
# lies. At δ = 1e-7, 10,000 steps on 450,000 examples cost 0.51 by random stopping with these
# orders and 0.86 without.
IMPROVED_ORDERS = tuple(sorted({*rdp.RdpAccountant().orders, *range(64, 513, 8), 768, 1024}))

# Below this order, 1 / (order - 1) loses its significant digits.
_MIN_ORDER = 1.01


@dataclasses.dataclass(frozen=True)
class Accounting:
    """How the ε of a search is computed.

    Args:
      accountant: `"rdp"`, or `"pld"`, which is tighter and slower. PLD falls back to the ε of RDP
        where PLD would take minutes or gigabytes; see `accounting.epsilon`.
      conversion: from Rényi divergences r(α) to ε: `"improved"`, dp_accounting's conversion
        (Canonne, Kamath and Steinke 2020), or `"classical"`,
        ε = min over α of r(α) + log(1/δ) / (α - 1) (Mironov 2017, Proposition 3).
      orders: Rényi orders, above 1.01. `None` selects the default orders of the conversion:
        dp_accounting's and more from 64 to 512 for "improved", and 2, 3, …, 200 for "classical".

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    References:
      - Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020),
        arXiv:2004.00010.
      - Mironov, "Rényi Differential Privacy" (2017), arXiv:1702.07476.

    >>> Accounting(orders=(8, 2)).renyi_orders
    (2.0, 8.0)
    """

    accountant: str = "rdp"
    conversion: str = "improved"
    orders: Sequence[float] | None = None

    def __post_init__(self) -> None:
        checks.choice("accountant", self.accountant, accountants.ACCOUNTANTS)
        checks.choice("conversion", self.conversion, CONVERSIONS)
        if self.orders is None:
            return
        if isinstance(self.orders, str) or not isinstance(self.orders, Iterable):
            raise TypeError(
                f"`orders` must be a sequence of numbers. Received: orders={self.orders!r}"
            )
        found = {checks.number("orders", order, _MIN_ORDER, strict=True) for order in self.orders}
        if not found:
            raise ValueError("`orders` must hold at least one order. Received: orders=()")
        object.__setattr__(self, "orders", tuple(sorted(found)))

    @property
    def renyi_orders(self) -> tuple[float, ...]:
        """The Rényi orders in use, ascending."""
        if self.orders is not None:
            return tuple(self.orders)
        known = CLASSICAL_ORDERS if self.conversion == "classical" else IMPROVED_ORDERS
        return tuple(float(order) for order in known)

    @property
    def uses_pld(self) -> bool:
        """Whether the accountant is PLD."""
        return self.accountant == "pld"

    def by_rdp(self) -> Accounting:
        """The same accounting with the accountant RDP."""
        return dataclasses.replace(self, accountant="rdp")


DEFAULT_ACCOUNTING = Accounting()


def checked_event(name: str, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns `event`, or raises TypeError if it is not a `DpEvent`."""
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(
            f"`{name}` must be a `dp_accounting.DpEvent` that composes all releases of one trial. "
            f"Received: {name}={event!r}"
        )
    return event


def renyi_divergences(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Upper bounds on the Rényi divergences of an event, one for each order.

    Guarantee: the bounds hold in both directions for neighbors that differ by one example. No
    divergence counts for less than `RDP_PRECISION`, the absolute precision of dp_accounting, and a
    divergence that dp_accounting cannot compute (NaN) counts as infinite. All divergences are zero
    only for an event without releases.

    Args:
      event: what is released.
      orders: Rényi orders, above 1.

    Returns:
      [len(orders)], ≥ 0, `math.inf` where there is no bound.

    Raises:
      dp_accounting.UnsupportedEventError: for an event that RDP does not support.
      TypeError, ValueError: if a noise multiplier or a probability in the event is invalid.

    Example:
      >>> import dp_accounting
      >>> renyi_divergences(dp_accounting.GaussianDpEvent(2.0), (2.0, 8.0))
      array([0.25, 1.  ])
    """
    counts, others = _releases(event)
    total = np.zeros(len(orders))
    for (noise_multiplier, sampling_probability), count in counts.items():
        total += count * _gaussian_divergences(noise_multiplier, sampling_probability, orders)
    for other, count in others:
        total += count * _event_divergences(other, orders)
    total[np.isnan(total)] = math.inf
    return total


def epsilon_from(divergences: np.ndarray, delta: float, accounting: Accounting) -> float:
    """ε at δ from the Rényi divergences r(α) at the orders α of the accounting.

    "classical" is min over α of r(α) + log(1/δ) / (α - 1); "improved" is
    min over α of r(α) + log(1 - 1/α) - log(δ α) / (α - 1).

    Args:
      divergences: [number of orders], ≥ 0.
      delta: δ in [0, 1); 0 stands for a δ too small for a float.
      accounting: the conversion and the orders.

    Returns:
      ε ≥ 0: 0.0 if all divergences are zero, `math.inf` if none of them is finite.

    Example:
      >>> divergences, orders = np.array([0.25, 1.0]), (2.0, 8.0)
      >>> round(epsilon_from(divergences, 1e-5, Accounting("rdp", "classical", orders)), 3)
      2.645
      >>> round(epsilon_from(divergences, 1e-5, Accounting("rdp", "improved", orders)), 3)
      2.214
    """
    if not np.any(divergences):
        return 0.0
    if delta == 0:
        return math.inf
    orders = accounting.renyi_orders
    if accounting.conversion == "classical":
        return float(np.min(divergences - math.log(delta) / (np.array(orders) - 1)))
    return float(rdp.compute_epsilon(orders, divergences, delta)[0])


def delta_from(divergences: np.ndarray, orders: tuple[float, ...], epsilon: float) -> float:
    """δ at ε from Rényi divergences: the "improved" conversion solved for δ.

    The minimum over α of exp((α - 1)(r(α) - ε + log(1 - 1/α))) / α and √(1 - exp(-r(α))).

    Args:
      divergences: r, one for each order.
      orders: α, above 1.
      epsilon: ε.
    """
    alpha = np.array(orders)
    exponents = (alpha - 1) * (divergences - epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    by_kl = np.sqrt(-np.expm1(-divergences))
    return float(min(math.exp(min(np.min(exponents), 0.0)), np.min(by_kl)))


def epsilon_of(
    event: dp_accounting.DpEvent, delta: float, accounting: Accounting = DEFAULT_ACCOUNTING
) -> float:
    """ε of an event that is released as a whole.

    PLD gives the smaller of its own ε and that of RDP. Its own is left out where it would take
    minutes or gigabytes (see `accounting.epsilon`) and for δ below 1e-9, where its arithmetic is
    not reliable.

    Guarantee: (ε, δ)-DP for adding or removing one example.

    Args:
      event: what is released.
      delta: δ, in (0, 1).
      accounting: how ε is computed.
    """
    divergences = renyi_divergences(event, accounting.renyi_orders)
    bound = epsilon_from(divergences, delta, accounting)
    too_small = delta < accountants.PLD_MIN_DELTA
    if not accounting.uses_pld or too_small or not 0 < bound < math.inf:
        return bound
    counts, others = _releases(event)
    composed = [dp_accounting.SelfComposedDpEvent(other, count) for other, count in others]
    return min(bound, accountants.composed_epsilon(counts, composed, delta, "pld"))


class TrialProfile:
    """The privacy profile of a trial: δ by PLD, and ε by PLD or RDP, whichever is smaller.

    No δ is reported below 1e-9, where the arithmetic of PLD is not reliable, and no ε at such a δ
    comes from PLD.

    Guarantee: the profile is an upper bound for adding and for removing one example.
    """

    def __init__(
        self, event: dp_accounting.DpEvent, divergences: np.ndarray, accounting: Accounting
    ):
        """Composes the privacy loss distributions of all releases of a trial.

        Args:
          event: the trial.
          divergences: its Rényi divergences at the orders of `accounting`.
          accounting: the conversion from RDP to ε.

        Raises:
          dp_accounting.UnsupportedEventError: for an event that PLD does not support.
        """
        self._divergences, self._accounting = divergences, accounting
        counts, others = _releases(event)
        parts = tuple(dp_accounting.SelfComposedDpEvent(other, count) for other, count in others)
        self._pld = _composed_pld(tuple(sorted(counts.items())), parts)

    def delta(self, epsilons: np.ndarray) -> np.ndarray:
        """δ at each ε ≥ 0, in ascending order of ε; δ is decreasing and convex in e^ε."""
        return np.maximum(self._pld.get_delta(epsilons), accountants.PLD_MIN_DELTA)

    def epsilon(self, delta: float) -> float:
        """ε ≥ 0 at δ in (0, 1)."""
        bound = epsilon_from(self._divergences, delta, self._accounting)
        if delta < accountants.PLD_MIN_DELTA:
            return bound
        return min(bound, float(self._pld.get_epsilon(delta)))


def profile(
    event: dp_accounting.DpEvent, divergences: np.ndarray, delta: float, accounting: Accounting
) -> TrialProfile | None:
    """The privacy profile of a trial, or `None` where PLD cannot be used.

    PLD cannot be used where it would take minutes or gigabytes, and for events that it does not
    support; the latter raise a warning.

    Args:
      event: the trial.
      divergences: its Rényi divergences at the orders of `accounting`.
      delta: δ of the search.
      accounting: the conversion from RDP to ε.
    """
    bound = epsilon_from(divergences, delta, accounting)
    if not 0 < bound < math.inf or accountants.pld_is_too_costly(_releases(event)[0], bound):
        return None
    try:
        return TrialProfile(event, divergences, accounting)
    except dp_accounting.UnsupportedEventError as error:
        warnings.warn(
            f"PLD does not support an event of the trial, so epsilon is RDP's: {error}",
            stacklevel=2,
        )
        return None


@functools.lru_cache(maxsize=4)
def _composed_pld(counts: tuple, others: tuple) -> pld.PLDAccountant:
    return accountants.composed_pld(dict(counts), others)


def _releases(
    event: dp_accounting.DpEvent,
) -> tuple[accountants.Counts, list[tuple[dp_accounting.DpEvent, int]]]:
    """Flattens an event into counts of Gaussians by their parameters, and other events with counts.

    Events that release nothing are dropped.
    """
    counts: accountants.Counts = collections.Counter()
    others: list[tuple[dp_accounting.DpEvent, int]] = []

    def add(part: Any, count: int) -> None:
        probability, inner = 1.0, part
        if isinstance(part, dp_accounting.PoissonSampledDpEvent):
            probability, inner = part.sampling_probability, part.event
            if probability != 0:
                probability = checks.probability("sampling_probability", probability, or_one=True)
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
def _gaussian_divergences(
    noise_multiplier: float, sampling_probability: float, orders: tuple[float, ...]
) -> np.ndarray:
    if noise_multiplier < accountants.MIN_NOISE_MULTIPLIER:
        return np.full(len(orders), math.inf)
    return _event_divergences(
        accountants.release_event(noise_multiplier, sampling_probability), orders
    )


def _event_divergences(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    try:
        known = rdp.RdpAccountant(orders).compose(event).rdp
    except ZeroDivisionError:  # a Laplace mechanism without noise
        known = np.full(len(orders), math.inf)
    return np.maximum(known, accountants.RDP_PRECISION)
