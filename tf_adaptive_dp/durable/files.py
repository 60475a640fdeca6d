"""Files that survive a crash, and that one process at a time can use."""

from __future__ import annotations

import ctypes
import os
import struct
import time
import warnings
import zlib
from pathlib import Path

# Of Linux's `statx`.
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
# How much later than its last line says a file may have been written, in nanoseconds.
_LATER = 2 * 10**9


def with_checksum(text: bytes) -> bytes:
    """A line that ends with a checksum of the text before it."""
    return text + b" %08x\n" % zlib.crc32(text)


def checked(line: bytes) -> bytes | None:
    """The text of a line of `with_checksum`; `None` if the line is damaged."""
    text = line[:-10]
    return text if line == with_checksum(text) else None


def lock(file: int, in_use: str) -> None:
    """Locks an open file until it is closed.

    Args:
      file: its descriptor.
      in_use: the error message if it is already locked, here or in another process.

    Raises:
      RuntimeError: if it is already locked.
    """
    import fcntl  # not available on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(in_use) from None


def identity(file: int) -> str:
    """What an open file on its disk keeps when it moves, and a copy has of its own.

    The inode alone does not do: most file systems give that of a deleted file to the next new one,
    such as the copy that is put in its place.
    """
    return f"{os.fstat(file).st_ino}.{_birth(file)}"


def _birth(file: int) -> int:
    """When an open file was created, in nanoseconds; 0 where the file system does not say."""
    statx = getattr(ctypes.CDLL(None), "statx", None)  # Python has no function for it
    found = ctypes.create_string_buffer(256)
    if statx is None or statx(file, b"", _AT_EMPTY_PATH, _STATX_BTIME, found):
        return 0
    (mask,) = struct.unpack_from("=I", found, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
    return seconds * 10**9 + nanoseconds if mask & _STATX_BTIME else 0


class Clock:
    """The time at which a file is written, by its file system, which may be that of a server.

    A line of the file that says when it was written shows whether anything else was written later,
    such as an older copy into the same file, which keeps its `identity`.
    """

    def __init__(self, file: int) -> None:
        """Creates the clock of an open file."""
        self._file, self._ahead = file, 0

    def now(self) -> int:
        """What the file system will say if the file is written now, in nanoseconds."""
        return time.time_ns() + self._ahead

    def compare(self) -> None:
        """Compares the clocks; call it when the file has just been written."""
        self._ahead = os.fstat(self._file).st_ctime_ns - time.time_ns()


def warn_if_restored(
    file: int, identity_before: str, written: int | None, what: str, path: str | os.PathLike
) -> None:
    """Warns that a record of releases is a copy, or that one was put in its place.

    Nothing else tells a copy from its original. The copy and the original each count only what is
    released with them, although both may see the same data.

    Args:
      file: the descriptor of the record.
      identity_before: its `identity` when it was created.
      written: when it was last written, by its `Clock`; `None` if its content does not say that.
      what: the beginning of the warning, such as "The release log".
      path: its path.
    """
    if identity(file) != identity_before:
        how, harmless = "is a copy, or was restored from one", ""
    elif written is not None and os.fstat(file).st_ctime_ns > written + _LATER:
        how = "was changed after it was last written, as if a copy was put in its place"
        harmless = "If only its name or its permissions were changed, nothing is missing. "
    else:
        return
    warnings.warn(
        f"{what} {how}. If the original was also used after it was copied, what was released then "
        f"is missing here and ε is too small. Continue with only one of them. {harmless}Received: "
        f"{str(path)!r}",
        stacklevel=5,
    )


def sync(path: str | os.PathLike) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file atomically and durably; only its owner can read it."""
    path = Path(path)
    unfinished = _unfinished(path)
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(file)
    unfinished.rename(path)
    sync(path.parent)


def delete(path: str | os.PathLike) -> None:
    """Removes a file, and what a `write` of it that was killed has left; durable on return."""
    path = Path(path)
    _unfinished(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    sync(path.parent)


def _unfinished(path: Path) -> Path:
    """Where `write` puts the content before it is whole."""
    return path.with_suffix(".new")
