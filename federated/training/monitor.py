"""Monitoring of rounds: figures under fixed names, TensorBoard, a CSV file, a progress bar."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_work import LEARNING_RATE_EDGES
from federated.privacy.user_level import UserLevelPrivacy
from tf_adaptive_dp import checks

_PREFIX = "not_private/"
# They reveal the size of the cohort, which is secret if clients are drawn at random.
_COUNTS = ("num_examples", "num_batches", "clients")
_NUM_QUANTILES = 100


def scalars(
    metrics: Mapping[str, Any], privacy: UserLevelPrivacy | None = None
) -> OrderedDict[str, float | list[float]]:
    """The figures of a round, under their names in TensorBoard and in the CSV file.

    | name | meaning |
    | --- | --- |
    | `train/loss`, … | metrics on the clients' data, of the model that they received |
    | `optimizer/learning_rate` | geometric mean of the clients' final learning rates |
    | `optimizer/log10_learning_rate_stddev` | their standard deviation |
    | `optimizer/log10_learning_rate_histogram` | 100 quantiles, to half a decade |
    | `optimizer/discarded_share` | share of the steps judged by ADADP that were discarded |
    | `privacy/clip_norm` | the clip norm; that of the next round if it is adaptive |
    | `privacy/noise_stddev` | of the noise in each value of the averaged update, at that clip |
    | other paths | other measurements of the process, such as `finalizer/update_non_finite` |

    With the tree mechanism the noise is that of one node of the tree. With banded noise it is the
    fresh noise of a round; that in its result is larger by `privacy.strategy.deviations`.
    `federated.train` adds `privacy/epsilon`, `privacy/epsilon_covers_rounds` (the number of rounds
    that this ε is for, at least those counted), `privacy/delta`, `privacy/rounds_counted`,
    `test/…`, `held_out/…`, and `privacy/NOT_PRIVATE` if ε is infinite.

    In private runs the names of all exact aggregates over clients begin with `not_private/`: they
    have no noise. Show them only to people who may see the data.

    Guarantee: in private runs, every figure without `not_private/` in its name is computed from
    noisy results alone, and no figure is a count of clients, examples or batches.

    Args:
      metrics: the metrics of the process's output.
      privacy: the privacy of the clients; `None` without privacy.

    Returns:
      Numbers, which may be NaN, and lists for histograms, which are released as arrays.

    Example:
      >>> metrics = {"client_work": {"train": {"loss": 0.5, "num_examples": 8}}}
      >>> dict(scalars(metrics))
      {'train/loss': 0.5, 'train/num_examples': 8.0}
      >>> dict(scalars(metrics, UserLevelPrivacy(1.0, 10, 100, clip=0.5)))
      {'privacy/clip_norm': 0.5, 'privacy/noise_stddev': 0.05, 'not_private/train/loss': 0.5}
    """
    checks.instance("metrics", metrics, Mapping)
    figures: OrderedDict[str, float | list[float]] = OrderedDict()
    private = privacy is not None
    clips = [float(value) for path, value in _leaves(metrics) if "dp_query_metrics" in path]
    if privacy is not None and not privacy.is_adaptive:
        clips = [float(privacy.clip)]
    if clips:
        figures["privacy/clip_norm"] = clips[0]
    if privacy is not None and clips:
        stddev = privacy.value_noise_multiplier * clips[0] / privacy.clients_per_round
        figures["privacy/noise_stddev"] = stddev
    for path, value in _leaves(metrics):
        if "dp_query_metrics" not in path and not (private and path[-1] in _COUNTS):
            path = path[1:] if path[0] == "client_work" else path
            exact = private and path[0] != "finalizer"
            for name, figure in _readable("/".join(path), np.asarray(value)):
                figures[_PREFIX * exact + name] = figure
    return figures


def _leaves(metrics: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The numbers and arrays with their paths."""
    if hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()
    if isinstance(metrics, (list, tuple)):
        metrics = dict(enumerate(metrics))
    if not isinstance(metrics, Mapping):
        return [(path, metrics)]
    return [leaf for key, value in metrics.items() for leaf in _leaves(value, (*path, str(key)))]


