"""From a ledger of noisy gradients to ε.

Each release in a ledger is the Gaussian mechanism on a Poisson-sampled batch. A ledger is therefore
a composition of Poisson-subsampled Gaussians, and of any other private events of the run. This
module uses add/remove adjacency throughout.

A release on a batch that was released before is not a new draw. It counts as the Gaussian mechanism
without sampling, whatever happened in between. Proof: fix the draws of all other examples, and let
x join each batch by an independent coin. Given all earlier releases, the next release of a batch is
N(μ, σ²C²) without x. With x in the data it is the mixture (1 - r)·N(μ, σ²C²) + r·N(μ + g, σ²C²),
where r is the conditional probability that the coin was heads. For a new batch r = q; for a batch
that was released before, r may be anything. Hockey-stick divergences are jointly convex and Rényi
divergences quasi-convex, so in both directions the pair is at most as far apart as N(μ, σ²C²) and
N(μ + g, σ²C²), the case r = 1. These pairs compose adaptively.
"""

from __future__ import annotations

import collections
import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Callable, TypeVar

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.accounting.accountants import (
    ACCOUNTANTS,
    Counts,
    composed_epsilon,
    composed_event,
)
from tf_adaptive_dp.accounting.ledger import Ledger, ledger_of, wrong_size
from tf_adaptive_dp.accounting.noise_strategies import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment

__all__ = [
    "dp_event",
    "epsilon",
    "epsilon_spent",
    "epsilon_without_amplification",
    "max_participations",
    "releases_left",
]

# A search for the number of releases that a budget allows stops here.
MAX_RELEASES = 2**31

_Number = TypeVar("_Number", int, float)


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """ε of `steps` Poisson-subsampled Gaussian releases.

    With D(α) the Rényi divergence of order α of one release, the RDP accountant returns
    ε = min over α of steps · D(α) + log(1 - 1/α) - log(δ α) / (α - 1).

    Guarantee: (ε, δ)-DP for adding or removing one example (per example, not per person), for
    everything computed from the releases, if the batches were drawn by Poisson sampling: each
    example joins with `sampling_probability`, independently of everything else. For batches of a
    shuffled data set (`dataset.shuffle(...).batch(...)`) this ε is the customary approximation, not
    a proven bound; see `epsilon_without_amplification`.

    Args:
      noise_multiplier: standard deviation of the noise / L2 sensitivity, at least 0.
      sampling_probability: expected batch size / number of examples, in (0, 1].
      steps: number of releases (noisy gradients), at least 0.
      delta: δ, in (0, 1); should be well below 1 / number of examples.
      accountant: `"rdp"` (TF Privacy's default) or `"pld"`, which is tighter and slower. PLD
        returns the ε of RDP beyond ε = 50 or two million releases, where it would take minutes or
        gigabytes, and for δ below 1e-9, where its arithmetic is not reliable.

    Returns:
      ε ≥ 0: 0.0 without releases, `math.inf` for releases without noise.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    Example:
      >>> from tf_adaptive_dp.accounting.composition import epsilon
      >>> round(epsilon(2.0, 200 / 60_000, steps=6_000, delta=1e-5), 3)
      0.538
      >>> round(epsilon(2.0, 200 / 60_000, steps=6_000, delta=1e-5, accountant="pld"), 3)
      0.489
    """
    noise_multiplier = checks.number("noise_multiplier", noise_multiplier, 0)
    sampling_probability = checks.probability(
        "sampling_probability", sampling_probability, or_one=True
    )
    steps = checks.integer("steps", steps, 0)
    return composed_epsilon(
        {(noise_multiplier, sampling_probability): steps}, (), delta, accountant
    )


def dp_event(ledger: Any, num_examples: int, *, in_epochs: bool = False) -> dp_accounting.DpEvent:
    """Converts a ledger to a `DpEvent`, for any accountant.

    Guarantee: the event covers everything in the ledger, for adding or removing one example and
    Poisson sampling with probability `batch_size / num_examples`.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set, a public constant.
      in_epochs: see `epsilon_spent`.

    Returns:
      The composition of the releases, oldest first, and of `ledger.other_events`.

    Raises:
      TypeError, ValueError: as `epsilon_spent`.

    Example:
      >>> from tf_adaptive_dp.accounting import Releases
      >>> from tf_adaptive_dp.accounting.composition import dp_event
      >>> ledger = Releases([(2.0, 200.0, 3)])
      >>> dp_event(ledger, num_examples=200)
      SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=3)
    """
    _refuse_users(ledger)
    segments, other_events = counted_ledger(ledger, num_examples, in_epochs=in_epochs)
    releases = [((z, batch_size / num_examples), count) for z, batch_size, count in segments]
    return composed_event(releases, other_events)


