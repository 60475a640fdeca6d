"""The tolerance at which ADADP should start, by the size of the network: the choice of the default.

This experiment is not in the papers, where the tolerance is 1 (ADADP, version 1, algorithm 1). It
trains problems of `untuned`, and a wider and a narrower network, on four fifths of their training
data with several first tolerances, on inputs that `PrivateNormalization` normalizes and on some as
they are, and measures accuracy on the last fifth; see `lib/held_out.py`.

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
from examples.experiments.lib import harness, held_out, report
from examples.experiments.lib.harness import Trial
from examples.experiments.lib.held_out import Setting

NARROW, WIDE = (64,), (1024, 1024)
# Of the training data; four fifths of them are trained on.
NUM_EXAMPLES = {
    **{"digits": 1_437, "adult": 32_561, "reviews": 25_000},
    **{"mnist": 60_000, "scattering": 60_000, "cifar10": 50_000},
}
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
        Setting("mnist", "standardized", 2.0, (1.0, 2.0, 4.0, 8.0), 1, WIDE, epochs=10),
        *(
            Setting("mnist", "standardized", sigma, values, 1, NARROW, batch_size, epochs)
            for sigma, values, batch_size, epochs in [
                (1.0, (0.5, 1.0, 2.0), 200, 5),
                (1.0, (0.5, 1.0, 2.0, 4.0), 1_000, 10),
                (2.0, (0.5, 1.0, 2.0), 200, 20),
                (8.0, (0.5, 1.0, 2.0), 200, 20),
            ]
        ),
        Setting("scattering", "normalized", 2.0, (0.5, 1.0, 2.0), epochs=10),
        Setting("cifar10", "standardized", 2.0, (1.0, 2.0, 4.0)),
        Setting("cifar10", "features", 8.0, (1.0, 2.0, 4.0)),
        # In batches as a plan chooses them, with the noise of another σ that spends as much in
        # smaller ones: 2, 4 and 8 on MNIST, 2 on CIFAR-10, and 1 on reviews.
        Setting("mnist", "/ 255", 4.4, (1.0, 1.5, 2.0, 3.0), 2, batch_size=1_024),
        Setting("mnist", "/ 255", 20.0, (1.0, 1.5, 2.0, 3.0), 2, batch_size=1_024),
        Setting("cifar10", "features", 3.3, (1.0, 2.0, 3.0, 4.0), batch_size=571),
        Setting("mnist", "standardized", 9.3, (1.0, 1.5, 2.0, 3.0), batch_size=1_024),
        Setting("mnist", "standardized", 1.3, (1.0, 1.5, 2.0), batch_size=1_024),
        Setting("reviews", "tf-idf", 2.3, (0.25, 0.5, 1.0), batch_size=571),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=4) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All first tolerances with all seeds."""
    del trials
    return held_out.plan(SETTINGS[scale], "tolerance")


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run; see `held_out.train`."""
    del data_dir  # there are several data sets
    return held_out.train(settings, {"tolerance": settings["tolerance"]})


def by_size(trials: Sequence[Trial]) -> list[tuple[int, dict[str, Any], dict[float, list[float]]]]:
    """Numbers of parameters, in ascending order; problems; and accuracies by tolerance."""
    found = [
        (
            next(iter(by_value.values()))[0].result["num_parameters"],
            problem,
            {t: held_out.accuracies(runs) for t, runs in sorted(by_value.items())},
        )
        for problem, by_value in held_out.by_problem(trials, "tolerance")
    ]
    return sorted(found, key=lambda entry: entry[0])


def num_steps(problem: dict[str, Any]) -> int:
    """The minibatches of a run."""
    num_examples = NUM_EXAMPLES[problem["data"]] * 4 // 5
    return num_examples // problem["batch_size"] * problem["epochs"]


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, by the first tolerance; a column has a plan's default."""
    found = by_size(trials)
    tolerances = sorted({t for *_, of_tolerance in found for t in of_tolerance})
    rows = []
    for size, problem, of_tolerance in found:
        means = {t: np.mean(values) for t, values in of_tolerance.items()}
        best = max(means, key=means.__getitem__)
        marks = {t: "**" if t == best else "" for t in means}
        cells = [
            f"{marks[t]}{report.mean(of_tolerance[t])}{marks[t]}" if t in means else ""
            for t in tolerances
        ]
        default = float(
            tf_adaptive_dp.update_rules.step_doubling.default_tolerance(
                size, problem["normalized"], problem["noise_multiplier"], num_steps(problem)
            )
        )
        name = f"{held_out.title(problem)}, {held_out.length(problem)}"
        rows.append([name, f"{size:,}", f"{default:.2f}", *cells])
    columns = ["problem", "parameters", "default", *(f"{t:g}" for t in tolerances)]
    return report.table(columns, rows)


def plot(trials: Sequence[Trial]) -> Any:
    """How far the accuracy at each tolerance is from that at the best one."""
    import matplotlib.pyplot as plt

    found = by_size(trials)
    sizes = sorted({size for size, *_ in found})  # a color for each
    tolerances = sorted({t for *_, of_tolerance in found for t in of_tolerance})
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for number, (size, problem, of_tolerance) in enumerate(found):
        means = {t: float(np.mean(values)) for t, values in of_tolerance.items()}
        best = max(means.values())
        axis.plot(
            list(means),
            [mean - best for mean in means.values()],
            color=f"C{sizes.index(size)}",
            marker="os^Dv"[number % 5],
            linestyle=("-", "--", ":")[number % 3],
            label=f"{held_out.title(problem)}, d = {size:,}",
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
