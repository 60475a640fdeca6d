"""Has a compiled training step searched, and names everything in it that is refused."""

from __future__ import annotations

import warnings
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.batch_axis.analysis import comes_from_data, prepare
from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample
from tf_adaptive_dp.gradients.graph import layer_name
from tf_adaptive_dp.validation.layers import has_own, path_finder
from tf_adaptive_dp.validation.report import Finding

_CURE = (
    "Keep the batch as an axis of its own: reduce, normalize and compare inside of each example "
    "only."
)


class Search(NamedTuple):
    """What the search of a compiled step found.

    Attributes:
      findings: one for each layer that mixes, and one for each other refusal.
      accepted: whether a training step would be accepted.
      norms: [B], the norms of the gradients; empty if the step is refused.
    """

    findings: list[Finding]
    accepted: bool
    norms: np.ndarray


def search(
    model: tf.keras.Model,
    losses: Callable[[tuple, bool], tf.Tensor],
    batch: tuple,
    expected_batch_size: float | None,
) -> Search:
    """Traces a training step on batches of any size and runs it if it is accepted.

    A model that takes batches of one size only is traced for that one, with a warning among the
    findings.

    Args:
      model: is built already.
      losses: from a batch and whether the model trains to the loss vector.
      batch: nests of tensors.
      expected_batch_size: as the optimizer has it.
    """
    found = None
    free, fixed = batch_specs(batch)
    for specs in (free, fixed):
        findings: list[Finding] = []
        step = tf.function(_step(model, losses, expected_batch_size, findings), autograph=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training will say where it takes the Jacobian
                concrete = step.get_concrete_function(specs)
        except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
            found = found or _not_compiled(error)
            continue
        if specs is fixed:
            findings.append(found._replace(severity="warning", cure=_ONE_SIZE))
        return _run(step, concrete, batch, findings)
    return Search([found], False, np.zeros(0))


def batch_specs(batch: tuple) -> tuple[tuple, tuple]:
    """What to trace a step for: batches of any size, and batches of this one's size."""
    fixed = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batch)
    free = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), fixed)
    return free, fixed


_ONE_SIZE = (
    "Nothing, if all batches have one static size, as with `drop_remainder=True` or "
    "`poisson_batches`; for that size the step is compiled."
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
        "Make the step compile without `run_eagerly`; only a compiled step is searched in full.",
    )


def _run(step: Any, concrete: Any, batch: tuple, findings: list[Finding]) -> Search:
    if any(f.severity == "error" for f in findings):
        return Search(findings, False, np.zeros(0))
    squares = concrete(*tf.nest.flatten(batch))
    return Search(findings, True, np.sqrt(np.maximum(squares.numpy(), 0)))


def _step(model, losses, expected_batch_size, findings) -> Callable:
    """A step that adds to `findings` while it is traced, and returns the squared norms."""

    def step(batch):
        with tf.GradientTape() as tape:
            values = losses(batch, True)
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
    """What to say of a loss that depends on the size of the batch.

    Args:
      expected_batch_size: as the optimizer has it; with it, batches may be of random size.
    """
    random = expected_batch_size is not None
    return Finding(
        "batch size",
        "loss",
        "The loss of each example depends on how many examples the batch has"
        + (", which is not public for batches of random size." if random else "."),
        "Do not divide by the batch size (the optimizer does so), or make all batches equal "
        "(`drop_remainder=True`, no `expected_batch_size`).",
        "error" if random else "warning",
    )


def _mixing(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    """One finding a layer: where a mixed tensor leaves a layer it counts as clean again."""
    prepared = prepare(loss) if loss.shape.rank == 1 else None
    if prepared is None:
        return []
    batch_axes, ops = prepared
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
    """The finding that a refusal of the search makes.

    Args:
      error: the refusal.
      model: what was searched.
      kind: of the finding.
    """
    # AutoGraph puts the user's lines before it.
    message = str(error).rpartition(f"{type(error).__name__}: ")[2].strip()
    names = [part for part in message.replace(",", " ").split() if "/" in part]
    where = next(
        (p for p in map(path_finder(model), (n.strip("'\".:") for n in names)) if p), "model"
    )
    return Finding(kind, where, message, "As the message says.")


def _hidden_state(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    try:
        refuse_state(loss)
    except NotPrivateError as error:
        return [refusal(error, model, "state")]
    return []


def _added_losses(model: tf.keras.Model) -> list[Finding]:
    """Terms from the data that layers add to the loss, and that are no vector [B]."""
    if has_own(model, "compute_loss"):
        return []  # they are part of the loss vector then, and the search goes through them
    found: dict[str, Finding] = {}
    for term in model.losses:
        if term.shape.rank != 1 and comes_from_data(term):
            where = _place(term.op, path_finder(model))
            found[where] = Finding(
                "added loss",
                where,
                "It adds a term to the loss that depends on the data and is not one entry an "
                f"example, [B] (`activity_regularizer` or `add_loss`, of shape {term.shape}), so "
                "Keras cannot add it to a loss vector.",
                "Pass one entry an example, [B], to `add_loss`, leave the term out, or return it "
                "as an output of the model and add it in the loss.",
            )
    return list(found.values())
