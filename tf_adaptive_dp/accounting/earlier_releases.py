"""Finds the ledgers that count the releases a variable was trained with."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.variables import local_copies, native
from tf_adaptive_dp.accounting.ledger import Ledger, is_chosen_by_search
from tf_adaptive_dp.accounting.releases import Segment, joined
from tf_adaptive_dp.accounting.terms import missing_events

_ATTRIBUTE = "_ledgers_of_tf_adaptive_dp"
# The variables that have this attribute, by the handles of their copies.
_NOTED: weakref.WeakValueDictionary[Hashable, tf.Variable] = weakref.WeakValueDictionary()
# What the optimizer of each ledger was told.
_TOLD: weakref.WeakKeyDictionary[Ledger, _Told] = weakref.WeakKeyDictionary()

_NOT_COUNTED = (
    "These weights come from {count} that this optimizer's ledger does not include. If both use "
    "the same examples, the epsilon of this optimizer covers only its new releases and is too "
    "small. To count all of them, compile with `type(old).from_config(old.get_config())`, where "
    "`old` is the earlier optimizer. For an optimizer with other settings, call "
    "`optimizer.ledger.restore([{rows}, *optimizer.ledger.segments], [{checks}, "
    "*optimizer.ledger.checks])`, where each tuple of the first list is (noise multiplier, batch "
    "size, releases).{events} If the examples differ, nothing is missing: each data set has its "
    "own epsilon."
)
_NO_SUM = (
    "These weights come from {total} private steps that this optimizer's ledger does not include, "
    "{kind}. No accounting adds them to this ledger. If both use the same examples, add "
    "what they cost to `optimizer.ledger.other_events` as a `dp_accounting.DpEvent`: "
    "`sampling.dp_event(old, {number})` of the sampling of those releases; with that of a "
    "`FixedOrder`, epsilon holds for data sets in which one example is blank or not. If the "
    "examples differ, nothing is missing: each data set has its own epsilon."
)
_EXAMPLES = (
    "These weights come from {total} private steps that protect examples, and this optimizer's "
    "ledger counts users. No accounting adds them: what they cost a user depends on how many "
    "examples the user has. If both use the same data, continue with an optimizer without "
    "`examples_per_user`. If the data differ, nothing is missing: each data set has its own "
    "epsilon."
)
_MORE_EVENTS = (
    "These weights come from an optimizer whose ledger has `other_events` that this optimizer's "
    "ledger does not include: {events}. If both use the same examples, the epsilon of this "
    "optimizer is too small; call `optimizer.ledger.other_events += {events}`. If the "
    "examples differ, nothing is missing: each data set has its own epsilon."
)
_CHOSEN_BY_SEARCH = (
    "These weights come from a model that a search of hyperparameters chose, which used the data "
    "more often than any ledger shows. If both use the same examples, set "
    "`optimizer.ledger.chosen_by_search = True`, so that the privacy statement says so. If the "
    "examples differ, nothing is missing: each data set has its own epsilon."
)
_EVENTS = " Add {events} to `optimizer.ledger.other_events`."


def warn_of_earlier_releases(
    variables: Sequence[tf.Variable], ledger: Ledger, read: Iterable[Hashable] = ()
) -> list[Ledger]:
    """Warns if variables were trained by releases that this ledger lacks.

    This happens after `model.compile` with a new optimizer, for example. It only warns and copies
    nothing, since only the user knows whether the examples are the same. Copying silently would
    charge the releases of another data set, as after private pretraining, to this one.

    Guarantee: each variable remembers its ledgers for as long as it lives. A later ledger is
    compared with the content of the earlier ones at that time, and one that goes on after another
    has trained the variables hears of it. So within a process, the function reports all releases on
    one of the variables that `ledger` does not hold, once for each ledger.
    When training begins, it also reports those on the variables that the loss reads, such as the
    frozen ones of a model, but not of an eager step. Releases of another process are reported if
    their ledger was loaded into an optimizer that was built for the variables (`note_ledger`). It
    cannot see copied values (`set_weights`, files without the optimizer, clones), optimizers
    without a ledger, or an optimizer that continues after its releases were taken over.

    Args:
      variables: the variables to train.
      ledger: the ledger that counts their training from now on. Restore it first.
      read: the handles that the loss reads, as `frames.Frame.handles` names them.

    Returns:
      The ledgers whose releases this one took over.
    """
    earlier: dict[int, _Noted] = {}
    is_new = False  # the ledger for one of the variables
    _told(ledger)  # from now on
    before = _trained_by(ledger, variables)
    for variable in variables:
        if not _trained_by(ledger, [variable]):
            noted = [n for n in getattr(variable, _ATTRIBUTE, ()) if n.ledger is not ledger]
            earlier.update((id(other.ledger), other) for other in noted)
            _note(variable, [*noted, _Noted(ledger, ledger.restorations)])
            is_new = True
    others = [_NOTED[handle] for handle in read if is_new and handle in _NOTED]
    for variable in others:
        noted = getattr(variable, _ATTRIBUTE)
        earlier.update((id(o.ledger), o) for o in noted if o.ledger is not ledger)
    spent = {key: other.ledger.segments for key, other in earlier.items()}
    spent = {key: segments for key, segments in spent.items() if segments}
    apart = {key: s for key, s in spent.items() if not _are_alike(ledger, earlier[key].ledger)}
    alike = {key: segments for key, segments in spent.items() if key not in apart}
    missing = {**apart, **_not_held(ledger.segments, _without_doubles(alike, earlier))}
    taken_over = spent.keys() - missing.keys()
    for key in taken_over:  # `restore` does not say of how many examples they were
        ledger.lower_units(earlier[key].ledger.fewest_units)
    events = missing_events(
        [event for key in taken_over for event in earlier[key].ledger.other_events],
        ledger.other_events,
    )
    if events:
        warnings.warn(_MORE_EVENTS.format(events=events), stacklevel=level_of_caller())
    since = [other for other in _of_others_since(before, ledger) if id(other) not in earlier]
    found = [*(earlier[key].ledger for key in spent), *since]
    by_search = any(map(is_chosen_by_search, found))
    if by_search and not is_chosen_by_search(ledger):
        warnings.warn(_CHOSEN_BY_SEARCH, stacklevel=level_of_caller())
    for variable in [*variables, *others]:
        noted = getattr(variable, _ATTRIBUTE)
        kept = tuple(o for o in noted if id(o.ledger) not in taken_over)
        if len(kept) < len(noted) and all(o.ledger is not ledger for o in kept):
            kept = (*kept, _Noted(ledger, ledger.restorations))  # which holds them for this one
        setattr(variable, _ATTRIBUTE, kept)
    untold = [*(earlier[key].ledger for key in missing), *since]
    if untold:
        _told(ledger).ledgers.update(untold)
        _warn(ledger, untold)
    return [earlier[key].ledger for key in taken_over]


def warn_of_releases_since(variables: Sequence[tf.Variable], ledger: Ledger) -> None:
    """Warns if others trained variables meanwhile that a ledger counts; see above.

    Args:
      variables: those that may have been trained.
      ledger: the ledger that counts their training.
    """
    warn_of_earlier_releases(_trained_by(ledger, variables), ledger)


def note_ledger(variables: Sequence[tf.Variable], ledger: Ledger) -> None:
    """Notes that a ledger may hold releases on variables although its optimizer made no step yet.

    A state that is loaded brings those of another process; see `warn_of_earlier_releases`.

    Args:
      variables: those that the optimizer of the ledger was built for.
      ledger: it may be loaded later.
    """
    for variable in variables:
        noted = getattr(variable, _ATTRIBUTE, ())
        if all(other.ledger is not ledger for other in noted):
            _note(variable, [*noted, _Noted(ledger, ledger.restorations, has_trained=False)])


def _note(variable: tf.Variable, noted: Iterable[_Noted]) -> None:
    setattr(variable, _ATTRIBUTE, tuple(noted))
    _NOTED.update((id(copy.handle), variable) for copy in local_copies(variable))


def _trained_by(ledger: Ledger, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The variables that a step of this process has trained whose release the ledger counts."""
    return [
        v
        for v in variables
        if any(n.ledger is ledger and n.has_trained for n in getattr(v, _ATTRIBUTE, ()))
    ]


