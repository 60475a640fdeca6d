"""TFF contexts: a local worker that ends with this process, or workers on several machines.

    federated.local_context()                            # one worker, which ends with Python
    federated.remote_context(["ada:8000", "bob:8000"])   # `python -m federated.runtime.worker`
    federated.local_context().for_programs()             # for `tff.learning.programs.train_model`

Workers check no password and encrypt nothing. Anyone who can reach a worker can make it run any
TensorFlow graph, which may read and write files, and the clients' data travels to the workers. Use
them only in closed networks, or through SSH tunnels (`ssh -L 8000:localhost:8000 ada`, then the
address `"localhost:8000"`) with the port closed to everyone else.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import gc
import re
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow_federated as tff

from federated.runtime import worker
from federated.runtime.connection import (
    Pool,
    Worker,
    WorkerLostError,
    WorkerMismatchError,
    check_versions,
)
from tf_adaptive_dp import checks

__all__ = ["Runtime", "WorkerLostError", "WorkerMismatchError", "local_context", "remote_context"]


_LAST_TRY = 2.0  # seconds for the other workers to answer when one is lost
# Open executors of a worker: for all clients and none; beside other workers, for its share too.
_ALONE, _TOGETHER = 2, 4
_SETTLED_AFTER = 50  # computations that determine a worker's normal size, the largest so far
# A local worker that has grown by more than both is replaced.
_GROWTH = 0.05  # share of its normal size
_MUCH = 50 * 2**20  # bytes


class Runtime(tff.framework.SyncContext):
    """TFF's default context, made by `local_context` and `remote_context`.

    As a context manager it closes at the end of its block and restores the previous default.

    Attributes:
      addresses: the addresses of the workers, `"host:port"`.
      versions: for each worker of `remote_context`, what it said of its versions when it was
        connected: those of `tf_adaptive_dp`, `tensorflow-federated`, `tensorflow` and `python`.
        Empty for a worker that was not started by `python -m federated.runtime.worker`.
      reads_own_files: whether workers can read the files that this process has open.
    """

    reads_own_files = False

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float,
        processes: Sequence[worker.WorkerProcess] = (),
    ):
        self.addresses = tuple(addresses)
        self._timeout = timeout
        self._processes = list(processes)
        executors = _ALONE if len(addresses) == 1 else _TOGETHER
        self._workers = [Worker(address, timeout, executors) for address in addresses]
        self.versions = {} if processes else self._said_versions()
        self._pool = Pool(self._workers) if len(addresses) > 1 else None
        self._invoke = (self._pool or self._workers[0]).invoke_and_wait
        self._before = [tff.framework.get_context_stack().current]
        if isinstance(self._before[0], Runtime):  # one that nobody else holds closes here
            self._before = [weakref.ref(self._before[0])]
        held = (self._workers, self._processes, self._before)
        self._finalizer = weakref.finalize(self, _close, *held)
        tff.framework.set_default_context(self)

    def _said_versions(self) -> dict[str, dict[str, str]]:
        """Asks each worker, all at the same time; closes the connections if one does not fit."""
        ours = worker.versions()

        def ask(connection: Worker) -> dict[str, str]:
            found = connection.versions()
            check_versions(connection.address, found, ours)
            return found

        try:
            with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as threads:
                return dict(zip(self.addresses, threads.map(ask, self._workers)))
        except BaseException:
            _close(self._workers, [], [])
            raise

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the current workers that this context started; none for a remote one."""
        return tuple(process.pid for process in self._processes)

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation; called by TFF.

        Raises:
          WorkerLostError: if a worker is gone, or this context was closed.
        """
        if not self._finalizer.alive:
            raise WorkerLostError(
                "This context was closed, and its workers with it. Make a new one with "
                "`local_context()` or `remote_context([...])`.",
                self.addresses,
            )
        try:
            return self._invoke(comp, arg)
        except WorkerLostError as error:
            raise self._explain(error) from error.__cause__

    def _explain(self, error: WorkerLostError) -> WorkerLostError:
        known = {*error.addresses, *(self._pool.lost if self._pool else ())}
        others = [a for a in self.addresses if a not in known]
        found = unreachable(others, min(self._timeout, _LAST_TRY))
        lost = [a for a in self.addresses if a not in others or a in found]
        ended = [
            f"Its process {process.pid} ended with status {process.exit_status}; -9 often means a "
            f"lack of memory. Its last words: {process.last_words or 'none'}"
            for process in self._processes
            if process.wait(1.0) is not None
        ]
        whom = "workers" if len(lost) > 1 else "worker"
        return WorkerLostError(
            f"Lost in the middle of a computation: the {whom} at {', '.join(lost)} ({error}). "
            "Start it again if it does not run, make a new context and continue from the last "
            "state. " + " ".join(ended),
            lost,
        )

    def for_programs(self) -> tff.program.FederatedContext:
        """Makes a context for TFF's programs, whose computations run in these workers.

        ```python
        federated.local_context().for_programs()
        asyncio.run(tff.learning.programs.train_model(train_process=process, ...))
        ```

        A program of TFF keeps no ledger: count its rounds yourself, failed ones included.

        Returns:
          The context, now TFF's default. It holds this one until it is replaced.
        """
        context = tff.program.NativeFederatedContext(_Asynchronous(self))
        tff.framework.set_default_context(context)
        return context

    def close(self) -> None:
        """Disconnects, and ends workers that `local_context` started. Safe to call again."""
        before = self._before[0] if self._before else None
        self._finalizer()
        if tff.framework.get_context_stack().current is not self:
            return
        if isinstance(before, weakref.ref):
            before = before()
        if before is None or (isinstance(before, Runtime) and not before._finalizer.alive):
            before = tff.backends.native.create_sync_local_cpp_execution_context()  # TFF's own
        tff.framework.set_default_context(before)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Asynchronous(tff.framework.AsyncContext):
    """A runtime whose computations can be awaited; each waits in a thread."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime

    async def invoke(self, comp: Any, arg: Any) -> Any:
        return await asyncio.to_thread(self._runtime.invoke, comp, arg)


