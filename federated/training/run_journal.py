"""The journal of a run's rounds on disk, which survives any end of the process."""

from __future__ import annotations

import json
import os
from typing import Any

from tf_adaptive_dp.durable import journal

_OTHER_STATE = (
    "The states of the run in this directory have another form than those of the process. Either "
    "the model or an optimizer differs, or an earlier version of this library began the run with "
    "mechanism='tree', whose states this version cannot read. Nothing was changed. Resume it with "
    "the arguments and the version that began it, or begin a new run in another directory, with "
    "the `ledger` of this one if the users are the same."
)


class RunJournal(journal.Journal):
    """The rounds of one run that were begun and released, in a file that only grows.

    The first line describes the run, the next one has the hash of the sampler's key, and each other
    line records that a round was begun or released, that another cohort is to be drawn, that the
    caller's own code drew one, or that a release was not as stated. Rounds are numbered 1, 2, … in
    the order in which they begin; a number is never used twice.

    Guarantee: that of `tf_adaptive_dp.durable.journal.Journal`. `federated.training.program`
    compares the journal with the saved states, in case its last lines were lost.

    Attributes:
      run: the description of the run.
      begun: the number of the last round that was begun; 0 if there was none.
      released: the number of the last round whose figures went to the release managers.
      contradicted: the number of a round that did not release what its privacy says; 0 without one.
      redrawn: the rounds whose cohorts were given up because too few clients were left.
      drawn_by_caller: the rounds whose cohorts a sampler of the caller's drew, noted before they
        begin.
      sampler_key: the hash of the sampler's key; `None` if it was not noted yet.
    """

    _OWNER = "The run's directory"
    _IN_USE = (
        "The run is in progress in another process, or in another call of this one. End the other "
        "one, or give this run its own directory."
    )
    _REFUSED = (
        "The file is not a journal, or it is damaged: it does not show how many rounds were begun."
    )

    def __init__(self, path: str | os.PathLike, run: dict[str, Any]):
        """Opens the journal of a run, or creates it.

        Args:
          path: the file; its folder exists.
          run: JSON values that must be the same whenever the run resumes.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if the file is not a journal, is damaged, or belongs to another run. It is
            left unchanged.
        """
        self.run = json.loads(json.dumps(run))
        self.begun = self.released = self.contradicted = 0
        self.redrawn: list[int] = []
        self.drawn_by_caller: list[int] = []
        self.sampler_key: str | None = None
        # Without the last brace, since the base class writes more into this line.
        super().__init__(path, json.dumps({"run": self.run}, sort_keys=True)[:-1].encode())

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
                self._compare_states(value)
                journal.compare(
                    value,
                    self.run,
                    "The directory holds a run with other arguments. Nothing was changed. Pass the "
                    "arguments of that run to continue it, or a new directory.",
                    repr(str(self._path)),
                )
            return event == "run"
        if event == "sampler_key":
            return self.sampler_key is None and isinstance(value, str)
        if event in ("begun", "drawn_by_caller"):
            return value == self.begun + 1
        if event == "contradicted":
            return value == self.begun > self.contradicted
        if event == "redrawn":
            return value == self.begun and value not in self.redrawn
        return event == "released" and self.released <= value <= self.begun

    def _compare_states(self, before: dict) -> None:
        """Raises ValueError if the state is all that differs; the error names the leaves."""
        if any(before.get(key) != self.run.get(key) for key in {*before, *self.run} - {"state"}):
            return
        was, now = before.get("state", []), self.run.get("state", [])
        if was != now:
            gone = [leaf for leaf in was if leaf not in now]
            new = [leaf for leaf in now if leaf not in was]
            raise ValueError(
                f"{_OTHER_STATE} Received: {str(self._path)!r}, which has {gone} in place of {new}"
            )

    def _follow(self, entry: dict) -> None:
        ((event, value),) = entry.items()
        if event in ("redrawn", "drawn_by_caller"):
            getattr(self, event).append(value)
        else:
            setattr(self, event, value)

    def note_sampler_key(self, digest: str) -> None:
        """Records the hash of the sampler's key, once.

        Guarantee: that of the class.

        Raises:
          ValueError: if one is recorded already.
          OSError: if it cannot be written; then it was not recorded.
        """
        self._append({"sampler_key": digest})

    def note(self, event: str, number: int) -> None:
        """Records that a round was begun, released, and so on; see the class.

        Guarantee: that of the class.

        Args:
          event: `"drawn_by_caller"`, `"begun"`, `"released"`, `"redrawn"` or `"contradicted"`.
          number: the number of the round.

        Raises:
          ValueError: if this event cannot follow the recorded ones.
          OSError: if it cannot be written; then it was not recorded.
        """
        if not self._may_follow({event: number}):
            raise ValueError(
                f"Round {number} cannot be {event} now. Received: begun={self.begun}, "
                f"released={self.released}, redrawn={self.redrawn}"
            )
        self._append({event: number})
