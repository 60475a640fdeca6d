"""What optimizers with an update rule of their own override, alike for Keras 2 and Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import tensorflow as tf


class OwnRule:
    """What sees all variables of a step at once; the defaults treat each variable alone."""

    def update_all(
        self,
        grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]],
        update_each: Callable[[Sequence], tf.Tensor],
    ) -> tf.Tensor:
        """Makes one step.

        Args:
          grads_and_vars: pairs of a summed gradient and its variable.
          update_each: calls `update_step` for each pair; returns the next value of `iterations`.

        Returns:
          What `update_each` returned.
        """
        return update_each(grads_and_vars)

    def decay_all(
        self, variables: Sequence[tf.Variable], decay_each: Callable[[Sequence], None]
    ) -> None:
        """Applies the weight decay of one step; not called without `weight_decay`.

        Args:
          variables: the variables of this step.
          decay_each: decays each variable that `decays` at the learning rate.
        """
        decay_each(variables)
