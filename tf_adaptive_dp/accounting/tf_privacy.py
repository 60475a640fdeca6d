"""TF Privacy's own statement about a run, which our privacy statement quotes if it agrees."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.releases import BatchChecks, Segment
from tf_adaptive_dp.wording import format_epsilon, paragraph


def tf_privacy_paragraph(
    ledger: Any,
    spent: float,
    with_checks: Sequence[tuple[Segment, BatchChecks]],
    num_examples: int,
    delta: float,
    accountant: str,
    max_examples_per_user: int | None,
) -> str:
    """TF Privacy's statement about a run.

    It is empty where TF Privacy is not installed, and for runs for which it would state another ε:
    those of several segments, with repeated batches, or with batches that were larger than
    declared.

    Args:
      ledger: a ledger about examples, with independent noise and no other events.
      spent: its ε, which TF Privacy has to agree with.
      with_checks: its segments, with what is known about their batches.
      num_examples: number of examples in the training set.
      delta: δ.
      accountant: the accountant that computed ε.
      max_examples_per_user: upper bound on the number of examples from one person, or `None`.
    """
    if len(with_checks) > 1 or any(known.repeated or known.declared for _, known in with_checks):
        return ""
    plain = composition.epsilon_spent(ledger, num_examples, delta, accountant=accountant)
    if format_epsilon(plain) != format_epsilon(spent):
        return ""
    return _statement(with_checks[0][0], num_examples, delta, accountant, max_examples_per_user)


def _statement(
    segment: Segment,
    num_examples: int,
    delta: float,
    accountant: str,
    max_examples_per_user: int | None,
) -> str:
    if importlib.util.find_spec("tensorflow_privacy") is None:
        return ""  # it repeats what the other paragraphs say
    # Imported here because it takes seconds.
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
        # dp_accounting fails on rounding errors at very large noise, which `accounting` avoids.
        return paragraph(f"TF Privacy cannot produce a statement for this run: {error}")
    return f"TF Privacy's statement for the same run:\n\n{textwrap.indent(text, '  ')}"


def _num_epochs(count: int, batch_size: float, num_examples: int) -> float:
    """The shortest decimal number of epochs that TF Privacy converts to `count` releases.

    TF Privacy computes ceil(num_epochs / sampling_probability), which rounding errors easily make
    too large by one.
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
