"""ε of repeat-and-select from the privacy profile of a trial, which PLD can compute.

The profile of a mechanism with outputs Q, or Q′ on a neighboring data set, is the smallest δ for
each ε: δ_Q(ε) = max over sets S, and over both directions, of Q(S) - e^ε Q′(S). Koskela, Redberg
and Wang (2024) bound the profile of a search by that of a trial. The following is their argument,
with its last step made exact.

**The search.** It runs K trials and shows the best output. Let f(z) = E z^K be the generating
function of K. Ties are broken at random: each output gets its own uniform number, which changes
neither a profile nor the distribution of the best output. So outputs are strictly ordered, and
F(y) = Q(outputs up to y) grows continuously from 0 to 1. The best of K outputs is at most y with
probability f(F(y)). By differentiation, the search A has a density with respect to a trial,

    A(dy) = f′(F(y)) Q(dy), and likewise A′(dy) = f′(F′(y)) Q′(dy).

f′ is increasing, with f′(1) = E K. If f′(F(y)) ≤ e^κ f′(F′(y)) for all y, then for every set S

    A(S) - e^ε A′(S) ≤ ∫_S f′(F(y)) (Q(dy) - e^(ε - κ) Q′(dy)) ≤ E K · δ_Q(ε - κ),            (1)

where the last step holds because f′ ≤ E K where the bracket is positive. (Running no trial at all
has the same probability for A and A′, and adds nothing for ε ≥ 0.)

**Truncated negative binomial K**, with η > -1, γ in (0, 1) and c = (1 - γ) / γ. Here
f(z) = ((1 - (1 - γ) z)^-η - 1) / (γ^-η - 1), for η = 0 log(1 - (1 - γ) z) / log γ, and in all cases

    f′(z) = E K · (1 + c (1 - z))^-(1 + η).

Let x = 1 - F(y), the probability of a trial above y. The profile in the other direction, applied to
outputs above y, says 1 - F′(y) ≤ e^t x + δ_Q(t) for any t ≥ 0. Hence

    f′(F(y)) / f′(F′(y)) ≤ ((1 + c δ_Q(t) + c x e^t) / (1 + c x))^(1 + η) ≤ M^(1 + η),
    M = max(1 + c δ_Q(t), e^t),                                                                (2)

since the fraction lies between (1 + c δ_Q(t)) / 1 and c x e^t / (c x). Koskela et al. use the
larger sum e^t + c δ_Q(t) in place of M. As e^t grows with t and δ_Q(t) falls, the best t makes both
equal: t* is the smallest t ≥ 0 with 1 + c δ_Q(t) ≤ e^t. It is at most log(1/γ), since δ_Q ≤ 1. With
κ = (1 + η) t* in (1),

    δ_A(ε) ≤ E K · δ_Q(ε - (1 + η) t*),  or  ε_A(δ) ≤ ε_Q(δ / E K) + (1 + η) t*.               (3)

**Poisson K** with mean μ. Here f′(z) = μ e^(μ (z - 1)), so that f′(F) / f′(F′) =
e^(μ (x′ - x)) ≤ e^(μ δ_Q(0)), and κ = μ δ_Q(0).

All of this also holds with a decreasing upper bound on δ_Q in place of δ_Q. Profiles are convex
functions of u = e^t, being maxima of the lines Q(S) - u Q′(S). So if δ_Q is known only at some t,
the chords between these points lie above it, and t* comes from the first chord that falls to
(u - 1)/c.

References:
  - Koskela, Redberg and Wang, "Privacy Profiles for Private Selection" (2024), arXiv:2402.06701.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from tf_adaptive_dp.tuning import trial_count_distributions

# The points at which a profile is evaluated. Twice as many would reduce ε by less than 0.01%.
_POINTS = 2_000


class Profile(Protocol):
    """An upper bound on the privacy profile of a trial, in both directions of adjacency."""

    def delta(self, epsilons: np.ndarray) -> np.ndarray:
        """δ at each ε ≥ 0, in ascending order of ε: decreasing, and convex in e^ε."""

    def epsilon(self, delta: float) -> float:
        """ε ≥ 0 at δ in (0, 1)."""


def selected_epsilon(trial: Profile, mean: float, shape: float, delta: float) -> float:
    """ε_A(δ) of a search, by (3) above.

    Guarantee: (ε, δ)-DP under the conditions of `search_epsilon.repeat_and_select_epsilon`, if the
    profile bounds that of a trial from above.

    Args:
      trial: its profile.
      mean: E K, at least 1.
      shape: η > -1 of the truncated negative binomial distribution; `math.inf` is Poisson.
      delta: δ, in (0, 1).

    Returns:
      ε ≥ 0.
    """
    return trial.epsilon(delta / mean) + loss_of_choice(trial, mean, shape)


def loss_of_choice(trial: Profile, mean: float, shape: float) -> float:
    """κ of (1): how much choosing the best can increase the privacy loss.

    Args:
      trial: its profile.
      mean: E K, at least 1.
      shape: η, see `selected_epsilon`.

    Returns:
      An upper bound on (1 + η) t*, or μ δ_Q(0).
    """
    if math.isinf(shape):
        return mean * float(trial.delta(np.zeros(1))[0])
    last = -trial_count_distributions.log_gamma(mean, shape)  # log(1/γ)
    if last == 0:
        return 0.0  # always one trial
    times = np.append(0.0, np.geomspace(min(1e-4, last / 2), last, _POINTS))
    grown = np.expm1(times)  # u - 1
    excess = np.expm1(last) * np.minimum(trial.delta(times), 1.0) - grown
    excess[-1] = min(excess[-1], 0.0)  # δ ≤ 1 suffices there, apart from rounding
    first = int(np.argmax(excess <= 0))
    if first == 0:
        return 0.0
    before, after = excess[first - 1 : first + 1]
    along = before / (before - after)
    return (1 + shape) * math.log1p(grown[first - 1] + along * (grown[first] - grown[first - 1]))
