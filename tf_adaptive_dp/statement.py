"""The privacy statement: what can be claimed about a training run, worded for a model card."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, composition
from tf_adaptive_dp.accounting.accountants import is_unprotected, unprotected
from tf_adaptive_dp.accounting.ledger import is_chosen_by_search, ledger_of
from tf_adaptive_dp.accounting.releases import BatchChecks, Segment
from tf_adaptive_dp.accounting.tf_privacy import tf_privacy_paragraph
from tf_adaptive_dp.sampling import draws, sampling_epsilon
from tf_adaptive_dp.sampling.cyclic import CyclicPoissonSampling
from tf_adaptive_dp.sampling.draws import FullBatches, Sampling
from tf_adaptive_dp.sampling.fixed_order import FixedOrder
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.side_information.provenance import uncounted_events
from tf_adaptive_dp.wording import (
    counted,
    format_delta,
    format_epsilon,
    joined,
    list_item,
    paragraph,
)

__all__ = ["privacy_statement"]

_PROTECTED = """\
Protected: every noisy gradient that was released, and therefore the model weights after every step,
all checkpoints, and anything computed from them without further access to the training data. This
statement covers the releases recorded in this ledger. It does not cover what another optimizer
released about the data, for example in earlier training of the same weights."""

_NOT_PROTECTED = """\
Not protected: losses and metrics reported on training data; gradient norms and other statistics of
gradients without noise; statistics and vocabularies computed from the data beforehand without
noise, such as by Keras's `adapt`; the choice of hyperparameters, if they were tuned on the private
data; and the number of {units}, which is treated as public."""

NOTHING_RELEASED = """\
Nothing was released: the ledger is empty, so epsilon = 0. This does not cover weights that were
trained by other means."""

_CHOSEN_BY_SEARCH = """\
NOT THE WHOLE COST: this model was chosen by a search of its hyperparameters, which used the data
more often than this ledger shows. The epsilon and delta below are those of this training alone.
Publish the statement of the search, `HonestTuner.privacy_statement()`. Whatever the model was
trained further adds to the epsilon and delta of the search."""

# Noise that ends costs 3e-9 of δ for 10⁸ weights and 100 releases at σ = 1, see docs/privacy.md.
_SMALL_DELTA = 1e-8
_TO_OTHERS = " only against those who know no seed of the run"


@dataclasses.dataclass(frozen=True)
class Unit:
    """The words that a statement uses for the unit of privacy and the steps of training.

    Attributes:
      one: the unit of privacy.
      a: the unit with its article.
      batch: what is sampled for one release.
      batches: the plural of `batch`.
      release: what one step releases.
      releases: the plural of `release`.
      others: short for `releases`, as in "in addition to the ...".
      whole: what a mechanism with too large a δ may publish.
      largest: the argument that says how large a batch may be.
    """

    one: str = "example"
    a: str = "an example"
    batch: str = "batch"
    batches: str = "batches"
    release: str = "noisy gradient"
    releases: str = "noisy gradients"
    others: str = "gradients"
    whole: str = "whole examples"
    largest: str = "max_batch_size"


EXAMPLE = Unit()
USER = Unit(one="user", a="a user", whole="all data of some users")


def unit_of(sampling: Sampling | str) -> Unit:
    """The words for the unit that a sampling draws."""
    return USER if getattr(sampling, "unit", "example") == "user" else EXAMPLE


class _Drawn(NamedTuple):
    """The words for how batches were drawn.

    Attributes:
      how: completes "the batches were drawn ...".
      verified: completes "the library verified that the batch ...".
      adjacency: completes "data sets ...".
    """

    how: str
    verified: str = "was a fresh draw"
    adjacency: str = "that differ by adding or removing one {one}"


_POISSON = _Drawn("by Poisson sampling")
# By label; the words for Poisson sampling are for all others.
_DRAWN = {
    "cyclic": _Drawn("by cyclic Poisson sampling", "was a fresh draw for its step"),
    "fixed": _Drawn(
        "as independent random subsets of a fixed size",
        adjacency="in which one {one} replaces another",
    ),
    "fixed_order": _Drawn(
        "in one order that every pass over the data repeats",
        "came in its order",
        "in which one {one} is blank or not",
    ),
}


def privacy_statement(
    ledger: Any,
    num_examples: int,
    delta: float,
    *,
    sampling: Sampling | str = "shuffled",
    accountant: str = "rdp",
    max_examples_per_user: int | None = None,
) -> str:
    """Describes the privacy of a training run, in a text to publish with the model.

    Guarantee: the values of epsilon are those of `sampling.epsilon_spent` and, for shuffled
    batches, `accounting.epsilon_without_amplification`, rounded up. The text names the unit (one
    example; one user, if the sampling draws users), the adjacency (add/remove; replace-one for
    fixed-size subsets), the sampling, what is protected and what is not, and the side information
    of the optimizer with its provenance. A sampling object is checked against the ledger; a label
    is taken on trust, and the text says so. It says "proven" only of a sampling object, if the
    ledger verified that the batch of every release was a fresh draw (see `BatchChecks`), and
    neither the noise of the optimizer nor the sampling has a seed. Noise with a seed is called not
    private: anyone who knows the seed can remove it. If a search of hyperparameters chose the model
    (`Ledger.chosen_by_search`), the text claims ε for the training alone, and says that the search
    has cost more.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`. A ledger alone does not know
        whether its optimizer had a seed.
      num_examples: number of examples in the training set, a public constant; of users, if the
        sampling draws users.
      delta: δ, in (0, 1); should be well below 1 / `num_examples`.
      sampling: how the batches were drawn: any `Sampling`, such as a `PoissonSampling` or a
        `FixedOrder`. For batches from elsewhere pass a label: `"poisson"` (each example joins
        independently, without truncation), `"fixed"` (random subsets of a fixed size), or
        `"shuffled"`, which is what `dataset.shuffle(...).batch(...)` and `fit(x, y)` do.
      accountant: `"rdp"` or `"pld"`, see `accounting.epsilon`.
      max_examples_per_user: upper bound on the number of examples from one person, if there is one.
        A statement about users has no such bound.

    Returns:
      Paragraphs of at most 80 columns. If the ledger has one segment and no other events, TF
      Privacy's own statement comes last where TF Privacy is installed.

    Raises:
      ValueError: if `sampling` is unknown or contradicts the ledger, or as for
        `accounting.epsilon_spent`.
      TypeError, dp_accounting.UnsupportedEventError: as for `accounting.epsilon_spent`.

    Example:
      >>> from tf_adaptive_dp.accounting import Releases
      >>> from tf_adaptive_dp.accounting.releases import BatchChecks
      >>> from tf_adaptive_dp.statement import privacy_statement
      >>> ledger = Releases([(2.0, 200.0, 6_000)], checks=[BatchChecks(checked=6_000)])
      >>> text = privacy_statement(ledger, 60_000, 1e-5, sampling="poisson")
      >>> print("".join(text.splitlines(keepends=True)[:6]))
      Differential privacy with epsilon = 0.5384 and delta = 1e-05 (RDP accounting,
      rounded up). Unit: one example. Adjacency: data sets that differ by adding or
      removing one example. The batches are stated to have been drawn by Poisson
      sampling; if so, this epsilon is an upper bound. The library verified that each
      batch was a fresh draw, but not how it was drawn.
      <BLANKLINE>
    """
    delta = checks.probability("delta", delta)
    if isinstance(sampling, Sampling):
        draws.check_num_examples(sampling, num_examples)
    unit = unit_of(sampling)
    _check_max_examples(max_examples_per_user, sampling)
    spent = sampling_epsilon.epsilon_spent(
        sampling, ledger, num_examples, delta, accountant=accountant
    )
    with_checks = composition.checks_of(ledger, num_examples, correlated=True)
    segments, other_events = [s for s, _ in with_checks], ledger_of(ledger).other_events
    chosen = is_chosen_by_search(ledger)
    search = paragraph(_CHOSEN_BY_SEARCH) if chosen else ""
    if not segments and not other_events:
        return joined([search, paragraph(NOTHING_RELEASED)])
    drawn: Sampling | str = sampling
    if isinstance(sampling, Sampling):
        drawn = sampling.as_drawn(ledger)
    released = list_of_releases(segments, other_events, num_examples, unit)
    released += _about_releases(ledger, with_checks, num_examples, sampling, drawn)
    information = side_information_paragraph(
        getattr(ledger, "side_information", None), other_events
    )
    seeded = noise_is_seeded(ledger)
    if math.isinf(spent):
        causes = why_not_private(segments, other_events, drawn, unit)
        return joined([search, causes, _noise_seed_warning(ledger, unit), released, information])
    unamplified, tf_privacy = math.inf, ""
    if composition.noise_of(ledger).is_independent:
        unamplified = composition.epsilon_without_amplification(
            composition.in_units(ledger), num_examples, delta, accountant=accountant
        )
        if not (seeded or chosen or other_events) and unit is EXAMPLE:
            tf_privacy = tf_privacy_paragraph(
                ledger, spent, with_checks, num_examples, delta, accountant, max_examples_per_user
            )
    return joined(
        [
            search,
            _noise_seed_warning(ledger, unit),
            claim(
                spent,
                unamplified,
                delta=delta,
                accountant=accountant,
                sampling=drawn,
                num_examples=num_examples,
                unit=unit,
                num_unchecked=num_unchecked(ledger, num_examples, drawn),
                num_returned=composition.num_returned(with_checks, num_examples),
                seeded_noise=seeded,
                of_training_alone=chosen,
            ),
            delta_warning(delta, num_examples, unit),
            released,
            information,
            paragraph(_PROTECTED),
            paragraph(_NOT_PROTECTED.format(units=f"{unit.one}s")),
            _protection(drawn, max_examples_per_user),
            tf_privacy,
        ]
    )


def _check_max_examples(max_examples_per_user: int | None, sampling: Sampling | str) -> None:
    """Raises for an invalid `max_examples_per_user`, or one in a statement about users."""
    if max_examples_per_user is None:
        return
    max_examples_per_user = checks.integer("max_examples_per_user", max_examples_per_user, 1)
    if unit_of(sampling) is USER:
        raise ValueError(
            "`max_examples_per_user` belongs to a statement about examples. This one is about "
            "users, however many examples they have. Received: max_examples_per_user="
            f"{max_examples_per_user!r}, sampling={sampling!r}"
        )


def claim(
    spent: float,
    unamplified: float,
    *,
    delta: float,
    accountant: str,
    sampling: Sampling | str,
    num_examples: int,
    unit: Unit = EXAMPLE,
    num_unchecked: int = 0,
    num_returned: int = 0,
    seeded_noise: bool = False,
    of_training_alone: bool = False,
) -> str:
    """The first paragraph: ε, δ, unit, adjacency and sampling.

    Args:
      spent: ε for the sampling.
      unamplified: ε without amplification by sampling; read for shuffled batches only.
      delta: δ.
      accountant: the accountant that computed both.
      sampling: any `Sampling`, or a label: `"poisson"`, `"fixed"` or `"shuffled"`.
      num_examples: number of units in the data set.
      unit: the words for the unit.
      num_unchecked: number of releases whose batch was not verified to be a fresh draw.
      num_returned: number of releases on a batch of an earlier epoch; read for shuffled batches.
      seeded_noise: whether the noise can be repeated by whoever knows its seed.
      of_training_alone: whether the model has cost more than this training.
    """
    label = sampling_epsilon.label_of(sampling)
    drawn = _DRAWN.get(label, _POISSON)
    adjacency = drawn.adjacency.format(one=unit.one)
    of_what, bounds = "", ""
    if of_training_alone:
        of_what, bounds = " of this training alone", " for this training alone"
    terms = (
        f"delta = {format_delta(delta)}{of_what} ({accountant.upper()} accounting, rounded up). "
        f"Unit: one {unit.one}. Adjacency: data sets {adjacency}."
    )
    if label == "shuffled":
        is_known = not num_unchecked and not isinstance(sampling, str)
        came = "came" if is_known else "are stated to have come"
        text = _shuffled_claim(spent, unamplified, terms, came, num_returned, unit, bounds)
        return text + seed_warning(sampling, unit)
    text = f"Differential privacy with epsilon = {format_epsilon(spent)} and {terms} "
    to_whom = "" if not seeded_noise and getattr(sampling, "seed", None) is None else _TO_OTHERS
    bounds += to_whom
    on_trust = isinstance(sampling, str)
    text += _how_far_proven(drawn, unit, bounds, num_unchecked, on_trust)
    if label == "fixed":
        text += f" It is not comparable to an epsilon for adding or removing {unit.a}."
    elif isinstance(sampling, (PoissonSampling, CyclicPoissonSampling)):
        text += _independent_draws(sampling, num_examples, unit)
    return paragraph(text) + seed_warning(sampling, unit)


def _how_far_proven(
    drawn: _Drawn, unit: Unit, bounds: str, num_unchecked: int, on_trust: bool
) -> str:
    """Sentences about how the batches were drawn, and whether ε is proven for these draws.

    Args:
      drawn: the words for the sampling.
      unit: the words for the unit.
      bounds: what limits the bound, with a space before it; empty if nothing does.
      num_unchecked: number of releases whose batch was not verified to be a fresh draw.
      on_trust: whether the caller only named the sampling.
    """
    if not num_unchecked and not on_trust:
        text = f"The {unit.batches} were drawn {drawn.how}"
        if bounds:
            return f"{text}. This epsilon is an upper bound{bounds}."
        return f"{text}, for which this epsilon is a proven upper bound."
    text = (
        f"The {unit.batches} are stated to have been drawn {drawn.how}; if so, this epsilon is an "
        f"upper bound{bounds}. "
    )
    if num_unchecked:
        return text + (
            f"The library did not verify that the {unit.batch} {drawn.verified} for "
            f"{num_unchecked} of the {unit.releases}."
        )
    return text + (
        f"The library verified that each {unit.batch} {drawn.verified}, but not how it was drawn."
    )


def _independent_draws(
    sampling: PoissonSampling | CyclicPoissonSampling, num_examples: int, unit: Unit
) -> str:
    """Sentences, with a space before them, about who joined which batches."""
    text, which = "", f"each {unit.batch}"
    if isinstance(sampling, CyclicPoissonSampling):
        text = f" Each {unit.one} was put into one of {sampling.num_groups} groups at random."
        which = f"every {unit.batch} of its group, one in {sampling.num_groups},"
    probability, most = sampling.sampling_probability, sampling.max_batch_size
    text += f" Each {unit.one} joined {which} independently with probability {probability:g}."
    if most <= num_examples:
        text += (
            f" Draws of more than {counted(most, unit.one)} were subsampled uniformly to {most}; "
            "delta accounts for this."
        )
    return text


def _shuffled_claim(
    spent: float,
    unamplified: float,
    terms: str,
    came: str,
    num_returned: int,
    unit: Unit,
    bounds: str,
) -> str:
    value = f"For shuffled {unit.batches} it is a customary approximation, not a proven bound."
    if num_returned:
        value = (
            f"It is not even an approximation here: {num_returned} of the {unit.releases} were on "
            f"{unit.batches} of an earlier epoch, so the data were not shuffled for each epoch."
        )
    return (
        paragraph(
            f"Differential privacy at {terms} The {unit.batches} {came} from shuffling the data, "
            "not from Poisson sampling, so this statement gives two values of epsilon:"
        )
        + list_item(
            f"epsilon = {format_epsilon(spent)} holds for Poisson sampling with the same expected "
            f"{unit.batch} size. {value}"
        )
        + list_item(
            f"epsilon = {format_epsilon(unamplified)} assumes no amplification by sampling. It is "
            f"an upper bound{bounds} for any order of the data if each {unit.one} was in at most "
            f"one {unit.batch} per epoch (pass over the data), each epoch ended before the next "
            f"one began, and the other {unit.batches} did not depend on that {unit.one}. The bound "
            "does not hold if an epoch was cut short."
        )
    )


def seed_warning(sampling: Any, unit: Unit = EXAMPLE) -> str:
    """A paragraph that warns of predictable batches; empty if nobody can predict them."""
    seed = getattr(sampling, "seed", None)
    if seed is None:
        return ""
    return "\n" + paragraph(
        f"NOT AMPLIFIED: the {unit.batches} were drawn with seed {seed}, which is for tests only. "
        f"Anyone who knows the seed can reproduce the {unit.batches}, so epsilon does not hold."
    )


def noise_is_seeded(optimizer: Any) -> bool:
    """Whether whoever knows a seed can compute the noise of an optimizer.

    Args:
      optimizer: an optimizer. A ledger does not know it, so for a ledger the answer is no.
    """
    return getattr(optimizer, "seed", None) is not None


def _noise_seed_warning(optimizer: Any, unit: Unit) -> str:
    """A paragraph that warns of predictable noise; empty if the noise is secret.

    It does not name the seed: publishing it would end what protection there is.
    """
    if not noise_is_seeded(optimizer):
        return ""
    return paragraph(
        "NOT PRIVATE unless the seed of the noise is secret: the noise was drawn with a seed, "
        "which is for tests only. Anyone who knows the seed can compute the noise and remove it "
        f"from the {unit.releases}, so epsilon protects nobody from them. Saved models and "
        "configurations of the optimizer hold the seed. To protect the data, train without `seed`."
    )


def is_large_delta(delta: float, num_examples: int) -> bool:
    """Whether δ is above 1 / `num_examples`, which itself is customary."""
    return delta * num_examples > 1 + 1e-9


class LargeDeltaWarning(UserWarning):
    """Says that δ is so large that it would permit publishing whole examples."""


def warn_of_large_delta(delta: float, num_examples: int, unit: Unit, stacklevel: int) -> None:
    """Warns, before training, of a large δ that `delta_warning` would warn of in the statement.

    Args:
      delta: δ.
      num_examples: number of units in the data set.
      unit: the words for the unit.
      stacklevel: see `warnings.warn`.
    """
    if is_large_delta(delta, num_examples):
        warnings.warn(
            f"`delta` should be well below 1 / num_{unit.one}s. A delta this large would permit "
            f"publishing {unit.whole}. Received: delta={delta!r}, num_{unit.one}s={num_examples!r}",
            LargeDeltaWarning,
            stacklevel=stacklevel + 1,
        )


def delta_warning(
    delta: float, num_examples: int, unit: Unit = EXAMPLE, may_be_secure: bool = True
) -> str:
    """A paragraph that warns of δ above 1 / `num_examples`, or of a very small one; else empty.

    Args:
      delta: δ.
      num_examples: number of units in the data set.
      unit: the words for the unit.
      may_be_secure: whether the noise may be that of `secure_noise=True`.
    """
    if 0 < delta < _SMALL_DELTA:
        noise = "the noise"
        if may_be_secure:
            noise = "unless the noise is secure (`secure_noise=True`), it"
        return paragraph(
            f"Warning: {noise} ends at 8.24 standard deviations. For large models and many "
            "releases this can cost more than a delta as small as this one, and epsilon does not "
            "include it (docs/privacy.md, Secure noise)."
        )
    if not is_large_delta(delta, num_examples):
        return ""
    return paragraph(
        f"Warning: delta exceeds 1 / (number of {unit.one}s). A delta this large would permit "
        f"publishing {unit.whole}."
    )


def list_of_releases(
    segments: Sequence[Segment],
    events: Sequence[dp_accounting.DpEvent],
    num_examples: int,
    unit: Unit = EXAMPLE,
) -> str:
    """Lists what was released.

    Args:
      segments: the segments of the ledger.
      events: its other events.
      num_examples: number of units in the data set.
      unit: the words for the unit.
    """
    lines = [paragraph("Released:")]
    for noise_multiplier, batch_size, count in segments:
        lines.append(
            list_item(
                f"{counted(count, unit.release, unit.releases)} with noise multiplier "
                f"{noise_multiplier:g} and expected {unit.batch} size {batch_size:g} of "
                f"{counted(num_examples, unit.one)}"
            )
        )
    lines.extend(
        list_item(f"in addition to the {unit.others}, and included in epsilon: {_in_words(event)}")
        for event in events
    )
    return "".join(lines)


def _in_words(event: dp_accounting.DpEvent) -> str:
    if type(event) is dp_accounting.GaussianDpEvent:
        return (
            "one release of the Gaussian mechanism with noise multiplier "
            f"{event.noise_multiplier:g} (for example the means and deviations of a "
            "`PrivateNormalization`, or the gradients of an earlier optimizer)"
        )
    return str(event)


def _about_releases(
    ledger: Any,
    with_checks: Sequence[tuple[Segment, BatchChecks]],
    num_examples: int,
    sampling: Sampling | str,
    drawn: Sampling | str,
) -> str:
    """Says what their noise and their batches have in common; empty if nothing."""
    noise = composition.noise_of(ledger)
    about = ""
    if not noise.is_independent:
        about = list_item(f"the noise of each cancels {noise.taken_back}: {noise!r}")
    about += _repetitions(with_checks, num_examples, sampling)
    return about + _less_room(drawn, sampling, unit_of(sampling))


def _repetitions(
    with_checks: Sequence[tuple[Segment, BatchChecks]], num_examples: int, sampling: Sampling | str
) -> str:
    """Says how many releases count as repetitions of a batch; empty if none do."""
    again = sampling_epsilon.num_repeated(sampling, with_checks, num_examples)
    if not again:
        return ""
    return list_item(
        f"of these, {again} on batches that had been released before; they are counted without "
        "amplification by sampling"
    )


def _less_room(drawn: Any, sampling: Any, unit: Unit) -> str:
    """Says that batches had less room than those of the sampling; empty if they had not."""
    if drawn is sampling:
        return ""
    return list_item(
        f"the first {unit.batches} had room for {counted(drawn.max_batch_size, unit.one)}, not for "
        f"{sampling.max_batch_size} like those of the sampling; epsilon is computed as if all had "
        "the smaller room"
    )


def num_unchecked(ledger: Any, num_examples: int, sampling: Sampling | str) -> int:
    """Counts releases that claim amplification but whose batch may not be a fresh draw.

    Batches without padding do not show what drew them. So no release counts as checked if the
    sampling object has made no data set in this process. Batches with padding do not show from
    how many examples they were drawn. So none counts as checked if this process has drawn such
    batches with another sampling, and none with this one. A `FixedOrder` has another order in each
    process, so with it only releases that this process saw count as checked.

    Args:
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of units in the training set, a public constant.
      sampling: how the batches were drawn, as for `claim`.
    """
    with_checks = composition.checks_of(ledger, num_examples, correlated=True)
    released = sum(segment.num_releases for segment, _ in with_checks)
    if isinstance(sampling, FullBatches) and not draws.has_drawn(sampling):
        return released
    if isinstance(sampling, Sampling) and draws.drawn_in_its_place(sampling, num_examples):
        return released
    sampled = [(s, known) for s, known in with_checks if s.batch_size < num_examples]
    unchecked = sum(max(s.num_releases - known.checked, 0) for s, known in sampled)
    if isinstance(sampling, FixedOrder) and sampled:
        unchecked = max(unchecked, released - sampling.num_in_order(ledger))
    return unchecked


def side_information_paragraph(information: Any, counted: Sequence[dp_accounting.DpEvent]) -> str:
    """Names the side information and its provenance.

    Args:
      information: a `SideInformation`, or `None` if there was none.
      counted: the `other_events` of the ledger, which epsilon includes.
    """
    if information is None:
        return ""
    provenance = information.provenance
    if provenance == "public":
        origin = "public. The data it was computed from are not protected."
    elif provenance == "released":
        origin = "computed from the gradients that were released, which epsilon includes."
    elif is_unprotected(provenance):
        origin = f"NOT PRIVATE: it was released by {provenance}, which provides no protection."
    elif uncounted_events(information, counted):
        origin = f"released by {provenance}, which epsilon does NOT include."
    else:
        origin = f"released by {provenance}; included in epsilon."
    return paragraph(f"Side information: {information.description}, {origin}")


def why_not_private(
    segments: Sequence[Segment],
    events: Sequence[dp_accounting.DpEvent],
    sampling: Any = None,
    unit: Unit = EXAMPLE,
) -> str:
    """Explains why ε is infinite.

    Args:
      segments: the segments of the ledger.
      events: its other events.
      sampling: how the batches were drawn, if known.
      unit: the words for the unit.
    """
    causes = [f"the release {event} provides no protection" for event in unprotected(events)]
    # Replace-one adjacency halves the noise multiplier, so it reaches the minimum at twice the
    # value.
    noiseless = any(s.noise_multiplier < 2 * accountants.MIN_NOISE_MULTIPLIER for s in segments)
    most = getattr(sampling, "max_batch_size", None)
    if noiseless or (not causes and most is None):
        causes.insert(0, "something was released without noise")
    elif not causes and most is not None:
        causes = [
            f"at so large an epsilon, truncating {unit.batches} to {counted(most, unit.one)} costs "
            f"more than delta; draw again with a larger `{unit.largest}`"
        ]
    return paragraph(f"NOT PRIVATE: epsilon is infinite because {' and '.join(causes)}.")


def _protection(sampling: Sampling | str, max_examples_per_user: int | None) -> str:
    """A paragraph about what epsilon means for a person with several examples."""
    if isinstance(sampling, Sampling) and sampling.examples_per_user:
        return _protection_of_users(sampling.examples_per_user)
    return _protection_of_persons(max_examples_per_user)


def _protection_of_users(examples_per_user: int) -> str:
    return paragraph(
        "A user is everyone and everything behind one user id. This epsilon is per user: it covers "
        "all examples of one person together, if all of them have the same id and no example is "
        f"also about somebody else. At most {counted(examples_per_user, 'example')} of a user were "
        "in a batch, and their gradients were clipped as one."
    )


def _protection_of_persons(max_examples: int | None) -> str:
    if max_examples == 1:
        return paragraph(
            "Each person contributed at most one example, so this epsilon is also per person."
        )
    bound = "" if max_examples is None else f" (up to {max_examples})"
    return paragraph(
        f"This epsilon is per example. A person who contributed several examples{bound} has weaker "
        "protection."
    )
