"""The examples that batches are drawn from: arrays, or a source that is read by index.

Both have the number of examples as their length, say what an example consists of, and make a
`Reader` of the rows that a batch needs.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.datasets import functions_within, has_random_order
from tf_adaptive_dp._keras.tied_examples import (
    choices_before_unbatch,
    gives_copies,
    maps_of_batches,
    ties_between_examples,
)
from tf_adaptive_dp._keras.tracebacks import level_of_caller
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.analysis import comes_from_data, mixed_rows
from tf_adaptive_dp.gradients.batch_axis.hidden import state_between

_WHAT = "(x, y) or (x, y, sample_weight)"
_PARTS = (1, 2, 3)  # (x,) is for models that need no targets
SINGLE_EXAMPLES = (
    "A `tf.data.Dataset` must give single examples: leave `.batch(...)` out, since batches are "
    "drawn at random. Keras's functions that make data sets, such as "
    "`image_dataset_from_directory`, take `batch_size=None`."
)

# What ties examples to each other, by method, and what to do about it.
_TIES = {
    "take_while": "whose function reads the examples. Use `filter` or `take` in its place.",
    "scan": "whose function reads the examples. Use `map` in its place.",
    "group_by_window": (
        "whose function reads the examples, also as part of `bucket_by_sequence_length`: what they "
        "hold decides how many batches there are and which of them share one. Give all examples "
        "one length, with `padded_batch` and its `padded_shapes`."
    ),
    "group_by_reducer": "which makes one element of several examples. Leave it out.",
    "padded_batch": (
        "which pads all examples to the longest of their batch. Give them one length by "
        "`padded_shapes=`, and cut longer ones with `map`."
    ),
}

_ONE_CLASS = (
    "needs labels that name one class for each example, by its number or one-hot; pass "
    "`sample_weight` for any others"
)
# One-hot labels may be smoothed, and rounded.
_MORE_THAN_ONE_HOT = 1.01

# Larger arrays are read in place: a copy for TensorFlow would cost too much memory.
MAX_COPIED_BYTES = 2**31
# How many examples are compared with all others, and how many of these must differ: by chance, the
# numbers of copies of so many have a common divisor once in a million times.
_LOOKED_UP, _DIFFERENT = 64, 20
# How many examples a fingerprint reads, which may have to be decoded from files.
MOST_COMPARED = 1024

# Maps indices [R] to the rows of each leaf of a batch. An index of `num_examples` means padding.
Reader = Callable[[tf.Tensor], list[tf.Tensor]]


def open_source(
    data: Any, preprocess: Callable[[Any], tuple] | None, name: str = "data"
) -> Arrays | Records:
    """Wraps `data` as arrays or as a random-access source.

    Args:
      data: see `poisson_batches`, also for `preprocess`.
      preprocess: maps one example of a source to (x, y) or (x, y, sample_weight).
      name: the argument that the caller's user passed, for errors.

    Raises:
      TypeError, ValueError: if `data` is neither, or is empty.
    """
    if preprocess is not None and not callable(preprocess):
        raise TypeError(f"`preprocess` must be a function. Received: preprocess={preprocess!r}")
    if isinstance(data, tf.data.Dataset):
        data, preprocess = read_examples(data, preprocess, name), None
    if isinstance(data, tuple) and len(data) in _PARTS:
        if preprocess is not None:
            raise ValueError(
                "`preprocess` is for sources of single examples; apply it to the arrays, one row "
                "at a time. Received: `data` of arrays"
            )
        source: Arrays | Records = Arrays(data)
    elif (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, (dict, str))
    ):
        source = Records(data, preprocess)
    else:
        generator = (
            "Turn a generator into a dataset with `tf.data.Dataset.from_generator`. "
            if isinstance(data, Iterator) or inspect.isgeneratorfunction(data)
            else ""
        )
        raise TypeError(
            f"`{name}` must be a tuple {_WHAT} of arrays, a `tf.data.Dataset` of single examples, "
            f"or have `__len__` and `__getitem__`. {generator}Received: {type(data).__name__}"
        )
    if not len(source):
        raise ValueError(f"`{name}` must hold at least one example. Received: none")
    return source


def with_class_weights(
    source: Arrays | Records, class_weight: Mapping[int, float]
) -> Arrays | Records:
    """Weights examples by the class of their label, as `fit` of Keras does.

    Guarantee: each weight depends on the label of its own example alone.

    Args:
      source: the examples.
      class_weight: the weight of each class. Classes that are missing have the weight 1.

    Returns:
      The same examples, whose weights are multiplied by those of their classes.

    Raises:
      TypeError, ValueError: if the weights are wrong, or examples have no label, several, or one
        that names no class.
    """
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            "`class_weight` must be a dict from the number of each class to its weight, such as "
            "`{0: 0.25, 1: 1.0}`; an array of weights becomes one by `dict(enumerate(weights))`. "
            f"Received: class_weight={class_weight!r}"
        )
    weights: dict[int, float] = {}
    for number, weight in class_weight.items():
        if not isinstance(number, numbers.Integral):
            raise TypeError(
                "The keys of `class_weight` must be whole numbers, those of the classes. Received: "
                f"{number!r} in class_weight={class_weight!r}"
            )
        weights[int(number)] = checks.number(f"class_weight[{number!r}]", weight, 0)
    if len(source.structure) == 1:
        raise ValueError(
            "`class_weight` needs targets, which name the class of each example. Received: "
            f"class_weight={class_weight!r}, and examples without targets"
        )
    if any(tf.nest.is_nested(part) for part in source.structure[1:]):
        raise ValueError(
            "`class_weight` is only supported for models with a single output. For several, pass "
            "`sample_weight` with the weights of the examples for each. Received: "
            f"class_weight={class_weight!r}, and targets or weights in a nest"
        )
    return source.weighted(
        lambda y: np.array([weights.get(c, 1.0) for c in _classes(y)], np.float32)
    )


def _classes(labels: np.ndarray) -> list[int]:
    """The class of each label: whole numbers, [n] or [n, 1], or one-hot, [n, C], as in Keras."""
    of_one = labels.shape[1:]
    if len(of_one) > 1 or labels.dtype.kind not in "biuf":
        raise ValueError(
            f"`class_weight` {_ONE_CLASS}. Received: labels of shape {of_one} and dtype "
            f"{labels.dtype}"
        )
    if of_one in ((), (1,)):
        return np.rint(labels.astype(np.float64)).reshape(-1).astype(np.int64).tolist()
    if not np.all(labels.sum(axis=1, dtype=np.float64) < _MORE_THAN_ONE_HOT):
        raise ValueError(
            f"`class_weight` {_ONE_CLASS}. Received: labels of shape {of_one}, of which some "
            "have a sum above 1"
        )
    return labels.argmax(axis=1).tolist()


def refuse_shuffled(data: Any) -> None:
    """Raises ValueError for a dataset whose examples come in an unknown order.

    `user_ids` assign users to examples by position. If the order is another one, examples are
    assigned to the wrong users.
    """
    if isinstance(data, tf.data.Dataset) and has_random_order(data):
        raise ValueError(
            "`user_ids` name the user of each example by its place, so the examples must come in a "
            "known order. Received: a `tf.data.Dataset` that is shuffled, or need not be "
            "deterministic. Remove its `shuffle` (batches are drawn at random anyway), or the "
            "option that it need not be deterministic; for `tfds`, `shuffle_files=False`."
        )


def is_draw(data: Any) -> bool:
    """Whether a data set is what a sampling of the library returned."""
    return hasattr(data, "is_repeatable")


def refuse_ties(dataset: tf.data.Dataset, batched: bool) -> None:
    """Raises NotPrivateError for a data set in which an example changes what becomes of others.

    One more example could then change all that is drawn, however its own gradient is clipped.

    Args:
      dataset: of examples or batches.
      batched: whether its elements are batches.
    """
    for method in ties_between_examples(dataset):
        raise NotPrivateError(
            "No example may change what becomes of the others: clipping bounds only what it adds "
            f"itself. Received: a `tf.data.Dataset` with `{method}`, {_TIES[method]}"
        )
    for method, result in choices_before_unbatch(dataset):
        if result is None or comes_from_data(result):
            raise NotPrivateError(
                "No example may decide whether others are used: clipping bounds only what it adds "
                f"itself. Received: a `tf.data.Dataset` with `{method}` of batches that are taken "
                "apart later. Choose examples before they are batched."
            )
    writes = state_between(functions_within(dataset, until=is_draw))
    if writes is not None:
        raise NotPrivateError(
            "No example may change what becomes of the others: clipping bounds only what it adds "
            "itself. Received: a `tf.data.Dataset` whose functions write what examples hold into a "
            f"variable, a table or the like, and read it ({writes.name}, {writes.type}). Compute "
            "such numbers from public data before, or leave them out."
        )
    for batch, results in maps_of_batches(dataset, batched, until=is_draw):
        mixed = mixed_rows(batch, results)
        if mixed is not None:
            raise NotPrivateError(
                "Each row of a batch must be made of one example alone, and each example must be "
                "in one row: clipping bounds rows. Received: a `tf.data.Dataset` with a `map` of "
                f"batches whose operation {mixed.op.name} ({mixed.op.type}) {mixed.why}. Leave it "
                "out, or change each example on its own: `map` before `batch`."
            )


def read_examples(
    dataset: tf.data.Dataset,
    preprocess: Callable[[Any], tuple] | None = None,
    name: str = "data",
) -> tuple:
    """Reads a dataset of single examples into arrays, since a draw needs any example at any time.

    Args:
      dataset: a finite dataset whose elements are single examples, not batches.
      preprocess: maps one example, as NumPy arrays, to (x, y) or (x, y, sample_weight).
      name: the argument that the dataset came by, for errors.

    Returns:
      The examples in the structure of an element, one row each; (x,) if that is no tuple.

    Raises:
      TypeError, ValueError: if the dataset is infinite or repeats, its elements are not (x,),
        (x, y) or (x, y, sample_weight), or their shapes differ.
      NotPrivateError: if an example may change what becomes of others.
    """
    refuse_ties(dataset, batched=False)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{name}` must be finite: Poisson sampling draws from all examples. Received: a "
            "`tf.data.Dataset` that repeats forever. Remove its `repeat()`."
        )
    if gives_copies(dataset):
        raise ValueError(
            f"`{name}` must give each example once: its copies would count as examples of others, "
            "so that epsilon would be far too small. Received: a `tf.data.Dataset` with a "
            "`repeat`, or that is joined with itself, as it is or changed (`concatenate`, "
            "`sample_from_datasets`, `zip`). Leave that out; the number of epochs says how often "
            "examples are used."
        )
    examples = [preprocess(e) if preprocess else e for e in dataset.as_numpy_iterator()]
    if not examples:
        raise ValueError(f"`{name}` must hold at least one example. Received: an empty dataset")
    if not tf.nest.is_nested(examples[0]):  # as of inputs that have no targets
        examples = [(example,) for example in examples]
    structure = examples[0]
    if not isinstance(structure, tuple) or len(structure) not in _PARTS:
        is_dict = isinstance(structure, dict)
        names = f" with the keys {', '.join(map(str, structure))}" if is_dict else ""
        raise TypeError(
            f"Each element of the dataset must be one example, {_WHAT}. Use `dataset.map` to "
            "convert it; `tfds.load` gives (x, y) with `as_supervised=True`. Received: "
            f"{type(structure).__name__}{names}"
        )
    columns = list(zip(*(tf.nest.flatten(example) for example in examples)))
    for column in columns:
        _refuse_other_shapes(column)
    return tf.nest.pack_sequence_as(structure, [np.stack(column) for column in columns])


def _refuse_other_shapes(column: Sequence[np.ndarray]) -> None:
    """Raises ValueError unless the examples have one shape; the usual cause is a smaller batch."""
    shapes = [np.shape(leaf) for leaf in column]
    other = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is None:
        return
    first, last = shapes[0], shapes[other]
    if other == len(shapes) - 1 and first[1:] == last[1:] and first[:1] > last[:1]:
        raise ValueError(
            f"{SINGLE_EXAMPLES} Received: elements of shape {first}, and a last one of {last}"
        )
    raise ValueError(
        "All examples of the dataset must have the shapes of the first one: pad or crop them; or, "
        "if these are batches, leave `.batch(...)` out, since batches are drawn at random. "
        f"Received: shape {last} after {first}"
    )


def warn_of_copies(source: Arrays | Records) -> None:
    """Warns if each example is there several times, as data sets in loops and functions give them.

    Args:
      source: the examples; records that are read one by one are not searched.
    """
    copies = source.copies_of_each() if isinstance(source, Arrays) else 1
    if copies > 1:
        warnings.warn(
            f"The data hold each example {copies} times. Epsilon counts each copy as an example of "
            f"its own; for the {copies} copies together, which come from one source, it is far "
            "larger. Remove the copies: the number of epochs sets how often examples are used. If "
            "they are different examples that happen to be equal, nothing is wrong.",
            stacklevel=level_of_caller(),
        )


class Arrays:
    """Examples in arrays, one row each.

    Attributes:
      structure: nest (x,), (x, y) or (x, y, sample_weight), into which a flat list can be packed.
      parts: shape and dtype of each part of an example.
    """

    def __init__(self, data: tuple):
        """Takes a nest of arrays; raises TypeError or ValueError for anything else."""
        leaves = tf.nest.flatten(data)
        if not leaves or not all(getattr(leaf, "shape", ()) for leaf in leaves):
            raise TypeError(
                f"`data` must be {_WHAT} of arrays, or nests of them; turn lists into arrays with "
                f"`np.asarray`. Received: leaves of {[type(leaf).__name__ for leaf in leaves]}"
            )
        for leaf in leaves:
            checks.not_masked("data", leaf)
        # Taking rows of any other layout would copy the whole array each time.
        arrays = [np.asarray(checks.array(leaf), order="C") for leaf in leaves]
        for array in arrays:
            checks.numbers_or_strings("data", array)
        self._arrays = [a.astype(_dtype(a), copy=False) for a in arrays]
        self.structure = data
        self.parts = [(array.shape[1:], array.dtype) for array in self._arrays]
        lengths = sorted({len(array) for array in self._arrays})
        if len(lengths) > 1:
            raise ValueError(
                f"The arrays of `data` must share their first axis. Received: lengths {lengths}"
            )

    def __len__(self) -> int:
        return len(self._arrays[0])

    def are_finite(self) -> bool:
        """See the function of that name; it reads the arrays in place."""
        return are_finite(self._arrays)

    def copies_of_each(self) -> int:
        """k, if each example is there k times, or a multiple of that; 1 if that may be by chance.

        It looks up some examples, evenly spaced, and stops at the first that has no copy.
        """
        if sum(array.nbytes for array in self._arrays) > MAX_COPIED_BYTES:
            return 1  # too slow to search
        count, different = 0, set()
        for place in np.unique(np.linspace(0, len(self) - 1, _LOOKED_UP).astype(np.int64)):
            alike = self._places_of_copies(place)
            count = math.gcd(count, len(alike))
            if count == 1:
                return 1
            different.update(alike[:1].tolist())
        return count if len(different) >= _DIFFERENT else 1

    def _places_of_copies(self, place: int) -> np.ndarray:
        """The places of all examples that equal one; none if it has a NaN."""
        found = np.arange(len(self))
        for array in self._arrays:
            rows = array.reshape(len(array), math.prod(array.shape[1:]))
            for start in range(0, rows.shape[1], 64):
                part = slice(start, start + 64)
                found = found[(rows[found, part] == rows[place, part]).all(axis=1)]
                if len(found) <= 1:
                    return found
        return found

    def weighted(self, weights_of: Callable[[np.ndarray], np.ndarray]) -> Arrays:
        """The examples with weights multiplied by a function of their labels.

        Args:
          weights_of: maps the labels of some examples, [n, ...], to their weights, [n].
        """
        x, y, *given = tf.nest.pack_sequence_as(self.structure, self._arrays)
        weights = weights_of(y)
        return Arrays((x, y, *(_times(part, weights) for part in given or [1.0])))

    def reader(self, padding: Sequence[np.ndarray]) -> Reader:
        """Gathers rows within TensorFlow, from a copy that ends with the padding."""
        if sum(array.nbytes for array in self._arrays) > MAX_COPIED_BYTES:
            return _python_reader(self, padding)
        with tf.device("CPU:0"):  # where tf.data runs
            tensors = [tf.concat([a, row[None]], 0) for a, row in zip(self._arrays, padding)]
        return lambda indices: [tf.gather(tensor, indices) for tensor in tensors]

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Writes each example of `indices` into its row of `out`, and anything into the others."""
        for array, rows in zip(self._arrays, out):
            # "clip" saves a copy; the rows that it makes of padding are overwritten.
            np.take(array, indices, axis=0, out=rows, mode="clip")


