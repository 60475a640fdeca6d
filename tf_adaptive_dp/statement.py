"""The privacy statement: what may be claimed of a training run, in words fit for a model card."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.composition import (
    MIN_NOISE_MULTIPLIER,
    epsilon_without_amplification,
)
from tf_adaptive_dp.accounting.events import is_unprotected, unprotected
from tf_adaptive_dp.accounting.ledger import Checks, Segment
from tf_adaptive_dp.sampling import spending
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling


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


__all__ = ["privacy_statement"]

_PROTECTED = """\
Protected: every noisy gradient that was released, hence the weights after every step, all
checkpoints, and whatever is computed from these without looking at the training data again. What is
counted is what this ledger holds: not what another optimizer released of the data, if it trained
the same weights before."""

_NOT_PROTECTED = """\
Not protected: loss and metrics that were printed for training data, gradient norms and other
statistics of unprotected gradients, the choice of hyperparameters if they were tuned on the private
data, and the number of examples, which counts as public."""


def privacy_statement(
    ledger: Any,
    num_examples: int,
    delta: float,
    *,
    sampling: Sampling | str = "shuffled",
    accountant: str = "rdp",
    max_examples_per_user: int | None = None,
) -> str:
    """The privacy of a training run, as a text to publish with the model.

    Guarantee: the numbers are `sampling.epsilon_spent` and, for shuffled batches,
    `epsilon_without_amplification`, rounded up. The text names the unit (one example), the
    adjacency (add or remove one; replace one for subsets of fixed size), the sampling, what is
    protected and what is not, and of an optimizer which side information it used and where that
    came from. A sampling object is compared with the ledger, a label is believed. "Proven" is said
    if the ledger checked for each release that its batch was a draw of its own; see `Checks`.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of examples in the training set, a public constant.
      delta: δ, in (0, 1); should be well below 1 / `num_examples`.
      sampling: how batches were really drawn: a `PoissonSampling`, `FixedSizeSampling` or
        `ShuffledEpochs`, or for batches of your own a label: `"poisson"` (every example
        independently, none truncated), `"fixed"` (subsets of fixed size), or `"shuffled"`, which is
        what `dataset.shuffle(...).batch(...)` and `fit(x, y)` do.
      accountant: `"rdp"` or `"pld"`, see `accounting.epsilon`.
      max_examples_per_user: most examples that come from one person, if that is bounded.

    Returns:
      Paragraphs of at most 80 columns. A run of one segment and nothing else ends with TF Privacy's
      own statement.

    Raises:
      ValueError: if `sampling` is unknown or contradicts the ledger, and with TypeError and
        dp_accounting.UnsupportedEventError as `accounting.epsilon_spent`.

    Example:
      >>> from types import SimpleNamespace
      >>> from tf_adaptive_dp.statement import privacy_statement
      >>> ledger = SimpleNamespace(segments=[(2.0, 200.0, 6_000)], other_events=())
      >>> ledger.checks = [(6_000, 0)]  # checked and repeated, as an optimizer's ledger knows it
      >>> text = privacy_statement(ledger, 60_000, 1e-5, sampling="poisson")
      >>> print("".join(text.splitlines(keepends=True)[:4]))
      Differential privacy with epsilon = 0.5384 and delta = 1e-05 (RDP accounting,
      rounded up). Unit: one example. Adjacency: data sets that differ by adding or
      removing one example. The batches were drawn by Poisson sampling, and for that
      this epsilon is a proven bound.
      <BLANKLINE>
    """
    if max_examples_per_user is not None:
        checks.integer("max_examples_per_user", max_examples_per_user, 1)
    spent = spending.epsilon_spent(sampling, ledger, num_examples, delta, accountant=accountant)
    segments, other_events = composition.read_ledger(ledger, num_examples)
    if not segments and not other_events:
        return filled(
            "Nothing was released: the ledger is empty, epsilon = 0. That says nothing of weights "
            "that were trained by other means."
        )
    with_checks = composition.checks_of(ledger, num_examples)
    released = list_of_releases(segments, other_events, num_examples)
    released += _repetitions(with_checks, num_examples, sampling)
    information = of_side_information(getattr(ledger, "side_information", None))
    if math.isinf(spent):
        parts = [why_not_private(segments, other_events, sampling), released, information]
        return "\n".join(part for part in parts if part)
    unamplified = epsilon_without_amplification(ledger, num_examples, delta, accountant=accountant)
    tf_privacy = ""
    plain = composition.epsilon_spent(ledger, num_examples, delta, accountant=accountant)
    as_declared = not any(known.repeated or known.declared for _, known in with_checks)
    alone = len(segments) == 1 and not other_events
    if alone and as_declared and up(spent) == up(plain):
        # Of anything else TF Privacy's statement would be a smaller epsilon than the true one.
        tf_privacy = _tf_privacy_statement(
            segments[0], num_examples, delta, accountant, max_examples_per_user
        )
    paragraphs = [
        claim(
            *(spent, unamplified, delta, accountant, sampling, num_examples),
            unchecked=_unchecked(with_checks, num_examples),
        ),
        warning_of_delta(delta, num_examples),
        released,
        information,
        filled(_PROTECTED),
        filled(_NOT_PROTECTED),
        _of_one_person(max_examples_per_user),
        tf_privacy,
    ]
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def claim(
    spent: float,
    unamplified: float,
    delta: float,
    accountant: str,
    sampling: Sampling | str,
    num_examples: int,
    unit: Unit = EXAMPLE,
    unchecked: int = 0,
) -> str:
    """The first paragraph: ε, δ, unit, adjacency and sampling.

    Args:
      spent: ε of the sampling.
      unamplified: ε without amplification by sampling, for shuffled batches.
      delta: δ.
      accountant: which made them.
      sampling: `"poisson"`, `"fixed"` or `"shuffled"`, or such a sampling.
      num_examples: how many units there are.
      unit: what the text calls the unit.
      unchecked: of how many releases it is not known that they had a draw of their own.
    """
    one = unit.one
    whose = f"Unit: one {one}. Adjacency: data sets that differ by adding or removing one {one}."
    how = f"({accountant.upper()} accounting, rounded up)"
    label = spending.label_of(sampling)
    if label == "shuffled":
        text = _claim_of_shuffling(spent, unamplified, delta, f"{how}. {whose}", unit)
        return text + of_seed(sampling, unit)
    proven = "for that this epsilon is a proven bound."
    if unchecked:
        proven = (
            f"if so, this epsilon is a bound. For {unchecked} of the {unit.releases} nothing "
            f"checked that the {unit.batch} was a draw of its own."
        )
    drawn = f"by Poisson sampling, and {proven}"
    if label == "fixed":
        whose = f"Unit: one {one}. Adjacency: data sets in which one {one} replaces another."
        drawn = (
            f"as random subsets of a fixed size, independent of each other, and {proven} It is not "
            f"to be compared with epsilons for adding or removing {unit.a}."
        )
    elif isinstance(sampling, PoissonSampling):
        drawn += (
            f" Every {one} joined each {unit.batch} with probability "
            f"{sampling.sampling_probability:g}."
        )
        if sampling.max_batch_size <= num_examples:
            drawn += (
                f" Of more than {sampling.max_batch_size} as many were kept at random; what that "
                "may reveal is part of delta."
            )
    return filled(
        f"Differential privacy with epsilon = {up(spent)} and delta = {delta:g} {how}. {whose} The "
        f"{unit.batches} {'are said to be' if unchecked else 'were'} drawn {drawn}"
    ) + of_seed(sampling, unit)


def _claim_of_shuffling(
    spent: float, unamplified: float, delta: float, how_and_unit: str, unit: Unit
) -> str:
    return (
        filled(
            f"Differential privacy at delta = {delta:g} {how_and_unit} The {unit.batches} came "
            "from shuffling the data, not from Poisson sampling, so there are two epsilons:"
        )
        + item(
            f"epsilon = {up(spent)} is that of Poisson sampling with the same {unit.batch} size: "
            "an approximation to what shuffling gives, not a proven bound."
        )
        + item(
            f"epsilon = {up(unamplified)} is without amplification by sampling: a bound for any "
            f"order of the data, if each {unit.one} is in one {unit.batch} per pass over the data "
            f"at most, each pass ended before the next one began, and the other {unit.batches} do "
            "not depend on it. It is none if passes were cut short."
        )
    )


def list_of_releases(
    segments: Sequence[Segment],
    events: Sequence[dp_accounting.DpEvent],
    num_examples: int,
    unit: Unit = EXAMPLE,
) -> str:
    """What was released, as a list.

    Args:
      segments: of the ledger.
      events: what else was spent.
      num_examples: number of units in all.
      unit: what the text calls the unit.
    """
    lines = [filled("Released:")]
    for noise_multiplier, batch_size, count in segments:
        lines.append(
            item(
                f"{count} {unit.releases} with noise multiplier {noise_multiplier:g} and expected "
                f"{unit.batch} size {batch_size:g} of {num_examples} {unit.one}s"
            )
        )
    lines.extend(item(f"besides the {unit.others}, and counted in: {event}") for event in events)
    return "".join(lines)


def _unchecked(with_checks: Sequence[tuple[Segment, Checks]], num_examples: int) -> int:
    """How many releases may have had a batch of an earlier one, where that matters."""
    sampled = [(s, known) for s, known in with_checks if s.batch_size < num_examples]
    return sum(max(s.num_releases - known.checked, 0) for s, known in sampled)


def _repetitions(
    with_checks: Sequence[tuple[Segment, Checks]],
    num_examples: int,
    sampling: Sampling | str,
) -> str:
    passes = spending.label_of(sampling) == "shuffled"
    again = sum(composition.repeated(*of, num_examples, passes=passes) for of in with_checks)
    if not again:
        return ""
    return item(
        f"of these, {again} on batches that had been released before, which count without "
        "amplification by sampling"
    )


def warning_of_delta(delta: float, num_examples: int, unit: Unit = EXAMPLE) -> str:
    """A warning, or the empty text if δ is small enough for so many units."""
    if delta * num_examples <= 1 + 1e-9:  # 1 / n itself is customary
        return ""
    return filled(
        f"Warning: delta is above 1 / number of {unit.one}s. So large a delta would allow to "
        f"publish some {unit.one} as it is."
    )


def _of_one_person(max_examples: int | None) -> str:
    if max_examples == 1:
        return filled("Each person has one example at most, so the unit is also one person.")
    number = "any number of" if max_examples is None else f"up to {max_examples}"
    return filled(
        f"A person may have {number} examples, and is protected less than one example is: the "
        "epsilon above is not one for persons."
    )


def _tf_privacy_statement(
    segment: Segment,
    num_examples: int,
    delta: float,
    accountant: str,
    max_examples_per_user: int | None,
) -> str:
    # Here, because it takes seconds to import.
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib as lib

    noise_multiplier, batch_size, count = segment
    try:
        text = lib.compute_dp_sgd_privacy_statement(
            number_of_examples=num_examples,
            batch_size=int(batch_size) if batch_size.is_integer() else batch_size,
            num_epochs=_num_epochs(count, batch_size, num_examples),
            noise_multiplier=noise_multiplier,
            delta=delta,
            used_microbatching=False,  # the ledger's noise multiplier is the effective one
            max_examples_per_user=max_examples_per_user,
            accountant_type=lib.AccountantType[accountant.upper()],
        )
    except (ArithmeticError, ValueError, lib.UserLevelDPComputationError) as error:
        # With very much noise dp_accounting meets rounding errors that `accounting` deals with.
        return filled(f"TF Privacy has no statement of this run: {error}")
    return f"TF Privacy's statement of the same run:\n\n{textwrap.indent(text, '  ')}"


def _num_epochs(count: int, batch_size: float, num_examples: int) -> float:
    """The shortest number of epochs of which TF Privacy makes `count` releases.

    It takes ceil(num_epochs / sampling_probability), where rounding easily makes one too many.
    """
    exact = count * Fraction(batch_size) / num_examples
    for digits in range(16):
        unit = Fraction(1, 10**digits)
        below = exact // unit * unit
        for epochs in (float(below), float(below - unit)):
            same_count = math.ceil(epochs / (batch_size / num_examples)) == count
            if same_count and math.ceil(epochs) == math.ceil(exact):
                return epochs
    return (count - 0.5) * batch_size / num_examples
