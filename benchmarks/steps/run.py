r"""Measures time and memory of training steps: this library, Keras, TF Privacy and other peers.

No privacy claim: the data is random. Each engine runs in a process of its own; they take turns, and
one computes at a time. One file collects the results of several runs; ratios stay within a run.

    python -m benchmarks.steps.run --models mlp,cnn --output benchmarks/steps/results.json
    python -m benchmarks.steps.run --models mlp --batch_sizes 50,100,200,400 --widths 1,2,4
    python -m benchmarks.steps.run --engines keras_sgd,dpsgd --peers    # after `make bench-peers`
    python -m benchmarks.steps.run --from_json benchmarks/steps/results.json \
        --report docs/performance.md
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
from collections.abc import Iterator

from benchmarks.core import names, parser, say, sizes
from benchmarks.steps import catalogue, report, results, tables
from benchmarks.steps.problems import PROBLEMS


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--models", type=names(PROBLEMS), default=["mlp", "cnn"], help="names, or all")
    add("--engines", type=names(catalogue.ENGINES), default=list(catalogue.OWN), help="or all")
    add("--peers", action="store_true", help="also Opacus, JAX-Privacy and their baselines")
    add("--batch_sizes", type=sizes, help="such as 50,100,200 (default: each model's own)")
    add("--widths", type=sizes, default=[1], help="factors of the hidden sizes (mlp alone)")
    add("--rounds", type=int, default=7, help="turns of each engine")
    add("--steps", type=int, default=10, help="timed steps in a turn")
    add("--timeout", type=float, default=900, help="seconds to wait for an answer")
    add("--output", type=pathlib.Path, help="JSON file; keeps earlier results")
    add("--plot", type=pathlib.Path, help="PNG file")
    add("--report", type=pathlib.Path, help="Markdown file; the plot is written beside it")
    add(
        "--from_json",
        type=pathlib.Path,
        help="read the results from this file instead of measuring",
    )
    return arguments.parse_args()


def grid(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Model, batch size and width of each group to measure."""
    for model in args.models:
        widths = args.widths if PROBLEMS[model].scalable else [1]
        for batch_size in args.batch_sizes or [PROBLEMS[model].batch_size]:
            for width in widths:
                yield model, batch_size, width


def measure_all(args: argparse.Namespace) -> results.Results:
    """Measures the grid; writes the file and prints a table after each group."""
    from benchmarks.steps.measure import measure

    engines = list(dict.fromkeys(args.engines + (list(catalogue.PEERS) if args.peers else [])))
    engines.sort(key=list(catalogue.ENGINES).index)
    settings = {"rounds": args.rounds, "steps": args.steps}
    options = {**settings, "timeout": args.timeout, "say": say}
    run = results.Run(settings, args.output)
    for group in grid(args):
        model, batch_size, width = group
        title = f"{model}, B = {batch_size}" + (f", width {width}" if width > 1 else "")
        say(f"-- {title}")
        rows = run.measure(*group, functools.partial(measure, engines, *group, **options))
        shown = tables.with_ratios(results.frame({"rows": rows}))
        print(f"\n### {title}\n\n{tables.problem_table(shown)}\n", flush=True)
    return run.results


def main() -> None:
    """Measures, or reads earlier results; then draws and writes."""
    args = parse_args()
    found = results.read(args.from_json) if args.from_json else measure_all(args)
    plot = args.plot or (args.report and args.report.with_suffix(".png"))
    if plot:
        from benchmarks.steps import (
            plots,  # after the measurements: workers inherit the peak memory
        )

        plots.draw(found, plot)
    if args.report:
        source = args.from_json or args.output
        shown = pathlib.Path(os.path.relpath(plot, args.report.parent)).as_posix()
        report.write(found, args.report, source.name if source else "a run", shown)


if __name__ == "__main__":
    main()
