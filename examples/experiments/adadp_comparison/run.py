"""ADADP against tuned DP-Adam and DP-SGD on MNIST and CIFAR-10.

Repeats figures 4 and 5 of the ADADP paper (version 1). MNIST (left-hand panels) uses a network
784-256-256-10. CIFAR-10 (right-hand panels) uses two frozen convolutions that were trained on
CIFAR-100, then the dense layers 1600-500-500-10. Both train with batches of 200 for 100 epochs at
σ = 2, 4, 6 and 8.

ADADP runs with its default arguments, with the constant tolerances of the authors' code and of the
paper's text, and with the schedule of figure 4: its learning rate is fixed halfway and then decays.
The learning rates of DP-Adam and DP-SGD come from grids of half decades. DP-Adam uses the best and
the second best rate at each σ; DP-SGD uses the rate that is best at the first σ.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one training image; CIFAR-100
counts as public. Batches are drawn by Poisson sampling, so the ε shown is a proven upper bound.
Accuracy is measured on the test images. The grids are tuned on these, as in the paper, and ε does
not include the cost of choosing the best rate. ADADP chooses nothing.

CIFAR-10 needs `cifar100_conv_layers.npz`, see `lib/datasets/images.py`.

    python examples/experiments/adadp_comparison/run.py --dataset mnist --data_dir ~/tfds

References:
  - Koskela and Honkela, "Learning Rate Adaptation for Federated and Differentially Private
    Learning" (2018), arXiv:1809.03832.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import dense, harness, report
from examples.experiments.lib.datasets import images
from examples.experiments.lib.harness import Trial

Settings = dict[str, Any]
BATCH_SIZE, CLIP, DELTA = 200, 1.0, 1e-5

# The runs of one process share what was read.
LOADERS = {
    "mnist": functools.cache(images.mnist),
    "cifar10": functools.cache(images.cifar10_features),
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the comparison.

    Attributes:
      epochs: The number of epochs.
      noise_multipliers: All σ; DP-SGD is tuned at the first.
      seeds: The number of runs of ADADP, of DP-Adam with its best rate and of DP-SGD.
      other_seeds: The number of runs of DP-Adam with its second best rate and of ADADP's variants.
      grids: The exponents k of the learning rates 10^(k/2) of each tuned optimizer.
      open_ended: Whether a grid is extended as long as its best rate is at an end.
      num_train: The number of private examples.
      num_test: The number of test examples.
      hidden_units: The units of each hidden layer.
    """

    epochs: int
    noise_multipliers: tuple[float, ...]
    seeds: int
    other_seeds: int
    grids: dict[str, range]
    open_ended: bool
    num_train: int
    num_test: int
    hidden_units: tuple[int, ...]


SMOKE = Scale(
    epochs=2,
    noise_multipliers=(2.0, 4.0),
    seeds=1,
    other_seeds=1,
    grids={"DPAdam": range(-6, -4), "DPSGD": range(-2, 0)},
    open_ended=False,
    num_train=2000,
    num_test=1000,
    hidden_units=(16,),
)


def _scales(
    num_train: int,
    hidden_units: tuple[int, ...],
    small_epochs: int,
    small_sigmas: tuple[float, ...],
) -> dict[str, Scale]:
    common = dict(
        seeds=3, open_ended=True, num_train=num_train, num_test=10_000, hidden_units=hidden_units
    )
    small = Scale(
        epochs=small_epochs,
        noise_multipliers=small_sigmas,
        other_seeds=1,
        grids={"DPAdam": range(-8, -5), "DPSGD": range(-3, 0)},
        **common,
    )
    paper = Scale(
        epochs=100,
        noise_multipliers=(2.0, 4.0, 6.0, 8.0),
        other_seeds=3,
        grids={"DPAdam": range(-10, -4), "DPSGD": range(-6, 1)},
        **common,
    )
    return {"smoke": SMOKE, "small": small, "paper": paper}


