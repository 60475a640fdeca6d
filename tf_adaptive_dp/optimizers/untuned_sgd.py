"""UntunedSGD: private SGD whose scales and step sizes come from what it measures first."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.optimizers import OwnRuleOptimizer, add_state, slot_index
from tf_adaptive_dp.mechanism.histograms import Histograms
from tf_adaptive_dp.optimizers.docstrings import fill_docstring
from tf_adaptive_dp.optimizers.dp_optimizer import RateAdaptingOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import SideInformation
from tf_adaptive_dp.update_rules import unit_steps

# What the base classes have in their configuration and this optimizer finds by itself.
_FOUND = ("l2_norm_clip", "learning_rate", "clipping", "num_microbatches")
_STEPS_PER_MEASUREMENT = 8


@register
@fill_docstring
class UntunedSGD(RateAdaptingOptimizer, OwnRuleOptimizer, sets=_FOUND):
    """Private SGD that needs neither a learning rate nor a clip norm, whatever the units are.

    The first W = 5 + ⌊(50·σ/L)²·(K+1)/2⌋ batches change no weights, for K variables and batches of
    L examples. Instead of gradients they release noisy histograms of the examples' losses and of
    the norms of their gradients for each variable. From these come a scale a_k for each variable
    and a unit u of the loss (one nat, or more where the first predictions are far apart). Gradients
    are multiplied by a_k, which gives most of them a norm of about 10, and clipped to 1. With their
    noisy mean p, whose noise is s = σ/L, step t after that is

        η_t = min(κ / (10·s·√(t + 10)), 1) · u
        θ_k ← θ_k − η_t·a_k·p_k

    So the units of the inputs do not matter, nor how large the weights of one layer are compared
    with those of the next. Nor does it matter if the loss is multiplied by a factor below 1. But if
    a classification loss is multiplied by 1,000, steps stay too small, because only the spread of
    the first losses shows its unit. `update_rules.unit_steps` has the formulas.

    With side information, all of this refers to preconditioned gradients. After a
    `DelayedPreconditioner` has changed its A, another W batches measure the norms under it, and
    steps are multiplied by A, too: θ ← θ − η·a·A·p. It may change only if all measurements together
    then take at most an eighth of the steps.

    `learning_rate` is η_t, and 0 during the first W batches.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger,
    those that measure included. All that is learned on the way is post-processing.

    Args:
      noise_multiplier: σ. 0 adds no noise: it gives no privacy and is for tests only.
      {{side_information_args}}
      kappa: κ > 0, which says how much noise may accumulate. `None` uses 1.4 for small linear
        models, and less for deep and large ones: min(1.4 / D^1.25, max(50/√d, .35)) for D kernels,
        of which at most four count, and d parameters.
      expected_batch_size: L, the public constant that divides the noisy sum. `None` uses the size
        of the first batch and requires all batches to have that size.
      **kwargs: `gradients`, `gradient_accumulation_steps`, `loss_scale`, `secure_noise`, `seed` and
        `examples_per_user` as in `DPSGD`, and the arguments of `tf.keras.optimizers.Optimizer`,
        such as `use_ema`.

    Raises:
      {{raises}}

    References:
      - Abadi et al., "Deep Learning with Differential Privacy" (2016), arXiv:1607.00133,
        Algorithm 1, is the step. The measuring is ours: `docs/methods/untuned-sgd.md`.

    >>> optimizer = UntunedSGD(noise_multiplier=1.1)
    >>> optimizer.gradient_norms is None
    True
    """

    needs_independent_noise = "its step size is that of sums of independent noise"

    def __init__(
        self,
        *,
        noise_multiplier: float,
        kappa: float | None = None,
        expected_batch_size: float | None = None,
        side_information: SideInformation | None = None,
        name: str = "UntunedSGD",
        **kwargs: Any,
    ):
        for argument in _FOUND:
            if argument in kwargs:
                raise TypeError(
                    f"`UntunedSGD` finds `{argument}` by itself, or has none. Received: "
                    f"{argument}={kwargs[argument]!r}. Leave it out, or choose `DPSGD` or `ADADP`."
                )
        if side_information is not None:
            side_information = check_side_information(side_information)
        super().__init__(
            1.0,
            noise_multiplier,
            expected_batch_size=expected_batch_size,
            side_information=_Scaling(side_information),
            learning_rate=0.0,
            name=name,
            **kwargs,
        )
        self._shapes: list[list[int]] = []
        if kappa is not None:
            kappa = checks.number("kappa", kappa, 0, strict=True)
        self.kappa = kappa
        self._num_steps = add_state(self, [], tf.int64, "num_steps")
        # Those after the first.
        self._measurements = add_state(self, [], tf.int64, "measurements")

    def create_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the histograms.

        Args:
          variables: the variables to train.
        """
        self._shapes = [list(v.shape) for v in variables]
        add = functools.partial(add_state, self)
        self._mechanism.histograms = Histograms(len(variables), add)

    @property
    def learns_units(self) -> bool:
        """Whether the optimizer learns how large gradients are: always, whatever C is."""
        return True

    @property
    def gradient_norms(self) -> list[float] | None:
        """U_k, or `None` before they are known. They are private: they come from noisy counts."""
        histograms = self._mechanism.histograms
        norms = [] if histograms is None else histograms.sizes().norms.numpy().tolist()
        return norms if any(norms) else None

    def scale_of(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """a_k of some variables, float32 scalars.

        Args:
          variables: variables that the optimizer was built for.
        """
        ranks = [len(shape) for shape in self._shapes]
        norms = self._histograms().sizes().norms
        scales = tf.cast(unit_steps.scales(norms, ranks), tf.float32)
        return [scales[slot_index(self, variable)] for variable in variables]

    def _histograms(self) -> Histograms:
        histograms = self._mechanism.histograms
        if histograms is None:
            raise RuntimeError("`UntunedSGD` must be built before it can take a step.")
        return histograms

    def may_measure_again(self) -> tf.Tensor:
        """Whether all measurements, with another one, take an eighth of the steps at most."""
        measurements = tf.cast(self._measurements + 1, tf.float64)
        needed = self._mechanism.batches_to_measure() * measurements
        return tf.cast(self._num_steps, tf.float64) >= _STEPS_PER_MEASUREMENT * needed

    def measure_again(
        self, when: tf.Tensor, indices: Sequence[int], ratios: Sequence[tf.Tensor]
    ) -> None:
        """Lets the next W batches measure the norms anew.

        Args:
          when: bool scalar, whether to do so.
          indices: the places of some variables.
          ratios: for each of them [2], by which factor its norms have become larger, at least and
            at most. Those of other variables stay what they are.
        """
        of_all = [tf.ones([2], tf.float64)] * len(self._shapes)
        for index, ratio in zip(indices, ratios):
            of_all[index] = ratio
        self._histograms().open_again(when, tf.stack(of_all, axis=1))
        self._measurements.assign_add(tf.cast(when, tf.int64))

    def update_all(
        self,
        grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]],
        update_each: Callable[[Sequence], tf.Tensor],
    ) -> tf.Tensor:
        """Sets η_t for all variables, then updates each; see `OwnRuleOptimizer`."""
        moves = ~self._mechanism.is_measuring()
        num_steps = tf.convert_to_tensor(self._num_steps.assign_add(tf.cast(moves, tf.int64)))
        noise, sizes = self._mechanism.relative_noise(), self._histograms().sizes()
        usual = unit_steps.default_kappa(self._shapes)
        unit = unit_steps.unit_of_loss(sizes.loss, sizes.spread, usual)
        kappa = usual if self.kappa is None else self.kappa
        step = unit_steps.step_size(num_steps, noise, unit, kappa)
        rate = tf.where(moves, step, tf.zeros_like(step))
        self.learning_rate.assign(tf.cast(rate, self.learning_rate.dtype))
        return update_each(grads_and_vars)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Moves one variable by η_t·a_k·p_k, times A if side information learns."""
        (scale,) = self.scale_of([variable])
        information = self.side_information
        if information is not None and information.learns:
            index = slot_index(self, variable)
            (learned,), _ = information.scale_and_shift(self.side_information_state, [index])
            scale *= learned
        rate = tf.cast(self.learning_rate, tf.float32) * scale
        variable.assign_sub(tf.cast(rate, variable.dtype) * gradient)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; what it measured is not among them."""
        config = {**super().get_config(), "kappa": self.kappa}
        return {key: value for key, value in config.items() if key not in _FOUND}


class _Scaling(Preconditioning):
    """Multiplies gradients by a_k, after side information has preconditioned them."""

    def scale_and_shift(
        self, optimizer: tf.keras.optimizers.Optimizer, variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
        """The product of both scales; see `Preconditioning`."""
        scale, shift = super().scale_and_shift(optimizer, variables)
        own = optimizer.scale_of(variables)
        if scale is not None:
            own = [a * tf.cast(b, tf.float32) for a, b in zip(own, scale)]
        return own, shift

    def may_change(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.Tensor:
        """Whether there is time to measure norms again; see `Preconditioning`."""
        return super().may_change(optimizer) & optimizer.may_measure_again()

    def after_change(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        changed: tf.Tensor,
        indices: Sequence[int],
        ratios: Sequence[tf.Tensor],
    ) -> None:
        """Has the norms of gradients measured under the new A; see `Preconditioning`."""
        optimizer.measure_again(changed, indices, ratios)
