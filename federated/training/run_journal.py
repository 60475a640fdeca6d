"""A journal of a run's rounds on disk: what was begun is known, however the run ends."""

from __future__ import annotations

import json
import os
from typing import Any

from tf_adaptive_dp.durable import journal


class Journal(journal.Journal):
    """The rounds of one run that were begun and released, in a file that only grows.

    The first line describes the run; each other says that a round was begun, or released.
    Rounds are numbered 1, 2, … in the order in which they are begun; a number is never used twice.

    Guarantee: that of `tf_adaptive_dp.durable.journal.Journal`. `federated.training.program`
    compares the journal with the saved states, in case its last lines were lost.

    Attributes:
      run: the description.
      begun: the number of the last round that was begun, 0 if there was none.
      released: the number of the last round whose figures were given to the release managers.
    """

    _IN_USE = (
        "The run is in progress in another process, or in another call of this one. End that one, "
        "or give this run a directory of its own."
    )
    _REFUSED = (
        "The file is no journal, or it is damaged: how many rounds were begun cannot be told from "
        "it."
    )

    def __init__(self, path: str | os.PathLike, run: dict[str, Any]):
        """Opens the journal of a run, or begins it.

        Args:
          path: of the file; its folder exists.
          run: what has to be the same whenever the run goes on; plain JSON.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if it is something else, damaged, or of another run; it is left as it was.
        """
        self.run = json.loads(json.dumps(run))
        self.begun = self.released = 0
        super().__init__(path, journal.encoded({"run": self.run}))

    def _read(self, beginning: bytes) -> None:
        super()._read(beginning)
        if not self._end:
            self._append({"run": self.run})

    def _may_follow(self, entry: dict) -> bool:
        if len(entry) != 1:
            return False
        ((event, value),) = entry.items()
        if not self._end:
            if event == "run":
                journal.compare(
                    value,
                    self.run,
                    "The directory holds a run with other arguments. Nothing was changed. Pass the "
                    "arguments of that run to go on with it, or a new directory.",
                    repr(str(self._path)),
                )
            return event == "run"
        if event == "begun":
            return value == self.begun + 1
        return event == "released" and self.released <= value <= self.begun

    def _follow(self, entry: dict) -> None:
        ((event, value),) = entry.items()
        setattr(self, event, value)

    def note(self, event: str, number: int) -> None:
        """Notes that a round was begun, or released.

        Guarantee: that of the class.

        Args:
          event: `"begun"` or `"released"`.
          number: of the round.

        Raises:
          ValueError: if it cannot come after what was noted before.
          OSError: if it cannot be written; then it was not noted.
        """
        if not self._may_follow({event: number}):
            raise ValueError(
                f"Round {number} cannot be {event} now. Received: begun={self.begun}, "
                f"released={self.released}"
            )
        self._append({event: number})