SCALES = {
    "mnist": _scales(60_000, (256, 256), 20, (2.0, 4.0, 8.0)),
    "cifar10": _scales(50_000, (500, 500), 10, (2.0, 8.0)),
}


def plan(how: Scale, trials: Sequence[Trial]) -> list[Settings]:
    """The wanted trials at a scale, given the finished ones."""
    wanted: list[Settings] = []
    for number, sigma in enumerate(how.noise_multipliers):
        for k, arguments in enumerate(_variants(how)):
            count = how.other_seeds if k else how.seeds
            wanted += _runs(how, sigma, "ADADP", arguments, count)
        tuned = ["DPAdam"] if number else ["DPAdam", "DPSGD"]
        for optimizer in tuned:
            grid, ranking = _search(how, trials, optimizer, sigma)
            for rate in grid:
                wanted += _runs(how, sigma, optimizer, {"learning_rate": rate}, 1)
            if not ranking:
                continue
            best, second = ({"learning_rate": rate} for rate in ranking[:2])
            if optimizer == "DPAdam":
                wanted += _runs(how, sigma, optimizer, best, how.seeds)
                wanted += _runs(how, sigma, optimizer, second, how.other_seeds)
            else:
                for each in how.noise_multipliers:
                    wanted += _runs(how, each, optimizer, best, how.seeds)
    return wanted


def _variants(how: Scale) -> list[dict[str, Any]]:
    """ADADP's arguments: none; the authors' tolerance; the printed one; figure 4's schedule."""
    authors = {"tolerance": 10**-0.5, "tolerance_decay": 0.0, "initial_factor": 1.0}
    schedule = {
        "freeze_learning_rate_after": how.epochs // 2,
        "steps_per_epoch": how.num_train // BATCH_SIZE,
    }
    return [{}, authors, {**authors, "tolerance": 1.0}, {**authors, **schedule}]


def _runs(
    how: Scale, sigma: float, optimizer: str, arguments: dict[str, Any], count: int
) -> list[Settings]:
    return [
        {
            "optimizer": optimizer,
            "arguments": arguments,
            "noise_multiplier": sigma,
            "seed": seed,
            "epochs": how.epochs,
            "num_train": how.num_train,
            "num_test": how.num_test,
            "hidden_units": list(how.hidden_units),
            "batch_size": BATCH_SIZE,
            "l2_norm_clip": CLIP,
            "delta": DELTA,
        }
        for seed in range(count)
    ]


def _search(
    how: Scale, trials: Iterable[Trial], optimizer: str, sigma: float
) -> tuple[list[float], list[float]]:
    """The rates to try with seed 0, and their ranking once all are done and the best is inside."""
    scores = {
        t.settings["arguments"]["learning_rate"]: final_accuracy(t)
        for t in trials
        if _is(t, optimizer, sigma) and t.settings["seed"] == 0
    }
    exponents = list(how.grids[optimizer])
    while True:
        rates = [float(f"{10 ** (k / 2):.3g}") for k in exponents]
        if not all(rate in scores for rate in rates):
            return rates, []
        ranking = sorted(rates, key=scores.get, reverse=True)
        if not how.open_ended or ranking[0] not in (rates[0], rates[-1]):
            return rates, ranking
        if ranking[0] == rates[0]:
            exponents.insert(0, exponents[0] - 1)
        else:
            exponents.append(exponents[-1] + 1)


def _is(trial: Trial, optimizer: str, sigma: float) -> bool:
    settings = trial.settings
    return settings["optimizer"] == optimizer and settings["noise_multiplier"] == sigma


def final_accuracy(trial: Trial) -> float:
    """The test accuracy after the last epoch."""
    return trial.result["accuracy"][-1]


