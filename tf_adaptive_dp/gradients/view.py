"""Rearrangements of a variable's entries, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class View(NamedTuple):
    """A variable with its axes exchanged and reshaped: norms are the same in every view.

    Attributes:
      shape: that of the variable.
      steps: what is done to it in turn: ("transpose", order), ("reshape", shape) or ("negate",).

    >>> view = View((2, 3)).transpose([1, 0]).reshape([1, 3, 2])
    >>> view.apply(tf.ones([2, 3])).shape, view.invert(tf.ones([5, 1, 3, 2]), 1).shape
    (TensorShape([1, 3, 2]), TensorShape([5, 2, 3]))
    """

    shape: tuple[int, ...]
    steps: tuple[tuple, ...] = ()

    def transpose(self, order: Sequence[int]) -> View:
        """The view with its axes in another order."""
        return self._with("transpose", tuple(int(a) for a in order))

    def reshape(self, shape: Sequence[int]) -> View:
        """The view in another shape."""
        return self._with("reshape", tuple(int(n) for n in shape))

    def negate(self) -> View:
        """The view times −1."""
        return self._with("negate")

    def _with(self, *step) -> View:
        return self._replace(steps=(*self.steps, step))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape before each step and after the last."""
        shapes = [self.shape]
        for kind, *argument in self.steps:
            before = shapes[-1]
            if kind == "transpose":
                shapes.append(tuple(before[a] for a in argument[0]))
            else:
                shapes.append(argument[0] if kind == "reshape" else before)
        return shapes

    def apply(self, tensor: tf.Tensor) -> tf.Tensor:
        """From the variable to the view.

        Args:
          tensor: in the shape of the variable, or one that broadcasts to it.

        Returns:
          The tensor in the view; axes of length 1 stay so where the view allows, and the result
          broadcasts to the view.
        """
        if not tensor.shape.is_fully_defined() and None not in self.shape:
            tensor = tf.broadcast_to(tensor, self.shape)
        missing = len(self.shape) - tensor.shape.rank
        if missing:
            tensor = tf.reshape(tensor, [1] * missing + tensor.shape.as_list())
        for (kind, *argument), before in zip(self.steps, self.shapes):
            if kind == "negate":
                tensor = -tensor
            elif kind == "reshape":
                tensor = _reshape(tensor, before, argument[0])
            else:
                tensor = tf.transpose(tensor, argument[0])
        return tensor

    def invert(self, tensor: tf.Tensor, leading: int = 0) -> tf.Tensor:
        """From the view back to the variable, for tensors with so many axes before it."""
        front = tf.shape(tensor)[:leading]
        for (kind, *argument), before in zip(reversed(self.steps), reversed(self.shapes[:-1])):
            if kind == "negate":
                tensor = -tensor
            elif kind == "reshape":
                tensor = tf.reshape(tensor, tf.concat([front, before], 0) if leading else before)
            else:
                back = np.argsort(argument[0]) + leading
                tensor = tf.transpose(tensor, [*range(leading), *back])
        return tensor


def _reshape(tensor: tf.Tensor, before: Sequence[int], after: Sequence[int]) -> tf.Tensor:
    """Reshapes what broadcasts to `before` to what broadcasts to `after`."""
    if tensor.shape == before or 0 in before:
        return tf.reshape(tf.broadcast_to(tensor, before), after)
    wide, result = [], []
    for of_before, of_after in _blocks(before, after):
        lengths = [tensor.shape[a] for a in of_before]
        full = any(n != 1 for n in lengths)
        wide += [before[a] if full else 1 for a in of_before]
        result += [after[a] if full else 1 for a in of_after]
    return tf.reshape(tf.broadcast_to(tensor, wide), result)


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of neighbouring axes that a reshape makes of each other."""
    blocks, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, other, sizes = i, j, [1, 1]
        if i < len(before):
            sizes[0], i = before[i], i + 1
        if j < len(after):
            sizes[1], j = after[j], j + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0], i = sizes[0] * before[i], i + 1
            else:
                sizes[1], j = sizes[1] * after[j], j + 1
        blocks.append((list(range(start, i)), list(range(other, j))))
    return blocks
