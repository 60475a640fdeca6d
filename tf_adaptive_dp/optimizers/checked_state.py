"""Checks that saved state fits an optimizer, so that loading it never loses releases.

Keras assigns one variable after another until one does not fit, accepts a list that is too short,
and skips a saved state of a different length with a warning.

Guarantee: nothing is loaded from a state that does not fit. If it holds releases that the ledger
lacks, loading it is an error, since the ε of the weights that belong to it would be understated.
Keras may turn the error into a warning (`skip_mismatch=True`) after it has loaded other weights, so
the releases are added to the ledger all the same, and training is refused until somebody decides.
Where they cannot be added, because their unit is different or their noise is correlated, ε is
infinite until then.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import BatchChecks, Segment, joined
from tf_adaptive_dp.accounting.terms import Terms, digest, gaussian_events
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
            "Call `optimizer.build(model.trainable_variables)` before loading. Only if the weights "
            "were trained on other data than those of this training, load them before `compile`, "
            "which begins a new ledger. "
            f"Received: shapes {received}, instead of {own}"
        )


class RefusedState:
    """Remembers a saved state that was refused until somebody decides how its releases count.

    Until then they are in the ledger; or, if it cannot count them, a `NonPrivateDpEvent` stands for
    them. Loading a state that fits is a decision, and so is `ledger.restore`, or removing that
    event.
    """

    def __init__(self) -> None:
        self._num_releases = 0
        self._restorations = -1
        self._unknown: dp_accounting.DpEvent | None = None
        self._why = ""

    def add_to(self, ledger: Ledger, store: Mapping[str, Any]) -> None:
        """Adds the releases of a refused state to the ledger, and remembers that it did."""
        saved = _saved_ledger(_arrays(store))
        self.settle(ledger)
        if saved.terms is not None and saved.terms.chosen_by_search:
            ledger.chosen_by_search = True
        self._num_releases = sum(segment.num_releases for segment in saved.segments)
        self._why = _why_not_added(saved, ledger)
        if self._why:
            self._unknown = dp_accounting.NonPrivateDpEvent()
            ledger.other_events = (*ledger.other_events, self._unknown)
            return
        ledger.other_events = (*ledger.other_events, *(saved.other_events or ()))
        segments, checks = [*ledger.segments, *saved.segments], [*ledger.checks, *saved.checks]
        ledger.restore(*joined(segments, checks))
        ledger.lower_units(saved.fewest_units)
        self._restorations = ledger.restorations

    def settle(self, ledger: Ledger) -> None:
        """Forgets the refused state, because one that fits is being loaded."""
        if self._is_unknown(ledger):
            kept = tuple(e for e in ledger.other_events if e is not self._unknown)
            ledger.other_events = kept
        self._restorations, self._unknown = -1, None

    def require_decision(self, ledger: Ledger) -> None:
        """Raises unless it was decided what the weights have cost.

        Args:
          ledger: the optimizer's.

        Raises:
          NotPrivateError: if a state was refused since a state was loaded or the ledger restored.
        """
        if self._is_unknown(ledger):
            raise NotPrivateError(
                "The optimizer's saved state was refused when weights were loaded, and this ledger "
                f"cannot count its releases, so epsilon is infinite. {self._why} Load weights "
                "whose state fits; or remove the `NonPrivateDpEvent` from "
                "`optimizer.ledger.other_events`, and put in its place what was spent on the data "
                "of this training: nothing, if everything that was loaded was trained on other "
                f"data. Received: a saved state of {self._num_releases} releases"
            )
        if self._restorations != ledger.restorations:
            return
        raise NotPrivateError(
            "The optimizer's saved state was refused when weights were loaded. The ledger counts "
            "its releases, but they may belong to other weights. Received: a saved state of "
            f"{self._num_releases} releases. Load weights whose state fits; or say that they count "
            "for this training, `optimizer.ledger.restore(optimizer.ledger.segments, "
            "optimizer.ledger.checks)`, or, if everything that was loaded was trained on other "
            "data, that none do, `optimizer.ledger.restore([])`."
        )

    def _is_unknown(self, ledger: Ledger) -> bool:
        unknown = self._unknown  # of most optimizers `None`, and reading the ledger takes time
        return unknown is not None and any(event is unknown for event in ledger.other_events)


def can_load(variables: Sequence[tf.Variable], ledger: Ledger, store: Mapping[str, Any]) -> bool:
    """Whether a saved state fits an optimizer; warns if it does not but may be skipped.

    Args:
      variables: the optimizer's.
      ledger: the optimizer's.
      store: saved arrays, by their number.

    Raises:
      ValueError: if the state does not fit and holds releases that the ledger lacks.
    """
    arrays = _arrays(store)
    saved = _saved_ledger(arrays)
    if saved.segments and saved.segments != ledger.segments:
        require_same_shapes(variables, arrays)
    if _shapes(arrays) == _shapes(variables):
        _require_same_terms(ledger, saved)
        return True
    if arrays:
        warnings.warn(
            "The saved state belongs to another optimizer, or to one that was not built, and is "
            "not loaded. It holds no releases that this ledger lacks.",
            stacklevel=level_of_caller(),
        )
    return False


def require_same_terms(ledger: Ledger, weights: Sequence[Any]) -> None:
    """Raises if a saved state has another unit of privacy, or another strategy of its noise.

    Args:
      ledger: the optimizer's.
      weights: arrays or variables that fit the optimizer.

    Raises:
      ValueError: if it does.
    """
    _require_same_terms(ledger, _saved_ledger(weights))


def _require_same_terms(ledger: Ledger, saved: _SavedLedger) -> None:
    own = ledger.terms
    if saved.terms is None or saved.terms[:2] == own[:2]:
        return
    names = [f"{_unit(terms)}, {_noise(terms)}" for terms in (saved.terms, own)]
    raise ValueError(
        "`weights` must be those of an optimizer with the same unit of privacy and the same noise. "
        "With others epsilon would be wrong. Nothing of them was loaded. Create the optimizer with "
        f"the `examples_per_user` and `noise` of then. Received: a state of {names[0]}; this "
        f"optimizer: {names[1]}"
    )


class _SavedLedger(NamedTuple):
    """The ledger in a saved optimizer; the last three are `None` if not known."""

    segments: list[Segment]
    checks: list[BatchChecks]
    terms: Terms | None = None
    other_events: tuple[dp_accounting.DpEvent, ...] | None = None
    fewest_units: int | None = None


def _why_not_added(saved: _SavedLedger, ledger: Ledger) -> str:
    """Why the releases of a saved ledger cannot be added to one; empty if they can."""
    if saved.terms is None or saved.other_events is None:
        return "It does not say what its numbers mean, or what else was released."
    if saved.terms.noise or ledger.terms.noise:
        return (
            "Its noise, or that of this optimizer, is correlated over steps, and no accounting "
            "combines such releases with others except as an event: `sampling.dp_event(old, "
            "num_examples)` of the sampling that drew their batches."
        )
    if saved.terms.examples_per_user != ledger.terms.examples_per_user:
        return f"It counts {_unit(saved.terms)}, this optimizer {_unit(ledger.terms)}."
    return ""


def _unit(terms: Terms) -> str:
    users = terms.examples_per_user
    return f"users of at most {users} examples in a batch" if users else "examples"


def _noise(terms: Terms) -> str:
    return f"correlated noise (strategy {terms.noise:x})" if terms.noise else "independent noise"


def _shapes(arrays: Sequence[Any]) -> list[tuple]:
    return [tuple(np.shape(array)) for array in arrays]


def _arrays(store: Mapping[str, Any]) -> list[Any]:
    return [store[str(i)] for i in range(len(store.keys()))]


def _saved_ledger(saved: Sequence[Any]) -> _SavedLedger:
    """The ledger of a saved optimizer; an empty one without terms if it has none."""
    size = Ledger.MAX_SEGMENTS
    shapes = [(size, 2), (size,), (size, len(BatchChecks._fields))]
    for k in range(len(saved) - 2):
        if _shapes(saved[k : k + 3]) != shapes:
            continue  # before anything is read, which may be large and in a file
        parameters, counts, checks, *others = (np.asarray(a) for a in saved[k : k + 5])
        if counts.dtype != np.int64:
            continue
        used = np.flatnonzero(counts)
        segments = [
            Segment(float(p[0]), float(p[1]), int(n))
            for p, n in zip(parameters[used], counts[used])
        ]
        known = [_checks(*checks[row].tolist()) for row in used]
        return _SavedLedger(segments, known, *_terms(others), _fewest_units(saved[k + 5 : k + 6]))
    return _SavedLedger([], [])


def _terms(saved: Sequence[np.ndarray]) -> tuple[Terms | None, tuple | None]:
    """The terms and the events that follow a ledger's numbers, `None` where they are not known."""
    if _shapes(saved) != [(len(Terms._fields),), (Ledger.MAX_SAVED_EVENTS,)]:
        return None, None  # a ledger of an earlier version
    terms, events = Terms(*saved[0].tolist()), gaussian_events(saved[1].tolist())
    return terms, events if digest(events) == terms.other_events else None


def _fewest_units(saved: Sequence[Any]) -> int | None:
    """What follows the terms and the events of a ledger."""
    if _shapes(saved) != [()] or np.asarray(saved[0]).dtype != np.int64:
        return None  # a ledger of an earlier version
    return int(np.asarray(saved[0])) or None


def _checks(checked: float, repeated: float, nearest: float, declared: float) -> BatchChecks:
    return BatchChecks(int(checked), int(repeated), int(nearest), declared)
