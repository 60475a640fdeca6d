"""Adam's defaults under privacy: DPAdam over learning rate, β₁ and β₂.

Repeats figure 3 and section 4.2 of "The Role of Adaptive Optimizers for Honest Private
Hyperparameter Selection": α ∈ {0.001, 0.05, 0.01, 0.2, 0.5}, β₁, β₂ ∈ {0.8, 0.85, 0.9, 0.95, 0.99,
0.999}, batches of L = 250, C = 0.5, T = 2,500 steps, σ = 2, 4, 8. The table shows how α = 0.001,
and among these the default (0.001, 0.9, 0.999), rank among all candidates by test accuracy.

Adult and MNIST are the paper's data sets. IMDB, with counts of its 2,000 most common words, stands
for ENRON (e-mails, counts of words); Gisette is left out. "LR" is logistic regression, "TLNN" has
one hidden layer of 100 units.

| scale | data and models | σ | candidates | steps | seeds |
| --- | --- | --- | --- | --- | --- |
| smoke | 2,000 rows of Adult, LR | 4 | 4 | 100 | 1 |
| small | Adult LR, MNIST LR; IMDB LR, Adult TLNN, MNIST TLNN | 2, 4, 8; 4 | 45 | 2,500 | 1 |
| paper | Adult, MNIST, IMDB, each LR and TLNN | 2, 4, 8 | 180 | 2,500 | 3 |

The 45 candidates have β₁ ∈ {0.8, 0.9, 0.99} and β₂ ∈ {0.8, 0.99, 0.999}. On two idle cores, small
takes about 12 minutes and paper about eight hours.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-6, for adding or removing one training example,
with batches drawn by Poisson sampling; the table shows its ε. All candidates are shown and none is
chosen. On private data, this comparison would cost the ε of all runs composed. A default learned
from it costs nothing on other data.

    python examples/experiments/honest_adam_defaults/run.py --scale small

The environment variables TFDS_DATA_DIR and ADULT_CSV say where the data are.
"""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import candidates, harness, report
from examples.experiments.lib.harness import Trial
from tf_adaptive_dp.tuning import search_epsilon

BATCH, CLIP, DELTA = 250, 0.5, 1e-6
RATES = (0.001, 0.05, 0.01, 0.2, 0.5)
ALL_BETAS = (0.8, 0.85, 0.9, 0.95, 0.99, 0.999)
DEFAULT = (0.001, 0.9, 0.999)
SIGMAS = (2.0, 4.0, 8.0)
SMALL = [
    ("adult", "LR", SIGMAS),
    ("mnist", "LR", SIGMAS),
    ("imdb", "LR", (4.0,)),
    ("adult", "TLNN", (4.0,)),
    ("mnist", "TLNN", (4.0,)),
]
PAPER = [(*part, SIGMAS) for part in candidates.PAPER]
# By scale: data, model and σ; values of α, β₁, β₂; training rows; steps; seeds.
WHAT = {
    "smoke": ([("adult", "LR", (4.0,))], (0.001, 0.5), (0.9,), (0.8, 0.999), 2000, 100, 1),
    "small": (SMALL, RATES, (0.8, 0.9, 0.99), (0.8, 0.99, 0.999), None, 2500, 1),
    "paper": (PAPER, RATES, ALL_BETAS, ALL_BETAS, None, 2500, 3),
}


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """All candidates, grouped by compiled model."""
    parts, rates, betas_1, betas_2, num_train, steps, seeds = WHAT[scale]
    return [
        {
            "data": data,
            "model": model,
            "hidden_units": candidates.HIDDEN_UNITS[model],
            "num_train": num_train,
            "batch_size": BATCH,
            "steps": steps,
            "judge_every": steps,
            "optimizer": "DPAdam",
            "arguments": {
                "learning_rate": rate,
                "beta_1": beta_1,
                "beta_2": beta_2,
                "l2_norm_clip": CLIP,
            },
            "noise_multiplier": sigma,
            "seed": seed,
        }
        for data, model, sigmas in parts
        for beta_1, beta_2 in itertools.product(betas_1, betas_2)
        for sigma in sigmas
        for rate in rates
        for seed in range(seeds)
    ]


Part = tuple[str, str, float]


def scores(trials: Sequence[Trial]) -> dict[Part, dict[tuple, float]]:
    """By data, model and σ, the final accuracy of each (α, β₁, β₂), mean over the seeds."""
    runs: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for trial in trials:
        s = trial.settings
        values = tuple(s["arguments"][name] for name in ("learning_rate", "beta_1", "beta_2"))
        part = (s["data"], s["model"], s["noise_multiplier"])
        runs[part][values].append(trial.result["accuracy"][-1])
    return {
        part: {values: float(np.mean(found)) for values, found in by_values.items()}
        for part, by_values in runs.items()
    }


@functools.cache
def epsilon(num_examples: int, steps: int, sigma: float) -> float:
    """ε of one run."""
    trial = candidates.trial_event(num_examples, BATCH, sigma, steps)
    return search_epsilon.composition_epsilon(trial, 1, DELTA)


def table(trials: Sequence[Trial]) -> str:
    """The ranks of the default and of α = 0.001 among the candidates."""
    rows = []
    for (data, model, sigma), found in scores(trials).items():
        one = next(t for t in trials if t.settings["data"] == data)
        spent = epsilon(one.result["num_examples"], one.settings["steps"], sigma)
        best = max(found, key=found.get)
        rank = 1 + sum(score > found[DEFAULT] for score in found.values())
        groups = [[v for k, v in found.items() if k[0] == DEFAULT[0]], list(found.values())]
        cells = [f"{np.median(g):.4f} ({min(g):.4f} to {max(g):.4f})" for g in groups]
        of_part = [f"{data} {model}", f"{sigma:g}", f"{spent:.3f}"]
        of_default = [f"{found[DEFAULT]:.4f}", f"{rank} of {len(found)}"]
        rows.append([*of_part, f"{found[best]:.4f}", best, *of_default, *cells])
    columns = [
        *("data", "σ", "ε of one run", "best", "at (α, β₁, β₂)", "default", "its rank"),
        *("median with α = 0.001 (range)", "median of all (range)"),
    ]
    return report.table(columns, rows)


def plot(trials: Sequence[Trial]) -> Any:
    """A box for each data, model and σ; black points α = 0.001, gold the default."""
    import matplotlib.pyplot as plt

    found = scores(trials)
    figure, axis = plt.subplots(figsize=(2 + 1.3 * len(found), 5))
    axis.boxplot([list(by_values.values()) for by_values in found.values()], showfliers=True)
    for at, by_values in enumerate(found.values(), start=1):
        small = [v for k, v in by_values.items() if k[0] == DEFAULT[0]]
        axis.plot([at] * len(small), small, "k.", zorder=3)
        axis.plot([at], [by_values[DEFAULT]], "o", color="gold", markeredgecolor="k", zorder=4)
    names = [f"{data} {model}\nσ = {sigma:g}" for data, model, sigma in found]
    axis.set_xticks(range(1, len(found) + 1), names, fontsize=8)
    axis.set(ylabel="test accuracy", title="black: α = 0.001; gold: the default")
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment(
    "honest_adam_defaults", __doc__, plan, candidates.train, table, plot
)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
