"""Saves a training at the end of each epoch, and resumes it, whenever its process is killed."""

from __future__ import annotations

import os
from pathlib import Path

from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.models import load_weights, save_weights
from tf_adaptive_dp.durable import files

_SUFFIX = ".weights.h5"


def epoch_backup(folder: str | os.PathLike) -> keras.callbacks.Callback:
    """Makes a callback that keeps the last finished epoch, the optimizer's state included.

    Guarantee: a process that is killed at any moment leaves either the epoch before or the new one,
    whole. The callback deletes nothing when the training ends.

    Args:
      folder: what it keeps lies there, and nothing else may.
    """
    if GENERATION == 3:
        return EpochBackup(folder)
    return keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)


class EpochBackup(keras.callbacks.Callback):
    """`BackupAndRestore` of Keras 3, made safe against kills.

    That one overwrites the weights in place, and then the number of the epoch: a process that is
    killed in between leaves a file that cannot be read, or a number that does not fit. Here a file
    gets its name, which is the number of the epoch, when it is whole and on disk.

    Args:
      folder: what it keeps lies there, and nothing else may.
    """

    def __init__(self, folder: str | os.PathLike):
        super().__init__()
        self._folder = Path(folder)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the last finished epoch, if there is one; called by Keras."""
        saved = self._saved()
        if saved:
            load_weights(self.model, self._path(saved[-1]))
            self.model._initial_epoch = saved[-1]

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Saves the epoch; called by Keras."""
        before = self._saved()
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"unfinished{_SUFFIX}"
        save_weights(self.model, unfinished)
        files.sync(unfinished)
        unfinished.rename(self._path(epoch + 1))
        files.sync(self._folder)
        for old in before:
            self._path(old).unlink()

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch}{_SUFFIX}"

    def _saved(self) -> list[int]:
        names = [path.name.removesuffix(_SUFFIX) for path in self._folder.glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdigit())