def epsilon_spent(
    ledger: Any,
    num_examples: int,
    delta: float,
    *,
    accountant: str = "rdp",
    in_epochs: bool = False,
) -> float:
    """ε of everything in a ledger.

    "rdp" takes about 20 ms for new parameters and less than 1 ms otherwise, "pld" at least 50 ms.

    Guarantee: that of `epsilon`: adding or removing one example, Poisson sampling with probability
    `batch_size / num_examples`, and an approximation for shuffled batches. The `other_events` of
    the ledger are composed with the releases. A release on a batch that was released before counts
    without amplification by sampling.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set, a public constant.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`, see `epsilon`.
      in_epochs: whether the batches come in epochs, so that a batch that returns after a whole
        pass over the data is not a repetition. For randomly drawn batches it is one.

    Returns:
      ε ≥ 0, `math.inf` if something was released without noise.

    Raises:
      TypeError: if `ledger` is not a ledger, or a number has the wrong type.
      ValueError: if a batch size is above `num_examples`, or another value is out of range.
      dp_accounting.UnsupportedEventError: for `other_events` that the accountant, or RDP, does not
        support.

    Example:
      >>> from tf_adaptive_dp.accounting import Releases
      >>> from tf_adaptive_dp.accounting.composition import epsilon_spent
      >>> ledger = Releases([(2.0, 200.0, 6_000)])
      >>> round(epsilon_spent(ledger, num_examples=60_000, delta=1e-5), 3)
      0.538
    """
    _refuse_users(ledger)
    segments, other_events = counted_ledger(ledger, num_examples, in_epochs=in_epochs)
    return composed_epsilon(_count(segments, num_examples), other_events, delta, accountant)


def epsilon_without_amplification(
    ledger: Any, num_examples: int, delta: float, *, accountant: str = "rdp"
) -> float:
    """ε of a ledger without amplification by sampling.

    An epoch (a pass over the data) takes at least m = floor(num_examples / batch_size) releases. An
    example is therefore in at most ceil(num_releases / m) releases of a segment, and in one more if
    the segment may have begun within an epoch. Each of these counts as a Gaussian mechanism without
    sampling, and so does each release on a batch that was released before within the length of an
    epoch.

    Guarantee: (ε, δ)-DP for adding or removing one example, for any order of the examples, if each
    example is in at most one batch per epoch, each epoch ends before the next one begins, and the
    other batches do not depend on whether the example is present. The bound does not hold if an
    epoch is cut short, as by `take(k)` on a data set that is reshuffled each time: an example may
    then be in as many releases as epochs were begun. This ε is large because it assumes no secret
    randomness.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set, a public constant.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`, see `accounting.epsilon`.

    Returns:
      ε ≥ 0, `math.inf` if something was released without noise.

    Raises:
      TypeError, ValueError, dp_accounting.UnsupportedEventError: as `accounting.epsilon_spent`.

    Example:
      >>> from tf_adaptive_dp.accounting import Releases
      >>> from tf_adaptive_dp.accounting.composition import epsilon_without_amplification
      >>> ledger = Releases([(2.0, 200.0, 6_000)])
      >>> round(epsilon_without_amplification(ledger, num_examples=60_000, delta=1e-5), 2)
      12.3
    """
    _refuse_users(ledger)
    segments, other_events = counted_ledger(ledger, num_examples, in_epochs=True)
    counts: Counts = {}
    for segment, times in zip(segments, max_participations(segments, num_examples)):
        release = (segment.noise_multiplier, 1.0)
        counts[release] = counts.get(release, 0) + times
    return composed_epsilon(counts, other_events, delta, accountant)


