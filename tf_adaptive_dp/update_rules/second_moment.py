"""Second moments of adaptive methods, and the preconditioners they give.

These are pure functions of tensors.

References:
  - Li et al., "Private Adaptive Optimization with Side Information" (2022), arXiv:2202.05963,
    section 4.
"""

from __future__ import annotations

import tensorflow as tf

RULES = ("rmsprop", "adam", "adagrad")


def next_second_moment(
    rule: str, second_moment: tf.Tensor, gradient: tf.Tensor, beta: float
) -> tf.Tensor:
    """Updates the second moment v with a gradient g.

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
    """A = √(v + ε), the divisor of gradients.

    Args:
      second_moment: v.
      epsilon: ε > 0, inside the root as in the code of the paper's authors.

    Returns:
      A, in the shape of v.
    """
    return tf.sqrt(second_moment + epsilon)
