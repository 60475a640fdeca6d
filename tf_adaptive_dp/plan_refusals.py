"""What a plan rejects, and warns of: arguments, optimizers, models and data."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks, optimizers
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.models import steps_per_call
from tf_adaptive_dp._keras.tracebacks import is_filtering, level_of_caller
from tf_adaptive_dp.accounting.ledger import has_ledger
from tf_adaptive_dp.accounting.noise_strategies import NoiseStrategy
from tf_adaptive_dp.accounting.terms import missing_events
from tf_adaptive_dp.callbacks.common import longer_plan
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.normalization import some_of
from tf_adaptive_dp.optimizers.loss_scaling import WRAPPED
from tf_adaptive_dp.sampling.draws import check_unit
from tf_adaptive_dp.sampling.noise_budget import SamplingOfPlan
from tf_adaptive_dp.sampling.sources import Arrays, Records, are_finite
from tf_adaptive_dp.validation.layer_findings import has_own, named_layers, needs_targets
from tf_adaptive_dp.validation.unit_findings import small_weight_findings, unit_findings

# Arguments that the plan sets, so callers of `optimizer` must not, and what to do instead.
_SET_IN_OPTIMIZER = {
    "noise": "pass it to `PrivacyPlan(...)`",
    "noise_multiplier": "pass it to `PrivacyPlan(...)`, in place of `epsilon`",
    "expected_batch_size": "pass it to `PrivacyPlan(...)`, as `batch_size`",
    "num_microbatches": "leave it out, since its batches have none",
    "examples_per_user": "pass it to `PrivacyPlan(...)`, with `user_ids`",
}
# Classes in `keras.optimizers` that have no update rule of their own, in lower case.
_NO_RULE = ("lossscaleoptimizer", "multioptimizer", "optimizer", "optimizermap")
# Arguments that the plan sets, so callers of `fit` must not.
_SET_IN_FIT = ("batch_size", "epochs", "initial_epoch", "shuffle", "steps_per_epoch")
# Arguments that Keras applies to arrays, which it does not get here, and what to do instead.
_NOT_WITH_A_PLAN = {
    "validation_split": "split the data beforehand and pass `validation_data`",
}
# What Python, Keras and TensorFlow say if a step takes a batch of three parts for one of others.
_OF_TUPLES = (
    "too many values to unpack",
    "but it received 3 input tensors",
    "Inputs to a layer should be tensors",
    "'tuple' object has no attribute",
    "(<class 'NoneType'>)",
    "None values not supported",
)


class PrivacyPlanLike(Protocol):
    """What training needs of a `PrivacyPlan`, where all of it is described."""

    num_examples: int
    epochs: int
    steps: int
    steps_per_epoch: int
    noise_multiplier: float
    noise: NoiseStrategy
    sampling: SamplingOfPlan
    other_events: tuple[dp_accounting.DpEvent, ...]
    normalize_inputs: bool
    normalize_targets: bool

    @property
    def expected_batch_size(self) -> float:
        """See `PrivacyPlan`."""

    def callbacks(self, log_dir: str | None) -> list[keras.callbacks.Callback]:
        """See `PrivacyPlan`."""

    def limit_for(self, optimizer: Any) -> float:
        """See `PrivacyPlan`."""

    def report(self, path: str) -> None:
        """See `PrivacyPlan`."""


def refuse_optimizer_arguments(kwargs: dict[str, Any]) -> None:
    """Raises TypeError for an argument of `plan.optimizer` that the plan sets."""
    for name, instead in _SET_IN_OPTIMIZER.items():
        if name in kwargs:
            raise TypeError(
                f"`{name}` is set by the plan: {instead}. Received: {name}={kwargs[name]!r}"
            )


def require_class_with_ledger(optimizer_class: Any) -> None:
    """Raises TypeError unless it is an optimizer class of the library."""
    if has_ledger(optimizer_class) and not isinstance(optimizer_class, type):
        raise TypeError(
            "`optimizer_class` must be a class, not an instance: pass "
            f"`{type(optimizer_class).__name__}`, and its other arguments by name, as in "
            "`plan.optimizer(tf_adaptive_dp.ADADP, l2_norm_clip=1.0)`. Received: "
            f"optimizer_class={optimizer_class!r}"
        )
    if not (isinstance(optimizer_class, type) and has_ledger(optimizer_class)):
        raise TypeError(
            "`optimizer_class` must be an optimizer class of tf_adaptive_dp, "
            f"{_class_to_pass(optimizer_class)}. Received: optimizer_class={optimizer_class!r}"
        )


def _class_to_pass(given: Any) -> str:
    """Which class to pass in place of a name, or of an optimizer of Keras."""
    own = [name for name in optimizers.__all__ if has_ledger(getattr(optimizers, name))]
    named = {name.lower(): f"tf_adaptive_dp.{name}" for name in own}
    for name in dir(tf.keras.optimizers):
        if name.lower() not in _NO_RULE and isinstance(getattr(tf.keras.optimizers, name), type):
            made = f"tf_adaptive_dp.make_dp_optimizer_class(tf.keras.optimizers.{name})"
            named[name.lower()] = named.get(f"dp{name.lower()}", made)
    kind = given if isinstance(given, type) else type(given)
    name = given if isinstance(given, str) else kind.__name__
    if isinstance(given, str) or issubclass(kind, tf.keras.optimizers.Optimizer):
        private = named.get(name.lower())
        if private is not None:
            return f"here `{private}`; pass its other arguments, such as `learning_rate`, by name"
    return "such as `tf_adaptive_dp.ADADP`; `make_dp_optimizer_class` makes one of a Keras class"


def refuse_fit_arguments(fit_arguments: dict[str, Any]) -> None:
    """Raises TypeError for an argument of `plan.fit` that the plan sets, or cannot pass on."""
    for name, instead in _NOT_WITH_A_PLAN.items():
        if fit_arguments.get(name) is not None:
            raise TypeError(
                f"`plan.fit` does not support `{name}`: {instead}. Received: "
                f"{name}={fit_arguments[name]!r}"
            )
    given = [name for name in _SET_IN_FIT if name in fit_arguments]
    if given:
        are, them = ("is", "it") if len(given) == 1 else ("are", "them")
        there = {"batch_size", "epochs"}.issuperset(given)
        raise TypeError(
            f"{' and '.join(f'`{name}`' for name in given)} {are} set by the plan. Remove "
            f"{them} here{f', or change {them} in `PrivacyPlan(...)`' if there else ''}. "
            "Received: " + ", ".join(f"{name}={fit_arguments[name]!r}" for name in given)
        )


def check_optimizer(plan: PrivacyPlanLike, optimizer: Any) -> None:
    """Raises unless an optimizer spends what the plan accounts for."""
    _require_private(optimizer)
    check_unit(plan.sampling, optimizer)
    _check_next_release(plan, optimizer)
    _check_steps(plan, optimizer)
    if optimizer.noise != plan.noise:
        raise ValueError(
            "The optimizer must have the noise strategy of the plan: create it with "
            f"`plan.optimizer(...)`. Received: noise={optimizer.noise!r} instead of "
            f"{plan.noise!r}"
        )
    _check_events(plan, optimizer)


def _require_private(optimizer: Any) -> None:
    """Raises unless an optimizer is one of the library's, and its noise is secret."""
    inside = getattr(optimizer, "inner_optimizer", optimizer)
    if inside is not optimizer and has_ledger(inside):
        raise NotPrivateError(WRAPPED)
    if not has_ledger(optimizer):
        raise TypeError(
            "The model must be compiled with an optimizer of tf_adaptive_dp, such as "
            f"`plan.optimizer(tf_adaptive_dp.ADADP)`. Received: optimizer={optimizer!r}"
        )
    if optimizer.seed is not None:
        raise NotPrivateError(
            "The optimizer of a plan must draw secret noise: anyone who knows the seed can "
            "remove the noise. Leave out `seed`; a test with repeatable noise can train "
            f"without a plan. Received: seed={optimizer.seed!r}"
        )


