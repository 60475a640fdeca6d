"""AdaDPS where adaptivity should help most: sparse linear regression on synthetic data.

Repeats figure 3 of the AdaDPS paper: 1,000 examples of 500 features in {0, 1}. The first 10% are
frequent and carry little information, the other 90% are rare and carry much:

    P(x_j = 1) = 0.9, θ*_j = 0.01  for the first 50,
    P(x_j = 1) = 0.01, θ*_j = 1    for the other 450,   y = ⟨x, θ*⟩ + N(0, 0.01²).

The loss is ½(y − ⟨x, θ⟩)², from θ ~ N(0, 0.1²). AdaDPS knows which features are frequent and uses
A = 1 for these and A = 0.01 for the others. σ = 0.7, batches of 8 and 2,250 steps are the numbers
of the authors' released program. DP-Adam is not in the figure. The curves show the loss on 1,000
fresh examples from the same distribution; the paper shows the loss on the training data.

Privacy claim: the data are synthetic, so there is nobody to protect. The private methods run as on
real data: each run alone is (ε, δ)-DP with δ = 1/1,000 for adding or removing one example. Batches
are drawn by Poisson sampling, so ε is a proven upper bound. A is known in advance. Clip norms and
rates, the same number of pairs for each private method, are chosen by the loss that is shown, as in
the paper; ε does not include the cost of this choice.

    python examples/experiments/adadps_toy/run.py --scale small
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import adadps_methods, grids, harness

NUM_EXAMPLES, NUM_FEATURES, NUM_FREQUENT = 1000, 500, 50
TITLES = {
    **adadps_methods.TITLES,
    "adadps_frequency": "AdaDPS, frequent features known",
    "adas_frequency": "AdaS, frequent features known (not private)",
}
PRIVATE, NOT_PRIVATE = "private", "not private"

# Small scale: the released pair first, and two more.
CANDIDATES: Mapping[str, Sequence[tuple[float, float]]] = {
    "dp_sgd": [(0.5, 0.1), (0.5, 0.03), (0.1, 0.2)],
    "dp_adam": [(0.5, 0.001), (0.5, 0.003), (0.5, 0.01)],
    "adadps_frequency": [(0.5, 0.2), (0.5, 0.1), (1.0, 0.1)],
}
# Paper scale: the same number of pairs for each, from the authors' range of clip norms.
CLIPS = (0.1, 0.5, 1.0, 2.0)
RATES = {
    "dp_sgd": (0.03, 0.1, 0.3),
    "dp_adam": (0.001, 0.003, 0.01),
    "adadps_frequency": (0.1, 0.2, 0.3),
}


class HalfSquaredError(tf.keras.losses.Loss):
    """½(y − ŷ)²."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """The loss of each example.

        Args:
          y_true: [B, 1].
          y_pred: [B, 1].
        """
        return 0.5 * tf.reduce_sum(tf.square(y_true - y_pred), axis=-1)


@functools.cache
def data() -> tuple[adadps_methods.Arrays, adadps_methods.Arrays]:
    """Training and fresh examples; the same in all runs."""
    generator = np.random.default_rng(0)
    frequent = np.arange(NUM_FEATURES) < NUM_FREQUENT
    theta = np.where(frequent, 0.01, 1.0)
    parts = []
    for _ in range(2):
        x = generator.random([NUM_EXAMPLES, NUM_FEATURES]) < np.where(frequent, 0.9, 0.01)
        y = x @ theta + generator.normal(0, 0.01, NUM_EXAMPLES)
        parts.append((x.astype(np.float32), y[:, np.newaxis].astype(np.float32)))
    return parts[0], parts[1]


def known_frequencies() -> tf_adaptive_dp.side_information.FixedPreconditioner:
    """A = 1 for frequent features and 0.01 for rare ones."""
    a = np.where(np.arange(NUM_FEATURES) < NUM_FREQUENT, 1.0, 0.01)[:, np.newaxis]
    return tf_adaptive_dp.side_information.FixedPreconditioner(
        lambda variable: a, provenance="public"
    )


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale."""
    epochs = {"smoke": 2, "small": 18, "paper": 18}[scale]
    seeds = {"smoke": 1, "small": 3, "paper": 5}[scale]
    common = {
        "scale": scale,
        "batch_size": 8,
        "delta": 1 / NUM_EXAMPLES,
        "steps_per_execution": 25,
    }
    candidates = {}
    for method, pairs in CANDIDATES.items():
        if scale == "paper":
            pairs = itertools.product(CLIPS, RATES[method])
        chosen = [{"clip": clip, "rate": rate} for clip, rate in pairs]
        candidates[method] = chosen[:1] if scale == "smoke" else chosen
    private = {**common, "epochs": epochs, "part": PRIVATE, "sigma": 0.7}
    # As released: 40,000 steps.
    longer = {**common, "epochs": epochs if scale == "smoke" else 320, "part": NOT_PRIVATE}
    rates = {"sgd": [{"rate": 0.03}], "adas_frequency": [{"rate": 0.003}]}
    return [
        grids.Part(private, candidates, "loss", larger_is_better=False, seeds=seeds),
        grids.Part(longer, rates, "loss", larger_is_better=False, seeds=seeds),
    ]


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run; `data_dir` is not used.

    Args:
      settings: of `adadps_methods.run`, and "seed".
      data_dir: see above.
    """
    private, fresh = data()
    tf.keras.utils.set_random_seed(settings["seed"])
    start = tf.keras.initializers.RandomNormal(stddev=0.1, seed=settings["seed"])
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer=start)
    model = tf.keras.Sequential([tf.keras.Input([NUM_FEATURES]), layer])
    return adadps_methods.run(
        model,
        settings,
        private,
        private,
        fresh,
        loss=HalfSquaredError,
        metrics=[],
        judge_every=max(1, settings["epochs"] // 18),
        known=known_frequencies() if settings["method"].endswith("_frequency") else None,
    )


EXPERIMENT = grids.experiment("adadps_toy", __doc__, parts, train, TITLES)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
