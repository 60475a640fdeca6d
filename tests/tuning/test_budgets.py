"""Noise and numbers of trials that a budget allows."""

import math

import dp_accounting
import pytest

from tf_adaptive_dp.tuning.budgets import (
    gamma_for_budget,
    mean_trials_for_budget,
    noise_multiplier_for_selection,
    num_trials_for_budget,
)
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.search_epsilon import (
    composition_epsilon,
    liu_talwar_epsilon,
    repeat_and_select_epsilon,
)
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, NoisyScore, RepeatAndSelect

DELTA = 1e-5
STRATEGIES = [
    Composition(4),
    LiuTalwar(0.1),
    RepeatAndSelect(10),
    RepeatAndSelect(10, math.inf),
]


def make_trial(noise_multiplier):
    release = dp_accounting.PoissonSampledDpEvent(
        0.01, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(release, 500)


TRIAL = make_trial(1.5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 200.0])
def test_the_least_noise_within_the_budget(strategy, epsilon):
    sigma = noise_multiplier_for_selection(strategy, make_trial, epsilon, DELTA)
    assert strategy.epsilon(make_trial(sigma), DELTA) <= epsilon
    assert strategy.epsilon(make_trial(sigma / 1.001), DELTA) > epsilon
    assert sigma == float(f"{sigma:.6g}")


@pytest.mark.in_turns
@pytest.mark.parametrize("tolerance", [0.3, 1e-5])
def test_tolerance_bounds_the_surplus(tolerance):
    strategy = STRATEGIES[2]
    sigma = noise_multiplier_for_selection(strategy, make_trial, 2.0, DELTA, tolerance=tolerance)
    assert strategy.epsilon(make_trial(sigma), DELTA) <= 2.0
    assert strategy.epsilon(make_trial(sigma / (1 + tolerance)), DELTA) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "accounting",
    [Accounting(conversion="classical"), Accounting(orders=(2, 8, 32)), Accounting("pld")],
)
def test_the_accounting_reaches_the_strategy(accounting):
    strategy = STRATEGIES[0]
    sigma = noise_multiplier_for_selection(strategy, make_trial, 1.0, DELTA, accounting=accounting)
    assert strategy.epsilon(make_trial(sigma), DELTA, accounting=accounting) <= 1.0
    assert strategy.epsilon(make_trial(sigma / 1.001), DELTA, accounting=accounting) > 1.0
    assert sigma != noise_multiplier_for_selection(strategy, make_trial, 1.0, DELTA)


@pytest.mark.slow
def test_a_score_that_costs_takes_more_noise_and_may_cost_too_much():
    def with_score(noise_multiplier, score):
        return dp_accounting.ComposedDpEvent([make_trial(noise_multiplier), score.event])

    def noise_with(score):
        return noise_multiplier_for_selection(
            Composition(4), lambda sigma: with_score(sigma, score), 1.0, DELTA
        )

    alone = noise_multiplier_for_selection(Composition(4), make_trial, 1.0, DELTA)
    assert alone < noise_with(NoisyScore(50.0, 0.01))
    with pytest.raises(ValueError, match="No noise multiplier up to 1e\\+06 meets the budget"):
        noise_with(NoisyScore(2.0, 0.01))


def test_trials_that_cost_nothing_need_no_noise():
    found = noise_multiplier_for_selection(
        Composition(2), lambda _: dp_accounting.NoOpDpEvent(), 1.0, DELTA
    )
    assert found < 1e-5


# --- number of trials ---


@pytest.mark.slow
def test_the_most_trials_of_composition():
    for epsilon in (1.2, 2.5, 20.0):
        found = num_trials_for_budget(TRIAL, epsilon, DELTA)
        spent = [composition_epsilon(TRIAL, k, DELTA) for k in (found, found + 1)]
        assert spent[0] <= epsilon < spent[1]
    by_pld = num_trials_for_budget(TRIAL, 2.0, DELTA, accounting=Accounting("pld"))
    assert by_pld > num_trials_for_budget(TRIAL, 2.0, DELTA)
    assert composition_epsilon(TRIAL, by_pld, DELTA, accounting=Accounting("pld")) <= 2.0
    assert composition_epsilon(TRIAL, by_pld + 1, DELTA, accounting=Accounting("pld")) > 2.0


