"""What HonestTuner is asked for: checks of its arguments, before anything is drawn or trained."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import keras_tuner

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.privacy import files
from tf_adaptive_dp.privacy import sampling as samplings
from tf_adaptive_dp.selection import space
from tf_adaptive_dp.selection.fit_arguments import FitArguments
from tf_adaptive_dp.selection.strategies import Composition, LiuTalwar, RepeatAndSelect

_NAMES = ("composition", "liu_talwar", "repeat_and_select")


def strategy(named: Any, num_trials: float | None) -> Any:
    """The strategy that is meant; `None` for the composition of a whole space.

    Raises:
      TypeError, ValueError: if it is none, or the number of trials is missing or said twice.
    """
    if isinstance(named, (Composition, LiuTalwar, RepeatAndSelect)):
        if num_trials is not None:
            raise ValueError(
                "The strategy says how many trials there are: leave out `num_trials`. Received: "
                f"num_trials={num_trials!r}, strategy={named!r}"
            )
        return named
    name = checks.choice("strategy", named, _NAMES)
    if name == "composition":
        return None if num_trials is None else Composition(num_trials)
    if num_trials is None:
        raise ValueError(
            f"`num_trials` is required with strategy={name!r}: the mean number of trials. "
            "Received: num_trials=None"
        )
    mean = checks.number("num_trials", num_trials, 1)
    return LiuTalwar(gamma=1 / mean) if name == "liu_talwar" else RepeatAndSelect(mean)


def fitted(strategy: Any, hyperparameters: keras_tuner.HyperParameters) -> Any:
    """The strategy for a space: composition never has more trials than there are candidates.

    Raises:
      ValueError: if a whole space is asked for that is not finite.
    """
    if strategy is not None and not strategy.releases_all:
        return strategy
    candidates = space.listed(hyperparameters)
    if candidates is None:
        if strategy is None:
            raise ValueError(
                "The space is not finite, or very large: pass `num_trials`, or give its numbers a "
                "`step`. Received: num_trials=None"
            )
        return strategy
    if strategy is None:
        return Composition(len(candidates))
    return dataclasses.replace(strategy, num_trials=min(strategy.num_trials, len(candidates)))


# Arguments of KerasTuner's tuners and oracles, and what to do instead.
_CANDIDATES = (
    "candidates must not depend on the results of others; see `strategy` for the ways to search"
)
_GROWS = (
    "the space is fixed before the search: declare all hyperparameters in `build_model`, or pass "
    "those that may be tuned as `hyperparameters`"
)
_COMPILED = "compile the models in `build_model`, which all cost the same"
_KERAS_TUNER = {
    "max_trials": (
        "the number of trials, or its mean, is `num_trials`; with 'composition' it may be left out"
    ),
    "seed": "candidates are secret, drawn with the operating system's entropy",
    "executions_per_trial": (
        "a trial trains one model, and a second would be paid for like another trial: let "
        "`num_trials` be larger"
    ),
    "max_retries_per_trial": "a trial that crashed is paid for and counts as the worst",
    "max_consecutive_failed_trials": (
        "no number of crashes ends a search, since that would tell of its trials"
    ),
    "tune_new_entries": _GROWS,
    "allow_new_entries": _GROWS,
    "max_model_size": "leave models that are too large out of the space",
    "optimizer": _COMPILED,
    "loss": _COMPILED,
    "metrics": _COMPILED,
    "distribution_strategy": "make it a part of `build_model`, if its optimizer allows replicas",
    "oracle": _CANDIDATES,
    "max_epochs": "`epochs` is an argument of `search`, the same for all trials",
    "logger": "KerasTuner no longer uses it",
    "tuner_id": "one process at a time is at a search",
    **dict.fromkeys(
        ("factor", "hyperband_iterations", "num_initial_points", "alpha", "beta"), _CANDIDATES
    ),
}


def refuse_keras_tuners(given: dict[str, Any]) -> None:
    """Raises TypeError for arguments of KerasTuner that HonestTuner does not have, and any other.

    Args:
      given: arguments beyond those of HonestTuner, by name.
    """
    for name, value in given.items():
        if name not in _KERAS_TUNER:
            raise TypeError(f"HonestTuner got an unexpected keyword argument: {name}={value!r}")
        raise TypeError(
            f"HonestTuner has no `{name}`: {_KERAS_TUNER[name]}. Leave it out. Received: "
            f"{name}={value!r}"
        )


def check_score(score: Any) -> Any:
    """Returns `score` if it is one; raises TypeError if not."""
    if isinstance(score, type) or not all(
        hasattr(score, name) for name in ("event", "released", "sentence")
    ):
        raise TypeError(
            "`score` must say what the validation data are: PublicScore(), NoisyScore(...) or "
            f"FreeScore(). Received: score={score!r}"
        )
    return score


def check_sampling(sampling: samplings.Sampling | str) -> samplings.Sampling | str:
    """Returns `sampling`, or raises ValueError if a search cannot account for it."""
    samplings.check_sampling(sampling)
    if samplings.label_of(sampling) == "fixed":
        raise ValueError(
            "Selection is accounted for adding or removing an example, and subsets of a fixed size "
            f"for replacing one: draw Poisson batches. Received: sampling={sampling!r}"
        )
    if getattr(sampling, "seed", None) is not None:
        raise ValueError(
            "With a seed all trials would have the same batches, which anyone can foretell: leave "
            f"it out. Received: sampling={sampling!r}"
        )
    return sampling


def check_objective(objective: keras_tuner.Objective) -> None:
    """Raises NotPrivateError if scores would not be computed from the validation data."""
    names = list(getattr(objective, "name_to_direction", {objective.name: None}))
    if not all(name.startswith("val_") for name in names):
        raise NotPrivateError(
            "Candidates are compared by metrics of the validation data: those of the training data "
            "are not private. Pass an `objective` that begins with 'val_'. Received: "
            f"objective={names}"
        )


def check_hypermodel(hypermodel: keras_tuner.HyperModel) -> None:
    """Raises ValueError if it trains models itself."""
    if type(hypermodel).fit is not keras_tuner.HyperModel.fit or "fit" in vars(hypermodel):
        raise ValueError(
            "Every candidate is trained by the arguments of `search`, so that all cost the same: "
            f"leave out the method `fit` of the hypermodel. Received: hypermodel={hypermodel!r}"
        )


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raises an error if a project cannot be used here, before it is changed.

    Raises:
      ValueError: if it is another tuner's.
      RuntimeError: if it is to be overwritten, and in use by another process.
      NotImplementedError: if KerasTuner's parallel search is asked for.
    """
    if "KERASTUNER_ORACLE_IP" in os.environ:
        raise NotImplementedError(
            "HonestTuner cannot search in parallel: its journal is for one process. Unset "
            "KERASTUNER_ORACLE_IP. Received: "
            f"KERASTUNER_ORACLE_IP={os.environ['KERASTUNER_ORACLE_IP']!r}"
        )
    if not overwrite and list(folder.glob("tuner*.json")):
        raise ValueError(
            "The folder holds a search of another tuner: pass another `project_name`. Received: "
            f"{str(folder)!r}"
        )
    if overwrite and is_in_use(folder):
        raise RuntimeError(
            "The search is in progress in another process, so it cannot be overwritten. "
            f"Received: {str(folder)!r}"
        )


