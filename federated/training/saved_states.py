"""The saved states of a run; each is complete on the disk before anything is released."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tree

from tf_adaptive_dp.durable import files

_KEPT = 2
_PREFIX = "round_"
_ENDING = ".state"
_ARRAY_ENDING = ".array"
_LARGE = 2**20  # bytes of an array that gets a file of its own
_NAME = re.compile(rf"{_PREFIX}(\d+){re.escape(_ENDING)}")
_KINDS = "biufcV"  # V: bfloat16


def newest(folder: Path) -> int | None:
    """The number of the newest state that a folder has; `None` if there is none."""
    return max(_paths(folder), default=None)


def _paths(folder: Path) -> dict[int, Path]:
    """The files of states, by their numbers."""
    files_of = sorted(folder.iterdir()) if folder.exists() else []
    found = ((_NAME.fullmatch(path.name), path) for path in files_of)
    return {int(match[1]): path for match, path in found if match}


class SavedStates:
    """The newest two saved states of one run, each in a file, beside the files of large arrays.

    The file of a state begins with a line of JSON, which holds the number, the record and the types
    of the leaves, and their checksum; then come the numbers of the small leaves. Arrays of at least
    1 MiB are in files that are named by a hash of their content. So what did not change since one
    of these states, such as most of the noise of a tree, is not written again. With hash and
    checksum a loaded state is the one that was saved under this number.

    Guarantee: an array is on the disk before the state that needs it, and stays there at least as
    long.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: list[tuple[np.ndarray, str]] = []  # arrays of the last state, and their files
        folder.mkdir(mode=0o700, exist_ok=True)
        for unfinished in folder.glob("*.new"):
            unfinished.unlink()

    def latest(self) -> int | None:
        """The number of the newest state; `None` if there is none."""
        return newest(self._folder)

    def save(self, number: int, state: Any, record: dict) -> None:
        """Saves a state and its record; both are on the disk when this returns.

        Args:
          number: the number of its round.
          state: a nest of numbers, texts, and arrays of numbers.
          record: what else to keep with it, as JSON values.
        """
        arrays: list[tuple[np.ndarray, str]] = []
        leaves = [self._plain(leaf, arrays) for leaf in tree.flatten(state)]
        content = b"".join(values for _, values in leaves)
        head = {
            "number": number,
            "record": record,
            "leaves": [kind for kind, _ in leaves],
            "checksum": zlib.crc32(content),
        }
        line = files.with_checksum(json.dumps(head).encode())
        files.write(self._folder / f"{_PREFIX}{number}{_ENDING}", line + content)
        self._known = arrays
        paths = _paths(self._folder)
        for old in sorted(paths)[:-_KEPT]:
            paths.pop(old).unlink()
        self._remove_all_arrays_but([_arrays_of(path) for path in paths.values()])

    def _remove_all_arrays_but(self, needed: list[list[str] | None]) -> None:
        if None in needed:
            return  # a damaged state may be restored from a copy, and needs its arrays then
        names = {name for of_state in needed for name in of_state or []}
        for path in self._folder.glob(f"*{_ARRAY_ENDING}"):
            if path.name not in names:
                path.unlink()

    def _plain(self, leaf: Any, arrays: list[tuple[np.ndarray, str]]) -> tuple[list, bytes]:
        """The type of a leaf in JSON values, and its numbers unless they are in a file."""
        kind, values = _plain(leaf)
        if not isinstance(leaf, np.ndarray) or leaf.nbytes < _LARGE:
            return kind, values()
        same = (name for array, name in self._known if array is leaf and _cannot_change(leaf))
        name = next(same, None)
        if name is None:
            content = values()
            name = _name_of(content)
            if not (self._folder / name).exists():
                files.write(self._folder / name, content)
        arrays.append((leaf, name))
        return [*kind, name], b""

    def sync(self, number: int) -> None:
        """Waits until a saved state is on the disk."""
        for part in (_paths(self._folder)[number], self._folder):
            files.sync(part)

    def load(self, number: int, state: Any) -> tuple[Any, dict]:
        """Loads a saved state in the structure of `state`, and its record.

        Raises:
          ValueError: if it cannot be read.
        """
        path = _paths(self._folder)[number]
        try:
            return _loaded(path, number, state)
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise ValueError(
                "The saved state cannot be read; it is damaged, renamed, or of another version of "
                "TensorFlow Federated. Nothing was changed. Restore it from a copy, or move it "
                "away to resume from the state before it: its round stays counted. "
                f"Received: {str(path)!r}; {why}"
            ) from error


def _cannot_change(array: np.ndarray) -> bool:
    """Whether an array is a view of `bytes`, as those that TFF returns are.

    One that is merely not writeable may be a view of an array that is, and change with it.
    """
    memory: Any = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return isinstance(memory, bytes)


def _name_of(content: bytes) -> str:
    """The name of the file of an array."""
    return hashlib.blake2b(content, digest_size=16).hexdigest() + _ARRAY_ENDING


def _arrays_of(path: Path) -> list[str] | None:
    """The names of the files of the arrays of a saved state; `None` if it is damaged."""
    with open(path, "rb") as file:
        line = files.checked(file.readline())
    if line is None:
        return None
    return [name for _, _, *names in json.loads(line)["leaves"] for name in names]


def _plain(leaf: Any) -> tuple[list, Callable[[], bytes]]:
    """The type of a leaf in JSON values, and a function that gives its numbers."""
    if isinstance(leaf, str):
        leaf = leaf.encode()
    if isinstance(leaf, bytes):
        return ["text", base64.b64encode(leaf).decode()], bytes
    array = np.asarray(leaf)
    if array.dtype.kind not in _KINDS:
        raise TypeError(
            "The state of the process must consist of numbers, texts, and arrays of numbers. "
            f"Received: {leaf!r}"
        )
    return [array.dtype.name, list(array.shape)], array.tobytes


def _loaded(path: Path, number: int, state: Any) -> tuple[Any, dict]:
    line, _, content = path.read_bytes().partition(b"\n")
    head = json.loads(files.checked(line + b"\n") or b"damaged")
    if zlib.crc32(content) != head["checksum"]:
        raise ValueError("its numbers are damaged")
    if head["number"] != number:
        raise ValueError(f"it is the state of round {head['number']}, and was renamed or copied")
    leaves, place = [], 0
    for kind, shape, *names in head["leaves"]:
        if kind == "text":
            leaves.append(base64.b64decode(shape))
            continue
        dtype, count = np.dtype(kind), int(np.prod(shape))
        source = content
        for name in names:
            source = (path.parent / name).read_bytes()
            if _name_of(source) != name:
                raise ValueError(f"The array in {name!r} is damaged, which other states may share.")
        # A copy, which is writable and does not keep the other leaves.
        array = np.frombuffer(source, dtype, count, 0 if names else place).reshape(shape).copy()
        leaves.append(array if shape else array[()])
        place += 0 if names else array.nbytes
    return tree.unflatten_as(state, leaves), head["record"]
