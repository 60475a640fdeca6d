"""The rows that functions of a data set take out of arrays, of which one may come again.

A row that comes twice into a batch moves the sum by twice its clipped gradient.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.datasets import (
    datasets_within,
    ends_of,
    is_argument,
    kind_of,
    num_elements,
)

# Data sets that hold no examples.
_COUNTERS = ("Random", "Range", "Tensor")
_GATHERS = ("Gather", "GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd")
_SLICES = ("Slice", "StridedSlice")
# Indices that these return differ from each other.
_DIFFERENT = ("RandomShuffle", "TopK", "TopKV2", "Where")


def draws_rows_again(dataset: tf.data.Dataset, batched: bool) -> bool:
    """Whether functions draw examples out of an array at random, so that one may come again.

    It sees random indices of arrays from outside of the functions, in place of elements. Within one
    element it sees no order in them: of what was shuffled or sorted, or picked by a random mask, no
    row comes twice, unless the next element is drawn anew for the same batch.

    Args:
      dataset: whose functions are looked at.
      batched: whether its elements are put into batches.
    """
    ends = [end for source in dataset._inputs() for end in ends_of(source)]
    if not dataset._functions() or not all(kind_of(d) in _COUNTERS for d in ends):
        return False
    random_elements = any(kind_of(d) == "Random" for d in ends)
    several = batched and any(num_elements(d) not in (0, 1) for d in dataset._inputs())
    return any(
        _draws_rows(function.function.graph, random_elements, batched, several)
        for function in dataset._functions()
    )


def _draws_rows(graph: tf.Graph, random_elements: bool, batched: bool, several: bool) -> bool:
    """See `draws_rows_again`, of one function.

    Args:
      graph: that of the function.
      random_elements: whether its arguments are random numbers.
      batched: whether its results are put into batches.
      several: whether that may be the results of several calls.
    """

    def is_random(op: tf.Operation) -> bool:
        numbers = "Multinomial" in op.type or ("Random" in op.type and "Shuffle" not in op.type)
        shuffled_anew = several and op.type == "RandomShuffle"
        return numbers or shuffled_anew or (random_elements and is_argument(op))

    def sources(tensor: tf.Tensor) -> list[tf.Operation]:
        return graphs.ancestors([tensor], stop=lambda t: not several and t.op.type in _DIFFERENT)

    def takes_rows(op: tf.Operation) -> bool:
        # An index without an axis picks one of several batches, and so does a slice.
        return batched or (op.type in _GATHERS and op.inputs[1].shape.rank != 0)

    ops = graphs.ancestors(graph.outputs, stop=lambda t: is_random(t.op))
    if not random_elements and any(map(is_argument, ops)):
        return False
    taken: dict[tf.Operation, list[tf.Operation]] = {}  # by which random numbers, of each array
    for op in ops:
        if op.type not in (*_GATHERS, *_SLICES):
            continue
        is_public = not any(is_argument(o) or is_random(o) for o in sources(op.inputs[0]))
        random = list(filter(is_random, sources(_index_of_rows(op))))
        if is_public and random:
            array = graphs.behind_identities(op.inputs[0]).op
            if takes_rows(op) or taken.setdefault(array, random) != random:
                return True
    return False


def _index_of_rows(op: tf.Operation) -> tf.Tensor:
    """The rows that an operation takes, or the first of them; all indices if they are in one."""
    index = op.inputs[1]
    if op.type in _SLICES and index.op.type == "Pack":  # one number for each axis
        return index.op.inputs[0]
    return index


# What gives the same value for several numbers.
_MANY_TO_ONE = {
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
}
# What the numbers of a counter may go through without another coming in.
_KEEPS_NUMBERS = ("Cache", "Options", "Prefetch", "Range", "Restructured", "Shuffle")
# Of a longer counter only the first numbers are looked at, which takes a second.
_MOST_NUMBERS = 10**7


def counts_again(dataset: tf.data.Dataset, size: int | None = None) -> bool:
    """Whether a function maps several numbers of a counter to one value, as `i % n` does.

    It sees that everything which depends on the number depends on such a value alone.

    Args:
      dataset: whose function is looked at.
      size: that of batches which take its elements in order; `None` if any may come together.
    """
    if kind_of(dataset) != "Map":
        return False
    within = list(datasets_within(dataset._inputs()[0]))
    kinds = [kind_of(d) for d in within]
    if kinds[-1] != "Range" or not set(kinds).issubset(_KEEPS_NUMBERS):
        return False
    outputs = dataset._map_func.function.graph.outputs
    shared: dict[tuple[str, int], list[tf.Operation]] = {}
    for op in graphs.ancestors(outputs):
        if op.type in _MANY_TO_ONE and op.inputs[0].dtype.is_integer:
            other = tf.get_static_value(op.inputs[1])
            if is_argument(_behind_casts(op.inputs[0]).op) and np.size(other) == 1:
                shared.setdefault((op.type, int(other)), []).append(op)
    for (kind, other), ops in shared.items():
        if not any(map(is_argument, _ancestors_besides(ops, outputs))):
            values = _MANY_TO_ONE[kind](_numbers_of(within[-1]), other)
            return _come_again(values, None if "Shuffle" in kinds else size)
    return False


def _ancestors_besides(ops: list[tf.Operation], outputs: list[tf.Tensor]) -> list[tf.Operation]:
    """What outputs are computed from, besides operations and what only these need."""
    return graphs.ancestors(outputs, stop=lambda tensor: tensor.op in ops)


def _behind_casts(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _numbers_of(counter: tf.data.Dataset) -> np.ndarray:
    """The first numbers that `Dataset.range` counts; none if they depend on an element."""
    bounds = [tf.get_static_value(b) for b in (counter._start, counter._stop, counter._step)]
    numbers = range(*map(int, bounds)) if None not in bounds else range(0)
    return np.array(numbers[:_MOST_NUMBERS], np.int64)


def _come_again(values: np.ndarray, size: int | None) -> bool:
    """Whether values come again, in one of the batches of a size or, without one, anywhere."""
    size = min(size or len(values), len(values)) or 1
    whole = len(values) // size * size
    in_order = [np.sort(values[:whole].reshape(-1, size)), np.sort(values[whole:])]
    return any(bool(np.any(np.diff(part) == 0)) for part in in_order)
