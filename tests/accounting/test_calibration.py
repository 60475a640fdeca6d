"""The noise that a privacy budget takes."""

from __future__ import annotations

import math

import dp_accounting
import pytest

from tf_adaptive_dp.accounting import calibration
from tf_adaptive_dp.accounting.calibration import noise_multiplier_for
from tf_adaptive_dp.accounting.composition import epsilon

DELTA = 1e-5

# Budget, δ, sampling probability, steps; the last is on a jump between two of RDP's orders.
BUDGETS = [(0.538353, DELTA, 1 / 300, 6_000), (2.0, DELTA, 0.01, 10_000), (3.0, 1e-6, 1.0, 50)]
HARD_FOR_RDP = [(30.0, DELTA, 0.01, 300), (1e4, DELTA, 0.1, 100), (0.1, 1e-6, 1e-4, 100_000)]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("accountant", "budget"),
    [("rdp", b) for b in BUDGETS + HARD_FOR_RDP] + [("pld", b) for b in BUDGETS],
)
def test_the_least_noise_within_the_budget(accountant, budget):
    target, delta, sampling_probability, steps = budget

    def spent(noise_multiplier):
        return epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    sigma = noise_multiplier_for(target, delta, sampling_probability, steps, accountant=accountant)
    assert spent(sigma) <= target < spent(0.99 * sigma)
    assert target < spent(sigma / 1.001)  # the default tolerance


@pytest.mark.parametrize("tolerance", [0.3, 0.01, 1e-6])
def test_tolerance_bounds_the_surplus(tolerance):
    sigma = noise_multiplier_for(1.0, DELTA, 0.01, 1_000, tolerance=tolerance)
    assert epsilon(sigma, 0.01, 1_000, DELTA) <= 1.0
    assert epsilon(sigma / (1 + tolerance), 0.01, 1_000, DELTA) > 1.0


def test_agrees_with_dp_accounting():
    expected = dp_accounting.calibrate_dp_mechanism(
        dp_accounting.rdp.RdpAccountant,
        lambda sigma: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(sigma)), 1_000
        ),
        target_epsilon=1.0,
        target_delta=DELTA,
        bracket_interval=dp_accounting.ExplicitBracketInterval(0.5, 5.0),
    )
    sigma = noise_multiplier_for(1.0, DELTA, 0.01, 1_000, tolerance=1e-5)
    assert sigma == pytest.approx(expected, rel=2e-5)


def test_recovers_the_noise_of_a_known_run():
    target = epsilon(2.0, 1 / 300, 6_000, DELTA)
    assert noise_multiplier_for(target, DELTA, 1 / 300, 6_000) == pytest.approx(2.0, rel=1e-3)


def test_the_result_is_a_short_number():
    sigma = noise_multiplier_for(1.0, DELTA, 0.01, 1_000)
    assert len(repr(sigma)) <= len("1.5133")


def test_rounding_is_upwards_and_as_far_as_it_takes():
    assert calibration.rounded_up(1.51321, 5e-4, lambda sigma: False) == 1.5133
    # A rounded number that overspends all the same, as floats may, is not good enough.
    assert calibration.rounded_up(1.51321, 5e-4, lambda sigma: sigma < 1.5135) == 1.5135


@pytest.mark.parametrize("guess", [0.01, 0.9, 1.0, 1.9, 10.0, 1e9])
def test_the_search_begins_between_too_little_and_enough_noise(guess):
    low, high = calibration.bracket(lambda sigma: sigma < 1.0, guess)
    assert low < 1.0 <= high == 2 * low


@pytest.mark.parametrize("budget", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(
    ("resembling", "most_calls"),
    [
        (lambda spent, sigma: 1.07 * spent, 3),
        (lambda spent, sigma: 1.2 * sigma**-0.3 * spent, 3),
        (lambda spent, sigma: 3 * spent + 0.01 * math.sin(40 * sigma), None),
        (lambda spent, sigma: spent if sigma < 0.5 else 0.0, None),
        (lambda spent, sigma: 1e-9 * spent, None),
        (lambda spent, sigma: math.inf, None),
    ],
    ids=["proportional", "drifting", "uneven", "then nothing", "far too small", "never enough"],
)
def test_a_resemblance_saves_evaluations_and_costs_no_accuracy(resembling, most_calls, budget):
    evaluated = []

    def spent(sigma):
        return (1 + 0.5 / sigma) / sigma

    def counted(sigma):
        evaluated.append(sigma)
        return spent(sigma)

    found = calibration.least_noise(
        counted, budget, 1e-3, resembling=lambda sigma: resembling(spent(sigma), sigma)
    )
    assert spent(found) <= budget < spent(found / 1.001)
    assert found in evaluated
    assert most_calls is None or len(evaluated) <= most_calls


@pytest.mark.in_turns
@pytest.mark.parametrize("budget", [(1.0, DELTA, 0.02, 200), (3.0, 1e-6, 1.0, 50)])
def test_pld_is_computed_three_times_at_most(budget, monkeypatch):
    evaluated = []

    def counted(noise_multiplier, *args):
        evaluated.append(args[-1])
        return epsilon(noise_multiplier, *args)

    monkeypatch.setattr(calibration.composition, "epsilon", counted)
    noise_multiplier_for(*budget, accountant="pld")
    assert 1 <= evaluated.count("pld") <= 3


def test_pld_needs_less_noise():
    by_rdp = noise_multiplier_for(2.0, DELTA, 0.01, 10_000)
    assert noise_multiplier_for(2.0, DELTA, 0.01, 10_000, accountant="pld") < 0.97 * by_rdp


def test_a_budget_that_is_all_but_infinite_gets_the_least_noise_that_is_accounted():
    sigma = noise_multiplier_for(1e15, DELTA, 1.0, 1)
    assert epsilon(sigma, 1.0, 1, DELTA) <= 1e15
    assert sigma == pytest.approx(1e-6)


def test_an_unreachable_budget_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"No noise multiplier up to 1e\+06 meets the budget.*Received: epsilon=0.001",
    ):
        noise_multiplier_for(0.001, DELTA, 0.01, 10_000)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epsilon": 0}, ValueError, "`epsilon` must be finite and greater than 0. Received"),
        ({"epsilon": -1.0}, ValueError, "Received: epsilon=-1.0"),
        ({"epsilon": math.nan}, ValueError, "Received: epsilon=nan"),
        ({"epsilon": math.inf}, ValueError, "Received: epsilon=inf"),
        ({"delta": 2}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=2"),
        ({"sampling_probability": 1.5}, ValueError, r"`sampling_probability` must be in \(0, 1\]"),
        ({"sampling_probability": 0.0}, ValueError, "Received: sampling_probability=0.0"),
        ({"steps": 0}, ValueError, "`steps` must be at least 1. Received: steps=0"),
        ({"steps": 10.5}, TypeError, "`steps` must be a whole number. Received: steps=10.5"),
        ({"accountant": "gdp"}, ValueError, "`accountant` must be one of 'rdp', 'pld'. Received"),
        ({"tolerance": 0}, ValueError, r"`tolerance` must be in \(0, 1\). Received: tolerance=0"),
    ],
)
def test_refuses(change, error, message):
    arguments = dict(epsilon=1.0, delta=DELTA, sampling_probability=0.01, steps=10)
    with pytest.raises(error, match=message):
        noise_multiplier_for(**{**arguments, **change})
