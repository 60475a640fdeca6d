"""Lower bounds on ε from finished training runs.

The accountant bounds ε from above and trusts the code. An audit runs the real code and bounds ε
from below. If the two bounds cross, one of them is wrong. All bounds here are for (ε, δ)-DP under
add/remove adjacency.

References:
  - Steinke et al., "Privacy Auditing with One (1) Training Run" (2023), arXiv:2305.08846.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
from scipy import optimize, special, stats

from tf_adaptive_dp import checks


class OneRunReport(NamedTuple):
    """What one training run proves; see `one_run_epsilon`.

    Attributes:
      epsilon_lower_bound: lower bound on ε; 0 if nothing was proven.
      delta: the δ of the bound.
      confidence: the probability with which the bound holds.
      num_canaries: number of canaries, each included by a fair coin.
      num_guesses: number of canaries whose membership was guessed.
      num_correct: number of correct guesses.
      num_tests: number of tests that shared the error probability 1 - `confidence`.
    """

    epsilon_lower_bound: float
    delta: float
    confidence: float
    num_canaries: int
    num_guesses: int
    num_correct: int
    num_tests: int


class ManyRunReport(NamedTuple):
    """What many training runs prove; see `many_run_epsilon`.

    Attributes:
      epsilon_lower_bound: lower bound on ε; 0 if nothing was proven.
      delta: the δ of the bound.
      confidence: the probability with which the bound holds.
      num_with: number of runs with the canary that the bound uses.
      num_without: number of runs without it that the bound uses.
      true_rate: the fraction of runs of one kind that the attack guesses correctly.
      false_rate: the fraction of runs of the other kind with the same guess.
    """

    epsilon_lower_bound: float
    delta: float
    confidence: float
    num_with: int
    num_without: int
    true_rate: float
    false_rate: float


def one_run_epsilon(
    scores: Any,
    included: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    num_guesses: int | Sequence[int] | None = None,
) -> OneRunReport:
    """A lower bound on ε from one training run with m canaries (Steinke et al. 2023).

    The attack guesses that the r/2 canaries with the highest scores were included and the r/2 with
    the lowest were not. Let W be the number of successes in r tosses, each with probability
    e^ε / (1 + e^ε). Under (ε, δ)-DP,

        P[v or more guesses are right] ≤ P[W ≥ v] + 2·m·δ·max over i ≥ 1 of P[v > W ≥ v - i] / i

    The bound is the largest ε for which this is below 1 - `confidence`.

    Guarantee: if the training is (ε, δ)-DP for adding or removing one example, the bound is at most
    ε with probability `confidence`, over the noise of the training and the coins of the canaries.
    This holds for any scores computed from what was released. It requires independent fair coins,
    scores that depend on the coins only through what was released, and a number of guesses chosen
    in advance. Several columns of scores or numbers of guesses share the probability of error. A
    low bound does not prove privacy: another attack may prove more, and at a confidence of 0.95 one
    run never proves more than about log(r / 3).

    Args:
      scores: [m], higher for canaries that seem to be included; or [m, k] for k attacks at once.
      included: [m], bool: which canaries were included.
      delta: δ, in [0, 1).
      confidence: in (0, 1).
      num_guesses: r, from 1 to m; or several values, to report the best one. `None` guesses a
        quarter of the canaries.

    Returns:
      A `OneRunReport` of the best test.

    Raises:
      TypeError, ValueError: if an argument has the wrong shape or is out of range, or if a score is
        NaN.

    >>> included = np.arange(200) % 2 == 0
    >>> report = one_run_epsilon(included, included, delta=1e-5)  # an attacker who knows
    >>> round(report.epsilon_lower_bound, 2), report.num_correct
    (2.78, 50)
    """
    scores, included = _checked_scores(scores, included)
    num_canaries, num_attacks = scores.shape
    delta, confidence = _check_parameters(delta, confidence)
    numbers = _checked_guesses(num_guesses, num_canaries)
    num_tests = num_attacks * len(numbers)
    best = OneRunReport(-1.0, delta, confidence, num_canaries, 0, 0, num_tests)
    for column in scores.T:
        order = np.argsort(column, kind="stable")
        for guesses in numbers:
            lowest, highest = order[: guesses // 2], order[num_canaries - (guesses + 1) // 2 :]
            correct = int(np.sum(~included[lowest])) + int(np.sum(included[highest]))
            bound = _largest_refuted(
                functools.partial(
                    _p_value,
                    num_canaries=num_canaries,
                    guesses=guesses,
                    correct=correct,
                    delta=delta,
                ),
                (1 - confidence) / num_tests,
            )
            if bound > best.epsilon_lower_bound:
                best = best._replace(
                    epsilon_lower_bound=bound, num_guesses=guesses, num_correct=correct
                )
    return best


def many_run_epsilon(
    scores_with: Any, scores_without: Any, delta: float, *, confidence: float = 0.95
) -> ManyRunReport:
    """A lower bound on ε from independent training runs with and without one canary.

    Half of the runs select an attack: a threshold on the score, and whether scores above it count
    as evidence for the canary or scores below it as evidence against. The other half give the bound

        ε ≥ log((lower limit of the true rate - δ) / upper limit of the false rate)

    with the exact limits of Clopper and Pearson, each with error probability
    (1 - `confidence`) / 2.

    Guarantee: if the training is (ε, δ)-DP for adding or removing one example, the bound is at
    most ε with probability `confidence` over the runs. The runs must be independent and differ only
    in the canary. A low bound does not prove privacy: at a confidence of 0.95, n runs of each kind
    never prove more than about log(n / 7.4).

    Args:
      scores_with: [n], one score for each run with the canary.
      scores_without: [n'], one score for each run without it.
      delta: δ, in [0, 1).
      confidence: in (0, 1).

    Returns:
      A `ManyRunReport`.

    Raises:
      TypeError, ValueError: if there are fewer than two runs of a kind, a score is NaN, or a number
        is out of range.

    >>> report = many_run_epsilon(np.ones(1000), np.zeros(1000), delta=1e-5)
    >>> round(report.epsilon_lower_bound, 2)
    4.91
    """
    delta, confidence = _check_parameters(delta, confidence)
    runs = []
    for name, scores in (("scores_with", scores_with), ("scores_without", scores_without)):
        scores = as_numbers(name, scores)
        if scores.ndim != 1 or len(scores) < 2 or np.isnan(scores).any():
            raise ValueError(
                f"`{name}` must be two or more numbers, one for each run. Received: shape "
                f"{scores.shape}, {np.isnan(scores).sum()} of them NaN"
            )
        runs.append(scores)
    with_, without = runs
    level = (1 - confidence) / 2
    attacks = []
    # High scores are evidence for the canary, or low ones against it.
    for hits, misses in ((with_, without), (-without, -with_)):
        thresholds = np.unique(np.concatenate([hits[::2], misses[::2]]))
        bounds = _rate_bounds(hits[::2], misses[::2], thresholds, delta, level)
        best = np.argmax(bounds)
        attacks.append((bounds[best], thresholds[best], hits[1::2], misses[1::2]))
    _, threshold, hits, misses = max(attacks, key=lambda attack: attack[0])
    (bound,) = _rate_bounds(hits, misses, np.array([threshold]), delta, level)
    return ManyRunReport(
        epsilon_lower_bound=max(0.0, float(bound)),
        delta=delta,
        confidence=confidence,
        num_with=len(with_[1::2]),
        num_without=len(without[1::2]),
        true_rate=float(np.mean(hits >= threshold)),
        false_rate=float(np.mean(misses >= threshold)),
    )


def _check_parameters(delta: float, confidence: float) -> tuple[float, float]:
    delta = checks.number("delta", delta, 0)
    confidence = checks.number("confidence", confidence, 0, strict=True)
    for name, value in (("delta", delta), ("confidence", confidence)):
        if value >= 1:
            raise ValueError(f"`{name}` must be below 1. Received: {name}={value!r}")
    return delta, confidence


def _checked_scores(scores: Any, included: Any) -> tuple[np.ndarray, np.ndarray]:
    checks.not_masked("included", included)
    scores, included = as_numbers("scores", scores), np.asarray(included)
    if included.ndim != 1 or included.dtype != bool or not len(included):
        raise ValueError(
            "`included` must be one bool for each canary. Received: "
            f"shape {included.shape}, dtype {included.dtype}"
        )
    if scores.ndim not in (1, 2) or len(scores) != len(included) or not scores.size:
        raise ValueError(
            f"`scores` must have one row for each of the {len(included)} canaries. Received: "
            f"shape {scores.shape}"
        )
    if np.isnan(scores).any():
        raise ValueError(f"`scores` must be numbers. Received: {np.isnan(scores).sum()} NaN")
    return scores.reshape(len(scores), -1), included


def as_numbers(name: str, scores: Any) -> np.ndarray:
    """Converts scores to float64.

    Args:
      name: the argument that an error names.
      scores: numbers of any type; NaN stays.

    Raises:
      TypeError: if they are no numbers, or masked.
    """
    checks.not_masked(name, scores)
    try:
        return np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be numbers. Received: {name}={scores!r}") from error


def _checked_guesses(num_guesses: int | Sequence[int] | None, num_canaries: int) -> list[int]:
    if num_guesses is None:
        return [max(1, num_canaries // 4)]
    given = num_guesses if isinstance(num_guesses, (Sequence, np.ndarray)) else [num_guesses]
    numbers = [checks.integer("num_guesses", n, 1) for n in given]
    if not numbers or max(numbers) > num_canaries:
        raise ValueError(
            f"`num_guesses` must be from 1 to the number of canaries, {num_canaries}. Received: "
            f"num_guesses={num_guesses!r}"
        )
    return numbers


def _p_value(epsilon: float, num_canaries: int, guesses: int, correct: int, delta: float) -> float:
    """Upper bound on the probability of at least `correct` correct guesses under (ε, δ)-DP."""
    accuracy = special.expit(epsilon)
    tail = stats.binom.sf(correct - 1, guesses, accuracy)
    # δ may move probability to "v correct guesses" from i guesses below, at i times the cost.
    i = np.arange(1, correct + 1)
    just_below = np.cumsum(stats.binom.pmf(correct - i, guesses, accuracy))
    return float(tail + 2 * num_canaries * delta * np.max(just_below / i, initial=0.0))


def _largest_refuted(p_value: Callable[[float], float], level: float) -> float:
    """The largest ε with p_value(ε) < level, rounded down by at most 1e-6; 0 if there is none."""
    if p_value(0.0) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(high) < level:
        low, high = high, 2 * high
    found = optimize.bisect(lambda e: 1.0 if p_value(e) >= level else -1.0, low, high, xtol=5e-7)
    # Round to the safe side: this ε must be refuted.
    return found if p_value(found) < level else max(low, found - 1e-6)


def _rate_bounds(
    hits: np.ndarray, misses: np.ndarray, thresholds: np.ndarray, delta: float, level: float
) -> np.ndarray:
    """log((lower limit of P[hit ≥ t] - δ) / upper limit of P[miss ≥ t]) for each threshold t."""

    def count(scores: np.ndarray) -> np.ndarray:
        return np.asarray(len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left"))

    true, false = count(hits), count(misses)
    with np.errstate(divide="ignore"):
        # The beta distribution does not allow a parameter of 0; the limits are then 0 and 1.
        low = np.nan_to_num(stats.beta.ppf(level, true, len(hits) - true + 1), nan=0.0)
        high = np.nan_to_num(stats.beta.isf(level, false + 1, len(misses) - false), nan=1.0)
        return np.log(np.maximum(low - delta, 0.0)) - np.log(high)
