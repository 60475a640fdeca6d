"""One thread at a time, where several threads share an optimizer."""

from __future__ import annotations

import itertools
import weakref
from typing import Callable

import tensorflow as tf

from tf_adaptive_dp.gradients.graph import in_xla
from tf_adaptive_dp.mechanism import replicas

_NUMBERS = itertools.count()  # in no graph, which has the handle alone


class Turns:
    """Lets threads change what they share one after the other, in graphs and eagerly.

    Guarantee: of all changes that are passed to one object, in whatever function, no two run at the
    same time, so that each sees what the one before it wrote. A compiled step (XLA) takes no turns:
    it locks its variables from its beginning to its end, against other such steps. Steps on several
    replicas take none either, since they wait for each other.
    """

    def __init__(self):
        self._handle: tf.Tensor | None = None

    def __reduce__(self) -> tuple:
        """Copies have turns of their own."""
        return Turns, ()

    def take(self, change: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Makes a change when it is its turn.

        What the change needs should have been computed by then; in a graph, call this under
        control dependencies of it.

        Args:
          change: reads and writes variables. It returns tensors that are known only once all was
            written, and must not take a turn of the same object.

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
            del lock  # eagerly this tensor is the lock, which an exception's traceback would keep
        return results

    def _mutex(self) -> tf.Tensor:
        if self._handle is None:
            with tf.init_scope(), tf.device("CPU:0"):
                name = f"tf_adaptive_dp_turns_{next(_NUMBERS)}"
                self._handle = tf.raw_ops.MutexV2(shared_name=name)
            # It has a thread of its own, which has to end with this object.
            weakref.finalize(self, _destroy, self._handle).atexit = False
        return self._handle


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        tf.raw_ops.DestroyResourceOp(resource=handle)