def _of_others_since(variables: Sequence[tf.Variable], ledger: Ledger) -> list[Ledger]:
    """The ledgers whose releases trained variables since a ledger first did, and which it lacks.

    A ledger that was restored meanwhile is taken to have what it should.
    """
    noted = [
        n.ledger
        for v in variables
        for n in getattr(v, _ATTRIBUTE)
        if n.ledger is not ledger and n.has_trained
    ]
    others = [other for other in {id(n): n for n in noted}.values() if other.num_releases]
    told = _told(ledger)
    if told.restorations != ledger.restorations:
        told.restorations = ledger.restorations
        told.ledgers.update(others)
    return [other for other in others if other not in told.ledgers]


def _told(ledger: Ledger) -> _Told:
    """What the optimizer of a ledger was told."""
    if ledger not in _TOLD:
        _TOLD[ledger] = _Told(ledger.restorations)
    return _TOLD[ledger]


def were_trained_privately(variables: Sequence[tf.Variable]) -> bool:
    """Whether releases of this process have trained any of these variables."""
    noted = [other for v in variables for other in getattr(native(v), _ATTRIBUTE, ())]
    return any(other.has_trained and other.ledger.num_releases for other in noted)


@dataclasses.dataclass
class _Told:
    """The ledgers that an optimizer was told of, and how often its own had been restored then."""

    restorations: int
    ledgers: weakref.WeakSet[Ledger] = dataclasses.field(default_factory=weakref.WeakSet)


