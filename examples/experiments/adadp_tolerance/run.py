"""The tolerance at which ADADP should start, by the size of the network: the choice of the default.

This experiment is not in the papers, where the tolerance is 1 (ADADP, version 1, algorithm 1). It
trains the problems of `untuned`, and a wider network, on four fifths of their training data with
several first tolerances, on inputs that `PrivateNormalization` normalizes and on some as they are,
and measures accuracy on the last fifth. No test data are used, except that `untuned` takes the
words and document frequencies of the reviews, and the means of CIFAR-10's features, from test
inputs as public ones.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Batches are drawn by Poisson sampling. ε does not include the cost of a choice between the runs.

    python examples/experiments/adadp_tolerance/run.py --scale small
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import tf_adaptive_dp
from examples.experiments.lib import harness, report
from examples.experiments.lib.harness import Trial
from examples.experiments.untuned import run as untuned


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem of `untuned`, and the first tolerances to compare on it.

    Attributes:
      data: its name.
      inputs: its units.
      noise_multiplier: σ.
      tolerances: the first tolerances.
      seeds: of each tolerance.
      hidden_units: `None` for those of the problem.
      epochs: likewise.
      normalized: whether the inputs are normalized.
    """

    data: str
    inputs: str
    noise_multiplier: float
    tolerances: tuple[float, ...]
    seeds: int = 1
    hidden_units: tuple[int, ...] | None = None
    epochs: int | None = None
    normalized: bool = True


