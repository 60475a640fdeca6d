"""ADADP against tuned DP-Adam and DP-SGD on MNIST and CIFAR-10.

The ADADP paper's figures 4 and 5 (version 1). MNIST, the left-hand panels: a network
784-256-256-10. CIFAR-10, the right-hand panels: two frozen convolutions that were trained on
CIFAR-100, then the dense layers 1600-500-500-10. Both train with batches of 200 for 100 epochs at
σ = 2, 4, 6 and 8.

ADADP runs with its default arguments, with the constant tolerances of the authors' code and of the
paper's text, and with the schedule of figure 4: its learning rate is fixed halfway and then decays.
The learning rates of DP-Adam and DP-SGD come from grids of half decades.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one training image; CIFAR-100
counts as public. Batches are drawn by Poisson sampling, so the ε shown is exact. Accuracy is
measured on the test images. The grids are tuned on these, as in the paper, and ε does not include
the cost of choosing the best rate. ADADP chooses nothing.

CIFAR-10 needs `cifar100_conv_layers.npz`, see `lib/datasets/images.py`.

    python examples/experiments/adadp_comparison/run.py --dataset mnist --data_dir ~/tfds

References:
  Koskela and Honkela (2018), "Learning Rate Adaptation for Federated and Differentially Private
  Learning", arXiv:1809.03832.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from examples.experiments.lib import dense, harness, tuned
from examples.experiments.lib.datasets import images

# The runs of one process share what was read.
LOADERS = {
    "mnist": functools.cache(images.mnist),
    "cifar10": functools.cache(images.cifar10_features),
}

SMOKE = tuned.Scale(
    epochs=2,
    noise_multipliers=(2.0, 4.0),
    seeds=1,
    other_seeds=1,
    grids={"DPAdam": range(-6, -4), "DPSGD": range(-2, 0)},
    open_ended=False,
    num_train=2000,
    num_test=1000,
    hidden_units=(16,),
)


def _scales(
    num_train: int,
    hidden_units: tuple[int, ...],
    small_epochs: int,
    small_sigmas: tuple[float, ...],
) -> dict[str, tuned.Scale]:
    common = dict(
        seeds=3, open_ended=True, num_train=num_train, num_test=10_000, hidden_units=hidden_units
    )
    small = tuned.Scale(
        epochs=small_epochs,
        noise_multipliers=small_sigmas,
        other_seeds=1,
        grids={"DPAdam": range(-8, -5), "DPSGD": range(-3, 0)},
        **common,
    )
    paper = tuned.Scale(
        epochs=100,
        noise_multipliers=(2.0, 4.0, 6.0, 8.0),
        other_seeds=3,
        grids={"DPAdam": range(-10, -4), "DPSGD": range(-6, 1)},
        **common,
    )
    return {"smoke": SMOKE, "small": small, "paper": paper}


COMPARISONS = {
    "mnist": tuned.Comparison(_scales(60_000, (256, 256), 20, (2.0, 4.0, 8.0))),
    "cifar10": tuned.Comparison(_scales(50_000, (500, 500), 10, (2.0, 8.0))),
}


def train(dataset: str, settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run on one of the data sets."""
    load = LOADERS[dataset]
    train = load(data_dir, f"train[:{settings['num_train']}]")
    return dense.train(settings, train, load(data_dir, f"test[:{settings['num_test']}]"))


EXPERIMENTS = {
    dataset: harness.Experiment(
        f"adadp_comparison_{dataset}",
        __doc__,
        comparison.plan,
        functools.partial(train, dataset),
        tuned.table,
        tuned.plot,
    )
    for dataset, comparison in COMPARISONS.items()
}


if __name__ == "__main__":
    harness.main(EXPERIMENTS, pathlib.Path(__file__).parent)
