"""Reports everything that prevents private training of a model."""

from __future__ import annotations

import dataclasses
import textwrap
import time
import traceback
import warnings
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.layers import BATCH_NORMALIZATIONS, is_compiled
from tf_adaptive_dp._keras.models import compiled_with, loss_of_step, loss_weights_of
from tf_adaptive_dp._keras.tracebacks import raised
from tf_adaptive_dp._keras.variables import native, path_of
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.validation import argument_findings
from tf_adaptive_dp.validation.findings import Finding, ValidationReport
from tf_adaptive_dp.validation.fixes import is_defective, repaired_model, why_left
from tf_adaptive_dp.validation.layer_findings import (
    has_own,
    layer_findings,
    named_layers,
    needs_targets,
    path_finder,
    statistics_findings,
    takes_batch_statistics,
)
from tf_adaptive_dp.validation.padding_findings import padding_findings
from tf_adaptive_dp.validation.per_example import (
    Losses,
    batch_specs,
    checked_batch,
    compare,
    losses_of_step,
    marked_padding,
)
from tf_adaptive_dp.validation.probe import counting, probe
from tf_adaptive_dp.validation.repeatable import unchanged
from tf_adaptive_dp.validation.train_step import TracedStep, trace_step
from tf_adaptive_dp.validation.unit_findings import unit_findings

_NOTHING_PROBED = "Not run, because the errors below must be fixed first."


class _Subject(NamedTuple):
    """What to validate.

    Attributes:
      model: a built model, which the report is about.
      trained: the model whose training step is searched; it shares the layers of `model`.
      loss: what the report gives as the loss.
      optimizer: the one to train with.
    """

    model: tf.keras.Model
    trained: tf.keras.Model
    loss: Any
    optimizer: Any


def validate(
    model: tf.keras.Model,
    batch: Any,
    *,
    loss: Any = None,
    optimizer: tf.keras.optimizers.Optimizer | None = None,
    fix: bool = False,
) -> ValidationReport:
    """Finds everything that prevents private training of a compiled model, and reports all of it.

    It traces the training step of the model as `fit` does, with a copy of its optimizer and without
    running it: `report.ok` says whether `fit` would train on this batch. It names all layers that
    mix examples, and not only the first one. It announces each Jacobian and what it costs. It
    inspects the layers, the optimizer and the batch. And it runs the model on batches with one
    example changed, on which the losses of the other examples must stay the same. That takes
    seconds for a small model, and about a minute for a repaired MobileNetV2.

    Guarantee: none by itself. What the search of a training step accepts holds for all batches, as
    in training. The probe can only find mixing, on this batch. The report is not private: do not
    publish reports on private data.

    Args:
      model: compiled as for `fit`, unless `loss` and `optimizer` are given. A model without weights
        is built by calling it on the batch, and metrics are built; otherwise it does not change.
      batch: `(x, y)`, `(x, y, sample_weight)` or x, as `fit` takes it; a few examples are enough. x
        and y may be nested, axis 0 is the batch. For an optimizer with `examples_per_user` the rows
        are grouped by user, as in the batches of a plan with `user_ids`.
      loss: replaces the loss that the model was compiled with. A compiled model that overrides
        `compute_loss` or `train_step` is searched with that instead.
      optimizer: replaces the model's own; it does not change.
      fix: whether to repair, in a copy of the model, what has a safe replacement.
        BatchNormalization becomes GroupNormalization, or is frozen if it was trained before, and
        stateful recurrent layers become stateless. All other layers keep their weights. The report
        is then about the copy, which is not compiled.

    Returns:
      A `ValidationReport` with `findings`, `ok`, `repaired`, `model` and `loss`.

    Raises:
      TypeError: if `model`, `loss` or `batch` has the wrong type.
      ValueError: if the model is not compiled and `loss` or `optimizer` is missing, or if Keras has
        no loss of that name.
      RuntimeError: if it is called within the scope of a strategy.

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([4]), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    ... )
    >>> model.compile(tf.keras.optimizers.SGD(), "mse")
    >>> report = validate(model, (tf.eye(4), tf.ones([4, 1])), fix=True)
    >>> [finding.where for finding in report.findings]
    ['optimizer']
    >>> [finding.kind for finding in report.repaired]
    ['batch statistics']
    """
    if tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`validate` runs the model as one replica does: compile the model in the scope of its "
            "strategy, and call `validate` outside of it. Received: a call within `with "
            "strategy.scope():`"
        )
    batch = checked_batch(model, batch, loss)
    if not is_compiled(model) and (loss is None or optimizer is None):
        raise ValueError(
            "`model` must be compiled, or `loss` and `optimizer` be given. Received: a model that "
            f"is not compiled, loss={loss!r}, optimizer={optimizer!r}. Call `model.compile` first."
        )
    _check_loss(loss)
    optimizer = model.optimizer if optimizer is None else optimizer
    report = _inspect(model, loss, None, optimizer, batch)
    return _repair(report, optimizer, batch) if fix and report.findings else report


