"""Checks of arguments. Their errors name the argument and the value received."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from tf_adaptive_dp._keras.models import tunes_steps_per_call


def number(name: str, value: Any, minimum: float, *, strict: bool = False) -> float:
    """Returns `value` as a float, or raises.

    Args:
      name: the argument's name, for the message.
      value: what the caller passed.
      minimum: the smallest number allowed.
      strict: whether `minimum` itself is not allowed either.

    Raises:
      TypeError: if `value` is not a number.
      ValueError: if it is NaN, infinite or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    if not math.isfinite(value) or value < minimum or (strict and value == minimum):
        bound = "greater than" if strict else "at least"
        raise ValueError(
            f"`{name}` must be finite and {bound} {minimum:g}. Received: {name}={value!r}"
        )
    return float(value)


def integer(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as an int, or raises.

    Raises:
      TypeError: if `value` is not a whole number.
      ValueError: if it is below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a whole number. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}. Received: {name}={value!r}")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, or raises TypeError if it is neither true nor false."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Received: {name}={value!r}")
    return value


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns `value`, or raises if it is none of `choices`.

    Raises:
      ValueError: if it is not.
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"`{name}` must be one of {listed}. Received: {name}={value!r}")
    return value


def fixed_steps_per_call(model: Any) -> None:
    """Raises ValueError if Keras may change how many steps one call of a model makes."""
    if tunes_steps_per_call(model):
        raise ValueError(
            "The number of steps per call must be known in advance. Received: a model with "
            "enable_tune_steps_per_execution=True, which lets a thread change it at any time. "
            "Pass a number as `steps_per_execution`."
        )
