"""Runs a search: draws once, tries each candidate once, keeps only what may be shown."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras import process_state
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.draw_numbers import SeenDraws
from tf_adaptive_dp.tuning.keras_tuner import architecture, results, search_journal, space
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments
from tf_adaptive_dp.tuning.keras_tuner.oracle import HonestOracle
from tf_adaptive_dp.tuning.keras_tuner.search_plan import SearchPlan
from tf_adaptive_dp.tuning.keras_tuner.shared_state import SharedState
from tf_adaptive_dp.tuning.keras_tuner.trial import IN_PROGRESS, PrivateTrial, prepare


def delete_trials(folder: str | Path, keep: set[str]) -> None:
    """Deletes the folders of all trials but some.

    Args:
      folder: the folder of the project.
      keep: the ids of the trials to keep.
    """
    for trial in Path(folder).glob("trial_*"):
        if trial.name.removeprefix("trial_") not in keep:
            shutil.rmtree(trial)


def _name(values: space.Values) -> str:
    return json.dumps(values, sort_keys=True)


class Search:
    """One search in one folder, in as many processes as it takes.

    Guarantee: the noise and all candidates are on disk before the first trial begins, and are never
    drawn again. Each trial is on disk before it spends anything. If only the winner may be shown,
    everything that a trial leaves is deleted once the trial has lost. No remaining file depends on
    the other trials or on their number, except through its date, and neither do the numbers and
    seeds of the process afterwards (`process_state.hidden`), nor what models share (`SharedState`).
    This does not cover a user's callback that itself writes TensorFlow's numbers, as graphs and
    profiles contain them.
    """

    def __init__(
        self,
        folder: str | Path,
        oracle: HonestOracle,
        build: Callable[[Any], tf.keras.Model],
        weights: Callable[[str], str],
        plan: SearchPlan,
        data: FitArguments,
    ):
        """Prepares a search.

        Args:
          folder: the folder of the project.
          oracle: holds the space and the objective.
          build: makes a compiled model from hyperparameters.
          weights: maps the id of a trial to the path of its weights.
          plan: what the trials may spend.
          data: the arguments of `fit` for every trial.
        """
        self._folder, self._oracle = Path(folder), oracle
        self._build, self._weights = build, weights
        self._plan, self._data = plan, data
        self._seen, self._shared = SeenDraws(), SharedState()
        self._space = space.description(oracle.hyperparameters)

    def describe(self) -> dict[str, Any]:
        """Everything that must stay the same when the search is resumed, as plain JSON."""
        return {
            **self._plan.describe(),
            **self._data.describe(),
            "rows": self._data.num_rows,
            "space": self._space,
            "objective": str(self._oracle.objective),
        }

    def run(self, journal: search_journal.SearchJournal) -> dict[str, Any]:
        """Starts or resumes the search, and finishes it.

        Args:
          journal: the journal of the project.

        Returns:
          The content of the result file.

        Raises:
          ValueError: if the journal belongs to a search with other arguments, or the budget cannot
            be met; then nothing was changed. Also if the model of a candidate has other layers,
            weights or another kind of optimizer than when the search began.
          NotPrivateError: if a model would not cost what was planned.
        """
        with self._hidden():
            try:
                return self._run(journal)
            finally:
                self._shared.restore()

    def _hidden(self) -> contextlib.AbstractContextManager:
        if self._plan.strategy.releases_all:
            return contextlib.nullcontext()
        return process_state.hidden(self._plan.strategy.expected_trials)

    def _run(self, journal: search_journal.SearchJournal) -> dict[str, Any]:
        if journal.search is None:
            noise_multiplier = self._plan.noise_multiplier()
            draws = self._oracle.draws(self._plan.strategy)
            ids = [secrets.token_hex(8) for _ in draws]
            drawn = {"noise_multiplier": noise_multiplier, "draws": draws, "ids": ids}
            if not self._plan.strategy.releases_all:
                salt = secrets.token_bytes(16)
                drawn["data"] = {"salt": salt.hex(), "digests": self._data.fingerprints(salt)}
            journal.begin(self.describe(), drawn)
        else:
            search_journal.compare(journal.search, self.describe(), str(self._folder))
            self._require_same_data(journal)
            self._require_newest(journal)
        draws = journal.drawn["draws"]
        self._models = journal.models
        if not journal.begun or not self._plan.strategy.releases_all:
            # All models are built and described before this process trains the first one.
            distinct = {_name(values): values for values in draws}
            noise_multiplier = journal.drawn["noise_multiplier"]
            models = {
                name: architecture.described(self._model(values, noise_multiplier))
                for name, values in distinct.items()
            }
            if not journal.begun:
                self._models = models
        self._drop_losers(journal)
        for number in range(len(journal.ended), len(draws)):
            self._try(number, journal)
        return self._result(journal)

    def _trial(self, trial_id: str, journal: search_journal.SearchJournal) -> PrivateTrial:
        noise_multiplier = journal.drawn["noise_multiplier"]
        return PrivateTrial(self._plan, noise_multiplier, self._folder / f"trial_{trial_id}")

    def _require_same_data(self, journal: search_journal.SearchJournal) -> None:
        """Raises if arrays changed since a search began that may show its winner only.

        The price of such a search holds for trials that are all alike. Those of older journals are
        not known.
        """
        before = journal.drawn.get("data")
        if before is None:
            return
        if self._data.fingerprints(bytes.fromhex(before["salt"])) != before["digests"]:
            raise ValueError(
                "The arrays for training and validation must be those that the search began with, "
                "in the same order: only the winner is shown, and what that costs is known if all "
                "candidates are trained and compared on the same data. Nothing was changed. "
                "Features that you compute must be computed once and stored, since their last bits "
                "may differ from run to run. Pass the same arrays to resume, or start over with "
                "another `project_name`; what that search spent stays spent. Received: other "
                f"values of the same shapes, with folder {str(self._folder)!r}"
            )

    def _require_newest(self, journal: search_journal.SearchJournal) -> None:
        """Raises if a trial has left files that, says the journal, did not begin."""
        later = journal.drawn["ids"][journal.begun :]
        left = [trial_id for trial_id in later if self._trial(trial_id, journal).has_begun()]
        if left:
            raise ValueError(
                "The journal of the search is older than its candidates, as if it was restored "
                "from a copy: what these released would not be counted. Put the newest file back, "
                "or start over with another `project_name`; what that search spent stays spent. "
                f"Received: folder {str(self._folder)!r}, whose journal does not know that "
                f"'trial_{left[0]}' began"
            )

    def _model(self, values: space.Values, noise_multiplier: float) -> tf.keras.Model:
        """Builds a model with the planned noise; raises if it would cost something else."""
        hyperparameters = self._oracle.with_values(values)
        model = self._build(hyperparameters)
        if space.description(hyperparameters) != self._space:
            new = [p.name for p in hyperparameters.space[len(self._space) :]]
            raise NotPrivateError(
                "The space grew while a model was built, so trials would not be alike: declare all "
                "hyperparameters in every call of `build_model`, and those that are used only "
                "sometimes within `hp.conditional_scope`. Nothing was trained with this model. "
                "The change makes another space, so start over with `overwrite=True`; if no trial "
                f"had begun, nothing was spent. Received: {new}"
            )
        prepare(model, self._plan, noise_multiplier, self._seen)
        if not self._plan.strategy.releases_all:
            self._shared.begin_with(model)
        return model

    def _try(self, number: int, journal: search_journal.SearchJournal) -> None:
        drawn = journal.drawn
        values, trial_id = drawn["draws"][number], drawn["ids"][number]
        model = self._model(values, drawn["noise_multiplier"])
        if self._models is not None:
            now = architecture.described(model)
            architecture.compare(self._models[_name(values)], now, str(self._folder))
        trial = self._trial(trial_id, journal)
        if journal.begun == number:
            trial.begin()
            journal.note_begun(None if number else self._models)
        else:
            trial.check_resumable()
            journal.note_resumed()
        weights = self._weights(trial_id)
        outcome = trial.run(model, self._data, self._oracle.objective, weights)
        which = {"id": trial_id, "values": values}
        journal.note_ended({**outcome, **which, "resumed": journal.resumed})
        trial.clean()
        self._drop_losers(journal)
        if self._plan.strategy.releases_all and self._data.arguments.get("verbose", 1):
            result = "crashed" if outcome["error"] else outcome["score"]
            of = len(journal.drawn["draws"])
            print(f"Trial {number + 1} of {of}: {values}: {result}")

    def _drop_losers(self, journal: search_journal.SearchJournal) -> None:
        """Deletes the trials that have lost, if only the winner may be shown."""
        if self._plan.strategy.releases_all:
            return
        winner = results.best(journal.ended, self._oracle.objective.direction)
        keep = set(journal.drawn["ids"][len(journal.ended) : journal.begun])
        keep |= set() if winner is None else {journal.ended[winner]["id"]}
        delete_trials(self._folder, keep)

    def _failure(self, ended: list[results.Outcome]) -> str:
        return results.failure(ended, is_all=self._plan.strategy.releases_all)

    def _result(self, journal: search_journal.SearchJournal) -> dict[str, Any]:
        plan, objective = self._plan, self._oracle.objective
        winner = results.best(journal.ended, objective.direction)
        shown = results.ranked(journal.ended, objective.direction)
        if not plan.strategy.releases_all:
            # The number of resumptions would reveal something about when it was tried.
            shown = [] if winner is None else [{**journal.ended[winner], "resumed": 0}]
        noise_multiplier = journal.drawn["noise_multiplier"]
        results.write_hparams(self._folder / "tensorboard", shown, objective.name)
        results.forget_numbers(self._folder)
        for leftover in self._folder.glob(f"trial_*/{IN_PROGRESS}"):
            shutil.rmtree(leftover)
        return {
            "search": self.describe(),
            "noise_multiplier": noise_multiplier,
            "shown": shown,
            "failure": None if winner is not None else self._failure(journal.ended),
            "statement": results.privacy_statement(plan, noise_multiplier, shown),
            "spending": {
                "one training": plan.epsilon_of_one(noise_multiplier),
                "the search": plan.epsilon_spent(noise_multiplier),
                "budget": plan.budget.epsilon,
            },
        }
