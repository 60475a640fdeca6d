"""Batches of a fixed size: random subsets, with their own accounting."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import rdp

from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.composition import unprotected
from tf_adaptive_dp.sampling import draws


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(draws.FullBatches):
    """Each batch is a uniformly random subset of a fixed size, independent of all others.

    Guarantee: (ε, δ)-DP for replacing one example by another, with the ε of `epsilon_spent`. For
    each order, the Rényi divergence is at most that of Theorem 27 of Wang, Balle and
    Kasiviswanathan 2019 for sampling without replacement, and at most that without amplification by
    sampling; the smaller one counts. Replacing an example moves the sum by up to 2C, so the
    effective noise multiplier is half the nominal one. The adjacency differs from that of Poisson
    sampling: do not compare the two values of ε. The examples are placed in uniformly random rows.
    Couple neighbors so that the replacement takes the row of the replaced example and all others
    keep theirs. Then only the gradient of that row changes, even if the loss depends on the row.

    References:
      - Wang et al., "Subsampled Rényi Differential Privacy and Analytical Moments Accountant"
        (2018), arXiv:1808.00087.

    Attributes:
      batch_size: number of examples in each batch, at least 1.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy; a number is for tests only.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> FixedSizeSampling(3, steps=1).draw(6, step=0, key=draws.new_key(seed=1))
    array([0, 1, 3])
    """

    label: ClassVar[str] = "fixed"

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step: all subsets are equally likely.

        Guarantee: a pure function of its arguments; different steps and keys are independent.
        """
        generator = draws.generator(key, b"fixed", step)
        return np.sort(generator.choice(num_examples, self.batch_size, replace=False))

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger; see the class."""
        return fixed_size_epsilon(ledger, num_examples, delta, accountant)


def fixed_size_epsilon(
    ledger: Any, num_examples: int, delta: float, accountant: str = "rdp"
) -> float:
    """ε of a ledger whose batches were subsets of a fixed size; see `FixedSizeSampling`.

    Raises:
      ValueError: if the accountant is not RDP, the only one that supports this sampling; if a batch
        size is not an integer; if there are `other_events`, which hold for adding or removing an
        example.
    """
    composition.check_probability("delta", delta)
    segments, events = composition.counted_ledger(ledger, num_examples, in_epochs=False)
    if accountant != "rdp":
        raise ValueError(
            "Only `accountant='rdp'` knows batches of fixed size without replacement. Received: "
            f"accountant={accountant!r}"
        )
    if unprotected(events):
        return math.inf  # for any adjacency
    if events:
        raise ValueError(
            "The ledger's `other_events` hold for adding or removing an example, and cannot be "
            "composed with batches of fixed size, which replace one; use PoissonSampling. "
            f"Received: other_events={events!r}"
        )
    divergences = np.zeros(len(rdp.RdpAccountant().orders))
    for noise_multiplier, batch_size, count in segments:
        if not batch_size.is_integer():
            raise ValueError(
                "Batches of fixed size have a whole number of examples. Received: "
                f"batch_size={batch_size!r}"
            )
        if noise_multiplier < 2 * composition.MIN_NOISE_MULTIPLIER:
            return math.inf
        noise_multiplier = min(noise_multiplier, composition.MAX_NOISE_MULTIPLIER)
        divergences += count * _rdp_without_replacement(
            noise_multiplier, int(batch_size), num_examples
        )
    divergences[np.isnan(divergences)] = math.inf
    return float(rdp.compute_epsilon(rdp.RdpAccountant().orders, divergences, delta)[0])


@functools.lru_cache(maxsize=1024)
def _rdp_without_replacement(
    noise_multiplier: float, batch_size: int, num_examples: int
) -> np.ndarray:
    # Replacing an example moves the sum by 2C, so relative to that the noise is half as large.
    event = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    # By convexity no batch costs more than one that surely holds the example. With little noise
    # the bound with sampling is above that.
    divergences = _rdp_of_release(event)
    if batch_size < num_examples:
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(num_examples, batch_size, event)
        divergences = np.fmin(divergences, _rdp_of_release(sampled))
    return np.maximum(divergences, composition.RDP_PRECISION)


def _rdp_of_release(event: dp_accounting.DpEvent) -> np.ndarray:
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    return rdp.RdpAccountant(neighboring_relation=replaced).compose(event).rdp
