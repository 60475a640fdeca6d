"""Runs the trials of a simulation program, each in its own folder, and resumes interrupted ones."""

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
from federated.runtime.connection import WorkerLostError, WorkerMismatchError
from federated.runtime.worker import WorkerStartError

Settings = dict[str, Any]
_FINISHED = "finished.json"
_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


class Trial(NamedTuple):
    """A finished run.

    Attributes:
      settings: the arguments of the run.
      figures: each figure of `federated.scalars` by name, one value per round; NaN in rounds
        without one. Empty if all rounds were lost.
      final: figures of the whole trial, such as its ε, lost rounds included.
    """

    settings: Settings
    figures: Mapping[str, Sequence[float]]
    final: Mapping[str, float]

    def last(self, name: str, values: int = 1) -> float:
        """The mean of the last values of a figure. Rounds without one do not count.

        Args:
          name: the name of the figure.
          values: the number of values to average.

        Returns:
          The mean; NaN if no round has the figure.

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
    """The first candidate with the highest score. A NaN score loses to every number.

    >>> best([1.0, 3.0, 2.0], {1.0: math.nan, 3.0: 0.5, 2.0: 0.75}.get)
    2.0
    """
    scores = ((candidate, score(candidate)) for candidate in candidates)
    return max(scores, key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1])[0]


# Of curves and points in figures, by position: without color they can be told apart too, and a
# curve that coincides with another one shows between its dashes.
STYLES = tuple(zip(("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), "osD^v"))


def style(position: int) -> dict[str, Any]:
    """The color, line style and marker of a method in figures.

    >>> style(1)
    {'color': 'C1', 'linestyle': '--', 'marker': 's', 'markersize': 4}
    """
    line, marker = STYLES[position % len(STYLES)]
    return {"color": f"C{position}", "linestyle": line, "marker": marker, "markersize": 4}


def by_round(axis: Any) -> None:
    """Labels an axis of rounds, which has ticks at whole rounds only."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xlabel("round")


def draw_baseline(axis: Any, accuracy: float, label: str) -> None:
    """Draws what a model that learned nothing reaches, as a line across the panel."""
    axis.axhline(accuracy, color="gray", linestyle=(0, (1, 3)), linewidth=1.2, label=label)


def write_results(path: Path, finished: Iterable[Trial]) -> None:
    """Writes trials as one compact JSON object, to keep next to the program.

    It has the rounds in which the model was evaluated (all rounds if it never was) and nine
    significant digits. Each trial's own folder keeps all rounds in full precision.
    """
    path.write_text(json.dumps({"trials": [_compact(t) for t in finished]}, **_COMPACT) + "\n")


def _compact(trial: Trial) -> dict[str, Any]:
    last = max(map(len, trial.figures.values()), default=0)
    evaluated = {
        r for name in trial.figures if name.startswith("test/") for r in trial.curve(name)[0]
    }
    rounds = sorted(evaluated) or list(range(1, last + 1))
    figures = {name: [_short(v[r - 1]) for r in rounds] for name, v in trial.figures.items()}
    final = {name: _short(value) for name, value in trial.final.items()}
    return {"settings": trial.settings, "rounds": rounds, "figures": figures, "final": final}


def _short(value: float) -> float | int | None:
    """Nine significant digits, enough for float32; `None` for NaN, which JSON lacks."""
    if math.isnan(value):
        return None
    short = float(f"{value:.9g}")
    return int(short) if math.isfinite(short) and short.is_integer() else short


