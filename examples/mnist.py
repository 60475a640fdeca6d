"""Private training on MNIST with any of the optimizers, using tensorflow-datasets.

Privacy claim: (ε, δ)-DP for adding or removing one of the 60,000 training images (with `adadps`,
one of the 59,400 that are not public). Batches come from a shuffled data set, while ε assumes
Poisson sampling. So ε is the customary approximation; the statement at the end says so. The test
images are used only for the accuracy. The default learning rates are not tuned on this data: those
of ADADP and DPAdamWOSM are from the papers, that of Adam is from Keras.

    python examples/mnist.py --optimizer adadp --noise_multiplier 2 --data_dir ~/tensorflow_datasets
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

import tf_adaptive_dp

PUBLIC_SHARE = 0.01  # of the training images, given up as public data for AdaDPS


def load(data_dir: str | None, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as rows of 784, standardized by MNIST's published mean and deviation, and labels."""
    dataset = tfds.load("mnist", split=split, data_dir=data_dir, batch_size=-1)
    images, labels = dataset["image"].numpy(), dataset["label"].numpy()
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255
    return (pixels - 0.1307) / 0.3081, labels


def make_optimizer(args: argparse.Namespace, public: tf.data.Dataset):
    """The requested optimizer and the callbacks that it needs."""
    private = {
        "l2_norm_clip": args.l2_norm_clip,
        "noise_multiplier": args.noise_multiplier,
        "expected_batch_size": args.batch_size,
    }
    if args.learning_rate is not None:
        private["learning_rate"] = args.learning_rate
    if args.optimizer == "adadps":
        # The preconditioner scales gradients to about one per coordinate, so their norms are about
        # √d and all are clipped. Then only the product of clip norm and rate matters. This one is
        # close to ADADP's learning rate in this setting.
        private.setdefault("learning_rate", 0.1)
        side_information = tf_adaptive_dp.side_information.PublicGradients(
            public, provenance="public"
        )
        return tf_adaptive_dp.AdaDPS(side_information, **private), [side_information]
    classes = {
        "adadp": tf_adaptive_dp.ADADP,
        "dp_adam": tf_adaptive_dp.DPAdam,
        "dp_adam_wosm": tf_adaptive_dp.DPAdamWOSM,
        "dp_sgd": tf_adaptive_dp.DPSGD,
    }
    return classes[args.optimizer](**private), []


def make_model(hidden_units: int) -> keras.Model:
    """The network of the ADADP paper, with two hidden layers."""
    return keras.Sequential(
        [
            keras.Input([784]),
            keras.layers.Dense(hidden_units, activation="relu"),
            keras.layers.Dense(hidden_units, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    optimizers = ["adadp", "dp_adam", "dp_adam_wosm", "dp_sgd", "adadps"]
    parser.add_argument("--optimizer", choices=optimizers, default="adadp")
    parser.add_argument("--noise_multiplier", type=float, default=2.0)
    parser.add_argument("--l2_norm_clip", type=float, default=1.0)
    parser.add_argument("--learning_rate", type=float, help="default: that of the optimizer")
    parser.add_argument("--batch_size", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hidden_units", type=int, default=256)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--data_dir", default=os.environ.get("TFDS_DATA_DIR"))
    parser.add_argument("--log_dir", help="directory for TensorBoard's files")
    parser.add_argument("--max_examples", type=int, help="train only on the first examples")
    return parser.parse_args()


def main() -> None:
    """Trains and reports."""
    args = parse_args()
    x, y = load(args.data_dir, "train")
    x_test, y_test = load(args.data_dir, "test")
    x, y = x[: args.max_examples], y[: args.max_examples]
    public = None
    if args.optimizer == "adadps":
        num_public = int(len(x) * PUBLIC_SHARE)
        public = tf.data.Dataset.from_tensor_slices((x[:num_public], y[:num_public]))
        public = public.shuffle(num_public).batch(min(args.batch_size, num_public))
        x, y = x[num_public:], y[num_public:]  # public images must not be private too
    num_examples = len(x)
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(num_examples)
    train = train.batch(args.batch_size, drop_remainder=True).prefetch(2)

    optimizer, callbacks = make_optimizer(args, public)
    model = make_model(args.hidden_units)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    monitor = tf_adaptive_dp.PrivacyMonitor(num_examples, args.delta, args.log_dir)
    start = time.time()
    history = model.fit(
        train,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        callbacks=[*callbacks, monitor],
        verbose=2,
    ).history
    print()
    print(monitor.statement())
    print()
    result = {
        "optimizer": args.optimizer,
        "noise_multiplier": args.noise_multiplier,
        "epochs": args.epochs,
        "test_accuracy": [round(a, 4) for a in history["val_accuracy"]],
        "epsilon": round(history["epsilon"][-1], 4),
        "learning_rate": history["learning_rate"][-1],
        "seconds": round(time.time() - start),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
