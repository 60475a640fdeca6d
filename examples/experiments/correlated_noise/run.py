"""What correlated noise is worth in test accuracy, at the same ε.

This experiment is not in the papers. DP-SGD and ADADP with the noise that
`PrivacyPlan(noise="best")` picks run beside the same with independent noise: same data, network,
batch size, number of steps and ε.

- mnist: 784-64-10, standardized pixels, 5 epochs of batches of 200, and 10 of batches of 1,000
- cifar10: features of frozen convolutions, then 1600-32-10, 5 epochs of batches of 200

DP-SGD has the same rates to choose from with both. They are judged on a part of the training set
that no run trains on. Only the best one meets the test data, once at the end of each of three runs.
For ADADP nothing is chosen.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one example that it
trains on (RDP accountant). Batches are drawn by Poisson sampling, from groups in turn if the noise
is correlated. ε does not include the choice of the rate on the held-out part.

    python examples/experiments/correlated_noise/run.py --scale small

The environment's TFDS_DATA_DIR says where the data are; the smoke scale needs none.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import grids, harness, report
from examples.experiments.lib.datasets import images
from tf_adaptive_dp.accounting import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.accounting.noise_strategies import get_strategy, prefix_error, serialize

Arrays = tuple[np.ndarray, np.ndarray]

TITLES = {
    "independent": "DP-SGD, tuned, independent noise",
    "best": 'DP-SGD, tuned, noise="best"',
    "adadp_independent": "ADADP, independent noise",
    "adadp_best": 'ADADP, noise="best"',
}
# Of DP-SGD, the same for both kinds of noise. Larger batches take larger rates.
RATES = {
    ("digits", 32): (0.3, 1.0),
    ("mnist", 200): (0.1, 0.3, 1.0, 3.0, 10.0),
    ("mnist", 1000): (0.3, 1.0, 3.0, 10.0, 30.0),
    ("cifar10", 200): (0.1, 0.3, 1.0, 3.0),
}
DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set and its model.

    Attributes:
      hidden_units: of the one hidden layer; 0 for none.
      held_out: how many of the training examples judge the rates, in place of training.
    """

    hidden_units: int
    held_out: int


