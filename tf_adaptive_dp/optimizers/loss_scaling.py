"""The part of an optimizer that scales the loss, and undoes that before gradients are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.mixed_precision import may_vanish
from tf_adaptive_dp._keras.optimizers import is_wrapped_by_loss_scaling
from tf_adaptive_dp.errors import NotPrivateError

# With this scale, gradients in float16 keep 11 bits down to 6e-5 / 1024. Entries above 64 overflow.
DEFAULT = 1024.0
# Squares of scaled gradients must neither vanish nor leave float32, or clipping would fail.
LARGEST = 2.0**24
WRAPPED = (
    "A LossScaleOptimizer around this optimizer would scale the loss before gradients are clipped. "
    "Received: an optimizer inside of one. Pass the optimizer itself, which scales the loss and "
    "undoes that before clipping (argument `loss_scale`)."
)


class LossScaling:
    """A constant loss scale.

    Keras's `LossScaleOptimizer` would scale the loss vector before the private optimizer sees it,
    so gradients would be clipped while scaled. It would also adapt the scale to overflows in raw
    gradients, which are not public. Here the scale is a constant, and an example whose gradient
    overflows counts as zero, like every example whose gradient is not finite.

    Args:
      scale: a power of two from 1 to 2**24. `None` uses 1024 for layers with a mixed-precision
        policy and 1 otherwise.

    Raises:
      TypeError, ValueError: if the scale has the wrong type or is out of its range.
    """

    def __init__(self, scale: float | None):
        if scale is not None:
            scale = checks.number("loss_scale", scale, 0, strict=True)
            if math.frexp(scale)[0] != 0.5 or not 1 <= scale <= LARGEST:
                raise ValueError(
                    "`loss_scale` must be a power of two, which can be undone exactly, from 1 to "
                    f"2**24. Received: loss_scale={scale!r}"
                )
        self.scale = scale

    def scale_for(self, loss: tf.Tensor, variables: Sequence[tf.Variable]) -> float:
        """The scale of a loss that is differentiated with respect to some variables."""
        if self.scale is not None:
            return self.scale
        return DEFAULT if may_vanish(loss, variables) else 1.0

    def refuse_wrapper(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Rejects a `LossScaleOptimizer` around the optimizer.

        Raises:
          NotPrivateError: if there is one.
        """
        if is_wrapped_by_loss_scaling(optimizer):
            raise NotPrivateError(WRAPPED)
