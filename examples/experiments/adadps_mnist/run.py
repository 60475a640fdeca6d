"""AdaDPS on MNIST: a deep autoencoder and a classifier.

Repeats tables 1, 2, 6, 7, 8 and 9 of the AdaDPS paper on MNIST. The first figure is the loss of an
autoencoder 784-1000-500-250-30-250-500-1000-784 with sigmoids (none on the code): the mean squared
error per pixel of images in [0, 1], at σ = 1 and 0.75. The second is the accuracy of a classifier.
The paper does not describe its network; here it is 784-256-10 with ReLU. Batches have 64 images.
1% of the images are public and excluded from the private data. The smaller scales train an
autoencoder of a quarter of the widths (the code keeps its 30 units).

Privacy claim: each run of a private method alone is (ε, δ)-DP for adding or removing one image,
where δ is one over the number of private images. Batches are drawn by Poisson sampling, so the ε
shown is a proven upper bound. Figures are measured on the test images. Clip norms and rates are
chosen on these, as in the paper, and ε does not include the cost of this choice.

    python examples/experiments/adadps_mnist/run.py --scale small --data_dir ~/tensorflow_datasets
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import adadps_methods, grids, harness
from examples.experiments.lib.datasets import images

Candidates = Mapping[str, Sequence[Mapping[str, float]]]

# For each method three (C, rate), chosen by short runs of the small scale. C is so small that all
# gradients are clipped at the start, and the product of the two is what counts.
_PUBLIC = {"epsilon_root": 1e-10}
_WARM = {"public_rate": 0.001, "public_epochs": 20}


def _pairs(clip: float, rates: Sequence[float], **others: float) -> list[dict[str, float]]:
    return [{"clip": clip, "rate": rate, **others} for rate in rates]


MAIN: Candidates = {
    "dp_sgd": _pairs(0.01, [50.0, 100.0, 200.0]),
    "dp_adam": _pairs(0.01, [0.005, 0.01, 0.02]),
    "dp_rmsprop": _pairs(0.01, [0.005, 0.01, 0.02]),
    "adadps_rmsprop": _pairs(1.0, [0.3, 0.6, 1.2], **_PUBLIC),
    "adadps_adam": _pairs(1.0, [0.3, 0.6, 1.2], **_PUBLIC),
}
OTHERS: Candidates = {
    "dp_r_pub": _pairs(0.01, [0.0005, 0.001, 0.002], **_PUBLIC),
    "dp_adam_pub": _pairs(0.01, [0.0005, 0.001, 0.002], **_PUBLIC),
    "pda_dpmd": _pairs(0.01, [25.0, 50.0, 100.0]),
    "warm_start": _pairs(0.01, [50.0, 100.0, 200.0], **_WARM),
    "sgd": [{"rate": rate} for rate in (3.0, 10.0, 30.0)],
    "adam": [{"rate": rate} for rate in (0.0003, 0.001, 0.003)],
    "adas": [{"rate": rate, **_PUBLIC} for rate in (0.0003, 0.001, 0.003)],
}
CLASSIFIER: Candidates = {
    "dp_sgd": _pairs(0.5, [0.1, 0.3, 1.0]),
    "dp_adam": _pairs(0.5, [0.001, 0.003, 0.01]),
    "dp_rmsprop": _pairs(0.5, [0.001, 0.003, 0.01]),
    "adadps_rmsprop": _pairs(2.0, [0.03, 0.1, 0.3], epsilon_root=1e-4),
    "adadps_adam": _pairs(2.0, [0.03, 0.1, 0.3], epsilon_root=1e-4),
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the experiment.

    Attributes:
      num_train: number of training images, including the public ones; `None` for all.
      divisor: divides the widths of the autoencoder.
      epochs: number of epochs of the autoencoder.
      tuning_epochs: the same while clip norm and rate are chosen.
      classifier_epochs: number of epochs of the classifier.
      candidates: number of pairs of clip norm and rate per method.
      seeds: number of seeds of the main methods at σ = 1 and of the classifier.
      other_seeds: number of seeds of all others.
      rate_factor: scales the private rates of the autoencoder: longer runs need smaller steps.
    """

    num_train: int | None
    divisor: int
    epochs: int
    tuning_epochs: int
    classifier_epochs: int
    candidates: int
    seeds: int
    other_seeds: int
    rate_factor: float = 1.0


