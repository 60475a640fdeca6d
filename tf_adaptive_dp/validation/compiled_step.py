"""Searches a compiled training step, and names everything in it that the library refuses."""

from __future__ import annotations

import warnings
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import layer_name
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.batch_axis.analysis import comes_from_data, prepare
from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample
from tf_adaptive_dp.validation.layer_findings import has_own, path_finder
from tf_adaptive_dp.validation.report import Finding

_CURE = "Keep the batch as an axis of its own: reduce, normalize and compare only within examples."
# From a batch, and whether the model trains, to the loss vector.
Losses = Callable[[tuple, bool], tf.Tensor]


class StepSearch(NamedTuple):
    """The result of the search of a compiled step.

    Attributes:
      findings: one per layer that mixes, and one per other refusal.
      accepted: whether the library accepts the training step.
      norms: [B], the norms of the gradients; empty if the step is refused.
    """

    findings: list[Finding]
    accepted: bool
    norms: np.ndarray


def search_compiled_step(
    model: tf.keras.Model,
    losses: Losses,
    batch: tuple,
    expected_batch_size: float | None,
) -> StepSearch:
    """Traces a training step for batches of any size, and runs it if it is accepted.

    A model that takes only batches of one size is traced for that size, with a warning among the
    findings.

    Args:
      model: a built model.
      losses: maps a batch, and whether the model trains, to the loss vector.
      batch: nests of tensors.
      expected_batch_size: the attribute of the optimizer.
    """
    found: list[Finding] = []
    free, fixed = batch_specs(batch)
    for specs in (free, fixed):
        findings: list[Finding] = []
        step = tf.function(_step(model, losses, expected_batch_size, findings), autograph=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training will say where it takes the Jacobian
                concrete = step.get_concrete_function(specs)
        except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
            found = found or [_not_compiled(error)]
            continue
        # If only batches of one size compile.
        findings += [f._replace(severity="warning", cure=_ONE_SIZE) for f in found]
        return _run(step, concrete, batch, findings)
    return StepSearch(found, False, np.zeros(0))


# The name scope in which a loss is summed over the batch on purpose.
REDUCTION = "reduction_of_the_loss"


def batch_specs(batch: tuple) -> tuple[tuple, tuple]:
    """The specs to trace a step with: batches of any size, and batches of this size."""
    fixed = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batch)
    free = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), fixed)
    return free, fixed


_ONE_SIZE = (
    "Nothing to do if all batches have one static size, as with `drop_remainder=True` or "
    "`poisson_batches`: the step compiles for that size."
)


def _not_compiled(error: Exception) -> Finding:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next(
        (line for line in lines if "Error" in line and ":" in line), lines[0] if lines else ""
    )
    return Finding(
        "not compiled",
        "model",
        f"A training step for batches of any size does not compile: {type(error).__name__}: {said}",
        "Make the step compile without `run_eagerly`: only compiled steps can be searched in full.",
    )


def _run(step: Any, concrete: Any, batch: tuple, findings: list[Finding]) -> StepSearch:
    if any(f.severity == "error" for f in findings):
        return StepSearch(findings, False, np.zeros(0))
    squares = concrete(*tf.nest.flatten(batch))
    return StepSearch(findings, True, np.sqrt(np.maximum(squares.numpy(), 0)))


def _step(
    model: tf.keras.Model,
    losses: Losses,
    expected_batch_size: float | None,
    findings: list[Finding],
) -> Callable[[tuple], tf.Tensor]:
    """Makes a step that adds to `findings` while it is traced, and returns squared norms."""

    def step(batch: tuple) -> tf.Tensor:
        with tf.GradientTape() as tape:
            values = losses(batch, True)
        if values.shape.rank == 1:
            findings.extend(_added_losses(model))
        try:
            source = per_example_gradients(values, model.trainable_variables, tape)
            squares = source.squared_norms()
        except (NotPrivateError, ValueError) as error:
            named = [*_mixing(values, model), *_hidden_state(values, model)]
            findings.extend(named or [refusal(error, model)])
            return tf.zeros([0])
        if source.counts_batch:
            findings.append(counting(expected_batch_size))
        return squares

    return step


def counting(expected_batch_size: float | None) -> Finding:
    """The finding about a loss that depends on the batch size.

    Args:
      expected_batch_size: the attribute of the optimizer; if set, batches may vary in size.
    """
    random = expected_batch_size is not None
    return Finding(
        "batch size",
        "loss",
        "The loss of each example depends on the number of examples in the batch"
        + (", which is not public for batches of random size." if random else "."),
        "Do not divide by the batch size (the optimizer does so), or make all batches equal "
        "(`drop_remainder=True`, no `expected_batch_size`).",
        "error" if random else "warning",
    )


def _mixing(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    """One finding per layer: a mixed tensor that leaves its layer counts as clean again."""
    prepared = prepare(loss) if loss.shape.rank in (0, 1) else None
    if prepared is None:
        return []
    batch_axes, ops = prepared
    ops = [op for op in ops if not op.name.startswith(f"{REDUCTION}/")]
    path_of = path_finder(model)
    found: dict[str, Finding] = {}
    for op in ops:
        place = _place(op, path_of)
        for tensor in op.inputs:
            layout = batch_axes[tensor]
            if isinstance(layout, CrossExample) and _place(layout.op, path_of) != place:
                shape = tensor.shape
                if shape.rank and shape[0] in (None, batch_axes.batch_size.static):
                    batch_axes.set(tensor, BatchAxis(), dependent=True)
        operations.run([op], batch_axes)
        for tensor in op.outputs:
            layout = batch_axes[tensor]
            if isinstance(layout, CrossExample):
                where = _place(layout.op, path_of)
                what = (
                    f"It mixes the examples of a batch: {layout.op.name} ({layout.op.type}) "
                    f"{layout.why}."
                )
                found.setdefault(where, Finding("mixing", where, what, _CURE))
    return list(found.values())


def _place(op: tf.Operation, path_of: Callable[[str], str | None]) -> str:
    return path_of(op.name) or layer_name(op)


def refusal(error: Exception, model: tf.keras.Model, kind: str = "refused") -> Finding:
    """Turns a refusal into a finding.

    Args:
      error: the refusal.
      model: the model that was searched.
      kind: the kind of the finding.
    """
    # AutoGraph puts lines of the user's program in front of the message.
    message = str(error).rpartition(f"{type(error).__name__}: ")[2].strip()
    names = [part for part in message.replace(",", " ").split() if "/" in part]
    where = next(
        (p for p in map(path_finder(model), (n.strip("'\".:") for n in names)) if p), "model"
    )
    return Finding(kind, where, message, "Follow the message.")


def _hidden_state(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    try:
        refuse_state(loss)
    except NotPrivateError as error:
        return [refusal(error, model, "state")]
    return []


def _added_losses(model: tf.keras.Model) -> list[Finding]:
    """Loss terms of layers that depend on the data and are not vectors [B]."""
    if has_own(model, "compute_loss"):
        return []  # they are part of the loss vector, which is searched
    found: dict[str, Finding] = {}
    for term in model.losses:
        if term.shape.rank != 1 and comes_from_data(term):
            where = _place(term.op, path_finder(model))
            found[where] = Finding(
                "added loss",
                where,
                "It adds a loss term (`activity_regularizer` or `add_loss`) that depends on the "
                f"data and has shape {term.shape} instead of one entry per example, [B], so Keras "
                "cannot add it to a loss vector.",
                'Use the loss without `reduction="none"`, or pass one entry per example, [B], to '
                "`add_loss`.",
            )
    return list(found.values())
