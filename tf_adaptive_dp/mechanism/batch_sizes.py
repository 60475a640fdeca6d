"""What the mechanism knows of the sizes of batches: the public divisor, and whether it is right."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from tf_adaptive_dp import checks
from tf_adaptive_dp._keras.tracebacks import CHECK, UsersLine, level_of_caller
from tf_adaptive_dp._keras.variables import value_of
from tf_adaptive_dp.accounting.ledger import wrong_size
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.released import vouch_for

# The largest log probability at which a batch counts as too large for the declared expected size.
LOG_FALSE_ALARM = math.log(1e-12)


def log_tail(size: Any, expected: Any, log: Callable) -> Any:
    """Chernoff's bound on log P[a Poisson batch has at least `size` examples], above the mean."""
    return size - expected - size * log(size / expected)


class SizesSeen:
    """Compares batches with the size that was declared, one by one and all together.

    Their sums are private, so they are neither saved nor restored.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            # Examples that were expected, and seen, in all batches of this process.
            self._totals = tf.Variable(tf.zeros([2], tf.float64), trainable=False)

    def add(self, seen: tf.Tensor, expected: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds a batch.

        Guarantee: where the expected sizes are right, Poisson batches are doubted with probability
        at most 2e-12 per batch.

        Args:
          seen: float64 scalar, positive, the number of its examples.
          expected: float64 scalar, L.

        Returns:
          Whether it, or all batches together, held too many examples, a bool scalar; and their
          mean, if L was the same for all.
        """
        now = tf.stack([expected, seen])
        totals = self._totals.assign_add(now, read_value=True)
        expectations, sizes = tf.unstack(tf.stack([now, totals]), axis=1)
        improbable = log_tail(sizes, expectations, tf.math.log) < LOG_FALSE_ALARM
        too_many = tf.reduce_any((sizes > expectations) & improbable)
        return too_many, expected * totals[1] / totals[0]


