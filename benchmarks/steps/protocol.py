"""The protocol between a worker and the program that started it: one JSON object per line.

The worker begins with `ready` or `error`; then each command has one answer:

    {"command": "run", "steps": 5, "untimed": 1}   ->  {"milliseconds": [...]}
    {"command": "memory"}                          ->  {"peak_mib": 512.0}
    {"command": "quit"}, or the end of stdin       ->  the worker ends

An answer with the key "error" describes a failure; its "status" is the kind of failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import threading
import traceback
from collections.abc import Iterator
from typing import Any, TextIO


class NotSupportedError(Exception):
    """The engine cannot train this model, for the reason in the message."""


def take_stdout() -> TextIO:
    """Reserves stdout for the protocol; everything else that prints there now goes to stderr.

    Returns:
      The stream for answers.
    """
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "w", encoding="utf-8")


def send(stream: TextIO, **message: Any) -> None:
    """Writes one message."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def receive(stream: TextIO) -> Iterator[dict]:
    """Yields the commands as they arrive.

    A separate thread reads them. The stream ends when the parent process ends in any way; then the
    thread ends this process, even in the middle of a step.
    """
    messages: queue.Queue[dict] = queue.Queue()

    def read() -> None:
        for line in stream:
            message = json.loads(line)
            messages.put(message)
            if message["command"] == "quit":
                return
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while (message := messages.get())["command"] != "quit":
        yield message


def peak_memory_mib() -> float:
    """The largest resident size of this process so far.

    Linux includes the size of the parent when it started the process, so the parent must be small.
    """
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


@contextlib.contextmanager
def reported_errors(answers: TextIO) -> Iterator[None]:
    """Answers with the reason if the block fails: any error of a library is a row of the table."""
    try:
        yield
    except NotSupportedError as error:
        send(answers, error=str(error), status="not supported")
    except Exception as error:
        traceback.print_exc()
        send(answers, error=short_reason(error), status="failed")


def short_reason(error: BaseException) -> str:
    """Formats an error in one line, without paths of this machine.

    Keras and TensorFlow put the traceback into the message; its last line is the useful one.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and "{{node" not in line and "[Op:" not in line]
    text = lines[-1] if lines else ""
    name = type(error).__name__
    if not text.startswith(name):
        text = f"{name}: {text}"
    text = re.sub(r"(?:/[\w.+-]+){2,}/", ".../", text).replace("|", "/")
    return text if len(text) <= 300 else text[:297] + "..."
