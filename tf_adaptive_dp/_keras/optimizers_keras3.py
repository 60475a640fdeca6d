"""What the optimizers need of Keras 3 beyond its public API.

Keras 3 does not ask an optimizer for gradients. Its train step calls `scale_loss` under a tape,
differentiates what that returns, and hands the gradients to `apply_gradients`. Here `scale_loss`
keeps the loss and returns a constant, so raw gradients never exist; `apply_gradients` computes the
released ones from the loss it finds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import keras
import tensorflow as tf

from tf_adaptive_dp._keras.own_rule import OwnRule
from tf_adaptive_dp._keras.tracebacks import short_traceback
from tf_adaptive_dp._keras.tracing import GraphTape
from tf_adaptive_dp._keras.variables import native, path_of
from tf_adaptive_dp.errors import NotPrivateError

_Wrapper = keras.optimizers.LossScaleOptimizer
_Pairs = list[tuple]

APPLYING = "`apply` and `apply_gradients` take"
HOW_TO_STEP = (
    "Call `optimizer.minimize(loss, variables, tape)`; or call `optimizer.scale_loss(loss)` under "
    "the tape, and differentiate what it returns"
)


class SelfScalingOptimizer(keras.optimizers.LossScaleOptimizer):
    """First base of a private optimizer, which makes its gradients from the loss of the step.

    Under a mixed-precision policy `Model.compile` wraps every optimizer that is not a
    `LossScaleOptimizer` in one, which scales the loss before gradients are clipped. This class
    makes an optimizer count as wrapped. All it has of `LossScaleOptimizer` is the name: each method
    of that class is overridden by the one that comes after it, that of the Keras optimizer which
    the private one builds on.

    Args:
      *args: those of the Keras optimizer.
      loss_scale_factor: must be `None`; the argument `loss_scale` takes its place.
      **kwargs: those of the Keras optimizer.

    Raises:
      ValueError: if `loss_scale_factor` is given.
    """

    def __init__(self, *args: Any, loss_scale_factor: float | None = None, **kwargs: Any):
        if loss_scale_factor is not None:
            raise ValueError(
                "`loss_scale_factor` must be None: Keras would scale the loss before gradients are "
                f"clipped. Received: loss_scale_factor={loss_scale_factor!r}. Pass `loss_scale`, "
                "which the optimizer undoes before clipping."
            )
        super(_Wrapper, self).__init__(*args, **kwargs)

    # ----- what a step calls

    @tf.autograph.experimental.do_not_convert
    @short_traceback
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Keeps the loss for `apply_gradients`; the train step of Keras calls it under its tape.

        Args:
          loss: the loss of the step.

        Returns:
          A constant, whose gradients are all `None`.

        Raises:
          NotPrivateError: under eager execution, or if an earlier loss was not applied yet.
        """
        if tf.executing_eagerly():
            raise NotPrivateError(
                "Under eager execution `scale_loss` cannot give private gradients, since the tape "
                "of the step is gone when they are computed. Received: a step that is not "
                "compiled. Train without `run_eagerly`, or call `optimizer.minimize(loss, "
                "variables, tape)` with a vector of losses."
            )
        kept, key = _kept_losses(), self._step()
        if key in kept:
            raise NotPrivateError(
                "`scale_loss` takes the whole loss of a step, once. Received: a second loss before "
                "`apply_gradients`. Add the losses, or call `optimizer.minimize(loss, variables, "
                "tape)` for each."
            )
        kept[key] = loss
        return tf.zeros([], loss.dtype)

    def pairs_of_step(self, grads_and_vars: _Pairs) -> _Pairs:
        """Replaces the gradients of a train step by released ones.

        Args:
          grads_and_vars: what `apply_gradients` got.

        Returns:
          The released gradients of the loss that `scale_loss` kept in this step, with the same
          variables; without such a loss, what was given.

        Raises:
          NotPrivateError: if there are other gradients besides the loss, or neither.
        """
        loss = None if tf.executing_eagerly() else _kept_losses().pop(self._step(), None)
        empty = all(g is None for g, _ in grads_and_vars)
        if loss is None and empty and grads_and_vars:
            raise NotPrivateError(
                "`apply_gradients` needs gradients that this library released, or the loss that "
                "`scale_loss` kept in the same function. Received: neither. "
                f"{HOW_TO_STEP}, in the function that calls `apply_gradients`."
            )
        if loss is not None and not empty:
            raise NotPrivateError(
                "`apply_gradients` takes the gradients of what `scale_loss` returned. Received: "
                "other gradients. Pass the result of `scale_loss` to `tape.gradient`, not the loss "
                "itself."
            )
        if loss is None:
            return grads_and_vars
        return self.compute_gradients(loss, [v for _, v in grads_and_vars], GraphTape())

    @tf.autograph.experimental.do_not_convert
    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable] | Callable[[], Sequence[tf.Variable]],
        tape: tf.GradientTape | None = None,
    ) -> None:
        """Makes one private step; see `compute_gradients` for the arguments."""
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Iterable[tf.Tensor | None], trainable_variables: Iterable | None = None
    ) -> None:
        """Applies gradients, with the checks of `apply_gradients`.

        Args:
          grads: as `apply_gradients` takes them.
          trainable_variables: their variables; `None` for those that the optimizer was built for.
        """
        grads = list(grads)
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if len(grads) != len(variables):
            raise ValueError(
                "`grads` must have one entry for each variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables"
            )
        self.apply_gradients(zip(grads, variables))

    def apply_gradients(self, grads_and_vars: Iterable[tuple]) -> keras.Variable:
        """Has Keras apply gradients that `DPOptimizer.apply_gradients` has checked."""
        grads, variables = zip(*grads_and_vars)
        super(_Wrapper, self).apply(list(grads), list(variables))
        return self._iterations

    def stateless_apply(self, *args: Any, **kwargs: Any) -> None:
        """Raises: it would apply gradients without a check."""
        raise NotPrivateError(
            "`stateless_apply` is for other backends of Keras. Received: a call. Use "
            "`apply_gradients`, which checks that the gradients were released by the mechanism."
        )

    def _step(self) -> tuple[int, int]:
        """Tells the steps that are being traced into one graph apart: replicas have threads."""
        return id(self), threading.get_ident()

    # ----- the sum over replicas, before anything else

    def _backend_apply_gradients(self, grads: Sequence, trainable_variables: Sequence) -> None:
        """Sums gradients over replicas before Keras clips them.

        Keras clips those of each replica. The gradient of one replica has only a part of the noise,
        so a nonlinear function of it would not be post-processing of the release.
        """
        pairs = super(_Wrapper, self)._all_reduce_sum_gradients(zip(grads, trainable_variables))
        super(_Wrapper, self)._backend_apply_gradients([g for g, _ in pairs], trainable_variables)

    def _all_reduce_sum_gradients(self, grads_and_vars: _Pairs) -> _Pairs:
        return grads_and_vars  # they are sums

    # ----- what `LossScaleOptimizer` would do otherwise

    def build(self, variables: Sequence) -> None:
        """Creates all slots.

        Args:
          variables: the variables to train.

        Raises:
          NotPrivateError: for a variable that Keras sets to its gradient, see float8.
        """
        variables = list(variables)
        for variable in variables:
            if self._overwrite_variable_with_gradient(variable):
                raise NotPrivateError(
                    "Variables that Keras sets to their gradient (quantization to float8) cannot "
                    f"be trained privately. Received: {path_of(variable)}"
                )
        super(_Wrapper, self).build(variables)

    @property
    def variables(self) -> list:
        """All variables of the optimizer, in the order in which they are saved."""
        return super(_Wrapper, self).variables

    @property
    def iterations(self) -> keras.Variable:
        """The number of steps so far."""
        return super(_Wrapper, self).iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate, at this step if it is a schedule."""
        return super(_Wrapper, self).learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(_Wrapper, type(self)).learning_rate.fset(self, value)

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Sets variables to their moving averages, if the optimizer keeps any."""
        super(_Wrapper, self).finalize_variable_values(var_list)

    def get_config(self) -> dict:
        """The arguments that make the same optimizer; its state is not among them."""
        return super(_Wrapper, self).get_config()

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> Any:
        """Makes the optimizer that `get_config` described."""
        return super(_Wrapper, cls).from_config(config, custom_objects)


