"""Lets threads that share an optimizer change its state one at a time."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp._keras.tracing import in_xla
from tf_adaptive_dp.mechanism import replicas

_NUMBERS = itertools.count()  # names locks; a graph holds the handle only
# Threads that trace steps at the same time have to get the same lock.
_CREATION = threading.Lock()


class Turns:
    """Runs changes of shared state one after the other, in graphs and eagerly.

    Guarantee: no two changes that are passed to one object run at the same time, whatever functions
    they belong to, so each change sees what the previous one wrote. Steps compiled with XLA take no
    turns, since XLA locks their variables from beginning to end. Steps on several replicas take
    none either, since replicas wait for each other.
    """

    def __init__(self) -> None:
        self._handle: tf.Tensor | None = None

    def __reduce__(self) -> tuple:
        """Gives copies a lock of their own."""
        return Turns, ()

    def take(self, change: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Runs a change when its turn comes.

        The inputs of the change should be computed before. In a graph, call this under control
        dependencies on them.

        Args:
          change: reads and writes variables. The tensors it returns must be available only when
            every variable has been written. It must not take a turn of the same object.

        Returns:
          What `change` returned.
        """
        if in_xla() or replicas.num_replicas() > 1:
            return change()
        lock = tf.raw_ops.MutexLock(mutex=self._mutex())
        try:
            with tf.control_dependencies([lock]):
                results = change()
            with tf.control_dependencies(results):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        finally:
            del lock  # in eager execution it is the lock, and a traceback would keep it alive
        return results

    def _mutex(self) -> tf.Tensor:
        with _CREATION:
            if self._handle is None:
                with tf.init_scope(), tf.device("CPU:0"):
                    name = f"tf_adaptive_dp_turns_{next(_NUMBERS)}"
                    self._handle = tf.raw_ops.MutexV2(shared_name=name)
                # The lock has a thread of its own, which must end with this object.
                weakref.finalize(self, _destroy, self._handle).atexit = False
        return self._handle


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        tf.raw_ops.DestroyResourceOp(resource=handle)
