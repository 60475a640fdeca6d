"""Sentences of the privacy statement, and how they are set."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import dp_accounting

from tf_adaptive_dp.privacy.accounting import MIN_NOISE_MULTIPLIER
from tf_adaptive_dp.privacy.events import is_unprotected, unprotected
from tf_adaptive_dp.privacy.ledger import Segment


@dataclasses.dataclass(frozen=True)
class Unit:
    """What the unit of privacy and the steps of training are called in a statement.

    Attributes:
      one: the unit.
      a: the unit with its article.
      batch: what is drawn for one release.
      batches: several of them.
      releases: what is released, in the plural.
      others: what `releases` are called in "besides the ...".
    """

    one: str = "example"
    a: str = "an example"
    batch: str = "batch"
    batches: str = "batches"
    releases: str = "noisy gradients"
    others: str = "gradients"


EXAMPLE = Unit()


def of_side_information(information: Any) -> str:
    """Which side information was used, and where it came from.

    Args:
      information: a `SideInformation`, or `None` if there was none.
    """
    if information is None:
        return ""
    start = f"Side information: {information.description}, "
    provenance = information.provenance
    if provenance == "public":
        end = "public. The data that it was made from are not protected."
    elif is_unprotected(provenance):
        end = f"NOT PRIVATE: it was released by {provenance}, which protects nothing."
    else:
        end = f"released by {provenance}; included in epsilon."
    return filled(start + end)


def of_seed(sampling: Any, unit: Unit = EXAMPLE) -> str:
    """A paragraph that warns of batches which can be foreseen, or the empty text."""
    seed = getattr(sampling, "seed", None)
    if seed is None:
        return ""
    return "\n" + filled(
        f"NOT AMPLIFIED: the {unit.batches} were drawn with the seed {seed}, which is for tests. "
        f"Who knows it knows the {unit.batches}, and epsilon does not hold."
    )


def why_not_private(
    segments: Sequence[Segment],
    events: Sequence[dp_accounting.DpEvent],
    sampling: Any = None,
    unit: Unit = EXAMPLE,
) -> str:
    """Why ε is infinite.

    Args:
      segments: what the ledger holds.
      events: what it holds besides.
      sampling: what drew the batches, if it is known.
      unit: what the text calls them.
    """
    found = unprotected(events)
    causes = [f"the release {event} protects nothing" for event in found]
    too_little = any(segment.noise_multiplier < 2 * MIN_NOISE_MULTIPLIER for segment in segments)
    most = getattr(sampling, "max_batch_size", None)
    if too_little or (not causes and most is None):
        causes.insert(0, "something was released without noise")
    elif not causes:
        causes = [
            f"at so large an epsilon what {unit.batches} cut to {most} may reveal is more than "
            "delta (a larger `max_batch_size` helps)"
        ]
    return filled(f"NOT PRIVATE: epsilon is infinite, because {' and '.join(causes)}.")


def up(epsilon: float) -> str:
    """ε with four digits, rounded up."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"


def filled(text: str) -> str:
    """A paragraph of at most 80 columns."""
    return textwrap.fill(" ".join(text.split()), width=80) + "\n"


def item(text: str) -> str:
    """An entry of a list."""
    return textwrap.fill(text, width=80, initial_indent="  - ", subsequent_indent="    ") + "\n"
