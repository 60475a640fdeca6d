"""A search for the eye: TensorBoard's table of hyperparameters, and a plot."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf


def write_hparams(folder: str | Path, shown: Sequence[dict[str, Any]], objective: str) -> None:
    """Writes TensorBoard's HParams log of the candidates that may be shown.

    Args:
      folder: gets one folder for each.
      shown: their outcomes; those without a score are left out.
      objective: what the score is called.
    """
    from tensorboard.plugins.hparams import api

    for outcome in shown:
        if outcome["score"] is None:
            continue
        with tf.summary.create_file_writer(str(Path(folder) / outcome["id"])).as_default():
            api.hparams(outcome["values"], trial_id=outcome["id"])
            tf.summary.scalar(objective, outcome["score"], step=0)


def forget_numbers(folder: str | Path) -> None:
    """Renames TensorBoard's files in a project: their names count the writers of the process.

    So the name of the winner's would tell how many trials came before it.

    Args:
      folder: of the project.
    """
    for path in Path(folder).rglob("events.out.tfevents.*"):
        if not path.name.endswith(".honest"):
            path.rename(path.with_name(f"events.out.tfevents.{secrets.token_hex(8)}.honest"))


def plot(
    shown: Sequence[dict[str, Any]], objective: str, spending: dict[str, float], is_all: bool
) -> Any:
    """Draws the scores that may be shown, and what was spent.

    Args:
      shown: outcomes, the best first.
      objective: what the score is called.
      spending: ε by what it is of.
      is_all: whether all candidates are shown, or the winner alone.

    Returns:
      The `matplotlib` figure.

    Raises:
      ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "The plot needs matplotlib: pip install 'tf-adaptive-dp[plots]'"
        ) from None

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    scores, budget = figure.subplots(1, 2)
    scored = [outcome for outcome in shown if outcome["score"] is not None]
    names = [_name(outcome["values"]) for outcome in scored]
    scores.barh(range(len(scored)), [outcome["score"] for outcome in scored])
    scores.set_yticks(range(len(scored)), names)
    scores.invert_yaxis()
    scores.set_xlabel(objective)
    scores.set_title("Candidates" if is_all else "Winner")
    budget.barh(range(len(spending)), list(spending.values()))
    budget.set_yticks(range(len(spending)), list(spending))
    budget.invert_yaxis()
    budget.set_xlabel("ε")
    budget.set_title("Spending")
    return figure


def _name(values: dict[str, Any]) -> str:
    parts = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
    return "\n".join(parts) or "no hyperparameters"
