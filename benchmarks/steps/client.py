"""Starts a worker process, sends it commands, and ensures that it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.steps import catalogue


class WorkerError(Exception):
    """A worker failed to answer.

    Args:
      status: `"not supported"`, `"failed"` or `"timed out"`.
      reason: The reason in one line.
    """

    def __init__(self, status: str, reason: str):
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class WorkerProcess:
    """A process that answers commands; see `protocol.py`.

    The process ends with `close`. If this program dies first, the pipe to the worker closes, and
    the worker exits.

    Args:
      command: The interpreter, which may not exist, and its arguments.
      variables: Environment variables that it needs beside this program's.
      timeout: Seconds to wait for an answer.

    Raises:
      WorkerError: If it cannot be started.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], timeout: float):
        if not pathlib.Path(command[0]).exists():
            raise WorkerError("failed", "its environment is missing: run `make bench-peers`")
        self.timeout = timeout
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # A peer's environment knows nothing of this repository.
            env={
                **os.environ,
                "PYTHONNOUSERSITE": "1",
                "PYTHONPATH": str(catalogue.ROOT),
                **variables,
            },
            text=True,
            encoding="utf-8",
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def answer(self) -> dict:
        """Returns the next message of the worker.

        Raises:
          WorkerError: If the worker reports an error, is silent for too long, or has ended.
        """
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            raise WorkerError("timed out", f"no answer within {self.timeout:g} s") from None
        if line is None:
            raise WorkerError("failed", self._how_it_ended())
        message = json.loads(line)
        if "error" in message:
            raise WorkerError(message["status"], message["error"])
        return message

    def send(self, command: str, **arguments: Any) -> None:
        """Sends a command, whose answer is then to be fetched."""
        # If it has ended, `answer` returns its last message or raises how it ended.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()

    def ask(self, command: str, **arguments: Any) -> dict:
        """Sends a command and returns the answer; see `answer`."""
        self.send(command, **arguments)
        return self.answer()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"killed by signal {-code} (9: out of memory?)" if code < 0 else f"exit code {code}"

    def log(self) -> str:
        """The last lines that the worker and its libraries printed."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", errors="replace").splitlines()
        # TensorFlow's greeting on a machine without a GPU.
        return "\n".join([line for line in lines if "Unable to register" not in line][-5:])

    def close(self) -> None:
        """Ends the process, by force if necessary. Can be called twice."""
        if self._stderr.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write('{"command": "quit"}\n')
            self._process.stdin.close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            try:
                self._process.wait(timeout=5)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.stdout.close()
        self._stderr.close()


class Worker(WorkerProcess):
    """One engine in a separate process, in the engine's environment.

    Args:
      engine: A name of `catalogue.ENGINES`.
      model: A name of `problems.PROBLEMS`.
      batch_size: B.
      width: The factor of the hidden sizes.
      timeout: Seconds to wait for an answer.

    Raises:
      WorkerError: If it cannot be started.
    """

    def __init__(self, engine: str, model: str, batch_size: int, width: int, timeout: float):
        family = catalogue.family_of(engine)
        self.engine = engine
        arguments = ("--engine", engine, "--model", model)
        arguments += ("--batch_size", str(batch_size), "--width", str(width))
        command = [str(family.python()), "-m", "benchmarks.steps.worker", *arguments]
        super().__init__(command, family.variables, timeout)
