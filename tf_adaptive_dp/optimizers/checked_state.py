"""Checks that saved state fits an optimizer, so that loading it never loses releases.

Keras assigns variable after variable until one does not fit, accepts a list that is too short, and
skips a saved state of another length with a warning.

Guarantee: of state that does not fit nothing is loaded. If it holds releases that the ledger lacks,
loading it is an error, since the ε of the weights that belong to it would be understated. Keras may
turn the error into a warning (`skip_mismatch=True`) after it has loaded other weights, so the
releases are added to the ledger all the same, and training is refused until somebody decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.accounting.ledger import Checks, Ledger, Segment
from tf_adaptive_dp.errors import NotPrivateError


def require_same_shapes(variables: Sequence[tf.Variable], weights: Sequence[Any]) -> None:
    """Raises unless weights fit all variables of an optimizer.

    Args:
      variables: the optimizer's.
      weights: arrays or variables, meant for them in this order.

    Raises:
      ValueError: if their number or their shapes differ.
    """
    received, own = _shapes(weights), _shapes(variables)
    if received != own:
        raise ValueError(
            "`weights` must be those of an optimizer of this kind for the same variables. Loading "
            "others would discard the ledger and understate epsilon. Nothing of them was loaded. "
            "Call `optimizer.build(model.trainable_variables)` before loading, or load "
            f"the model's weights before `compile`. Received: shapes {received}, instead of {own}"
        )


class RefusedState:
    """Whether a saved state was refused whose releases nobody has decided on yet.

    They are in the ledger. Loading a state that fits, or `ledger.restore`, is a decision.
    """

    def __init__(self) -> None:
        self._num_releases = 0
        self._restorations = -1

    def add_to(self, ledger: Ledger, store: Mapping[str, Any]) -> None:
        """Adds the releases of a refused state to the ledger, and remembers that it did."""
        segments, checks = _saved_ledger(_arrays(store))
        self._num_releases = sum(segment.num_releases for segment in segments)
        ledger.restore(*_joined([*ledger.segments, *segments], [*ledger.checks, *checks]))
        self._restorations = ledger.restorations

    def settle(self) -> None:
        """Forgets it, as a state was loaded that fits."""
        self._restorations = -1

    def require_decision(self, ledger: Ledger) -> None:
        """Raises unless it was decided what the weights have cost.

        Args:
          ledger: the optimizer's.

        Raises:
          NotPrivateError: if a state was refused since a state was loaded or the ledger restored.
        """
        if self._restorations != ledger.restorations:
            return
        raise NotPrivateError(
            "The optimizer's saved state was refused when weights were loaded. The ledger counts "
            "its releases, but they may belong to other weights. Received: a saved state of "
            f"{self._num_releases} releases. Load weights whose state fits; or say that they count "
            "for this training, `optimizer.ledger.restore(optimizer.ledger.segments, "
            "optimizer.ledger.checks)`, or, if all that was loaded was trained on other data, that "
            "nothing does, `optimizer.ledger.restore([])`."
        )


def can_load(variables: Sequence[tf.Variable], ledger: Ledger, store: Mapping[str, Any]) -> bool:
    """Whether a saved state fits an optimizer; warns if it does not but may be skipped.

    Args:
      variables: the optimizer's.
      ledger: the optimizer's.
      store: saved arrays, by their number.

    Raises:
      ValueError: if the state does not fit and holds releases that the ledger lacks.
    """
    saved = _arrays(store)
    segments, _ = _saved_ledger(saved)
    if segments and segments != ledger.segments:
        require_same_shapes(variables, saved)
    if _shapes(saved) == _shapes(variables):
        return True
    if saved:
        warnings.warn(
            "The saved state belongs to another optimizer, or to one that was not built, and is "
            "not loaded. It holds no releases that this ledger lacks.",
            stacklevel=3,
        )
    return False


def _shapes(arrays: Sequence[Any]) -> list[tuple]:
    return [tuple(np.shape(array)) for array in arrays]


def _arrays(store: Mapping[str, Any]) -> list[Any]:
    return [store[str(i)] for i in range(len(store.keys()))]


def _saved_ledger(saved: Sequence[Any]) -> tuple[list[Segment], list[Checks]]:
    """The segments and checks of a saved optimizer; none if it has no ledger."""
    size = Ledger.MAX_SEGMENTS
    shapes = [(size, 2), (size,), (size, len(Checks._fields))]
    for k in range(len(saved) - 2):
        found = saved[k : k + 3]
        if _shapes(found) != shapes or found[1].dtype != np.int64:
            continue
        parameters, counts, checks = (np.asarray(array) for array in found)
        used = np.flatnonzero(counts)
        return (
            [
                Segment(float(p[0]), float(p[1]), int(n))
                for p, n in zip(parameters[used], counts[used])
            ],
            [_checks(*checks[row].tolist()) for row in used],
        )
    return [], []


def _checks(checked: float, repeated: float, nearest: float, declared: float) -> Checks:
    return Checks(int(checked), int(repeated), int(nearest), declared)


def _joined(segments: list[Segment], checks: list[Checks]) -> tuple[list[Segment], list[Checks]]:
    """As many segments as a ledger holds: the last ones become one of the worst of all."""
    while len(segments) > Ledger.MAX_SEGMENTS:
        *segments, a, b = segments
        *checks, c, d = checks
        noise_multiplier = min(a.noise_multiplier, b.noise_multiplier)
        size = max(a.batch_size, b.batch_size)
        segments.append(Segment(noise_multiplier, size, a.num_releases + b.num_releases))
        nearest = min((n for n in (c.nearest, d.nearest) if n), default=0)
        repeated, declared = c.repeated + d.repeated, max(c.declared, d.declared)
        checks.append(Checks(c.checked + d.checked, repeated, nearest, declared))
    return segments, checks
