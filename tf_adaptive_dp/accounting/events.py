"""Finds events without any protection."""

from __future__ import annotations

from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting import rdp


def is_unprotected(event: dp_accounting.DpEvent) -> bool:
    """Whether no finite ε holds for an event: `NonPrivateDpEvent`, or one that contains it.

    Returns `False` for an event that RDP does not support; the accountants reject it themselves.

    >>> is_unprotected(dp_accounting.NonPrivateDpEvent())
    True
    >>> is_unprotected(dp_accounting.GaussianDpEvent(noise_multiplier=1.0))
    False
    """
    accountant = rdp.RdpAccountant()
    if not accountant.supports(event):
        return False
    return bool(np.isinf(accountant.compose(event).rdp).all())


def unprotected(events: Iterable[dp_accounting.DpEvent]) -> list[dp_accounting.DpEvent]:
    """The events for which no finite ε holds."""
    return [event for event in events if is_unprotected(event)]
