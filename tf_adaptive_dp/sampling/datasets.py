"""Batches drawn by a sampling, as a `tf.data.Dataset` for `fit`.

From top to bottom: the functions that users call, `poisson_batches`, `fixed_size_batches` and
`shuffled_batches`; `as_dataset`, which turns any sampling into a dataset; and the padding of
batches that are not full. `sources` reads the examples.

A sampling is a frozen dataclass of public values. The data, the number of examples and the secret
key of the draws are passed to the call, so nothing private gets into a configuration.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.datasets import datasets_within
from tf_adaptive_dp._keras.layers import known_tokens
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.cyclic import CyclicPoissonSampling
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.sampling.fixed_order import FixedOrder
from tf_adaptive_dp.sampling.fixed_size import FixedSizeSampling
from tf_adaptive_dp.sampling.poisson import PoissonSampling
from tf_adaptive_dp.sampling.shuffled import ShuffledEpochs
from tf_adaptive_dp.sampling.sources import (
    Arrays,
    Records,
    is_draw,
    open_source,
    refuse_shuffled,
    warn_of_copies,
)
from tf_adaptive_dp.sampling.users import UserRecords

__all__ = ["fixed_size_batches", "poisson_batches", "shuffled_batches"]

# Calling Python costs more than drawing a batch, so one call draws the batches of many steps.
DRAWS_PER_CALL = 16
# The entries of a draw that are no rows, where batches have different numbers of them.
_NO_ROW = -1
# What stands for an unknown word in Keras's lookup layers.
_UNKNOWN = b"[UNK]"
# Smaller weights may count as zeros in the step, and would keep their sign.
_LEAST_WEIGHT = float(np.finfo(np.float32).tiny)


def poisson_batches(
    data: Any,
    sampling: PoissonSampling | CyclicPoissonSampling,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    padding: tuple | None = None,
    key: bytes | None = None,
    user_ids: Any = None,
) -> tf.data.Dataset:
    """Poisson batches (x, y, sample_weight) for `fit`, all of one static shape.

    A batch has `sampling.max_batch_size` rows unless gradients are accumulated. The drawn examples
    are in random rows. The other rows are padding with sample weight 0. Its losses and gradients
    are exactly zero, so the mechanism counts it as absent. The zeros have random signs, from which
    the optimizer recognizes a repeated draw. Batches can be empty, and empty batches must be
    released too.

    Padding has inputs of ones (strings are "[UNK]") and labels of zeros, which are public. A real
    example would not be: weight 0 times an infinite loss is NaN, which shows. If ones are not valid
    inputs of the model (the index 1 of a table of one row), pass a public example as `padding`.

    With `user_ids`, users are drawn instead of examples. A batch has room for
    B = `sampling.max_batch_size` users, with k = `sampling.examples_per_user` neighboring rows for
    each. A user's examples, or a random k of them, are in the first of these rows; the others are
    padding. For `user_reduction="mean"` the sample weight of each example is divided by the number
    of examples of its user in the batch. The reduction happens only in the weights, so no loss can
    get it wrong: a loss that ignores them is refused, since its padding contributes. Padding with a
    gradient that is not finite would drop the user among whose rows it is, so pass a public example
    as `padding` where ones are not valid inputs.

    Guarantee: every example joins each batch independently with probability q, up to truncation,
    and its row reveals nothing about the others; see `PoissonSampling`. Each iterator has its own
    sequence of draws, so no draw repeats. The sequence of the first iterator is a pure function of
    key and step. Without a seed or `key`, each call makes a new key and stores it nowhere. A
    resumed run of a `PoissonSampling` then draws new batches, which leaves ε valid because batches
    are independent. A resumed run of a `CyclicPoissonSampling` needs the same groups: a
    `start_step` above 0 without the `key` is an error. Positions in the data determine the groups,
    so `data` must come in the same order, which `PrivacyPlan.fit` checks and this function does
    not. To continue the same sequence, make a key (`draws.new_key()`), pass it to both calls, and
    keep it with the data, not in a checkpoint that others receive.

    Args:
      data: `(x, y)` or `(x, y, sample_weight)` of arrays, or nests of arrays, that share their
        first axis, or `(x,)` for models that need no targets, whose batches are
        `(x, None, sample_weight)`; or an object with `__len__` and `__getitem__` of single examples
        (or of lists of indices, or `__getitems__`), such as `tfds.data_source`. Shapes and dtypes
        are taken from the first example and count as public. Arrays of up to 2 GiB in total are
        copied, so that TensorFlow can gather their rows. Larger ones are read by Python, which
        takes longer. A finite `tf.data.Dataset` of single examples is read into memory once.
      sampling: q, the size of a batch, and the number of batches; a `CyclicPoissonSampling` for
        optimizers with correlated noise.
      start_step: the number of draws to skip because an earlier run made them.
      gradient_accumulation_steps: k, the number of consecutive batches that each draw is divided
        into; the optimizer must accumulate as many. Each has ceil(`max_batch_size` / k) rows, and
        the drawn examples are in random rows of all k.
      preprocess: maps one example of a source to (x, y) or (x, y, sample_weight).
      padding: (x, y) of one public example, to use instead of ones and zeros.
      key: 32 secret bytes, to continue a sequence.
      user_ids: the user each example belongs to: whole numbers or strings. Needed if and only if
        the sampling has `examples_per_user`. See `users.UserRecords` and docs/how-to/people.md.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches. Pass `steps_per_epoch` to `fit`,
      and `shuffle=False`: Keras 3 warns of datasets without it, which it never shuffles.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or shape, or is out of range.

    Example:
      >>> import numpy as np
      >>> from tf_adaptive_dp.sampling import PoissonSampling, poisson_batches
      >>> sampling = PoissonSampling(0.5, max_batch_size=4, steps=1, seed=1)
      >>> x, y = np.arange(1, 7, dtype=np.float32), np.arange(6)
      >>> [[t.tolist() for t in b] for b in poisson_batches((x, y), sampling).as_numpy_iterator()]
      [[[3.0, 1.0, 1.0, 1.0], [2, 0, 0, 0], [1.0, -0.0, -0.0, -0.0]]]
    """
    _require(sampling, PoissonSampling, CyclicPoissonSampling)
    if user_ids is not None:
        refuse_shuffled(data)
    source = open_source(data, preprocess)
    return as_dataset(
        source,
        sampling,
        start_step,
        key,
        gradient_accumulation_steps,
        masked=True,
        padding=padding,
        users=None if user_ids is None else UserRecords(user_ids),
    )


def fixed_size_batches(
    data: Any,
    sampling: FixedSizeSampling,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    key: bytes | None = None,
) -> tf.data.Dataset:
    """Batches (x, y[, sample_weight]) for `fit`, each a random subset of a fixed size.

    Guarantee: all subsets are equally likely and batches are independent; see
    `FixedSizeSampling` for the adjacency and `poisson_batches` for keys and iterators.

    Args:
      data: see `poisson_batches`.
      sampling: the size and the number of the batches.
      start_step: the number of draws to skip because an earlier run made them.
      gradient_accumulation_steps: k, a divisor of the batch size: each draw is divided into k
        batches.
      preprocess: maps one example of a source to (x, y) or (x, y, sample_weight).
      key: 32 secret bytes, to continue a sequence.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or shape, or is out of range.
    """
    _require(sampling, FixedSizeSampling)
    return _full_batches(data, sampling, start_step, gradient_accumulation_steps, preprocess, key)


def shuffled_batches(
    data: Any,
    sampling: ShuffledEpochs | FixedOrder,
    *,
    start_step: int = 0,
    gradient_accumulation_steps: int = 1,
    preprocess: Callable[[Any], tuple] | None = None,
    key: bytes | None = None,
) -> tf.data.Dataset:
    """Batches (x, y[, sample_weight]) for `fit` from passes over shuffled data.

    Guarantee: no amplification by sampling is proven; see `ShuffledEpochs`, and `FixedOrder` for
    passes in one order. Resuming `ShuffledEpochs` within a pass requires the same `key` or seed;
    otherwise examples occur twice in that pass. `FixedOrder` requires it wherever a run resumes,
    since all passes have one order, and raises an error without it. Without a `key`, all datasets
    that a process makes by a `FixedOrder` with one batch size from as many examples have one order,
    whatever its `steps`. For both, `data` must come in the same order again, which is not
    checked here.

    Args:
      data: see `poisson_batches`.
      sampling: the size and the number of the batches.
      start_step: the number of draws to skip because an earlier run made them.
      gradient_accumulation_steps: k, a divisor of the batch size: each draw is divided into k
        batches.
      preprocess: maps one example of a source to (x, y) or (x, y, sample_weight).
      key: 32 secret bytes, to continue a sequence.

    Returns:
      A dataset of k · (`sampling.steps` - `start_step`) batches.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or shape, or is out of range.
    """
    _require(sampling, ShuffledEpochs, FixedOrder)
    return _full_batches(data, sampling, start_step, gradient_accumulation_steps, preprocess, key)


def _full_batches(
    data: Any,
    sampling: FixedSizeSampling | ShuffledEpochs | FixedOrder,
    start_step: int,
    gradient_accumulation_steps: int,
    preprocess: Callable[[Any], tuple] | None,
    key: bytes | None,
) -> tf.data.Dataset:
    """The batches of a sampling that fills every batch; the data must suffice for one."""
    source = open_source(data, preprocess)
    if len(source) < sampling.batch_size:
        raise ValueError(
            "`data` must hold at least one batch; make `batch_size` smaller. Received: "
            f"{len(source)} examples, batch_size={sampling.batch_size!r}"
        )
    return as_dataset(source, sampling, start_step, key, gradient_accumulation_steps)


def _require(sampling: Any, *kinds: type[Sampling]) -> None:
    if not isinstance(sampling, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"`sampling` must be a {names}. Received: sampling={sampling!r}")


def is_repeatable(data: Any) -> bool:
    """Whether another process would draw the same batches again."""
    return any(drawn.is_repeatable for drawn in _drawn_by_samplings(data))


def is_drawn(data: Any) -> bool:
    """Whether a sampling of the library drew the batches of a data set."""
    return next(_drawn_by_samplings(data), None) is not None


def _drawn_by_samplings(data: Any) -> Iterator[Any]:
    """What samplings of the library drew, of a data set and those that it transforms."""
    if isinstance(data, tf.data.Dataset):
        yield from filter(is_draw, datasets_within(data))


def as_dataset(
    source: Arrays | Records,
    sampling: draws.Sampling,
    start_step: int,
    key: bytes | None,
    gradient_accumulation_steps: int,
    *,
    masked: bool = False,
    padding: tuple | None = None,
    users: UserRecords | None = None,
    equal_rows: bool = True,
) -> tf.data.Dataset:
    """The batches of a sampling; if `masked`, the sample weights mark the padding.

    Guarantee: see `sampling.poisson_batches`.

    Args:
      source: the examples.
      sampling: how batches are drawn.
      start_step: the number of draws to skip because an earlier run made them.
      key: 32 secret bytes, to continue a sequence; `None` for a new one.
      gradient_accumulation_steps: k, the number of batches that each draw is divided into.
      masked: whether batches have sample weights, which are 0 for padding.
      padding: one public example to pad with, see `padding_rows`.
      users: whom the examples belong to, if users are drawn.
      equal_rows: whether all batches have the same number of rows. Others, of `places_for` places,
        are only for the compiled steps of `fit`, whose optimizer was told by `expect_rows`.

    Raises:
      TypeError, ValueError: if the arguments do not fit each other.
      NotPrivateError: if several workers would each draw batches of their own.
    """
    _refuse_several_workers()
    _check_users(users, sampling, len(source))
    k, rows = gradient_accumulation_steps, sampling.rows_per_batch(gradient_accumulation_steps)
    _check(sampling, start_step, key)
    if not equal_rows and (k > 1 or sampling.keeps_distance or not masked):
        raise ValueError(
            "Only undivided Poisson batches may differ in their number of rows. Received: "
            f"gradient_accumulation_steps={k!r}, sampling={sampling!r}"
        )
    if users is None:
        warn_of_copies(source)
    repeatable = key is not None or sampling.seed is not None  # by another process
    num_examples = len(source)
    first_key = sampling.new_key(num_examples) if key is None else key
    sampling.remember_key(num_examples, first_key)
    draws.remember_num_examples(sampling, num_examples if users is None else users.num_users)
    draw = _drawer(sampling, first_key, num_examples, k, users, equal_rows)
    read = _batch_reader(source, rows if equal_rows else None, padding)
    first_steps = tf.data.Dataset.range(start_step, sampling.steps, DRAWS_PER_CALL)
    passes = itertools.count()

    def new_pass() -> Iterator[int]:
        # Another iteration must not draw the same batches again: ε holds for independent ones.
        yield next(passes)

    def batch(indices: tf.Tensor) -> tuple:
        if not equal_rows:
            indices = tf.boolean_mask(indices, indices > _NO_ROW)
        data = read(indices)
        return _weighted(data, indices, num_examples, sampling) if masked else data

    made = (
        tf.data.Dataset.from_generator(new_pass, output_signature=tf.TensorSpec((), tf.int64))
        .flat_map(lambda number: first_steps.map(lambda first: draw(number, first)))
        .prefetch(1)
        .unbatch()
        .map(batch)
        .apply(tf.data.experimental.assert_cardinality(k * (sampling.steps - start_step)))
        .prefetch(2)
    )
    made.is_repeatable = repeatable
    return made


def _drawer(
    sampling: draws.Sampling,
    first_key: bytes,
    num_examples: int,
    k: int,
    users: UserRecords | None,
    equal_rows: bool,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Makes the function that draws the batches of a few steps.

    Args:
      sampling: says who joins which batch.
      first_key: the key of the first pass.
      num_examples: the number of examples.
      k: the number of batches that each draw is divided into.
      users: whom the examples belong to, if users are drawn.
      equal_rows: whether all batches have R rows.

    Returns:
      A function of the number of a pass and the first of the steps. It returns indices, [N, R] for
      N batches of at most R rows: of an example, or at least `num_examples` for padding. Above
      that, the zero weight of the padding gets a sign. A smaller batch ends with `_NO_ROW`s.
    """
    rows, process = sampling.rows_per_batch(k), os.getpid()

    def draw(number: np.ndarray, first: np.ndarray) -> np.ndarray:
        if os.getpid() != process and getattr(sampling, "seed", None) is None:
            raise NotPrivateError(
                "A data set of random batches cannot be used in a process that was forked after it "
                "was made: all children would draw the same batches, and epsilon holds for "
                "independent ones. Make the data set in the child."
            )
        own_key = sampling.key_of_pass(first_key, int(number))
        steps = range(int(first), min(int(first) + DRAWS_PER_CALL, sampling.steps))
        parts = np.full((len(steps), k, rows), _NO_ROW, np.int64)
        for step, own in zip(steps, parts):
            if users is None:
                placed = sampling.place(num_examples, step, own_key, k, equal_rows)
            else:
                placed = users.place(sampling, step, own_key, k, equal_rows)
            if not equal_rows:
                _mark_some(placed, num_examples)
            own[:, : placed.shape[1]] = placed
        return parts.reshape(-1, rows)

    def draw_tensor(number: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(draw, [number, first], tf.int64), [None, rows])

    return draw_tensor


