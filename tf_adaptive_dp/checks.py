"""Checks of arguments. Their errors name the argument and the value received."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import tensorflow as tf

from tf_adaptive_dp._keras.models import became_of_graphs, tunes_steps_per_call
from tf_adaptive_dp._keras.variables import paths_named

_Value = TypeVar("_Value")
_MADE_DENSE = {
    tf.RaggedTensor: "Pad a ragged tensor by its `to_tensor()`; the model can mask padding.",
    tf.SparseTensor: "Convert a sparse tensor with `tf.sparse.to_dense`.",
}


def number(name: str, value: Any, minimum: float, *, strict: bool = False) -> float:
    """Returns `value` as a float, or raises.

    Args:
      name: the argument's name, for the message.
      value: what the caller passed.
      minimum: the smallest number allowed.
      strict: whether `minimum` itself is not allowed either.

    Raises:
      TypeError: if `value` is not a number.
      ValueError: if it is NaN, infinite or too small.
    """
    _require_real(name, value)
    try:
        number = float(value)
    except OverflowError:  # of an int or a fraction
        number = math.inf
    if not math.isfinite(number) or number < minimum or (strict and number == minimum):
        bound = "greater than" if strict else "at least"
        raise ValueError(
            f"`{name}` must be finite and {bound} {minimum:g}. Received: {name}={value!r}"
        )
    return number


def _require_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")


def integer(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as an int, or raises.

    Raises:
      TypeError: if `value` is not a whole number.
      ValueError: if it is below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a whole number. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}. Received: {name}={value!r}")
    return int(value)


def probability(name: str, value: Any, *, or_one: bool = False) -> float:
    """Returns `value` as a float, or raises.

    Args:
      name: the argument's name, for the message.
      value: what the caller passed.
      or_one: whether 1 is allowed, too.

    Raises:
      TypeError: if `value` is not a number.
      ValueError: if it is not in (0, 1), or with `or_one` in (0, 1].
    """
    _require_real(name, value)
    if not (0 < value < 1 or (or_one and value == 1)):
        interval = "(0, 1]" if or_one else "(0, 1)"
        raise ValueError(f"`{name}` must be in {interval}. Received: {name}={value!r}")
    return float(value)


def keep(owner: Any, check: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> None:
    """Checks an attribute of a frozen dataclass, and stores what the check returns.

    Otherwise numbers of NumPy would stay what they are, and be computed with in few bits.

    Args:
      owner: what has the attribute.
      check: one of these functions.
      name: of the attribute.
      *args: of the check, after the value.
      **kwargs: of the check.
    """
    object.__setattr__(owner, name, check(name, getattr(owner, name), *args, **kwargs))


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, or raises TypeError if it is neither true nor false."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Received: {name}={value!r}")
    return value


def instance(name: str, value: Any, kind: type) -> Any:
    """Returns `value`, or raises TypeError if it is not of a class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"`{name}` must be {article} `{kind.__name__}`. Received: {name}={value!r}")
    return value


def path(name: str, value: Any) -> str | os.PathLike:
    """Returns `value`, or raises TypeError if it is no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path. Received: {name}={value!r}")
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Returns the strings of a list; raises TypeError for anything else, such as one string."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        found = tuple(value)
        if all(isinstance(entry, str) for entry in found):
            return found
    raise TypeError(
        f"`{name}` must be a list of strings; `x.decode()` makes one of bytes, and `str(x)` of a "
        f"number. Received: {name}={value!r:.200}"
    )


def not_masked(name: str, value: Any) -> None:
    """Raises if some values of a NumPy array are masked; as an array they would be there again.

    Raises:
      ValueError: if some are.

    >>> not_masked("x", np.ma.masked_array([1, 2], mask=[False, False]))
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        count = int(np.ma.getmaskarray(value).sum())
        raise ValueError(
            f"`{name}` must have no masked values, since what lies under a mask is unknown. Drop "
            f"or fill them. Received: {count} masked values of {value.size}"
        )


def array(value: Any) -> np.ndarray:
    """Returns a value as a NumPy array.

    A pandas table whose columns are numbers or booleans becomes an array of numbers, with NaN for
    what is missing. NumPy would make one of objects if the columns differ in type, as those of
    `pandas.get_dummies` do, or may have missing values.

    >>> array([1, 2])
    array([1, 2])
    """
    made = np.asarray(value)
    if made.dtype != object or not hasattr(value, "dtypes") or not hasattr(value, "isna"):
        return made
    types = [value.dtypes] if value.ndim == 1 else list(value.dtypes)
    if not types or any(of.kind not in "iufb" for of in types):
        return made
    if np.any(np.asarray(value.isna())):
        return value.to_numpy(np.float64, na_value=np.nan)
    return value.to_numpy(np.result_type(*(getattr(of, "numpy_dtype", of) for of in types)))


