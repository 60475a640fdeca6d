"""Keras callbacks that report what was spent, and stop before too much is."""

from __future__ import annotations

import math
import warnings

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.privacy import accounting
from tf_adaptive_dp.privacy import sampling as samplings
from tf_adaptive_dp.privacy.statement import privacy_statement


def _private_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    optimizer = getattr(model, "optimizer", None)  # no model before the callback is in `fit`
    if not hasattr(optimizer, "ledger"):
        raise TypeError(
            "The model must be compiled with an optimizer of tf_adaptive_dp, and the callback be "
            f"passed to `fit`. Received: optimizer={optimizer!r}"
        )
    return optimizer


def _refuse_batch_over_two_passes(optimizer, sampling: samplings.Sampling | str) -> None:
    """A batch whose parts come from two passes may hold an example twice: a sensitivity of 2C."""
    if isinstance(sampling, str) and sampling != "poisson" and optimizer.unfinished_parts:
        raise NotPrivateError(
            "An accumulated batch must not reach from one pass over the data into the next, where "
            f"an example could join it twice. Received: {optimizer.unfinished_parts} parts of "
            f"{optimizer.gradient_accumulation_steps} at the end of an epoch. Let the number of "
            "steps an epoch be a multiple of `gradient_accumulation_steps` (`steps_per_epoch`, "
            "`drop_remainder`), or draw batches with a sampling of tf_adaptive_dp."
        )


def _begin_batches_anew(optimizer) -> None:
    """A run that stopped inside a batch left parts of it; others must not join them."""
    if optimizer.unfinished_parts:
        warnings.warn(
            f"Training stopped in the middle of a batch: {optimizer.unfinished_parts} of "
            f"{optimizer.gradient_accumulation_steps} parts are dropped. Nothing of them was "
            "released.",
            stacklevel=3,
        )
        optimizer._mechanism.accumulator.drop()


