"""ε of searches against the theorems, dp_accounting and themselves."""

import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from tf_adaptive_dp.accounting.composition import epsilon as epsilon_of_run
from tf_adaptive_dp.tuning.conversion import IMPROVED_ORDERS, Accounting
from tf_adaptive_dp.tuning.search_epsilon import (
    best_delta_2,
    composition_epsilon,
    liu_talwar_delta_1,
    liu_talwar_epsilon,
    repeat_and_select_epsilon,
)

DELTA = 1e-5
SHAPES = [0.0, 0.3, 1.0, 1.0001, 4.0, math.inf]
DEFAULT = IMPROVED_ORDERS


def gaussian(noise_multiplier):
    return dp_accounting.GaussianDpEvent(noise_multiplier)


def sampled(noise_multiplier, sampling_probability, steps):
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian(noise_multiplier)), steps
    )


TRIALS = [gaussian(0.7), gaussian(10.0), sampled(4.0, 0.05, 10_000), sampled(1.0, 0.01, 200)]


# --- composition ---


def exact_gaussian_epsilon(noise_multiplier, delta):
    """ε of the Gaussian mechanism (Balle and Wang 2018)."""

    def excess(epsilon):
        mean = 1 / noise_multiplier
        first = norm.cdf(mean / 2 - epsilon / mean)
        return first - math.exp(epsilon) * norm.cdf(-mean / 2 - epsilon / mean) - delta

    return brentq(excess, 0, 100)


@pytest.mark.parametrize("num_trials", [1, 4, 100])
def test_trials_compose_like_releases(num_trials):
    noise_multiplier = 10.0
    exact = exact_gaussian_epsilon(noise_multiplier / math.sqrt(num_trials), DELTA)
    by_rdp = composition_epsilon(gaussian(noise_multiplier), num_trials, DELTA)
    by_pld = composition_epsilon(
        gaussian(noise_multiplier), num_trials, DELTA, accounting=Accounting("pld")
    )
    assert exact <= by_pld <= exact + 1e-3
    assert by_pld < by_rdp < 1.25 * exact
    run = composition_epsilon(sampled(2.0, 0.01, 300), num_trials, DELTA)
    assert run == pytest.approx(epsilon_of_run(2.0, 0.01, 300 * num_trials, DELTA))


def test_composition_through_dp_accounting():
    for trial in TRIALS:
        expected = rdp.RdpAccountant(DEFAULT).compose(trial, 5).get_epsilon(DELTA)
        assert composition_epsilon(trial, 5, DELTA) == pytest.approx(expected, rel=1e-6)


# --- random stopping ---


def liu_talwar_by_hand(trial, gamma, delta, delta_2):
    upsilon = math.ceil(math.log(1 / delta_2) / gamma)
    delta_1 = ((delta - delta_2) / upsilon) ** 2 / 2
    assert math.sqrt(2 * delta_1) * upsilon + delta_2 == pytest.approx(delta)
    epsilon_1 = rdp.RdpAccountant(DEFAULT).compose(trial).get_epsilon(delta_1)
    return 3 * epsilon_1 + 3 * math.sqrt(2 * delta_1)


