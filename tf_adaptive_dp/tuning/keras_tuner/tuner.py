"""A tuner for KerasTuner that accounts for the privacy of its search."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, NoReturn

import keras_tuner

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.accounting import accountants
from tf_adaptive_dp.callbacks.backups import load_weights
from tf_adaptive_dp.durable import journal
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.tuning.keras_tuner import arguments, results, search_journal
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments
from tf_adaptive_dp.tuning.keras_tuner.oracle import HonestOracle
from tf_adaptive_dp.tuning.keras_tuner.search import Search, delete_trials
from tf_adaptive_dp.tuning.keras_tuner.search_plan import Batches, Budget, Schedule, SearchPlan
from tf_adaptive_dp.tuning.keras_tuner.trial import batch_size_and_parts, check_optimizer
from tf_adaptive_dp.tuning.strategies import Score, Strategy
from tf_adaptive_dp.wording import format_delta


class HonestTuner(keras_tuner.Tuner):
    """Searches hyperparameters with KerasTuner's conventions, within one privacy budget.

    The tuner chooses the noise. Whatever `noise_multiplier` the optimizer of `build_model` has, the
    tuner sets it so that all trials together, their scores and the choice are (ε, δ)-DP. All trials
    make the same number of releases with the same expected batch size. A model is scored once,
    after its last epoch, on `validation_data`. There are no retries: a trial that crashes has spent
    its share and ranks last, and so does a trial whose score is not finite.

    Strategies: `"composition"` tries `num_trials` candidates, or a whole finite space, each once,
    and may show all of them. `"repeat_and_select"` and `"liu_talwar"` try a secret random number of
    random candidates, `num_trials` on average, and show only the winner, for a far smaller ε. They
    delete other trials as soon as these have lost. Keep the project's folder as secret as the data
    until the search is over. Candidates are drawn with the operating system's entropy.

    Call an interrupted search again with the same arguments to resume it: a journal, written before
    anything is spent, keeps its draws and results. See `trial.PrivateTrial` for the trial that was
    in progress. A finished search returns immediately.

    Guarantee: (ε, δ)-DP of everything that `privacy_statement` lists, for adding or removing one
    example, under the conditions that it states. The tuner builds all drawn candidates once in
    advance. Before any trial is trained, it rejects a model that would cost something else, as far
    as this can be seen without training.

    Args:
      hypermodel: `build_model(hp)`, or a `keras_tuner.HyperModel` that does not override `fit`,
        whose models are compiled with a new optimizer of tf_adaptive_dp with
        `expected_batch_size`. The space must not grow while models are built.
      objective: as in KerasTuner, but with validation metrics only: `"val_accuracy"`, a
        `keras_tuner.Objective`, or a list of these.
      strategy: one of the names above, or of the classes in `tf_adaptive_dp.tuning.strategies`.
      epsilon: the budget of the whole search.
      delta: δ, which should be well below 1 / `num_examples`.
      num_examples: the size of the training set, a public constant.
      num_trials: the number of trials for composition, by default the whole space; the mean number
        for the other strategies.
      score: `PublicScore()` if the validation data are public, `NoisyScore(...)` if they are
        private, or `UnprotectedScore()` if they are private and ε need not cover them.
      sampling: how batches are drawn, as for `PrivacyMonitor`, except subsets of a fixed size. A
        seed or a `key` is not allowed, since a resumed search would draw the same batches again.
      accountant: `"rdp"` or `"pld"`.
      hyperparameters: the space, if `hypermodel` does not declare it.
      directory: the folder of projects.
      project_name: the folder of this search.
      overwrite: whether to discard an existing search. What it spent stays spent, and a warning
        says so if it has begun.
      **of_keras_tuner: not allowed. For arguments of KerasTuner that do not apply here, such as
        `max_trials` and `seed`, the error says what to do instead.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
      NotPrivateError: if a score would come from private data that is not accounted for.
    """

    def __init__(
        self,
        hypermodel: Any,
        objective: Any,
        *,
        epsilon: float,
        delta: float,
        num_examples: int,
        score: Score,
        strategy: str | Strategy = "repeat_and_select",
        num_trials: float | None = None,
        sampling: Sampling | str = "shuffled",
        accountant: str = "rdp",
        hyperparameters: keras_tuner.HyperParameters | None = None,
        directory: str | os.PathLike | None = None,
        project_name: str | None = None,
        overwrite: bool = False,
        **of_keras_tuner: Any,
    ):
        arguments.refuse_keras_tuners(of_keras_tuner)
        self._epsilon = checks.number("epsilon", epsilon, 0, strict=True)
        self._delta = checks.probability("delta", delta)
        self._num_examples = checks.integer("num_examples", num_examples, 1)
        self._accountant = checks.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self._score = arguments.check_score(score)
        self._sampling = arguments.check_sampling(sampling)
        asked_for = arguments.read_strategy(strategy, num_trials)
        oracle = HonestOracle(objective, hyperparameters)
        arguments.check_objective(oracle.objective)
        folder = Path(directory or ".") / (project_name or "untitled_project")
        arguments.check_folder(folder, overwrite)
        super().__init__(oracle, hypermodel, directory=directory, project_name=project_name)
        arguments.check_hypermodel(self.hypermodel)
        self._strategy = arguments.strategy_for_space(asked_for, self.oracle.hyperparameters)
        if overwrite:  # all arguments are valid by now
            _warn_of_what_is_discarded(Path(self.project_dir))
            shutil.rmtree(self.project_dir)
        self._secret = Path(self.project_dir) / "secret"
        self._read_result()
        # A process that was killed after its search was finished may have left the draws.
        if self._result.is_there and not arguments.is_in_use(folder):
            self._tidy()

    # KerasTuner (1.4.8) calls this method. `_try_build` and `_get_checkpoint_fname` are its own.
    def _get_tuner_fname(self) -> str:
        """A file that never exists, so that KerasTuner always asks the hypermodel for its space.

        When overwriting another tuner's search, KerasTuner would otherwise reuse that space.
        """
        return str(Path(self.project_dir) / "no_state_of_keras_tuner")

    def search(self, *fit_args: Any, **fit_kwargs: Any) -> None:
        """Trains and compares candidates; resumes the search, or returns if it is finished.

        Args:
          *fit_args: the arguments of `Model.fit` for every trial: arrays, data sets, or our
            `poisson_batches(...)`.
          **fit_kwargs: likewise. `validation_data` is required. Every trial gets copies of
            `callbacks`, whose TensorBoard logs go into the folder of the trial. If only the winner
            may be shown, these have neither graphs nor profiles.

        Raises:
          ValueError: if the budget cannot be met, or arguments do not suit a search or differ from
            those it began with; then nothing was changed. Where only the winner may be shown, the
            values of arrays are compared, too.
          NotPrivateError: if a model would not cost what was planned, or something ended a trial
            early. Correct it and call `search` again. In a search that has begun, correct only what
            cannot change the trained models; otherwise, or if the space changes, start over with
            `overwrite=True`. What was spent stays spent.
          RuntimeError: if another process is running the search, or no candidate has a score.
        """
        data = FitArguments.read(fit_args, fit_kwargs, releases_all=self._strategy.releases_all)
        arguments.check_callbacks(
            data.callbacks,
            releases_all=self._strategy.releases_all,
            num_examples=self._num_examples,
            sampling=self._sampling,
        )
        plan = self._plan(data)
        search = Search(
            folder=self.project_dir,
            oracle=self.oracle,
            build=self._try_build,
            weights=self._get_checkpoint_fname,
            plan=plan,
            data=data,
        )
        described = search.describe()
        if self._is_finished(described):
            print(
                f"The search in {str(self.project_dir)!r} was finished before: it has its results, "
                "and nothing was trained. For another search pass another `project_name`."
            )
        else:
            with contextlib.closing(self._journal()) as opened:
                if not self._is_finished(described):  # by now
                    self.on_search_begin()
                    self._result.write(**search.run(opened))
                    self.on_search_end()
        self._read_result()
        self._tidy()
        self._result.shown()  # raises with the reason if there is none

    def run_trial(self, trial: Any, *fit_args: Any, **fit_kwargs: Any) -> NoReturn:
        """Raises, since such a training would bypass the journal, and have other noise."""
        raise NotImplementedError(
            "HonestTuner trains its trials in `search` alone, which counts them. To train a model "
            "further, take it from `get_best_models()`."
        )

    def _plan(self, data: FitArguments) -> SearchPlan:
        model = self._try_build(self.oracle.get_space())
        check_optimizer(model)
        batch_size, parts = batch_size_and_parts(model)
        arguments.check_rows(data, self._num_examples, batch_size, parts, self._sampling)
        plan = SearchPlan(
            self._strategy,
            self._score,
            Budget(self._epsilon, self._delta, self._accountant),
            Batches(self._num_examples, self._sampling, batch_size),
            Schedule(data.epochs, data.steps_per_epoch, parts, data.epoch_is_pass),
        )
        if not self._result.is_there:
            metrics = {name: 0.0 for name in data.scores(model)}
            if not self.oracle.objective.has_value(metrics):
                raise ValueError(
                    "The models must have a metric of the objective that is one number. Received: "
                    f"{self.oracle.objective}, metrics {sorted(metrics)}"
                )
        return plan

    def _journal(self) -> search_journal.SearchJournal:
        path = self._secret / "journal"
        trials = [trial.name for trial in Path(self.project_dir).glob("trial_*")]
        is_finished = results.Result(self.project_dir).is_there  # by now, in another process
        if trials and not is_finished and not journal.has_begun(path):
            raise ValueError(
                "The project holds candidates of a search whose journal is gone, so nobody knows "
                "what it spent. Restore the file, or start over with another `project_name`; what "
                f"that search spent stays spent. Received: no entries in {str(path)!r}, and "
                f"{len(trials)} candidates"
            )
        self._secret.mkdir(exist_ok=True)
        for folder in (self.project_dir, self._secret):
            os.chmod(folder, 0o700)
        return search_journal.SearchJournal(path)

    def _is_finished(self, described: dict) -> bool:
        self._read_result()
        if self._result.is_there:
            search_journal.compare(self._result["search"], described, str(self.project_dir))
        return self._result.is_there

    def _read_result(self) -> None:
        self._result = results.Result(self.project_dir)
        if self._result.is_there:
            self.oracle.show(self._result["shown"])

    def _tidy(self) -> None:
        """Deletes what only a search in progress needs, above all the draws."""
        shutil.rmtree(self._secret, ignore_errors=True)
        delete_trials(self.project_dir, {outcome["id"] for outcome in self._result["shown"]})

    def _require(self, number: int) -> None:
        self._result.shown()
        if number > 1 and not self._strategy.releases_all:
            raise ValueError(
                f"With {self._strategy.name!r} only the winner may be shown. Received: {number}"
            )

    def get_best_models(self, num_models: int = 1) -> list:
        """The best models with the weights of their last epoch, the best first.

        Args:
          num_models: the number of models with a score; more than one only for composition.
        """
        self._require(num_models)
        return [self.load_model(trial) for trial in self.oracle.get_best_trials(num_models)]

    def get_best_hyperparameters(self, num_trials: int = 1) -> list:
        """The best hyperparameters, the best first; more than one only for composition.

        Take the model from `get_best_models`: training again with these hyperparameters spends
        privacy again.

        Args:
          num_trials: the number of trials with a score.
        """
        self._require(num_trials)
        return super().get_best_hyperparameters(num_trials)

    def load_model(self, trial: Any) -> Any:
        """The model of a trial that may be shown, with the ledger of this trial.

        The search has spent more, see `privacy_statement`. Further training adds to the (ε, δ) of
        the search, which no callback knows. So the ledger is marked (`Ledger.chosen_by_search`):
        statements and reports of this optimizer claim ε for its training alone, and say that the
        search has cost more.

        Raises:
          FileNotFoundError: if its weights are gone.
        """
        model = self._try_build(trial.hyperparameters)
        model.optimizer.noise_multiplier = self._result["noise_multiplier"]
        path = Path(self._get_checkpoint_fname(trial.trial_id))
        if not any(path.parent.glob(f"{path.name}*")):
            raise FileNotFoundError(
                "The weights of the candidate are gone: `get_best_models` needs the folder that "
                f"the search kept for it. Received: no file {str(path)!r}"
            )
        load_weights(model, str(path))
        model.optimizer.ledger.chosen_by_search = True
        return model

    def results_summary(self, num_trials: int = 10) -> None:
        """Prints the best trials that may be shown."""
        self._require(1)
        super().results_summary(num_trials if self._strategy.releases_all else 1)

    def privacy_statement(self) -> str:
        """Describes the privacy of the search, in a text to publish with its winner."""
        self._require(1)
        return self._result["statement"]

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots the scores that may be shown and the privacy spent, with matplotlib.

        Args:
          path: where to save the picture, if anywhere.

        Returns:
          The figure.
        """
        shown = self._result.shown()
        objective, is_all = self.oracle.objective.name, self._strategy.releases_all
        figure = results.plot(shown, objective, self._result["spending"], is_all)
        if path is not None:
            figure.savefig(path)
        return figure

    def save(self) -> None:
        """Writes nothing: the journal is written at every step."""

    def reload(self) -> None:
        """Reads nothing; see `save`."""


def _warn_of_what_is_discarded(folder: Path) -> None:
    """Warns before a search that has begun is deleted.

    Args:
      folder: of a project; whatever it holds may be deleted, damaged files too.
    """
    spent = "an unknown epsilon and delta, since its files are damaged"
    path = folder / "secret" / "journal"
    try:
        result = results.Result(folder)
        search = result["search"] if result.is_there else None
        if search is None and path.exists():
            with contextlib.closing(search_journal.SearchJournal(path)) as journal:
                search = journal.search if journal.begun else None
        if search is None:
            return
        spent = f"epsilon = {search['epsilon']:g} and delta = {format_delta(search['delta'])}"
    except (OSError, LookupError, TypeError, ValueError):
        pass  # somebody else's files, or damaged ones
    warnings.warn(
        f"`overwrite=True` discards a search that may have spent up to {spent}. What it spent "
        "stays spent, and the statement of the new search does not include it: if both use the "
        f"same data, their epsilons and deltas add up. Received: {str(folder)!r}",
        stacklevel=level_of_caller(),
    )
