"""Trials of a simulation program, each in its folder: what is finished is not run again."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from federated import runtime

Settings = dict[str, Any]
_FINISHED = "finished.json"


class Trial(NamedTuple):
    """A run that is finished.

    Attributes:
      settings: what it was asked to do.
      figures: by name, as `federated.monitor.scalars` has them, for each round; NaN where a round
        has none.
    """

    settings: Settings
    figures: Mapping[str, Sequence[float]]

    def last(self, name: str, values: int = 1) -> float:
        """Mean of the last values of a figure; rounds without one do not count."""
        there = [value for value in self.figures[name] if not math.isnan(value)][-values:]
        return sum(there) / len(there)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The rounds that have a figure, and its values."""
        there = [(r, v) for r, v in enumerate(self.figures[name], 1) if not math.isnan(v)]
        return [r for r, _ in there], [v for _, v in there]


def run_trials(
    plan: Callable[[Sequence[Trial]], Iterable[Settings]],
    train: Callable[[Settings, Path], None],
    folder: Path,
) -> list[Trial]:
    """Runs what a plan wants and is not there yet.

    Args:
      plan: from the finished trials to the settings of all that are wanted. It is
        asked again until nothing is missing, so that it can search first and then repeat the best.
      train: runs one trial in a folder, where `federated.monitor.monitors` leaves `figures.csv`;
        called again, it goes on where it was interrupted.
      folder: of all trials; gets one folder for each.

    Returns:
      The finished trials, in the order of the plan.
    """
    done: list[Trial] = []
    while True:
        wanted = list(plan(done))
        missing = [settings for settings in wanted if settings not in [t.settings for t in done]]
        if not missing:
            return [next(t for t in done if t.settings == settings) for settings in wanted]
        for number, settings in enumerate(missing, 1):
            path = folder / _name(settings)
            if not (path / _FINISHED).exists():
                print(f"[{number}/{len(missing)}] {label(settings)}", flush=True)
                train(settings, path)
                _finish(settings, path)
            done.append(Trial(**json.loads((path / _FINISHED).read_text())))


def label(settings: Settings) -> str:
    """Settings as words."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _name(settings: Settings) -> str:
    """A folder's name: what can be read, and a hash of everything."""
    text = json.dumps(settings, sort_keys=True)
    words = "_".join(str(settings[key]) for key in ("method", "rate") if key in settings)
    return f"{words}_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _finish(settings: Settings, path: Path) -> None:
    with open(path / "figures.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "round"]
    number = {int(row["round"]): row for row in rows}
    figures = {
        name: [float(number.get(r, {}).get(name) or "nan") for r in range(1, max(number) + 1)]
        for name in names
    }
    unfinished = path / f"{_FINISHED}.new"
    unfinished.write_text(json.dumps({"settings": settings, "figures": figures}))
    unfinished.rename(path / _FINISHED)


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
        help="TFF workers (`python -m federated.worker`) that share the clients of a round; "
        "without it a worker of this machine",
    )
    return parser.parse_args(argv)


def context(workers: str) -> Any:
    """Where TFF computes: `--workers`, or a worker of this machine that ends with the program."""
    return runtime.remote_context(workers.split(",")) if workers else runtime.local_context()


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, the latter where there are several values."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:.3f} ± {deviation:.3f}"


def save(table: str, figure: Any, trials: Sequence[Trial], folder: Path, name: str) -> None:
    """Prints the table and writes it, the figure and all results into a folder.

    Args:
      table: Markdown.
      figure: of matplotlib.
      trials: all.
      folder: where to.
      name: of the files.
    """
    print(f"\n{table}\n")
    (folder / f"{name}.md").write_text(f"{table}\n")
    (folder / f"{name}.json").write_text(json.dumps([t._asdict() for t in trials], indent=1))
    figure.savefig(folder / f"{name}.png", dpi=120)
    print(f"Written: {folder / name}.md, .json and .png")


def run_program(
    name: str,
    description: str,
    data_help: str,
    scales: Iterable[str],
    plan: Callable[[str, Sequence[Trial]], Iterable[Settings]],
    train: Callable[[Settings, Path, str | None], None],
    table: Callable[[Sequence[Trial]], str],
    plot: Callable[[Sequence[Trial]], Any],
    argv: Sequence[str] | None = None,
) -> None:
    """A whole program: reads the command line, runs what is missing, saves table and figure.

    Args:
      name: of its folder and files.
      description: see `parse_arguments`, as for `data_help`, `scales` and `argv`.
      data_help: where the data are looked for.
      scales: the choices of `--scale`.
      plan: from the scale and the finished trials, see `run_trials`.
      train: gets the settings, the trial's folder and `--data_dir`, see `run_trials`.
      table: of all trials, in Markdown.
      plot: of all trials, a figure of matplotlib.
      argv: arguments instead of the command line's.
    """
    args = parse_arguments(description, scales, data_help, argv)
    folder = args.output_dir / name / args.scale
    with context(args.workers):
        finished = run_trials(
            lambda done: plan(args.scale, done),
            lambda settings, path: train(settings, path, args.data_dir),
            folder,
        )
    save(table(finished), plot(finished), finished, folder, name)