@pytest.mark.slow_after(18)
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("gamma", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("delta_2", [1e-20, 3e-6])
def test_random_stopping_is_theorem_1(trial, gamma, delta_2):
    expected = liu_talwar_by_hand(trial, gamma, DELTA, delta_2)
    found = liu_talwar_epsilon(trial, gamma, DELTA, delta_2=delta_2)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_term_of_delta_1_counts():
    # A large δ and a short search, where 3 √(2 δ₁) is not small.
    delta_1 = liu_talwar_delta_1(1.0, 0.4, 0.05)
    assert delta_1 == pytest.approx((0.35 / 3) ** 2 / 2)
    trial = dp_accounting.LaplaceDpEvent(1.0)
    expected = liu_talwar_by_hand(trial, 1.0, 0.4, 0.05)
    assert liu_talwar_epsilon(trial, 1.0, 0.4, delta_2=0.05) == pytest.approx(expected)
    assert expected - 3 * rdp.RdpAccountant(DEFAULT).compose(trial).get_epsilon(delta_1) > 0.3


@pytest.mark.parametrize("gamma", [1.0, 0.3, 1 / 40, 1e-6])
@pytest.mark.parametrize("delta", [0.5, 1e-3, 1e-5, 1e-12, 1e-100])
def test_the_best_split_of_delta(gamma, delta):
    best = best_delta_2(gamma, delta)
    assert 0 < best < delta
    found = liu_talwar_delta_1(gamma, delta, best)
    others = delta * np.geomspace(1e-12, 1, 2_000, endpoint=False)
    most = max(liu_talwar_delta_1(gamma, delta, float(other)) for other in others)
    assert found >= (1 - 1e-6) * most
    assert liu_talwar_delta_1(gamma, delta, None) == found


def test_the_best_split_saves_privacy():
    split = {
        delta_2: liu_talwar_epsilon(TRIALS[2], 0.01, DELTA, delta_2=delta_2)
        for delta_2 in (1e-20, None)
    }
    assert split[None] < 0.98 * split[1e-20]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_pld_is_for_the_single_trial_where_it_reaches(accountant):
    trial = sampled(2.0, 0.01, 300)
    by_rdp = liu_talwar_epsilon(trial, 0.9, 0.1, delta_2=None)
    found = liu_talwar_epsilon(trial, 0.9, 0.1, delta_2=None, accounting=Accounting(accountant))
    assert (found < by_rdp) == (accountant == "pld")
    # δ₁ is out of its reach: RDP's
    small = liu_talwar_epsilon(trial, 0.9, DELTA, accounting=Accounting(accountant))
    assert small == liu_talwar_epsilon(trial, 0.9, DELTA)


# --- repeat and select ---


def repeat_and_select_by_hand(trial, mean, delta, shape):
    """Theorems 2 and 6 of Papernot and Steinke 2022, with the conversion of dp_accounting."""
    accountant = rdp.RdpAccountant(DEFAULT).compose(trial)
    single = dict(zip(DEFAULT, accountant.rdp))
    if shape == math.inf:
        selected = [
            single[a]
            + mean * accountant.get_delta(math.log(1 + 1 / (a - 1)))
            + math.log(mean) / (a - 1)
            for a in DEFAULT
        ]
    else:
        if shape == 1:
            gamma = 1 / mean
        elif shape == 0:
            gamma = brentq(lambda g: (1 - g) / g / -math.log(g) - mean, 1e-9, 1 - 1e-9)
        else:
            gamma = brentq(lambda g: shape * (1 - g) / g / (1 - g**shape) - mean, 1e-9, 1 - 1e-9)
        other = min((1 - 1 / b) * single[b] + math.log(1 / gamma) / b for b in DEFAULT)
        selected = [single[a] + math.log(mean) / (a - 1) + (1 + shape) * other for a in DEFAULT]
    return rdp.compute_epsilon(DEFAULT, selected, delta)[0]


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [10.0, 1.5, 1000.0])
@pytest.mark.parametrize("trial", TRIALS)
def test_repeat_and_select_is_the_theorems_and_dp_accountings(trial, mean, shape):
    found = repeat_and_select_epsilon(trial, mean, DELTA, shape=shape)
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, mean, shape)
    known = rdp.RdpAccountant(DEFAULT).compose(event).get_epsilon(DELTA)
    assert found == pytest.approx(known, rel=1e-6)
    assert found == pytest.approx(repeat_and_select_by_hand(trial, mean, DELTA, shape), rel=1e-6)


def test_the_geometric_law_is_the_default():
    by_default = repeat_and_select_epsilon(TRIALS[1], 10, DELTA)
    assert by_default == repeat_and_select_epsilon(TRIALS[1], 10, DELTA, shape=1)


@pytest.mark.parametrize("shape", [1.0, 0.5, math.inf])
def test_divergences_lost_to_rounding_do_not_make_selection_cheap(shape):
    trial = sampled(1e6, 1e-3, 100)
    assert rdp.RdpAccountant(DEFAULT).compose(trial).rdp.min() < 0
    assert repeat_and_select_epsilon(trial, 10, DELTA, shape=shape) >= 0
    exactly_nothing = repeat_and_select_epsilon(gaussian(1e6), 10, DELTA, shape=shape)
    found = repeat_and_select_epsilon(trial, 10, DELTA, shape=shape)
    assert found == pytest.approx(exactly_nothing, rel=1e-3, abs=1e-3)


def test_conversion_and_orders_reach_every_function():
    for function, number in (
        (composition_epsilon, 3),
        (liu_talwar_epsilon, 0.5),
        (repeat_and_select_epsilon, 3),
    ):
        improved = function(TRIALS[1], number, DELTA)
        classical = function(
            TRIALS[1], number, DELTA, accounting=Accounting(conversion="classical")
        )
        coarse = function(TRIALS[1], number, DELTA, accounting=Accounting(orders=[2, 4]))
        assert improved < classical < coarse


# --- all of them ---

FUNCTIONS = {
    "composition": lambda trial, trials, delta, **k: composition_epsilon(trial, trials, delta, **k),
    "stopping": lambda trial, trials, delta, **k: liu_talwar_epsilon(trial, 1 / trials, delta, **k),
    "geometric": lambda trial, trials, delta, **k: repeat_and_select_epsilon(
        trial, trials, delta, **k
    ),
    "spread": lambda trial, trials, delta, **k: repeat_and_select_epsilon(
        trial, trials, delta, shape=0.4, **k
    ),
    "poisson": lambda trial, trials, delta, **k: repeat_and_select_epsilon(
        trial, trials, delta, shape=math.inf, **k
    ),
}
whole = st.integers(1, 300)
noise = st.floats(0.3, 100)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("function", FUNCTIONS)
@hypothesis.given(
    sigma=noise,
    more_noise=st.floats(1, 10),
    trials=whole,
    more_trials=whole,
    log_delta=st.floats(-12, -2),
    more_delta=st.floats(1, 9),
    conversion=st.sampled_from(["improved", "classical"]),
)
@hypothesis.settings(max_examples=25)
def test_more_of_anything_moves_epsilon_the_right_way(
    function, sigma, more_noise, trials, more_trials, log_delta, more_delta, conversion
):
    def spent(sigma, trials, delta):
        return FUNCTIONS[function](
            gaussian(sigma), trials, delta, accounting=Accounting(conversion=conversion)
        )

    delta = 10**log_delta
    here = spent(sigma, trials, delta)
    slack = 1 + 1e-9
    assert 0 < here < math.inf
    assert spent(sigma * more_noise, trials, delta) <= here * slack
    assert spent(sigma, trials + more_trials, delta) >= here / slack
    # Theorem 1 has the term 3 √(2 δ₁), which grows with δ, up to 3 δ.
    term = 3 * delta * more_delta if function == "stopping" else 0.0
    assert spent(sigma, trials, delta * more_delta) <= here * slack + term


