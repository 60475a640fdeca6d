"""What `tf.data` keeps to itself about a data set."""

from __future__ import annotations

import tensorflow as tf


def input_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that a data set transforms."""
    return dataset._inputs()


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
    if "Repeat" in kind and int(dataset._count) != 1:
        return True
    if "Concatenate" in kind and inputs[0] is inputs[1]:
        return True
    return any(map(gives_copies, inputs))


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


_CHOICES = {
    "Filter": "filter",
    "TakeWhile": "take_while",
    "Unique": "unique",
    "IgnoreErrors": "ignore_errors",
}
