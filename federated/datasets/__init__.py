"""Federated data sets: which client has which examples, and how a client reads its own.

    train, test = federated.datasets.load_digits(num_clients=100)
    train, held_out, test = federated.datasets.load_stackoverflow()

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "cifar10": (
        "client_data",
        "dirichlet_partition",
        "load_cifar10",
        "normalized_images",
        "paper_partition",
    ),
    "clients": ("ClientBatches", "in_memory", "random_clients", "subset"),
    "digits": ("load_digits",),
    "stackoverflow": ("bags_of_words", "load_stackoverflow"),
    "vocabulary": ("Vocabulary", "UserCounts", "count_users", "load_counts"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
