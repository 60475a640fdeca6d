"""Draws the figures of the site from this library's accounting and from the experiments' results.

No number is typed in: ε comes from `tf_adaptive_dp.accounting`, gradients from a small model on
scikit-learn's digits, and accuracies from the JSON files of `examples/experiments`.

    python docs/figures/draw.py            # writes docs/figures/*.svg
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tf_adaptive_dp import PoissonSampling, gradients, noise_multiplier_for
from tf_adaptive_dp.accounting import Releases, epsilon_spent, epsilon_without_amplification

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = pathlib.Path(__file__).parent
EXPERIMENTS = FOLDER.parents[1] / "examples" / "experiments"
DELTA = 1e-5
NUM_EXAMPLES, BATCH_SIZE = 60_000, 200  # MNIST, as in the paper of ADADP
BLUE, ORANGE, GRAY = "#3f51b5", "#ef6c00", "#9e9e9e"


def certainty() -> plt.Figure:
    """How sure an attacker can become that an example was in the data, by ε."""
    epsilon = np.linspace(0, 8, 200)
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    for prior, color in ((0.5, BLUE), (0.1, ORANGE), (0.01, GRAY)):
        odds = np.exp(epsilon) * prior / (1 - prior)
        ax.plot(epsilon, odds / (1 + odds), color=color, label=f"{prior:.0%} before")
    ax.set(xlabel="ε", ylabel="at most so sure afterwards", ylim=(0, 1.02), xlim=(0, 8))
    ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    ax.legend(title="an attacker who was sure to")
    return figure


def epsilon_by_epoch() -> plt.Figure:
    """What a run has spent after each epoch, for three noise multipliers."""
    steps = NUM_EXAMPLES // BATCH_SIZE
    epochs = np.arange(1, 41)
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    for sigma, color in ((1.0, ORANGE), (2.0, BLUE), (4.0, GRAY)):
        spent = [
            epsilon_spent(Releases([(sigma, BATCH_SIZE, int(k * steps))]), NUM_EXAMPLES, DELTA)
            for k in epochs
        ]
        ax.plot(epochs, spent, color=color, label=f"σ = {sigma:g}")
    ax.set(xlabel="epoch", ylabel="ε", ylim=(0, None), xlim=(0, 40))
    ax.legend()
    return figure


def amplification() -> plt.Figure:
    """ε with and without amplification by sampling, by the number of examples."""
    sizes = np.array([2_000, 5_000, 10_000, 20_000, 60_000, 200_000])
    epochs, sigma = 20, 2.0
    sampled, shuffled = [], []
    for size in sizes:
        releases = Releases([(sigma, BATCH_SIZE, epochs * int(size) // BATCH_SIZE)])
        sampled.append(epsilon_spent(releases, int(size), DELTA))
        shuffled.append(epsilon_without_amplification(releases, int(size), DELTA))
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    ax.loglog(sizes, shuffled, color=GRAY, marker=".", label="any order of the data")
    ax.loglog(sizes, sampled, color=BLUE, marker=".", label="Poisson sampling")
    ax.set(xlabel=f"examples (batches of {BATCH_SIZE}, {epochs} epochs, σ = {sigma:g})", ylabel="ε")
    ax.legend()
    return figure


def poisson_sizes() -> plt.Figure:
    """How many examples 3,000 Poisson batches hold, and the row at which they are cut."""
    sampling = PoissonSampling.for_batch_size(BATCH_SIZE, NUM_EXAMPLES, steps=6_000)
    sizes = np.random.default_rng(0).binomial(NUM_EXAMPLES, BATCH_SIZE / NUM_EXAMPLES, 3_000)
    figure, ax = plt.subplots(figsize=(6.4, 3.0))
    ax.hist(sizes, bins=np.arange(140, 262, 4), color=BLUE)
    ax.axvline(sampling.max_batch_size, color=ORANGE)
    ax.annotate(
        f"{sampling.max_batch_size} rows",
        (sampling.max_batch_size, ax.get_ylim()[1] * 0.8),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        color=ORANGE,
    )
    ax.set(xlabel="examples in a batch", ylabel="batches")
    return figure


def noise_by_batch_size() -> plt.Figure:
    """At equal ε and epochs: the noise in the mean gradient, by batch size."""
    sizes, epochs = [50, 100, 200, 400, 800, 1_600, 3_200], 20
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    for epsilon, color in ((1.0, ORANGE), (3.0, BLUE)):
        noise = [
            noise_multiplier_for(
                epsilon,
                DELTA,
                sampling_probability=size / NUM_EXAMPLES,
                steps=epochs * NUM_EXAMPLES // size,
            )
            / size
            for size in sizes
        ]
        ax.loglog(sizes, noise, color=color, marker=".", label=f"ε = {epsilon:g}")
    ax.set(xlabel=f"batch size ({NUM_EXAMPLES:,} examples, {epochs} epochs)", ylabel="σ / L")
    ax.legend(title="noise in the mean, in units of C")
    return figure


def _digits_norms() -> tuple[np.ndarray, np.ndarray]:
    """Norms of the per-example gradients of a small model, before and after training."""
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    layers = [keras.Input([64]), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def norms(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss(y, model(x))
        source = gradients.per_example_gradients(losses, model.trainable_variables, tape)
        return tf.sqrt(source.squared_norms())

    before = norms(tf.constant(images), tf.constant(labels)).numpy()
    mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), mean)
    model.fit(images, labels, batch_size=64, epochs=5, verbose=0)
    return before, norms(tf.constant(images), tf.constant(labels)).numpy()


def clipping() -> plt.Figure:
    """Gradient norms of the examples at two moments, and what clipping at 1 leaves of them."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True, constrained_layout=True)
    titles = ("untrained", "after 5 epochs")
    for ax, norms, title in zip(axes, _digits_norms(), titles):
        top = max(norms.max(), 1.2)
        ax.hist(norms, bins=np.linspace(0, top, 50), color=BLUE)
        ax.axvline(1.0, color=ORANGE)
        ax.set(
            xlabel="norm of an example's gradient",
            title=f"{title}: {np.mean(norms > 1):.0%} above C = 1",
        )
    axes[0].set_ylabel("examples")
    return figure


