"""A KerasTuner that pays for its search."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import keras_tuner

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.tuning.keras_tuner import arguments, results, search_journal
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments
from tf_adaptive_dp.tuning.keras_tuner.oracle import HonestOracle
from tf_adaptive_dp.tuning.keras_tuner.plan import Batches, Budget, Plan, Schedule
from tf_adaptive_dp.tuning.keras_tuner.search import Search, delete_trials
from tf_adaptive_dp.tuning.keras_tuner.trial import settings


class HonestTuner(keras_tuner.Tuner):
    """Searches hyperparameters with KerasTuner's conventions, inside one privacy budget.

    The tuner chooses the noise: whatever `noise_multiplier` the optimizer of `build_model` has, it
    is set so that all trials together, their scores and the choice are (ε, δ)-DP. All trials make
    the same number of releases of the same expected batch size. A model is scored once, after its
    last epoch, on `validation_data`; there are no retries: a trial that crashes is paid for and
    counts as the worst, as does a score that is not finite.

    Strategies: `"composition"` tries `num_trials` candidates, or a whole finite space, each once,
    and may show all. `"repeat_and_select"` and `"liu_talwar"` try a secret random number of random
    candidates, `num_trials` on average, and show the winner alone, for a far smaller ε: other
    trials are deleted as soon as they have lost. The project's folder is to be kept as secret as
    the data until the search is over. Candidates are drawn with the operating system's entropy.

    A search that was interrupted goes on when it is called again with the same arguments: draws
    and results are kept in a journal that is written before anything is spent. See
    `trial.Trial` for what becomes of the trial that was in progress. A finished search returns at
    once.

    Guarantee: (ε, δ)-DP of what `privacy_statement` lists, for adding or removing one example,
    under the conditions that it states. A model that would cost something else is refused before
    any trial is trained, as far as can be seen without training: all candidates that were drawn are
    built once beforehand.

    Args:
      hypermodel: `build_model(hp)`, or a `keras_tuner.HyperModel` that does not override `fit`,
        whose models are compiled with a new optimizer of tf_adaptive_dp with
        `expected_batch_size`. The space must not grow while models are built.
      objective: KerasTuner's: `"val_accuracy"`, a `keras_tuner.Objective`, or a list of these,
        of validation metrics.
      strategy: a name as above, or one of `tf_adaptive_dp.tuning.strategies`.
      epsilon: the budget of the whole search.
      delta: δ, well below 1 / `num_examples`.
      num_examples: of the training set, a public constant.
      num_trials: the number of trials for composition, by default the whole space; their mean
        number for the others.
      score: `PublicScore()` if the validation data are public, `NoisyScore(...)` if they are
        private, or `UnprotectedScore()`: private, and not covered by ε.
      sampling: how batches are drawn, as for `PrivacyMonitor`; not in subsets of fixed size, nor
        with a seed or a `key`, with which batches would come again when a search is resumed.
      accountant: `"rdp"` or `"pld"`.
      hyperparameters: the space, if `hypermodel` does not declare it.
      directory: where projects are.
      project_name: the folder of this search.
      overwrite: whether to forget a search that is there. What it spent is spent.
      **of_keras_tuner: none; for those of KerasTuner that have no place here, such as `max_trials`
        and `seed`, the error says what to do instead.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.
      NotPrivateError: if a score would be computed from private data that nothing accounts for.
    """

    def __init__(
        self,
        hypermodel: Any,
        objective: Any,
        *,
        epsilon: float,
        delta: float,
        num_examples: int,
        score: Any,
        strategy: Any = "repeat_and_select",
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
        self._delta = composition.check_probability("delta", delta)
        self._num_examples = checks.integer("num_examples", num_examples, 1)
        self._accountant = checks.choice("accountant", accountant, composition.ACCOUNTANTS)
        self._score = arguments.check_score(score)
        self._sampling = arguments.check_sampling(sampling)
        strategy = arguments.strategy(strategy, num_trials)
        oracle = HonestOracle(objective, hyperparameters)
        arguments.check_objective(oracle.objective)
        folder = Path(directory or ".") / (project_name or "untitled_project")
        arguments.check_folder(folder, overwrite)
        super().__init__(oracle, hypermodel, directory=directory, project_name=project_name)
        arguments.check_hypermodel(self.hypermodel)
        self._strategy = arguments.fitted(strategy, self.oracle.hyperparameters)
        if overwrite:  # now that nothing more is refused
            shutil.rmtree(self.project_dir)
        self._secret = Path(self.project_dir) / "secret"
        self._read_result()
        # A process that was killed after its search was finished may have left the draws.
        if self._result.is_there and not arguments.is_in_use(folder):
            self._tidy()

    def _get_tuner_fname(self) -> str:
        """A file that is never there, so that KerasTuner always asks the hypermodel for its space.

        Where another tuner's search is overwritten, it would take the space to be known already.
        """
        return str(Path(self.project_dir) / "no_state_of_keras_tuner")

    def search(self, *fit_args: Any, **fit_kwargs: Any) -> None:
        """Trains and compares candidates, or goes on with that, or returns if it is done.

        Args:
          *fit_args: those of `Model.fit`, for every trial: arrays, data sets, our
            `poisson_batches(...)`.
          **fit_kwargs: likewise; `validation_data` is required. Every trial gets copies of
            `callbacks`; their TensorBoard logs go into the folder of the trial. Where the winner
            alone may be shown, these have neither graphs nor profiles.

        Raises:
          ValueError: if the budget cannot be met, or for arguments that do not go with a search, or
            that differ from those it was begun with; then nothing was changed.
          NotPrivateError: for a model that would cost something else than planned, or a trial that
            something ended early. Correct it, and call `search` again. In a search that has begun
            correct only what cannot change the models that are trained; otherwise, or if the space
            changes, begin anew with `overwrite=True`. What was spent is spent.
          RuntimeError: if another process is at it, or when no candidate has a score.
        """
        data = FitArguments.read(fit_args, fit_kwargs, releases_all=self._strategy.releases_all)
        arguments.check(
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
        if not self._is_finished(described):
            with contextlib.closing(self._journal()) as journal:
                if not self._is_finished(described):  # by now
                    self.on_search_begin()
                    self._result.write(**search.run(journal))
                    self.on_search_end()
        self._read_result()
        self._tidy()
        self._result.shown()  # or an error that says why there is none

    def _plan(self, data: FitArguments) -> Plan:
        model = self._try_build(self.oracle.get_space())
        batch_size, parts = settings(model)
        arguments.check_rows(data, self._num_examples, batch_size, parts, self._sampling)
        plan = Plan(
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
                    f"The models have no metric of the objective. Received: {self.oracle.objective}"
                    f", metrics {sorted(metrics)}"
                )
        return plan

    def _journal(self) -> search_journal.Journal:
        self._secret.mkdir(exist_ok=True)
        for folder in (self.project_dir, self._secret):
            os.chmod(folder, 0o700)
        return search_journal.Journal(self._secret / "journal")

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
        """Deletes what only a search in progress needs, the draws above all."""
        shutil.rmtree(self._secret, ignore_errors=True)
        delete_trials(self.project_dir, {outcome["id"] for outcome in self._result["shown"]})

    def _require(self, number: int) -> None:
        self._result.shown()
        if number > 1 and not self._strategy.releases_all:
            raise ValueError(
                f"With {self._strategy.name!r} the winner alone may be shown. Received: {number}"
            )

    def get_best_models(self, num_models: int = 1) -> list:
        """The best models with the weights of their last epoch, the best first.

        Args:
          num_models: how many, of those that have a score; more than one for composition only.
        """
        self._require(num_models)
        return [self.load_model(trial) for trial in self.oracle.get_best_trials(num_models)]

    def get_best_hyperparameters(self, num_trials: int = 1) -> list:
        """The best hyperparameters, the best first; more than one for composition only.

        Take the model from `get_best_models`: to train one again with them spends again, with
        another noise.

        Args:
          num_trials: how many; of trials that have a score.
        """
        self._require(num_trials)
        return super().get_best_hyperparameters(num_trials)

    def load_model(self, trial: Any) -> Any:
        """The model of a trial that may be shown, with the ledger of this trial.

        The search has spent more, see `privacy_statement`: to its (ε, δ) has to be added whatever
        the model is trained further, which no callback knows.
        """
        model = self._try_build(trial.hyperparameters)
        model.optimizer.noise_multiplier = self._result["noise_multiplier"]
        if model.built:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(self._get_checkpoint_fname(trial.trial_id))
        return model

    def results_summary(self, num_trials: int = 10) -> None:
        """Prints the best trials that may be shown."""
        self._require(1)
        super().results_summary(num_trials if self._strategy.releases_all else 1)

    def privacy_statement(self) -> str:
        """What may be claimed of the search, as a text to publish with its winner."""
        self._require(1)
        return self._result["statement"]

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draws the scores that may be shown and what was spent, with matplotlib.

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
