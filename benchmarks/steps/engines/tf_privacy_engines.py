"""The same Keras models, made private by TF Privacy in its several ways."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry

from benchmarks.steps import problems
from benchmarks.steps.engines.keras_models import build, loss
from benchmarks.steps.engines.tensorflow_engines import MEAN, PRIVATE, RATE
from benchmarks.steps.protocol import NotSupportedError


def compiled_model(
    engine: str, problem: problems.Problem, width: int, data: tf.data.Dataset
) -> tf.keras.Model:
    """The model, compiled as TF Privacy's documentation says.

    Args:
      engine: a name of `catalogue.ENGINES` that begins with "tfp_".
      problem: the problem.
      width: factor of the hidden sizes.
      data: not used.

    Raises:
      NotSupportedError: if fast clipping does not know a layer; the model would train all the
        same, but in the slow way.
    """
    if engine == "tfp_vectorized":
        model = build(problem, width)
        optimizer = tensorflow_privacy.VectorizedDPKerasSGDOptimizer(learning_rate=RATE, **PRIVATE)
        model.compile(optimizer, loss(problem, "none"))
        return model
    fast = engine == "tfp_fast"
    model = build(
        problem,
        width,
        tensorflow_privacy.DPModel,
        use_xla=engine == "tfp_model",
        layer_registry=layer_registry.make_default_layer_registry() if fast else None,
        **PRIVATE,
    )
    if fast and not model._enable_fast_peg_computation:
        raise NotSupportedError("fast clipping knows Dense and Embedding layers only")
    model.compile(tf.keras.optimizers.SGD(RATE), loss(problem, MEAN))
    return model
