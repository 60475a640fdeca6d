"""Whether averages of ADADP's weights are better than its last weights.

This experiment is not in the papers. It trains problems of `untuned` with `use_ema=True`, on four
fifths of their training data, and measures the accuracy of both on the last fifth; see
`lib/held_out.py`. The averages change nothing about the training, so each run gives both figures.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Averages are post-processing. Batches are drawn by Poisson sampling. ε does not include the cost of
a choice between the runs.

    python examples/experiments/adadp_averages/run.py --scale small
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from examples.experiments.lib import harness, held_out, report
from examples.experiments.lib.harness import Trial
from examples.experiments.lib.held_out import Setting

MOMENTUM = (0.9,)
SETTINGS = {
    "smoke": [Setting("digits", "/ 16", 2.0, MOMENTUM, epochs=2)],
    "small": [
        Setting("digits", "/ 16", 1.0, MOMENTUM, 8),
        Setting("digits", "/ 16", 2.0, MOMENTUM, 8),
        Setting("digits", "/ 16", 8.0, MOMENTUM, 8),
        Setting("digits", "/ 16", 2.0, MOMENTUM, 8, batch_size=256, epochs=20),
        Setting("digits", "0 to 16", 2.0, MOMENTUM, 8, normalized=False),
        Setting("adult", "in [0, 1]", 2.0, MOMENTUM, 4),
        Setting("adult", "in [0, 1]", 2.0, MOMENTUM, 4, epochs=2),
        Setting("adult", "raw numbers", 2.0, MOMENTUM, 4, normalized=False),
        Setting("mnist", "/ 255", 2.0, MOMENTUM, 2),
        Setting("mnist", "/ 255", 2.0, MOMENTUM, 2, batch_size=2000),
        Setting("mnist", "/ 255", 8.0, MOMENTUM, 2),
        Setting("mnist", "pixels", 2.0, MOMENTUM, 2, normalized=False),
        Setting("cifar10", "features", 2.0, MOMENTUM, 2),
        Setting("cifar10", "features", 2.0, MOMENTUM, 2, batch_size=2000),
        Setting("cifar10", "features", 8.0, MOMENTUM, 2),
        Setting("scattering", "normalized", 2.0, MOMENTUM, 2, epochs=10),
        Setting("reviews", "tf-idf", 1.0, MOMENTUM, 2),
        Setting("reviews", "tf-idf", 8.0, MOMENTUM, 2),
        Setting("reviews", "counts / 290", 1.0, MOMENTUM, 2, normalized=False),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=2 * s.seeds) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All problems with all seeds."""
    del trials
    return held_out.plan(SETTINGS[scale], "ema_momentum")


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run; see `held_out.train`."""
    del data_dir  # there are several data sets
    arguments = {"use_ema": True, "ema_momentum": settings["ema_momentum"]}
    return held_out.train(settings, arguments)


def both(trials: Sequence[Trial]) -> dict[str, tuple[list[float], list[float]]]:
    """The accuracy of the last weights and that of the averages, run by run, by problem."""
    found = {}
    for problem, by_value in held_out.by_problem(trials, "ema_momentum"):
        (runs,) = by_value.values()
        last = [run.result["accuracy_unaveraged"][-1] for run in runs]
        name = f"{held_out.title(problem)}, {held_out.length(problem)}"
        found[name] = last, held_out.accuracies(runs)
    return found


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, and what averages change, with its standard error."""
    rows = []
    for name, (last, averaged) in both(trials).items():
        change = np.subtract(averaged, last)
        shown = f"{np.mean(change):+.4f}"
        if len(change) > 1:
            shown += f" ± {stats.sem(change):.4f}"
        rows.append([name, len(last), report.mean(last), report.mean(averaged), shown])
    return report.table(["problem", "seeds", "last weights", "averages", "change"], rows)


def plot(trials: Sequence[Trial]) -> Any:
    """What averages change, problem by problem."""
    return held_out.plot_gains(both(trials), "averaged weights minus that with the last", True)


EXPERIMENT = harness.Experiment("adadp_averages", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
