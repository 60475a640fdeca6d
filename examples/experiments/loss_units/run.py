"""Targets and losses in any units: a last layer that finds units, and a clip norm that follows.

This experiment is not in the papers. The noise of private training is in proportion to the clip
norm, so it matters in which units the loss is.

- regression: five normal inputs explain 99% of z, a target of deviation 1, which comes in several
  units. 5,000 examples, 5-16-1, mean squared error, batches of 250, 10 epochs. R² on 2,000 held-out
  examples. ADADP as it is, behind `plan.denormalization(y)`, also with a measured clip norm or
  `clipping="adaptive"`, and DP-Adam at a rate of .01.
- classification: scikit-learn's digits, 64-64-10, batches of 128, 40 epochs, with a loss that is
  multiplied by a factor. Test accuracy of ADADP with a clip norm of 1, with a measured one, and
  with `clipping="adaptive"`.

Privacy claim: each run alone is (3, 1e-5)-DP for adding or removing one training example, the
release of the targets' mean and deviation included (RDP accountant). Batches are drawn by Poisson
sampling. Nothing is chosen.

    python examples/experiments/loss_units/run.py --scale small
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import grids, harness, report
from examples.experiments.lib.datasets import images

TITLES = {
    "denormalized": "ADADP, `denormalization` last",
    "measured": '`l2_norm_clip="measured"`',
    "adaptive": '`clipping="adaptive"`',
    "adadp": "ADADP",
    "dp_adam": "DP-Adam, rate .01",
}
REGRESSION = ("denormalized", "measured", "adaptive", "adadp", "dp_adam")
CLASSIFICATION = ("measured", "adaptive", "adadp")
# The target in these units is offset + scale · z, or the exponential of that.
TARGETS = {
    "z": (0.0, 1.0),
    "1,000 z": (0.0, 1e3),
    "price = 300,000 + 80,000 z": (3e5, 8e4),
    "year = 2005 + 8 z": (2005.0, 8.0),
    "100,000,000 z": (0.0, 1e8),
    "income = exp(10 + z/2)": (10.0, 0.5),
    ".1 z": (0.0, 0.1),
    ".01 z": (0.0, 0.01),
}
FACTORS = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e2, 1e4, 1e6)


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale; "paper" has more seeds, since there is no paper."""
    if scale == "smoke":
        return [
            _regression("1,000 z", scale, epochs=1, seeds=1),
            _classification(0.01, scale, epochs=1, seeds=1),
        ]
    seeds = 3 if scale == "small" else 10
    return [
        *(_regression(name, scale, 10, seeds) for name in TARGETS),
        *(_classification(factor, scale, 40, seeds) for factor in FACTORS),
    ]


def _regression(name: str, scale: str, epochs: int, seeds: int) -> grids.Part:
    common = {"part": name, "scale": scale, "data": "regression", "units": name, "epochs": epochs}
    return grids.Part(common, {m: [{}] for m in REGRESSION}, "r2", seeds=seeds)


