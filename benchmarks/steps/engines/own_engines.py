"""Keras models with the optimizers of this library."""

from __future__ import annotations

from typing import Callable

import numpy as np
import tensorflow as tf

import tf_adaptive_dp as dp
from benchmarks.steps import problems
from benchmarks.steps.engines.keras_models import build, loss
from benchmarks.steps.engines.tensorflow_engines import MEAN, PRIVATE, RATE


def _ramp(variable: tf.Variable) -> np.ndarray:
    """A preconditioner that differs between coordinates."""
    return np.linspace(0.5, 2.0, int(np.prod(variable.shape))).reshape(variable.shape)


def _secure(data: tf.data.Dataset) -> dp.DPSGD:
    return _dpsgd(data, secure_noise=True)


def _adaptive(data: tf.data.Dataset) -> dp.DPSGD:
    return _dpsgd(data, clipping="adaptive")


def _dpsgd(data: tf.data.Dataset, **kwargs) -> dp.DPSGD:
    return dp.DPSGD(learning_rate=RATE, **PRIVATE, **kwargs)


def _materialized(data: tf.data.Dataset) -> dp.DPSGD:
    return _dpsgd(data, gradients="materialized")


def _adadp(data: tf.data.Dataset) -> dp.ADADP:
    return dp.ADADP(**PRIVATE)


def _untuned(data: tf.data.Dataset) -> dp.UntunedSGD:
    return dp.UntunedSGD(**{name: x for name, x in PRIVATE.items() if name != "l2_norm_clip"})


def _delayed(data: tf.data.Dataset) -> dp.DPSGD:
    return _dpsgd(data, side_information=dp.side_information.DelayedPreconditioner())


def _dpadam(data: tf.data.Dataset) -> dp.DPAdam:
    return dp.DPAdam(learning_rate=RATE, **PRIVATE)


def _adadps_fixed(data: tf.data.Dataset) -> dp.AdaDPS:
    fixed = dp.side_information.FixedPreconditioner(_ramp, provenance="public")
    return dp.AdaDPS(fixed, learning_rate=RATE, **PRIVATE)


def _adadps_public(data: tf.data.Dataset) -> dp.AdaDPS:
    public = dp.side_information.PublicGradients(data, provenance="public")
    return dp.AdaDPS(public, learning_rate=RATE, **PRIVATE)


OPTIMIZERS: dict[str, Callable[[tf.data.Dataset], tf.keras.optimizers.Optimizer]] = {
    "dpsgd": _dpsgd,
    "dpsgd_xla": _dpsgd,
    "dpsgd_secure": _secure,
    "dpsgd_adaptive": _adaptive,
    "materialized": _materialized,
    "dpsgd_delayed": _delayed,
    "adadp": _adadp,
    "untuned": _untuned,
    "dpadam": _dpadam,
    "adadps_fixed": _adadps_fixed,
    "adadps_public": _adadps_public,
}


def with_ordinary_loss(problem: problems.Problem, width: int, jit_compile: bool) -> tf.keras.Model:
    """The model with `DPSGD` and the loss of ordinary training."""
    model = build(problem, width)
    model.compile(
        dp.DPSGD(learning_rate=RATE, **PRIVATE), loss(problem, MEAN), jit_compile=jit_compile
    )
    return model


def compiled_model(
    engine: str, problem: problems.Problem, width: int, data: tf.data.Dataset
) -> tf.keras.Model:
    """The model, compiled as a user would.

    Args:
      engine: a name of `OPTIMIZERS`.
      problem: the problem.
      width: factor of the hidden sizes.
      data: batches; they stand in for public data where it is needed.
    """
    model = build(problem, width)
    model.compile(
        OPTIMIZERS[engine](data),
        loss(problem, "none"),
        jit_compile=True if engine == "dpsgd_xla" else None,
    )
    return model
