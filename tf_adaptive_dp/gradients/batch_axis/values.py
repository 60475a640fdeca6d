"""The layouts of tensors: which axis is the batch, if any."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Union

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import TensorReference
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Size


class BatchAxis(NamedTuple):
    """The axis whose index tells the example: index = (o·B + example)·inner + j.

    A dense layer on sequences merges batch and time into one axis, with inner = time. Dilated
    convolutions put blocks in front of the batch, with outer = blocks.

    Attributes:
      axis: the axis, counted from the front.
      outer: the number of blocks that each hold the whole batch.
      inner: the number of consecutive entries that belong to one example.
    """

    axis: int = 0
    outer: Size = ONE
    inner: Size = ONE

    def at(self, axis: int) -> BatchAxis:
        """The same layout on another axis."""
        return self._replace(axis=axis)


class CrossExample(NamedTuple):
    """The layout of values in which the examples of the batch are, or may be, mixed.

    Attributes:
      op: the operation that mixed them.
      why: what it does, for the error message.
      is_certain: whether the search shows that it mixes them. Otherwise it only cannot rule it out,
        since a shape or an operation is unknown, or the values depend on places in the batch.
    """

    op: tf.Operation
    why: str
    is_certain: bool = True


@dataclasses.dataclass(frozen=True)
class Rows:
    """The layout of a list as long as the batch whose element i belongs to example i."""


@dataclasses.dataclass(frozen=True)
class OneExample:
    """The layout of what belongs to one example, in a loop over the examples of the batch.

    Attributes:
      index: a reference to the tensor that holds the index of the example.
    """

    index: TensorReference

    @property
    def loop(self) -> tf.Graph:
        """The graph in which the index is computed."""
        return self.index.deref().graph


@dataclasses.dataclass(frozen=True)
class Parts:
    """The layout of a vector with any number of entries for each example, in their order.

    Attributes:
      made_by: the operation that made the parts, and knows how many each example has.
      rows: the batch axis of the tensor that has one row for each of the examples' vectors.
    """

    made_by: tf.Operation
    rows: BatchAxis


# The layouts of a tensor; `None` for no batch axis.
Layout = Union[BatchAxis, CrossExample, Rows, OneExample, Parts, None]


class DataIndependent(NamedTuple):
    """Marks values that do not depend on the data.

    Attributes:
      layout: their batch axis, if the batch size is among their sizes; `Rows` for an empty list
        with room for one element per example.
      tied: the loop bodies from whose iteration to iteration the values change.
    """

    layout: Layout = None
    tied: frozenset[tf.Graph] = frozenset()


# What is known about a tensor: its layout, and whether its values depend on the data.
Value = Union[Layout, DataIndependent]


def by_example(
    tensor: tf.Tensor, layout: BatchAxis, num_rows: tf.Tensor | int, examples_per_row: int | None
) -> tf.Tensor:
    """Moves the examples to axis 0, and the other entries of the batch axis to axis 1.

    Args:
      tensor: of any shape.
      layout: its batch axis.
      num_rows: B, or the number of microbatches or users, whose examples then share a row.
      examples_per_row: 1, or as many as a user has; `None` for microbatches.

    Returns:
      [num_rows, T, ...the other axes in their order]; T = 1 for an ordinary batch axis and one
      example in each row.
    """
    axis, outer = layout.axis, layout.outer.static
    if outer is None:
        raise ValueError(f"`layout` must have a known number of blocks. Received: {layout}.")
    shape = static_or_dynamic_shape(tensor)
    if examples_per_row is not None and layout.inner.static is not None:
        each = layout.inner.static * examples_per_row
    elif isinstance(num_rows, int) and isinstance(shape[axis], int):
        each = shape[axis] // outer // num_rows
    else:
        each = shape[axis] // outer // tf.maximum(num_rows, 1)
    split = [*shape[:axis], outer, num_rows, each, *shape[axis + 1 :]]
    if outer == 1 and axis == 0:
        return tf.reshape(tensor, split[1:])
    others = [*range(axis), *range(axis + 3, len(split))]
    moved = tf.transpose(tf.reshape(tensor, split), [axis + 1, axis, axis + 2, *others])
    return tf.reshape(moved, [num_rows, outer * each, *(split[a] for a in others)])


def static_or_dynamic_shape(tensor: tf.Tensor) -> list:
    """The sizes of the axes of a tensor, as numbers where they are known."""
    if tensor.shape.is_fully_defined():
        return tensor.shape.as_list()
    dynamic = tf.shape(tensor)
    return [dynamic[a] if n is None else n for a, n in enumerate(tensor.shape)]
