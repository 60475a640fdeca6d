"""The training of models by a plan: how it begins and resumes, and what was trained last."""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.layers import layers_within
from tf_adaptive_dp._keras.models import (
    give_weights_axes_of_losses,
    has_generators,
    have_weights_made_outside,
    leave_padding_out_of_metrics,
    steps_per_call,
    takes_any_number_of_rows,
)
from tf_adaptive_dp._keras.tracebacks import level_of_caller, short_assertions
from tf_adaptive_dp.accounting.ledger import Ledger, has_ledger
from tf_adaptive_dp.callbacks.run_directory import (
    OTHER_EXAMPLES,
    OTHER_USERS,
    Fingerprint,
    RunDirectory,
    RunHistory,
)
from tf_adaptive_dp.normalization import (
    PlannedNormalization,
    PrivateNormalization,
    first_unpaid,
    normalizations_in,
    words_of,
)
from tf_adaptive_dp.plan_refusals import (
    PrivacyPlanLike,
    check_optimizer,
    check_steps_per_call,
    examples_of,
    explaining_batches,
    refuse_missing_targets,
    refuse_second_order,
    require_finite_weights,
    warn_of_values,
    with_strings_for_keras,
)
from tf_adaptive_dp.sampling.datasets import as_dataset, padding_for
from tf_adaptive_dp.sampling.poisson import PoissonSampling, RandomSizes
from tf_adaptive_dp.sampling.sources import (
    SINGLE_EXAMPLES,
    Arrays,
    Records,
    fingerprint,
    open_source,
    refuse_shuffled,
    with_class_weights,
)
from tf_adaptive_dp.sampling.users import UserRecords
from tf_adaptive_dp.side_information.public_gradients import PublicGradients
from tf_adaptive_dp.validation.layer_findings import has_own

# Of threads that begin to train with one plan at the same time, at least one has to warn.
_BEGINNING = threading.Lock()

_OUTSIDE = (
    "The model was trained outside the plan, by `model.fit` for example, so the plan cannot say "
    "what all of it has cost. If `HonestTuner` trained it, its `privacy_statement()` can, and no "
    "ledger. Otherwise `privacy_statement(model.optimizer, num_examples, delta)` can; pass "
    "`sampling=plan.sampling` if it was trained on `plan.batches` only."
)


