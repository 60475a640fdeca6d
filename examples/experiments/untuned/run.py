"""Nothing to tune, whatever the units: ADADP on normalized inputs against tuned optimizers.

This experiment is not in the papers. Each data set comes in the units that people use, and in units
that are 100 times smaller and larger. ADADP, with and without `PrivateNormalization`, and
UntunedSGD run with their defaults everywhere, and DP-Adam and DP-SGD with the best of seven rates.
Where there is public data, AdaDPS runs with it, at the best of seven rates. The normalization is
paid for: ADADP has more noise with it, so that ε is the same. Behind it ADADP also runs with a
measured clip norm in place of 1, and with the batch size that a plan chooses where none is given;
in some cells the tuned optimizers get these batches, too.

- reviews: IMDB as words, logistic regression, batches of 64: TF-IDF rows of norm 1, counts / 290
  with the padding counted, and raw counts
- mnist: 784-256-256-10, batches of 200: standardized, pixels / 255, pixels
- cifar10: features of frozen convolutions, then 1600-500-500-10, batches of 200: as they are, and
  standardized
- adult: 91-64-2, batches of 200: numbers in [0, 1], and raw numbers beside the indicators
- posts: tags of Stack Exchange posts, softmax regression, batches of 64: frequencies of words, and
  100 times these
- digits: 8×8 pixels, softmax regression, batches of 32: / 16, and from 0 to 16
- scattering: features of MNIST that need no learning, softmax regression, batches of 4,096

UntunedSGD was developed on a fifth of the training sets of the first four, on scikit-learn's breast
cancer and on synthetic data. Posts, digits and scattering features played no part in that. The
normalization was developed on a fifth of the training sets of reviews, mnist, adult and digits, and
on synthetic columns. ADADP's first tolerance for normalized inputs was chosen on held-out training
data of digits, adult, reviews, mnist and cifar10 (`adadp_tolerance`).

The test inputs, without their labels, are taken as public: the vocabulary and document frequencies
of the reviews and the means and deviations of CIFAR-10's features come from them. AdaDPS divides
by the counts of words in these reviews, and in posts of 100 public users.

Privacy claim: each run alone is (ε, δ)-DP, δ = 1e-5, for adding or removing one training example.
Batches are drawn by Poisson sampling. Accuracy is measured on the test data. The rates of the tuned
methods are chosen on these, and ε does not include the cost of this choice. The others choose
nothing.

    python examples/experiments/untuned/run.py --scale small

The environment variables TFDS_DATA_DIR, TFF_CACHE_DIR, ADULT_CSV and SCATTERING_FEATURES say where
the data are.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.lib import grids, harness, report, reviews, training
from examples.experiments.lib.datasets import adult, images, scattered, stackoverflow, text
from federated.datasets.folder import folder

Arrays = tuple[np.ndarray, np.ndarray]

TITLES = {
    "normalized": "ADADP, inputs normalized",
    "measured": "the same, C measured",
    "planned": "the same, the plan's batches",
    "untuned": "UntunedSGD",
    "adadp": "ADADP",
    "dp_adam": "DP-Adam, tuned",
    "dp_sgd": "DP-SGD, tuned",
    "adadps": "AdaDPS, public data, tuned",
    "dp_adam_planned": "DP-Adam, the plan's batches, tuned",
    "dp_sgd_planned": "DP-SGD, the plan's batches, tuned",
}
NOTHING_TO_TUNE = ("normalized", "measured", "planned", "untuned", "adadp")
TUNED = ("dp_adam", "dp_sgd")  # without public data, as those above
TUNED_ON_PLANNED = ("dp_adam_planned", "dp_sgd_planned")
# Where these run: the data, their units and σ.
PLANNED_CELLS = (("reviews", "tf-idf", 1.0), ("mnist", "/ 255", 2.0), ("cifar10", "features", 2.0))
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SGD_RATES = (0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 100.0)
POSTS = {"num_words": 2000, "num_tags": 50, "public_users": 100}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set and its model.

    Attributes:
      inputs: the units it comes in; the first are the usual ones.
      hidden_units: of each hidden layer.
      classes: outputs.
      batch_size: expected.
      epochs: of a run.
      has_public_counts: of the words that its columns stand for.
      seeds: of each method; more where few test examples make one run say little.
    """

    inputs: tuple[str, ...]
    hidden_units: tuple[int, ...]
    classes: int
    batch_size: int
    epochs: int
    has_public_counts: bool = False
    seeds: int = 3

    @property
    def methods(self) -> tuple[str, ...]:
        """What can be compared on it."""
        public = ("adadps",) if self.has_public_counts else ()
        return (*NOTHING_TO_TUNE, *TUNED, *public)


