"""Private training on one page: ADADP on scikit-learn's handwritten digits, without tuning.

Privacy claim: (ε, δ)-DP for adding or removing one of the 1,437 training images, δ = 1e-5, for the
trained weights and every checkpoint. Batches are drawn by Poisson sampling, as ε assumes. The test
images are used only for the accuracy. The progress line shows training metrics that are not
private.

    python examples/quickstart.py --out_dir quickstart_output
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adaptive_dp


def standardize(images: np.ndarray) -> np.ndarray:
    """Scales each image to mean 0 and variance 1, without statistics of the data set."""
    centered = images - images.mean(axis=1, keepdims=True)
    return (centered / centered.std(axis=1, keepdims=True)).astype(np.float32)


def main() -> None:
    """Trains, then prints the accuracy and the privacy statement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out_dir", type=pathlib.Path, default=pathlib.Path("quickstart_output"))
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        standardize(images), labels, test_size=0.2, random_state=0, stratify=labels
    )
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=args.epsilon,
        delta=1e-5,
        num_examples=len(x_train),
        epochs=args.epochs,
    )
    print(plan.describe())

    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        plan.optimizer(tf_adaptive_dp.ADADP),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = plan.fit(
        model, x_train, y_train, validation_data=(x_test, y_test), directory=args.out_dir
    ).history

    print()
    print(plan.statement())
    print()
    print(
        f"Test accuracy {history['val_accuracy'][-1]:.1%} at ε = {history['epsilon'][-1]:.2f}, "
        f"δ = {plan.delta:g}. The batches were drawn by Poisson sampling, as this ε assumes."
    )
    print(f"Report:      {args.out_dir / 'report.html'}")
    print(f"TensorBoard: tensorboard --logdir {args.out_dir / 'logs'}")
    print(f"Run it again to restore this model; delete {args.out_dir} to train a new one.")


if __name__ == "__main__":
    main()
