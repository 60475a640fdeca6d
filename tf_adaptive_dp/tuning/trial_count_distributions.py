"""How many trials are made: the laws that the proofs of random selection demand.

Truncated negative binomial, with parameters η > -1 and γ in (0, 1] (Papernot and Steinke 2022,
Definition 1): P(K = k) = (1 - γ)^k / (γ^-η - 1) · Π_{l<k} (l + η) / (l + 1), k = 1, 2, …; η = 1 is
the geometric law, and the limit η = 0 the logarithmic one, (1 - γ)^k / (k log(1/γ)).
Poisson: P(K = k) = e^-μ μ^k / k!, k = 0, 1, …
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

# Numbers of the operating system, which no seed repeats: who knows how many trials there were knows
# more than the proofs allow.
_SECRET = random.SystemRandom()

# The largest log(1/γ): 1/γ must be a float.
_MOST_SPREAD = 512.0


def hard_stop(gamma: float, delta_2: float) -> int:
    """⌈Υ⌉ = ⌈log(1/δ₂) / γ⌉: P(geometric > ⌈Υ⌉) = (1 - γ)^⌈Υ⌉ ≤ δ₂."""
    return math.ceil(-math.log(delta_2) / gamma)


def log_gamma(mean: float, shape: float) -> float:
    """log γ ≤ 0 of the truncated negative binomial law with a mean ≥ 1 and a shape η > -1.

    Solves η (1/γ - 1) / (1 - γ^η) = mean to the last digits; with η = 0 (1/γ - 1) / log(1/γ).

    Raises:
      ValueError: if a law with that mean would be spread beyond what floats hold, near η = -1.
    """
    if mean == 1:
        return 0.0
    if shape == 1:
        return -math.log(mean)

    def mean_at(t: float) -> float:
        return math.expm1(-t) * _slope(t, shape)

    low, high = -1.0, 0.0  # mean_at(low) ≥ mean > mean_at(high)
    while mean_at(low) < mean:
        low, high = 2 * low, low
        if low < -_MOST_SPREAD:
            raise ValueError(
                "Numbers of trials would be spread beyond what floats hold: choose a larger "
                f"`shape`, or fewer trials. Received: shape={shape!r}, mean {mean!r}"
            )
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if mean_at(middle) >= mean else (low, middle)
    return low


def _slope(t: float, shape: float) -> float:
    """η / (1 - γ^η) > 0 with t = log γ < 0, for η = 0 its limit 1 / log(1/γ)."""
    return -1 / t if shape == 0 else shape / -math.expm1(shape * t)


def log_probabilities(mean: float, shape: float) -> Iterator[tuple[int, float]]:
    """(k, log P(K = k)), from the smallest k on; `shape` = inf is Poisson."""
    if math.isinf(shape):
        k, value = 0, -mean
        while True:
            yield k, value
            k += 1
            value += math.log(mean / k)
    t = log_gamma(mean, shape)
    if t == 0:
        yield 1, 0.0
        return
    log_failure = math.log(-math.expm1(t))  # log(1 - γ)
    k, value = 1, log_failure + shape * t + math.log(_slope(t, shape))
    while True:
        yield k, value
        value += log_failure + math.log((k + shape) / (k + 1))
        k += 1


def generating_function(mean: float, shape: float, z: float) -> float:
    """E z^K for z in [0, 1], the probability that all of K trials are of a kind that has z."""
    if math.isinf(shape):
        return math.exp(mean * (z - 1))
    t = log_gamma(mean, shape)
    if t == 0:
        return z
    left = math.log1p(math.expm1(t) * z)  # log(1 - (1 - γ) z)
    return left / t if shape == 0 else math.expm1(-shape * left) / math.expm1(-shape * t)


def draw(mean: float, shape: float) -> int:
    """A secret number with that law. It takes about `mean` steps."""
    left = _SECRET.random()
    for k, log_probability in log_probabilities(mean, shape):
        probability = math.exp(log_probability)
        left -= probability
        # Far in the tail the sum of what was subtracted may fall short of 1 by its rounding.
        if left < 0 or (k > mean and probability < 1e-300):
            break
    return k


def draw_geometric(gamma: float, stop: int) -> int:
    """A secret coin is thrown after each trial and ends with probability γ; `stop` is the last."""
    k = 1
    while k < stop and _SECRET.random() >= gamma:
        k += 1
    return k