PROBLEMS = {
    "digits": Problem(("/ 16", "0 to 16"), (), 10, 32, 40, seeds=10),
    "posts": Problem(("frequencies", "per 100 words"), (), POSTS["num_tags"], 64, 20, True),
    "adult": Problem(("in [0, 1]", "raw numbers"), (64,), 2, 200, 20),
    "mnist": Problem(("standardized", "/ 255", "pixels"), (256, 256), 10, 200, 20),
    "reviews": Problem(("tf-idf", "counts / 290", "counts"), (), 2, 64, 20, True),
    "cifar10": Problem(("features", "standardized"), (500, 500), 10, 200, 10),
    "scattering": Problem(("normalized",), (), 10, 4096, 40),
}
RESCALED = (0.01, 100.0)
# Raw numbers of Adult are those in [0, 1] times the published bounds.
ADULT_BOUNDS = (90.0, 16.0, 20000.0, 4000.0, 99.0)


def parts(scale: str) -> list[grids.Part]:
    """What is compared at a scale.

    All methods meet in the units that people use, at σ = 2, 4 and 8, and on reviews at σ = 1; at
    the scale "paper" everywhere at σ = 1, too. Only those with nothing to tune run with rescaled
    inputs.
    """
    if scale == "smoke":
        methods = (*PROBLEMS["digits"].methods, *TUNED_ON_PLANNED)
        return [_part("digits", "/ 16", 1.0, 2.0, scale, methods, seeds=1, epochs=2)]
    made = []
    for name, problem in PROBLEMS.items():
        made += [_part(name, inputs, 1.0, 2.0, scale, problem.methods) for inputs in problem.inputs]
        usual = problem.inputs[0]
        made += [_part(name, usual, factor, 2.0, scale, NOTHING_TO_TUNE) for factor in RESCALED]
    for sigma in (1.0, 4.0, 8.0):
        for name, problem in PROBLEMS.items():
            if scale == "small" and sigma == 1 and name != "reviews":
                continue
            for inputs in problem.inputs:
                made.append(_part(name, inputs, 1.0, sigma, scale, problem.methods))
    return made


def _part(
    name: str,
    inputs: str,
    factor: float,
    sigma: float,
    scale: str,
    methods: Sequence[str],
    seeds: int | None = None,
    epochs: int | None = None,
) -> grids.Part:
    times = "" if factor == 1 else f" × {factor:g}"
    if (name, inputs, sigma) in PLANNED_CELLS and factor == 1:
        methods = (*methods, *TUNED_ON_PLANNED)
    return grids.Part(
        {
            "part": f"{name}, {inputs}{times}, σ = {sigma:g}",
            "scale": scale,
            "data": name,
            "inputs": inputs,
            "factor": factor,
            "noise_multiplier": sigma,
            "epochs": epochs or PROBLEMS[name].epochs,
        },
        {method: _candidates(method) for method in methods},
        "accuracy",
        seeds=seeds or PROBLEMS[name].seeds,
    )


