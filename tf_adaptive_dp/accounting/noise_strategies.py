"""How the noise of one step depends on that of earlier steps: strategies, and what they cost.

The noise of step t is w_t with C w = z, where z is independent Gaussian noise and C the *strategy
matrix*. w_t cancels part of what earlier steps added, so a sum over many steps has less noise than
if the noise of the steps were independent.

Privacy: everything that is released, g_t + w_t, can be computed from y = C g + z, so the guarantee
is that of the Gaussian mechanism on C g. The rows of y can be released one after the other, and g_t
may depend on what was released before, since no row of y that step t needs depends on later
gradients.

- `BandedNoise` and `ToeplitzNoise`: C is a lower triangular Toeplitz matrix with the first column
  c_0 ≥ c_1 ≥ ... ≥ 0, c_0 > 0. One example that is part of step t alone moves y by at most ‖c‖
  times the clipping bound. Here ‖c‖ = 1, so a noise multiplier means the same for each of these:
  the noise of one participation.
- `TreeNoise`: C has one row for each node of binary trees over the steps. The noise multiplier is
  that of a node, and one participation costs more: it moves every node above it.

What several participations of an example cost depends on how far apart they are; see `sensitivity`
and `sampling.CyclicPoissonSampling`.

References:
  - Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear Operators on
    Adaptive Streams" (2022), arXiv:2202.08312, for the adaptive mechanism.
  - Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (2021),
    arXiv:2103.00039, for trees.
  - Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), arXiv:2306.08153.
  - Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model
    Training" (2024), arXiv:2405.13763.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import math
from typing import Any

import numpy as np

from tf_adaptive_dp import checks

__all__ = [
    "BandedNoise",
    "IndependentNoise",
    "NoiseStrategy",
    "ToeplitzNoise",
    "TreeNoise",
    "prefix_error",
    "sensitivity",
]

# The norm of normalized coefficients differs from 1 by less than this.
_ROUNDING_OF_NORM = 1e-14
MAX_BANDS = 1024
# Steps after which the noise of a step has the deviation that it keeps.
_SETTLED = 4 * MAX_BANDS


class NoiseStrategy(abc.ABC):
    """The base class of noise strategies.

    Attributes:
      bands: b, if the gradient of any step changes y = C g + z in that step and the next b - 1
        only; `None` if there is no such b.
    """

    bands: int | None

    @property
    def is_independent(self) -> bool:
        """Whether the noise of different steps is independent."""
        return self.bands == 1

    def digest(self) -> int:
        """A number that identifies the strategy in saved states."""
        content = np.array(self._identity()).round(9).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")

    @abc.abstractmethod
    def deviations(self, steps: int) -> np.ndarray:
        """The standard deviations of w_0, ..., w_{T-1}, if z has standard deviation 1.

        Args:
          steps: T, at least 1.

        Returns:
          [T], float64.
        """

    @abc.abstractmethod
    def sum_deviations(self, steps: int) -> np.ndarray:
        """The standard deviations of w_0, w_0 + w_1, ..., if z has standard deviation 1.

        Args:
          steps: T, at least 1.

        Returns:
          [T], float64.
        """

    @property
    @abc.abstractmethod
    def taken_back(self) -> str:
        """What the noise of a step cancels, in words."""

    @abc.abstractmethod
    def sensitivity(self, steps: int, min_separation: int, max_participations: int) -> float:
        """See the function `sensitivity`, which has checked the arguments."""

    @abc.abstractmethod
    def _identity(self) -> list[float]:
        """Numbers that no other strategy has."""


class ToeplitzStrategy(NoiseStrategy):
    """Strategies whose matrix C is a lower triangular Toeplitz matrix.

    Attributes:
      coefficients: c_0, ..., c_{b-1}, the first column of C up to its last band: positive, not
        increasing, and of norm 1.
      bands: b; y_t depends on the gradients of the steps t - b + 1, ..., t.
    """

    coefficients: tuple[float, ...]
    bands: int

    def noise_coefficients(self, steps: int) -> np.ndarray:
        """The first column d of C⁻¹: w_t = Σ_k d_k z_{t-k}.

        Args:
          steps: T, at least 1.

        Returns:
          [T], float64.

        >>> BandedNoise(2).noise_coefficients(3).round(4)
        array([ 1.118 , -0.559 ,  0.2795])
        """
        first, *others = self.coefficients
        taken_back = np.array(others[::-1])
        found = np.zeros(len(others) + checks.integer("steps", steps, 1))
        for t in range(steps):
            earlier = found[t : t + len(others)] @ taken_back
            found[len(others) + t] = ((t == 0) - earlier) / first
        return found[len(others) :]

    def deviations(self, steps: int) -> np.ndarray:
        """See `NoiseStrategy`."""
        return np.sqrt(np.cumsum(self.noise_coefficients(steps) ** 2))

    def sum_deviations(self, steps: int) -> np.ndarray:
        """See `NoiseStrategy`."""
        return np.sqrt(np.cumsum(np.cumsum(self.noise_coefficients(steps)) ** 2))

    @property
    def is_bounded(self) -> bool:
        """Whether the noise of a step stays bounded in a long run; see `ToeplitzNoise`."""
        following = (*self.coefficients[1:], 0.0)
        falls = [k for k, (c, n) in enumerate(zip(self.coefficients, following), 1) if c > n]
        return math.gcd(*falls) == 1

    def difference_deviation(self) -> float:
        """The standard deviation of (w_t - w_{t-1})/√2 in late steps, if that of z is 1.

        It is 1 for independent noise, and more for noise that takes earlier noise back. It is for
        strategies that are bounded (`is_bounded`).

        >>> round(BandedNoise(2).difference_deviation(), 3)
        1.581
        """
        noise = self.noise_coefficients(_SETTLED)
        return float(np.linalg.norm(np.diff(noise, prepend=0.0))) / math.sqrt(2)

    def drift_deviation(self) -> float:
        """What `sum_deviations(T)[-1]` / √T tends to for many steps: 1 / Σ_k c_k.

        A sum of many steps has the noise of steps with independent noise of this deviation.

        >>> round(BandedNoise(2).drift_deviation(), 3)
        0.745
        """
        return 1 / sum(self.coefficients)

    def memory(self, steps: int) -> int:
        """How many steps of z matter to w_t: the sum of |d_k| over earlier ones is below 1e-9.

        Args:
          steps: T, at least 1. The result is at most T.
        """
        rest = np.cumsum(np.abs(self.noise_coefficients(steps))[::-1])[::-1]
        return int(np.count_nonzero(rest >= 1e-9))

    @property
    def taken_back(self) -> str:
        """See `NoiseStrategy`."""
        return f"part of that of up to {self.bands - 1} earlier ones"

    def sensitivity(self, steps: int, min_separation: int, max_participations: int) -> float:
        """‖Σ_j C[:, j·s]‖ over j = 0, ..., k - 1.

        For coefficients that are not negative and do not increase, no other k steps that lie at
        least s apart give more (Kalinin and Lampert, Theorem 2).
        """
        column = np.array(self.coefficients)
        moved = np.zeros(steps + self.bands)
        for first in range(0, max_participations * min_separation, min_separation):
            moved[first : first + self.bands] += column
        return float(np.linalg.norm(moved[:steps]))

    def _identity(self) -> list[float]:
        return list(self.coefficients)


@dataclasses.dataclass(frozen=True)
class IndependentNoise(ToeplitzStrategy):
    """The noise of every step is independent of all others: ordinary DP-SGD.

    >>> IndependentNoise().coefficients
    (1.0,)
    """

    coefficients: tuple[float, ...] = dataclasses.field(default=(1.0,), init=False, repr=False)
    bands: int = dataclasses.field(default=1, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class BandedNoise(ToeplitzStrategy):
    """The banded square root: c_k is proportional to C(2k, k) / 4^k for k < b, and 0 beyond.

    Without the bands, C is the square root of the matrix that adds up all steps so far.

    Attributes:
      bands: b, from 2 to 1024. Small budgets need few bands, or none.

    Raises:
      TypeError, ValueError: if `bands` has the wrong type or is out of range.

    References:
      - Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private
        Model Training" (2024), arXiv:2405.13763.

    >>> [round(c, 4) for c in BandedNoise(3).coefficients]
    [0.848, 0.424, 0.318]
    """

    bands: int
    coefficients: tuple[float, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if checks.integer("bands", self.bands, 2) > MAX_BANDS:
            raise ValueError(
                f"`bands` must be at most {MAX_BANDS}, since the noise of that many steps has to "
                f"be kept. Received: bands={self.bands!r}"
            )
        ratios = [1.0, *((2 * k - 1) / (2 * k) for k in range(1, self.bands))]
        object.__setattr__(self, "coefficients", _of_norm_one(np.cumprod(ratios)))


@dataclasses.dataclass(frozen=True)
class ToeplitzNoise(ToeplitzStrategy):
    """A strategy of your own.

    Attributes:
      coefficients: c_0 ≥ c_1 ≥ ... ≥ c_{b-1} > 0, from 2 to 1024 of them, in any scale; they are
        divided by their norm. The noise of a step is bounded however many steps there are, except
        for coefficients that are equal in blocks of g > 1, where g divides b, such as (1, 1) or
        (2, 2, 1, 1): with these its variance grows in proportion to the steps.

    Why: with p(x) = Σ c_k x^k, the d_k are the coefficients of 1 / p. Where p(x) = 0, also
    c_0 = Σ_k (c_{k-1} - c_k) x^k over k = 1, ..., b, with c_b = 0. No factor is negative and they
    add up to c_0, so |x| ≥ 1, and |x| = 1 only if x^k = 1 for each k with c_{k-1} > c_k. Let g be
    the greatest common divisor of these k, one of which is b. If g = 1, that leaves x = 1, where
    p > 0: all roots lie outside of the unit circle, and d_k falls exponentially. Otherwise p(x) is
    (1 + x + ... + x^{g-1}) q(x^g) with roots of q outside of the circle, and d_k does not fall.

    Raises:
      TypeError, ValueError: if `coefficients` has the wrong type, or they increase.

    >>> ToeplitzNoise((4, 3)).coefficients
    (0.8, 0.6)
    """

    coefficients: tuple[float, ...]
    bands: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = self.coefficients
        if not isinstance(given, (tuple, list, np.ndarray)):
            raise TypeError(
                f"`coefficients` must be a sequence of numbers. Received: coefficients={given!r}"
            )
        found = [checks.number("coefficients", c, 0, strict=True) for c in given]
        if not 2 <= len(found) <= MAX_BANDS or sorted(found, reverse=True) != found:
            raise ValueError(
                f"`coefficients` must be 2 to {MAX_BANDS} positive numbers in non-increasing "
                f"order. Received: coefficients={given!r}"
            )
        object.__setattr__(self, "coefficients", _of_norm_one(np.array(found)))
        object.__setattr__(self, "bands", len(found))


@dataclasses.dataclass(frozen=True)
class TreeNoise(NoiseStrategy):
    """DP-FTRL: noise at the nodes of binary trees over the steps, with Honaker's estimate.

    The first P = `steps_per_tree` steps are the leaves of a binary tree, the next P those of
    another one, and so on. z has an entry for each node, and C a row: 1 for the steps below the
    node, and 0 for others. The noise in the sum of the first t steps of a tree is that of one node
    for each bit of t. The estimate of a node also uses the nodes below it: with u = z in a leaf and
    u = z + (u_left + u_right)/2 above it, it is u / v_k at level k, where v_k = 2 - 2⁻ᵏ, and its
    variance is 1 / v_k. w_t is the difference of the noise in two such sums.

    If each tree covers one pass over the data (P = steps in a pass), it meets every example at most
    once. One tree for the whole run (P = T) has less noise in the sums of its steps, but an example
    moves it more.

    Guarantee: every w_t is a function of the z of nodes whose last step is t or earlier, and the
    estimates are unbiased: B C = A for the matrix A that adds up steps and the decoder B. So the
    releases are a function of y = C g + z. `sensitivity` says by how much one example moves C g.

    Use it for comparison, or where memory is short: only log₂P + 2 vectors are kept. `BandedNoise`
    with as many bands as there are steps in a pass has less noise at the same ε.

    Attributes:
      steps_per_tree: P, at least 1, below 2³⁰.

    Raises:
      TypeError, ValueError: if `steps_per_tree` has the wrong type or is out of range.

    References:
      - Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling"
        (2021), arXiv:2103.00039, Section 3 and Appendix B.
      - Honaker, "Efficient Use of Differentially Private Binary Trees" (2015).

    >>> noise = TreeNoise(100)
    >>> round(sensitivity(noise, steps=500, min_separation=100) ** 2)  # 5 trees of 7 levels
    35
    """

    steps_per_tree: int
    bands: None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if checks.integer("steps_per_tree", self.steps_per_tree, 1) >= 2**30:
            raise ValueError(
                "`steps_per_tree` must be below 2**30. Received: "
                f"steps_per_tree={self.steps_per_tree!r}"
            )

    @property
    def levels(self) -> int:
        """The number of levels of a tree, leaves included; the highest ones have whole nodes."""
        return self.steps_per_tree.bit_length()

    @property
    def variances(self) -> np.ndarray:
        """[levels], v_k = 2 - 2⁻ᵏ: the variance of u at each level."""
        return 2.0 - 0.5 ** np.arange(self.levels)

    def deviations(self, steps: int) -> np.ndarray:
        """See `NoiseStrategy`.

        A step that finishes a node of level j cancels one estimate of each level below j, and adds
        the node's, which is made of these and of new noise.
        """
        v, of_level = self.variances, np.zeros(self.levels)
        for j in range(self.levels):
            share = 0.5 ** np.arange(j, -1, -1) / v[j]  # of level i in the estimate, i = 0, ..., j
            taken_back = (share[:j] - 1 / v[:j]) ** 2 @ v[:j]
            of_level[j] = math.sqrt((share**2).sum() + taken_back)
        leaf = np.arange(checks.integer("steps", steps, 1)) % self.steps_per_tree
        finished = leaf + 1 & -(leaf + 1)  # 2^level
        return of_level[np.log2(finished).astype(int)]

    def sum_deviations(self, steps: int) -> np.ndarray:
        """See `NoiseStrategy`."""
        done, leaf = np.divmod(np.arange(checks.integer("steps", steps, 1)), self.steps_per_tree)
        of_tree = self._variance_of_sums(np.array([self.steps_per_tree]))
        return np.sqrt(done * of_tree + self._variance_of_sums(leaf + 1))

    def _variance_of_sums(self, counts: np.ndarray) -> np.ndarray:
        """The variance of the noise in the sum of the first steps of a tree."""
        bits = counts[:, np.newaxis] >> np.arange(self.levels) & 1
        return bits @ (1 / self.variances)

    @property
    def taken_back(self) -> str:
        """See `NoiseStrategy`."""
        return (
            f"part of that of the earlier ones of its tree, and the noise multiplier is that of "
            f"a node of the trees, which have {self.steps_per_tree} steps each"
        )

    def sensitivity(self, steps: int, min_separation: int, max_participations: int) -> float:
        """√(Σ_h n_h·min(k, ceil(2ʰ / s))) over the levels h.

        n_h is k, or less if less fits into the whole nodes of the level: the sum over the trees of
        ceil(steps below the whole nodes / s). An example that is part of c_1, c_2, ... of the steps
        below these nodes moves them by ‖(c_1, c_2, ...)‖ at most, and Σ c_i² ≤ max c_i · Σ c_i. The
        sum is at most n_h, and 2ʰ steps in a row hold at most ceil(2ʰ / s) of the participations.
        Equality holds for k = 1; if T is a multiple of P and P ≤ s; and where s and P are powers of
        two.
        """
        trees, rest = divmod(steps, self.steps_per_tree)
        square = 0
        for level in range(self.levels):
            size = 2**level
            whole, in_last = (
                -(-(n // size * size) // min_separation) for n in (self.steps_per_tree, rest)
            )
            inside = min(max_participations, trees * whole + in_last)
            square += inside * min(max_participations, -(-size // min_separation))
        return math.sqrt(square)

    def _identity(self) -> list[float]:
        return [-1.0, float(self.steps_per_tree)]  # no coefficient is negative


def _of_norm_one(coefficients: np.ndarray) -> tuple[float, ...]:
    norm = np.linalg.norm(coefficients)
    # Dividing the coefficients of a saved configuration again might change their last bits, and the
    # state that was saved with it would be refused.
    divided = coefficients if abs(norm - 1) < _ROUNDING_OF_NORM else coefficients / norm
    return tuple(divided.tolist())


def get_strategy(value: Any) -> NoiseStrategy:
    """Returns the strategy that an argument stands for.

    Args:
      value: a `NoiseStrategy`, `None` for independent noise, or what `serialize` returned.

    Raises:
      TypeError: if it is none of these.
    """
    if value is None:
        return IndependentNoise()
    if isinstance(value, dict) and set(value) == {"bands"}:
        return BandedNoise(**value)
    if isinstance(value, dict) and set(value) == {"coefficients"}:
        return ToeplitzNoise(tuple(value["coefficients"]))
    if isinstance(value, dict) and set(value) == {"steps_per_tree"}:
        return TreeNoise(**value)
    if isinstance(value, (IndependentNoise, BandedNoise, ToeplitzNoise, TreeNoise)):
        return value
    raise TypeError(
        "`noise` must be IndependentNoise(), BandedNoise(bands), ToeplitzNoise(coefficients) or "
        f"TreeNoise(steps_per_tree). Received: noise={value!r}"
    )


def serialize(strategy: NoiseStrategy) -> dict | None:
    """Describes a strategy by plain values, for `get_strategy`."""
    if isinstance(strategy, BandedNoise):
        return {"bands": strategy.bands}
    if isinstance(strategy, TreeNoise):
        return {"steps_per_tree": strategy.steps_per_tree}
    if isinstance(strategy, ToeplitzNoise):
        return {"coefficients": list(strategy.coefficients)}
    return None


@functools.lru_cache(maxsize=256)
def prefix_error(strategy: NoiseStrategy, steps: int) -> float:
    """The noise in sums over all steps so far, for a noise multiplier of 1.

    It is √(Σ_t Var[w_0 + ... + w_t] / T), where z has variance 1: the part of the error in SGD's
    weights that the noise causes, for a constant learning rate. For independent noise it is
    √((T + 1) / 2).

    Args:
      strategy: the noise strategy.
      steps: T, at least 1.

    >>> round(prefix_error(IndependentNoise(), 7), 4), round(prefix_error(BandedNoise(7), 7), 4)
    (2.0, 1.5459)
    """
    return math.sqrt((strategy.sum_deviations(steps) ** 2).mean())


def sensitivity(
    strategy: NoiseStrategy, steps: int, min_separation: int, max_participations: int | None = None
) -> float:
    """By how much one example can change C g, if each of its gradients has norm at most 1.

    Each strategy has a method of this name with its formula. If no two participations in a strategy
    with b bands are closer than b steps, the columns are orthogonal, and the result is √k. For
    `TreeNoise` it is an upper bound; `TreeNoise.sensitivity` says when it is reached.

    Guarantee: the noise multiplier divided by this number is that of one Gaussian mechanism without
    sampling, for an example that is part of at most k steps, any two at least s steps apart,
    whatever was released before.

    Args:
      strategy: the noise strategy.
      steps: T, at least 1.
      min_separation: s, at least 1; 1 allows any two steps.
      max_participations: k; by default as many as fit, ceil(T / s).

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.

    >>> round(sensitivity(BandedNoise(4), steps=100, min_separation=25), 6)
    2.0
    """
    steps = checks.integer("steps", steps, 1)
    min_separation = checks.integer("min_separation", min_separation, 1)
    most = -(-steps // min_separation)
    if max_participations is not None:
        most = min(most, checks.integer("max_participations", max_participations, 1))
    return strategy.sensitivity(steps, min_separation, most)
