"""ε of Gaussian releases and other private events, by Rényi divergences or privacy losses.

The releases are counted by their parameters (`Counts`), whatever recorded them: `composition` reads
ledgers. `dp_accounting` does the arithmetic. Where it would overflow, lose its precision or take
too long, this module uses a bound that holds nevertheless.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Callable

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from tf_adaptive_dp import checks

ACCOUNTANTS = ("rdp", "pld")

# The accountants overflow beyond these. Below the minimum nothing is private (ε > 1e11); above the
# maximum we count less noise than there was. Both are on the safe side.
MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 1e-6, 1e6

# The absolute precision of dp_accounting for the Rényi divergence of one release. With much noise
# the computed divergence can even be negative. No release counts for less than this.
RDP_PRECISION = 1e-13

# Beyond these the PLD accountant would take minutes or gigabytes, so the RDP bound is used instead.
PLD_MAX_EPSILON = 50.0
PLD_MAX_RELEASES = 2_000_000
PLD_INTERVAL = 1e-4  # the default of `PLDAccountant`

# Rounding errors of the PLD accountant's FFT accumulate: for 10,000 releases of the Gaussian
# mechanism with noise multiplier 200, its ε at δ = 1e-14 is 3.65 instead of 3.77. They become
# visible below 1e-10.
PLD_MIN_DELTA = 1e-9

# (noise multiplier, sampling probability): number of releases
Counts = dict[tuple[float, float], int]


def _concerns_users(record: logging.LogRecord) -> bool:
    """False for dp_accounting's message that it leaves out a Rényi order.

    It leaves out orders whose series do not converge. With much sampling and little noise, that
    happens at every evaluation, dozens of times in one search for σ. ε is then the smallest bound
    of the other orders, which is valid too.
    """
    return "_compute_log_a_frac failed to converge" not in record.getMessage()


logging.getLogger("absl").addFilter(_concerns_users)


def composed_epsilon(
    counts: Counts, events: Sequence[dp_accounting.DpEvent], delta: float, accountant: str
) -> float:
    """ε of releases and other events together; the order of composition does not matter.

    Args:
      counts: how many releases there are of each noise multiplier and sampling probability.
      events: what else was released about the same examples.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`; see `accounting.epsilon`.

    Returns:
      ε ≥ 0. With `"pld"`, the smaller one of both bounds where PLD can be computed.

    Raises:
      TypeError, ValueError: if `delta` or `accountant` is not valid.
      dp_accounting.UnsupportedEventError: for events that the accountant, or RDP, does not support.
    """
    delta = checks.probability("delta", delta)
    checks.choice("accountant", accountant, ACCOUNTANTS)
    counts = {release: count for release, count in counts.items() if count}
    bound = _compose_rdp(counts, events, delta)
    if accountant == "rdp" or pld_is_too_costly(counts, bound) or delta < PLD_MIN_DELTA:
        return bound
    if not events:
        return min(bound, _pld_epsilon(tuple(sorted(counts.items())), delta))
    releases, others = tuple(counts.items()), _as_releases(events)
    if others is not None:
        return min(bound, _pld_epsilon((*releases, *others), delta))
    if _are_hashable(events):
        return min(bound, _pld_epsilon_with(releases, tuple(events), delta))
    return min(bound, float(composed_pld(counts, events).get_epsilon(delta)))


def composed_event(
    releases: Iterable[tuple[tuple[float, float], int]], events: Sequence[dp_accounting.DpEvent]
) -> dp_accounting.DpEvent:
    """Releases, as the items of `Counts`, and then other events, as one event in this order."""
    builder = dp_accounting.DpEventBuilder()
    for release, count in releases:
        builder.compose(release_event(*release), count)
    for event in events:
        builder.compose(event)
    return builder.build()


def release_event(noise_multiplier: float, sampling_probability: float) -> dp_accounting.DpEvent:
    """One Gaussian release on a Poisson-sampled batch."""
    event = dp_accounting.GaussianDpEvent(min(noise_multiplier, MAX_NOISE_MULTIPLIER))
    if sampling_probability == 1:
        return event
    return dp_accounting.PoissonSampledDpEvent(sampling_probability, event)


def is_unprotected(event: dp_accounting.DpEvent) -> bool:
    """Whether no finite ε holds for an event: `NonPrivateDpEvent`, or one that contains it.

    Returns `False` for an event that RDP does not support; the accountants reject it themselves.

    >>> is_unprotected(dp_accounting.NonPrivateDpEvent())
    True
    >>> is_unprotected(dp_accounting.GaussianDpEvent(noise_multiplier=1.0))
    False
    """
    if not rdp.RdpAccountant().supports(event):
        return False
    return bool(np.isinf(_rdp_of_event(event)).all())


def unprotected(events: Iterable[dp_accounting.DpEvent]) -> list[dp_accounting.DpEvent]:
    """The events for which no finite ε holds."""
    return [event for event in events if is_unprotected(event)]


def _compose_rdp(counts: Counts, events: Sequence[dp_accounting.DpEvent], delta: float) -> float:
    if any(noise_multiplier < MIN_NOISE_MULTIPLIER for noise_multiplier, _ in counts):
        return math.inf
    orders = rdp.RdpAccountant().orders
    divergences = np.zeros(len(orders))
    for event in events:
        divergences += _rdp_of_event(event)
    for release, count in counts.items():
        divergences += count * _rdp_of_release(*release)
    divergences[np.isnan(divergences)] = math.inf  # dp_accounting would take NaN for ε = 0
    return float(rdp.compute_epsilon(orders, divergences, delta)[0])


def _rdp_of_event(event: dp_accounting.DpEvent) -> np.ndarray:
    """Rényi divergences of an event at the default orders, at least 0.

    Raises:
      dp_accounting.UnsupportedEventError: if RDP does not support the event.
    """
    try:
        found = rdp.RdpAccountant().compose(event).rdp
    except ZeroDivisionError:  # a Laplace mechanism without noise
        return np.full(len(rdp.RdpAccountant().orders), math.inf)
    if np.any(found < -1e-6):  # far below rounding errors: it would pay for other releases
        raise ValueError(
            f"The noise and the counts of an event must be at least 0. Received: event={event!r}"
        )
    return np.maximum(found, 0)


@functools.lru_cache(maxsize=1024)
def _rdp_of_release(noise_multiplier: float, sampling_probability: float) -> np.ndarray:
    """Rényi divergences of one release at the default orders; they add up over releases."""
    event = release_event(noise_multiplier, sampling_probability)
    return np.maximum(rdp.RdpAccountant().compose(event).rdp, RDP_PRECISION)


def pld_is_too_costly(counts: Counts, epsilon: float) -> bool:
    """Whether PLD would take minutes or gigabytes for releases with about this ε."""
    return epsilon > PLD_MAX_EPSILON or sum(counts.values()) > PLD_MAX_RELEASES


def composed_pld(counts: Counts, events: Sequence[dp_accounting.DpEvent]) -> pld.PLDAccountant:
    """The privacy loss distribution, rounded up, of releases and other events together.

    Raises:
      dp_accounting.UnsupportedEventError: for an event that PLD does not support.
    """
    by_pld = pld.PLDAccountant()
    for release, count in counts.items():
        by_pld.compose(release_event(*release), count)
    for event in events:
        by_pld.compose(event)
    return by_pld


# For the δ that truncation leaves, samplings ask for the ε of the same releases at several δ.
@functools.lru_cache(maxsize=2)
def pld_of_releases(
    counts: tuple[tuple[tuple[float, float], int], ...],
    of_release: Callable[[float, float], pld.privacy_loss_distribution.PrivacyLossDistribution],
) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The privacy loss distribution of releases together.

    Args:
      counts: the items of `Counts`, sorted.
      of_release: maps the noise multiplier and the sampled share of a release to the privacy loss
        distribution of that release. Without sampling (a share of 1), n releases must equal one
        whose noise multiplier is divided by √n.
    """
    total = pld.privacy_loss_distribution.identity(PLD_INTERVAL)
    for (noise_multiplier, probability), count in counts:
        if probability == 1:
            composed = of_release(noise_multiplier / math.sqrt(count), 1.0)
        else:
            composed = of_release(noise_multiplier, probability).self_compose(count)
        total = total.compose(composed)
    return total


@functools.lru_cache(maxsize=8)
def _pld_of_release(
    noise_multiplier: float, probability: float
) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The privacy loss distribution of one release, rounded up as `PLDAccountant` rounds."""
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        min(noise_multiplier, MAX_NOISE_MULTIPLIER),
        value_discretization_interval=PLD_INTERVAL,
        sampling_prob=probability,
    )


# Callbacks ask several times for the ε of the same releases, and after each epoch for that of a few
# more. Constructing the distribution of one release takes most of the time.
@functools.lru_cache(maxsize=1024)
def _pld_epsilon(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    return float(pld_of_releases(counts, _pld_of_release).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=1024)
def _pld_epsilon_with(
    counts: tuple[tuple[tuple[float, float], int], ...],
    events: tuple[dp_accounting.DpEvent, ...],
    delta: float,
) -> float:
    return float(composed_pld(dict(counts), events).get_epsilon(delta))


def _as_releases(
    events: Iterable[dp_accounting.DpEvent],
) -> list[tuple[tuple[float, float], int]] | None:
    """Events as the items of `Counts`, in their order; `None` if one is no Gaussian release.

    Composed as releases, they have the privacy loss distribution that `PLDAccountant` computes.
    """
    found: list[tuple[tuple[float, float], int]] = []
    pending = [(event, 1) for event in events][::-1]
    while pending:
        event, count = pending.pop()
        probability = 1.0
        if isinstance(event, dp_accounting.ComposedDpEvent):
            pending += [(part, count) for part in event.events][::-1]
            continue
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            pending.append((event.event, count * event.count))
            continue
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            event, probability = event.event, event.sampling_probability
            if not 0 < probability < 1:
                return None
        if not (
            isinstance(event, dp_accounting.GaussianDpEvent)
            and 0 < event.noise_multiplier <= MAX_NOISE_MULTIPLIER
            and count > 0
        ):
            return None
        found.append(((event.noise_multiplier, probability), count))
    return found


def _are_hashable(events: Iterable[dp_accounting.DpEvent]) -> bool:
    """Whether events can be keys of a cache; one that holds a list cannot, and may change."""
    try:
        hash(tuple(events))
    except TypeError:
        return False
    return True
