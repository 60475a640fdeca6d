"""TensorFlow Federated processes: clients that adapt, user-level privacy, and ε after each round.

    import federated

    federated.local_context()  # TFF's worker, ended with Python
    process = federated.build_dp_fed_avg(model_fn, federated.build_adadp(), privacy)

Names are imported when they are first used, so that `python -m federated.runtime.worker` starts
without TFF.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "clients.client_optimizers": ("build_adadp", "build_adadps"),
    "clients.client_work": ("build_client_work",),
    "clients.preconditioner": ("ClientPreconditioner",),
    "privacy.user_epsilon": ("epsilon_spent", "privacy_statement"),
    "privacy.user_ledger": ("UserLedger",),
    "privacy.user_level": ("UserLevelPrivacy",),
    "runtime.connection": ("WorkerLostError", "WorkerMismatchError"),
    "runtime.contexts": ("local_context", "remote_context"),
    "runtime.worker": ("WorkerStartError",),
    "privacy.client_sampling": ("ClientSampler", "EveryClient"),
    "training.evaluation": ("Evaluation", "export"),
    "training.monitor": ("monitors", "scalars"),
    "training.processes": ("build_adaptive_fed_avg", "build_dp_fed_avg"),
    "training.program": ("Trained", "train"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "datasets":  # a package of its own names
        return importlib.import_module(f"{__name__}.datasets")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
