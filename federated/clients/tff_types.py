"""Models and optimizers must be TFF's; for those of Keras, errors show what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

_OURS = {"ADADP": "federated.build_adadp()", "AdaDPS": "federated.build_adadps(A)"}


def check_optimizer(name: str, value: Any) -> None:
    """Checks that an optimizer is one of TFF's.

    Args:
      name: the argument.
      value: what was passed for it.

    Raises:
      TypeError: if it is something else. For an optimizer of Keras the error shows TFF's.
    """
    if isinstance(value, tff.learning.optimizers.Optimizer):
        return
    kind = value if isinstance(value, type) else type(value)
    cure = ", such as `tff.learning.optimizers.build_sgdm(1.0)`"
    if callable(value) and not isinstance(value, type):
        cure += "; pass the optimizer itself, not a function that returns it"
    if issubclass(kind, tf.keras.optimizers.Optimizer):
        cure = f"; Keras's optimizers do not run in TFF. Write: {name}={_of_tff(kind.__name__)}"
    raise TypeError(
        f"`{name}` must be a `tff.learning.optimizers.Optimizer`{cure}. Received: {name}={value!r}"
    )


def _of_tff(keras_name: str) -> str:
    """The call that makes TFF's counterpart of a Keras optimizer of that name."""
    if keras_name in _OURS:
        return _OURS[keras_name]
    builder = f"build_{keras_name.lower()}"
    if not hasattr(tff.learning.optimizers, builder):
        builder = "build_sgdm"
    return f"tff.learning.optimizers.{builder}(learning_rate=...)"


def made_model(model_fn: Any) -> Any:
    """Makes the model, and checks that it is one of TFF's.

    Args:
      model_fn: a function that makes a `tff.learning.models.VariableModel`, or a
        `tff.learning.models.FunctionalModel`.

    Returns:
      The new `VariableModel`, in the default graph, or the `FunctionalModel` itself.

    Raises:
      TypeError: if it is something else. For a Keras model the error shows how to wrap it.
    """
    if isinstance(model_fn, tff.learning.models.FunctionalModel):
        return model_fn
    if isinstance(model_fn, (tf.keras.Model, tff.learning.models.VariableModel)):
        raise _refused(model_fn, model_fn)
    if not callable(model_fn):
        raise _refused(model_fn, None)
    made = model_fn()
    if not isinstance(made, tff.learning.models.VariableModel):
        raise _refused(model_fn, made)
    return made


def _refused(model_fn: Callable | Any, made: Any) -> TypeError:
    cure = ""
    if isinstance(made, tf.keras.Model):
        cure = (
            " For a Keras model, pass a function that makes a new one and compiles it with its "
            "loss and metrics, and `input_spec=client_data.element_type_structure`. Or let it "
            "return `tff.learning.models.from_keras_model(new_keras_model(), loss=..., "
            "input_spec=...)`, where the new model is not compiled."
        )
    found = "" if made is None or made is model_fn else f", which returned {made!r}"
    return TypeError(
        "`model_fn` must be a function that makes a `tff.learning.models.VariableModel` or a "
        "compiled Keras model, or a `tff.learning.models.FunctionalModel`."
        f"{cure} Received: model_fn={model_fn!r}{found}"
    )
