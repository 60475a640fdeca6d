"""Batches in one order that every pass over the data repeats: no sampling, and no amplification."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from tf_adaptive_dp.accounting import accountants, composition, noise_strategies
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.wording import counted

# The orders that this process made, by batch size. Data that grow have other orders, and nothing
# shows from which of them an optimizer's batches came.
_orders_of: dict[int, set[bytes]] = {}


@dataclasses.dataclass(frozen=True)
class FixedOrder(draws.FullBatches):
    """Passes over the data, all in the same random order; an incomplete batch is dropped.

    An example is in every s-th batch, s = floor(n / batch_size). Correlated noise requires nothing
    more, and ε assumes no secret randomness of the batches. With few passes and a large ε, noise
    with many bands can beat Poisson sampling.

    Guarantee: (ε, δ)-DP for neighbors that differ in one example, which is blank in one of them
    (its gradients are zero there), with the ε of `epsilon_spent`. Proof: let g be the clipped sums,
    each divided by the noise multiplier and the clipping bound of its step. The releases are a
    function of y = C g + z, see `accounting.noise_strategies`. The example is in at most
    k = ceil(T / s) of the T steps, any two at least s apart. So it moves C g by at most
    `sensitivity(noise, T, s, k)` divided by the least noise multiplier of all steps, whatever was
    released before. That is one Gaussian mechanism whose noise multiplier is the inverse of this
    quotient. If the ledger knows of a batch that came back sooner, there is no ε.
    `privacy_statement` says "proven" only if this process made a single order and one optimizer saw
    all batches here: in a second order the batches would differ, so an example that comes back too
    soon would go unnoticed. With correlated noise it says that the order was not verified, since
    these batches do not show their step.

    Attributes:
      batch_size: number of examples in each batch, at least 1.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    References:
      - Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private
        Model Training" (2024), arXiv:2405.13763, Theorem 2.

    >>> from tf_adaptive_dp.accounting import BandedNoise, IndependentNoise, Releases
    >>> sampling = FixedOrder(100, steps=500)  # 5 passes over 10,000 examples
    >>> for noise in (IndependentNoise(), BandedNoise(100)):
    ...     ledger = Releases([(4.0, 100.0, 500)], noise=noise)
    ...     print(round(sampling.epsilon_spent(ledger, 10_000, 1e-5), 2))
    2.45
    2.45
    """

    label: ClassVar[str] = "fixed_order"
    keeps_distance: ClassVar[bool] = True

    def new_key(self, num_examples: int) -> bytes:
        """The same key for all datasets of a process: a run may make one for each pass.

        Nor does it depend on `steps`: a run that is made longer continues in its order.
        """
        if self.seed is not None:
            return super().new_key(num_examples)
        return _key_of_process(self.batch_size, num_examples)

    def remember_key(self, num_examples: int, key: bytes) -> None:
        """Records that this process made batches in the order of a key and a number of examples."""
        name = draws.derived_key(key, b"name", num_examples)  # the key itself ends with the dataset
        _orders_of.setdefault(self.batch_size, set()).add(name)

    def num_in_order(self, ledger: Any) -> int:
        """How many releases are known to be on batches of one order.

        Another process has another order, unless it was given the key. So has a dataset with
        another key, or of another size.

        Args:
          ledger: an optimizer; a ledger alone does not show which process saw its batches.
        """
        seen = getattr(ledger, "batches_seen", None)
        if seen is None or len(_orders_of.get(self.batch_size, ())) > 1:
            return 0
        return int(seen.numbered // ledger.parts_per_batch)

    def key_of_pass(self, key: bytes, number: int) -> bytes:
        """The same key for all passes, since the order is one for the whole run."""
        del number
        return key

    def separation(self, num_examples: int) -> int:
        """s, the number of steps from one batch with an example to the next."""
        return num_examples // self.batch_size

    def equivalent_sensitivity(
        self, noise: noise_strategies.NoiseStrategy, num_examples: int
    ) -> float:
        """By how much an example moves all releases, in units of C; exact, see the class."""
        separation = self.separation(num_examples)
        return noise_strategies.sensitivity(noise, self.steps, separation)

    def resumed_key(self, kept: bytes) -> bytes:
        """The key that was kept: the order is all that is drawn."""
        return kept

    def describe(self, num_examples: int, epochs: int) -> list[str]:
        """See `Sampling.describe`."""
        per_pass = self.steps // epochs
        left = num_examples - per_pass * self.batch_size
        others = counted(left, self.unit) + (" is" if left == 1 else " are")
        return [
            f"{self.steps} steps: {epochs} passes of {per_pass} batches, all in one order; batches "
            "are not sampled",
            f"Each batch has {counted(self.batch_size, self.unit)}"
            + (f"; {others} in none, chosen at random" if left else ""),
        ]

    def step_of_rows(self, num_examples: int, step: int) -> int:
        """The place in a pass: by its rows, the same in every pass, a batch is recognized."""
        return step % self.separation(num_examples)

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step: a pure function of its arguments."""
        place = step % self.separation(num_examples)
        order = _order(num_examples, key)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger or an optimizer contradicts the sampling."""
        super().check_ledger(ledger, num_examples)
        least = self.separation(num_examples)
        for segment, known in composition.checks_of(ledger, num_examples, correlated=True):
            if known.repeated and known.nearest < least:
                raise ValueError(
                    f"A batch came back after {known.nearest} steps, before the others of the pass "
                    "had come, so no epsilon is proven. Use each batch of the dataset once and in "
                    "order, and pass `steps_per_epoch` to `fit`. Received: "
                    f"{known.repeated} such releases of {segment.num_releases}, sampling={self!r}"
                )

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger; see the class."""
        counts, events = self._as_one_release(ledger, num_examples)
        return accountants.composed_epsilon(counts, events, delta, accountant)

    def dp_event(self, ledger: Any, num_examples: int) -> dp_accounting.DpEvent:
        """Converts a ledger to a `DpEvent`, as `accounting.dp_event` does for independent noise.

        Guarantee: that of the class, for data sets in which one example is blank or not. In the
        `other_events` of another ledger it makes the whole epsilon one for such data sets, whatever
        the adjacency that a statement about that ledger names.

        Args:
          ledger: a ledger, or an optimizer with the attribute `ledger`.
          num_examples: number of examples in the training set, a public constant.
        """
        self.check_ledger(ledger, num_examples)
        counts, events = self._as_one_release(ledger, num_examples)
        return accountants.composed_event(counts.items(), events)

    def _as_one_release(
        self, ledger: Any, num_examples: int
    ) -> tuple[accountants.Counts, tuple[dp_accounting.DpEvent, ...]]:
        """The Gaussian mechanism that all releases are, if there are any, and other events."""
        segments, events = composition.read_ledger(ledger, num_examples, correlated=True)
        counts: accountants.Counts = {}
        if segments:
            steps = sum(segment.num_releases for segment in segments)
            moved = noise_strategies.sensitivity(
                composition.noise_of(ledger), steps, self.separation(num_examples)
            )
            least = min(segment.noise_multiplier for segment in segments)
            counts[least / moved, 1.0] = 1
        return counts, events


@functools.cache
def _key_of_process(batch_size: int, num_examples: int) -> bytes:
    del batch_size, num_examples
    return draws.new_key()


@functools.lru_cache(maxsize=2)
def _order(num_examples: int, key: bytes) -> np.ndarray:
    return draws.generator(key, b"order", 0).permutation(num_examples)
