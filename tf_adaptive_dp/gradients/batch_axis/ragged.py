"""What happens to the parts of examples, as when texts are split into words.

`tf.strings.split` and the preprocessing layers built on it return a ragged tensor: one vector with
the words of all examples, in the order of the examples, and numbers that say how many words each
one has. The vector may go through operations that work entry by entry. It becomes a batch again
where it is padded to a fixed length, or counted example by example. The numbers may only serve for
that: everything else that is computed from them, or from the length of the vector, counts as mixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value
from tf_adaptive_dp.gradients.batch_axis.operation_types import ELEMENTWISE
from tf_adaptive_dp.gradients.batch_axis.operations import (
    register_layout,
    register_part_rule,
    unless_cross_example,
)
from tf_adaptive_dp.gradients.batch_axis.state import BatchAxes
from tf_adaptive_dp.gradients.batch_axis.values import BatchAxis, CrossExample, Parts, Value

TO_LONGEST = (
    "pads all examples to the longest of the batch (give them one length, as with "
    "`output_sequence_length=` of TextVectorization)"
)
_PARTITION = "puts the parts of examples into rows that may not be those of the examples"


@register_layout("StringSplitV2")
@unless_cross_example
def split(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Splits each string of a vector; returns the places of the parts, the parts, and a shape."""
    strings, separator = op.inputs
    layout = batch_axes[strings]
    if not isinstance(layout, BatchAxis) or batch_axes.depends(separator):
        return CrossExample(op, "splits strings by what depends on the data")
    places = CrossExample(op, "says where in the batch the parts of the examples are")
    return [places, Parts(op, layout), places]