class PlannedTraining:
    """Trains models within a `PrivacyPlan`; see `PrivacyPlan.fit`.

    Guarantee: nothing is trained whose releases the plan does not account for, as far as the model,
    its optimizer, the data and the run's directory show.

    Args:
      plan: the numbers, which do not change.
      users: the records of the users, if users are protected.

    Attributes:
      model: the model that was trained last, or `None`.
    """

    def __init__(self, plan: PrivacyPlanLike, users: UserRecords | None):
        self._plan, self._users = plan, users
        self.model: keras.Model | None = None
        self._history: RunHistory | None = None
        self._rows: list[dict[str, Any]] = []  # of the model that came with a copied plan
        self._optimizer: tf.keras.optimizers.Optimizer | None = None
        self._directory: str | None = None  # of the run of that optimizer
        # By whether the layer inverts. All have the same noise.
        self._normalizations = {
            invert: PlannedNormalization(plan.other_events[-1].noise_multiplier, users, invert)
            for invert, paid in ((False, plan.normalize_inputs), (True, plan.normalize_targets))
            if paid
        }
        self._made: weakref.WeakSet = weakref.WeakSet()  # optimizers that the plan made
        self._running: weakref.WeakSet = weakref.WeakSet()  # those that train at this moment
        self._warned_of_second_model = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is known about optimizers: a copy of the plan has made none.

        The copy has the model that was trained last, with its optimizer, and its history, so that
        it gives the same statement; but no model that was compiled anew since.
        """
        is_kept = self.model is not None and self.model.optimizer is self._optimizer
        return {
            **vars(self),
            "model": self.model if is_kept else None,
            "_rows": self.history if is_kept else [],
            # The optimizer comes with the model, which Keras knows how to copy, and the callback
            # holds files.
            **dict.fromkeys(("_optimizer", "_history", "_made", "_running")),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _made=weakref.WeakSet(), _running=weakref.WeakSet())
        self._optimizer = getattr(self.model, "optimizer", None)

    def note_optimizer(self, optimizer: Any) -> None:
        """Makes an optimizer of the plan warn if it is used outside of the plan."""
        self._made.add(optimizer)
        if isinstance(self._plan.sampling, RandomSizes):
            optimizer.expect_padding()

    @property
    def optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The optimizer of the last model.

        Raises:
          ValueError: if there is none, or it was used outside the plan.
        """
        if self._optimizer is None:
            outside = max((made.ledger.num_releases for made in self._made), default=0)
            if outside:
                raise ValueError(
                    f"{_OUTSIDE} Received: {outside} releases, none of them by the plan"
                )
            raise ValueError(
                "The plan has trained no model yet. Call `plan.fit` first, or use "
                "`privacy_statement` and `report.facts` with an optimizer of your own."
            )
        released = self._optimizer.ledger.num_releases
        if released > self._plan.steps:
            raise ValueError(
                f"{_OUTSIDE} Received: {released} releases, of which the plan made at most "
                f"{self._plan.steps}"
            )
        self._refuse_later_optimizer(self._optimizer)
        return self._optimizer

    def _refuse_later_optimizer(self, own: Any) -> None:
        """Raises, or warns, if the model was compiled with another optimizer and trained with it.

        Args:
          own: the optimizer that the plan trained the model with.
        """
        later = getattr(self.model, "optimizer", None)
        if later is None or later is own or not int(tf.convert_to_tensor(later.iterations)):
            return
        if not has_ledger(later):
            warnings.warn(
                "The model was trained further by an optimizer that adds no noise. This statement "
                "does not hold for the model as it is if that was on the same examples. Received: "
                f"{type(later).__name__} after {type(own).__name__}",
                stacklevel=level_of_caller(),
            )
        elif later.ledger.segments != own.ledger.segments:  # else it is a copy, with its state
            raise ValueError(
                f"{_OUTSIDE} Received: another optimizer than that of `plan.fit`, with "
                f"{later.ledger.num_releases} releases instead of {own.ledger.num_releases}"
            )

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of the last model's `RunHistory`, which are NOT private."""
        return self._rows if self._history is None else self._history.rows

    def normalization(self, values: Any, axis: int | None, invert: bool) -> PrivateNormalization:
        """See `PrivacyPlan.normalization`, and with `invert` `PrivacyPlan.denormalization`."""
        if invert not in self._normalizations:
            words = words_of(invert)
            raise ValueError(
                f"This plan has no budget for normalizing {words.data}. Make the plan with "
                f"`{words.argument}=True`. Received: {words.argument}=False"
            )
        planned = self._normalizations[invert]
        return planned.layer_for(values, axis, self._check_num_examples)

    def source(self, x: Any, y: Any, sample_weight: Any) -> Arrays | Records:
        """The examples in memory, or with random access; see `PrivacyPlan.batches`."""
        if self._users is not None:
            refuse_shuffled(x)
        source = open_source(examples_of(x, y, sample_weight), None, name="x")
        self._check_num_examples(len(source), isinstance(x, tf.data.Dataset))
        return source

    def batches(
        self,
        source: Arrays | Records,
        start_step: int,
        gradient_accumulation_steps: int,
        key: bytes | None,
        padding: tuple | None = None,
        equal_rows: bool = True,
    ) -> tf.data.Dataset:
        """See `PrivacyPlan.batches`, and `as_dataset` for `padding` and `equal_rows`."""
        return as_dataset(
            source,
            self._plan.sampling,
            start_step,
            key,
            gradient_accumulation_steps,
            masked=True,
            padding=padding,
            users=self._users,
            equal_rows=equal_rows,
        )

    def fit(
        self,
        model: keras.Model,
        data: tuple[Any, Any, Any],
        *,
        class_weight: Mapping[int, float] | None,
        directory: str | os.PathLike | None,
        settings: Mapping[str, Any],
        callbacks: Sequence[keras.callbacks.Callback],
        equal_rows: bool,
        fit_arguments: dict[str, Any],
    ) -> keras.callbacks.History:
        """Trains a model, or resumes its training.

        Args:
          model: see `PrivacyPlan.fit`, also for the errors.
          data: (x, y, sample_weight).
          class_weight: the weight of each class, or `None`.
          directory: where the run is kept, or `None`.
          settings: the public settings of the plan, which the directory keeps.
          callbacks: further callbacks.
          equal_rows: whether to pad all batches to one number of rows.
          fit_arguments: other arguments of `model.fit`.
        """
        normalizations = self._check_model(model, data[0])
        if directory is None:
            refuse_second_order(self._plan, model.optimizer)
        source = self.source(*data)
        if len(source.structure) == 1:
            refuse_missing_targets(model)
        if class_weight is not None:
            source = with_class_weights(source, class_weight)
        warn_of_values(model, source, class_weight)
        run = None if directory is None else self._open_run(directory, settings, model, source)
        recorded = model.optimizer.ledger.num_recorded_here
        try:
            if run is not None:
                run.log.require_run_of(model.optimizer)
                self._keep_normalizations(run, normalizations, model)
            self._warn_of_second_model(model, run)
            if not equal_rows:
                equal_rows = not _rows_may_differ(model, source, self._plan.sampling)
            return self._fit(model, source, run, callbacks, equal_rows, fit_arguments)
        finally:
            self._running.discard(model.optimizer)
            # Not before its first step, in which a copy learns what it was trained behind.
            if model.optimizer.ledger.num_recorded_here > recorded:
                for layer in normalizations:
                    model.optimizer.ledger.statistics.update(layer.releases)
            if run is not None:
                run.close()

    def _check_model(self, model: keras.Model, x: Any) -> list[PrivateNormalization]:
        """Raises unless a model can be trained on inputs within the plan.

        Returns:
          See `_check_normalization`.
        """
        optimizer = getattr(model, "optimizer", None)
        check_optimizer(self._plan, optimizer)
        information = getattr(optimizer, "side_information", None)
        if isinstance(information, PublicGradients):
            information.refuse_private_data(x)
        if model.built and not model.trainable_variables:
            raise ValueError(
                "The model has no trainable variables. Set `trainable = True` on the layers to "
                f"train. Received: model={model.name!r}"
            )
        require_finite_weights(model)
        normalizations = self._check_normalization(model)
        check_steps_per_call(self._plan, model)
        return normalizations

    def _open_run(
        self,
        directory: str | os.PathLike,
        settings: Mapping[str, Any],
        model: keras.Model,
        source: Arrays | Records,
    ) -> RunDirectory:
        # Otherwise the last call might not fit, so that the run would never be finished.
        settings = {**settings, "steps_per_execution": steps_per_call(model)}
        return RunDirectory(
            directory,
            settings,
            self._plan.steps,
            fingerprint=self._fingerprint(source),
            keeps_keys=not self._plan.noise.is_independent,
        )

    def _fingerprint(self, source: Arrays | Records) -> Fingerprint | None:
        """The data that may not change between the calls of `fit` for one run."""
        if self._users is not None:
            return Fingerprint("user_ids", self._users.fingerprint, OTHER_USERS)
        if not self._plan.noise.is_independent:
            return Fingerprint("examples", functools.partial(fingerprint, source), OTHER_EXAMPLES)
        return None

    def _keep_normalizations(
        self, run: RunDirectory, layers: Sequence[PrivateNormalization], model: keras.Model
    ) -> None:
        """Gives layers the statistics that the run began with, which its budget pays for.

        Gradients that were released before a kill belong to the first values.
        """
        values = [layer.get_weights() for layer in layers]
        kept = run.keep("normalization", values)
        if [[v.shape for v in of] for of in kept] != [[v.shape for v in of] for of in values]:
            raise ValueError(
                "The model must have the `PrivateNormalization` layers that the run in `directory` "
                "began with, each adapted before `fit` if it was then. Received: statistics of "
                f"shapes {[[v.shape for v in of] for of in values]}, and in the directory "
                f"{[[v.shape for v in of] for of in kept]}"
            )
        inside = layers_within(model)
        for layer, before in zip(layers, kept):
            changed = not all(map(np.array_equal, layer.get_weights(), before))
            if changed and not any(layer is x for x in inside):
                raise ValueError(
                    "The run in `directory` began with other statistics, and the model does not "
                    f"have the layer `{words_of(layer.invert).call}`, so `fit` cannot restore "
                    "them: the rest of the training would see data that were normalized with a "
                    "second release. Put the layer into the model. Received: a model without it"
                )
            layer.resume_with(before)

    def _fit(
        self,
        model: keras.Model,
        source: Arrays | Records,
        run: RunDirectory | None,
        callbacks: Sequence[keras.callbacks.Callback],
        equal_rows: bool,
        fit_arguments: dict[str, Any],
    ) -> keras.callbacks.History:
        """Trains with callbacks around a run's directory."""
        plan, parts = self._plan, model.optimizer.parts_per_batch
        finished = run is not None and run.is_finished
        if run is not None and finished:
            run.require_saved_epoch()
        # A directory says more about a run that resumes, and restores the epoch itself.
        trained = 0 if finished else model.optimizer.ledger.num_releases // plan.steps_per_epoch
        batches = self._batches_of_run(model, source, run, equal_rows)
        monitor, budget = plan.callbacks(None if run is None else f"{run.path}/logs")
        budget.epsilon = plan.limit_for(model.optimizer)
        history = RunHistory(lambda: monitor.not_private, None if run is None else run.history_path)
        reporting = [monitor, *([] if finished else [budget]), *callbacks, history]
        if "validation_data" in fit_arguments:
            validation_data = with_strings_for_keras(fit_arguments["validation_data"])
            fit_arguments = {**fit_arguments, "validation_data": validation_data}
        self._optimizer, self.model, self._history = model.optimizer, model, history
        self._directory = _place_of(run)
        model.optimizer.expect_rows(None if equal_rows else plan.sampling.rows)
        try:
            with explaining_batches(model), short_assertions():
                of_keras = model.fit(
                    batches,
                    epochs=0 if finished else plan.epochs,
                    initial_epoch=trained,
                    steps_per_epoch=parts * plan.steps_per_epoch,
                    shuffle=False,  # the batches are drawn already; Keras warns of anything else
                    callbacks=reporting if run is None else run.callbacks(reporting),
                    **fit_arguments,
                )
        finally:
            model.optimizer.expect_rows(None)
            if run is not None:
                run.log.admit(model.optimizer)  # what callbacks released after the log's own end
        if finished:  # as `fit` does after the last epoch, for averages of the weights
            model.optimizer.finalize_variable_values(model.trainable_variables)
        _add_earlier_epochs(of_keras, history.rows)
        if run is not None:
            _say_what_is_left(run, finished, fit_arguments.get("verbose", "auto"))
            plan.report(f"{run.path}/report.html")
        return of_keras

    def _batches_of_run(
        self,
        model: keras.Model,
        source: Arrays | Records,
        run: RunDirectory | None,
        equal_rows: bool,
    ) -> tf.data.Dataset:
        """The batches that a model trains on from where a run stands; prepares the model for them.

        Args:
          model: the compiled model.
          source: the examples.
          run: `None` if nothing is kept.
          equal_rows: whether all have the same number of rows.
        """
        # A finished run draws nothing more; Keras still looks at the shapes of a batch.
        start = 0 if run is None or run.is_finished else run.log.num_releases
        key = None
        if run is not None and run.keys is not None:
            key = self._plan.sampling.resumed_key(run.keys.groups)
        padding, parts = padding_for(model, source), model.optimizer.parts_per_batch
        batches = self.batches(source, start, parts, key, padding, equal_rows)
        if not has_own(model, "train_step"):
            have_weights_made_outside(model, batches.element_spec[0])
        batches = give_weights_axes_of_losses(model, batches)
        leave_padding_out_of_metrics(model)
        return batches

    def _check_num_examples(self, received: int, of_dataset: bool = False) -> None:
        """Raises if data are not those that the plan is about."""
        if received != self._plan.num_examples:
            name = "num_examples" if self._users is None else "len(user_ids)"
            single = f"{SINGLE_EXAMPLES} " if of_dataset else ""
            raise ValueError(
                f"`{name}` must be the number of examples that are trained on. {single}Received: "
                f"{received} examples, {name}={self._plan.num_examples!r}"
            )

    def _check_normalization(self, model: keras.Model) -> list[PrivateNormalization]:
        """Raises if statistics were released by an event that the plan does not pay for.

        Returns:
          The layers whose statistics the run must keep: the plan's own, and the model's.
        """
        layers = normalizations_in(model)
        made = [planned.layer for planned in self._normalizations.values()]
        own = [layer for layer in made if layer is not None]
        all_layers = own + [layer for layer in layers if all(layer is not x for x in own)]
        known = model.optimizer.ledger.statistics
        unpaid = first_unpaid(all_layers, model.optimizer, self._plan.other_events, known)
        if unpaid is not None:
            raise ValueError(
                "The model has a `PrivateNormalization` that the plan's budget does not pay for. "
                "Create it with `plan.normalization(x)`, of a plan with `normalize_inputs=True`, "
                "or `plan.denormalization(y)`, with `normalize_targets=True`; or pass its "
                "`dp_event` in `other_events`, once for each layer that was adapted, in addition "
                "to the events of side information. A layer of `clone_model` has no statistics: "
                "copy the model with `copy.deepcopy(model)`, or set its weights to those of the "
                "original. A layer that was adapted and then given the weights of "
                f"another counts for both. Received: {unpaid.name!r} with {unpaid.dp_event!r}, "
                f"other_events={self._plan.other_events!r}"
            )
        for planned in self._normalizations.values():
            planned.require_use(layers, model.name)
        return all_layers

    def _warn_of_second_model(self, model: keras.Model, run: RunDirectory | None) -> None:
        """Warns, once, that a model of the plan is not its first, or not the only one now."""
        with _BEGINNING:
            at_once = any(running is not model.optimizer for running in self._running)
            self._running.add(model.optimizer)
        if self._warned_of_second_model or not (at_once or self._is_second_model(model, run)):
            return
        self._warned_of_second_model = True
        warnings.warn(
            "This plan has already trained another model on these examples. The statement of "
            "each model is about that model alone: publishing both, or choosing between them, "
            "spends more. `HonestTuner` accounts for such a choice.",
            stacklevel=4,
        )

    def _is_second_model(self, model: keras.Model, run: RunDirectory | None) -> bool:
        """Whether the plan has trained another model, whose releases this one does not count.

        One that resumes the run of the first in its directory counts what that has released.
        """
        before = self._optimizer
        if before is None or before is model.optimizer:
            return False
        if run is not None and _place_of(run) == self._directory:
            # Not if the directory was emptied in between.
            if run.log.num_releases >= before.ledger.num_releases:
                return False
        released = before.ledger.segments
        return bool(released) and not Ledger.extends(model.optimizer.ledger.segments, released)


