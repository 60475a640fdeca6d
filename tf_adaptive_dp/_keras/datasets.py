"""Where the rows of a data set come from: the data sets that it transforms, their sizes and order.

`tf.data` shows none of this. `tied_examples` looks at the same data sets for what repeats examples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras import graphs


def input_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a data set transforms, and the one that its function makes, at the end."""
    made = made_by_function(dataset)
    return [*dataset._inputs(), *([] if made is None else [made])]


# By the methods whose functions make data sets, the attributes with these functions.
_MAKERS = {"FlatMap": "_map_func", "Interleave": "_map_func", "GroupByWindow": "_reduce_func"}
_MADE: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset | None] = (
    weakref.WeakKeyDictionary()
)


def made_by_function(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """The data set that the function of `interleave` and the like makes of an element.

    TensorFlow keeps only the graph of the function, so this traces it once more.

    Returns:
      One of symbolic tensors, whose inputs may be data sets that were made outside of the function.
      `None` if there is no such function, and for `from_generator`.
    """
    function = getattr(dataset, _MAKERS.get(kind_of(dataset), ""), None)
    if function is None or is_generator(dataset):
        return None
    if dataset not in _MADE:
        _MADE[dataset] = _trace(function)
    return _MADE[dataset]


def is_generator(dataset: tf.data.Dataset) -> bool:
    """Whether `from_generator` made a data set, which nobody can look into."""
    if kind_of(dataset) != "FlatMap":
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


def num_elements(dataset: tf.data.Dataset) -> int:
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


def ends_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets without inputs that a data set is made of."""
    return [d for d in datasets_within(dataset) if not input_datasets(d)]


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


def is_among(dataset: tf.data.Dataset, kinds: Sequence[str]) -> bool:
    """Whether a data set transforms another one in one of these ways."""
    return len(input_datasets(dataset)) == 1 and kind_of(dataset) in kinds


def kind_of(dataset: tf.data.Dataset) -> str:
    """What a data set does to others, such as "Map"."""
    return type(dataset).__name__.removesuffix("Dataset").lstrip("_").removeprefix("Parallel")


# What leaves the elements of a data set as they are; `map` changes them, but hardly their rows.
_LEAVES_ROWS = ("Cache", "Options", "Prefetch", "Repeat", "Shuffle")
LEAVES_BATCHES = (*_LEAVES_ROWS, "Map")
# What changes examples, or puts them into batches, but leaves none out.
LEAVES_EXAMPLES = (*LEAVES_BATCHES, "Batch", "PaddedBatch", "Unbatch", "Restructured")
# What keeps batches in their order, and leaves out none but the last ones.
_KEEPS_ORDER = "AssertCardinality Cache CopyToDevice Options Prefetch Take Zip".split()


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
    batched = batched_by(dataset, among=(*LEAVES_BATCHES, "Skip", "Take"))
    if batched is None:
        return None
    size = tf.get_static_value(batched._batch_size)
    drops_remainder = tf.get_static_value(batched._drop_remainder)
    num_examples = num_elements(input_datasets(batched)[0])
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
        repeats |= is_among(change, ["Repeat"])
        count = tf.get_static_value(getattr(change, "_count", None))  # negative: all
        if is_among(change, ["Shuffle"]):
            place = 0
        elif is_among(change, ["Take"]) and 0 <= count <= place:
            return None
        elif is_among(change, ["Skip"]):
            if not repeats and not 0 <= count <= place:
                return None
            place = max(0, place - int(count))
    return place


def batches_of_a_pass(dataset: tf.data.Dataset) -> int | None:
    """How many batches there are before a data set of batches repeats; `None` if it is unknown."""
    one_pass = dataset
    while len(input_datasets(dataset)) == 1 and not hasattr(dataset, "_batch_size"):
        repeats = is_repetition(dataset)
        (dataset,) = input_datasets(dataset)
        one_pass = dataset if repeats else one_pass
    number = num_elements(one_pass)
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
    kind, inputs = kind_of(dataset), input_datasets(dataset)
    for source in inputs:
        found = _rearranges(source, parts, is_draw, in_order)
        if found is not None:
            return found
    of_draws = any(_has(source, is_draw) for source in inputs)
    if not of_draws and not any(_has(source, is_repetition) for source in inputs):
        return None
    if kind == "Skip":
        count = tf.get_static_value(dataset._count)
        kept = count is not None and count % parts == 0
    elif kind == "Repeat":  # of a pass over data that were not drawn, `batches_of_a_pass` says it
        number = num_elements(inputs[0])
        kept = not of_draws or (number > 0 and number % parts == 0)
    elif kind == "Map":
        kept = in_order and not reorders(dataset)
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


def is_repetition(dataset: tf.data.Dataset) -> bool:
    """Whether a data set gives another one more than once."""
    return "Repeat" in type(dataset).__name__ and tf.get_static_value(dataset._count) != 1


def num_examples(dataset: tf.data.Dataset) -> int | None:
    """How many examples there are that `batch` makes batches of.

    Args:
      dataset: one of batches.

    Returns:
      `None` if that is unknown, also if each pass over the data may take other ones, or if a `map`
      after `batch` may give batches with more rows.
    """
    batched = batched_by(dataset, among=_LEAVES_ROWS)
    if batched is None:
        return None
    (examples,) = input_datasets(batched)
    while is_among(examples, LEAVES_BATCHES):
        (examples,) = input_datasets(examples)
    if has_random_order(examples):
        return None
    number = num_elements(examples)
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
    if kind_of(source) != "TensorSlice" or any(t.dtype == tf.variant for t in source._tensors):
        return None
    return tf.nest.pack_sequence_as(source.element_spec, source._tensors)


def unchanged_arrays_of(dataset: tf.data.Dataset) -> Any:
    """As `arrays_of`, if the examples of a data set of batches are rows of these as they are.

    Returns:
      `None` also if a function changes them.
    """
    kinds = (*_LEAVES_ROWS, "Batch")
    source = dataset
    while is_among(source, kinds):
        (source,) = input_datasets(source)
    if tf.nest.flatten(dataset.element_spec) == tf.nest.flatten(source.element_spec):
        return None  # not batched
    return None if _examples(dataset) is not source else arrays_of(source)


def _examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set that has all examples of this one, before they were changed and batched."""
    while is_among(dataset, LEAVES_EXAMPLES):
        (dataset,) = input_datasets(dataset)
    return dataset


def has_all_of(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
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


def batched_by(dataset: tf.data.Dataset, among: Sequence[str]) -> tf.data.Dataset | None:
    """The data set whose elements `batch` made; `None` if others than these came after it."""
    while not hasattr(dataset, "_batch_size"):
        if not is_among(dataset, among):
            return None
        (dataset,) = input_datasets(dataset)
    return dataset if hasattr(dataset, "_drop_remainder") else None


def has_random_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, is shuffled, or may be out of order.

    It cannot see what happens in Python, such as in the function of `from_generator`.
    """
    with tf.init_scope():  # a step may be traced now
        return any(_may_reorder(d) or reorders(d) for d in datasets_within(dataset))


def _may_reorder(dataset: tf.data.Dataset) -> bool:
    """Whether the options of a data set say so."""
    if graphs.is_symbolic(dataset._variant_tensor):
        return dataset._options_attr.deterministic is False
    return dataset.options().deterministic is False


def reorders(dataset: tf.data.Dataset) -> bool:
    """Whether a data set may put its elements into another order, which its options do not say."""
    # `map`, `batch` and `interleave` in parallel have an argument for it.
    of_call = getattr(dataset, "_deterministic", None)
    return "Shuffle" in type(dataset).__name__ or of_call == "false"


def is_argument(op: tf.Operation) -> bool:
    """Whether an operation stands for an argument of its function, not for what that captured."""
    if op.type != "Placeholder":
        return False
    return op not in {inside.op for _, inside in graphs.captures(op.graph)}
