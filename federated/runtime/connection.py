"""Connections to TFF workers; one that is lost, or is none, raises an error instead of hanging.

The use of TFF's gRPC protocol, which is not public API, is in this module.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import grpc
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import executor_pb2_grpc

from federated.runtime import worker


class WorkerLostError(RuntimeError):
    """A worker is gone or was restarted; the result of the computation is unknown.

    The clients of a lost worker run again on the other workers, with a warning, and the round
    continues. This error is raised if no worker is left, or if the worker was lost in the server's
    part of a round, which draws the noise: that is never run again. Start the worker again, make a
    new context, and resume from the last state. The result of a lost private round may have been
    released all the same.

    Attributes:
      addresses: the workers that do not answer, `"host:port"`.
    """

    def __init__(self, message: str, addresses: Sequence[str] = ()):
        super().__init__(message)
        self.addresses = tuple(addresses)


class WorkerMismatchError(RuntimeError):
    """What answers at an address is not a worker, or a worker with another version of TFF.

    Attributes:
      addresses: where it answers, `"host:port"`.
    """

    def __init__(self, message: str, addresses: Sequence[str] = ()):
        super().__init__(message)
        self.addresses = tuple(addresses)


_START = "Start one with `python -m federated.runtime.worker --port N`."
_CLOSED = "its connection was closed during the computation"


class _Stub:
    """The stub through which `tff.framework.RemoteExecutor` calls a worker.

    TFF's own stub retries calls to a lost worker forever, and waits forever for a silent one. This
    one raises `WorkerLostError`, or `WorkerMismatchError` if what answers does not know the call. A
    call may take any time while the worker's machine accepts new connections.
    """

    def __init__(self, address: str, channel: grpc.Channel, timeout: float):
        self._address = address
        self._timeout = timeout
        self._lost = False
        self._calls = executor_pb2_grpc.ExecutorGroupStub(channel)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        # The worker calls them GetExecutor, CreateValue, CreateCall, Compute, Dispose and so on.
        rpc = getattr(self._calls, "".join(word.capitalize() for word in name.split("_")))
        return functools.partial(self._call, rpc)

    def dispose(self, request: Any) -> None:
        """Frees values. TFF calls it from finalizers, where an error would only be printed."""
        try:
            self._call(self._calls.Dispose, request)
        except WorkerLostError:
            pass  # they are gone with it

    def _call(self, rpc: grpc.UnaryUnaryMultiCallable, request: Any) -> Any:
        if self._lost:
            raise WorkerLostError("it was lost before", [self._address])
        try:
            call = rpc.future(request)
        except ValueError as error:  # so gRPC says that the channel was closed
            raise WorkerLostError(_CLOSED, [self._address]) from error
        while True:
            try:
                return call.result(timeout=self._timeout)
            except grpc.FutureTimeoutError:
                if not worker.answers(self._address, self._timeout):
                    self._lost = True
                    call.cancel()
                    raise WorkerLostError("it does not answer", [self._address]) from None
            except grpc.FutureCancelledError:
                raise WorkerLostError(_CLOSED, [self._address]) from None
            except grpc.RpcError as error:
                raise self._in_our_words(error) from error

    def _in_our_words(self, error: Any) -> Exception:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.CANCELLED:
            return WorkerLostError(_CLOSED, [self._address])
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return WorkerMismatchError(
                f"What answers at {self._address} is not a TFF worker ({details}). {_START}",
                [self._address],
            )
        if code == grpc.StatusCode.UNAVAILABLE or "No executor found" in details:  # restarted
            self._lost = True
            return WorkerLostError(details, [self._address])
        # What follows is about TFF's plan of the computation.
        said = (details.split(" while evaluating ")[0].splitlines() or [str(error)])[0]
        said = said.removeprefix("Failed to run computation: ")
        return RuntimeError(f"A computation failed in the worker at {self._address}: {said}")


class _Executors(tff.framework.ExecutorFactory):
    """The executors of one worker: one for each number of clients, a few at a time.

    TFF's own factory drops old executors without telling the worker, which keeps their last values.
    A different number of clients in each round would then fill the worker's memory.
    """

    def __init__(self, stub: _Stub, most: int):
        self._stub = stub
        self._most = most
        self._open: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def create_executor(self, cardinalities: dict[Any, int]) -> tff.framework.RemoteExecutor:
        cardinalities = {tff.CLIENTS: 0, **cardinalities}
        key = tuple(sorted((str(place), number) for place, number in cardinalities.items()))
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= self._most:
            self._open.popitem(last=False)[1].close()
        executor = tff.framework.RemoteExecutor(self._stub)
        executor.set_cardinalities(cardinalities)
        self._open[key] = executor
        return executor

    def clean_up_executor(self, cardinalities: dict[Any, int]) -> None:
        self.close()  # after an error; the others are recreated on demand

    def close(self) -> None:
        while self._open:
            try:
                self._open.popitem()[1].close()
            except WorkerLostError:
                pass  # its values are gone with it


def _without_late_losses(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Leaves out of the log what followed from a loss that was raised already.

    When a round fails, nobody awaits the other workers' shares any more. Python would print how
    each of them ends, or that it had not ended yet, below the error that says what to do.
    """
    not_ended = "task" in context and "exception" not in context
    if not not_ended and not isinstance(context.get("exception"), WorkerLostError):
        loop.default_exception_handler(context)


