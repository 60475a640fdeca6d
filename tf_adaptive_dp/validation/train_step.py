"""Traces the training step of a compiled model as `fit` does, without running it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.layers import is_compiled
from tf_adaptive_dp._keras.models import traced_step, trained_weights, untrained_weights
from tf_adaptive_dp._keras.tracebacks import raised
from tf_adaptive_dp._keras.tracing import GraphTape
from tf_adaptive_dp._keras.variables import path_of
from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.gradients.batch_axis.hidden import written_from_data
from tf_adaptive_dp.gradients.frames import Frame
from tf_adaptive_dp.gradients.jacobian import JacobianWarning
from tf_adaptive_dp.gradients.watch import releases_within
from tf_adaptive_dp.normalization import normalizations_in, refuse_unpaid_behind
from tf_adaptive_dp.validation.diagnosis import added_loss_findings, diagnose, refusal
from tf_adaptive_dp.validation.findings import Finding
from tf_adaptive_dp.validation.layer_findings import has_own, path_finder
from tf_adaptive_dp.validation.per_example import batch_specs

_NOT_COMPILED = "not compiled"
_COMPILE = "Call `model.compile` with this optimizer before `validate`."
_ONE_SIZE = (
    "Nothing to do if all batches have one static size, as with `drop_remainder=True`, "
    "`poisson_batches` or `plan.fit(..., equal_rows=True)`: the step compiles for that size."
)
_KEEP_ELSEWHERE = "Leave it out, keep it in a metric, or reset it before you share the model."
_TRAIN_PRIVATELY = "Let the private optimizer train it too, or keep private data out of its loss."


class TracedStep(NamedTuple):
    """What tracing a training step showed.

    Attributes:
      findings: what `fit` would refuse; as warnings, what it would refuse for batches of unknown
        size only.
      accepted: whether `fit` would train on batches of this size.
      any_size: whether it would train on batches of any size.
      without_rules: the variables whose Jacobian the step takes.
    """

    findings: list[Finding]
    accepted: bool
    any_size: bool
    without_rules: list[tf.Variable]


def trace_step(
    model: tf.keras.Model,
    trained: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    batch: tuple,
) -> TracedStep:
    """Traces the training step of a model for batches of any size, and else for this size.

    It does not run: no weight changes and nothing is released. A copy of the optimizer takes the
    place of the model's. Metrics and other optimizers that the step uses are built.

    Args:
      model: a built model, whose layers findings name.
      trained: the compiled model whose step is traced; it shares the layers of `model`.
      optimizer: the one to train with.
      batch: (x,), (x, y) or (x, y, sample_weight): nests of tensors.
    """
    if has_own(model, "make_train_function"):
        what = "It has a custom `make_train_function`, which cannot be searched."
        found = Finding("not searched", "model", what, "Override `train_step` instead.")
        return TracedStep([found], False, False, [])
    if not is_compiled(trained):
        what = "It has a custom `train_step` and is not compiled, so the step was not searched."
        found = Finding("not searched", "model", what, _COMPILE)
        return TracedStep([found], False, False, [])
    if has_ledger(optimizer):
        try:
            optimizer.copy_to_inspect()
        except Exception as error:  # noqa: BLE001, whatever a user's `get_config` raises
            return _refused([_not_copied(error)])
    if trained.run_eagerly:
        return _run_eagerly(model, trained, optimizer, batch)
    free, fixed = batch_specs(batch)
    first = _trace(model, trained, optimizer, free)
    if first.accepted:
        return first
    second = _trace(model, trained, optimizer, fixed)
    if not second.accepted:
        # What compiles for one size only shows with that size what else is wrong with it.
        return second if first.findings[0].kind == _NOT_COMPILED else first
    # Only batches of one size compile.
    warned = [f._replace(severity="warning", fix=_ONE_SIZE) for f in first.findings]
    return second._replace(findings=warned, any_size=False)


def _trace(
    model: tf.keras.Model, trained: tf.keras.Model, optimizer: Any, specs: tuple
) -> TracedStep:
    findings: list[Finding] = []
    own_step = has_own(model, "train_step")
    private = has_ledger(optimizer)
    with trained.distribute_strategy.scope():
        stand_in = _stand_in(model, optimizer, findings)
    with _compiled_with(trained, stand_in):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                graph = traced_step(trained, specs)
            except NotPrivateError as error:
                kind = "train_step" if own_step else "refused"
                return _refused(findings or [refusal(error, model, kind)])
            except Exception as error:  # noqa: BLE001, whatever a user's step raises is a finding
                return _refused(
                    findings
                    or added_loss_findings(model, trained.loss, specs)
                    or [_not_traced(error)]
                )
    if own_step and private and not releases_within(graph):
        return _releases_nothing()
    jacobians = [w.message for w in caught if isinstance(w.message, JacobianWarning)]
    # A step that creates variables, such as those of metrics, is traced twice.
    variables = {id(v): v for warning in jacobians for v in warning.variables}
    unreleased = _unreleased(graph, model, private)
    return TracedStep(unreleased, not unreleased, True, list(variables.values()))


def _unreleased(graph: tf.Graph, model: tf.keras.Model, private: bool) -> list[Finding]:
    """Names the layers with weights into which the step writes data, other than by a release."""
    found = []
    for variable in written_from_data(Frame(graph), untrained_weights(model)):
        what = (
            f"The training step writes data of its batches into {path_of(variable)}, a weight that "
            "is saved with the model but not trained: a statistic of private data without noise, "
            "which ε does not cover."
        )
        found.append(("statistics", variable, what, _KEEP_ELSEWHERE))
    for variable in written_from_data(Frame(graph), trained_weights(model) if private else ()):
        what = (
            f"The training step changes {path_of(variable)} by data of its batches instead of by "
            "released gradients: it is trained without clipping and noise, and ε does not cover it."
        )
        found.append(("not private", variable, what, _TRAIN_PRIVATELY))
    layer_of = path_finder(model)
    return [
        Finding(kind, layer_of(path_of(variable)) or "model", what, fix)
        for kind, variable, what, fix in found
    ]


def _refused(findings: list[Finding]) -> TracedStep:
    return TracedStep(findings, False, False, [])


def _releases_nothing() -> TracedStep:
    """What is said of a step that does not use the private optimizer's gradients."""
    what = "Its `train_step` releases no gradients of the private optimizer."
    fix = "Call `self.optimizer.minimize(loss, self.trainable_variables, tape)` in it."
    return _refused([Finding("not private", "model", what, fix)])


