"""Federated averaging with adaptive learning rates at the clients, on heterogeneous CIFAR-10.

The ADADP paper's figures 1 to 3 (the supplement's 2 to 4): five clients (cars and trucks; planes
and ships; cats and dogs; birds and frogs; deer and horses). A share of their images between 0 and
100% is redistributed at random. Every client takes part in every round, with minibatches of 10 and
one local epoch. The experiment compares ADADP clients from several initial learning rates (with the
defaults of `build_adadp`, and in the paper's form: constant tolerance 0.1, steps with err > tol
discarded),
SGD with a grid of constant rates, and Adam, which the paper runs at 33%. The network is the
paper's: two 3×3 convolutions with 64 channels, ReLU, 3×3 max pools of stride 2, then
1600-500-500-10.

Privacy claim: none. Nothing is clipped and no noise is added, so ε is infinite; here ADADP saves
the tuning. `federated.simulation.stackoverflow_dp` is private.

Accuracy is measured on test images after each round. The "best" rate of a grid is chosen by it, as
in the paper. ADADP's row is the one with the initial rate 0.1. Each client starts each round with
the initial rate, and a discarded step lowers it by at most 10%: from 1.0, most steps of a short
round would be discarded. So `small` has few rounds and many images. The table names the runs in
which every step was discarded.

    python -m federated.simulation.cifar10_adaptive --scale smoke --data_dir ~/tensorflow_datasets

| scale | rounds | images per client | test images | randomness | seeds |
| --- | --- | --- | --- | --- | --- |
| smoke | 2 | 40 | 100 | 0, 1 | 1 |
| small | 5 | 4,000 | 2,000 | 0, .33, .67, 1 | 1 |
| medium | 40 | 10,000 | 10,000 | 0, .33 | 1 |
| long | 200 | 10,000 | 10,000 | 0 | 1 |
| paper | 200 | 10,000 | 10,000 | 0, .33, .67, 1 | 3 |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp
from federated.datasets import cifar10
from federated.datasets.clients import ClientBatches
from federated.privacy import client_sampling
from federated.simulation import trials
from federated.simulation.evaluator import evaluator
from federated.simulation.trials import Settings, Trial
from federated.training import monitor, processes, program

METHODS = {
    "adadp": build_adadp,
    "adadp_paper": build_adadp,
    "sgd": tff.learning.optimizers.build_sgdm,
    "adam": tff.learning.optimizers.build_adam,
}
# Arguments of a method beside its learning rate. ADADP's defaults are here too: were they others,
# finished trials would not be taken for those of the new ones.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "adadp": {"tolerance": 0.3, "discard": False, "tolerance_decay": 1.0},
    "adadp_paper": {"tolerance": 0.1, "discard": True, "tolerance_decay": 0.0},
}
TITLES = {"adadp": "ADADP", "adadp_paper": "ADADP of the paper", "sgd": "SGD", "adam": "Adam"}
NOT_PRIVATE = "Not private: nothing is clipped and no noise added, so ε is infinite."
DEFAULT_RATE = 0.1  # of ADADP
CHANCE = 0.1  # accuracy of a constant answer: ten classes of as many test images
ADAM_AT = 0.33  # the only share of randomness at which the paper shows Adam


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of the experiment.

    Attributes:
      rounds: the number of rounds of each trial.
      images_per_client: the number of training images per client, of 10,000.
      test_images: the number of test images, of 10,000.
      randomness: the shares of images that are redistributed at random.
      rates: the learning rates of each method; ADADP's are initial rates.
      seeds: the number of runs of each setting.
    """

    rounds: int
    images_per_client: int
    test_images: int
    randomness: tuple[float, ...]
    rates: Mapping[str, tuple[float, ...]]
    seeds: int


ALL_SHARES = (0.0, 0.33, 0.67, 1.0)
SCALES = {
    "smoke": Scale(
        rounds=2,
        images_per_client=40,
        test_images=100,
        randomness=(0.0, 1.0),
        rates={"adadp": (0.1,), "adadp_paper": (0.1,), "sgd": (0.01,)},
        seeds=1,
    ),
    "small": Scale(
        rounds=5,
        images_per_client=4000,
        test_images=2000,
        randomness=ALL_SHARES,
        rates={
            "adadp": (0.001, 0.1, 1.0),
            "adadp_paper": (0.001, 0.1, 1.0),
            "sgd": (0.00316, 0.01, 0.0316, 0.1),
            "adam": (0.0001, 0.001),
        },
        seeds=1,
    ),
    "medium": Scale(
        rounds=40,
        images_per_client=10_000,
        test_images=10_000,
        randomness=(0.0, 0.33),
        rates={
            "adadp": (0.1,),
            "adadp_paper": (0.1,),
            "sgd": (0.01, 0.0316, 0.1),
            "adam": (0.0001, 0.001),
        },
        seeds=1,
    ),
    "long": Scale(  # the paper's number of rounds for the best of `medium` at 0%
        rounds=200,
        images_per_client=10_000,
        test_images=10_000,
        randomness=(0.0,),
        rates={"adadp": (0.1,), "adadp_paper": (0.1,), "sgd": (0.0316,)},
        seeds=1,
    ),
    "paper": Scale(
        rounds=200,
        images_per_client=10_000,
        test_images=10_000,
        randomness=ALL_SHARES,
        rates={
            "adadp": (0.001, 0.01, 0.1, 1.0),
            "adadp_paper": (0.001, 0.01, 0.1, 1.0),
            "sgd": (0.001, 0.00316, 0.01, 0.0316, 0.1),
            "adam": (3.16e-6, 1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3),
        },
        seeds=3,
    ),
}


