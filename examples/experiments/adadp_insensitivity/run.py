"""ADADP on MNIST from initial learning rates that span five orders of magnitude.

The ADADP paper (version 1, "Comparison of ADADP against DP-Adam") starts at η₀ = 0.1 and reports
that the results are insensitive to it, since the algorithm finds its learning rate within the first
epoch. This experiment starts at 10⁻⁴, 10⁻³, … 10 at σ = 2, with the network, batches and epochs of
the paper's figure 4. It shows the learning rate and the accuracy by epoch.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one training image. Batches are
drawn by Poisson sampling, so the ε shown is a proven upper bound. Accuracy is measured on the test
images; nothing is tuned.

    python examples/experiments/adadp_insensitivity/run.py --scale small --data_dir ~/tfds
"""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import dense, harness, report
from examples.experiments.lib.datasets import images
from examples.experiments.lib.harness import Trial

load = functools.cache(images.mnist)  # once for each process

# By scale: epochs, seeds, first learning rates, training and test images, hidden units.
ALL_RATES = [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0]
SCALES = {
    "smoke": (3, 1, [1e-4, 1e-1, 10.0], 2000, 1000, [16]),
    "small": (10, 1, ALL_RATES, 60_000, 10_000, [256, 256]),
    "paper": (100, 3, ALL_RATES, 60_000, 10_000, [256, 256]),
}


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All initial learning rates with all seeds."""
    epochs, seeds, rates, num_train, num_test, hidden_units = SCALES[scale]
    return [
        {
            "optimizer": "ADADP",
            "arguments": {"learning_rate": rate},
            "noise_multiplier": 2.0,
            "seed": seed,
            "epochs": epochs,
            "num_train": num_train,
            "num_test": num_test,
            "hidden_units": hidden_units,
            "batch_size": 200,
            "l2_norm_clip": 1.0,
            "delta": 1e-5,
        }
        for seed in range(seeds)
        for rate in rates
    ]


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run."""
    train = load(data_dir, f"train[:{settings['num_train']}]")
    return dense.train(settings, train, load(data_dir, f"test[:{settings['num_test']}]"))


def by_start(trials: Sequence[Trial]) -> dict[float, list[Trial]]:
    """The runs by initial learning rate."""
    found = collections.defaultdict(list)
    for trial in trials:
        found[trial.settings["arguments"]["learning_rate"]].append(trial)
    return dict(sorted(found.items()))


def table(trials: Sequence[Trial]) -> str:
    """The final learning rate and accuracy."""
    rows = []
    for start, runs in by_start(trials).items():
        rates = np.mean([t.result["learning_rate"] for t in runs], axis=0)
        accuracy = report.mean([t.result["accuracy"][-1] for t in runs])
        rows.append([f"{start:g}", f"{rates[0]:.4g}", f"{rates[-1]:.4g}", accuracy, len(runs)])
    columns = ["η₀", "η after 1 epoch", "η at the end", "test accuracy", "seeds"]
    return report.table(columns, rows)


def plot(trials: Sequence[Trial]) -> Any:
    """Learning rate and test accuracy by epoch."""
    import matplotlib.pyplot as plt

    figure, (rate_axis, accuracy_axis) = plt.subplots(1, 2, figsize=(10, 4))
    for start, runs in by_start(trials).items():
        epochs = runs[0].result["epochs"]
        rates = np.mean([t.result["learning_rate"] for t in runs], axis=0)
        accuracies = np.mean([t.result["accuracy"] for t in runs], axis=0)
        rate_axis.plot([0, *epochs], [start, *rates], label=f"η₀ = {start:g}")
        accuracy_axis.plot(epochs, accuracies, label=f"η₀ = {start:g}")
    rate_axis.set(xlabel="epoch", ylabel="learning rate η", yscale="log")
    accuracy_axis.set(xlabel="epoch", ylabel="test accuracy")
    accuracy_axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("adadp_insensitivity", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
