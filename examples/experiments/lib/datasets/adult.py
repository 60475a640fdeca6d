"""UCI Adult (census income) as arrays."""

from __future__ import annotations

import csv
import gzip
import os
import pathlib

import numpy as np

from examples.experiments.lib.datasets.images import Arrays

# Published in the data set's description: values of the categorical columns are public, and
# numbers are brought to about [0, 1] by bounds that do not come from the rows.
_BOUNDS = {
    "age": 90.0,
    "education-num": 16.0,
    "capital-gain": 20000.0,
    "capital-loss": 4000.0,
    "hours-per-week": 99.0,
}
_SKIPPED = ("fnlwgt", "education")  # a survey weight, and the same as education-num


def adult(path: str | None, split: str) -> Arrays:
    """Rows of numbers in [0, 1] and indicators, and whether income is above 50K.

    Every fifth row of the file is the test part.

    Args:
      path: of `adult.csv.gz`, with a header; `None` takes the environment's `ADULT_CSV`.
      split: `"train"` or `"test"`.

    Raises:
      FileNotFoundError: if there is no such file.
    """
    path = path or os.environ.get("ADULT_CSV")
    if not path or not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            "The environment's ADULT_CSV must name adult.csv.gz, UCI's census income with a "
            f"header. Received: {path!r}"
        )
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    *names, target = rows[0]
    categories = [n for n in names if n not in _BOUNDS and n not in _SKIPPED]
    indicators = sorted({(n, row[n].strip()) for n in categories for row in rows})
    position = {pair: len(_BOUNDS) + k for k, pair in enumerate(indicators)}
    x = np.zeros([len(rows), len(_BOUNDS) + len(indicators)], np.float32)
    for k, row in enumerate(rows):
        x[k, : len(_BOUNDS)] = [min(float(row[n]) / bound, 1.0) for n, bound in _BOUNDS.items()]
        x[k, [position[n, row[n].strip()] for n in categories]] = 1.0
    y = np.asarray([">50K" in row[target] for row in rows], np.int32)
    in_test = np.arange(len(rows)) % 5 == 0
    chosen = in_test if split == "test" else ~in_test
    return x[chosen], y[chosen]
