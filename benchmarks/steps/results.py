"""The results file: runs, rows, and ratios that never compare rows of different runs.

    {"runs": {run id: {"date", "machine", "settings"}},
     "rows": [{"run", "model", "batch_size", "width", "engine", "status", ...}]}

A group is what was measured in alternation: the rows of one run with one model, batch size and
width.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable

import pandas as pd

from benchmarks.core import OthersLoad, describe_machine

Results = dict  # with the keys "runs" and "rows"
PROBLEM = ["model", "batch_size", "width"]
GROUP = ["run", *PROBLEM]


def read(path: pathlib.Path) -> Results:
    """The results in a file; empty ones if the file does not exist."""
    if not path.exists():
        return {"runs": {}, "rows": []}
    return json.loads(path.read_text(encoding="utf-8"))


def write(results: Results, path: pathlib.Path) -> None:
    """Writes the results, one row per line."""
    runs = json.dumps(results["runs"], sort_keys=True)
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in results["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"runs": {runs},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")


def frame(results: Results) -> pd.DataFrame:
    """The rows as a table; figures that a row lacks are NaN."""
    figures = ["median_ms", "lower_ms", "upper_ms", "first_step_ms", "memory_mib", "start_mib"]
    columns = [*GROUP, "engine", "status", "reason", "num_parameters", *figures]
    rows = pd.DataFrame(results["rows"])
    return rows.reindex(columns=[*columns, *rows.columns.difference(columns)])


def _engines(rows: pd.DataFrame, keys: list[str]) -> pd.Series:
    return rows.groupby(keys)["engine"].agg(set)


def merge(old: Results, new: Results) -> Results:
    """Joins two results, without the groups of `old` whose engines `new` has measured again.

    A group is kept whole or not at all, because its rows are compared with each other.

    Args:
      old: Earlier results.
      new: Later results, of other runs.

    Returns:
      The results, new rows last; runs without rows are left out.
    """
    rows = list(old["rows"])
    if rows and new["rows"]:
        again = _engines(frame(new), PROBLEM)
        outdated = {
            group
            for group, engines in _engines(frame(old), GROUP).items()
            if engines <= again.get(group[1:], set())
        }
        rows = [row for row in rows if tuple(row[key] for key in GROUP) not in outdated]
    rows += new["rows"]
    runs, used = {**old["runs"], **new["runs"]}, {row["run"] for row in rows}
    return {"runs": {run: runs[run] for run in sorted(runs) if run in used}, "rows": rows}


class Run:
    """A run in progress: measures one group after the other and keeps the file up to date.

    Args:
      settings: What the figures depend on, the same for all groups.
      path: The file, whose earlier results are kept; `None` for none.
    """

    def __init__(self, settings: dict, path: pathlib.Path | None):
        now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        about = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "machine": describe_machine()}
        self._id, self._path = now.isoformat(), path
        self._new: Results = {"runs": {self._id: {**about, "settings": settings}}, "rows": []}
        self._earlier: Results = read(path) if path else {"runs": {}, "rows": []}

    @property
    def results(self) -> Results:
        """The earlier results and those of this run."""
        return merge(self._earlier, self._new)

    def measure(
        self, model: str, batch_size: int, width: int, measure: Callable[[], list[dict]]
    ) -> list[dict]:
        """Measures a group, with the load of other processes meanwhile, and writes the file.

        Args:
          model: A model.
          batch_size: B.
          width: The factor of its hidden sizes.
          measure: Returns a row for each engine.

        Returns:
          The rows as the file has them.
        """
        load = OthersLoad()
        rows = measure()
        group = {"run": self._id, "model": model, "batch_size": batch_size, "width": width}
        group["others_load"] = load.measure()
        rows = [{**group, **row} for row in rows]
        self._new["rows"] += rows
        if self._path:
            write(self.results, self._path)
        return rows


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest row of each engine and problem; its column "run" says where it comes from."""
    newest_last = rows.sort_values("run", kind="stable")
    return newest_last.drop_duplicates([*PROBLEM, "engine"], keep="last")


def ratios(rows: pd.DataFrame, engine: str, field: str = "median_ms") -> pd.Series:
    """Each row's figure divided by that of an engine in the same group.

    Args:
      rows: All rows.
      engine: The denominator.
      field: `"median_ms"`, `"first_step_ms"` or `"memory_mib"`.

    Returns:
      NaN where either was not measured in that run.
    """
    denominators = rows[rows["engine"] == engine].drop_duplicates(GROUP).set_index(GROUP)[field]
    return rows[field] / denominators.reindex(pd.MultiIndex.from_frame(rows[GROUP])).to_numpy()


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio that the library should reach.

    Args:
      numerator: An engine.
      denominator: An engine.
      model: A model.
      batch_size: B.
      must: The bound that must hold.
      aim: The bound to aim for.
      field: The figure to compare.
      at_least: Whether the bounds are lower bounds.
    """

    numerator: str
    denominator: str
    model: str
    batch_size: int
    must: float
    aim: float
    field: str = "median_ms"
    at_least: bool = False

    def measured(self, rows: pd.DataFrame) -> float | None:
        """The newest measured ratio; `None` if no run has both engines."""
        wanted = (
            (rows["engine"] == self.numerator)
            & (rows["model"] == self.model)
            & (rows["batch_size"] == self.batch_size)
            & (rows["width"] == 1)
        )
        found = rows.assign(ratio=ratios(rows, self.denominator, self.field))[wanted]
        found = found.dropna(subset=["ratio"]).sort_values("run")
        return None if found.empty else float(found["ratio"].iloc[-1])

    def verdict(self, value: float | None) -> str:
        """`"aim"`, `"must"`, `"missed"` or `"not measured"`."""
        if value is None:
            return "not measured"
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if (value >= bound) if self.at_least else (value <= bound):
                return name
        return "missed"


MLP, CNN, TRANSFORMER = ("mlp", 250), ("cnn", 100), ("transformer", 64)
TARGETS = (
    Target("tfp_vectorized", "dpsgd", *MLP, must=80, aim=150, at_least=True),
    Target("tfp_vectorized", "dpsgd", *CNN, must=70, aim=100, at_least=True),
    Target("dpsgd", "keras_sgd", *MLP, must=3.0, aim=1.8),
    Target("dpsgd", "keras_sgd", *CNN, must=2.0, aim=1.3),
    Target("dpsgd", "opacus_ghost", *MLP, must=1.0, aim=0.8),
    Target("dpsgd", "opacus_ghost", *CNN, must=1.0, aim=0.8),
    Target("adadps_fixed", "dpsgd", *MLP, must=1.3, aim=1.1),
    Target("adadp", "dpsgd", *MLP, must=1.2, aim=1.05),
    Target("adadp", "dpsgd", *CNN, must=1.2, aim=1.05),
    *(
        Target(f"keras3_dpsgd{xla}", f"keras3_sgd{xla}", *problem, must=must, aim=must - 0.2)
        for xla in ("", "_xla")
        for problem, must in ((MLP, 1.8), (CNN, 1.4), (TRANSFORMER, 1.3))
    ),
    *(
        Target(
            *(f"keras3_dpsgd{xla}", f"keras3_sgd{xla}", *problem),
            must=4.0,
            aim=3.0,
            field="first_step_ms",
        )
        for xla in ("", "_xla")
        for problem in (MLP, CNN, TRANSFORMER)
    ),
    Target("dpsgd", "keras_sgd", *MLP, must=1.5, aim=1.2, field="memory_mib"),
    Target("dpsgd", "keras_sgd", *CNN, must=1.5, aim=1.2, field="memory_mib"),
)
