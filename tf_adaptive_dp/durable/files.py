"""Files that survive a crash, and that one process at a time can use."""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
import zlib
from pathlib import Path

# Of Linux's `statx`.
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800


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


def warn_if_copied(file: int, before: str, what: str, path: str | os.PathLike) -> None:
    """Warns that a record of releases is a copy, since nothing else tells a copy from its original.

    The copy and the original each count only what is released with them, although both may see the
    same data.

    Args:
      file: the descriptor of the record.
      before: its `identity` when it was created.
      what: the beginning of the warning, such as "The release log".
      path: its path.
    """
    if identity(file) != before:
        warnings.warn(
            f"{what} is a copy, or was restored from one. If the original was also used after it "
            "was copied, what was released then is missing here and ε is too small. Continue with "
            f"only one of them. Received: {str(path)!r}",
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