def numbers_or_strings(name: str, value: np.ndarray) -> None:
    """Raises TypeError if an array holds anything but numbers or strings.

    Args:
      name: the argument that holds the array, for the message.
      value: the array.
    """
    must = f"`{name}` must be arrays of numbers or of strings."
    if value.dtype.kind in "Mm":
        raise TypeError(
            f"{must} Convert times to numbers that count from a public date, such as `(times - "
            'numpy.datetime64("2020-01-01")) / numpy.timedelta64(365, "D")`. Received: an array of '
            f"{value.dtype}"
        )
    if value.dtype.names is not None:
        raise TypeError(
            f"{must} Convert a structured array to a dict of its columns, "
            f"`{{n: {name}[n] for n in {name}.dtype.names}}`. Received: an array with the columns "
            f"{', '.join(value.dtype.names)}"
        )
    if value.dtype.kind != "O":
        return
    for other in (v for v in value.flat if not isinstance(v, (str, bytes))):
        kind = type(other).__name__
        if value.ndim == 1 and (kind in ("NoneType", "NAType") or other != other):
            raise TypeError(
                f"{must} Fill in missing strings by a public constant, as `series.fillna('')` "
                f"does. Received: {other!r} in place of a string"
            )
        if all(isinstance(v, (int, float, np.number, np.bool_)) for v in value.flat):
            raise TypeError(
                f'{must} Convert it to numbers of one type, as `{name}.astype("float32")` does. '
                "Received: an array of dtype object, with numbers"
            )
        raise TypeError(
            f"{must} Convert a table whose columns differ in type to a dict of its columns, "
            f"`dict(frame)`. Received: an array with objects of type {kind}"
        )


def dense(name: str, value: Any) -> None:
    """Raises if a value is sparse or ragged: such values cannot be trained on privately.

    Args:
      name: the argument that holds the value, for the message.
      value: an array, a tensor, or anything else.

    Raises:
      TypeError: if it is.
    """
    how = next((how for kind, how in _MADE_DENSE.items() if isinstance(value, kind)), None)
    if scipy.sparse.issparse(value):
        how = "Convert a sparse matrix by its `toarray()`."
    if how is not None:
        raise TypeError(
            f"`{name}` must hold dense arrays or tensors: sparse and ragged ones cannot be trained "
            f"on privately. {how} Received: a {type(value).__name__} of shape {value.shape}"
        )


def equal_rows(arrays: Mapping[str, Any]) -> None:
    """Raises unless all arrays have one row for each example.

    Args:
      arrays: nests of arrays by the names of the arguments that hold them. `None` has no rows.

    Raises:
      TypeError: if something in them is no array, or one without axes.
      ValueError: if an array has another number of rows.

    >>> equal_rows({"x": np.zeros([5, 2]), "y": np.zeros(5), "sample_weight": None})
    """
    lengths = {}
    for name, part in arrays.items():
        leaves = [leaf for leaf in tf.nest.flatten(part) if leaf is not None]
        if not all(getattr(leaf, "shape", None) for leaf in leaves):
            raise TypeError(
                f"`{name}` must be an array with one row for each example, or a nest of such "
                f"arrays: convert lists by `numpy.array`. Received: {name}={reprlib.repr(part)}"
            )
        lengths[name] = sorted({int(leaf.shape[0]) for leaf in leaves})
    if len({length for of_part in lengths.values() for length in of_part}) > 1:
        received = {name: " and ".join(map(str, of)) for name, of in lengths.items() if of}
        rows = {length for of in lengths.values() for length in of}
        stack = (
            "A list of arrays stands for several inputs; join the rows of one input by "
            "`numpy.stack`. "
            if any(isinstance(p, (list, tuple)) and len(p) in rows for p in arrays.values())
            else ""
        )
        raise ValueError(
            f"All arrays must have one row for each example. {stack}Received: "
            + ", ".join(f"`{name}` of {of} rows" for name, of in received.items())
        )


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns `value`, or raises if it is none of `choices`.

    Raises:
      ValueError: if it is not.
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"`{name}` must be one of {listed}. Received: {name}={value!r}")
    return value


def by_path(
    name: str, kind: str, values: Mapping[str, _Value], paths: Sequence[str]
) -> dict[str, _Value]:
    """Returns values that were passed by name, by the path of what each name means.

    Args:
      name: the argument's name, for the message.
      kind: what the names are of, "layer" or "variable".
      values: what the caller passed; see `paths_named` for the names.
      paths: of all that is trained.

    Raises:
      ValueError: if a name means nothing, or more than one, or the same as another name.
    """
    found = {of: paths_named(of, paths) for of in values}
    unknown = [of for of, meant in found.items() if not meant]
    if unknown:
        raise ValueError(
            f"`{name}` names {kind}s that are not trained. Received: {name} for "
            f"{', '.join(unknown)}; there are {', '.join(dict.fromkeys(paths))}"
        )
    if len({meant[0] for meant in found.values()}) < sum(map(len, found.values())):
        raise ValueError(
            f"Each name in `{name}` must mean one {kind}, and no two names the same. Received: "
            f"names that mean {found}. Add the names of the layers around it."
        )
    return {meant[0]: values[of] for of, meant in found.items()}


def fixed_steps_per_call(model: Any) -> None:
    """Raises ValueError if Keras may change how many steps one call of a model makes."""
    if tunes_steps_per_call(model):
        raise ValueError(
            "The number of steps per call must be known in advance. Received: a model with "
            "enable_tune_steps_per_execution=True, which lets a thread change it at any time. "
            "Pass a number as `steps_per_execution`."
        )


def works_eagerly(model: Any) -> bool:
    """Whether a Keras model can be called outside of graphs; see `became_of_graphs`."""
    return not became_of_graphs(model)