SCALES = {
    "smoke": Scale(2000, 10, 1, 1, 1, candidates=1, seeds=1, other_seeds=1),
    "small": Scale(None, 4, 8, 8, 3, candidates=3, seeds=3, other_seeds=1, rate_factor=0.5),
    "paper": Scale(None, 1, 80, 80, 80, candidates=3, seeds=3, other_seeds=3, rate_factor=0.1),
}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale."""
    how = SCALES[scale]
    common = {"scale": scale, "batch_size": 64, "num_train": how.num_train}
    network = {**common, "model": "autoencoder", "divisor": how.divisor, "epochs": how.epochs}

    def autoencoder_part(name: str, sigma: float, chosen: Candidates, seeds: int) -> grids.Part:
        return grids.Part(
            {**network, "sigma": sigma, "part": name},
            _cut(chosen, how.candidates, how.rate_factor),
            "loss",
            larger_is_better=False,
            seeds=seeds,
            tuning={"epochs": how.tuning_epochs},
        )

    in_table_1 = {m: MAIN[m] for m in ("dp_sgd", "dp_adam", "adadps_rmsprop")}
    digits = {"model": "classifier", "epochs": how.classifier_epochs, "sigma": 1.0}
    return [
        autoencoder_part("autoencoder, σ = 1", 1.0, MAIN, how.seeds),
        autoencoder_part("autoencoder, others, σ = 1", 1.0, OTHERS, how.other_seeds),
        autoencoder_part("autoencoder, σ = 0.75", 0.75, in_table_1, how.other_seeds),
        grids.Part(
            {**common, **digits, "part": "classifier, σ = 1"},
            _cut(CLASSIFIER, how.candidates),
            "accuracy",
            seeds=how.seeds,
        ),
    ]


def _cut(chosen: Candidates, number: int, private_factor: float = 1.0) -> Candidates:
    """The first candidates of each method, with scaled rates for private methods."""

    def scaled(candidate: Mapping[str, float]) -> dict[str, float]:
        factor = private_factor if "clip" in candidate else 1.0
        return {**candidate, "rate": float(f"{factor * candidate['rate']:.3g}")}

    return {m: [scaled(c) for c in candidates[:number]] for m, candidates in chosen.items()}


@functools.cache
def load(data_dir: str | None, num_train: int | None) -> tuple:
    """Public, private and test images with their labels."""
    x, y = (part[:num_train] for part in images.mnist(data_dir, "train", normalize=False))
    test = images.mnist(data_dir, "test", normalize=False)
    return *tf_adaptive_dp.side_information.split_public((x, y), 0.01)[:2], test


def autoencoder(divisor: int) -> tf.keras.Model:
    """784-1000-500-250-30-250-500-1000-784, with 1000, 500 and 250 divided by `divisor`."""
    widths = [width // divisor for width in (1000, 500, 250)]
    return tf.keras.Sequential(
        [
            tf.keras.Input([784]),
            *(tf.keras.layers.Dense(width, "sigmoid") for width in widths),
            tf.keras.layers.Dense(30),
            *(tf.keras.layers.Dense(width, "sigmoid") for width in [*widths[::-1], 784]),
        ]
    )


def classifier() -> tf.keras.Model:
    """784-256-10 with ReLU; it returns logits."""
    return tf.keras.Sequential(
        [
            tf.keras.Input([784]),
            tf.keras.layers.Dense(256, "relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run."""
    tf.keras.utils.set_random_seed(settings["seed"])
    arrays = load(data_dir, settings["num_train"])
    if settings["model"] == "classifier":
        return adadps_methods.run(
            classifier(),
            settings,
            *arrays,
            loss=tf.keras.losses.SparseCategoricalCrossentropy,
            from_logits=True,
            metrics=["accuracy"],
        )
    return adadps_methods.run(
        autoencoder(settings["divisor"]),
        settings,
        *((x, x) for x, _ in arrays),
        loss=tf.keras.losses.MeanSquaredError,
        metrics=[],
    )


EXPERIMENT = grids.experiment("adadps_mnist", __doc__, parts, train, adadps_methods.TITLES)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
