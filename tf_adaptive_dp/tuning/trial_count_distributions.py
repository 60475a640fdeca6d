"""Distributions of the number of trials, as the proofs of private selection require them.

Truncated negative binomial with parameters η > -1 and γ in (0, 1] (Papernot and Steinke 2022,
Definition 1): P(K = k) = (1 - γ)^k / (γ^-η - 1) · Π_{l<k} (l + η) / (l + 1), k = 1, 2, …
η = 1 is the geometric distribution, and the limit η = 0 the logarithmic distribution,
(1 - γ)^k / (k log(1/γ)). Poisson: P(K = k) = e^-μ μ^k / k!, k = 0, 1, …

References:
  - Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy" (2022),
    arXiv:2110.03620.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator

from scipy import optimize

# Entropy of the operating system, which no seed repeats: the proofs require that nobody knows the
# number of trials.
_SECRET = random.SystemRandom()

# The largest log(1/γ), since 1/γ must be a float.
_MAX_LOG_INVERSE_GAMMA = 512.0


def hard_stop(gamma: float, delta_2: float) -> int:
    """⌈Υ⌉ = ⌈log(1/δ₂) / γ⌉: P(geometric > ⌈Υ⌉) = (1 - γ)^⌈Υ⌉ ≤ δ₂."""
    return math.ceil(-math.log(delta_2) / gamma)


def log_gamma(mean: float, shape: float) -> float:
    """log γ ≤ 0 of the truncated negative binomial distribution with a mean ≥ 1 and a shape η > -1.

    Solves η (1/γ - 1) / (1 - γ^η) = mean to the last digits; for η = 0, (1/γ - 1) / log(1/γ).

    Guarantee: the distribution with the returned γ has at least this mean, up to the rounding of
    the formula. Bounds on ε increase with the mean.

    Raises:
      ValueError: if 1/γ is too large for a float, which happens for η near -1.
    """
    if mean == 1:
        return 0.0
    if shape == 1:
        return -math.log(mean)

    def excess(t: float) -> float:
        return (math.expm1(-t) * _slope(t, shape) if t else 1.0) - mean

    low, high = -1.0, 0.0  # excess(low) ≥ 0 > excess(high)
    while excess(low) < 0:
        low, high = 2 * low, low
        if low < -_MAX_LOG_INVERSE_GAMMA:
            raise ValueError(
                "The numbers of trials would spread beyond what floats hold: choose a larger "
                f"`shape`, or fewer trials. Received: shape={shape!r}, mean {mean!r}"
            )
    precision = 4 * sys.float_info.epsilon
    found = optimize.bisect(excess, low, high, xtol=1e-300, rtol=precision, maxiter=5000)
    while excess(found) < 0:  # on the safe side
        found *= 1 + precision
        precision *= 2
    return found


def _slope(t: float, shape: float) -> float:
    """η / (1 - γ^η) > 0 for t = log γ < 0; the limit 1 / log(1/γ) for η = 0."""
    return -1 / t if shape == 0 else shape / -math.expm1(shape * t)


def log_probabilities(mean: float, shape: float) -> Iterator[tuple[int, float]]:
    """Yields (k, log P(K = k)) from the smallest k on; `shape` = inf is Poisson."""
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
    """E z^K for z in [0, 1]: the probability that K trials all have an outcome of probability z."""
    if math.isinf(shape):
        return math.exp(mean * (z - 1))
    t = log_gamma(mean, shape)
    if t == 0:
        return z
    left = math.log1p(math.expm1(t) * z)  # log(1 - (1 - γ) z)
    return left / t if shape == 0 else math.expm1(-shape * left) / math.expm1(-shape * t)


def draw(mean: float, shape: float) -> int:
    """Draws a secret number of trials, in about `mean` steps."""
    left = _SECRET.random()
    for k, log_probability in log_probabilities(mean, shape):
        probability = math.exp(log_probability)
        left -= probability
        # By rounding, the probabilities may sum to less than the uniform number.
        if left < 0 or (k > mean and probability < 1e-300):
            break
    return k


def draw_geometric(gamma: float, stop: int) -> int:
    """Draws min(geometric(γ), `stop`): a secret coin after each trial stops with probability γ."""
    k = 1
    while k < stop and _SECRET.random() >= gamma:
        k += 1
    return k
