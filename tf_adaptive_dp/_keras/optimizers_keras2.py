"""What the optimizers need of Keras 2 beyond its public API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.own_rule import OwnRule

APPLYING = "`apply_gradients` takes"
HOW_TO_STEP = "Call `optimizer.minimize(loss, variables, tape)` with a loss vector"


class _AnyConstructor(type(tf.keras.mixed_precision.LossScaleOptimizer)):  # type: ignore[misc]
    """Lifts the rule that a `LossScaleOptimizer` is constructed around another optimizer."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type.__call__(cls, *args, **kwargs)


class SelfScalingOptimizer(tf.keras.mixed_precision.LossScaleOptimizer, metaclass=_AnyConstructor):
    """First base of an optimizer that scales the loss itself, and undoes that itself.

    Under a mixed-precision policy `Model.compile` wraps every optimizer that is not a
    `LossScaleOptimizer` in one. The wrapper hands over a scaled loss and adapts the scale to
    overflows. This class makes an optimizer count as wrapped, with a scale that never changes.
    """

    dynamic = False
    dynamic_counter = None
    dynamic_growth_steps = None

    @property
    def initial_scale(self) -> float:
        """The factor; Keras's class takes it from the wrapper's constructor."""
        return 1.0

    @property
    def inner_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The optimizer itself, since it wraps no other."""
        return self

    @property
    def loss_scale(self) -> tf.Tensor:
        """`initial_scale`, as a tensor."""
        return tf.constant(self.initial_scale)

    def get_scaled_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss unchanged: the optimizer scales it in `compute_gradients`."""
        return loss

    def get_unscaled_gradients(self, grads: Sequence) -> list:
        """Returns the gradients unchanged: `compute_gradients` has undone the scaling."""
        return list(grads)

    def pairs_of_step(self, grads_and_vars: list[tuple]) -> list[tuple]:
        """Returns what `apply_gradients` got: Keras 2 asks `compute_gradients` for it itself."""
        return grads_and_vars


def is_wrapped_by_loss_scaling(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether a `LossScaleOptimizer` was constructed around an optimizer."""
    return getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False)


def is_built(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer has created its slots."""
    return getattr(optimizer, "_built", False)


def has_slots_for(optimizer: tf.keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether a built optimizer was built for a variable."""
    return optimizer._var_key(variable) in optimizer._index_dict


def slot_index(optimizer: tf.keras.optimizers.Optimizer, variable: tf.Variable) -> int:
    """The place of a variable among those that the optimizer was built for."""
    return optimizer._index_dict[optimizer._var_key(variable)]


def decays(optimizer: tf.keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether the optimizer's weight decay applies to a variable."""
    return optimizer._use_weight_decay(variable)


def add_state(
    optimizer: tf.keras.optimizers.Optimizer, shape: Sequence[int], dtype: tf.DType, name: str
) -> tf.Variable:
    """Creates a variable of zeros that is saved with an optimizer.

    Args:
      optimizer: any optimizer.
      shape: of the variable.
      dtype: of the variable.
      name: of the variable.
    """
    return optimizer.add_variable(shape, dtype=dtype, name=name)


def add_slot(
    optimizer: tf.keras.optimizers.Optimizer,
    variable: tf.Variable,
    name: str,
    *,
    initial_value: tf.Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> tf.Variable:
    """Creates a variable that belongs to one of the model, and is saved with an optimizer.

    Args:
      optimizer: any optimizer.
      variable: that of the model.
      name: of the slot.
      initial_value: zeros by default.
      shape: that of `initial_value` or of `variable` by default.
    """
    return optimizer.add_variable_from_reference(
        variable, name, shape=shape, initial_value=initial_value
    )


class OwnRuleOptimizer(OwnRule, tf.keras.optimizers.Optimizer):
    """Base of optimizers whose update rule Keras does not have.

    A subclass overrides `create_slots` and `update_step`, and where it has to the two methods that
    see all variables at once: `update_all` and `decay_all`.

    Args:
      learning_rate: a number or a schedule.
      **kwargs: the arguments of `tf.keras.optimizers.Optimizer`.
    """

    def __init__(
        self,
        *,
        learning_rate: float | tf.keras.optimizers.schedules.LearningRateSchedule,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates all slots, unless they exist.

        Args:
          var_list: the variables to train.
        """
        super().build(var_list)
        if not is_built(self):
            self.create_slots(var_list)
            self._built = True

    def create_slots(self, variables: Sequence[tf.Variable]) -> None:
        """Creates the slots of the update rule.

        Args:
          variables: the variables to train.
        """

    def _internal_apply_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]]
    ) -> tf.Tensor:
        return self.update_all(list(grads_and_vars), super()._internal_apply_gradients)

    def _apply_weight_decay(self, variables: Sequence[tf.Variable]) -> None:
        if self.weight_decay is not None:
            self.decay_all(variables, super()._apply_weight_decay)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
        }
