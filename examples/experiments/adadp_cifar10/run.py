"""ADADP against tuned DP-Adam and DP-SGD on CIFAR-10.

The ADADP paper's figures 4 and 5 (version 1), right-hand panels: two convolutions that were trained
on CIFAR-100 and stay as they are, then the dense layers 1600-500-500-10, trained with batches of
200 for 100 epochs at σ = 2, 4, 6 and 8. ADADP runs with its default arguments, with the constant
tolerances of the authors' code and of the paper's text, and with the schedule of figure 4: its
learning rate is fixed halfway and then decays. The learning rates of DP-Adam
and DP-SGD come from grids of half decades.

Privacy claim: each run alone is (ε, δ)-DP for adding or removing one training image of CIFAR-10;
CIFAR-100 counts as public. Batches are drawn by Poisson sampling, so the ε shown is exact. Accuracy
is that of the test images; the grids are tuned on these, as in the paper, and what choosing the
best rate costs is not counted. ADADP chooses nothing.

Needs `cifar100_conv_layers.npz`, see `datasets/images.py`.

    python examples/experiments/adadp_cifar10/run.py --scale small --data_dir ~/tfds
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from examples.experiments import dense, harness, tuned
from examples.experiments.datasets import images

load = functools.cache(images.cifar10_features)  # once for each process

COMPARISON = tuned.Comparison(
    {
        "smoke": tuned.Scale(
            epochs=2,
            noise_multipliers=(2.0, 4.0),
            seeds=1,
            other_seeds=1,
            grids={"DPAdam": range(-6, -4), "DPSGD": range(-2, 0)},
            open_ended=False,
            num_train=2000,
            num_test=1000,
            hidden_units=(16,),
        ),
        "small": tuned.Scale(
            epochs=10,
            noise_multipliers=(2.0, 8.0),
            seeds=3,
            other_seeds=1,
            grids={"DPAdam": range(-8, -5), "DPSGD": range(-3, 0)},
            open_ended=True,
            num_train=50_000,
            num_test=10_000,
            hidden_units=(500, 500),
        ),
        "paper": tuned.Scale(
            epochs=100,
            noise_multipliers=(2.0, 4.0, 6.0, 8.0),
            seeds=3,
            other_seeds=3,
            grids={"DPAdam": range(-10, -4), "DPSGD": range(-6, 1)},
            open_ended=True,
            num_train=50_000,
            num_test=10_000,
            hidden_units=(500, 500),
        ),
    }
)


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run."""
    train = load(data_dir, f"train[:{settings['num_train']}]")
    return dense.train(settings, train, load(data_dir, f"test[:{settings['num_test']}]"))


if __name__ == "__main__":
    harness.main(
        harness.Experiment(
            "adadp_cifar10", __doc__, COMPARISON.plan, train, tuned.table, tuned.plot
        ),
        pathlib.Path(__file__).parent,
    )