@functools.cache
def _said_versions() -> Any:
    """The computation that reads the versions in a worker's environment, and nothing else of it."""
    entry = rf"(?s)^(?:.*[\x00\n])?{worker.VERSIONS_VARIABLE}=(\{{[^\x00\n]*\}})(?:[\x00\n].*)?$"

    @tff.tensorflow.computation
    def said() -> tf.Tensor:
        lines = tf.data.TextLineDataset("/proc/self/environ")
        text = lines.reduce("", lambda read, line: tf.strings.join([read, line], "\n"))
        found = tf.strings.regex_replace(text, entry, r"\1")
        return tf.where(tf.strings.regex_full_match(text, entry), found, "{}")

    return said


def check_versions(address: str, found: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Checks that a worker's TFF is that of this machine.

    TFF's worker has its own TensorFlow inside, and needs neither Python nor this library to
    compute: their versions are for the message.

    Args:
      address: the worker, `"host:port"`.
      found: its versions, from `worker.versions`; empty if it does not say them.
      ours: the versions on this machine.

    Raises:
      WorkerMismatchError: if the versions of TFF differ.
    """
    name = "tensorflow-federated"
    if found and found.get(name) != ours[name]:
        raise WorkerMismatchError(
            f"The worker at {address} has another version of TFF: {_listed(found)}. Here: "
            f"{_listed(ours)}. Install the same tensorflow-federated on both machines and start "
            "the worker again.",
            [address],
        )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _require_no_secure_sums(comp: Any) -> None:
    """Raises NotImplementedError for a computation with secure sums, which no worker computes."""
    proto = tff.framework.serialize_computation(comp).SerializeToString()
    if b"federated_secure_" in proto:
        raise NotImplementedError(
            "TFF's workers compute no secure sums. Leave out `secure_aggregator()`, "
            "`ddp_secure_aggregator(...)`, `secure_sum_then_finalize` and the like. To test a "
            "process with them, call `tff.backends.test.set_sync_test_cpp_execution_context()`, "
            "which computes the same sums without any protection. Received: a computation with "
            "`federated_secure_...` intrinsics"
        )


def _compiled(comp: Any) -> Any:
    """The form of a computation that workers take."""
    _require_no_secure_sums(comp)
    return tff.backends.native.desugar_and_transform_to_native(comp)


class Worker(tff.framework.AsyncContext):
    """A connection to one worker, with its own thread to wait in.

    TFF's calls block, so without these threads the workers would compute one after another.

    Args:
      address: `"host:port"`.
      timeout: seconds of silence after which the worker is checked for life.
      open_executors: the number of executors to keep open; each costs the worker memory.
    """

    def __init__(self, address: str, timeout: float, open_executors: int):
        self.address = address
        self._channel = grpc.insecure_channel(address, worker.CHANNEL_OPTIONS)
        self._executors = _Executors(_Stub(address, self._channel, timeout), open_executors)
        self._context = tff.framework.AsyncExecutionContext(
            executor_fn=self._executors,
            compiler_fn=_compiled,
            transform_args=tff.tensorflow.transform_args,
            transform_result=tff.tensorflow.transform_result,
        )
        self._loop = asyncio.new_event_loop()
        # A daemon, so that Python does not wait for running computations at its end.
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _start(self, comp: Any, arg: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(self._context.invoke(comp, arg), self._loop)

    async def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs this worker's share of a round; called by TFF."""
        asyncio.get_running_loop().set_exception_handler(_without_late_losses)
        return await asyncio.wrap_future(self._start(comp, arg))

    def invoke_and_wait(self, comp: Any, arg: Any) -> Any:
        """Runs a whole computation in this worker."""
        return self._start(comp, arg).result()

    def versions(self) -> dict[str, str]:
        """What the worker says of its versions, see `worker.versions`; empty if it says nothing.

        Raises:
          WorkerLostError, WorkerMismatchError: if it does not answer, or is no worker.
        """
        try:
            said = json.loads(self.invoke_and_wait(_said_versions(), None))
        except (WorkerLostError, WorkerMismatchError):
            raise
        except Exception as error:
            raise WorkerMismatchError(
                f"What answers at {self.address} cannot compute for this version of TFF: {error} "
                f"{_START}",
                [self.address],
            ) from error
        return {str(name): str(number) for name, number in said.items()}

    def close(self) -> None:
        """Frees what the worker holds for this connection, if it still answers."""
        self._executors.close()
        self._channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


class Pool:
    """Several workers that share rounds; the clients of a lost one run again on the others.

    Guarantee: a round is released at most once. Only computations whose result stays between the
    workers and this process are run again: the sums over some of the clients, without noise, and
    the sums of two of these. The part of a round that follows is run once, or raises.

    Args:
      workers: the connections, at least two.
    """

    def __init__(self, workers: Sequence[Worker]):
        self._workers = list(workers)
        self.lost: dict[str, WorkerLostError] = {}
        self._lock = threading.Lock()
        self._forms: dict[Any, Any] = {}
        # Of the forms above, which keep them alive: before the aggregation, and of two sums.
        self._before_release: set[int] = set()
        self._context = self._new_context()

    def _new_context(self) -> tff.framework.MergeableCompExecutionContext:
        live = [w for w in self._workers if w.address not in self.lost]
        return tff.framework.MergeableCompExecutionContext([_Share(self, one) for one in live])

    def invoke_and_wait(self, comp: Any, arg: Any) -> Any:
        """Runs a computation, its clients divided equally between the workers that are left.

        Raises:
          WorkerLostError: see there.
        """
        with self._lock:
            if comp not in self._forms:
                _require_no_secure_sums(comp)
                form = tff.backends.native.compile_to_mergeable_comp_form(comp)
                self._before_release |= {id(form.up_to_merge), id(form.merge)}
                self._forms[comp] = form
            context, form = self._context, self._forms[comp]
            if len(self.lost) == len(self._workers):
                raise next(iter(self.lost.values()))
        return context.invoke(form, arg)

    def another(self, comp: Any, error: WorkerLostError, instead_of: Worker) -> Worker:
        """A worker to run a computation instead of a lost one.

        Raises:
          WorkerLostError: `error`, if no worker is left or if the computation must not run again.
        """
        with self._lock:
            news = instead_of.address not in self.lost
            self.lost.setdefault(instead_of.address, error)
            live = [w for w in self._workers if w.address not in self.lost]
            if news:
                self._context = self._new_context()
        if not live or id(comp) not in self._before_release:
            raise error
        if news:
            warnings.warn(
                f"Lost the worker at {instead_of.address} ({error}). Its clients run again on the "
                f"other workers, {', '.join(w.address for w in live)}, and so will those of later "
                "rounds. Nothing had been released.",
                stacklevel=2,
            )
        return live[hash(instead_of.address) % len(live)]


class _Share(tff.framework.AsyncContext):
    """The place of a worker in a pool, which another one takes when it is lost."""

    def __init__(self, pool: Pool, own: Worker):
        self._pool = pool
        self._worker = own

    async def invoke(self, comp: Any, arg: Any) -> Any:
        while True:
            used = self._worker
            try:
                return await used.invoke(comp, arg)
            except WorkerLostError as error:
                self._worker = self._pool.another(comp, error, used)