def _mark_some(placed: np.ndarray, num_examples: int) -> None:
    """Marks one row of padding if chance marked none, as it does once in 4,096 times with 12 rows.

    Without a mark, a batch does not show that it is one of ours.

    Args:
      placed: [1, R], see `_drawer`; changed in place.
      num_examples: the number of examples.
    """
    padding = np.flatnonzero(placed == num_examples)
    if padding.size and not (placed > num_examples).any():
        placed[0, padding[0]] += 1


def _batch_reader(
    source: Arrays | Records, rows: int | None, padding: tuple | None
) -> Callable[[tf.Tensor], tuple]:
    """Makes the function from the indices of a batch, [R], to its (x, y[, sample_weight])."""
    read, num_examples = source.reader(padding_rows(source, padding)), len(source)

    def batch(indices: tf.Tensor) -> tuple:
        leaves = read(tf.minimum(indices, num_examples))
        for leaf, (shape, _) in zip(leaves, source.parts):
            leaf.set_shape((rows, *shape))
        return tuple(tf.nest.pack_sequence_as(source.structure, leaves))

    return batch


def _weighted(
    data: tuple, indices: tf.Tensor, num_examples: int, sampling: draws.Sampling
) -> tuple:
    """The batch (x, y, sample_weight) whose weights mark the padding and reduce users.

    Args:
      data: (x,), (x, y), or (x, y, sample_weight) with the weights of the examples.
      indices: [R], see `_drawer`.
      num_examples: the number of examples.
      sampling: says how the gradients of a user become one.
    """
    marked = indices > num_examples
    mask = tf.cast(indices < num_examples, tf.float32)
    if sampling.examples_per_user is not None and sampling.user_reduction == "mean":
        mask = _share_of_user(mask, sampling.examples_per_user)
    if len(data) < 3:
        x, y = (*data, None)[:2]
        return x, y, _with_marks(mask, marked)
    x, y, weights = data
    if sampling.examples_per_user is not None:
        weights = tf.nest.map_structure(lambda w: _times(w, mask), weights)
    return x, y, tf.nest.map_structure(lambda w: _with_marks(w, marked), weights)