def _kept_losses() -> dict[tuple[int, int], tf.Tensor]:
    """What `scale_loss` keeps of the graph that is being traced, by optimizer and thread.

    It belongs to the graph, so what a failed trace leaves is gone with it.
    """
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "kept_losses"):
        graph.kept_losses = {}
    return graph.kept_losses


def is_wrapped_by_loss_scaling(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer knows of a `LossScaleOptimizer` around it: never.

    Such a wrapper hands over raw gradients, which are refused.
    """
    del optimizer
    return False


def is_built(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer has created its slots."""
    return optimizer.built


def has_slots_for(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> bool:
    """Whether a built optimizer was built for a variable."""
    return optimizer._var_key(variable) in optimizer._trainable_variables_indices


def slot_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> int:
    """The place of a variable among those that the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable) -> bool:
    """Whether the optimizer's weight decay applies to a variable."""
    return optimizer._use_weight_decay(variable)


def add_state(
    optimizer: keras.optimizers.Optimizer, shape: Sequence[int], dtype: tf.DType, name: str
) -> tf.Variable:
    """Creates a variable of zeros that is saved with an optimizer; see `add_slot` for its kind.

    Args:
      optimizer: any optimizer.
      shape: of the variable.
      dtype: of the variable.
      name: of the variable.
    """
    return _add(optimizer, shape, dtype, name, "zeros")


def add_slot(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable | tf.Variable,
    name: str,
    *,
    initial_value: tf.Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> tf.Variable:
    """Creates a variable that belongs to one of the model, and is saved with an optimizer.

    It is a `tf.Variable`: those of Keras do not count up in one operation, and what their `assign`
    returns does not wait for the assignment.

    Args:
      optimizer: any optimizer.
      variable: that of the model.
      name: of the slot.
      initial_value: zeros by default.
      shape: that of `initial_value` or of `variable` by default.
    """
    if shape is None:
        shape = (variable if initial_value is None else initial_value).shape
    initializer = "zeros" if initial_value is None else lambda shape, dtype: initial_value
    variable = native(variable)
    name = f"{variable.name.split(':')[0].replace('/', '_')}_{name}"
    with optimizer._distribution_strategy.extended.colocate_vars_with(variable):
        return _add(optimizer, shape, variable.dtype, name, initializer)


def _add(
    optimizer: keras.optimizers.Optimizer,
    shape: Sequence[int],
    dtype: tf.DType,
    name: str,
    initializer: Any,
) -> tf.Variable:
    variable = optimizer.add_variable(
        tuple(shape),
        initializer,
        tf.as_dtype(dtype).name,
        # All replicas write the same value.
        aggregation="only_first_replica",
        name=name,
    )
    return variable.value


class OwnRuleOptimizer(OwnRule, keras.optimizers.Optimizer):
    """Base of optimizers whose update rule Keras does not have.

    A subclass overrides `create_slots` and `update_step`, and where it has to the two methods that
    see all variables at once: `update_all` and `decay_all`. They get `tf.Variable`s.

    Args:
      learning_rate: a number or a schedule.
      **kwargs: the arguments of `keras.optimizers.Optimizer`.
    """

    def __init__(
        self,
        *,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Creates all slots, unless they exist.

        Args:
          variables: the variables to train.
        """
        if not self.built:
            super().build(variables)
            self.create_slots(variables)

    def create_slots(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Creates the slots of the update rule.

        Args:
          variables: the variables to train.
        """

    def _backend_update_step(
        self, grads: Sequence, trainable_variables: Sequence, learning_rate: Any
    ) -> None:
        update = super()._backend_update_step

        def update_each(pairs: Sequence) -> tf.Tensor:
            update([g for g, _ in pairs], [v for _, v in pairs], learning_rate)
            return tf.convert_to_tensor(self._iterations) + 1  # Keras adds it afterwards

        self.update_all([(g, native(v)) for g, v in zip(grads, trainable_variables)], update_each)

    def _distributed_tf_update_step(
        self, distribution: tf.distribute.Strategy, grads_and_vars: Sequence, learning_rate: Any
    ) -> None:
        def update(variable: tf.Variable, gradient: tf.Tensor) -> None:
            self.update_step(gradient, variable)

        for gradient, variable in grads_and_vars:
            distribution.extended.update(variable, update, args=(gradient,), group=False)

    def _apply_weight_decay(self, variables: Sequence) -> None:
        if self.weight_decay is not None:
            self.decay_all([native(v) for v in variables], super()._apply_weight_decay)
