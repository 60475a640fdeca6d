"""Splits data into public and private examples, and checks that they do not overlap."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras import datasets
from tf_adaptive_dp.errors import NotPrivateError

# How many public examples `copies_of_first` compares with all private ones.
_LOOKED_UP = 32


class PublicSplit(NamedTuple):
    """What `split_public` returns.

    Attributes:
      public: the examples that are public from now on, in the structure of the data.
      private: the private examples, in the structure of the data.
      num_left_out: how many other examples were left out because they equal a public one. Do not
        publish it, since it was counted on private data.
    """

    public: Any
    private: Any
    num_left_out: int


def split_public(data: Any, share: float = 0.01, *, seed: int = 0) -> PublicSplit:
    """Makes a random share of the examples public, and removes them from the private examples.

    Examples that are not chosen but have the same features as a public one belong to neither part.

    Guarantee: no private example is public, by its index or by its features (`check_disjoint`).
    Whether an example is left out depends only on that example and the public ones. But which
    ones are public depends on the number of examples. So split first: ε compares private parts
    after the split that differ in one example, not datasets before it. The public examples are not
    protected at all. Take them from data that may be published, and split only once, since ε is
    for the private part of one split.

    Args:
      data: x, `(x, y)` or `(x, y, sample_weight)`, of arrays or nests of arrays that share their
        first axis. Examples are compared by x.
      share: the share of public examples, in (0, 1). At least one example is public.
      seed: the seed of the random choice, at least 0.

    Returns:
      `PublicSplit(public, private, num_left_out)`.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of its range, or no
        private example is left.

    >>> x, y = np.arange(8) // 2, np.arange(8)
    >>> (public_x, _), (private_x, _), num_left_out = split_public((x, y), share=0.2)
    >>> len(public_x), len(private_x), num_left_out, set(public_x) & set(private_x)
    (2, 4, 2, set())
    """
    share = checks.number("share", share, 0, strict=True)
    if share >= 1:
        raise ValueError(f"`share` must be below 1. Received: share={share!r}")
    seed = checks.integer("seed", seed, 0)
    data = tf.nest.map_structure(np.asarray, data)
    size = _num_examples("data", tf.nest.flatten(data))
    count = max(1, round(share * size))
    order = np.random.default_rng(seed).permutation(size)
    chosen, others = np.sort(order[:count]), np.sort(order[count:])
    digests = list(_digests("data", _features(data), None))
    public = set().union(*(digests[i] for i in chosen))
    kept = np.array([i for i in others if public.isdisjoint(digests[i])], others.dtype)
    if not len(kept):
        raise ValueError(
            f"No private example is left. Use a smaller `share`. Received: share={share!r} of "
            f"{size} examples, and {len(others)} others that equal public ones"
        )
    return PublicSplit(
        tf.nest.map_structure(lambda a: a[chosen], data),
        tf.nest.map_structure(lambda a: a[kept], data),
        len(others) - len(kept),
    )


def check_disjoint(public: Any, private: Any) -> None:
    """Rejects public data that contain examples of the private data.

    Statistics of public data enter training without noise. For an example in both data sets, they
    would reveal what the noise hides.

    Guarantee: if the function returns, no private example has exactly the features of a public one,
    byte by byte except for trailing zeros (padding), along any axis. All NaNs are equal, and so are
    numbers of the same value in arrays of objects. It does not find examples that were changed, for
    instance by augmentation, or that a dataset did not yield this time. Labels are not compared,
    and rows with a sample weight of 0 count as absent.

    Args:
      public: a `tf.data.Dataset` of batches x, (x, y) or (x, y, sample_weight), as `fit` takes
        them; or such a tuple of arrays, or of nests of arrays, with one example per row.
      private: data of the same kinds, with the same structure and dtypes of x.

    Raises:
      NotPrivateError: if private examples are in the public data. The message contains their
        number, which is not private.
      TypeError, ValueError: if the data are not comparable, empty or endless, or hold objects that
        are neither numbers nor texts.

    >>> x = np.arange(10.0)
    >>> check_disjoint((x[:2], x[:2]), (x[2:], x[2:]))
    >>> check_disjoint(x[:2], tf.data.Dataset.from_tensor_slices(x).batch(4))
    Traceback (most recent call last):
    ...
    tf_adaptive_dp.errors.NotPrivateError: 2 of 10 private examples are in the public data...
    """
    public_kind, private_kind = _kind("public", public), _kind("private", private)
    if public_kind != private_kind:
        raise ValueError(
            "`public` and `private` must have features of the same structure and dtypes; otherwise "
            f"equal examples are not found. Received: {public_kind} and {private_kind}"
        )
    known = set().union(*_all_digests("public", public))
    total = found = 0
    for digests in _all_digests("private", private):
        total += 1
        found += not known.isdisjoint(digests)
    for name, size in (("public", len(known)), ("private", total)):
        if not size:
            raise ValueError(f"`{name}` must hold at least one example. Received: none")
    if found:
        raise NotPrivateError(
            f"{found} of {total} private examples are in the public data, whose statistics are "
            "used without noise, so these examples would not be protected. Remove them from the "
            "private data before training (`tf_adaptive_dp.side_information.split_public` does so "
            "for arrays), or use other public data."
        )


def copies_of_first(public: tf.data.Dataset, private: Any) -> int:
    """How many of the first public examples are among the private ones: all of them, or none.

    It is quick and finds a share of the same arrays, or copies of it, and not single examples. For
    these, `check_disjoint` hashes all examples of both, which takes too long for each `fit`.

    Args:
      public: a data set of examples, or of batches of them, which it looks up before they are
        changed, shuffled and batched.
      private: such a data set, or arrays of x.

    Returns:
      The number of examples that were looked up. 0 if one of them is not among the private ones,
      or if that is unknown: for private data that are no arrays, or have other features.
    """
    if isinstance(private, tf.data.Dataset):
        arrays = datasets.arrays_of(private)
        private = None if arrays is None else _features(arrays)
    rows = [np.asarray(part) for part in tf.nest.flatten(private) if hasattr(part, "shape")]
    examples = datasets.first_examples(public, _LOOKED_UP) if rows else []
    for example in examples:
        parts = [np.asarray(part) for part in tf.nest.flatten(_features(example))]
        if [(p.shape, p.dtype) for p in parts] != [(r.shape[1:], r.dtype) for r in rows]:
            return 0
        if not _is_among(parts, rows):
            return 0
    return len(examples)


def _is_among(example: list[np.ndarray], rows: list[np.ndarray]) -> bool:
    """Whether some row has exactly the parts of an example, none of which is NaN."""
    found = np.arange(len(rows[0]))
    for part, of_rows in zip(example, rows):
        part, flat = part.reshape(-1), of_rows.reshape(len(of_rows), part.size)
        for start in range(0, part.size, 64):  # few rows are left after the first entries
            some = slice(start, start + 64)
            found = found[(flat[found, some] == part[some]).all(axis=1)]
    return bool(len(found))


def _features(data: Any) -> Any:
    return tf.keras.utils.unpack_x_y_sample_weight(data)[0]


def _kind(name: str, data: Any) -> tuple[list, list]:
    """The paths and dtypes of the features."""
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(f"`{name}` must end; remove `repeat()`. Received: an endless dataset")
        features = _features(data.element_spec)
        if any(getattr(s, "shape", None) == [] for s in tf.nest.flatten(features)):
            raise ValueError(
                f"`{name}` must be a dataset of batches, as `fit` takes them. Received: elements "
                f"{data.element_spec}; call `.batch(...)`"
            )
        dtypes = [spec.dtype.name for spec in tf.nest.flatten(features)]
    else:
        features = tf.nest.map_structure(np.asarray, _features(data))
        dtypes = [_dtype_name(a) for a in tf.nest.flatten(features)]
    paths = [str(path) for path, _ in _flat_with_paths(features)]
    return paths, dtypes


def _dtype_name(array: np.ndarray) -> str:
    return "string" if array.dtype.kind in "OSU" else array.dtype.name


def _flat_with_paths(nest: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    if isinstance(nest, dict):
        parts = sorted(nest.items())
    elif isinstance(nest, (list, tuple)):
        parts = list(enumerate(nest))
    else:
        yield path, nest
        return
    for key, part in parts:
        yield from _flat_with_paths(part, (*path, key))


def _all_digests(name: str, data: Any) -> Iterator[tuple[bytes, ...]]:
    for batch in data if isinstance(data, tf.data.Dataset) else [data]:
        x, _, weights = tf.keras.utils.unpack_x_y_sample_weight(batch)
        x = tf.nest.map_structure(_dense, x)
        size = _num_examples(name, tf.nest.flatten(x))
        present = None
        if weights is not None:
            each = [np.asarray(w).reshape(size, -1).any(1) for w in tf.nest.flatten(weights)]
            present = np.any(each, axis=0)
        yield from _digests(name, x, present)


def _dense(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    elif isinstance(tensor, tf.sparse.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return np.asarray(tensor)


def _num_examples(name: str, arrays: list[np.ndarray]) -> int:
    sizes = sorted({a.shape[0] if a.ndim else -1 for a in arrays})
    if len(sizes) != 1 or sizes[0] < 0:
        raise ValueError(
            f"`{name}` must be arrays with one example per row, and equally many. Received: shapes "
            f"{[a.shape for a in arrays]}"
        )
    return sizes[0]


def _digests(name: str, x: Any, present: np.ndarray | None) -> Iterator[tuple[bytes, ...]]:
    """Hashes of the features of each example that is present; equal examples share one of them.

    The first is of all entries in a row, whatever their shape. If an example has several axes, the
    second is of the entries without padding: inner axes, too, are as long as the batch needs.
    """
    arrays = tf.nest.flatten(x)
    several_axes = any(array.ndim > 2 for array in arrays)
    for i in range(len(arrays[0])):
        if present is not None and not present[i]:
            continue
        rows = [_canonical(name, np.asarray(array[i], array.dtype)) for array in arrays]
        whole = _hash([_bytes(row) for row in rows])
        yield (
            (whole, _hash([_bytes_without_padding(r) for r in rows])) if several_axes else (whole,)
        )


def _hash(parts: list[bytes]) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.digest()


def _canonical(name: str, row: np.ndarray) -> np.ndarray:
    """One example's features, with the same bytes for equal values; texts are objects of bytes."""
    kind = row.dtype.kind
    if kind in "OSU":
        texts = np.empty(row.size, object)
        texts[:] = [_text(name, value) for value in row.reshape(-1).tolist()]
        return texts.reshape(row.shape)
    if kind in "mM":  # times
        return row.astype(np.int64)
    row = row + np.zeros([], row.dtype)  # -0.0 becomes 0.0
    # NaNs differ in their sign and their last bits.
    return row if kind in "biu" else np.where(row == row, row, np.array(np.nan, row.dtype))