def plan(scale: str) -> list[Settings]:
    """All trials of a scale."""
    how = SCALES[scale]
    return [
        {
            "method": method,
            "rate": rate,
            "randomness": share,
            "seed": seed,
            "rounds": how.rounds,
            "images_per_client": how.images_per_client,
            "test_images": how.test_images,
            **ARGUMENTS.get(method, {}),
        }
        for share in how.randomness
        for method, rates in how.rates.items()
        for rate in rates
        for seed in range(how.seeds)
        if method != "adam" or share == ADAM_AT
    ]


def network(seed: int) -> tf.keras.Model:
    """The paper's network, which returns logits; the seed determines its weights."""
    layers, glorot = tf.keras.layers, tf.keras.initializers.GlorotUniform
    return tf.keras.Sequential(
        [
            tf.keras.Input([32, 32, 3]),
            layers.Conv2D(64, 3, activation="relu", kernel_initializer=glorot(10 * seed)),
            layers.MaxPool2D(3, 2),
            layers.Conv2D(64, 3, activation="relu", kernel_initializer=glorot(10 * seed + 1)),
            layers.MaxPool2D(3, 2),
            layers.Flatten(),
            layers.Dense(500, "relu", kernel_initializer=glorot(10 * seed + 2)),
            layers.Dense(500, "relu", kernel_initializer=glorot(10 * seed + 3)),
            layers.Dense(10, kernel_initializer=glorot(10 * seed + 4)),
        ]
    )


@functools.cache  # trials share what was read
def load(data_dir: str | None) -> tuple[cifar10.Arrays, cifar10.Arrays]:
    """Loads CIFAR-10 with `federated.datasets.cifar10.load_cifar10`."""
    return cifar10.load_cifar10(data_dir)


def describe(scale: str, data_dir: str | None) -> str:
    """Describes the table; reads the data, which all trials share."""
    del scale
    load(data_dir)
    return NOT_PRIVATE


def client_optimizer(settings: Settings) -> tff.learning.optimizers.Optimizer:
    """The client optimizer of a trial."""
    method = settings["method"]
    arguments = {name: settings[name] for name in ARGUMENTS.get(method, {})}
    return METHODS[method](learning_rate=settings["rate"], **arguments)


def train(settings: Settings, folder: Path, data_dir: str | None) -> dict[str, float]:
    """Runs or resumes one trial; there are no final figures."""
    (images, labels), test = load(data_dir)
    rng = np.random.default_rng(settings["seed"])
    partition = {
        client: rng.permutation(rows)[: settings["images_per_client"]]
        for client, rows in cifar10.paper_partition(
            labels, settings["randomness"], settings["seed"]
        ).items()
    }
    batches = cifar10.normalized_images(ClientBatches(batch_size=10))
    data = cifar10.client_data(images, labels, partition).preprocess(batches)
    spec = data.element_type_structure
    process = processes.build_adaptive_fed_avg(
        lambda: tff.learning.models.from_keras_model(
            network(settings["seed"]),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=spec,
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy("accuracy")],
        ),
        client_optimizer(settings),
    )
    in_order = cifar10.normalized_images(ClientBatches(batch_size=500, shuffle_buffer=1))
    judged = tuple(part[: settings["test_images"]] for part in test)
    test_batches = in_order(tf.data.Dataset.from_tensor_slices(judged)).cache()
    program.train(
        process,
        data,
        client_sampling.ClientSampler(data.client_ids, client_sampling.EveryClient()),
        settings["rounds"],
        folder,
        evaluate=evaluator(network(0), test_batches),
        release_managers=monitor.monitors(folder, settings["rounds"]),
    )
    return {}


# Trials that differ only in their seed, by randomness, method and rate.
Groups = dict[tuple[float, str, float], list[Trial]]


def groups(finished: Sequence[Trial]) -> Groups:
    """Trials that differ only in their seed, by randomness, method and rate."""
    found: Groups = {}
    for trial in finished:
        key = tuple(trial.settings[name] for name in ("randomness", "method", "rate"))
        found.setdefault(key, []).append(trial)
    return found


def accuracies(runs: Sequence[Trial]) -> list[float]:
    """The accuracy of each run after its last round."""
    return [run.last("test/accuracy") for run in runs]