def _readable(name: str, value: np.ndarray) -> list[tuple[str, float | list[float]]]:
    """A figure under the name and on the scale that readers expect; nothing for text."""
    if value.dtype.kind not in "biuf":
        return []
    if name == "optimizer/log10_learning_rate_mean":
        return [("optimizer/learning_rate", float(10.0 ** np.float64(value)))]
    if name == "optimizer/learning_rate_histogram":
        quantiles = _quantiles(value)
        return [("optimizer/log10_learning_rate_histogram", quantiles)] if quantiles else []
    return [(name, float(value) if value.ndim == 0 else value.ravel().tolist())]


def _quantiles(counts: np.ndarray) -> list[float]:
    """log10 η at evenly spaced ranks: a sample with the histogram of all clients."""
    if not counts.sum():
        return []
    edges = [math.log10(edge) for edge in LEARNING_RATE_EDGES]
    width = edges[1] - edges[0]
    middles = np.array([edges[0] - width, *edges]) + width / 2
    ranks = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    return middles[np.searchsorted(np.cumsum(counts) / counts.sum(), ranks)].tolist()


class TensorBoard(tff.program.ReleaseManager):
    """Writes figures for TensorBoard, which are in its file as soon as they are released.

    Args:
      summary_dir: the folder for TensorBoard's `--logdir`.
    """

    def __init__(self, summary_dir: str | os.PathLike):
        self._writer = tf.summary.create_file_writer(os.fspath(summary_dir))

    async def release(self, value: Mapping[str, Any], key: int) -> None:
        """Writes a round's figures, see `scalars`; lists as histograms."""
        with self._writer.as_default():
            for name, figure in value.items():
                write = tf.summary.histogram if np.ndim(figure) else tf.summary.scalar
                write(name, figure, step=key)
        self._writer.flush()


class ProgressBar(tff.program.ReleaseManager):
    """A progress bar of the rounds with some of their figures, on standard output.

    Args:
      num_rounds: the number of rounds of the whole run.
      names: the names of the figures; a round's missing ones are left out.
    """

    DEFAULT = (
        "train/loss",
        "not_private/train/loss",
        "test/loss",
        "test/accuracy",
        "held_out/loss",
        "not_private/held_out/loss",
        "held_out/accuracy",
        "not_private/held_out/accuracy",
        "privacy/epsilon",
        "privacy/clip_norm",
    )

    def __init__(self, num_rounds: int, names: tuple[str, ...] = DEFAULT):
        self._names = names
        self._bar = tf.keras.utils.Progbar(num_rounds, stateful_metrics=names, unit_name="round")

    async def release(self, value: Mapping[str, Any], key: int) -> None:
        """Shows a round's figures, see `scalars`."""
        self._bar.update(key, [(name, value[name]) for name in self._names if name in value])


def monitors(
    directory: str | os.PathLike, num_rounds: int | None = None
) -> list[tff.program.ReleaseManager]:
    """Makes the `release_managers` for `federated.train`.

    A resumed run appends: TensorBoard shows one curve, and the CSV file has one row per finished
    round, which is replaced if the round is released again.

    Args:
      directory: gets a folder `tensorboard` and a file `figures.csv`, without histograms.
      num_rounds: if given, a progress bar of this many rounds is shown too.

    Returns:
      TFF's release managers.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
    """
    directory = Path(checks.path("directory", directory))
    if num_rounds is not None:
        checks.integer("num_rounds", num_rounds, 1)
    table = tff.program.CSVFileReleaseManager(
        # TFF rewrites the whole file and renames it, so that no row is ever torn.
        directory / "figures.csv",
        tff.program.CSVSaveMode.WRITE,
        key_fieldname="round",
    )
    managers = [
        TensorBoard(directory / "tensorboard"),
        tff.program.FilteringReleaseManager(table, lambda path: "histogram" not in path[0]),
    ]
    return managers if num_rounds is None else [*managers, ProgressBar(num_rounds)]
