"""Reports everything that prevents private training of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp._keras.layers import is_compiled
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import check_loss
from tf_adaptive_dp.validation import argument_findings
from tf_adaptive_dp.validation.compiled_step import (
    REDUCTION,
    Losses,
    search_compiled_step,
)
from tf_adaptive_dp.validation.fixes import is_defective, repaired_model
from tf_adaptive_dp.validation.layer_findings import has_own, layer_findings
from tf_adaptive_dp.validation.per_example import check_per_example, checked_batch, loss_function
from tf_adaptive_dp.validation.probe import probe
from tf_adaptive_dp.validation.repeatable import unchanged
from tf_adaptive_dp.validation.report import Finding, ValidationReport
from tf_adaptive_dp.validation.train_step import train_step_findings

_NOTHING_PROBED = "nothing, since the findings leave no losses to compare"
_ONE_NUMBER = "nothing, since `compute_loss` returns one number for the batch"


def validate(
    model: tf.keras.Model,
    loss: str | Callable[..., tf.Tensor],
    optimizer: tf.keras.optimizers.Optimizer,
    batch: Sequence[Any],
    *,
    fix: bool = False,
) -> ValidationReport:
    """Finds everything that prevents private training of a model, and reports all of it.

    It inspects the layers, the loss, the optimizer and the batch. It searches a compiled training
    step layer by layer, as `fit` does, and traces a custom `train_step` to its end. And it runs the
    model eagerly on changed batches, where the losses of other examples must not move.

    Guarantee: none by itself. What the search of a compiled step accepts holds for all batches, as
    in training. The probe can only find mixing, on this batch. The report is not private: do not
    publish reports on private data.

    Args:
      model: compiled or not. A model without weights is built by calling it on the batch;
        otherwise the model does not change. A model with a custom `train_step` must be compiled,
        and its metrics are built.
      loss: the loss as passed to `model.compile`. A compiled model with a custom `compute_loss` is
        searched with that instead.
      optimizer: the optimizer as passed to `model.compile`; it does not change.
      batch: `(x, y)` or `(x, y, sample_weight)` as in training; a few examples are enough. x and y
        may be nested, axis 0 is the batch.
      fix: whether to repair, in a copy of the model, what has a safe replacement.
        BatchNormalization becomes GroupNormalization, and stateful recurrent layers become
        stateless. All other layers keep their weights. The report is then about the copy.

    Returns:
      A `ValidationReport` with `findings`, `ok`, `repaired`, `model` and `loss`.

    Raises:
      TypeError: if `model`, `loss` or `batch` has the wrong type.
      ValueError: if Keras has no loss of that name.

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    ... )
    >>> batch = (tf.eye(4), tf.ones([4, 1]))
    >>> optimizer = tf.keras.optimizers.SGD()
    >>> report = validate(model, tf.keras.losses.MeanSquaredError(), optimizer, batch, fix=True)
    >>> [finding.where for finding in report.findings]
    ['optimizer']
    >>> [finding.kind for finding in report.repaired]
    ['probe', 'batch statistics']
    """
    batch = checked_batch(model, batch)
    report = _inspect(model, loss, optimizer, batch)
    return _repair(report, optimizer, batch) if fix and report.findings else report


def _repair(report: ValidationReport, optimizer: Any, batch: tuple) -> ValidationReport:
    """Reports on a repaired copy."""
    model, loss, left = report.model, report.loss, []
    kinds = {f.kind for f in report.findings}
    if model.built and kinds & {"batch statistics", "state"} and is_defective(model):
        try:
            model = repaired_model(model, batch[0])
        except Exception as error:  # noqa: BLE001, whatever a user's `from_config` raises
            left = [_not_copied(error)]
    after = _inspect(model, loss, optimizer, batch)
    remaining = {(f.kind, f.where) for f in after.findings}
    repaired = tuple(f for f in report.findings if (f.kind, f.where) not in remaining)
    return ValidationReport(_sorted([*after.findings, *left]), repaired, after.probed, model, loss)


def _not_copied(error: Exception) -> Finding:
    return Finding(
        "not repaired",
        "model",
        f"It could not be copied: {type(error).__name__}: {error}",
        "Define `get_config` in your layers, or replace the layers named here yourself.",
        "warning",
    )


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    unique = list(dict.fromkeys(findings))
    return tuple(sorted(unique, key=lambda f: f.severity != "error"))


def _inspect(model: tf.keras.Model, loss: Any, optimizer: Any, batch: tuple) -> ValidationReport:
    from_batch = argument_findings.batch_findings(batch)
    comparable = not any(f.severity == "error" for f in from_batch)
    num_examples = tf.nest.flatten(batch)[0].shape[0] if comparable else None
    loss_of_examples = argument_findings.loss_of_examples(loss)
    found = [
        *from_batch,
        *argument_findings.optimizer_findings(optimizer, num_examples),
    ]
    failed = _build(model, batch[0])
    probed, accepted = _NOTHING_PROBED, False
    if failed is not None:
        found.append(failed)
    elif comparable:
        losses = _step_losses(model, loss, loss_of_examples)
        with unchanged(model):
            seen, accepted, probed = _run(model, losses, loss_of_examples, optimizer, batch)
            seen += train_step_findings(model, optimizer, batch)
        found += seen
    if model.built:
        found = _joined(found, layer_findings(model, argument_findings.is_reduced(loss)), accepted)
    return ValidationReport(_sorted([*found, *_own_steps(model)]), (), probed, model, loss)


def _build(model: tf.keras.Model, inputs: Any) -> Finding | None:
    if model.built:
        return None
    try:
        model(inputs, training=False)
    except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
        return _failure(error)
    return None


def _failure(error: Exception) -> Finding:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    return Finding(
        "fails",
        "model",
        f"The model or the loss fails on the batch: {type(error).__name__}: {said}",
        "Make `loss(y, model(x, training=True))` run. A common reason is labels out of range.",
    )


def _run(
    model: tf.keras.Model,
    losses: Losses,
    loss_of_examples: Callable[..., tf.Tensor],
    optimizer: Any,
    batch: tuple,
) -> tuple[list[Finding], bool, str]:
    """Searches and probes, and compares with batches of one if neither finds anything."""
    own_loss = has_own(model, "compute_loss")
    try:
        values = losses(batch, True)
        # A compiled step takes apart a sum over examples, an eager one cannot.
        one_number = own_loss and values.shape.rank == 0
        if not one_number:
            check_loss(values)
    except NotPrivateError as error:
        finding = Finding("loss", "loss", str(error), "Return one entry per example.")
        return [finding], False, _NOTHING_PROBED
    except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
        return [_failure(error)], False, _NOTHING_PROBED
    expected = getattr(optimizer, "expected_batch_size", None)
    found = [] if one_number else argument_findings.loss_value_findings(values, batch)
    searched = search_compiled_step(model, losses, batch, expected)
    found += searched.findings
    found += argument_findings.clip_findings(optimizer, searched.norms)
    if one_number:
        return found, searched.accepted, _ONE_NUMBER
    probed = probe(model, losses, batch, expected)
    known = {(f.kind, f.where) for f in found}
    found += [f for f in probed.findings if (f.kind, f.where) not in known]
    said = probed.probed
    # The comparison with batches of one needs losses from `loss` that ignore the batch size.
    counts = any(f.kind == "batch size" for f in found)
    refused = any(f.severity == "error" for f in found)
    if not (counts or refused or own_loss):
        differing, compared = _compare_gradients(model, loss_of_examples, batch)
        found, said = found + differing, f"{said}; {compared}"
    return found, searched.accepted, said


def _compare_gradients(
    model: tf.keras.Model, loss: Callable[..., tf.Tensor], batch: tuple
) -> tuple[list[Finding], str]:
    """Compares gradients of a few examples with batches of one; also returns what was done."""
    few = tf.nest.map_structure(lambda t: t[:4], batch)
    try:
        report = check_per_example(model, loss, few)
    except NotPrivateError as error:
        return [Finding("gradients", "model", str(error), "Follow the message.")], "gradients"
    except Exception as error:  # noqa: BLE001, a model may take batches of one size only
        return [], f"gradients not compared ({type(error).__name__})"
    return [], f"gradients of {report.num_examples} examples compared with batches of one"


def _joined(found: list[Finding], of_layers: list[Finding], accepted: bool) -> list[Finding]:
    """Names each layer once: its kind says more than what the search saw in it."""
    if accepted:
        # The step was searched, and these layers run on fixed statistics in it.
        of_layers = [f for f in of_layers if f.kind != "batch statistics"]
    known = {f.where for f in of_layers if f.kind in ("batch statistics", "state")}
    searched = ("mixing", "refused", "state")
    return [f for f in found if not (f.kind in searched and f.where in known)] + of_layers


def _step_losses(
    model: tf.keras.Model,
    loss: str | Callable[..., tf.Tensor],
    loss_of_examples: Callable[..., tf.Tensor],
) -> Losses:
    """Makes a function that computes the loss of a training step as `fit` does.

    Eagerly, for the probe, it returns the losses of the examples even if the loss is reduced.
    """
    if has_own(model, "compute_loss") and is_compiled(model):

        def losses(batch: tuple, training: bool) -> tf.Tensor:
            x, y, *sample_weight = batch
            return model.compute_loss(x, y, model(x, training=training), *sample_weight)

        return losses
    vector = loss_function(model, loss_of_examples)
    if not argument_findings.is_reduced(loss):
        return vector

    def reduced(batch: tuple, training: bool) -> tf.Tensor:
        values = vector(batch, training)
        if tf.executing_eagerly():
            return values
        numbers = [tf.cast(t, values.dtype) for t in model.losses if t.shape.rank == 0]
        with tf.name_scope(REDUCTION):
            return tf.add_n([tf.reduce_mean(values), *numbers])

    return reduced


def _own_steps(model: tf.keras.Model) -> list[Finding]:
    """What this module cannot know about models with custom training."""
    found = []
    if has_own(model, "compute_loss") and not is_compiled(model):
        found.append(
            Finding(
                "not searched",
                "model",
                "It has a custom `compute_loss` and is not compiled; `loss` was used instead.",
                "Call `model.compile` before `validate`.",
                "warning",
            )
        )
    return found
