"""Per-example gradients: the one door to them, whatever way they are computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients import graph
from tf_adaptive_dp.gradients.materialized import MaterializedGradients

METHODS = ("auto", "traced", "materialized")


def check_method(method: str) -> str:
    """Returns the way of computing per-example gradients, or raises.

    Raises:
      ValueError: if it is unknown, or not part of this version.
    """
    checks.choice("gradients", method, METHODS)
    if method == "traced":
        raise ValueError(
            "The traced source is not part of this version. Received: gradients='traced'. Use "
            "'auto' or 'materialized'."
        )
    return method


def check_loss_vector(loss: tf.Tensor) -> None:
    """Refuses a loss that is not one entry an example.

    Args:
      loss: what the training step computed.

    Raises:
      NotPrivateError: for a scalar, whose per-example parts are lost, and for a loss of rank 2 or
        more, whose entries are not examples.
    """
    rank = loss.shape.rank
    if rank == 0:
        raise NotPrivateError(
            "DP training needs the loss of each example, a vector [B]. Received: a scalar loss. "
            'Pass a loss with `reduction="none"`, for example '
            '`tf.keras.losses.SparseCategoricalCrossentropy(reduction="none")`.'
        )
    if rank is None:
        raise NotPrivateError(
            "DP training needs the loss of each example, a vector [B]. Received: a loss of unknown "
            "rank. Give it a static shape, for example with `tf.ensure_shape(loss, [None])`."
        )
    if rank > 1:
        axes = "axis 1" if rank == 2 else f"axes 1 to {rank - 1}"
        raise NotPrivateError(
            "DP training needs the loss of each example, a vector [B]. Received: a loss of shape "
            f"{loss.shape}. Reduce {axes} in the loss, for example "
            f"`tf.reduce_mean(loss, axis={list(range(1, rank))})`; axis 0 stays."
        )


def microbatch_means(loss: tf.Tensor, num_microbatches: int) -> tf.Tensor:
    """The mean loss of each of `num_microbatches` groups of neighbours in the batch.

    Call it under the tape that recorded the loss.

    Args:
      loss: [B].
      num_microbatches: how many groups; must divide B.

    Returns:
      [num_microbatches].

    Raises:
      ValueError, tf.errors.InvalidArgumentError: if it does not divide B; the latter when the
        step runs, where B is not known before.
    """
    message = f"`num_microbatches` must divide the batch. Received: {num_microbatches}"
    if loss.shape[0] is not None and loss.shape[0] % num_microbatches:
        raise ValueError(f"{message} for a batch of {loss.shape[0]} examples")
    size = tf.shape(loss)[0]
    check = tf.debugging.Assert(size % num_microbatches == 0, [message, "for a batch of", size])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.reduce_mean(tf.reshape(loss, [num_microbatches, -1]), axis=1)


def per_example_gradients(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    tape: tf.GradientTape,
    method: str = "auto",
) -> MaterializedGradients:
    """Makes the source of per-example gradients gᵢ = ∂lossᵢ/∂variables.

    Guarantee: gᵢ is the gradient of example i alone. Models in which the examples of a batch mix,
    and losses with terms that all examples share, are refused where they can be seen: in a
    compiled step, training-mode batch normalization, reductions over the batch axis and scalars
    that are added to the loss vector. Under eager execution only the backward pass can be
    searched, where some of them leave no trace; a warning says so.

    Args:
      loss: [B], one entry an example (or a microbatch).
      variables: what to differentiate for.
      tape: the tape that recorded `loss`; used up unless it is persistent.
      method: `"auto"` takes the fastest that is exact, `"materialized"` the reference. `"traced"`
        is not part of this version.

    Returns:
      An object with `squared_norms(scale=None, shift=None)` → [B] and `weighted_sum(weights)` →
      one tensor a variable.

    Raises:
      NotPrivateError: for a loss or a model that cannot be trained per example.
      ValueError: for an unknown `method`.
    """
    check_method(method)
    check_loss_vector(loss)
    if tf.executing_eagerly():
        warnings.warn(
            "Under eager execution only the backward pass can be searched for operations that mix "
            "the examples of a batch. Run one compiled step (without `run_eagerly`) to have the "
            "model checked in full.",
            stacklevel=2,
        )
    else:
        graph.refuse_mixed_examples(loss)
    return MaterializedGradients(loss, variables, tape)
