"""How experiments report figures: tables in Markdown, means with their spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown.

    >>> print(table(["method", "ε"], [["ADADP", 1.5]]))
    | method | ε |
    | --- | --- |
    | ADADP | 1.5 |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def deviation(values: Sequence[float], digits: int = 4) -> str:
    """The standard deviation, or nothing for a single value."""
    return f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""


def mean(values: Sequence[float], digits: int = 4) -> str:
    """The mean, and ± the standard deviation if there are several values.

    >>> mean([0.25, 0.75], digits=2)
    '0.50 ± 0.35'
    """
    spread = deviation(values, digits)
    return f"{np.mean(values):.{digits}f}" + (f" ± {spread}" if spread else "")
