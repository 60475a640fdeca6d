"""Connections to TFF workers that may be lost: then there is an error, and nothing hangs."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable

import grpc
import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import executor_pb2_grpc

from federated.runtime import worker


class WorkerLostError(RuntimeError):
    """A worker is gone or was restarted; the result of the computation is unknown.

    Nothing is repeated behind the user's back. Start the worker again, make a new context, and go
    on from the last state; a private round that was lost may have been released all the same.

    Attributes:
      addresses: the workers that do not answer, `"host:port"`.
    """

    def __init__(self, message: str, addresses: Sequence[str] = ()):
        super().__init__(message)
        self.addresses = tuple(addresses)


class _Stub:
    """What `tff.framework.RemoteExecutor` calls the worker through.

    TFF's own repeats calls to a lost worker for ever and waits for ever for one that is silent.
    This one raises `WorkerLostError`. A call may take as long as it likes while the worker's
    machine accepts new connections.
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

    def _call(self, rpc: grpc.UnaryUnaryMultiCallable, request: Any) -> Any:
        if self._lost:
            raise WorkerLostError("it was lost before", [self._address])
        call = rpc.future(request)
        while True:
            try:
                return call.result(timeout=self._timeout)
            except grpc.FutureTimeoutError:
                if not worker.answers(self._address, self._timeout):
                    self._lost = True
                    call.cancel()
                    raise WorkerLostError("it does not answer", [self._address]) from None
            except grpc.RpcError as error:
                lost = error.code() == grpc.StatusCode.UNAVAILABLE
                restarted = "No executor found" in (error.details() or "")
                if lost or restarted:
                    self._lost = True
                    raise WorkerLostError(error.details(), [self._address]) from error
                raise


class _Executors(tff.framework.ExecutorFactory):
    """The executors of one worker: one for each number of clients, a few at a time.

    TFF's own factory forgets old ones without telling the worker, which keeps their last values,
    so that a different number of clients in each round would fill the worker's memory.
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
        self.close()  # after an error; the others are made again when they are needed

    def close(self) -> None:
        while self._open:
            try:
                self._open.popitem()[1].close()
            except WorkerLostError:
                pass  # and what it held with it


class Worker(tff.framework.AsyncContext):
    """A connection to one worker, with a thread of its own to wait in.

    TFF's calls block, so that without the threads the workers would compute one after the other.

    Args:
      address: `"host:port"`.
      timeout: seconds of silence after which the worker is asked whether it is there.
      open_executors: as many numbers of clients it is ready for at a time: each costs it memory.
    """

    def __init__(self, address: str, timeout: float, open_executors: int):
        self.address = address
        self._channel = grpc.insecure_channel(address, worker.CHANNEL_OPTIONS)
        self._executors = _Executors(_Stub(address, self._channel, timeout), open_executors)
        self._context = tff.framework.AsyncExecutionContext(
            executor_fn=self._executors,
            compiler_fn=tff.backends.native.desugar_and_transform_to_native,
            transform_args=tff.tensorflow.transform_args,
            transform_result=tff.tensorflow.transform_result,
        )
        self._loop = asyncio.new_event_loop()
        # A daemon: Python does not wait for what the worker still computes when it ends.
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _start(self, comp: Any, arg: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(self._context.invoke(comp, arg), self._loop)

    async def invoke(self, comp: Any, arg: Any) -> Any:
        """Computes; TFF calls this for each worker's share of a round."""
        return await asyncio.wrap_future(self._start(comp, arg))

    def invoke_and_wait(self, comp: Any, arg: Any) -> Any:
        """Computes all of it in this worker."""
        return self._start(comp, arg).result()

    def close(self) -> None:
        """Frees what the worker holds for this connection, if it still answers."""
        self._executors.close()
        self._channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
