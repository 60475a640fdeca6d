"""Which Keras the library works on; its modules import `keras` from here.

It is the Keras that `tf.keras` is. TensorFlow 2.14 has Keras 2. Later releases have Keras 3, or
Keras 2 as the package `tf_keras` if the environment variable `TF_USE_LEGACY_KERAS=1` asks for it.
"""

from __future__ import annotations

import importlib
import os
import types
from importlib import metadata

import tensorflow as tf

__all__ = ["GENERATION", "PACKAGE", "internal_module", "keras", "keras_version"]

_OTHER_BACKEND = (
    "tf_adaptive_dp needs the TensorFlow backend of Keras 3. Received: {!r}. Set the environment "
    "variable KERAS_BACKEND=tensorflow before Python starts, or `backend` in ~/.keras/keras.json."
)

try:
    # Keras 2 does not say its version here.
    GENERATION = 3 if getattr(tf.keras, "__version__", "2").startswith("3.") else 2
except ImportError as error:  # of Keras 3, as when its backend is not installed
    asked_for = os.environ.get("KERAS_BACKEND", "tensorflow")
    if asked_for == "tensorflow":
        raise
    raise ImportError(_OTHER_BACKEND.format(asked_for)) from error

if GENERATION == 3:
    import keras  # `tf.keras` lacks some of its modules

    if keras.backend.backend() != "tensorflow":
        raise ImportError(_OTHER_BACKEND.format(keras.backend.backend()))
else:
    keras = tf.keras

# "keras" or "tf_keras".
PACKAGE = keras.Model.__module__.partition(".")[0]


def keras_version() -> str:
    """The version of the Keras in use; that of TensorFlow 2.14 does not say its own."""
    return metadata.version(PACKAGE)


def internal_module(name: str) -> types.ModuleType:
    """A module of Keras that is not part of its public API.

    Args:
      name: its name in the folder of Keras's sources, such as `"backend"`.
    """
    return importlib.import_module(f"{PACKAGE}.src.{name}")
