"""KerasTuner's side of a search: its space, its objective, and the trials that may be shown."""

from __future__ import annotations

from typing import Any

import keras_tuner

from tf_adaptive_dp.tuning.keras_tuner import space
from tf_adaptive_dp.tuning.keras_tuner.results import Outcome


class HonestOracle(keras_tuner.Oracle):
    """Holds the space before a search, and what may be shown after it.

    KerasTuner's own files are not written: they would keep what has to stay secret, and the journal
    of the search knows more.
    """

    def __init__(self, objective: Any, hyperparameters: Any = None):
        super().__init__(objective=objective, hyperparameters=hyperparameters)
        self.verbose = 0

    def draws(self, strategy: Any) -> list[space.Values]:
        """The candidates of all trials: drawn here once, before the first of them.

        Guarantee: as the strategy's proof demands. For composition no candidate twice; otherwise
        a secret number of them by the strategy's law, independent, uniform, with replacement.

        Args:
          strategy: one of `strategies`.
        """
        number = strategy.draw_num_trials()
        if strategy.releases_all:
            return space.without_replacement(self.hyperparameters, number)
        return [space.draw(self.hyperparameters) for _ in range(number)]

    def with_values(self, values: space.Values) -> keras_tuner.HyperParameters:
        """The space with the values of one candidate."""
        hyperparameters = self.get_space()
        hyperparameters.values = dict(values)
        return hyperparameters

    def show(self, outcomes: list[Outcome]) -> None:
        """Makes trials of the outcomes that may be shown.

        Args:
          outcomes: the best first.
        """
        self.trials = {}
        for outcome in outcomes:
            trial = keras_tuner.engine.trial.Trial(
                self.with_values(outcome["values"]),
                trial_id=outcome["id"],
                status="COMPLETED" if outcome["score"] is not None else "FAILED",
                message=outcome["error"],
            )
            trial.score = outcome["score"]
            self.trials[trial.trial_id] = trial

    def get_best_trials(self, num_trials: int = 1) -> list:
        """The best trials that may be shown, the best first; none without a score."""
        return [trial for trial in self.trials.values() if trial.score is not None][:num_trials]

    def create_trial(self, tuner_id: str) -> Any:
        """Refuses what would go around the journal."""
        raise NotImplementedError("HonestTuner draws all trials before the first one.")

    def save(self) -> None:
        """Writes nothing; see the class."""

    def reload(self) -> None:
        """Reads nothing; see the class."""