class PrivacyMonitor(tf.keras.callbacks.Callback):
    """Shows the ε that was spent: in `fit`'s progress line, its history and TensorBoard.

    At the end of each epoch `epsilon`, `delta` and `learning_rate` join the logs. TensorBoard gets
    them under `privacy/` and `training/`, ADADP's error and acceptance under `adadp/` (computed
    from released gradients, so private) and, under `not_private/`, figures of the raw gradients:
    the share of clipped examples, quantiles of the norms, examples that were not finite.

    Guarantee: ε is the accountant's for all that stands in the optimizer's ledger, for adding or
    removing one example and Poisson sampling with probability L / `num_examples`. For shuffled
    batches that is the customary approximation, and `statement()` says so; for subsets of fixed
    size ε is another one, for replacing an example. A sampling object is compared with what the
    optimizer saw and released, and an error says where they differ; a label is believed. What
    stands under `not_private/`, and the training loss and metrics, are not covered: do not publish
    them.

    Args:
      num_examples: number of examples of the training set.
      delta: δ; well below 1 / num_examples.
      log_dir: where TensorBoard's files go; `None` writes none.
      sampling: how batches are drawn: the sampling that went into `poisson_batches` and the like,
        or for batches of your own `"poisson"`, `"fixed"` or `"shuffled"`; see `privacy_statement`.
      accountant: `"rdp"` or the tighter `"pld"`.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.

    >>> monitor = PrivacyMonitor(num_examples=60_000, delta=1e-5)
    >>> monitor.sampling
    'shuffled'
    """

    def __init__(
        self,
        num_examples: int,
        delta: float,
        log_dir: str | None = None,
        *,
        sampling: samplings.Sampling | str = "shuffled",
        accountant: str = "rdp",
    ):
        super().__init__()
        self.num_examples = checks.integer("num_examples", num_examples, 1)
        self.delta = accounting.check_probability("delta", delta)
        self.log_dir = log_dir
        self.sampling = samplings.check_sampling(sampling)
        self.accountant = checks.choice("accountant", accountant, accounting.ACCOUNTANTS)
        self._writer = None
        self._new_run = False

    def epsilon(self) -> float:
        """ε spent so far by the optimizer of the model."""
        return samplings.epsilon_spent(
            self.sampling,
            _private_optimizer(self.model),
            self.num_examples,
            self.delta,
            accountant=self.accountant,
        )

    def statement(self) -> str:
        """The guarantee in words; see `privacy_statement`."""
        return privacy_statement(
            _private_optimizer(self.model),
            self.num_examples,
            self.delta,
            sampling=self.sampling,
            accountant=self.accountant,
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the optimizer is private; called by Keras."""
        optimizer = _private_optimizer(self.model)
        _begin_batches_anew(optimizer)
        self._released = optimizer.ledger.num_releases
        self._check_sampling(optimizer)
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reports; called by Keras."""
        optimizer = self.model.optimizer
        _refuse_batch_over_two_passes(optimizer, self.sampling)
        summary = optimizer.statistics.summary(reset=True)
        self._check_rows(optimizer)
        self._warn_of_large_batches(summary.num_examples)
        private = {
            "epsilon": self.epsilon(),
            "delta": self.delta,
            "learning_rate": float(tf.convert_to_tensor(optimizer.learning_rate).numpy()),
        }
        if logs is not None:
            logs.update(private)
        if self._writer is None:
            return
        scalars = {
            "privacy/epsilon": private["epsilon"],
            "privacy/delta": self.delta,
            "training/learning_rate": private["learning_rate"],
            "not_private/clipped_share": summary.clipped_share,
            "not_private/non_finite_examples": summary.num_non_finite,
        }
        for quantile, norm in summary.norm_quantiles.items():
            scalars[f"not_private/gradient_norm_quantile_{quantile}"] = norm
        if hasattr(optimizer, "acceptance"):
            scalars["adadp/error"] = optimizer.last_error
            scalars["adadp/acceptance"] = optimizer.acceptance
        with self._writer.as_default(step=epoch):
            for tag, value in scalars.items():
                tf.summary.scalar(tag, value)
        self._writer.flush()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Closes TensorBoard's file; called by Keras."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _check_sampling(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Refuses, before training, an optimizer that is not made for the sampling."""
        if not isinstance(self.sampling, samplings.Sampling):
            self.epsilon()  # what contradicts the ledger is an error before more is released
            return
        self._new_run = self._released == 0
        size = self.sampling.expected_batch_size(self.num_examples)
        _, set_size = optimizer.next_release()
        if set_size is None and self.sampling.label != "poisson":
            return  # it will be that of the first batch
        if set_size is None or not math.isclose(set_size, size, rel_tol=1e-9):
            raise ValueError(
                f"The optimizer must have `expected_batch_size={size!r}`, which is that of the "
                f"sampling. Received: expected_batch_size={set_size!r}, sampling={self.sampling!r}"
            )
        self.sampling.check_delta(self.num_examples, self.delta)
        self.epsilon()  # makes the other checks

    def _check_rows(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Batches of another shape than the sampling's cannot be the sampling's."""
        if not isinstance(self.sampling, samplings.Sampling) or not self._new_run:
            return
        rows = int(optimizer._mechanism._fixed_batch_size.numpy())
        accumulated = optimizer.gradient_accumulation_steps
        expected = self.sampling.rows_per_batch(accumulated)
        if rows != expected:
            raise ValueError(
                f"`fit` got batches of {rows} rows, but those of the sampling have "
                f"{expected}: pass the sampling that the dataset was made with, or say "
                f"`sampling='shuffled'`. Received: sampling={self.sampling!r}"
            )

    def _warn_of_large_batches(self, num_examples: int) -> None:
        """ε is computed for the expected batch size; batches that are larger make it wrong."""
        optimizer = self.model.optimizer
        released = optimizer.ledger.num_releases
        steps, self._released = released - self._released, released
        _, size = optimizer.next_release()
        if not steps or size is None:
            return
        # Six standard deviations of a sum of Poisson batches: once in a billion epochs by chance.
        limit = size * steps + 6 * math.sqrt(size * steps)
        if optimizer.num_microbatches is None and num_examples > limit:
            warnings.warn(
                f"The batches held {num_examples / steps:.1f} examples on average, but ε is "
                f"computed for `expected_batch_size`={size:g}: the ε shown is too small. Set "
                "`optimizer.expected_batch_size` to the real mean.",
                stacklevel=2,
            )


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Stops training before the step that would overspend the budget.

    Guarantee: as long as the ledger holds all that was released, ε stays at most `epsilon`, in the
    sense of `PrivacyMonitor`: training stops as soon as the next call of the training function
    (`steps_per_execution` steps) does not fit. A step that does not fit because another callback
    changed the noise or the batch size just before it is refused with an error.

    Args:
      epsilon: the largest ε allowed, what the ledger already holds included.
      delta: δ.
      num_examples: number of examples of the training set.
      batch_size: the batch size, if the optimizer has no `expected_batch_size`; the first step
        cannot be priced otherwise.
      sampling: how batches are drawn, as for `PrivacyMonitor`, whose ε depends on it.
      accountant: `"rdp"` or the tighter `"pld"`.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.
      BudgetExceededError: when training begins and no step fits, or as said above.

    >>> budget = PrivacyBudget(epsilon=2.0, delta=1e-5, num_examples=60_000)
    >>> budget.epsilon
    2.0
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        num_examples: int,
        *,
        batch_size: float | None = None,
        sampling: samplings.Sampling | str = "shuffled",
        accountant: str = "rdp",
    ):
        super().__init__()
        self.epsilon = checks.number("epsilon", epsilon, 0, strict=True)
        self.delta = accounting.check_probability("delta", delta)
        self.num_examples = checks.integer("num_examples", num_examples, 1)
        if batch_size is not None:
            checks.number("batch_size", batch_size, 0, strict=True)
        self.batch_size = batch_size
        self.sampling = samplings.check_sampling(sampling)
        self.accountant = checks.choice("accountant", accountant, accounting.ACCOUNTANTS)
        self._priced: tuple = ()

    def releases_left(self) -> int:
        """How many more steps fit with the optimizer's present parameters."""
        optimizer = _private_optimizer(self.model)
        noise_multiplier, size = optimizer.next_release()
        if None not in (size, self.batch_size) and optimizer.expected_batch_size is None:
            self._compare_batch_size(size)
        size = size or self.batch_size
        if size is None:
            raise ValueError(
                "The first step cannot be priced without its batch size. Pass "
                "`expected_batch_size` to the optimizer or `batch_size` to PrivacyBudget."
            )
        segments, released = optimizer.ledger.segments, optimizer.ledger.num_releases
        if segments and segments[-1][:2] == (noise_multiplier, size):
            segments.pop()  # more of the same need no new price
        price_of = (noise_multiplier, size, segments)
        if self._priced[:1] != (price_of,):
            left = samplings.releases_left(
                self.sampling,
                optimizer,
                noise_multiplier,
                size,
                self.num_examples,
                self.epsilon,
                self.delta,
                accountant=self.accountant,
            )
            self._priced = (price_of, released + left)
        return self._priced[1] - released

    def _compare_batch_size(self, size: float) -> None:
        """The first step was priced with what was said; it may have cost more than that."""
        if size != self.batch_size:
            raise ValueError(
                f"`batch_size` must be that of `fit`, which is {size:g}: the first step was "
                f"checked against the budget with another. Received: batch_size={self.batch_size!r}"
            )

    def _next_call_fits(self) -> bool:
        steps = self.model._steps_per_execution
        steps = 1 if steps is None else int(steps)
        accumulated = self.model.optimizer.gradient_accumulation_steps
        return self.releases_left() >= -(-steps // accumulated)

    def _require_room(self) -> None:
        if not self._next_call_fits():
            raise BudgetExceededError(
                f"No further step fits into the budget. Received: epsilon={self.epsilon}, "
                f"delta={self.delta}, with {self.model.optimizer.ledger.num_releases} releases "
                "in the ledger."
            )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Refuses to start what would overspend at once; called by Keras."""
        _begin_batches_anew(_private_optimizer(self.model))
        self._priced = ()
        self._require_room()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Refuses a step that was made dearer since the last check; called by Keras."""
        self._require_room()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stops when the next step would overspend; called by Keras."""
        if not self._next_call_fits():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Refuses an accumulated batch that would reach into the next pass; called by Keras."""
        _refuse_batch_over_two_passes(self.model.optimizer, self.sampling)
