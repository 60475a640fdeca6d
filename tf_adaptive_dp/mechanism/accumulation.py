"""Batches that arrive in parts, as with gradient accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

_TWO_SETS = (
    "With `gradient_accumulation_steps`, an optimizer must train the same variables with all parts "
    "of a batch. Received: two calls of `minimize` in a step, for different variables. "
    "Differentiate the sum of the losses once, or give each set of variables an optimizer of its "
    "own."
)


class Accumulator:
    """Adds the clipped sums of a batch that arrives in parts.

    It holds raw sums, which are NOT private. They do not belong to the optimizer's variables, so
    they are neither saved nor restored. A run that resumes in the middle of a batch starts that
    batch again; nothing of it was released.

    Attributes:
      steps: the number of parts in a batch.
    """

    def __init__(self, steps: int):
        """Creates it without sums.

        Args:
          steps: the number of parts in a batch, at least 2.
        """
        self.steps = steps
        # Count and sums, by variables: a step function that was traced earlier keeps its own.
        self._held: dict[tuple, tuple[tf.Variable, list[tf.Variable]]] = {}
        # The key of the variables that a step trains, by its graph.
        self._used_in: weakref.WeakKeyDictionary[tf.Graph, tuple] = weakref.WeakKeyDictionary()

    @property
    def num_parts(self) -> int:
        """How many parts of an incomplete batch are held."""
        return sum(int(parts.numpy()) for parts, _ in self._held.values())

    def drop(self) -> None:
        """Forgets the parts of an incomplete batch."""
        for parts, sums in self._held.values():
            for variable in (parts, *sums):
                variable.assign(tf.zeros_like(variable))

    def add(
        self, sums: Sequence[tf.Tensor], places: Sequence[int] = ()
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adds the sums of one part. After the last part it starts another batch.

        Args:
          sums: float32 tensors of known shapes.
          places: numbers of the variables that they belong to.

        Returns:
          The sums over all parts so far, and whether the batch is complete, a bool scalar. They
          become available only when every variable has been written.

        Raises:
          ValueError: if a step trains one set of variables after another, since both sets would be
            parts of one batch.
        """
        key = (tuple(places), tuple(tuple(s.shape) for s in sums))
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if self._used_in.setdefault(graph, key) != key:
                raise ValueError(_TWO_SETS)
        count, held = self._variables(key)
        parts = tf.convert_to_tensor(count.assign_add(1))
        complete = parts >= self.steps
        counted = tf.convert_to_tensor(
            count.assign(tf.where(complete, tf.zeros_like(parts), parts))
        )
        totals = [tf.convert_to_tensor(v.assign_add(s)) for v, s in zip(held, sums)]
        kept = [
            tf.convert_to_tensor(v.assign(tf.where(complete, tf.zeros_like(total), total)))
            for v, total in zip(held, totals)
        ]
        with tf.control_dependencies([counted, *kept]):
            return [tf.identity(total) for total in totals], tf.identity(complete)

    def _variables(self, key: tuple) -> tuple[tf.Variable, list[tf.Variable]]:
        if key in self._held and not tf.executing_eagerly():
            return self._held[key]
        with tf.init_scope():
            of_others = sum(int(p.numpy()) for k, (p, _) in self._held.items() if k != key)
            if of_others:
                raise ValueError(
                    "The variables that are trained changed in the middle of a batch. Received: "
                    f"{of_others} of {self.steps} parts. Let the number of steps be a "
                    "multiple of `gradient_accumulation_steps`."
                )
            if key not in self._held:
                sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in key[1]]
                self._held[key] = tf.Variable(0, dtype=tf.int64, trainable=False), sums
        return self._held[key]