def is_in_use(folder: Path) -> bool:
    """Whether a process is at the search in this folder."""
    try:
        file = os.open(folder / "secret" / "journal", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        files.lock(file, "")
    except RuntimeError:
        return True
    finally:
        os.close(file)
    return False


def check_rows(
    data: FitArguments,
    num_examples: int,
    batch_size: float,
    parts: int,
    sampling: samplings.Sampling | str,
) -> None:
    """Raises ValueError if arrays do not have the size, or the batches, that noise is made for."""
    if data.num_rows is None:
        return
    if data.num_rows < num_examples:
        raise ValueError(
            "`num_examples` must be the size of the training set, or epsilon would be too small. "
            f"Received: num_examples={num_examples}, and arrays of {data.num_rows} rows"
        )
    if sampling != "shuffled" and getattr(sampling, "label", None) != "shuffled":
        raise ValueError(
            "`fit` shuffles arrays: pass the data set that the sampling made, or leave out "
            f"`sampling`. Received: sampling={sampling!r}"
        )
    if data.batch_size * parts != batch_size:
        raise ValueError(
            "`batch_size` of `search`, times the optimizer's `gradient_accumulation_steps`, must "
            f"be the optimizer's `expected_batch_size`. Received: batch_size={data.batch_size}, "
            f"gradient_accumulation_steps={parts}, expected_batch_size={batch_size:g}"
        )
