"""Cyclic Poisson sampling: amplification by sampling for noise that is correlated over steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import accountants, batch_order, composition
from tf_adaptive_dp.sampling import draws
from tf_adaptive_dp.sampling.poisson import (
    RandomSizes,
    at_most,
    bernoulli,
    with_room,
)


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampling(RandomSizes):
    """Poisson sampling from b groups of examples in turn, for noise with b bands.

    Before the first step each example is put into one of b = `num_groups` groups, uniformly and
    independently of the others. The batch of step t is drawn from group t mod b: each example of
    the group joins with probability q, independently of everything else. So an example is in no two
    of b consecutive batches, as `BandedNoise(b)` and `ToeplitzNoise` with b coefficients need it.

    Guarantee: (ε, δ)-DP for adding or removing one example, with the ε of `epsilon_spent`, under
    the conditions of `PoissonSampling`, if step t of the optimizer uses the batch of step t. The T
    releases cost as much as ceil(T / b) Gaussian mechanisms, each on a Poisson sample with
    probability q. Proof: let x be the additional example, and fix the groups of all examples and
    the draws and rows of all others. Their law is the same with x and without it, and so are the
    gradients of the others once the earlier releases are given. Let x be in group j.
    1. The releases g_t + σ_t·C_t·w_t, with clipping bound C_t and C w = z, determine and are
       determined by y_t = Σ_k c_k·g_{t-k} / (σ_{t-k}·C_{t-k}) + z_t, where z is independent
       standard noise. σ_t and C_t depend on the data only through earlier releases.
    2. Cut y into blocks that begin at the steps t ≡ j (mod b), when x may join. As c has b
       coefficients, what x adds to step t moves y within the block of t alone.
    3. Given everything before the block, y without x is z plus a part of the others that is a
       function of the earlier releases. Subtract it, which is a bijection. Without x, N(0, I) is
       left; with x, (1 - q)·N(0, I) + q·N(v, I), where v = (c_0·u, ..., c_{b-1}·u), u is the
       clipped gradient of x in units of σ_t·C_t, and so ‖v‖ ≤ ‖c‖/σ_t = 1/σ_t. (u depends on the
       row of x, which gives another mixture of such pairs.) This is the pair of one
       Poisson-sampled Gaussian mechanism.
    4. The blocks compose adaptively, and T steps hold at most ceil(T / b) of them. The bound holds
       for all groups and draws of the others, and so for their mixture.
    The step from this to batches of at most B examples is that of `PoissonSampling`: before
    anything was drawn, an example joins a batch with probability q/b, which determines η.

    Order: the batches show their step and their groups in the marks of their padding
    (`accounting.batch_order`). A step whose batch was drawn for another one, or from other groups
    than the first batch, fails before its release; one in 256 pairs of groups look alike. Batches
    with too little padding show nothing; `privacy_statement` counts them.

    Attributes:
      sampling_probability: q, in (0, 1], the probability in the step of an example's own group.
      num_groups: b, at least 2; that of the noise.
      max_batch_size: B, at least 1; `for_batch_size` chooses one with negligible cost.
      steps: number of batches in the whole run, at least 1.
      seed: `None` for the operating system's entropy; a number is for tests only.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    References:
      - Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified approach to
        private training" (2023), arXiv:2306.08153.
      - McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Differentially Private
        ML" (2024), arXiv:2405.15913.

    >>> sampling = CyclicPoissonSampling.for_batch_size(128, 60_000, steps=4_000, num_groups=8)
    >>> round(sampling.sampling_probability, 5), sampling.max_batch_size
    (0.01707, 224)
    >>> from tf_adaptive_dp.accounting import BandedNoise, Releases
    >>> ledger = Releases([(2.0, 128.0, 4_000)], noise=BandedNoise(8))
    >>> round(sampling.epsilon_spent(ledger, 60_000, 1e-5), 3)
    0.855
    """

    sampling_probability: float
    num_groups: int
    max_batch_size: int
    steps: int
    seed: int | None = None
    label: ClassVar[str] = "cyclic"
    keeps_distance: ClassVar[bool] = True
    _bits_of_step: ClassVar[int] = 2 * batch_order.BITS

    def __post_init__(self) -> None:
        checks.keep(self, checks.probability, "sampling_probability", or_one=True)
        checks.keep(self, checks.integer, "num_groups", 2)
        checks.keep(self, checks.integer, "max_batch_size", 1)
        self._check_common()

    @classmethod
    def for_batch_size(
        cls,
        batch_size: float,
        num_examples: int,
        steps: int,
        num_groups: int,
        seed: int | None = None,
    ) -> CyclicPoissonSampling:
        """Makes a sampling with enough room that truncation does not show in ε.

        Args:
          batch_size: the expected batch size, as for the optimizer; at most
            `num_examples` / `num_groups`.
          num_examples: number of examples in the training set, a public constant.
          steps: number of batches in the whole run.
          num_groups: b, the number of bands of the noise.
          seed: see the class.

        Returns:
          As `PoissonSampling.for_batch_size`.
        """
        num_groups = checks.integer("num_groups", num_groups, 2)
        num_examples = checks.integer("num_examples", num_examples, 1)
        batch_size = checks.number("batch_size", batch_size, 0, strict=True)
        if num_groups * batch_size > num_examples:
            raise ValueError(
                "`num_groups` batches together must not be larger than the data: use fewer groups "
                f"or smaller batches. Received: num_groups={num_groups!r}, "
                f"batch_size={batch_size!r}, num_examples={num_examples!r}"
            )

        q = num_groups * batch_size / num_examples

        def make(_: float, rows: int) -> CyclicPoissonSampling:
            return cls(q, num_groups, rows, steps, seed)

        return with_room(make, batch_size, num_examples, steps)

    @property
    def share(self) -> float:
        """q / b."""
        return self.sampling_probability / self.num_groups

    def expected_batch_size(self, num_examples: int) -> float:
        """q · num_examples / b, which the optimizer's `expected_batch_size` must equal."""
        of_all_groups = self.sampling_probability * checks.integer("num_examples", num_examples, 1)
        return of_all_groups / self.num_groups

    def key_of_pass(self, key: bytes, number: int) -> bytes:
        """The key of a pass over the batches: other draws, from the same groups."""
        draws_key, groups_key = _both_keys(key)
        return (draws.derived_key(draws_key, b"pass", number) if number else draws_key) + groups_key

    def resumed_key(self, kept: bytes) -> bytes:
        """New draws from the groups that were kept."""
        return draws.new_key() + kept

    def describe(self, num_examples: int, epochs: int) -> list[str]:
        """See `Sampling.describe`."""
        steps, rows = super().describe(num_examples, epochs)
        return [f"{steps}, drawn from {self.num_groups} groups of examples in turn", rows]

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step, ascending.

        Guarantee: that of `PoissonSampling.draw`, for the examples of the group of the step. The
        groups are a function of the key alone.

        Args:
          num_examples: number of examples.
          step: the number of the step, from 0.
          key: 32 bytes, or 32 bytes for the draws and then 32 for the groups.
        """
        draws_key, groups_key = _both_keys(key)
        members = _groups(num_examples, self.num_groups, groups_key)[step % self.num_groups]
        generator = draws.generator(draws_key, b"cyclic", step)
        chosen = bernoulli(generator, len(members), self.sampling_probability)
        return members[at_most(generator, chosen, self.max_batch_size)]

    def marks(self, padding: np.ndarray, random: np.ndarray, step: int, key: bytes) -> np.ndarray:
        """The marks of padding, which show step and groups; see `accounting.batch_order`."""
        groups = batch_order.code_of_groups(_both_keys(key)[1])
        return batch_order.marked(padding, random, step, self.num_groups, groups)

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger or an optimizer contradicts the sampling."""
        noise = composition.noise_of(ledger)
        if noise.bands != self.num_groups:
            raise ValueError(
                "The noise must have as many bands as the sampling has groups, so that no two "
                "batches within the bands share an example. Received: "
                f"noise={noise!r}, sampling={self!r}"
            )
        repeated = sum(
            known.repeated
            for _, known in composition.checks_of(ledger, num_examples, correlated=True)
        )
        if repeated:
            raise ValueError(
                "With correlated noise no epsilon is proven for batches that were released before. "
                f"Received: {repeated} releases on such batches, noise={noise!r}"
            )
        super().check_ledger(ledger, num_examples)

    def dp_event(self, ledger: Any, num_examples: int) -> dp_accounting.DpEvent:
        """Converts a ledger to a `DpEvent`, as `accounting.dp_event` does for independent noise.

        Guarantee: that of the class, without the cost of truncation.

        Args:
          ledger: a ledger, or an optimizer with the attribute `ledger`.
          num_examples: number of examples in the training set, a public constant.
        """
        self.check_ledger(ledger, num_examples)
        _, events = composition.read_ledger(ledger, num_examples, correlated=True)
        return accountants.composed_event(self._blocks(ledger, num_examples).items(), events)

    def _epsilon(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        _, events = composition.read_ledger(ledger, num_examples, correlated=True)
        counts = self._blocks(ledger, num_examples)
        return accountants.composed_epsilon(counts, events, delta, accountant)

    def _blocks(self, ledger: Any, num_examples: int) -> accountants.Counts:
        """The number of steps of each kind that an example may join."""
        counts: accountants.Counts = {}
        for noise_multiplier, _, releases in composition.read_ledger(
            ledger, num_examples, correlated=True
        )[0]:
            # Segment by segment, since the noise of a block is that of its first step.
            release = (noise_multiplier, self.sampling_probability)
            counts[release] = counts.get(release, 0) - (-releases // self.num_groups)
        return counts


def _both_keys(key: bytes) -> tuple[bytes, bytes]:
    """The key of the draws and that of the groups."""
    return (key[:32], key[32:]) if len(key) == 64 else (key, draws.derived_key(key, b"groups", 0))


@functools.lru_cache(maxsize=2)
def _groups(num_examples: int, num_groups: int, key: bytes) -> list[np.ndarray]:
    """The examples of each group, ascending."""
    groups = draws.generator(key, b"groups", 0).integers(num_groups, size=num_examples)
    return [np.flatnonzero(groups == group) for group in range(num_groups)]
