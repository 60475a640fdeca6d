"""Shuffled epochs: passes over the data, each in a new random order."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.sampling import draws


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(draws.FullBatches):
    """Passes over the data, each in a new random order; incomplete batches are dropped.

    Guarantee: within an iterator each example is in at most one of the floor(n / batch_size)
    batches of a pass. `epsilon_spent` returns the ε of Poisson sampling with the same batch size,
    which is an approximation and not a proven bound. `accounting.epsilon_without_amplification`
    bounds ε for neighbors that differ in one example, which is blank in one of them. (An additional
    example would move its successors to other batches.) Both neighbors have the same uniformly
    random permutation and rows, so all other examples keep their places. A new iterator begins a
    new pass.

    Attributes:
      batch_size: number of examples in each batch, at least 1.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> ShuffledEpochs(3, steps=2).draw(6, step=1, key=draws.new_key(seed=1))
    array([4, 2, 1])
    """

    label: ClassVar[str] = "shuffled"

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step: a pure function of its arguments."""
        epoch, place = divmod(step, num_examples // self.batch_size)
        order = _permutation(num_examples, epoch, key)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger; see the class."""
        return composition.epsilon_spent(
            ledger, num_examples, delta, accountant=accountant, in_epochs=True
        )


@functools.lru_cache(maxsize=2)
def _permutation(num_examples: int, epoch: int, key: bytes) -> np.ndarray:
    return draws.generator(key, b"shuffle", epoch).permutation(num_examples)
