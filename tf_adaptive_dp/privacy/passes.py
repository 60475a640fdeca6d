"""ε of shuffled batches, from how often an example is in one, in whatever order they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tf_adaptive_dp.privacy import accounting
from tf_adaptive_dp.privacy.ledger import Segment

__all__ = ["epsilon_without_amplification", "occurrences"]


def epsilon_without_amplification(
    ledger: Any, num_examples: int, delta: float, *, accountant: str = "rdp"
) -> float:
    """ε of a ledger if all that is known of the batches is that a pass has each example once.

    A pass over the data takes at least m = floor(num_examples / batch_size) releases. So an example
    is in at most ceil(num_releases / m) releases of a segment, one more if the segment may have
    begun in the middle of a pass; these count as Gaussian mechanisms without sampling. So does each
    release on a batch that was released before within the length of a pass.

    Guarantee: (ε, δ)-DP for adding or removing one example, in whatever order the examples come, if
    each pass has each example in one batch at most, ends before the next one begins, and the other
    batches do not depend on whether the example is there. A pass that is cut short, as by `take(k)`
    of a data set that is shuffled anew each time, is outside of it: an example may be in as many
    releases as passes were begun. No secret randomness is assumed, hence the size of this ε.

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
      >>> from types import SimpleNamespace
      >>> from tf_adaptive_dp.privacy.passes import epsilon_without_amplification
      >>> ledger = SimpleNamespace(segments=[(2.0, 200.0, 6_000)], other_events=())
      >>> round(epsilon_without_amplification(ledger, num_examples=60_000, delta=1e-5), 2)
      12.3
    """
    segments, other_events = accounting.counted_ledger(ledger, num_examples, passes=True)
    counts: accounting.Counts = {}
    for segment, times in zip(segments, occurrences(segments, num_examples)):
        release = (segment.noise_multiplier, 1.0)
        counts[release] = counts.get(release, 0) + times
    return accounting.composed_epsilon(counts, other_events, delta, accountant)


def occurrences(segments: Sequence[Segment], num_examples: int) -> list[int]:
    """In how many releases of each segment one example is at most."""
    result = []
    pass_begins = True
    for _, batch_size, count in segments:
        # As a fraction, so that 60,000 / 200.0 is 300 releases exactly.
        per_pass = num_examples / Fraction(batch_size)
        result.append(-(-count // math.floor(per_pass)) + (not pass_begins))
        # Known for certain only where batches divide the data.
        pass_begins = pass_begins and per_pass.denominator == 1 and count % per_pass == 0
    return result
