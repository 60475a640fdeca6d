"""KerasTuner's side of a search: its space, its objective, and the trials that may be shown."""

from __future__ import annotations

from typing import Any

import keras_tuner

from tf_adaptive_dp.tuning.keras_tuner import space
from tf_adaptive_dp.tuning.keras_tuner.results import Outcome
from tf_adaptive_dp.tuning.strategies import Strategy


class HonestOracle(keras_tuner.Oracle):
    """Holds the space before a search, and the trials that may be shown after it.

    It does not write KerasTuner's own files: they would store what must stay secret, and the
    journal of the search knows more.
    """

    def __init__(self, objective: Any, hyperparameters: Any = None):
        super().__init__(objective=objective, hyperparameters=hyperparameters)
        self.verbose = 0

    def draws(self, strategy: Strategy) -> list[space.Values]:
        """Draws the candidates of all trials, once, before the first trial.

        Guarantee: as the proof of the strategy requires. Composition draws no candidate twice. The
        others draw a secret number of candidates from the strategy's distribution, independently
        and uniformly with replacement.

        Args:
          strategy: a `Composition`, `LiuTalwar` or `RepeatAndSelect`.
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
        """Turns the outcomes that may be shown into trials.

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
        """The best trials that may be shown and have a score, the best first."""
        return [trial for trial in self.trials.values() if trial.score is not None][:num_trials]

    def create_trial(self, tuner_id: str) -> Any:
        """Raises, since such a trial would bypass the journal."""
        raise NotImplementedError("HonestTuner draws all trials before the first one.")

    def save(self) -> None:
        """Writes nothing; see the class."""

    def reload(self) -> None:
        """Reads nothing; see the class."""
