"""Linear models on features that need no learning: scattering networks, without tuning.

Repeats the linear models of Tramèr and Boneh, "Differentially Private Learning Needs Better
Features (or Much More Data)" (2020), arXiv:2011.11660. Softmax regression on scattering features,
normalized in groups of channels, is trained at ε = 3, δ = 1e-5. The paper chooses
learning rate, batch size and epochs on test data. ADADP takes the paper's batch size and epochs,
and defaults for the rest. DP-SGD with the paper's rate and C, and ADADP on the pixels, are for
comparison; so is, on cifar10, ADADP with channels that are also normalized by means and deviations
released with noise, which the same ε pays for. Mirrored features are our own: square roots of the
coefficients, averaged over an image and its mirror image, with channels normalized in the same way;
on them ADADP also runs with averaged weights (`use_ema`). Both were chosen on 10,000 held-out
training images.

- mnist: 3,969 features, batches of 4,096, 40 epochs
- cifar10: 15,552 features, 7,776 mirrored ones, batches of 8,192, 60 epochs

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one training example. Batches are
drawn by Poisson sampling, so ε is a proven upper bound. The features of an image depend on no other
image. The test data are for the figures alone. Batch size and epochs of all methods, and the rates
of DP-SGD, are the paper's, which chose them on these; ε does not include the cost of that choice.

    python examples/experiments/scattering/run.py --dataset mnist --scale small

The environment's SCATTERING_FEATURES names a folder for the features, which are computed once: in
a minute and a half for MNIST and four minutes for CIFAR-10 on one core.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import grids, harness, report, training
from examples.experiments.lib.datasets import images, scattered
from federated.datasets.folder import folder

TITLES = {
    "adadp": "ADADP, defaults",
    "adadp_normalized": "ADADP, defaults, channels normalized",
    "adadp_mirrored": "ADADP, defaults, mirrored features, channels normalized",
    "adadp_averaged": "ADADP, averaged weights, mirrored features, channels normalized",
    "dp_sgd": "DP-SGD, the paper's rate and C",
    "adadp_pixels": "ADADP, defaults, on pixels",
}
PAPER_RATES = {"mnist": 8.0, "cifar10": 4.0}
# By scale: ε, seeds, and the number of examples, all if `None`.
SCALES = {
    "smoke": ((3.0,), 1, 2000),
    "small": ((3.0,), 3, None),
    "paper": ((1.0, 2.0, 3.0), 5, None),
}
# A run on CIFAR-10 takes three times as long as one on MNIST.
SMALL_CIFAR10 = {
    "adadp": 3,
    "adadp_normalized": 1,
    "adadp_mirrored": 3,
    "adadp_averaged": 3,
    "dp_sgd": 1,
    "adadp_pixels": 1,
}


def _candidates(dataset: str) -> dict[str, list[dict[str, Any]]]:
    """What each method sets; there is nothing to choose from."""
    paper = {"learning_rate": PAPER_RATES[dataset], "momentum": 0.9, "l2_norm_clip": 0.1}
    # Each group of channels, and each image's pixels, have mean 0 and variance 1.
    adadp = {"optimizer": "ADADP", "arguments": {"normalized_inputs": True}}
    mirrored = {**adadp, "inputs": "mirrored", "normalized": True}
    averages = {"normalized_inputs": True, "use_ema": True, "ema_momentum": 0.9}
    of_cifar10 = {
        "adadp_normalized": [{**adadp, "inputs": "features", "normalized": True}],
        "adadp_mirrored": [mirrored],
        "adadp_averaged": [{**mirrored, "arguments": averages}],
    }
    return {
        "adadp": [{**adadp, "inputs": "features"}],
        **(of_cifar10 if dataset == "cifar10" else {}),
        "dp_sgd": [{"optimizer": "DPSGD", "arguments": paper, "inputs": "features"}],
        "adadp_pixels": [{**adadp, "inputs": "pixels"}],
    }


def parts(dataset: str, scale: str) -> list[grids.Part]:
    """What is compared at a scale: all methods for each ε."""
    epsilons, seeds, number = SCALES[scale]
    if (dataset, scale) == ("cifar10", "small"):
        seeds = SMALL_CIFAR10
    small = {} if number is None else {"batch_size": number // 8, "epochs": 4}
    return [
        grids.Part(
            {
                "part": f"{dataset}, ε = {epsilon:g}",
                "scale": scale,
                "data": dataset,
                "epsilon": epsilon,
                "delta": 1e-5,
                **scattered.PAPER[dataset],
                **small,
                "number": number,
            },
            _candidates(dataset),
            "accuracy",
            seeds=seeds,
        )
        for epsilon in epsilons
    ]


@functools.lru_cache(maxsize=2)
def load(dataset: str, split: str, inputs: str, data_dir: str | None) -> scattered.Arrays:
    """Features or pixels, one row each, and labels."""
    if inputs != "pixels":
        how = "The features of the images are stored there; it may be empty."
        cache_dir = folder("SCATTERING_FEATURES", None, "SCATTERING_FEATURES", how)
        return scattered.load(dataset, split, data_dir, cache_dir, mirrored=inputs == "mirrored")
    pixels, labels = images.load(dataset, split, data_dir)
    scaled = pixels.reshape(len(pixels), -1).astype(np.float32) / 255
    # As the groups of features: each image by itself.
    scaled -= scaled.mean(1, keepdims=True)
    return scaled / np.maximum(scaled.std(1, keepdims=True), 1e-3), labels


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run: softmax regression within a privacy plan, evaluated after each epoch.

    Args:
      settings: "data", "inputs", "number" of examples, "epsilon", "delta", "batch_size", "epochs",
        "optimizer" with its "arguments", and "seed", which determines the initial weights.
      data_dir: tensorflow-datasets' folder.

    Returns:
      Lists by epoch: "epochs", "epsilon", "learning_rate", "accuracy"; and "noise_multiplier",
      "steps", and "seconds" of the training.
    """
    part = "" if settings["number"] is None else f"[:{settings['number']}]"
    x, y = load(settings["data"], f"train{part}", settings["inputs"], data_dir)
    test = load(settings["data"], f"test{part}", settings["inputs"], data_dir)
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=settings["epsilon"],
        delta=settings["delta"],
        num_examples=len(x),
        batch_size=settings["batch_size"],
        epochs=settings["epochs"],
        normalize_inputs=settings.get("normalized", False),
    )
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    normalization = []
    if plan.normalize_inputs:
        by_channel = scattered.NUM_CHANNELS[settings["data"]], -1
        layer = plan.normalization(x.reshape(len(x), *by_channel), axis=1)
        normalization = [tf.keras.layers.Reshape(by_channel), layer, tf.keras.layers.Flatten()]
    model = tf.keras.Sequential(
        [tf.keras.Input([x.shape[1]]), *normalization, tf.keras.layers.Dense(10)]
    )
    model.compile(
        plan.optimizer(getattr(tf_adaptive_dp, settings["optimizer"]), **settings["arguments"]),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    judge = training.Judge(test)
    start = time.perf_counter()
    history = plan.fit(model, x, y, callbacks=[judge], verbose=0).history
    return {
        "epochs": list(range(1, settings["epochs"] + 1)),
        "epsilon": [round(float(e), 4) for e in history["epsilon"]],
        "learning_rate": [float(f"{rate:.4g}") for rate in history["learning_rate"]],
        "accuracy": [round(float(score["accuracy"]), 5) for score in judge.scores],
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Test accuracy by epoch, mean over the seeds ± standard deviation, in Markdown."""
    rows = []
    for part in made:
        shown = [round(share * part.common["epochs"]) for share in (0.25, 0.5, 1)]
        for method, runs in part.finals(trials).items():
            curves = np.asarray([run.result["accuracy"] for run in runs])
            cells = [f"{report.mean(curves[:, k - 1])} ({k})" for k in shown]
            of_first = runs[0].result
            sigma = f"{of_first['noise_multiplier']:.2f}"
            spent = [sigma, of_first["steps"], f"{of_first['epsilon'][-1]:.2f}", len(runs)]
            rows.append([part.common["part"], titles[method], *cells, *spent])
    at = "accuracy (epoch)"
    return report.table(["data", "method", at, at, at, "σ", "steps", "ε", "seeds"], rows)


def _experiment(dataset: str) -> harness.Experiment:
    return grids.experiment(
        f"scattering_{dataset}",
        __doc__,
        functools.partial(parts, dataset),
        train,
        TITLES,
        table,
    )


EXPERIMENTS = {dataset: _experiment(dataset) for dataset in scattered.PAPER}

if __name__ == "__main__":
    harness.main(EXPERIMENTS, pathlib.Path(__file__).parent)
