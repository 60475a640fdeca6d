"""Whether a loss was computed in half precision, whose gradients may vanish without a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.graphs import ancestors, bodies, is_symbolic
from tf_adaptive_dp._keras.variables import has_autocast


def may_vanish(loss: tf.Tensor, variables: Sequence[Any]) -> bool:
    """Whether gradients of a loss may be too small for the type that they are computed in.

    Keras 2 marks the variables of layers with a mixed-precision policy, that of bfloat16 too, for
    which a scale changes nothing. In Keras 3 the graph of the loss tells; under eager execution
    only the global policy can.

    Args:
      loss: the loss to differentiate.
      variables: the variables to differentiate with respect to.
    """
    if GENERATION == 2:
        return any(map(has_autocast, variables))
    if is_symbolic(loss):
        return _computes_in_half(ancestors([loss]))
    of_keras = any(isinstance(v, keras.Variable) for v in variables)
    return of_keras and keras.config.dtype_policy().compute_dtype == "float16"


def _computes_in_half(operations: Sequence[tf.Operation]) -> bool:
    """Whether an operation, or one in a function that it runs, returns numbers in float16."""
    return any(
        any(output.dtype.base_dtype == tf.float16 for output in op.outputs)
        or any(_computes_in_half(body.get_operations()) for body in bodies(op).values())
        for op in operations
    )
