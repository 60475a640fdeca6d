"""One trial of a search: it trains and scores one candidate, and costs what was planned.

`check_optimizer` and `prepare` check the model that `build_model` made. `PrivateTrial` trains it,
in as many processes as it takes. `TrialBudget`, its last callback, sees to it that every trial
makes exactly the planned releases with the planned noise.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp._keras import models
from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp.accounting.composition import repeated
from tf_adaptive_dp.accounting.ledger import Ledger, has_ledger
from tf_adaptive_dp.callbacks.backups import epoch_backup, save_weights
from tf_adaptive_dp.callbacks.common import private_optimizer
from tf_adaptive_dp.callbacks.release_log import ReleaseLog
from tf_adaptive_dp.durable import ledger_file
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.mechanism.draw_numbers import SeenDraws
from tf_adaptive_dp.normalization import normalizations_in, unpaid_in
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.statement import num_unchecked, side_information_paragraph
from tf_adaptive_dp.tuning.keras_tuner import arguments
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments
from tf_adaptive_dp.tuning.keras_tuner.search_plan import SearchPlan

# The folder with everything that only an unfinished trial needs.
IN_PROGRESS = "in_progress"

# The event of a score that costs nothing.
NO_EVENT = dp_accounting.NoOpDpEvent()

# These end the search as a kill would, and the next call of `search` resumes the trial. Any other
# error of the training is a crash, which counts as the trial's result.
_INTERRUPTIONS = (
    OSError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.UnavailableError,
)


class PrivateTrial:
    """Trains and scores one candidate in a folder of its own, in as many processes as it takes.

    Strategies that show all trials count every release that may have happened. Releases that were
    lost with a process are paid for out of the trial's own budget, so the trial ends that many
    steps earlier. Strategies that show only the winner require that all trials follow one
    distribution, which an interruption must not change. There a trial repeats its lost steps with
    new noise, from its last finished epoch. Nobody sees what was lost, just as nobody sees the
    losers.

    Guarantee: no process releases more than `plan.schedule.releases` noisy gradients for this
    trial. With `plan.strategy.releases_all`, all processes together do not either.
    """

    def __init__(self, plan: SearchPlan, noise_multiplier: float, folder: str | os.PathLike):
        self._plan, self._noise_multiplier = plan, noise_multiplier
        self._folder = Path(folder)
        self._announced = 0
        self._working = self._folder / IN_PROGRESS
        self._log_path = self._working / "releases"

    def begin(self) -> None:
        """Creates the log of releases, before the journal notes that the trial began."""
        with self._log():
            pass

    def has_begun(self) -> bool:
        """Whether there is more in the folder than `begin` makes."""
        found = [path for path in self._folder.rglob("*") if path.is_file()]
        if found != [self._log_path]:
            return bool(found)
        with self._log() as log:
            return log is None or log.num_releases > 0

    def check_resumable(self) -> None:
        """Raises ValueError if the log of a trial that began is gone, and with it what it spent."""
        if self._plan.strategy.releases_all and not ledger_file.has_begun(self._log_path):
            raise ValueError(
                "The candidate in progress had a log of what it released, which is gone, so nobody "
                "knows what it spent. Restore the file, or start over with another `project_name` "
                f"and count this search as spent. Received: no releases in {str(self._log_path)!r}"
            )

    def run(
        self, model: tf.keras.Model, data: FitArguments, objective: Any, weights: str
    ) -> dict[str, Any]:
        """Trains the candidate, or resumes its training, and scores it.

        Args:
          model: made by `build_model`, then passed through `prepare`.
          data: the arguments of `fit`.
          objective: `keras_tuner.Objective`.
          weights: path for the weights of the last epoch.

        Returns:
          The outcome as plain JSON: `score`, as released, or `None` if it is not finite;
          `releases`, and how many of them were `unchecked`, with a batch that may not be a fresh
          draw; `error`, if the trial crashed; `side_information`, a sentence or nothing.
        """
        optimizer = model.optimizer
        outcome: dict[str, Any] = {
            "score": None,
            "error": None,
            "side_information": side_information_paragraph(
                optimizer.side_information, optimizer.ledger.other_events
            ),
        }
        try:
            with self._log() as log:
                self._train(model, data, log)
            save_weights(model, weights)
            outcome["score"] = self._score(model, data, objective)
        except (*_INTERRUPTIONS, NotPrivateError, BudgetExceededError):
            raise
        except Exception:
            outcome["error"] = traceback.format_exc()
        self._budget_of(model).require_planned()
        # After a crash the log may have more releases than the ledger.
        outcome["releases"] = max(optimizer.ledger.num_releases, self._announced)
        batches = self._plan.batches
        outcome["unchecked"] = num_unchecked(
            optimizer.ledger, batches.num_examples, batches.sampling
        )
        return outcome

    def _budget_of(self, model: tf.keras.Model) -> TrialBudget:
        budget = TrialBudget(self._plan, self._noise_multiplier)
        budget.set_model(model)
        return budget

    def clean(self) -> None:
        """Deletes everything that only an unfinished trial needs."""
        shutil.rmtree(self._working, ignore_errors=True)

    @contextlib.contextmanager
    def _log(self) -> Iterator[ReleaseLog | None]:
        if not self._plan.strategy.releases_all:
            yield None
            return
        log = ReleaseLog(self._log_path, steps=self._plan.schedule.releases, fsync=True)
        try:
            yield log
        finally:
            self._announced = log.num_releases
            log.close()

    def _train(self, model: tf.keras.Model, data: FitArguments, log: ReleaseLog | None) -> None:
        optimizer = model.optimizer
        backup = epoch_backup(self._working / "backup")
        budget = self._budget_of(model)
        if log is not None and not budget.room(log.num_releases):
            backup.set_model(model)  # the last process had made all releases
            backup.on_train_begin()
            backup.on_train_end()
            log.reconcile(optimizer)
            # As `fit` does at its end, for averages of the weights.
            optimizer.finalize_variable_values(model.trainable_variables)
            return
        information = optimizer.side_information
        own = [information] if isinstance(information, tf.keras.callbacks.Callback) else []
        users = arguments.callback_copies(
            data.callbacks, self._folder, releases_all=self._plan.strategy.releases_all
        )
        callbacks = [backup, *([] if log is None else [log]), *own, *users, budget]
        try:
            model.fit(
                **data.training(with_validation=self._plan.score.event == NO_EVENT),
                callbacks=callbacks,
            )
            budget.check_end()
        except NotPrivateError:
            budget.require_planned()  # which knows better than the log what is wrong
            raise
        finally:
            if log is not None:
                log.admit(optimizer)  # so that whoever resumes the search knows of it

    def _score(self, model: tf.keras.Model, data: FitArguments, objective: Any) -> float | None:
        exact = float(objective.get_value(data.scores(model)))
        # Noise cannot hide a score that is not finite. By a public rule it ranks last.
        return self._plan.score.released(exact) if math.isfinite(exact) else None


def prepare(
    model: tf.keras.Model, plan: SearchPlan, noise_multiplier: float, seen: SeenDraws | None = None
) -> None:
    """Checks that a model costs what was planned, and sets its noise multiplier.

    Args:
      model: as `build_model` made it.
      plan: the plan of the search.
      noise_multiplier: noise multiplier of every trial.
      seen: the batches of all trials, which have to be independent draws; `None` compares those of
        each trial.

    Raises:
      TypeError: if the optimizer is not private.
      NotPrivateError: if the model would cost something else, or does not accept that noise.
    """
    check_optimizer(model)
    found, planned = batch_size_and_parts(model), (plan.batches.batch_size, plan.schedule.parts)
    if found != planned:
        _refuse(
            "must have the same `expected_batch_size` and `gradient_accumulation_steps` for all "
            f"hyperparameters, {planned[0]:g} and {planned[1]}",
            f"{found[0]:g} and {found[1]}",
        )
    steps_per_call, steps_per_epoch = models.steps_per_call(model), plan.schedule.steps_per_epoch
    if models.overruns_epochs(steps_per_call, steps_per_epoch):
        _refuse(
            "must run a number of steps per call that divides the steps of an epoch: Keras 3 would "
            "exceed them in the last call",
            f"steps_per_execution={steps_per_call}, with {steps_per_epoch} steps per epoch",
        )
    if not plan.strategy.releases_all and plan.batches.sampling != "shuffled":
        _check_verifiable(model)
    try:
        model.optimizer.noise_multiplier = noise_multiplier
    except ValueError as error:
        raise NotPrivateError(
            "The optimizer of `build_model` cannot have the noise multiplier of the search, "
            f"{noise_multiplier:g}. Nothing was trained with it. {error}"
        ) from error
    # Shuffled batches are the same examples in every trial, and no law says how they are arranged.
    if seen is not None and sampling_epsilon.label_of(plan.batches.sampling) == "poisson":
        model.optimizer.compare_draws_with(seen)


def _check_verifiable(model: tf.keras.Model) -> None:
    """Raises NotPrivateError if no step of a model shows how its batch was drawn.

    The statement of a search that shows only the winner says whether the library verified the
    batches. To name a loser whose batches it could not verify would reveal something about it.
    """
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    replicas = model.distribute_strategy.num_replicas_in_sync
    if eager or replicas > 1:
        _refuse(
            "must train in a compiled step on one replica: only the winner is shown, and the "
            "statement cannot say for which candidates the library could not verify how batches "
            "were drawn. Leave out `run_eagerly` and the distribution strategy, or choose "
            "'composition' as the `strategy` of the search",
            f"run_eagerly={eager}, {replicas} replicas",
        )


def check_optimizer(model: tf.keras.Model) -> None:
    """Checks that the ledger of a model's optimizer counts all that the search accounts for.

    Args:
      model: as `build_model` made it.

    Raises:
      TypeError: if the optimizer is not private.
      NotPrivateError: if its ledger would not count what the search accounts for.
    """
    optimizer = getattr(model, "optimizer", None)  # Keras 3 sets it in `compile`
    if not has_ledger(optimizer):
        raise TypeError(
            "`build_model` must compile the model with an optimizer of tf_adaptive_dp, such as "
            f"`tf_adaptive_dp.DPAdamWOSM`. Received: optimizer={optimizer!r}"
        )
    optimizer = private_optimizer(model)
    _check_unit(optimizer)
    _check_counted(model, optimizer)
    if optimizer.seed is not None:
        _refuse("must draw secret noise: leave out `seed`", f"seed={optimizer.seed}")
    if models.tunes_steps_per_call(model):
        _refuse("must run a fixed number of steps per call", "auto-tuned steps_per_execution")


def _check_unit(optimizer: Any) -> None:
    """Raises NotPrivateError unless each example of a batch of known size is clipped alone."""
    if optimizer.expected_batch_size is None:
        _refuse("must know its batch size: pass `expected_batch_size`", "expected_batch_size=None")
    if optimizer.num_microbatches is not None:
        _refuse(
            "must clip every example: leave out `num_microbatches`, which halves the effective "
            "noise",
            f"num_microbatches={optimizer.num_microbatches}",
        )
    if optimizer.examples_per_user is not None:
        _refuse(
            "must protect examples: the search does not draw users, so leave out "
            "`examples_per_user`",
            f"examples_per_user={optimizer.examples_per_user}",
        )


def _check_counted(model: tf.keras.Model, optimizer: Any) -> None:
    """Raises NotPrivateError if a model releases something that the search does not count."""
    if optimizer.ledger.num_releases:
        _refuse(
            "must be created anew in each call of `build_model`",
            f"{optimizer.ledger.num_releases} releases in its ledger",
        )
    if optimizer.ledger.other_events:
        _refuse(
            "must not use side information that was itself released with privacy, nor come from a "
            "`PrivacyPlan` with `normalize_inputs=True` or `normalize_targets=True`, whose "
            "optimizers pay for the plan's normalization: the search does not count such a "
            "release, so create the optimizer without the plan, and normalize by public constants "
            "(`tf.keras.layers.Rescaling`)",
            f"{list(optimizer.ledger.other_events)}",
        )
    adapted = [layer for layer in normalizations_in(model) if layer.release_id]
    if adapted:
        _refuse(
            "must not train behind a `PrivateNormalization` that was adapted: the search does not "
            "count its release, so normalize by public constants (`tf.keras.layers.Rescaling`)",
            f"{adapted[0].name!r} with {adapted[0].dp_event!r}",
        )
    if not optimizer.noise.is_independent:
        _refuse(
            "must draw independent noise: the search does not account for other noise",
            f"noise={optimizer.noise!r}",
        )
    others = [other for other in _optimizers_within(model) if other is not optimizer]
    if others:
        _refuse(
            "must be the model's only private one: the search counts no other",
            f"a model with another one, {', '.join(map(repr, others))}",
        )


def batch_size_and_parts(model: tf.keras.Model) -> tuple[float, int]:
    """What the price of a trial depends on besides its noise.

    Args:
      model: one that `check_optimizer` accepts.

    Returns:
      The optimizer's `expected_batch_size` and `gradient_accumulation_steps`.
    """
    optimizer = private_optimizer(model)
    return optimizer.expected_batch_size, optimizer.parts_per_batch


def _optimizers_within(model: tf.keras.Model) -> list[tf.keras.optimizers.Optimizer]:
    """The private optimizers that a model or a layer in it holds, also in lists and mappings."""
    left: list[Any] = [vars(layer) for layer in (model, *layers_within(model))]
    found, seen = {}, set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple, set)):
            left += value
        elif isinstance(getattr(value, "ledger", None), Ledger):
            found[id(value)] = value
    return list(found.values())


def _refuse(what: str, received: str) -> NoReturn:
    raise NotPrivateError(
        f"All trials have to cost the same, so the optimizer of `build_model` {what}. Nothing was "
        f"trained with it. Received: {received}"
    )


class TrialBudget(tf.keras.callbacks.Callback):
    """Keeps a trial to its plan: the planned number of releases, noise and batch size.

    It must be the last callback of a trial.

    Guarantee: no step begins that would bring the ledger above `plan.schedule.releases`, or whose
    noise multiplier or batch size is known to differ from the plan. What shows only in the step is
    detected after the call of the training function: several releases in one step, less noise, as
    of padding that had a gradient, larger batches, repeated ones, and Poisson batches without the
    weights that mark their padding. `check_end`, called after `fit`, rejects a trial that ended
    with releases left: its length would be another release, whose price is unknown.
    """

    # A search pays for each trial as a whole, and shows nothing of what a crash discarded unless a
    # log counts it.
    pays_for_lost_releases = True

    def __init__(self, plan: SearchPlan, noise_multiplier: float):
        super().__init__()
        models.allow_tensors_as_logs(self)
        self._batches, self._schedule = plan.batches, plan.schedule
        self._planned = (noise_multiplier, plan.batches.batch_size)
        self._rows_are_known = False

    def room(self, released: int, next_step: int = 0) -> bool:
        """Whether the next call of the training function, at this step of an epoch, fits."""
        left = self._schedule.steps_per_epoch - next_step
        steps = min(self._steps_per_call, left or self._schedule.steps_per_epoch)
        return released + self._releases_in(steps) <= self._schedule.releases

    def set_model(self, model: tf.keras.Model) -> None:
        """Reads the number of steps per call; called by Keras."""
        super().set_model(model)
        self._steps_per_call = models.steps_per_call(model)

    def _releases_in(self, steps: int) -> int:
        return -(-steps // self._schedule.parts)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Rejects a step that was not planned; called by Keras."""
        optimizer = self.model.optimizer
        if optimizer.next_release() != self._planned:
            raise NotPrivateError(
                "Nothing may change the noise or the batch size of a trial. Received: noise "
                f"multiplier and expected batch size {optimizer.next_release()} instead of "
                f"{self._planned}"
            )
        self._before = optimizer.ledger.num_releases
        self._announced = self._releases_in(models.steps_per_call(self.model))
        if self._before + self._announced > self._schedule.releases:
            raise BudgetExceededError(
                f"The trial has no room for another step. Received: {self._before} releases of "
                f"{self._schedule.releases}"
            )

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stops when the next call would not fit; called by Keras."""
        released = self.model.optimizer.ledger.num_releases
        if released - self._before > self._announced:
            raise NotPrivateError(
                "A step of a trial must release one noisy gradient. Received: "
                f"{released - self._before} releases in a call that has {self._announced} steps"
            )
        self._check_rows()
        self._check_releases()
        self._check_draws()
        if not self.room(released, batch + 1):
            self.model.stop_training = True
        elif self.model.stop_training:
            # Not only after `fit`, which would save the epoch as if it were complete.
            self.check_end()

    def check_end(self) -> None:
        """Raises NotPrivateError if the trial ends before it made all releases that it may."""
        self.require_planned()
        released = self.model.optimizer.ledger.num_releases
        if self.room(released):
            raise NotPrivateError(
                "A trial ended early, but the length of a trial must not depend on the data: "
                "leave out callbacks that set `stop_training`, and pass data that last for all "
                "epochs. Then call `search` again, or start over with `overwrite=True` if an "
                "incomplete epoch was already saved. Received: "
                f"{released} releases of {self._schedule.releases}"
            )

    def require_planned(self) -> None:
        """Raises NotPrivateError if releases were not planned, by the steps of `fit` or others."""
        released = self.model.optimizer.ledger.num_releases
        if released > self._schedule.releases:
            raise NotPrivateError(
                "A trial must release what was planned and no more: leave out callbacks, metrics "
                "and a custom `fit` of the model that train it further. Epsilon does not cover "
                f"what this trial released, so do not publish it. Received: {released} releases, "
                f"{self._schedule.releases} were planned"
            )
        self._check_releases()

    def _check_releases(self) -> None:
        """Rejects what the ledger says of the releases if the plan says something else."""
        optimizer, sampling = self.model.optimizer, self._batches.sampling
        others = [s for s in optimizer.ledger.segments if s[:2] != self._planned]
        if others:
            raise NotPrivateError(
                "A trial released gradients with less noise or larger batches than planned, which "
                "epsilon does not cover, so do not publish it. Such batches have more rows than "
                "declared, or padding with a gradient. Received: (noise multiplier, batch size, "
                f"releases) {others}, planned: {self._planned}"
            )
        beside = optimizer.ledger.other_events
        uncounted = unpaid_in(self.model, optimizer)
        if uncounted is not None:
            beside += (uncounted.dp_event,)
        if beside:
            raise NotPrivateError(
                "A trial released something beside its gradients, which epsilon does not cover, so "
                "do not publish it. Leave out callbacks that release statistics or record other "
                f"events in the ledger. Received: {beside!r}"
            )
        if isinstance(sampling, Sampling):
            sampling.check_ledger(optimizer, self._batches.num_examples)

    def _check_draws(self) -> None:
        """Rejects repeated batches: the noise was computed for independent draws."""
        batches, ledger = self._batches, self.model.optimizer.ledger
        in_epochs = sampling_epsilon.label_of(batches.sampling) == "shuffled"
        for segment, known in zip(ledger.segments, ledger.checks):
            if repeated(segment, known, batches.num_examples, in_epochs=in_epochs):
                raise NotPrivateError(
                    "A trial released a batch that it or an earlier trial had released, so the "
                    "batches are not independent draws: leave out `cache`, `repeat` and the like "
                    "after they are drawn. "
                    f"Received: a batch that was also released {known.nearest} releases earlier"
                )

    def _check_rows(self) -> None:
        """Rejects batches of another size, for which the noise would be too small."""
        if self._rows_are_known or self._batches.sampling == "poisson":
            return
        self._rows_are_known = True
        rows = self.model.optimizer.rows_per_batch
        if isinstance(self._batches.sampling, Sampling):
            expected: float = self._batches.sampling.rows_per_batch(self._schedule.parts)
        else:
            expected = self._batches.batch_size / self._schedule.parts
        if rows != expected:
            raise NotPrivateError(
                f"`fit` got batches of {rows} rows, but the noise was computed for {expected:g}: "
                "pass the `sampling` that the data set was made with, or the right "
                "`expected_batch_size` to the optimizer. Received: "
                f"sampling={self._batches.sampling!r}"
            )
