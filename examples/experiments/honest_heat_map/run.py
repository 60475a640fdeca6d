"""Clip norm and learning rate of DP-SGD are coupled: a heat map of the training loss.

Repeats figure 2 of "The Role of Adaptive Optimizers for Honest Private Hyperparameter Selection":
linear regression on synthetic data, x ~ U(0, 1)¹⁰, y = ⟨x, w*⟩ with w* = (10, …, 10), from w = 0,
at σ = 4, for all 900 pairs of learning rate and clip norm from [1, 2, 4, 5, 8] × [10⁻⁴ … 10]. The
rule of Theorem 2, α = R/(C·√(T(1 + dσ²/L²))) with R = ‖w*‖ and d = 10, is drawn as a diagonal. So
is the printed rule, R/(C·T·√(1 + σ²)); see `tf_adaptive_dp.tuning.grids.optimal_learning_rate`.

Our choices are 20,000 examples, batches of 250, the squared error as the loss, and its mean over
the training data as the figure. The paper's "100 iterations" are 100 steps at the scales smoke and
small. The losses that its authors released lie along α·C = 0.004, which takes about 8,000 steps or
100 epochs. The scale paper includes these.

| scale | pairs | steps | runs of each pair |
| --- | --- | --- | --- |
| smoke | 6 × 6 | 100 | 1 |
| small | 30 × 30 | 100 | 3 |
| paper | 30 × 30 | 100 and 8,000 | 3 |

All runs of a process share one compiled model, so a run of 100 steps takes a tenth of a second.

Privacy claim: the data are synthetic, so there is nobody to protect. Each run alone would be
(ε, δ)-DP for adding or removing one example, with batches drawn by Poisson sampling. The training
loss that is shown would not be private.

    python examples/experiments/honest_heat_map/run.py --scale small
"""

from __future__ import annotations

import collections
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import candidates, harness, report
from examples.experiments.lib.harness import Trial
from tf_adaptive_dp.tuning import grids

NUM_EXAMPLES, NUM_FEATURES, BATCH, NOISE = 20_000, 10, 250, 4.0
RADIUS = 10.0 * math.sqrt(NUM_FEATURES)
VALUES = [float(f"{m}e{e}") for e in range(-4, 2) for m in (1, 2, 4, 5, 8)]
# By scale: values of α and of C, numbers of steps, runs of each pair.
WHAT = {
    "smoke": ([1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0], (100,), 1),
    "small": (VALUES, (100,), 3),
    "paper": (VALUES, (100, 8000), 3),
}


