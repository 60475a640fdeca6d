"""What `tf.data` keeps to itself about a data set."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs


def input_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a data set transforms, and the one that its function makes, at the end."""
    made = _made_by_function(dataset)
    return [*dataset._inputs(), *([] if made is None else [made])]


# By the methods whose functions make data sets, the attributes with these functions.
_MAKERS = {"FlatMap": "_map_func", "Interleave": "_map_func", "GroupByWindow": "_reduce_func"}
_MADE: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset | None] = (
    weakref.WeakKeyDictionary()
)


def _made_by_function(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """The data set that the function of `interleave` and the like makes of an element.

    TensorFlow keeps only the graph of the function, so this traces it once more.

    Returns:
      One of symbolic tensors, whose inputs may be data sets that were made outside of the function.
      `None` if there is no such function, and for `from_generator`, which nobody can look into.
    """
    function = getattr(dataset, _MAKERS.get(_kind(dataset), ""), None)
    if function is None or _is_generator(dataset):
        return None
    if dataset not in _MADE:
        _MADE[dataset] = _trace(function)
    return _MADE[dataset]


def _is_generator(dataset: tf.data.Dataset) -> bool:
    if _kind(dataset) != "FlatMap":
        return False
    return "from_generator" in getattr(dataset._map_func._func, "__module__", "")


def _trace(function: Any) -> tf.data.Dataset | None:
    """What a function returns for symbolic arguments, if that is a data set."""
    specs = function._input_structure
    results: list[Any] = [None]

    def trace(*arguments: Any) -> None:
        results[0] = function._func(*arguments)

    with tf.init_scope():  # a step may be traced now
        tf.function(trace).get_concrete_function(*(specs if type(specs) is tuple else (specs,)))
    return results[0] if isinstance(results[0], tf.data.Dataset) else None


def _reads_element(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, made by a function, is another one for each element."""
    return _is_of_element(dataset._variant_tensor)


def _is_of_element(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from the arguments of the function that it is in."""
    if not graphs.is_symbolic(tensor):
        return False  # made outside of functions
    captured = {inside.op for _, inside in graphs.captures(tensor.graph)}
    return any(op.type == "Placeholder" and op not in captured for op in graphs.ancestors([tensor]))


def _num_elements(dataset: tf.data.Dataset) -> int:
    """How many elements a data set has; negative if that is unknown, or if it does not end."""
    if graphs.is_symbolic(dataset._variant_tensor):
        return int(tf.data.UNKNOWN_CARDINALITY)
    with tf.init_scope():  # a step may be traced now
        return int(dataset.cardinality())


def datasets_within(
    dataset: tf.data.Dataset, until: Callable[[tf.data.Dataset], bool] = lambda _: False
) -> Iterator[tf.data.Dataset]:
    """A data set, and all that it is made of: each before what it transforms.

    Args:
      dataset: any.
      until: says of a data set that the walk ends before it.
    """
    if not until(dataset):
        yield dataset
        for source in input_datasets(dataset):
            yield from datasets_within(source, until)


# What leaves the elements of a data set as they are; `map` changes them, but hardly their rows.
_LEAVES_ROWS = ("Cache", "Options", "Prefetch", "Repeat", "Shuffle")
_LEAVES_BATCHES = (*_LEAVES_ROWS, "Map")
# What changes examples, or puts them into batches, but leaves none out.
_LEAVES_EXAMPLES = (*_LEAVES_BATCHES, "Batch", "PaddedBatch", "Unbatch", "Restructured")
# The methods that make batches of other elements, by the names of their data sets.
_REGROUPS = {
    **{"Batch": "batch", "GroupByWindow": "group_by_window", "PaddedBatch": "padded_batch"},
    **{"Rebatch": "rebatch", "Unbatch": "unbatch", "Window": "window"},
}
# What keeps examples in their order, and leaves out none but the last ones.
_IN_ORDER = "Cache Map Options Prefetch Repeat Restructured Take".split()
# What keeps batches in their order, and leaves out none but the last ones.
_KEEPS_ORDER = "AssertCardinality Cache CopyToDevice Options Prefetch Take Zip".split()
# The methods that may leave out elements, by the names of their data sets.
_CHOICES = {
    "Filter": "filter",
    "TakeWhile": "take_while",
    "Unique": "unique",
    "IgnoreErrors": "ignore_errors",
}


def sizes_of_batches(
    dataset: tf.data.Dataset, num_batches: int | None = None
) -> tuple[int, int | None] | None:
    """The size of the batches that `batch` makes, and that of the last one if it is smaller.

    If the number of examples is unknown, as after `filter` or in files, so is the size of the last
    one, which is `None` then.

    A `map` after `batch` may still give batches of other sizes.

    Args:
      dataset: one of batches.
      num_batches: how many are drawn, if not all of them.

    Returns:
      `None` if all batches have one size, or if something other than `batch` makes them.
    """
    batched = _batched(dataset, among=(*_LEAVES_BATCHES, "Skip", "Take"))
    if batched is None:
        return None
    size = tf.get_static_value(batched._batch_size)
    drops_remainder = tf.get_static_value(batched._drop_remainder)
    with tf.init_scope():  # a step may be traced now
        num_examples = int(input_datasets(batched)[0].cardinality())
    if num_examples == tf.data.UNKNOWN_CARDINALITY and size is not None and not drops_remainder:
        return int(size), None
    if drops_remainder or size is None or num_examples <= size or num_examples % size == 0:
        return None
    place = _place_of_last(dataset, batched, num_examples // size)
    if place is None or (num_batches is not None and num_batches <= place):
        return None
    return int(size), int(num_examples % size)


def _place_of_last(dataset: tf.data.Dataset, batched: tf.data.Dataset, place: int) -> int | None:
    """The earliest place at which the last batch may come; `None` if `skip` or `take` omit it.

    Args:
      dataset: what became of the batches.
      batched: the data set of the batches.
      place: that of the last one in it.
    """
    changes, repeats = [], False
    while dataset is not batched:
        changes.append(dataset)
        (dataset,) = input_datasets(dataset)
    for change in reversed(changes):
        repeats |= _is_among(change, ["Repeat"])
        count = tf.get_static_value(getattr(change, "_count", None))  # negative: all
        if _is_among(change, ["Shuffle"]):
            place = 0
        elif _is_among(change, ["Take"]) and 0 <= count <= place:
            return None
        elif _is_among(change, ["Skip"]):
            if not repeats and not 0 <= count <= place:
                return None
            place = max(0, place - int(count))
    return place


def batches_of_a_pass(dataset: tf.data.Dataset) -> int | None:
    """How many batches there are before a data set of batches repeats; `None` if it is unknown."""
    one_pass = dataset
    while len(input_datasets(dataset)) == 1 and not hasattr(dataset, "_batch_size"):
        repeats = _repeats(dataset)
        (dataset,) = input_datasets(dataset)
        one_pass = dataset if repeats else one_pass
    with tf.init_scope():  # a step may be traced now
        number = int(one_pass.cardinality())
    return number if number > 0 else None


def rearranges_parts(
    dataset: tf.data.Dataset, parts: int, is_draw: Callable[[tf.data.Dataset], bool]
) -> str | None:
    """What puts parts of several draws, or of several passes, where one batch is expected.

    It looks at what became of batches after they were drawn, or after they were repeated. It does
    not see what happens within functions.

    Args:
      dataset: of batches.
      parts: how many of them in turn are one batch.
      is_draw: says of a data set whether each of its draws is so many batches.

    Returns:
      The name of a data set of TensorFlow's, such as "Shuffle"; or `None`.
    """
    with tf.init_scope():  # a step may be traced now
        in_order = dataset.options().deterministic is not False
    return _rearranges(dataset, parts, is_draw, in_order)


def _rearranges(
    dataset: tf.data.Dataset,
    parts: int,
    is_draw: Callable[[tf.data.Dataset], bool],
    in_order: bool,
) -> str | None:
    """See `rearranges_parts`; `in_order` says whether functions run in the order of elements."""
    if is_draw(dataset) or hasattr(dataset, "_batch_size"):
        return None
    kind, inputs = _kind(dataset), input_datasets(dataset)
    for source in inputs:
        found = _rearranges(source, parts, is_draw, in_order)
        if found is not None:
            return found
    of_draws = any(_has(source, is_draw) for source in inputs)
    if not of_draws and not any(_has(source, _repeats) for source in inputs):
        return None
    if kind == "Skip":
        count = tf.get_static_value(dataset._count)
        kept = count is not None and count % parts == 0
    elif kind == "Repeat":  # of a pass over data that were not drawn, `batches_of_a_pass` says it
        number = _num_elements(inputs[0])
        kept = not of_draws or (number > 0 and number % parts == 0)
    elif kind == "Map":
        kept = in_order and not _reorders(dataset)
    else:
        kept = kind in _KEEPS_ORDER
    return None if kept else kind


def _has(dataset: tf.data.Dataset, condition: Callable[[tf.data.Dataset], bool]) -> bool:
    """Whether a condition holds for a data set of batches, or one of batches that it transforms."""
    if condition(dataset):
        return True
    if hasattr(dataset, "_batch_size"):
        return False
    return any(_has(source, condition) for source in input_datasets(dataset))


def _repeats(dataset: tf.data.Dataset) -> bool:
    return "Repeat" in type(dataset).__name__ and tf.get_static_value(dataset._count) != 1


def num_examples(dataset: tf.data.Dataset) -> int | None:
    """How many examples there are that `batch` makes batches of.

    Args:
      dataset: one of batches.

    Returns:
      `None` if that is unknown, also if each pass over the data may take other ones, or if a `map`
      after `batch` may give batches with more rows.
    """
    batched = _batched(dataset, among=_LEAVES_ROWS)
    if batched is None:
        return None
    (examples,) = input_datasets(batched)
    while _is_among(examples, _LEAVES_BATCHES):
        (examples,) = input_datasets(examples)
    if has_random_order(examples):
        return None
    with tf.init_scope():  # a step may be traced now
        number = int(examples.cardinality())
    return number if number > 0 else None


def holds_the_same(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    """Whether two data sets hold the same examples, since both are made of one data set of them.

    It does not compare examples, so it sees nothing of two that are made of the same arrays.
    """
    return _examples(one) is _examples(other)


def first_examples(dataset: tf.data.Dataset, number: int) -> list[Any]:
    """Examples of a data set as they were before they were changed, shuffled and batched."""
    with tf.init_scope():  # a step may be traced now
        return list(_examples(dataset).take(number).as_numpy_iterator())


def arrays_of(dataset: tf.data.Dataset) -> Any:
    """The nest of arrays whose rows are all the examples of a data set, as `first_examples`.

    Returns:
      `None` if it is made of something else than dense arrays.
    """
    source = _examples(dataset)
    if _kind(source) != "TensorSlice" or any(t.dtype == tf.variant for t in source._tensors):
        return None
    return tf.nest.pack_sequence_as(source.element_spec, source._tensors)


def unchanged_arrays_of(dataset: tf.data.Dataset) -> Any:
    """As `arrays_of`, if the examples of a data set of batches are rows of these as they are.

    Returns:
      `None` also if a function changes them.
    """
    kinds = (*_LEAVES_ROWS, "Batch")
    source = dataset
    while _is_among(source, kinds):
        (source,) = input_datasets(source)
    if tf.nest.flatten(dataset.element_spec) == tf.nest.flatten(source.element_spec):
        return None  # not batched
    return None if _examples(dataset) is not source else arrays_of(source)


def _examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set that has all examples of this one, before they were changed and batched."""
    while _is_among(dataset, _LEAVES_EXAMPLES):
        (dataset,) = input_datasets(dataset)
    return dataset


def _has_all_of(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    """Whether a data set holds all examples of another one, which may leave some out.

    Two that are made of equal arrays hold the same ones.
    """
    whole = _examples(one)
    return any(d is whole or _are_of_equal_arrays(d, whole) for d in datasets_within(other))


def _are_of_equal_arrays(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    ours, theirs = (getattr(d, "_tensors", []) for d in (one, other))
    if not ours or type(one) is not type(other) or len(ours) != len(theirs):
        return False
    return all(map(_is_equal, ours, theirs))


def _is_equal(one: tf.Tensor, other: tf.Tensor) -> bool:
    if one is other or one.dtype == tf.variant or one.dtype != other.dtype:
        return one is other
    if graphs.is_symbolic(one) or graphs.is_symbolic(other):  # as constants of a function
        values = [tf.get_static_value(tensor) for tensor in (one, other)]
        return all(v is not None for v in values) and np.array_equal(*values)
    with tf.init_scope():  # a step may be traced now
        return one.shape == other.shape and bool(tf.reduce_all(tf.equal(one, other)))


def _batched(dataset: tf.data.Dataset, among: Sequence[str]) -> tf.data.Dataset | None:
    """The data set whose elements `batch` made; `None` if others than these came after it."""
    while not hasattr(dataset, "_batch_size"):
        if not _is_among(dataset, among):
            return None
        (dataset,) = input_datasets(dataset)
    return dataset if hasattr(dataset, "_drop_remainder") else None


def _is_among(dataset: tf.data.Dataset, kinds: Sequence[str]) -> bool:
    """Whether a data set transforms another one in one of these ways."""
    return len(input_datasets(dataset)) == 1 and _kind(dataset) in kinds


def _kind(dataset: tf.data.Dataset) -> str:
    """What a data set does to others, such as "Map"."""
    return type(dataset).__name__.removesuffix("Dataset").lstrip("_").removeprefix("Parallel")


def has_random_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, is shuffled, or may be out of order.

    It cannot see what happens in Python, such as in the function of `from_generator`.
    """
    with tf.init_scope():  # a step may be traced now
        return any(_may_reorder(d) or _reorders(d) for d in datasets_within(dataset))


def _may_reorder(dataset: tf.data.Dataset) -> bool:
    """Whether the options of a data set say so."""
    if graphs.is_symbolic(dataset._variant_tensor):
        return dataset._options_attr.deterministic is False
    return dataset.options().deterministic is False


def _reorders(dataset: tf.data.Dataset) -> bool:
    """Whether a data set may put its elements into another order, which its options do not say."""
    # `map`, `batch` and `interleave` in parallel have an argument for it.
    of_call = getattr(dataset, "_deterministic", None)
    return "Shuffle" in type(dataset).__name__ or of_call == "false"


def gives_copies(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, gives its elements more than once.

    It sees `repeat` and data sets that are joined with themselves, but not what happens in Python,
    nor that windows overlap.
    """
    kind, inputs = type(dataset).__name__, _elements_from(dataset)
    if _joins_the_same(dataset) or _gives_same_again(dataset):
        return True
    if _draws_rows_again(dataset, batched=True):
        return True
    if "Zip" in kind:
        # One value beside each element is no copy: `map` could have captured it. The windows of
        # `timeseries_dataset_from_array` get their positions this way.
        inputs = [d for d in inputs if not _repeats_one_value(d)] or inputs
    if _repeats(dataset):
        return True
    return any(map(gives_copies, inputs))


def _elements_from(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that the elements of a data set come from."""
    inputs = input_datasets(dataset)
    # The first one says which of the others is next.
    return inputs[1:] if "DirectedInterleave" in type(dataset).__name__ else inputs


def _gives_same_again(dataset: tf.data.Dataset) -> str | None:
    """The method whose function makes data sets of the same examples for several elements, if any.

    It does not look into generators, which may give other examples each time.
    """
    kind, made = _kind(dataset), _made_by_function(dataset)
    if made is None or kind == "GroupByWindow" or _num_elements(dataset._inputs()[0]) in (0, 1):
        return None
    source = made
    while _is_among(source, _LEAVES_EXAMPLES) or _cuts_without_element(source):
        (source,) = input_datasets(source)
    if _reads_element(source) or any(map(_is_generator, datasets_within(source))):
        return None
    return "flat_map" if kind == "FlatMap" else "interleave"


def _cuts_without_element(dataset: tf.data.Dataset) -> bool:
    """Whether a data set is a part of another one, for all elements of a function the same part."""
    if not _is_among(dataset, ("Skip", "Take")):
        return False
    return not _is_of_element(dataset._count)


def _draws_rows_again(dataset: tf.data.Dataset, batched: bool) -> bool:
    """Whether functions draw examples out of an array at random, so that one may come again.

    It sees random indices of arrays from outside of the functions, in place of elements. It sees no
    order in them: of what was shuffled or sorted, or picked by a random mask, no row comes twice.

    Args:
      dataset: whose functions are looked at.
      batched: whether its elements are put into batches.
    """
    within = [d for source in dataset._inputs() for d in datasets_within(source)]
    ends = [d for d in within if not input_datasets(d)]
    if not dataset._functions() or not all(_kind(d) in _COUNTERS for d in ends):
        return False
    random_elements = any(_kind(d) == "Random" for d in ends)
    return any(
        _draws_rows(function.function.graph, random_elements, batched)
        for function in dataset._functions()
    )


# Data sets that hold no examples.
_COUNTERS = ("Random", "Range", "Tensor")
_GATHERS = ("Gather", "GatherNd", "GatherV2")
# Indices that these return differ from each other.
_DIFFERENT = ("RandomShuffle", "TopK", "TopKV2", "Where")


def _draws_rows(graph: tf.Graph, random_elements: bool, batched: bool) -> bool:
    """See `_draws_rows_again`, of one function.

    Args:
      graph: that of the function.
      random_elements: whether its arguments are random numbers.
      batched: whether its results are put into batches.
    """
    captured = {inside.op for _, inside in graphs.captures(graph)}

    def is_element(op: tf.Operation) -> bool:
        return op.type == "Placeholder" and op not in captured

    def is_random(op: tf.Operation) -> bool:
        numbers = "Multinomial" in op.type or ("Random" in op.type and "Shuffle" not in op.type)
        return numbers or (random_elements and is_element(op))

    def sources(tensor: tf.Tensor) -> list[tf.Operation]:
        return graphs.ancestors([tensor], stop=lambda t: t.op.type in _DIFFERENT)

    def takes_rows(op: tf.Operation) -> bool:
        if op.type == "StridedSlice":
            return batched and bool(op.get_attr("shrink_axis_mask") & 1)
        # Without an axis, the index picks one of several batches.
        return op.type in _GATHERS and (batched or op.inputs[1].shape.rank != 0)

    ops = graphs.ancestors(graph.outputs, stop=lambda t: is_random(t.op))
    if not random_elements and any(map(is_element, ops)):
        return False
    for op in filter(takes_rows, ops):
        is_public = not any(is_element(o) or is_random(o) for o in sources(op.inputs[0]))
        if is_public and any(map(is_random, sources(op.inputs[1]))):
            return True
    return False


def _joins_the_same(dataset: tf.data.Dataset) -> str | None:
    """The method by which a data set joins others that hold the same examples, if it does."""
    kind = type(dataset).__name__
    pairs = list(itertools.permutations(_elements_from(dataset), 2))
    if _made_by_function(dataset) is not None:
        return None
    if "Zip" in kind:
        return "zip" if any(_is_out_of_step(a, b) for a, b in pairs) else None
    if any(_has_all_of(a, b) for a, b in pairs):
        return "concatenate" if "Concatenate" in kind else "sample_from_datasets"
    return None


def copies_in_batches(dataset: tf.data.Dataset) -> list[str]:
    """The methods by which one batch may hold an example several times.

    It sees examples that are repeated before they are batched, unless the batches divide each
    pass, and data sets that are joined with themselves, but not what happens in Python.

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
    kind, inputs = type(dataset).__name__, _elements_from(dataset)
    if batched is None:
        if any(n in kind for n in ("Batch", "Rebatch", "GroupBy", "Window")) and "Un" not in kind:
            batched = dataset
    elif not _is_among(dataset, _IN_ORDER):
        in_order = False
    found, joined = [], _joins_the_same(dataset)
    if joined is not None and (batched is not None or joined == "zip"):
        found.append(joined)
    again = _gives_same_again(dataset)
    if again is not None and batched is not None:
        found.append(again)
    if _draws_rows_again(dataset, batched is not None):
        found.append("random indices")
    if _repeats(dataset) and batched is not None:
        found += [] if in_order and _divides(batched, inputs[0]) else ["repeat"]
    parts = [_copies(d, batched, in_order) for d in inputs]
    if "Zip" in kind:
        return found + min(parts, key=len)  # no copies of examples that come once
    return found + [method for part in parts for method in part]


def _divides(batched: tf.data.Dataset, one_pass: tf.data.Dataset) -> bool:
    """Whether batches of these sizes divide a pass, so that none has examples of two."""
    if _kind(batched) == "Rebatch":
        sizes, number = tf.get_static_value(batched._batch_sizes), _num_rows(one_pass)
        size = sizes if sizes is None or sizes.ndim == 0 else sizes.sum()
    else:
        size = getattr(batched, "_batch_size", getattr(batched, "_size", None))
        size = None if size is None else tf.get_static_value(size)
        number = _num_elements(one_pass)
    return size is not None and number > 0 and number % size == 0


def _num_rows(dataset: tf.data.Dataset) -> int:
    """How many examples batches hold together; negative if that is unknown."""
    batched = _batched(dataset, among=_LEAVES_BATCHES)
    size = None if batched is None else tf.get_static_value(batched._batch_size)
    if batched is None or size is None or _is_among(dataset, ("Repeat",)):
        return -1
    number = _num_elements(input_datasets(batched)[0])
    dropped = number % size if tf.get_static_value(batched._drop_remainder) else 0
    return number - int(dropped) if number > 0 else -1


def _is_out_of_step(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    """Whether two data sets hold the same examples, and one of them in another order."""
    return _has_all_of(one, other) and (has_random_order(one) or has_random_order(other))


def functions_within(
    dataset: tf.data.Dataset, until: Callable[[tf.data.Dataset], bool]
) -> list[tf.Graph]:
    """The graphs of all functions, such as those of `map`, that a data set is made by.

    Args:
      dataset: any.
      until: says of a data set that it is not looked at.
    """
    within = datasets_within(dataset, until)
    return [function.function.graph for d in within for function in d._functions()]


def takes_apart(dataset: tf.data.Dataset, is_draw: Callable[[tf.data.Dataset], bool]) -> str | None:
    """The method that takes batches apart, or puts several together, after they were drawn.

    Args:
      dataset: any.
      is_draw: says of a data set whether its batches were drawn at random.

    Returns:
      `None` if there is none.
    """
    for after in datasets_within(dataset, until=is_draw):
        method = _REGROUPS.get(_kind(after))
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
    made = _made_by_function(dataset)
    if made is not None:
        found += maps_of_batches(made, batched, until)
        inputs, batched = inputs[:-1], _holds_batches(inputs[0])
    elif _makes_new_elements(dataset):
        batched = "Unbatch" in type(dataset).__name__ and _holds_batches(inputs[0])
    elif batched and _is_among(dataset, ["Map"]):
        graph = dataset._map_func.function.graph
        found.append((graph.inputs[: len(inputs[0]._flat_types)], graph.outputs))
    return found + [f for d in inputs for f in maps_of_batches(d, batched, until)]


def _makes_new_elements(dataset: tf.data.Dataset) -> bool:
    """Whether elements are made of several others, or several of one."""
    kind = type(dataset).__name__
    new = ("Batch", "Unbatch", "GroupBy", "Window", "FlatMap", "Interleave")
    return any(name in kind for name in new) and "DirectedInterleave" not in kind


def _holds_batches(dataset: tf.data.Dataset) -> bool:
    """Whether `batch` made the elements of a data set, or what they were before a `map`."""
    while not _makes_new_elements(dataset) and len(input_datasets(dataset)) == 1:
        (dataset,) = input_datasets(dataset)
    made = _made_by_function(dataset)
    if made is not None:
        return _holds_batches(made)
    return "Batch" in type(dataset).__name__


def _repeats_one_value(dataset: tf.data.Dataset) -> bool:
    if "Repeat" not in type(dataset).__name__:
        return False
    return all("TensorDataset" in type(d).__name__ for d in input_datasets(dataset))


def choices_of_batches(dataset: tf.data.Dataset) -> list[tuple[str, tf.Tensor | None]]:
    """What decides which batches a data set gives, after its examples were batched.

    Args:
      dataset: of batches.

    Returns:
      The name of each method, with the result of its function, which belongs to a graph of its own,
      or `None` if it has none.
    """
    found: list[tuple[str, tf.Tensor | None]] = []
    for after in datasets_within(dataset, until=_makes_batches):
        for name, method in _CHOICES.items():
            if name in type(after).__name__:
                function = getattr(after, "_predicate", None)
                found.append((method, function and function.function.graph.outputs[0]))
    return found


def _makes_batches(dataset: tf.data.Dataset) -> bool:
    kind = type(dataset).__name__
    return any(name in kind for name in ("Batch", "GroupBy")) and "Unbatch" not in kind


def ties_between_examples(dataset: tf.data.Dataset) -> list[str]:
    """The methods by which what one element holds may change what becomes of others.

    It sees `take_while`, `scan`, `group_by_window` and a `padded_batch` that pads to the longest,
    in all data sets that this one transforms, but not what happens in Python. What the function of
    `flat_map` makes of one example are parts of it, which may be tied to each other.
    """
    found, made = [_tie_between_examples(dataset)], _made_by_function(dataset)
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
    ends = [d for d in datasets_within(made) if not input_datasets(d)]
    of_element = all(_kind(d) in ("Tensor", "TensorSlice") and _reads_element(d) for d in ends)
    return of_element and not _holds_batches(source)


def _tie_between_examples(dataset: tf.data.Dataset) -> str | None:
    """See `ties_between_examples`, of this data set alone."""
    kind, inputs = type(dataset).__name__, input_datasets(dataset)
    if "TakeWhile" in kind:
        graph = dataset._predicate.function.graph
        return "take_while" if _reads(graph.outputs, graph.inputs, inputs[0]) else None
    if "Scan" in kind:
        graph = dataset._scan_func.function.graph
        state = len(graph.outputs) - len(dataset._flat_types)
        changes = _reads(graph.outputs[:state], graph.inputs[state:], inputs[0])
        return "scan" if changes else None
    if "GroupByWindow" in kind:
        graph = dataset._key_func.function.graph
        return "group_by_window" if _reads(graph.outputs, graph.inputs, inputs[0]) else None
    if "PaddedBatch" in kind:
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


def _reads(results: list[tf.Tensor], inputs: list[tf.Tensor], dataset: tf.data.Dataset) -> bool:
    """Whether results of a function are computed from an element, which its inputs begin with."""
    elements = {tensor.op for tensor in inputs[: len(dataset._flat_types)]}
    return not elements.isdisjoint(graphs.ancestors(results))