class Records:
    """Examples of a random-access source, read singly or in lists, as the source allows.

    Attributes:
      structure: nest (x,), (x, y) or (x, y, sample_weight), into which a flat list can be packed.
      parts: shape and dtype of each part of an example.
    """

    def __init__(self, data: Any, preprocess: Callable[[Any], tuple] | None):
        """Reads the first example to learn the structure."""
        self._data, self._preprocess = data, preprocess
        self._takes_lists = False
        if not hasattr(data, "__getitems__") and len(data):
            try:
                data[0]
            except TypeError:  # older tfds sources take only lists of indices
                self._takes_lists = True
        (example,) = self._read([0]) if len(data) else [((), ())]
        if not isinstance(example, tuple) or len(example) not in _PARTS:
            raise TypeError(
                f"Each example must be {_WHAT}; pass `preprocess` to convert it. Received: "
                f"{type(example).__name__}"
            )
        self.structure = example
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(example)]
        self.parts = [(leaf.shape, _dtype(leaf)) for leaf in leaves]

    def __len__(self) -> int:
        return len(self._data)

    def _read(self, indices: list[int]) -> list:
        if hasattr(self._data, "__getitems__"):
            examples = self._data.__getitems__(indices)
        elif self._takes_lists:
            examples = self._data[indices]
        else:
            examples = [self._data[i] for i in indices]
        return [self._preprocess(e) for e in examples] if self._preprocess else list(examples)

    def weighted(self, weights_of: Callable[[np.ndarray], np.ndarray]) -> Records:
        """See `Arrays.weighted`."""

        def example(read: Any) -> tuple:
            x, y, *given = self._preprocess(read) if self._preprocess else read
            (weight,) = weights_of(np.asarray(y)[None])
            return x, y, *(np.multiply(part, weight) for part in given or [np.float32(1)])

        return Records(self._data, example)

    def reader(self, padding: Sequence[np.ndarray]) -> Reader:
        """Reads rows with one call of Python per batch."""
        return _python_reader(self, padding)

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Writes each example of `indices` into its row of `out`, and nothing into the others."""
        present = np.argsort(indices)[: np.count_nonzero(indices < len(self))]
        # In ascending order, since files are read fastest that way.
        examples = self._read(indices[present].tolist()) if len(present) else []
        for row, example in zip(present, examples):
            tf.nest.assert_same_structure(self.structure, example)
            for rows, leaf in zip(out, tf.nest.flatten(example)):
                leaf = np.asarray(leaf)
                if leaf.shape != rows.shape[1:]:  # numpy would broadcast
                    raise ValueError(
                        "All examples must have the shapes of the first one; pad or crop them in "
                        f"`preprocess`. Received: shape {leaf.shape} after {rows.shape[1:]}"
                    )
                rows[row] = leaf


def fingerprint(source: Arrays | Records, salt: bytes) -> str:
    """A digest of examples in their order, to notice that it changed. It is NOT private.

    Guarantee: none. Anyone who has the digest and its salt can test a guess of all examples. It
    covers at most `MOST_COMPARED` examples, evenly spaced if there are more: another shuffling is
    noticed, and a change of a few examples may not be.

    Args:
      source: the examples.
      salt: 16 random bytes.
    """
    digest = hashlib.blake2b(repr((len(source), source.parts)).encode(), digest_size=16, salt=salt)
    places = np.unique(np.linspace(0, len(source) - 1, MOST_COMPARED).astype(np.int64))
    for some in np.array_split(places, -(-len(places) // 64)):  # a batch, not more, in memory
        out = [np.zeros((len(some), *shape), dtype) for shape, dtype in source.parts]
        source.fill(some, out)
        for rows in out:
            content = repr(rows.tolist()).encode() if rows.dtype == object else rows.tobytes()
            digest.update(content)
    return digest.hexdigest()


def _python_reader(source: Arrays | Records, padding: Sequence[np.ndarray]) -> Reader:
    def read(indices: np.ndarray) -> list[np.ndarray]:
        absent = indices >= len(source)
        out = [np.empty((len(indices), *row.shape), row.dtype) for row in padding]
        source.fill(indices, out)
        for rows, row in zip(out, padding):
            rows[absent] = row
        return out

    dtypes = [tf.string if row.dtype.kind == "O" else tf.as_dtype(row.dtype) for row in padding]
    return lambda indices: tf.numpy_function(read, [indices], dtypes)


def _times(given: Any, weights: np.ndarray) -> np.ndarray:
    """Weights of examples, [n, ...] or a number for all, multiplied by one factor for each."""
    return given * weights.reshape([-1, *[1] * (np.ndim(given) - 1)])


def are_finite(arrays: Sequence[np.ndarray]) -> bool:
    """Whether no number of the arrays is NaN or infinite."""
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _dtype(array: np.ndarray) -> np.dtype:
    # NumPy strings have a fixed length, which the first example would impose on the others.
    return np.dtype(object) if array.dtype.kind in "SU" else array.dtype
