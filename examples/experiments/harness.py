"""Runs the trials of an experiment: side by side, resumable, with a progress bar and a JSON file.

An experiment is a program `examples/experiments/<name>/run.py` that hands an `Experiment` to
`main`. What was finished is in its JSON file; started again, it goes on with the rest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Callable

import tqdm

SCALES = ("smoke", "small", "paper")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of training.

    Attributes:
      settings: what was asked for; JSON values only. Two trials with equal settings are one.
      result: what came out; JSON values only.
      seconds: how long it took.
    """

    settings: dict[str, Any]
    result: dict[str, Any]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a program hands to `main`.

    Attributes:
      name: the folder's name.
      description: what is shown, and which figure of which paper it is.
      plan: from a scale and the trials finished so far, the settings of all trials that are
        wanted. It is asked again whenever all of them are done, so it can choose the rates that
        get more seeds once the grid is there; it ends when it asks for nothing new.
      train: from settings and the folder of data, the result. It runs in a process of its own.
      table: from the finished trials, a table in Markdown.
      plot: from the finished trials, a matplotlib figure.
    """

    name: str
    description: str
    plan: Callable[[str, Sequence[Trial]], list[dict[str, Any]]]
    train: Callable[[dict[str, Any], str | None], dict[str, Any]]
    table: Callable[[Sequence[Trial]], str]
    plot: Callable[[Sequence[Trial]], Any]


class Results:
    """The finished trials of an experiment at one scale, in a JSON file.

    Args:
      path: the file; read if it is there.

    Raises:
      ValueError: if the file is there and is not one of these.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.trials: list[Trial] = []
        if path.exists():
            try:
                self.trials = [Trial(**t) for t in json.loads(path.read_text())["trials"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} is no file of results ({error}). Move it away to start anew."
                ) from error

    def missing(self, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those settings of `wanted` that are not finished, each once."""
        seen = {_key(trial.settings) for trial in self.trials}
        left = []
        for settings in wanted:
            if _key(settings) not in seen:
                seen.add(_key(settings))
                left.append(settings)
        return left

    def add(self, trial: Trial) -> None:
        """Keeps a finished trial; the file is whole at every moment."""
        self.trials.append(trial)
        lines = ",\n".join(json.dumps(dataclasses.asdict(t)) for t in self.trials)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(f'{{"trials": [\n{lines}\n]}}\n')
        temporary.replace(self.path)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _one_thread_each() -> None:
    """Small models gain more from two runs side by side than from two threads."""
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # each trial is a new model: it warns of retracing
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _timed(train: Callable, settings: dict[str, Any], data_dir: str | None) -> Trial:
    start = time.perf_counter()
    result = train(settings, data_dir)
    gc.collect()  # Keras's models are cycles, and hold the copy of the data that batches come from
    return Trial(settings, result, round(time.perf_counter() - start, 1))


def run_trials(
    experiment: Experiment, scale: str, results: Results, data_dir: str | None, jobs: int
) -> None:
    """Runs what is missing until the plan asks for nothing new.

    A trial that fails stops the experiment with its error; what was finished is kept.
    """
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_one_thread_each)
    with pool, tqdm.tqdm(desc=experiment.name, unit="trial", dynamic_ncols=True) as bar:
        bar.update(len(results.trials))
        while missing := results.missing(experiment.plan(scale, results.trials)):
            bar.total = len(results.trials) + len(missing)
            bar.refresh()
            futures = [pool.submit(_timed, experiment.train, s, data_dir) for s in missing]
            try:
                for future in concurrent.futures.as_completed(futures):
                    results.add(future.result())
                    bar.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # waits for what runs already
                for future in futures:
                    if not future.cancelled() and future.exception() is None:
                        if results.missing([future.result().settings]):
                            results.add(future.result())
                raise


def main(experiment: Experiment, folder: pathlib.Path, arguments: Sequence[str] | None = None):
    """The command line of an experiment.

    Args:
      experiment: what to run.
      folder: where results go unless told otherwise: the program's own folder.
      arguments: the command line; `None` takes the program's.
    """
    parser = argparse.ArgumentParser(
        description=experiment.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="smoke",
        help="smoke: does it run (a minute); small: the figures of docs/results.md (minutes to an "
        "hour on 2 cores); paper: the paper's settings in full (default: smoke)",
    )
    parser.add_argument("--output", type=pathlib.Path, default=folder, help="folder of the results")
    parser.add_argument(
        "--data_dir", help="folder of the data (default: the environment's, see data.py)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="trials side by side, one thread each"
    )
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    results = Results(args.output / f"results_{args.scale}.json")
    run_trials(experiment, args.scale, results, args.data_dir, args.jobs)
    picture = args.output / f"{experiment.name}_{args.scale}.png"
    experiment.plot(results.trials).savefig(picture, dpi=120)
    print(experiment.table(results.trials))
    print(f"\n{results.path}\n{picture}")