PROBLEMS = {
    "digits": Problem(0, 300),
    "mnist": Problem(64, 10_000),
    "cifar10": Problem(32, 10_000),
}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale; "paper" has more seeds, since there is no paper."""
    if scale == "smoke":
        return [_part("digits", 32, 8.0, scale, epochs=2, seeds=1)]
    cells = [("mnist", 200, 5), ("cifar10", 200, 5), ("mnist", 1000, 10)]
    seeds = 3 if scale == "small" else 10
    return [
        _part(name, batch_size, epsilon, scale, epochs, seeds)
        for name, batch_size, epochs in cells
        for epsilon in (3.0, 8.0)
    ]


def _part(
    name: str, batch_size: int, epsilon: float, scale: str, epochs: int, seeds: int
) -> grids.Part:
    common = {
        "part": f"{name}, batches of {batch_size}, ε = {epsilon:g}",
        "scale": scale,
        "data": name,
        "batch_size": batch_size,
        "epochs": epochs,
        "epsilon": epsilon,
        "judged_on": "test",
    }
    rates = [{"learning_rate": rate} for rate in RATES[name, batch_size]]
    return grids.Part(
        common,
        {method: [{}] if method.startswith("adadp") else rates for method in TITLES},
        "accuracy",
        seeds=seeds,
        tuning={"judged_on": "held_out"},
    )


@functools.lru_cache(maxsize=2)
def load(name: str, data_dir: str | None) -> dict[str, Arrays]:
    """The arrays to train on ("train"), to choose rates on ("held_out"), and "test"."""
    read = {
        "digits": lambda split: (images.digits(split)[0] / 16, images.digits(split)[1]),
        "mnist": functools.partial(images.mnist, data_dir),
        "cifar10": functools.partial(images.cifar10_features, data_dir),
    }[name]
    x, y = read("train")
    first = len(x) - PROBLEMS[name].held_out
    return {
        "train": (x[:first], y[:first]),
        "held_out": (x[first:], y[first:]),
        "test": read("test"),
    }


@functools.cache
def _noise(
    method: str, epsilon: float, num_examples: int, batch_size: int, epochs: int
) -> tuple[NoiseStrategy, float]:
    """The strategy of a method and its σ, found once for all rates and seeds."""
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon,
        delta=DELTA,
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        noise="best" if method.endswith("best") else None,
        accountant="rdp",
    )
    return plan.noise, plan.noise_multiplier


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "method", "data", "batch_size", "epochs", "epsilon", "judged_on", "learning_rate" of
        DP-SGD, and "seed", which determines the initial weights; noise and batches never repeat.
      data_dir: tensorflow-datasets' folder.

    Returns:
      Of the end of the run, each a list with one entry: "epochs", "epsilon", "accuracy". Also
      "noise_multiplier"; "noise", the strategy as plain values; "error", the noise in sums of steps
      relative to a noise multiplier of 1 with independent noise; and "seconds".
    """
    start = time.perf_counter()
    data = load(settings["data"], data_dir)
    x, y = data["train"]
    of_run = len(x), settings["batch_size"], settings["epochs"]
    noise, noise_multiplier = _noise(settings["method"], settings["epsilon"], *of_run)
    plan = tf_adaptive_dp.PrivacyPlan(
        delta=DELTA,
        num_examples=len(x),
        batch_size=settings["batch_size"],
        epochs=settings["epochs"],
        noise_multiplier=noise_multiplier,
        noise=noise,
        accountant="rdp",
    )
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    units = PROBLEMS[settings["data"]].hidden_units
    model = tf.keras.Sequential(
        [
            tf.keras.Input([x.shape[1]]),
            *([tf.keras.layers.Dense(units, activation="relu")] if units else []),
            tf.keras.layers.Dense(10),
        ]
    )
    arguments: dict[str, Any] = {"l2_norm_clip": 1.0}
    if "learning_rate" in settings:
        arguments["learning_rate"] = settings["learning_rate"]
    uses_adadp = settings["method"].startswith("adadp")
    model.compile(
        plan.optimizer(tf_adaptive_dp.ADADP if uses_adadp else tf_adaptive_dp.DPSGD, **arguments),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        metrics=["accuracy"],
    )
    history = plan.fit(model, x, y, verbose=0).history
    judged = model.evaluate(
        *data[settings["judged_on"]], batch_size=1000, verbose=0, return_dict=True
    )
    independent = prefix_error(IndependentNoise(), plan.steps)
    return {
        "epochs": [settings["epochs"]],
        "epsilon": [round(history["epsilon"][-1], 4)],
        "accuracy": [round(judged["accuracy"], 5)],
        "noise_multiplier": noise_multiplier,
        "noise": serialize(noise),
        "error": round(noise_multiplier * prefix_error(noise, plan.steps) / independent, 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Test accuracy of DP-SGD at its best rate and of ADADP, mean ± standard deviation."""
    rows = []
    for part in made:
        finals = part.finals(trials)
        for method in titles:
            runs = finals.get(method)
            if not runs:
                continue
            result = runs[0].result
            values = [grids.final(run, "accuracy") for run in runs]
            relative = result["error"] / finals["independent"][0].result["error"]
            rows.append(
                [
                    part.common["part"],
                    titles[method],
                    get_strategy(result["noise"]).bands,
                    f"{result['noise_multiplier']:.3f}",
                    f"{relative:.2f}",
                    f"{rate:g}" if (rate := runs[0].settings.get("learning_rate")) else "its own",
                    report.mean(values),
                    len(runs),
                ]
            )
    columns = "part, method, bands, σ, noise in sums, rate, test accuracy, seeds".split(", ")
    return report.table(columns, rows)


def plot(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> Any:
    """Accuracy on the held-out part by rate, and on the test data; a line for ADADP's own rates."""
    import matplotlib.pyplot as plt

    columns = min(2, len(made))
    rows = -(-len(made) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False)
    for axis, part in zip(axes.flat, made):
        for number, (method, title) in enumerate(titles.items()):
            chosen = [
                trial
                for trial in trials
                if trial.settings["part"] == part.common["part"]
                and trial.settings["method"] == method
            ]
            if "adadp" in method:
                tested = [grids.final(trial, "accuracy") for trial in chosen]
                if tested:
                    axis.axhline(np.mean(tested), color=f"C{number}", label=f"{title}, test")
                continue
            for judged_on, marker in (("held_out", "o--"), ("test", "*")):
                points = sorted(
                    (t.settings["learning_rate"], grids.final(t, "accuracy"))
                    for t in chosen
                    if t.settings["judged_on"] == judged_on
                )
                label = f"{title}, {judged_on.replace('_', '-')}"
                axis.plot(*zip(*points), marker, color=f"C{number}", label=label)
        axis.set(title=part.common["part"], xlabel="learning rate", ylabel="accuracy")
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


EXPERIMENT = grids.experiment("correlated_noise", __doc__, parts, train, TITLES, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
