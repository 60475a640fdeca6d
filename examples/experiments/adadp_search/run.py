"""How fast ADADP should look for its learning rate: the choice of `initial_factor`.

This experiment is not in the papers, where one adaptation changes the rate by a tenth at most
(ADADP, version 1, algorithm 1). It trains problems of `untuned`, some with larger batches or for
fewer epochs, on four fifths of their training data, with and without a search by factors of 2, and
measures accuracy on the last fifth; see `lib/held_out.py`.

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

from examples.experiments.lib import harness, held_out, report
from examples.experiments.lib.harness import Trial
from examples.experiments.lib.held_out import Setting

FACTORS = (1.0, 2.0)


SETTINGS = {
    "smoke": [Setting("digits", "/ 16", 2.0, FACTORS, batch_size=256, epochs=2)],
    "small": [
        Setting("digits", "/ 16", 2.0, FACTORS, 8, epochs=20),
        Setting("digits", "/ 16", 8.0, FACTORS, 16, epochs=20),
        Setting("digits", "/ 16", 2.0, FACTORS, 8, batch_size=256, epochs=20),
        Setting("adult", "in [0, 1]", 2.0, FACTORS, 4, epochs=2),
        Setting("reviews", "tf-idf", 2.0, FACTORS, 2, batch_size=1000),
        Setting("mnist", "/ 255", 2.0, FACTORS, 8, epochs=2),
        Setting("mnist", "/ 255", 2.0, FACTORS, 2, batch_size=2000),
        Setting("cifar10", "features", 2.0, FACTORS, 2, batch_size=2000),
        Setting("scattering", "normalized", 2.0, FACTORS, 2, epochs=10),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=2 * s.seeds) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Both factors with all seeds."""
    del trials
    return held_out.plan(SETTINGS[scale], "initial_factor")


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run; see `held_out.train`."""
    del data_dir  # there are several data sets
    # The first tolerance is at least 1, as in the paper.
    arguments = {"initial_factor": settings["initial_factor"], "normalized_inputs": False}
    return held_out.train(settings, arguments)


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, with and without the search."""
    rows = []
    for problem, by_value in held_out.by_problem(trials, "initial_factor"):
        some = next(iter(by_value.values()))
        rates = [t.result["learning_rate"][-1] for t in some]
        cells = [
            report.mean(held_out.accuracies(by_value[f])) if f in by_value else "" for f in FACTORS
        ]
        size = problem["batch_size"], problem["epochs"]
        rate = f"{np.mean(rates):.2g}"
        rows.append([held_out.title(problem), *size, len(some), rate, *cells])
    columns = ["problem", "batches of", "epochs", "seeds", "last η"]
    return report.table([*columns, *(f"initial_factor = {f:g}" for f in FACTORS)], rows)


def plot(trials: Sequence[Trial]) -> Any:
    """By how much the search changes accuracy, problem by problem."""
    found = held_out.gains(trials, "initial_factor")
    return held_out.plot_gains(found, "the search minus that without")


EXPERIMENT = harness.Experiment("adadp_search", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
