"""A file for the segments of a ledger that is intact at every moment."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import Segment
from tf_adaptive_dp.durable import files

# Room for `Ledger.MAX_SEGMENTS` segments of at most 73 characters.
_RECORD_BYTES = 8192


class _Record(NamedTuple):
    """What one line of the file says; older files lack what comes after the segments."""

    number: int
    segments: list[Segment]
    identity: str | None = None
    fewest_units: int | None = None
    adopted: bool = False
    written: int | None = None

    def encoded(self) -> bytes:
        """One line of `_RECORD_BYTES` with a checksum."""
        content = {"release_log": 1, "record": self.number, "segments": self.segments}
        content |= {name: getattr(self, name) for name in self._fields[2:]}
        return files.with_checksum(json.dumps(content).ljust(_RECORD_BYTES - 10).encode())


def has_begun(path: str | os.PathLike) -> bool:
    """Whether a `SegmentFile` was written; one that is missing or was emptied was not."""
    path = Path(path)
    return path.exists() and bool(path.read_bytes().strip(b"\0"))


def _decoded(line: bytes) -> _Record | None:
    """What was encoded; `None` if the line is damaged."""
    text = files.checked(line)
    if len(line) != _RECORD_BYTES or text is None:
        return None
    content = json.loads(text)
    segments = [Segment(*segment) for segment in content["segments"]]
    others = {name: content[name] for name in _Record._fields[2:] if name in content}
    return _Record(content["record"], segments, **others)


def _is_unfinished_beginning(content: bytes, identity: str) -> bool:
    """Whether a file holds a part of its first record, or nothing."""
    before_time = _Record(0, [], identity).encoded().partition(b'"written"')[0]
    found = content.rstrip(b"\0")
    if not found.startswith(before_time):
        return before_time.startswith(found)
    return len(content) <= _RECORD_BYTES and _decoded(content) is None


class SegmentFile:
    """Segments in a file that one process at a time can have open.

    Two records of equal size are written alternately, each with a number and a checksum, so the
    earlier one remains until the later one is complete. Both have the identity of the file that
    was created first, and the time, so that a copy is opened with a warning, also one that was
    written into the file.

    Guarantee: when `write` has returned, the segments survive any signal to the process, and with
    `fsync` also a crash of the machine if its disk honors it. An unfinished `write` has no effect.
    Damage to the newest record alone cannot be told from an unfinished `write`; any other damage is
    an error.

    Attributes:
      segments: the releases that the file holds.
      fewest_units: `Ledger.fewest_units` as it was when they were written.
      adopted: whether all of them happened before there was a file.
      identity: that of the file that was created first.
    """

    def __init__(self, path: str | os.PathLike, *, fsync: bool):
        """Opens the file, or creates it and its folder.

        Args:
          path: of the file.
          fsync: whether `write` waits for the disk.

        Raises:
          RuntimeError: if it is already open, here or in another process.
          ValueError: if it is another kind of file, or damaged; it is left unchanged.
        """
        self._path, self._fsync = Path(path), fsync
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            files.lock(
                self._file,
                "The release log is in use by another process, or by another ReleaseLog of this "
                "one. End that process or call `close()` of the other log; give each training run "
                f"a log of its own. Received: path={str(path)!r}",
            )
            self.identity, self._clock = files.identity(self._file), files.Clock(self._file)
            newest = self._read()
            self._number, self.segments = newest.number, newest.segments
            self.fewest_units, self.adopted = newest.fewest_units, newest.adopted
            if self._number < 0:
                self.write([], None)
                if fsync:
                    files.sync(self._path.parent)  # the name of the new file
            elif newest.identity is not None:
                self.identity = newest.identity
                files.warn_if_restored(
                    *(self._file, newest.identity, newest.written, "The release log", self._path)
                )
        except BaseException:
            self.close()
            raise

    def _read(self) -> _Record:
        """The newest complete record; number -1 if none was ever finished."""
        content = os.pread(self._file, 2 * _RECORD_BYTES + 1, 0)
        none = _Record(-1, [])
        if _is_unfinished_beginning(content, self.identity):
            return none
        records = [_decoded(content[i : i + _RECORD_BYTES]) for i in (0, _RECORD_BYTES)]
        newest = max(filter(None, records), key=lambda record: record.number, default=none)
        number, segments = newest.number, newest.segments
        other = records[(number + 1) % 2]
        length = _RECORD_BYTES * (2 if number > 0 else 1)
        if (
            number < 0
            or not (other is None or other.number == number - 1)
            or not (length <= len(content) <= 2 * _RECORD_BYTES)
            or len(segments) > Ledger.MAX_SEGMENTS
        ):
            raise ValueError(
                "The file is not a release log, or it is damaged: it does not show how much was "
                f"released. Nothing was changed. Received: path={str(self._path)!r}"
            )
        # After an unfinished `write`, the time is that of the record before.
        unfinished = other is None and len(content) > _RECORD_BYTES
        return newest._replace(written=None) if unfinished else newest

    def write(
        self, segments: Sequence[Segment], fewest_units: int | None, *, adopted: bool = False
    ) -> None:
        """Replaces the content of the file; see the attributes.

        Raises:
          OSError: if the file cannot be written; its content is then unchanged.
        """
        number = self._number + 1
        content = (number, list(segments), self.identity, fewest_units, adopted)
        record = _Record(*content, self._clock.now()).encoded()
        written = os.pwrite(self._file, record, number % 2 * _RECORD_BYTES)
        self._clock.compare()
        if written != len(record):
            raise OSError(f"Only {written} of {len(record)} bytes were written to {self._path}")
        if self._fsync:
            os.fsync(self._file)
        self._number, self.segments = number, list(segments)
        self.fewest_units, self.adopted = fewest_units, adopted

    def close(self) -> None:
        """Releases the file for others; writing is an error from now on."""
        self._file = -1
        self._close()
