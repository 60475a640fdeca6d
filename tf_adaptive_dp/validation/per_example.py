"""Is this model fit for private training? Proof by comparison with one example at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.per_example import check_loss_vector, per_example_gradients


class PerExampleReport(NamedTuple):
    """How far the library's per-example gradients are from those of one example at a time.

    Attributes:
      norm_error: the largest relative error of a squared norm.
      sum_error: the largest error of a weighted sum, relative to its largest entry, or to a
        hundredth of the largest of all variables if that is more.
      num_examples: how many examples were compared.
      without_rules: what the library says of variables that its rules do not cover, and whose
        Jacobian it takes; empty if rules cover all.
      training: whether the model ran in training mode; with random layers such as dropout it
        cannot, since every run draws anew.
    """

    norm_error: float
    sum_error: float
    num_examples: int
    without_rules: tuple[str, ...]
    training: bool


def check_per_example(
    model: tf.keras.Model,
    loss: Callable[..., tf.Tensor],
    batch: Sequence[Any],
    *,
    tolerance: float = 1e-4,
) -> PerExampleReport:
    """Proves on a batch that a model's per-example gradients are those of its examples.

    The gradients that a compiled training step would clip are compared with gradients on batches
    of one. They differ if examples mix, or if a rule for an operation is wrong.

    Guarantee: none beyond this batch; but a model that mixes its examples, or a wrong rule of your
    own, shows here.

    Args:
      model: called as `model(x, training=True)`.
      loss: `loss(y_true, y_pred)` → [B], for example a Keras loss with `reduction="none"`.
      batch: `(x, y)` or `(x, y, sample_weight)`; x and y may be nested, axis 0 is the batch.
      tolerance: the largest relative error that passes; float32 needs about 1e-5.

    Returns:
      A `PerExampleReport`.

    Raises:
      NotPrivateError: if they differ, or if the model or the loss is refused.
      TypeError: if `model`, `loss` or `batch` are no such things.
      ValueError: if the batch has fewer than two examples.

    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
    >>> def squares(y, z):
    ...     return (y - z[:, 0]) ** 2
    >>> report = check_per_example(model, squares, (np.eye(4, dtype="float32"), np.ones(4, "f")))
    >>> report.without_rules, report.norm_error < 1e-5
    ((), True)
    """
    checks.number("tolerance", tolerance, 0, strict=True)
    batch = checked_batch(model, batch)
    if not callable(loss):
        raise TypeError(f"`loss` must be a function of (y_true, y_pred). Received: loss={loss!r}")
    num_examples = int(tf.nest.flatten(batch)[0].shape[0])
    if num_examples < 2:
        raise ValueError(f"`batch` must have two examples or more. Received: {num_examples}")
    losses = _loss_function(model, loss)
    # In training mode for the search, whatever the comparison can use.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _batch_gradients(losses, model.trainable_variables, batch, True)
    first, again = losses(batch, True), losses(batch, True)
    training = bool(tf.reduce_all((first == again) | (first != first)))
    if not training:
        found = _batch_gradients(losses, model.trainable_variables, batch, False)
    norms, sums, weights = found
    alone = _gradients_alone(losses, model.trainable_variables, batch, num_examples, training)
    true_norms = [sum(float(np.sum(np.square(g))) for g in gradients) for gradients in alone]
    norm_error = max(_relative(a, b) for a, b in zip(norms, true_norms))
    true_sums = [np.tensordot(weights, np.stack(column), axes=1) for column in zip(*alone)]
    # Some gradients are zero but for rounding, as that of a bias whose mean is subtracted again.
    smallest = 0.01 * max(float(np.max(np.abs(b), initial=0.0)) for b in true_sums)
    sum_error = max(_relative(a, b, smallest) for a, b in zip(sums, true_sums))
    report = PerExampleReport(
        norm_error,
        sum_error,
        num_examples,
        tuple(str(w.message) for w in caught if "No rule covers" in str(w.message)),
        training,
    )
    if not max(norm_error, sum_error) <= tolerance:
        raise NotPrivateError(
            "The gradients that would be clipped are not those of single examples, so clipping "
            f"would not bound what an example can do. Received: {report}. Examples may mix in an "
            "operation that was vouched for with `register_layout`, or a rule that was added with "
            "`register_rule` may be wrong."
        )
    return report


def checked_batch(model: tf.keras.Model, batch: Sequence[Any]) -> tuple:
    """The batch as tensors.

    Raises:
      TypeError: if `batch` is none, or `model` no Keras model.
    """
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: model={model!r}")
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise TypeError(
            "`batch` must be (x, y) or (x, y, sample_weight). Received: batch of type "
            f"{type(batch).__name__}"
        )
    return tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))


def _loss_function(model, loss) -> Callable:
    def losses(batch, training):
        x, y, *sample_weight = batch
        values = loss(y, model(x, training=training))
        check_loss_vector(values)
        return values * tf.cast(sample_weight[0], values.dtype) if sample_weight else values

    return losses


def _batch_gradients(losses, variables, batch, training):
    """Squared norms, and a weighted sum, as a compiled step computes them."""
    num_examples = tf.nest.flatten(batch)[0].shape[0]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, num_examples).astype("float32")

    @tf.function(autograph=False)
    def step(batch):
        with tf.GradientTape() as tape:
            values = losses(batch, training)
        source = per_example_gradients(values, variables, tape)
        sums = source.weighted_sum(tf.constant(weights))
        sums = [tf.zeros(v.shape) if s is None else s for s, v in zip(sums, variables)]
        return source.squared_norms(), sums

    norms, sums = step.get_concrete_function(batch)(batch)
    return norms.numpy(), [s.numpy() for s in sums], weights


def _gradients_alone(losses, variables, batch, num_examples, training):
    """The gradient of each example, on a batch that holds nothing else."""
    gradients = []
    for i in range(num_examples):
        one = tf.nest.map_structure(lambda t, i=i: t[i : i + 1], batch)
        with tf.GradientTape() as tape:
            value = losses(one, training)
        found = tape.gradient(value, variables, unconnected_gradients="zero")
        gradients.append([tf.convert_to_tensor(g).numpy().astype("float64") for g in found])
    return gradients


def _relative(actual, expected, smallest: float = 0.0) -> float:
    """The largest difference, relative to the largest entry expected, or to `smallest`."""
    size = float(np.max(np.abs(expected), initial=smallest))
    difference = float(np.max(np.abs(actual - np.asarray(expected)), initial=0.0))
    return difference / size if size else difference
