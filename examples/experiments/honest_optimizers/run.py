"""Optimizers over their default grids: DPSGD, DPMomentum, DPAdam, DPAdamWOSM and ADADP.

Repeats figures 4 and 5, and the accuracies behind table 1, of "The Role of Adaptive Optimizers for
Honest Private Hyperparameter Selection": σ = 4, batches of L = 250, T = 2,500 steps. Each optimizer
runs with every candidate of `tf_adaptive_dp.tuning.grids.default_grid`. The figure shows their
maximum and median by step. The table adds the mean maximum of 4 random candidates of DPSGD and
DPMomentum, which cost as much as DPAdam's 4, and the final ε of each way of paying for the whole
grid.

Adult and MNIST are the paper's data sets. IMDB, with counts of its 2,000 most common words, stands
for ENRON (e-mails, counts of words); Gisette is left out. "LR" is logistic regression, "TLNN" has
one hidden layer of 100 units.

| scale | data and models | steps | candidates of DPSGD / DPMomentum / others | seeds |
| --- | --- | --- | --- | --- |
| smoke | 2,000 rows of Adult, LR | 100 | 4 / 4 / 2 | 1 |
| small | Adult LR, MNIST LR; IMDB LR, MNIST TLNN | 2,500 | 40 / 40, momentum 0.9 / 4 | 3; 1 |
| paper | Adult, MNIST, IMDB, each LR and TLNN | 2,500 | 40 / 280 / 4 | 3 |

The test data are evaluated every 100 steps, at small scale every 250. On two idle cores, small
takes about 23 minutes and paper about six hours.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-6, for adding or removing one training example;
batches are drawn by Poisson sampling. The ε in a column covers the whole search, paid for in the
way that the column names, but not the scores. As in the paper, candidates are compared by accuracy
on the test data, which count as public here.

    python examples/experiments/honest_optimizers/run.py --scale small

The environment variables TFDS_DATA_DIR and ADULT_CSV say where the data are.
"""

from __future__ import annotations

import collections
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.experiments.honest_costs.run import ACCOUNTINGS
from examples.experiments.lib import candidates, harness, report
from examples.experiments.lib.harness import Trial
from tf_adaptive_dp.tuning import grids, search_epsilon

NOISE, BATCH, DELTA = 4.0, 250, 1e-6
OPTIMIZERS = ("DPSGD", "DPMomentum", "DPAdam", "DPAdamWOSM", "ADADP")
SMALL = [("adult", "LR", 3), ("mnist", "LR", 3), ("imdb", "LR", 1), ("mnist", "TLNN", 1)]
PAPER = [(*part, 3) for part in candidates.PAPER]
# By scale: data, model and seeds; training rows; steps, and between two looks at the test data.
WHAT = {
    "smoke": ([("adult", "LR", 1)], 2000, 100, 50),
    "small": (SMALL, None, 2500, 250),
    "paper": (PAPER, None, 2500, 100),
}


