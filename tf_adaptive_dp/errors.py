"""Errors of the library. Each is the built-in error that fits as well, so either can be caught."""

from __future__ import annotations


class NotPrivateError(ValueError):
    """What was asked for would void the privacy guarantee, so nothing was done."""

    # AutoGraph re-raises errors of compiled functions with their own type only for this `__init__`.
    __init__ = Exception.__init__


class BudgetExceededError(RuntimeError):
    """The privacy budget has no room for one more release."""

    __init__ = Exception.__init__
