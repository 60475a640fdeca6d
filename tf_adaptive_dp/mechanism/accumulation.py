"""Batches that arrive in parts, as with gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


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
        # Count and sums, by shapes: a step function that was traced earlier keeps its own.
        self._held: dict[tuple, tuple[tf.Variable, list[tf.Variable]]] = {}

    @property
    def num_parts(self) -> int:
        """How many parts of an incomplete batch are held."""
        return sum(int(parts.numpy()) for parts, _ in self._held.values())

    def drop(self) -> None:
        """Forgets the parts of an incomplete batch."""
        for parts, sums in self._held.values():
            for variable in (parts, *sums):
                variable.assign(tf.zeros_like(variable))

    def add(self, sums: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adds the sums of one part. After the last part it starts another batch.

        Args:
          sums: float32 tensors of known shapes.

        Returns:
          The sums over all parts so far, and whether the batch is complete, a bool scalar. They
          become available only when every variable has been written.
        """
        count, held = self._variables(tuple(tuple(s.shape) for s in sums))
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

    def _variables(self, shapes: tuple) -> tuple[tf.Variable, list[tf.Variable]]:
        if shapes in self._held:
            return self._held[shapes]
        with tf.init_scope():
            if self.num_parts:
                raise ValueError(
                    "The variables that are trained changed in the middle of a batch. Received: "
                    f"{self.num_parts} of {self.steps} parts. Let the number of steps be a "
                    "multiple of `gradient_accumulation_steps`."
                )
            sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
            self._held[shapes] = tf.Variable(0, dtype=tf.int64, trainable=False), sums
        return self._held[shapes]
