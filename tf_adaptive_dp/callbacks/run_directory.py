"""The directory of a training run: what lets a run that was killed resume, and what it reported."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.models import allow_tensors_as_logs
from tf_adaptive_dp.callbacks.backups import epoch_backup
from tf_adaptive_dp.callbacks.common import longer_plan
from tf_adaptive_dp.callbacks.release_log import ReleaseLog
from tf_adaptive_dp.durable import files, ledger_file
from tf_adaptive_dp.durable.key_file import KeyFile

_SHAPES = "shapes_of_state"
_HISTORY = "history_NOT_PRIVATE.json"
# What a run writes after its log.
_OF_RUN = ("plan.json", "optimizer.json", "normalization.json", "noise.key", "backup", _HISTORY)


class RunHistory(keras.callbacks.Callback):
    """The figures of every epoch, including those before the process was killed. NOT private.

    They are losses and metrics of the training data, and statistics of raw gradients.

    Args:
      figures: a function that returns figures of the epoch that has just ended, which Keras's logs
        do not hold.
      path: the file that keeps the history, or `None`.

    Attributes:
      rows: one dictionary per epoch: `epoch` (from 0), `releases`, `logs` and `figures`. Metrics
        with several numbers are lists of them.
    """

    def __init__(
        self, figures: Callable[[], Mapping[str, float]], path: str | os.PathLike | None = None
    ):
        super().__init__()
        self._figures, self._path = figures, None if path is None else Path(path)
        self.rows = [] if self._path is None else _rows_of_history(self._path)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the epoch, or replaces it if it was trained again; called by Keras."""
        row = {
            "epoch": epoch,
            "releases": self.model.optimizer.ledger.num_releases,
            "logs": {name: _plain(value) for name, value in (logs or {}).items()},
            "figures": {name: float(value) for name, value in self._figures().items()},
        }
        self.rows = [*(r for r in self.rows if r["epoch"] < epoch), row]
        if self._path is not None:
            files.write(self._path, json.dumps(self.rows, indent=1).encode())


def _plain(value: Any) -> Any:
    """A number, or a list of the numbers of a metric that has several; else a text."""
    if tf.is_tensor(value) and value.dtype.is_floating:
        value = tf.cast(value, tf.float64)  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # such as a ragged list
        return str(value)
    return array.tolist() if array.dtype.kind in "biuf" else str(value)


def _read(path: Path, cure: str = "Put back an intact copy, or pass a new directory.") -> Any:
    """The content of a JSON file of a run; ValueError if it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"A file of the run in `directory` is damaged. {cure} Received: {str(path)!r}, of "
            f"{path.stat().st_size} bytes, which is not JSON"
        ) from error


def _rows_of_history(path: Path) -> list[dict[str, Any]]:
    """The rows that a `RunHistory` has kept in a file, which its first epoch creates."""
    cure = "Delete it to go on without the figures of past epochs."
    return _read(path, cure) if path.exists() else []


OTHER_USERS = (
    "`user_ids` must assign the examples as they did when the run began: a person under another id "
    "could spend more than epsilon. Received: other `user_ids`. Pass those of the "
    "run in `directory`, or a new directory."
)
OTHER_EXAMPLES = (
    "The examples must be those that the run began with, in the same order: with correlated noise "
    "an example that changes its place could join batches that are closer to each other than "
    "epsilon assumes. A `tf.data.Dataset` must not be shuffled. Features that you compute must be "
    "computed once and stored, since their last bits may differ from run to run. Received: other "
    "examples, or another order. Pass those of the run in `directory`, or a new directory."
)


class Fingerprint(NamedTuple):
    """Data that must not change as long as a run lasts.

    Attributes:
      name: of the data.
      of: a function of 16 random bytes that returns a digest, which is NOT private.
      refusal: the sentence for data that changed.
    """

    name: str
    of: Callable[[bytes], str]
    refusal: str


def _to_pass(before: Mapping[str, Any], changed: Sequence[str]) -> str:
    """The arguments of a run that differ, without what follows from the others."""
    budget = {"epsilon", "noise_multiplier"}
    # One of them was given. The other one follows, so it hardly ever is a short number.
    given = min(sorted(budget), key=lambda name: len(repr(before.get(name))))
    left_out = budget - {given} if budget.issubset(changed) else budget
    shown = [name for name in changed if name not in left_out] or list(changed)
    return ", ".join(f"`{name}={before.get(name)!r}`" for name in shown)


def _to_train_longer(before: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What to do for more epochs than a run has, if these are asked for."""
    if settings.get("epochs", 0) <= before.get("epochs", 0):
        return ""
    longer = longer_plan(before["noise_multiplier"], before.get("batch_size"))
    return (
        f" To train its model longer, finish the run, and then make {longer}, for another "
        "directory or none; see docs/how-to/resume.md#train-longer."
    )


