"""What correlated noise is worth in test accuracy, at the same ε.

This experiment is not in the papers. DP-SGD and ADADP with the noise that
`PrivacyPlan(noise="best")` picks run beside the same with independent noise: same data, network,
batch size, number of steps and ε.

- mnist: 784-64-10, standardized pixels, 5 epochs of batches of 200, and 10 of batches of 1,000
- cifar10: features of frozen convolutions, then 1600-32-10, 5 epochs of batches of 200
- digits, adult and reviews of `untuned`, in raw units, which the plan normalizes: ADADP only

DP-SGD has the same rates to choose from with both. They are judged on a part of the training set
that no run trains on. Only the best one meets the test data, once at the end of each of three runs.
For ADADP nothing is chosen. On data in raw units both kinds of noise leave the same share of ε to
the statistics of the inputs.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one example that it
trains on (RDP accountant). Batches are drawn by Poisson sampling, from groups in turn if the noise
is correlated. ε does not include the choice of the rate on the held-out part.

    python examples/experiments/correlated_noise/run.py --scale small

The environment's TFDS_DATA_DIR and ADULT_CSV say where the data are; the smoke scale needs none.
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
from examples.experiments.untuned import run as untuned
from tf_adaptive_dp.accounting import IndependentNoise
from tf_adaptive_dp.accounting.noise_strategies import get_strategy, prefix_error, serialize

Arrays = tuple[np.ndarray, np.ndarray]

TITLES = {
    "independent": "DP-SGD, tuned, independent noise",
    "best": 'DP-SGD, tuned, noise="best"',
    "adadp_independent": "ADADP, independent noise",
    "adadp_best": 'ADADP, noise="best"',
    "normalized_independent": "ADADP, inputs normalized, independent noise",
    "normalized_best": 'ADADP, inputs normalized, noise="best"',
}
AS_THEY_ARE = ("independent", "best", "adadp_independent", "adadp_best")
NORMALIZED = ("normalized_independent", "normalized_best")
# Of DP-SGD, the same for both kinds of noise. Larger batches take larger rates.
RATES = {
    ("digits", 32): (0.3, 1.0),
    ("mnist", 200): (0.1, 0.3, 1.0, 3.0, 10.0),
    ("mnist", 1000): (0.3, 1.0, 3.0, 10.0, 30.0),
    ("cifar10", 200): (0.1, 0.3, 1.0, 3.0),
}
# Problems of `untuned`, in the units of their files.
RAW = {"digits": "0 to 16", "adult": "raw numbers", "reviews": "counts"}
DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set and its model.

    Attributes:
      hidden_units: of each hidden layer.
      held_out: how many of the training examples judge the rates, in place of training.
    """

    hidden_units: tuple[int, ...]
    held_out: int


PROBLEMS = {
    "digits": Problem((), 300),
    "mnist": Problem((64,), 10_000),
    "cifar10": Problem((32,), 10_000),
}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale; "paper" has more seeds, since there is no paper."""
    if scale == "smoke":
        return [_part("digits", 32, 8.0, scale, epochs=2, seeds=1), _raw_part("digits", 8.0, scale)]
    cells = [("mnist", 200, 5), ("cifar10", 200, 5), ("mnist", 1000, 10)]
    seeds = 3 if scale == "small" else 10
    made = [
        _part(name, batch_size, epsilon, scale, epochs, seeds)
        for name, batch_size, epochs in cells
        for epsilon in (3.0, 8.0)
    ]
    return made + [_raw_part(name, epsilon, scale) for name in RAW for epsilon in (3.0, 8.0)]


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
        {method: [{}] if method.startswith("adadp") else rates for method in AS_THEY_ARE},
        "accuracy",
        seeds=seeds,
        tuning={"judged_on": "held_out"},
    )


def _raw_part(name: str, epsilon: float, scale: str) -> grids.Part:
    problem, inputs = untuned.PROBLEMS[name], RAW[name]
    common = {
        "part": f"{name}, {inputs}, ε = {epsilon:g}",
        "scale": scale,
        "data": name,
        "inputs": inputs,
        "batch_size": problem.batch_size,
        "epochs": 2 if scale == "smoke" else problem.epochs,
        "epsilon": epsilon,
        "judged_on": "test",
    }
    seeds = 1 if scale == "smoke" else problem.seeds
    return grids.Part(common, {method: [{}] for method in NORMALIZED}, "accuracy", seeds=seeds)


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


@functools.lru_cache(maxsize=1)
def load_raw(name: str) -> dict[str, Arrays]:
    """The arrays of a problem of `untuned` in the units of `RAW`: "train" and "test"."""
    layers = untuned.layers_of(name, RAW[name], 1.0)

    def in_units(x: np.ndarray, y: np.ndarray) -> Arrays:
        if not layers:
            return x, y
        model = tf.keras.Sequential([tf.keras.Input([x.shape[1]]), *layers])
        return model.predict(x, batch_size=1000, verbose=0), y

    train, test = untuned.load(name)
    return {"train": in_units(*train), "test": in_units(*test)}


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "method", "data", "batch_size", "epochs", "epsilon", "judged_on", "learning_rate" of
        DP-SGD, "inputs" if they are in raw units, and "seed", which determines the initial weights;
        noise and batches never repeat.
      data_dir: tensorflow-datasets' folder; data in raw units are those of the environment.

    Returns:
      Of the end of the run, each a list with one entry: "epochs", "epsilon", "accuracy". Also
      "noise_multiplier"; "noise", the strategy as plain values; "error", the noise in sums of steps
      relative to a noise multiplier of 1 with independent noise; and "seconds".
    """
    start = time.perf_counter()
    method, name, raw = settings["method"], settings["data"], "inputs" in settings
    data = load_raw(name) if raw else load(name, data_dir)
    x, y = data["train"]
    plan = tf_adaptive_dp.PrivacyPlan(
        settings["epsilon"],
        delta=DELTA,
        num_examples=len(x),
        batch_size=settings["batch_size"],
        epochs=settings["epochs"],
        noise="best" if method.endswith("best") else None,
        normalize_inputs=raw,
        accountant="rdp",
    )
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    problem = untuned.PROBLEMS[name] if raw else PROBLEMS[name]
    model = tf.keras.Sequential(
        [
            tf.keras.Input([x.shape[1]]),
            *([plan.normalization(x)] if raw else []),
            *(tf.keras.layers.Dense(units, activation="relu") for units in problem.hidden_units),
            tf.keras.layers.Dense(int(y.max()) + 1),
        ]
    )
    arguments: dict[str, Any] = {"l2_norm_clip": 1.0}
    if "learning_rate" in settings:
        arguments["learning_rate"] = settings["learning_rate"]
    tuned = method in ("independent", "best")
    model.compile(
        plan.optimizer(tf_adaptive_dp.DPSGD if tuned else tf_adaptive_dp.ADADP, **arguments),
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
        "noise_multiplier": plan.noise_multiplier,
        "noise": serialize(plan.noise),
        "error": round(
            plan.noise_multiplier * prefix_error(plan.noise, plan.steps) / independent, 4
        ),
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
            (alone, *_) = (runs[0] for m, runs in finals.items() if m.endswith("independent"))
            relative = result["error"] / alone.result["error"]
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

    made = [part for part in made if "independent" in part.candidates]
    columns = min(2, len(made))
    rows = -(-len(made) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False)
    for axis, part in zip(axes.flat, made):
        for number, method in enumerate(part.candidates):
            title = titles[method]
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
