"""The saved states of a run; each is complete on the disk before anything is released."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
import re
import shutil
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_federated as tff
import tree

from tf_adaptive_dp.durable import files

_KEPT = 2
_PREFIX = "round_"
_ENDING = ".state"
# A folder is a SavedModel of TFF, which earlier versions wrote, in 0.7 s.
_NAME = re.compile(rf"{_PREFIX}(\d+)(?:{re.escape(_ENDING)})?")
_KINDS = "biufcV"  # V: bfloat16


def wait(coroutine: Coroutine) -> Any:
    """Runs a coroutine in a separate thread, so that it works inside a notebook too."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


class SavedStates:
    """The newest two saved states of one run, each in a file.

    The file begins with a line of JSON, which holds the record and the types of the state's leaves,
    and their checksum; then come the numbers of the leaves. With these checksums a loaded state is
    the one that was saved.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for unfinished in [*folder.glob(f"{_PREFIX}*_temp*"), *folder.glob("*.new")]:
            _remove(unfinished)

    def _paths(self) -> dict[int, Path]:
        found = ((_NAME.fullmatch(path.name), path) for path in sorted(self._folder.iterdir()))
        return {int(match[1]): path for match, path in found if match}

    def latest(self) -> int | None:
        """The number of the newest state; `None` if there is none."""
        return max(self._paths(), default=None)

    def save(self, number: int, state: Any, record: dict) -> None:
        """Saves a state and its record; both are on the disk when this returns."""
        leaves = [_plain(leaf) for leaf in tree.flatten(state)]
        content = b"".join(values for _, values in leaves)
        head = {
            "record": record,
            "leaves": [kind for kind, _ in leaves],
            "checksum": zlib.crc32(content),
        }
        line = files.with_checksum(json.dumps(head).encode())
        files.write(self._folder / f"{_PREFIX}{number}{_ENDING}", line + content)
        paths = self._paths()
        for old in sorted(paths)[:-_KEPT]:
            _remove(paths[old])

    def sync(self, number: int) -> None:
        """Waits until a saved state is on the disk."""
        path = self._paths()[number]
        for part in [*path.rglob("*"), path, self._folder]:
            files.sync(part)

    def load(self, number: int, state: Any) -> tuple[Any, dict]:
        """Loads a saved state in the structure of `state`, and its record."""
        path = self._paths()[number]
        try:
            return (_loaded_model if path.is_dir() else _loaded)(path, number, state)
        except Exception as error:
            raise ValueError(
                "The saved state cannot be read; it is damaged, or of another version of "
                "TensorFlow Federated. Nothing was changed. Restore it from a copy, or move it "
                "away to resume from the state before it: its round stays counted. "
                f"Received: {str(path)!r}"
            ) from error


def _plain(leaf: Any) -> tuple[list, bytes]:
    """The type of a leaf in JSON values, and its numbers."""
    if isinstance(leaf, str):
        leaf = leaf.encode()
    if isinstance(leaf, bytes):
        return ["text", base64.b64encode(leaf).decode()], b""
    array = np.asarray(leaf)
    if array.dtype.kind not in _KINDS:
        raise TypeError(
            "The state of the process must consist of numbers, texts, and arrays of numbers. "
            f"Received: {leaf!r}"
        )
    return [array.dtype.name, list(array.shape)], array.tobytes()


def _loaded(path: Path, number: int, state: Any) -> tuple[Any, dict]:
    del number
    line, _, content = path.read_bytes().partition(b"\n")
    head = json.loads(files.checked(line + b"\n") or b"damaged")
    if zlib.crc32(content) != head["checksum"]:
        raise ValueError("its numbers are damaged")
    leaves, place = [], 0
    for kind, shape in head["leaves"]:
        if kind == "text":
            leaves.append(base64.b64decode(shape))
            continue
        dtype, count = np.dtype(kind), int(np.prod(shape))
        # A copy, which is writable and does not keep the other leaves.
        array = np.frombuffer(content, dtype, count, place).reshape(shape).copy()
        leaves.append(array if shape else array[()])
        place += array.nbytes
    return tree.unflatten_as(state, leaves), head["record"]


def _loaded_model(path: Path, number: int, state: Any) -> tuple[Any, dict]:
    manager = tff.program.FileProgramStateManager(path.parent, _PREFIX, 0)
    saved = wait(manager.load(number, {"state": state, "record": ""}))
    return saved["state"], json.loads(saved["record"])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