@register_part_rule("StringNGrams")
def ngrams(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Joins neighboring parts of each example, and says how many it makes."""
    parts, splits = op.inputs
    layout = batch_axes[parts]
    if not isinstance(layout, Parts) or not _are_row_splits(splits, layout.made_by):
        return CrossExample(op, _PARTITION)
    return [Parts(op, layout.rows), CrossExample(op, "counts the parts of the examples")]


@register_part_rule(*ELEMENTWISE, "LookupTableFindV2")
def entry_by_entry(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Works on each part alone, with numbers that are the same for all."""
    own = {batch_axes[t] for t in op.inputs if batch_axes.depends(t)}
    layout = own.pop()
    others = [t for t in op.inputs if not batch_axes.depends(t)]
    if own or not isinstance(layout, Parts) or any(t.shape.rank != 0 for t in others):
        return CrossExample(op, "combines the parts of examples with other values")
    return layout


def pads_to_longest(op: tf.Operation) -> bool:
    """Whether an operation makes ragged rows as long as the longest of the batch."""
    sizes = static_value(op.inputs[0])
    return sizes is not None and (sizes.ndim == 0 or bool((sizes[1:] < 0).any()))


@register_part_rule("RaggedTensorToTensor")
def padded(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """One row of a fixed length for each example, cut off or filled up with one public value.

    Without a fixed length, rows are as long as the longest example of the batch.
    """
    shape, parts, filler, *partition = op.inputs
    layout, sizes = batch_axes[parts], static_value(shape)
    if not isinstance(layout, Parts) or any(map(batch_axes.depends, (shape, filler))):
        return CrossExample(op, _PARTITION)
    if sizes is None or sizes.shape != (2,) or sizes[0] != -1 or filler.shape.rank != 0:
        return CrossExample(op, _PARTITION)
    if sizes[1] < 0:
        return CrossExample(op, TO_LONGEST)
    if not _is_partition(op.get_attr("row_partition_types"), partition, layout.made_by):
        return CrossExample(op, _PARTITION)
    return layout.rows


@register_part_rule("RaggedBincount")
def counted(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    """Counts the parts of each example by their value, up to a public number of values."""
    splits, parts, size, weights = op.inputs
    layout = batch_axes[parts]
    if not isinstance(layout, Parts) or not _are_row_splits(splits, layout.made_by):
        return CrossExample(op, _PARTITION)
    if batch_axes.depends(size):
        return CrossExample(op, "counts up to a number that depends on the batch")
    if batch_axes[weights] != layout and not _is_empty(weights):
        return CrossExample(op, "has weights that are not those of its parts")
    return layout.rows


def _is_partition(types: Sequence[bytes], partition: Sequence[tf.Tensor], of: tf.Operation) -> bool:
    """Whether the tensors tell which part belongs to which row of the strings that were split."""
    if list(types) == [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        return _is_number_of_rows(partition[0], of) and _are_row_ids(partition[1], of)
    return list(types) == [b"ROW_SPLITS"] and _are_row_splits(partition[0], of)


def _are_row_splits(tensor: tf.Tensor, of: tf.Operation) -> bool:
    """Whether a tensor says where the parts of each row begin, and where the last ones end.

    This is 0, n₀, n₀ + n₁, and so on: TensorFlow counts the numbers of parts n from the row of each
    part, and adds them up.
    """
    tensor = _behind_casts(tensor)
    if of.type == "StringNGrams":
        return tensor is of.outputs[1]
    joined = tensor.op
    if joined.type != "ConcatV2" or len(joined.inputs) != 3 or static_value(joined.inputs[2]) != 0:
        return False
    zero, sums = static_value(joined.inputs[0]), _behind_casts(joined.inputs[1]).op
    if zero is None or zero.tolist() != [0] or sums.type != "Cumsum":
        return False
    if static_value(sums.inputs[1]) != 0 or sums.get_attr("exclusive") or sums.get_attr("reverse"):
        return False
    counts = _behind_casts(sums.inputs[0]).op
    if counts.type not in ("Bincount", "DenseBincount"):
        return False
    if counts.type == "DenseBincount" and counts.get_attr("binary_output"):
        return False
    rows, size, weights = counts.inputs
    rows = _behind_casts(rows)
    if rows.op.type == "Reshape" and rows.shape.rank == 1:
        rows = rows.op.inputs[0]
    return _are_row_ids(rows, of) and _is_all_rows(size, of) and _is_empty(weights)


def _is_all_rows(tensor: tf.Tensor, of: tf.Operation) -> bool:
    """Whether a tensor is the number of rows n, as min(n, max(n, …)) is."""
    op = _behind_casts(tensor).op
    if op.type != "Minimum":
        return _is_number_of_rows(tensor, of)
    return any(
        _is_number_of_rows(bound, of)
        and other.op.type == "Maximum"
        and any(_is_number_of_rows(t, of) for t in other.op.inputs)
        for bound, other in (op.inputs, reversed(op.inputs))
    )


def _are_row_ids(tensor: tf.Tensor, of: tf.Operation) -> bool:
    """Whether a tensor is the row of each part: column 0 of the places."""
    op = _behind_casts(tensor).op
    if of.type != "StringSplitV2" or op.type != "StridedSlice" or op.inputs[0] is not of.outputs[0]:
        return False
    return _slice_of(op) == ([0, 0], [0, 1], [1, 1], {"begin": 1, "end": 1, "shrink_axis": 2})


def _is_number_of_rows(tensor: tf.Tensor, of: tf.Operation) -> bool:
    """Whether a tensor is entry 0 of the shape."""
    op = _behind_casts(tensor).op
    if of.type != "StringSplitV2" or op.type != "StridedSlice" or op.inputs[0] is not of.outputs[2]:
        return False
    return _slice_of(op) == ([0], [1], [1], {"shrink_axis": 1})


def _slice_of(op: tf.Operation) -> tuple | None:
    """The begin, end and strides of a slice, and its masks that are not 0."""
    numbers = [static_value(t) for t in op.inputs[1:]]
    if any(n is None for n in numbers):
        return None
    names = ("begin", "end", "shrink_axis", "new_axis", "ellipsis")
    masks = {name: op.get_attr(f"{name}_mask") for name in names}
    return (*(np.asarray(n).tolist() for n in numbers), {n: m for n, m in masks.items() if m})


def _behind_casts(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of whole numbers that was cast to other whole numbers, or copied."""
    while tensor.op.type in ("Cast", "Identity") and tensor.op.inputs[0].dtype.is_integer:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_empty(tensor: tf.Tensor) -> bool:
    return tensor.shape.num_elements() == 0


# --- crossed features, as in `HashedCrossing` -----------------------------------------------------


@register_layout("SparseCross")
@unless_cross_example
def cross(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Crosses the features of each row; returns the places of the results, these, and a shape.

    Dense inputs [B, 1] give one result per row, in the order of the rows.
    """
    columns = [t.shape.rank == 2 and t.shape[1] == 1 for t in op.inputs]
    rows = [batch_axes[t] == BatchAxis() and batch_axes.depends(t) for t in op.inputs]
    if op.get_attr("N") or not all((*columns, *rows)):
        return CrossExample(op, "crosses features that are not dense columns of the batch")
    places = CrossExample(op, "says where in the batch the crossed features are")
    return [places, BatchAxis(), places]


@register_layout("SparseToDense")
def to_dense(op: tf.Operation, batch_axes: BatchAxes) -> Value | list[Value]:
    """Puts crossed features where `cross` says that they are; nothing else is known."""
    places, shape, values, default = op.inputs
    made = values.op
    crossed = made.type == "SparseCross" and batch_axes[values] == BatchAxis()
    own = crossed and values is made.outputs[1] and not batch_axes.depends(default)
    if own and places is made.outputs[0] and shape is made.outputs[2]:
        return BatchAxis()
    return _put_elsewhere(op, batch_axes)


@unless_cross_example
def _put_elsewhere(op: tf.Operation, batch_axes: BatchAxes) -> Value:
    return CrossExample(op, "puts values into rows that may not be those of the examples")
