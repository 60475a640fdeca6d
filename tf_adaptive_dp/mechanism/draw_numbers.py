"""Identifies the draw behind a batch by a number, and finds batches that are released again.

Amplification by sampling requires a fresh draw for each release. A batch that is cached, repeated
or passed to `minimize` twice is one draw and must be counted as one. So each release determines a
number for its batch:

- Batches of our Poisson samplers carry a number: a digest of where the weights are zero, and of the
  signs of these zeros (see `padding`). It survives whatever `map` does to examples and weights.
- Other batches are identified by their contents: a digest of everything that enters the loss, and
  one of each input. Two losses may share a batch of which they read different parts.

The numbers reveal something about the batches, so they are neither saved nor returned; only counts
enter the ledger.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.graphs import ancestors
from tf_adaptive_dp._keras.variables import local_copies, uncounted_variables, value_of
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.gradients.batch_axis.analysis import feeds
from tf_adaptive_dp.mechanism.padding import (
    Order,
    fit_to_rows,
    has_weights,
    is_ours,
    marks_in,
    order_in,
    sample_weights_among,
    vector_of_weights,
    weights_of_rows,
)
from tf_adaptive_dp.mechanism.replicas import num_replicas

# This many distinct rows in random order repeat the same order once in 15! > 2⁴⁰ times.
DIFFERENT_ROWS = 15
_CREATION = threading.Lock()
# Numbers that are not to be remembered are written to one more bucket, as zeros.
_BUCKETS, _PLACES = 8192, 16
_NEVER = 2**62
_REMEMBERED = 16
# Counts of parts without a number and of repeated parts, and the distance to the nearest repeat.
_NO_PARTS = np.array([0, 0, _NEVER], np.int64)

_GOLDEN, _MIX_1, _MIX_2 = (
    int(np.uint64(c).astype(np.int64))
    for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _folded(number: tf.Tensor, places: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(number, tf.constant(places, tf.int64))
    # Clears the sign bits, as a shift of an unsigned number would.
    shifted = tf.bitwise.bitwise_and(shifted, tf.constant(2 ** (64 - places) - 1, tf.int64))
    return tf.bitwise.bitwise_xor(number, shifted)


def _digests(values: tf.Tensor) -> tf.Tensor:
    """[K], int64: each depends on the bits of a row of [K, B] float32 and on their order.

    It sums SplitMix64 hashes of each value and its place; multiplication wraps around.
    """
    bits = tf.cast(tf.bitcast(values, tf.int32), tf.int64)
    place = (tf.range(tf.shape(bits)[1], dtype=tf.int64) + 1) * _GOLDEN
    place = _folded(place * _MIX_2, 29)  # a constant where the size is known
    number = _folded(place + bits, 30) * _MIX_1
    return tf.reduce_sum(_folded(_folded(number, 27) * _MIX_2, 31), axis=1)


def _row_contents(tensor: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    """[B], a number computed from the contents of each row of an input."""
    tensor = tf.cast(tensor, tf.float32)
    if tensor.shape.rank == 1:
        return fit_to_rows(tensor, loss)
    columns = tensor.shape[1:].num_elements()
    if columns is None:
        columns = tf.reduce_prod(tf.shape(tensor)[1:])
        direction = tf.random.stateless_uniform([columns], [0, 20231], 0.5, 1.5)
    else:
        direction = np.random.default_rng(0).uniform(0.5, 1.5, columns).astype(np.float32)
    flat = tf.reshape(tensor, [tf.shape(tensor)[0], columns])
    return fit_to_rows(tf.linalg.matvec(flat, direction), loss)


def _of_contents(tensors: Sequence[tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
    """[K, B], numbers of the rows: of all inputs together, and of each if there are several."""
    each = [_row_contents(tensor, loss) for tensor in tensors]
    together = tf.add_n([(1 + 0.377 * place) * rows for place, rows in enumerate(each)])
    return tf.stack([together, *each] if len(each) > 1 else [together])


def _fed(loss: tf.Tensor) -> list[tf.Tensor]:
    """The numeric inputs of a loss that may have one row per example."""
    size = loss.shape[0]
    return [
        t
        for t in feeds(ancestors([loss]), loss.graph)
        if t.shape.rank
        and t.shape[0] in (size, None)
        and (t.dtype.is_floating or t.dtype.is_integer or t.dtype.is_bool)
    ]


def _weights(fed: Sequence[tf.Tensor], loss: tf.Tensor) -> list[tf.Tensor]:
    """[B], float32, each of the inputs that may hold the weights of our batches."""
    vectors = [vector_of_weights(tensor) for tensor in fed]
    of_tokens = [t for t in sample_weights_among(fed, loss.graph) if t.shape.rank == 2]
    vectors += [weights_of_rows(t) for t in of_tokens if t.shape[1] != 1]
    return [fit_to_rows(tf.cast(v, tf.float32), loss) for v in vectors if v is not None]


def lacks_weights(loss: tf.Tensor) -> bool:
    """Whether a step receives nothing that may be sample weights; false if that is unknown."""
    unknown = tf.executing_eagerly() or num_replicas() > 1
    return not unknown and not has_weights(_fed(loss), loss.graph)


class Number(NamedTuple):
    """The numbers of a batch. It was released before if any of them was.

    Attributes:
      digests: [K], int64.
      known: [K], bool, whether each distinguishes this draw from others. It does not if it is the
        digest of something so small or so uniform that another draw may well look the same.
      marked: bool scalar, whether something among the inputs has a mark of our Poisson samplers:
        a zero with a negative sign. Weights of users, which may be zero, do not hide it.
    """

    digests: tf.Tensor
    known: tf.Tensor
    marked: tf.Tensor


def number_of(loss: tf.Tensor, rows_per_unit: int = 1) -> Number | None:
    """The numbers of the batch that a loss is computed from.

    Args:
      loss: [B].
      rows_per_unit: the number of neighboring rows that are placed together: those of a user.

    Returns:
      `None` if there is no number: in eager execution, on several replicas, and if the step has no
      numeric inputs.
    """
    if tf.executing_eagerly() or num_replicas() > 1:
        return None
    fed = _fed(loss)
    if not fed:
        return None
    rows = _of_contents(fed, loss)
    ordered = tf.sort(rows)
    different = 1 + tf.math.count_nonzero(ordered[:, 1:] > ordered[:, :-1], axis=1)
    known = different >= DIFFERENT_ROWS
    first = tf.equal(tf.range(tf.size(known)), 0)
    for weights in _weights(fed, loss):
        ours = is_ours(weights, rows_per_unit)
        marks = tf.where(tf.equal(weights, 0), weights, tf.ones_like(weights))
        rows = tf.where(ours, marks, rows)
        known = tf.where(ours, first, known)  # one number: the marks say it all
    return Number(_digests(rows), known, _is_marked(fed, loss.graph))


def _is_marked(fed: Sequence[tf.Tensor], graph: tf.Graph) -> tf.Tensor:
    """Whether something among the inputs of a step has a mark, a bool scalar.

    Weights may be an input of the model. But a vector with a negative entry is none unless the
    graph shows it: targets that were rounded have zeros of both signs, too.
    """
    weights = {tensor.ref() for tensor in sample_weights_among(fed, graph)}
    found = [tf.constant(False)]
    for tensor in fed:
        vector = weights_of_rows(tensor)
        if vector is not None:
            marked = tf.reduce_any(marks_in(tf.cast(vector, tf.float32)))
            may_be_weights = tensor.ref() in weights or tf.reduce_all(vector >= 0)
            found.append(marked & may_be_weights)
    return tf.reduce_any(found)


def order_of(loss: tf.Tensor) -> Order | None:
    """Which step the batch that a loss is computed from was drawn for.

    Args:
      loss: [B].

    Returns:
      `None` under the conditions of `number_of`, and if nothing may be weights.
    """
    if tf.executing_eagerly() or num_replicas() > 1:
        return None
    read = [order_in(weights) for weights in _weights(_fed(loss), loss)]
    if not read:
        return None
    shown = tf.stack([order.shown for order in read])
    code = tf.gather([order.code for order in read], tf.argmax(tf.cast(shown, tf.int32)))
    return Order(tf.reduce_any(shown), code)


class Draw(NamedTuple):
    """What is known about the batch of a release.

    Attributes:
      checked: bool scalar, whether all its parts had numbers.
      distance: int64 scalar, how many releases ago one of its parts was released; 0 if never.
      copies: float64 scalar, how many of its parts repeat another of its parts.
    """

    checked: tf.Tensor
    distance: tf.Tensor
    copies: tf.Tensor


class Seen(NamedTuple):
    """How many batches, or parts of batches, an optimizer was given in this process.

    Attributes:
      numbered: those that have a number, see `number_of`.
      marked: those of them that have a mark of our Poisson samplers.
    """

    numbered: int
    marked: int


class SeenDraws:
    """The numbers of released batches: all of the last 40,000, and most of the last 120,000.

    A batch of our Poisson samplers has one number, and so does one with a single input. Any other
    batch has one for each input, and one for all of them.

    They are raw, NOT private. They do not belong to the optimizer's variables, so they are neither
    saved nor restored. But an optimizer that continues the ledger of another one, made by
    `from_config` or `load_model`, begins with the numbers of all optimizers of the process, since
    any of them may be the one that it continues. Of all but the last 16 it knows what they had
    released when another 16 had begun.
    """

    def __init__(self, ledger: Ledger | None = None, is_remembered: bool = True) -> None:
        """Creates it empty; variables follow with the first number.

        Args:
          ledger: that of the optimizer; `None` if several new optimizers share the numbers.
          is_remembered: whether later optimizers may begin with the numbers. Those of an optimizer
            whose steps are traced but never run would displace others.
        """
        self._entries: tf.Variable | None = None
        self._before = Seen(0, 0)
        self._ledger, self._is_remembered = ledger, is_remembered

    def _created(self) -> tf.Variable:
        # Threads that trace steps at the same time have to share these variables.
        with _CREATION:
            if self._entries is None:
                with uncounted_variables():
                    goes_on = self._ledger is not None and self._ledger.num_releases > 0
                    entries, following = _joined(_OF_PROCESS if goes_on else ())
                    self._releases = tf.Variable(following, dtype=tf.int64, trainable=False)
                    self._parts = tf.Variable(_NO_PARTS, trainable=False)
                    self._seen = tf.Variable(np.array(self._before, np.int64), trainable=False)
                    self._entries = tf.Variable(entries, name="seen_draws", trainable=False)
                self._ledger = None  # outlives the optimizer otherwise
                if self._is_remembered:
                    _remember(self)
            return self._entries

    def released(self) -> tuple[np.ndarray, int]:
        """[K, 2], the numbers of released batches with their releases, and the next release."""
        if self._entries is None:
            raise RuntimeError("Nothing was released.")
        following = int(self._releases.numpy())
        rows = self._entries.numpy().reshape(-1, 2)
        return rows[(rows[:, 1] > 0) & (rows[:, 1] < following)], following

    def counts(self) -> Seen:
        """How many batches were added, and how many of them had marks."""
        return self._before if self._entries is None else Seen(*value_of(self._seen).tolist())

    def add_counts(self, seen: Seen) -> None:
        """Adds batches of another optimizer, which this one continues, to the counts."""
        self._before = Seen(*(a + b for a, b in zip(self.counts(), seen)))
        if self._entries is not None:
            self._seen.assign(self._before)

    def drop_parts(self) -> None:
        """Forgets the parts of a batch that was not released, so that they may come again."""
        if self._entries is not None:
            dropped = self._entries[:, :, 1:] == self._releases
            self._entries.assign(tf.where(dropped, tf.zeros_like(self._entries), self._entries))
            self._parts.assign(_NO_PARTS)

    def add(self, batch: Number | None, complete: tf.Tensor) -> Draw:
        """Adds the number of a batch, or of a part of one.

        Args:
          batch: what `number_of` returned.
          complete: bool scalar, whether the release follows.

        Returns:
          What is known about all parts so far. It becomes available only when every variable has
          been written, since threads take turns here (see `mechanism.turns`).
        """
        if batch is None:
            return Draw(tf.constant(False), tf.constant(0, tf.int64), tf.constant(0.0, tf.float64))
        entries = self._created()
        digests, known, marked = batch
        release = self._releases.read_value()
        distances = self._enter(entries, digests, known, release)
        unknown, copies, nearest = tf.unstack(self._parts.read_value())
        unknown += tf.cast(~tf.reduce_any(known), tf.int64)
        copies += tf.cast(tf.reduce_any(tf.equal(distances, 0)), tf.int64)
        nearest = tf.minimum(nearest, tf.reduce_min(tf.where(distances > 0, distances, nearest)))
        now = tf.stack([unknown, copies, nearest])
        with tf.control_dependencies([distances]):
            parts = self._parts.assign(tf.where(complete, tf.constant(_NO_PARTS), now))
            count = self._releases.assign(release + tf.cast(complete, tf.int64))
            seen = self._seen.assign_add(tf.stack([1, tf.cast(marked, tf.int64)]))
        distance = tf.where(nearest < _NEVER, nearest, tf.zeros_like(nearest))
        draw = Draw(tf.equal(unknown, 0), distance, tf.cast(copies, tf.float64))
        with tf.control_dependencies([tf.convert_to_tensor(v) for v in (parts, count, seen)]):
            return Draw(*(tf.identity(tensor) for tensor in draw))

    def _enter(
        self, seen: tf.Variable, digests: tf.Tensor, known: tf.Tensor, release: tf.Tensor
    ) -> tf.Tensor:
        """Adds numbers; returns how many releases ago each was added, [K], or -1 if it is new."""
        buckets = tf.bitwise.bitwise_and(digests, tf.constant(_BUCKETS - 1, tf.int64))
        entries = tf.gather(seen, buckets)
        numbers, releases = tf.unstack(entries, axis=2)  # [K, _PLACES] each
        same = tf.equal(numbers, digests[:, tf.newaxis]) & (releases > 0) & known[:, tf.newaxis]
        before = tf.reduce_any(same, axis=1)
        distances = release - tf.reduce_max(tf.where(same, releases, tf.zeros_like(releases)), 1)
        distances = tf.where(before, distances, -tf.ones_like(distances))
        # Their own places, or the oldest.
        places = tf.where(
            before, tf.argmax(tf.cast(same, tf.int32), axis=1), tf.argmin(releases, axis=1)
        )
        entered = tf.stack([digests, tf.fill(tf.shape(digests), release)], axis=1)
        entered = tf.where(known[:, tf.newaxis], entered, tf.zeros_like(entered))
        into = tf.where(known, buckets, tf.constant(_BUCKETS, tf.int64))
        with tf.control_dependencies([distances]):
            # A `MirroredStrategy` with one replica wraps the variable, and wrappers cannot scatter.
            (own,) = local_copies(seen)
            written = own.scatter_nd_update(tf.stack([into, places], axis=1), entered)
        with tf.control_dependencies([tf.gather(written, buckets)]):
            return tf.identity(distances)


class _Earlier(NamedTuple):
    """What optimizers had released, as `SeenDraws.released` returns it."""

    rows: np.ndarray
    following: int

    def released(self) -> _Earlier:
        """Returns itself."""
        return self


# A strong reference: what an optimizer released counts when the optimizer is gone.
_OF_PROCESS: collections.deque[SeenDraws | _Earlier] = collections.deque()


def _remember(seen: SeenDraws) -> None:
    """Adds the numbers of an optimizer; where there are many, those of the oldest two are joined.

    Each takes 2 MB. A search makes many optimizers, and one of the first may train on.
    """
    _OF_PROCESS.append(seen)
    if len(_OF_PROCESS) > _REMEMBERED + 1:
        with tf.init_scope():  # a step is traced now
            entries, following = _joined([_OF_PROCESS[0], _OF_PROCESS[1]])
        rows = entries.reshape(-1, 2)
        _OF_PROCESS.popleft()
        _OF_PROCESS[0] = _Earlier(rows[rows[:, 1] > 0], following)


def _joined(several: Sequence[SeenDraws | _Earlier]) -> tuple[np.ndarray, int]:
    """The entries of several optimizers, as if one had made all their releases at the same time.

    Returns:
      [_BUCKETS + 1, _PLACES, 2], int64, in which the last releases of all are equally long ago; and
      the number of the next release.
    """
    entries = np.zeros([_BUCKETS + 1, _PLACES, 2], np.int64)
    found = [seen.released() for seen in several]
    following = max((number for _, number in found), default=1)
    rows = [of_one + [0, following - number] for of_one, number in found]
    newest_first = np.concatenate([entries[:0, 0], *rows])
    newest_first = newest_first[np.argsort(-newest_first[:, 1], kind="stable")]
    _, newest = np.unique(newest_first[:, 0], return_index=True)
    kept = newest_first[np.sort(newest)]
    bucket = kept[:, 0] & (_BUCKETS - 1)
    by_bucket = np.argsort(bucket, kind="stable")
    kept, bucket = kept[by_bucket], bucket[by_bucket]
    place = np.arange(len(kept)) - np.searchsorted(bucket, bucket)
    fits = place < _PLACES
    entries[bucket[fits], place[fits]] = kept[fits]
    return entries, following
