"""A large batch in parts: clipped sums are collected until the batch is complete."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Accumulator:
    """Adds up the clipped sums of the parts of a batch.

    What it holds is raw, NOT private: it is no part of the optimizer's variables, so it is neither
    saved nor restored. A run that is resumed in the middle of a batch starts the batch anew;
    nothing of it was released.

    Attributes:
      steps: parts a batch.
    """

    def __init__(self, steps: int):
        """Creates it without sums.

        Args:
          steps: parts a batch, at least 2.
        """
        self.steps = steps
        self._sums: list[tf.Variable] = []
        with tf.init_scope():
            self._parts = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def num_parts(self) -> int:
        """How many parts of an unfinished batch are held."""
        return int(self._parts.numpy())

    def add(self, sums: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adds those of one part.

        Args:
          sums: float32 tensors of known shapes.

        Returns:
          The sums over all parts so far, and whether the batch is complete, a bool scalar; then
          the next part is the first of another batch.
        """
        self._build([s.shape for s in sums])
        parts = tf.convert_to_tensor(self._parts.assign_add(1))
        complete = parts >= self.steps
        self._parts.assign(tf.where(complete, tf.zeros_like(parts), parts))
        totals = [tf.convert_to_tensor(v.assign_add(s)) for v, s in zip(self._sums, sums)]
        for variable, total in zip(self._sums, totals):
            variable.assign(tf.where(complete, tf.zeros_like(total), total))
        return totals, complete

    def _build(self, shapes: list[tf.TensorShape]) -> None:
        if [v.shape for v in self._sums] == shapes:
            return
        with tf.init_scope():
            if self.num_parts:
                raise ValueError(
                    "The variables that are trained changed in the middle of a batch. Received: "
                    f"{self.num_parts} of {self.steps} parts. Let the number of steps be a "
                    "multiple of `gradient_accumulation_steps`."
                )
            self._sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
