"""What private training costs, padding included: `plan.fit` beside `fit` with Keras's SGD.

No privacy claim: the data is random. `PrivacyPlan.fit` trains one model with ADADP on Poisson
batches, whose sizes are random, and `fit` another one with SGD on shuffled batches. Their batches
have as many examples on average, so a step stands for the same number in both. They take turns: an
epoch of one follows an epoch of the other.

CPU time is that of all threads of this process: drawing and reading batches, padding, the callbacks
of a plan. The ratio of each round is that of neighboring epochs; its quartiles over the rounds are
shown. "Rows" is the mean number of rows of a private batch, and "room" that of the largest.

    python -m benchmarks.steps.epochs
    python -m benchmarks.steps.epochs --models cnn --batch_sizes 64 1024 --equal_rows
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import parser, quartiles
from benchmarks.steps.variants import MODELS, data


class Turns(tf.keras.callbacks.Callback):
    """Measures the epochs of a private training, and after each of them an epoch of another one.

    Attributes:
      private: CPU seconds of each epoch.
      plain: CPU seconds of each call of `run_plain`.
    """

    def __init__(self, run_plain: Callable[[], Any]):
        super().__init__()
        self._run_plain, self._start = run_plain, 0.0
        self.private: list[float] = []
        self.plain: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Takes the time, and runs the other training."""
        now = time.process_time()
        self.private.append(now - self._start)
        self._run_plain()
        self.plain.append(time.process_time() - now)


def mean_rows(sampling: dp.PoissonSampling, num_examples: int, equal_rows: bool) -> float:
    """The mean number of rows of a batch."""
    if equal_rows:
        return sampling.rows
    random = np.random.default_rng(0)
    sizes = random.binomial(num_examples, sampling.sampling_probability, 10_000)
    return float(np.mean([sampling.places_for(size) for size in sizes.tolist()]))


def compare(name: str, batch_size: int, rounds: int, steps: int, equal_rows: bool) -> list[float]:
    """Prints a row, and returns the ratios of the rounds."""
    x, y = data(name, steps * batch_size)
    make, shape, are_words = MODELS[name]

    def model(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.Model:
        first = tf.keras.Input(shape, dtype="int32" if are_words else "float32")
        made = tf.keras.Sequential([first, *make()])
        made.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    plan = dp.PrivacyPlan(
        noise_multiplier=1.0,
        delta=1e-5,
        num_examples=len(x),
        batch_size=batch_size,
        epochs=rounds + 1,
    )
    plain = model(tf.keras.optimizers.SGD(0.01))
    turns = Turns(lambda: plain.fit(x, y, batch_size=batch_size, verbose=0))
    private = model(plan.optimizer(dp.ADADP))
    plan.fit(private, x, y, callbacks=turns, equal_rows=equal_rows, verbose=0)
    times = {"plain": turns.plain[1:], "private": turns.private[1:]}  # the first round compiles
    ratios = [b / a for a, b in zip(times["plain"], times["private"])]
    lower, median, upper = quartiles(ratios)
    plain_ms, private_ms = (1e3 * statistics.median(of) / steps for of in times.values())
    rows = mean_rows(plan.sampling, len(x), equal_rows)
    print(
        f"| {name} | {batch_size:,} | {rows:,.0f} | {plan.sampling.rows:,} | {plain_ms:.2f} "
        f"| {private_ms:.2f} | {median:.2f} ({lower:.2f} to {upper:.2f}) |",
        flush=True,
    )
    return ratios


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--batch_sizes", nargs="+", type=int, default=[64, 256, 1024])
    arguments.add_argument("--rounds", type=int, default=9, help="epochs of each kind (9)")
    arguments.add_argument("--steps", type=int, default=100, help="steps of an epoch (100)")
    arguments.add_argument("--equal_rows", action="store_true", help="pad to the largest batch")
    args = arguments.parse_args()
    print(f"{args.rounds} rounds of {args.steps} steps; CPU ms per step\n")
    print("| model | batch size | rows | room | Keras's SGD | ADADP | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name in args.models:
        for batch_size in args.batch_sizes:
            compare(name, batch_size, args.rounds, args.steps, args.equal_rows)


if __name__ == "__main__":
    main()
