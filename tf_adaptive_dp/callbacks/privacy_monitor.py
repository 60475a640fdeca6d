"""A Keras callback that reports the privacy spent."""

from __future__ import annotations

import math
import warnings
from typing import Any

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.callers import callbacks_beside
from tf_adaptive_dp._keras.models import (
    allow_tensors_as_logs,
    forget_saved_metrics,
    metrics_without_weights,
)
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.accounting import accountants, composition
from tf_adaptive_dp.accounting.ledger import Ledger, is_chosen_by_search
from tf_adaptive_dp.callbacks.common import (
    NumExamplesCheck,
    PrivateCallback,
    begin_batches_anew,
    refuse_batch_over_two_passes,
    steps_per_epoch,
)
from tf_adaptive_dp.callbacks.privacy_budget import PrivacyBudget
from tf_adaptive_dp.callbacks.tensorboard import TensorBoardLog
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.poisson import RandomSizes
from tf_adaptive_dp.statement import (
    noise_is_seeded,
    privacy_statement,
    unit_of,
    warn_of_large_delta,
)


class PrivacyMonitor(PrivateCallback):
    """Reports the ε spent so far in `fit`'s progress line, its history and TensorBoard.

    At the end of each epoch the callback adds `epsilon`, `delta` and `learning_rate` to the logs.
    It also adds `NOT_PRIVATE` with the value 1 if ε is infinite, because something was released
    without noise or side information came from the private data without privacy; and if the noise
    of the optimizer has a `seed`, with which anybody can remove it. `WITHOUT_SEARCH` has the value
    1 if a search of hyperparameters chose the model, whose cost ε leaves out.

    TensorBoard shows these first, in the group `privacy/`, with the ε of a `PrivacyBudget` beside
    it and the norm of a step's noise relative to the largest norm of its signal; its page "Custom
    scalars" shows ε against the budget in one chart, and "HParams" the public settings. ADADP's
    error and acceptance are under `step_size/`; they are private because they depend on released
    gradients only. Under `raw_gradients_NOT_PRIVATE/` are statistics of the raw gradients: the
    share of clipped examples, quantiles of the norms, and examples that were not finite.

    Guarantee: ε covers everything in the optimizer's ledger, for adding or removing one example
    and Poisson sampling with probability L / `num_examples`. For shuffled batches this is the
    customary approximation, as `statement()` says. For fixed-size subsets ε is for replacing one
    example; if the sampling draws users, for adding or removing one user. A sampling object is
    compared with what the optimizer saw and released, and an error reports any difference; a label
    is taken on trust. What is marked `NOT_PRIVATE`, the training loss and the metrics are not
    covered: do not publish them.

    Args:
      num_examples: the number of examples in the training set; of users, if the sampling draws
        users.
      delta: δ, which should be well below 1 / num_examples.
      log_dir: the directory for TensorBoard's files. `None` writes none.
      sampling: how batches are drawn: the sampling passed to `poisson_batches` or similar, or for
        batches of your own `"poisson"`, `"fixed"` or `"shuffled"`; see `privacy_statement`.
      accountant: `"rdp"` or the tighter `"pld"`.
      full_passes: whether an epoch of `fit` on shuffled batches is one pass over the data. It is
        then compared with `num_examples`. Pass `False` if `steps_per_epoch` makes an epoch shorter
        or longer than a pass, or if a step of `fit` makes several releases.
      optimizer: the private optimizer, for models that train with several (GANs) and for custom
        loops; `None` for that of the model.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range; in training,
        if `fit` feeds another number of examples than `num_examples`.

    Attributes:
      not_private: statistics of the raw gradients of the last epoch, by their names under
        `raw_gradients_NOT_PRIVATE/`.

    >>> monitor = PrivacyMonitor(num_examples=60_000, delta=1e-5)
    >>> monitor.sampling
    'shuffled'

    A custom loop needs three lines: one that stops before the budget is exceeded, one that records
    what is about to be released, and one that reports ε.

    >>> import tempfile
    >>> import tf_adaptive_dp
    >>> optimizer = tf_adaptive_dp.DPSGD(1.0, 2.0, expected_batch_size=4, learning_rate=0.1)
    >>> weights = tf.Variable([0.0])
    >>> numbers = {"delta": 1e-3, "num_examples": 400, "optimizer": optimizer}
    >>> budget = tf_adaptive_dp.PrivacyBudget(epsilon=0.5, **numbers)
    >>> monitor = tf_adaptive_dp.PrivacyMonitor(**numbers)
    >>> log = tf_adaptive_dp.ReleaseLog(f"{tempfile.mkdtemp()}/releases.log")
    >>> @tf.function
    ... def step(x):
    ...     with tf.GradientTape() as tape:
    ...         loss = (weights - x) ** 2
    ...     optimizer.minimize(loss, [weights], tape)
    >>> for _ in range(100_000):
    ...     if not budget.releases_left():  # 1.
    ...         break
    ...     log.announce(optimizer)  # 2.
    ...     step(tf.ones([4]))
    >>> print(f"epsilon = {monitor.epsilon():.2f}")  # 3.
    epsilon = 0.50
    """

    def __init__(
        self,
        num_examples: int,
        delta: float,
        log_dir: str | None = None,
        *,
        sampling: Sampling | str = "shuffled",
        accountant: str = "rdp",
        full_passes: bool = True,
        optimizer: tf.keras.optimizers.Optimizer | None = None,
    ):
        super().__init__(optimizer)
        self.num_examples = checks.integer("num_examples", num_examples, 1)
        self.delta = checks.probability("delta", delta)
        self.log_dir = log_dir
        self.sampling = sampling_epsilon.check_sampling(sampling)
        self.accountant = checks.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self._unit = unit_of(self.sampling).one
        warn_of_large_delta(self.delta, self.num_examples, unit_of(self.sampling), stacklevel=2)
        self._num_examples_check = NumExamplesCheck(self.num_examples, self.sampling, full_passes)
        self._board: TensorBoardLog | None = None
        self._new_run = self._noted = False
        allow_tensors_as_logs(self)
        self._warned_of_returns = False
        self._warned_of_non_finite = False
        self.not_private: dict[str, float] = {}

    def epsilon(self) -> float:
        """The ε that the optimizer has spent so far."""
        self.require_counted_statistics()
        return sampling_epsilon.epsilon_spent(
            self.sampling,
            self.optimizer,
            self.num_examples,
            self.delta,
            accountant=self.accountant,
        )

    def statement(self) -> str:
        """The guarantee in words; see `privacy_statement`."""
        self.require_counted_statistics()
        return privacy_statement(
            self.optimizer,
            self.num_examples,
            self.delta,
            sampling=self.sampling,
            accountant=self.accountant,
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the optimizer is private; called by Keras."""
        optimizer = self.optimizer
        self.require_counted_statistics()
        self.prepare_training()
        begin_batches_anew(optimizer)
        self._released, self._noted = optimizer.ledger.num_releases, False
        optimizer.statistics.summary(reset=True)  # of training without this callback
        self._num_examples_check.begin(optimizer, steps_per_epoch(self))
        self._check_sampling(optimizer)
        if self.log_dir is not None:
            self._board = TensorBoardLog(self.log_dir, self._settings(optimizer))
        self._budget = next(
            (c.epsilon for c in callbacks_beside(self) if isinstance(c, PrivacyBudget)), None
        )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Raises if the ledger went back, or lacks a release; called by Keras."""
        self.require_counted_statistics()
        self.optimizer.ledger.require_nothing_lost()
        self._note_units()

    def _note_units(self) -> None:
        """Notes, before the first release, of how many examples the releases are."""
        if not self._noted:
            self.epsilon()  # raises for a state that was loaded after training began
            self.optimizer.ledger.note_units(self.num_examples)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Notes where an epoch begins, and of how many examples; called by Keras."""
        if batch:
            return
        self._note_units()  # again, since a log may have restored the ledger meanwhile
        self._noted = True
        self._num_examples_check.begin_epoch(self.optimizer)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reports; called by Keras."""
        forget_saved_metrics(self.model)
        optimizer = self.optimizer
        refuse_batch_over_two_passes(optimizer, self.sampling)
        self._num_examples_check.end_epoch(optimizer, self.model.stop_training)
        summary = optimizer.statistics.summary(reset=True)
        self._check_rows(optimizer)
        private = {
            "epsilon": self.epsilon(),
            "delta": self.delta,
        }
        if optimizer.current_learning_rate is not None:
            private["learning_rate"] = optimizer.current_learning_rate
        self._compare_mean_size(summary.num_examples)
        self._warn_of_early_returns(optimizer.ledger)
        self._warn_of_non_finite(summary.num_non_finite)
        if math.isinf(private["epsilon"]) or noise_is_seeded(optimizer):
            private["NOT_PRIVATE"] = 1.0  # appears next to ε wherever logs go
        if is_chosen_by_search(optimizer):
            private["WITHOUT_SEARCH"] = 1.0  # so does this: ε is of this training alone
        if logs is not None:
            logs.update(private)
        self.not_private = {
            "clipped_share": summary.clipped_share,
            f"non_finite_{self._unit}s": summary.num_non_finite,
        }
        for quantile, norm in summary.norm_quantiles.items():
            self.not_private[f"gradient_norm_quantile_{quantile}"] = norm
        if self._board is not None:
            self._show(self._board, epoch, private)

    def _show(self, board: TensorBoardLog, epoch: int, private: dict[str, float]) -> None:
        """Shows an epoch in TensorBoard.

        Args:
          board: TensorBoard's files.
          epoch: the number of the epoch.
          private: what the logs got; δ is a setting, which TensorBoard shows among others.
        """
        optimizer = self.optimizer
        shown = {name: value for name, value in private.items() if name != "delta"}
        if self._budget is not None:
            shown["epsilon_budget"] = self._budget
        # One of several optimizers trains only some of the model's variables.
        if optimizer is self.model.optimizer:
            ratio = optimizer.noise_to_signal(self.model.trainable_variables)
            if ratio is not None:
                shown["noise_to_signal"] = ratio
        step_size = {}
        if hasattr(optimizer, "acceptance"):
            step_size = {"error": optimizer.last_error, "acceptance": optimizer.acceptance}
        board.write(epoch, shown, self.not_private, step_size)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Closes TensorBoard's file, and raises if the ledger went back; called by Keras."""
        forget_saved_metrics(self.model)
        if self._board is not None:
            self._board.close()
            self._board = None
        self.optimizer.ledger.require_nothing_lost()

    def _settings(self, optimizer: Any) -> dict[str, Any]:
        """The settings of the run, all of them public; `None` for what needs no mention.

        TensorBoard sorts them by name and shows the first five.
        """
        clipping = getattr(optimizer.clipping, "method", type(optimizer.clipping).__name__)
        parts = optimizer.parts_per_batch
        sampling = self.sampling if isinstance(self.sampling, str) else self.sampling.label
        return {
            "optimizer": type(optimizer).__name__,
            "l2_norm_clip": optimizer.l2_norm_clip,
            "noise_multiplier": optimizer.noise_multiplier,
            "expected_batch_size": optimizer.expected_batch_size,
            "clipping": None if clipping == "flat" else clipping,
            "num_microbatches": optimizer.num_microbatches,
            "noise": None if optimizer.noise.is_independent else repr(optimizer.noise),
            "examples_per_user": optimizer.examples_per_user,
            "gradient_accumulation_steps": None if parts == 1 else parts,
            "learning_rate": optimizer.current_learning_rate,
            "num_examples" if self._unit == "example" else "num_users": self.num_examples,
            "delta": self.delta,
            "sampling": sampling,
            "privacy_accountant": self.accountant,
        }

    def _check_sampling(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Rejects, before training, an optimizer whose settings do not fit the sampling."""
        if not isinstance(self.sampling, Sampling):
            self.epsilon()  # raises on a conflict with the ledger, before more is released
            return
        self._new_run = self._released == 0
        size = self.sampling.expected_batch_size(self.num_examples)
        _, set_size = optimizer.next_release()
        if set_size is None and not isinstance(self.sampling, RandomSizes):
            return  # the first batch will determine it
        if set_size is None or not math.isclose(set_size, size, rel_tol=1e-9):
            raise ValueError(
                f"The optimizer must have `expected_batch_size={size!r}`, which is that of the "
                f"sampling. Received: expected_batch_size={set_size!r}, sampling={self.sampling!r}"
            )
        self.sampling.check_delta(self.num_examples, self.delta)
        self.epsilon()  # runs the other checks
        self._warn_of_padding_in_metrics()

    def _warn_of_padding_in_metrics(self) -> None:
        """Warns if metrics count padding, which has no effect on training but on their values."""
        counting = metrics_without_weights(self.model)
        if counting and isinstance(self.sampling, RandomSizes):
            warnings.warn(
                "Metrics that are compiled as `metrics` count the padding of Poisson batches, rows "
                "of weight 0, as if it were examples. Compile them as `weighted_metrics`, or train "
                f"with `PrivacyPlan.fit`, which leaves padding out. Received: metrics={counting}",
                stacklevel=level_of_caller(),
            )

    def _check_rows(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Rejects batches that cannot come from the sampling, because their shape differs."""
        if not isinstance(self.sampling, Sampling) or not self._new_run:
            return
        rows = optimizer.rows_per_batch
        accumulated = optimizer.parts_per_batch
        expected = self.sampling.rows_per_batch(accumulated)
        if rows != expected:
            raise ValueError(
                f"`fit` got batches of {rows} rows, but those of the sampling have "
                f"{expected}: pass the sampling that the dataset was made with, or say "
                f"`sampling='shuffled'`. Received: sampling={self.sampling!r}"
            )

    def _warn_of_early_returns(self, ledger: Ledger) -> None:
        """Warns, once, if batches came again, as a whole, that should have been drawn anew."""
        if self._warned_of_returns or sampling_epsilon.label_of(self.sampling) != "shuffled":
            return
        known = composition.checks_of(ledger, self.num_examples, correlated=True)
        early = [composition.repeated(*of, self.num_examples, in_epochs=True) for of in known]
        if any(early):
            self._warned_of_returns = True
            warnings.warn(
                f"{sum(early)} batches were reused before every batch had been used once, so each "
                "counts as if it held the whole data set, and ε is far larger than for new "
                "batches. `fit` changes the order of the batches of a `PyDataset`: pass "
                "`shuffle=False`, or form new batches in its `on_epoch_end`.",
                stacklevel=2,
            )
        elif composition.num_returned(known, self.num_examples):
            self._warned_of_returns = True
            warnings.warn(
                "The same batches came again in a later epoch, so the data are not shuffled for "
                "each epoch, and the ε shown is not even an approximation. After "
                "`keras.utils.set_random_seed`, `fit` of Keras 3 repeats the order of the first "
                "epoch. Use a plan, pass `dataset.shuffle(num_examples).batch(batch_size)`, or go "
                "by the second ε of `privacy_statement`, which assumes no amplification.",
                stacklevel=2,
            )

    def _warn_of_non_finite(self, number: int) -> None:
        """Warns, once, that the model does not learn from examples which epsilon is spent on."""
        if self._warned_of_non_finite or not number:
            return
        self._warned_of_non_finite = True
        warnings.warn(
            f"Some {self._unit}s had gradients that are NaN or infinite, or an index outside of "
            "its row in `tf.gather(..., batch_dims=...)`. They count as zero, so the model learns "
            "nothing from them, while ε is spent as before. If the loss that `fit` prints is NaN, "
            "missing values in the data are one cause, a learning rate that is too large is "
            "another: `validation.validate(model, batch)` names the examples of a batch. Fill "
            "in missing values with public constants, and clip indices.",
            stacklevel=2,
        )

    def _compare_mean_size(self, num_examples: int) -> None:
        """Compares the batches of an epoch with the expected batch size that ε is computed for.

        Raises:
          NotPrivateError: if they held more than a sampling object draws.
        """
        optimizer = self.optimizer
        released = optimizer.ledger.num_releases
        steps, self._released = released - self._released, released
        _, size = optimizer.next_release()
        if not steps or size is None or optimizer.num_microbatches is not None:
            return
        # Six standard deviations of a sum of Poisson batches: by chance once in a billion epochs.
        # The groups of cyclic ones vary, too; and an error is worse than a warning.
        has_padding = isinstance(self.sampling, RandomSizes)
        deviations = 12 if has_padding else 6
        if num_examples <= size * steps + deviations * math.sqrt(size * steps):
            return
        mean = f"{num_examples / steps:.1f} {self._unit}s"
        if has_padding:
            raise NotPrivateError(
                f"The batches held {mean} on average, but the sampling draws {size:g}. Rows of "
                "padding have gradients, so epsilon does not hold: pass the sample weights of "
                "`poisson_batches` on unchanged, and multiply all terms of the loss by them. "
                f"Received: sampling={self.sampling!r}"
            )
        warnings.warn(
            f"The batches held {mean} on average, but ε is computed for "
            f"`expected_batch_size`={size:g}: the ε shown is too small. Pass an "
            "`expected_batch_size` to the optimizer that is at least the mean size of the batches "
            "and was not computed from private data.",
            stacklevel=2,
        )