def _check_next_release(plan: PrivacyPlanLike, optimizer: Any) -> None:
    """Raises unless the next release has the noise and the batch size of the plan."""
    wanted = (plan.noise_multiplier, plan.expected_batch_size)
    noise_multiplier, size = optimizer.next_release()
    if noise_multiplier == wanted[0] and size is not None and math.isclose(size, wanted[1]):
        return
    longer = ""
    if optimizer.ledger.num_releases:
        longer = (
            "To train a model longer, keep its optimizer, whose ledger counts the steps so "
            f"far, and make {longer_plan(noise_multiplier, size)}. "
        )
    if optimizer.ledger.chosen_by_search:
        longer += (
            "The plan's epsilon then leaves out the search that chose the model: add what the "
            "further steps spend to `HonestTuner.privacy_statement()`. "
        )
    raise ValueError(
        "The optimizer must have the noise and the batch size of the plan: create it with "
        "`plan.optimizer(...)`, or make the plan with the optimizer's `batch_size` and "
        f"`noise_multiplier`, without `epsilon`. {longer}Received: "
        f"noise_multiplier={noise_multiplier!r} and expected_batch_size={size!r} instead of "
        f"{wanted[0]!r} and {wanted[1]!r}"
    )


def _check_steps(plan: PrivacyPlanLike, optimizer: Any) -> None:
    """Raises unless the plan has as many steps as the optimizer has made."""
    released, steps = optimizer.ledger.num_releases, plan.steps
    if released > steps:
        more = f"`epochs` above {released // plan.steps_per_epoch}"
        longer = longer_plan(plan.noise_multiplier, plan.expected_batch_size, more)
        raise BudgetExceededError(
            "The plan must cover the steps that the optimizer has made: `epochs` counts "
            f"the earlier ones, too. To train longer, make {longer}. If this is a new "
            "model, compile it with a new optimizer, `plan.optimizer(...)`. Received: "
            f"{released} releases, and a plan of {steps} steps"
        )


