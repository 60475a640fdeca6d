"""The share of a DPSGD step's CPU time that drawing Poisson batches takes.

No privacy claim: the data is random. One compiled step alternates between drawn batches and one of
these batches, repeated. CPU time is that of all threads of this process. The share in a round is
1 - repeated / drawn; its quartiles over the rounds are shown.

    python -m benchmarks.steps.sampling
    python -m benchmarks.steps.sampling --examples 1000000 --features 64 --batch_size 500
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser, quartiles


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = parser(__doc__)
    for name, default, meaning in [
        ("examples", 60_000, "examples in the training set"),
        ("features", 784, "32-bit numbers in an example"),
        ("batch_size", 250, "examples in a batch, on average"),
        ("rounds", 60, "turns of each kind of batch"),
        ("steps", 20, "steps in a turn"),
    ]:
        arguments.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} ({default})"
        )
    return arguments.parse_args()


def private_model(features: int, batch_size: int) -> tf.keras.Model:
    """An MLP that is ready to train."""
    layers = [tf.keras.layers.Dense(256, "relu"), tf.keras.layers.Dense(256, "relu")]
    inputs = tf.keras.Input([features])
    model = tf.keras.Sequential([inputs, *layers, tf.keras.layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.01, expected_batch_size=float(batch_size))
    model.compile(optimizer, loss=loss)
    return model


def turn(model: tf.keras.Model, batches: Iterator, steps: int) -> tuple[float, float]:
    """Milliseconds per step: CPU time of all threads, and elapsed time."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        logs = model.train_function(batches)
    logs["loss"].numpy()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return 1e3 * cpu / steps, 1e3 * wall / steps


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    random = np.random.default_rng(0)
    x = random.standard_normal((args.examples, args.features), np.float32)
    y = random.integers(10, size=args.examples)
    total = (args.rounds + 2) * args.steps + 10
    sampling = dp.PoissonSampling.for_batch_size(args.batch_size, args.examples, total, seed=1)
    drawn = dp.poisson_batches((x, y), sampling)
    repeated = tf.data.Dataset.from_tensors(next(iter(drawn))).repeat()
    model = private_model(args.features, args.batch_size)
    model.make_train_function()
    kinds = {"drawn": iter(drawn), "repeated": iter(repeated)}
    measured = {kind: [] for kind in kinds}
    for number in range(args.rounds + 1):
        for kind in sorted(kinds, reverse=number % 2 == 0):  # neither is always the first
            times = turn(model, kinds[kind], args.steps)
            if number:  # the first round compiles
                measured[kind].append(times)
    print(f"{sampling}, {args.rounds} rounds of {args.steps} steps")
    print(f"{'ms per step':11} {'CPU':>6} {'clock':>6}")
    for kind, times in measured.items():
        print(f"{kind:11} " + " ".join(f"{np.median(column):6.3f}" for column in zip(*times)))
    shares = [1 - b[0] / a[0] for a, b in zip(measured["drawn"], measured["repeated"])]
    lower, median, upper = quartiles(shares)
    print(f"share of drawing in the CPU time: {median:.1%} ({lower:.1%} to {upper:.1%})")


if __name__ == "__main__":
    main()
