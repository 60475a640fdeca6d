"""Draws the ratios to ordinary Keras: time above, memory below."""

from __future__ import annotations

import pathlib

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import ticker

from benchmarks.steps import problems, results, tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PANELS = (
    ("÷ keras_sgd", "time of a step ÷ keras_sgd"),
    ("memory_ratio", "peak memory ÷ keras_sgd"),
)


def draw(found: results.Results, path: pathlib.Path) -> None:
    """Writes a PNG with a group of bars for each model and a bar for each engine.

    Args:
      found: The results. Each model is shown at its own batch size, or at its smallest one.
      path: The file to write.
    """
    rows = tables.by_catalogue(results.latest(tables.with_ratios(results.frame(found))))
    rows = rows[(rows["status"] == "ok") & (rows["width"] == 1)]
    usual = rows["model"].map(lambda name: problems.PROBLEMS[name].batch_size)
    rows = rows.assign(unusual=rows["batch_size"] != usual)
    chosen = rows.sort_values(["unusual", "batch_size"]).groupby("model")["batch_size"].first()
    rows = rows[rows["batch_size"] == rows["model"].map(chosen)]
    models = [name for name in problems.PROBLEMS if name in chosen]
    engines = [name for name in rows["engine"].unique() if name != "keras_sgd"]
    figure, axes = plt.subplots(2, 1, figsize=(12, 8), constrained_layout=True)
    for ax, (column, title) in zip(axes, PANELS):
        ratios = rows.pivot(index="model", columns="engine", values=column).reindex(models)
        _bars(ax, ratios.reindex(columns=engines))
        ax.set_title(title)
        labels = [f"{model}\nB = {chosen[model]}" for model in models]
        ax.set_xticks(range(len(models)), labels)
    if engines:
        axes[0].legend(ncols=2, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(ax: plt.Axes, ratios: pd.DataFrame) -> None:
    """Bars that start at 1 on a logarithmic axis; ratios that were not measured have none."""
    colours, width = plt.get_cmap("tab20").colors, 0.85 / max(ratios.shape[1], 1)
    for k, (engine, values) in enumerate(ratios.items()):
        at = np.arange(len(values)) + (k + 0.5) * width - 0.425
        there = values.notna().to_numpy()
        heights = values[there] - 1
        ax.bar(at[there], heights, width, 1, label=engine, color=colours[k % len(colours)])
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_yscale("log")
    ax.set_ylim(top=max(2, ax.get_ylim()[1]))
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    ax.grid(axis="y", alpha=0.3)
