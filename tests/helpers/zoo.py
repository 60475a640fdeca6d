"""Small models with data and their true per-example gradients; a mechanism without a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from tests.helpers.zoo_models import MODELS as ZOO
from tests.helpers.zoo_models import (  # noqa: F401
    Problem,
    classifier,
    cross_entropy,
    floats,
    labels,
    shake,
)
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.gradients.source import LossOfStep, PerExampleGradients
from tf_adaptive_dp.mechanism.gaussian import GaussianMechanism


@functools.cache
def problem(name: str) -> Problem:
    """The problem of that name, with the same weights each time."""
    tf.keras.utils.set_random_seed(3)
    return ZOO[name]()


@functools.cache
def rows(name: str) -> list[np.ndarray]:
    """The true per-example gradients of the problem of that name: [B, ...], one per variable."""
    return batch_of_one_gradients(problem(name))


def batch_of_one_gradients(problem: Problem) -> list[np.ndarray]:
    """The gradient of each example, computed on a batch that holds nothing else."""
    gradients, sources = [], [native(v) for v in problem.variables]
    for i in range(len(problem.batch[0])):
        with tf.GradientTape() as tape:
            loss = problem.losses(*(tf.constant(a[i : i + 1]) for a in problem.batch))[0]
        gradients.append(
            [
                tf.convert_to_tensor(g).numpy().astype("float64")
                for g in tape.gradient(loss, sources, unconnected_gradients="zero")
            ]
        )
    return [np.stack(column) for column in zip(*gradients)]


def source(
    problem: Problem,
    *batch: tf.Tensor,
    method: str = "auto",
    num_microbatches=None,
    examples_per_user=None,
):
    """The library's per-example gradients."""
    with tf.GradientTape() as tape:
        loss = problem.losses(*batch)
    return per_example_gradients(
        *(loss, problem.variables, tape, method, num_microbatches),
        examples_per_user=examples_per_user,
    )


def in_mode(
    mode: str, function: Callable, batch: Sequence[np.ndarray], free: bool = False
) -> Callable:
    """`function` of a batch as users run it.

    Args:
      mode: "eager", "graph" (of unknown batch size), "graph of fixed size" or "xla".
      function: takes tensors.
      batch: arrays like those that it will be given.
      free: whether axis 1 is unknown, too, in the mode "graph".
    """
    if mode == "eager":
        return lambda *batch: function(*map(tf.constant, batch))
    batch_size = {"graph": None, "graph of fixed size": len(batch[0]), "xla": len(batch[0])}[mode]
    shapes = [[batch_size, *a.shape[1:]] for a in batch]
    if free and mode == "graph":
        shapes = [[*s[:1], *[None] * len(s[1:2]), *s[2:]] for s in shapes]
    return tf.function(
        function,
        input_signature=[tf.TensorSpec(s, tf.as_dtype(a.dtype)) for s, a in zip(shapes, batch)],
        jit_compile=mode == "xla",
        autograph=False,  # converting the library would take longer than all else
    )


class Rows(PerExampleGradients):
    """A gradient source of rows that the test chooses: [B, ...], one tensor per variable."""

    def __init__(self, *rows, losses=None):
        self._rows = [tf.convert_to_tensor(r, tf.float32) for r in rows]
        self.ranks = [r.shape.rank - 1 for r in self._rows]
        self.connected = [True] * len(rows)
        ones = tf.ones(tf.shape(self._rows[0])[:1])
        losses = ones if losses is None else tf.convert_to_tensor(losses, tf.float32)
        self.loss = LossOfStep(losses, losses)

    def _norms_of(self, k, scale, shift):
        rows = self._rows[k]
        rows = rows if shift is None else rows + shift
        rows = rows if scale is None else rows * scale
        return tf.reduce_sum(tf.reshape(rows**2, [tf.shape(rows)[0], -1]), axis=1)

    def _sum_of(self, k, weights):
        rows = self._rows[k]
        return tf.tensordot(weights, tf.where(tf.math.is_finite(rows), rows, 0.0), axes=1)


def add_variable(shape, dtype=None, name=None):
    """As `tf.keras.optimizers.Optimizer.add_variable`, without an optimizer."""
    return tf.Variable(tf.zeros(shape, dtype or tf.float32), name=name, trainable=False)


def make_mechanism(**kwargs) -> GaussianMechanism:
    """A mechanism without noise that clips to 1, unless said otherwise."""
    arguments = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 0.0,
        "num_microbatches": None,
        "expected_batch_size": None,
        "clipping": "flat",
        "gradient_accumulation_steps": 1,
        "secure_noise": False,
        "seed": None,
        "add_variable": add_variable,
    }
    return GaussianMechanism(**{**arguments, **kwargs})


def release(mechanism: GaussianMechanism, *rows, mode: str = "eager", **kwargs) -> list[np.ndarray]:
    """What the mechanism makes of a batch with these gradients."""

    def step(*rows):
        return mechanism.release(Rows(*rows), tf.shape(rows[0])[0], **kwargs)

    rows = [np.asarray(r, "float32") for r in rows]
    return [g.numpy() for g in in_mode(mode, step, rows)(*rows)]
