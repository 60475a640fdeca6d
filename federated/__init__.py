"""TensorFlow Federated processes: clients that adapt, user-level privacy, and ε after each round.

    import federated

    federated.local_context()  # TFF's worker, ended with Python
    process = federated.build_dp_fed_avg(model_fn, federated.build_adadp(), privacy)

Names are imported when they are first used: `python -m federated.worker` starts without TFF.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "accounting": ("UserLedger", "epsilon_spent", "privacy_statement"),
    "client_optimizers": ("build_adadp", "build_adadps"),
    "client_preconditioner": ("ClientPreconditioner",),
    "client_work": ("build_client_work",),
    "connection": ("WorkerLostError",),
    "monitor": ("monitors", "scalars"),
    "processes": ("build_adaptive_fed_avg", "build_dp_fed_avg"),
    "program": ("Trained", "train"),
    "runtime": ("local_context", "remote_context"),
    "sampling": ("ClientSampler", "EveryClient"),
    "user_level_privacy": ("UserLevelPrivacy",),
    "worker": ("WorkerStartError",),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
