"""Private training on one page: ADADP on scikit-learn's handwritten digits, without tuning.

Privacy claim: (ε, δ)-DP for adding or removing one of the 1,437 training images, δ = 1/1,437, for
the trained weights and every checkpoint. Batches are drawn by Poisson sampling, as ε assumes. The
test images are used only for the accuracy. The progress line shows training metrics that are not
private.

    python examples/quickstart.py --out_dir quickstart_output
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adaptive_dp

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BATCH_SIZE = 128  # expected; a Poisson batch has a random size


def standardize(images: np.ndarray) -> np.ndarray:
    """Scales each image to mean 0 and variance 1, without statistics of the data set."""
    centered = images - images.mean(axis=1, keepdims=True)
    return (centered / centered.std(axis=1, keepdims=True)).astype(np.float32)


def plot(history: dict, path: pathlib.Path) -> None:
    """Plots test accuracy, ε and learning rate by epoch."""
    panels = (("val_accuracy", "test accuracy"), ("epsilon", "ε"), ("learning_rate", "η"))
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), constrained_layout=True)
    for ax, (key, label) in zip(axes, panels):
        ax.plot(range(1, len(history[key]) + 1), history[key], marker=".")
        ax.set_xlabel("epoch")
        ax.set_title(label)
        ax.grid(alpha=0.3)
    axes[2].set_yscale("log")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Trains, then prints the accuracy and the privacy statement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--noise_multiplier", type=float, default=2.0)
    parser.add_argument("--out_dir", type=pathlib.Path, default=pathlib.Path("quickstart_output"))
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        standardize(images), labels, test_size=0.2, random_state=0, stratify=labels
    )
    num_examples = len(x_train)
    steps_per_epoch = round(num_examples / BATCH_SIZE)
    sampling = tf_adaptive_dp.PoissonSampling.for_batch_size(
        BATCH_SIZE, num_examples, steps=args.epochs * steps_per_epoch
    )

    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        tf_adaptive_dp.ADADP(
            l2_norm_clip=1.0,
            noise_multiplier=args.noise_multiplier,
            expected_batch_size=sampling.expected_batch_size(num_examples),
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],  # padding has weight 0
    )
    monitor = tf_adaptive_dp.PrivacyMonitor(
        num_examples=num_examples,
        delta=1 / num_examples,
        log_dir=str(args.out_dir / "logs"),
        sampling=sampling,
    )
    history = model.fit(
        tf_adaptive_dp.poisson_batches((x_train, y_train), sampling),
        steps_per_epoch=steps_per_epoch,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        callbacks=[monitor],
    ).history
    plot(history, args.out_dir / "training.png")

    print()
    print(monitor.statement())
    print()
    print(
        f"Test accuracy {history['val_accuracy'][-1]:.1%} at ε = {history['epsilon'][-1]:.2f}, "
        f"δ = 1/{num_examples}. The batches were drawn by Poisson sampling, as this ε assumes."
    )
    print(f"Plot:        {args.out_dir / 'training.png'}")
    print(f"TensorBoard: tensorboard --logdir {args.out_dir / 'logs'}")


if __name__ == "__main__":
    main()