class _LocalRuntime(Runtime):
    """A context that replaces its worker between two computations when the worker has grown.

    An allocator never recovers all memory of rounds with different clients. The result of a
    computation is in Python when it ends, so a new worker lacks nothing that the old one held.
    """

    reads_own_files = sys.platform == "linux"

    def __init__(self, max_concurrency: int | None, timeout: float):
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()
        self._running = self._finished = self._largest = 0
        process = self._new_process(timeout)
        try:
            super().__init__([process.address], timeout, [process])
        except BaseException:
            process.close()
            raise

    def invoke(self, comp: Any, arg: Any) -> Any:
        with self._lock:
            if not self._running and self._finalizer.alive and self._has_grown():
                self._renew()
            self._running += 1
        try:
            return super().invoke(comp, arg)
        finally:
            with self._lock:
                self._running -= 1
                self._finished += 1

    def _new_process(self, timeout: float) -> worker.WorkerProcess:
        return worker.WorkerProcess(None, self._max_concurrency, timeout)

    def _has_grown(self) -> bool:
        size = self._processes[0].resident_size
        if self._finished <= _SETTLED_AFTER:
            self._largest = max(self._largest, size)
        return size - self._largest > max(_GROWTH * self._largest, _MUCH)

    def _renew(self) -> None:
        process = self._new_process(self._timeout)
        old = self._workers[:], self._processes[:]
        self.addresses = (process.address,)
        self._processes[:] = [process]
        self._workers[:] = [Worker(process.address, self._timeout, _ALONE)]
        self._invoke = self._workers[0].invoke_and_wait
        self._finished = self._largest = 0
        _close(*old, before=[])


def _close(
    workers: Sequence[Worker], processes: Sequence[worker.WorkerProcess], before: list[Any]
) -> None:
    for process in processes:
        process.close()
    for connection in workers:
        connection.close()
    before.clear()  # TFF's own context logs errors if it lives until Python's end


