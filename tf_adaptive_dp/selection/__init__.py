"""Honest selection: choose among trained models, and pay for the choice inside the budget."""

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