def best_rate(found: Groups, share: float, method: str) -> float | None:
    """ADADP's default rate, or another method's most accurate one; `None` if nothing was run."""
    rates = {
        rate: float(np.mean(accuracies(runs)))
        for (at, name, rate), runs in found.items()
        if (at, name) == (share, method)
    }
    if method in ARGUMENTS and DEFAULT_RATE in rates:
        return DEFAULT_RATE
    return trials.best(rates, rates.__getitem__) if rates else None


def table(finished: Sequence[Trial]) -> str:
    """What all trials reached in their last round, in Markdown.

    For ADADP also the share of that round's steps that were discarded, and below the table the runs
    in which no round had another.
    """
    found = groups(finished)
    lines = [
        "| randomness | method | rate | test accuracy | steps discarded | ε | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (share, method, rate), runs in sorted(found.items()):
        shares = [run.last("optimizer/discarded_share") for run in runs]
        discarded = "" if np.isnan(shares).any() else f"{np.mean(shares):.0%}"
        mark = "**" if rate == best_rate(found, share, method) else ""
        lines.append(
            f"| {share:.0%} | {TITLES[method]} | {mark}{rate:g}{mark} "
            f"| {trials.spread(accuracies(runs))} | {discarded} | ∞ | {len(runs)} |"
        )
    for (share, method, rate), runs in sorted(found.items()):
        unmoved = sum(map(accepted_no_step, runs))
        if unmoved:
            lines += [
                "",
                f"**No step was accepted** by {TITLES[method]} from {rate:g} at {share:.0%} in "
                f"{unmoved} of {len(runs)} runs: their accuracy is that of a model that has hardly "
                "moved.",
            ]
    return "\n".join(lines)


def accepted_no_step(run: Trial) -> bool:
    """Whether ADADP's clients discarded every step of every round."""
    _, shares = run.curve("optimizer/discarded_share")
    return bool(shares) and min(shares) == 1.0


def plot(finished: Sequence[Trial]) -> Any:
    """The paper's three figures: by round, with all rates of Adam, by rate, and by randomness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = groups(finished)
    shares = sorted({share for share, _, _ in found})
    figure, axes = plt.subplots(2, max(len(shares), 2), figsize=(4 * max(len(shares), 2), 8))
    for axis, share in zip(axes[0], shares):
        _draw_by_round(axis, found, share)
    _draw_by_rate(axes[1, 0], found, shares)
    _draw_by_randomness(axes[1, 1], found, shares)
    for axis in (*axes[0, len(shares) :], *axes[1, 2:]):
        axis.remove()
    figure.tight_layout()
    return figure


def _draw_by_round(axis: Any, found: Groups, share: float) -> None:
    position = 0
    for method, title in TITLES.items():
        rates: Sequence[float | None] = [best_rate(found, share, method)]
        if method == "adam":
            rates = sorted(rate for at, name, rate in found if (at, name) == (share, method))
        for rate in rates:
            if rate is not None:
                curve = found[share, method, rate][0].curve("test/accuracy")
                axis.plot(*curve, label=f"{title}, {rate:g}", **trials.style(position))
                position += 1
    trials.draw_baseline(axis, CHANCE, "chance")
    axis.set(title=f"{share:.0%} random", ylabel="test accuracy")
    trials.by_round(axis)
    axis.legend(fontsize=8)


def _draw_by_rate(axis: Any, found: Groups, shares: Sequence[float]) -> None:
    for position, share in enumerate(shares):
        for method, line in (("adadp", "-"), ("sgd", "--")):
            points = sorted(
                (rate, np.mean(accuracies(runs)))
                for (at, name, rate), runs in found.items()
                if (at, name) == (share, method)
            )
            if points:
                style = {**trials.style(position), "linestyle": line}
                axis.semilogx(*zip(*points), label=f"{TITLES[method]}, {share:.0%}", **style)
    trials.draw_baseline(axis, CHANCE, "chance")
    axis.set(xlabel="learning rate (ADADP: the initial one)", ylabel="test accuracy")
    axis.set_ylim(bottom=-0.08)
    axis.legend(fontsize=7, loc="lower center", ncol=2)


def _draw_by_randomness(axis: Any, found: Groups, shares: Sequence[float]) -> None:
    for position, method in enumerate(("adadp", "adadp_paper", "sgd")):
        best = [(share, best_rate(found, share, method)) for share in shares]
        points = [(s, np.mean(accuracies(found[s, method, r]))) for s, r in best if r is not None]
        if points:
            axis.plot(*zip(*points), label=TITLES[method], **trials.style(position))
    trials.draw_baseline(axis, CHANCE, "chance")
    axis.set(xlabel="share of images dealt out at random", ylabel="test accuracy")
    axis.legend()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program."""
    trials.run_program(
        "cifar10_adaptive",
        __doc__,
        "tensorflow-datasets' folder with cifar10, else TFDS_DATA_DIR",
        SCALES,
        lambda scale, done: plan(scale),
        train,
        describe,
        table,
        plot,
        argv,
    )


if __name__ == "__main__":
    main()