def _candidates(method: str) -> list[dict[str, Any]]:
    if method == "untuned":
        return [{"optimizer": "UntunedSGD", "arguments": {}}]
    if method == "normalized":
        normalized = {"optimizer": "ADADP", "arguments": {"l2_norm_clip": 1.0}, "normalized": True}
        return [normalized]
    if method == "measured":
        (candidate,) = _candidates("normalized")
        return [{**candidate, "arguments": {"l2_norm_clip": "measured"}}]
    if method == "planned":
        (candidate,) = _candidates("normalized")
        return [{**candidate, "batch_size": "planned"}]
    if method in TUNED_ON_PLANNED:
        candidates = _candidates(method.removesuffix("_planned"))
        return [{**candidate, "batch_size": "planned"} for candidate in candidates]
    if method == "adadp":
        return [{"optimizer": "ADADP", "arguments": {"l2_norm_clip": 1.0}}]
    optimizer, rates = {
        "dp_adam": ("DPAdam", ADAM_RATES),
        "dp_sgd": ("DPSGD", SGD_RATES),
        "adadps": ("AdaDPS", SGD_RATES),
    }[method]
    return [
        {"optimizer": optimizer, "arguments": {"l2_norm_clip": 1.0, "learning_rate": rate}}
        for rate in rates
    ]


@functools.lru_cache(maxsize=1)
def load(name: str) -> tuple[Arrays, Arrays]:
    """Training and test arrays of a data set, in the units of its files."""
    if name == "posts":
        return _posts()
    loaders = {
        "digits": images.digits,
        "reviews": _bags_of_words,
        "mnist": functools.partial(images.mnist, None, normalize=False),
        "adult": functools.partial(adult.adult, None),
        "cifar10": functools.partial(images.cifar10_features, None),
        "scattering": _scattering,
    }
    return loaders[name]("train"), loaders[name]("test")


def _bags_of_words(split: str) -> Arrays:
    rows, labels = text.imdb(None, split)
    return text.bag_of_words(rows), labels


def _scattering(split: str) -> Arrays:
    how = "The features of the images are stored there; it may be empty."
    cache_dir = folder("SCATTERING_FEATURES", None, "SCATTERING_FEATURES", how)
    x, y = scattered.load("mnist", split, None, cache_dir)
    return np.asarray(x), y


def _posts() -> tuple[Arrays, Arrays]:
    """Frequencies of words; words and tags are those of the first users, who are public."""
    private, known = _private_and_known_posts()
    test = stackoverflow.posts(None, "test")
    return stackoverflow.bags_of_words(private, known), stackoverflow.bags_of_words(test, known)


def _private_and_known_posts() -> tuple[list[stackoverflow.Post], stackoverflow.Vocabulary]:
    posts = stackoverflow.posts(None, "train")
    public, private = stackoverflow.by_users(posts, POSTS["public_users"])
    return private, stackoverflow.vocabulary(public, POSTS["num_words"], POSTS["num_tags"])


def public_frequencies(name: str) -> Any:
    """Side information on words, from public texts."""
    if name == "reviews":
        counts = load(name)[1][0].sum(0, dtype=np.float64)
        return reviews.token_frequencies(counts, "public", largest=1.0)
    users = _private_and_known_posts()[1].users
    return tf_adaptive_dp.side_information.token_frequencies(
        users, divisor=float(users.max()), provenance="public"
    )


