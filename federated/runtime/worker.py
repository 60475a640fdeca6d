"""Starts a TFF worker: the program that computes for `federated.runtime.contexts`.

    python -m federated.runtime.worker --port 8000

The worker runs any TensorFlow graph that it is sent, checks no password, encrypts nothing, and
listens on every address of its machine. Run it only where no stranger can reach the port: in a
closed network, behind a firewall, or through SSH tunnels.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc

# A separate process becomes the worker, since code between fork and exec of a process with many
# threads may deadlock. The kernel kills it (1 is PR_SET_PDEATHSIG) when the process that started it
# ends in any way; the second condition covers an end before the first call.
_BECOME_WORKER = """\
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, signal.SIGKILL) or os.getppid() != int(sys.argv[1]):
    sys.exit("cannot tie the worker to the process that starts it (this needs Linux)")
os.execv(sys.argv[2], sys.argv[2:])
"""

# Messages of any length. Keepalive pings start after five minutes of a call; workers reject more
# frequent pings as an attack.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 301_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

# Defaults for a worker; the environment of this process takes precedence.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2"}
# Where a worker finds the versions of the machine that it runs on. TFF's worker itself says none,
# but it runs TensorFlow graphs, and these can read its environment.
VERSIONS_VARIABLE = "TF_ADAPTIVE_DP_WORKER"


class WorkerStartError(RuntimeError):
    """A worker did not start; the message says why."""


def binary() -> str:
    """The path of the worker binary in TFF's package, found without importing TFF.

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


def versions() -> dict[str, str]:
    """The versions on this machine, found without importing TensorFlow or TFF.

    Returns:
      Those of `tf_adaptive_dp`, `tensorflow-federated`, `tensorflow` and `python`; "unknown" where
      a package has none.
    """
    found = importlib.util.find_spec("tf_adaptive_dp")
    folder = next(iter(found.submodule_search_locations or ())) if found else ""
    file = pathlib.Path(folder, "version.py")
    ours = runpy.run_path(str(file))["__version__"] if file.is_file() else "unknown"

    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    return {
        "tf_adaptive_dp": ours,
        "tensorflow-federated": installed("tensorflow-federated"),
        "tensorflow": installed("tensorflow"),
        "python": platform.python_version(),
    }


def answers(address: str, timeout: float) -> bool:
    """Whether a gRPC server accepts a new connection.

    Args:
      address: `"host:port"`.
      timeout: seconds to wait.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout)
        except grpc.FutureTimeoutError:
            return False
    return True


def _hold_port(port: int) -> socket.socket:
    """Reserves a port until the worker listens on it.

    Two workers would silently share a port. Binding a socket without listening fails if another
    process listens on the port, and does not hinder the worker that is started next.
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

    It ends with `close`, or when this process ends in any way (the kernel ensures that). Its output
    goes to this process's stderr; error messages quote its last lines.

    Args:
      port: the port to listen on; `None` takes a free one.
      max_concurrency: the number of clients to compute in parallel; `None` takes the number of
        cores that this process may use.
      timeout: seconds to wait for the start.

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
        self._process: subprocess.Popen[str] | None = None
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
            # To the kernel a process's parent is the thread that started it, so this thread lives
            # as long as the worker.
            self._thread = threading.Thread(target=self._run, args=[command], daemon=True)
            self._thread.start()
            self._wait_until_ready(timeout)

    @property
    def address(self) -> str:
        """The address for this process, `"host:port"`."""
        return f"127.0.0.1:{self.port}"

    @property
    def _child(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("The worker has not been started.")
        return self._process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """`None` while it runs; a negative number is the signal that killed it."""
        return self._child.poll()

    @property
    def resident_size(self) -> int:
        """Its resident memory in bytes; 0 if it has ended."""
        try:
            pages = pathlib.Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def wait(self, timeout: float) -> int | None:
        """Waits at most `timeout` seconds for its end, and returns `exit_status`."""
        self._thread.join(timeout)
        return self.exit_status

    @property
    def last_words(self) -> str:
        """The last lines that it printed."""
        return "".join(self._lines)

    def _run(self, command: list[str]) -> None:
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BECOME_WORKER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **_ENVIRONMENT,
                    **os.environ,
                    VERSIONS_VARIABLE: json.dumps(versions()),
                },
                start_new_session=True,  # Ctrl-C is for this process to handle
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        for line in process.stdout or ():
            self._lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
        process.wait()

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
        """Kills the worker; its running computations are lost. Safe to call again."""
        if self.exit_status is None:
            self._child.kill()  # it holds nothing that needs an orderly shutdown
        self._child.wait()


def _parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m federated.runtime.worker",
        description=__doc__,
        epilog="It prints a line when it is ready, and ends on SIGTERM, on Ctrl-C, and when the "
        "process that started it ends. Pass its address to the program that trains: "
        'remote_context(["host:8000", ...]).',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--port", type=int, required=True, help="TCP port to listen on, from 1 to 65535")
    add(
        "--max_concurrency",
        type=int,
        help="clients computed in parallel (default: the number of cores)",
    )
    add("--timeout", type=float, default=60.0, help="seconds to wait for the start (60)")
    add(
        "--detached", action="store_true", help="keep running when the process that started it ends"
    )
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> int:
    """Runs a worker until it is told to end; see `--help`.

    Args:
      args: the command line; `None` takes the program's.

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