class BatchSizes:
    """The expected batch size L, the size of the first batch, and doubts about either.

    Sizes count examples, or users with `examples_per_user`, except where they are said to be rows.
    Those of batches are of one part of a batch with gradient accumulation.

    Guarantee: what divides a noisy sum is public, L or the size that all batches share.

    Args:
      expected_batch_size: L, or `None` if all batches have one size.
      num_microbatches: the number of groups whose mean gradients are clipped, or `None`.
      examples_per_user: the rows of each user, or `None` if the unit is an example.
      parts: in how many parts each batch arrives.
      add_variable: makes a variable that is saved with the optimizer.

    Raises:
      TypeError, ValueError: if `expected_batch_size` is not a positive number.
    """

    def __init__(
        self,
        expected_batch_size: float | None,
        num_microbatches: int | None,
        examples_per_user: int | None,
        parts: int,
        add_variable: Callable[..., tf.Variable],
    ):
        self._num_microbatches = num_microbatches
        self._rows_per_unit = examples_per_user or 1
        self._parts = parts
        self._expected = hyperparameter(0.0)  # 0 stands for None
        self._most = hyperparameter(0.0)  # 0 if L was declared, and not taken from full batches
        self._first = add_variable([], dtype=tf.int64, name="fixed_batch_size")
        with tf.init_scope():
            # The size of the first batch if it is random, and so private; not saved.
            self._random = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._seen = SizesSeen()
        self._traced: dict[float, int] = {}  # rows, by L
        self._rows_vary = False
        self.expected = expected_batch_size

    @property
    def expected(self) -> float | None:
        """L, as it was given; `None` means the size of all batches. It may be set between steps."""
        return float(value_of(self._expected)) or None

    @expected.setter
    def expected(self, value: float | None) -> None:
        if value is not None:
            value = checks.number("expected_batch_size", value, 0, strict=True)
        self._expected.assign(value or 0.0)
        self._most.assign(0.0)

    @property
    def declared(self) -> float | None:
        """L, if the user gave it: a copy that trains in other batches must find its own."""
        return None if self._most.numpy() else self.expected

    def expect_at_most(self, size: int) -> None:
        """Makes the size of full batches the expected one: the last of an epoch may be smaller.

        Guarantee: a batch of more examples is refused, or counts with its own size under XLA.
        """
        self.expected = size * self._parts
        self._most.assign(size)
        # The smaller one may come first. An optimizer that is loaded goes on with this size.
        self._first.assign(size)

    @property
    def rows_per_batch(self) -> int:
        """Rows of the first batch, or of the largest with microbatches; 0 before any batch."""
        return int(self._first.numpy() or self._random.numpy()) * self._rows_per_unit

    @property
    def first(self) -> float:
        """The size of the first batch, all its parts together; 0 before it."""
        return float(int(self._first.numpy()) * self._parts)

    def continue_after(self, other: BatchSizes) -> None:
        """Takes over the public size of the first batch, if that is no divisor here.

        Args:
          other: the sizes of an optimizer that this one continues.
        """
        alike = (self._rows_per_unit, self._parts) == (other._rows_per_unit, other._parts)
        if alike and not self._first_divides():
            self._note_room(int(value_of(other._first)))

    def expect_rows(self, most: int | None) -> None:
        """Says whether batches differ in their number of rows.

        Guarantee: where they do, their numbers of rows are private. Only `most`, a public constant,
        is saved, and steps that know the number of their rows are refused.

        Args:
          most: the rows that the largest ones have room for, or `None` if all have as many.

        Raises:
          ValueError: if the sizes of batches divide the noisy sum, or groups of them are clipped.
        """
        self._rows_vary = most is not None
        if most is None:
            return
        if self._first_divides() or self._parts > 1:
            raise ValueError(
                "Batches that differ in their number of rows need `expected_batch_size`, without "
                "`num_microbatches` and `gradient_accumulation_steps`. Received: "
                f"expected_batch_size={self.expected!r}, num_microbatches="
                f"{self._num_microbatches!r}, gradient_accumulation_steps={self._parts!r}"
            )
        self._note_room(self.units(most))

    def _first_divides(self) -> bool:
        """Whether the size of the first batch is L, or determines the size of microbatches."""
        return self.expected is None or self._num_microbatches is not None

    def _note_room(self, size: int) -> None:
        """Notes a public size; of two samplings the smaller one counts, see `as_drawn`."""
        own = int(self._first.numpy())
        if size:
            self._first.assign(min(own, size) if own else size)

    def units(self, rows: Any) -> Any:
        """How many examples, or users, these rows are."""
        return rows // self._rows_per_unit

    def examples_share_groups(self) -> bool:
        """Whether a microbatch may hold several examples, which halves σ in the ledger."""
        groups = self._num_microbatches
        return groups is not None and not 0 < self.rows_per_batch <= groups

    def warn_if_too_large(self, rows: int | None) -> None:
        """Warns, before a step, if batches of this many rows cannot have the expected size L."""
        with tf.init_scope():
            expected = self.expected
        if rows is None or expected is None or self._num_microbatches is not None:
            return
        size = self.units(rows) * self._parts
        if size > expected and log_tail(size, expected, math.log) < LOG_FALSE_ALARM:
            warnings.warn(wrong_size(expected, size), stacklevel=level_of_caller())

    def refuse_another_trace(self, rows: int | None) -> None:
        """Refuses to trace a step for batches of one size after one for batches of another size.

        In such a trace the size is a constant. So nothing shows whether the loss depends on it, as
        in `loss / x.shape[0]`, and one more example would change all gradients.

        Args:
          rows: of the batch that is traced; `None` if the trace is for any number, or if rows have
            weights, as padded batches have, whose size is public.

        Raises:
          NotPrivateError: if the size is random, and an earlier trace had another one.
        """
        with tf.init_scope():
            expected = self.expected
        if rows is None or expected is None or self._num_microbatches is not None:
            return
        before = self._traced.setdefault(expected, rows)
        if before != rows:
            raise NotPrivateError(
                "A step that is traced for batches of each size may depend on the size, which is "
                "not public here. Trace it once for all, `@tf.function(input_signature=[tf."
                "TensorSpec([None, ...]), ...])`, or pad batches to one size "
                "(`tf_adaptive_dp.poisson_batches` does). Received: batches of "
                f"{before} and of {rows} rows, expected_batch_size={expected}"
            )

    def refuse_known_rows(self, rows: int | None) -> None:
        """Refuses a step that knows the number of its rows, if batches differ in that number.

        Nothing shows whether such a step depends on the number, which is private then.

        Args:
          rows: of the batch; `None` in a step that is traced for any number.

        Raises:
          NotPrivateError: if the step runs eagerly, or was traced for one number of rows.
        """
        if self._rows_vary and (tf.executing_eagerly() or rows is not None):
            how = "runs eagerly" if tf.executing_eagerly() else f"was traced for {rows} rows"
            raise NotPrivateError(
                "The batches of this fit have different numbers of rows, which are private, so its "
                "step must be compiled once for any number. Pad them to one number: "
                f"`plan.fit(..., equal_rows=True)`. Received: a step that {how}"
            )

    def check(self, size: tf.Tensor) -> tf.Operation | None:
        """Asserts that all batches have the size of the first, unless the size may vary."""
        previous = self._first.read_value()
        may_vary = (self._expected > 0) & (self._num_microbatches is None)
        most = self._most.read_value()
        fits = (most == 0) | (tf.cast(size, tf.float64) <= most)
        return assert_true(
            tf.where(may_vary, fits, (size > 0) & ((previous == 0) | (previous == size))),
            [
                "Batches vary in size. That of a batch that is drawn at random is not public, so "
                "it must not divide the noisy sum. Pass `expected_batch_size` to the optimizer, "
                "without `num_microbatches`, or make all batches equal (`drop_remainder=True`). "
                "Received: a batch of",
                size,
                "after batches of",
                tf.maximum(previous, tf.cast(most, tf.int64)),
            ],
        )

    def remember(self, size: tf.Tensor, is_public: bool | tf.Tensor = True) -> tf.Tensor:
        """Stores the size of the first batch, and returns the stored size.

        Guarantee: a random size is not saved with the optimizer, unless it is public.

        Args:
          size: of the batch.
          is_public: whether the size is public even if L is given, a bool or a bool scalar. Without
            L all batches have it.
        """
        previous = self._first.read_value()
        known = previous > 0
        if self._num_microbatches is not None:
            # XLA drops assertions, so a larger batch can follow; its groups hold more examples.
            known &= size <= previous
        elif is_public is not True:
            noted = self._random.read_value()
            noted = self._random.assign(tf.where(noted > 0, noted, size))
            with tf.control_dependencies([tf.convert_to_tensor(noted)]):
                known |= (self._expected.read_value() > 0) & ~tf.convert_to_tensor(is_public)
        # No private size gets here, so the search for what a step writes of its data may end.
        kept = vouch_for(tf.where(known, previous, size))
        return tf.convert_to_tensor(self._first.assign(kept))

    def divisor(self) -> tf.Tensor:
        """L, a float64 scalar, once a batch has been seen."""
        expected = self._expected.read_value()
        fixed = tf.cast(self._first.read_value(), tf.float64)
        return tf.where(expected > 0, expected, fixed * self._parts)

    def per_group(self) -> tf.Tensor:
        """How many examples are clipped together: 1, or the size of a microbatch; float64."""
        if self._num_microbatches is None:
            return tf.constant(1.0, tf.float64)
        return tf.cast(self._first.read_value(), tf.float64) / self._num_microbatches

    def too_large(
        self, expected: tf.Tensor, per_group: tf.Tensor, size: tf.Tensor, present: tf.Tensor
    ) -> tf.Tensor:
        """The size of a whole batch if there were too many examples for the expected one, else 0.

        Too many may be in this batch, or in all batches of the process together: one batch of 210
        examples may be a draw with a mean of 200, but a hundred such batches are not.

        Guarantee: a correct L of Poisson batches is doubted with probability at most 2e-12 per
        step. The size that is returned is public if batches are padded or have one size. Otherwise
        it reveals the size of that batch.

        Args:
          expected: `divisor()`, as it is for this batch.
          per_group: `per_group()`, as it is for this batch.
          size: of the batch, or of its last part, padding included.
          present: how many examples, users or microbatches of the whole batch are not padding.
        """
        size = tf.cast(size * self._parts, tf.float64)
        there = tf.maximum(tf.cast(present, tf.float64) * per_group, tf.constant(1e-9, tf.float64))
        too_many, mean = self._seen.add(there, expected)
        size = tf.maximum(size, tf.math.ceil(mean))  # this batch may be one of the smaller ones
        # Without a declared L no batch is larger than the first. Under XLA a larger one gets here.
        is_largest = tf.equal(self._expected.read_value(), 0) | (self._most.read_value() > 0)
        size = tf.where(is_largest, tf.maximum(size, tf.math.ceil(there)), size)
        too_many |= is_largest & (size > expected)
        size = tf.where(too_many, size, tf.zeros_like(size))
        if tf.executing_eagerly() and too_many:
            warnings.warn(wrong_size(float(expected), float(size)), stacklevel=level_of_caller())
        return size


def hyperparameter(value: float) -> tf.Variable:
    """A variable for a value that users may change between steps of a compiled function."""
    with tf.init_scope():
        return tf.Variable(value, dtype=tf.float64, trainable=False)


def assert_true(condition: tf.Tensor, data: Sequence) -> tf.Operation | None:
    """Like `tf.debugging.Assert`, but without the branch and two functions that it adds."""
    data = [tf.convert_to_tensor(part) for part in data]
    with UsersLine():
        return tf.raw_ops.Assert(condition=condition, data=data, summarize=3, name=CHECK)