def layers_of(name: str, inputs: str, factor: float) -> list[tf.keras.layers.Layer]:
    """Layers that bring the arrays of `load` to some units."""
    layers = tf.keras.layers
    scales = {
        ("reviews", "counts / 290"): 1 / text.LENGTH,
        ("mnist", "pixels"): 255.0,
        ("digits", "/ 16"): 1 / 16,
        ("posts", "per 100 words"): 100.0,
    }
    scale = scales.get((name, inputs), 1.0) * factor
    if (name, inputs) == ("reviews", "tf-idf"):
        public_texts = load(name)[1][0]
        frequencies = text.inverse_document_frequencies(public_texts)
        return [layers.Rescaling(frequencies), layers.UnitNormalization(), layers.Rescaling(factor)]
    if (name, inputs) == ("mnist", "standardized"):
        return [layers.Rescaling(factor / 0.3081, offset=-factor * 0.1307 / 0.3081)]
    if (name, inputs) == ("cifar10", "standardized"):
        public = load(name)[1][0]
        mean, deviation = public.mean(0), np.maximum(public.std(0), 1e-3)
        return [layers.Rescaling(factor / deviation, offset=-factor * mean / deviation)]
    if (name, inputs) == ("adult", "raw numbers"):
        ones = [1.0] * (load(name)[0][0].shape[1] - len(ADULT_BOUNDS))
        return [layers.Rescaling(np.float32([*ADULT_BOUNDS, *ones]) * np.float32(factor))]
    return [] if scale == 1 else [layers.Rescaling(scale)]


