"""Compares per-example gradients with gradients of one example at a time."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.layers import is_compiled, set_dtype_policy
from tf_adaptive_dp._keras.models import loss_of_step
from tf_adaptive_dp._keras.variables import dense_gradients
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.absent_rows import PADDING_CONTRIBUTES, find_present
from tf_adaptive_dp.gradients.api import check_loss, per_example_gradients
from tf_adaptive_dp.gradients.batch_axis.analysis import follow
from tf_adaptive_dp.gradients.frames import Frame
from tf_adaptive_dp.gradients.jacobian import JacobianWarning
from tf_adaptive_dp.gradients.penalties import find_penalties
from tf_adaptive_dp.gradients.scalar_losses import example_losses
from tf_adaptive_dp.validation.layer_findings import named_layers
from tf_adaptive_dp.validation.repeatable import unchanged

# The error that passes in float16 and bfloat16, where the rounding of one number is up to .4%.
_ROUNDING = 0.05
# From a batch, and whether the model trains, to the loss vector.
Losses = Callable[[tuple, bool], tf.Tensor]


class PerExampleReport(NamedTuple):
    """How far per-example gradients are from the gradients of one example at a time.

    Attributes:
      norm_error: the largest error of a squared norm, relative to the largest of itself, a
        ten-thousandth of the largest squared norm and 1e-20.
      sum_error: the largest error of a weighted sum, relative to the larger of its own largest
        entry and a hundredth of the largest entry over all variables.
      num_examples: the number of compared examples, or users. Those whose gradient alone is not
        finite count as zero in training, and are left out.
      without_rules: the library's warnings about variables that need the Jacobian, since no rule
        covers them; empty if rules cover all.
      training: whether the model ran in training mode. Models with random layers such as dropout
        cannot, since every run draws new numbers.
    """

    norm_error: float
    sum_error: float
    num_examples: int
    without_rules: tuple[str, ...]
    training: bool


def check_per_example(
    model: tf.keras.Model,
    batch: Any,
    *,
    loss: Callable[..., tf.Tensor] | None = None,
    tolerance: float = 1e-4,
    examples_per_user: int | None = None,
) -> PerExampleReport:
    """Tests on one batch that a model's per-example gradients are those of its examples.

    It compares the gradients that a compiled training step would clip with the gradients on batches
    of one. They differ if examples mix, or if a rule for an operation is wrong. Layers with a mixed
    policy (`mixed_float16`, `mixed_bfloat16`) are searched as they are, but compared while they
    compute in float32: in the short types, sums over many positions are mostly rounding errors.
    Where a model casts to such a type itself, errors of 5% pass.

    Guarantee: none beyond this batch. But a model that mixes its examples, or a rule of yours that
    is wrong, fails this test, unless it goes wrong only in float16 or bfloat16.

    Args:
      model: compiled, unless `loss` is given. Its loss is that of a step of `fit`, without the
        terms that all examples share.
      batch: `(x, y)`, `(x, y, sample_weight)` or x, as `fit` takes it: x and y may be nested, and
        axis 0 is the batch.
      loss: `loss(y_true, y_pred)` → [B], for example a Keras loss with `reduction="none"`, in place
        of the one that the model was compiled with.
      tolerance: the largest relative error that passes. Rounding in float32 is about 1e-5. Where
        the model casts to float16 or bfloat16 itself, at least 0.05.
      examples_per_user: that of the optimizer, if users are protected. The gradients of users are
        then compared, each with the gradient on a batch of that user's rows alone.

    Returns:
      A `PerExampleReport`.

    Raises:
      NotPrivateError: if they differ, if the library refuses the model or the loss, or if padding
        of `poisson_batches` contributes to the loss.
      TypeError: if `model`, `loss` or `batch` has the wrong type.
      ValueError: if the model is not compiled and there is no `loss`; if the batch has fewer than
        two examples (or users), or none whose gradient is finite; if the model draws random numbers
        with `training=False` too; or if a model with a mixed policy cannot run in float32, for
        example because it casts to float16.

    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> report = check_per_example(model, (np.eye(4, dtype="float32"), np.ones(4, "f")))
    >>> report.without_rules, report.norm_error < 1e-5
    ((), True)
    """
    tolerance = checks.number("tolerance", tolerance, 0, strict=True)
    if loss is not None and not callable(loss):
        raise TypeError(f"`loss` must be a function of (y_true, y_pred). Received: loss={loss!r}")
    batch = checked_batch(model, batch, loss)
    num_examples = int(tf.nest.flatten(batch)[0].shape[0])
    if examples_per_user is not None:
        examples_per_user = checks.integer("examples_per_user", examples_per_user, 1)
        if num_examples % examples_per_user or num_examples < 2 * examples_per_user:
            raise ValueError(
                "`batch` must have `examples_per_user` rows for each of two users or more. "
                f"Received: {num_examples} rows, examples_per_user={examples_per_user!r}"
            )
    if num_examples < 2:
        raise ValueError(f"`batch` must have two examples or more. Received: {num_examples}")
    if loss is None and not is_compiled(model):
        raise ValueError(
            "`model` must be compiled, or `loss` be given. Received: a model that is not compiled, "
            "and loss=None"
        )
    if not model.built:
        model(batch[0], training=False)

    def make_losses() -> Losses:
        if loss is not None:
            return loss_function(model, loss)
        return losses_of_step(model, float(num_examples), batch_specs(batch)[0])

    with unchanged(model):
        return compare(model, make_losses, batch, tolerance, examples_per_user)


def compare(
    model: tf.keras.Model,
    make_losses: Callable[[], Losses],
    batch: tuple,
    tolerance: float = 1e-4,
    examples_per_user: int | None = None,
) -> PerExampleReport:
    """Does what `check_per_example` says; call it within `unchanged`.

    Args:
      model: a built model.
      make_losses: makes the function from a batch to its losses.
      batch: nests of tensors.
      tolerance: the largest relative error that passes.
      examples_per_user: the number of rows of each user, or `None`.
    """
    losses, k = make_losses(), examples_per_user
    # The search needs the model as it trains, whatever the comparison can use.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = _compiled_step(losses, model.trainable_variables, batch, True, k)
    without_rules = tuple(str(w.message) for w in caught if isinstance(w.message, JacobianWarning))
    with _in_float32(model) as changed:
        if changed:
            losses = make_losses()
            step = _step_in_float32(losses, model.trainable_variables, batch, k)
        report = _compare(losses, model.trainable_variables, batch, step, without_rules, k)
    if _computes_in_short_types(step):
        tolerance = max(tolerance, _ROUNDING)
    if not max(report.norm_error, report.sum_error) <= tolerance:
        raise NotPrivateError(
            "The gradients that would be clipped are not those of single examples, so clipping "
            f"would not bound the effect of an example. Received: {report}. An operation that was "
            "registered with `register_layout` may mix examples, or a rule that was registered "
            "with `register_rule` may be wrong."
        )
    return report


def _compare(
    losses: Losses,
    variables: Sequence[tf.Variable],
    batch: tuple,
    step: Callable,
    without_rules: tuple[str, ...],
    examples_per_user: int | None,
) -> PerExampleReport:
    """Compares what `step` computes for the batch with its examples alone."""
    first, again = losses(batch, True), losses(batch, True)
    training = bool(tf.reduce_all((first == again) | (first != first)))
    if not training:
        first, again = losses(batch, False), losses(batch, False)
        if bool(tf.reduce_any((first != again) & (first == first))):
            raise ValueError(
                "Gradients can be compared only if a second run gives the same losses, and the "
                "model draws random numbers with `training=False` too. This says nothing about "
                "whether its examples stay apart; training searches the compiled step for that. "
                "Draw the numbers only with `training=True`, as Dropout does. Received: "
                f"losses of {first[0]:.6g} and {again[0]:.6g} for one example"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warned before
            step = _compiled_step(losses, variables, batch, False, examples_per_user)
    rows = examples_per_user or 1
    num_examples = int(tf.nest.flatten(batch)[0].shape[0]) // rows
    alone = _gradients_alone(losses, variables, batch, rows, training)
    true_norms = np.array([sum(float(np.sum(np.square(g))) for g in each) for each in alone])
    _refuse_padding(batch, true_norms, rows)
    finite = np.flatnonzero(np.isfinite(true_norms))
    if not finite.size:
        raise ValueError(
            "`batch` must have an example whose gradient is finite. Received: none, so there is "
            "nothing to compare."
        )
    weights = np.zeros(num_examples, "float32")  # 0 where not finite, as in training
    weights[finite] = np.random.default_rng(0).uniform(0.5, 1.5, num_examples)[finite]
    norms, sums = step(batch, tf.constant(weights))
    norms, sums = norms.numpy(), [s.numpy() for s in sums]
    true_sums = [
        np.tensordot(weights[finite], np.stack(column)[finite], axes=1) for column in zip(*alone)
    ]
    # The squares of an example whose loss is almost 0 underflow in float32: with raw inputs, its
    # norm may be 10^10 times too large, which is safe and no sign of a wrong rule.
    smallest_norm = max(1e-4 * float(np.max(true_norms[finite])), 1e-20)
    # Some gradients are zero except for rounding, such as that of a bias before a normalization.
    smallest = 0.01 * max(float(np.max(np.abs(b), initial=0.0)) for b in true_sums)
    # `np.max` keeps NaN; `max` may lose it.
    return PerExampleReport(
        float(np.max([_relative(norms[i], true_norms[i], smallest_norm) for i in finite])),
        float(np.max([_relative(a, b, smallest) for a, b in zip(sums, true_sums)])),
        int(finite.size),
        without_rules,
        training,
    )


def _computes_in_short_types(step: Any) -> bool:
    """Whether a compiled step, or a branch or loop within it, computes in float16 or bfloat16."""
    graphs = (frame.graph for frame in Frame(step.graph).all_within())
    outputs = (t for graph in graphs for op in graph.get_operations() for t in op.outputs)
    return any(t.dtype in (tf.float16, tf.bfloat16) for t in outputs)


def _refuse_padding(batch: tuple, true_norms: np.ndarray, rows: int) -> None:
    """Refuses a loss to which padding contributes, if the batch comes from our samplers."""
    contributes = true_norms > 0
    if rows == 1:
        found = contributes[marked_padding(batch)]
    else:  # users without a row of weight other than 0, of whom some row is marked
        marked = np.isin(np.arange(len(true_norms) * rows), marked_padding(batch))
        marked = np.any(marked.reshape(-1, rows), axis=1)
        found = contributes & marked & _absent(batch).reshape(-1, rows).all(axis=1)
    if np.any(found):
        raise NotPrivateError(PADDING_CONTRIBUTES)


def _absent(batch: tuple) -> np.ndarray:
    """[B], whether all weights of a row are zero; for a batch with weights."""
    return np.all(_weights(batch) == 0, axis=1)


def _weights(batch: tuple) -> np.ndarray:
    """[B, n], all sample weights of each row."""
    size = int(tf.nest.flatten(batch)[0].shape[0])
    weights = [np.asarray(w) for w in tf.nest.flatten(batch[2:]) if w is not None]
    flat = [np.reshape(w, [len(w), -1]) for w in weights]
    return np.concatenate(flat, axis=1) if flat else np.ones([size, 1])


def marked_padding(batch: tuple) -> np.ndarray:
    """The indices of rows whose weights are zeros, with the sign that only our samplers use."""
    return np.flatnonzero(_absent(batch) & np.any(np.signbit(_weights(batch)), axis=1))


@contextlib.contextmanager
def _in_float32(model: tf.keras.Model) -> Iterator[bool]:
    """Makes layers with a mixed policy compute in float32; yields whether there are any."""
    mixed = [
        (layer, layer.dtype_policy)
        for layer in [model, *(layer for _, layer in named_layers(model))]
        if layer.variable_dtype == "float32" and layer.compute_dtype in ("float16", "bfloat16")
    ]
    try:
        for layer, _ in mixed:
            set_dtype_policy(layer, "float32")
        yield bool(mixed)
    finally:
        for layer, policy in mixed:
            set_dtype_policy(layer, policy)


def _step_in_float32(
    losses: Losses, variables: Sequence[tf.Variable], batch: tuple, examples_per_user: int | None
) -> Callable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warned before
        try:
            return _compiled_step(losses, variables, batch, True, examples_per_user)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Models with a mixed policy are compared while they compute in float32, but this "
                f"one does not run in float32. Received: {type(error).__name__}: {error}. Cast to "
                "`layer.compute_dtype`, not to float16 or bfloat16."
            ) from error


def checked_batch(model: tf.keras.Model, batch: Any, loss: Any = None) -> tuple:
    """Converts a batch to tensors, of the types and in the tuples that `fit` makes of arrays.

    Args:
      model: the model that it is for.
      batch: what the user passed.
      loss: a loss that the user passed, which compares outputs with y.

    Returns:
      (x,), (x, y) or (x, y, sample_weight); y may be `None`.

    Raises:
      TypeError: if `batch` is not a batch, or `model` not a Keras model.
    """
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: model={model!r}")
    checks.dense("batch", batch)
    if isinstance(batch, (dict, np.ndarray, tf.Tensor)):
        batch = (batch,)
    if isinstance(batch, tf.data.Dataset):
        raise TypeError(
            "`batch` must be one batch, (x, y) or (x, y, sample_weight), or x alone: pass "
            f"`next(iter(dataset))` of a data set. Received: {batch!r}"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) not in (1, 2, 3) or batch[0] is None:
        raise TypeError(
            "`batch` must be (x, y) or (x, y, sample_weight), or x alone. Received: batch of type "
            f"{type(batch).__name__}"
        )
    if loss is not None and len(batch) == 1:
        raise TypeError(
            "`batch` must be (x, y) or (x, y, sample_weight), since `loss` compares with y. "
            f"Received: x alone, of type {type(batch[0]).__name__}"
        )
    for leaf in tf.nest.flatten(tuple(batch)):
        checks.dense("batch", leaf)
        if leaf is not None and not getattr(leaf, "shape", None):
            raise TypeError(
                "`batch` must hold arrays or tensors with one row for each example, or nests of "
                f"these: convert lists of numbers by `numpy.array`. Received: {leaf!r} in it"
            )
    return tuple(_as_tensors(part) for part in batch)


def _as_tensors(part: Any) -> Any:
    """A part of a batch in tensors. Lists become tuples, since `tf.data` would stack a list."""
    if isinstance(part, list):
        return tuple(_as_tensors(each) for each in part)
    if isinstance(part, dict):
        return {key: _as_tensors(each) for key, each in part.items()}
    return tf.nest.map_structure(_as_tensor, part)


def _as_tensor(value: Any) -> tf.Tensor | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        value = value.astype(tf.keras.backend.floatx())
    return tf.convert_to_tensor(value)


def labels_for(loss: Any, y: Any, outputs: Any) -> Any:
    """Gives a Keras loss labels [B] as [B, 1] if the outputs have this shape, as `fit` does.

    Otherwise a loss may compare each output with the labels of all examples.

    Args:
      loss: functions of the user's own that are no Keras loss get the labels as they are.
      y: the labels.
      outputs: what the model returned.
    """
    if isinstance(loss, tf.keras.losses.Loss) and tf.is_tensor(outputs) and tf.is_tensor(y):
        if outputs.shape.rank == 2 and outputs.shape[1] == 1 == y.shape.rank:
            return y[:, tf.newaxis]
    return y


def batch_specs(batch: tuple) -> tuple[tuple, tuple]:
    """The specs to trace a step with: batches of any size, and batches of this size."""

    def spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
        return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)

    def any_size(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        return None if spec is None else tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    fixed = tf.nest.map_structure(spec, batch)
    return tf.nest.map_structure(any_size, fixed), fixed


def losses_of_step(model: tf.keras.Model, divisor: float, specs: tuple | None = None) -> Losses:
    """Makes a function that computes the losses of examples as a training step does.

    Args:
      model: a built and compiled model.
      divisor: the expected batch size, by which sums of gradients will be divided.
      specs: those of batches of any size, if the model takes them; else it is traced for each size.

    Returns:
      A function of a batch and of `training`, also for use inside of a `tf.function`.
    """

    def traced(batch: tuple, training: bool) -> tf.Tensor:
        return _of_examples(loss_of_step(model, batch, training), divisor)

    @functools.cache
    def compiled(training: bool, seed: int | None) -> Callable[[tuple], tf.Tensor]:
        del seed  # which the operations that draw random numbers keep from their trace
        function = tf.function(lambda batch: traced(batch, training))
        return function if specs is None else function.get_concrete_function(specs)

    def losses(batch: tuple, training: bool) -> tf.Tensor:
        if not tf.executing_eagerly():
            return traced(batch, training)
        seed, _ = tf.compat.v1.get_seed(0)
        return compiled(training, seed)(batch)

    return losses


@tf.autograph.experimental.do_not_convert
def _of_examples(loss: tf.Tensor, divisor: float) -> tf.Tensor:
    """The losses of the examples [B], without terms that all share; 0 for those of weight 0."""
    check_loss(loss)
    batch_axes, is_one = follow(loss)
    vector, terms, _ = example_losses(loss, batch_axes, is_one, divisor)
    for term, factor in find_penalties(vector, batch_axes):
        vector -= tf.reshape(term, []) * tf.cast(factor, term.dtype)
    present = find_present(terms, loss, batch_axes)
    return vector if present is None else tf.where(present, vector, tf.zeros_like(vector))


def loss_function(model: tf.keras.Model, loss: Callable[..., tf.Tensor]) -> Losses:
    """Makes a function that computes the loss vector of a training step.

    It includes sample weights and the vectors of `add_loss`.

    Args:
      model: called as `model(x, training=training)`.
      loss: maps (y_true, y_pred) to [B]. A Keras loss gets labels [B] as [B, 1] if the outputs have
        this shape, as in `fit`.

    Returns:
      A function of a batch, `(x, y)` or `(x, y, sample_weight)`, and of `training`.
    """

    def losses(batch: tuple, training: bool) -> tf.Tensor:
        x, y, *sample_weight = batch
        outputs = model(x, training=training)
        values = loss(labels_for(loss, y, outputs), outputs)
        check_loss(values)
        added = [tf.cast(t, values.dtype) for t in model.losses if t.shape.rank == 1]
        if sample_weight:
            values *= tf.cast(sample_weight[0], values.dtype)
            present = tf.reshape(sample_weight[0] != 0, [-1])
            added = [tf.where(present, term, tf.zeros_like(term)) for term in added]
        return tf.add_n([values, *added])

    return losses


def _compiled_step(
    losses: Losses,
    variables: Sequence[tf.Variable],
    batch: tuple,
    training: bool,
    examples_per_user: int | None,
) -> Callable:
    """Compiles a function from a batch and weights [R] to squared norms and the weighted sum."""

    @tf.function(autograph=False)
    def step(batch: tuple, weights: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            values = losses(batch, training)
        source = per_example_gradients(values, variables, tape, examples_per_user=examples_per_user)
        sums = source.weighted_sum(weights)
        sums = [tf.zeros(v.shape) if s is None else s for s, v in zip(sums, variables)]
        return source.squared_norms(), sums

    num_examples = tf.nest.flatten(batch)[0].shape[0] // (examples_per_user or 1)
    return step.get_concrete_function(batch, tf.TensorSpec([num_examples], tf.float32))


def _gradients_alone(
    losses: Losses,
    variables: Sequence[tf.Variable],
    batch: tuple,
    rows: int,
    training: bool,
) -> list[list[np.ndarray]]:
    """Computes the gradient of each example, or of each user's rows, on a batch of nothing else."""
    gradients = []
    for i in range(0, tf.nest.flatten(batch)[0].shape[0], rows):
        one = tf.nest.map_structure(
            lambda t, i=i: None if t is None else t[i : i + rows],
            batch,  # whose missing weights are a leaf for older TensorFlow
        )
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(losses(one, training))
        found = dense_gradients(tape, value, variables)
        gradients.append([g.numpy().astype("float64") for g in found])
    return gradients


def _relative(actual: np.ndarray, expected: np.ndarray, smallest: float = 0.0) -> float:
    """The largest difference, relative to the largest expected entry, or to `smallest`."""
    size = float(np.max(np.abs(expected), initial=smallest))
    difference = float(np.max(np.abs(actual - np.asarray(expected)), initial=0.0))
    return difference / size if size else difference
