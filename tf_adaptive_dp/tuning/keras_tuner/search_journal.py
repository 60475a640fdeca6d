"""The journal of a search: its draws and the trials it began, whatever ends the process."""

from __future__ import annotations

import os
from typing import Any

from tf_adaptive_dp.durable import journal


def compare(before: dict, now: dict, where: str) -> None:
    """Raises ValueError if arguments changed since a search began, and names them."""
    journal.compare(
        before,
        now,
        "The project holds a search with other arguments. Nothing was changed. Pass the arguments "
        "of that search to resume it, or a new `project_name`; what that search spent stays spent.",
        where,
    )


class SearchJournal(journal.Journal):
    """The draws of a search and the trials that it began and ended, in an append-only file.

    The first line holds the arguments of the search, its noise and its draws. Each trial, in the
    order of the draws, then adds a line when it begins and another when it ends. The line of the
    first trial also describes the models of all candidates; older journals lack this.

    Guarantee: that of `tf_adaptive_dp.durable.journal.Journal`. Draws are secret.

    Attributes:
      search: the arguments of the search; `None` before `begin`.
      models: the structure of the candidates' models, by the JSON of their values; `None` if it is
        unknown.
      begun: number of trials that began.
      resumed: number of times that the last of these was resumed in another process.
      ended: the outcomes of the trials that ended.
    """

    _OWNER = "The search's folder"
    _IN_USE = (
        "The search is in progress in another process, or in another call of this one. End the "
        "other one, or give this search its own `project_name`."
    )
    _REFUSED = (
        "The file is not the journal of a search, or it is damaged: it does not show what was "
        "spent."
    )

    def __init__(self, path: str | os.PathLike):
        """Opens the journal of a project, or creates an empty one.

        Args:
          path: the path of the file; its folder must exist.

        Raises:
          RuntimeError: if it is already open, here or in another process.
          ValueError: if the file is something else or damaged; it is not changed.
        """
        self.search: dict | None = None
        self._drawn: dict[str, Any] | None = None
        self.models: dict | None = None
        self.begun, self.resumed = 0, 0
        self.ended: list[dict[str, Any]] = []
        super().__init__(path, b'{"plan": ')

    @property
    def drawn(self) -> dict[str, Any]:
        """The noise of a search that has begun, its draws, and what else was chosen once."""
        if self._drawn is None:
            raise ValueError("The search has not begun.")
        return self._drawn

    def _may_follow(self, entry: dict) -> bool:
        if self.search is None:
            return set(entry) == {"search", "plan"}
        in_progress = self.begun == len(self.ended) + 1
        if set(entry) == {"begun"} or (set(entry) == {"begun", "models"} and not self.begun):
            is_next = entry["begun"] == self.begun + 1 <= len(self.drawn["draws"])
            return is_next and not in_progress
        if set(entry) == {"resumed"}:
            return in_progress and entry["resumed"] == self.begun
        return set(entry) == {"ended", "outcome"} and in_progress and entry["ended"] == self.begun

    def _follow(self, entry: dict) -> None:
        if "search" in entry:
            self.search, self._drawn = entry["search"], entry["plan"]
        elif "begun" in entry:
            self.begun, self.resumed = entry["begun"], 0
            self.models = entry.get("models", self.models)
        elif "resumed" in entry:
            self.resumed += 1
        else:
            self.ended.append(entry["outcome"])

    def begin(self, search: dict[str, Any], drawn: dict[str, Any]) -> None:
        """Records the search and its draws, before any trial.

        Args:
          search: everything that must stay the same when the search is resumed; plain JSON.
          drawn: `draws`, a list with one entry per trial, and everything else that was chosen once.
        """
        self._append({"search": search, "plan": drawn})

    def note_begun(self, models: dict[str, Any] | None = None) -> None:
        """Records that the next trial begins, before it spends anything.

        Args:
          models: with the first trial, the structure of all candidates' models; plain JSON.
        """
        noted = {} if models is None else {"models": models}
        self._append({"begun": self.begun + 1, **noted})

    def note_resumed(self) -> None:
        """Records that the trial in progress is resumed, before it spends anything more."""
        self._append({"resumed": self.begun})

    def note_ended(self, outcome: dict[str, Any]) -> None:
        """Records how the trial in progress ended; plain JSON."""
        self._append({"ended": self.begun, "outcome": outcome})
