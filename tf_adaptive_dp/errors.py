"""Errors of the library. Each is also a built-in error, so callers can catch either."""

from __future__ import annotations


class NotPrivateError(ValueError):
    """The request would void the privacy guarantee, so nothing was done."""

    # AutoGraph passes an error with this attribute on as it is. It would put twenty lines of its
    # own before the message of any other.
    ag_pass_through = True


class BudgetExceededError(RuntimeError):
    """The privacy budget has no room for one more release."""

    ag_pass_through = True
