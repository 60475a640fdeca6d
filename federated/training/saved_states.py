"""The saved states of a run; each is complete on the disk before anything is released."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import tensorflow_federated as tff

from tf_adaptive_dp.durable.files import sync

_PREFIX = "round_"


def wait(coroutine: Coroutine) -> Any:
    """Runs a coroutine in a separate thread, so that it works inside a notebook too."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


class SavedStates:
    """The newest two saved states of one run.

    TensorFlow keeps checksums of the values, so a loaded state is the one that was saved.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        # Each is complete or absent: TFF renames it when it is complete.
        self._manager = tff.program.FileProgramStateManager(folder, _PREFIX, 2, keep_first=False)
        for unfinished in folder.glob(f"{_PREFIX}*_temp*"):
            shutil.rmtree(unfinished)

    def latest(self) -> int | None:
        """The number of the newest state; `None` if there is none."""
        return max(wait(self._manager.get_versions()) or [None])

    def save(self, number: int, state: Any, record: dict) -> None:
        """Saves a state and its record; both are on the disk when this returns."""
        wait(self._manager.save({"state": state, "record": json.dumps(record)}, number))
        self.sync(number)

    def sync(self, number: int) -> None:
        """Waits until a saved state is on the disk."""
        for folder, _, files in os.walk(self._folder / f"{_PREFIX}{number}"):
            for path in [*files, ""]:
                sync(os.path.join(folder, path))
        sync(self._folder)

    def load(self, number: int, state: Any) -> tuple[Any, dict]:
        """Loads a saved state in the structure of `state`, and its record."""
        try:
            saved = wait(self._manager.load(number, {"state": state, "record": ""}))
            return saved["state"], json.loads(saved["record"])
        except Exception as error:
            path = self._folder / f"{_PREFIX}{number}"
            raise ValueError(
                "The saved state cannot be read; it is damaged, or of another version of "
                "TensorFlow Federated. Nothing was changed. Restore it from a copy, or move the "
                "folder away to resume from the state before it: its round stays counted. "
                f"Received: {str(path)!r}"
            ) from error
