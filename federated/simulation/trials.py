"""Trials of a simulation program, each in its folder: what is finished is not run again."""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from federated.runtime import contexts
from federated.runtime.connection import WorkerLostError
from federated.runtime.worker import WorkerStartError

Settings = dict[str, Any]
_FINISHED = "finished.json"


class Trial(NamedTuple):
    """A run that is finished.

    Attributes:
      settings: what it was asked to do.
      figures: by name, as `federated.scalars` has them, for each round; NaN where a round
        has none. Without any entry if all rounds were lost.
      final: figures of the whole trial, lost rounds included, such as its ε.
    """

    settings: Settings
    figures: Mapping[str, Sequence[float]]
    final: Mapping[str, float]

    def last(self, name: str, values: int = 1) -> float:
        """Mean of the last values of a figure; rounds without one do not count. NaN if all lack it.

        >>> Trial({}, {"test/loss": [0.5, 0.25, math.nan]}, {}).last("test/loss")
        0.25
        """
        there = self.curve(name)[1][-values:]
        return sum(there) / len(there) if there else math.nan

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The rounds that have a figure, and its values."""
        there = [(r, v) for r, v in enumerate(self.figures.get(name, ()), 1) if not math.isnan(v)]
        return [r for r, _ in there], [v for _, v in there]


def best(candidates: Iterable[Any], score: Callable[[Any], float]) -> Any:
    """The first with the highest score, one whose score is NaN only if there is no other.

    >>> best([1.0, 3.0, 2.0], {1.0: math.nan, 3.0: 0.5, 2.0: 0.75}.get)
    2.0
    """
    scores = ((candidate, score(candidate)) for candidate in candidates)
    return max(scores, key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1])[0]


def run_trials(
    plan: Callable[[Sequence[Trial]], Iterable[Settings]],
    train: Callable[[Settings, Path], Mapping[str, float]],
    folder: Path,
    report: Callable[[Sequence[Trial]], Any] = lambda done: None,
) -> list[Trial]:
    """Runs what a plan wants and is not there yet.

    Args:
      plan: from the finished trials to the settings of all that are wanted. It is
        asked again until nothing is missing, so that it can search first and then repeat the best.
      train: runs one trial in a folder, where `federated.monitors` leaves `figures.csv`;
        returns `Trial.final`; called again, it goes on where it was interrupted.
      folder: of all trials; gets one folder for each. The saved states of `federated.train`
        in it are deleted as soon as the trial is finished; journal and figures are kept.
      report: gets all that are finished, each time that one more is.

    Returns:
      The finished trials, in the order of the plan.
    """
    done: list[Trial] = []
    while True:
        wanted = list(plan(done))
        missing = [settings for settings in wanted if settings not in [t.settings for t in done]]
        if not missing:
            return [next(t for t in done if t.settings == settings) for settings in wanted]
        waiting = [s for s in missing if not (folder / _name(s) / _FINISHED).exists()]
        done += [_finished(folder / _name(s)) for s in missing if s not in waiting]
        for number, settings in enumerate(waiting, 1):
            path = folder / _name(settings)
            print(f"[{number}/{len(waiting)}] {label(settings)}", flush=True)
            _finish(settings, path, train(settings, path))
            done.append(_finished(path))
            report(done)


def label(settings: Settings) -> str:
    """Settings as words."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _name(settings: Settings) -> str:
    """A folder's name: what can be read, and a hash of everything."""
    text = json.dumps(settings, sort_keys=True)
    words = "_".join(str(settings[key]) for key in ("method", "rate") if key in settings)
    return f"{words}_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _finish(settings: Settings, path: Path, final: Mapping[str, float]) -> None:
    """Writes down that a trial is finished, and its figures; none if all its rounds were lost."""
    with open(path / "figures.csv", newline="") as file:
        reader = csv.DictReader(file)
        number = {int(row["round"]): row for row in reader}
    names = [name for name in reader.fieldnames or () if name != "round"]
    rounds = range(1, max(number, default=0) + 1)
    figures = {
        name: [float(number.get(r, {}).get(name) or "nan") for r in rounds] for name in names
    }
    unfinished = path / f"{_FINISHED}.new"
    record = Trial(settings, figures, dict(final))._asdict()
    unfinished.write_text(json.dumps(record))
    unfinished.rename(path / _FINISHED)