class RunDirectory:
    """What a run keeps: its settings, its releases, its last epoch and its history.

    Guarantee: that of `ReleaseLog`; and a process that is killed at any moment leaves a directory
    from which the run resumes at the last epoch that was saved. An epoch is saved after its last
    step, before anything else that may fail, such as validation or a callback; and once more when
    all callbacks have finished it. With correlated noise the
    directory also holds the keys of the noise (`KeyFile`), until the run is finished: without them
    it cannot be resumed, and with them anybody can remove noise from released gradients. They are
    deleted after the last release; if the process is killed in between, when the run is opened
    again.

    Args:
      path: the directory, which is created. It belongs to one run.
      settings: the public settings of the run, which must not change.
      steps: the number of releases of the whole run.
      keeps_keys: whether the noise of the run is correlated.
      fingerprint: the `Fingerprint` of data that must not change either. It is kept in a file that
        says that it is not private. Leave that file out if you publish the directory.

    Attributes:
      path: the directory.
      log: the `ReleaseLog`.
      keys: the `KeyFile` of an unfinished run with correlated noise, or `None`.
      history_path: the file for a `RunHistory`, whose name says that it is not private.

    Raises:
      TypeError: if `path` is no path.
      ValueError: if the directory belongs to a run with other settings or another fingerprint, or
        one of its files is missing or damaged.
      RuntimeError: if another process uses the directory.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        settings: Mapping[str, Any],
        steps: int,
        *,
        fingerprint: Fingerprint | None = None,
        keeps_keys: bool = False,
    ):
        self.path = Path(checks.path("directory", path))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                "`directory` must be a directory, or one that can be created. Received: "
                f"directory={str(path)!r}, where there is a file"
            ) from None
        backup = self.path / "backup"
        if backup.exists() and not backup.is_dir():  # before an epoch is paid for
            raise ValueError(
                "`directory` must hold nothing but its run, which keeps its epochs in the folder "
                f"'backup'. Received: directory={str(path)!r}, with a file of this name"
            )
        self._require_names()
        self._require_log()
        self.log = ReleaseLog(self.path / "releases.log", steps=steps)
        self.keys: KeyFile | None = None
        self.history_path = self.path / _HISTORY
        try:
            self._require_newest_log()
            self._check_settings(settings)
            if fingerprint is not None:
                self._check_fingerprint(fingerprint)
            keys = self.path / "noise.key"
            if self.is_finished:
                files.delete(keys)
            elif keeps_keys:
                self.keys = KeyFile(keys, self.log.num_releases)
        except BaseException:
            self.close()
            raise
        self._backup_path = backup
        self._backup = epoch_backup(backup)

    def _require_names(self) -> None:
        """Raises if folders have the names of files that the run writes after its releases."""
        reports = ("report.html", "report.md", "report.json", _HISTORY)
        taken = [name for name in reports if (self.path / name).is_dir()]
        if taken:
            raise ValueError(
                "`directory` must hold nothing but its run, which writes files of these names. "
                f"Received: directory={str(self.path)!r}, with a folder {', '.join(taken)}"
            )

    def _require_log(self) -> None:
        """Raises if the run had a log of releases, which is written before all other files."""
        log = self.path / "releases.log"
        left = [name for name in _OF_RUN if (self.path / name).exists()]
        if left and not ledger_file.has_begun(log):
            raise ValueError(
                "The run in `directory` cannot continue without `releases.log`: nothing else says "
                "what it has released. Put it back, or pass a new directory; what this run "
                f"released stays spent. Received: no releases in {str(log)!r}, beside "
                f"{', '.join(left)}"
            )

    def _require_newest_log(self) -> None:
        """Raises if the run has released more than its log says."""
        rows = _rows_of_history(self.history_path)
        released = max((row["releases"] for row in rows), default=0)
        if released > self.log.num_releases:
            raise ValueError(
                "`releases.log` of the run in `directory` is older than its history, as if it was "
                "restored from a copy: what was released since would not be counted. Put the "
                "newest file back, or pass a new directory; what this run released stays spent. "
                f"Received: {self.log.num_releases} releases in the log, {released} in "
                f"{str(self.history_path)!r}"
            )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        kept = self.path / "plan.json"
        if not kept.exists():
            self._check_not_begun(
                kept.name, "it says what the releases of the run were planned for"
            )
            files.write(kept, json.dumps(settings, indent=1).encode())
            return
        before = _read(kept)
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            raise ValueError(
                "`directory` holds a run of another plan, or of a model that was compiled with "
                "other `steps_per_execution`. Use a new directory, or resume with the settings of "
                f"the original run: {_to_pass(before, changed)}."
                f"{_to_train_longer(before, settings)} Received: "
                + ", ".join(f"{n}={settings[n]!r} instead of {before.get(n)!r}" for n in changed)
            )

    def _check_fingerprint(self, fingerprint: Fingerprint) -> None:
        kept = self.path / f"{fingerprint.name}_NOT_PRIVATE.json"
        if not kept.exists():
            self._check_not_begun(kept.name, f"it says that `{fingerprint.name}` have not changed")
            salt = secrets.token_bytes(16)
            row = {"salt": salt.hex(), "digest": fingerprint.of(salt)}
            files.write(kept, json.dumps(row).encode())
            return
        before = _read(kept)
        if fingerprint.of(bytes.fromhex(before["salt"])) != before["digest"]:
            raise ValueError(fingerprint.refusal)

    def keep(self, name: str, values: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Keeps values that a run began with, so that it resumes with the same ones.

        Args:
          name: that of the file, which is written if there are values.
          values: lists of arrays of floating-point numbers that were released about the examples.

        Returns:
          The values that the run keeps already, or these if it had not begun.

        Raises:
          ValueError: if the run has begun without these values.
        """
        kept = self.path / f"{name}.json"
        if kept.exists():
            return [[np.asarray(v) for v in of_one] for of_one in _read(kept)]
        if values:
            self._check_not_begun(kept.name, "other values would be another release")
            text = json.dumps([[v.tolist() for v in of_one] for of_one in values])
            files.write(kept, text.encode())
        return [list(of_one) for of_one in values]

    def _check_not_begun(self, missing: str, why: str) -> None:
        """Raises if the run has begun, so that a file which is missing was there."""
        if self.log.has_begun:
            raise ValueError(
                f"The run in `directory` cannot continue without `{missing}`: {why}. Received: a "
                "directory without this file. Put it back, or pass a new directory."
            )

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run may have been released."""
        return self.log.num_releases >= (self.log.steps or 0)

    def require_saved_epoch(self) -> None:
        """Raises if a run that is finished has no weights that could be restored."""
        if not self._backup_path.exists() or not any(self._backup_path.iterdir()):
            raise RuntimeError(
                "All steps of the run in `directory` were released, but no epoch of it was saved, "
                "so there are no weights to restore. Pass a new directory to train anew; both runs "
                f"together cost more than this plan. Received: directory={str(self.path)!r}"
            )

    def callbacks(
        self, others: Sequence[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        """The callbacks for `fit`, around the others.

        Args:
          others: callbacks that report or stop; they see the restored model. What they do to the
            weights at the end of an epoch is part of what a resumed run begins with.

        Raises:
          ValueError: if averages of the weights would be saved as the weights.
        """
        swaps = getattr(keras.callbacks, "SwapEMAWeights", ())  # Keras 2 has none
        if any(isinstance(c, swaps) and c.swap_on_epoch for c in others):
            raise ValueError(
                "`callbacks` must not swap weights at the end of an epoch if there is a "
                "`directory`: the averages would be saved as the weights, and a resumed run would "
                "go on from the averages. Leave `swap_on_epoch` out; validation uses the averages "
                "all the same. Received: SwapEMAWeights(swap_on_epoch=True)"
            )
        resume = _Resume(self._backup, self.log, self.keys, self.path / "optimizer.json")
        return [resume, *others, _SaveEpoch(resume)]

    def close(self) -> None:
        """Lets another process use the directory; deletes the keys of a run that is finished."""
        if self.keys is not None and self.is_finished:
            self.keys.delete()
        self.log.close()


class _Resume(keras.callbacks.Callback):
    """Restores the last epoch and announces releases, before other callbacks act.

    Args:
      backup: what saves epochs, and restores the last one.
      log: what announces releases.
      keys: the keys of correlated noise, or `None`.
      kind_path: the file that says which kind of optimizer the run has.
    """

    counts_lost_releases = True  # as its log does

    def __init__(
        self,
        backup: keras.callbacks.Callback,
        log: ReleaseLog,
        keys: KeyFile | None,
        kind_path: Path,
    ):
        super().__init__()
        allow_tensors_as_logs(self)
        self._backup, self._log = backup, log
        self._held = (backup, log)
        self._keys = keys
        self._kind_path = kind_path

    def set_model(self, model: keras.Model) -> None:
        """Passes the model on; called by Keras."""
        super().set_model(model)
        for callback in self._held:
            callback.set_model(model)

    def set_params(self, params: dict) -> None:
        """Passes the parameters of `fit` on; called by Keras."""
        super().set_params(params)
        for callback in self._held:
            callback.set_params(params)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the model, then the ledger, then the noise; called by Keras."""
        self._check_kind_of_optimizer(begun=self._log.has_begun)
        try:
            self._backup.on_train_begin(logs)
        except ValueError as error:  # the reason, before Keras shows all values
            reason = str(error).partition("variable.shape=")[0].split("\n\n")[-1].strip()
            raise self._refusal(reason) from error
        self._log.on_train_begin(logs)
        if self._keys is not None:
            self.model.optimizer.resume_noise(self._keys.keys)

    def _check_kind_of_optimizer(self, begun: bool) -> None:
        """Raises if the state of the run's optimizer would not fit this one.

        Keras 2 would put it into whatever variables come in the same order. Both versions of Keras
        would take the state of one optimizer for that of another with the same variables.

        Args:
          begun: whether the run has released anything.
        """
        optimizer = self.model.optimizer
        found: dict[str, Any] = {"class": type(optimizer).__name__, **_options(optimizer)}
        # An optimizer that has made steps here may have more variables than one that begins.
        if self.model.built and not optimizer.ledger.num_releases:
            optimizer.build(self.model.trainable_variables)
            found[_SHAPES] = [list(v.shape) for v in optimizer.variables]
        if not begun:
            files.write(self._kind_path, json.dumps(found).encode())
        elif self._kind_path.exists():
            differences = _differences(_read(self._kind_path), found)
            if differences:
                raise self._refusal(f"The optimizer has {', '.join(differences)}")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            "`directory` holds a run of another model, or of another optimizer. Pass a new "
            "directory, or the model of that run to resume it. Received: "
            f"model={self.model.name!r}. {reason}"
        )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Called by Keras."""
        for callback in self._held:
            callback.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Announces releases; called by Keras."""
        for callback in self._held:
            callback.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves the epoch after its last step, and deletes the keys after that of the run.

        Called by Keras. What comes next may fail, and an epoch that is paid for must not be lost.
        """
        for callback in self._held:
            callback.on_train_batch_end(batch, logs)
        if batch + 1 >= self.params["steps"] or self.model.stop_training:
            self.save_epoch()
        if self._keys is not None:
            if self.model.optimizer.ledger.num_releases >= (self._log.steps or math.inf):
                self._keys.delete()

    def save_epoch(self) -> None:
        """Saves the training, with the number of whole epochs that were released.

        An epoch that was stopped within begins again when the run resumes.
        """
        optimizer = self.model.optimizer
        steps = optimizer.ledger.num_releases * optimizer.parts_per_batch
        last = steps // self.params["steps"] - 1
        self._backup.on_epoch_begin(last)  # Keras 2 saves the number of the epoch that began last
        self._backup.on_epoch_end(last)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Called by Keras."""
        for callback in self._held:
            callback.on_train_end(logs)


