"""Private hyperparameter tuning, with the search counted in the privacy budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_adaptive_dp.tuning.budgets import (
    Recommendation,
    gamma_for_budget,
    mean_trials_for_budget,
    noise_multiplier_for_selection,
    num_trials_for_budget,
    recommend,
)
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.grids import default_grid, optimal_learning_rate
from tf_adaptive_dp.tuning.search_epsilon import (
    best_delta_2,
    composition_epsilon,
    liu_talwar_epsilon,
    repeat_and_select_epsilon,
)
from tf_adaptive_dp.tuning.strategies import (
    Composition,
    LiuTalwar,
    NoisyScore,
    PublicScore,
    RepeatAndSelect,
    UnprotectedScore,
)
from tf_adaptive_dp.update_rules.step_doubling import suggest_tolerance

if TYPE_CHECKING:  # so that tools which read the source find it here too; see `__getattr__`
    from tf_adaptive_dp.tuning.keras_tuner.tuner import HonestTuner

__all__ = [
    "Accounting",
    "Composition",
    "HonestTuner",
    "LiuTalwar",
    "NoisyScore",
    "PublicScore",
    "Recommendation",
    "RepeatAndSelect",
    "UnprotectedScore",
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
    "suggest_tolerance",
]


def __getattr__(name: str) -> Any:
    """Loads `HonestTuner` on first use, because KerasTuner is an optional dependency."""
    if name != "HonestTuner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tf_adaptive_dp.tuning.keras_tuner.tuner import HonestTuner
    except ModuleNotFoundError as error:
        if error.name != "keras_tuner":
            raise
        raise ImportError(
            "HonestTuner requires KerasTuner: pip install 'tf-adaptive-dp[tuning]'"
        ) from None
    return HonestTuner