@hypothesis.given(sigma=noise, mean=st.floats(1, 1e4), shape=st.floats(0.01, 20))
@hypothesis.settings(max_examples=25)
def test_a_wider_spread_costs_less(sigma, mean, shape):
    narrow = repeat_and_select_epsilon(gaussian(sigma), mean, DELTA, shape=shape)
    wide = repeat_and_select_epsilon(gaussian(sigma), mean, DELTA, shape=shape / 2)
    assert wide <= narrow * (1 + 1e-9)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_trial_is_never_cheaper_than_the_trial_itself(function):
    for trial in TRIALS:
        alone = composition_epsilon(trial, 1, DELTA)
        assert FUNCTIONS[function](trial, 1, DELTA) >= alone * (1 - 1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_noise_epsilon_is_infinite_and_without_a_release_next_to_nothing(function):
    spent = FUNCTIONS[function]
    assert spent(dp_accounting.NonPrivateDpEvent(), 4, DELTA) == math.inf
    assert spent(gaussian(0.0), 4, DELTA) == math.inf
    assert 0 <= spent(dp_accounting.NoOpDpEvent(), 4, DELTA) <= 3 * DELTA


@pytest.mark.parametrize("function", FUNCTIONS)
def test_extreme_numbers_give_a_number(function):
    for sigma in (1e-5, 1e9):
        for delta in (1e-250, 0.99):
            number = FUNCTIONS[function](
                gaussian(sigma),
                10**6,
                delta,
                **({"delta_2": None} if function == "stopping" else {}),
            )
            assert number >= 0  # not NaN


WRONG = [
    (composition_epsilon, (3.0, 2, DELTA), {}, TypeError, "`trial` must be a `dp_accounting.DpEv"),
    (composition_epsilon, (gaussian(1.0), 0, DELTA), {}, ValueError, "`num_trials` must be at le"),
    (composition_epsilon, (gaussian(1.0), 2.5, DELTA), {}, TypeError, "`num_trials` must be a who"),
    (composition_epsilon, (gaussian(1.0), 2, 1.0), {}, ValueError, "`delta` must be in"),
    (liu_talwar_epsilon, (None, 0.5, DELTA), {}, TypeError, "`trial` must be a"),
    (liu_talwar_epsilon, (gaussian(1.0), 0.0, DELTA), {}, ValueError, "`gamma` must be in"),
    (liu_talwar_epsilon, (gaussian(1.0), 1.5, DELTA), {}, ValueError, "`gamma` must be in"),
    (liu_talwar_epsilon, (gaussian(1.0), 0.5, 0.0), {}, ValueError, "`delta` must be in"),
    (liu_talwar_epsilon, (gaussian(1.0), 0.5, DELTA), {"delta_2": 0.0}, ValueError, "`delta_2` mu"),
    (
        liu_talwar_epsilon,
        (gaussian(1.0), 0.5, DELTA),
        {"delta_2": DELTA},
        ValueError,
        "`delta_2` must be below `delta`",
    ),
    (repeat_and_select_epsilon, ("x", 5, DELTA), {}, TypeError, "`trial` must be a"),
    (repeat_and_select_epsilon, (gaussian(1.0), 0.9, DELTA), {}, ValueError, "`mean_trials` must"),
    (repeat_and_select_epsilon, (gaussian(1.0), math.inf, DELTA), {}, ValueError, "`mean_trials`"),
    (repeat_and_select_epsilon, (gaussian(1.0), 5, -1.0), {}, ValueError, "`delta` must be in"),
    (
        repeat_and_select_epsilon,
        (gaussian(1.0), 5, DELTA),
        {"shape": -1},
        ValueError,
        "`shape` must be greater than -1",
    ),
    (
        repeat_and_select_epsilon,
        (gaussian(1.0), 5, DELTA),
        {"shape": math.nan},
        ValueError,
        "`shape` must be greater than -1",
    ),
    (
        repeat_and_select_epsilon,
        (gaussian(1.0), 5, DELTA),
        {"shape": "1"},
        TypeError,
        "`shape` must be a number",
    ),
    (
        repeat_and_select_epsilon,
        (gaussian(1.0), 1e6, DELTA),
        {"shape": -0.99},
        ValueError,
        "spread beyond what floats hold",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "keywords", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(function, arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        function(*arguments, **keywords)