def _check_loss(loss: Any) -> None:
    """Raises unless Keras can make losses of what the user passed."""
    for part in tf.nest.flatten(loss):
        if isinstance(part, str):
            tf.keras.losses.get(part)
        elif part is not None and not callable(part):
            raise TypeError(
                f"`loss` must be a loss as `model.compile` takes it. Received: loss={loss!r}"
            )


def _repair(report: ValidationReport, optimizer: Any, batch: tuple) -> ValidationReport:
    """Reports on a repaired copy."""
    model, left = report.model, []
    kinds = {f.kind for f in report.findings}
    if not (model.built and kinds & {"batch statistics", "state"} and is_defective(model)):
        return report
    try:
        copy = repaired_model(model, batch[0])
    except Exception as error:  # noqa: BLE001, whatever a user's `from_config` raises
        left = [_not_copied(error)]
        return dataclasses.replace(report, findings=_sorted([*report.findings, *left]))
    weights = loss_weights_of(model) if is_compiled(model) else None
    after = _inspect(copy, report.loss, weights, optimizer, batch)
    remaining = {(f.kind, f.where) for f in after.findings}
    layers = dict(named_layers(copy))
    repaired = tuple(
        f._replace(fix=_what_was_done(layers.get(f.where)))
        for f in report.findings
        if (f.kind, f.where) not in remaining
    )
    findings = tuple(
        f._replace(fix=why_left(layers[f.where]))
        if f.kind == "batch statistics" and takes_batch_statistics(layers[f.where])
        else f
        for f in after.findings
    )
    return dataclasses.replace(after, findings=findings, repaired=repaired)


def _what_was_done(repaired: tf.keras.layers.Layer | None) -> str:
    """What the repair did to a layer, which it may have replaced."""
    if isinstance(repaired, tf.keras.layers.GroupNormalization):
        return f"Replaced by GroupNormalization(groups={repaired.groups})."
    if isinstance(repaired, tf.keras.layers.RNN):
        return "Set stateful=False."
    if isinstance(repaired, BATCH_NORMALIZATIONS):
        return (
            "Frozen, with the moving averages of its earlier training, which must not be on the "
            "private data."
        )
    return "The repair of other layers fixed this too."


def _not_copied(error: Exception) -> Finding:
    fix = "Replace the layers named here yourself."
    uncopied = _class_in_copying(error)
    if uncopied is not None:
        fix = (
            f"Let `get_config` of `{uncopied.__name__}` return all arguments of its `__init__`, or "
            "replace the layers named here yourself."
        )
    return Finding(
        "not repaired",
        "model",
        f"It could not be copied: {type(error).__name__}: {error}",
        fix,
        "warning",
    )


def _class_in_copying(error: Exception) -> type | None:
    """The class whose `get_config` or `from_config` raised an error; `None` if none did."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("get_config", "from_config"):
            names = frame.f_locals
            found = names["cls"] if "cls" in names else type(names.get("self"))
    return found


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    unique = list(dict.fromkeys(findings))
    return tuple(sorted(unique, key=lambda f: f.severity != "error"))


def _inspect(
    model: tf.keras.Model, loss: Any, loss_weights: Any, optimizer: Any, batch: tuple
) -> ValidationReport:
    from_batch = argument_findings.batch_findings(batch)
    comparable = not any(f.severity == "error" for f in from_batch)
    num_examples = tf.nest.flatten(batch)[0].shape[0] if comparable else None
    found = [*from_batch, *argument_findings.optimizer_findings(optimizer, num_examples)]
    failed = _build(model, batch[0])
    probed, accepted = _NOTHING_PROBED, False
    if failed is not None:
        found.append(failed)
    elif comparable:
        subject = _subject(model, loss, loss_weights, optimizer)
        loss = subject.loss
        if _lacks_targets(subject, batch):
            what = "The batch has no targets, but the model is compiled with a loss."
            found.append(Finding("no targets", "batch", what, "Pass `(x, y)`."))
            comparable = False
    if failed is None and comparable:
        with unchanged(subject.trained):
            step = trace_step(model, subject.trained, optimizer, batch)
        found += [f for f in step.findings if f not in found]
        accepted = step.accepted
        if accepted:
            with unchanged(subject.trained):
                seen, probed = _run(subject, step, batch)
            found += seen
    if model.built and comparable:
        found += unit_findings(model, loss, batch)
    if model.built:
        found = _joined(found, layer_findings(model), accepted)
        found += statistics_findings(model, optimizer)
    return ValidationReport(_sorted([*found, *_own_steps(model)]), (), probed, model, loss)


def _lacks_targets(subject: _Subject, batch: tuple) -> bool:
    """Whether Keras's own training step needs targets that are not there."""
    if len(batch) > 1 and batch[1] is not None:
        return False
    return is_compiled(subject.trained) and needs_targets(subject.model, subject.loss)


