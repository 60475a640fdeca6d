"""How the noise of one step depends on that of earlier steps: strategies, and what they cost.

The noise of step t is w_t with C w = z, where z is independent Gaussian noise and C a lower
triangular Toeplitz matrix with the first column c_0, c_1, ..., the *strategy matrix*. Since c_0 > 0
and the others are not negative, w_t takes back a part of what earlier steps added, so a sum over
many steps has less noise than that of independent steps.

Privacy: from the released g_t + w_t one can compute y = C g + z and vice versa, so the guarantee is
that of the Gaussian mechanism on C g. Its rows can be released one after the other, and g_t may
depend on what was released before, since C is lower triangular. One example that is part of step t
alone moves y by at most ‖c‖ times the clipping bound. All strategies here have ‖c‖ = 1, so a noise
multiplier means the same for each of them: the noise of one participation.

What several participations of an example cost depends on how far apart they are; see `sensitivity`
and `sampling.CyclicPoissonSampling`.

References:
  - Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear Operators on
    Adaptive Streams" (2022), arXiv:2202.08312, for the adaptive mechanism.
  - Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), arXiv:2306.08153.
  - Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model
    Training" (2024), arXiv:2405.13763.
"""

from __future__ import annotations

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
    "prefix_error",
    "sensitivity",
]

MAX_BANDS = 1024


class NoiseStrategy:
    """The base class of noise strategies.

    Attributes:
      coefficients: c_0, ..., c_{b-1}, the first column of C up to its last band: positive, not
        increasing, and of norm 1.
      bands: b; y_t depends on the gradients of the steps t - b + 1, ..., t.
    """

    coefficients: tuple[float, ...]
    bands: int

    @property
    def is_independent(self) -> bool:
        """Whether the noise of different steps is independent."""
        return self.bands == 1

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

    def memory(self, steps: int) -> int:
        """How many earlier steps matter to the noise: the sum of |d_k| beyond is below 1e-9.

        Args:
          steps: T, at least 1; also the result if all of them matter.
        """
        rest = np.cumsum(np.abs(self.noise_coefficients(steps))[::-1])[::-1]
        return int(np.count_nonzero(rest >= 1e-9))

    def digest(self) -> int:
        """A number that other coefficients do not have, by which saved states are told apart."""
        content = np.array(self.coefficients).round(9).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")


@dataclasses.dataclass(frozen=True)
class IndependentNoise(NoiseStrategy):
    """The noise of every step is independent of all others: ordinary DP-SGD.

    >>> IndependentNoise().coefficients
    (1.0,)
    """

    coefficients: tuple[float, ...] = dataclasses.field(default=(1.0,), init=False, repr=False)
    bands: int = dataclasses.field(default=1, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class BandedNoise(NoiseStrategy):
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
                f"`bands` must be at most {MAX_BANDS}, since the noise of as many steps is kept. "
                f"Received: bands={self.bands!r}"
            )
        ratios = [1.0, *((2 * k - 1) / (2 * k) for k in range(1, self.bands))]
        object.__setattr__(self, "coefficients", _of_norm_one(np.cumprod(ratios)))


@dataclasses.dataclass(frozen=True)
class ToeplitzNoise(NoiseStrategy):
    """A strategy of your own.

    Attributes:
      coefficients: c_0 ≥ c_1 ≥ ... ≥ c_{b-1} > 0, from 2 to 1024 of them, in any scale; they are
        divided by their norm. Then no noise grows without bound: the roots of Σ c_k x^k lie on or
        outside of the unit circle.

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
                f"`coefficients` must be 2 to {MAX_BANDS} positive numbers that do not increase. "
                f"Received: coefficients={given!r}"
            )
        object.__setattr__(self, "coefficients", _of_norm_one(np.array(found)))
        object.__setattr__(self, "bands", len(found))


def _of_norm_one(coefficients: np.ndarray) -> tuple[float, ...]:
    return tuple((coefficients / np.linalg.norm(coefficients)).tolist())


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
    if isinstance(value, (IndependentNoise, BandedNoise, ToeplitzNoise)):
        return value
    raise TypeError(
        "`noise` must be IndependentNoise(), BandedNoise(bands) or ToeplitzNoise(coefficients). "
        f"Received: noise={value!r}"
    )


def serialize(strategy: NoiseStrategy) -> dict | None:
    """Describes a strategy by plain values, for `get_strategy`."""
    if isinstance(strategy, BandedNoise):
        return {"bands": strategy.bands}
    return None if strategy.is_independent else {"coefficients": list(strategy.coefficients)}


@functools.lru_cache(maxsize=256)
def prefix_error(strategy: NoiseStrategy, steps: int) -> float:
    """The noise in sums over all steps so far, of noise multiplier 1.

    It is √(Σ_t Var[w_0 + ... + w_t] / T), where z has variance 1: the error of the weights of SGD
    with a constant learning rate, as far as the noise causes it. For independent noise it is
    √((T + 1) / 2).

    Args:
      strategy: the noise strategy.
      steps: T, at least 1.

    >>> round(prefix_error(IndependentNoise(), 7), 4), round(prefix_error(BandedNoise(7), 7), 4)
    (2.0, 1.5459)
    """
    sums = np.cumsum(strategy.noise_coefficients(steps))
    return math.sqrt(np.cumsum(sums**2).mean())


def sensitivity(
    strategy: NoiseStrategy, steps: int, min_separation: int, max_participations: int | None = None
) -> float:
    """By how much one example can change C g, if each of its gradients has norm at most 1.

    It is ‖Σ_j C[:, j·s]‖ over j = 0, ..., k - 1: for coefficients that are not negative and do not
    increase, no other k steps that lie at least s apart give more (Kalinin and Lampert, Theorem 2).
    If no two participations fall within b steps, the columns are orthogonal, and it is √k.

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
    checks.integer("steps", steps, 1)
    checks.integer("min_separation", min_separation, 1)
    most = -(-steps // min_separation)
    if max_participations is not None:
        most = min(most, checks.integer("max_participations", max_participations, 1))
    column = np.array(strategy.coefficients)
    moved = np.zeros(steps + strategy.bands)
    for first in range(0, most * min_separation, min_separation):
        moved[first : first + strategy.bands] += column
    return float(np.linalg.norm(moved[:steps]))
