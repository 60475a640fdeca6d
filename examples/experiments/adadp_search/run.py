"""How fast ADADP should look for its learning rate: the choice of `initial_factor`.

This experiment is not in the papers, where one adaptation changes the rate by a tenth at most
(ADADP, version 1, algorithm 1). It trains problems of `untuned`, some with larger batches or for
fewer epochs, on four fifths of their training data, with and without a search by factors of 2, and
measures accuracy on the last fifth. No test data are used, except that `untuned` takes the words
and document frequencies of the reviews from test inputs as public ones.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Batches are drawn by Poisson sampling. ε does not include the cost of a choice between the runs.

    python examples/experiments/adadp_search/run.py --scale small
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import harness, report
from examples.experiments.lib.harness import Trial
from examples.experiments.untuned import run as untuned

FACTORS = (1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem of `untuned`, with the length of a run.

    Attributes:
      data: its name.
      inputs: its units.
      noise_multiplier: σ.
      epochs: how long to train.
      batch_size: the expected size of a batch.
      seeds: of each factor.
    """

    data: str
    inputs: str
    noise_multiplier: float
    epochs: int
    batch_size: int
    seeds: int = 2


SETTINGS = {
    "smoke": [Setting("digits", "/ 16", 2.0, 2, 256, 1)],
    "small": [
        Setting("digits", "/ 16", 2.0, 20, 32, 8),
        Setting("digits", "/ 16", 8.0, 20, 32, 16),
        Setting("digits", "/ 16", 2.0, 20, 256, 8),
        Setting("adult", "in [0, 1]", 2.0, 2, 200, 4),
        Setting("reviews", "tf-idf", 2.0, 20, 1000),
        Setting("mnist", "/ 255", 2.0, 2, 200, 8),
        Setting("mnist", "/ 255", 2.0, 20, 2000),
        Setting("cifar10", "features", 2.0, 10, 2000),
        Setting("scattering", "normalized", 2.0, 10, 4096),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=2 * s.seeds) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Both factors with all seeds."""
    del trials
    return [
        {
            "data": setting.data,
            "inputs": setting.inputs,
            "factor": 1.0,
            "noise_multiplier": setting.noise_multiplier,
            "epochs": setting.epochs,
            "batch_size": setting.batch_size,
            "initial_factor": initial_factor,
            "seed": seed,
        }
        for setting in SETTINGS[scale]
        for seed in range(setting.seeds)
        for initial_factor in FACTORS
    ]


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: as `plan` makes them; "seed" determines the initial weights.
      data_dir: not used, since there are several data sets.

    Returns:
      See `training.fit`; evaluated once, on held-out training data.
    """
    del data_dir
    arguments = {
        "l2_norm_clip": 1.0,
        "initial_factor": settings["initial_factor"],
        "normalized_inputs": False,  # so that the first tolerance is at least 1, as in the paper
    }
    of_untuned = {**settings, "optimizer": "ADADP", "arguments": arguments, "normalized": True}
    problem = dataclasses.replace(
        untuned.PROBLEMS[settings["data"]], batch_size=settings["batch_size"]
    )
    return untuned.fit_without_test_data(of_untuned, problem)[0]


def by_problem(trials: Sequence[Trial]) -> dict[tuple, dict[float, list[Trial]]]:
    """Trials by problem, in the order of the experiment, and by factor."""
    found: dict[tuple, dict[float, list[Trial]]] = {}
    for trial in trials:
        names = ("data", "inputs", "noise_multiplier", "batch_size", "epochs")
        of_factor = found.setdefault(tuple(trial.settings[n] for n in names), {})
        of_factor.setdefault(trial.settings["initial_factor"], []).append(trial)
    return found


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, with and without the search."""
    rows = []
    for (data, inputs, sigma, batch_size, epochs), of_factor in by_problem(trials).items():
        values = {f: [t.result["accuracy"][-1] for t in runs] for f, runs in of_factor.items()}
        some = next(iter(of_factor.values()))
        rates = [t.result["learning_rate"][-1] for t in some]
        rows.append(
            [
                f"{data}, {inputs}, σ = {sigma:g}",
                batch_size,
                epochs,
                len(some),
                f"{np.mean(rates):.2g}",
                *(report.mean(values[f]) if f in values else "" for f in FACTORS),
            ]
        )
    columns = ["problem", "batches of", "epochs", "seeds", "last η"]
    return report.table([*columns, *(f"initial_factor = {f:g}" for f in FACTORS)], rows)


def plot(trials: Sequence[Trial]) -> Any:
    """By how much the search changes accuracy, problem by problem."""
    import matplotlib.pyplot as plt

    found = {
        f"{data}, σ = {sigma:g}, batches of {size}, {epochs} epochs": [
            [trial.result["accuracy"][-1] for trial in of_factor.get(f, [])] for f in FACTORS
        ]
        for (data, _, sigma, size, epochs), of_factor in by_problem(trials).items()
    }
    found = {name: both for name, both in found.items() if all(both)}
    figure, axis = plt.subplots(figsize=(8, 1.5 + 0.3 * len(found)))
    gains = [np.mean(after) - np.mean(before) for before, after in found.values()]
    errors = [
        np.hypot(*(np.std(values) / np.sqrt(len(values)) for values in both))
        for both in found.values()
    ]
    axis.errorbar(gains, range(len(found)), xerr=errors, fmt="o")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="held-out accuracy with the search minus that without")
    axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("adadp_search", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
