"""What the benchmarks share: command lines, the machine and its load, numbers and tables."""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence

import pandas as pd

IDLE = 0.1  # cores that other processes may use without spoiling a measurement


def parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help shows a program's docstring unchanged."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `known`; "all" stands for all of them."""

    def parse(text: str) -> list[str]:
        found = list(known) if text == "all" else text.split(",")
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return found

    return parse


def sizes(text: str) -> list[int]:
    """Parses comma-separated integers, all at least 1."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected integers of at least 1, got {text!r}")
    return found


def say(text: str) -> None:
    """Prints progress to stderr; stdout has the tables."""
    print(text, file=sys.stderr, flush=True)


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def describe_machine() -> dict:
    """Processor, usable cores, memory and system; no names and no paths."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "cpu": found.group(1).strip() if found else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


class OthersLoad:
    """Measures how many cores other processes keep busy, on average since it was created.

    That is the processor time of the whole machine minus that of this process and of its children,
    which must have ended by then.
    """

    def __init__(self):
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        # user nice system idle iowait irq softirq steal
        fields = [int(word) for word in _read("/proc/stat").split("\n")[0].split()[1:9]]
        idle = sum(fields[3:5])
        everybody = (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), everybody, sum(os.times()[:4])

    def measure(self) -> float:
        """Returns the number of cores; a few hundredths on an idle machine."""
        elapsed, everybody, own = (b - a for a, b in zip(self._start, self._now()))
        load = round(max(0.0, (everybody - own) / elapsed), 2)
        if load > IDLE:
            say(f"Other processes kept {load} cores busy: do not trust these figures.")
        return load


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return round(lower, 4), round(median, 4), round(upper, 4)


def number(value: float | None) -> str:
    """About three digits, with a separator of thousands; empty for a missing value."""
    if value is None or pd.isna(value):
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def median_and_quartiles(values: Sequence[float]) -> tuple[str, str]:
    """Two cells of a table: the median, and "lower to upper"."""
    lower, median, upper = quartiles(values)
    return number(median), f"{number(lower)} to {number(upper)}"


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table of text cells; all columns but the first are aligned to the right.

    >>> print(markdown(pd.DataFrame({"engine": ["sgd"], "ms": ["1.25"]})))
    | engine | ms |
    | --- | ---: |
    | sgd | 1.25 |
    """
    rows = [list(frame.columns), ["---", *["---:"] * (frame.shape[1] - 1)], *frame.to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
