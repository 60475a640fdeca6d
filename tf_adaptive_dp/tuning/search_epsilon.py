"""ε of a search: the cost of training several models and choosing one.

A trial is one training run with its score, given as a `dp_accounting.DpEvent` that composes all its
releases. Every ε is for adding or removing one example (per example, not per person). It holds as
firmly as the ε of the event: it is a proven bound under Poisson sampling, and the customary
approximation for shuffled batches.

References:
  - Liu and Talwar, "Private Selection from Private Candidates" (2019), arXiv:1811.07971.
  - Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential Privacy" (2022),
    arXiv:2110.03620.
  - Koskela, Redberg and Wang, "Privacy Profiles for Private Selection" (2024), arXiv:2402.06701.
  - Mohapatra et al., "The Role of Adaptive Optimizers for Honest Private Hyperparameter
    Selection" (2021), arXiv:2111.04906.
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from scipy import special

from tf_adaptive_dp import checks
from tf_adaptive_dp.tuning import conversion, profiles, trial_count_distributions
from tf_adaptive_dp.tuning.conversion import DEFAULT_ACCOUNTING, Accounting


def composition_epsilon(
    trial: dp_accounting.DpEvent,
    num_trials: int,
    delta: float,
    *,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> float:
    """ε of a fixed number of trials, all of which are released.

    Composes the events of all trials. With `Accounting(conversion="classical")` this is "MA" of
    Mohapatra et al. 2021.

    Guarantee: (ε, δ)-DP for adding or removing one example, for the models and scores of all trials
    together and anything computed from them, including the choice. Trials may differ, depend on
    the results of earlier ones and be chosen by hand, provided that none costs more than `trial`
    and that their number was fixed in advance. A trial that crashed counts.

    Args:
      trial: one trial, or the most expensive one.
      num_trials: K, at least 1.
      delta: δ, in (0, 1).
      accounting: how ε is computed, see `Accounting`.

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
      dp_accounting.UnsupportedEventError: for an event that RDP does not support.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.search_epsilon import composition_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(composition_epsilon(trial, 4, delta=1e-5), 3)
      0.795
    """
    conversion.checked_event("trial", trial)
    checks.instance("accounting", accounting, Accounting)
    num_trials = checks.integer("num_trials", num_trials, 1)
    delta = checks.probability("delta", delta)
    composed = dp_accounting.SelfComposedDpEvent(trial, int(num_trials))
    return conversion.epsilon_of(composed, delta, accounting)


def liu_talwar_epsilon(
    trial: dp_accounting.DpEvent,
    gamma: float,
    delta: float,
    *,
    delta_2: float | None = 1e-20,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> float:
    """ε of random stopping: after each trial a coin ends the search with probability γ.

    Theorem 3.4 of Liu and Talwar 2019: if a trial is (ε₁, δ₁)-DP, the search is (ε, δ)-DP with
    ε = 3 ε₁ + 3 √(2 δ₁) and δ = √(2 δ₁) ⌈Υ⌉ + δ₂. The search runs at most ⌈Υ⌉ = ⌈log(1/δ₂) / γ⌉
    trials, the hard stop. Solved for δ₁, this is `liu_talwar_delta_1`; ε₁ is then ε₁(δ₁).

    Guarantee: (ε, δ)-DP for adding or removing one example, for the trial with the highest score
    and its score, under these conditions:
    - Nothing else about the search is shown: neither the other trials nor their number.
    - The trials are independent draws from one distribution: each draws its hyperparameters from
      the same distribution, with replacement, regardless of earlier results.
    - Each trial is (ε₁, δ₁)-DP together with its score: `trial` is the most expensive one of the
      search space, composed with its score.
    - The number of trials is min(geometric(γ), ⌈Υ⌉). It is drawn once, with secret coins
      (`LiuTalwar.draw_num_trials`), and no trial is repeated.

    Args:
      trial: one trial, or the most expensive one of the search space.
      gamma: γ in (0, 1]. The search runs 1 / γ trials on average, apart from the hard stop.
      delta: δ, in (0, 1) and above `delta_2`.
      delta_2: δ₂, in (0, δ). `None` selects `best_delta_2(gamma, delta)`.
      accounting: how ε₁ is computed, see `Accounting`. PLD helps only for δ₁ of at least 1e-9; δ₁
        is nearly always smaller.

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
      dp_accounting.UnsupportedEventError: for an event that RDP does not support.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.search_epsilon import liu_talwar_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(liu_talwar_epsilon(trial, gamma=0.1, delta=1e-5), 3)
      2.362
      >>> round(liu_talwar_epsilon(trial, gamma=0.1, delta=1e-5, delta_2=None), 3)
      2.278
    """
    conversion.checked_event("trial", trial)
    checks.instance("accounting", accounting, Accounting)
    delta_1 = liu_talwar_delta_1(gamma, delta, delta_2)
    single = conversion.epsilon_of(trial, delta_1, accounting)
    return 3 * single + 3 * math.sqrt(2 * delta_1)


def liu_talwar_delta_1(gamma: float, delta: float, delta_2: float | None = 1e-20) -> float:
    """δ₁ of a single trial in random stopping: ((δ - δ₂) / ⌈log(1/δ₂) / γ⌉)² / 2.

    Args:
      gamma: γ, in (0, 1].
      delta: δ, in (0, 1).
      delta_2: δ₂, in (0, δ); `None` for `best_delta_2(gamma, delta)`.

    Returns:
      δ₁ ≥ 0; 0 stands for a δ₁ too small for a float.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> from tf_adaptive_dp.tuning.search_epsilon import liu_talwar_delta_1
      >>> print(f"{liu_talwar_delta_1(1 / 40, 1e-6):.3g}")
      1.47e-19
    """
    gamma = checks.probability("gamma", gamma, or_one=True)
    delta = checks.probability("delta", delta)
    if delta_2 is None:
        delta_2 = best_delta_2(gamma, delta)
    delta_2 = checks.probability("delta_2", delta_2)
    if not delta_2 < delta:
        raise ValueError(
            "`delta_2` must be below `delta`, since it is a part of it. "
            f"Received: delta_2={delta_2!r}, delta={delta!r}"
        )
    return ((delta - delta_2) / trial_count_distributions.hard_stop(gamma, delta_2)) ** 2 / 2


def best_delta_2(gamma: float, delta: float) -> float:
    """The δ₂ for the hard stop of `liu_talwar_epsilon` that leaves the most for δ₁.

    Maximizing δ₁, see `liu_talwar_delta_1`, minimizes ε up to the term 3 √(2 δ₁), which is below
    3 δ.

    Args:
      gamma: γ, in (0, 1].
      delta: δ, in (0, 1).

    Returns:
      δ₂, in (0, δ).

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> from tf_adaptive_dp.tuning.search_epsilon import best_delta_2
      >>> print(f"{best_delta_2(0.1, 1e-5):.3g}")
      6.81e-07
    """
    gamma = checks.probability("gamma", gamma, or_one=True)
    delta = checks.probability("delta", delta)
    # Without rounding up, the derivative is zero where δ₂ (1 + log(1/δ₂)) = δ, that is, where
    # w e^w = -δ/e for w = log(δ₂) - 1, on the branch below -1.
    best = math.exp(1 + float(special.lambertw(-delta / math.e, -1).real))
    stop = trial_count_distributions.hard_stop(gamma, best)
    # The smallest δ₂ with this hard stop, and with one trial less. The factor absorbs rounding.
    candidates = [math.exp(-gamma * n) * (1 + 1e-9) for n in (stop, stop - 1)]
    fitting = [delta_2 for delta_2 in (*candidates, best) if 0 < delta_2 < delta]
    return max(
        fitting,
        key=lambda delta_2: (delta - delta_2) / trial_count_distributions.hard_stop(gamma, delta_2),
    )


def repeat_and_select_epsilon(
    trial: dp_accounting.DpEvent,
    mean_trials: float,
    delta: float,
    *,
    shape: float = 1.0,
    accounting: Accounting = DEFAULT_ACCOUNTING,
) -> float:
    """ε of a random number of trials when only the best one is shown.

    With RDP this is the bound of Papernot and Steinke 2022. Let r(α) be the Rényi divergence of a
    trial and K the number of trials. The divergence of order α of the search is
    - for truncated negative binomial K with `shape` η (Theorem 2): r(α) + log(E K) / (α - 1) +
      (1 + η) min over β of (1 - 1/β) r(β) + log(1/γ) / β; η = 1 is the geometric distribution with
      γ = 1 / E K, and η = 0 the logarithmic distribution;
    - for Poisson K (Theorem 6): r(α) + log(E K) / (α - 1) + E K · δ̂, where a trial is
      (log(1 + 1 / (α - 1)), δ̂)-DP.
    `dp_accounting.dp_event.RepeatAndSelectDpEvent` stands for the same bounds.

    With PLD, let δ_Q(ε) be the privacy profile of a trial. Then δ = E K · δ_Q(ε - (1 + η) t*),
    where t* is the smallest t ≥ 0 with 1 + (1/γ - 1) δ_Q(t) ≤ e^t. For Poisson K,
    δ = E K · δ_Q(ε - E K · δ_Q(0)). The module `profiles` proves this, following Koskela, Redberg
    and Wang 2024. The result is the smaller of this ε and that of RDP.

    Guarantee: (ε, δ)-DP for adding or removing one example, for the trial with the highest score
    and its score (for nothing, if there was no trial), under the conditions of
    `liu_talwar_epsilon`: only the winner is shown, not K; the trials are independent draws from one
    distribution, and each costs at most `trial`, which includes its score; K is drawn once, in
    secret, by `RepeatAndSelect.draw_num_trials`. There is no hard stop: all K trials run.

    Args:
      trial: one trial, or the most expensive one of the search space.
      mean_trials: E K, at least 1. If `shape` is finite, this is the mean of the truncated
        distribution, which is never 0.
      delta: δ, in (0, 1).
      shape: η > -1. A small η spreads K widely and gives a smaller ε. `math.inf` is Poisson, which
        may draw 0.
      accounting: how ε is computed, see `Accounting`. For an event that PLD does not support, the
        result is the ε of RDP, with a warning.

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument has the wrong type or is out of range.
      dp_accounting.UnsupportedEventError: for an event that RDP does not support.

    Example:
      >>> import dp_accounting, math
      >>> from tf_adaptive_dp.tuning.search_epsilon import repeat_and_select_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5), 3)
      0.849
      >>> pld = Accounting("pld")
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5, accounting=pld), 3)
      0.577
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5, shape=math.inf), 3)
      0.898
    """
    conversion.checked_event("trial", trial)
    checks.instance("accounting", accounting, Accounting)
    mean_trials = checks.number("mean_trials", mean_trials, 1)
    delta = checks.probability("delta", delta)
    check_shape(shape)
    orders = accounting.renyi_orders
    divergences = conversion.renyi_divergences(trial, orders)
    if not np.any(divergences):
        return 0.0
    selected = selected_divergences(divergences, orders, mean_trials, shape)
    bound = conversion.epsilon_from(selected, delta, accounting)
    if not accounting.uses_pld:
        return bound
    profile = conversion.profile(trial, divergences, delta, accounting)
    if profile is None:
        return bound
    return min(bound, profiles.selected_epsilon(profile, mean_trials, shape, delta))


# Beyond it `trial_count_distributions.log_gamma` is too coarse.
_LARGEST_SHAPE = 1e15


def check_shape(shape: float) -> float:
    """Returns `shape` if it is above -1 or `math.inf`, or raises."""
    if shape == math.inf:
        return math.inf
    try:
        shape = checks.number("shape", shape, -1, strict=True)
    except ValueError as error:
        raise ValueError(
            "`shape` must be greater than -1: 0 is the logarithmic distribution, 1 the geometric, "
            f"math.inf Poisson. Received: shape={shape!r}"
        ) from error
    if shape > _LARGEST_SHAPE:
        raise ValueError(
            f"`shape` must be at most {_LARGEST_SHAPE:g}, above which floats do not tell its "
            "distribution from Poisson's closely enough: pass math.inf. Received: "
            f"shape={shape!r}"
        )
    return shape


def selected_divergences(
    divergences: np.ndarray, orders: tuple[float, ...], mean: float, shape: float
) -> np.ndarray:
    """Rényi divergences of the search from those of a trial; see `repeat_and_select_epsilon`.

    `RdpAccountant().compose(RepeatAndSelectDpEvent(…))` would take divergences that are NaN, or
    negative by rounding, at face value, and so understate ε.
    """
    alpha = np.array(orders)
    grown = divergences + math.log(mean) / (alpha - 1)
    if math.isinf(shape):
        leaks = [
            conversion.delta_from(divergences, orders, math.log1p(1 / (a - 1))) for a in orders
        ]
        return grown + mean * np.array(leaks)
    shifted = (1 - 1 / alpha) * divergences
    chosen = float(np.min(shifted - trial_count_distributions.log_gamma(mean, shape) / alpha))
    # Divergences increase with the order, so each bounds all those of lower orders.
    return np.minimum.accumulate((grown + (1 + shape) * chosen)[::-1])[::-1]
