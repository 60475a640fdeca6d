"""A log of releases, including those that no checkpoint has recorded."""

from __future__ import annotations

import os
import warnings
import weakref

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.models import allow_tensors_as_logs, steps_per_call
from tf_adaptive_dp.accounting.ledger import Ledger, has_ledger, wrong_size
from tf_adaptive_dp.accounting.releases import Contents, Segment
from tf_adaptive_dp.callbacks.common import PrivateCallback
from tf_adaptive_dp.durable.ledger_file import SegmentFile
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError

# The logs that announced or adopted the releases of an optimizer of this process: their identities.
_LOGS_OF: weakref.WeakKeyDictionary[tf.keras.optimizers.Optimizer, set[str]] = (
    weakref.WeakKeyDictionary()
)


def _require_ledger(optimizer: tf.keras.optimizers.Optimizer) -> None:
    if not has_ledger(optimizer):
        raise TypeError(
            f"The log needs an optimizer of tf_adaptive_dp. Received: optimizer={optimizer!r}"
        )
    optimizer.require_known_state()


class ReleaseLog(PrivateCallback):
    """Counts releases that a crash would otherwise erase, because no checkpoint has them yet.

    A checkpoint restores the ledger as it was saved. Later steps are forgotten, although their
    gradients may have been seen. So before each call of the training function, the log writes to a
    file what may have been released by the time the call returns. When training resumes, the log
    adds the missing releases to the ledger, and a warning says how many there were.

    Pass it to `fit` with `tf_adaptive_dp.callbacks.epoch_backup(folder)`, preferably directly after
    it and before other callbacks; ε is right in any order. With Keras's own `BackupAndRestore`,
    pass `delete_checkpoint=False`, since a process that ends during the deletion could not resume.
    The one of Keras 3 overwrites its files, so a process that is killed may leave a backup that
    cannot be read. Draw batches with `start_step=log.num_releases`, so that none is drawn twice.
    Also pass `steps`: Keras may otherwise train longer, because it restarts a dataset of exactly
    `steps_per_epoch` batches in each epoch and repeats steps from before the backup: with
    `steps_per_execution` above 1, and in Keras 3 always, because it begins the epoch of the backup
    anew.

    Guarantee: whenever and however often the process ends, by any signal, the ledger holds every
    release that `fit` began, with its noise multiplier and batch size, as soon as the first epoch
    begins. For each time that the process ended, it may also hold the releases of one more call
    that did not happen. So ε is never understated and never decreases. With `fsync` this also
    covers a failure of the machine. It assumes that `expected_batch_size` is right: of batches that
    turn out to be larger, the log learns when the call has returned. It also assumes that the file
    is kept and belongs to this training run alone. Opening a copy of the file gives a warning,
    since the copy and the original each count only their own releases.

    Args:
      path: the path of the log: a new file, or the log of the run to resume. Its directory is
        created. Each process of a distributed training needs a path of its own.
      steps: the number of releases of the whole run, lost ones included. Training stops when the
        ledger holds them, after the call of the training function that makes the last one: with
        `steps_per_execution` above 1 there may be a few more, which count. `None` leaves the end to
        `fit`.
      fsync: whether to wait for the disk before each call, so that the log also survives a power
        failure.
      optimizer: the private optimizer, for models that train with several (GANs); `None` for that
        of the model.
      releases_per_step: how many times a step of `fit` uses the optimizer.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range; if the file
        is not a log; in training, if log and ledger belong to different runs, or the optimizer
        does not know its batch size.
      RuntimeError: if another process uses the log.
      BudgetExceededError: if an epoch begins after `steps` releases.

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
      ...     backup = tf_adaptive_dp.callbacks.epoch_backup(f"{folder}/backup")
      ...     callbacks = [backup, log]
      ...     model.fit(tf.ones([12, 2]), tf.ones([12]), 4, epochs, verbose=0, callbacks=callbacks)
      ...     log.close()
      ...     return model.optimizer.ledger.num_releases
      >>> import tf_adaptive_dp
      >>> train(epochs=1), train(epochs=3)
      (3, 9)
    """

    counts_lost_releases = True

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        steps: int | None = None,
        fsync: bool = False,
        optimizer: tf.keras.optimizers.Optimizer | None = None,
        releases_per_step: int = 1,
    ):
        super().__init__(optimizer)
        self._per_step = checks.integer("releases_per_step", releases_per_step, 1)
        allow_tensors_as_logs(self)
        self.steps = None if steps is None else checks.integer("steps", steps, 1)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"`path` must be the path of a file. Received: path={path!r}")
        self._file = SegmentFile(path, fsync=checks.boolean("fsync", fsync))
        # What was released at least. The file says what was released at most.
        self._released = self._file.segments

    @property
    def segments(self) -> list[Segment]:
        """The releases that may have happened, oldest first."""
        return list(self._file.segments)

    @property
    def num_releases(self) -> int:
        """How many gradients may have been released: the `start_step` to resume with."""
        return sum(segment.num_releases for segment in self._file.segments)

    @property
    def has_begun(self) -> bool:
        """Whether releases were announced, rather than adopted."""
        return self.num_releases > 0 and not self._file.adopted

    def adopt(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Starts the log of an optimizer that has released gradients without one.

        Args:
          optimizer: an optimizer of tf_adaptive_dp.

        Raises:
          TypeError: if it has no ledger.
          ValueError: if the log already holds releases.
        """
        _require_ledger(optimizer)
        if self._file.segments:
            raise ValueError(
                "Only a new log can adopt an optimizer. Received: a log of "
                f"{self.num_releases} releases."
            )
        ledger = optimizer.ledger
        self._file.write(ledger.segments, ledger.fewest_units, adopted=True)
        self._released = self._file.segments
        self._note_run_of(optimizer)

    def _note_run_of(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        _LOGS_OF.setdefault(optimizer, set()).add(self._file.identity)

    def _is_log_of(self, optimizer: tf.keras.optimizers.Optimizer) -> bool:
        """Whether an optimizer announced releases in this log, or was adopted, in this process."""
        return self._file.identity in _LOGS_OF.get(optimizer, ())

    def require_run_of(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Raises if an optimizer has released gradients that are not of this run.

        Call it before a backup is restored, which replaces what they trained.

        Args:
          optimizer: an optimizer of tf_adaptive_dp.

        Raises:
          TypeError: if it has no ledger.
          ValueError: if the ledger holds releases that are not in the log, or the optimizer trained
            in this process without the log.
        """
        _require_ledger(optimizer)
        ledger = optimizer.ledger
        if not ledger.extends(self._file.segments, ledger.segments):
            self._refuse(ledger)
        self._require_not_trained_elsewhere(optimizer)

    def _require_not_trained_elsewhere(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Raises if this process trained something else with an optimizer; counts may agree."""
        if self._is_log_of(optimizer) or not self.num_releases:
            return
        recorded = optimizer.ledger.num_recorded_here
        if recorded:
            raise ValueError(
                "The optimizer has released gradients in this process that do not belong to the "
                "run of the log. To resume that run, build and compile a new model. To train this "
                "model on, pass the path of a new log, or a new directory, and call "
                "`adopt(optimizer)` of the new log once. Received: an optimizer that recorded "
                f"{recorded} releases, and a log with {self.num_releases} of another one"
            )

    def reconcile(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Adds releases to the ledger that are in the log but not in the ledger.

        Args:
          optimizer: an optimizer of tf_adaptive_dp, after its state was restored.

        Raises:
          TypeError: if it has no ledger.
          NotPrivateError: if steps released something else than was announced, or the ledger was
            set back and lacks more releases than those of the log.
          ValueError: if the ledger holds other releases that are not in the log, see the class, or
            the optimizer trained in this process without the log.
        """
        self._reconciled(optimizer)

    def _reconciled(self, optimizer: tf.keras.optimizers.Optimizer) -> Contents:
        """Does what `reconcile` says; returns what the ledger holds then, as a read takes time."""
        _require_ledger(optimizer)
        self._require_not_trained_elsewhere(optimizer)
        ledger, announced = optimizer.ledger, self._file.segments
        recorded = ledger.read()
        if not ledger.extends(announced, recorded.segments):
            self._refuse(ledger)
        lost = self.num_releases - recorded.num_releases
        if ledger.num_lost_in(recorded) > lost:  # of which the log does not know either
            ledger.require_nothing_lost()
        if ledger.extends(recorded.segments, self._released):
            self._released = recorded.segments
            return recorded
        ledger.restore(announced, recorded.checks)
        ledger.lower_units(self._file.fewest_units)
        self._released = announced
        warnings.warn(
            f"{lost} releases were not in the checkpoint, because training ended before they were "
            "saved. They are added to the ledger, so ε includes them.",
            stacklevel=3,
        )
        return ledger.read()

    def _refuse(self, ledger: Ledger) -> None:
        segments, announced = ledger.segments, self._file.segments
        if self._released is not announced and ledger.extends(segments, self._released):
            # First, the file must hold the truth.
            self._file.write(segments, ledger.fewest_units)
            declared, counted = announced[-1].batch_size, segments[-1].batch_size
            if counted > declared:
                raise NotPrivateError(wrong_size(declared, counted))
            raise NotPrivateError(
                "The releases differ from those announced. Put callbacks that change the noise or "
                "the batch size before ReleaseLog, and call `announce` before each step of a "
                f"custom training loop. Received: ledger={segments}, announced={announced}"
            )
        raise ValueError(
            "The log belongs to another run than the ledger, which holds releases that are not in "
            "the log. Nothing was changed. Pass the path of the run's own log. For a model trained "
            "without one, pass a new path and call `adopt(optimizer)` once. Received: "
            f"ledger={segments}, log={announced}"
        )

    def admit(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Writes down what was released without being announced, as after the end of `fit`.

        Args:
          optimizer: an optimizer. Nothing is written if it has made no step of this run in this
            process, or if its ledger lacks releases of the log.

        Raises:
          TypeError: if it has no ledger.
        """
        _require_ledger(optimizer)
        ledger = optimizer.ledger
        segments = ledger.segments
        known = ledger.extends(self._file.segments, segments)
        own = self._is_log_of(optimizer) and ledger.extends(segments, self._released)
        if own and not known:
            self._file.write(segments, ledger.fewest_units)

    def announce(self, optimizer: tf.keras.optimizers.Optimizer, num_releases: int = 1) -> None:
        """Writes down releases that are about to happen. Custom training loops must call it.

        Guarantee: when it returns, the file counts them; the class says how durably.

        Args:
          optimizer: an optimizer of tf_adaptive_dp.
          num_releases: the most there can be before the next call of this method.

        Raises:
          TypeError, ValueError, OSError: if it fails. Then do not release anything.
        """
        num_releases = checks.integer("num_releases", num_releases, 1)
        noise_multiplier, batch_size = optimizer.next_release(self._reconciled(optimizer))
        if batch_size is None:
            raise ValueError(
                "The first step cannot be announced without its batch size. Pass "
                "`expected_batch_size` to the optimizer."
            )
        more = Segment(noise_multiplier, batch_size, num_releases)
        ledger = optimizer.ledger
        self._file.write(ledger.extended(self._released, more), ledger.fewest_units)
        self._note_run_of(optimizer)

    def _of_training(self) -> tf.keras.optimizers.Optimizer:
        return self.model.optimizer if self._optimizer is None else self._optimizer

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Reconciles the ledger for callbacks that read it; called by Keras."""
        self.prepare_training()
        checks.fixed_steps_per_call(self.model)
        self.reconcile(self._of_training())

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Reconciles the ledger after a later callback restored it; called by Keras."""
        self.reconcile(self._of_training())
        if self.steps is not None and self.num_releases >= self.steps:
            raise BudgetExceededError(
                "The run already has all its releases. Received: "
                f"steps={self.steps}, with {self.num_releases} releases in the log."
            )

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Announces the steps of one call of the training function; called by Keras."""
        optimizer = self._of_training()
        uses = steps_per_call(self.model) * self._per_step
        self.announce(optimizer, -(-uses // optimizer.parts_per_batch))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Notes what was released, and stops after the last step; called by Keras.

        A later callback may restore an earlier state, with a ledger that lacks it.
        """
        recorded = self._reconciled(self._of_training())
        if self.steps is not None and recorded.num_releases >= self.steps:
            self.model.stop_training = True

    def on_train_end(self, logs: dict | None = None) -> None:
        """Removes announced releases that did not happen; called by Keras."""
        optimizer = self._of_training()
        self.reconcile(optimizer)
        adopted = self._file.adopted and self._file.segments == self._released
        self._file.write(self._released, optimizer.ledger.fewest_units, adopted=adopted)
        self._released = self._file.segments

    def close(self) -> None:
        """Closes the file, so that another ReleaseLog can open it."""
        self._file.close()
