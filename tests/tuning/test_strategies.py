"""The strategies: what they say of themselves, and the law that they draw from."""

import dataclasses
import importlib
import itertools
import math
import random

import dp_accounting
import numpy as np
import pytest
from scipy.stats import chisquare

from tests.helpers.exact_selection import (
    poisson_law,
    stopped_geometric,
    truncated_negative_binomial,
)
from tf_adaptive_dp.tuning import trial_count_distributions
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.search_epsilon import (
    composition_epsilon,
    liu_talwar_epsilon,
    repeat_and_select_epsilon,
)
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect

DRAWS = 20_000
RARE = 1e-6
TRIAL = dp_accounting.GaussianDpEvent(5.0)


def fits(drawn, law):
    """p-value of a chi-square test; classes of fewer than 20 expected draws go together."""
    observed = np.bincount(drawn)
    expected = len(drawn) * law
    length = max(len(observed), len(expected))
    observed, expected = (np.pad(x, (0, length - len(x))) for x in (observed, expected))
    many = expected >= 20
    observed = np.append(observed[many], observed[~many].sum())
    expected = np.append(expected[many], expected[~many].sum())
    if expected[-1] < 1e-9:  # what cannot be
        if observed[-1]:
            return 0.0
        observed, expected = observed[:-1], expected[:-1]
    return chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


# strategy, its law, laws that are near it
LAWS = [
    (
        LiuTalwar(0.1, 1e-20),
        stopped_geometric(0.1, 461),
        [stopped_geometric(0.113, 461), stopped_geometric(0.1, 40), poisson_law(10)],
    ),
    (
        LiuTalwar(0.1, 0.2),
        stopped_geometric(0.1, 17),
        [stopped_geometric(0.1, 16), stopped_geometric(0.1, 18), stopped_geometric(0.1, 461)],
    ),
    (
        RepeatAndSelect(10),
        truncated_negative_binomial(10, 1),
        [
            truncated_negative_binomial(8.8, 1),
            truncated_negative_binomial(10, 1.3),
            np.roll(truncated_negative_binomial(10, 1), -1),
        ],
    ),
    (
        RepeatAndSelect(6, 0.5),
        truncated_negative_binomial(6, 0.5),
        [truncated_negative_binomial(6, 1.0), truncated_negative_binomial(7.2, 0.5)],
    ),
    (
        RepeatAndSelect(6, 0.0),
        truncated_negative_binomial(6, 0.0),
        [truncated_negative_binomial(6, 0.5), truncated_negative_binomial(7.5, 0.0)],
    ),
    (
        RepeatAndSelect(4, -0.5),
        truncated_negative_binomial(4, -0.5),
        [truncated_negative_binomial(4, 0.0), truncated_negative_binomial(5, -0.5)],
    ),
    (
        RepeatAndSelect(8, 3.0),
        truncated_negative_binomial(8, 3.0),
        [truncated_negative_binomial(8, 2.0), truncated_negative_binomial(8.8, 3.0)],
    ),
    (
        RepeatAndSelect(4, math.inf),
        poisson_law(4),
        [poisson_law(4.4), truncated_negative_binomial(4, 50.0), np.roll(poisson_law(4), 1)],
    ),
]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("strategy", "law", "near"), LAWS, ids=lambda x: str(x)[:30])
def test_numbers_of_trials_have_the_law_of_the_proof_and_no_other(strategy, law, near):
    drawn = [strategy.draw_num_trials() for _ in range(DRAWS)]
    assert fits(drawn, law) > RARE
    for other in near:
        assert fits(drawn, other) < RARE


@pytest.mark.parametrize(
    ("mean", "shape"),
    [
        *itertools.product([1.0, 1.000001, 1.5, 40.0, 3_000.0], [0.0, 1e-3, 0.5, 1.0, 2.5, 1e6]),
        *itertools.product([1.0, 1.000001, 1.5, 40.0], [-0.3, -1e-6]),
    ],
)
def test_probabilities_add_up_to_one_and_have_the_mean(mean, shape):
    total = sums = 0.0
    for k, log_probability in trial_count_distributions.log_probabilities(mean, shape):
        total += math.exp(log_probability)
        sums += k * math.exp(log_probability)
        if k > 300_000 or 1 - total < 1e-12:
            break
    assert total == pytest.approx(1)
    assert sums == pytest.approx(mean, rel=1e-4)


def test_the_smallest_number_is_one_or_for_poisson_zero():
    assert next(trial_count_distributions.log_probabilities(5.0, 0.5))[0] == 1
    assert next(trial_count_distributions.log_probabilities(5.0, math.inf)) == (0, -5.0)


