"""One trial: a model is checked, trained within its allowance, and scored once."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp.callbacks.common import private_optimizer
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.privacy.wording import of_side_information
from tf_adaptive_dp.release_log import ReleaseLog
from tf_adaptive_dp.selection import callback_rules
from tf_adaptive_dp.selection.allowance import Allowance
from tf_adaptive_dp.selection.fit_arguments import FitArguments
from tf_adaptive_dp.selection.plan import Plan

# The folder of what only an unfinished trial needs.
IN_PROGRESS = "in_progress"

# Of a score that costs nothing.
NO_EVENT = dp_accounting.NoOpDpEvent()

# They end the search as a kill would: the trial goes on when it is called again. All else that
# training may raise is a crash, which counts as the trial's result.
_INTERRUPTIONS = (
    OSError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.UnavailableError,
)


def settings(model: tf.keras.Model) -> tuple[float, int]:
    """What a trial's price depends on besides its noise.

    Args:
      model: as `build_model` made it.

    Returns:
      The optimizer's `expected_batch_size` and `gradient_accumulation_steps`.

    Raises:
      TypeError: if the optimizer is not private.
      NotPrivateError: if its ledger would count otherwise than the search does.
    """
    optimizer = private_optimizer(model)
    if optimizer.expected_batch_size is None:
        _refuse("must know its batch size: pass `expected_batch_size`", "expected_batch_size=None")
    if optimizer.num_microbatches is not None:
        _refuse(
            "must clip every example: leave out `num_microbatches`, which halves the noise that "
            "counts",
            f"num_microbatches={optimizer.num_microbatches}",
        )
    if optimizer.ledger.num_releases:
        _refuse(
            "must be a new one in each call of `build_model`",
            f"{optimizer.ledger.num_releases} releases in its ledger",
        )
    if optimizer.ledger.other_events:
        _refuse(
            "must not use side information that was itself released with privacy: the search does "
            "not count that",
            f"{list(optimizer.ledger.other_events)}",
        )
    if optimizer._mechanism.noise.seed is not None:
        _refuse(
            "must draw secret noise: leave out `seed`", f"seed={optimizer._mechanism.noise.seed}"
        )
    if getattr(model, "enable_tune_steps_per_execution", False):
        _refuse("must make calls of a fixed number of steps", "auto-tuned steps_per_execution")
    return optimizer.expected_batch_size, optimizer.gradient_accumulation_steps


def _refuse(what: str, received: str) -> None:
    raise NotPrivateError(
        f"All trials have to cost the same, so the optimizer of `build_model` {what}. Nothing was "
        f"trained with it. Received: {received}"
    )


def prepare(model: tf.keras.Model, plan: Plan, noise_multiplier: float) -> None:
    """Checks that a model costs what is planned, and sets its noise.

    Args:
      model: as `build_model` made it.
      plan: of the search.
      noise_multiplier: of every trial.

    Raises:
      TypeError: if the optimizer is not private.
      NotPrivateError: if the model would cost something else, or cannot have that noise.
    """
    found, planned = settings(model), (plan.batch_size, plan.parts)
    if found != planned:
        _refuse(
            "must have the same `expected_batch_size` and `gradient_accumulation_steps` for all "
            f"hyperparameters, {planned[0]:g} and {planned[1]}",
            f"{found[0]:g} and {found[1]}",
        )
    try:
        model.optimizer.noise_multiplier = noise_multiplier
    except ValueError as error:
        raise NotPrivateError(
            "The optimizer of `build_model` cannot have the noise multiplier of the search, "
            f"{noise_multiplier:g}. Nothing was trained with it. {error}"
        ) from error


class Trial:
    """Trains and scores one candidate in a folder of its own, in as many processes as it takes.

    The strategies that show all trials count every release that may have happened: those that were
    lost with a process are paid for out of the trial's own allowance, and it ends so many steps
    early. The strategies that show the winner alone rest on trials that are drawn from one
    distribution, which an interruption must not change: there a trial makes its lost steps again,
    with new noise and from its last finished epoch. What was lost is seen by nobody, like losers.

    Guarantee: no process releases more than `plan.releases` noisy gradients for this trial, and
    with `plan.strategy.releases_all` all processes together do not.
    """

    def __init__(self, plan: Plan, noise_multiplier: float, folder: str | os.PathLike):
        self._plan, self._noise_multiplier = plan, noise_multiplier
        self._folder = Path(folder)
        self._announced = 0
        self._working = self._folder / IN_PROGRESS

    def run(
        self, model: tf.keras.Model, data: FitArguments, objective: Any, weights: str
    ) -> dict[str, Any]:
        """Trains, or goes on, and scores.

        Args:
          model: as `build_model` made it, `prepare`d.
          data: what to train with.
          objective: `keras_tuner.Objective`.
          weights: where the weights of the last epoch go.

        Returns:
          The outcome as plain JSON: `score`, released, or `None` if there is none that is finite;
          `releases`; `error`, if it crashed; `side_information`, a sentence or nothing.
        """
        optimizer = model.optimizer
        outcome = {
            "score": None,
            "error": None,
            "side_information": of_side_information(optimizer.side_information),
        }
        try:
            with self._log() as log:
                self._train(model, data, log)
            model.save_weights(weights)
            outcome["score"] = self._score(model, data, objective)
        except (*_INTERRUPTIONS, NotPrivateError, BudgetExceededError):
            raise
        except Exception:
            outcome["error"] = traceback.format_exc()
        # After a crash the log may know of more than the ledger.
        outcome["releases"] = max(optimizer.ledger.num_releases, self._announced)
        return outcome

    def clean(self) -> None:
        """Deletes what only an unfinished trial needs."""
        shutil.rmtree(self._working, ignore_errors=True)

    @contextlib.contextmanager
    def _log(self) -> Iterator[ReleaseLog | None]:
        if not self._plan.strategy.releases_all:
            yield None
            return
        log = ReleaseLog(self._working / "releases", steps=self._plan.releases, fsync=True)
        try:
            yield log
        finally:
            self._announced = log.num_releases
            log.close()

    def _train(self, model: tf.keras.Model, data: FitArguments, log: ReleaseLog | None) -> None:
        optimizer = model.optimizer
        backup = tf.keras.callbacks.BackupAndRestore(
            str(self._working / "backup"), delete_checkpoint=False
        )
        allowance = Allowance(self._plan, self._noise_multiplier)
        allowance.set_model(model)
        if log is not None and not allowance.room(log.num_releases):
            backup.set_model(model)  # all was released before the process ended
            backup.on_train_begin()
            backup.on_train_end()
            log.reconcile(optimizer)
            return
        information = optimizer.side_information
        own = [information] if isinstance(information, tf.keras.callbacks.Callback) else []
        users = callback_rules.copies(
            data.callbacks, self._folder, releases_all=self._plan.strategy.releases_all
        )
        callbacks = [backup, *([] if log is None else [log]), *own, *users, allowance]
        try:
            model.fit(
                **data.training(with_validation=self._plan.score.event == NO_EVENT),
                callbacks=callbacks,
            )
            allowance.check_end()
        except NotPrivateError:
            if log is not None:
                with contextlib.suppress(ValueError):
                    log.reconcile(optimizer)  # notes what was released beyond what was announced
            raise

    def _score(self, model: tf.keras.Model, data: FitArguments, objective: Any) -> float | None:
        exact = float(objective.get_value(data.scores(model)))
        # No noise hides a score that is not finite: by a public rule it is the worst there is.
        return self._plan.score.released(exact) if math.isfinite(exact) else None
