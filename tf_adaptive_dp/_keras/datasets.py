"""What `tf.data` keeps to itself about a data set."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras import graphs


def input_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a data set transforms."""
    return dataset._inputs()


# What leaves the elements of a data set as they are; `map` changes them, but hardly their rows.
_LEAVES_ROWS = ("Cache", "Options", "Prefetch", "Repeat", "Shuffle")
_LEAVES_BATCHES = (*_LEAVES_ROWS, "Map")
# What changes examples, or puts them into batches, but leaves none out.
_LEAVES_EXAMPLES = (*_LEAVES_BATCHES, "Batch", "PaddedBatch", "Unbatch", "Restructured")
# The methods that may leave out elements, by the names of their data sets.
_CHOICES = {
    "Filter": "filter",
    "TakeWhile": "take_while",
    "Unique": "unique",
    "IgnoreErrors": "ignore_errors",
}


def sizes_of_batches(
    dataset: tf.data.Dataset, num_batches: int | None = None
) -> tuple[int, int] | None:
    """The size of the batches that `batch` makes, and that of the last one if it is smaller.

    A `map` after `batch` may still give batches of other sizes.

    Args:
      dataset: one of batches.
      num_batches: how many are drawn, if not all of them.

    Returns:
      `None` if all batches have one size, or if that is unknown: if the number of examples is not
      known, or if something other than `batch` makes the batches.
    """
    batched = _batched(dataset, among=_LEAVES_BATCHES)
    if batched is None:
        return None
    dataset = batched
    size = tf.get_static_value(dataset._batch_size)
    drops_remainder = tf.get_static_value(dataset._drop_remainder)
    with tf.init_scope():  # a step may be traced now
        num_examples = int(input_datasets(dataset)[0].cardinality())
    if drops_remainder or size is None or num_examples <= size or num_examples % size == 0:
        return None
    if num_batches is not None and num_batches <= num_examples // size:
        return None
    return int(size), int(num_examples % size)


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


def _examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set that has all examples of this one, before they were changed and batched."""
    while _is_among(dataset, _LEAVES_EXAMPLES):
        (dataset,) = input_datasets(dataset)
    return dataset


def _batched(dataset: tf.data.Dataset, among: Sequence[str]) -> tf.data.Dataset | None:
    """The data set whose elements `batch` made; `None` if others than these came after it."""
    while not hasattr(dataset, "_batch_size"):
        if not _is_among(dataset, among):
            return None
        (dataset,) = input_datasets(dataset)
    return dataset if hasattr(dataset, "_drop_remainder") else None


def _is_among(dataset: tf.data.Dataset, kinds: Sequence[str]) -> bool:
    """Whether a data set transforms another one in one of these ways."""
    name = type(dataset).__name__.removesuffix("Dataset").lstrip("_").removeprefix("Parallel")
    return len(input_datasets(dataset)) == 1 and name in kinds


def has_random_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, is shuffled, or may be out of order.

    It cannot see what happens within functions, such as those of `interleave` and `from_generator`.
    """
    if dataset.options().deterministic is False or "Shuffle" in type(dataset).__name__:
        return True
    return any(map(has_random_order, input_datasets(dataset)))


def gives_copies(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it transforms, gives its elements more than once.

    It sees `repeat` and what is concatenated with itself, but not what happens within functions,
    nor that windows overlap.
    """
    kind, inputs = type(dataset).__name__, input_datasets(dataset)
    if "Zip" in kind:
        # One value beside each element is no copy: `map` could have captured it. The windows of
        # `timeseries_dataset_from_array` get their positions this way.
        inputs = [d for d in inputs if not _repeats_one_value(d)] or inputs
    if "Repeat" in kind and int(dataset._count) != 1:
        return True
    if "Concatenate" in kind and inputs[0] is inputs[1]:
        return True
    return any(map(gives_copies, inputs))


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
    kind = type(dataset).__name__
    if any(name in kind for name in ("Batch", "GroupBy")) and "Unbatch" not in kind:
        return []
    found: list[tuple[str, tf.Tensor | None]] = []
    for name, method in _CHOICES.items():
        if name in kind:
            function = getattr(dataset, "_predicate", None)
            found.append((method, function and function.function.graph.outputs[0]))
    return found + [choice for d in input_datasets(dataset) for choice in choices_of_batches(d)]


def ties_between_examples(dataset: tf.data.Dataset) -> list[str]:
    """The methods by which what one element holds may change what becomes of those after it.

    It sees `take_while` and `scan`, in all data sets that this one transforms, but not what happens
    within functions, nor variables to which a function of `map` writes.
    """
    kind, inputs = type(dataset).__name__, input_datasets(dataset)
    found = []
    if "TakeWhile" in kind:
        graph = dataset._predicate.function.graph
        found += ["take_while"] * _reads(graph.outputs, graph.inputs, inputs[0])
    if "Scan" in kind:
        graph = dataset._scan_func.function.graph
        state = len(graph.outputs) - len(dataset._flat_types)
        found += ["scan"] * _reads(graph.outputs[:state], graph.inputs[state:], inputs[0])
    return found + [method for d in inputs for method in ties_between_examples(d)]


def _reads(results: list[tf.Tensor], inputs: list[tf.Tensor], dataset: tf.data.Dataset) -> bool:
    """Whether results of a function are computed from an element, which its inputs begin with."""
    elements = {tensor.op for tensor in inputs[: len(dataset._flat_types)]}
    return not elements.isdisjoint(graphs.ancestors(results))