def _check_events(plan: PrivacyPlanLike, optimizer: Any) -> None:
    """Raises unless the optimizer's ledger has the events that the plan's budget pays for."""
    events, paid = optimizer.ledger.other_events, plan.other_events
    if missing_events(events, among=paid):
        raise ValueError(
            "The optimizer's ledger, to which side information adds its release, has an event "
            "that the plan's budget does not pay for. Pass the events to the plan as "
            f"`other_events`. Received: {events!r} instead of {paid!r}"
        )
    if missing_events(paid, among=events):
        raise ValueError(
            "The optimizer's ledger must have every event that the plan's budget pays for, or "
            "its epsilon is too small: create it with `plan.optimizer(...)`, or set "
            "`optimizer.ledger.other_events = plan.other_events`. Received: "
            f"{events!r} instead of {paid!r}"
        )


def refuse_second_order(plan: PrivacyPlanLike, optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Raises if a run with correlated noise would continue in other groups or another order.

    An example could then be in two batches that are closer to each other than epsilon assumes,
    and nothing else might notice: a batch with little padding does not show its step. After all
    steps of the plan the budget refuses more of them.
    """
    released = optimizer.ledger.num_releases
    if not plan.noise.is_independent and 0 < released < plan.steps:
        raise ValueError(
            "Only the directory of a run with correlated noise knows the groups or the order "
            "of its batches. Pass `directory` to the first call of `fit`, and to the call that "
            "resumes it; or begin with a new model. Received: directory=None, and an optimizer "
            f"with {released} releases"
        )


def check_steps_per_call(plan: PrivacyPlanLike, model: keras.Model) -> None:
    """Raises unless calls of the training function end where batches and epochs end."""
    checks.fixed_steps_per_call(model)
    calls, parts = steps_per_call(model), model.optimizer.parts_per_batch
    in_epoch = parts * plan.steps_per_epoch
    if in_epoch % calls or max(calls, parts) % min(calls, parts):
        raise ValueError(
            "`steps_per_execution` must divide the steps of an epoch, and be a multiple or a "
            "divisor of `gradient_accumulation_steps`, or the last steps would be left out. "
            f"Received: steps_per_execution={calls}, {in_epoch} steps in an epoch, "
            f"gradient_accumulation_steps={parts}"
        )


def require_finite_weights(model: keras.Model) -> None:
    """Raises if no example could have a finite gradient, so that epsilon would buy noise alone."""

    def is_finite(layer: keras.layers.Layer) -> bool:
        return all(np.isfinite(w).all() for w in layer.get_weights() if w.dtype.kind == "f")

    if model.built and not is_finite(model):
        found = [path for path, layer in named_layers(model) if not is_finite(layer)]
        # A layer around others has their weights, too.
        inner = [path for path in found if not any(p.startswith(f"{path}/") for p in found)]
        raise ValueError(
            "The model's weights must be finite, or every gradient would count as zero, and all of "
            "epsilon would be spent on noise. A layer that is adapted to data with missing values "
            "has NaN for statistics: fill in those values first. Received: NaN or infinity in "
            f"{', '.join(map(repr, inner or [model.name]))}"
        )


def refuse_missing_targets(model: keras.Model) -> None:
    """Raises if a model needs targets, or TensorFlow cannot pass batches without them to it."""
    if needs_targets(model, model.loss):
        raise ValueError(
            "`y` is missing, but the model is compiled with a loss, which compares outputs "
            "with it. To learn to reproduce the inputs, pass them as `y` too. Received: "
            f"y=None, loss={model.loss!r}"
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "`y` is missing, and TensorFlow passes no batches without targets to several replicas. "
            "Train on one replica; or pass zeros as `y`, and multiply the losses by the sample "
            f"weights, which mark padding. Received: y=None, {replicas} replicas"
        )


@contextlib.contextmanager
def explaining_batches(model: keras.Model) -> Iterator[None]:
    """Says what a batch is made of if a `train_step` of the model's own fails to unpack one.

    And what padding holds, if the model fails on that.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if not any(word in error.message for word in ("[UNK]", "num_oov_indices=0")):
            raise
        said = error.message.rpartition("\n\n")[2].partition("\n")[0].replace('\\"', '"')
        raise ValueError(
            "The model must accept padding. The batches of a plan are padded with rows of weight "
            'zero, whose inputs are ones or the text "[UNK]". Give layers that look up words or '
            "numbers a place for unknown ones, `num_oov_indices=1`, or encode the inputs before "
            f"`fit`. Received: model={model.name!r}, whose step failed with: {said}"
        ) from (None if is_filtering() else error)
    except (AttributeError, TypeError, ValueError) as error:
        lines = (line for line in str(error).splitlines() if any(w in line for w in _OF_TUPLES))
        said = next(lines, "").strip()
        if not said or not has_own(model, "train_step"):
            raise
        raise ValueError(
            "The `train_step` of the model must take batches of three parts, (x, y, "
            "sample_weight): the weights mark padding, and y is `None` if there are no targets. "
            "Write `x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)`, and pass "
            "`sample_weight` to the loss; "
            f"see docs/troubleshooting.md. Received: model={model.name!r}, whose step failed with: "
            f"{said}"
        ) from error


def examples_of(x: Any, y: Any, sample_weight: Any) -> Any:
    """What `open_source` reads."""
    if isinstance(x, keras.utils.Sequence):  # a `PyDataset` in Keras 3
        raise TypeError(
            "`x` must give single examples, since the plan draws the batches, and a "
            f"`keras.utils.{keras.utils.Sequence.__name__}` gives batches. Pass arrays, a "
            "`tf.data.Dataset` of single examples, or an object whose `__getitem__` returns one "
            f"example. Received: {type(x).__name__}"
        )
    if y is None:
        if sample_weight is not None:
            raise ValueError(
                "`sample_weight` needs `y`. A source of single examples gives its weights as "
                "(x, y, sample_weight). Received: y=None"
            )
        if isinstance(x, tuple) and len(x) == 1:  # what an element of a data set of x alone is
            (x,) = x
        # Several inputs, as `fit` of Keras has it, and not a list of examples.
        is_several = isinstance(x, (list, tuple)) and not (x and isinstance(x[0], tuple))
        is_of_arrays = hasattr(x, "shape") or isinstance(x, dict) or is_several
        return (_arrays("x", x),) if is_of_arrays else x
    if isinstance(y, dict) and isinstance(sample_weight, dict) and set(y) - set(sample_weight):
        raise ValueError(
            "`sample_weight` must have weights for each output of `y`; `np.ones(num_examples)` "
            f"weights all examples equally. Received: weights for {sorted(sample_weight)}, and "
            f"targets for {sorted(y)}"
        )
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    arrays = {name: _arrays(name, part) for name, part in parts.items() if part is not None}
    checks.equal_rows(arrays)
    return tuple(arrays.values())


def _arrays(name: str, part: Any) -> Any:
    """A nest of NumPy arrays, without lists, which `tf.data` would take for one array each."""
    if isinstance(part, dict):
        return {key: _arrays(name, value) for key, value in part.items()}
    if isinstance(part, (list, tuple)) and all(len(getattr(v, "shape", ())) for v in part):
        return tuple(_arrays(name, value) for value in part)
    checks.dense(name, part)
    checks.not_masked(name, part)
    try:
        array = checks.array(part)
    except ValueError as error:  # NumPy says that a shape is "inhomogeneous"
        raise ValueError(
            f"`{name}` must have rows of one shape: pad or crop them. Received: a "
            f"{type(part).__name__} whose rows differ in shape"
        ) from error
    checks.numbers_or_strings(name, array)
    return array


def with_strings_for_keras(data: Any) -> Any:
    """Validation data with tensors in place of arrays of strings, which Keras 3 rejects."""
    if not isinstance(data, (list, tuple)) or not data:
        return data

    def readable(value: Any) -> Any:
        if not isinstance(value, np.ndarray) and not hasattr(value, "to_numpy"):
            return value
        array = checks.array(value)
        if array.dtype.kind not in "OSU":
            return value
        checks.numbers_or_strings("validation_data", array)
        return tf.constant(array)

    x, *others = data
    return (tf.nest.map_structure(readable, x), *others)


def warn_of_values(
    model: keras.Model, source: Arrays | Records, class_weight: Mapping[int, float] | None = None
) -> None:
    """Warns of missing values and raw units before epsilon is spent.

    Units are judged by a few examples, and so are missing values of a source that is not in memory.

    Args:
      model: a compiled model.
      source: its examples, with their weights.
      class_weight: the weight of each class, if there are such. They are judged by themselves,
        too, since the few examples may lack a rare class.
    """
    some = some_of(len(source))
    rows = [np.zeros([len(some), *shape], dtype) for shape, dtype in source.parts]
    source.fill(some, rows)
    if not (source.are_finite() if isinstance(source, Arrays) else are_finite(rows)):
        warnings.warn(
            "Some examples have values that are NaN or infinite. If the model's gradient is not "
            "finite for them, they count as zero, so that it learns nothing from them while ε is "
            "spent as before. Fill in missing values with public constants.",
            stacklevel=level_of_caller(),
        )
    batch = tf.nest.pack_sequence_as(source.structure, [tf.convert_to_tensor(r) for r in rows])
    if class_weight:
        batch = (*batch[:2], (batch[2], tf.constant([float(w) for w in class_weight.values()])))
    findings = unit_findings(model, getattr(model, "loss", None), batch)
    if isinstance(source, Arrays) and len(source.structure) > 2:
        findings += small_weight_findings(
            model, tf.nest.map_structure(tf.convert_to_tensor, source.structure[2])
        )
    for found in findings:
        warnings.warn(f"{found.what} {found.fix}", stacklevel=level_of_caller())
