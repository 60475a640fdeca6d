"""From drawn indices to padded tensors: what `sampling.py` needs of `tf.data`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.privacy import draws

_WHAT = "(x, y) or (x, y, sample_weight)"

# Larger arrays are read where they lie: a copy for TensorFlow would cost too much memory.
MAX_COPIED_BYTES = 2**31
# Calling Python costs more than drawing a batch, so one call draws the batches of many steps.
DRAWS_PER_CALL = 16

# Makes the rows of each leaf of a batch out of indices [R]; the number of examples means padding.
Reader = Callable[[tf.Tensor], list[tf.Tensor]]


class Arrays:
    """Examples that lie in arrays, one row each.

    Attributes:
      structure: nest (x, y) or (x, y, sample_weight), to pack a flat list into.
      parts: shape and dtype of each part of an example.
    """

    def __init__(self, data: tuple):
        """Takes a nest of arrays; raises TypeError or ValueError if it is none."""
        leaves = tf.nest.flatten(data)
        if not leaves or not all(getattr(leaf, "shape", ()) for leaf in leaves):
            raise TypeError(
                f"`data` must be {_WHAT} of arrays, or nests of them; lists become arrays by "
                f"`np.asarray`. Received: leaves of {[type(leaf).__name__ for leaf in leaves]}"
            )
        # Taking rows of any other layout would copy the whole array each time.
        arrays = [np.asarray(leaf, order="C") for leaf in leaves]
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

    def reader(self, padding: Sequence[np.ndarray]) -> Reader:
        """Rows gathered within TensorFlow, from a copy that ends with the padding."""
        if sum(array.nbytes for array in self._arrays) > MAX_COPIED_BYTES:
            return _python_reader(self, padding)
        with tf.device("CPU:0"):  # where tf.data runs
            tensors = [tf.concat([a, row[None]], 0) for a, row in zip(self._arrays, padding)]
        return lambda indices: [tf.gather(tensor, indices) for tensor in tensors]

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Writes each example of `indices` into its row of `out`, and anything into the others."""
        for array, rows in zip(self._arrays, out):
            # "clip" spares a copy; what it makes of padding's index is overwritten.
            np.take(array, indices, axis=0, out=rows, mode="clip")


