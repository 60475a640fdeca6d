"""Second-moment recurrences of adaptive methods, and the preconditioner that they give.

"Private Adaptive Optimization with Side Information", section 4. Pure functions of tensors.
"""

from __future__ import annotations

import tensorflow as tf

RULES = ("rmsprop", "adam", "adagrad")


def next_second_moment(
    rule: str, second_moment: tf.Tensor, gradient: tf.Tensor, beta: float
) -> tf.Tensor:
    """The recurrence of v.

    - `"rmsprop"` and `"adam"`: v ← β·v + (1 − β)·g².
    - `"adagrad"`: v ← v + g².

    Args:
      rule: one of `RULES`.
      second_moment: v.
      gradient: g, of the same shape.
      beta: β in [0, 1); `"adagrad"` does not use it.

    Returns:
      The next v.
    """
    if rule == "adagrad":
        return second_moment + tf.square(gradient)
    return beta * second_moment + (1.0 - beta) * tf.square(gradient)


def preconditioner(second_moment: tf.Tensor, epsilon: float) -> tf.Tensor:
    """A = √(v + ε), by which gradients are divided.

    Args:
      second_moment: v.
      epsilon: ε > 0, inside the root as in the authors' code.

    Returns:
      A, of the shape of v.
    """
    return tf.sqrt(second_moment + epsilon)
