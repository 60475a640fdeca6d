"""Writes the performance report: every number comes out of the results file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pandas as pd

from benchmarks.core import markdown, number
from benchmarks.steps import catalogue, problems, results, tables

INTRODUCTION = """\
# Performance

What a training step costs in time and in memory. `python -m benchmarks.steps.run --report` wrote
this page from four files: the measurements in `{source}` and `kinds.json`, and the sections in
`variants.md` and `../federated/report.md`, which are written by hand. Change those, not this page.

- A step is what `fit` does for one batch: forward, backward and update. Private engines also clip
  each example's gradient to norm 1 and add noise of multiplier 1. The data is random, one batch in
  memory that is used again and again, so reading data costs nothing here.
- Each engine runs in its own process, with the number of threads that its framework chooses.
  After a warm-up the engines take turns, one computing at a time, so that disturbances on the
  machine affect all of them alike. Times are medians over the steps, with the quartiles beside
  them.
- Ratios (÷) compare engines within one run, never across runs. They say more than milliseconds,
  which depend on this machine.
- Memory is the peak resident size of the whole process, libraries included. Those alone need
  {start}.
- The first step builds and compiles; the times do not include it.{engine_notes}
- The table of runs shows how many cores other processes kept busy meanwhile. It should be near 0:
  PyTorch's threads spin while they wait for each other, and become many times slower on a machine
  that is not idle.
- No GPU was available, so nothing here was measured on one. Tests with several replicas run on
  logical CPUs.
"""
ENGINE_NOTES = {
    "adadps_public": "includes the gradient of a public batch of the same size in every step."
}


def _runs(found: results.Results, rows: pd.DataFrame) -> str:
    load = rows.groupby("run")["others_load"].max()
    lines = []
    for k, (run, about) in enumerate(found["runs"].items()):
        machine, settings = about["machine"], about["settings"]
        lines.append(
            {
                "run": f"{k + 1}: {about['date']}",
                "processor": machine["cpu"],
                "cores": str(machine["cores"]),
                "memory": f"{machine['memory_gib']:g} GiB",
                "used by others": f"{load[run]:g}",
                "rounds × steps": f"{settings['rounds']} × {settings['steps']}",
            }
        )
    return markdown(pd.DataFrame(lines))


def _versions(found: results.Results) -> str:
    seen: dict[str, set[str]] = {}
    for row in found["rows"]:
        for name, version in row.get("versions", {}).items():
            seen.setdefault("Python" if name == "python" else name, set()).add(version)
    return ", ".join(f"{name} {' and '.join(sorted(seen[name]))}" for name in sorted(seen))


def _start(rows: pd.DataFrame) -> str:
    """The memory of each family before it makes a model."""
    family = rows["engine"].map(lambda engine: catalogue.ENGINES[engine][0])
    spans = []
    for name, needs in rows["start_mib"].dropna().groupby(family):
        least, most = number(needs.min()), number(needs.max())
        spans.append(f"{least if least == most else f'{least} to {most}'} MiB ({name})")
    return ", ".join(spans) or "nothing measured yet"


def _problems(rows: pd.DataFrame, runs: Sequence[str]) -> list[str]:
    """A table for each model: at its own batch size, or at those that were measured."""
    parts = []
    for name, problem in problems.PROBLEMS.items():
        groups = dict(list(rows[rows["model"] == name].groupby(["batch_size", "width"])))
        usual = (problem.batch_size, 1)
        for key in [usual] if usual in groups else sorted(groups):
            chosen = groups[key]
            title = f"### {name}, B = {key[0]}" + (f", width {key[1]}" if key[1] > 1 else "")
            about = problem.description[0].upper() + problem.description[1:]
            known = chosen["num_parameters"].dropna()
            about += "." if known.empty else f"; {known.iloc[0]:,.0f} parameters."
            parts += [title, about, tables.problem_table(chosen, runs)]
    return parts


def _growth(rows: pd.DataFrame) -> list[str]:
    parts = []
    for axis, other, words in (
        ("batch_size", "width", "batch size"),
        ("width", "batch_size", "width of the hidden layers"),
    ):
        for (model, value), chosen in rows.groupby(["model", other]):
            table = tables.growth_table(chosen, axis)
            if table is not None:
                fixed = f"B = {value}" if other == "batch_size" else f"width {value}"
                parts += [f"### {model} ({fixed}): growth with the {words}", table]
    return parts


KINDS = catalogue.ROOT / "benchmarks" / "steps" / "kinds.json"
ABOUT_KINDS = """\
## Fourteen kinds of models

Models after Keras's own examples, with their ordinary losses and metrics. Both optimizers are in
one process and take turns; the times are CPU times of all threads, which other processes disturb
less. `python -m benchmarks.steps.kinds --output benchmarks/steps/kinds.json` measured them, once
with each Keras."""
# The figures of `variants` and of some runs, and those of `benchmarks/federated`, with the
# conclusions: written by hand.
VARIANTS = catalogue.ROOT / "benchmarks" / "steps" / "variants.md"
FEDERATED = catalogue.ROOT / "benchmarks" / "federated" / "report.md"


def make(found: results.Results, source: str, plot: str | None) -> str:
    """Makes the report.

    Args:
      found: The results.
      source: The name of their file.
      plot: The name of the plot's file beside the report, if there is one.

    Returns:
      Markdown.
    """
    everything = tables.with_ratios(results.frame(found))
    rows = results.latest(everything)
    used = set(rows["engine"])
    engines = [
        f"- `{name}`: {what}" for name, (_, what) in catalogue.ENGINES.items() if name in used
    ]
    notes = "".join(f"\n- `{name}` {note}" for name, note in ENGINE_NOTES.items() if name in used)
    head = INTRODUCTION.format(source=source, start=_start(everything), engine_notes=notes)
    parts = [head.rstrip()]
    parts += ["## Machine and versions", _runs(found, everything), _versions(found) + "."]
    parts += ["## Targets", "Ratios within one run; `reached` says which bound holds."]
    parts += [tables.target_table(everything)]
    parts += ["## Engines", "\n".join(engines)]
    parts += ["## Models", *([f"![Ratios to keras_sgd]({plot})"] if plot else [])]
    parts += _problems(rows, list(found["runs"]))
    growth = _growth(rows)
    parts += ["## Growth", *growth] if growth else []
    if KINDS.exists():
        parts += [ABOUT_KINDS, tables.kinds_tables(results.frame(results.read(KINDS)))]
    parts += [path.read_text(encoding="utf-8").rstrip() for path in (VARIANTS, FEDERATED)]
    return "\n\n".join(parts) + "\n"


def write(found: results.Results, path: pathlib.Path, source: str, plot: str | None) -> None:
    """Writes the report to a file; see `make`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make(found, source, plot), encoding="utf-8")
