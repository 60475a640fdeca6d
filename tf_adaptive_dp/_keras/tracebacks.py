"""Short tracebacks: an error about a user's model should not be buried in the library's frames."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import tensorflow as tf

from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.errors import NotPrivateError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def short_traceback(function: _Function) -> _Function:
    """Leaves out the frames beneath a function from the traceback of a `NotPrivateError`.

    `keras.config.disable_traceback_filtering()` in Keras 3, and
    `tf.debugging.disable_traceback_filtering()` in Keras 2, show them, as they show Keras's own.

    Args:
      function: one that users or Keras call.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotPrivateError as error:
            if not _is_filtering():
                raise
            found = error.with_traceback(None)
        raise found

    return wrapped  # type: ignore[return-value]


def _is_filtering() -> bool:
    settings = keras.config if GENERATION == 3 else tf.debugging
    return settings.is_traceback_filtering_enabled()
