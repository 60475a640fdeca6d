"""Finds the folders of data sets on this machine."""

from __future__ import annotations

import os
import pathlib

from tf_adaptive_dp import checks


def folder(name: str, value: str | None, variable: str, how: str) -> pathlib.Path:
    """The folder of a data set.

    Args:
      name: the name of the caller's argument, for the error.
      value: the value of that argument; `None` takes the environment's `variable`.
      variable: the environment variable to fall back to.
      how: what the folder must hold and how to get it, for the error.

    Raises:
      TypeError: if `value` is neither a path nor `None`.
      FileNotFoundError: if neither names a folder that exists.
    """
    if value is not None:
        checks.path(name, value)
    path = value or os.environ.get(variable)
    if not path or not pathlib.Path(path).is_dir():
        raise FileNotFoundError(
            f"`{name}` or the environment's {variable} must name a folder that exists. {how} "
            f"Received: {path!r}"
        )
    return pathlib.Path(path)
