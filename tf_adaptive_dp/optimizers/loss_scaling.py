"""Loss scaling that is undone before gradients are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError

# Gradients in float16 keep 11 bits down to 6e-5 / 1024; entries of more than 64 overflow.
DEFAULT = 1024.0
# Squares of scaled gradients must neither vanish nor leave float32, or clipping would fail.
LARGEST = 2.0**24


def check_loss_scale(loss_scale: float | None) -> float | None:
    """Returns `loss_scale`, or raises TypeError or ValueError if it is out of its range."""
    if loss_scale is None:
        return None
    loss_scale = checks.number("loss_scale", loss_scale, 0, strict=True)
    if math.frexp(loss_scale)[0] != 0.5 or not 1 <= loss_scale <= LARGEST:
        raise ValueError(
            "`loss_scale` must be a power of two, which is undone exactly, from 1 to 2**24. "
            f"Received: loss_scale={loss_scale!r}"
        )
    return loss_scale


class _LikeAnyClass(type(tf.keras.mixed_precision.LossScaleOptimizer)):
    """Takes away that the first argument of the constructor has to be another optimizer."""

    def __call__(cls, *args, **kwargs):
        return type.__call__(cls, *args, **kwargs)


class LossScaling(tf.keras.mixed_precision.LossScaleOptimizer, metaclass=_LikeAnyClass):
    """Mixin of an optimizer that scales the loss itself.

    Keras's wrapper scales the loss vector before the optimizer sees it, so gradients would be
    clipped scaled; and it adapts the scale to overflows in raw gradients, which are not public.
    As a `LossScaleOptimizer` of its own kind the optimizer is not wrapped by `Model.compile`. Its
    scale is a constant. An example whose gradient overflows counts as zero, as any that is not
    finite.
    """

    _loss_scale: float | None
    dynamic = False
    dynamic_counter = None
    dynamic_growth_steps = None

    @property
    def inner_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The optimizer itself: none is inside."""
        return self

    @property
    def initial_scale(self) -> float:
        """The scale; `1.0` if it depends on the variables."""
        return self._loss_scale or 1.0

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale; `1.0` if it depends on the variables."""
        return tf.constant(self.initial_scale)

    def get_scaled_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss as it is: `compute_gradients` scales it, and undoes that."""
        return loss

    def get_unscaled_gradients(self, grads: Sequence) -> list:
        """The gradients as they are: `compute_gradients` has undone the scaling."""
        return list(grads)

    def _loss_scale_for(self, variables: Sequence[tf.Variable]) -> float:
        if self._loss_scale is not None:
            return self._loss_scale
        # Variables of layers with a mixed policy are cast as they are read. With bfloat16 a scale
        # is not needed, and changes nothing.
        return DEFAULT if any(hasattr(v, "true_dtype") for v in variables) else 1.0

    def _refuse_wrapper(self) -> None:
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            raise NotPrivateError(
                "A LossScaleOptimizer around this optimizer would scale the loss before gradients "
                "are clipped. Received: one. Pass the optimizer itself, which scales the loss and "
                "undoes that before clipping (argument `loss_scale`)."
            )
