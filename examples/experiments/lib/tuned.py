"""ADADP, which tunes nothing, against DP-Adam and DP-SGD with the best rates of their grids.

Version 1 of the ADADP paper, figures 4 and 5: DP-Adam has the best and the second best learning
rate at each σ, DP-SGD the one that is best at the first σ. "Best" refers to the accuracy on the
test set after the last epoch, as in the paper; ε does not include the cost of this choice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import dense
from examples.experiments.lib.harness import Trial

Settings = dict[str, Any]


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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison on one data set: the methods `plan`, `table` and `plot` of an `Experiment`.

    Attributes:
      scales: The scales by name.
      batch_size: The expected batch size.
      l2_norm_clip: C.
      delta: δ.
    """

    scales: dict[str, Scale]
    batch_size: int = 200
    l2_norm_clip: float = 1.0
    delta: float = 1e-5

    def plan(self, scale: str, trials: Sequence[Trial]) -> list[Settings]:
        """The wanted trials, given the finished ones."""
        how = self.scales[scale]
        wanted: list[Settings] = []
        for number, sigma in enumerate(how.noise_multipliers):
            for k, arguments in enumerate(self._variants(how)):
                count = how.other_seeds if k else how.seeds
                wanted += self._runs(how, sigma, "ADADP", arguments, count)
            tuned = ["DPAdam"] if number else ["DPAdam", "DPSGD"]
            for optimizer in tuned:
                grid, ranking = _search(how, trials, optimizer, sigma)
                for rate in grid:
                    wanted += self._runs(how, sigma, optimizer, {"learning_rate": rate}, 1)
                if not ranking:
                    continue
                best, second = ({"learning_rate": rate} for rate in ranking[:2])
                if optimizer == "DPAdam":
                    wanted += self._runs(how, sigma, optimizer, best, how.seeds)
                    wanted += self._runs(how, sigma, optimizer, second, how.other_seeds)
                else:
                    for each in how.noise_multipliers:
                        wanted += self._runs(how, each, optimizer, best, how.seeds)
        return wanted

    def _variants(self, how: Scale) -> list[dict[str, Any]]:
        """ADADP's arguments: none; the authors' tolerance; the printed one; figure 4's schedule."""
        authors = {"tolerance": 10**-0.5, "tolerance_decay": 0.0}
        schedule = {
            "freeze_learning_rate_after": how.epochs // 2,
            "steps_per_epoch": how.num_train // self.batch_size,
        }
        return [{}, authors, {**authors, "tolerance": 1.0}, {**authors, **schedule}]

    def _runs(
        self, how: Scale, sigma: float, optimizer: str, arguments: dict[str, Any], count: int
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
                "batch_size": self.batch_size,
                "l2_norm_clip": self.l2_norm_clip,
                "delta": self.delta,
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
    lines = ["| σ | ε | method | test accuracy | seeds |", "| --- | --- | --- | --- | --- |"]
    for (sigma, name), runs in groups(trials).items():
        lines.append(
            f"| {sigma:g} | {runs[0].result['epsilon'][-1]:.3f} | {name} | {spread(runs)} "
            f"| {len(runs)} |"
        )
    return "\n".join(lines)


def spread(runs: Sequence[Trial]) -> str:
    """Mean ± standard deviation of the final accuracy."""
    finals = [final_accuracy(t) for t in runs]
    deviation = f" ± {np.std(finals, ddof=1):.4f}" if len(finals) > 1 else ""
    return f"{np.mean(finals):.4f}{deviation}"


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
