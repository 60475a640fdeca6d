"""Searches of tiny mechanisms, whose distributions are computed to the last digit.

A mechanism is a pair (P, P′) of distributions, on a data set and on its neighbour, over outcomes
that are numbered from the lowest score to the highest. Nothing here uses the library.
"""

import functools
import itertools
import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import laplace, nbinom, norm, poisson

LENGTH = 20_000


# --- laws of the number of trials: entry n is P(N = n) ---


def fixed(count):
    law = np.zeros(count + 1)
    law[count] = 1.0
    return law


def stopped_geometric(gamma, last):
    """A coin after each trial; whoever gets that far stops after trial `last`."""
    n = np.arange(1, last)
    started = gamma * (1 - gamma) ** (n - 1)
    return np.concatenate([[0.0], started, [1 - started.sum()]])


def truncation(mean, shape):
    """γ of the truncated negative binomial law with a mean."""

    def mean_of(gamma):
        if shape == 0:
            return (1 / gamma - 1) / -math.log(gamma)
        return shape * (1 / gamma - 1) / (1 - gamma**shape)

    return brentq(lambda g: mean_of(g) - mean, 1e-9, 1 - 1e-9, xtol=1e-15)


def truncated_negative_binomial(mean, shape):
    gamma = truncation(mean, shape)
    if shape > 0:
        law = nbinom.pmf(np.arange(LENGTH), shape, gamma)
        law = law / (1 - law[0])
    else:
        n = np.arange(1, LENGTH)
        first = (1 - gamma) * (shape / (gamma**-shape - 1) if shape else -1 / math.log(gamma))
        steps = (1 - gamma) * (n + shape) / (n + 1)
        law = np.concatenate([[0.0, first], first * np.cumprod(steps)[:-1]])
    law[0] = 0.0
    assert abs(law.sum() - 1) < 1e-9
    return law


def generating_function(mean, shape):
    """z ↦ E z^K of the same laws; `math.inf` is Poisson."""
    if math.isinf(shape):
        return lambda z: np.exp(mean * (z - 1))
    gamma = truncation(mean, shape)
    if shape == 0:
        return lambda z: np.log1p(-(1 - gamma) * z) / math.log(gamma)
    return lambda z: ((1 - (1 - gamma) * z) ** -shape - 1) / (gamma**-shape - 1)


def poisson_law(mean):
    return poisson.pmf(np.arange(math.ceil(mean + 20 * math.sqrt(mean) + 20)), mean)


# --- what a search releases ---


def winner(trial, law):
    """Distribution of the highest outcome of N trials; the last entry: there was none."""
    below = np.concatenate([[0.0], np.cumsum(trial)])
    below[-1] = 1.0
    numbers = np.flatnonzero(law)
    numbers = numbers[numbers > 0]
    up_to = [float(law[numbers] @ np.power(x, numbers)) for x in below]
    return np.append(np.diff(up_to), law[0])


def winner_by_generating_function(trial, function):
    """The same, by E x^N at the cumulated probabilities x."""
    below = np.concatenate([[0.0], np.cumsum(trial)])
    below[-1] = 1.0
    up_to = function(below)
    return np.append(np.diff(up_to), up_to[0])


def winner_by_enumeration(trial, law):
    """The same, over all sequences of outcomes one by one."""
    found = np.zeros(len(trial) + 1)
    for n, probability in enumerate(law):
        for outcomes in itertools.product(range(len(trial)), repeat=n):
            found[max(outcomes, default=len(trial))] += probability * math.prod(
                trial[y] for y in outcomes
            )
    return found


def everything(trial, count):
    """Distribution of the outcomes of `count` trials, all shown."""
    return functools.reduce(np.kron, [trial] * count)


def distance(first, second, epsilon):
    """The least δ with which two distributions are (ε, δ)-indistinguishable."""
    return max(
        float(np.maximum(a - math.exp(epsilon) * b, 0).sum())
        for a, b in ((first, second), (second, first))
    )


def least_epsilon(first, second, delta):
    """The least ε with which two distributions are (ε, δ)-indistinguishable."""
    low, high = 0.0, 100.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if distance(first, second, middle) > delta else (low, middle)
    return high


def divergence(first, second, order):
    """Rényi divergence of two distributions without zeros."""
    first, second = np.log(first), np.log(second)
    return float(logsumexp(order * first + (1 - order) * second)) / (order - 1)


# --- mechanisms ---


def randomized_response(epsilon):
    likely = 1 / (1 + math.exp(-epsilon))
    return np.array([1 - likely, likely]), np.array([likely, 1 - likely])


def rare_winner(epsilon, second, first):
    """Nearly all trials are worthless. The neighbour makes the best rarer, the next best likelier.

    Close to the worst for random stopping: whether the next best wins depends on how likely it is,
    and twice (once more than that) on how rare the best is.
    """
    grown = math.exp(epsilon)
    p = np.array([0.0, grown * second, first])
    q = np.array([0.0, second, grown * first])
    p[0], q[0] = 1 - p.sum(), 1 - q.sum()
    assert math.exp(-epsilon) <= p[0] / q[0] <= grown
    return p, q


def binned_gaussian(noise_multiplier, order, bins=40):
    """N(0, σ²) and N(1, σ²) in bins; `order` says how scores rank the bins, lowest first."""
    edges = np.linspace(-4, 4 + 1 / noise_multiplier, bins - 1) * noise_multiplier
    edges = np.concatenate([[-np.inf], edges, [np.inf]])
    return tuple(np.diff(norm.cdf(edges, mean, noise_multiplier))[order] for mean in (0.0, 1.0))


def binned_laplace(scale, bins=40):
    """Laplace distributions with this scale around 0 and 1, in bins."""
    edges = np.linspace(-3, 3 + 1 / scale, bins - 1) * scale
    edges = np.concatenate([[-np.inf], edges, [np.inf]])
    return tuple(np.diff(laplace.cdf(edges, mean, scale)) for mean in (0.0, 1.0))
