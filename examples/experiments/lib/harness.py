"""Runs the trials of an experiment in parallel, with a progress bar, and resumes interrupted ones.

An experiment is a program `examples/experiments/<name>/run.py` that passes an `Experiment` to
`main`. Each finished trial is stored in a JSON file, so a restarted program runs only the rest.
Methods that are tuned on grids share their plan, table and figure, see `grids`; all tables are made
by `report`.

The simulations of `federated` have a runner of their own, `federated/simulation/trials.py`: there a
trial is a TFF program with a folder of its own that resumes in the middle, inside one TFF context,
while here it is one call in a pool of processes. Neither can replace the other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import tqdm

SCALES = ("smoke", "small", "paper")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of training.

    Attributes:
      settings: The arguments of the run; JSON values only. They identify the trial: a plan that
        asks for the same settings twice gets one trial.
      result: The figures of the run; JSON values only.
      seconds: The duration of the run.
    """

    settings: dict[str, Any]
    result: dict[str, Any]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A program's argument for `main`.

    Attributes:
      name: The name of the figure, and of the folder unless the folder holds several experiments.
      description: What the experiment shows, and which figure of which paper it repeats.
      plan: Maps a scale and the finished trials to the settings of every trial that is wanted. It
        is called again whenever all of these are finished, so it can give more seeds to the best
        candidates of a grid. The experiment ends when the plan asks for nothing new.
      train: Maps settings and the data folder to a result. It runs in a worker process.
      table: Maps the finished trials to a table in Markdown.
      plot: Maps the finished trials to a matplotlib figure.
    """

    name: str
    description: str
    plan: Callable[[str, Sequence[Trial]], list[dict[str, Any]]]
    train: Callable[[dict[str, Any], str | None], dict[str, Any]]
    table: Callable[[Sequence[Trial]], str]
    plot: Callable[[Sequence[Trial]], Any]


class Results:
    """The finished trials of an experiment at one scale, stored in a JSON file.

    Args:
      path: The file. It is read if it exists.

    Raises:
      ValueError: If the file exists and does not hold results.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.trials: list[Trial] = []
        if path.exists():
            try:
                self.trials = [
                    Trial(**t) for t in json.loads(path.read_text(encoding="utf-8"))["trials"]
                ]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} does not hold results ({error}). Move it away to start over."
                ) from error

    def missing(self, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the settings of `wanted` that have no finished trial, without duplicates."""
        seen = {_key(trial.settings) for trial in self.trials}
        left = []
        for settings in wanted:
            if _key(settings) not in seen:
                seen.add(_key(settings))
                left.append(settings)
        return left

    def add(self, trial: Trial) -> None:
        """Stores a finished trial. The file is replaced in one step, so it is always complete."""
        self.trials.append(trial)
        compact = functools.partial(json.dumps, separators=(",", ":"), ensure_ascii=False)
        lines = ",\n".join(compact(dataclasses.asdict(t)) for t in self.trials)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(f'{{"trials":[\n{lines}\n]}}\n', encoding="utf-8")
        temporary.replace(self.path)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _one_thread_each() -> None:
    """Limits TensorFlow to one thread: small models gain more from parallel runs."""
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it warns of retracing for each new model
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _timed(train: Callable, settings: dict[str, Any], data_dir: str | None) -> Trial:
    start = time.perf_counter()
    result = train(settings, data_dir)
    gc.collect()  # Keras models are reference cycles that keep the training data alive
    return Trial(settings, result, round(time.perf_counter() - start, 1))


def run_trials(
    experiment: Experiment, scale: str, results: Results, data_dir: str | None, jobs: int
) -> None:
    """Runs missing trials until the plan asks for nothing new.

    A trial that fails stops the experiment with its error; finished trials are kept.
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
                pool.shutdown(cancel_futures=True)  # waits for the trials that are running
                finished = [f for f in futures if not f.cancelled() and f.exception() is None]
                for trial in (future.result() for future in finished):
                    if results.missing([trial.settings]):
                        results.add(trial)
                raise


def main(
    experiment: Experiment | Mapping[str, Experiment],
    folder: pathlib.Path,
    arguments: Sequence[str] | None = None,
) -> None:
    """Runs an experiment as its command line says.

    Args:
      experiment: The experiment; or one per data set, of which `--dataset` chooses one.
      folder: The default folder of the results: the program's own.
      arguments: The command line. `None` takes the program's.
    """
    several = isinstance(experiment, Mapping)
    any_of_them = next(iter(experiment.values())) if several else experiment
    args = _parser(any_of_them.description, folder, list(experiment) if several else []).parse_args(
        arguments
    )
    chosen = experiment[args.dataset] if several else experiment
    stem = f"results_{args.dataset}" if several else "results"
    args.output.mkdir(parents=True, exist_ok=True)
    results = Results(args.output / f"{stem}_{args.scale}.json")
    run_trials(chosen, args.scale, results, args.data_dir, args.jobs)
    picture = args.output / f"{chosen.name}_{args.scale}.png"
    chosen.plot(results.trials).savefig(picture, dpi=120)
    print(chosen.table(results.trials))
    print(f"\n{results.path}\n{picture}")


def _parser(
    description: str, folder: pathlib.Path, datasets: Sequence[str]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if datasets:
        parser.add_argument("--dataset", choices=datasets, required=True)
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="smoke",
        help="smoke: does it run (a minute); small: the figures of docs/results.md (minutes to an "
        "hour on 2 cores); paper: the paper's settings in full (default: smoke)",
    )
    parser.add_argument("--output", type=pathlib.Path, default=folder, help="folder of the results")
    parser.add_argument(
        "--data_dir", help="folder of the data (default: the environment's, see lib/datasets)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="parallel trials, one thread each"
    )
    return parser