def _classification(factor: float, scale: str, epochs: int, seeds: int) -> grids.Part:
    name = f"loss × {factor:g}"
    common = {"part": name, "scale": scale, "data": "digits", "units": factor, "epochs": epochs}
    return grids.Part(common, {m: [{}] for m in CLASSIFICATION}, "accuracy", seeds=seeds)


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "data", "units", "method", "epochs", and "seed", which determines the initial
        weights and, in a regression, the data.
      data_dir: not used.

    Returns:
      Of the end of the run, each a list with one entry: "epochs", "epsilon" and "r2" or "accuracy".
      Also "seconds".
    """
    del data_dir
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    start = time.perf_counter()
    run = _train_regression if settings["data"] == "regression" else _train_classification
    figures = run(settings)
    return {"epochs": [settings["epochs"]], **figures, "seconds": time.perf_counter() - start}


def _plan(settings: dict[str, Any], num_examples: int, batch_size: int) -> Any:
    return tf_adaptive_dp.PrivacyPlan(
        epsilon=3.0,
        delta=1e-5,
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=settings["epochs"],
        accountant="rdp",
        normalize_targets=settings["data"] == "regression" and _finds_units(settings["method"]),
    )


def _finds_units(method: str) -> bool:
    return method in ("denormalized", "measured", "adaptive")


def _optimizer(settings: dict[str, Any], plan: Any) -> tf.keras.optimizers.Optimizer:
    if settings["method"] == "dp_adam":
        return plan.optimizer(tf_adaptive_dp.DPAdam, learning_rate=0.01)
    clipping = "adaptive" if settings["method"] == "adaptive" else "flat"
    clip = "measured" if settings["method"] == "measured" else 1.0
    return plan.optimizer(tf_adaptive_dp.ADADP, l2_norm_clip=clip, clipping=clipping)


def _train_regression(settings: dict[str, Any]) -> dict[str, Any]:
    x, y = regression(settings["units"], settings["seed"])
    train = slice(0, 5_000)
    plan = _plan(settings, 5_000, 250)
    layers = [tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(1)]
    if _finds_units(settings["method"]):
        layers.append(plan.denormalization(y[train]))
    model = tf.keras.Sequential([tf.keras.Input([5]), *layers])
    model.compile(_optimizer(settings, plan), loss="mse")
    plan.fit(model, x[train], y[train].astype(np.float32), verbose=0)
    x, y = x[5_000:], y[5_000:]
    predicted = model.predict(x, verbose=0)[:, 0].astype(np.float64)
    r2 = 1 - np.mean(np.square(predicted - y)) / np.var(y)
    return {"epsilon": [plan.epsilon], "r2": [round(float(r2), 5)]}


def regression(units: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [7,000, 5] and targets [7,000] in some units."""
    random = np.random.default_rng(seed)
    x = random.normal(size=[7_000, 5]).astype(np.float32)
    z = x @ np.array([0.6, -0.5, 0.4, 0.3, -0.35])
    z = 0.995 * z / z.std() + 0.1 * random.normal(size=len(z))
    offset, scale = TARGETS[units]
    return x, np.exp(offset + scale * z) if "exp" in units else offset + scale * z


def _train_classification(settings: dict[str, Any]) -> dict[str, Any]:
    x, y = images.digits("train")
    plan = _plan(settings, len(y), 128)
    layers = [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input([64]), tf.keras.layers.Rescaling(1 / 16), *layers])
    model.compile(
        _optimizer(settings, plan),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        loss_weights=settings["units"],
        metrics=["accuracy"],
    )
    plan.fit(model, x, y, verbose=0)
    accuracy = model.evaluate(*images.digits("test"), verbose=0)[1]
    return {"epsilon": [plan.epsilon], "accuracy": [round(float(accuracy), 5)]}


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """R², or test accuracy, mean over the seeds ± standard deviation."""
    rows = []
    for part in made:
        finals = part.finals(trials)
        cells = [grids.cell(finals.get(method, []), part.metric, None) for method in titles]
        rows.append([part.common["part"], part.metric, *cells])
    return report.table(["", "", *titles.values()], rows)


def plot(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> Any:
    """Each figure in all units; what is below 0 is at 0."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4))
    for axis, metric in zip(axes, ("r2", "accuracy")):
        shown = [part for part in made if part.metric == metric]
        names = [part.common["part"].partition(" =")[0] for part in shown]
        for method, title in titles.items():
            runs = [part.finals(trials).get(method, []) for part in shown]
            if not any(runs):
                continue
            means = [grids.mean(of, metric) for of in runs]
            axis.plot(names, np.maximum(means, 0.0), "o-", label=title)
        axis.set(ylabel={"r2": "R² on held-out data", "accuracy": "test accuracy"}[metric])
        axis.tick_params(axis="x", rotation=30)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    return figure


EXPERIMENT = grids.experiment("loss_units", __doc__, parts, train, TITLES, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