class _Nowhere(tff.framework.SyncContext):
    def invoke(self, comp: Any, arg: Any) -> Any:
        raise RuntimeError("Python is shutting down; nothing can be computed.")


@atexit.register
def _leave_tffs_own_context() -> None:
    """Drops TFF's context, which logs errors and may leave its worker behind at Python's end."""
    tff.framework.set_default_context(_Nowhere())
    gc.collect()


def unreachable(addresses: Sequence[str], timeout: float) -> list[str]:
    """Returns the workers that accept no new connection; tries all of them in parallel.

    Args:
      addresses: `"host:port"` of each worker.
      timeout: seconds to wait.
    """
    with concurrent.futures.ThreadPoolExecutor(max(1, len(addresses))) as threads:
        found = threads.map(lambda address: worker.answers(address, timeout), addresses)
        return [address for address, answered in zip(addresses, found) if not answered]


def local_context(max_concurrency: int | None = None, *, timeout: float = 60.0) -> Runtime:
    """Computes in a worker on this machine that ends with this process, however that ends.

    To keep memory constant, a worker that has grown by more than 5% and 50 MiB since its first 50
    computations is replaced between two computations. Call this function once at the start of a
    program, or use it as a context manager:

    ```python
    with federated.local_context():
        output = process.next(state, datasets)
    ```

    Args:
      max_concurrency: the number of clients to compute in parallel. More clients need more memory,
        and more than the number of cores gains nothing. `None` takes the number of cores.
      timeout: seconds for the worker to start, and seconds of silence after which it is checked for
        life. A computation may take longer.

    Returns:
      The context, now TFF's default.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
      federated.WorkerStartError: if the worker does not start. A computation raises it if the
        replacement of a worker does not start.
    """
    if max_concurrency is not None:
        checks.integer("max_concurrency", max_concurrency, 1)
    checks.number("timeout", timeout, 0, strict=True)
    return _LocalRuntime(max_concurrency, timeout)


def remote_context(addresses: Sequence[str], *, timeout: float = 30.0) -> Runtime:
    """Spreads the clients of each round over workers on other machines.

    Start `python -m federated.runtime.worker --port N` on each machine first. The docstring of this
    module says how to protect that port. Each worker computes an equal share of a round's clients,
    so the slowest one sets the pace, and workers beyond the number of clients are idle. One of them
    computes the server's part of a round (such as the noise), once. If a worker is lost while it
    computes for clients, the others run its clients again, with a warning, within the same round;
    nothing was released yet, so the round counts once. Later rounds do without it.

    Args:
      addresses: `"host:port"` of each worker.
      timeout: seconds for a worker to answer, at the start and whenever it has been silent for as
        long. A computation may take longer.

    Returns:
      The context, now TFF's default.

    Raises:
      ValueError: if an argument is out of range, or an address is not like `"host:port"`.
      WorkerLostError: if a worker does not answer; it names all of them.
      WorkerMismatchError: if something other than a worker answers, or a worker with another
        version of TFF.
    """
    checks.number("timeout", timeout, 0, strict=True)
    if isinstance(addresses, str) or not addresses:
        raise ValueError(
            "`addresses` must be a list of at least one worker. "
            f'Received: addresses={addresses!r}. Write ["host:port", ...].'
        )
    for address in addresses:
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d+)", address)
        if not found or not 1 <= int(found[2]) <= 65535:
            raise ValueError(
                '`addresses` must be like "host:port", with a port from 1 to 65535 and an IPv6 '
                f"address in brackets. Received: {address!r}."
            )
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            f"`addresses` must name each worker once. Received: addresses={list(addresses)}."
        )
    lost = unreachable(addresses, timeout)
    if lost:
        raise WorkerLostError(
            f"No worker answers at {', '.join(lost)} within {timeout:g} seconds. Start it there "
            "with `python -m federated.runtime.worker --port N`, and check the name, the port and "
            "the firewall.",
            lost,
        )
    return Runtime(addresses, timeout)
