"""The loss and the variables that `compute_gradients` is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.variables import native


def loss_and_variables(
    loss: tf.Tensor | Callable[[], tf.Tensor],
    var_list: Sequence[tf.Variable] | Callable[[], Sequence[tf.Variable]],
    tape: tf.GradientTape | None,
) -> tuple[tf.Tensor, list[tf.Variable], tf.GradientTape]:
    """Calls what was given as a function, the loss on the tape.

    Args:
      loss: a tensor, or a function that returns it.
      var_list: the variables, or a function that returns them.
      tape: the tape that recorded `loss`; `None` makes one for a function.

    Raises:
      ValueError: if `tape` is missing for a tensor.
    """
    if callable(loss):
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            if not callable(var_list):
                tape.watch([native(v) for v in var_list])
            loss = loss()
    elif tape is None:
        raise ValueError(
            "`tape` must be the tape that recorded `loss`, unless `loss` is a function. Received: "
            "tape=None"
        )
    return loss, list(var_list() if callable(var_list) else var_list), tape