def plan(scale: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The trials: one learning rate each, with all clip norms."""
    values, numbers_of_steps, runs = WHAT[scale]
    return [
        {"learning_rate": rate, "l2_norm_clips": values, "steps": steps, "run": k}
        for steps in numbers_of_steps
        for k in range(runs)
        for rate in values
    ]


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """The examples; the same in all runs."""
    x = np.random.default_rng(0).random([NUM_EXAMPLES, NUM_FEATURES], np.float32)
    return x, 10 * x.sum(1, keepdims=True)


class SquaredError(tf.keras.losses.Loss):
    """(y − ŷ)² of each example."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """The loss of each example.

        Args:
          y_true: [B, 1].
          y_pred: [B, 1].
        """
        return tf.reduce_sum(tf.square(y_true - y_pred), axis=-1)


def make_model() -> tf.keras.Model:
    """Linear regression from w = 0."""
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return tf.keras.Sequential([tf.keras.Input([NUM_FEATURES]), layer])


@functools.cache
def compiled() -> candidates.CompiledOnce:
    """The model of all runs."""
    law = tf_adaptive_dp.PoissonSampling.for_batch_size(BATCH, NUM_EXAMPLES, candidates.ALL_STEPS)
    return candidates.CompiledOnce(
        make_model,
        tf_adaptive_dp.DPSGD(1.0, NOISE, learning_rate=1.0, expected_batch_size=BATCH),
        SquaredError(reduction="none"),
        data(),
        law,
        steps_per_execution=100,
    )


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """The training loss after one run with each clip norm; `None` if it is not finite."""
    del data_dir  # the data are synthetic
    x, y = data()
    losses = []
    for clip in settings["l2_norm_clips"]:
        compiled().begin(0, {"learning_rate": settings["learning_rate"], "l2_norm_clip": clip})
        compiled().train(settings["steps"])
        weights = compiled().model.get_weights()[0].astype(np.float64)
        loss = float(np.mean(np.square(x @ weights - y)))
        losses.append(float(f"{loss:.5g}") if math.isfinite(loss) else None)
    return {"loss": losses}


def heat(trials: Sequence[Trial], steps: int) -> tuple[list[float], np.ndarray]:
    """The values, and log10 of the loss [learning rate, clip norm], mean over the runs."""
    rows = collections.defaultdict(list)
    for trial in trials:
        if trial.settings["steps"] == steps:
            loss = [math.inf if v is None else max(v, 1e-12) for v in trial.result["loss"]]
            rows[trial.settings["learning_rate"]].append(np.log10(loss))
            values = trial.settings["l2_norm_clips"]
    return values, np.asarray([np.mean(rows[rate], axis=0) for rate in values])


def rules(steps: int) -> dict[str, float]:
    """α·C of Theorem 2, as derived and as printed."""
    derived = grids.optimal_learning_rate(
        *(1.0, steps, NOISE, RADIUS), num_parameters=NUM_FEATURES, expected_batch_size=BATCH
    )
    return {"derived": derived, "printed": RADIUS / (steps * math.sqrt(1 + NOISE**2))}


def table(trials: Sequence[Trial]) -> str:
    """The region of small losses, in Markdown."""
    rows = []
    for steps in sorted({t.settings["steps"] for t in trials}):
        values, logs = heat(trials, steps)
        alphas, clips = np.meshgrid(values, values, indexing="ij")
        good = logs <= logs.min() + 1
        products = (alphas * clips)[good]
        rule = rules(steps)
        # The pair of each clip norm whose rate is nearest to the rule, where the grid reaches it.
        wanted = rule["derived"] / np.asarray(values)
        inside = [k for k, rate in enumerate(wanted) if values[0] <= rate <= values[-1]]
        nearest = [int(np.argmin(np.abs(np.log(values) - np.log(wanted[k])))) for k in inside]
        on_rule = 10 ** logs[nearest, inside]
        spread = f"{on_rule.min():.3g} to {on_rule.max():.3g}" if inside else "off the grid"
        rows.append(
            [
                steps,
                f"{rule['derived']:.3g}",
                f"{rule['printed']:.3g}",
                f"{np.median(products):.3g} ({products.min():.3g} to {products.max():.3g})",
                f"{10 ** logs.min():.3g}",
                f"{good.sum()} of {good.size}",
                f"{alphas[good].min():g} to {alphas[good].max():g}",
                f"{clips[good].min():g} to {clips[good].max():g}",
                f"{np.median(on_rule) if inside else math.nan:.3g} ({spread})",
            ]
        )
    columns = [
        *("steps", "α·C: Theorem 2", "as printed", "best pairs' α·C, median (range)", "best loss"),
        *("pairs within 10 times of it", "their α", "their C"),
        "at Theorem 2's rate, median (range)",
    ]
    return report.table(columns, rows)


def plot(trials: Sequence[Trial]) -> Any:
    """The heat map of each number of steps, with Theorem 2's diagonal."""
    import matplotlib.pyplot as plt

    numbers = sorted({t.settings["steps"] for t in trials})
    figure, axes = plt.subplots(1, len(numbers), figsize=(8 * len(numbers), 7), squeeze=False)
    for axis, steps in zip(axes.flat, numbers):
        values, logs = heat(trials, steps)
        shown = axis.imshow(
            np.clip(logs, -3, 5), origin="lower", cmap="inferno", vmin=-3, vmax=5, aspect="auto"
        )
        at = np.arange(len(values))
        for (name, product), style in zip(rules(steps).items(), ("-", ":")):
            rates = product / np.asarray(values)
            places = np.interp(np.log(rates), np.log(values), at, left=np.nan, right=np.nan)
            axis.plot(at, places, f"c{style}", linewidth=2, label=f"Theorem 2, {name}")
        axis.set_xticks(at[:: max(1, len(at) // 15)], values[:: max(1, len(at) // 15)], rotation=90)
        axis.set_yticks(at[:: max(1, len(at) // 15)], values[:: max(1, len(at) // 15)])
        axis.set(title=f"{steps} steps", xlabel="clip norm C", ylabel="learning rate α")
        axis.legend(loc="lower left")
        figure.colorbar(shown, ax=axis, label="log10 of the training loss")
    figure.tight_layout()
    return figure


EXPERIMENT = harness.Experiment("honest_heat_map", __doc__, plan, train, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
