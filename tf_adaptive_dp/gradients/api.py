"""Per-example gradients: the one entry point for all ways to compute them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.graphs import ancestors, is_symbolic, place_of
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp._keras.tracing import is_recording
from tf_adaptive_dp._keras.variables import native, path_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.absent_rows import find_present
from tf_adaptive_dp.gradients.batch_axis.analysis import follow, has_other_rows, refuse
from tf_adaptive_dp.gradients.batch_axis.counting import counts_batch
from tf_adaptive_dp.gradients.batch_axis.custom_gradients import refuse_custom_gradients
from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state
from tf_adaptive_dp.gradients.batch_axis.row_ties import refuse_row_ties
from tf_adaptive_dp.gradients.batch_axis.rows_outside import rows_outside
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.jacobian import MaterializedGradients
from tf_adaptive_dp.gradients.penalties import Penalty, find_penalties, penalty_gradients
from tf_adaptive_dp.gradients.scalar_losses import example_losses
from tf_adaptive_dp.gradients.source import LossOfStep, PerExampleGradients
from tf_adaptive_dp.gradients.traced import TracedGradients
from tf_adaptive_dp.gradients.watch import search_sums_when_complete, search_when_complete

_UNWEIGHTED = (
    "Terms of the loss have no sample weights, such as those of `add_loss` and activity "
    "regularizers. They are added up over the examples of a user, even with "
    '`user_reduction="mean"`, which works through the sample weights. Epsilon still holds. To take '
    "their mean, add them to the loss that Keras weights, or multiply them by the weights."
)
METHODS = ("auto", "traced", "materialized")


def check_method(method: str) -> str:
    """Returns `method` if it is a way to compute per-example gradients.

    Raises:
      ValueError: if it is not.
    """
    return checks.choice("gradients", method, METHODS)


def check_loss(loss: tf.Tensor) -> None:
    """Refuses a loss of a shape that cannot be trained per example.

    Args:
      loss: the result of a loss function.

    Raises:
      NotPrivateError: for a scalar under eager execution, which has lost the losses of examples,
        and for a loss of rank 2 or more, whose entries are not examples.
      TypeError: if it is not a tensor, or its graph takes strings for numbers.
    """
    if not tf.is_tensor(loss):
        raise TypeError(f"`loss` must be a tensor of shape [B]. Received: loss={loss!r}")
    rank = loss.shape.rank
    if rank == 0 and not is_symbolic(loss):
        raise NotPrivateError(
            "Under eager execution DP training needs the loss of each example, a vector [B]. "
            "Received: a scalar loss. Train in a compiled step (without `run_eagerly`), which "
            'finds the examples in the loss, or pass a loss with `reduction="none"`, for example '
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
    if is_symbolic(loss):
        _refuse_strings_as_numbers(loss)


def _refuse_strings_as_numbers(loss: tf.Tensor) -> None:
    """Raises TypeError for a conversion that TensorFlow adds to a graph, but cannot run."""
    for op in ancestors([loss]):
        if op.type == "Cast" and op.inputs[0].dtype == tf.string:
            raise TypeError(
                "Labels and inputs that enter the loss must be numbers. Received: strings, which "
                f"{op.name} ({op.type}) {place_of(op)} would convert to "
                f"{op.outputs[0].dtype.name}. Number them before training by a public list, as "
                '`tf.keras.layers.StringLookup(vocabulary=["cat", "dog"], num_oov_indices=0)(y)` '
                "does."
            )


def microbatch_means(loss: tf.Tensor, num_microbatches: int) -> tf.Tensor:
    """Averages the losses of `num_microbatches` groups of neighboring examples.

    Call it under the tape that recorded the loss.

    Args:
      loss: [B].
      num_microbatches: the number of groups; must divide B.

    Returns:
      [num_microbatches].

    Raises:
      ValueError: if `num_microbatches` does not divide B.
      tf.errors.InvalidArgumentError: likewise when the step runs, if B is unknown before.
    """
    message = (
        "`num_microbatches` must divide the batch. Make all batches of a data set equal "
        f"(`drop_remainder=True`). Received: {num_microbatches}"
    )
    if loss.shape[0] is not None and loss.shape[0] % num_microbatches:
        raise ValueError(f"{message} for a batch of {loss.shape[0]} examples")
    size = tf.shape(loss)[0]
    check = tf.debugging.Assert(size % num_microbatches == 0, [message, "for a batch of", size])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.reduce_mean(tf.reshape(loss, [num_microbatches, -1]), axis=1)


def user_sums(loss: tf.Tensor, examples_per_user: int) -> tf.Tensor:
    """Adds up the losses of each user, whose rows are neighbors.

    A mean over a user's own records is the sum of losses that were weighted so, as
    `sampling.poisson_batches` does.

    Args:
      loss: [U·k].
      examples_per_user: k, the number of rows of each user, padding included.

    Returns:
      [U].

    Raises:
      ValueError: if k does not divide the batch.
      tf.errors.InvalidArgumentError: likewise when the step runs, if the batch size is unknown
        before.
    """
    if loss.shape[0] is not None and loss.shape[0] % examples_per_user:
        raise ValueError(
            "`examples_per_user` must divide the batch, whose rows belong to one user after the "
            f"other. Received: {examples_per_user} for a batch of {loss.shape[0]} rows. Draw the "
            "batches with `PrivacyPlan(user_ids=...)` or `poisson_batches(user_ids=...)`."
        )
    return tf.reduce_sum(tf.reshape(loss, [-1, examples_per_user]), axis=1)


@tf.autograph.experimental.do_not_convert
def per_example_gradients(
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    tape: tf.GradientTape,
    method: str = "auto",
    num_microbatches: int | None = None,
    loss_scale: float = 1.0,
    expected_batch_size: float | None = None,
    examples_per_user: int | None = None,
) -> PerExampleGradients:
    """Makes a source of the per-example gradients gᵢ = ∂lossᵢ/∂variables.

    A scalar loss is taken apart into the losses of examples, see `scalar_losses.take_apart`.

    Guarantee: gᵢ is the gradient of example i alone. In a compiled step, the library follows the
    batch axis through the whole graph. It refuses a model that mixes the examples of a batch, and
    one with an operation that is not known to keep them apart. Under eager execution it can search
    only the backward pass, where some mixing leaves no trace; a warning says so. Loss terms that
    depend on no example are not part of gᵢ, but of `penalty_gradients`. In a compiled step, an
    example whose sample weights are all 0 has gradient 0, even from terms that Keras does not
    weight, and so has one with an index outside of its row in a gather with `batch_dims` (where the
    forward pass does not fail: on GPUs and under XLA).

    Args:
      loss: [B], one entry per example; in a compiled step also a scalar, a sum or a mean over
        examples.
      variables: the variables to differentiate with respect to.
      tape: the tape that recorded `loss`; the tape cannot be used again unless it is persistent.
      method: `"auto"` takes the fastest exact method. In a compiled step these are traced
        gradients, with the Jacobian for variables that they do not cover. Eagerly it is the
        Jacobian. `"traced"` raises an error if the Jacobian is needed. `"materialized"` takes the
        Jacobian for all variables.
      num_microbatches: if given, the mean gradients of this many groups of neighboring examples
        replace those of examples.
      loss_scale: a power of two that multiplies the loss before it is differentiated. All results
        are those of the loss itself.
      expected_batch_size: the public number by which the sum of gradients will be divided. Only a
        scalar loss that has both sums and means over the batch among its terms needs it.
      examples_per_user: if given, the gradients of users replace those of examples: the sum over
        this many neighboring rows, see `user_sums`.

    Returns:
      A `PerExampleGradients`, with `squared_norms(scale=None, shift=None)` → [B], and
      `weighted_sum(weights)` → one tensor per variable. Its `example_losses`
      are the losses of examples [B].

    Raises:
      NotPrivateError: for a loss or a model that cannot be trained per example.
      ValueError: for an unknown `method`, or if the loss depends on none of the variables.
    """
    check_method(method)
    check_loss(loss)
    if tape is None:
        raise ValueError("`tape` must be the tape that recorded `loss`. Received: tape=None")
    paths = [path_of(v) for v in variables]
    variables = [native(v) for v in variables]
    _require_floating(variables, paths)
    with contextlib.nullcontext() if is_recording(tape) else tape:
        searched = _search(loss, method, expected_batch_size)
        if searched.present is not None and examples_per_user is not None:
            warnings.warn(_UNWEIGHTED, stacklevel=level_of_caller())
        losses = _losses_of_present(searched)
        unit_losses = _unit_losses(losses, num_microbatches, examples_per_user)
        scaled = unit_losses
        if loss_scale != 1:
            scaled *= tf.cast(loss_scale, scaled.dtype)
    batch_axes, penalties = searched.batch_axes, searched.penalties
    terms = [p.term for p in penalties]
    # A batch that microbatches do not divide must fail there, not where something is reshaped.
    checked = [] if num_microbatches is None or not is_symbolic(scaled) else [scaled.op]
    source: PerExampleGradients
    with tf.control_dependencies(checked):
        if batch_axes is None or method == "materialized":
            source = MaterializedGradients(scaled, variables, tape, terms)
        else:
            source = TracedGradients(
                scaled,
                variables,
                tape,
                batch_axes,
                examples_per_row=(examples_per_user or 1) if num_microbatches is None else None,
                penalties=terms,
                only_rules=method == "traced",
                paths=paths,
            )
    if not any(source.connected):
        names = ", ".join(paths) or "none"
        raise ValueError(f"The loss depends on none of the variables. Received: {names}")
    of_penalties = penalty_gradients(penalties, variables)
    search_sums_when_complete([g for g in of_penalties if g is not None])
    numbers = [n for p in penalties for n in (p.term, p.factor) if tf.is_tensor(n)]
    source.loss = LossOfStep(
        of_examples=losses,
        of_units=unit_losses,
        scale=loss_scale,
        penalty_gradients=of_penalties,
        counts_batch=batch_axes is not None and counts_batch(searched.losses, batch_axes, numbers),
        outside=searched.outside,
        rows_differ=searched.rows_differ,
    )
    return source


def _require_floating(variables: Sequence[tf.Variable], paths: Sequence[str]) -> None:
    """Raises for variables whose gradients have no norm in floating-point numbers."""
    for variable, path in zip(variables, paths):
        if not variable.dtype.is_floating:
            raise ValueError(
                "Only gradients of floating-point variables can be clipped. Received: "
                f"{path} of type {variable.dtype.name}. Train the real and imaginary "
                "parts instead."
            )


class _Searched(NamedTuple):
    """What the graph of a loss shows.

    Attributes:
      losses: [B], the losses of examples.
      batch_axes: `None` for one example, or under eager execution.
      penalties: the terms that all examples share.
      present: [B], bool, which rows are examples; `None` for all.
      outside: see `rows_outside`.
      rows_differ: see `has_other_rows`.
    """

    losses: tf.Tensor
    batch_axes: BatchAxes | None
    penalties: list[Penalty]
    present: tf.Tensor | None
    outside: tf.Tensor | None = None
    rows_differ: tf.Tensor | None = None


def _search(loss: tf.Tensor, method: str, expected_batch_size: float | None) -> _Searched:
    """Searches the graph of a loss for what mixes examples."""
    if tf.executing_eagerly():
        return _not_searched(loss, method)
    axes, is_one = follow(loss)
    vector, terms, penalties = example_losses(loss, axes, is_one, expected_batch_size)
    if not is_one:
        refuse(vector, axes)
    # The loss has terms that all examples share, too, and these have no noise of their own.
    has_private_size = expected_batch_size is not None and bool(axes.batch_size.unknowns)
    refuse_state(loss, has_private_size)
    for searched in {id(t): t for t in (vector, loss)}.values():
        search_when_complete(searched, has_private_size)
    penalties = [*penalties, *find_penalties(vector, axes)]
    present = find_present(terms, loss, axes)
    if is_one:
        return _Searched(vector, None, penalties, present)
    ops = ancestors([vector])
    refuse_custom_gradients(ops, axes)
    outside = rows_outside(ops, axes)
    refuse_row_ties(vector, axes).renew()
    rows_differ = has_other_rows(vector, axes)
    return _Searched(vector, axes, penalties, present, outside, rows_differ)


def _losses_of_present(searched: _Searched) -> tf.Tensor:
    """[B], of rows that are absent, or have an index outside of their row, 0."""
    losses = searched.losses
    if searched.outside is not None:
        losses = tf.where(searched.outside, tf.zeros_like(losses), losses)
    if searched.present is not None:
        losses = tf.where(searched.present, losses, tf.zeros_like(losses))
    return losses


def _unit_losses(
    losses: tf.Tensor, num_microbatches: int | None, examples_per_user: int | None
) -> tf.Tensor:
    """The losses whose gradients are clipped: of examples, microbatches or users."""
    if num_microbatches is not None:
        return microbatch_means(losses, num_microbatches)
    if examples_per_user is not None:
        return user_sums(losses, examples_per_user)
    return losses


def _not_searched(loss: tf.Tensor, method: str) -> _Searched:
    if method == "traced":
        raise ValueError(
            "Traced gradients need a compiled step, in which they find the operations that read "
            "the variables. Received: gradients='traced' under eager execution. Train without "
            "`run_eagerly`, call `minimize` inside a `tf.function`, or pass 'auto'."
        )
    warnings.warn(
        "Under eager execution only the backward pass can be searched for operations that mix "
        "the examples of a batch. Run one compiled step (without `run_eagerly`) to have the "
        "model checked in full.",
        stacklevel=level_of_caller(),
    )
    return _Searched(loss, None, [], None)