def test_exactly_one_trial_may_fit():
    alone, two = (composition_epsilon(TRIAL, k, DELTA) for k in (1, 2))
    assert num_trials_for_budget(TRIAL, alone, DELTA) == 1
    assert num_trials_for_budget(TRIAL, two, DELTA) == 2
    assert num_trials_for_budget(TRIAL, two * (1 - 1e-9), DELTA) == 1


@pytest.mark.parametrize("delta_2", [1e-20, None])
@pytest.mark.parametrize("epsilon", [5.5, 7.0, 40.0])
def test_the_smallest_gamma(delta_2, epsilon):
    gamma = gamma_for_budget(TRIAL, epsilon, DELTA, delta_2=delta_2)
    assert liu_talwar_epsilon(TRIAL, gamma, DELTA, delta_2=delta_2) <= epsilon
    if gamma > 2**-30:
        less = liu_talwar_epsilon(TRIAL, gamma / 1.002, DELTA, delta_2=delta_2)
        assert less > epsilon
    else:
        assert epsilon == 40.0


@pytest.mark.parametrize("shape", [0.5, 1.0, math.inf])
@pytest.mark.parametrize("epsilon", [0.9, 1e4])
def test_the_largest_mean(shape, epsilon):
    mean = mean_trials_for_budget(TRIAL, epsilon, DELTA, shape=shape)
    assert repeat_and_select_epsilon(TRIAL, mean, DELTA, shape=shape) <= epsilon
    if mean < 2**30:
        assert repeat_and_select_epsilon(TRIAL, mean * 1.002, DELTA, shape=shape) > epsilon
    else:
        assert epsilon == 1e4


@pytest.mark.parametrize(
    ("function", "one"),
    [
        (gamma_for_budget, lambda: liu_talwar_epsilon(TRIAL, 1.0, DELTA)),
        (mean_trials_for_budget, lambda: repeat_and_select_epsilon(TRIAL, 1.0, DELTA)),
    ],
)
def test_a_budget_for_one_trial_exactly(function, one):
    # Random stopping rounds its hard stop up, so that a little less than γ = 1 costs the same.
    assert 0.97 < function(TRIAL, one(), DELTA) <= 1.0


FUNCTIONS = [num_trials_for_budget, gamma_for_budget, mean_trials_for_budget]


@pytest.mark.parametrize(
    ("function", "epsilon"),
    [*zip(FUNCTIONS, (5.0, 8.0, 1.2))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_accounting_reaches_the_functions(function, epsilon):
    numbers = {
        function(TRIAL, epsilon, DELTA, accounting=accounting)
        for accounting in (
            Accounting(),
            Accounting(conversion="classical"),
            Accounting(orders=(2, 6, 10, 14)),
        )
    }
    assert len(numbers) == 3


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("trial", [TRIAL, dp_accounting.NonPrivateDpEvent()])
def test_a_budget_below_one_trial_is_an_error(function, trial):
    with pytest.raises(ValueError, match="No trial fits the budget: .* costs"):
        function(trial, 0.05, DELTA)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TRIAL, 0.0, DELTA), ValueError, "`epsilon` must be finite and greater than 0"),
        ((TRIAL, math.inf, DELTA), ValueError, "`epsilon` must be finite"),
        ((TRIAL, 1.0, 2.0), ValueError, "`delta` must be in"),
        ((1.5, 1.0, DELTA), TypeError, "`trial` must be a `dp_accounting.DpEvent`"),
    ],
)
def test_wrong_arguments_are_refused(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epsilon": -1.0}, ValueError, "`epsilon` must be finite and greater than 0"),
        ({"delta": 0.0}, ValueError, "`delta` must be in"),
        ({"tolerance": 0.0}, ValueError, "`tolerance` must be in"),
        ({"make_trial": TRIAL}, TypeError, "`make_trial` must be a function"),
        ({"make_trial": lambda sigma: sigma}, TypeError, "`make_trial\\(noise_multiplier\\)` must"),
        ({"strategy": LiuTalwar(0.5, 0.1)}, ValueError, "`delta_2` must be below `delta`"),
        (
            {"epsilon": 1e-9, "delta": 1e-30},
            ValueError,
            "No noise multiplier up to 1e\\+06 meets the budget",
        ),
    ],
)
def test_wrong_arguments_of_the_noise_are_refused(change, error, message):
    arguments = {
        "strategy": Composition(2),
        "make_trial": make_trial,
        "epsilon": 1.0,
        "delta": DELTA,
    }
    with pytest.raises(error, match=message):
        noise_multiplier_for_selection(**{**arguments, **change})