class Records:
    """Examples of a random-access source, read one by one or as many as it gives at a time.

    Attributes:
      structure: nest (x, y) or (x, y, sample_weight), to pack a flat list into.
      parts: shape and dtype of each part of an example.
    """

    def __init__(self, data: Any, preprocess: Callable[[Any], tuple] | None):
        """Reads the first example, for its structure."""
        self._data, self._preprocess = data, preprocess
        self._takes_lists = False
        if not hasattr(data, "__getitems__") and len(data):
            try:
                data[0]
            except TypeError:  # of older tfds sources, which take lists of indices only
                self._takes_lists = True
        (example,) = self._read([0]) if len(data) else [((), ())]
        if not isinstance(example, tuple) or len(example) not in (2, 3):
            raise TypeError(
                f"Each example must be {_WHAT}; pass `preprocess` to make that of it. Received: "
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

    def reader(self, padding: Sequence[np.ndarray]) -> Reader:
        """Rows read by a call of Python a batch."""
        return _python_reader(self, padding)

    def fill(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Writes each example of `indices` into its row of `out`, and nothing into the others."""
        present = np.argsort(indices)[: np.count_nonzero(indices < len(self))]
        # In ascending order, in which files are read fastest.
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


def _dtype(array: np.ndarray) -> np.dtype:
    # Strings of numpy have a length, which the first example would impose on the others.
    return np.dtype(object) if array.dtype.kind in "SU" else array.dtype


def source(data: Any, preprocess: Callable[[Any], tuple] | None) -> Arrays | Records:
    """Tells arrays from random-access sources.

    Raises:
      TypeError, ValueError: if `data` is neither, or holds no example.
    """
    if preprocess is not None and not callable(preprocess):
        raise TypeError(f"`preprocess` must be a function. Received: preprocess={preprocess!r}")
    if isinstance(data, tuple) and len(data) in (2, 3):
        if preprocess is not None:
            raise ValueError(
                "`preprocess` is for sources of single examples; apply it to the arrays, one row "
                "at a time. Received: `data` of arrays"
            )
        found = Arrays(data)
    elif (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, (dict, str))
    ):
        found = Records(data, preprocess)
    else:
        raise TypeError(
            f"`data` must be a tuple {_WHAT} of arrays, or have `__len__` and `__getitem__`. "
            f"Received: {type(data).__name__}"
        )
    if not len(found):
        raise ValueError("`data` must hold at least one example. Received: none")
    return found


def padding_rows(found: Arrays | Records, padding: tuple | None) -> list[np.ndarray]:
    """The leaves of a row of padding: of the public example `padding`, otherwise zeros.

    Raises:
      ValueError: if the leaves of `padding` have other shapes than those of the data.
    """
    rows = [
        np.full(shape, b"", dtype) if dtype.kind == "O" else np.zeros(shape, dtype)
        for shape, dtype in found.parts
    ]
    if padding is None:
        return rows
    try:
        tf.nest.assert_same_structure(tuple(found.structure[:2]), padding)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "`padding` must be one example, (x, y) of the structure of the data's. Received: "
            f"padding={padding!r}"
        ) from error
    # A sample weight, the last leaf, stays zero.
    for i, leaf in enumerate(map(np.asarray, tf.nest.flatten(padding))):
        if leaf.shape != rows[i].shape:
            raise ValueError(
                "`padding` must be one example, of the shapes of the data's. Received: shape "
                f"{leaf.shape} instead of {rows[i].shape}"
            )
        rows[i] = leaf.astype(rows[i].dtype)
    return rows


def _python_reader(found: Arrays | Records, padding: Sequence[np.ndarray]) -> Reader:
    def read(indices: np.ndarray) -> list[np.ndarray]:
        absent = indices >= len(found)
        out = [np.empty((len(indices), *row.shape), row.dtype) for row in padding]
        found.fill(indices, out)
        for rows, row in zip(out, padding):
            rows[absent] = row
        return out

    dtypes = [tf.string if row.dtype.kind == "O" else tf.as_dtype(row.dtype) for row in padding]
    return lambda indices: tf.numpy_function(read, [indices], dtypes)


def _check(sampling: draws.Sampling, start_step: int, key: bytes | None) -> None:
    checks.integer("start_step", start_step, 0)
    if start_step >= sampling.steps:
        raise ValueError(
            "`start_step` must be below the `steps` of the sampling. Received: "
            f"start_step={start_step!r}, steps={sampling.steps!r}"
        )
    if key is not None and not (isinstance(key, bytes) and len(key) == 32):
        raise ValueError("`key` must be 32 bytes, see `draws.new_key`. Received: something else")


def is_repeatable(data: Any) -> bool:
    """Whether data are, or are made of, batches that another process would draw again."""
    if getattr(data, "is_repeatable", False):
        return True
    return isinstance(data, tf.data.Dataset) and any(map(is_repeatable, data._inputs()))


def _refuse_several_workers() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = resolver.cluster_spec().as_dict()
    workers = sum(len(tasks.get(job, ())) for job in ("chief", "worker"))
    if workers > 1:
        raise NotPrivateError(
            "Each worker would draw batches of its own, so that an example could be in a batch "
            "twice: the sampling is for one process, with as many replicas as you like "
            f"(`MirroredStrategy`). Received: {workers} workers in TF_CONFIG. Give each worker its "
            "share of shuffled batches instead (`tf.data`), with the label 'shuffled'."
        )


def _with_marks(weights: tf.Tensor, marked: tf.Tensor) -> tf.Tensor:
    """Gives the zeros of marked rows a sign, the number of the draw; they stay zeros."""
    if weights.shape.rank != 1 or not weights.dtype.is_floating:
        return weights
    return tf.where(marked, tf.constant(-0.0, weights.dtype), weights)


def dataset(
    found: Arrays | Records,
    sampling: draws.Sampling,
    start_step: int,
    key: bytes | None,
    gradient_accumulation_steps: int,
    *,
    masked: bool = False,
    padding: tuple | None = None,
) -> tf.data.Dataset:
    """The batches of a sampling, with a mask as (or inside) the sample weight if `masked`.

    Guarantee: see `sampling.poisson_batches`.
    """
    _refuse_several_workers()
    k, rows = gradient_accumulation_steps, sampling.rows_per_batch(gradient_accumulation_steps)
    _check(sampling, start_step, key)
    comes_again = key is not None or sampling.seed is not None  # in another process
    key = draws.new_key(sampling.seed) if key is None else key
    num_examples, structure = len(found), found.structure
    read = found.reader(padding_rows(found, padding))
    add_mask = masked and len(structure) == 2
    passes = itertools.count()

    def new_pass() -> Iterator[int]:
        # A dataset that is iterated again must not draw the same batches again: ε is for
        # independent ones.
        yield next(passes)

    def draw(number: np.ndarray, first: np.ndarray) -> np.ndarray:
        own_key = draws.derived_key(key, b"pass", int(number)) if number else key
        steps = range(int(first), min(int(first) + DRAWS_PER_CALL, sampling.steps))
        parts = np.empty((len(steps), k, rows), np.int64)
        for step, own in zip(steps, parts):
            own[:] = sampling.place(num_examples, step, own_key, k)
        return parts.reshape(-1, rows)

    def draw_tensor(number: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(draw, [number, first], tf.int64), [None, rows])

    def batch(indices: tf.Tensor) -> tuple:
        leaves = read(tf.minimum(indices, num_examples))
        for leaf, (shape, _) in zip(leaves, found.parts):
            leaf.set_shape((rows, *shape))
        marked = indices > num_examples
        if not add_mask:
            *data, weights = tf.nest.pack_sequence_as(structure, leaves)
            if masked:
                weights = tf.nest.map_structure(lambda w: _with_marks(w, marked), weights)
            return (*data, weights)
        mask = tf.cast(indices < num_examples, tf.float32)
        return tf.nest.pack_sequence_as((*structure, 0), [*leaves, _with_marks(mask, marked)])

    first_steps = tf.data.Dataset.range(start_step, sampling.steps, DRAWS_PER_CALL)
    made = (
        tf.data.Dataset.from_generator(new_pass, output_signature=tf.TensorSpec((), tf.int64))
        .flat_map(lambda number: first_steps.map(lambda first: draw_tensor(number, first)))
        .prefetch(1)
        .unbatch()
        .map(batch)
        .apply(tf.data.experimental.assert_cardinality(k * (sampling.steps - start_step)))
        .prefetch(2)
    )
    made.is_repeatable = comes_again
    return made