class _Noted(NamedTuple):
    """A ledger that a variable noted.

    Attributes:
      ledger: the ledger.
      restorations: how often it had been restored then.
      has_trained: whether its optimizer trained the variable in this process.
    """

    ledger: Ledger
    restorations: int
    has_trained: bool = True


def _without_doubles(spent: dict[int, list[Segment]], earlier: dict[int, _Noted]) -> dict:
    """Leaves out ledgers whose releases another one took over after a variable had noted it.

    One that has not trained the variable may have got them as a copy, or from a file.
    """
    for key, noted in earlier.items():
        if key not in spent:
            continue
        others = {k: segments for k, segments in spent.items() if k != key}
        own = {key: spent[key]}
        if not noted.has_trained and any(not _not_held(s, own) for s in others.values()):
            spent = others
        elif not noted.has_trained or noted.ledger.restorations > noted.restorations:
            spent = {**own, **_not_held(spent[key], others)}
    return spent


def _not_held(segments: Sequence[Segment], spent: dict[int, list[Segment]]) -> dict:
    """The ledgers whose releases a ledger with these segments does not hold.

    No release counts for two of them.
    """
    left, missing = _counts(segments), {}
    for key, of_other in spent.items():
        counts = _counts(of_other)
        # A ledger that is full merges its last segments.
        full = len(of_other) == Ledger.MAX_SEGMENTS and Ledger.extends(segments, of_other)
        if full or not counts - left:
            left -= counts
        else:
            missing[key] = of_other
    return missing


def _counts(segments: Sequence[Segment]) -> collections.Counter:
    """The number of releases by noise multiplier and batch size."""
    counts: collections.Counter = collections.Counter()
    for noise_multiplier, batch_size, count in segments:
        counts[noise_multiplier, batch_size] += count
    return counts


def _are_alike(ledger: Ledger, other: Ledger) -> bool:
    """Whether a ledger could hold another one's releases: both have the same unit and noise."""
    same_unit = (ledger.examples_per_user is None) == (other.examples_per_user is None)
    return same_unit and ledger.terms.noise == other.terms.noise


def _warn(ledger: Ledger, ledgers: Sequence[Ledger]) -> None:
    alike = []
    for other in ledgers:
        independent = ledger.noise.is_independent and other.noise.is_independent
        users = other.examples_per_user is not None
        if independent and _are_alike(ledger, other):
            alike.append(other)
            continue
        if ledger.examples_per_user is not None and not users:
            warnings.warn(_EXAMPLES.format(total=other.num_releases), stacklevel=level_of_caller())
            continue
        kind = "which protect users" if independent else "with noise that is correlated over steps"
        number = "num_users" if users else "num_examples"
        text = _NO_SUM.format(total=other.num_releases, kind=kind, number=number)
        warnings.warn(text, stacklevel=level_of_caller())
    if not alike:
        return
    spent = [segment for other in alike for segment in other.segments]
    # Without the checks, batches that were released again would count as new ones.
    known = [of_segment for other in alike for of_segment in other.checks]
    total = sum(segment.num_releases for segment in spent)
    # What `restore` takes, together with the segments of this ledger, which has one soon.
    room = Ledger.MAX_SEGMENTS - max(len(ledger.segments), 1)
    spent, known = joined(spent, known, max(room, 1))
    events = tuple(event for other in alike for event in other.other_events)
    warnings.warn(
        _NOT_COUNTED.format(
            count="1 private step" if total == 1 else f"{total} private steps",
            rows=_listed(spent),
            checks=_listed(known),
            events=_EVENTS.format(events=list(events)) if events else "",
        ),
        stacklevel=level_of_caller(),
    )


def _listed(rows: Iterable[tuple]) -> str:
    """The items of a list of tuples, as Python reads them; equal neighbors are written once.

    They are not added up: each segment may have begun within a pass over the data.
    """
    runs = [(str(tuple(row)), len(list(run))) for row, run in itertools.groupby(rows)]
    return ", ".join(row if count == 1 else f"*{count} * [{row}]" for row, count in runs)