def max_participations(segments: Sequence[Segment], num_examples: int) -> list[int]:
    """The maximum number of releases of each segment that one example is part of."""
    result = []
    pass_begins = True
    for _, batch_size, count in segments:
        # As a fraction, so that 60,000 / 200.0 is 300 releases exactly.
        per_pass = num_examples / Fraction(batch_size)
        result.append(-(-count // math.floor(per_pass)) + (not pass_begins))
        # Known for certain only if the batch size divides the number of examples.
        pass_begins = pass_begins and per_pass.denominator == 1 and count % per_pass == 0
    return result


def releases_left(
    ledger: Any,
    noise_multiplier: float,
    batch_size: float,
    num_examples: int,
    epsilon: float,
    delta: float,
    *,
    accountant: str = "rdp",
    in_epochs: bool = False,
    at_most: int = MAX_RELEASES,
) -> int:
    """How many more releases a privacy budget allows: the largest n with ε(n) ≤ `epsilon`.

    ε(n) is `epsilon_spent` after n more releases. "rdp" takes about 10 ms, "pld" seconds, unless
    `at_most` releases fit.

    Guarantee: n more releases stay within the budget, in the sense of `epsilon_spent`; n + 1 do
    not, unless n is `at_most`, where the search stops.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      noise_multiplier: noise multiplier of the future releases.
      batch_size: expected batch size of the future releases.
      num_examples: number of examples in the training set, a public constant.
      epsilon: the total budget, including what was already spent; greater than 0.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`.
      in_epochs: see `epsilon_spent`.
      at_most: the largest n to consider.

    Returns:
      n, from 0 (none fits, or the budget is already overspent) to `at_most`.

    Raises:
      TypeError, ValueError, dp_accounting.UnsupportedEventError: as `epsilon_spent`.

    Example:
      >>> from tf_adaptive_dp.accounting import Releases
      >>> from tf_adaptive_dp.accounting.composition import releases_left
      >>> ledger = Releases([(2.0, 200.0, 6_000)])
      >>> releases_left(ledger, 2.0, 200, num_examples=60_000, epsilon=1.0, delta=1e-5)
      13040
    """
    budget = checks.number("epsilon", epsilon, 0, strict=True)
    at_most = checks.integer("at_most", at_most, 0)
    _refuse_users(ledger)
    segments, other_events = counted_ledger(ledger, num_examples, in_epochs=in_epochs)
    one = _checked((noise_multiplier, batch_size, 1), num_examples)

    def epsilon_of(then: Sequence[Segment], method: str) -> float:
        return composed_epsilon(_count(then, num_examples), other_events, delta, method)

    return releases_within(budget, epsilon_of, segments, one, accountant, at_most)


def releases_within(
    budget: float,
    epsilon_of: Callable[[Sequence[Segment], str], float],
    segments: Sequence[Segment],
    one: Segment,
    accountant: str,
    at_most: int,
) -> int:
    """How many more releases fit a budget, however ε is computed.

    Args:
      budget: the total ε, including what was already spent.
      epsilon_of: ε of all segments by an accountant, `"rdp"` or `"pld"`.
      segments: the releases so far.
      one: one of the future releases.
      accountant: `"rdp"` or `"pld"`.
      at_most: the largest number to consider.
    """

    def fits(n: int, method: str) -> bool:
        then = Ledger.extended(segments, one._replace(num_releases=n))  # a full one merges
        return epsilon_of(then, method) <= budget

    return largest_within(fits, accountant, functools.partial(largest, at_most=at_most), 0)


def largest_within(
    fits: Callable[[_Number, str], bool],
    accountant: str,
    search: Callable[[Callable[[_Number], bool], _Number], _Number],
    low: _Number,
) -> _Number:
    """The largest number that fits a budget.

    What fits by RDP also fits by PLD, whose ε is the smaller of both bounds. Starting there saves
    most of PLD's slow evaluations.

    Args:
      fits: whether a number fits by an accountant.
      accountant: `"rdp"` or `"pld"`.
      search: finds the largest number that fits, given whether one does and where to begin.
      low: where to begin.
    """
    checks.choice("accountant", accountant, ACCOUNTANTS)
    found = search(lambda n: fits(n, "rdp"), low)
    return found if accountant == "rdp" else search(lambda n: fits(n, accountant), found)


def largest(fits: Callable[[int], bool], low: int = 0, *, at_most: int = MAX_RELEASES) -> int:
    """The largest number that fits.

    Args:
      fits: whether a number fits; all smaller ones must if it does.
      low: one that fits, or 0.
      at_most: the largest number to consider.

    Returns:
      A number from `low` to `at_most`; `low` if no larger one fits.
    """
    if at_most <= low or (at_most < MAX_RELEASES and fits(at_most)):
        return max(at_most, 0)
    high = low + max(1, low // 8)
    while high <= at_most and fits(high):
        low, high = high, 3 * high - 2 * low  # twice as far as the last time
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def in_units(ledger: Any) -> Any:
    """A ledger without its unit of privacy, for callers that pass the number of users."""
    found = ledger_of(ledger)
    if getattr(found, "examples_per_user", None) is None:
        return ledger
    return Releases(found.segments, found.other_events, found.checks)


def _refuse_users(ledger: Any) -> None:
    """Raises ValueError for a ledger of users, whose ε would be too small for `num_examples`."""
    if getattr(ledger_of(ledger), "counts_rounds", False):
        raise ValueError(
            "This ledger counts rounds of federated training, whose unit is a user with all data. "
            "Call `federated.epsilon_spent(ledger, delta, sampling=sampler.sampling)`, or "
            f"`federated.privacy_statement`. Received: ledger={ledger!r}"
        )
    if in_units(ledger) is not ledger:
        raise ValueError(
            "This ledger counts releases about users, so ε depends on the number of users, not on "
            "the number of examples. Use the sampling that drew the users: "
            "`sampling.epsilon_spent(ledger, num_users, delta)`, `PrivacyMonitor` or the plan. "
            f"Received: ledger={ledger!r}"
        )


def read_ledger(
    ledger: Any, num_examples: int, *, correlated: bool = False
) -> tuple[list[Segment], tuple[dp_accounting.DpEvent, ...]]:
    """Checks a ledger, or that of an optimizer, and returns its segments and its other events.

    Warns if batches were larger than the optimizer's `expected_batch_size`.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set.
      correlated: whether the caller accounts for correlated noise. Otherwise a ledger with such
        noise is an error, since its releases are not a composition of independent ones.
    """
    read, events = _read(ledger, num_examples, correlated)
    return [segment for segment, _ in read], events


def counted_ledger(
    ledger: Any, num_examples: int, *, in_epochs: bool
) -> tuple[list[Segment], tuple[dp_accounting.DpEvent, ...]]:
    """Like `read_ledger`, with separate segments for releases on repeated batches.

    Their batch size is `num_examples`, so they count without amplification by sampling.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set.
      in_epochs: see `epsilon_spent`.
    """
    read, events = _read(ledger, num_examples)
    segments = []
    for segment, known in read:
        again = repeated(segment, known, num_examples, in_epochs=in_epochs)
        segments.append(segment._replace(batch_size=float(num_examples), num_releases=again))
        segments.append(segment._replace(num_releases=segment.num_releases - again))
    return [s for s in segments if s.num_releases], events


def repeated(segment: Segment, known: BatchChecks, num_examples: int, *, in_epochs: bool) -> int:
    """How many releases of a segment count as repetitions.

    Args:
      segment: the releases.
      known: what is known about their batches.
      num_examples: number of examples in the training set.
      in_epochs: see `epsilon_spent`.
    """
    if in_epochs and known.nearest >= num_examples // segment.batch_size:
        return 0
    return min(known.repeated, segment.num_releases)


def num_returned(known: Sequence[tuple[Segment, BatchChecks]], num_examples: int) -> int:
    """How many releases were on a batch of an earlier epoch, so that the data were not shuffled.

    Args:
      known: a value of `checks_of`.
      num_examples: number of examples in the training set.
    """
    return sum(
        repeated(segment, of, num_examples, in_epochs=False)
        - repeated(segment, of, num_examples, in_epochs=True)
        for segment, of in known
        if segment.batch_size < num_examples  # larger ones cannot be another batch
    )


def checks_of(
    ledger: Any, num_examples: int, *, correlated: bool = False
) -> list[tuple[Segment, BatchChecks]]:
    """The segments of a ledger, with what is known about their batches.

    Args:
      ledger: see `read_ledger`.
      num_examples: see `read_ledger`.
      correlated: see `read_ledger`.
    """
    return _read(ledger, num_examples, correlated)[0]


def noise_of(ledger: Any) -> NoiseStrategy:
    """How the noise of the releases in a ledger, or in that of an optimizer, is correlated."""
    return getattr(ledger_of(ledger), "noise", None) or IndependentNoise()


def _read(
    ledger: Any, num_examples: int, correlated: bool = False
) -> tuple[list[tuple[Segment, BatchChecks]], tuple[dp_accounting.DpEvent, ...]]:
    """The segments of a ledger as they count, each with what is known about it; other events.

    See `read_ledger`. Where batches were larger than declared, segments have the larger size.
    """
    num_examples = checks.integer("num_examples", num_examples, 1)
    found = ledger_of(ledger)
    if not (hasattr(found, "segments") and hasattr(found, "other_events")):
        is_model = hasattr(ledger, "optimizer")
        hint = ". For a compiled model, pass `model.optimizer`" if is_model else ""
        raise TypeError(
            f"`ledger` must be a ledger or an optimizer that has one{hint}. Received: "
            f"ledger={ledger!r}"
        )
    _refuse_understated_epsilon(found, num_examples, correlated)
    known = [BatchChecks(*of_segment) for of_segment in getattr(found, "checks", ())]
    known += [BatchChecks()] * (len(found.segments) - len(known))
    sizes = _larger_sizes(found.segments, known)
    for declared, seen in sizes.items():
        warnings.warn(wrong_size(declared, seen), stacklevel=level_of_caller())
    read = []
    for segment, of_segment in zip(found.segments, known):
        noise_multiplier, batch_size, count = segment
        declared = of_segment.declared or batch_size
        if declared in sizes:
            size = min(max(batch_size, sizes[declared]), num_examples)
            segment = (noise_multiplier, size, count)
        read.append((_checked(segment, num_examples), of_segment))
    return [(s, of) for s, of in read if s.num_releases], tuple(found.other_events)


def _refuse_understated_epsilon(found: Any, num_examples: int, correlated: bool) -> None:
    """Raises ValueError for a ledger whose ε would be too small as it is asked for.

    Args:
      found: the ledger.
      num_examples: see `read_ledger`.
      correlated: see `read_ledger`.
    """
    fewest = getattr(found, "fewest_units", None)
    if fewest is not None and fewest < num_examples and found.segments:
        raise ValueError(
            f"Some of these releases were drawn from {fewest} examples or users, so an epsilon for "
            f"{num_examples} would be too small for those that could be in all of them. An epsilon "
            f"for {fewest} holds for all. To train on more data, compile with a new optimizer and "
            "add up what both spent; the sum is smaller. If `fit` had `validation_split`, pass the "
            "number of examples that are left. If a callback was given a wrong number, or if each "
            "pass over shuffled data was fed in parts, with a `fit` of one epoch for each, set "
            f"`optimizer.ledger.fewest_units`. Received: num_examples={num_examples!r}"
        )
    if not (correlated or noise_of(found).is_independent):
        raise ValueError(
            "The noise of these releases is correlated, so epsilon depends on how far apart the "
            "releases with one example are. Pass the `sampling.CyclicPoissonSampling` or "
            "`FixedOrder` that drew the batches, `sampling.epsilon_spent(ledger, num_examples, "
            f"delta)`; no other accounting is proven. Received: noise={noise_of(found)!r}"
        )


def _larger_sizes(segments: Sequence, known: Sequence[BatchChecks]) -> dict[float, float]:
    """The size that batches turned out to have, by the smaller one that was declared for them.

    It takes several batches to notice that they are a little larger than declared. Earlier ones may
    have been as large, so all releases with the declared size count with the larger one.
    """
    sizes: dict[float, float] = {}
    for segment, of_segment in zip(segments, known):
        if of_segment.declared:
            sizes[of_segment.declared] = max(segment[1], sizes.get(of_segment.declared, 0.0))
    return sizes


def _checked(segment: tuple[float, float, int], num_examples: int) -> Segment:
    checked = Segment(
        checks.number("noise_multiplier", segment[0], 0),
        checks.number("batch_size", segment[1], 0, strict=True),
        checks.integer("num_releases", segment[2], 0),
    )
    if checked.batch_size > num_examples:
        raise ValueError(
            "`batch_size` must be at most `num_examples`. Received: "
            f"batch_size={checked.batch_size:g}, num_examples={num_examples!r}"
        )
    return checked


def _count(segments: Iterable[Segment], num_examples: int) -> Counts:
    counts: Counts = collections.Counter()
    for noise_multiplier, batch_size, num_releases in segments:
        counts[noise_multiplier, batch_size / num_examples] += num_releases
    return counts
