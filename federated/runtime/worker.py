"""Starts a TFF worker: the program that computes for `federated.runtime.contexts`.

    python -m federated.runtime.worker --port 8000

The worker runs whatever TensorFlow graph it is sent, it asks nobody for a password, it encrypts
nothing, and it listens on every address of its machine. Run it only where no stranger can reach
the port: in a closed network, behind a firewall, or through SSH tunnels.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc

# A process of its own that becomes the worker: code between fork and exec of a process with many
# threads may deadlock. The kernel ends it (1 is PR_SET_PDEATHSIG) when the one that started it ends
# in whatever way, also if that was before the kernel was asked.
_BECOME_WORKER = """\
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, signal.SIGKILL) or os.getppid() != int(sys.argv[1]):
    sys.exit("cannot tie the worker to the process that starts it (this needs Linux)")
os.execv(sys.argv[2], sys.argv[2:])
"""

# Messages of any length. A call that has gone on for five minutes is asked whether its connection
# is still there; workers take more frequent questions for an attack.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 301_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

# Of a worker; the environment of this process goes before it.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2"}


class WorkerStartError(RuntimeError):
    """A worker did not start; the message says why."""


def binary() -> str:
    """The path of the worker that comes with TFF, found without importing TFF.

    Raises:
      WorkerStartError: if there is none.
    """
    found = importlib.util.find_spec("tensorflow_federated")
    folders = found.submodule_search_locations if found else None
    path = pathlib.Path(folders[0], "data", "worker_binary") if folders else None
    if path is None or not path.is_file():
        raise WorkerStartError(
            f"TFF's worker was not found. Received: {path}. Install tensorflow-federated 0.87.0."
        )
    return str(path)


def answers(address: str, timeout: float) -> bool:
    """Whether something that speaks gRPC accepts a new connection.

    Args:
      address: `"host:port"`.
      timeout: seconds.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout)
        except grpc.FutureTimeoutError:
            return False
    return True


def _hold_port(port: int) -> socket.socket:
    """Keeps others off a port until the worker listens on it.

    Workers share a port without a word if they may. A socket that does not listen is refused a port
    that somebody listens on, and does not hinder a worker that comes after it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        held.bind(("", port))
    except OSError as error:
        held.close()
        raise WorkerStartError(
            f"`port` must be free and allowed. Received: port={port} ({error.strerror}). "
            "Choose another one, or end the process that listens there."
        ) from error
    return held


class WorkerProcess:
    """A worker on this machine that never outlives the process that started it.

    It ends with `close`, and otherwise when this process ends in whatever way (the kernel sees to
    that). What it prints goes to this process's stderr; its last lines are kept for error messages.

    Args:
      port: where it listens; a free one if `None`.
      max_concurrency: how many clients it computes at a time; as many as this process may use
        cores if `None`.
      timeout: seconds that it may take to start.

    Raises:
      ValueError: if an argument is out of range.
      WorkerStartError: if the port is taken, or the worker does not answer in time.
    """

    def __init__(
        self,
        port: int | None = None,
        max_concurrency: int | None = None,
        timeout: float = 60.0,
    ):
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"`port` must be from 1 to 65535. Received: port={port}.")
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(
                "`max_concurrency` must be at least 1, or None for the number of cores. "
                f"Received: max_concurrency={max_concurrency}."
            )
        self._lines: collections.deque[str] = collections.deque(maxlen=20)
        self._process: subprocess.Popen | None = None
        self._started = threading.Event()
        self._error: OSError | None = None
        with _hold_port(port or 0) as held:
            self.port: int = held.getsockname()[1]
            cores = len(os.sched_getaffinity(0))
            command = [
                binary(),
                f"--port={self.port}",
                f"--max_concurrent_computation_calls={max_concurrency or cores}",
            ]
            # The kernel means the thread that started a process when it says parent, so this
            # thread stays as long as the worker.
            self._thread = threading.Thread(target=self._run, args=[command], daemon=True)
            self._thread.start()
            self._wait_until_ready(timeout)

    @property
    def address(self) -> str:
        """Where this process reaches it: `"host:port"`."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """`None` while it runs; a negative number is the signal that ended it."""
        return self._process.poll()

    @property
    def resident_size(self) -> int:
        """Bytes of memory that it holds; 0 if it ended."""
        try:
            pages = pathlib.Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def wait(self, timeout: float) -> int | None:
        """Waits for its end, for so many seconds at most, and returns `exit_status`."""
        self._thread.join(timeout)
        return self.exit_status

    @property
    def last_words(self) -> str:
        """The last lines that it printed."""
        return "".join(self._lines)

    def _run(self, command: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BECOME_WORKER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,  # Ctrl-C is for this process to handle
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        for line in self._process.stdout:
            self._lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
        self._process.wait()

    def _wait_until_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._started.wait()
        if self._error is not None:
            raise WorkerStartError(f"The worker did not start: {self._error}") from self._error
        while self.exit_status is None:
            if answers(self.address, min(1.0, timeout)):
                return
            if time.monotonic() > end:
                self.close()
                raise WorkerStartError(
                    f"The worker on port {self.port} did not answer within {timeout:g} seconds. "
                    f"Give it more time with `timeout`. It said: {self.last_words or 'nothing'}"
                )
        self._thread.join()
        raise WorkerStartError(
            f"The worker on port {self.port} ended at once with status {self.exit_status}. "
            f"It said: {self.last_words or 'nothing'}"
        )

    def close(self) -> None:
        """Ends the worker; what it computes is lost. Safe to call again."""
        if self.exit_status is None:
            self._process.kill()  # it keeps nothing that would need an orderly end
        self._process.wait()


def _parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m federated.runtime.worker",
        description=__doc__,
        epilog="It says when it is ready, and ends on SIGTERM, on Ctrl-C, and when the process "
        "that started it ends. Name it to the program that trains: "
        'remote_context(["host:8000", ...]).',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--port", type=int, required=True, help="TCP port to listen on, from 1 to 65535")
    add("--max_concurrency", type=int, help="clients computed at a time (the number of cores)")
    add("--timeout", type=float, default=60.0, help="seconds that it may take to start (60)")
    add("--detached", action="store_true", help="go on when the process that started it ends")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> int:
    """Runs a worker until somebody ends it; see `--help`.

    Args:
      args: the command line; that of the process if `None`.

    Returns:
      The exit status: 0 after a signal, 1 if the worker did not start or ended by itself.
    """
    options = _parse_args(args)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    parent = os.getppid()
    try:
        worker = WorkerProcess(options.port, options.max_concurrency, options.timeout)
    except (ValueError, WorkerStartError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"The worker is ready on port {worker.port} (process {worker.pid}).", flush=True)
    while not end.wait(0.5) and worker.exit_status is None:
        if not options.detached and os.getppid() != parent:
            break
    status = worker.exit_status
    worker.close()
    if status is not None:
        print(f"The worker ended by itself with status {status}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