def _finished(path: Path) -> Trial:
    """Reads a finished trial, and deletes its states, which nothing needs any more."""
    states = path / "secret" / "states"
    if states.exists():
        shutil.rmtree(states)
    return Trial(**json.loads((path / _FINISHED).read_text()))


def parse_arguments(
    description: str, scales: Iterable[str], data_help: str, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The arguments that the programs share.

    Args:
      description: the program's docstring.
      scales: the choices of `--scale`.
      data_help: where the data are looked for.
      argv: arguments instead of the command line's.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=list(scales), default="smoke", help="how much is done")
    parser.add_argument("--data_dir", help=data_help)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("federated_runs"),
        help="gets a folder for each trial, a table and a figure; the program goes on from there",
    )
    parser.add_argument(
        "--workers",
        default="",
        metavar="HOST:PORT,…",
        help="TFF workers (`python -m federated.runtime.worker`) that share the clients of a "
        "round; without it a worker of this machine",
    )
    return parser.parse_args(argv)


def context(workers: str) -> Any:
    """Where TFF computes: `--workers`, or a worker of this machine that ends with the program."""
    if not workers:
        return contexts.local_context()
    try:
        return contexts.remote_context(workers.split(","))
    except ValueError as error:
        sys.exit(f"--workers {workers}: {error}")


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, the latter where there are several values."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:.3f} ± {deviation:.3f}"


@contextlib.contextmanager
def _ending_in_words(args: argparse.Namespace) -> Iterator[None]:
    """Ends the program with the message of a worker's error, which says all there is to know."""
    try:
        yield
    except (WorkerStartError, WorkerLostError) as error:
        sys.exit(f"{error}\nThe same command goes on where this one ended.")


def run_program(
    name: str,
    description: str,
    data_help: str,
    scales: Iterable[str],
    plan: Callable[[str, Sequence[Trial]], Iterable[Settings]],
    train: Callable[[Settings, Path, str | None], Mapping[str, float]],
    describe: Callable[[str, str | None], str],
    table: Callable[[Sequence[Trial]], str],
    plot: Callable[[Sequence[Trial]], Any],
    argv: Sequence[str] | None = None,
) -> None:
    """A whole program: reads the command line, runs what is missing, saves table and figure.

    Table and results are written after each trial, and before the figure is drawn. Where the data
    or a worker are missing it ends with a message and status 1.

    Args:
      name: of its folder and files.
      description: see `parse_arguments`, as for `data_help`, `scales` and `argv`.
      data_help: where the data are looked for.
      scales: the choices of `--scale`.
      plan: from the scale and the finished trials, see `run_trials`.
      train: gets the settings, the trial's folder and `--data_dir`, see `run_trials`.
      describe: what has to be known beside the table, such as the sizes of the data, of the scale
        and `--data_dir`; printed first, and fails if there are no data.
      table: of the trials that are finished, in Markdown.
      plot: of all trials, a figure of matplotlib.
      argv: arguments instead of the command line's.
    """
    args = parse_arguments(description, scales, data_help, argv)
    folder = args.output_dir / name / args.scale
    with _ending_in_words(args), context(args.workers):
        try:
            about = describe(args.scale, args.data_dir)
        except FileNotFoundError as error:
            sys.exit(f"--data_dir {args.data_dir}: {error}")
        print(about, flush=True)

        def report(done: Sequence[Trial]) -> str:
            text = f"{about}\n\n{table(done)}\n"
            (folder / f"{name}.md").write_text(text)
            results = json.dumps([trial._asdict() for trial in done], indent=1)
            (folder / f"{name}.json").write_text(results)
            return text

        finished = run_trials(
            lambda done: plan(args.scale, done),
            lambda settings, path: train(settings, path, args.data_dir),
            folder,
            report,
        )
    print(f"\n{report(finished)}")
    plot(finished).savefig(folder / f"{name}.png", dpi=120)
    print(f"Written: {folder / name}.md, .json and .png")
