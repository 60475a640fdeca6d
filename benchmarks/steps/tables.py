"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from benchmarks.core import markdown, number
from benchmarks.steps import catalogue, results

_FIELDS = {"median_ms": "time", "first_step_ms": "first step", "memory_mib": "memory"}
# The ordinary and the private engine of each Keras.
OF_GENERATION = {2: ("keras_sgd", "dpsgd"), 3: ("keras3_sgd", "keras3_dpsgd")}
KINDS_TARGET = 2.0  # the largest ratio of a private step to an ordinary one, on kinds of models
BASELINES = ("keras_sgd", "dpsgd", "keras3_sgd")


def with_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """All rows, with a column for each ratio that is shown."""
    return rows.assign(
        **{f"÷ {name}": results.ratios(rows, name) for name in BASELINES},
        memory_ratio=results.ratios(rows, "keras_sgd", "memory_mib"),
    )


def by_catalogue(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of the catalogue of engines."""
    order = {engine: k for k, engine in enumerate(catalogue.ENGINES)}
    return rows.sort_values("engine", key=lambda names: names.map(order), kind="stable")


def problem_table(rows: pd.DataFrame, runs: Sequence[str] = ()) -> str:
    """Time, memory and ratios of the engines on one problem.

    Args:
      rows: One row per engine, of `with_ratios`.
      runs: All runs. A column shows the number of a row's run if there are several.
    """
    rows = by_catalogue(rows)
    shown = [name for name in BASELINES if rows[f"÷ {name}"].notna().any()]
    done = rows["status"] == "ok"
    # Without a failure, reasons are a column of numbers (NaN), which cannot be added to texts.
    reasons = rows["reason"].astype(object).fillna("")
    time = rows["median_ms"].map(number).where(done, rows["status"] + ": " + reasons)
    spread = rows["lower_ms"].map(number) + " to " + rows["upper_ms"].map(number)
    columns = {
        "engine": "`" + rows["engine"] + "`",
        "ms per step": time,
        "quartiles": spread.where(done, ""),
        **{f"÷ {name}": rows[f"÷ {name}"].map(number) for name in shown},
        "peak MiB": rows["memory_mib"].map(number),
        # Renamed below, since a ratio of time has the same head.
        "memory": rows["memory_ratio"].map(number),
        "first step, s": (rows["first_step_ms"] / 1e3).map(number),
    }
    if len(runs) > 1:
        columns["run"] = rows["run"].map(lambda run: str(list(runs).index(run) + 1))
    return markdown(pd.DataFrame(columns).rename(columns={"memory": "÷ keras_sgd"}))


def growth_table(rows: pd.DataFrame, axis: str) -> str | None:
    """Time and memory of each engine along an axis.

    Args:
      rows: The rows of one model that differ in `axis` only.
      axis: `"batch_size"` or `"width"`.

    Returns:
      A line for each engine with at least two points, or `None` if there is none.
    """
    figures = rows["median_ms"].map(number) + ", " + rows["memory_mib"].map(number)
    cells = rows.assign(cell=figures.where(rows["status"] == "ok", rows["status"]))
    found = cells.pivot(index="engine", columns=axis, values="cell")
    found = found[found.notna().sum(axis=1) > 1].fillna("")
    if found.empty:
        return None
    parameters = rows.groupby(axis)["num_parameters"].first()

    def head(point: int) -> str:
        if axis == "batch_size":
            return f"B = {point}"
        known = pd.notna(parameters[point])
        return f"width {point}" + (f" ({parameters[point]:,.0f} parameters)" if known else "")

    engines = [name for name in catalogue.ENGINES if name in found.index]
    found = found.loc[engines].rename(columns=head)
    found.insert(0, "ms, MiB", [f"`{name}`" for name in engines])
    return markdown(found)


def target_table(rows: pd.DataFrame) -> str:
    """The targets beside the measured ratios."""
    lines = []
    for target in results.TARGETS:
        sign = "≥" if target.at_least else "≤"
        value = target.measured(rows)
        what = _FIELDS[target.field]
        lines.append(
            {
                "ratio": f"{what}: `{target.numerator}` ÷ `{target.denominator}`, "
                f"{target.model} B = {target.batch_size}",
                "must": f"{sign} {target.must:g}",
                "aim": f"{sign} {target.aim:g}",
                "measured": number(value),
                "reached": target.verdict(value),
            }
        )
    return markdown(pd.DataFrame(lines))


def kinds_tables(rows: pd.DataFrame) -> str:
    """A section for each Keras: ordinary and private steps of kinds of models.

    Args:
      rows: Those of `benchmarks.steps.kinds`, whose times are CPU times.
    """
    texts = (_kinds_table(rows, generation) for generation in OF_GENERATION)
    return "\n\n".join(text for text in texts if text is not None)


def _kinds_table(rows: pd.DataFrame, generation: int) -> str | None:
    """The section of one Keras; `None` if it was not measured."""
    plain, private = OF_GENERATION[generation]
    rows = rows.assign(ratio=results.ratios(rows, plain))
    found = rows[rows["engine"] == private]
    if found.empty:
        return None
    ordinary = rows[rows["engine"] == plain].set_index(results.GROUP)
    ordinary = ordinary.loc[pd.MultiIndex.from_frame(found[results.GROUP])]
    columns = {"model": found["model"], "B": found["batch_size"].map(str)}
    for name, of in (("SGD", ordinary.set_index(found.index)), ("DPSGD", found)):
        columns[f"{name}, ms"] = of["median_ms"].map(number)
        columns[f"{name}, quartiles"] = (
            of["lower_ms"].map(number) + " to " + of["upper_ms"].map(number)
        )
    columns["÷"] = found["ratio"].map(number)
    worst = found.loc[found["ratio"].idxmax()]
    reached = int((found["ratio"] <= KINDS_TARGET).sum())
    return (
        f"### Keras {generation}: CPU time of a step\n\n{markdown(pd.DataFrame(columns))}\n\n"
        f"{reached} of {len(found)} ratios are at most {KINDS_TARGET:g}; the median is "
        f"{number(found['ratio'].median())}, the largest {number(worst['ratio'])} "
        f"({worst['model']}). Other processes kept up to {found['others_load'].max():g} cores busy."
    )
