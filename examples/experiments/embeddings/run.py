"""Embeddings trained from scratch: what ADADP needs to train them without tuning.

This experiment is not in the papers. The vectors of an embedding begin near 0, and their mean over
a text is smaller still. So the layer behind them sees inputs far below a variance of 1, which ADADP
suffers from in an embedding just as it does in raw data. `LayerNormalization(center=False,
scale=False)`, which has no weights, brings them to one scale: behind the mean over the words, or on
the vectors of the words if a convolution follows.

Film reviews (IMDB), at most 290 words each, and three models: a table of 10,000 × 16, the mean over
the words and a softmax; 10,000 × 32, the mean and a hidden layer of 64; 5,000 × 16, a convolution
of 32 filters over five words with stride 2, and the maximum. Batches of 250, 10 epochs. ADADP has
its defaults. DP-Adam, with normalized gradients (`clipping="automatic"`), has the best of three
rates, by accuracy on 5,000 training reviews that no run trains on. Only the best one meets the test
data, once at the end of each of three runs. Where the normalization goes was chosen on the same
5,000 reviews.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one of the examples
that it trains on (RDP accountant). Batches are drawn by Poisson sampling. ε does not include the
choice of the rate on the held-out part.

    python examples/experiments/embeddings/run.py --scale small

The environment's TFDS_DATA_DIR says where the data are; the smoke scale needs none.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.embedding_rows.run import fit
from examples.experiments.lib import grids, harness, report

TITLES = {
    "adadp, normalized": "ADADP, normalized",
    "adadp": "ADADP",
    "dp_adam, normalized": "DP-Adam, normalized, tuned",
    "dp_adam": "DP-Adam, tuned",
}
ROWS = {"mean": 10_000, "hidden layer": 10_000, "convolution": 5_000}
RATES = (0.003, 0.01, 0.03)


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale; "paper" has more seeds, since there is no paper."""
    if scale == "smoke":
        return [_part("mean", 8.0, scale, epochs=1, seeds=1)]
    seeds = 3 if scale == "small" else 10
    return [_part(model, epsilon, scale, 10, seeds) for epsilon in (1.0, 8.0) for model in ROWS]


def _part(model: str, epsilon: float, scale: str, epochs: int, seeds: int) -> grids.Part:
    common = {
        "part": f"{model}, ε = {epsilon:g}",
        "scale": scale,
        "model": model,
        "epochs": epochs,
        "epsilon": epsilon,
        "judged_on": "test",
    }
    methods = {
        title: [
            {"optimizer": optimizer, "learning_rate": rate, "normalized": "normalized" in title}
            for rate in rates
        ]
        for title in TITLES
        for optimizer, rates in [("DPAdam", RATES) if "adam" in title else ("ADADP", (None,))]
    }
    return grids.Part(common, methods, "accuracy", seeds=seeds, tuning={"judged_on": "held_out"})


def build(name: str, length: int, normalized: bool) -> tf.keras.Model:
    """One of the models.

    Args:
      name: one of `ROWS`.
      length: of the texts.
      normalized: whether to normalize what comes out of the embedding.
    """
    layers = tf.keras.layers
    rows = ROWS[name]
    norm = [layers.LayerNormalization(center=False, scale=False)] if normalized else []
    if name == "convolution":
        body = [
            layers.Embedding(rows, 16),
            *norm,
            layers.Conv1D(32, 5, strides=2, activation="relu"),
            layers.GlobalMaxPooling1D(),
        ]
    else:
        hidden = [layers.Dense(64, activation="relu")] if name == "hidden layer" else []
        width = 32 if hidden else 16
        table = layers.Embedding(rows, width, mask_zero=True)
        body = [table, layers.GlobalAveragePooling1D(), *norm, *hidden]
    return tf.keras.Sequential([tf.keras.Input([length], dtype="int32"), *body, layers.Dense(2)])


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "model", "normalized", "optimizer" with its "learning_rate" or `None`, "epochs",
        "epsilon", "judged_on", and "seed", which determines the initial weights; noise and batches
        never repeat.
      data_dir: tensorflow-datasets' folder.

    Returns:
      Of the end of the run, each a list with one entry: "epochs", "epsilon", "accuracy". Also
      "noise_multiplier" and "seconds".
    """
    name = settings["model"]
    arguments = {"l2_norm_clip": 1.0}
    if settings["learning_rate"] is not None:
        arguments = {"clipping": "automatic", "learning_rate": settings["learning_rate"]}
    return fit(
        settings,
        data_dir,
        ROWS[name],
        lambda length: build(name, length, settings["normalized"]),
        getattr(tf_adaptive_dp, settings["optimizer"]),
        arguments,
    )


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Test accuracy, mean over the seeds ± standard deviation, with the best rates."""
    rows = []
    for part in made:
        finals = part.finals(trials)
        cells = []
        for method in titles:
            runs = finals.get(method, [])
            rate = runs[0].settings["learning_rate"] if runs else None
            cells.append(grids.cell(runs, "accuracy", rate))
        rows.append([part.common["part"], *cells])
    return report.table(["", *titles.values()], rows)


def plot(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> Any:
    """Test accuracy of all methods, model by model."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    names = [part.common["part"] for part in made]
    for method, title in titles.items():
        means = [grids.mean(part.finals(trials).get(method, []), "accuracy") for part in made]
        axis.plot(names, means, "o" if "normalized" in method else "x", label=title)
    axis.set(ylabel="test accuracy")
    axis.tick_params(axis="x", rotation=20)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


EXPERIMENT = grids.experiment("embeddings", __doc__, parts, train, TITLES, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
