"""ε of a search: what it costs to train several models and to choose one.

A trial is one training run with its score, as a `dp_accounting.DpEvent`: its own releases composed.
All ε are for adding or removing one example (the unit is one example, not one person), and as good
as the event is: under Poisson sampling proven, for shuffled batches the customary approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import dp_accounting
import numpy as np

from tf_adaptive_dp import checks
from tf_adaptive_dp.accounting.composition import check_probability
from tf_adaptive_dp.tuning import conversion as convert
from tf_adaptive_dp.tuning import profiles, trial_count_distributions


def composition_epsilon(
    trial: dp_accounting.DpEvent,
    num_trials: int,
    delta: float,
    *,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """ε of `num_trials` trials that are all released.

    The events of all trials composed; the paper's "MA" with `conversion="classical"`.

    Guarantee: (ε, δ)-DP for adding or removing one example, for all models and scores of all trials
    together and whatever is computed from them, the choice included. Trials may differ, depend on
    each other's results and be chosen by hand, if none costs more than `trial` and their number was
    fixed before. A trial that crashed counts.

    Args:
      trial: one trial, or the costliest of them.
      num_trials: K, at least 1.
      delta: δ, in (0, 1).
      accountant: `"rdp"`, or `"pld"`, tighter and slower (RDP's ε where PLD would take minutes).
      conversion: from RDP to ε: `"improved"` (dp_accounting's) or `"classical"`,
        ε = min over α of r(α) + log(1/δ) / (α - 1).
      orders: Rényi orders, above 1.01; `None` for dp_accounting's and more from 64
        to 512, or 2, 3, …, 200 if "classical".

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above.
      dp_accounting.UnsupportedEventError: for events that RDP lacks.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.search_epsilon import composition_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(composition_epsilon(trial, 4, delta=1e-5), 3)
      0.795
    """
    convert.checked_event("trial", trial)
    checks.integer("num_trials", num_trials, 1)
    check_probability("delta", delta)
    return convert.epsilon_of(
        dp_accounting.SelfComposedDpEvent(trial, int(num_trials)),
        delta,
        accountant=accountant,
        conversion=conversion,
        orders=orders,
    )


def liu_talwar_epsilon(
    trial: dp_accounting.DpEvent,
    gamma: float,
    delta: float,
    *,
    delta_2: float | None = 1e-20,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """ε of random stopping: after each trial a coin ends the search with probability γ.

    Liu and Talwar 2019, Theorem 3.4: if a trial is (ε₁, δ₁)-DP, then the search is (ε, δ)-DP with
    ε = 3 ε₁ + 3 √(2 δ₁) and δ = √(2 δ₁) ⌈Υ⌉ + δ₂, where ⌈Υ⌉ = ⌈log(1/δ₂) / γ⌉ trials are the most
    that are made. Here δ and δ₂ are given, hence δ₁ = ((δ - δ₂) / ⌈Υ⌉)² / 2 and ε₁ = ε₁(δ₁).

    Guarantee: (ε, δ)-DP for adding or removing one example, for the trial with the highest score
    and its score, if
    - nothing else of the search is shown: not the losers, nor how many trials there were;
    - trials are independent draws from one distribution: each draws its hyperparameters anew from
      the same law, with replacement, whatever came out before;
    - each is (ε₁, δ₁)-DP with its score: `trial` is the costliest of the space, score composed;
    - the number of trials is min(geometric(γ), ⌈Υ⌉), drawn with secret coins
      (`LiuTalwar.draw_num_trials`), never again, and no trial is repeated.

    Args:
      trial: one trial, or the costliest in the space.
      gamma: γ in (0, 1]: 1 / γ trials are made on average, up to the hard stop.
      delta: δ, in (0, 1) and above `delta_2`.
      delta_2: δ₂, in (0, δ). `None` for `best_delta_2(gamma, delta)`.
      accountant: `"rdp"` or `"pld"`, for the single trial. PLD's arithmetic does not reach a δ₁
        below 1e-9; that is nearly always so, and then the ε is RDP's.
      conversion: see `composition_epsilon`.
      orders: see `composition_epsilon`.

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above.
      dp_accounting.UnsupportedEventError: for events that RDP lacks.

    Example:
      >>> import dp_accounting
      >>> from tf_adaptive_dp.tuning.search_epsilon import liu_talwar_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(liu_talwar_epsilon(trial, gamma=0.1, delta=1e-5), 3)
      2.362
      >>> round(liu_talwar_epsilon(trial, gamma=0.1, delta=1e-5, delta_2=None), 3)
      2.278
    """
    convert.checked_event("trial", trial)
    delta_1 = liu_talwar_delta_1(gamma, delta, delta_2)
    single = convert.epsilon_of(
        trial, delta_1, accountant=accountant, conversion=conversion, orders=orders
    )
    return 3 * single + 3 * math.sqrt(2 * delta_1)


def liu_talwar_delta_1(gamma: float, delta: float, delta_2: float | None = 1e-20) -> float:
    """δ₁ of a single trial, for δ of random stopping: ((δ - δ₂) / ⌈log(1/δ₂) / γ⌉)² / 2.

    Args:
      gamma: γ, in (0, 1].
      delta: δ, in (0, 1).
      delta_2: δ₂, in (0, δ); `None` for `best_delta_2(gamma, delta)`.

    Returns:
      δ₁ ≥ 0; 0 stands for one that no float can hold.

    Raises:
      ValueError: if an argument is not of the range above.

    Example:
      >>> from tf_adaptive_dp.tuning.search_epsilon import liu_talwar_delta_1
      >>> print(f"{liu_talwar_delta_1(1 / 40, 1e-6):.3g}")
      1.47e-19
    """
    check_probability("gamma", gamma, or_one=True)
    check_probability("delta", delta)
    if delta_2 is None:
        delta_2 = best_delta_2(gamma, delta)
    check_probability("delta_2", delta_2)
    if not delta_2 < delta:
        raise ValueError(
            "`delta_2` must be below `delta`, of which it is a part. "
            f"Received: delta_2={delta_2!r}, delta={delta!r}"
        )
    return ((delta - delta_2) / trial_count_distributions.hard_stop(gamma, delta_2)) ** 2 / 2


def best_delta_2(gamma: float, delta: float) -> float:
    """The part δ₂ of δ, for the hard stop of `liu_talwar_epsilon`, that leaves the most for δ₁.

    Maximises δ₁ = ((δ - δ₂) / ⌈log(1/δ₂) / γ⌉)² / 2. So it minimises ε but for the term 3 √(2 δ₁),
    which is below 3 δ.

    Args:
      gamma: γ, in (0, 1].
      delta: δ, in (0, 1).

    Returns:
      δ₂, in (0, δ).

    Raises:
      ValueError: if an argument is not of the range above.

    Example:
      >>> from tf_adaptive_dp.tuning.search_epsilon import best_delta_2
      >>> print(f"{best_delta_2(0.1, 1e-5):.3g}")
      6.81e-07
    """
    check_probability("gamma", gamma, or_one=True)
    check_probability("delta", delta)
    # Without rounding up, the derivative is zero where δ₂ (1 + log(1/δ₂)) = δ.
    low, high = 0.0, delta
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if middle * (1 - math.log(middle)) < delta else (low, middle)
    stop = trial_count_distributions.hard_stop(gamma, high)
    # The smallest δ₂ with that hard stop, and with one trial less; a hair more against rounding.
    candidates = [math.exp(-gamma * n) * (1 + 1e-9) for n in (stop, stop - 1)]
    fitting = [delta_2 for delta_2 in candidates if 0 < delta_2 < delta]
    return max(
        [*fitting, high],
        key=lambda delta_2: (delta - delta_2) / trial_count_distributions.hard_stop(gamma, delta_2),
    )


def repeat_and_select_epsilon(
    trial: dp_accounting.DpEvent,
    mean_trials: float,
    delta: float,
    *,
    shape: float = 1.0,
    accountant: str = "rdp",
    conversion: str = "improved",
    orders: Sequence[float] | None = None,
) -> float:
    """ε of a random number of trials of which the best is shown.

    By RDP: Papernot and Steinke 2022. With r(α) the Rényi divergence of a trial and K the number of
    trials, the divergence of order α of the search is
    - truncated negative binomial K, `shape` η (Theorem 2): r(α) + log(E K) / (α - 1) +
      (1 + η) min over β of (1 - 1/β) r(β) + log(1/γ) / β; η = 1 is the geometric law, γ = 1 / E K,
      η = 0 the logarithmic one;
    - Poisson K (Theorem 6): r(α) + log(E K) / (α - 1) + E K · δ̂, where a trial is
      (log(1 + 1 / (α - 1)), δ̂)-DP.
    These are what `dp_accounting.dp_event.RepeatAndSelectDpEvent` stands for.

    By PLD: with δ_Q(ε) the privacy profile of a trial, δ = E K · δ_Q(ε - (1 + η) t*), where t* is
    the least t ≥ 0 with 1 + (1/γ - 1) δ_Q(t) ≤ e^t; for Poisson K, δ = E K · δ_Q(ε - E K · δ_Q(0)).
    `profiles` has the proof, which follows Koskela, Redberg and Wang 2024. The smaller ε of this
    and of RDP's counts.

    Guarantee: (ε, δ)-DP for adding or removing one example, for the trial with the highest score
    and its score (nothing, if there was no trial), under the conditions of `liu_talwar_epsilon`:
    the winner alone is shown, not K; trials are independent draws from one distribution, and each
    costs at most `trial`, its score composed; K is drawn by `RepeatAndSelect.draw_num_trials`, in
    secret, once and for all. There is no hard stop: all K trials are made.

    Args:
      trial: one trial, or the costliest in the space.
      mean_trials: E K, at least 1; of the truncated law, which is never 0, if `shape` is finite.
      delta: δ, in (0, 1).
      shape: η > -1. Small: spread widely, smaller ε; `math.inf`: Poisson, which may be 0.
      accountant: `"rdp"`, or `"pld"`, tighter and slower. PLD is used for trials and δ / E K as
        `accounting.epsilon` says; for an event that it lacks there is RDP's ε with a warning.
      conversion: see `composition_epsilon`.
      orders: see `composition_epsilon`.

    Returns:
      ε ≥ 0, `math.inf` if a trial releases something without noise.

    Raises:
      TypeError, ValueError: if an argument is not of the kind above.
      dp_accounting.UnsupportedEventError: for events that RDP lacks.

    Example:
      >>> import dp_accounting, math
      >>> from tf_adaptive_dp.tuning.search_epsilon import repeat_and_select_epsilon
      >>> trial = dp_accounting.GaussianDpEvent(noise_multiplier=10.0)
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5), 3)
      0.849
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5, accountant="pld"), 3)
      0.577
      >>> round(repeat_and_select_epsilon(trial, 10, delta=1e-5, shape=math.inf), 3)
      0.898
    """
    convert.checked_event("trial", trial)
    checks.number("mean_trials", mean_trials, 1)
    check_probability("delta", delta)
    check_shape(shape)
    checks.choice("accountant", accountant, convert.ACCOUNTANTS)
    checked = convert.checked_orders(orders, conversion)
    divergences = convert.renyi_divergences(trial, checked)
    if not np.any(divergences):
        return 0.0
    selected = selected_divergences(divergences, checked, mean_trials, shape)
    bound = convert.epsilon_from(selected, checked, delta, conversion)
    if accountant == "rdp":
        return bound
    profile = convert.profile(trial, divergences, checked, delta, conversion)
    if profile is None:
        return bound
    return min(bound, profiles.selected_epsilon(profile, mean_trials, shape, delta))


def check_shape(shape: float) -> float:
    """Returns `shape` if it is above -1 or `math.inf`, or raises."""
    if shape == math.inf:
        return math.inf
    try:
        return checks.number("shape", shape, -1, strict=True)
    except ValueError as error:
        raise ValueError(
            "`shape` must be greater than -1: 0 is the logarithmic law, 1 the geometric law, "
            "math.inf Poisson. "
            f"Received: shape={shape!r}"
        ) from error


def selected_divergences(
    divergences: np.ndarray, orders: tuple[float, ...], mean: float, shape: float
) -> np.ndarray:
    """Rényi divergences of the search, from those of a trial; see `repeat_and_select_epsilon`.

    Not `RdpAccountant().compose(RepeatAndSelectDpEvent(…))`: that one takes divergences which are
    negative by rounding, or NaN, as they come, and so arrives at an ε that is too small.
    """
    alpha = np.array(orders)
    grown = divergences + math.log(mean) / (alpha - 1)
    if math.isinf(shape):
        leaks = [convert.delta_from(divergences, orders, math.log1p(1 / (a - 1))) for a in orders]
        return grown + mean * np.array(leaks)
    chosen = np.min(
        (1 - 1 / alpha) * divergences - trial_count_distributions.log_gamma(mean, shape) / alpha
    )
    # Divergences grow with the order: one bounds all those below.
    return np.minimum.accumulate((grown + (1 + shape) * chosen)[::-1])[::-1]
