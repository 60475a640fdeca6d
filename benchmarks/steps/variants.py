"""CPU time of a DPSGD step that is not plain, relative to a plain one.

No privacy claim: the data is random. Two compiled steps of one model take turns on batches of the
same rows; one of them clips the gradient of each row and adds independent noise, the other is

- "users=4": clips the gradient of each four neighboring rows (`examples_per_user=4`);
- "bands=8": with `BandedNoise(8)`;
- "tree=1024": with `TreeNoise(1024)`;
- "normalized": with a `PrivateNormalization` as the first layer (not for the model of words).

CPU time is that of all threads of this process. The ratio of each round is that of neighboring
turns; its quartiles over the rounds are shown. With `--memory` it shows the peak memory of
processes that each train one of the models, and no times.

    python -m benchmarks.steps.variants
    python -m benchmarks.steps.variants --memory --models mlp --variants bands=8 bands=32 bands=128
    python -m benchmarks.steps.variants --models cnn --variants users=2 users=16
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import re
import statistics
import time
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser, quartiles
from tf_adaptive_dp.accounting import BandedNoise, TreeNoise

Data = tuple[np.ndarray, np.ndarray]

# What differs from a plain step on some rows.
KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "users": lambda rows, k: {"expected_batch_size": float(rows // k), "examples_per_user": k},
    "bands": lambda rows, bands: {"noise": BandedNoise(bands)},
    "tree": lambda rows, steps: {"noise": TreeNoise(steps)},
}
NORMALIZED = "normalized"
VARIANTS = ["users=4", "users=8", "bands=2", "bands=8", "bands=32", "tree=1024"]


def _mlp() -> list[tf.keras.layers.Layer]:
    layers = tf.keras.layers
    return [layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)]


def _cnn() -> list[tf.keras.layers.Layer]:
    layers = tf.keras.layers
    return [
        layers.Conv2D(16, 8, 2, "same", activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Conv2D(32, 4, 2, activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Flatten(),
        layers.Dense(32, "relu"),
        layers.Dense(10),
    ]


def _text() -> list[tf.keras.layers.Layer]:
    layers = tf.keras.layers
    return [
        layers.Embedding(10_000, 16),
        layers.GlobalAveragePooling1D(),
        layers.Dense(16, "relu"),
        layers.Dense(10),
    ]


def _lstm() -> list[tf.keras.layers.Layer]:
    return [tf.keras.layers.LSTM(32), tf.keras.layers.Dense(10)]


# Layers, the shape of an example, and whether it consists of the numbers of words.
MODELS: dict[str, tuple[Callable[[], list[tf.keras.layers.Layer]], tuple[int, ...], bool]] = {
    "mlp": (_mlp, (784,), False),
    "cnn": (_cnn, (28, 28, 1), False),
    "text": (_text, (128,), True),
    "lstm": (_lstm, (28, 28), False),
}


def data(name: str, rows: int) -> Data:
    """A batch for a model."""
    random = np.random.default_rng(0)
    _, shape, are_words = MODELS[name]
    if are_words:
        x = random.integers(10_000, size=(rows, *shape)).astype(np.int32)
    else:
        x = random.standard_normal((rows, *shape), np.float32)
    return x, random.integers(10, size=rows)


def arguments_of(variant: str, rows: int) -> dict[str, Any]:
    """The arguments of the optimizer of a variant; "plain" is one, too.

    >>> arguments_of("users=4", rows=256)
    {'expected_batch_size': 64.0, 'examples_per_user': 4}
    """
    plain = {"expected_batch_size": float(rows)}
    if variant in ("plain", NORMALIZED):
        return plain
    kind, _, number = variant.partition("=")
    return {**plain, **KINDS[kind](rows, int(number))}


def private_model(name: str, variant: str, rows: int) -> tf.keras.Model:
    """A model that is ready to train."""
    make, shape, are_words = MODELS[name]
    layers = [tf.keras.Input(shape, dtype="int32" if are_words else "float32"), *make()]
    if variant == NORMALIZED:
        normalization = dp.PrivateNormalization(noise_multiplier=20.0)
        normalization.adapt(data(name, rows)[0])
        layers.insert(1, normalization)
    model = tf.keras.Sequential(layers)
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.01, **arguments_of(variant, rows))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    model.make_train_function()
    return model


def turn(model: tf.keras.Model, batches: Iterator, steps: int) -> float:
    """Milliseconds of CPU time per step."""
    start = time.process_time()
    for _ in range(steps):
        logs = model.train_function(batches)
    for value in tf.nest.flatten(logs):
        np.asarray(value)
    return 1e3 * (time.process_time() - start) / steps


def compare(name: str, rows: int, variant: str, rounds: int, steps: int) -> list[float]:
    """The ratios of the rounds."""
    batch = tf.data.Dataset.from_tensors(data(name, rows)).repeat()
    models = {v: private_model(name, v, rows) for v in ("plain", variant)}
    batches = {v: iter(batch) for v in models}
    times: dict[str, list[float]] = {v: [] for v in models}
    for number in range(rounds + 1):
        for v in sorted(models, reverse=number % 2 == 0):  # neither is always the first
            taken = turn(models[v], batches[v], steps)
            if number:  # the first round compiles
                times[v].append(taken)
    ratios = [b / a for a, b in zip(times["plain"], times[variant])]
    lower, median, upper = quartiles(ratios)
    print(
        f"{name:5} {variant:10} {np.median(times['plain']):9.2f} "
        f"{np.median(times[variant]):9.2f}    {median:.2f} ({lower:.2f} to {upper:.2f})",
        flush=True,
    )
    return ratios


def _own_peak_mib(name: str, rows: int, variant: str) -> float:
    """The peak resident size of this process, after it has trained a model."""
    batches = iter(tf.data.Dataset.from_tensors(data(name, rows)).repeat())
    turn(private_model(name, variant, rows), batches, 5)
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE).group(1)) / 1024


def peak_mib(name: str, rows: int, variant: str, processes: int) -> float:
    """The median of the peaks of processes that each train a model."""
    found = []
    for _ in range(processes):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(_own_peak_mib, (name, rows, variant)))
    return statistics.median(found)


def compare_memory(name: str, rows: int, variants: list[str], processes: int) -> None:
    """Prints the peaks, and by how much they exceed that of a plain step."""
    plain = peak_mib(name, rows, "plain", processes)
    for variant in variants:
        peak = peak_mib(name, rows, variant, processes)
        print(f"{name:5} {variant:10} {plain:9.0f} {peak:9.0f}    {peak - plain:+.0f}", flush=True)


def checked_variant(text: str) -> str:
    """A variant as the command line has it."""
    kind, _, number = text.partition("=")
    if text != NORMALIZED and (kind not in KINDS or not number.isdigit()):
        wanted = ", ".join([*(f"{kind}=<number>" for kind in KINDS), NORMALIZED])
        raise argparse.ArgumentTypeError(f"must be one of {wanted}, not {text!r}")
    return text


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--rows", type=int, default=256, help="rows of a batch (256)")
    arguments.add_argument("--variants", nargs="+", type=checked_variant, default=VARIANTS)
    arguments.add_argument("--rounds", type=int, default=30, help="turns of each kind (30)")
    arguments.add_argument("--steps", type=int, default=5, help="steps in a turn (5)")
    arguments.add_argument("--memory", action="store_true", help="measure memory instead of time")
    arguments.add_argument("--processes", type=int, default=3, help="for the memory of each (3)")
    args = arguments.parse_args()
    if NORMALIZED in args.variants and any(MODELS[name][2] for name in args.models):
        arguments.error(f"numbers of words are not normalized: leave out {NORMALIZED}, or text")
    if args.memory:
        print(f"{args.rows} rows; peak MiB of a process, medians of {args.processes}")
        print(f"{'model':5} {'variant':10} {'plain':>9} {'variant':>9}    more")
        for name in args.models:
            compare_memory(name, args.rows, args.variants, args.processes)
        return
    print(f"{args.rows} rows, {args.rounds} rounds of {args.steps} steps; CPU ms per step")
    print(f"{'model':5} {'variant':10} {'plain':>9} {'variant':>9}    ratio")
    for name in args.models:
        for variant in args.variants:
            compare(name, args.rows, variant, args.rounds, args.steps)


if __name__ == "__main__":
    main()
