"""What the optimizers need of Keras 3 beyond its public API.

It makes the library importable. A private step on Keras 3 needs another shell than on Keras 2. That
shell is not here yet, so no private optimizer can be created.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class SelfScalingOptimizer:
    """First base of the private optimizers. On Keras 3 none can be created yet.

    Keras 3 does not call `compute_gradients`, so an optimizer written for Keras 2 would train
    without privacy or not at all.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            f"{type(self).__name__} needs Keras 2. Received: Keras {keras.__version__}. Install "
            "`tf-keras` in the version of TensorFlow, and set the environment variable "
            "TF_USE_LEGACY_KERAS=1 before Python starts."
        )


class OwnRuleOptimizer(keras.optimizers.Optimizer):
    """Base of optimizers whose update rule Keras does not have."""


def is_wrapped_by_loss_scaling(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is a `LossScaleOptimizer` around another one."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


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
