"""Which callbacks go with a search, and a copy of each for every trial."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from tf_adaptive_dp.callbacks import PrivacyBudget, PrivacyMonitor
from tf_adaptive_dp.privacy import sampling as samplings
from tf_adaptive_dp.release_log import ReleaseLog

_keras = tf.keras.callbacks

# What is wrong with them, whatever the strategy.
_NEVER = {
    ReleaseLog: "the tuner keeps a log of each candidate itself",
    PrivacyBudget: "the tuner keeps every candidate within its share of `epsilon` itself",
    _keras.BackupAndRestore: "the tuner saves the candidate in progress itself",
    _keras.EarlyStopping: (
        "every candidate makes the same number of releases, and the score is that of its last epoch"
    ),
    _keras.ReduceLROnPlateau: (
        "it decides by figures that are not private, and forgets them when a search is resumed"
    ),
    _keras.TerminateOnNaN: (
        "it would end a candidate by the exact loss, which a single example can make NaN, and "
        "every candidate makes the same number of releases"
    ),
}
# They leave something of every trial where the tuner does not find it.
_NOT_FOR_LOSERS = (_keras.ModelCheckpoint, _keras.CSVLogger, _keras.RemoteMonitor)


def check(
    callbacks: Sequence[tf.keras.callbacks.Callback],
    *,
    releases_all: bool,
    num_examples: int,
    sampling: samplings.Sampling | str,
) -> None:
    """Raises ValueError for callbacks that would not do in a search what they promise.

    Among them are those that cannot be copied.

    Args:
      callbacks: those that `search` was called with.
      releases_all: whether every trial may be shown.
      num_examples: of the search.
      sampling: of the search.
    """
    for callback in callbacks:
        for kind, reason in _NEVER.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"Leave {kind.__name__} out of `callbacks`: {reason}. Received: {callback!r}"
                )
        if not releases_all and isinstance(callback, _NOT_FOR_LOSERS):
            raise ValueError(
                f"{type(callback).__name__} would keep figures or weights of candidates that lost, "
                "and only the winner may be shown. Use TensorBoard, whose files go with the "
                "candidate, and save the winner from `get_best_models()`; or choose the strategy "
                f"'composition'. Received: {callback!r}"
            )
        if isinstance(callback, PrivacyMonitor):
            own = (callback.num_examples, callback.sampling)
            if own != (num_examples, sampling):
                raise ValueError(
                    "PrivacyMonitor must have the `num_examples` and the `sampling` of the tuner. "
                    f"Received: {own}, instead of {(num_examples, sampling)}"
                )
        _check_copy(callback)


def _check_copy(callback: tf.keras.callbacks.Callback) -> None:
    # Found within a trial, it would be a crash of every one of them, and the search lost.
    try:
        copies([callback], "", releases_all=True)
    except Exception as error:
        raise ValueError(
            "Every candidate gets copies of the callbacks, so it must be possible to copy them: "
            "let what cannot be copied be made in `on_train_begin`, or define `__deepcopy__`. "
            f"Received: {callback!r}, whose copy failed with {error!r}"
        ) from error


def copies(
    callbacks: Sequence[tf.keras.callbacks.Callback],
    folder: str | os.PathLike,
    *,
    releases_all: bool,
) -> list[tf.keras.callbacks.Callback]:
    """Copies for one trial, as KerasTuner makes them: what a callback keeps is of one trial alone.

    TensorBoard's files, and PrivacyMonitor's, go into the trial's folder. Where the winner alone
    may be shown, TensorBoard writes neither graphs nor profiles: both number the functions of the
    process, and so tell how many trials came before.

    Args:
      callbacks: those that `search` was called with, never used by a trial.
      folder: of the trial.
      releases_all: whether every trial may be shown.
    """
    made = []
    for callback in callbacks:
        if isinstance(callback, PrivacyMonitor):
            # All that it keeps of a run it sets when the run begins. A deep copy of one that was
            # used already would copy its model.
            copied = copy.copy(callback)
            copied.model = None
        else:
            copied = copy.deepcopy(callback)
        if isinstance(callback, (_keras.TensorBoard, PrivacyMonitor)) and callback.log_dir:
            copied.log_dir = str(Path(folder) / "tensorboard")
        if isinstance(callback, _keras.TensorBoard) and not releases_all:
            copied.write_graph = False
            copied._init_profile_batch(0)
            # Keras relies on the graph's writer to have made the folder of its embeddings.
            os.makedirs(copied.log_dir, exist_ok=True)
        made.append(copied)
    return made
