"""A journal of a run's rounds on disk: what was begun is known, however the run ends."""

from __future__ import annotations

import json
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

from tf_adaptive_dp.privacy import release_log

_EVENTS = ("begun", "released")


def _encoded(entry: dict) -> bytes:
    """One line of text with a checksum at its end."""
    text = json.dumps(entry, sort_keys=True).encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _decoded(line: bytes) -> dict | None:
    """The entry of a line without its end; `None` if the line is damaged."""
    text = line[:-9]
    return json.loads(text) if line[-9:] == b" %08x" % zlib.crc32(text) else None


def sync(path: str | os.PathLike) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Journal:
    """The rounds of one run that were begun and released, in a file that only grows.

    The first line describes the run; each other says that a round was begun, or released.
    Rounds are numbered 1, 2, … in the order in which they are begun; a number is never used twice.

    Guarantee: when `note` has returned, the entry survives the end of the process by whatever
    signal, and that of the machine, as far as its disk keeps its word. An entry that was not
    finished is as if it had not been made. A file that is damaged otherwise is refused, but one
    that lost its last lines whole cannot be told from an earlier one: `federated.program` compares
    it with the saved states. One process at a time may have the file open.

    Attributes:
      begun: the number of the last round that was begun, 0 if there was none.
      released: the number of the last round whose figures were given to the release managers.
    """

    def __init__(self, path: str | os.PathLike, run: dict[str, Any]):
        """Opens the journal of a run, or begins it.

        Args:
          path: of the file; its folder exists.
          run: what has to be the same whenever the run goes on; plain JSON.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if it is something else, damaged, or of another run; it is left as it was.
        """
        self._path = Path(path)
        self.begun = self.released = 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            release_log.lock(
                self._file,
                "The run is in progress in another process, or in another call of this one. End "
                "that one, or give this run a directory of its own. Received: "
                f"{str(self._path)!r}",
            )
            self._read(json.loads(json.dumps(run)))
        except BaseException:
            self.close()
            raise

    def _read(self, run: dict) -> None:
        size = os.fstat(self._file).st_size
        content = os.pread(self._file, size, 0)
        *lines, torn = content.split(b"\n")
        self._end = size - len(torn)
        if not lines:
            if not _encoded({"run": run}).startswith(torn.rstrip(b"\0")):
                self._refuse(1)
            self._write({"run": run})
            sync(self._path.parent)
            return
        header = _decoded(lines[0])
        if header is None or set(header) != {"run"}:
            self._refuse(1)
        self._compare(header["run"], run)
        for number, line in enumerate(lines[1:], 2):
            entry = _decoded(line)
            if entry is None or not self._take(entry):
                self._refuse(number)

    def _take(self, entry: dict) -> bool:
        """Follows one entry; false if it cannot come here."""
        if len(entry) != 1:
            return False
        ((event, number),) = entry.items()
        if event == "begun":
            possible = number == self.begun + 1
        else:
            possible = event in _EVENTS and getattr(self, event) <= number <= self.begun
        if possible:
            setattr(self, event, number)
        return possible

    def _compare(self, before: dict, now: dict) -> None:
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed:
            differences = "; ".join(
                f"{key}: was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
            )
            raise ValueError(
                "The directory holds a run with other arguments. Nothing was changed. Pass the "
                "arguments of that run to go on with it, or a new directory. Changed: "
                f"{differences}. Received: {str(self._path)!r}"
            )

    def _refuse(self, line: int) -> None:
        raise ValueError(
            "The file is no journal, or it is damaged: how many rounds were begun cannot be told "
            f"from it. Nothing was changed. Received: {str(self._path)!r}, line {line}"
        )

    def _write(self, entry: dict) -> None:
        line = _encoded(entry)
        # At the place where the last whole line ends, so that it replaces an unfinished one.
        written = os.pwrite(self._file, line, self._end)
        if written != len(line):
            raise OSError(f"Only {written} of {len(line)} bytes were written to {self._path}")
        os.ftruncate(self._file, self._end + written)
        os.fsync(self._file)
        self._end += written

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
        before = getattr(self, event)
        if not self._take({event: number}):
            raise ValueError(
                f"Round {number} cannot be {event} now. Received: begun={self.begun}, "
                f"released={self.released}"
            )
        try:
            self._write({event: number})
        except BaseException:
            setattr(self, event, before)
            raise

    def close(self) -> None:
        """Lets others open the file; writing is an error from now on."""
        self._file = -1
        self._close()
