"""A Keras callback that stops training before it exceeds a privacy budget."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.models import forget_saved_metrics, steps_per_call
from tf_adaptive_dp.accounting import accountants
from tf_adaptive_dp.accounting.accountants import unprotected
from tf_adaptive_dp.accounting.composition import MAX_RELEASES
from tf_adaptive_dp.accounting.releases import BatchChecks, Contents, Segment
from tf_adaptive_dp.callbacks.common import (
    NumExamplesCheck,
    PrivateCallback,
    begin_batches_anew,
    longer_plan,
    refuse_batch_over_two_passes,
    steps_per_epoch,
)
from tf_adaptive_dp.errors import BudgetExceededError
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.wording import format_epsilon

# The order in which segments are added up changes the last digits of ε.
_ROUNDING = 1 + 1e-9


class PrivacyBudget(PrivateCallback):
    """Stops training before the step that would exceed the budget.

    Guarantee: ε stays at most `epsilon`, in the sense of `PrivacyMonitor`, as long as the ledger
    holds every release. Training stops as soon as the next call of the training function
    (`steps_per_execution` steps) does not fit. If another callback changes the noise or the batch
    size so that the very next call does not fit, that call raises an error. There is one exception:
    that a batch was released before, is larger than declared, or has padding with a gradient shows
    only when it is released, so such a call may exceed the budget. It counts with what it costs,
    and if that is too much, an error ends the training. After a call with repeated batches, the
    next one is priced as if its batches were repeated, too.

    Args:
      epsilon: the largest allowed ε, including what the ledger already holds.
      delta: δ.
      num_examples: the number of examples in the training set; of users, if the sampling draws
        users.
      batch_size: the batch size. It is needed if the optimizer has no `expected_batch_size`, since
        the cost of the first step depends on it.
      sampling: how batches are drawn, as for `PrivacyMonitor`; ε depends on it.
      accountant: `"rdp"` or the tighter `"pld"`.
      full_passes: whether an epoch of `fit` on shuffled batches is one pass over the data. It is
        then compared with `num_examples`. Pass `False` if `steps_per_epoch` makes an epoch shorter
        or longer than a pass.
      steps: the number of releases after which training stops even if more would fit.
      optimizer: the private optimizer, for models that train with several (GANs) and for custom
        loops, which ask `releases_left` before each step; `None` for that of the model.
      releases_per_step: how many times a step of `fit` uses the optimizer.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range; in training,
        if `fit` feeds another number of examples than `num_examples`.
      BudgetExceededError: if no step fits when training begins, and in both cases above.

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
        sampling: Sampling | str = "shuffled",
        accountant: str = "rdp",
        full_passes: bool = True,
        steps: int | None = None,
        optimizer: tf.keras.optimizers.Optimizer | None = None,
        releases_per_step: int = 1,
    ):
        super().__init__(optimizer)
        self._per_step = checks.integer("releases_per_step", releases_per_step, 1)
        self._released, self._epoch = 0, 0
        self._stopped = self._guessed = False
        self.epsilon = checks.number("epsilon", epsilon, 0, strict=True)
        self.delta = checks.probability("delta", delta)
        self.num_examples = checks.integer("num_examples", num_examples, 1)
        if batch_size is not None:
            batch_size = checks.number("batch_size", batch_size, 0, strict=True)
        self.batch_size = batch_size
        self.sampling = sampling_epsilon.check_sampling(sampling)
        self.accountant = checks.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self.steps = None if steps is None else checks.integer("steps", steps, 1)
        self._num_examples_check = NumExamplesCheck(self.num_examples, self.sampling, full_passes)
        self._priced: tuple = ()
        # Whether the last call repeated batches; the releases and repetitions that it left.
        self._again, self._seen = False, (0, 0)

    def _num_repeated(self, segments: Sequence[Segment], known: Sequence[BatchChecks]) -> int:
        return sampling_epsilon.num_repeated(self.sampling, zip(segments, known), self.num_examples)

    def releases_left(self) -> int:
        """How many more releases fit with the optimizer's current parameters.

        If a batch was repeated since the last call, the next ones are taken to be repeated, too.

        Raises:
          ValueError: if the batch size, and so the cost of the first step, is unknown; or if the
            ledger contradicts the sampling.
        """
        optimizer = self.optimizer
        return self._left(optimizer, optimizer.ledger.read())

    def _left(self, optimizer: tf.keras.optimizers.Optimizer, recorded: Contents) -> int:
        """See `releases_left`.

        Args:
          optimizer: `self.optimizer`, which reads variables of TensorFlow each time it is asked.
          recorded: what its ledger holds now.
        """
        ledger = optimizer.ledger
        segments, known = recorded
        noise_multiplier, size = self._next_release(optimizer, recorded)
        released = recorded.num_releases
        if released != self._seen[0]:
            repeated = self._num_repeated(segments, known)
            self._again, self._seen = repeated > self._seen[1], (released, repeated)
        if segments and segments[-1][:2] == (noise_multiplier, size):
            segments = segments[:-1]  # more releases of the same kind do not change the price
        released_as = (segments, [c.repeated for c in known], ledger.other_events)
        of_budget = (self.epsilon, self.delta, self.num_examples, self.sampling, self.accountant)
        price_of = (noise_multiplier, size, self._again, released_as, of_budget, self.steps)
        if self._priced[:1] != (price_of,):
            left = sampling_epsilon.releases_left(
                self.sampling,
                optimizer,
                noise_multiplier,
                size,
                self.num_examples,
                self.epsilon,
                self.delta,
                accountant=self.accountant,
                at_most=MAX_RELEASES if self.steps is None else self.steps - released,
                again=self._again,
            )
            self._priced = (price_of, released + left)
            if left and self.model is None:  # in a loop of one's own
                ledger.note_units(self.num_examples)
        return self._priced[1] - released

    def _next_release(
        self, optimizer: tf.keras.optimizers.Optimizer, recorded: Contents
    ) -> tuple[float, float]:
        """The noise multiplier of the next release, and its batch size."""
        noise_multiplier, size = optimizer.next_release(recorded)
        # In `fit` the optimizer may find its size after the first step was priced.
        differs = None not in (size, self.batch_size) and size != self.batch_size
        if differs and (self._guessed or optimizer.expected_batch_size is None):
            self._refuse_batch_size(size)
        self._guessed |= size is None
        size = size or self.batch_size
        if size is None:
            raise ValueError(
                "The cost of the first step depends on the batch size, which is unknown. Pass "
                "`expected_batch_size` to the optimizer or `batch_size` to PrivacyBudget."
            )
        return noise_multiplier, size

    def _refuse_batch_size(self, size: float) -> None:
        """Rejects a wrong `batch_size`, since the first step was priced with it."""
        raise ValueError(
            f"`batch_size` must be that of `fit`, which is {size:g}: the first step was checked "
            "against the budget with another batch size. Received: "
            f"batch_size={self.batch_size!r}"
        )

    def _releases_per_call(self, optimizer: tf.keras.optimizers.Optimizer) -> int:
        """The most that one call of the training function releases."""
        uses = steps_per_call(self.model) * self._per_step
        return -(-uses // optimizer.parts_per_batch)

    def _next_call_fits(self, optimizer: tf.keras.optimizers.Optimizer, recorded: Contents) -> bool:
        return self._left(optimizer, recorded) >= self._releases_per_call(optimizer)

    def _require_room(self, optimizer: tf.keras.optimizers.Optimizer, recorded: Contents) -> None:
        if not self._next_call_fits(optimizer, recorded):
            ledger = optimizer.ledger
            lost = unprotected(ledger.other_events)
            why = f" NOT PRIVATE: {lost[0]} alone makes epsilon infinite." if lost else ""
            limit = "" if self.steps is None else f", steps={self.steps}"
            raise BudgetExceededError(
                f"The privacy budget is used up; no further step is possible.{why} Keep the model "
                f"as it is{'.' if lost else self._how_to_continue()} Received: epsilon="
                f"{self.epsilon}, delta={self.delta}{limit}, with {ledger.num_releases} releases "
                "in the ledger."
            )

    def _require_within_budget(self) -> None:
        """Raises if a call cost more than it was priced with, so that ε exceeds the budget."""
        spent = sampling_epsilon.epsilon_spent(
            self.sampling, self.optimizer, self.num_examples, self.delta, accountant=self.accountant
        )
        if spent > self.epsilon * _ROUNDING:
            ledger = self.optimizer.ledger
            raise BudgetExceededError(
                "The last step cost more than the budget had left: its batch was released before, "
                "is larger than `expected_batch_size`, or has padding with a gradient, which shows "
                "only when it is released. The weights hold what it released. Do not publish them "
                "under this budget: begin anew with a new model, and feed each batch once (no "
                "`cache` or `repeat` after it was drawn), of the declared size. Received: "
                f"epsilon={format_epsilon(spent)} instead of {self.epsilon} at delta={self.delta}, "
                f"with {ledger.num_releases} releases, {sum(c.repeated for c in ledger.checks)} of "
                "them on batches that were released before"
            )

    def _how_to_continue(self) -> str:
        """The end of a sentence: what lets the model train longer, if anything does."""
        if self.steps is None:
            return ", or allow a larger `epsilon`."
        covered = ". A plan's budget covers exactly its `epochs`."
        if not self.optimizer.noise.is_independent:
            return f"{covered} With correlated noise, no other plan can continue them."
        longer = longer_plan(*self.optimizer.next_release())
        return (
            f"{covered} To train longer, make {longer}, which count those so far, and call its "
            "`fit` with this model, without compiling it again. Its epsilon covers all of them. If "
            "this is a new model, compile it with a new optimizer, `plan.optimizer(...)`: what "
            "both models spent adds up."
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Raises if not even the first step fits; called by Keras."""
        checks.fixed_steps_per_call(self.model)
        optimizer = self.optimizer
        self.require_counted_statistics()
        self.prepare_training()
        begin_batches_anew(optimizer)
        self._num_examples_check.begin(optimizer, steps_per_epoch(self))
        self._priced, self._stopped, self._guessed = (), False, False
        recorded = optimizer.ledger.read()
        self._again, self._seen = False, (recorded.num_releases, self._num_repeated(*recorded))
        self._require_room(optimizer, recorded)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Notes the epoch, and of how many examples its releases are; called by Keras.

        A `ReleaseLog` writes that down with the first release, before the batch begins here.
        """
        self._epoch, optimizer = epoch, self.optimizer
        ledger = optimizer.ledger
        if self._next_call_fits(optimizer, ledger.read()):  # what is refused must not be noted
            ledger.note_units(self.num_examples)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Raises if the next step became more expensive since the last check; called by Keras."""
        if batch == 0:  # other callbacks may have adapted a layer meanwhile
            self.require_counted_statistics()
        optimizer = self.optimizer
        recorded = optimizer.ledger.read()
        optimizer.ledger.require_nothing_lost(recorded)
        self._require_room(optimizer, recorded)
        if batch == 0:  # what is refused must not be noted
            optimizer.ledger.note_units(self.num_examples)
            self._num_examples_check.begin_epoch(optimizer)
        self._released = recorded.num_releases

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stops training if the next step does not fit; called by Keras."""
        optimizer = self.optimizer
        recorded = optimizer.ledger.read()
        released = recorded.num_releases - self._released
        if released > self._releases_per_call(optimizer):
            raise ValueError(
                "The training step used the optimizer more often than `releases_per_step` says, so "
                "the callback cannot keep to the budget. Received: "
                f"releases_per_step={self._per_step}, and {released} releases in a call of "
                f"{steps_per_call(self.model)} steps"
            )
        if not self._next_call_fits(optimizer, recorded):
            self._require_within_budget()
            self.model.stop_training = self._stopped = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Rejects an accumulated batch that reaches into the next epoch; called by Keras."""
        forget_saved_metrics(self.model)
        refuse_batch_over_two_passes(self.optimizer, self.sampling)
        self._num_examples_check.end_epoch(self.optimizer, self.model.stop_training)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Says why training ended before its last epoch; called by Keras.

        It also forgets the metrics of an epoch that ended early.
        """
        forget_saved_metrics(self.model)
        params = getattr(self, "params", None) or {}  # loops of one's own may set none
        epochs = params.get("epochs", 0)
        if self._stopped and self._epoch + 1 < epochs and params.get("verbose"):
            print(
                f"PrivacyBudget: training stopped in epoch {self._epoch + 1} of {epochs}, because "
                f"another step would exceed epsilon = {self.epsilon:g}."
            )
