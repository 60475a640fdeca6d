"""A file that only grows: what was noted in it is known, however the process ends."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

from tf_adaptive_dp.durable import files


def encoded(entry: dict) -> bytes:
    """One line of text with a checksum at its end."""
    return files.with_checksum(json.dumps(entry, sort_keys=True).encode())


def _decoded(line: bytes) -> dict | None:
    """The entry of a line; `None` if the line is damaged."""
    text = files.checked(line)
    return None if text is None else json.loads(text)


def compare(before: dict, now: dict, refusal: str, where: str) -> None:
    """Raises ValueError, which names them, if arguments differ from those that were noted.

    Args:
      before: as noted, plain JSON.
      now: those of this call; what becomes the same JSON is the same.
      refusal: how the error begins.
      where: how it ends.
    """
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        differences = "; ".join(
            f"{key}: was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
        )
        raise ValueError(f"{refusal} Changed: {differences}. Received: {where}")


class Journal:
    """Entries in a file that only grows, each whole or absent; the base of those that have rules.

    A subclass says which entry may follow which (`_may_follow`) and what it changes (`_follow`).
    It sets its own attributes before this constructor, which reads the file, and has the first part
    of two messages: `_IN_USE`, if the file is open already, and `_REFUSED`, if it cannot be read.

    Guarantee: when a method has returned, its entry survives the end of the process by whatever
    signal, and that of the machine, as far as its disk keeps its word. An entry that was not
    finished, or could not be written, is as if it had not been made. A file that is damaged
    otherwise, or has an entry that cannot come where it is, is refused and left as it was; but one
    that lost its last lines whole cannot be told from an earlier one. One process at a time may
    have the file open, and only its owner can read it.
    """

    _IN_USE: str
    _REFUSED: str

    def __init__(self, path: str | os.PathLike, beginning: bytes):
        """Opens the file, or creates an empty one.

        Args:
          path: of the file; its folder exists.
          beginning: of the first line. A file whose first line was not finished, and does not begin
            so, is some other file, which is not to be written over.

        Raises:
          RuntimeError: if it is open already, here or in another process.
          ValueError: if it is something else, or damaged; it is left as it was.
        """
        self._path, self._end = Path(path), 0  # where the last whole line ends
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            files.lock(self._file, f"{self._IN_USE} Received: {str(self._path)!r}")
            self._read(beginning)
        except BaseException:
            self.close()
            raise

    def _may_follow(self, entry: dict) -> bool:
        """Whether an entry can come after those that were followed; changes nothing."""
        raise NotImplementedError

    def _follow(self, entry: dict) -> None:
        """Takes over an entry that is in the file."""
        raise NotImplementedError

    def _read(self, beginning: bytes) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        *lines, torn = content.split(b"\n")
        # After a power failure the end may be zeros.
        if not lines and not beginning.startswith(torn.rstrip(b"\0")[: len(beginning)]):
            self._refuse(1)
        for number, line in enumerate(lines, 1):
            entry = _decoded(line + b"\n")
            if entry is None or not self._may_follow(entry):
                self._refuse(number)
            self._follow(entry)
            self._end += len(line) + 1

    def _refuse(self, line: int) -> None:
        raise ValueError(
            f"{self._REFUSED} Nothing was changed. Received: {str(self._path)!r}, line {line}"
        )

    def _append(self, entry: dict) -> None:
        """Writes an entry and follows it.

        Raises:
          ValueError: if it cannot come now.
          OSError: if it cannot be written. Then, too, it was not noted.
        """
        line = encoded(entry)
        read = _decoded(line)
        if not self._may_follow(read):
            raise ValueError(f"This cannot be noted now. Received: {entry!r}")
        # At the place where the last whole line ends, so that it replaces an unfinished one.
        written = os.pwrite(self._file, line, self._end)
        if written != len(line):
            raise OSError(f"Only {written} of {len(line)} bytes were written to {self._path}")
        os.ftruncate(self._file, self._end + written)
        os.fsync(self._file)
        if not self._end:
            files.sync(self._path.parent)  # the name of a new file
        self._end += written
        self._follow(read)

    def close(self) -> None:
        """Lets others open the file; writing is an error from now on."""
        self._file = -1
        self._close()