def groups(trials: Iterable[Trial]) -> dict[tuple[float, str], list[Trial]]:
    """Trials that differ only in their seed, by σ and label, the most accurate of each σ first."""
    found = collections.defaultdict(list)
    for trial in trials:
        found[trial.settings["noise_multiplier"], dense.label(trial.settings)].append(trial)
    return dict(
        sorted(found.items(), key=lambda g: (g[0][0], -np.mean([*map(final_accuracy, g[1])])))
    )


def shown(trials: Sequence[Trial], sigma: float) -> dict[str, list[Trial]]:
    """The curves of a figure at one σ: all ADADP, the two best DP-Adam, DP-SGD of the first σ.

    The two best are those of the grid, with seed 0, as in the plan.
    """
    first = min(t.settings["noise_multiplier"] for t in trials)
    kept = {}
    for optimizer, at, count in [("ADADP", sigma, None), ("DPAdam", sigma, 2), ("DPSGD", first, 1)]:
        grid = [t for t in trials if _is(t, optimizer, at) and t.settings["seed"] == 0]
        if count is None:  # so that each keeps its colour at all σ
            grid.sort(key=lambda t: dense.label(t.settings))
        else:
            grid.sort(key=lambda t: (-final_accuracy(t), t.settings["arguments"]["learning_rate"]))
        for rank, trial in enumerate(grid[:count]):
            arguments = trial.settings["arguments"]
            name = dense.label(trial.settings) + (", second best" if count == 2 and rank else "")
            kept[name] = [
                t
                for t in trials
                if _is(t, optimizer, sigma) and t.settings["arguments"] == arguments
            ]
    return kept


def table(trials: Sequence[Trial]) -> str:
    """Mean and standard deviation of the final accuracy, for all trials."""
    rows = []
    for (sigma, name), runs in groups(trials).items():
        epsilon = runs[0].result["epsilon"][-1]
        accuracy = report.mean([final_accuracy(t) for t in runs])
        rows.append([f"{sigma:g}", f"{epsilon:.3f}", name, accuracy, len(runs)])
    return report.table(["σ", "ε", "method", "test accuracy", "seeds"], rows)


def plot(trials: Sequence[Trial]) -> Any:
    """Test accuracy by epoch and by ε, a column for each σ; bands are one standard deviation."""
    import matplotlib.pyplot as plt

    sigmas = sorted({t.settings["noise_multiplier"] for t in trials})
    figure, axes = plt.subplots(
        2, len(sigmas), figsize=(4.2 * len(sigmas) + 1, 7.5), sharey=True, squeeze=False
    )
    for column, sigma in zip(axes.T, sigmas):
        for name, runs in shown(trials, sigma).items():
            curves = np.asarray([t.result["accuracy"] for t in runs])
            mean, deviation = curves.mean(0), curves.std(0, ddof=min(1, len(runs) - 1))
            for axis, x in zip(column, ("epochs", "epsilon")):
                at = runs[0].result[x]
                axis.plot(at, mean, label=name)
                axis.fill_between(at, mean - deviation, mean + deviation, alpha=0.2)
        delta = trials[0].settings["delta"]
        column[0].set(title=f"σ = {sigma:g}", xlabel="epoch")
        column[1].set(xlabel=f"ε at δ = {delta:g}")
        column[0].legend(fontsize=7, loc="lower right")
    for axis in axes[:, 0]:
        axis.set_ylabel("test accuracy")
    figure.tight_layout()
    return figure


def train(dataset: str, settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run on one of the data sets."""
    load = LOADERS[dataset]
    train = load(data_dir, f"train[:{settings['num_train']}]")
    return dense.train(settings, train, load(data_dir, f"test[:{settings['num_test']}]"))


EXPERIMENTS = {
    dataset: harness.Experiment(
        f"adadp_comparison_{dataset}",
        __doc__,
        lambda scale, trials, scales=scales: plan(scales[scale], trials),
        functools.partial(train, dataset),
        table,
        plot,
    )
    for dataset, scales in SCALES.items()
}

if __name__ == "__main__":
    harness.main(EXPERIMENTS, pathlib.Path(__file__).parent)
