"""One object for a private training run: it takes each number once and makes the parts agree."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp import report as reports
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting import accountants, calibration, noise_strategies
from tf_adaptive_dp.accounting.noise_strategies import IndependentNoise, NoiseStrategy
from tf_adaptive_dp.accounting.terms import checked_events, missing_events
from tf_adaptive_dp.callbacks.privacy_budget import PrivacyBudget
from tf_adaptive_dp.callbacks.privacy_monitor import PrivacyMonitor
from tf_adaptive_dp.normalization import PrivateNormalization
from tf_adaptive_dp.plan_refusals import (
    check_optimizer,
    refuse_fit_arguments,
    refuse_optimizer_arguments,
    require_class_with_ledger,
)
from tf_adaptive_dp.planned_training import PlannedTraining
from tf_adaptive_dp.sampling.noise_budget import NoiseBudget, SamplingOfPlan
from tf_adaptive_dp.sampling.users import UserRecords
from tf_adaptive_dp.statement import (
    EXAMPLE,
    USER,
    LargeDeltaWarning,
    privacy_statement,
    warn_of_large_delta,
)
from tf_adaptive_dp.wording import format_delta, format_epsilon

__all__ = ["PlanOffer", "PrivacyPlan"]

# The parts of ε that the normalization of inputs alone would spend, the usual one and the largest;
# composed, they are far less. It gets more than usual if its noise exceeded a thousandth of the
# number of examples: a feature that is in a twentieth of them is then hardly ever found.
_FOR_NORMALIZATION, _MOST_FOR_NORMALIZATION = 0.2, 0.4
_EXAMPLES_PER_NOISE = 1000
# Runs of fewer steps learn less the fewer they have; from here on, little depends on the number
# (`batch_and_epochs` in docs/results.md).
_ENOUGH_STEPS = 700
# Batches that nobody chose get no larger than this: memory is not ours to spend.
_LARGEST_USUAL_BATCH = 1024


class PlanOffer(NamedTuple):
    """One way to spend a budget; see `PrivacyPlan.recommend`.

    Attributes:
      batch_size: the expected batch size L.
      epochs: the number of epochs.
      steps: the number of noisy gradients T.
      noise_multiplier: the σ that meets the budget.
      signal_to_noise: √T·L/σ, in four digits.

    >>> PlanOffer(256, epochs=4, steps=100, noise_multiplier=2.0, signal_to_noise=1280.0).rank
    (100, 1280.0)
    """

    batch_size: int
    epochs: int
    steps: int
    noise_multiplier: float
    signal_to_noise: float

    @property
    def rank(self) -> tuple[int, float]:
        """What `PrivacyPlan.recommend` sorts by: steps as far as they are few, then the signal."""
        return min(self.steps, _ENOUGH_STEPS), self.signal_to_noise


class PrivacyPlan:
    """The privacy of one training run, from ε to the trained model.

        plan = PrivacyPlan(epsilon=3.0, delta=1e-5, num_examples=len(x), epochs=20)
        model.compile(plan.optimizer(tf_adaptive_dp.ADADP), loss="sparse_categorical_crossentropy")
        plan.fit(model, x, y, validation_data=(x_test, y_test), directory="run")
        print(plan.statement())

    The plan finds the noise multiplier σ that spends ε in all steps of the run, draws Poisson
    batches, reports ε, stops at the budget, and writes a directory from which the run resumes,
    whenever and however its process ends. All its parts are public, and each works on its own.

    With `user_ids` the plan protects people instead of examples:

        plan = PrivacyPlan(
            epsilon=3.0, delta=1e-5, user_ids=authors, examples_per_user=8, epochs=20
        )

    Private training works badly on inputs in raw units, such as pixels, counts or columns of a
    table. With `normalize_inputs`, the plan brings them to mean 0 and variance 1, and its budget
    pays for that:

        plan = PrivacyPlan(..., normalize_inputs=True)
        model = keras.Sequential([plan.normalization(x), keras.layers.Dense(10)])

    Targets of a regression in raw units, such as prices, are out of reach for private training.
    With `normalize_targets`, the last layer turns outputs of about unit size into their units:

        plan = PrivacyPlan(..., normalize_targets=True)
        model = keras.Sequential([keras.layers.Dense(1), plan.denormalization(y)])

    Guarantee: (ε, δ)-DP for adding or removing one example, for everything that one model trained
    by `fit` releases, and for every checkpoint. With `user_ids`, for adding or removing one user
    with all of their examples, however many they are. With `TreeNoise`, neighbors differ in one
    example, which is blank in one of them, and training must keep the plan's order of batches; see
    `FixedOrder`. σ is within 0.1% of the smallest value for which `sampling.epsilon_spent(σ, L, T)
    ≤ epsilon` holds. Training a second model with the plan spends ε again. The number of examples
    (or of users) is public. Losses, metrics and statistics of the training data are not covered.

    Args:
      epsilon: the budget ε. Pass this or `noise_multiplier`.
      delta: δ, which should be well below 1 / `num_examples`; above that a warning says so.
      num_examples: the number of examples in the training set, a public constant. With `user_ids`,
        whose length it is, it may be left out and is not public.
      batch_size: L, the expected number of examples (or users) in a batch. Poisson batches vary in
        size. By default the largest L, up to 1,024, that leaves the run about 700 steps: larger
        batches leave less noise at the same ε, but a model needs some steps.
      epochs: the number of epochs. Each has round(`num_examples` / `batch_size`) steps, or
        round(number of users / `batch_size`); with `TreeNoise`, floor(`num_examples` /
        `batch_size`).
      noise_multiplier: σ. The plan's `epsilon` is then what the run will spend.
      accountant: `"pld"`, the tighter one, which computes for some seconds, or `"rdp"`,
        the faster one.
      other_events: what else about these examples the budget pays for, such as the release from
        which side information was computed.
      normalize_inputs: whether the budget pays for a `PrivateNormalization` of the inputs, which
        `normalization` makes. Its noise is chosen so that on its own it would spend ε/5, or up to
        2ε/5 where it exceeded a thousandth of the number of examples (or users).
      normalize_targets: whether the budget pays for a `PrivateNormalization` of the targets, too,
        which `denormalization` makes. It costs as much as that of the inputs.
      noise: how the noise of a step depends on that of earlier steps: `None` or
        `accounting.IndependentNoise()`; a strategy such as `accounting.BandedNoise(8)`, with which
        batches are drawn by `CyclicPoissonSampling`; or `"best"`, the one of these with 2 to 32
        bands, or independent noise, that leaves the least noise in sums of steps at this ε.
        `accounting.TreeNoise(steps_per_tree)` is for comparison: with it each epoch is a pass over
        the data in one order, `FixedOrder`, without amplification by sampling.
      user_ids: the user each example belongs to: whole numbers or strings, one for each example in
        the order of the data. `None` protects examples. The plan stores them, so keep it as secret
        as the data.
      examples_per_user: k, the largest number of examples of one user in a batch; needed with
        `user_ids`. A batch has k rows for each user, so a large k costs time.
      user_reduction: whether a user's gradient, which is clipped, is the `"mean"` or the `"sum"` of
        the gradients of the user's examples in the batch.

    Attributes:
      epsilon: ε.
      noise_multiplier: σ.
      steps_per_epoch: steps in each epoch.
      steps: T, the number of noisy gradients of the whole run.
      noise: the noise strategy.
      sampling: the `PoissonSampling`; with correlated noise the `CyclicPoissonSampling`, or the
        `FixedOrder` for trees.
      num_users: the number of users, a public constant; `None` without `user_ids`.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range, an example
        has no user or several, or no noise meets the budget.

    References:
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133.
      - Koskela et al., "Computing Tight Differential Privacy Guarantees Using FFT" (2020),
        arXiv:1906.03049.

    >>> plan = PrivacyPlan(
    ...     epsilon=2.0, delta=1e-4, num_examples=2_000, batch_size=100, epochs=5, accountant="rdp"
    ... )
    >>> plan.noise_multiplier, plan.steps, plan.sampling.max_batch_size
    (1.3074, 100, 184)
    """

    def __init__(
        self,
        epsilon: float | None = None,
        *,
        delta: float,
        num_examples: int | None = None,
        batch_size: int | None = None,
        epochs: int,
        noise_multiplier: float | None = None,
        accountant: str = "pld",
        other_events: Sequence[dp_accounting.DpEvent] = (),
        normalize_inputs: bool = False,
        normalize_targets: bool = False,
        noise: NoiseStrategy | str | None = None,
        user_ids: Any = None,
        examples_per_user: int | None = None,
        user_reduction: str = "mean",
    ):
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                "Pass either `epsilon` or `noise_multiplier`; the plan computes the other one. "
                f"Received: epsilon={epsilon!r}, noise_multiplier={noise_multiplier!r}"
            )
        self.delta = checks.probability("delta", delta)
        self._users = _users(user_ids, examples_per_user, num_examples)
        self.num_users = None if self._users is None else self._users.num_users
        self._examples_per_user, self._user_reduction = examples_per_user, user_reduction
        if self._users is not None:
            num_examples = self._users.num_records
        self.num_examples = checks.integer("num_examples", num_examples, 1)
        unit = EXAMPLE if self._users is None else USER
        warn_of_large_delta(self.delta, self._num_units, unit, stacklevel=2)
        self.epochs = checks.integer("epochs", epochs, 1)
        if batch_size is None:
            batch_size = self._usual_batch_size(noise)
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.accountant = checks.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self.other_events = checked_events(other_events)
        self.normalize_inputs = checks.boolean("normalize_inputs", normalize_inputs)
        self.normalize_targets = checks.boolean("normalize_targets", normalize_targets)
        if epsilon is not None:
            self.epsilon = checks.number("epsilon", epsilon, 0, strict=True)
            self._pay_for_normalization(self.epsilon)
        self.noise = self._strategy(noise, known_epsilon=epsilon is not None)
        self.sampling = self._sampling(self.batch_size, self.epochs)
        self.steps, self.steps_per_epoch = self.sampling.steps, self.sampling.steps // self.epochs
        self._noise_was_given = noise_multiplier is not None
        if noise_multiplier is None:
            self.noise_multiplier = self._budget.least_noise(
                self.epsilon, self.sampling, self.noise
            )
        else:
            self.noise_multiplier = checks.number(
                "noise_multiplier", noise_multiplier, 0, strict=True
            )
            self.epsilon = self._epsilon_of_run()
            if math.isinf(self.epsilon):
                raise ValueError(
                    "`noise_multiplier` must be large enough for a finite epsilon. Received: "
                    f"noise_multiplier={noise_multiplier!r}"
                )
        self._training = PlannedTraining(self, self._users)

    def _strategy(self, noise: NoiseStrategy | str | None, *, known_epsilon: bool) -> NoiseStrategy:
        """The strategy that `noise` stands for; `"best"` is sought for the plan's ε."""
        if self._users is not None and noise not in (None, IndependentNoise()):
            raise ValueError(
                "Correlated noise is proven for examples as the unit, not for users. Leave `noise` "
                f"out, or `user_ids`. Received: noise={noise!r}"
            )
        if noise != "best":
            return noise_strategies.get_strategy(noise)
        if not known_epsilon:
            raise ValueError(
                '`noise="best"` is the best strategy for a given `epsilon`. Pass `epsilon`, or a '
                "strategy. "
                "Received: epsilon=None"
            )
        return self._budget.best_strategy(self.epsilon, self.batch_size, self.epochs)

    def _usual_batch_size(self, noise: NoiseStrategy | str | None) -> int:
        """The batch size of a plan that was given none."""
        bands = 1 if noise == "best" else noise_strategies.get_strategy(noise).bands
        most = min(_LARGEST_USUAL_BATCH, self._largest_batch_size(bands))
        return max(1, min(most, round(self._num_units * self.epochs / _ENOUGH_STEPS)))

    def _largest_batch_size(self, bands: int | None) -> int:
        """That of batches which hold every example once in each of `bands` steps."""
        return self._num_units // (bands or 1)

    def _epsilon_of_run(self) -> float:
        """The ε of all steps with the plan's noise, and of any normalization."""
        of_steps = self._epsilon_after(self.steps)
        if not self._num_normalizations or math.isinf(of_steps):
            return of_steps
        self._pay_for_normalization(of_steps)
        return self._epsilon_after(self.steps)

    @property
    def _num_normalizations(self) -> int:
        return self.normalize_inputs + self.normalize_targets

    def _pay_for_normalization(self, epsilon: float) -> None:
        """Adds the events of normalizations, parts of ε, to those that the budget pays for."""
        if not self._num_normalizations:
            return
        try:
            usual, least = (
                calibration.noise_multiplier_for(
                    part * epsilon, self.delta, sampling_probability=1.0, steps=1
                )
                for part in (_FOR_NORMALIZATION, _MOST_FOR_NORMALIZATION)
            )
        except ValueError:  # which names arguments that the plan does not have
            raise ValueError(
                "No noise of the normalization meets its part of the budget, "
                f"{_FOR_NORMALIZATION:g} of epsilon. Allow more `epsilon` or `delta`, or leave "
                "`normalize_inputs` and `normalize_targets` out. Received: "
                f"epsilon={epsilon!r}, delta={self.delta!r}"
            ) from None
        noise = min(usual, max(least, self._num_units / _EXAMPLES_PER_NOISE))
        self.other_events += (dp_accounting.GaussianDpEvent(noise),) * self._num_normalizations

    @property
    def _budget(self) -> NoiseBudget:
        return NoiseBudget(
            delta=self.delta,
            num_units=self._num_units,
            accountant=self.accountant,
            other_events=self.other_events,
            examples_per_user=self._examples_per_user,
            user_reduction=self._user_reduction,
        )

    @property
    def _of_users(self) -> dict[str, Any]:
        """The arguments that only a plan with `user_ids` has; empty without them."""
        if self._users is None:
            return {}
        return {
            "examples_per_user": self._examples_per_user,
            "user_reduction": self._user_reduction,
        }

    @property
    def expected_batch_size(self) -> float:
        """L, as the optimizer needs it."""
        return self.sampling.expected_batch_size(self._num_units)

    @property
    def _num_units(self) -> int:
        """The number of examples, or of users: the public size of what batches are drawn from."""
        return self.num_examples if self.num_users is None else self.num_users

    @property
    def _unit(self) -> str:
        return self.sampling.unit

    def __repr__(self) -> str:
        of = "num_examples" if self.num_users is None else "num_users"
        shown = ("epsilon", "delta", of, "batch_size", "epochs", "noise_multiplier", "accountant")
        more = () if self.noise.is_independent else ("noise",)
        more += tuple(n for n in ("normalize_inputs", "normalize_targets") if getattr(self, n))
        values = [f"{name}={getattr(self, name)!r}" for name in (*shown, *more)]
        values += [f"{name}={value!r}" for name, value in self._of_users.items()]
        return f"PrivacyPlan({', '.join(values)})"

    def optimizer(
        self, optimizer_class: type, *, l2_norm_clip: float | str | None = None, **kwargs: Any
    ) -> tf.keras.optimizers.Optimizer:
        """Makes an optimizer with the noise and the batch size of the plan.

        `ADADP` is told how many steps the plan has, and whether it normalizes the inputs.

        Args:
          optimizer_class: `UntunedSGD` or another optimizer class of the library.
          l2_norm_clip: C, the bound on the L2 norm of each example's gradient, or `"measured"`.
            `None` means 1, or that the optimizer finds its scales by itself, as `UntunedSGD` does.
          **kwargs: other arguments of the class.

        Raises:
          TypeError: if the class is not one of the library's, or an argument is the plan's.
          ValueError: if the optimizer releases more about the examples than `other_events` say.
          NotPrivateError: if its noise has a `seed`.
        """
        refuse_optimizer_arguments(kwargs)
        require_class_with_ledger(optimizer_class)
        arguments = inspect.signature(optimizer_class).parameters
        if l2_norm_clip is not None:
            kwargs["l2_norm_clip"] = l2_norm_clip
        elif "l2_norm_clip" in arguments:
            kwargs["l2_norm_clip"] = 1.0
        if self.normalize_inputs and "normalized_inputs" in arguments:
            kwargs.setdefault("normalized_inputs", True)
        if "num_steps" in arguments:
            kwargs.setdefault("num_steps", self.steps)
        if not self.noise.is_independent:
            kwargs["noise"] = self.noise
        if self._users is not None:
            kwargs["examples_per_user"] = self._examples_per_user
        made = optimizer_class(
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=self.expected_batch_size,
            **kwargs,
        )
        if not missing_events(made.ledger.other_events, among=self.other_events):
            # The budget pays for all of them, whatever released them.
            made.ledger.other_events = self.other_events
        check_optimizer(self, made)
        self._training.note_optimizer(made)
        if made.batches_to_measure > self.steps / 4:
            warnings.warn(
                f"{made.batches_to_measure} of {self.steps} steps will measure the norms of "
                "gradients, and change no weights: the noise is large beside the batch size. Use "
                "larger batches, or pass a number as `l2_norm_clip`, such as 1.0.",
                stacklevel=2,
            )
        return made

    def normalization(self, x: Any, axis: int | None = -1) -> PrivateNormalization:
        """The layer that normalizes the inputs, for the first place in the model.

        The first call releases means and deviations; further calls return the same layer. When a
        run resumes from its directory, `fit` restores those that the run began with.

        Args:
          x: [n, ...], an array of all training inputs as the layer will see them.
          axis: see `PrivateNormalization`.

        Raises:
          TypeError, ValueError: if the plan was made without `normalize_inputs`, the inputs are not
            an array of `num_examples` examples, or an earlier call had another `axis` or inputs of
            another shape.
        """
        return self._training.normalization(x, axis, invert=False)

    def denormalization(self, y: Any, axis: int | None = -1) -> PrivateNormalization:
        """The layer that turns outputs into the units of the targets, for the end of the model.

        The first call releases means and deviations; further calls return the same layer. The
        layers before it then work at unit scale, while targets, predictions and metrics keep their
        units.

        Args:
          y: [n] or [n, ...], an array of all training targets.
          axis: see `PrivateNormalization`.

        Raises:
          TypeError, ValueError: if the plan was made without `normalize_targets`, the targets are
            not an array of `num_examples` examples, or an earlier call had another `axis` or
            targets of another shape.
        """
        return self._training.normalization(y, axis, invert=True)

    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        start_step: int = 0,
        gradient_accumulation_steps: int = 1,
        key: bytes | None = None,
    ) -> tf.data.Dataset:
        """Batches for `fit`, all of one shape; see `poisson_batches`.

        With `TreeNoise` they are those of `shuffled_batches` for the plan's `FixedOrder`, with
        sample weights of 1.

        Args:
          x: the inputs: an array, a pandas frame, or a dict, list or tuple of arrays. Without `y`,
            a finite `tf.data.Dataset` of single examples (x, y) or (x, y, sample_weight), which is
            read into memory once; or a source with random access to such examples, such as
            `tfds.data_source`.
          y: the targets. `None` for models that need none; a data set then gives x alone, and
            batches are (x, None, sample_weight).
          sample_weight: a weight for each example.
          start_step: the number of draws to skip because an earlier run made them.
          gradient_accumulation_steps: that of the optimizer.
          key: 32 secret bytes, to continue a sequence of draws.

        Returns:
          A data set of all `steps` batches of the run. Pass `steps_per_epoch`, which is `steps` /
          `epochs`, to `model.fit`, or it takes all of them for one epoch.

        Raises:
          TypeError, ValueError: if the data have a wrong type, or are not `num_examples` examples.
        """
        source = self._training.source(x, y, sample_weight)
        return self._training.batches(source, start_step, gradient_accumulation_steps, key)

    def callbacks(self, log_dir: str | os.PathLike | None = None) -> list[keras.callbacks.Callback]:
        """The monitor and the budget, for those who call `model.fit` themselves.

        `statement` covers `fit` of the plan only. After `model.fit`, the monitor's `statement` says
        what the run spent.

        Args:
          log_dir: the directory for TensorBoard's files. `None` writes none.
        """
        with warnings.catch_warnings():
            # The plan has warned of it already.
            warnings.simplefilter("ignore", LargeDeltaWarning)
            monitor = PrivacyMonitor(
                self._num_units,
                self.delta,
                log_dir=None if log_dir is None else str(log_dir),
                sampling=self.sampling,
                accountant=self.accountant,
            )
        budget = PrivacyBudget(
            self.epsilon,
            self.delta,
            self._num_units,
            sampling=self.sampling,
            accountant=self.accountant,
            steps=self.steps,
        )
        return [monitor, budget]

    def fit(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        class_weight: Mapping[int, float] | None = None,
        directory: str | os.PathLike | None = None,
        callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
        equal_rows: bool = False,
        **fit_arguments: Any,
    ) -> keras.callbacks.History:
        """Trains a model within the budget, or resumes its training.

        With a directory, the call may be repeated after any interruption: it continues from the
        last epoch whose steps were made, and counts what was released after that epoch. If the run
        is finished, it restores the model. The directory also gets TensorBoard's files (`logs`)
        and, at the end, the report. It holds a digest of `user_ids`, by which a changed assignment
        is refused; or, with correlated noise, a digest of the examples, which must come in the same
        order whenever the run resumes. Do not publish what is marked `NOT_PRIVATE`: the files
        `user_ids_NOT_PRIVATE.json`, `examples_NOT_PRIVATE.json` and `history_NOT_PRIVATE.json`, and
        `history_NOT_PRIVATE` in `report.json`.

        Metrics leave out the padding of the batches: those that were compiled without weights get
        the batches' weights, which mark padding. The loss that Keras prints in training is averaged
        over the rows of padding, too, so it is smaller than `val_loss` by about `batch_size` /
        rows; this does not affect the gradients.

        Args:
          model: a model compiled with an optimizer of the plan.
          x: see `batches`, also for `y` and `sample_weight`.
          y: the targets. `None` for a model that needs none, as one with a `train_step` or a
            `compute_loss` of its own, or whose losses are those of `add_loss`. Where its loss does
            not read the sample weights, the rows of padding are left out.
          sample_weight: a weight for each example.
          class_weight: a weight for each class, by its number, which multiplies the weights of its
            examples; 1 for classes that are left out. The largest should be 1, since clipping
            undoes larger ones, and none should be computed from the examples: see
            docs/how-to/class-weights.md. It is for one output, whose labels are whole numbers or
            one-hot.
          directory: where the run is kept. It belongs to this run alone. `None` keeps nothing.
          callbacks: further callbacks, or a single one.
          equal_rows: whether to pad all batches to one number of rows, for a model whose step has
            to know that number; training takes longer. By default batches have only a few rows
            more than examples, where the library can show that nothing depends on how many; see
            docs/concepts/sampling.md.
          **fit_arguments: other arguments of `model.fit`, such as `validation_data` and `verbose`.

        Returns:
          Keras's history, including the epochs before an interruption.

        Raises:
          TypeError, ValueError: if an argument is wrong, the optimizer is not one of the plan, or
            the directory belongs to another plan.
          NotPrivateError: if the noise of the optimizer has a `seed`.
          BudgetExceededError: if the model has already spent the budget.
          RuntimeError: if the run in the directory is finished, but none of its epochs was saved.
        """
        refuse_fit_arguments(fit_arguments)
        return self._training.fit(
            model,
            data=(x, y, sample_weight),
            class_weight=class_weight,
            directory=directory,
            settings=self._settings(),
            callbacks=_listed(callbacks),
            equal_rows=equal_rows,
            fit_arguments=fit_arguments,
        )

    def statement(self, max_examples_per_user: int | None = None) -> str:
        """The guarantee of the model that `fit` trained last; see `privacy_statement`.

        Args:
          max_examples_per_user: upper bound on the number of examples from one person; for plans
            without `user_ids`.

        Raises:
          ValueError: if `fit` has not been called.
        """
        return privacy_statement(
            self._training.optimizer,
            self._num_units,
            self.delta,
            sampling=self.sampling,
            accountant=self.accountant,
            max_examples_per_user=max_examples_per_user,
        )

    def report(
        self, path: str | os.PathLike, *, audit: Any = None, test_metric: str | None = None
    ) -> None:
        """Writes the report of the model that `fit` trained last; see `report.facts`.

        Args:
          path: the HTML page. The same report as Markdown and as JSON is written beside it, with
            the suffixes `.md` and `.json`.
          audit: the result of an `auditing.PrivacyAudit`, if one was made.
          test_metric: the metric to show, one that `validation_data` gave; by default the first.

        Raises:
          ValueError: if `fit` has not been called, or `test_metric` is not such a metric.
        """
        data = reports.facts(
            self._training.optimizer,
            self._num_units,
            self.delta,
            history=self._training.history,
            epsilon=self.epsilon,
            sampling=self.sampling,
            accountant=self.accountant,
            model=self._training.model,
            audit=audit,
            test_metric=test_metric,
        )
        reports.write(path, data)

    def describe(self) -> str:
        """What the plan will do, before any training.

        >>> plan = PrivacyPlan(
        ...     noise_multiplier=1.5, delta=1e-4, num_examples=2_000, batch_size=100, epochs=4,
        ...     accountant="rdp",
        ... )
        >>> print(plan.describe())
        epsilon = 1.4249 at delta = 0.0001 for each of 2000 examples (RDP accounting)
        noise multiplier 1.5
        80 steps: 4 epochs of 20 Poisson batches
        Batches average 100 examples, with room for 184 examples, since their sizes are random
        epsilon after epoch 1: 0.8149, 2: 1.0514, 4: 1.4249
        """
        shown = sorted({1, math.ceil(self.epochs / 4), math.ceil(self.epochs / 2), self.epochs})
        spent = [
            f"{epoch}: {format_epsilon(self._epsilon_after(epoch * self.steps_per_epoch))}"
            for epoch in shown
        ]
        total = self._epsilon_after(self.steps)
        unspent = (
            f"the run spends {format_epsilon(total)} of it: with less noise, no epsilon would hold "
            "at this delta"
        )
        return "\n".join(
            [
                f"epsilon = {format_epsilon(self.epsilon)} at delta = {format_delta(self.delta)} "
                f"for each of {self._num_units} {self._unit}s "
                f"({self.accountant.upper()} accounting)",
                *([unspent] if total < 0.95 * self.epsilon else []),
                f"noise multiplier {self.noise_multiplier:g}",
                *self._budget.describe_noise(self.sampling, self.noise),
                *self.sampling.describe(self._num_units, self.epochs),
                f"epsilon after epoch {', '.join(spent)}",
            ]
        )

    def _gain_of_sums(self, steps: int) -> float:
        """T steps in one direction relative to the noise in their sum, √T if it is independent."""
        if self.noise.is_independent:
            return math.sqrt(steps)
        return steps / float(self.noise.sum_deviations(steps)[-1])

    def recommend(
        self, batch_sizes: Sequence[int] | None = None, epochs: Sequence[int] | None = None
    ) -> list[PlanOffer]:
        """Compares ways to spend the ε of the plan, the best first.

        T steps of norm C in one direction add up to T·C, and their noise to a standard deviation of
        √T·σ·C/L in each weight, or less with correlated noise: a ratio of √T·L/σ. The ratio favors
        large batches, which cost time. Offers with the best ratio come first, but those of fewer
        than 700 steps come last, the fewest steps at the end, because a model needs some steps
        however little noise they have.

        Finding the noise for each pair takes seconds with `accountant="pld"`: for the fifteen pairs
        of the default and 60,000 examples, about a minute. A plan with `accountant="rdp"` compares
        them in seconds, by slightly larger noise.

        Args:
          batch_sizes: expected batch sizes to compare; by default 1/2 to 8 times the plan's.
          epochs: numbers of epochs to compare; by default half, once and twice the plan's.

        Returns:
          One offer for each pair.

        Raises:
          TypeError, ValueError: if an argument has the wrong type or is out of its range, or no
            noise meets the budget.

        >>> plan = PrivacyPlan(
        ...     epsilon=2.0, delta=1e-4, num_examples=2_000, batch_size=50, epochs=5,
        ...     accountant="rdp",
        ... )
        >>> for offer in plan.recommend(batch_sizes=[50, 200], epochs=[5]):
        ...     print(offer.batch_size, offer.steps, offer.noise_multiplier)
        50 200 1.0554
        200 50 1.6897
        """
        if batch_sizes is None:
            some = (self.batch_size * factor // 2 for factor in (1, 2, 4, 8, 16))
            largest = self._largest_batch_size(self.noise.bands)
            batch_sizes = sorted({min(max(size, 1), largest) for size in some})
        if epochs is None:
            epochs = sorted({max(1, self.epochs // 2), self.epochs, 2 * self.epochs})
        for name, values in {"batch_sizes": batch_sizes, "epochs": epochs}.items():
            if not isinstance(values, Iterable):
                raise TypeError(
                    f"`{name}` must be a list of whole numbers, such as `[{values!r}]`. Received: "
                    f"{name}={values!r}"
                )
        batch_sizes, epochs = list(batch_sizes), list(epochs)
        if not batch_sizes or not epochs:
            raise ValueError(
                "`batch_sizes` and `epochs` must not be empty; leave them out for the default. "
                f"Received: batch_sizes={batch_sizes!r}, epochs={epochs!r}"
            )
        offers = []
        for size in (checks.integer("batch_sizes", size, 1) for size in batch_sizes):
            for number in epochs:
                sampling = self._sampling(size, checks.integer("epochs", number, 1))
                noise = self._budget.least_noise(self.epsilon, sampling, self.noise)
                ratio = self._gain_of_sums(sampling.steps) * size / noise
                shown = float(f"{ratio:.4g}")  # it only compares; `noise` keeps the budget
                offers.append(PlanOffer(size, number, sampling.steps, noise, shown))
        return sorted(offers, key=lambda offer: offer.rank, reverse=True)

    def _sampling(self, batch_size: int, epochs: int) -> SamplingOfPlan:
        return self._budget.sampling(batch_size, epochs, self.noise)

    def limit_for(self, optimizer: Any) -> float:
        """The ε at which `fit`, which calls this, stops training with an optimizer.

        It is that of the plan, with one exception: a plan that was made with a given σ, to train a
        model longer, may have more room in its batches than the earlier plan had. All steps then
        count with the smaller room, which costs a little more, and `fit` allows that.
        """
        drawn = self.sampling.as_drawn(optimizer)
        if not self._noise_was_given or drawn is self.sampling:
            return self.epsilon
        of_steps = self._budget.epsilon(drawn, self.noise, self.noise_multiplier)
        return of_steps if self.epsilon < of_steps < 1.01 * self.epsilon else self.epsilon

    def _epsilon_after(self, steps: int) -> float:
        return self._budget.epsilon(self.sampling, self.noise, self.noise_multiplier, steps)

    def _settings(self) -> dict[str, Any]:
        names = ("delta", "batch_size", "epochs", "noise_multiplier", "accountant")
        return {
            **{name: getattr(self, name) for name in names},
            # The number of examples would reveal something about how many each user has.
            "num_examples": self.num_examples if self._users is None else None,
            "num_users": self.num_users,
            **self._of_users,
            "epsilon": self.epsilon,
            "other_events": [repr(event) for event in self.other_events],
            "noise": noise_strategies.serialize(self.noise),
        }


def _listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Callbacks as `model.fit` takes them: several, a single one, or `None`."""
    if callbacks is None:
        return []
    return [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks)


def _users(
    user_ids: Any, examples_per_user: int | None, num_examples: int | None
) -> UserRecords | None:
    """The records of the users, if users are protected."""
    if (user_ids is None) != (examples_per_user is None):
        raise ValueError(
            "`user_ids` and `examples_per_user` belong together: the user each example belongs to, "
            "and how many examples of one user a batch may contain. Received: "
            f"{'no ' if user_ids is None else ''}`user_ids`, "
            f"examples_per_user={examples_per_user!r}"
        )
    if user_ids is None:
        return None
    users = UserRecords(user_ids)
    if num_examples is not None and users.num_records != num_examples:
        raise ValueError(
            "`user_ids` must have one id for each example. Received: "
            f"{users.num_records} ids, num_examples={num_examples!r}"
        )
    return users