def _not_copied(error: Exception) -> Finding:
    return Finding(
        "not searched",
        "optimizer",
        f"It could not be copied, so the step was not searched: {type(error).__name__}: {error}",
        "Let its `get_config` return all arguments of its `__init__`, and register your own "
        "classes and functions among them by `keras.saving.register_keras_serializable()`.",
    )


def _not_traced(error: Exception) -> Finding:
    return Finding(
        _NOT_COMPILED,
        "model",
        f"A training step does not compile: {raised(error)}",
        "Ordinary compiled training fails in the same way. The usual reasons are labels whose "
        "shape does not suit the loss, and NumPy in a loss or a layer, which only runs eagerly: "
        "use the operations of Keras or TensorFlow.",
    )


def _stand_in(model: tf.keras.Model, optimizer: Any, findings: list[Finding]) -> Any:
    """An optimizer that does what the one to validate does while a step is traced.

    It adds to `findings` what the graph of a refused loss shows.
    """

    def searched(compute: Callable[..., Any]) -> Callable[..., Any]:
        @tf.autograph.experimental.do_not_convert
        def wrapper(loss: Any, var_list: Any, tape: Any = None) -> Any:
            try:
                return compute(loss, var_list, tape)
            except (NotPrivateError, TypeError, ValueError) as error:
                findings[:] = diagnose(loss, model, error)
                raise

        return wrapper

    if not has_ledger(optimizer):
        return _SearchingOptimizer(searched(_search))
    copy = optimizer.copy_to_inspect()
    copy.compute_gradients = searched(copy.compute_gradients)
    # `statistics_findings` names the layers that Keras lists.
    copy.refuse_uncounted_statistics = functools.partial(
        refuse_unpaid_behind, optimizer=copy, apart_from=normalizations_in(model)
    )
    return copy


def _search(loss: tf.Tensor, variables: Sequence[Any], tape: Any) -> None:
    per_example_gradients(loss, list(variables), tape).squared_norms()


class _SearchingOptimizer:
    """Takes the place of an optimizer that is not private, and searches the loss of a step."""

    def __init__(self, search: Callable[..., None]):
        self._search = search
        self._loss: tf.Tensor | None = None

    @tf.autograph.experimental.do_not_convert
    def minimize(self, loss: tf.Tensor, var_list: Sequence[Any], tape: tf.GradientTape) -> None:
        """Searches the loss, as the train step of Keras 2 calls it."""
        self._search(loss, var_list, tape)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Keeps the loss, as the train step of Keras 3 calls it."""
        self._loss = loss
        return tf.zeros([], loss.dtype)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any) -> None:
        """Searches the loss that was kept."""
        self._search(self._loss, [v for _, v in grads_and_vars], GraphTape())


class _Accepted(Exception):
    """Ends an eager step before anything is released."""


def _run_eagerly(
    model: tf.keras.Model, trained: tf.keras.Model, optimizer: Any, batch: tuple
) -> TracedStep:
    """Runs the step of a model with `run_eagerly=True` until the gradients would be clipped."""

    def search(loss: tf.Tensor, variables: Sequence[Any], tape: Any = None) -> None:
        _search(loss, variables, tape)
        raise _Accepted

    stand_in: Any = _SearchingOptimizer(search)
    if has_ledger(optimizer):
        stand_in = optimizer.copy_to_inspect()
        stand_in.compute_gradients = search
    with _compiled_with(trained, stand_in), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will say what an eager step cannot search
        try:
            trained.train_step(batch)
        except _Accepted:
            return TracedStep([], True, True, [])
        except (NotPrivateError, ValueError) as error:
            return _refused([refusal(error, model)])
        except Exception as error:  # noqa: BLE001, whatever a user's step raises is a finding
            return _refused([_not_traced(error)])
    return _releases_nothing()


@contextlib.contextmanager
def _compiled_with(model: tf.keras.Model, optimizer: Any) -> Iterator[None]:
    own = model.optimizer
    model.optimizer = optimizer
    try:
        yield
    finally:
        model.optimizer = own
