"""Symbolic sizes of axes: a number times unknowns such as the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Callable, NamedTuple, Optional

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import static_value


class Size(NamedTuple):
    """A product of a number and of unknown sizes, for example 3·batch·time.

    Attributes:
      number: the known factor.
      unknowns: names of the unknown factors, sorted.
    """

    number: int = 1
    unknowns: tuple[str, ...] = ()

    def times(self, other: Size) -> Size:
        """The product."""
        return Size(self.number * other.number, tuple(sorted(self.unknowns + other.unknowns)))

    def over(self, other: Size) -> Size | None:
        """The quotient if it is certainly an integer, else `None`."""
        left = list(self.unknowns)
        for unknown in other.unknowns:
            if unknown not in left:
                return None
            left.remove(unknown)
        if other.number == 0 or self.number % other.number:
            return None
        return Size(self.number // other.number, tuple(left))

    @property
    def static(self) -> int | None:
        """The size if it is known."""
        return None if self.unknowns else self.number


ONE = Size()
# The entries of a shape; `None` for an unknown one.
Entries = list[Optional[Size]]
# From a tensor and one of its axes to the size of that axis.
SizeOf = Callable[[tf.Tensor, int], Size]
_Recurse = Callable[[tf.Tensor], Entries]


def product(sizes: Iterable[Size]) -> Size:
    """The product of all.

    >>> product([Size(3), Size(2, ("batch",))])
    Size(number=6, unknowns=('batch',))
    """
    sizes = list(sizes)
    unknowns = tuple(sorted(u for s in sizes for u in s.unknowns))
    return Size(math.prod(s.number for s in sizes), unknowns)


def evaluate(
    tensor: tf.Tensor,
    size_of: SizeOf,
    given: Callable[[tf.Tensor], Entries | None] = lambda tensor: None,
) -> Entries:
    """Evaluates an integer vector or scalar that was computed from shapes.

    Args:
      tensor: such as the second argument of a reshape.
      size_of: maps a tensor and an axis to a size.
      given: maps an argument of a function to its entries, or to `None` if they are unknown.

    Returns:
      One size per entry (one for a scalar); `None` where the graph does not tell, or for -1.
    """
    value = static_value(tensor)
    if value is not None:
        return [Size(int(n)) if n >= 0 else None for n in value.reshape(-1)]
    op, recurse = tensor.op, lambda t: evaluate(t, size_of, given)
    if op.type == "Split":
        parts, k, values = len(op.outputs), tensor.value_index, recurse(op.inputs[1])
        return values[k * len(values) // parts : (k + 1) * len(values) // parts]
    if op.type == "Unpack" and op.inputs[0].shape.rank == 1:
        return [recurse(op.inputs[0])[tensor.value_index]]
    found = given(tensor) if op.type == "Placeholder" else None
    if op.type in _EVALUATORS:
        found = _EVALUATORS[op.type](op, recurse, size_of)
    if found is None:
        return [None] * (1 if tensor.shape.rank == 0 else tensor.shape[0] or 0)
    return found


def _shape(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    tensor = op.inputs[0]
    return (
        None
        if tensor.shape.rank is None
        else [size_of(tensor, a) for a in range(tensor.shape.rank)]
    )


def _num_entries(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    tensor = op.inputs[0]
    if tensor.shape.rank is None:
        return None
    return [product(size_of(tensor, a) for a in range(tensor.shape.rank))]


def _strided_slice(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    values = recurse(op.inputs[0])
    begin, end, strides = (static_value(t) for t in op.inputs[1:])
    if begin is None or end is None or strides is None or len(begin) != 1:
        return None
    if op.get_attr("shrink_axis_mask"):
        return [values[int(begin[0])]] if -len(values) <= begin[0] < len(values) else None
    first = None if op.get_attr("begin_mask") else int(begin[0])
    last = None if op.get_attr("end_mask") else int(end[0])
    return values[slice(first, last, int(strides[0]))]


def _slice(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    begin, size = (static_value(t) for t in op.inputs[1:])
    if begin is None or size is None or len(begin) != 1:
        return None
    first, count = int(begin[0]), int(size[0])
    return recurse(op.inputs[0])[first : None if count < 0 else first + count]


def _gather(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    indices = static_value(op.inputs[1])
    values = recurse(op.inputs[0])
    return None if indices is None else [values[int(i)] for i in indices.reshape(-1)]


def _stitched(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    """Entries at given indices, where later ones win: the shape of a sum with `keepdims`."""
    count = op.get_attr("N")
    found: dict[int, Size | None] = {}
    for places, entries in zip(op.inputs[:count], op.inputs[count:]):
        places = static_value(places)
        if places is None:
            return None
        found.update(zip(places.reshape(-1).tolist(), recurse(entries)))
    return [found.get(k) for k in range(max(found, default=-1) + 1)]


def _product(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    values = recurse(op.inputs[0])
    known = [v for v in values if v is not None]
    return [product(known)] if len(known) == len(values) else None


def _multiply(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    left, right = (recurse(t) for t in op.inputs)
    if len(left) != 1 or len(right) != 1 or left[0] is None or right[0] is None:
        return None
    return [left[0].times(right[0])]


def _maximum(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    """The maximum of equal sizes, which `tf.vectorized_map` computes."""
    values = set(recurse(op.inputs[0]))
    return [values.pop()] if len(values) == 1 else None


def _same(op: tf.Operation, recurse: _Recurse, size_of: SizeOf) -> Entries | None:
    return recurse(op.inputs[0])


_EVALUATORS = {
    "Shape": _shape,
    "Size": _num_entries,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "DynamicStitch": _stitched,
    "GatherV2": _gather,
    "Prod": _product,
    "Max": _maximum,
    "Mul": _multiply,
    "Pack": lambda op, recurse, size_of: [recurse(t)[0] for t in op.inputs],
    "ConcatV2": lambda op, recurse, size_of: [s for t in op.inputs[:-1] for s in recurse(t)],
    **dict.fromkeys(("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze"), _same),
}
