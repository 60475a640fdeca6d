"""Honest selection: choose among trained models, and pay for the choice inside the budget."""

from __future__ import annotations

from typing import Any

from tf_adaptive_dp.selection.accounting import (
    best_delta_2,
    composition_epsilon,
    liu_talwar_epsilon,
    repeat_and_select_epsilon,
)
from tf_adaptive_dp.selection.budgets import (
    gamma_for_budget,
    mean_trials_for_budget,
    noise_multiplier_for_selection,
    num_trials_for_budget,
)
from tf_adaptive_dp.selection.grids import default_grid, optimal_learning_rate
from tf_adaptive_dp.selection.recommend import Recommendation, recommend
from tf_adaptive_dp.selection.scores import FreeScore, NoisyScore, PublicScore
from tf_adaptive_dp.selection.strategies import Composition, LiuTalwar, RepeatAndSelect

__all__ = [
    "Composition",
    "FreeScore",
    "HonestTuner",
    "LiuTalwar",
    "NoisyScore",
    "PublicScore",
    "Recommendation",
    "RepeatAndSelect",
    "best_delta_2",
    "composition_epsilon",
    "default_grid",
    "gamma_for_budget",
    "liu_talwar_epsilon",
    "mean_trials_for_budget",
    "noise_multiplier_for_selection",
    "num_trials_for_budget",
    "optimal_learning_rate",
    "recommend",
    "repeat_and_select_epsilon",
]


def __getattr__(name: str) -> Any:
    """Loads `HonestTuner` when it is asked for, since KerasTuner is an extra."""
    if name != "HonestTuner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tf_adaptive_dp.selection.tuner import HonestTuner
    except ModuleNotFoundError as error:
        if error.name != "keras_tuner":
            raise
        raise ImportError(
            "HonestTuner needs KerasTuner: pip install 'tf-adaptive-dp[tuning]'"
        ) from None
    return HonestTuner
