"""Where the data of the experiments lie."""

from __future__ import annotations

import os
import pathlib


def folder(data_dir: str | None, variable: str, what: str) -> pathlib.Path:
    """The folder of some data.

    Args:
      data_dir: as given on the command line.
      variable: the environment variable that stands in for it.
      what: what is looked for and how to get it, for the error.

    Raises:
      FileNotFoundError: if neither names a folder that exists.
    """
    path = data_dir or os.environ.get(variable)
    if not path or not pathlib.Path(path).is_dir():
        raise FileNotFoundError(
            f"`--data_dir` or the environment's {variable} must name a folder with {what}. "
            f"Received: {path!r}"
        )
    return pathlib.Path(path)
