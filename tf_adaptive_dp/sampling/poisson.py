"""Poisson sampling, and what it costs that a batch has room for so many examples only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, ClassVar

import numpy as np
from scipy import stats

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.sampling import draws


@dataclasses.dataclass(frozen=True)
class PoissonSampling(draws.Sampling):
    """Every example joins each batch independently with the same probability.

    A batch has room for B = `max_batch_size` examples. Of a larger draw a uniformly random B stay.

    Guarantee: (ε, δ)-DP for adding or removing one example, with ε of `epsilon_spent`, if q, B,
    `steps` and the optimizer's parameters were chosen without looking at whether one particular
    example is there (`num_examples` counts as public and only bounds the overflow).

    Why truncation costs e^ε·η of δ, where η = T·q·P[Binomial(n, q) ≥ B] for T releases: let D' be
    D with one example x more, and M the training. Let H be M on D', but with an extra seat for x:
    the others' draw is cut to B as if x did not exist, then x joins with probability q.
    1. H against M(D): the others' batch has the same law, and given it a release is N(μ, σ²C²)
       against the mixture (1 - q)·N(μ, σ²C²) + q·N(μ + g, σ²C²) with ‖g‖ ≤ C. That pair is what
       the accountant composes: H and M(D) are (ε, δ₀)-close in both directions.
    2. H against M(D'): run with the same random numbers they differ only if, in some step, x and B
       or more others are drawn: with probability η at most, whatever was released before.
    So P[M(D') ∈ S] ≤ P[H ∈ S] + η ≤ e^ε·P[M(D) ∈ S] + δ₀ + η, and P[M(D) ∈ S] ≤ e^ε·P[H ∈ S] + δ₀
    ≤ e^ε·P[M(D') ∈ S] + δ₀ + e^ε·η. Hence δ = δ₀ + e^ε·η, and `epsilon_spent` solves it for ε.

    Rows: `place` puts the examples of a draw into uniformly random rows of the batch, or of all its
    k parts together. So a loss may be tied to the row, as by position numbers, weights by row or
    noise from a known seed. Couple the batches of D and D' as follows. Draw the others, and put
    them into rows by one random injection, the same for both. If x joins D's batch to make that of
    D', put it into one of the rows that are left, each equally likely. In both batches all examples
    are then in uniformly random rows, as `place` has it. The others are in the same rows, so their
    gradients are the same; x takes a row of padding, which contributed zero. So the sums differ by
    the clipped gradient of x, and ‖g‖ ≤ C as 1. needs. (g depends on the row of x: one more mixture
    of such pairs. Where the others fill all rows, x stays out of H.) This assumes that a row's
    gradient depends on its example and its place only, which the optimizer checks. How many
    examples a part has depends on chance; nothing is clipped, divided or adapted by part.

    Attributes:
      sampling_probability: q, in (0, 1].
      max_batch_size: B, at least 1; `for_batch_size` chooses one that costs next to nothing.
      steps: number of batches of the whole run, at least 1.
      seed: `None` for the operating system's entropy; a number makes the draws foreseeable, so
        that nothing is amplified: for tests only.

    Raises:
      TypeError, ValueError: for an argument of the wrong type or out of its range.

    >>> sampling = PoissonSampling.for_batch_size(128, num_examples=1437, steps=440)
    >>> sampling.max_batch_size
    224
    >>> PoissonSampling(0.5, max_batch_size=4, steps=1).draw(6, step=0, key=draws.new_key(seed=1))
    array([2])
    """

    sampling_probability: float
    max_batch_size: int
    steps: int
    seed: int | None = None
    label: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        composition.check_probability(
            "sampling_probability", self.sampling_probability, or_one=True
        )
        checks.integer("max_batch_size", self.max_batch_size, 1)
        self._check_common()

    @classmethod
    def for_batch_size(
        cls, batch_size: float, num_examples: int, steps: int, seed: int | None = None
    ) -> PoissonSampling:
        """Batches of an expected size, with room enough that truncation does not show in ε.

        Args:
          batch_size: the expected size; `expected_batch_size` of the optimizer.
          num_examples: number of examples in the training set, a public constant.
          steps: number of batches of the whole run.
          seed: see the class.

        Returns:
          A sampling whose `max_batch_size` is the smallest multiple of 8 with η ≤ 1e-12, or
          one above `num_examples` if that is less: nothing overflows then, though there may be one
          example more.
        """
        checks.number("batch_size", batch_size, 0, strict=True)
        checks.integer("num_examples", num_examples, 1)
        checks.integer("steps", steps, 1)
        if batch_size > num_examples:
            raise ValueError(
                "`batch_size` must be at most `num_examples`. Received: "
                f"batch_size={batch_size!r}, num_examples={num_examples!r}"
            )
        q = batch_size / num_examples
        for rows in range(8 * math.ceil(batch_size / 8), num_examples + 1, 8):
            sampling = cls(q, rows, steps, seed)
            if steps * sampling.failure_probability(num_examples) <= 1e-12:
                return sampling
        return cls(q, num_examples + 1, steps, seed)

    @property
    def rows(self) -> int:
        """Rows of an undivided batch tensor, padding included."""
        return self.max_batch_size

    def rows_per_batch(self, gradient_accumulation_steps: int = 1) -> int:
        """Rows of each of the tensors that the batch of a step comes as, padding included."""
        checks.integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        return -(-self.rows // gradient_accumulation_steps)

    def expected_batch_size(self, num_examples: int) -> float:
        """q · num_examples: what the optimizer's `expected_batch_size` has to be."""
        return self.sampling_probability * checks.integer("num_examples", num_examples, 1)

    def failure_probability(self, num_examples: int) -> float:
        """η / T: how likely one example joins a batch that B others or more were drawn for."""
        tail = stats.binom.sf(self.max_batch_size - 1, num_examples, self.sampling_probability)
        return float(self.sampling_probability * tail)

    def delta_for_noise(
        self, epsilon: float, num_examples: int, delta: float, releases: int | None = None
    ) -> float:
        """δ₀ = δ - e^ε·η, what truncation leaves of δ, for example to `noise_multiplier_for`.

        Args:
          epsilon: ε that is to hold in the end.
          num_examples: number of examples in the training set, a public constant.
          delta: δ that is to hold in the end.
          releases: T; by default `steps`.

        Returns:
          δ₀; zero or less if truncation alone uses δ up.
        """
        releases = self.steps if releases is None else releases
        failure = releases * self.failure_probability(num_examples)
        return delta - failure * math.exp(min(epsilon, 700.0)) if failure else delta

    def check_delta(self, num_examples: int, delta: float) -> None:
        """Raises ValueError if overflow alone uses δ up before the last step."""
        if self.delta_for_noise(0.0, num_examples, delta) <= 0:
            raise ValueError(
                "Batches overflow so often that ε is infinite at this `delta`. Make "
                "`max_batch_size` larger, `PoissonSampling.for_batch_size` finds one. Received: "
                f"delta={delta!r}, sampling={self!r}"
            )

    def check_ledger(self, ledger: Any, num_examples: int) -> None:
        """Raises ValueError if a ledger, or an optimizer, does not agree with the sampling."""
        super().check_ledger(ledger, num_examples)
        refuse_microbatches(ledger)

    def draw(self, num_examples: int, step: int, key: bytes) -> np.ndarray:
        """Indices of the examples in the batch of a step, ascending.

        Guarantee: a pure function of its arguments; the draws of different steps, and of different
        keys, are independent, as far as BLAKE2b and SFC64 are random. An example joins if its
        uniform numbers allow it: one of 8 bits with probability c/2⁸, the next probability above
        q, the others with q·2⁸/c. So q is met to 2⁻⁵² of it, with no approximation by a binomial
        size, and most examples take one byte. Which ones stay of too large a draw is uniformly
        random, so no example is favoured.
        """
        generator = draws.generator(key, b"poisson", step)
        likely = math.ceil(self.sampling_probability * 2**8)
        words = generator.bit_generator.random_raw(-(-num_examples // 8)).view(np.uint8)
        # `likely` is up to 2⁸, which is not a number of 8 bits.
        chosen = np.flatnonzero(words[:num_examples] <= likely - 1)
        rest = self.sampling_probability * 2**8 / likely
        if rest < 0.5:
            # Uniform numbers are multiples of 2⁻⁵³: exact for a power of 2 and for 1/2 to 1.
            rest, exponent = math.frexp(rest)
            chosen = chosen[generator.random(len(chosen)) < 2.0**exponent]
        chosen = chosen[generator.random(len(chosen)) < rest]
        if len(chosen) > self.max_batch_size:
            stay = generator.choice(len(chosen), self.max_batch_size, replace=False, shuffle=False)
            chosen = chosen[np.sort(stay)]
        return chosen

    def account(self, ledger: Any, num_examples: int, delta: float, accountant: str) -> float:
        """ε of a ledger, see the class."""
        segments, _ = composition.read_ledger(ledger, num_examples)
        releases = sum(segment.num_releases for segment in segments)

        def epsilon_at(delta: float) -> float:
            return composition.epsilon_spent(
                ledger, num_examples, delta, accountant=accountant, in_epochs=False
            )

        def delta_left(epsilon: float) -> float:
            return self.delta_for_noise(epsilon, num_examples, delta, releases)

        return _self_consistent(epsilon_at, delta_left, delta)


def refuse_microbatches(ledger: Any) -> None:
    """Raises ValueError for an optimizer with microbatches, which Poisson batches cannot have.

    One example more moves others into different microbatches, so the sum may change by far more
    than 2C.
    """
    if getattr(ledger, "num_microbatches", None) is not None:
        raise ValueError(
            "Poisson batches cannot be clipped in microbatches. Create the optimizer without "
            f"`num_microbatches`. Received: num_microbatches={ledger.num_microbatches!r}"
        )


def _self_consistent(
    epsilon_at: Callable[[float], float], delta_left: Callable[[float], float], delta: float
) -> float:
    """An ε with epsilon_at(delta_left(ε)) ≤ ε, the least one up to rounding; or infinity."""
    spent = epsilon_at(delta)
    attempt = 0
    while True:
        left = delta_left(spent)
        if left == delta:
            return spent
        if not left > 0:
            return math.inf
        needed = epsilon_at(left)
        if needed <= spent:
            return spent
        # Longer and longer steps: near the largest η that δ can bear it would creep otherwise.
        spent = needed * (1 + 1e-7 * 2**attempt)
        attempt += 1
