"""ADADP's single run against private selection of a learning rate at the same ε.

Repeats table 1 of the supplement of the ADADP paper: mean and standard deviation of the accuracy,
and the mean number of runs, of ADADP and of private selection by Liu and Talwar's random stopping
with γ = 2⁻¹ … 2⁻⁹. The supplement names neither the data nor the candidates; an accuracy of .63
suggests CIFAR-10. Here the data are MNIST, the network is 784-256-256-10, batches have 200 images
and ADADP runs at σ = 2. A candidate is DP-SGD with C = 1 and a learning rate from 0.001, 0.00316,
… 10, drawn with replacement.

Both have the same ε. Each run of private selection is trained with the noise for which random
stopping with γ = 2⁻⁹ costs ADADP's ε. Larger γ would need slightly less noise, see the table. For
comparison there is repeat-and-select (Papernot and Steinke 2022) with the geometric distribution,
which needs far less noise for a mean of 2⁹ runs.

As usual, selection is simulated: each candidate is trained a few times, and a run of the selection
draws from that pool instead of training again. The first half of the test images decides which
candidate is best, and the second half evaluates it.

| scale | steps | learning rates | runs of each | runs of ADADP | hidden units |
| --- | --- | --- | --- | --- | --- |
| smoke | 100, of 2,000 images | 3 | 1 | 1 | 16 |
| small | 6,000 (20 epochs) | 9 | 2 | 5 | 256, 256 |
| paper | 30,000 (100 epochs) | 9 | 10 | 10 | 256, 256 |

On two idle cores, small takes about 13 minutes and paper about five hours.

Privacy claim: ADADP's run and the winner of a selection are (ε, δ)-DP, δ = 1e-5, for adding or
removing one training image; batches are drawn by Poisson sampling. The images that decide the
winner count as public: their accuracy is used without noise. This program shows the whole pool,
which a real selection must not do.

    python examples/experiments/honest_adadp/run.py --scale small

The environment variable TFDS_DATA_DIR says where MNIST is.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import candidates, harness, report
from examples.experiments.lib.harness import Trial
from tf_adaptive_dp.tuning import budgets, search_epsilon, strategies

NOISE, BATCH, CLIP, DELTA = 2.0, 200, 1.0, 1e-5
HALVINGS = range(1, 10)
RATES = [float(f"{10 ** (k / 2):.3g}") for k in range(-6, 3)]
PRINTED = {
    None: (0.6349, 0.0033, 1),
    1: (0.4728, 0.1688, 2.04),
    2: (0.5467, 0.1278, 3.42),
    3: (0.5576, 0.1280, 6.72),
    4: (0.6053, 0.0662, 14.79),
    5: (0.6215, 0.0552, 32.25),
    6: (0.6266, 0.0516, 49.77),
    7: (0.6317, 0.0399, 131.76),
    8: (0.6368, 0.0113, 224.30),
    9: (0.6386, 0.0011, 601.04),
}
# By scale: steps, training images, learning rates, runs of each, runs of ADADP, hidden units.
WHAT = {
    "smoke": (100, 2000, [0.01, 0.1, 1.0], 1, 1, [16]),
    "small": (6000, 60_000, RATES, 2, 5, [256, 256]),
    "paper": (30_000, 60_000, RATES, 10, 10, [256, 256]),
}


def strategy(way: str, halvings: int) -> strategies.Strategy:
    """Liu and Talwar's, or Papernot and Steinke's, with γ = 2 to the minus `halvings`."""
    if way == "liu_talwar":
        return strategies.LiuTalwar(gamma=2.0**-halvings)
    return strategies.RepeatAndSelect(mean_trials=2.0**halvings)


WAYS = ("liu_talwar", "repeat_and_select")


@functools.cache
def budget(num_examples: int, steps: int) -> float:
    """ε of ADADP's run."""
    trial = candidates.trial_event(num_examples, BATCH, NOISE, steps)
    return search_epsilon.composition_epsilon(trial, 1, DELTA)


@functools.cache
def noise_for(way: str, halvings: int, num_examples: int, steps: int) -> float:
    """The noise multiplier of the runs of a selection that costs what ADADP's run costs."""
    return budgets.noise_multiplier_for_selection(
        strategy(way, halvings),
        lambda noise: candidates.trial_event(num_examples, BATCH, noise, steps),
        budget(num_examples, steps),
        DELTA,
    )


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """ADADP's runs, then the pools of both ways."""
    steps, num_train, rates, runs, runs_of_adadp, hidden_units = WHAT[scale]
    common = {
        "data": "mnist",
        "hidden_units": hidden_units,
        "num_train": num_train,
        "batch_size": BATCH,
        "steps": steps,
        "judge_every": steps,
    }
    adadp = {"way": "single", "optimizer": "ADADP", "noise_multiplier": NOISE}
    wanted = [
        {**common, **adadp, "arguments": {"l2_norm_clip": CLIP}, "seed": seed}
        for seed in range(runs_of_adadp)
    ]
    for way in WAYS:
        noise = noise_for(way, max(HALVINGS), num_train, steps)
        of_pool = {"way": way, "optimizer": "DPSGD", "noise_multiplier": noise}
        wanted += [
            {
                **common,
                **of_pool,
                "arguments": {"learning_rate": rate, "l2_norm_clip": CLIP},
                "seed": seed,
            }
            for rate in rates
            for seed in range(runs)
        ]
    return wanted


