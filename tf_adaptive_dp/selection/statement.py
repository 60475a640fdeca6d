"""What may be claimed of a search, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_adaptive_dp.privacy import sampling as samplings
from tf_adaptive_dp.privacy import statement as statements
from tf_adaptive_dp.privacy.wording import filled, item, up
from tf_adaptive_dp.selection.plan import Plan

_WINNER_ALONE = """\
Assumed, because the bound rests on it: the candidates were drawn independently of each other and of
the data, and all trained alike; nothing interrupted the search in a way that depends on the data,
and what crashed did so of itself, not because the machine failed for all that came after it; and
nothing but the winner is ever shown. How many candidates there were, which ones, their scores,
weights and logs, and how long the search took are not protected: keep them secret."""

_PROTECTED = """\
Protected: the candidates that are listed as released, with their hyperparameters, the weights after
their last epoch and the scores by which they were compared; and whatever is computed from these
without looking at the data again."""

_NOT_PROTECTED = """\
Not protected: loss and metrics that were printed or logged for training data, messages of errors,
and the number of examples, which counts as public. Whether a candidate crashes must not depend on
a single example: labels out of range and rows that cannot be read are not protected. The space of
candidates, the number of epochs and the strategy must have been chosen without looking at the data:
a space that was narrowed by earlier runs on them is not covered."""


def privacy_statement(plan: Plan, noise_multiplier: float, shown: Sequence[dict[str, Any]]) -> str:
    """The privacy of a finished search, as a text to publish with its winner.

    Guarantee: the numbers are `plan.epsilon_spent` and, for shuffled batches,
    `plan.epsilon_without_amplification`, rounded up. Of a search that may show the winner alone it
    tells nothing of the others, nor how many there were.

    Args:
      plan: of the search.
      noise_multiplier: of every trial.
      shown: outcomes of the trials that are released.

    Returns:
      Paragraphs of at most 80 columns.
    """
    spent = plan.epsilon_spent(noise_multiplier)
    unamplified = spent
    if samplings.label_of(plan.sampling) == "shuffled":
        resumed = max((outcome["resumed"] for outcome in shown), default=0)
        unamplified = plan.epsilon_without_amplification(noise_multiplier, resumed)
    single = plan.epsilon_of_one(noise_multiplier)
    sentences = {outcome["side_information"] for outcome in shown}
    paragraphs = [
        statements.claim(
            *(spent, unamplified, plan.delta, plan.accountant, plan.sampling, plan.num_examples)
        ),
        filled(
            f"This includes the search for hyperparameters, whose budget was epsilon = "
            f"{plan.epsilon:g}. A single training like each of its candidates would have epsilon = "
            f"{up(single)}."
        ),
        filled(plan.score.sentence),
        statements.warning_of_delta(plan.delta, plan.num_examples),
        filled(_strategy(plan)),
        _released(plan, noise_multiplier, shown),
        *sorted(sentences),
        filled(_PROTECTED),
        "" if plan.strategy.releases_all else filled(_WINNER_ALONE),
        filled(_NOT_PROTECTED),
    ]
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def _strategy(plan: Plan) -> str:
    strategy = plan.strategy
    if strategy.releases_all:
        return (
            f"Strategy: composition of {strategy.max_trials} candidates, each of which may be "
            "shown. Candidates that crashed, or were interrupted, are counted like the others."
        )
    source = "Papernot and Steinke 2022"
    if plan.accountant == "pld":
        source += ", with the privacy profiles of Koskela, Redberg and Wang 2024"
    how = {
        "liu_talwar": (
            "random stopping (Liu and Talwar 2019): a secret coin ended the search after each "
            f"candidate with probability {getattr(strategy, 'gamma', 0):g}, and after "
            f"{strategy.max_trials} at the latest"
        ),
        "repeat_and_select": (
            f"the best of a secret random number of candidates ({source}), "
            f"{strategy.expected_trials:g} on average"
        ),
    }[strategy.name]
    return (
        f"Strategy: {how}. Each candidate was drawn uniformly from the space, with replacement; "
        "one that crashed counted as the worst."
    )


def _released(plan: Plan, noise_multiplier: float, shown: Sequence[dict[str, Any]]) -> str:
    each = (
        f"{plan.releases} noisy gradients at most, with noise multiplier {noise_multiplier:g} and "
        f"expected batch size {plan.batch_size:g} of {plan.num_examples} examples"
    )
    if not plan.strategy.releases_all:
        return filled("Released: the winner alone, with these releases:") + item(each)
    lines = [filled(f"Released: {len(shown)} candidates of {each}:")]
    for outcome in shown:
        result = "crashed" if outcome["error"] else f"score {outcome['score']}"
        lines.append(item(f"{outcome['values']}: {result}, {outcome['releases']} releases"))
    return "".join(lines)
