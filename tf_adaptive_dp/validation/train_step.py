"""Searches a custom `train_step` as `fit` would, without running it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.layers import is_compiled
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.watch import releases_within
from tf_adaptive_dp.validation.compiled_step import batch_specs, refusal
from tf_adaptive_dp.validation.layer_findings import has_own
from tf_adaptive_dp.validation.report import Finding

_COMPILE = "Call `model.compile` with this optimizer before `validate`."


def train_step_findings(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, batch: tuple
) -> list[Finding]:
    """Searches the custom `train_step` of a model, if it has one.

    The step is traced for batches of any size, or else for the size of this one. It does not run:
    no weight changes and nothing is released. A copy of the optimizer replaces the model's. Metrics
    and other optimizers that the step uses are built.

    Args:
      model: a built model.
      optimizer: the optimizer that was passed to `validate`.
      batch: nests of tensors.
    """
    if has_own(model, "make_train_function"):
        what = "It has a `make_train_function` of its own, which cannot be searched."
        return [Finding("not searched", "model", what, "Override `train_step` instead.")]
    if not has_own(model, "train_step") or not hasattr(optimizer, "ledger"):
        return []  # another finding covers optimizers that are not private
    if not is_compiled(model):
        what = "It has a custom `train_step` and is not compiled, so the step was not searched."
        return [Finding("not searched", "model", what, _COMPILE)]
    try:
        graph = _trace(model, optimizer, batch)
    except NotPrivateError as error:
        return [refusal(error, model, "train_step")]
    except Exception as error:  # noqa: BLE001, whatever a user's step raises is a finding
        what = f"Its `train_step` could not be traced: {type(error).__name__}: {_last_line(error)}"
        return [Finding("not searched", "model", what, "Make the step compile.")]
    if releases_within(graph):
        return []
    what = "Its `train_step` releases no gradients of the private optimizer."
    cure = "Call `self.optimizer.minimize(loss, self.trainable_variables, tape)` in it."
    return [Finding("not private", "model", what, cure)]


def _trace(model: tf.keras.Model, optimizer: Any, batch: tuple) -> tf.Graph:
    """Traces a step, for batches of any size if the model takes them."""
    step = tf.function(lambda *data: model.train_step(data))
    free, fixed = batch_specs(batch)
    with _compiled_with_copy(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will say where it takes the Jacobian
        try:
            return step.get_concrete_function(*free).graph
        except NotPrivateError:
            raise
        except Exception:  # noqa: BLE001, perhaps it takes batches of one size only
            return step.get_concrete_function(*fixed).graph


@contextlib.contextmanager
def _compiled_with_copy(model: tf.keras.Model, optimizer: Any) -> Iterator[None]:
    own = model.optimizer
    try:
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
    except ValueError:  # it cannot be copied; it is built, but not used
        model.optimizer = optimizer
    try:
        yield
    finally:
        model.optimizer = own


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""