def run_trials(
    plan: Callable[[Sequence[Trial]], Iterable[Settings]],
    train: Callable[[Settings, Path], Mapping[str, float]],
    folder: Path,
    report: Callable[[Sequence[Trial]], Any] = lambda done: None,
) -> list[Trial]:
    """Runs the trials of a plan that are not finished yet.

    Args:
      plan: maps the finished trials to the settings of every trial that is wanted. It is called
        again until nothing is missing, so it can search first and then repeat the best candidate.
      train: runs one trial in a folder, where `federated.monitors` leaves `figures.csv`, and
        returns `Trial.final`. Called again, it resumes the trial.
      folder: gets one folder per trial. The saved states of `federated.train` are deleted as soon
        as a trial is finished; its journal and figures are kept.
      report: called with all finished trials each time one more is finished.

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
    """Settings in words."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _name(settings: Settings) -> str:
    """A folder's name: a readable part, and a hash of all settings."""
    text = json.dumps(settings, sort_keys=True)
    words = "_".join(str(settings[key]) for key in ("method", "rate") if key in settings)
    return f"{words}_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _finish(settings: Settings, path: Path, final: Mapping[str, float]) -> None:
    """Stores the figures of a finished trial; there are none if all its rounds were lost."""
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
    unfinished.write_text(json.dumps(record, **_COMPACT))
    unfinished.rename(path / _FINISHED)


def _finished(path: Path) -> Trial:
    """Reads a finished trial and deletes its saved states, which nothing needs any more."""
    states = path / "secret" / "states"
    if states.exists():
        shutil.rmtree(states)
    return Trial(**json.loads((path / _FINISHED).read_text()))


def parse_arguments(
    description: str, scales: Iterable[str], data_help: str, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses the command line that the programs share.

    Args:
      description: the program's docstring.
      scales: the choices of `--scale`.
      data_help: where the program looks for its data.
      argv: the command line. `None` takes the program's.
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
        help="gets a folder per trial, a table and a figure; the program resumes from it "
        "(default: federated_runs)",
    )
    parser.add_argument(
        "--workers",
        default="",
        metavar="HOST:PORT,…",
        help="TFF workers (`python -m federated.runtime.worker`) that share the clients of a "
        "round (default: one worker on this machine)",
    )
    return parser.parse_args(argv)


def context(workers: str) -> Any:
    """TFF's context: `--workers`, or a worker on this machine that ends with the program."""
    if not workers:
        return contexts.local_context()
    try:
        return contexts.remote_context(workers.split(","))
    except ValueError as error:
        sys.exit(f"--workers {workers}: {error}")


def spread(values: Sequence[float]) -> str:
    """The mean, and ± the standard deviation if there are several values."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:.3f} ± {deviation:.3f}"


@contextlib.contextmanager
def _ending_in_words(args: argparse.Namespace) -> Iterator[None]:
    """Ends the program with the message of a worker's error, without a traceback."""
    try:
        yield
    except (WorkerStartError, WorkerLostError, WorkerMismatchError) as error:
        sys.exit(f"{error}\nRun the same command again to resume.")


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
    """Runs a whole program: parses the command line, runs missing trials, saves table and figure.

    It writes the table and the results after each trial, and before it draws the figure. If the
    data or a worker is missing, it ends with a message and status 1.

    Args:
      name: the name of its folder and files.
      description: see `parse_arguments`.
      data_help: see `parse_arguments`.
      scales: see `parse_arguments`.
      plan: maps the scale and the finished trials to settings, see `run_trials`.
      train: gets the settings, the trial's folder and `--data_dir`, see `run_trials`.
      describe: maps the scale and `--data_dir` to what a reader of the table needs to know, such as
        the sizes of the data. It is printed first, and raises `FileNotFoundError` without data.
      table: maps the finished trials to a table in Markdown.
      plot: maps all trials to a matplotlib figure.
      argv: see `parse_arguments`.
    """
    args = parse_arguments(description, scales, data_help, argv)
    folder = args.output_dir / name / args.scale
    with _ending_in_words(args), context(args.workers):
        try:
            about = describe(args.scale, args.data_dir)
        except FileNotFoundError as error:
            sys.exit(f"--data_dir {args.data_dir}: {error}")
        print(f"{about}\nWriting to {folder}", flush=True)

        def report(done: Sequence[Trial]) -> str:
            text = f"{about}\n\n{table(done)}\n"
            (folder / f"{name}.md").write_text(text)
            write_results(folder / f"{name}.json", done)
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