def train(settings: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """One run.

    Args:
      settings: "data", "inputs", "factor", "noise_multiplier", "epochs", "optimizer" with its
        "arguments", and "seed", which determines the initial weights.
      data_dir: not used, since there are several data sets.

    Returns:
      See `training.fit`; evaluated once, at the end.
    """
    del data_dir
    train, test = load(settings["data"])
    return fit(settings, train, test, PROBLEMS[settings["data"]])[0]


def fit_without_test_data(
    settings: dict[str, Any], problem: Problem
) -> tuple[dict[str, Any], tf.keras.Model]:
    """One run on four fifths of the training data, evaluated on the others.

    Args:
      settings: see `train`.
      problem: that of "data", or a variant of it.

    Returns:
      See `fit`.
    """
    (x, y), _ = load(settings["data"])
    order = np.random.default_rng(7).permutation(len(y))
    held_out, rest = np.split(order, [len(y) // 5])
    return fit(settings, (x[rest], y[rest]), (x[held_out], y[held_out]), problem)


def fit(
    settings: dict[str, Any], train: Arrays, test: Arrays, problem: Problem
) -> tuple[dict[str, Any], tf.keras.Model]:
    """One run on these data.

    Args:
      settings: see `train`.
      train: what to train on.
      test: what to evaluate on, once, at the end.
      problem: its layers and batch size count.

    Returns:
      See `training.fit`; and the model.
    """
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(settings["seed"])
    first = [
        tf.keras.Input([train[0].shape[1]]),
        *layers_of(settings["data"], settings["inputs"], settings["factor"]),
    ]
    noise, others, arguments = settings["noise_multiplier"], (), settings["arguments"]
    batch_size, is_planned = problem.batch_size, settings.get("batch_size") == "planned"
    if settings.get("normalized") or is_planned:
        plan = plan_of_same_epsilon(settings, len(train[1]), batch_size)
        noise, others, batch_size = plan.noise_multiplier, plan.other_events, plan.batch_size
        if is_planned and settings["optimizer"] == "ADADP":
            arguments = {"num_steps": plan.steps, **arguments}
    if settings.get("normalized"):
        arguments = {"normalized_inputs": True, **arguments}
        inputs = train[0]
        if len(first) > 1:
            inputs = tf.keras.Sequential(first).predict(inputs, batch_size=1000, verbose=0)
        first.append(plan.normalization(inputs))
    model = tf.keras.Sequential(
        [
            *first,
            *(tf.keras.layers.Dense(units, activation="relu") for units in problem.hidden_units),
            tf.keras.layers.Dense(problem.classes),
        ]
    )
    known = [public_frequencies(settings["data"])] if settings["optimizer"] == "AdaDPS" else []
    optimizer = getattr(tf_adaptive_dp, settings["optimizer"])(
        *known,
        noise_multiplier=noise,
        expected_batch_size=batch_size,
        **arguments,
    )
    optimizer.ledger.other_events += others
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    result = training.fit(
        *(model, train, test),
        epochs=settings["epochs"],
        batch_size=batch_size,
        delta=1e-5,
        judge_every=settings["epochs"],
    )
    return result, model


def plan_of_same_epsilon(
    settings: dict[str, Any], num_examples: int, batch_size: int
) -> tf_adaptive_dp.PrivacyPlan:
    """A plan with the ε of a run of `batch_size` examples without normalization.

    It pays for a normalization if there is one, and chooses the size of its batches where
    "batch_size" is "planned".
    """
    numbers = {
        "delta": 1e-5,
        "num_examples": num_examples,
        "epochs": settings["epochs"],
        "accountant": "rdp",
    }
    others = tf_adaptive_dp.PrivacyPlan(
        noise_multiplier=settings["noise_multiplier"], batch_size=batch_size, **numbers
    )
    if settings.get("batch_size") != "planned":
        numbers["batch_size"] = batch_size
    return tf_adaptive_dp.PrivacyPlan(
        epsilon=others.epsilon, normalize_inputs=settings.get("normalized", False), **numbers
    )


def table(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> str:
    """Test accuracy, mean over the seeds ± standard deviation, with the best rates."""
    rows = []
    for part in made:
        finals = {m: runs for m, runs in part.finals(trials).items() if runs}
        if not finals:
            continue
        cells = []
        for method in titles:
            runs = finals.get(method, [])
            rate = runs[0].settings["arguments"].get("learning_rate") if runs else None
            cells.append(grids.cell(runs, "accuracy", rate))
        ahead = advantage(part, trials)
        epsilon = next(iter(finals.values()))[0].result["epsilon"][-1]
        last = "" if ahead is None else f"{ahead:+.4f}"
        rows.append([part.common["part"], f"{epsilon:.2f}", *cells, last])
    columns = ["data, inputs, σ", "ε", *titles.values(), "normalized − best tuned"]
    gaps = [gap for part in made if (gap := advantage(part, trials)) is not None]
    summary = ""
    if gaps:
        summary = (
            f"\n\nADADP on normalized inputs − best tuned: mean {np.mean(gaps):+.4f}, worst "
            f"{min(gaps):+.4f}, at least −.005 in {sum(g >= -0.005 for g in gaps)} of {len(gaps)} "
            "cells."
        )
    return report.table(columns, rows) + summary


def advantage(
    part: grids.Part, trials: Sequence[harness.Trial], method: str = "normalized"
) -> float | None:
    """The mean accuracy of a method minus that of the best tuned one; `None` if any is missing."""
    finals = part.finals(trials)
    if any(not finals.get(m) for m in (method, *TUNED)):
        return None
    means = {m: grids.mean(runs, "accuracy") for m, runs in finals.items()}
    return means[method] - max(means[m] for m in TUNED)


def plot(
    made: Sequence[grids.Part], trials: Sequence[harness.Trial], titles: Mapping[str, str]
) -> Any:
    """How far all are from the best tuned optimizer, cell by cell."""
    import matplotlib.pyplot as plt

    shown = [part for part in made if advantage(part, trials) is not None]
    figure, axis = plt.subplots(figsize=(8, 1.5 + 0.28 * len(shown)))
    for method, marker in (("adadp", "x"), ("untuned", "+"), ("normalized", "o")):
        gaps = [advantage(part, trials, method) for part in shown]
        gaps = [np.nan if gap is None else gap for gap in gaps]
        axis.plot(gaps, range(len(shown)), marker, label=titles[method])
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(shown)), [part.common["part"] for part in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="test accuracy minus that of the best tuned optimizer")
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


EXPERIMENT = grids.experiment("untuned", __doc__, parts, train, TITLES, table, plot)

if __name__ == "__main__":
    harness.main(EXPERIMENT, pathlib.Path(__file__).parent)
