"""Features that need no learning: a linear model on scattering features of MNIST or CIFAR-10.

Privacy claim: (ε, δ)-DP for adding or removing one of the training images, for the trained weights
and every checkpoint. Batches are drawn by Poisson sampling, as ε assumes. The features of an image
are computed from this image alone, by fixed filters, so they cost no privacy. The test images are
used once, for the accuracy at the end. ADADP has its defaults for normalized inputs; batch size and
epochs are those of Tramèr and Boneh (2020), arXiv:2011.11660.

    python examples/scattered_images.py --data_dir ~/tensorflow_datasets --out_dir scattered_output
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import tf_adaptive_dp
from examples.experiments.lib.datasets import scattered


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dataset", choices=list(scattered.PAPER), default="mnist")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch_size", type=int, help="default: the paper's")
    parser.add_argument("--epochs", type=int, help="default: the paper's")
    parser.add_argument("--data_dir", default=os.environ.get("TFDS_DATA_DIR"))
    parser.add_argument("--max_examples", type=int, help="only so many images of each split")
    parser.add_argument("--out_dir", type=pathlib.Path, default=pathlib.Path("scattered_output"))
    return parser.parse_args()


def main() -> None:
    """Computes the features or reads them, trains, and reports."""
    args = parse_args()
    part = "" if args.max_examples is None else f"[:{args.max_examples}]"
    x, y = scattered.load(args.dataset, f"train{part}", args.data_dir, args.out_dir)
    x_test, y_test = scattered.load(args.dataset, f"test{part}", args.data_dir, args.out_dir)

    paper = scattered.PAPER[args.dataset]
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=args.epsilon,
        delta=args.delta,
        num_examples=len(x),
        batch_size=args.batch_size or paper["batch_size"],
        epochs=args.epochs or paper["epochs"],
    )
    print(plan.describe())
    model = keras.Sequential([keras.Input([x.shape[1]]), keras.layers.Dense(10)])
    model.compile(
        # Groups of features have mean 0 and variance 1 within each image.
        plan.optimizer(tf_adaptive_dp.ADADP, normalized_inputs=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.time()
    history = plan.fit(
        model, x, y, directory=args.out_dir / f"{args.dataset}_run", verbose=2
    ).history
    seconds = time.time() - start
    accuracy = model.evaluate(x_test, y_test, batch_size=1000, verbose=0)[1]

    print()
    print(plan.statement())
    print()
    result = {
        "dataset": args.dataset,
        "test_accuracy": round(accuracy, 4),
        "epsilon": round(history["epsilon"][-1], 4),
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "learning_rate": round(history["learning_rate"][-1], 4),
        "seconds": round(seconds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
