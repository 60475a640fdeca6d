"""CPU time of a training step on fourteen kinds of models: DPSGD beside Keras's own SGD.

No privacy claim: the data is random. The models are written after Keras's own examples, with their
ordinary losses and metrics (`tests/helpers/kinds_of_models.py`). One batch in memory is used again
and again. Both optimizers are in one process and take turns. CPU time is that of all threads of
this process, which other processes disturb less than elapsed time. A run measures the Keras of its
Python; one file collects the results of both Kerases.

    python -m benchmarks.steps.kinds --output benchmarks/steps/kinds.json
    python -m benchmarks.steps.kinds --models fnet,conv_lstm --batch_size 4 --rounds 3
    python -m benchmarks.steps.kinds --from_json benchmarks/steps/kinds.json
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.core import names, parser, quartiles, say
from benchmarks.steps import results, tables
from benchmarks.steps.engines.tensorflow_engines import PRIVATE, RATE
from benchmarks.steps.worker import versions
from tests.helpers.kinds_of_models import KINDS
from tf_adaptive_dp._keras.generation import GENERATION

MODELS = {make.__name__: make for make in KINDS}


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--models", type=names(MODELS), default=list(MODELS), help="names, or all (the default)")
    add("--batch_size", type=int, default=32, help="examples in a batch (32)")
    add("--rounds", type=int, default=15, help="turns of each optimizer (15)")
    add("--steps", type=int, default=20, help="steps in a turn (20)")
    add("--output", type=pathlib.Path, help="JSON file; keeps earlier results")
    add(
        "--from_json",
        type=pathlib.Path,
        help="print the tables of this file instead of measuring",
    )
    return arguments.parse_args()


class Training:
    """A model in training on one batch.

    Args:
      model: a name of `MODELS`.
      private: whether the optimizer is DPSGD, or Keras's SGD.
      batch_size: B.
    """

    def __init__(self, model: str, private: bool, batch_size: int):
        tf.keras.utils.set_random_seed(0)
        compiled, arguments, *batch = MODELS[model]()
        sgd = dp.DPSGD(learning_rate=RATE, **PRIVATE) if private else tf.keras.optimizers.SGD(RATE)
        compiled.compile(sgd, **arguments)
        batch = tf.nest.map_structure(
            lambda array: np.resize(array, (batch_size, *array.shape[1:])), tuple(batch)
        )
        self._batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
        # Keras 2 returns it, Keras 3 only keeps it.
        self._step = compiled.make_train_function() or compiled.train_function
        self.num_parameters = sum(int(np.prod(v.shape)) for v in compiled.trainable_variables)

    def turn(self, steps: int) -> float:
        """Milliseconds of CPU time per step."""
        start = time.process_time()
        for _ in range(steps):
            self._step(self._batches)
        return 1e3 * (time.process_time() - start) / steps


def measure(model: str, batch_size: int, rounds: int, steps: int) -> list[dict]:
    """Measures both optimizers in turns.

    Returns:
      One row per engine.
    """
    tf.keras.backend.clear_session()
    engines = {
        engine: Training(model, private, batch_size)
        for engine, private in zip(tables.OF_GENERATION[GENERATION], (False, True))
    }
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for k in range(rounds + 1):
        for engine in sorted(engines, reverse=k % 2 == 0):  # neither is always the first
            milliseconds = engines[engine].turn(steps)
            if k:  # the first round compiles
                times[engine].append(milliseconds)
    rows = []
    for engine, training in engines.items():
        lower, median, upper = quartiles(times[engine])
        rows.append(
            {
                "engine": engine,
                "status": "ok",
                "num_parameters": training.num_parameters,
                "steps": rounds * steps,
                "median_ms": median,
                "lower_ms": lower,
                "upper_ms": upper,
                "versions": versions(("tensorflow", "keras", "numpy")),
            }
        )
    return rows


def measure_all(args: argparse.Namespace) -> results.Results:
    """Measures each model; writes the file after each."""
    settings = {"rounds": args.rounds, "steps": args.steps}
    run = results.Run(settings, args.output)
    for model in args.models:
        say(f"-- {model}")
        once = functools.partial(measure, model, args.batch_size, **settings)
        run.measure(model, args.batch_size, 1, once)
    return run.results


def main() -> None:
    """Measures, or reads earlier results; then prints."""
    args = parse_args()
    found = results.read(args.from_json) if args.from_json else measure_all(args)
    print(tables.kinds_tables(results.frame(found)))


if __name__ == "__main__":
    main()
