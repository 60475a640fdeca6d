"""What a trial may release: no more, no less, and with the planned noise."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.privacy import sampling as samplings
from tf_adaptive_dp.privacy.accounting import repeated
from tf_adaptive_dp.selection.plan import Plan


class Allowance(tf.keras.callbacks.Callback):
    """Ends a trial before it releases more than planned, or otherwise; the last of its callbacks.

    Guarantee: no step begins that would bring the ledger above `plan.releases`, or whose noise
    multiplier or batch size is not the planned one. A model that releases several gradients in a
    step is found after the first call of the training function. `check_end`, after `fit`, refuses a
    trial that ended with room for more: its length would be another release, of no known price.
    """

    def __init__(self, plan: Plan, noise_multiplier: float):
        super().__init__()
        self._supports_tf_logs = True
        self._plan, self._noise_multiplier = plan, noise_multiplier
        self._rows_are_known = False

    def room(self, released: int, next_step: int = 0) -> bool:
        """Whether the call of the training function that begins with this step of an epoch fits."""
        left = self._plan.steps_per_epoch - next_step
        steps = min(self._steps_per_call, left or self._plan.steps_per_epoch)
        return released + self._releases_in(steps) <= self._plan.releases

    def set_model(self, model: tf.keras.Model) -> None:
        """Notes how many steps a call has; called by Keras."""
        super().set_model(model)
        self._steps_per_call = self._steps_of_this_call()

    def _steps_of_this_call(self) -> int:
        steps = self.model._steps_per_execution
        return 1 if steps is None else int(steps)

    def _releases_in(self, steps: int) -> int:
        return -(-steps // self._plan.parts)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Refuses what was not planned; called by Keras."""
        optimizer = self.model.optimizer
        planned = (self._noise_multiplier, self._plan.batch_size)
        if optimizer.next_release() != planned:
            raise NotPrivateError(
                "Nothing may change the noise or the batch size of a trial. Received: noise "
                f"multiplier and expected batch size {optimizer.next_release()}, instead of "
                f"{planned}"
            )
        self._before = optimizer.ledger.num_releases
        self._announced = self._releases_in(self._steps_of_this_call())
        if self._before + self._announced > self._plan.releases:
            raise BudgetExceededError(
                f"The trial has no room for another step. Received: {self._before} releases of "
                f"{self._plan.releases}"
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
        self._check_draws()
        if not self.room(released, batch + 1):
            self.model.stop_training = True
        elif self.model.stop_training:
            # Now and not after `fit`, which would save the epoch as if it were whole.
            self.check_end()

    def check_end(self) -> None:
        """Raises NotPrivateError if the trial ends before it made all releases that it may."""
        released = self.model.optimizer.ledger.num_releases
        if self.room(released):
            raise NotPrivateError(
                "Something ended a trial early, and no bound allows that it depends on the data: "
                "leave out callbacks that set `stop_training`, and pass data that last for all "
                "epochs. Then call `search` again, or begin anew with `overwrite=True` if an epoch "
                "that was cut short is saved already. Received: "
                f"{released} releases of {self._plan.releases}"
            )

    def _check_draws(self) -> None:
        """The noise was computed for batches that are all draws of their own."""
        plan, ledger = self._plan, self.model.optimizer.ledger
        passes = samplings.label_of(plan.sampling) == "shuffled"
        for segment, known in zip(ledger.segments, ledger.checks):
            if repeated(segment, known, plan.num_examples, passes=passes):
                raise NotPrivateError(
                    "A batch of a trial was released before, and counts as no draw of its own: "
                    "leave out `cache`, `repeat` and the like after the batches are drawn. "
                    f"Received: a batch that was released {known.nearest} releases before"
                )

    def _check_rows(self) -> None:
        """Batches of another size than planned would make the noise too small."""
        if self._rows_are_known or self._plan.sampling == "poisson":
            return
        self._rows_are_known = True
        rows = self.model.optimizer._mechanism.rows_per_batch
        plan = self._plan
        if isinstance(plan.sampling, samplings.Sampling):
            expected = plan.sampling.rows_per_batch(plan.parts)
        else:
            expected = plan.batch_size / plan.parts
        if rows != expected:
            raise NotPrivateError(
                f"`fit` got batches of {rows} rows, and the noise was computed for {expected:g}: "
                "pass the `sampling` that the data set was made with, or the right "
                f"`expected_batch_size` to the optimizer. Received: sampling={plan.sampling!r}"
            )
