"""CPU time of a DPSGD step that protects users, relative to one that protects examples.

No privacy claim: the data is random. Two compiled steps of one model take turns on batches of the
same rows; one of them clips the gradient of each row, the other that of each `examples_per_user`
neighboring rows. CPU time is that of all threads of this process. The ratio of each round is that
of neighboring turns; its quartiles over the rounds are shown.

    python -m benchmarks.steps.users
    python -m benchmarks.steps.users --models cnn --examples_per_user 2 16
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Callable

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser, quartiles

Data = tuple[np.ndarray, np.ndarray]


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


def private_model(name: str, expected: float, examples_per_user: int | None) -> tf.keras.Model:
    """A model that is ready to train."""
    make, shape, are_words = MODELS[name]
    inputs = tf.keras.Input(shape, dtype="int32" if are_words else "float32")
    model = tf.keras.Sequential([inputs, *make()])
    optimizer = dp.DPSGD(
        *(1.0, 1.0),
        learning_rate=0.01,
        expected_batch_size=expected,
        examples_per_user=examples_per_user,
    )
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


def compare(name: str, rows: int, examples_per_user: int, rounds: int, steps: int) -> list[float]:
    """The ratios of the rounds."""
    batch = tf.data.Dataset.from_tensors(data(name, rows)).repeat()
    models = {
        "examples": private_model(name, float(rows), None),
        "users": private_model(name, float(rows // examples_per_user), examples_per_user),
    }
    batches = {kind: iter(batch) for kind in models}
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for number in range(rounds + 1):
        for kind in sorted(models, reverse=number % 2 == 0):  # neither is always the first
            taken = turn(models[kind], batches[kind], steps)
            if number:  # the first round compiles
                times[kind].append(taken)
    ratios = [b / a for a, b in zip(times["examples"], times["users"])]
    lower, median, upper = quartiles(ratios)
    print(
        f"{name:5} {examples_per_user:3} {np.median(times['examples']):9.2f} "
        f"{np.median(times['users']):9.2f}    {median:.2f} ({lower:.2f} to {upper:.2f})",
        flush=True,
    )
    return ratios


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--rows", type=int, default=256, help="rows of a batch (256)")
    arguments.add_argument("--examples_per_user", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--rounds", type=int, default=30, help="turns of each kind (30)")
    arguments.add_argument("--steps", type=int, default=5, help="steps in a turn (5)")
    args = arguments.parse_args()
    print(f"{args.rows} rows, {args.rounds} rounds of {args.steps} steps; CPU ms per step")
    print(f"{'model':5} {'k':>3} {'examples':>9} {'users':>9}    ratio")
    for name in args.models:
        for examples_per_user in args.examples_per_user:
            compare(name, args.rows, examples_per_user, args.rounds, args.steps)


if __name__ == "__main__":
    main()
