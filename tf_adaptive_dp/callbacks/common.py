"""The base class of the callbacks, and the checks and advice that they share."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.callers import callbacks_beside, running_fit
from tf_adaptive_dp._keras.models import have_metrics_made_outside
from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.normalization import refuse_unpaid_in
from tf_adaptive_dp.optimizers.compiled_step import refuse_step_of_another
from tf_adaptive_dp.optimizers.fit_warnings import warn_of_uncovered
from tf_adaptive_dp.optimizers.refusals import over_two_passes, refuse_data, refuse_rates
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.draws import Sampling


class PrivateCallback(tf.keras.callbacks.Callback):
    """Base of the callbacks that read the ledger of a private optimizer.

    Args:
      optimizer: the optimizer; `None` for that of the model that `fit` trains.
    """

    warns_before_training = True  # so that the optimizer need not

    def __init__(self, optimizer: tf.keras.optimizers.Optimizer | None = None):
        super().__init__()
        if optimizer is not None and not has_ledger(optimizer):
            raise TypeError(
                "`optimizer` must be an optimizer of tf_adaptive_dp, or None for that of the model."
                f" Received: optimizer={optimizer!r}"
            )
        self._optimizer = optimizer

    @property
    def optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The optimizer whose ledger counts: the one that was passed, or that of the model."""
        if self._optimizer is None:
            return private_optimizer(self.model)
        self._optimizer.require_known_state()
        return self._optimizer

    def require_counted_statistics(self) -> None:
        """Raises if the model normalizes its inputs by statistics that the ledger does not count.

        Raises:
          NotPrivateError: if ε would leave their release out.
        """
        if self.model is not None:
            refuse_unpaid_in(self.model, self.optimizer)

    def prepare_training(self) -> None:
        """Warns, once in a call of `fit`, of releases that ε does not cover, see `fit_warnings`.

        Without such a callback, the optimizer does it in its first step. That is too late to have
        the means of several losses made outside of the step, which is then traced twice.

        Raises:
          ValueError: if a callback sets the learning rate of an optimizer that adapts its own.
          NotPrivateError: if the data set of `fit` leaves out batches by what they hold, if
            accumulated batches reach from one pass into the next, or if the step of the model was
            built with another optimizer.
        """
        refuse_step_of_another(self.model, self.optimizer)
        beside = callbacks_beside(self)
        if next(c for c in beside if isinstance(c, PrivateCallback)) is not self:
            return
        refuse_rates(self.optimizer, beside)
        fit = running_fit(self.optimizer)
        if fit is not None:  # a second one traces no step, which would do so
            refuse_data(self.optimizer, fit)
        warn_of_uncovered(self.model, self.optimizer, beside)
        if isinstance(self.model, tf.keras.Model):
            have_metrics_made_outside(self.model)


def private_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    """Returns the optimizer of a model, which must be private, or raises TypeError."""
    optimizer: Any = getattr(model, "optimizer", None)  # before `fit` there is no model
    if not has_ledger(optimizer):
        raise TypeError(
            "The model must be compiled with an optimizer of tf_adaptive_dp, and the callback must "
            f"be passed to `fit`. Received: optimizer={optimizer!r}. For a custom loop, or a model "
            "with several optimizers, pass `optimizer` to the callback."
        )
    optimizer.require_known_state()  # a step that was compiled before does not ask
    return optimizer


def refuse_batch_over_two_passes(
    optimizer: tf.keras.optimizers.Optimizer, sampling: Sampling | str
) -> None:
    """Rejects batches with parts from two epochs: an example in both has a sensitivity of 2C."""
    if isinstance(sampling, str) and sampling != "poisson" and optimizer.unfinished_parts:
        raise over_two_passes(
            f"{optimizer.unfinished_parts} parts of {optimizer.parts_per_batch} at the end of an "
            "epoch"
        )