def _text(name: str, value: Any) -> bytes:
    """An entry of an array of objects. A missing value makes the integers of a table floats."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if value is None or type(value).__name__ == "NAType":  # pandas.NA
        value = np.nan
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise TypeError(
            f"`{name}` must hold numbers or texts where its arrays have the dtype object: convert "
            f"other features to arrays of numbers. Received: an entry of type "
            f"{type(value).__name__}"
        )
    as_float = float(value)
    return b"%d" % int(as_float) if as_float.is_integer() else repr(as_float).encode()


def _bytes(row: np.ndarray) -> bytes:
    """The bytes of one example's features, without trailing zeros such as padding."""
    if row.dtype != object:
        return row.tobytes().rstrip(b"\0")
    texts = row.reshape(-1).tolist()
    while texts and not texts[-1]:
        texts.pop()
    return b"".join(len(t).to_bytes(8, "little") + t for t in texts)


def _bytes_without_padding(row: np.ndarray) -> bytes:
    """The shape and the bytes of features up to the last entry along each axis that is not zero."""
    filled = row.astype(bool) if row.dtype == object else row != 0
    for axis in range(row.ndim):
        others = tuple(k for k in range(row.ndim) if k != axis)
        used = np.flatnonzero(filled.any(axis=others))
        row = row.take(range(used[-1] + 1 if len(used) else 0), axis)
    return repr([n for n in row.shape if n != 1]).encode() + _bytes(row)
