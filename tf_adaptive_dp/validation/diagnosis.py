"""Names everything in a refused step that stands in the way of private training, layer by layer."""

from __future__ import annotations

import warnings
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import is_symbolic, layer_path, scope_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis import operations
from tf_adaptive_dp.gradients.batch_axis.analysis import comes_from_data, enter_sources
from tf_adaptive_dp.gradients.batch_axis.hidden import refuse_state
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample
from tf_adaptive_dp.validation.findings import Finding
from tf_adaptive_dp.validation.layer_findings import has_own, path_finder, regularizer_findings

_FIX = "Keep the batch as an axis of its own: reduce, normalize and compare only within examples."


def diagnose(loss: Any, model: tf.keras.Model, error: Exception) -> list[Finding]:
    """Finds what mixes in the graph of a loss, also behind the operation that was refused first.

    Args:
      loss: what the optimizer refused.
      model: the model that was searched.
      error: the refusal.

    Returns:
      One finding per layer that mixes or keeps state; if there are none, the refusal itself.
    """
    if not tf.is_tensor(loss) or not is_symbolic(loss):
        return [refusal(error, model, "loss")]
    if loss.shape.rank not in (0, 1):
        return [Finding("loss", "loss", _message(error), "Return one entry per example.")]
    return [*_mixing(loss, model), *_hidden_state(loss, model)] or [refusal(error, model)]


def refusal(error: Exception, model: tf.keras.Model, kind: str = "refused") -> Finding:
    """Turns a refusal into a finding.

    Args:
      error: the refusal.
      model: the model that was searched.
      kind: the kind of the finding.
    """
    message = _message(error)
    names = [part for part in message.replace(",", " ").split() if "/" in part]
    found = map(_finder_of_operations(model), (n.strip("'\".:") for n in names))
    where = next((path for path in found if path), "model")
    return Finding(kind, where, message, "")  # the message of a refusal names the fix itself


def _message(error: Exception) -> str:
    # AutoGraph puts lines of the user's program in front of the message.
    return str(error).rpartition(f"{type(error).__name__}: ")[2].strip()


def _mixing(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    """One finding per layer: a mixed tensor that leaves its layer counts as clean again."""
    batch_axes, ops, is_one = enter_sources(loss)
    if is_one:
        return []
    reductions = _reductions(loss)
    ops = [op for op in ops if op not in reductions]
    path_of = _finder_of_operations(model)
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
                found.setdefault(where, Finding("mixing", where, what, _FIX))
    return list(found.values())


def _reductions(loss: tf.Tensor) -> set[tf.Operation]:
    """The operations that make one number of the losses of the examples, on purpose."""
    found: set[tf.Operation] = set()
    pending = [loss]
    while pending:
        tensor = pending.pop()
        if (tensor.shape.rank == 0 or tensor.op.type == "Pack") and tensor.op not in found:
            found.add(tensor.op)
            pending += tensor.op.inputs
    return found


def _place(op: tf.Operation, path_of: Callable[[str], str | None]) -> str:
    return path_of(op.name) or scope_of(op)


def _finder_of_operations(model: tf.keras.Model) -> Callable[[str], str | None]:
    """Makes a function from the name of an operation to the path of its layer in the model."""
    find = path_finder(model)

    def of_operation(name: str) -> str | None:
        path = layer_path(name)
        return find(name) if path is None else find(f"{path}/") or find(name)

    return of_operation


def _hidden_state(loss: tf.Tensor, model: tf.keras.Model) -> list[Finding]:
    try:
        refuse_state(loss)
    except NotPrivateError as error:
        return [refusal(error, model, "state")]
    return []


def added_loss_findings(model: tf.keras.Model, loss: Any, specs: tuple) -> list[Finding]:
    """Looks for loss terms that Keras cannot add to a vector of losses.

    Args:
      model: a model whose step does not compile.
      loss: what it was compiled with.
      specs: the specs of a batch.
    """
    losses = [t for t in tf.nest.flatten(loss) if getattr(t, "reduction", None) == "none"]
    if not losses or has_own(model, "compute_loss"):
        return []
    path_of = _finder_of_operations(model)
    found: dict[str, Finding] = {}

    def look(x: Any) -> tf.Tensor:
        model(x, training=True)
        for term in model.losses:
            if term.shape.rank != 1 and comes_from_data(term):
                where = _place(term.op, path_of)
                found[where] = Finding(
                    "added loss",
                    where,
                    "It adds a loss term (`activity_regularizer` or `add_loss`) that depends on "
                    f"the data and has shape {term.shape} instead of one entry per example, [B], "
                    "so Keras cannot add it to a loss vector.",
                    'Use the loss without `reduction="none"`, or pass one entry per example, [B], '
                    "to `add_loss`.",
                )
        return tf.zeros([])

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tf.function(look, autograph=False).get_concrete_function(specs[0])
    except Exception:  # noqa: BLE001, whatever a user's model raises; the step failed before
        return []
    return [*found.values(), *regularizer_findings(model)]