def _place_of(run: RunDirectory | None) -> str | None:
    """The directory of a run, however it was written."""
    return None if run is None else os.path.realpath(run.path)


def _add_earlier_epochs(history: keras.callbacks.History, rows: Sequence[dict[str, Any]]) -> None:
    """Gives Keras's history the epochs before an interruption, too.

    Args:
      history: what `model.fit` returned.
      rows: those of the `RunHistory`.
    """
    history.epoch = [row["epoch"] for row in rows]
    names = {name: None for row in rows for name in row["logs"]}  # in order, unlike a set
    history.history = {
        name: [row["logs"][name] for row in rows if name in row["logs"]] for name in names
    }


def _say_what_is_left(run: RunDirectory, was_finished: bool, verbose: int | str) -> None:
    """Says what a call of `fit` did not do, or will do if it is repeated."""
    directory = str(run.path)
    if was_finished:
        nothing = (
            f"Nothing was trained: the run in {directory!r} is finished, and the model has the "
            "weights that it saved last. To train anew, pass a new directory."
        )
        if verbose:
            print(nothing)
        else:  # in place of the weights that the model had, without a word
            warnings.warn(nothing, stacklevel=level_of_caller())
    elif verbose and not run.is_finished:
        print(
            f"A callback stopped the run in {directory!r} after {run.log.num_releases} of "
            f"{run.log.steps} steps. Save the model to keep it as it is: another call of `fit` "
            "continues the run and spends the rest of epsilon."
        )


def _rows_may_differ(model: keras.Model, source: Arrays | Records, sampling: Any) -> bool:
    """Whether batches may have about as many rows as were drawn, instead of all the same number.

    Their number of rows is private then, so it takes the search of the compiled step to see that
    nothing depends on it. XLA would compile the step for each number.

    Args:
      model: a compiled model.
      source: its examples.
      sampling: that of the plan.
    """
    optimizer = model.optimizer
    is_searched = not (model.run_eagerly or tf.config.functions_run_eagerly() or model.jit_compile)
    at_once = optimizer.parts_per_batch == 1 and model.distribute_strategy.num_replicas_in_sync == 1
    is_possible = (
        isinstance(sampling, PoissonSampling) and optimizer.expected_batch_size is not None
    )
    if not (is_searched and at_once and is_possible):
        return False
    if has_own(model, "train_step") and not model.built:
        return False  # it may call its parts on anything else than x
    if has_generators((model, *layers_within(model))):
        return False
    specs = [tf.TensorSpec([None, *shape], dtype) for shape, dtype in source.parts]
    return takes_any_number_of_rows(model, tf.nest.pack_sequence_as(source.structure, specs)[0])