def _options(optimizer: keras.optimizers.Optimizer) -> dict[str, bool | str]:
    """What chooses one of several ways to train; not `get_config`, which refuses some functions."""
    # The name differs from run to run. How gradients are computed changes nothing else; Keras 2
    # chooses XLA by the machine.
    others = ("name", "built", "gradients", "jit_compile")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, str)) and not name.startswith("_") and name not in others
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What an optimizer has that the run's optimizer had not, in words."""
    differences = [
        f"{name}={value!r} instead of {before.get(name)!r}"
        for name, value in now.items()
        if name != _SHAPES and value != before.get(name)
    ]
    # They are not known of a model that was not built, or of an optimizer that has made steps.
    if _SHAPES in before and _SHAPES in now and before[_SHAPES] != now[_SHAPES]:
        differences.append("a state of other shapes")
    return differences


class _SaveEpoch(keras.callbacks.Callback):
    """Saves an epoch again when all other callbacks have finished it; they may change weights."""

    def __init__(self, resume: _Resume):
        super().__init__()
        allow_tensors_as_logs(self)
        self._resume = resume

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves an epoch that a callback stops, before validation may fail; called by Keras."""
        if self.model.stop_training:
            self._resume.save_epoch()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Called by Keras."""
        self._resume.save_epoch()
