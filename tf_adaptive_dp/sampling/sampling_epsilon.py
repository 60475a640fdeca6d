"""ε of a ledger, and the releases that a budget leaves, by the sampling of the batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment
from tf_adaptive_dp.sampling.draws import (
    Sampling,
    check_unit,
    examples_per_user_of,
    refuse_other_sizes,
)
from tf_adaptive_dp.sampling.fixed_size import fixed_size_epsilon
from tf_adaptive_dp.sampling.poisson import refuse_microbatches

LABELS = ("shuffled", "poisson", "fixed")


def epsilon_spent(
    sampling: Sampling | str,
    ledger: Any,
    num_examples: int,
    delta: float,
    *,
    accountant: str = "rdp",
) -> float:
    """ε of a ledger for the sampling that was used.

    Guarantee: that of the sampling's class. A label, one of `LABELS`, is taken on trust. The only
    checks are that the unit is an example, that `"poisson"` has no microbatches, and that `"fixed"`
    has batches of the size that was declared; `"poisson"` means that no batch was truncated.

    Args:
      sampling: how the batches were drawn: a sampling, or one of `LABELS`.
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      num_examples: number of units in the training set, a public constant.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`.

    Returns:
      ε ≥ 0, `math.inf` if something was released without noise.

    Raises:
      TypeError, ValueError: as for `accounting.epsilon_spent`, and if `sampling` is unknown or the
        ledger or the optimizer contradicts it.
    """
    check_unit(check_sampling(sampling), ledger)
    _check_label(sampling, ledger)
    if isinstance(sampling, Sampling):
        return sampling.epsilon_spent(ledger, num_examples, delta, accountant=accountant)
    if sampling == "fixed":
        return fixed_size_epsilon(ledger, num_examples, delta, accountant)
    return composition.epsilon_spent(
        ledger, num_examples, delta, accountant=accountant, in_epochs=sampling == "shuffled"
    )


def releases_left(
    sampling: Sampling | str,
    ledger: Any,
    noise_multiplier: float,
    batch_size: float,
    num_examples: int,
    epsilon: float,
    delta: float,
    *,
    accountant: str = "rdp",
    at_most: int = composition.MAX_RELEASES,
    again: bool = False,
) -> int:
    """The number of further releases that a budget allows; `accounting.releases_left` by sampling.

    Guarantee: with this number ε stays within the budget, in the sense of `epsilon_spent`; with one
    more it does not, unless the number is `at_most`. The `steps` of a sampling do not limit it.

    Args:
      sampling: how the batches are drawn: a sampling, or one of `LABELS`.
      ledger: a ledger, or an optimizer with the attribute `ledger`.
      noise_multiplier: noise multiplier of the future releases.
      batch_size: expected batch size of the future releases.
      num_examples: number of units in the training set, a public constant.
      epsilon: the total budget, including what was already spent.
      delta: δ, in (0, 1).
      accountant: `"rdp"` or `"pld"`.
      at_most: the largest number to consider.
      again: whether the further releases are on batches that were released before.

    Returns:
      The number, from 0 (none fits) to `at_most`.

    Raises:
      TypeError, ValueError: as for `epsilon_spent`, and if the sampling contradicts the future
        releases.
    """
    check_unit(check_sampling(sampling), ledger)
    if isinstance(sampling, Sampling):
        one = Releases(
            [(noise_multiplier, batch_size, 1)],
            noise=composition.noise_of(ledger),
            examples_per_user=examples_per_user_of(ledger),
        )
        sampling.check_ledger(ledger, num_examples)
        sampling.check_ledger(one, num_examples)
    _check_label(sampling, ledger)
    if again:
        batch_size = float(num_examples)  # as repetitions count
    if label_of(sampling) == "shuffled" or sampling == "poisson":
        return composition.releases_left(
            ledger,
            noise_multiplier,
            batch_size,
            num_examples=num_examples,
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            in_epochs=sampling != "poisson",
            at_most=at_most,
        )
    if isinstance(sampling, Sampling):
        account = sampling.as_drawn(ledger).account
    else:
        account = fixed_size_epsilon
    noise = composition.noise_of(ledger)
    if isinstance(sampling, Sampling) and sampling.keeps_distance:  # it knows repetitions
        segments, events = composition.read_ledger(ledger, num_examples, correlated=True)
    else:
        segments, events = composition.counted_ledger(ledger, num_examples, in_epochs=False)

    def epsilon_of(then: Sequence[Segment], method: str) -> float:
        return account(Releases(then, events, noise=noise), num_examples, delta, method)

    next_one = Segment(noise_multiplier, batch_size, 1)
    return composition.releases_within(epsilon, epsilon_of, segments, next_one, accountant, at_most)


def num_repeated(
    sampling: Sampling | str, known: Iterable[tuple[Segment, BatchChecks]], num_examples: int
) -> int:
    """How many releases count as repetitions of a batch.

    Args:
      sampling: how the batches were drawn: a sampling, or one of `LABELS`.
      known: the segments of a ledger, each with what is known about its batches.
      num_examples: number of units in the training set.
    """
    if isinstance(sampling, Sampling) and sampling.keeps_distance:
        return 0  # it has an ε for repetitions in its order, or none
    in_epochs = label_of(sampling) == "shuffled"
    return sum(composition.repeated(*of, num_examples, in_epochs=in_epochs) for of in known)


def check_sampling(sampling: Sampling | str) -> Sampling | str:
    """Returns `sampling` if it is a sampling or a label; raises ValueError otherwise."""
    if isinstance(sampling, Sampling):
        return sampling
    return checks.choice("sampling", sampling, LABELS)


def _check_label(sampling: Sampling | str, ledger: Any) -> None:
    """Raises ValueError if a ledger or an optimizer contradicts a label."""
    if sampling == "poisson":
        refuse_microbatches(ledger)
    if sampling == "fixed":
        refuse_other_sizes(ledger)


def label_of(sampling: Sampling | str) -> str:
    """The label of a sampling, or the label itself."""
    return sampling.label if isinstance(sampling, Sampling) else sampling
