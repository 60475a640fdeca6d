"""What repeats the examples of a data set of `tf.data`, and what ties them to each other.

Either lets one example move a sum by more than its clipped gradient. The functions here name the
methods by which it may happen; `optimizers/refusals.py` and `sampling/sources.py` reject them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.datasets import (
    LEAVES_BATCHES,
    LEAVES_EXAMPLES,
    batched_by,
    datasets_within,
    ends_of,
    has_all_of,
    has_random_order,
    input_datasets,
    is_among,
    is_generator,
    is_repetition,
    kind_of,
    made_by_function,
    num_elements,
)

# The methods that make batches of other elements, by the kinds of their data sets.
_MAKES_BATCHES = {
    "Batch": "batch",
    "DenseToSparseBatch": "dense_to_sparse_batch",
    "GroupByReducer": "group_by_reducer",
    "GroupByWindow": "group_by_window",
    "MapAndBatch": "map_and_batch",
    "PaddedBatch": "padded_batch",
}
# These, and those that divide batches anew, take them apart, or put several side by side.
_REGROUPS = {**_MAKES_BATCHES, "Rebatch": "rebatch", "Unbatch": "unbatch", "Window": "window"}
# What keeps examples in their order, and leaves out none but the last ones.
_IN_ORDER = "Cache Map Options Prefetch Repeat Restructured Take".split()
# The methods that may leave out elements, by the kinds of their data sets.
_CHOICES = {
    "Filter": "filter",
    "TakeWhile": "take_while",
    "Unique": "unique",
    "IgnoreErrors": "ignore_errors",
}


def gives_copies(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, gives its elements more than once.

    It sees `repeat`, data sets that are joined with themselves, and rows of an array that come
    again, but not what happens in Python, nor that windows overlap.
    """
    kind, inputs = kind_of(dataset), _elements_from(dataset)
    if _joins_the_same(dataset) or _gives_same_again(dataset):
        return True
    if _draws_rows_again(dataset, batched=True) or _counts_again(dataset):
        return True
    if kind == "Zip":
        # One value beside each element is no copy: `map` could have captured it. The windows of
        # `timeseries_dataset_from_array` get their positions this way.
        inputs = [d for d in inputs if not (_repeats_one_value(d) or _counts_again(d))] or inputs
    if is_repetition(dataset):
        return True
    return any(map(gives_copies, inputs))


