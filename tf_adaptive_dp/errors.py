"""Errors of the library. Each also is a built-in error, so callers can catch either."""

from __future__ import annotations


class NotPrivateError(ValueError):
    """The request would void the privacy guarantee, so nothing was done."""

    # AutoGraph keeps the type of an error that it re-raises only if it has this `__init__`.
    __init__ = Exception.__init__


class BudgetExceededError(RuntimeError):
    """The privacy budget has no room for one more release."""

    __init__ = Exception.__init__
