"""Image data sets as arrays."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from federated.datasets.folder import folder

Arrays = tuple[np.ndarray, np.ndarray]


def load(name: str, split: str, data_dir: str | None) -> Arrays:
    """Images as bytes [N, H, W, C], and labels.

    Args:
      name: of the data set in tensorflow-datasets.
      split: `"train"`, `"test"`, or a part such as `"train[:2000]"`.
      data_dir: tensorflow-datasets' folder; `None` takes the environment's `TFDS_DATA_DIR`.
    """
    path = folder(
        "--data_dir", data_dir, "TFDS_DATA_DIR", f"It must hold tensorflow-datasets' {name}."
    )
    data = tfds.load(name, split=split, data_dir=str(path), batch_size=-1)
    return data["image"].numpy(), data["label"].numpy()


def mnist(data_dir: str | None, split: str, *, normalize: bool = True) -> Arrays:
    """Rows of 784 pixels and digits.

    Args:
      data_dir: tensorflow-datasets' folder.
      split: `"train"` (60,000) or `"test"` (10,000), or a part such as `"train[:2000]"`.
      normalize: to MNIST's published mean and deviation; else pixels in [0, 1].
    """
    images, labels = load("mnist", split, data_dir)
    pixels = images.reshape(-1, 784).astype(np.float32) / 255
    return (pixels - 0.1307) / 0.3081 if normalize else pixels, labels


def digits(split: str) -> Arrays:
    """Scikit-learn's digits, which it brings along: rows of 64 pixels from 0 to 16, and digits.

    Args:
      split: `"train"` (1,437), or `"test"` (360), which is every fifth of all.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = (np.arange(len(x)) % 5 == 0) == (split == "test")
    return x[chosen].astype(np.float32), y[chosen].astype(np.int32)


def cifar10_features(
    data_dir: str | None, split: str, conv_layers: str | None = None, chunk: int = 1000
) -> Arrays:
    """CIFAR-10 after two frozen convolutions that were trained on CIFAR-100: rows of 1,600.

    As in the ADADP authors' experiment: 3×3 convolution, ReLU, 3×3 max pool with stride 2, twice,
    without padding. The convolutions saw none of CIFAR-10, so that features are public functions.

    Args:
      data_dir: tensorflow-datasets' folder.
      split: `"train"` (50,000) or `"test"` (10,000), or a part such as `"train[:2000]"`.
      conv_layers: path of `cifar100_conv_layers.npz`; `None` takes the environment's
        `CIFAR100_CONV_LAYERS`, or the file beside the datasets' folder.
      chunk: images at a time.
    """
    images, labels = load("cifar10", split, data_dir)
    path = conv_layers or os.environ.get("CIFAR100_CONV_LAYERS")
    if path is None:
        path = (
            folder("--data_dir", data_dir, "TFDS_DATA_DIR", "It must hold CIFAR-10.")
            .resolve()
            .parent
            / "cifar100_conv_layers.npz"
        )
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            "The environment's CIFAR100_CONV_LAYERS must name cifar100_conv_layers.npz, the two "
            "convolutions of the ADADP authors (github.com/DPBayes/ADADP) as arrays. Received: "
            f"{str(path)!r}"
        )
    layers = np.load(path)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # published for CIFAR-10
    rows = []
    for start in range(0, len(images), chunk):
        x = (images[start : start + chunk].astype(np.float32) / 255 - mean) / std
        for name in ("conv1", "conv2"):
            x = tf.nn.conv2d(tf.cast(x, tf.float32), layers[f"{name}_kernel"], 1, "VALID")
            x = tf.nn.relu(x + layers[f"{name}_bias"])
            x = tf.nn.max_pool2d(x, 3, 2, "VALID")
        rows.append(tf.reshape(x, [len(x), -1]).numpy())
    return np.concatenate(rows), labels
