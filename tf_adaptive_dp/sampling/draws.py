"""The secret key of the draws, and the base class of all samplings with its ledger checks."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, composition
from tf_adaptive_dp.accounting.ledger import ledger_of

# The sizes of the data sets that a sampling has drawn from in this process. A sampling is a frozen
# value without the data, but ε depends on the number of examples.
_num_examples_of: dict[Sampling, set[int]] = {}

_Kind = TypeVar("_Kind", bound="Sampling")

# Larger than rounding errors, smaller than any change of q that would show in ε.
_SAME = 1e-9


def new_key(seed: int | None = None) -> bytes:
    """A key for draws: 256 bits of the operating system's entropy, or derived from a seed.

    Guarantee: without a seed, nobody without the key can predict or repeat the draws. The key is as
    secret as the data. Anyone who has it knows which examples were in which batch; against them,
    sampling does not amplify privacy. With a seed, anyone can repeat the draws: for tests only.
    """
    if seed is None:
        return os.urandom(32)
    return hashlib.blake2b(str(seed).encode(), digest_size=32, person=b"dp seed").digest()


def check_key(key: Any, lengths: Sequence[int] = (32,)) -> None:
    """Raises ValueError unless a key has a length that keys have; the message does not show it.

    Args:
      key: what the caller passed.
      lengths: in bytes.
    """
    if not (isinstance(key, bytes) and len(key) in lengths):
        length = f" of length {len(key)}" if hasattr(key, "__len__") else ""
        raise ValueError(
            "`key` must be 32 bytes, see `tf_adaptive_dp.sampling.draws.new_key`. Received: "
            f"{type(key).__name__}{length}"
        )


def derived_key(key: bytes, purpose: bytes, number: int) -> bytes:
    """A key for one purpose. BLAKE2b is a keyed pseudorandom function: no key reveals another.

    Args:
      key: 32 bytes.
      purpose: at most 16 bytes.
      number: at least 0.
    """
    message = number.to_bytes(8, "little")
    return hashlib.blake2b(message, key=key, digest_size=32, person=purpose).digest()


def generator(key: bytes, purpose: bytes, number: int) -> np.random.Generator:
    """A separate generator for each key, purpose and number.

    Args:
      key: 32 bytes.
      purpose: at most 16 bytes.
      number: at least 0, such as that of a step.
    """
    seed = int.from_bytes(derived_key(key, purpose, number), "little")
    return np.random.Generator(np.random.SFC64(seed))


def remember_num_examples(sampling: Sampling, num_examples: int) -> None:
    """Records that a sampling draws batches from this many examples."""
    _num_examples_of.setdefault(sampling, set()).add(num_examples)


def has_drawn(sampling: Sampling) -> bool:
    """Whether this process has made a data set of batches that a sampling draws."""
    return sampling in _num_examples_of


def drawn_in_its_place(sampling: Sampling, num_examples: int) -> list[int]:
    """The sizes of data sets whose batches look like those of a sampling that has drawn none.

    Nothing in a batch tells with which probability its examples were drawn.

    Args:
      sampling: what ε is to be computed for.
      num_examples: the size of the data set that it is said to draw from.

    Returns:
      Sizes, sorted; empty if the sampling has drawn in this process, or one that draws alike has.
    """
    if has_drawn(sampling):
        return []
    size, look = sampling.expected_batch_size(num_examples), (sampling.label, sampling.rows)
    found = {
        n
        for other, sizes in _num_examples_of.items()
        if (other.label, other.rows) == look and other.unit == sampling.unit
        for n in sizes
        if math.isclose(other.expected_batch_size(n), size, rel_tol=_SAME)
    }
    return [] if num_examples in found else sorted(found)


def require_drawn(sampling: Sampling, num_examples: int) -> None:
    """Raises ValueError if batches that this process draws cannot be those of a sampling.

    Args:
      sampling: what ε is to be computed for.
      num_examples: the size of the data set that it is said to draw from.
    """
    check_num_examples(sampling, num_examples)
    sizes = drawn_in_its_place(sampling, num_examples)
    if sizes:
        raise ValueError(
            "`sampling` must be the object that the batches were made with. It has drawn nothing "
            "in this process, but another sampling has drawn batches that look the same, from "
            f"{', '.join(map(str, sizes))} {sampling.unit}s. "
            f"Received: sampling={sampling!r}, for {num_examples} {sampling.unit}s"
        )


def check_num_examples(sampling: Sampling, num_examples: int) -> None:
    """Raises ValueError if a sampling has drawn from data sets of other sizes only."""
    known = _num_examples_of.get(sampling)
    if known and num_examples not in known:
        size = "size of the data set" if sampling.unit == "example" else "number of users"
        raise ValueError(
            f"`num_examples` must be the {size} that the batches are drawn from: "
            f"{', '.join(map(str, sorted(known)))}. Received: num_examples={num_examples!r}"
        )


def examples_per_user_of(ledger: Any) -> int | None:
    """The `examples_per_user` of a ledger, or of the optimizer that has it."""
    return getattr(ledger_of(ledger), "examples_per_user", None)


def check_unit(sampling: Sampling | str, ledger: Any) -> None:
    """Raises ValueError if a sampling, or a label, draws another unit than a ledger counts."""
    counted = examples_per_user_of(ledger)
    drawn = getattr(sampling, "examples_per_user", None)
    if counted != drawn:
        raise ValueError(
            "The optimizer and the sampling must have the same unit: batches of users need an "
            "optimizer with the same `examples_per_user`, and such an optimizer batches of users "
            "(`PoissonSampling(..., examples_per_user=...)`, `poisson_batches(user_ids=...)`). "
            "`PrivacyPlan(user_ids=...)` makes both. Received: "
            f"examples_per_user={counted!r} in the optimizer, sampling={sampling!r}"
        )


class Sampling(abc.ABC):
    """The base class of samplings: steps, seed, draws and accounting.

    A sampling that batches of tensors are drawn with also defines `rows`, and one that a
    `PrivacyPlan` takes defines `describe` too. The others do without: `federated` draws clients,
    which have no rows.

    Attributes:
      label: `"poisson"`, `"cyclic"`, `"fixed"`, `"fixed_order"` or `"shuffled"`.
      steps: number of batches in the whole run.
      seed: `None` for the operating system's entropy.
      examples_per_user: `None` if it draws examples. A number k means that it draws users, of whom
        at most k examples each are in a batch; then `num_examples` is the number of users wherever
        a method takes it.
      user_reduction: `"mean"` or `"sum"`: how the gradients of a user's examples become one.
      keeps_distance: whether it keeps batches with the same example apart, as correlated noise
        requires. A process that resumes a run must know what keeps them apart.
    """

    label: ClassVar[str]
    steps: int
    seed: int | None
    examples_per_user: int | None = None
    user_reduction: str = "mean"
    keeps_distance: ClassVar[bool] = False

    @property
    def unit(self) -> str:
        """What is drawn, and protected: `"example"` or `"user"`."""
        return "example" if self.examples_per_user is None else "user"

    @property
    def rows(self) -> int:
        """Number of rows of an undivided batch, padding included.

        Raises:
          NotImplementedError: for a sampling that draws no batches of tensors.
        """
        raise NotImplementedError

    def _check_common(self) -> None:
        checks.keep(self, checks.integer, "steps", 1)
        if self.seed is not None:
            checks.keep(self, checks.integer, "seed", 0)

    def rows_per_batch(self, gradient_accumulation_steps: int = 1) -> int:
        """The number of rows of each part that the batch of a step is divided into.

        Raises:
          TypeError, ValueError: if the number of parts is not an integer or does not divide the
            batch.
        """
        gradient_accumulation_steps = checks.integer(
            "gradient_accumulation_steps", gradient_accumulation_steps, 1
        )
        if self.rows % gradient_accumulation_steps:
            raise ValueError(
                "`gradient_accumulation_steps` must divide the batch size, since these batches "
                "have no padding. Received: gradient_accumulation_steps="
                f"{gradient_accumulation_steps!r}, batch size {self.rows}"
            )
        return self.rows // gradient_accumulation_steps

    @abc.abstractmethod
    def expected_batch_size(self, num_examples: int) -> float:
        """The value that the optimizer's `expected_batch_size` must have."""

    @abc.abstractmethod
    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Draws the batch of a step: a pure function of its arguments.

        Args:
          num_examples: number of examples in the training set.
          step: the number of the step, from 0.
          key: the secret bytes of a pass, see `key_of_pass`.

        Returns:
          Indices of the examples, ascending, unless the sampling draws them in an order.
        """

    def new_key(self, num_examples: int) -> bytes:
        """The key of a dataset of batches if none is given."""
        del num_examples
        return new_key(self.seed)

    def remember_key(self, num_examples: int, key: bytes) -> None:
        """Records the key of a dataset, which some samplings need to tell orders apart."""
        del num_examples, key

    def key_of_pass(self, key: bytes, number: int) -> bytes:
        """The key of a pass over the batches of a dataset: that of the first pass, or another.

        Args:
          key: the key of the dataset.
          number: of the pass, from 0.
        """
        return derived_key(key, b"pass", number) if number else key

    def resumed_key(self, kept: bytes) -> bytes:
        """The key that a resumed run continues with.

        Args:
          kept: 32 bytes from the run's directory, which keep batches with the same example apart.

        Raises:
          TypeError: if the sampling does not keep them apart.
        """
        raise TypeError(f"This sampling draws anew in each process. Received: sampling={self!r}")

    def describe(self, num_examples: int, epochs: int) -> list[str]:
        """What batches there will be, before any training: sentences for `PrivacyPlan.describe`.

        Args:
          num_examples: number of examples in the training set, a public constant.
          epochs: number of epochs that the steps are divided into.
        """
        raise NotImplementedError

    def marks(self, padding: np.ndarray, random: np.ndarray, step: int, key: bytes) -> np.ndarray:
        """The marks of the rows of padding.

        Args:
          padding: [rows], bool, which rows are padding.
          random: [rows], bool, random marks.
          step: the number of the step.
          key: the secret bytes of a pass, see `key_of_pass`.

        Returns:
          [rows], bool.
        """
        del step, key
        return padding & random

    def places_for(self, num_drawn: int) -> int:
        """The places of an undivided batch, where batches may differ in their number of rows.

        Args:
          num_drawn: how many examples, or users, the batch has.
        """
        del num_drawn  # only some samplings know batches that differ
        return self.rows // (self.examples_per_user or 1)

    def step_of_rows(self, num_examples: int, step: int) -> int:
        """The number that the rows of a step's batch are drawn with: that of the step."""
        del num_examples
        return step

    def place(
        self,
        num_examples: int,
        step: int,
        key: bytes,
        gradient_accumulation_steps: int = 1,
        equal_rows: bool = True,
    ) -> np.ndarray:
        """The places of the batch of a step: [k, places per part], with indices of examples.

        A place is a row, or all rows of a user (`users.UserRecords.place`). Padding is
        `num_examples` or `num_examples` + 1, chosen by a random bit. Together these bits are the
        number by which the mechanism distinguishes this draw from others.

        Guarantee: a pure function of its arguments. All assignments of the drawn examples to the
        rows of all k parts are equally likely, whatever was drawn. So the places of some examples
        have the same distribution whether or not there are others: a uniformly random injection.
        Therefore a loss may depend on the row (position numbers, one number of seeded noise per
        row): one additional example moves no other one. With `equal_rows=False` it may not, since
        one more example may add rows.

        Args:
          num_examples: number of examples in the training set.
          step: the number of the step, from 0.
          key: the secret bytes of a pass, see `key_of_pass`.
          gradient_accumulation_steps: k, the number of parts.
          equal_rows: whether all batches have the same number of places, or those of `places_for`.
        """
        k = gradient_accumulation_steps
        drawn = self.draw(num_examples, step, key)
        if equal_rows:
            rows = self.rows_per_batch(k) // (self.examples_per_user or 1)
        else:
            rows = self.places_for(len(drawn))
        placed = np.full(k * rows, num_examples, np.int64)
        placed[: len(drawn)] = drawn
        random = generator(key, b"rows", self.step_of_rows(num_examples, step))
        words = random.bit_generator.random_raw(-(-(k * rows - len(drawn)) // 64))
        placed[len(drawn) :] += np.unpackbits(words.view(np.uint8))[: k * rows - len(drawn)]
        random.shuffle(placed)
        parts = placed.reshape(k, rows)
        for part in parts:
            padding, marked = part >= num_examples, part > num_examples
            part[padding] = num_examples
            part += self.marks(padding, marked, step, key)
        return parts

    @abc.abstractmethod
    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger that `check_ledger` accepts.

        Args:
          ledger: a ledger, or an optimizer with the attribute `ledger`.
          num_examples: number of examples in the training set.
          delta: δ, in (0, 1).
          accountant: `"rdp"` or `"pld"`.
        """

    def as_drawn(self: _Kind, ledger: Any) -> _Kind:
        """This sampling, or one with less room if an optimizer's batches had less.

        Args:
          ledger: an optimizer; a ledger alone does not know what its batches looked like.
        """
        del ledger  # only truncation depends on the room
        return self

    def epsilon_spent(
        self, ledger: Any, num_examples: int, delta: float, *, accountant: str = "rdp"
    ) -> float:
        """ε of a ledger whose batches this sampling drew; see the class for the guarantee.

        Args:
          ledger: a ledger, or an optimizer with the attribute `ledger`.
          num_examples: number of examples in the training set, a public constant.
          delta: δ, in (0, 1).
          accountant: `"rdp"` or `"pld"`.

        Returns:
          ε ≥ 0, `math.inf` if something was released without noise.

        Raises:
          TypeError, ValueError: as for `accounting.epsilon_spent`, and if the ledger or the
            optimizer contradicts the sampling.
        """
        delta = checks.probability("delta", delta)
        num_examples = checks.integer("num_examples", num_examples, 1)
        checks.choice("accountant", accountant, accountants.ACCOUNTANTS)
        self.check_ledger(ledger, num_examples)
        return self.as_drawn(ledger).account(ledger, num_examples, delta, accountant)

    def check_delta(self, num_examples: int, delta: float) -> None:
        """Raises ValueError if no ε holds for all steps at this δ, however large the noise."""
        del num_examples, delta  # only truncation uses part of δ

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger or an optimizer contradicts the sampling."""
        check_unit(self, ledger)
        segments, _ = composition.read_ledger(ledger, num_examples, correlated=self.keeps_distance)
        expected = self.expected_batch_size(num_examples)
        for segment in segments:
            if not math.isclose(segment.batch_size, expected, rel_tol=_SAME):
                raise ValueError(
                    f"The optimizer released with batch size {segment.batch_size!r}, but the "
                    f"sampling has {expected!r} {self.unit}s a batch of {num_examples}: pass "
                    f"`expected_batch_size={expected!r}` to the optimizer, or pass the sampling "
                    f"that was used. Received: sampling={self!r}"
                )
        released = sum(segment.num_releases for segment in segments)
        if released > self.steps:
            raise ValueError(
                f"The optimizer released {released} noisy gradients, but the sampling draws only "
                f"{self.steps} batches: other batches were used, or several passes over the "
                "dataset. Let `steps` be the number of batches of the whole run, and pass "
                f"`steps_per_epoch` to `fit`. Received: sampling={self!r}"
            )


@dataclasses.dataclass(frozen=True)
class FullBatches(Sampling):
    """A sampling whose batches all have the same number of examples, without padding.

    Attributes:
      batch_size: number of examples in each batch, at least 1.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the entropy of the operating system; a number is for tests only.
    """

    batch_size: int
    steps: int
    seed: int | None = None

    def __post_init__(self) -> None:
        checks.keep(self, checks.integer, "batch_size", 1)
        self._check_common()

    @property
    def rows(self) -> int:
        """Number of rows of an undivided batch."""
        return self.batch_size

    def expected_batch_size(self, num_examples: int) -> float:
        """The batch size."""
        del num_examples
        return float(self.batch_size)

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger or an optimizer contradicts the sampling."""
        super().check_ledger(ledger, num_examples)
        refuse_other_sizes(ledger)


def refuse_other_sizes(ledger: Any) -> None:
    """Raises ValueError if no release counts with the size that the first batch had.

    Batches of random size may by chance be a little larger than declared. Batches of a fixed size
    may not.

    Args:
      ledger: an optimizer; a ledger alone does not know the size of its batches.
    """
    rows = getattr(ledger, "rows_per_batch", 0) * getattr(ledger, "parts_per_batch", 1)
    declared = sorted({batch_size for _, batch_size, _ in ledger_of(ledger).segments})
    if rows and declared and rows not in declared:
        raise ValueError(
            "Batches of a fixed size must have the `expected_batch_size` that ε is computed with. "
            f"Received: batches of {rows} rows, expected_batch_size={declared[-1]:g}. Create the "
            f"optimizer with `expected_batch_size={rows}`. What was released so far costs at most "
            f"what a ledger with that size says, `accounting.Releases([(noise_multiplier, {rows}, "
            "num_releases)])`."
        )