def _elements_from(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that the elements of a data set come from."""
    inputs = input_datasets(dataset)
    # The first one says which of the others is next.
    return inputs[1:] if kind_of(dataset) == "DirectedInterleave" else inputs


def _gives_same_again(dataset: tf.data.Dataset) -> str | None:
    """The method whose function makes data sets of the same examples for several elements, if any.

    It does not look into generators, which may give other examples each time.
    """
    kind, made = kind_of(dataset), made_by_function(dataset)
    if made is None or kind == "GroupByWindow" or num_elements(dataset._inputs()[0]) in (0, 1):
        return None
    source = made
    while is_among(source, LEAVES_EXAMPLES) or _cuts_without_element(source):
        (source,) = input_datasets(source)
    if _reads_element(source) or any(map(is_generator, datasets_within(source))):
        return None
    return "flat_map" if kind == "FlatMap" else "interleave"


def _cuts_without_element(dataset: tf.data.Dataset) -> bool:
    """Whether a data set is a part of another one, for all elements of a function the same part."""
    if not is_among(dataset, ("Skip", "Take")):
        return False
    return not _is_of_element(dataset._count)


def _draws_rows_again(dataset: tf.data.Dataset, batched: bool) -> bool:
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


# Data sets that hold no examples.
_COUNTERS = ("Random", "Range", "Tensor")
_GATHERS = ("Gather", "GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd")
_SLICES = ("Slice", "StridedSlice")
# Indices that these return differ from each other.
_DIFFERENT = ("RandomShuffle", "TopK", "TopKV2", "Where")


def _draws_rows(graph: tf.Graph, random_elements: bool, batched: bool, several: bool) -> bool:
    """See `_draws_rows_again`, of one function.

    Args:
      graph: that of the function.
      random_elements: whether its arguments are random numbers.
      batched: whether its results are put into batches.
      several: whether that may be the results of several calls.
    """

    def is_random(op: tf.Operation) -> bool:
        numbers = "Multinomial" in op.type or ("Random" in op.type and "Shuffle" not in op.type)
        shuffled_anew = several and op.type == "RandomShuffle"
        return numbers or shuffled_anew or (random_elements and _is_argument(op))

    def sources(tensor: tf.Tensor) -> list[tf.Operation]:
        return graphs.ancestors([tensor], stop=lambda t: not several and t.op.type in _DIFFERENT)

    def takes_rows(op: tf.Operation) -> bool:
        if op.type in _SLICES:
            return batched
        # Without an axis, the index picks one of several batches.
        return op.type in _GATHERS and (batched or op.inputs[1].shape.rank != 0)

    ops = graphs.ancestors(graph.outputs, stop=lambda t: is_random(t.op))
    if not random_elements and any(map(_is_argument, ops)):
        return False
    taken: dict[tf.Operation, list[tf.Operation]] = {}  # by which random numbers, of each array
    for op in ops:
        if op.type not in (*_GATHERS, *_SLICES):
            continue
        is_public = not any(_is_argument(o) or is_random(o) for o in sources(op.inputs[0]))
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


def _counts_again(dataset: tf.data.Dataset, size: int | None = None) -> bool:
    """Whether a function makes the same of several numbers of a counter, as of `i % n`.

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
            if _is_argument(_behind_casts(op.inputs[0]).op) and np.size(other) == 1:
                shared.setdefault((op.type, int(other)), []).append(op)
    for (kind, other), ops in shared.items():
        if not any(map(_is_argument, _ancestors_besides(ops, outputs))):
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


def _joins_the_same(dataset: tf.data.Dataset) -> str | None:
    """The method by which a data set joins others that hold the same examples, if it does."""
    kind = kind_of(dataset)
    pairs = list(itertools.permutations(_elements_from(dataset), 2))
    if made_by_function(dataset) is not None:
        return None
    if kind == "Zip":
        return "zip" if any(_is_out_of_step(a, b) for a, b in pairs) else None
    if any(has_all_of(a, b) for a, b in pairs):
        return "concatenate" if kind == "Concatenate" else "sample_from_datasets"
    return None


def copies_in_batches(dataset: tf.data.Dataset) -> list[str]:
    """The methods by which one batch may hold an example several times.

    It sees examples that are repeated before they are batched, unless the batches divide each
    pass, data sets that are joined with themselves, and rows of an array that come again, but not
    what happens in Python.

    Args:
      dataset: of batches.
    """
    return _copies(dataset, None, in_order=True)


def _copies(dataset: tf.data.Dataset, batched: tf.data.Dataset | None, in_order: bool) -> list[str]:
    """See `copies_in_batches`.

    Args:
      dataset: one that the data set transforms.
      batched: the data set that makes batches of its elements; `None` if it holds batches.
      in_order: whether they come into the batches in this order, all of them.
    """
    kind, inputs = kind_of(dataset), _elements_from(dataset)
    if batched is None:
        batched = dataset if kind in _REGROUPS and kind != "Unbatch" else None
    elif not is_among(dataset, _IN_ORDER):
        in_order = False
    found, joined = [], _joins_the_same(dataset)
    if joined is not None and (batched is not None or joined == "zip"):
        found.append(joined)
    again = _gives_same_again(dataset)
    if again is not None and batched is not None:
        found.append(again)
    if _draws_rows_again(dataset, batched is not None):
        found.append("random indices")
    if batched is not None and _counts_again(dataset, _size_of(batched) if in_order else None):
        found.append("equal indices")
    if is_repetition(dataset) and batched is not None:
        found += [] if in_order and _divides(batched, inputs[0]) else ["repeat"]
    parts = [_copies(d, batched, in_order) for d in inputs]
    if kind == "Zip":
        return found + min(parts, key=len)  # no copies of examples that come once
    return found + [method for part in parts for method in part]


def _divides(batched: tf.data.Dataset, one_pass: tf.data.Dataset) -> bool:
    """Whether batches of these sizes divide a pass, so that none has examples of two."""
    if kind_of(batched) == "Rebatch":
        sizes, number = tf.get_static_value(batched._batch_sizes), _num_rows(one_pass)
        size = sizes if sizes is None or sizes.ndim == 0 else sizes.sum()
    else:
        size, number = _size_of(batched), num_elements(one_pass)
    return size is not None and number > 0 and number % size == 0


def _size_of(batched: tf.data.Dataset) -> int | None:
    """How many elements are put into each batch; `None` if that is unknown."""
    size = getattr(batched, "_batch_size", getattr(batched, "_size", None))
    return None if size is None else tf.get_static_value(size)


def _num_rows(dataset: tf.data.Dataset) -> int:
    """How many examples batches hold together; negative if that is unknown."""
    batched = batched_by(dataset, among=LEAVES_BATCHES)
    size = None if batched is None else tf.get_static_value(batched._batch_size)
    if batched is None or size is None or is_among(dataset, ("Repeat",)):
        return -1
    number = num_elements(input_datasets(batched)[0])
    dropped = number % size if tf.get_static_value(batched._drop_remainder) else 0
    return number - int(dropped) if number > 0 else -1


def _is_out_of_step(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    """Whether two data sets hold the same examples, and one of them in another order."""
    return has_all_of(one, other) and (has_random_order(one) or has_random_order(other))


def takes_apart(dataset: tf.data.Dataset, is_draw: Callable[[tf.data.Dataset], bool]) -> str | None:
    """The method that takes batches apart, or puts several together, after they were drawn.

    Args:
      dataset: any.
      is_draw: says of a data set whether its batches were drawn at random.

    Returns:
      `None` if there is none.
    """
    for after in datasets_within(dataset, until=is_draw):
        method = _REGROUPS.get(kind_of(after))
        if method is not None and any(map(is_draw, datasets_within(after))):
            return method
    return None


def maps_of_batches(
    dataset: tf.data.Dataset, batched: bool, until: Callable[[tf.data.Dataset], bool]
) -> list[tuple[list[tf.Tensor], list[tf.Tensor]]]:
    """What the functions of `map` take and return that change batches, before `unbatch` too.

    Args:
      dataset: any.
      batched: whether its elements are batches.
      until: says of a data set that its elements are to be left as they are.

    Returns:
      For each function, the parts of a batch and of its result, of a graph of its own.
    """
    if until(dataset):
        return []
    inputs, found = _elements_from(dataset), []
    made = made_by_function(dataset)
    if made is not None:
        found += maps_of_batches(made, batched, until)
        inputs, batched = inputs[:-1], _holds_batches(inputs[0])
    elif _makes_new_elements(dataset):
        batched = kind_of(dataset) == "Unbatch" and _holds_batches(inputs[0])
    elif batched and is_among(dataset, ["Map"]):
        graph = dataset._map_func.function.graph
        found.append((graph.inputs[: len(inputs[0]._flat_types)], graph.outputs))
    return found + [f for d in inputs for f in maps_of_batches(d, batched, until)]


def _makes_new_elements(dataset: tf.data.Dataset) -> bool:
    """Whether elements are made of several others, or several of one."""
    kind = kind_of(dataset)
    return kind in ("FlatMap", "Interleave") or (kind in _REGROUPS and kind != "Rebatch")


def _holds_batches(dataset: tf.data.Dataset) -> bool:
    """Whether `batch` made the elements of a data set, or what they were before a `map`."""
    while not _makes_new_elements(dataset) and len(input_datasets(dataset)) == 1:
        (dataset,) = input_datasets(dataset)
    made = made_by_function(dataset)
    if made is not None:
        return _holds_batches(made)
    return kind_of(dataset) in _MAKES_BATCHES


def _repeats_one_value(dataset: tf.data.Dataset) -> bool:
    return is_among(dataset, ("Repeat",)) and kind_of(input_datasets(dataset)[0]) == "Tensor"


def choices_of_batches(dataset: tf.data.Dataset) -> list[tuple[str, tf.Tensor | None]]:
    """What decides which batches a data set gives, after its examples were batched.

    Args:
      dataset: of batches.

    Returns:
      The name of each method, with the result of its function, which belongs to a graph of its own,
      or `None` if it has none.
    """
    found: list[tuple[str, tf.Tensor | None]] = []
    for after in datasets_within(dataset, until=lambda d: kind_of(d) in _MAKES_BATCHES):
        if kind_of(after) in _CHOICES:
            function = getattr(after, "_predicate", None)
            result = function and function.function.graph.outputs[0]
            found.append((_CHOICES[kind_of(after)], result))
    return found


def choices_before_unbatch(dataset: tf.data.Dataset) -> list[tuple[str, tf.Tensor | None]]:
    """As `choices_of_batches`, of batches that are taken apart later: examples decide of others."""
    return [
        choice
        for apart in datasets_within(dataset)
        if kind_of(apart) == "Unbatch" or made_by_function(apart) is not None
        if _holds_batches(apart._inputs()[0])
        for choice in choices_of_batches(apart._inputs()[0])
    ]


def ties_between_examples(dataset: tf.data.Dataset) -> list[str]:
    """The methods by which what one element holds may change what becomes of others.

    It sees `take_while`, `scan`, `group_by_window`, `group_by_reducer` and a `padded_batch` that
    pads to the longest, in all data sets that this one transforms, but not what happens in Python.
    What the function of `flat_map` makes of one example are parts of it, which may be tied to each
    other.
    """
    found, made = [_tie_between_examples(dataset)], made_by_function(dataset)
    for source in input_datasets(dataset):
        if source is not made or not _are_parts(made, dataset._inputs()[0]):
            found += ties_between_examples(source)
    return [method for method in found if method is not None]


def _are_parts(made: tf.data.Dataset, source: tf.data.Dataset) -> bool:
    """Whether all that a function makes is made of the tensors of one example.

    Args:
      made: the data set that a function makes.
      source: the one that it makes it of.
    """
    ends = ends_of(made)
    of_element = all(kind_of(d) in ("Tensor", "TensorSlice") and _reads_element(d) for d in ends)
    return of_element and not _holds_batches(source)


def _tie_between_examples(dataset: tf.data.Dataset) -> str | None:
    """See `ties_between_examples`, of this data set alone."""
    kind, inputs = kind_of(dataset), input_datasets(dataset)
    if kind == "TakeWhile":
        graph = dataset._predicate.function.graph
        return "take_while" if _reads(graph.outputs, graph.inputs, inputs[0]) else None
    if kind == "Scan":
        graph = dataset._scan_func.function.graph
        state = len(graph.outputs) - len(dataset._flat_types)
        changes = _reads(graph.outputs[:state], graph.inputs[state:], inputs[0])
        return "scan" if changes else None
    if kind == "GroupByWindow":
        graph = dataset._key_func.function.graph
        return "group_by_window" if _reads(graph.outputs, graph.inputs, inputs[0]) else None
    if kind == "GroupByReducer":
        return "group_by_reducer"
    if kind == "PaddedBatch":
        return "padded_batch" if _pads_to_longest(dataset, inputs[0]) else None
    return None


def _pads_to_longest(padded: tf.data.Dataset, examples: tf.data.Dataset) -> bool:
    """Whether `padded_batch` makes some axis as long as the longest example of a batch."""
    shapes = [spec.shape for spec in tf.nest.flatten(examples.element_spec)]
    for to, shape in zip(tf.nest.flatten(padded._padded_shapes), shapes):
        sizes = tf.get_static_value(to)
        if sizes is None or shape.rank is None:
            return True
        if any(size < 0 and known is None for size, known in zip(sizes, shape)):
            return True
    return False


def _reads_element(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, made by a function, is another one for each element."""
    return _is_of_element(dataset._variant_tensor)


def _is_of_element(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from the arguments of the function that it is in."""
    if not graphs.is_symbolic(tensor):
        return False  # made outside of functions
    return any(map(_is_argument, graphs.ancestors([tensor])))


def _is_argument(op: tf.Operation) -> bool:
    """Whether an operation stands for an argument of its function, not for what that captured."""
    if op.type != "Placeholder":
        return False
    return op not in {inside.op for _, inside in graphs.captures(op.graph)}


def _reads(results: list[tf.Tensor], inputs: list[tf.Tensor], dataset: tf.data.Dataset) -> bool:
    """Whether results of a function are computed from an element, which its inputs begin with."""
    elements = {tensor.op for tensor in inputs[: len(dataset._flat_types)]}
    return not elements.isdisjoint(graphs.ancestors(results))
