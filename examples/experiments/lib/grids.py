"""Tunes methods on grids of equal size, repeats the best with several seeds, and shows the results.

Each method has the same number of candidates. Each candidate is run with seed 0, and the one with
the best final figure is run with further seeds. The figure is that of the test set, as in the
papers; ε does not include the cost of this choice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np

from examples.experiments.lib import report
from examples.experiments.lib.harness import Experiment, Trial

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """Methods that are compared with each other.

    Attributes:
      common: The settings that all trials share; "part" is the name in the table.
      candidates: The settings to choose from, by method.
      metric: The figure of the result to compare.
      larger_is_better: Whether larger values of the figure are better.
      seeds: The number of runs of each method's best candidate, for all methods or by method.
      tuning: Settings that replace those of `common` during tuning, such as fewer "epochs".
    """

    common: Mapping[str, Any]
    candidates: Mapping[str, Sequence[Mapping[str, Any]]]
    metric: str
    larger_is_better: bool = True
    seeds: int | Mapping[str, int] = 3
    tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def settings(self, method: str, candidate: Mapping[str, Any], seed: int) -> Settings:
        """The settings of a final trial."""
        return {**self.common, "method": method, **candidate, "seed": seed}

    def seeds_of(self, method: str) -> range:
        """The seeds of a method's final trials."""
        return range(self.seeds if isinstance(self.seeds, int) else self.seeds[method])

    def plan(self, trials: Sequence[Trial]) -> list[Settings]:
        """The wanted trials, given the finished ones."""
        wanted = []
        for method, candidates in self.candidates.items():
            grid = [{**self.settings(method, c, 0), **self.tuning} for c in candidates]
            if len(grid) > 1:
                wanted += grid
            best = self.best(method, trials)
            if best is not None:
                wanted += [self.settings(method, best, seed) for seed in self.seeds_of(method)]
        return wanted

    def best(self, method: str, trials: Sequence[Trial]) -> Mapping[str, Any] | None:
        """The best candidate of a method, or `None` before all of them are done."""
        candidates = self.candidates[method]
        if len(candidates) == 1:
            return candidates[0]
        scores = []
        for candidate in candidates:
            wanted = {**self.settings(method, candidate, 0), **self.tuning}
            done = [t for t in trials if t.settings == wanted]
            if not done:
                return None
            scores.append(final(done[0], self.metric))
        # A run that diverged is not the best.
        worst_last = [s if np.isfinite(s) else np.inf for s in self._signed(scores)]
        return candidates[int(np.argmin(worst_last))]

    def finals(self, trials: Sequence[Trial]) -> dict[str, list[Trial]]:
        """The finished runs of each method's best candidate, by method; the best method first."""
        found = {}
        for method in self.candidates:
            best = self.best(method, trials)
            if best is None:
                continue
            wanted = [self.settings(method, best, seed) for seed in self.seeds_of(method)]
            found[method] = [t for t in trials if t.settings in wanted]
        means = {
            method: self._signed([mean(runs, self.metric)])[0]
            for method, runs in found.items()
            if runs
        }
        return {method: found[method] for method in sorted(means, key=means.get)}

    def _signed(self, scores: Sequence[float]) -> list[float]:
        return [-s if self.larger_is_better else s for s in scores]


def plan(parts: Sequence[Part], trials: Sequence[Trial]) -> list[Settings]:
    """The trials of all parts."""
    return [settings for part in parts for settings in part.plan(trials)]


def final(trial: Trial, metric: str) -> float:
    """A figure at the end of the run."""
    return float(trial.result[metric][-1])


def mean(runs: Sequence[Trial], metric: str) -> float:
    """The mean of a figure at the end of some runs; NaN without any."""
    return float(np.mean([final(run, metric) for run in runs])) if runs else float("nan")


def cell(runs: Sequence[Trial], metric: str, rate: float | None) -> str:
    """The mean over runs ± their standard deviation, with the rate chosen; empty without runs."""
    if not runs:
        return ""
    chosen = "" if rate is None else f" ({rate:g})"
    return report.mean([final(run, metric) for run in runs]) + chosen


def table(parts: Sequence[Part], trials: Sequence[Trial], titles: Mapping[str, str]) -> str:
    """Mean and spread of each method's best candidate, in Markdown."""
    columns = "part, method, chosen, figure, mean, std, best run's epoch, ε, seeds".split(", ")
    rows = []
    for part in parts:
        for method, runs in part.finals(trials).items():
            values = [final(t, part.metric) for t in runs]
            best = part.best(method, trials) or {}
            curve = np.mean([t.result[part.metric] for t in runs], axis=0)
            at = np.argmax(curve) if part.larger_is_better else np.argmin(curve)
            epsilon = runs[0].result["epsilon"][-1]
            rows.append(
                [
                    part.common["part"],
                    titles[method],
                    ", ".join(f"{k} {v:g}" for k, v in best.items()),
                    part.metric,
                    f"{np.mean(values):.5f}",
                    report.deviation(values, digits=5),
                    f"{curve[at]:.5f} (epoch {runs[0].result['epochs'][at]})",
                    "–" if epsilon is None else f"{epsilon:.2f}",
                    len(runs),
                ]
            )
    return report.table(columns, rows)


def plot(parts: Sequence[Part], trials: Sequence[Trial], titles: Mapping[str, str]) -> Any:
    """A panel for each part: the figure after each epoch, mean and range over seeds."""
    import matplotlib.pyplot as plt

    names = list(collections.OrderedDict.fromkeys(m for p in parts for m in p.candidates))
    colours = {name: plt.get_cmap("tab20")(k % 20) for k, name in enumerate(names)}
    finished = {part.common["part"]: part for part in parts if part.finals(trials)}
    columns = max(1, min(3, len(finished)))
    rows = -(-len(finished) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 5 * rows), squeeze=False)
    for axis in axes.flat[len(finished) :]:
        axis.remove()
    for axis, part in zip(axes.flat, finished.values()):
        for method, runs in part.finals(trials).items():
            curves = np.asarray([t.result[part.metric] for t in runs])
            at = runs[0].result["epochs"]
            axis.plot(at, curves.mean(0), ".-", label=titles[method], color=colours[method])
            axis.fill_between(at, curves.min(0), curves.max(0), alpha=0.2, color=colours[method])
        axis.set(title=part.common["part"], xlabel="epoch", ylabel=f"test {part.metric}")
        axis.legend(fontsize=7)
    figure.tight_layout()
    return figure


def experiment(
    name: str,
    description: str,
    parts: Callable[[str], Sequence[Part]],
    train: Callable[[dict[str, Any], str | None], dict[str, Any]],
    titles: Mapping[str, str],
    table: Callable[..., str] = table,
    plot: Callable[..., Any] = plot,
) -> Experiment:
    """Makes an experiment from a list of parts.

    Args:
      name: See `Experiment`.
      description: See `Experiment`.
      parts: Maps a scale to its parts; all settings hold the scale as "scale".
      train: See `Experiment`.
      titles: The names of the methods in the table and the figure.
      table: Makes the table from parts, trials and titles.
      plot: Makes the figure from these.
    """

    def of(trials: Sequence[Trial]) -> Sequence[Part]:
        return parts(trials[0].settings["scale"])

    return Experiment(
        name,
        description,
        plan=lambda scale, trials: plan(parts(scale), trials),
        train=train,
        table=lambda trials: table(of(trials), trials, titles),
        plot=lambda trials: plot(of(trials), trials, titles),
    )
