"""Whether noise on the rows of rare words costs accuracy: what sparsity-preserving noise can gain.

This experiment is not in the papers. Private training of an embedding adds noise to all of its
rows, also to those of words that hardly occur. DP-FEST (Ghazi et al. 2023, arXiv:2311.08357) trains
the rows of the most frequent words only, and spends a part of the budget on finding them. Here they
are found for nothing, in public texts, so that what is gained is at least what DP-FEST can gain.

Film reviews (IMDB), at most 290 words each: a table of 10,000 × 16, the mean over the words, and a
softmax. All words that have no row of their own share that of unknown words. DP-Adam with
normalized gradients (`clipping="automatic"`), batches of 250, 10 epochs. Its rate is chosen by
accuracy on 5,000 training reviews that no run trains on. Only the best one meets the test data,
once at the end of each of three runs. The *texts* of the test split, without their labels, are the
public ones.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one of the examples
that it trains on (RDP accountant). Batches are drawn by Poisson sampling. ε does not include the
choice of the rate on the held-out part.

    python examples/experiments/embedding_rows/run.py --scale small

The environment's TFDS_DATA_DIR says where the data are; the smoke scale needs none.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import grids, harness, report
from examples.experiments.lib.datasets import text

Arrays = tuple[np.ndarray, np.ndarray]

ROWS = (10_000, 3_000, 1_000, 300)
TITLES = {f"{rows} rows": f"{rows:,} rows" for rows in ROWS}
RATES = (0.01, 0.03, 0.1)
WIDTH, HELD_OUT = 16, 5_000
DELTA = 1e-5


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale; "paper" has more seeds, since there is no paper."""
    if scale == "smoke":
        return [_part(8.0, scale, epochs=1, seeds=1)]
    return [_part(epsilon, scale, 10, 3 if scale == "small" else 10) for epsilon in (1.0, 8.0)]


def _part(epsilon: float, scale: str, epochs: int, seeds: int) -> grids.Part:
    common = {
        "part": f"ε = {epsilon:g}",
        "scale": scale,
        "epochs": epochs,
        "epsilon": epsilon,
        "judged_on": "test",
    }
    methods = {
        title: [{"rows": rows, "learning_rate": rate} for rate in RATES]
        for title, rows in zip(TITLES, ROWS)
    }
    tuning = {"judged_on": "held_out"}
    return grids.Part(common, methods, "accuracy", seeds=seeds, tuning=tuning)


@functools.cache
def load(data_dir: str | None, scale: str) -> dict[str, Arrays]:
    """Reviews as rows of word numbers, which are in the order of the words' frequency."""
    if scale == "smoke":
        random = np.random.default_rng(0)
        x = random.integers(1, max(ROWS), size=[500, 20], dtype=np.int32)
        return dict.fromkeys(("train", "held_out", "test"), (x, x[:, 0] % 2))
    x, y = text.imdb(data_dir, "train")
    return {
        "train": (x[:-HELD_OUT], y[:-HELD_OUT]),
        "held_out": (x[-HELD_OUT:], y[-HELD_OUT:]),
        "test": text.imdb(data_dir, "test"),
    }


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "rows", those of the table; "learning_rate", "epochs", "epsilon", "judged_on", and
        "seed", which determines the initial weights; noise and batches never repeat.
      data_dir: tensorflow-datasets' folder.

    Returns:
      Of the end of the run, each a list with one entry: "epochs", "epsilon", "accuracy". Also
      "noise_multiplier" and "seconds".
    """
    rows = settings["rows"]

    def build(length: int) -> tf.keras.Model:
        return tf.keras.Sequential(
            [
                tf.keras.Input([length], dtype="int32"),
                tf.keras.layers.Embedding(rows, WIDTH, mask_zero=True),
                tf.keras.layers.GlobalAveragePooling1D(),
                tf.keras.layers.Dense(2),
            ]
        )

    arguments = {"clipping": "automatic", "learning_rate": settings["learning_rate"]}
    return fit(settings, data_dir, rows, build, tf_adaptive_dp.DPAdam, arguments)


def fit(
    settings: dict[str, Any],
    data_dir: str | None,
    rows: int,
    build: Callable[[int], tf.keras.Model],
    optimizer_class: type,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Trains a model of reviews under a plan, and judges it once.

    Args:
      settings: "scale", "epsilon", "epochs", "seed" and "judged_on".
      data_dir: tensorflow-datasets' folder.
      rows: words with a row of their own.
      build: makes a model for texts of some length.
      optimizer_class: see `PrivacyPlan.optimizer`.
      arguments: of the optimizer.

    Returns:
      See `train`.
    """
    start = time.perf_counter()
    data = load(data_dir, settings["scale"])
    x, y = data["train"]
    plan = tf_adaptive_dp.PrivacyPlan(
        settings["epsilon"],
        delta=DELTA,
        num_examples=len(x),
        batch_size=250,
        epochs=settings["epochs"],
        accountant="rdp",
    )
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    model = build(x.shape[1])
    model.compile(
        plan.optimizer(optimizer_class, **arguments),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        metrics=["accuracy"],
    )
    history = plan.fit(model, with_rows(x, rows), y, verbose=0).history
    judged_x, judged_y = data[settings["judged_on"]]
    judged = model.evaluate(with_rows(judged_x, rows), judged_y, batch_size=1000, verbose=0)
    return {
        "epochs": [settings["epochs"]],
        "epsilon": [round(history["epsilon"][-1], 4)],
        "accuracy": [round(judged[1], 5)],
        "noise_multiplier": plan.noise_multiplier,
        "seconds": round(time.perf_counter() - start, 1),
    }


def with_rows(words: np.ndarray, rows: int) -> np.ndarray:
    """The numbers of the words, where those without a row are unknown words.

    >>> with_rows(np.array([[1, 4, 250, 0]]), rows=100)
    array([[1, 4, 2, 0]])
    """
    return np.where(words < rows, words, text.UNKNOWN)


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Test accuracy, mean over the seeds ± standard deviation, by ε and rows."""
    rows = []
    for part in made:
        finals = part.finals(trials)
        cells = [[grids.final(t, "accuracy") for t in finals.get(method, [])] for method in titles]
        rows.append([part.common["part"], *(report.mean(c) if c else "" for c in cells)])
    return report.table(["", *titles.values()], rows)


def plot(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> Any:
    """Test accuracy by the number of rows, a line for each ε."""
    import matplotlib.pyplot as plt

    del titles
    figure, axis = plt.subplots(figsize=(6, 4))
    for part in made:
        points = [
            (trial.settings["rows"], grids.final(trial, "accuracy"))
            for runs in part.finals(trials).values()
            for trial in runs
        ]
        rows = sorted({r for r, _ in points})
        means = [np.mean([a for r, a in points if r == wanted]) for wanted in rows]
        axis.plot(rows, means, "o-", label=part.common["part"])
    axis.set(xlabel="trained rows", ylabel="test accuracy", xscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


EXPERIMENT = grids.experiment("embedding_rows", __doc__, parts, train, TITLES, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
