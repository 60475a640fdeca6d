"""What the numbers of a ledger mean, and the events that were spent besides its releases."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import dp_accounting

from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy


class Terms(NamedTuple):
    """What the numbers of a ledger mean, in a form that is saved with them.

    Attributes:
      examples_per_user: see `Ledger`; 0 if the unit of privacy is an example.
      noise: the digest of the strategy of the noise; 0 if the noise is independent.
      other_events: a digest of all `other_events`; 0 if there are none.
      chosen_by_search: 1 if a search chose the model, see `Ledger`; otherwise 0.
    """

    examples_per_user: int = 0
    noise: int = 0
    other_events: int = 0
    chosen_by_search: int = 0

    @classmethod
    def of(
        cls,
        examples_per_user: int | None,
        noise: NoiseStrategy,
        other_events: Sequence[dp_accounting.DpEvent],
        chosen_by_search: bool,
    ) -> Terms:
        """The terms of a ledger with these attributes."""
        of_noise = 0 if noise.is_independent else noise.digest()
        return cls(examples_per_user or 0, of_noise, digest(other_events), int(chosen_by_search))


def digest(events: Sequence[dp_accounting.DpEvent]) -> int:
    """A number that tells `other_events` apart, whatever their order; 0 if there are none.

    >>> digest([]), digest([dp_accounting.NoOpDpEvent()]) > 0
    (0, True)
    """
    content = "\n".join(sorted(map(_name, events))).encode()
    found = hashlib.blake2b(content, digest_size=7).digest() if content else b""
    return int.from_bytes(found, "little")


def missing_events(
    events: Sequence[dp_accounting.DpEvent], among: Sequence[dp_accounting.DpEvent]
) -> tuple[dp_accounting.DpEvent, ...]:
    """The events that another list lacks; equal events must occur in it as often.

    >>> noop = dp_accounting.NoOpDpEvent()
    >>> missing_events([noop, noop], [noop])
    (NoOpDpEvent(),)
    """
    left, missing = collections.Counter(map(_name, among)), []
    for event in events:
        if left[_name(event)]:
            left[_name(event)] -= 1
        else:
            missing.append(event)
    return tuple(missing)


def checked_events(events: Any) -> tuple[dp_accounting.DpEvent, ...]:
    """The events of an argument `other_events`.

    Args:
      events: what the caller passed.

    Raises:
      TypeError: if it is not a list of events.
    """
    is_list = isinstance(events, Iterable) and not isinstance(events, str)
    found = tuple(events) if is_list else ()
    if not is_list or not all(isinstance(event, dp_accounting.DpEvent) for event in found):
        raise TypeError(
            "`other_events` must be a list of `dp_accounting.DpEvent`s, such as "
            f"`[dp_accounting.GaussianDpEvent(2.0)]`. Received: other_events={events!r}"
        )
    return found


def gaussian_events(noise_multipliers: Sequence[float]) -> tuple[dp_accounting.DpEvent, ...]:
    """The events of a saved ledger.

    Args:
      noise_multipliers: see `Ledger.other_events`; 0 stands for none.
    """
    return tuple(dp_accounting.GaussianDpEvent(float(n)) for n in noise_multipliers if n > 0)


def _name(event: dp_accounting.DpEvent) -> str:
    """A name that equal events share, even if the types of their numbers differ."""
    if type(event) is dp_accounting.GaussianDpEvent:
        event = dp_accounting.GaussianDpEvent(float(event.noise_multiplier))
    return repr(event)
