"""Converts the events of `dp_accounting` to and from JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attr
import dp_accounting


def to_plain(value: Any) -> Any:
    """Converts a `DpEvent` to a dict with the name of its class; leaves other values unchanged.

    >>> plain = to_plain(dp_accounting.GaussianDpEvent(2.0))
    >>> plain
    {'event': 'GaussianDpEvent', 'fields': {'noise_multiplier': 2.0}}
    >>> from_plain(plain)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    if isinstance(value, dp_accounting.DpEvent):
        fields = {a.name: to_plain(getattr(value, a.name)) for a in attr.fields(type(value))}
        return {"event": type(value).__name__, "fields": fields}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def from_plain(value: Any) -> Any:
    """Converts the result of `to_plain` back.

    Raises:
      ValueError: if a dict does not describe an event.
    """
    if isinstance(value, Mapping):
        kind = getattr(dp_accounting.dp_event, value["event"], None)
        if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
            raise ValueError(f"dp_accounting has no such event. Received: {value!r}")
        return kind(**{name: from_plain(field) for name, field in value["fields"].items()})
    return [from_plain(item) for item in value] if isinstance(value, list) else value