def _check_users(users: UserRecords | None, sampling: draws.Sampling, num_examples: int) -> None:
    """Raises ValueError unless a sampling of users has the ids of the users, and only then."""
    if (users is None) != (sampling.examples_per_user is None):
        raise ValueError(
            "A sampling with `examples_per_user` draws users, and only such a sampling does: pass "
            "`user_ids` with it, and with no other. Received: "
            f"{'no ' if users is None else ''}`user_ids`, sampling={sampling!r}"
        )
    if users is not None and users.num_records != num_examples:
        raise ValueError(
            "`user_ids` must have one id for each example of `data`, in the same order. Received: "
            f"{users.num_records} ids for {num_examples} examples"
        )


def _share_of_user(mask: tf.Tensor, examples_per_user: int) -> tf.Tensor:
    """Divides a mask [U·k] of the rows that are examples by their number for each user."""
    of_users = tf.reshape(mask, [-1, examples_per_user])
    counts = tf.reduce_sum(of_users, axis=1, keepdims=True)
    return tf.reshape(tf.math.divide_no_nan(of_users, counts), [-1])


def _times(weights: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """Multiplies sample weights [U·k, ...] by the share of each row, as floats."""
    if not weights.dtype.is_floating:
        weights = tf.cast(weights, tf.float32)
    shares = tf.reshape(shares, [-1] + [1] * (weights.shape.rank - 1))
    return weights * tf.cast(shares, weights.dtype)


def _check(sampling: draws.Sampling, start_step: int, key: bytes | None) -> None:
    start_step = checks.integer("start_step", start_step, 0)
    if start_step >= sampling.steps:
        raise ValueError(
            "`start_step` must be below the `steps` of the sampling. Received: "
            f"start_step={start_step!r}, steps={sampling.steps!r}"
        )
    if key is not None:
        cyclic = isinstance(sampling, CyclicPoissonSampling)
        draws.check_key(key, (32, 64) if cyclic else (32,))
    if sampling.keeps_distance and start_step and key is None and sampling.seed is None:
        raise ValueError(
            "To continue at `start_step`, pass the `key` with which the groups or the order of the "
            "earlier steps were drawn. Received: "
            f"start_step={start_step!r}, key=None"
        )


def _refuse_several_workers() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = resolver.cluster_spec().as_dict()
    workers = sum(len(tasks.get(job, ())) for job in ("chief", "worker"))
    if workers > 1:
        raise NotPrivateError(
            "Each worker would draw its own batches, so an example could be in a batch twice: the "
            "sampling is for one process, with as many replicas as you like (`MirroredStrategy`). "
            f"Received: {workers} workers in TF_CONFIG. Give each worker its share of shuffled "
            "batches instead (`tf.data`), with the label 'shuffled'."
        )


def _with_marks(weights: tf.Tensor, marked: tf.Tensor) -> tf.Tensor:
    """Sets the sign of the zeros in marked rows, which encodes the draw; they stay zeros.

    What an example brings along must not look like a mark: its own -0.0, or a negative number that
    float32 has no place for, becomes 0.0.
    """
    if not weights.dtype.is_floating:  # whole numbers have no such zeros
        weights = tf.cast(weights, tf.float32)
    vanishes = tf.abs(tf.cast(weights, tf.float32)) < _LEAST_WEIGHT
    weights = tf.where(vanishes, tf.zeros([], weights.dtype), weights)
    marked = tf.reshape(marked, [-1] + [1] * (weights.shape.rank - 1))
    return tf.where(marked, tf.constant(-0.0, weights.dtype), weights)


def padding_rows(source: Arrays | Records, padding: tuple | None) -> list[np.ndarray]:
    """The leaves of one row of padding: the public example `padding`, or inputs of ones.

    Zeros would be less often valid inputs: `mask_zero` masks a whole row of them, whose mean is
    0/0, and Keras's loss shows NaN. An empty string has only such tokens, so strings are Keras's
    word for an unknown one, which `StringLookup` and `TextVectorization` do not mask. Labels are
    zeros, as there is a class 0.

    Raises:
      ValueError: if the shapes of `padding` differ from those of the data.
    """
    num_inputs = len(tf.nest.flatten(source.structure[0]))

    def entry(k: int, dtype: np.dtype) -> Any:
        is_input = k < num_inputs
        if dtype.kind == "O":
            return _UNKNOWN if is_input else b""
        return is_input

    rows = [np.full(shape, entry(k, dtype), dtype) for k, (shape, dtype) in enumerate(source.parts)]
    if padding is None:
        return rows
    try:
        tf.nest.assert_same_structure(tuple(source.structure[:2]), padding)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "`padding` must be one example, (x, y) with the structure of the data. Received: "
            f"padding={padding!r}"
        ) from error
    # A sample weight, the last leaf, stays zero.
    for i, leaf in enumerate(map(np.asarray, tf.nest.flatten(padding))):
        if leaf.shape != rows[i].shape:
            raise ValueError(
                "`padding` must be one example with the shapes of the data. Received: shape "
                f"{leaf.shape} instead of {rows[i].shape}"
            )
        rows[i] = leaf.astype(rows[i].dtype)
    return rows


def padding_for(model: tf.keras.Model, source: Arrays | Records) -> tuple | None:
    """One row of padding with words that the model knows; `None` if it accepts unknown ones.

    The words are in its vocabularies, which it holds already. No release depends on them, as on
    anything that padding holds.
    """
    tokens, x = known_tokens(model), source.structure[0]
    parts = tf.nest.flatten(x)
    if not tokens or len(parts) != len(model.inputs):
        return None
    names = sorted(x) if isinstance(x, dict) else None  # in the order of `tf.nest.flatten`
    rows = padding_rows(source, None)
    for name, (place, token) in tokens.items():
        if names is not None and name not in names:
            continue
        k = place if names is None else names.index(name)
        is_text = rows[k].dtype.kind == "O"
        if is_text == isinstance(token, str):
            rows[k] = np.full_like(rows[k], token.encode() if is_text else token)
    of_example = source.structure[:2]
    return tf.nest.pack_sequence_as(of_example, rows[: len(tf.nest.flatten(of_example))])
