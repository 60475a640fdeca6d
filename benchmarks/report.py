"""Writes the performance report: every number comes out of the results file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from benchmarks import catalogue, problems, results, tables

INTRODUCTION = """\
# Performance

What a training step costs in time and in memory. `benchmarks/run.py` wrote this page from
`{source}`; change it there, not here.

- A step is what `fit` does for one batch: forward, backward and update, and for private engines
  clipping each example's gradient to norm 1 and noise of multiplier 1. The data is random, one
  batch in memory that is used again and again, so reading data costs nothing here.
- Each engine runs in a process of its own, with the threads that its framework chooses. After
  warming up the engines take turns, so that what else happens on the machine falls on all alike;
  one computes at a time. Times are medians over the steps, with the quartiles beside them.
- Ratios (÷) compare engines within one run, never across runs. They say more than milliseconds,
  which belong to this machine.
- Memory is the peak resident size of the whole process, libraries included. Those alone need
  {start}.
- The first step builds and compiles; it is not part of the times.
- The table of runs says how many cores others kept busy meanwhile. It should be near 0: PyTorch's
  threads spin while they wait for each other, and become many times slower on a machine that is
  not idle.
- `adadps_public` counts the gradient of a public batch of the same size in every step.
"""


def _runs(found: results.Results) -> str:
    lines = []
    for k, (run, about) in enumerate(found["runs"].items()):
        machine, settings = about["machine"], about["settings"]
        load = max(row["others_load"] for row in found["rows"] if row["run"] == run)
        lines.append(
            [
                f"{k + 1}: {about['date']}",
                machine["cpu"],
                str(machine["cores"]),
                f"{machine['memory_gib']:g} GiB",
                f"{load:g}",
                f"{settings['rounds']} × {settings['steps']}",
            ]
        )
    head = ["run", "processor", "cores", "memory", "used by others", "rounds × steps"]
    return tables.table(head, lines)


def _versions(found: results.Results) -> str:
    seen: dict[str, set[str]] = {}
    for row in found["rows"]:
        for name, version in row.get("versions", {}).items():
            seen.setdefault("Python" if name == "python" else name, set()).add(version)
    return ", ".join(f"{name} {' and '.join(sorted(seen[name]))}" for name in sorted(seen))


def _start(found: results.Results) -> str:
    """What each family needs before it makes a model."""
    needs: dict[str, list[float]] = {}
    for row in found["rows"]:
        if "start_mib" in row:
            needs.setdefault(catalogue.ENGINES[row["engine"]][0], []).append(row["start_mib"])
    spans = []
    for family in sorted(needs):
        least, most = (tables.number(f(needs[family])) for f in (min, max))
        spans.append(f"{least if least == most else f'{least} to {most}'} MiB ({family})")
    return ", ".join(spans) or "nothing measured yet"


def _problems(found: results.Results, rows: Sequence[dict]) -> list[str]:
    """A table for each model: at its own batch size, or at those that there are."""
    parts = []
    for name, problem in problems.PROBLEMS.items():
        of_model = [row for row in rows if row["model"] == name]
        usual = (name, problem.batch_size, 1)
        wanted = {results.problem_of(row) for row in of_model}
        for key in [usual] if usual in wanted else sorted(wanted):
            chosen = [row for row in of_model if results.problem_of(row) == key]
            sizes = [row["num_parameters"] for row in chosen if "num_parameters" in row]
            title = f"### {name}, B = {key[1]}" + (f", width {key[2]}" if key[2] > 1 else "")
            about = problem.description[0].upper() + problem.description[1:]
            about += f"; {sizes[0]:,} parameters." if sizes else "."
            table = tables.problem_table(found, chosen, with_run=len(found["runs"]) > 1)
            parts += [title, about, table]
    return parts


def _growth(rows: Sequence[dict]) -> list[str]:
    parts = []
    for axis, other, words in (
        ("batch_size", "width", "batch size"),
        ("width", "batch_size", "width of the hidden layers"),
    ):
        keys = sorted({(row["model"], row[other]) for row in rows})
        for model, value in keys:
            chosen = [row for row in rows if (row["model"], row[other]) == (model, value)]
            table = tables.growth_table(chosen, axis)
            if table is not None:
                fixed = f"B = {value}" if other == "batch_size" else f"width {value}"
                parts += [f"### {model} ({fixed}): growth with the {words}", table]
    return parts


# What `benchmarks/federated_scale.py` measured, with the conclusions: written by hand.
FEDERATED = pathlib.Path(__file__).with_name("federated.md")


def make(found: results.Results, source: str, plot: str | None) -> str:
    """The report.

    Args:
      found: the results.
      source: the name of their file.
      plot: the name of the plot's file beside the report, if there is one.

    Returns:
      Markdown.
    """
    rows = results.latest(found)
    engines = [
        [f"`{name}`", what]
        for name, (_, what) in catalogue.ENGINES.items()
        if any(row["engine"] == name for row in rows)
    ]
    parts = [INTRODUCTION.format(source=source, start=_start(found)).rstrip()]
    parts += ["## Machine and versions", _runs(found), _versions(found) + "."]
    parts += ["## Targets", "Ratios within one run; `reached` says which bound holds."]
    parts += [tables.target_table(found)]
    parts += ["## Engines", "\n".join(f"- {name}: {what}" for name, what in engines)]
    parts += ["## Models", *([f"![Ratios to keras_sgd]({plot})"] if plot else [])]
    parts += _problems(found, rows)
    growth = _growth(rows)
    parts += ["## Growth", *growth] if growth else []
    parts += [FEDERATED.read_text(encoding="utf-8").rstrip()]
    return "\n\n".join(parts) + "\n"


def write(found: results.Results, path: pathlib.Path, source: str, plot: str | None) -> None:
    """Writes the report to a file; see `make`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make(found, source, plot), encoding="utf-8")