WIDE = (1024, 1024)
SETTINGS = {
    "smoke": [Setting("digits", "/ 16", 2.0, (0.5, 1.0), epochs=2)],
    "small": [
        Setting("digits", "/ 16", 1.0, (0.125, 0.25, 0.5, 1.0), 4),
        Setting("digits", "/ 16", 2.0, (0.125, 0.25, 0.5, 1.0), 4),
        Setting("digits", "/ 16", 8.0, (0.25, 0.5, 1.0), 4),
        Setting("adult", "in [0, 1]", 1.0, (0.125, 0.25, 0.5, 1.0), 2),
        Setting("adult", "in [0, 1]", 2.0, (0.125, 0.25, 0.5, 1.0, 2.0), 2),
        Setting("adult", "in [0, 1]", 8.0, (0.25, 0.5, 1.0), 2),
        Setting("adult", "in [0, 1]", 2.0, (0.5, 1.0), 2, normalized=False),
        Setting("reviews", "tf-idf", 1.0, (0.125, 0.25, 0.5, 1.0, 2.0)),
        Setting("reviews", "tf-idf", 2.0, (0.25, 0.5, 1.0)),
        Setting("reviews", "tf-idf", 8.0, (0.5, 1.0, 2.0)),
        Setting("reviews", "counts", 8.0, (0.5, 1.0, 2.0)),
        Setting("reviews", "tf-idf", 1.0, (0.5, 1.0), 2, normalized=False),
        Setting("reviews", "counts / 290", 1.0, (0.25, 0.5, 1.0)),
        Setting("mnist", "standardized", 1.0, (0.5, 1.0, 2.0)),
        Setting("mnist", "standardized", 2.0, (0.5, 1.0, 2.0, 4.0)),
        Setting("mnist", "standardized", 8.0, (0.5, 1.0, 2.0, 4.0)),
        Setting("mnist", "standardized", 2.0, (1.0, 2.0, 4.0, 8.0), 1, WIDE, 10),
        Setting("cifar10", "standardized", 2.0, (1.0, 2.0, 4.0)),
        Setting("cifar10", "features", 8.0, (1.0, 2.0, 4.0)),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=4) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All first tolerances with all seeds."""
    del trials
    found = []
    for setting in SETTINGS[scale]:
        problem = untuned.PROBLEMS[setting.data]
        common = {
            "data": setting.data,
            "inputs": setting.inputs,
            "factor": 1.0,
            "noise_multiplier": setting.noise_multiplier,
            "hidden_units": list(setting.hidden_units or problem.hidden_units),
            "epochs": setting.epochs or problem.epochs,
            "normalized": setting.normalized,
        }
        found += [
            {**common, "tolerance": tolerance, "seed": seed}
            for tolerance in setting.tolerances
            for seed in range(setting.seeds)
        ]
    return found


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: as `plan` makes them; "seed" determines the initial weights.
      data_dir: not used, since there are several data sets.

    Returns:
      See `training.fit`, and "num_parameters"; evaluated once, on held-out training data.
    """
    del data_dir
    arguments = {"l2_norm_clip": 1.0, "tolerance": settings["tolerance"]}
    of_untuned = {**settings, "optimizer": "ADADP", "arguments": arguments}
    problem = dataclasses.replace(
        untuned.PROBLEMS[settings["data"]], hidden_units=tuple(settings["hidden_units"])
    )
    result, model = untuned.fit_without_test_data(of_untuned, problem)
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    return {**result, "num_parameters": sum(sizes)}


def by_problem(trials: Sequence[Trial]) -> dict[tuple, dict[float, list[float]]]:
    """Accuracies by problem, with its number of parameters, and by tolerance."""
    found: dict[tuple, dict[float, list[float]]] = {}
    for trial in trials:
        names = ("data", "inputs", "noise_multiplier", "epochs", "normalized")
        key = (trial.result["num_parameters"], *(trial.settings[n] for n in names))
        of_tolerance = found.setdefault(key, {})
        accuracy = trial.result["accuracy"][-1]
        of_tolerance.setdefault(trial.settings["tolerance"], []).append(accuracy)
    return dict(sorted(found.items()))


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, by the first tolerance; a column has the default."""
    found = by_problem(trials)
    tolerances = sorted({t for of_tolerance in found.values() for t in of_tolerance})
    rows = []
    for (size, data, inputs, sigma, epochs, normalized), of_tolerance in found.items():
        means = {t: np.mean(values) for t, values in of_tolerance.items()}
        best = max(means, key=means.__getitem__)
        marks = {t: "**" if t == best else "" for t in means}
        cells = [
            f"{marks[t]}{report.mean(of_tolerance[t])}{marks[t]}" if t in means else ""
            for t in tolerances
        ]
        default = float(
            tf_adaptive_dp.update_rules.step_doubling.default_tolerance(size, normalized, sigma)
        )
        name = f"{_units(data, inputs, normalized)}, σ = {sigma:g}, {epochs} epochs"
        rows.append([name, f"{size:,}", f"{default:.2f}", *cells])
    columns = ["problem", "parameters", "default", *(f"{t:g}" for t in tolerances)]
    return report.table(columns, rows)


def _units(data: str, inputs: str, normalized: bool) -> str:
    return f"{data}, {inputs}" + ("" if normalized else ", not normalized")


def plot(trials: Sequence[Trial]) -> Any:
    """How far the accuracy at each tolerance is from that at the best one."""
    import matplotlib.pyplot as plt

    found = by_problem(trials)
    sizes = sorted({size for size, *_ in found})  # a color for each
    tolerances = sorted({t for of_tolerance in found.values() for t in of_tolerance})
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for number, (problem, of_tolerance) in enumerate(found.items()):
        size, data, inputs, sigma, _, normalized = problem
        means = {t: float(np.mean(values)) for t, values in sorted(of_tolerance.items())}
        best = max(means.values())
        axis.plot(
            list(means),
            [mean - best for mean in means.values()],
            color=f"C{sizes.index(size)}",
            marker="os^Dv"[number % 5],
            linestyle=("-", "--", ":")[number % 3],
            label=f"{_units(data, inputs, normalized)}, σ = {sigma:g}, d = {size:,}",
        )
    axis.set(xlabel="first tolerance", ylabel="held-out accuracy minus that of the best")
    axis.set_xscale("log", base=2)
    axis.set_xticks(tolerances, [f"{t:g}" for t in tolerances])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("adadp_tolerance", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