def side_information() -> plt.Figure:
    """Signal and noise by word, if gradients are as large as words are frequent (Zipf's law)."""
    rank = np.arange(1, 10_001)
    gradient = 1 / rank / np.linalg.norm(1 / rank)  # that of each example, of norm C = 1
    noise = 1.0 / 512  # σ / L
    # Divided by A, it is the same in all coordinates, of norm C again after clipping.
    divided = np.ones(len(rank)) / np.sqrt(len(rank))
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    ax.loglog(rank, gradient, color=BLUE, label="gradient")
    ax.loglog(rank, np.full(len(rank), noise), color=GRAY, label="noise of DP-SGD")
    ax.loglog(rank, gradient * noise / divided, color=ORANGE, label="noise of AdaDPS")
    ax.set(xlabel="word, by frequency (σ = 1, L = 512)", ylabel="size of the entry")
    ax.legend()
    return figure


def untuned_on_mnist() -> plt.Figure:
    """ADADP's defaults and the best tuned rates on MNIST, from the results of the experiment."""
    path = EXPERIMENTS / "adadp_comparison" / "results_mnist_small.json"
    curves = collections.defaultdict(list)
    for trial in json.loads(path.read_text("utf-8"))["trials"]:
        of, found = trial["settings"], trial["result"]
        rate = of["arguments"].get("learning_rate")
        if of["optimizer"] != "ADADP" or not of["arguments"]:
            key = of["noise_multiplier"], of["optimizer"], rate
            curves[key].append((found["epsilon"], found["accuracy"]))
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, constrained_layout=True)
    colors = {"ADADP": BLUE, "DPAdam": ORANGE, "DPSGD": GRAY}
    for ax, sigma in zip(axes, (2.0, 4.0)):
        for name, color in colors.items():
            of_name = {key: runs for key, runs in curves.items() if key[:2] == (sigma, name)}
            # The rate with the most seeds is the one that the experiment found best.
            best = max(
                of_name, key=lambda key: (len(of_name[key]), np.mean(of_name[key], 0)[1, -1])
            )
            epsilon, accuracy = np.mean(of_name[best], axis=0)
            label = "ADADP, untuned"
            if name != "ADADP":
                where = " of σ = 2" if name == "DPSGD" else ""
                label = f"{name}, best rate{where} ({best[2]:.1g})"
            ax.plot(epsilon, accuracy, color=color, label=label)
        ax.set(xlabel="ε", title=f"σ = {sigma:g}", ylim=(0.75, 0.93))
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        ax.legend(loc="lower right")
    axes[0].set_ylabel("test accuracy on MNIST")
    return figure


FIGURES = {
    "amplification": amplification,
    "certainty": certainty,
    "clipping": clipping,
    "epsilon_by_epoch": epsilon_by_epoch,
    "noise_by_batch_size": noise_by_batch_size,
    "poisson_sizes": poisson_sizes,
    "side_information": side_information,
    "untuned_on_mnist": untuned_on_mnist,
}


def main() -> None:
    """Draws all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], default=[])
    parser.add_argument("--out_dir", type=pathlib.Path, default=FOLDER)
    args = parser.parse_args()
    style = {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "grid.alpha": 0.3,
        "savefig.bbox": "tight",
        "svg.hashsalt": "tf_adaptive_dp",  # the same file each time
    }
    with plt.rc_context(style):
        for name in args.names or FIGURES:
            figure = FIGURES[name]()
            figure.savefig(args.out_dir / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
