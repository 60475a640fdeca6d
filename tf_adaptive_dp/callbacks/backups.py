"""Saves a training at the end of each epoch, and resumes it, whenever its process is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.models import start_at_epoch
from tf_adaptive_dp.durable import files

_SUFFIX = ".weights.h5"
# Beside the weights of Keras 3: with it a model of the same kind can make its variables.
_BUILD_CONFIG = "build_config.json"


def save_weights(model: tf.keras.Model, path: str | os.PathLike) -> None:
    """Saves the weights of a model and the state of its optimizer, for `load_weights`.

    Args:
      model: a built model.
      path: of the weights, which ends in `.weights.h5` for Keras 3.
    """
    if GENERATION == 3:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        config = json.dumps(model.get_build_config())
        files.write(path.with_name(_BUILD_CONFIG), config.encode())
    model.save_weights(str(path))


def load_weights(model: tf.keras.Model, path: str | os.PathLike) -> None:
    """Loads what `save_weights` saved, the state of the optimizer included.

    In Keras 2 variables that do not exist yet get their values when they are created. In Keras 3
    they are created here, since it would leave out the state of an optimizer without variables.

    Args:
      model: a compiled model of the same kind, built or not.
      path: of the weights.
    """
    config = Path(path).with_name(_BUILD_CONFIG)
    if GENERATION == 3 and not model.built and config.exists():
        model.build_from_config(json.loads(config.read_bytes()))
    if model.built:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(str(path))


def epoch_backup(folder: str | os.PathLike) -> keras.callbacks.Callback:
    """Makes a callback that keeps the last finished epoch, the optimizer's state included.

    Guarantee: a process that is killed at any moment leaves either the previous epoch or the new
    one complete on disk. The callback deletes nothing when the training ends.

    Args:
      folder: what it keeps lies there, and nothing else may.

    Returns:
      The callback, for `fit`. The ledger is in the optimizer's state, so it is restored too; pass a
      `ReleaseLog` as well, for the releases since then.

    Raises:
      TypeError: if `folder` is no path.
      ValueError: if Keras 2 could not restore from the folder.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> def train(epochs):
      ...     model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
      ...     model.compile("sgd", loss="mse")
      ...     model.fit(
      ...         tf.ones([12, 2]),
      ...         tf.ones([12]),
      ...         batch_size=4,
      ...         epochs=epochs,
      ...         verbose=0,
      ...         callbacks=[epoch_backup(folder)],
      ...     )
      ...     return int(model.optimizer.iterations)
      >>> train(epochs=1), train(epochs=3)
      (3, 9)
    """
    checks.path("folder", folder)
    if GENERATION == 3:
        return EpochBackup(folder)
    if "[" in os.path.abspath(folder):
        raise ValueError(
            "TensorFlow reads `[` in the name of a checkpoint as a wildcard, so the backup could "
            "be written but not restored. Choose a directory without brackets. Received: "
            f"{str(folder)!r}"
        )
    return keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)


class EpochBackup(keras.callbacks.Callback):
    """`BackupAndRestore` of Keras 3, made safe against kills.

    Keras's callback overwrites the weights in place, and then the number of the epoch: a process
    that is killed in between leaves a file that cannot be read, or a number that does not fit. Here
    a file gets its name, which is the number of the epoch, only when it is complete and on disk.

    Args:
      folder: what it keeps lies there, and nothing else may.
    """

    restores_backups = True  # and forgets what was released since, as `BackupAndRestore` does

    def __init__(self, folder: str | os.PathLike):
        super().__init__()
        self._folder = Path(folder)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the last finished epoch, if there is one; called by Keras."""
        saved = self._saved()
        if saved:
            load_weights(self.model, self._path(saved[-1]))
            start_at_epoch(self.model, saved[-1])

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
            if old != epoch + 1:  # saved again
                self._path(old).unlink()

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch}{_SUFFIX}"

    def _saved(self) -> list[int]:
        names = [path.name.removesuffix(_SUFFIX) for path in self._folder.glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdigit())