def _build(model: tf.keras.Model, inputs: Any) -> Finding | None:
    if model.built:
        return None
    try:
        model(inputs, training=False)
    except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
        what = f"The model fails on the batch: {raised(error)}"
        return Finding("fails", "model", what, "Make `model(x)` run on it.")
    return None


def _failure(error: Exception) -> Finding:
    return Finding(
        "fails",
        "model",
        f"The model or the loss fails on the batch: {raised(error)}",
        "Make the model and its loss run. A common reason is labels out of range.",
    )


def _subject(model: tf.keras.Model, loss: Any, loss_weights: Any, optimizer: Any) -> _Subject:
    """Finds the model whose training step is searched.

    A loss that the model was not compiled with is compiled into another model with the same layers.
    """
    own_loss, own_step = (has_own(model, name) for name in ("compute_loss", "train_step"))
    own_step = own_step or has_own(model, "make_train_function")
    if loss is None or own_step or (own_loss and is_compiled(model)):
        of_model = model.loss if is_compiled(model) and loss is None else loss
        return _Subject(model, model, of_model, optimizer)
    return _Subject(model, compiled_with(model, loss, loss_weights), loss, optimizer)


def _run(subject: _Subject, step: TracedStep, batch: tuple) -> tuple[list[Finding], str]:
    """Runs an accepted step's losses: looks at their values, and compares examples."""
    model, trained, optimizer = subject.model, subject.trained, subject.optimizer
    own_step = has_own(model, "train_step")
    num_examples = tf.nest.flatten(batch)[0].shape[0]
    k = getattr(optimizer, "examples_per_user", None)
    expected = getattr(optimizer, "expected_batch_size", None)
    specs = batch_specs(batch)[0] if step.any_size else None

    def make_losses() -> Losses:
        return losses_of_step(trained, expected or float(num_examples), specs)

    losses = make_losses()
    try:
        values = losses(batch, True)
        search = _search(trained, batch, specs, expected or float(num_examples), k)
    except Exception as error:  # noqa: BLE001, whatever a user's model raises is a finding
        if own_step:  # whose loss may be computed in it
            kind = type(error).__name__
            return [], f"Not run, because `train_step` has a loss of its own ({kind})."
        return [_failure(error)], _NOTHING_PROBED
    found = argument_findings.loss_value_findings(values, batch)
    if search.counts_batch:
        found.append(counting(None))
    found += argument_findings.clip_findings(optimizer, search.norms)
    found += _jacobians(model, step.without_rules, search, num_examples // (k or 1))
    # Batches of one size have a public size, whatever the optimizer expects.
    random = step.any_size and not search.counts_batch
    probed = probe(trained, losses, batch, expected if random else None)
    known = {(f.kind, f.where) for f in found}
    found += [f for f in probed.findings if (f.kind, f.where) not in known]
    refused = any(f.severity == "error" for f in found)
    if refused or search.counts_batch:
        return found, f"{probed.probed}."
    if not own_step:  # which takes weights in its own way
        found += padding_findings(trained, optimizer, batch)
    if not step.any_size:
        return found, f"{probed.probed}; gradients not compared, because batches have one size."
    differing, compared = _compare_gradients(trained, make_losses, batch, k)
    return found + differing, f"{probed.probed}; {compared}."


class _SearchedStep(NamedTuple):
    """What a step shows that computes per-example gradients as training does.

    Attributes:
      norms: [R], of the gradients of examples or users.
      counts_batch: whether the loss depends on the batch size.
      seconds: how long the gradients took, and how long ordinary ones; measured only if needed.
    """

    norms: np.ndarray
    counts_batch: bool
    seconds: Callable[[], tuple[float, float]]


def _search(
    model: tf.keras.Model,
    batch: tuple,
    specs: tuple | None,
    expected: float,
    examples_per_user: int | None,
) -> _SearchedStep:
    counts: list[bool] = []

    def private(batch: tuple) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of_step(model, batch, True)
        source = per_example_gradients(
            loss,
            model.trainable_variables,
            tape,
            expected_batch_size=expected,
            examples_per_user=examples_per_user,
        )
        counts[:] = [source.loss.counts_batch]
        squares = source.squared_norms()
        sums = [s for s in source.weighted_sum(tf.ones_like(squares)) if s is not None]
        with tf.control_dependencies(sums):
            return tf.identity(squares)

    def ordinary(batch: tuple) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of_step(model, batch, True)
        gradients = tape.gradient(loss, [native(v) for v in model.trainable_variables])
        gradients = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        with tf.control_dependencies(gradients):
            return tf.identity(loss)

    def compiled(function: Callable[[tuple], tf.Tensor]) -> Callable[[tuple], tf.Tensor]:
        return tf.function(function, autograph=False).get_concrete_function(specs or fixed)

    fixed = batch_specs(batch)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a finding announces the Jacobian
        step = compiled(private)

    def seconds() -> tuple[float, float]:
        return _seconds(step, batch), _seconds(compiled(ordinary), batch)

    norms = np.sqrt(np.maximum(step(batch).numpy(), 0))
    return _SearchedStep(norms, counts[0], seconds)


def _seconds(function: Callable[[tuple], tf.Tensor], batch: tuple) -> float:
    """The shortest of five runs after the first."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        function(batch).numpy()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _jacobians(
    model: tf.keras.Model, variables: list[tf.Variable], search: _SearchedStep, num_examples: int
) -> list[Finding]:
    """Announces the Jacobian of variables that no rule covers, and says what it costs."""
    if not variables:
        return []
    private, ordinary = search.seconds()
    place = path_finder(model)
    of_keras = {id(native(v)): v for v in model.trainable_variables}
    found = []
    for variable in variables:
        path = path_of(of_keras.get(id(variable), variable))
        size = variable.shape.num_elements()
        found.append(
            Finding(
                "Jacobian",
                place(path) or "model",
                f"No rule covers the variable {path}, so each step computes its Jacobian: "
                f"{num_examples} backward passes in place of one, and {num_examples} x {size:,} "
                f"numbers in memory, {_memory(4 * num_examples * size)} for a batch of "
                f"{num_examples}. All per-example gradients of this batch took "
                f"{private / ordinary:.1f} times as long here as ordinary gradients; the ratio "
                "grows with the batch.",
                "Write the layer with operations that have rules, register one "
                "(`tf_adaptive_dp.gradients.register_rule`), or train with smaller batches and "
                "`gradient_accumulation_steps`.",
                "warning",
            )
        )
    return found


def _memory(num_bytes: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _compare_gradients(
    model: tf.keras.Model,
    make_losses: Callable[[], Losses],
    batch: tuple,
    examples_per_user: int | None,
) -> tuple[list[Finding], str]:
    """Compares gradients of a few examples with batches of one; also returns what was done."""
    k = examples_per_user or 1
    num_units = int(tf.nest.flatten(batch)[0].shape[0]) // k
    # Rows of padding are worth a look; users without records have them in all rows.
    padding = marked_padding(batch) // k
    units = list(dict.fromkeys([*padding[:1], *padding[-1:], *range(num_units)]))[:4]
    rows = [unit * k + row for unit in units for row in range(k)]
    few = tf.nest.map_structure(lambda t: None if t is None else tf.gather(t, rows), batch)
    try:
        report = compare(model, make_losses, few, examples_per_user=examples_per_user)
    except NotPrivateError as error:
        return [Finding("gradients", "model", str(error), "")], "gradients differ"
    except Exception as error:  # noqa: BLE001, a model may take batches of one size only
        why = textwrap.shorten(str(error).partition(". ")[0], 160, placeholder=" ...")
        return [], f"gradients not compared ({type(error).__name__}: {why})"
    unit = "examples" if examples_per_user is None else "users"
    return [], f"gradients of {report.num_examples} {unit} match those of batches of one"


def _joined(found: list[Finding], of_layers: list[Finding], accepted: bool) -> list[Finding]:
    """Names each layer once: its kind says more than what the search saw in it."""
    if accepted:
        # The step was searched, and these layers run on fixed statistics in it.
        of_layers = [f for f in of_layers if f.kind != "batch statistics"]
    known = {f.where for f in of_layers if f.kind in ("batch statistics", "state")}
    searched = ("mixing", "refused", "state")
    return [f for f in found if not (f.kind in searched and f.where in known)] + of_layers


def _own_steps(model: tf.keras.Model) -> list[Finding]:
    """What this module cannot know about models with custom training."""
    if not has_own(model, "compute_loss") or is_compiled(model):
        return []
    return [
        Finding(
            "not searched",
            "model",
            "It has a custom `compute_loss` and is not compiled; `loss` was used instead.",
            "Call `model.compile` before `validate`.",
            "warning",
        )
    ]
