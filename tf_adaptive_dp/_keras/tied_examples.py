"""What repeats the examples of a data set of `tf.data`, and what ties them to each other.

Either lets one example move a sum by more than its clipped gradient. The functions here name the
methods by which it may happen; `optimizers/refusals.py` and `sampling/sources.py` reject them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

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
    is_argument,
    is_generator,
    is_repetition,
    kind_of,
    made_by_function,
    num_elements,
)
from tf_adaptive_dp._keras.rows_of_arrays import counts_again, draws_rows_again

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
    if draws_rows_again(dataset, batched=True) or counts_again(dataset):
        return True
    if kind == "Zip":
        # One value beside each element is no copy: `map` could have captured it. The windows of
        # `timeseries_dataset_from_array` get their positions this way.
        inputs = [d for d in inputs if not (_repeats_one_value(d) or counts_again(d))] or inputs
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
    if draws_rows_again(dataset, batched is not None):
        found.append("random indices")
    if batched is not None and counts_again(dataset, _size_of(batched) if in_order else None):
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
    return any(map(is_argument, graphs.ancestors([tensor])))


def _reads(results: list[tf.Tensor], inputs: list[tf.Tensor], dataset: tf.data.Dataset) -> bool:
    """Whether results of a function are computed from an element, which its inputs begin with."""
    elements = {tensor.op for tensor in inputs[: len(dataset._flat_types)]}
    return not elements.isdisjoint(graphs.ancestors(results))
