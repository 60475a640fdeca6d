"""The secret keys of a run whose noise is correlated over steps, in a file of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tf_adaptive_dp.durable import files

_KEY_BYTES, _GROUP_BYTES = 8, 32


class KeyFile:
    """The keys of noise that a run has to draw again if its process ends.

    Correlated noise cancels noise of earlier steps, so a process that resumes a run needs the keys
    of all its noise, and the groups that its batches are drawn from, or their order. No other file
    may hold these keys: with a key, anybody can remove the noise from the gradients of the steps
    that it was used for.

    Guarantee: only its owner can read the file, and it is on disk when a method returns. Each
    process adds a key of its own before its first release, so no two processes draw the same noise,
    not even in copies of the directory. `delete` removes the name; a disk may keep the bytes.

    Attributes:
      keys: pairs of the number of a release and the key of the noise from there on, oldest first.
      groups: 32 bytes, the key of the groups, or of the one order of all passes.
    """

    def __init__(self, path: str | os.PathLike, num_releases: int):
        """Opens the file of a run, or creates it.

        Args:
          path: of the file; its folder exists.
          num_releases: how many releases the run may have made already.

        Raises:
          ValueError: if there is no file although there were releases, or it is damaged.
        """
        self._path = Path(path)
        if self._path.exists():
            self._read()
        elif num_releases:
            raise ValueError(
                "The keys of this run's noise are missing, so the noise of its earlier steps "
                "cannot be canceled, and no epsilon is proven for more steps. Restore the file, or "
                "begin a new run in a new directory; what this one released stays spent. Received: "
                f"no file {str(path)!r}, after {num_releases} releases"
            )
        else:
            self.keys: list[tuple[int, int]] = []
            self.groups = os.urandom(_GROUP_BYTES)
        key = int.from_bytes(os.urandom(_KEY_BYTES), "little", signed=True)
        self.keys.append((num_releases, key))
        self._write()

    def __repr__(self) -> str:
        return f"<KeyFile {str(self._path)!r}>"

    def _read(self) -> None:
        text = files.checked(self._path.read_bytes())
        if text is None:
            raise ValueError(
                f"The keys of the run's noise are damaged. Received: {str(self._path)!r}. Restore "
                "the file, or begin a new run in a new directory."
            )
        content = json.loads(text)
        self.keys = [(first, key) for first, key in content["noise_keys"]]
        self.groups = bytes.fromhex(content["groups"])

    def _write(self) -> None:
        content = {"noise_keys": self.keys, "groups": self.groups.hex()}
        files.write(self._path, files.with_checksum(json.dumps(content).encode()))

    def delete(self) -> None:
        """Removes the file once the run no longer needs it."""
        files.delete(self._path)
