"""Scattering features of image data sets: computed once, then read from files."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import numpy as np
import tqdm

from examples.experiments.lib import scattering
from examples.experiments.lib.datasets import images

Arrays = tuple[np.ndarray, np.ndarray]
# Batch sizes and epochs of Tramèr and Boneh (2020), arXiv:2011.11660.
PAPER = {
    "mnist": {"batch_size": 4096, "epochs": 40},
    "cifar10": {"batch_size": 8192, "epochs": 60},
}
# Those of the features: 81 for each color.
NUM_CHANNELS = {"mnist": 81, "cifar10": 243}
CHUNK = 256  # images at a time
# ImageNet's statistics, in the order of the channels. Those of the private images would have to be
# released first. The paper's authors take the same.
MEAN = {"cifar10": (0.485, 0.456, 0.406)}
STD = {"cifar10": (0.229, 0.224, 0.225)}


def load(
    name: str,
    split: str,
    data_dir: str | None,
    cache_dir: pathlib.Path | str,
    mirrored: bool = False,
) -> Arrays:
    """Features [N, D] of a data set, and its labels [N].

    The features are 16-bit floats in a file that is mapped into memory, so MNIST takes 0.6 GB of
    disk and CIFAR-10 1.9 GB, and no process needs to hold them. The file is made under another name
    and renamed, so it is always complete.

    Args:
      name: `"mnist"` (D = 3,969) or `"cifar10"` (D = 15,552).
      split: `"train"`, `"test"`, or a part such as `"train[:2000]"`.
      data_dir: tensorflow-datasets' folder; `None` takes the environment's `TFDS_DATA_DIR`.
      cache_dir: The folder of the files, which is created if it is missing.
      mirrored: Whether to take `scattering.mirrored_features`, half as many, in place of
        `scattering.features`.
    """
    folder = pathlib.Path(cache_dir)
    compute = scattering.mirrored_features if mirrored else scattering.features
    kind = "mirrored" if mirrored else f"{scattering.GROUPS}_groups"
    stem = f"{name}_{split}_{kind}".replace("[", "_").replace(":", "-").replace("]", "")
    path, path_of_labels = folder / f"{stem}.npy", folder / f"{stem}_labels.npy"
    if not path.exists():
        pixels, labels = images.load(name, split, data_dir)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path_of_labels, labels)
        _write(path, pixels, np.float32(MEAN.get(name, 0)), np.float32(STD.get(name, 1)), compute)
    return np.load(path, mmap_mode="r"), np.load(path_of_labels)


def _write(
    path: pathlib.Path,
    pixels: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    compute: Callable[[np.ndarray], np.ndarray],
) -> None:
    start = time.perf_counter()
    unfinished = path.with_suffix(f".{time.time_ns()}.part")
    file = None
    for first in tqdm.trange(0, len(pixels), CHUNK, desc=path.stem, unit="chunk"):
        scaled = (pixels[first : first + CHUNK].astype(np.float32) / 255 - mean) / std
        rows = compute(scaled)
        if file is None:
            shape = (len(pixels), rows.shape[1])
            file = np.lib.format.open_memmap(unfinished, "w+", np.float16, shape)
        file[first : first + CHUNK] = rows
    file.flush()
    unfinished.rename(path)
    seconds = time.perf_counter() - start
    print(f"{path.name}: {shape[0]} examples of {shape[1]} features in {seconds:.0f} s", flush=True)
