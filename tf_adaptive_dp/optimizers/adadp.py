"""ADADP: private SGD that finds its own learning rate by step doubling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.optimizers import OwnRuleOptimizer, add_state, decays, slot_index
from tf_adaptive_dp.accounting.noise_strategies import ToeplitzStrategy
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import RateAdaptingOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import SideInformation
from tf_adaptive_dp.update_rules import step_doubling


class _Pair(NamedTuple):
    """What `update_step` needs to know about a pair of minibatches; bool scalars."""

    judge: tf.Tensor
    frozen: tf.Tensor
    accepted: tf.Tensor


@register
@fill_docstring
class ADADP(RateAdaptingOptimizer, OwnRuleOptimizer):
    """Private SGD that adapts its own learning rate by step doubling; nothing needs tuning.

    Pass `plan.optimizer(ADADP)` of a `PrivacyPlan` to `model.compile`, or without a plan
    `ADADP(l2_norm_clip=1.0, noise_multiplier=1.1)`.

    ADADP compares one step of size η with two steps of size η/2. The two half steps use two
    minibatches, with the noisy mean gradients G₁ and G₂ of `DPSGD`:

        even minibatch:  θ̂ ← θ − η·G₁ (the Euler point),  θ ← θ − (η/2)·G₁
        odd minibatch:   θ̃ ← θ − (η/2)·G₂,  err = ‖(θ̃ − θ̂) / max(1, |θ̃|)‖₂ over all variables
                         η ← η · min(max(tol / err, alpha_min), alpha_max)
                         θ ← θ̃ (or θ̂, see `keep`)

    The tolerance falls with the number of steps: tol = tolerance / √(1 + tolerance_decay·t) after t
    pairs of minibatches. Otherwise the noise that accumulates over a long run would undo what the
    model learned early. At first, one adaptation may double or halve η, until errors have been
    found on both sides of the tolerance: with large batches there are too few steps for a search by
    tenths. `tolerance_decay=0` and `initial_factor=1` give the paper's form of both.

    With `clipping="adaptive"`, G₁ and G₂ are divided by the clip norms that they were released
    with, so η depends neither on the units of the loss nor on how the clip norm moves.

    With correlated noise (`noise=BandedNoise(b)`), err would hold noise that the next steps take
    back. Its noise is known, so the noise that stays in sums of steps takes its place; see
    `update_rules.step_doubling.error_of_sums`. `TreeNoise` differs from step to step, and is
    refused.

    With side information, steps follow preconditioned gradients, and err compares points of that
    flow. `PublicGradients` stays constant during the two minibatches of a step.

    `learning_rate` is the adapted η, so callbacks and TensorBoard see it. Gradients are averages
    over the batch, which reproduces the paper's figures; version 1 of the paper prints sums.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger,
    so one adaptation step costs two releases. The rest is post-processing (Theorem 2). A discarded
    step has still been paid for.

    Args:
      {{mechanism_args}}
      {{side_information_args}}
      learning_rate: the first η. The first steps find a suitable rate from almost any value.
      tolerance: tol at the start. `None` uses min(√d / 50, max(1, √(d / 270,000))) for d
        parameters: 1, the value printed in the paper, from 2,500 to 270,000 parameters. With
        `normalized_inputs` it is less than 1 for fewer than 40,000 parameters and σ < 8; see
        `update_rules.step_doubling.default_tolerance`. The paper's code counted every parameter
        ten times in err, so its results correspond to 1/√10. See `suggest_tolerance`.
      tolerance_decay: how fast tol falls. 0 keeps it constant.
      alpha_min: the smallest factor of one adaptation.
      alpha_max: the largest factor of one adaptation.
      initial_factor: the factor by which one adaptation may raise or lower η at first, until there
        have been errors above tol and below it. With 1, `alpha_min` and `alpha_max` apply from the
        start, as in the paper.
      normalized_inputs: whether the model's inputs have mean 0 and variance 1, or nearly so. Only
        the first tolerance depends on it, and only if `tolerance` is `None`. A `PrivacyPlan` with
        `normalize_inputs=True` sets it for its optimizer.
      num_steps: T, the minibatches of the whole run, a public number; a `PrivacyPlan` sets it for
        its optimizer. With `normalized_inputs`, if T < 4,800, the first tolerance of a model of at
        least 40,000 parameters is (4,800 / T)^¼ times as large, unless `tolerance` is given.
      keep: which point to keep after two minibatches: `"half_steps"`, θ̃ (the supplement), or
        `"euler"`, θ̂ (version 1).
      discard: whether to return to the point before both minibatches if err > tol.
      freeze_learning_rate_after: k₀. From then on the optimizer is plain SGD with the learning
        rate η / (1 + decay_after_freeze·(k − k₀)). `None` adapts forever.
      decay_after_freeze: see `freeze_learning_rate_after`; 0.1 in the paper.
      steps_per_epoch: the unit of k and k₀, in minibatches. With the default of 1 they count
        Keras's `iterations`. Pass the number of minibatches per epoch to count epochs, as the
        paper does.
      **kwargs: the arguments of `tf.keras.optimizers.Optimizer`, such as `use_ema` and
        `weight_decay`.

    Raises:
      {{raises}}

    References:
      - Koskela and Honkela, "Learning Rate Adaptation for Federated and Differentially Private
        Learning" (2018), arXiv:1809.03832, Algorithms 1 and 2.

    >>> optimizer = ADADP(l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=0.1)
    >>> w = tf.Variable([0.0])
    >>> for _ in range(2):
    ...     with tf.GradientTape() as tape:
    ...         loss = tf.constant([-1.0, -1.0]) * w
    ...     _ = optimizer.minimize(loss, [w], tape)
    >>> print(f"w = {w.numpy()[0]:.2f}, next η = {optimizer.learning_rate.numpy():.2f}")
    w = 0.10, next η = 0.20
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        *,
        learning_rate: float = 0.1,
        tolerance: float | None = None,
        tolerance_decay: float = 0.005,
        alpha_min: float = 0.9,
        alpha_max: float = 1.1,
        initial_factor: float = 2.0,
        normalized_inputs: bool = False,
        num_steps: int | None = None,
        keep: str = "half_steps",
        discard: bool = False,
        freeze_learning_rate_after: int | None = None,
        decay_after_freeze: float = 0.1,
        steps_per_epoch: int = 1,
        side_information: SideInformation | None = None,
        name: str = "ADADP",
        **kwargs: Any,
    ):
        if isinstance(learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise TypeError(
                "ADADP adapts its learning rate, which a schedule would overwrite. Received: "
                f"learning_rate={learning_rate!r}. Pass a number; see also "
                "`freeze_learning_rate_after`."
            )
        if side_information is not None:
            side_information = check_side_information(side_information)
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            num_microbatches,
            learning_rate=checks.number("learning_rate", learning_rate, 0, strict=True),
            # G₁ and G₂ must be gradients of one flow, or err would measure how A changed.
            side_information=Preconditioning(side_information, minibatches_per_step=2),
            name=name,
            **kwargs,
        )
        settings = step_doubling.StepDoublingSettings(
            tolerance, tolerance_decay, alpha_min, alpha_max, keep, discard
        )
        self.tolerance, self.tolerance_decay = settings.tolerance, settings.tolerance_decay
        self.alpha_min, self.alpha_max = settings.alpha_min, settings.alpha_max
        self.keep, self.discard = settings.keep, settings.discard
        noise = self.noise
        if not isinstance(noise, ToeplitzStrategy) or not noise.is_bounded:
            raise ValueError(
                "`noise` must be IndependentNoise() or BandedNoise(bands) for ADADP: it compares "
                "gradients that are equally noisy. In trees, and with a ToeplitzNoise of equal "
                f"coefficients, the noise differs from step to step. Received: noise={noise!r}"
            )
        self._steady_noise = noise
        self.initial_factor = checks.number("initial_factor", initial_factor, 1)
        self.normalized_inputs = checks.boolean("normalized_inputs", normalized_inputs)
        if num_steps is not None:
            num_steps = checks.integer("num_steps", num_steps, 1)
        self.num_steps = num_steps
        if freeze_learning_rate_after is not None:
            freeze_learning_rate_after = checks.integer(
                "freeze_learning_rate_after", freeze_learning_rate_after, 0
            )
        self.freeze_learning_rate_after = freeze_learning_rate_after
        self.decay_after_freeze = checks.number("decay_after_freeze", decay_after_freeze, 0)
        self.steps_per_epoch = checks.integer("steps_per_epoch", steps_per_epoch, 1)
        self._last_error = add_state(self, [], tf.float32, "error")
        # How many pairs were judged, and how many of them had err ≤ tol.
        self._judged = add_state(self, [2], tf.int64, "judged")
        self._pair: _Pair | None = None

    def create_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the points that a pair of minibatches needs, for each variable.

        Args:
          variables: the variables to train.
        """
        self._euler_points = [self.add_variable_from_reference(v, "euler") for v in variables]
        if self.discard:
            self._starts = [self.add_variable_from_reference(v, "start") for v in variables]

    @property
    def last_error(self) -> float:
        """err of the last adaptation. It is private, as it depends on released gradients only."""
        return float(self._last_error.numpy())

    @property
    def acceptance(self) -> float:
        """The share of adaptations so far with err ≤ tol. It is private, like `last_error`."""
        judged, accepted = self._judged.numpy()
        return float(accepted) / max(int(judged), 1)

    def update_all(
        self,
        grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]],
        update_each: Callable[[Sequence], tf.Tensor],
    ) -> tf.Tensor:
        """Judges the pair over all variables, then updates each; see `OwnRuleOptimizer`."""
        clip = self._mechanism.clip_norm.learned()
        if clip is not None:  # in units of C, which may grow faster than η can shrink
            grads_and_vars = [(g / tf.cast(clip, g.dtype), v) for g, v in grads_and_vars]
        odd = self.iterations % 2 == 1
        frozen = self._epochs_frozen(self.iterations) >= 0
        eta = tf.cast(self.learning_rate, tf.float32)
        judge = odd & ~frozen & ~self._mechanism.is_measuring()

        def error_of_the_pair() -> tf.Tensor:
            points = [v - tf.cast(eta / 2, v.dtype) * g for g, v in grads_and_vars]
            error = step_doubling.error_estimate(
                points, [self._euler_points[slot_index(self, v)] for _, v in grads_and_vars]
            )
            return error if self.noise.is_independent else self._of_sums(error, eta, points)

        # Every second minibatch only, since this is a pass over all parameters.
        error = tf.cond(judge, error_of_the_pair, lambda: tf.zeros([]))
        tolerance = self._tolerance_now()
        accepted = error <= tolerance
        self._last_error.assign(tf.where(judge, error, self._last_error))
        counts = tf.cast(tf.stack([judge, judge & accepted]), tf.int64)
        self._judged.assign_add(counts)
        self._pair = _Pair(judge, frozen, accepted)
        iterations = update_each(grads_and_vars)
        self._pair = None
        judged, accepted = tf.unstack(self._judged)
        bounds = step_doubling.factor_bounds(
            judged, accepted, self.alpha_min, self.alpha_max, self.initial_factor
        )
        adapted = step_doubling.adapted_learning_rate(eta, error, tolerance, *bounds)
        self.learning_rate.assign(self._next_learning_rate(eta, adapted, judge, iterations))
        return iterations

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Moves one variable: by half a step while η adapts, by a whole one once it is frozen.

        The second minibatch of a pair ends at the point that `keep` and `discard` say.
        """
        pair = self._pair
        if pair is None:
            raise RuntimeError("`update_step` must be called by `update_all`.")
        index = slot_index(self, variable)
        euler = self._euler_points[index]
        step = tf.cast(self.learning_rate, variable.dtype) * gradient
        after = variable - tf.where(pair.frozen, step, step / 2)

        def first() -> tf.Tensor:
            if self.discard:
                self._starts[index].assign(variable)
            euler.assign(variable - step)
            return after

        def second() -> tf.Tensor:
            kept = after if self.keep == "half_steps" else tf.convert_to_tensor(euler)
            if self.discard:
                kept = tf.where(pair.accepted, kept, self._starts[index])
            return kept

        variable.assign(tf.cond(pair.judge, second, first))

    def _of_sums(self, error: tf.Tensor, eta: tf.Tensor, points: Sequence[tf.Tensor]) -> tf.Tensor:
        """err with the noise that stays in sums of steps; see `step_doubling.error_of_sums`."""
        points = [tf.cast(point, tf.float32) for point in points]
        relative = step_doubling.relative_norm([tf.ones_like(p) for p in points], points)
        return step_doubling.error_of_sums(
            error,
            eta / math.sqrt(2) * self._mechanism.noise_stddev() * relative,
            self._steady_noise.difference_deviation(),
            self._steady_noise.drift_deviation(),
        )

    def _tolerance_now(self) -> tf.Tensor:
        first = self.tolerance
        if first is None:
            num_parameters = sum(point.shape.num_elements() for point in self._euler_points)
            first = step_doubling.default_tolerance(
                num_parameters,
                self.normalized_inputs,
                self._mechanism.sigma() * self._steady_noise.drift_deviation(),
                self.num_steps,
            )
        return step_doubling.decayed_tolerance(first, self.iterations // 2, self.tolerance_decay)

    def _epochs_frozen(self, iterations: tf.Tensor) -> tf.Tensor:
        """k − k₀, which is negative as long as the learning rate adapts."""
        if self.freeze_learning_rate_after is None:
            return tf.constant(-1, tf.int64)
        return iterations // self.steps_per_epoch - self.freeze_learning_rate_after

    def _next_learning_rate(
        self, eta: tf.Tensor, adapted: tf.Tensor, judged: tf.Tensor, iterations: tf.Tensor
    ) -> tf.Tensor:
        iterations = tf.convert_to_tensor(iterations)
        elapsed = self._epochs_frozen(iterations - 1)
        decayed = step_doubling.decayed_learning_rate(
            eta,
            tf.maximum(elapsed, 0),
            tf.maximum(self._epochs_frozen(iterations), 0),
            self.decay_after_freeze,
        )
        rate = tf.where(elapsed >= 0, decayed, tf.where(judged, adapted, eta))
        return tf.cast(rate, self.learning_rate.dtype)

    def decay_all(
        self, variables: Sequence[tf.Variable], decay_each: Callable[[Sequence], None]
    ) -> None:
        """Decays once per step of size η: on even minibatches, and on all once η is frozen.

        Args:
          variables: the variables of this step.
          decay_each: not used; it would decay on every minibatch.
        """
        del decay_each
        even = (self.iterations % 2 == 0) | (self._epochs_frozen(self.iterations) >= 0)
        even &= ~self._mechanism.is_measuring()
        for variable in variables:
            if decays(self, variable):
                rate = tf.where(even, self.learning_rate * self.weight_decay, 0.0)
                variable.assign_sub(variable * tf.cast(rate, variable.dtype))

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; `learning_rate` is the adapted one."""
        return {
            **super().get_config(),
            "learning_rate": float(self.learning_rate.numpy()),
            "tolerance": self.tolerance,
            "tolerance_decay": self.tolerance_decay,
            "alpha_min": self.alpha_min,
            "alpha_max": self.alpha_max,
            "initial_factor": self.initial_factor,
            "normalized_inputs": self.normalized_inputs,
            "num_steps": self.num_steps,
            "keep": self.keep,
            "discard": self.discard,
            "freeze_learning_rate_after": self.freeze_learning_rate_after,
            "decay_after_freeze": self.decay_after_freeze,
            "steps_per_epoch": self.steps_per_epoch,
        }
