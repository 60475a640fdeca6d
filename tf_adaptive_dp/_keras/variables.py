"""How variables are made and found beneath the public API of TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, keras

# A `tf.function` that makes variables in its first trace is traced again without making them.
# Variables with this argument, made in an init scope, do not count.
_UNCOUNTED = {"experimental_enable_variable_lifting": False}


@contextlib.contextmanager
def uncounted_variables() -> Iterator[None]:
    """Makes variables that the `tf.function` being traced does not count as its own.

    Otherwise TensorFlow would trace the function a second time after the first call. A model that
    creates other variables in its first step still causes that.
    """
    with tf.init_scope(), tf.variable_creator_scope(_make_uncounted):
        yield


def _make_uncounted(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    return next_creator(**{**kwargs, **_UNCOUNTED})


def local_copies(variable: tf.Variable) -> list[tf.Variable]:
    """The copies that a distribution strategy keeps of a variable; without one, itself."""
    return list(getattr(variable, "values", [variable]))


def value_of(variable: Any) -> np.ndarray:
    """The value of a variable, which the `tf.function` being traced does not note as one it reads.

    TensorFlow notes such variables even if they are read outside of the trace, without keeping
    them, and the function fails once one of them is gone, such as that of an earlier optimizer.
    """
    variable = native(variable)
    # Nothing is traced in eager mode, and in an init scope a read takes twice as long.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope():
        if hasattr(variable, "values"):  # of a distribution strategy, which combines its copies
            return variable.numpy()
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        return read.numpy()


def handle_of(variable: tf.Variable) -> tf.Tensor:
    """What raw operations know a variable by: the handle of the copy on this replica."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return variable.handle
    return local_copies(variable)[0].handle


def has_autocast(variable: Any) -> bool:
    """Whether a layer with a mixed-precision policy casts the variable wherever it is read."""
    return hasattr(variable, "true_dtype")


def native(variable: Any) -> tf.Variable:
    """The `tf.Variable` inside a variable of Keras 3; any other variable as it is."""
    return variable.value if GENERATION == 3 and isinstance(variable, keras.Variable) else variable


def dense_gradients(
    tape: tf.GradientTape, loss: tf.Tensor, variables: Iterable[Any]
) -> list[tf.Tensor]:
    """The gradients of a loss, dense ones, and zero for variables that it does not depend on."""
    # TensorFlow makes zeros only for its own variables, not for those of Keras 3.
    own = [native(v) for v in variables]
    gradients = tape.gradient(loss, own, unconnected_gradients="zero")
    return [tf.convert_to_tensor(g) for g in gradients]


def path_of(variable: Any) -> str:
    """The name of a variable after those of the layers around it, as "dense/kernel".

    In Keras 3 it is `variable.path`. The name of the `tf.Variable` inside can lack the layer.
    """
    if GENERATION == 3 and isinstance(variable, keras.Variable):
        return variable.path
    return variable.name.split(":")[0]


def layer_path_of(variable: Any) -> str:
    """The path of the layer that a variable belongs to; its own if it belongs to none."""
    path = path_of(variable)
    return path.rpartition("/")[0] or path


def paths_named(name: str, paths: Iterable[str]) -> list[str]:
    """The paths that a name can mean.

    Keras 3 prepends the name of a Sequential or subclassed model, which it numbers.

    Args:
      name: a path or its last parts, as "kernel" or "dense/kernel".
      paths: of variables or layers.

    Returns:
      The path of that name, or else all paths that end with it, each once.
    """
    distinct = list(dict.fromkeys(paths))
    return [name] if name in distinct else [p for p in distinct if p.endswith(f"/{name}")]