def begin_batches_anew(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Drops the parts of a batch in which an earlier run stopped, so that others do not join."""
    if optimizer.unfinished_parts:
        warnings.warn(
            f"Training stopped in the middle of a batch: {optimizer.unfinished_parts} of "
            f"{optimizer.parts_per_batch} parts are dropped. Nothing from them was released.",
            stacklevel=3,
        )
        optimizer.drop_unfinished_parts()


def steps_per_epoch(callback: tf.keras.callbacks.Callback) -> int | None:
    """The number of batches of an epoch, if `fit` knows it before it trains."""
    return (getattr(callback, "params", None) or {}).get("steps")


class NumExamplesCheck:
    """Compares what `fit` feeds with the number of examples that ε is computed for.

    With too large a number the sampling probability, and with it ε, would be too small; with too
    small a number examples are in several batches of an epoch.

    Args:
      num_examples: the number of examples in the training set.
      sampling: how batches are drawn.
      full_passes: whether each epoch of `fit` is one pass over the data, if it is shuffled.
    """

    def __init__(self, num_examples: int, sampling: Sampling | str, full_passes: bool):
        self._num_examples, self._sampling = num_examples, sampling
        self._full_passes = checks.boolean("full_passes", full_passes)
        # Releases before the epoch and the size of a batch, if the epoch is seen from its start.
        self._before: tuple[int, float | None] | None = None

    def begin(self, optimizer: tf.keras.optimizers.Optimizer, steps: int | None) -> None:
        """Compares before training, as far as the numbers are known.

        Args:
          optimizer: the private optimizer.
          steps: the number of batches of an epoch of `fit`, if it is known.

        Raises:
          ValueError: if they contradict each other.
        """
        if isinstance(self._sampling, Sampling):
            draws.require_drawn(self._sampling, self._num_examples)
        self._before = None
        if steps is not None:
            _, size = optimizer.next_release()
            self._compare(optimizer, steps // optimizer.parts_per_batch, size)

    def begin_epoch(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Notes what was released before the first batch of an epoch."""
        self._before = optimizer.ledger.num_releases, optimizer.next_release()[1]

    def end_epoch(self, optimizer: tf.keras.optimizers.Optimizer, was_stopped: bool) -> None:
        """Compares after an epoch, unless it was cut short or began in the middle.

        Args:
          optimizer: the private optimizer.
          was_stopped: whether a callback stopped training.

        Raises:
          ValueError: if they contradict each other.
        """
        noted, self._before = self._before, None
        if not was_stopped and noted is not None:
            before, size = noted
            size = size or optimizer.next_release()[1]  # which the first batch may have set
            self._compare(optimizer, optimizer.ledger.num_releases - before, size)

    def _compare(
        self, optimizer: tf.keras.optimizers.Optimizer, releases: int, size: float | None
    ) -> None:
        if self._sampling != "shuffled" or not self._full_passes or size is None or not releases:
            return
        fed = releases * size
        # The last batch of a pass may be dropped, or smaller than the others.
        slack = size if optimizer.parts_per_batch == 1 else 2 * size
        if abs(fed - self._num_examples) >= slack:
            raise ValueError(
                f"An epoch of `fit` has {releases} batches. With `expected_batch_size={size:g}` "
                f"these are {fed:g} examples, but `num_examples` says {self._num_examples}, which "
                f"are {self._num_examples / releases:.6g} in a batch, so ε would be wrong. If that "
                f"is the batch size of `fit`, pass it `batch_size={size:g}`, or the optimizer "
                "another `expected_batch_size`. If not, pass the number of examples in the "
                "training set as `num_examples`. If an epoch of `fit` is not one pass over the "
                "data, because `steps_per_epoch` says so, pass `full_passes=False`. If the ledger "
                "has noted the wrong number already, set `optimizer.ledger.fewest_units`, too. "
                f"Received: num_examples={self._num_examples!r}"
            )


def longer_plan(
    noise_multiplier: float, batch_size: float | None, epochs: str = "more `epochs`"
) -> str:
    """The plan that trains a model longer, in the words of a message.

    Its releases must have the parameters of those so far, so neither of these may be chosen anew.

    Args:
      noise_multiplier: that of the releases so far.
      batch_size: theirs; `None` if it is unknown.
      epochs: how many the plan needs.
    """
    size = "the same `batch_size`" if batch_size is None else f"`batch_size={round(batch_size)}`"
    noise = f"`noise_multiplier={noise_multiplier!r}` in place of `epsilon`"
    return f"a plan with {noise}, {size} and {epochs}"
