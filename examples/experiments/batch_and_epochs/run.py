"""Which batch size and number of epochs to choose for a budget, if nothing else is tuned.

This experiment is not in the papers. It trains problems of `untuned` with ADADP's defaults and
normalized inputs, at the same (ε, δ), with several batch sizes and numbers of epochs: the noise is
what a plan finds for each pair. It trains on four fifths of the training data and measures accuracy
on the last fifth. The table shows, beside the best pair, the one that `PrivacyPlan.recommend` puts
first. A plan without `batch_size` takes batches of n · epochs / 700 examples, up to 1,024.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Batches are drawn by Poisson sampling. ε does not include the cost of a choice between the runs.

    python examples/experiments/batch_and_epochs/run.py --scale small
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_adaptive_dp
from examples.experiments.lib import harness, report
from examples.experiments.lib.harness import Trial
from examples.experiments.untuned import run as untuned
from tf_adaptive_dp.plan import PlanOffer


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem of `untuned` and what is compared on it.

    Attributes:
      data: its name.
      inputs: its units.
      batch_sizes: expected sizes of batches.
      epochs: how long to train.
      epsilons: the budgets.
      seeds: of each run.
    """

    data: str
    inputs: str
    batch_sizes: tuple[int, ...]
    epochs: tuple[int, ...] = (5, 20, 80)
    epsilons: tuple[float, ...] = (1.0, 3.0)
    seeds: int = 3


SETTINGS = {
    "smoke": [Setting("digits", "/ 16", (32, 256), (2,), (3.0,), 1)],
    "small": [
        Setting("digits", "/ 16", (4, 16, 64, 256)),
        # Batches that a plan takes by itself: those of Adult and MNIST are near others.
        Setting("digits", "/ 16", (8,), epochs=(5,)),
        Setting("digits", "/ 16", (32,), epochs=(20,)),
        Setting("digits", "/ 16", (128,), epochs=(80,)),
        Setting("adult", "in [0, 1]", (100, 400, 1600, 6400)),
        Setting("reviews", "tf-idf", (64, 256, 1024, 4096), seeds=1),
        Setting("mnist", "/ 255", (200, 800, 3200, 12800), seeds=1),
    ],
}
SETTINGS["paper"] = [dataclasses.replace(s, seeds=2 * s.seeds) for s in SETTINGS["small"]]


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All pairs of all problems with all seeds."""
    del trials
    return [
        {
            "data": setting.data,
            "inputs": setting.inputs,
            "epsilon": epsilon,
            "batch_size": batch_size,
            "epochs": epochs,
            "seed": seed,
        }
        for setting in SETTINGS[scale]
        for seed in range(setting.seeds)
        for epsilon in setting.epsilons
        for batch_size in setting.batch_sizes
        for epochs in setting.epochs
    ]


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: those of `plan`; "seed" determines the initial weights.
      data_dir: not used, since there are several data sets.

    Returns:
      See `training.fit`; and the "noise_multiplier" and "signal_to_noise" of the plan.
    """
    del data_dir
    problem = dataclasses.replace(
        untuned.PROBLEMS[settings["data"]], batch_size=settings["batch_size"]
    )
    offer = _offer(settings)
    of_untuned = {
        **settings,
        "factor": 1.0,
        "noise_multiplier": offer.noise_multiplier,
        "optimizer": "ADADP",
        "arguments": {"l2_norm_clip": 1.0},
        "normalized": True,
    }
    result, _ = untuned.fit_without_test_data(of_untuned, problem)
    return {
        **result,
        "noise_multiplier": offer.noise_multiplier,
        "signal_to_noise": offer.signal_to_noise,
    }


def _offer(settings: Mapping[str, Any]) -> PlanOffer:
    num_examples = len(untuned.load(settings["data"])[0][1])
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=settings["epsilon"],
        delta=1e-5,
        num_examples=num_examples - num_examples // 5,
        batch_size=settings["batch_size"],
        epochs=settings["epochs"],
        accountant="rdp",
    )
    (offer,) = plan.recommend([settings["batch_size"]], [settings["epochs"]])
    return offer


@dataclasses.dataclass(frozen=True)
class Pair:
    """A batch size and a number of epochs, and what they led to."""

    batch_size: int
    epochs: int
    noise_multiplier: float
    signal_to_noise: float
    accuracies: tuple[float, ...]

    @property
    def offer(self) -> PlanOffer:
        """What `PrivacyPlan.recommend` says of it; its ratio is √T·L/σ, which tells T steps."""
        steps = (self.signal_to_noise * self.noise_multiplier / self.batch_size) ** 2
        values = round(steps), self.noise_multiplier, self.signal_to_noise
        return PlanOffer(self.batch_size, self.epochs, *values)

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(self.accuracies))


def by_problem(trials: Sequence[Trial]) -> dict[str, list[Pair]]:
    """The pairs of each problem and budget, in the order of the experiment."""
    found: dict[str, dict[tuple[int, int], list[Trial]]] = {}
    for trial in trials:
        settings = trial.settings
        name = f"{settings['data']}, {settings['inputs']}, ε = {settings['epsilon']:g}"
        pair = settings["batch_size"], settings["epochs"]
        found.setdefault(name, {}).setdefault(pair, []).append(trial)
    return {
        name: [
            Pair(
                *pair,
                runs[0].result["noise_multiplier"],
                runs[0].result["signal_to_noise"],
                tuple(run.result["accuracy"][-1] for run in runs),
            )
            for pair, runs in sorted(pairs.items())
        ]
        for name, pairs in found.items()
    }


def table(trials: Sequence[Trial]) -> str:
    """Accuracy on held-out training data, batch sizes by epochs, a table for each problem."""
    return "\n\n".join(_table(name, pairs) for name, pairs in by_problem(trials).items())


def _table(name: str, pairs: Sequence[Pair]) -> str:
    epochs = sorted({pair.epochs for pair in pairs})
    cells = {
        (pair.batch_size, pair.epochs): f"{report.mean(pair.accuracies, 3)} "
        f"(σ = {pair.noise_multiplier:.2f})"
        for pair in pairs
    }
    rows = [
        [f"{size:,}", *(cells.get((size, number), "") for number in epochs)]
        for size in sorted({pair.batch_size for pair in pairs})
    ]
    best = max(pairs, key=lambda pair: pair.accuracy)
    first = max(pairs, key=lambda pair: pair.offer.rank)
    return (
        f"{name}\n\n"
        + report.table(["batches of", *(f"{number} epochs" for number in epochs)], rows)
        + f"\n\nBest: batches of {best.batch_size:,}, {best.epochs} epochs ({best.accuracy:.3f}). "
        f"`recommend` puts {first.batch_size:,} and {first.epochs} first ({first.accuracy:.3f})."
    )


def plot(trials: Sequence[Trial]) -> Any:
    """Accuracy by the number of steps, a line for each number of epochs."""
    import matplotlib.pyplot as plt

    found = by_problem(trials)
    columns = 2
    lines = -(-len(found) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(9, 3 * lines), squeeze=False)
    for axis, (name, pairs) in zip(axes.flat, found.items()):
        for number in sorted({pair.epochs for pair in pairs}):
            of_number = [pair for pair in pairs if pair.epochs == number]
            axis.plot(
                [pair.batch_size for pair in of_number],
                [pair.accuracy for pair in of_number],
                "o-",
                label=f"{number} epochs",
            )
        axis.set(title=name, xscale="log", xlabel="batch size", ylabel="held-out accuracy")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(found) :]:
        axis.set_visible(False)
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("batch_and_epochs", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
