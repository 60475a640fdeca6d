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
from tf_adaptive_dp.optimizers.dp_optimizer import DPOptimizer
from tf_adaptive_dp.optimizers.preconditioning import Preconditioning, check_side_information
from tf_adaptive_dp.optimizers.registration import register
from tf_adaptive_dp.side_information.provenance import SideInformation
from tf_adaptive_dp.update_rules import unit_steps

# What the base classes have in their configuration and this optimizer finds by itself.
_FOUND = ("l2_norm_clip", "learning_rate", "clipping", "num_microbatches")


@register
@fill_docstring
class UntunedSGD(DPOptimizer, OwnRuleOptimizer, sets=_FOUND):
    """Private SGD that needs neither a learning rate nor a clip norm, whatever the units are.

    The first W = 5 + ⌊(50·σ/L)²·(K+1)/2⌋ batches move nothing, for K variables and batches of L
    examples. Their releases are noisy histograms of the examples' losses and of the norms of their
    gradients for each variable, in place of gradients. From these come a scale a_k for each
    variable and a unit u of the loss (one nat, or more where the first predictions are far apart).
    Gradients are multiplied by a_k, which gives most of them a norm of about 10, and clipped to 1.
    With their noisy mean p, whose noise is s = σ/L, step t after that is

        η_t = min(κ / (10·s·√(t + 10)), 1) · u
        θ_k ← θ_k − η_t·a_k·p_k

    So neither the units of the inputs nor those of the loss matter, nor how large the weights of
    one layer are beside those of the next. `update_rules.unit_steps` has the formulas. With side
    information, all of this refers to preconditioned gradients.

    `learning_rate` is η_t, and 0 during the first W batches.

    Guarantee: each minibatch is one release of the Gaussian mechanism and one entry in the ledger,
    the first W included. All that is learned on the way is post-processing.

    Args:
      noise_multiplier: σ. 0 adds no noise: it gives no privacy and is for tests only.
      {{side_information_args}}
      kappa: κ > 0, which says how much noise may accumulate. `docs/results.md` has what the default
        gives on many problems; nothing there was tuned.
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

    def __init__(
        self,
        noise_multiplier: float,
        *,
        kappa: float = 0.35,
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
        self._ranks: list[int] = []
        self.kappa = checks.number("kappa", kappa, 0, strict=True)
        self._num_steps = add_state(self, [], tf.int64, "num_steps")

    def create_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the histograms.

        Args:
          variables: the variables to train.
        """
        self._ranks = [len(v.shape) for v in variables]
        add = functools.partial(add_state, self)
        self._mechanism.histograms = Histograms(len(variables), add)

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
        scales = tf.cast(
            unit_steps.scales(self._histograms().sizes().norms, self._ranks), tf.float32
        )
        return [scales[slot_index(self, variable)] for variable in variables]

    def _histograms(self) -> Histograms:
        histograms = self._mechanism.histograms
        if histograms is None:
            raise RuntimeError("`UntunedSGD` must be built before it can take a step.")
        return histograms

    def update_all(
        self,
        grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]],
        update_each: Callable[[Sequence], tf.Tensor],
    ) -> tf.Tensor:
        """Sets the step size, then updates variable by variable.

        Args:
          grads_and_vars: pairs of a noisy mean gradient and its variable.
          update_each: calls `update_step` for each pair.

        Returns:
          The next value of `iterations`.
        """
        moves = ~self._histograms().released()
        num_steps = tf.convert_to_tensor(self._num_steps.assign_add(tf.cast(moves, tf.int64)))
        noise, sizes = self._mechanism.relative_noise(), self._histograms().sizes()
        unit = unit_steps.unit_of_loss(sizes.loss, sizes.spread)
        step = unit_steps.step_size(num_steps, noise, unit, self.kappa)
        rate = tf.where(moves, step, tf.zeros_like(step))
        self.learning_rate.assign(tf.cast(rate, self.learning_rate.dtype))
        return update_each(grads_and_vars)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Moves one variable.

        Args:
          gradient: its noisy mean gradient.
          variable: the variable.
        """
        (scale,) = self.scale_of([variable])
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