def simulated(pool: np.ndarray, halvings: int, limit: int | None, runs: int = 2000) -> np.ndarray:
    """Simulates selections from a pool.

    Args:
      pool: [trained runs, 2]: the accuracy that decides, and the one that is reported.
      halvings: γ is 2 to the minus this.
      limit: the largest number of draws, or `None`.
      runs: number of selections.

    Returns:
      [runs, 2]: the accuracy of the winner, and the number of draws.
    """
    generator = np.random.default_rng(halvings)
    numbers = generator.geometric(2.0**-halvings, runs)
    numbers = numbers if limit is None else np.minimum(numbers, limit)
    found = []
    for number in numbers:
        drawn = pool[generator.integers(len(pool), size=number)]
        found.append((drawn[np.argmax(drawn[:, 0]), 1], number))
    return np.asarray(found)


def pool_of(trials: Sequence[Trial], way: str) -> np.ndarray:
    """[runs, 2]: accuracy on the first and on the second half of the test images."""
    return np.asarray([t.result["halves"] for t in trials if t.settings["way"] == way])


def selections(trials: Sequence[Trial], way: str) -> dict[int, np.ndarray]:
    """`simulated` for each γ."""
    pool = pool_of(trials, way)
    return {k: simulated(pool, k, strategy(way, k).max_trials) for k in HALVINGS}


def table(trials: Sequence[Trial]) -> str:
    """The supplement's table next to our results."""
    size, steps = trials[0].result["num_examples"], trials[0].settings["steps"]
    own = pool_of(trials, "single")[:, 1]
    printed = "{:.4f}, {:.4f}, {:g}"
    ours = [f"{own.mean():.4f}", report.deviation(own), 1]
    rows = [["ADADP", printed.format(*PRINTED[None]), f"{NOISE:g}", "", *ours]]
    for way in WAYS:
        noise = next(t.settings["noise_multiplier"] for t in trials if t.settings["way"] == way)
        for k, found in reversed(selections(trials, way).items()):
            numbers = printed.format(*PRINTED[k]) if way == "liu_talwar" else ""
            noises = [f"{noise:g}", f"{noise_for(way, k, size, steps):g}"]
            accuracies = [f"{found[:, 0].mean():.4f}", report.deviation(found[:, 0])]
            method = f"{way.replace('_', ' ')}, γ = 2^-{k}"
            rows.append([method, numbers, *noises, *accuracies, f"{found[:, 1].mean():.2f}"])
    columns = [
        *("method", "paper: mean, std, runs", "noise of the pool", "noise for this γ alone"),
        *("mean accuracy", "std", "mean runs"),
    ]
    about = f"ε = {budget(size, steps):.4f}, δ = {DELTA:g}"
    return f"{about}\n\n{report.table(columns, rows)}"


def plot(trials: Sequence[Trial]) -> Any:
    """Accuracy by mean number of runs; bars are one standard deviation."""
    import matplotlib.pyplot as plt

    figure, (chosen, pools) = plt.subplots(1, 2, figsize=(12, 5))
    own = pool_of(trials, "single")[:, 1]
    for axis in (chosen, pools):
        axis.axhline(own.mean(), color="k", label="ADADP, one run")
        axis.set(xscale="log", ylabel="accuracy on the second half of the test images")
    for way in WAYS:
        name = way.replace("_", " ")
        found = list(selections(trials, way).values())
        means, spreads = ([of(f[:, 0]) for f in found] for of in (np.mean, np.std))
        numbers = [f[:, 1].mean() for f in found]
        chosen.errorbar(numbers, means, spreads, fmt="o-", capsize=3, label=name)
        rates = [
            t.settings["arguments"]["learning_rate"] for t in trials if t.settings["way"] == way
        ]
        pools.plot(rates, pool_of(trials, way)[:, 1], "o", label=f"{name}: the pool")
    chosen.set(xlabel="mean number of runs")
    pools.set(xlabel="learning rate of DP-SGD")
    chosen.legend()
    pools.legend()
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("honest_adadp", __doc__, plan, candidates.train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
