"""Errors and warnings that show the user's code, not what surrounds it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import traceback
import types
from collections.abc import Iterator
from typing import Any, Callable, TypeVar

import tensorflow as tf
from tensorflow.python.util import tf_stack

from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.errors import NotPrivateError

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Keras lists the arguments of a call behind its message, and Keras 3 prints the message in bold.
_ARGUMENTS = re.compile("(?:Call a|A)rguments received by")
_BOLD = re.compile(r"\x1b\[\d*m")
# How Keras begins the message of an error that a layer raised.
_OF_A_LAYER = "Exception encountered when calling"
# Behind this Keras 3 repeats what a layer raised while its output's shape was inferred.
_ENCOUNTERED = "Error encountered:"
# The name of the operations by which this library checks a step while it runs.
CHECK = "check_of_private_step"
# What TensorFlow says of such a check that failed.
_FAILED_CHECK = re.compile(
    rf"assertion failed: \[(.*?)\]\s*\[\[\{{\{{node [^}}]*{CHECK}", re.DOTALL
)
# The packages between a warning and the user's line: this one, and what calls it or its functions.
_BETWEEN = {__name__.split(".")[0], "contextlib", "keras", "keras_tuner", "tensorflow", "tf_keras"}


def short_traceback(function: _Function) -> _Function:
    """Leaves out the frames beneath a function from the traceback of an error of this library.

    These are each `NotPrivateError`, and other errors that say what was received.

    `keras.config.disable_traceback_filtering()` in Keras 3, and
    `tf.debugging.disable_traceback_filtering()` in Keras 2, show them, as they show Keras's own.

    Args:
      function: one that users or Keras call.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (NotPrivateError, TypeError, ValueError) as error:
            is_own = isinstance(error, NotPrivateError) or "Received: " in str(error)
            if not is_own or not is_filtering():
                raise
            found = error.with_traceback(None)
        raise found

    return wrapped  # type: ignore[return-value]


@contextlib.contextmanager
def short_assertions() -> Iterator[None]:
    """Leaves out TensorFlow's way to a check of this library that fails while a step runs.

    What shows it is what shows the frames that `short_traceback` leaves out.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        failed = _FAILED_CHECK.search(error.message)
        if failed is None or not is_filtering():
            raise
        message = failed[1].replace("] [", " ")
        raise tf.errors.InvalidArgumentError(error.node_def, error.op, message) from None


class UsersLine(tf_stack.StackTraceFilter):
    """Within it, TensorFlow notes of an operation the user's line alone, such as that of `fit`.

    TensorFlow shows what it noted above the message of an operation that fails in a step. What
    shows the other lines is what shows the frames that `short_traceback` leaves out.
    """

    def get_filtered_filenames(self) -> set[str]:
        """The files whose lines are left out; TensorFlow calls it."""
        if not is_filtering():
            return set()
        frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
        of_user = next((f for f in frames if not _is_between(f)), frames[-1])
        return {f.f_code.co_filename for f in frames} - {of_user.f_code.co_filename}


def level_of_caller() -> int:
    """The `stacklevel` with which a function warns of the user's line, such as that of `fit`.

    It is for functions that are called by users and by other parts of the library, and for those
    that Keras and TensorFlow call while a step is traced.
    """
    here = inspect.currentframe()
    level, frame = 1, here and here.f_back
    while frame and frame.f_back and _is_between(frame):
        level, frame = level + 1, frame.f_back
    return level


def message_lines(error: Exception) -> list[str]:
    """The lines of an error's message, without the arguments that Keras lists behind it.

    Args:
      error: what a user's model raised while it was traced.
    """
    message = _ARGUMENTS.split(_BOLD.sub("", str(error)))[0]
    return [line.strip() for line in message.splitlines() if line.strip()]


def raised(error: Exception) -> str:
    """The type of an error and the line of its message that says most.

    AutoGraph puts the way to the place where it was raised before the message, and Keras the layer.

    Args:
      error: see `message_lines`.
    """
    kind, lines = type(error).__name__, message_lines(error)
    for place, line in reversed(list(enumerate(lines))):
        before, is_named, message = line.partition("Error: ")
        if is_named:
            kind, lines = f"{before}Error", [message, *lines[place + 1 :]]
            break
    said = [line for line in lines if not line.startswith(_OF_A_LAYER)]
    if len(said) > 1 and said[0].endswith(_ENCOUNTERED):
        return f"{kind}: {said[0]} {said[1]}"
    return f"{kind}: {said[0] if said else ''}"


def _is_between(frame: types.FrameType) -> bool:
    """Whether a frame belongs to one of these packages, or to AutoGraph's copy of a function."""
    package, _, _ = frame.f_globals.get("__name__", "").partition(".")
    return package in _BETWEEN or "__autograph_generated_file" in frame.f_code.co_filename


def is_filtering() -> bool:
    """Whether Keras leaves its own frames out of tracebacks, which is its default."""
    settings = keras.config if GENERATION == 3 else tf.debugging
    return settings.is_traceback_filtering_enabled()
