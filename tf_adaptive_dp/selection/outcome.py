"""The outcomes of trials: which one wins, which may be shown, and the file that keeps them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_adaptive_dp.privacy import files

Outcome = dict[str, Any]

# Names of TensorFlow's functions, which end with a number of the process.
_NUMBERED = re.compile(r"(__(?:inference|forward|backward)_\w*?|_(?:true|false|body|cond))_\d+\b")


def best(outcomes: Sequence[Outcome], direction: str) -> int | None:
    """The position of the winner; `None` if no outcome has a score.

    Of equal scores the first one wins, which among independent trials is the same as a random one.

    Args:
      outcomes: in the order of the trials; `score` is `None` for a crash or a score not finite.
      direction: `"max"` or `"min"`.
    """
    sign = 1 if direction == "max" else -1
    scored = [(sign * o["score"], -i) for i, o in enumerate(outcomes) if o["score"] is not None]
    return -max(scored)[1] if scored else None


def ranked(outcomes: Sequence[Outcome], direction: str) -> list[Outcome]:
    """From the best to the worst; those without a score last."""
    sign = 1 if direction == "max" else -1
    return sorted(outcomes, key=lambda o: (o["score"] is None, -sign * (o["score"] or 0)))


class Result:
    """What a finished search shows, in a file that is there as soon as the search is over."""

    def __init__(self, folder: str | os.PathLike):
        """Looks for the result of the project in a folder."""
        self._path = Path(folder) / "result.json"
        self._content: dict | None = None
        if self._path.exists():
            self._content = json.loads(self._path.read_text(encoding="utf-8"))

    @property
    def is_there(self) -> bool:
        """Whether the search is finished."""
        return self._content is not None

    def write(self, **content: Any) -> None:
        """Finishes the search: from now on it is never gone on with."""
        files.write(self._path, json.dumps(content, indent=1).encode())
        self._content = json.loads(json.dumps(content))

    def __getitem__(self, name: str) -> Any:
        if self._content is None:
            raise RuntimeError(
                "The search is not finished: call `search(...)` first, or again if it was "
                "interrupted."
            )
        return self._content[name]

    def shown(self) -> list[Outcome]:
        """The outcomes that may be shown, the best first.

        Raises:
          RuntimeError: if the search is not finished, or nothing came of it.
        """
        if self["failure"]:
            raise RuntimeError(self["failure"])
        return self["shown"]


def failure(outcomes: Sequence[Outcome], *, is_all: bool) -> str:
    """What to tell the user if no trial has a score.

    Args:
      outcomes: in the order of the trials.
      is_all: whether all may be shown. If not, the text is that of the first error, without the
        numbers that TensorFlow gives to functions: it does not tell how many trials there were.
    """
    if not outcomes:
        return (
            "The strategy drew no trial at all, as its law allows, so there is no winner. The "
            "budget is spent: another try is another search."
        )
    releases = sum(outcome["releases"] for outcome in outcomes)
    errors = [outcome["error"] for outcome in outcomes if outcome["error"]]
    spent = "Nothing was released." if not releases else "The budget is spent."
    which, error = ("last", errors[-1:]) if is_all else ("first", errors[:1])
    told = f"The {which} error, which may tell something of the data, was:\n{''.join(error)}"
    if not is_all:
        told = _NUMBERED.sub(r"\1", told)
    return (
        f"Every candidate crashed, or had a score that is not finite. {spent} Correct the model "
        f"and begin another search, with another `project_name`. {told if errors else ''}"
    )
