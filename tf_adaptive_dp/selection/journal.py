"""A search on disk: what was drawn and which trials were begun is known, however it ends."""

from __future__ import annotations

import json
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

from tf_adaptive_dp.privacy import release_log


def sync_folder(path: str | os.PathLike) -> None:
    """Waits until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_file(path: str | os.PathLike, text: str) -> None:
    """Writes a file that only its owner can read, whole or not at all, and waits for the disk."""
    path = Path(path)
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(file)
    unfinished.rename(path)
    sync_folder(path.parent)


def compare(before: dict, now: dict, where: str) -> None:
    """Raises ValueError, which names them, if arguments differ from those that a search had."""
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        differences = "; ".join(
            f"{key}: was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
        )
        raise ValueError(
            "The project holds a search with other arguments. Nothing was changed. Pass the "
            "arguments of that search to go on with it, or a new `project_name`; what that search "
            f"spent is spent. Changed: {differences}. Received: {where}"
        )


def _encoded(entry: dict) -> bytes:
    """One line of text with a checksum at its end."""
    text = json.dumps(entry, sort_keys=True).encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _decoded(line: bytes) -> dict | None:
    """The entry of a line without its end; `None` if the line is damaged."""
    text = line[:-9]
    return json.loads(text) if line[-9:] == b" %08x" % zlib.crc32(text) else None


class Journal:
    """What a search drew, and the trials that it began and ended, in a file that only grows.

    The first line holds the arguments of the search, its noise and its draws; then each trial, in
    the order of the draws, has a line when it begins and one when it ends.

    Guarantee: when a method has returned, its entry survives the end of the process by whatever
    signal, and that of the machine, as far as its disk keeps its word. An entry that was not
    finished is as if it had not been made. A file that is damaged otherwise is refused. One process
    at a time may have the file open, and only its owner can read it: draws are secret.

    Attributes:
      search: the arguments of the search, `None` before `begin`.
      plan: its noise and its draws, `None` before `begin`.
      begun: how many trials were begun.
      resumed: how many times the last of these was gone on with in another process.
      ended: the outcomes of the trials that ended.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens the journal of a project, or creates an empty one.

        Args:
          path: of the file; its folder exists.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if it is something else, or damaged; it is left as it was.
        """
        self._path = Path(path)
        self.search: dict | None = None
        self.plan: dict | None = None
        self.begun, self.resumed, self.ended = 0, 0, []
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            release_log.lock(
                self._file,
                "The search is in progress in another process, or in another call of this one. End "
                "that one, or give this search a `project_name` of its own. Received: "
                f"{str(self._path)!r}",
            )
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        size = os.fstat(self._file).st_size
        content = os.pread(self._file, size, 0)
        *lines, torn = content.split(b"\n")
        self._end = size - len(torn)
        if not lines and not b'{"plan": '.startswith(torn.rstrip(b"\0")[:9]):
            self._refuse(1)  # some other file, which is not to be written over
        for number, line in enumerate(lines, 1):
            entry = _decoded(line)
            if entry is None or not self._take(entry):
                self._refuse(number)

    def _take(self, entry: dict) -> bool:
        """Follows one entry; false if it cannot come here."""
        if set(entry) == {"search", "plan"}:
            possible = self.search is None
            if possible:
                self.search, self.plan = entry["search"], entry["plan"]
            return possible
        if self.search is None:
            return False
        if set(entry) == {"begun"}:
            possible = entry["begun"] == self.begun + 1 == len(self.ended) + 1
            self.begun, self.resumed = self.begun + possible, 0
            return possible and self.begun <= len(self.plan["draws"])
        in_progress = self.begun == len(self.ended) + 1
        if set(entry) == {"resumed"}:
            self.resumed += 1
            return in_progress and entry["resumed"] == self.begun
        possible = set(entry) == {"ended", "outcome"} and entry["ended"] == self.begun
        possible = possible and in_progress
        if possible:
            self.ended.append(entry["outcome"])
        return possible

    def _refuse(self, line: int) -> None:
        raise ValueError(
            "The file is no journal of a search, or it is damaged: what was spent cannot be told "
            f"from it. Nothing was changed. Received: {str(self._path)!r}, line {line}"
        )

    def _note(self, entry: dict) -> None:
        line = _encoded(entry)
        before = self.search, self.plan, self.begun, self.resumed, list(self.ended)
        try:
            if not self._take(json.loads(line[:-10])):
                raise ValueError(f"This cannot be noted now. Received: {entry!r}")
            self._write(line)
        except BaseException:
            self.search, self.plan, self.begun, self.resumed, self.ended = before
            raise

    def _write(self, line: bytes) -> None:
        # At the place where the last whole line ends, so that it replaces an unfinished one.
        written = os.pwrite(self._file, line, self._end)
        if written != len(line):
            raise OSError(f"Only {written} of {len(line)} bytes were written to {self._path}")
        os.ftruncate(self._file, self._end + written)
        os.fsync(self._file)
        self._end += written

    def begin(self, search: dict[str, Any], plan: dict[str, Any]) -> None:
        """Notes what the search is and what it drew, before any trial.

        Args:
          search: what has to be the same whenever the search goes on; plain JSON.
          plan: `draws`, a list with an entry a trial, and what else was chosen once.
        """
        self._note({"search": search, "plan": plan})
        sync_folder(self._path.parent)

    def note_begun(self) -> None:
        """Notes that the next trial begins, before it spends anything."""
        self._note({"begun": self.begun + 1})

    def note_resumed(self) -> None:
        """Notes that the trial in progress is gone on with, before it spends any more."""
        self._note({"resumed": self.begun})

    def note_ended(self, outcome: dict[str, Any]) -> None:
        """Notes how the trial in progress ended; plain JSON."""
        self._note({"ended": self.begun, "outcome": outcome})

    def close(self) -> None:
        """Lets others open the file; writing is an error from now on."""
        self._file = -1
        self._close()
