"""Warnings of the first step of `fit`: of what ε does not cover, and of data in raw units."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.callers import is_in_search_of_keras_tuner, running_fit
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.accounting.ledger import is_chosen_by_search
from tf_adaptive_dp.optimizers.refusals import refuse_rates
from tf_adaptive_dp.validation.layer_findings import adapted_warning
from tf_adaptive_dp.validation.unit_findings import small_weight_findings, unit_findings

# What the callbacks here add to the logs. It is private, as `val_` metrics are the user's affair.
_PRIVATE_LOGS = ("epsilon", "delta", "learning_rate", "lr", "NOT_PRIVATE", "WITHOUT_SEARCH")

_SEARCH = (
    "A search of hyperparameters chose this model, and used the data more often than the "
    "optimizer's ledger shows. The ε of this training does not cover the search, and neither does "
    "a budget for it: add what you spend now to the epsilon and delta of the search, "
    "`HonestTuner.privacy_statement()`. If the search was on other data, set "
    "`optimizer.ledger.chosen_by_search = False`."
)
_IN_SEARCH = (
    "This training is one trial of a KerasTuner search. Each trial uses the data, and so may the "
    "scores by which one is chosen, but the optimizer's ledger has the releases of this trial "
    "alone: its ε does not cover the search. `tf_adaptive_dp.tuning.HonestTuner` accounts for a "
    "whole search; ADADP needs none. If the search is on public data alone, ignore this."
)
_BY_METRICS = (
    "Callbacks act on metrics of the training data, which have no noise. ε does not cover what "
    "follows from that: when training stops, which weights are kept, how the learning rate falls. "
    "Received: {names}. Monitor a metric of public validation data ('val_…'), or decide before "
    "training (a fixed number of epochs, a `LearningRateSchedule`, ADADP); leave out "
    "`TerminateOnNaN`."
)
_FORGETS = (
    "Training that resumes from a backup forgets the releases since that backup, so ε is too small "
    "if the process was killed. Train with `PrivacyPlan.fit(directory=...)`, which counts them, or "
    "add a `tf_adaptive_dp.callbacks.ReleaseLog`. Received: {name} without a `ReleaseLog`"
)

_FEW = 32  # examples that tell their units
# The calls of `fit`, by their callbacks, whose step was asked before.
_SEEN: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_in_fit(optimizer: Any) -> None:
    """Does for the `fit` that is running what callbacks of the library do where there are some.

    Args:
      optimizer: the one whose step is being built.

    Raises:
      ValueError: if a callback sets the learning rate of an optimizer that adapts its own.
    """
    with tf.init_scope():
        fit = running_fit(optimizer)
        if fit is None or fit.callbacks is None or fit.callbacks in _SEEN:
            return
        _SEEN.add(fit.callbacks)
        callbacks = fit.callbacks.callbacks
        refuse_rates(optimizer, callbacks)
        if not any(getattr(c, "warns_before_training", False) for c in callbacks):
            warn_of_uncovered(fit.model, optimizer, callbacks)


def warn_of_uncovered(
    model: tf.keras.Model, optimizer: Any, callbacks: Sequence[tf.keras.callbacks.Callback]
) -> None:
    """Warns of searches, whose ledgers it marks, of layers that `adapt` set, and of callbacks.

    Args:
      model: the model that is trained.
      optimizer: its private optimizer.
      callbacks: all that `fit` calls.
    """
    found = [_SEARCH] if is_chosen_by_search(optimizer) else []
    if is_in_search_of_keras_tuner():
        optimizer.ledger.chosen_by_search = True
        found = [_IN_SEARCH]
    found += filter(None, [adapted_warning(model)])
    deciding = [
        f"{type(c).__name__}(monitor={getattr(c, 'monitor', 'loss')!r})"
        for c in callbacks
        if _acts_on_training(c)
    ]
    if deciding:
        found.append(_BY_METRICS.format(names=", ".join(deciding)))
    backups = [type(c).__name__ for c in callbacks if _restores(c)]
    pays = any(getattr(c, "pays_for_lost_releases", False) for c in callbacks)
    if backups and not (pays or count_lost_releases(callbacks)):
        found.append(_FORGETS.format(name=backups[0]))
    for message in found:
        warnings.warn(message, stacklevel=level_of_caller())


def count_lost_releases(callbacks: Sequence[tf.keras.callbacks.Callback]) -> bool:
    """Whether one of the callbacks gives a ledger back what it lacks, as a `ReleaseLog` does."""
    return any(getattr(c, "counts_lost_releases", False) for c in callbacks)


def warn_of_units(optimizer: Any) -> None:
    """Warns, before the first step of `fit`, of data in units that leave little to learn.

    It judges by a few examples, as `plan.fit` and `validate` do.
    """
    with tf.init_scope():
        fit = None if optimizer.rows_per_batch else running_fit(optimizer, on_replicas=False)
        batch = None if fit is None else fit.some_examples(_FEW)
        if fit is None or batch is None:
            return
        tensors = tf.nest.map_structure(lambda p: None if p is None else _tensor(p), batch)
        findings = unit_findings(fit.model, getattr(fit.model, "loss", None), tensors)
        findings += small_weight_findings(fit.model, tensors[2])
    for finding in findings:
        warnings.warn(f"{finding.what} {finding.fix}", stacklevel=level_of_caller())


def _acts_on_training(callback: tf.keras.callbacks.Callback) -> bool:
    """Whether a callback decides by a metric that `fit` computes from the training data."""
    if isinstance(callback, tf.keras.callbacks.TerminateOnNaN):
        return True  # by the loss, which a single example can make NaN
    monitor = getattr(callback, "monitor", None)
    if not isinstance(monitor, str) or not getattr(callback, "save_best_only", True):
        return False
    return not monitor.startswith("val_") and monitor not in _PRIVATE_LOGS


def _restores(callback: tf.keras.callbacks.Callback) -> bool:
    """Whether a callback resumes a training from what it saved."""
    of_keras = isinstance(callback, tf.keras.callbacks.BackupAndRestore)
    return of_keras or getattr(callback, "restores_backups", False)


def _tensor(part: np.ndarray) -> tf.Tensor | None:
    """A tensor of numbers; `None` for anything else, which has no units."""
    return tf.convert_to_tensor(part) if part.dtype.kind in "fiu" else None
