"""What private training costs, padding included: Poisson batches beside the ones that Keras makes.

No privacy claim: the data is random. `fit` trains one model with Keras's SGD on shuffled batches,
and another one with ADADP on Poisson batches, whose sizes are random and which are padded to one
shape. They have as many examples on average, so a step stands for the same number in both. The two
take turns; a turn is a call of `fit`.

CPU time is that of all threads of this process, drawing and reading batches included. The ratio of
each round is that of neighboring turns; its quartiles over the rounds are shown.

    python -m benchmarks.steps.epochs
    python -m benchmarks.steps.epochs --models cnn --batch_sizes 64 1024
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser, quartiles
from benchmarks.steps.variants import MODELS, data

NUM_EXAMPLES = 60_000


def trainings(
    name: str, batch_size: int, sampling: dp.PoissonSampling, steps: int
) -> dict[str, Callable[[], Any]]:
    """One function per kind, each of which trains its own model for some steps.

    Args:
      name: the model.
      batch_size: that of Keras's batches, and the expected one of ours.
      sampling: draws our batches, for all turns.
      steps: the steps of a turn.
    """
    x, y = data(name, NUM_EXAMPLES)
    make, shape, are_words = MODELS[name]

    def model(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.Model:
        first = tf.keras.Input(shape, dtype="int32" if are_words else "float32")
        made = tf.keras.Sequential([first, *make()])
        made.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    plain = model(tf.keras.optimizers.SGD(0.01))
    private = model(dp.ADADP(1.0, 1.0, expected_batch_size=float(batch_size)))
    batches = dp.poisson_batches((x, y), sampling)
    how = {"steps_per_epoch": steps, "verbose": 0}
    return {
        "plain": lambda: plain.fit(x, y, batch_size=batch_size, **how),
        "private": lambda: private.fit(batches, shuffle=False, **how),
    }


def compare(name: str, batch_size: int, rounds: int, steps: int) -> list[float]:
    """Prints a row, and returns the ratios of the rounds."""
    sampling = dp.PoissonSampling.for_batch_size(batch_size, NUM_EXAMPLES, steps * (rounds + 1))
    functions = trainings(name, batch_size, sampling, steps)
    times: dict[str, list[float]] = {kind: [] for kind in functions}
    for number in range(rounds + 1):
        for kind in sorted(functions, reverse=number % 2 == 0):  # neither is always the first
            start = time.process_time()
            functions[kind]()
            if number:  # the first round compiles
                times[kind].append(1e3 * (time.process_time() - start) / steps)
    ratios = [b / a for a, b in zip(times["plain"], times["private"])]
    lower, median, upper = quartiles(ratios)
    print(
        f"| {name} | {batch_size:,} | {sampling.rows:,} | {statistics.median(times['plain']):.2f} "
        f"| {statistics.median(times['private']):.2f} "
        f"| {median:.2f} ({lower:.2f} to {upper:.2f}) |",
        flush=True,
    )
    return ratios


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--batch_sizes", nargs="+", type=int, default=[64, 256, 1024])
    arguments.add_argument("--rounds", type=int, default=9, help="turns of each kind (9)")
    arguments.add_argument("--steps", type=int, default=100, help="steps in a turn (100)")
    args = arguments.parse_args()
    print(f"{args.rounds} rounds of {args.steps} steps; CPU ms per step\n")
    print("| model | batch size | rows | Keras's SGD | ADADP | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name in args.models:
        for batch_size in args.batch_sizes:
            compare(name, batch_size, args.rounds, args.steps)


if __name__ == "__main__":
    main()
