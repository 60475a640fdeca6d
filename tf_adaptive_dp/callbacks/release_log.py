"""A log beside the checkpoints that knows of releases which no checkpoint does."""

from __future__ import annotations

import os
import warnings

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.models import allow_tensors_as_logs, steps_per_call
from tf_adaptive_dp.accounting.ledger import Ledger, Segment
from tf_adaptive_dp.durable.ledger_file import SegmentFile
from tf_adaptive_dp.errors import BudgetExceededError


def _require_ledger(optimizer: tf.keras.optimizers.Optimizer) -> None:
    if not hasattr(optimizer, "ledger"):
        raise TypeError(
            f"The log needs an optimizer of tf_adaptive_dp. Received: optimizer={optimizer!r}"
        )


class ReleaseLog(tf.keras.callbacks.Callback):
    """Counts what was released and then lost because the process ended before a checkpoint.

    A checkpoint restores the ledger of the moment it was saved; steps after that are forgotten,
    though their gradients may have been seen. So before each call of the training function the log
    notes, in a file, what will have been released at most when it returns. When training begins
    again, the releases that the ledger lacks are added to it, and a warning says how many.

    Pass it to `fit` with `tf.keras.callbacks.BackupAndRestore`, best directly after that and before
    other callbacks; ε is right in any order. Give the backup `delete_checkpoint=False`: a process
    that ends while it is being deleted could not go on. Draw batches with
    `start_step=log.num_releases`, so that none is drawn twice, and say `steps`, or Keras may go
    beyond: it begins a dataset of exactly `steps_per_epoch` batches anew in each epoch, and if
    `steps_per_execution` is above 1 it makes steps again that were before the backup.

    Guarantee: however often the process is ended, at whatever moment and by whatever signal, the
    ledger holds every release that was begun in `fit`, with its noise multiplier and batch size, as
    soon as the first epoch begins; and at most those of one call more each time. So ε never is too
    small and never falls. With `fsync` this holds for the end of the machine too. Assumed: the file
    is kept, and belongs to this training alone.

    Args:
      path: of the log, a new file or that of the run to go on with; its folder is created. Each
        process of a distributed training needs a path of its own.
      steps: the releases of the whole run: training stops when the ledger holds so many. Lost ones
        count. `None` leaves the end to `fit`.
      fsync: whether to wait for the disk before each call, so that the log survives a power
        failure as well.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range; if the file is
        no log; in training, if the log belongs to another run than the ledger, or the optimizer
        does not know its batch size.
      RuntimeError: if another process uses the log.
      BudgetExceededError: when an epoch begins and `steps` were released already.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> def train(epochs):
      ...     model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
      ...     model.compile(
      ...         tf_adaptive_dp.DPSGD(1.0, 1.1, expected_batch_size=4, learning_rate=0.1),
      ...         loss=tf.keras.losses.MeanSquaredError(reduction="none"),
      ...     )
      ...     log = ReleaseLog(f"{folder}/releases.log")
      ...     backup = tf.keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
      ...     callbacks = [backup, log]
      ...     model.fit(tf.ones([12, 2]), tf.ones([12]), 4, epochs, verbose=0, callbacks=callbacks)
      ...     log.close()
      ...     return model.optimizer.ledger.num_releases
      >>> import tf_adaptive_dp
      >>> train(epochs=1), train(epochs=3)
      (3, 9)
    """

    def __init__(self, path: str | os.PathLike, *, steps: int | None = None, fsync: bool = False):
        super().__init__()
        allow_tensors_as_logs(self)
        self.steps = None if steps is None else checks.integer("steps", steps, 1)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"`path` must be the path of a file. Received: path={path!r}")
        self._file = SegmentFile(path, fsync=checks.boolean("fsync", fsync))
        # What was released at least; the file says what at most.
        self._released = self._file.segments

    @property
    def segments(self) -> list[Segment]:
        """What was released at most, oldest first."""
        return list(self._file.segments)

    @property
    def num_releases(self) -> int:
        """How many noisy gradients were released at most: the `start_step` to go on with."""
        return sum(segment.num_releases for segment in self._file.segments)

    def adopt(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Begins the log of an optimizer that released gradients without one.

        Args:
          optimizer: one of tf_adaptive_dp.

        Raises:
          TypeError: if it has no ledger.
          ValueError: if the log holds releases already.
        """
        _require_ledger(optimizer)
        if self._file.segments:
            raise ValueError(
                "Only a new log can adopt an optimizer. Received: a log of "
                f"{self.num_releases} releases."
            )
        self._file.write(optimizer.ledger.segments)
        self._released = self._file.segments

    def reconcile(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Adds to the ledger the releases that the log knows and the ledger lacks.

        Args:
          optimizer: one of tf_adaptive_dp, after its state was restored.

        Raises:
          TypeError: if it has no ledger.
          ValueError: if the ledger holds what the log does not know; see the class.
        """
        _require_ledger(optimizer)
        ledger, announced = optimizer.ledger, self._file.segments
        segments = ledger.segments
        if not ledger.extends(announced, segments):
            self._refuse(ledger)
        if ledger.extends(segments, self._released):
            self._released = segments
            return
        lost = self.num_releases - ledger.num_releases
        ledger.restore(announced, ledger.checks)
        self._released = announced
        warnings.warn(
            f"{lost} releases were not in the checkpoint, because training ended before they were "
            "saved. They are added to the ledger: ε counts them.",
            stacklevel=2,
        )

    def _refuse(self, ledger: Ledger) -> None:
        segments, announced = ledger.segments, self._file.segments
        if self._released is not announced and ledger.extends(segments, self._released):
            self._file.write(segments)  # first of all the truth
            raise ValueError(
                "What was released is not what had been announced. Put callbacks that change the "
                "noise or the batch size before ReleaseLog, and call `announce` before each step "
                f"of a loop of your own. Received: ledger={segments}, announced={announced}"
            )
        raise ValueError(
            "The log belongs to another run than the ledger, which holds releases that the log "
            "does not know. Nothing was changed. Pass the path of its own log, or, for a model "
            "that was trained without one, a new path, and call `adopt(optimizer)` once. Received: "
            f"ledger={segments}, log={announced}"
        )

    def announce(self, optimizer: tf.keras.optimizers.Optimizer, num_releases: int = 1) -> None:
        """Notes releases that are about to happen; `fit` calls it, loops of your own have to.

        Guarantee: when it returns, the file counts them; see the class for how durably.

        Args:
          optimizer: one of tf_adaptive_dp.
          num_releases: how many there may be before the next call of this method.

        Raises:
          TypeError, ValueError, OSError: if it cannot; then do not release anything.
        """
        checks.integer("num_releases", num_releases, 1)
        self.reconcile(optimizer)
        noise_multiplier, batch_size = optimizer.next_release()
        if batch_size is None:
            raise ValueError(
                "The first step cannot be announced without its batch size. Pass "
                "`expected_batch_size` to the optimizer."
            )
        more = Segment(noise_multiplier, batch_size, num_releases)
        self._file.write(optimizer.ledger.extended(self._released, more))

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Reconciles the ledger, for callbacks that look at it; called by Keras."""
        checks.fixed_steps_per_call(self.model)
        self.reconcile(self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Reconciles a ledger that a later callback restored; called by Keras."""
        self.reconcile(self.model.optimizer)
        if self.steps is not None and self.num_releases >= self.steps:
            raise BudgetExceededError(
                "The run has all its releases: no further step is made. Received: "
                f"steps={self.steps}, with {self.num_releases} releases in the log."
            )

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Announces the steps of one call of the training function; called by Keras."""
        optimizer, steps = self.model.optimizer, steps_per_call(self.model)
        self.announce(optimizer, -(-steps // optimizer.gradient_accumulation_steps))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stops after the last step of the run; called by Keras."""
        if self.steps is not None and self.model.optimizer.ledger.num_releases >= self.steps:
            self.model.stop_training = True

    def on_train_end(self, logs: dict | None = None) -> None:
        """Takes back what was announced and did not happen; called by Keras."""
        self.reconcile(self.model.optimizer)
        self._file.write(self._released)
        self._released = self._file.segments

    def close(self) -> None:
        """Lets another ReleaseLog open the file."""
        self._file.close()
