"""Experiments that choose one default of ADADP, without test data.

Each runs ADADP with several values of one argument on problems of `untuned`, or variants of them.
It trains on four fifths of the training data and measures accuracy on the last fifth. No test data
are used, except that `untuned` takes the words and document frequencies of the reviews, and the
means of CIFAR-10's features, from test inputs as public ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from examples.experiments.lib.harness import Trial
from examples.experiments.untuned import run as untuned

# What tells one problem from another in the settings of a trial.
_KEYS = (
    *("data", "inputs", "noise_multiplier", "hidden_units", "batch_size", "epochs"),
    "normalized",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem of `untuned`, or a variant of it, and the values to compare on it.

    Attributes:
      data: its name.
      inputs: its units.
      noise_multiplier: σ.
      values: of the argument whose default is to be chosen.
      seeds: of each value.
      hidden_units: `None` for those of the problem; likewise the next two.
      batch_size: the expected size of a batch.
      epochs: how long to train.
      normalized: whether the inputs are normalized.
    """

    data: str
    inputs: str
    noise_multiplier: float
    values: tuple[float, ...]
    seeds: int = 1
    hidden_units: tuple[int, ...] | None = None
    batch_size: int | None = None
    epochs: int | None = None
    normalized: bool = True


def plan(settings: Sequence[Setting], argument: str) -> list[dict[str, Any]]:
    """All values of an argument with all seeds.

    Args:
      settings: the problems.
      argument: the name of the argument of `ADADP`.
    """
    found = []
    for setting in settings:
        problem = untuned.PROBLEMS[setting.data]
        common = {
            "data": setting.data,
            "inputs": setting.inputs,
            "factor": 1.0,
            "noise_multiplier": setting.noise_multiplier,
            "hidden_units": list(setting.hidden_units or problem.hidden_units),
            "batch_size": setting.batch_size or problem.batch_size,
            "epochs": setting.epochs or problem.epochs,
            "normalized": setting.normalized,
        }
        found += [
            {**common, argument: value, "seed": seed}
            for seed in range(setting.seeds)
            for value in setting.values
        ]
    return found


def train(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One run.

    Args:
      settings: as `plan` makes them; "seed" determines the initial weights.
      arguments: those of `ADADP` besides the clip.

    Returns:
      See `training.fit`, and "num_parameters"; evaluated once, on held-out training data.
    """
    of_untuned = {
        **settings,
        "optimizer": "ADADP",
        "arguments": {"l2_norm_clip": 1.0, **arguments},
    }
    problem = dataclasses.replace(
        untuned.PROBLEMS[settings["data"]],
        hidden_units=tuple(settings["hidden_units"]),
        batch_size=settings["batch_size"],
    )
    result, model = untuned.fit_without_test_data(of_untuned, problem)
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    return {**result, "num_parameters": sum(sizes)}


def by_problem(
    trials: Sequence[Trial], argument: str
) -> list[tuple[dict[str, Any], dict[float, list[Trial]]]]:
    """Trials by problem, in the order of the experiment, and by value of the argument."""
    found: dict[str, tuple[dict[str, Any], dict[float, list[Trial]]]] = {}
    for trial in trials:
        problem = {key: trial.settings[key] for key in _KEYS}
        _, by_value = found.setdefault(str(problem), (problem, {}))
        by_value.setdefault(trial.settings[argument], []).append(trial)
    return list(found.values())


def accuracies(trials: Sequence[Trial]) -> list[float]:
    """The accuracy on held-out data of each run."""
    return [trial.result["accuracy"][-1] for trial in trials]


def title(problem: Mapping[str, Any]) -> str:
    """A problem in words, such as "digits, / 16, σ = 2"."""
    more = "" if problem["normalized"] else ", not normalized"
    return f"{problem['data']}, {problem['inputs']}{more}, σ = {problem['noise_multiplier']:g}"


def gains(
    trials: Sequence[Trial], argument: str
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """The accuracies with the smaller and the larger of two values, by problem.

    Args:
      trials: of an experiment with two values; problems that lack one of them are left out.
      argument: the name of the argument.
    """
    found = {}
    for problem, by_value in by_problem(trials, argument):
        if len(by_value) == 2:
            smaller, larger = (accuracies(by_value[value]) for value in sorted(by_value))
            found[f"{title(problem)}, {length(problem)}"] = smaller, larger
    return found


def length(problem: Mapping[str, Any]) -> str:
    """The length of a run in words, such as "batches of 32, 40 epochs"."""
    return f"batches of {problem['batch_size']:,}, {problem['epochs']} epochs"


def plot_gains(
    found: Mapping[str, tuple[Sequence[float], Sequence[float]]], what: str, paired: bool = False
) -> Any:
    """How much better the second of two choices is than the first, problem by problem.

    Args:
      found: the accuracies with both, by problem.
      what: the axis shows "held-out accuracy with" this.
      paired: whether the two lists have one entry for each run.

    Returns:
      A matplotlib figure; the bars are standard errors.
    """
    import matplotlib.pyplot as plt

    means, errors = [], []
    for first, second in found.values():
        means.append(np.mean(second) - np.mean(first))
        parts = [np.subtract(second, first)] if paired else [first, second]
        errors.append(np.hypot.reduce([stats.sem(part) for part in parts]))
    figure, axis = plt.subplots(figsize=(8, 1.5 + 0.3 * len(found)))
    axis.errorbar(means, range(len(found)), xerr=errors, fmt="o")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=f"held-out accuracy with\n{what}")
    axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    return figure