def grid(optimizer: str, scale: str) -> list[dict[str, float]]:
    """The candidates of an optimizer at a scale."""
    found = grids.default_grid(optimizer)
    if optimizer == "DPMomentum" and scale != "paper":
        found = [candidate for candidate in found if candidate["momentum"] == 0.9]
    return found[:: max(2, len(found) // 4)] if scale == "smoke" else found


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All candidates of all optimizers, grouped by compiled model."""
    parts, num_train, steps, every = WHAT[scale]
    return [
        {
            "data": data,
            "model": model,
            "hidden_units": candidates.HIDDEN_UNITS[model],
            "num_train": num_train,
            "batch_size": BATCH,
            "steps": steps,
            "judge_every": every,
            "optimizer": optimizer,
            "arguments": candidate,
            "noise_multiplier": NOISE,
            "seed": seed,
        }
        for data, model, seeds in parts
        for optimizer in OPTIMIZERS
        for candidate in grid(optimizer, scale)
        for seed in range(seeds)
    ]


def curves(trials: Sequence[Trial]) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """By data and model, then optimizer: accuracy [candidates, times], mean over the seeds."""
    runs = collections.defaultdict(list)
    for trial in trials:
        s = trial.settings
        key = ((s["data"], s["model"]), s["optimizer"], tuple(s["arguments"].items()))
        runs[key].append(trial.result["accuracy"])
    found: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for (part, optimizer, _), accuracies in runs.items():
        found[part][optimizer].append(np.mean(accuracies, axis=0))
    return {
        part: {name: np.asarray(by_name[name]) for name in OPTIMIZERS if name in by_name}
        for part, by_name in found.items()
    }


def expected_maximum(values: Sequence[float], drawn: int) -> float:
    """The expected maximum of `drawn` values, drawn without replacement.

    >>> expected_maximum([1.0, 2.0, 3.0], 2)
    2.66...
    """
    count, drawn = len(values), min(drawn, len(values))
    weights = [math.comb(k, drawn - 1) / math.comb(count, drawn) for k in range(count)]
    return float(np.dot(np.sort(values), weights))


@functools.cache
def epsilons(num_examples: int, steps: int, number: int) -> dict[str, float]:
    """ε of each way of paying for `number` candidates, and of the paper's accounting."""
    trial = candidates.trial_event(num_examples, BATCH, NOISE, steps)
    classical, many = ACCOUNTINGS["classical"], ACCOUNTINGS["more orders"]
    return {
        "composed": search_epsilon.composition_epsilon(
            trial, number, DELTA, accounting=ACCOUNTINGS["pld"]
        ),
        "random stopping": search_epsilon.liu_talwar_epsilon(
            trial, 1 / number, DELTA, accounting=many
        ),
        "repeat-and-select": search_epsilon.repeat_and_select_epsilon(
            trial, number, DELTA, accounting=many
        ),
        "composed, classical": search_epsilon.composition_epsilon(
            trial, number, DELTA, accounting=classical
        ),
        "stopping, classical": search_epsilon.liu_talwar_epsilon(
            trial, 1 / number, DELTA, accounting=classical
        ),
    }


def table(trials: Sequence[Trial]) -> str:
    """Accuracy at the end over the grid, and what the grid costs."""
    ways = list(epsilons(1000, 1, 1))
    rows = []
    for (data, model), by_name in curves(trials).items():
        one = next(t for t in trials if (t.settings["data"], t.settings["model"]) == (data, model))
        for name, accuracies in by_name.items():
            final = accuracies[:, -1]
            costs = epsilons(one.result["num_examples"], one.settings["steps"], len(final))
            figures = [final.max(), np.median(final), final.min(), expected_maximum(final, 4)]
            figures = [f"{figure:.4f}" for figure in figures]
            epsilon_of = [f"{costs[way]:.3f}" for way in ways]
            rows.append([f"{data} {model}", name, len(final), *figures, *epsilon_of])
    columns = "data, optimizer, candidates, maximum, median, minimum, 4 at random".split(", ")
    return report.table([*columns, f"ε: {ways[0]}", *ways[1:]], rows)


def plot(trials: Sequence[Trial]) -> Any:
    """Maximum (solid) and median (dotted) over the candidates by step, for each data and model."""
    import matplotlib.pyplot as plt

    found = curves(trials)
    figure, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 5), squeeze=False)
    for axis, ((data, model), by_name) in zip(axes.flat, found.items()):
        one = next(t for t in trials if (t.settings["data"], t.settings["model"]) == (data, model))
        steps = one.result["steps"]
        for name, accuracies in by_name.items():
            colour = f"C{OPTIMIZERS.index(name)}"
            axis.plot(steps, accuracies.max(0), color=colour, label=f"{name}, maximum")
            axis.plot(steps, np.median(accuracies, 0), ":", color=colour, label=f"{name}, median")
        best = max(a.max() for a in by_name.values())
        axis.set(
            title=f"{data} {model}",
            xlabel="step",
            ylabel="test accuracy",
            ylim=(best - 0.15, best + 0.01),
        )
        axis.legend(fontsize=7)
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("honest_optimizers", __doc__, plan, candidates.train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
