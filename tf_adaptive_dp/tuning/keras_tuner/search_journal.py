"""A search on disk: what was drawn and which trials were begun is known, however it ends."""

from __future__ import annotations

import os
from typing import Any

from tf_adaptive_dp.durable import journal


def compare(before: dict, now: dict, where: str) -> None:
    """Raises ValueError, which names them, if arguments differ from those that a search had."""
    journal.compare(
        before,
        now,
        "The project holds a search with other arguments. Nothing was changed. Pass the arguments "
        "of that search to go on with it, or a new `project_name`; what that search spent is "
        "spent.",
        where,
    )


class Journal(journal.Journal):
    """What a search drew, and the trials that it began and ended, in a file that only grows.

    The first line holds the arguments of the search, its noise and its draws; then each trial, in
    the order of the draws, has a line when it begins and one when it ends. When the first one
    begins, the models of all candidates are noted as well; older journals lack them.

    Guarantee: that of `tf_adaptive_dp.durable.journal.Journal`. Draws are secret.

    Attributes:
      search: the arguments of the search, `None` before `begin`.
      plan: its noise and its draws, `None` before `begin`.
      models: what the candidates' models are made of, by the JSON of their values; `None` if that
        is not known.
      begun: how many trials were begun.
      resumed: how many times the last of these was gone on with in another process.
      ended: the outcomes of the trials that ended.
    """

    _IN_USE = (
        "The search is in progress in another process, or in another call of this one. End that "
        "one, or give this search a `project_name` of its own."
    )
    _REFUSED = (
        "The file is no journal of a search, or it is damaged: what was spent cannot be told from "
        "it."
    )

    def __init__(self, path: str | os.PathLike):
        """Opens the journal of a project, or creates an empty one.

        Args:
          path: of the file; its folder exists.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if it is something else, or damaged; it is left as it was.
        """
        self.search: dict | None = None
        self.plan: dict[str, Any] | None = None
        self.models: dict | None = None
        self.begun, self.resumed = 0, 0
        self.ended: list[dict[str, Any]] = []
        super().__init__(path, b'{"plan": ')

    @property
    def drawn(self) -> dict[str, Any]:
        """The plan of a search that has begun."""
        if self.plan is None:
            raise ValueError("The search has not begun.")
        return self.plan

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
            self.search, self.plan = entry["search"], entry["plan"]
        elif "begun" in entry:
            self.begun, self.resumed = entry["begun"], 0
            self.models = entry.get("models", self.models)
        elif "resumed" in entry:
            self.resumed += 1
        else:
            self.ended.append(entry["outcome"])

    def begin(self, search: dict[str, Any], plan: dict[str, Any]) -> None:
        """Notes what the search is and what it drew, before any trial.

        Args:
          search: what has to be the same whenever the search goes on; plain JSON.
          plan: `draws`, a list with an entry a trial, and what else was chosen once.
        """
        self._append({"search": search, "plan": plan})

    def note_begun(self, models: dict[str, Any] | None = None) -> None:
        """Notes that the next trial begins, before it spends anything.

        Args:
          models: with the first trial, what the models of all candidates are made of; plain JSON.
        """
        noted = {} if models is None else {"models": models}
        self._append({"begun": self.begun + 1, **noted})

    def note_resumed(self) -> None:
        """Notes that the trial in progress is gone on with, before it spends any more."""
        self._append({"resumed": self.begun})

    def note_ended(self, outcome: dict[str, Any]) -> None:
        """Notes how the trial in progress ended; plain JSON."""
        self._append({"ended": self.begun, "outcome": outcome})
