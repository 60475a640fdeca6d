"""An append-only file whose entries survive a crash."""

from __future__ import annotations

import abc
import json
import os
import weakref
from pathlib import Path
from typing import NoReturn

from tf_adaptive_dp.durable import files

# Of the first line, and of every line. Sorted after what a subclass writes, so that `beginning`
# stays true.
_IDENTITY, _WRITTEN = "with_identity", "written"


def encoded(entry: dict) -> bytes:
    """An entry as one line of text with a checksum."""
    return files.with_checksum(json.dumps(entry, sort_keys=True).encode())


def _decoded(line: bytes) -> dict | None:
    """The entry of a line; `None` if the line is damaged."""
    text = files.checked(line)
    return None if text is None else json.loads(text)


def has_begun(path: str | os.PathLike) -> bool:
    """Whether a journal has a whole line; one that is missing or was emptied has none."""
    path = Path(path)
    return path.exists() and b"\n" in path.read_bytes()


def compare(before: dict, now: dict, refusal: str, where: str) -> None:
    """Raises ValueError if arguments differ from recorded ones; the error names the differences.

    Args:
      before: the recorded arguments, plain JSON.
      now: the arguments of this call; they are compared as JSON.
      refusal: the beginning of the error message.
      where: the end of the error message.
    """
    now = json.loads(json.dumps(now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        differences = "; ".join(
            f"{key}: was {before.get(key)!r}, is {now.get(key)!r}" for key in changed
        )
        raise ValueError(f"{refusal} Changed: {differences}. Received: {where}")


class Journal(abc.ABC):
    """An append-only file of entries, each of which is complete or absent; a base class.

    A subclass defines which entry may follow (`_may_follow`) and what it changes (`_follow`). It
    must set its own attributes before it calls this constructor, which reads the file. It defines
    the first part of three messages: `_IN_USE` for a file that is already open, `_REFUSED` for a
    file that cannot be read, and `_OWNER`, what a file that was copied belongs to.

    The first line also has the identity of the file, and every line the time, by which a copy is
    recognized.

    Guarantee: when a method has returned, its entry survives any signal to the process, and a crash
    of the machine if the disk honors `fsync`. An entry that was not finished, or could not be
    written, counts as absent. A file that is damaged otherwise, or holds an entry out of place, is
    rejected and left unchanged; a file that lost whole lines at its end cannot be told from an
    earlier version of it. A copy is opened with a warning. One process at a time can have the file
    open, and only its owner can read it.
    """

    _IN_USE: str
    _REFUSED: str
    _OWNER: str

    def __init__(self, path: str | os.PathLike, beginning: bytes):
        """Opens the file, or creates an empty one.

        Args:
          path: of the file; its folder exists.
          beginning: how the first line begins. A file with an unfinished first line that begins
            otherwise is another kind of file and is not overwritten.

        Raises:
          RuntimeError: if it is already open, here or in another process.
          ValueError: if it is another kind of file, or damaged; it is left unchanged.
        """
        self._path, self._end = Path(path), 0  # where the last whole line ends
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        self._clock = files.Clock(self._file)
        try:
            files.lock(self._file, f"{self._IN_USE} Received: {str(self._path)!r}")
            self._read(beginning)
            if self._identity is not None:
                files.warn_if_restored(
                    *(self._file, self._identity, self._written, self._OWNER, self._path)
                )
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _may_follow(self, entry: dict) -> bool:
        """Whether an entry may come next; changes nothing."""

    @abc.abstractmethod
    def _follow(self, entry: dict) -> None:
        """Updates the attributes by an entry of the file."""

    def _read(self, beginning: bytes) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        *lines, torn = content.split(b"\n")
        self._identity: str | None = None  # of the file that was created first
        self._written: int | None = None  # when the last line was
        # After a power failure the file may end with zeros.
        if not lines and not beginning.startswith(torn.rstrip(b"\0")[: len(beginning)]):
            self._refuse(1)
        for number, line in enumerate(lines, 1):
            entry = _decoded(line + b"\n")
            if entry is not None:
                self._written = entry.pop(_WRITTEN, None)
                if not self._end:
                    self._identity = entry.pop(_IDENTITY, None)
            if entry is None or not self._may_follow(entry):
                self._refuse(number)
            self._follow(entry)
            self._end += len(line) + 1
        if torn:  # and written after the last line
            self._written = None

    def _refuse(self, line: int) -> NoReturn:
        raise ValueError(
            f"{self._REFUSED} Nothing was changed. Received: {str(self._path)!r}, line {line}"
        )

    def _append(self, entry: dict) -> None:
        """Writes an entry and follows it.

        Raises:
          ValueError: if the entry may not come now.
          OSError: if it cannot be written; the entry then counts as absent.
        """
        read = _decoded(encoded(entry))
        if read is None or not self._may_follow(read):
            raise ValueError(f"This entry may not be written now. Received: {entry!r}")
        of_file = {} if self._end else {_IDENTITY: files.identity(self._file)}
        line = encoded({**entry, **of_file, _WRITTEN: self._clock.now()})
        # Written after the last complete line, so that it replaces an unfinished one.
        written = os.pwrite(self._file, line, self._end)
        if written != len(line):
            raise OSError(f"Only {written} of {len(line)} bytes were written to {self._path}")
        os.ftruncate(self._file, self._end + written)
        self._clock.compare()
        os.fsync(self._file)
        if not self._end:
            files.sync(self._path.parent)  # the name of a new file
        self._end += written
        self._follow(read)

    def close(self) -> None:
        """Releases the file for others; writing is an error from now on."""
        self._file = -1
        self._close()