@pytest.mark.parametrize("shape", [-0.5, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1 + 1e-9, 1.2, 50.0, 1e8])
def test_gamma_belongs_to_the_mean(mean, shape):
    # What is accounted for and what is drawn with are one number.
    t = trial_count_distributions.log_gamma(mean, shape)
    assert shape * math.expm1(-t) / -math.expm1(shape * t) == pytest.approx(mean, rel=1e-12)


def test_a_number_far_beyond_floats_of_probability_is_drawn():
    # e^-2000 is no float
    drawn = [RepeatAndSelect(2_000, math.inf).draw_num_trials() for _ in range(20)]
    assert all(abs(n - 2_000) < 8 * math.sqrt(2_000) for n in drawn)
    assert len(set(drawn)) > 1


def test_draws_come_from_no_seed():
    numbers = []
    for _ in range(2):
        importlib.reload(trial_count_distributions)  # as another process begins
        np.random.seed(0)
        random.seed(0)
        numbers.append([RepeatAndSelect(1_000).draw_num_trials() for _ in range(5)])
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize(
    ("strategy", "name", "releases_all", "expected", "most"),
    [
        (Composition(7), "composition", True, 7.0, 7),
        (LiuTalwar(0.1), "liu_talwar", False, 10.0, 461),
        (LiuTalwar(0.1, 0.2), "liu_talwar", False, 10 * (1 - 0.9**17), 17),
        (LiuTalwar(1.0), "liu_talwar", False, 1.0, 1),
        (RepeatAndSelect(12.5), "repeat_and_select", False, 12.5, None),
        (RepeatAndSelect(1), "repeat_and_select", False, 1.0, 1),
        (RepeatAndSelect(1, math.inf), "repeat_and_select", False, 1.0, None),
    ],
)
def test_what_a_strategy_says_of_itself(strategy, name, releases_all, expected, most):
    assert strategy.name == name
    assert strategy.releases_all is releases_all
    assert strategy.expected_trials == pytest.approx(expected)
    assert strategy.max_trials == most


def test_the_mean_of_random_stopping_is_that_of_its_law():
    law = stopped_geometric(0.1, 17)
    assert LiuTalwar(0.1, 0.2).expected_trials == pytest.approx(law @ np.arange(len(law)))


def test_strategies_that_draw_no_number():
    assert {Composition(3).draw_num_trials() for _ in range(5)} == {3}
    assert {LiuTalwar(1.0).draw_num_trials() for _ in range(50)} == {1}
    assert {RepeatAndSelect(1.0, 2.0).draw_num_trials() for _ in range(50)} == {1}


@pytest.mark.parametrize(
    "accounting",
    [Accounting(), Accounting(conversion="classical"), Accounting(orders=(2, 5, 9))],
)
def test_epsilon_is_that_of_the_functions(accounting):
    delta = 1e-5
    assert Composition(3).epsilon(TRIAL, delta, accounting=accounting) == composition_epsilon(
        TRIAL, 3, delta, accounting=accounting
    )
    assert LiuTalwar(0.3, 1e-9).epsilon(TRIAL, delta, accounting=accounting) == liu_talwar_epsilon(
        TRIAL, 0.3, delta, delta_2=1e-9, accounting=accounting
    )
    assert RepeatAndSelect(3, 0.5).epsilon(
        TRIAL, delta, accounting=accounting
    ) == repeat_and_select_epsilon(TRIAL, 3, delta, shape=0.5, accounting=accounting)


def test_the_accountant_reaches_the_functions():
    for strategy in (Composition(3), LiuTalwar(0.9, 0.01), RepeatAndSelect(3)):
        by_rdp, by_pld = (
            strategy.epsilon(TRIAL, 0.1, accounting=Accounting(a)) for a in ("rdp", "pld")
        )
        assert by_pld < by_rdp


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Composition(0), ValueError, "`num_trials` must be at least 1"),
        (lambda: Composition(2.0), TypeError, "`num_trials` must be a whole number"),
        (lambda: LiuTalwar(0.0), ValueError, "`gamma` must be in"),
        (lambda: LiuTalwar(1.01), ValueError, "`gamma` must be in"),
        (lambda: LiuTalwar(0.5, 0.0), ValueError, "`delta_2` must be in"),
        (lambda: LiuTalwar(0.5, None), TypeError, "`delta_2` must be a number"),
        (lambda: RepeatAndSelect(0.5), ValueError, "`mean_trials` must be finite and at least 1"),
        (lambda: RepeatAndSelect(5, -1.0), ValueError, "`shape` must be greater than -1"),
        (lambda: RepeatAndSelect(5, -math.inf), ValueError, "`shape` must be greater than -1"),
        (
            lambda: RepeatAndSelect(5, 1e16),
            ValueError,
            "`shape` must be at most 1e\\+15.*pass math.inf",
        ),
        (lambda: RepeatAndSelect(5, None), TypeError, "`shape` must be a number"),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_strategies_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Composition(3).num_trials = 1
