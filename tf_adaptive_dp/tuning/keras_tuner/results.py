"""What a finished search may show.

From top to bottom: the file with the result and the choice of the winner; the privacy statement;
TensorBoard's table and the plot.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import statement
from tf_adaptive_dp.durable import files
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.tuning.keras_tuner.search_plan import SearchPlan
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar
from tf_adaptive_dp.wording import counted, format_epsilon, joined, list_item, paragraph

Outcome = dict[str, Any]


class Result:
    """What a finished search shows, in a file that exists once the search is over."""

    def __init__(self, folder: str | os.PathLike):
        """Reads the result from the folder of a project, if it exists."""
        self._path = Path(folder) / "result.json"
        self._content: dict | None = None
        if self._path.exists():
            self._content = json.loads(self._path.read_text(encoding="utf-8"))

    @property
    def is_there(self) -> bool:
        """Whether the search is finished."""
        return self._content is not None

    def write(self, **content: Any) -> None:
        """Finishes the search: from now on it is never resumed."""
        files.write(self._path, json.dumps(content, indent=1).encode())
        self._content = json.loads(json.dumps(content))

    def __getitem__(self, name: str) -> Any:
        if self._content is None:
            raise RuntimeError(
                "The search is not finished: call `search(...)` first, or again if it was "
                "interrupted."
            )
        return self._content[name]

    def shown(self) -> list[Outcome]:
        """The outcomes that may be shown, the best first.

        Raises:
          RuntimeError: if the search is not finished, or no trial has a score.
        """
        if self["failure"]:
            raise RuntimeError(self["failure"])
        return self["shown"]


def best(outcomes: Sequence[Outcome], direction: str) -> int | None:
    """The position of the winner; `None` if no outcome has a score.

    Of equal scores the first one wins. Among independent trials this equals a random choice.

    Args:
      outcomes: in the order of the trials; `score` is `None` after a crash or if it is not finite.
      direction: `"max"` or `"min"`.
    """
    sign = 1 if direction == "max" else -1
    scored = [(sign * o["score"], -i) for i, o in enumerate(outcomes) if o["score"] is not None]
    return -max(scored)[1] if scored else None


def ranked(outcomes: Sequence[Outcome], direction: str) -> list[Outcome]:
    """Sorts outcomes from best to worst; those without a score come last."""
    sign = 1 if direction == "max" else -1
    return sorted(outcomes, key=lambda o: (o["score"] is None, -sign * (o["score"] or 0)))


# Names of TensorFlow's functions, which end with a number of the process.
_NUMBERED = re.compile(r"(__(?:inference|forward|backward)_\w*?|_(?:true|false|body|cond))_\d+\b")


def failure(outcomes: Sequence[Outcome], *, is_all: bool) -> str:
    """The error message if no trial has a score.

    Args:
      outcomes: in the order of the trials.
      is_all: whether all trials may be shown. If not, the message has the first error, without the
        numbers that TensorFlow gives to functions, so it does not reveal the number of trials.
    """
    if not outcomes:
        return (
            "The strategy drew no trial at all, as its distribution allows, so there is no winner. "
            "The budget is spent: another attempt is another search."
        )
    # What a trial released before an interruption may be in no outcome.
    may_have_released = any(outcome["releases"] or outcome["resumed"] for outcome in outcomes)
    errors = [outcome["error"] for outcome in outcomes if outcome["error"]]
    spent = "The budget is spent." if may_have_released else "Nothing was released."
    which, error = ("last", errors[-1:]) if is_all else ("first", errors[:1])
    told = f"The {which} error, which may reveal something about the data, was:\n{''.join(error)}"
    if not is_all:
        told = _NUMBERED.sub(r"\1", told)
    return (
        f"Every candidate crashed, or had a score that is not finite. {spent} Correct the model "
        f"and start a new search with another `project_name`. {told if errors else ''}"
    )


# --- the privacy statement -----------------------------------------------------------------------


_WINNER_ONLY = """\
Assumptions: the candidates were drawn independently of each other and of the data, and all trained
in the same way. No interruption of the search depended on the data. Candidates that crashed did so
on their own, not because of a machine failure that affected all later candidates. Only the winner
is ever shown. The bound does not hold otherwise. The number of candidates, their hyperparameters,
scores, weights and logs, and the duration of the search are not protected: keep them secret."""

_PROTECTED = """\
Protected: the candidates listed as released, that is, their hyperparameters, their weights after
the last epoch and the scores used to compare them; and anything computed from these without further
access to the data."""

_NOT_PROTECTED = """\
Not protected: losses and metrics printed or logged for training data; statistics and vocabularies
computed from the data beforehand (`adapt`); error messages; and the number of examples, which is
treated as public. Whether a candidate crashes must not depend on a
single example: labels out of range and unreadable rows are not protected. The search space, the
number of epochs and the strategy must have been chosen without access to the data: this statement
does not cover a search space that was narrowed by earlier runs on the same data."""


def privacy_statement(
    plan: SearchPlan, noise_multiplier: float, shown: Sequence[dict[str, Any]]
) -> str:
    """Describes the privacy of a finished search, in a text to publish with its winner.

    Guarantee: the values of epsilon are those of `plan.epsilon_spent` and, for shuffled batches,
    `plan.epsilon_without_amplification`, rounded up. If the strategy releases the winner only, the
    text reveals nothing about the other candidates, nor how many there were.

    Args:
      plan: the plan of the search.
      noise_multiplier: noise multiplier of every trial.
      shown: outcomes of the released trials.

    Returns:
      Paragraphs of at most 80 columns.
    """
    spent = plan.epsilon_spent(noise_multiplier)
    unamplified = spent
    if sampling_epsilon.label_of(plan.batches.sampling) == "shuffled":
        resumed = max((outcome["resumed"] for outcome in shown), default=0)
        unamplified = plan.epsilon_without_amplification(noise_multiplier, resumed)
    single = format_epsilon(plan.epsilon_of_one(noise_multiplier))
    budget, batches = plan.budget, plan.batches
    information = {outcome["side_information"] for outcome in shown}
    return joined(
        [
            statement.claim(
                spent,
                unamplified,
                delta=budget.delta,
                accountant=budget.accountant,
                sampling=batches.sampling,
                num_examples=batches.num_examples,
                num_unchecked=sum(outcome["unchecked"] for outcome in shown),
            ),
            paragraph(
                "This epsilon covers the whole hyperparameter search, whose budget was epsilon = "
                f"{budget.epsilon:g}. Training one candidate alone would cost epsilon = {single}."
            ),
            paragraph(plan.score.sentence),
            statement.delta_warning(budget.delta, batches.num_examples),
            paragraph(_strategy(plan)),
            _released(plan, noise_multiplier, shown),
            *sorted(information),
            paragraph(_PROTECTED),
            "" if plan.strategy.releases_all else paragraph(_WINNER_ONLY),
            paragraph(_NOT_PROTECTED),
        ]
    )


def _strategy(plan: SearchPlan) -> str:
    strategy = plan.strategy
    if isinstance(strategy, Composition):
        return (
            f"Strategy: composition of {counted(strategy.num_trials, 'candidate')}, any of which "
            "may be shown. Candidates that crashed or were interrupted are counted like the others."
        )
    source = "Papernot and Steinke 2022"
    if plan.budget.accountant == "pld":
        source += ", with the privacy profiles of Koskela, Redberg and Wang 2024"
    if isinstance(strategy, LiuTalwar):
        how = (
            "random stopping (Liu and Talwar 2019): after each candidate a secret coin ended the "
            f"search with probability {strategy.gamma:g}, and it ended after at most "
            f"{strategy.max_trials} candidates"
        )
    else:
        how = (
            f"the best of a secret random number of candidates ({source}), "
            f"{strategy.expected_trials:g} on average"
        )
    return (
        f"Strategy: {how}. Each candidate was drawn uniformly from the search space, with "
        "replacement. A candidate that crashed was ranked last."
    )


def _released(plan: SearchPlan, noise_multiplier: float, shown: Sequence[dict[str, Any]]) -> str:
    each = (
        f"at most {counted(plan.schedule.releases, 'noisy gradient')} with noise multiplier "
        f"{noise_multiplier:g} and expected batch size {plan.batches.batch_size:g} of "
        f"{plan.batches.num_examples} examples"
    )
    if not plan.strategy.releases_all:
        return paragraph("Released: only the winner, with these releases:") + list_item(each)
    lines = [paragraph(f"Released: {counted(len(shown), 'candidate')}, each with {each}:")]
    for outcome in shown:
        result = "crashed" if outcome["error"] else f"score {outcome['score']}"
        released = counted(outcome["releases"], "release")
        lines.append(list_item(f"{outcome['values']}: {result}, {released}"))
    return "".join(lines)


# --- TensorBoard and the plot --------------------------------------------------------------------


def write_hparams(folder: str | Path, shown: Sequence[dict[str, Any]], objective: str) -> None:
    """Writes TensorBoard's HParams log of the candidates that may be shown.

    Args:
      folder: gets one folder per candidate.
      shown: the outcomes; those without a score are left out.
      objective: the name of the score.
    """
    from tensorboard.plugins.hparams import api

    for outcome in shown:
        if outcome["score"] is None:
            continue
        with tf.summary.create_file_writer(str(Path(folder) / outcome["id"])).as_default():
            api.hparams(outcome["values"], trial_id=outcome["id"])
            tf.summary.scalar(objective, outcome["score"], step=0)


def forget_numbers(folder: str | Path) -> None:
    """Renames TensorBoard's files in a project, whose names count the writers of the process.

    The file name of the winner would otherwise reveal how many trials came before it.

    Args:
      folder: the folder of the project.
    """
    for path in Path(folder).rglob("events.out.tfevents.*"):
        if not path.name.endswith(".honest"):
            path.rename(path.with_name(f"events.out.tfevents.{secrets.token_hex(8)}.honest"))


def plot(
    shown: Sequence[dict[str, Any]], objective: str, spending: dict[str, float], is_all: bool
) -> Any:
    """Plots the scores that may be shown, and the privacy spent.

    Args:
      shown: outcomes, the best first.
      objective: the name of the score.
      spending: ε by what it covers.
      is_all: whether all candidates are shown, or only the winner.

    Returns:
      The `matplotlib` figure.
    """
    from matplotlib.figure import Figure  # takes a while to import

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    scores, budget = figure.subplots(1, 2)
    scored = [outcome for outcome in shown if outcome["score"] is not None]
    names = [_name(outcome["values"]) for outcome in scored]
    scores.barh(range(len(scored)), [outcome["score"] for outcome in scored])
    scores.set_yticks(range(len(scored)), names)
    scores.invert_yaxis()
    scores.set_xlabel(objective)
    scores.set_title("Candidates" if is_all else "Winner")
    budget.barh(range(len(spending)), list(spending.values()))
    budget.set_yticks(range(len(spending)), list(spending))
    budget.invert_yaxis()
    budget.set_xlabel("ε")
    budget.set_title("Spending")
    return figure


def _name(values: dict[str, Any]) -> str:
    parts = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
    return "\n".join(parts) or "no hyperparameters"
