"""ADADP without tuning: its defaults against its variants and tuned optimizers.

This experiment is not in the papers. On four data sets, over σ and epochs, it runs ADADP with its
default arguments, with the constant tolerance of the authors' code, with averaged weights (Keras's
`use_ema`), and with automatic clipping, which makes the choice of C irrelevant. It compares these
with DP-Adam and DP-SGD, each with the best of three learning rates.

- adult: 91-64-2, batches of 200
- imdb: bag of 10,000 words, logistic regression, batches of 64
- mnist: 784-256-256-10, batches of 200
- cifar10: frozen convolutions, then 1600-500-500-10, batches of 200

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Batches are drawn by Poisson sampling, so the ε shown is a proven upper bound. Accuracy is measured
on the test data. The rates of DP-Adam and DP-SGD are chosen on these, and ε does not include the
cost of this choice. ADADP chooses nothing.

    python examples/experiments/adadp_untuned/run.py --scale small

The environment variables TFDS_DATA_DIR and ADULT_CSV say where the data are.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.experiments.lib import dense, grids, harness, report
from examples.experiments.lib.datasets import adult, images, text

EPOCHS_SHOWN = (2, 5, 10, 20, 50, 100)
MODELS = {
    "adult": {"hidden_units": [64], "classes": 2, "batch_size": 200},
    "imdb": {"hidden_units": [], "classes": 2, "batch_size": 64, "input_scale": 1 / text.LENGTH},
    "mnist": {"hidden_units": [256, 256], "classes": 10, "batch_size": 200},
    "cifar10": {"hidden_units": [500, 500], "classes": 10, "batch_size": 200},
}
TITLES = {
    "adadp": "ADADP",
    "adadp_constant": "ADADP, constant tolerance 0.316",
    "adadp_averaged": "ADADP, averaged weights",
    "adadp_automatic": "ADADP, automatic clipping",
    "dp_adam": "DP-Adam, tuned",
    "dp_sgd": "DP-SGD, tuned",
}
ADADP = {
    "adadp": {},
    "adadp_constant": {"tolerance": 10**-0.5, "tolerance_decay": 0.0, "initial_factor": 1.0},
    "adadp_averaged": {"use_ema": True, "ema_momentum": 0.998},
    "adadp_automatic": {"clipping": "automatic"},
}
# Half decades around the best of short runs.
RATES = {
    "adult": {"DPAdam": (1e-3, 3.16e-3, 1e-2), "DPSGD": (0.316, 1.0, 3.16)},
    "imdb": {"DPAdam": (3.16e-3, 1e-2, 3.16e-2), "DPSGD": (1.0, 10.0, 100.0)},
    "mnist": {"DPAdam": (1e-4, 3.16e-4, 1e-3), "DPSGD": (0.0316, 0.1, 0.316)},
    "cifar10": {"DPAdam": (1e-4, 3.16e-4, 1e-3), "DPSGD": (0.0316, 0.1, 0.316)},
}
# By scale: data set, σ, epochs, seeds, and the methods.
ALL = tuple(TITLES)
WHAT = {
    "smoke": [("adult", (2.0,), 2, 1, ALL)],
    "small": [
        ("adult", (1.0, 2.0, 4.0, 8.0), 50, 3, ALL),
        ("imdb", (1.0, 4.0), 20, 3, ALL),
        ("mnist", (1.0, 8.0), 100, 1, ("adadp", "adadp_constant")),
        ("cifar10", (1.0, 8.0), 20, 1, ("adadp", "adadp_constant")),
    ],
    "paper": [(name, (1.0, 2.0, 4.0, 8.0), 100, 3, ALL) for name in MODELS],
}


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale: all methods for each data set and σ."""
    return [
        grids.Part(
            {
                "part": f"{name}, σ = {sigma:g}",
                "scale": scale,
                "data": name,
                "noise_multiplier": sigma,
                "epochs": epochs,
                "l2_norm_clip": 1.0,
                "delta": 1e-5,
                **MODELS[name],
            },
            {method: _candidates(method, name) for method in methods},
            "accuracy",
            seeds=seeds,
        )
        for name, sigmas, epochs, seeds, methods in WHAT[scale]
        for sigma in sigmas
    ]


def _candidates(method: str, name: str) -> list[dict[str, Any]]:
    if method in ADADP:
        return [{"optimizer": "ADADP", "arguments": ADADP[method]}]
    optimizer = {"dp_adam": "DPAdam", "dp_sgd": "DPSGD"}[method]
    return [
        {"optimizer": optimizer, "arguments": {"learning_rate": rate}}
        for rate in RATES[name][optimizer]
    ]


@functools.lru_cache(maxsize=2)
def load(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a data set, whose place the environment gives."""
    if name == "adult":
        return adult.adult(None, split)
    if name == "mnist":
        return images.mnist(None, split)
    if name == "cifar10":
        return images.cifar10_features(None, split)
    rows, labels = text.imdb(None, split)
    return text.bag_of_words(rows), labels


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run."""
    del data_dir  # there are several data sets
    return dense.train(settings, load(settings["data"], "train"), load(settings["data"], "test"))


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Accuracy by epoch, mean over the seeds ± standard deviation, in Markdown."""
    rows = []
    for part in made:
        for method, runs in part.finals(trials).items():
            best = (part.best(method, trials) or {})["arguments"].get("learning_rate")
            cells = [_cell(runs, epoch) for epoch in EPOCHS_SHOWN]
            chosen = [part.common["part"], titles[method], "–" if best is None else best]
            rows.append([*chosen, *cells, f"{runs[0].result['epsilon'][-1]:.2f}", len(runs)])
    columns = ["data, σ", "method", "chosen rate", *EPOCHS_SHOWN, "ε", "seeds"]
    return report.table(columns, rows)


def _cell(runs: Sequence[harness.Trial], epoch: int) -> str:
    if epoch not in runs[0].result["epochs"]:
        return ""
    at = runs[0].result["epochs"].index(epoch)
    return report.mean([run.result["accuracy"][at] for run in runs], digits=3)


EXPERIMENT = grids.experiment("adadp_untuned", __doc__, parts, train, TITLES, table)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
