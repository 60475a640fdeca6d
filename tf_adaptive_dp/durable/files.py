"""Files that survive a crash, and that one process at a time can use."""

from __future__ import annotations

import os
import zlib
from pathlib import Path


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
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(file)
    unfinished.rename(path)
    sync(path.parent)
