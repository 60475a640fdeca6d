"""Which ledgers count the releases that a variable was trained with."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp.accounting.ledger import Ledger, Segment

_ATTRIBUTE = "_ledgers_of_tf_adaptive_dp"

_NOT_COUNTED = (
    "These weights were trained by {count} private releases that the ledger of this optimizer does "
    "not hold: [{rows}] (noise multiplier, batch size, releases). If both use the same examples, "
    "the epsilon of this optimizer is that of its new releases alone, and too small. To count "
    "all, call `optimizer.ledger.restore([{rows}, *optimizer.ledger.segments], [{checks}, "
    "*optimizer.ledger.checks])`, or compile with `type(old).from_config(old.get_config())`, which "
    "keeps the settings as well.{events} If the examples are others, nothing is missing: each data "
    "set has an epsilon of its own."
)
_EVENTS = " Add {events} to `optimizer.ledger.other_events`."


def warn_of_earlier_releases(variables: Sequence[tf.Variable], ledger: Ledger) -> None:
    """Warns if variables were trained by releases of other ledgers that this one lacks.

    Such as after `model.compile` with a new optimizer. It is a warning, and nothing is taken over:
    only the user knows whether the examples are the same. Taken over silently, the releases of
    another data set, as after private pretraining, would be counted against this one.

    Guarantee: the ledger is noted with each variable, for as long as the variable lives, and a
    ledger that is noted later is compared with what the earlier ones hold at that time. So within
    a process all releases on one of the variables that `ledger` does not hold are told, once for
    each ledger. Values that were copied (`set_weights`, files without the optimizer, clones), other
    processes, and optimizers without a ledger leave no trace; nor does an optimizer that goes on
    after its releases were taken over.

    Args:
      variables: what is trained.
      ledger: counts what trains them from now on. Restore it before.
    """
    earlier: dict[int, _Noted] = {}
    for variable in variables:
        noted = getattr(variable, _ATTRIBUTE, ())
        if all(other.ledger is not ledger for other in noted):
            earlier.update((id(other.ledger), other) for other in noted)
            setattr(variable, _ATTRIBUTE, (*noted, _Noted(ledger, ledger.restorations)))
    spent = {key: other.ledger.segments for key, other in earlier.items()}
    spent = {key: segments for key, segments in spent.items() if segments}
    if not spent:
        return
    missing = _not_held(ledger.segments, _without_doubles(spent, earlier))
    taken_over = spent.keys() - missing.keys()
    for variable in variables:
        noted = getattr(variable, _ATTRIBUTE)
        setattr(variable, _ATTRIBUTE, tuple(o for o in noted if id(o.ledger) not in taken_over))
    if missing:
        _warn([earlier[key].ledger for key in missing])


class _Noted(NamedTuple):
    """A ledger, and how often it had been restored when it was noted."""

    ledger: Ledger
    restorations: int


def _without_doubles(spent: dict[int, list[Segment]], earlier: dict[int, _Noted]) -> dict:
    """Leaves out ledgers that another one took over after it had been noted."""
    for key, noted in earlier.items():
        if key in spent and noted.ledger.restorations > noted.restorations:
            others = {k: segments for k, segments in spent.items() if k != key}
            spent = {key: spent[key], **_not_held(spent[key], others)}
    return spent


def _not_held(segments: Sequence[Segment], spent: dict[int, list[Segment]]) -> dict:
    """Those of several ledgers that do not fit into one with these segments, side by side."""
    left, missing = _counts(segments), {}
    for key, of_other in spent.items():
        counts = _counts(of_other)
        # Of ledgers that are full the last segments are merged.
        full = len(of_other) == Ledger.MAX_SEGMENTS and Ledger.extends(segments, of_other)
        if full or not counts - left:
            left -= counts
        else:
            missing[key] = of_other
    return missing


def _counts(segments: Sequence[Segment]) -> collections.Counter:
    """How many releases there are of each noise multiplier and batch size."""
    counts: collections.Counter = collections.Counter()
    for noise_multiplier, batch_size, count in segments:
        counts[noise_multiplier, batch_size] += count
    return counts


def _warn(ledgers: Sequence[Ledger]) -> None:
    spent = [tuple(segment) for ledger in ledgers for segment in ledger.segments]
    # Without what is known of the batches, those that were released again would count as new ones.
    known = [tuple(of_segment) for ledger in ledgers for of_segment in ledger.checks]
    events = [event for ledger in ledgers for event in ledger.other_events]
    warnings.warn(
        _NOT_COUNTED.format(
            count=sum(count for _, _, count in spent),
            rows=", ".join(map(str, spent)),
            checks=", ".join(map(str, known)),
            events=_EVENTS.format(events=events) if events else "",
        ),
        stacklevel=3,
    )
