"""Rényi divergences of events, and the ε that follows from them."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from tf_adaptive_dp.accounting import accountants
from tf_adaptive_dp.accounting.accountants import RDP_PRECISION
from tf_adaptive_dp.tuning import conversion as conversions
from tf_adaptive_dp.tuning.conversion import (
    CLASSICAL_ORDERS,
    Accounting,
    delta_from,
    epsilon_from,
    epsilon_of,
    renyi_divergences,
)

ORDERS = (1.5, 2.0, 8.0, 64.0)
DEFAULT = tuple(float(order) for order in rdp.RdpAccountant().orders)
PLD = Accounting("pld")


def gaussian(noise_multiplier):
    return dp_accounting.GaussianDpEvent(noise_multiplier)


def sampled(noise_multiplier, sampling_probability, steps=1):
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian(noise_multiplier)), steps
    )


def composed(*events):
    return dp_accounting.ComposedDpEvent(list(events))


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 20.0])
def test_divergences_of_the_gaussian(noise_multiplier):
    expected = np.array(ORDERS) / (2 * noise_multiplier**2)
    np.testing.assert_allclose(renyi_divergences(gaussian(noise_multiplier), ORDERS), expected)


def test_divergences_are_dp_accountings_and_add_up():
    parts = [sampled(1.0, 0.01, 1_000), gaussian(3.0), dp_accounting.LaplaceDpEvent(2.0)]
    parts.append(gaussian(3.0))  # once more
    each = [rdp.RdpAccountant(ORDERS).compose(part).rdp for part in parts]
    for part, known in zip(parts, each):
        np.testing.assert_allclose(renyi_divergences(part, ORDERS), known, rtol=1e-7)
    thrice = dp_accounting.SelfComposedDpEvent(composed(parts[0], composed(*parts[1:])), 3)
    np.testing.assert_allclose(renyi_divergences(thrice, ORDERS), 3 * sum(each), rtol=1e-7)


def test_a_sampled_composition_is_left_to_dp_accounting():
    inner = dp_accounting.SelfComposedDpEvent(gaussian(4.0), 3)
    event = dp_accounting.PoissonSampledDpEvent(0.1, inner)
    known = rdp.RdpAccountant(ORDERS).compose(event).rdp
    np.testing.assert_allclose(renyi_divergences(event, ORDERS), known)


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.NoOpDpEvent(),
        dp_accounting.SelfComposedDpEvent(gaussian(1.0), 0),
        dp_accounting.PoissonSampledDpEvent(0.0, gaussian(1.0)),
        dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.NoOpDpEvent()),
        composed(),
    ],
)
@pytest.mark.parametrize("conversion", ["improved", "classical"])
def test_what_releases_nothing_costs_nothing(event, conversion):
    assert not renyi_divergences(event, ORDERS).any()
    assert epsilon_of(event, 1e-5, Accounting(conversion=conversion)) == 0


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.NonPrivateDpEvent(),
        composed(gaussian(1.0), dp_accounting.NonPrivateDpEvent()),
        gaussian(0.0),
        gaussian(1e-9),
        sampled(0.0, 0.01),
        dp_accounting.LaplaceDpEvent(0.0),
    ],
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_what_is_not_private_is_infinite(event, accountant):
    assert np.isinf(renyi_divergences(event, ORDERS)).all()
    assert epsilon_of(event, 1e-5, Accounting(accountant)) == math.inf


def test_divergences_that_turn_out_negative_count_for_their_precision():
    event = sampled(1e6, 1e-3, 100)
    raw = rdp.RdpAccountant().compose(event).rdp
    assert raw.min() < 0  # or else this test shows nothing
    assert renyi_divergences(event, DEFAULT).min() >= 100 * RDP_PRECISION
    assert epsilon_of(event, 1e-12) > 0


def test_noise_beyond_the_accountants_counts_for_less_and_not_as_none():
    assert renyi_divergences(gaussian(1e200), ORDERS).min() > 0


def test_a_divergence_that_nobody_can_tell_is_infinite(monkeypatch):
    monkeypatch.setattr(conversions, "_gaussian_divergences", lambda *_: np.array([1.0, math.nan]))
    np.testing.assert_array_equal(renyi_divergences(gaussian(1.0), (2.0, 3.0)), [1.0, math.inf])


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (gaussian(-1.0), ValueError, "`noise_multiplier` must be finite and at least 0"),
        (gaussian(math.nan), ValueError, "`noise_multiplier` must be finite"),
        (sampled(1.0, 1.5), ValueError, "`sampling_probability` must be in"),
        (dp_accounting.SelfComposedDpEvent(gaussian(1.0), -2), ValueError, "`count` must be"),
        (dp_accounting.UnsupportedDpEvent(), dp_accounting.UnsupportedEventError, "Unsupported"),
    ],
)
def test_events_that_make_no_sense_are_refused(event, error, message):
    with pytest.raises(error, match=message):
        renyi_divergences(event, ORDERS)


# --- from divergences to ε ---


@pytest.mark.parametrize("noise_multiplier", [1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-30])
def test_classical_epsilon_of_the_gaussian_in_closed_form(noise_multiplier, delta):
    # min over α of α / (2σ²) + log(1/δ) / (α - 1) is at α = 1 + σ √(2 log(1/δ))
    root = math.sqrt(-2 * math.log(delta))
    expected = 1 / (2 * noise_multiplier**2) + root / noise_multiplier
    best = 1 + noise_multiplier * root
    with_best = Accounting(conversion="classical", orders=(best,))
    exact = epsilon_of(gaussian(noise_multiplier), delta, with_best)
    assert exact == pytest.approx(expected)
    classical = Accounting(conversion="classical")
    by_default = epsilon_of(gaussian(noise_multiplier), delta, classical)
    assert expected <= by_default <= 1.01 * expected


@pytest.mark.parametrize("event", [gaussian(1.0), sampled(4.0, 0.05, 10_000)])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-19])
def test_improved_epsilon_is_dp_accountings(event, delta):
    known = rdp.RdpAccountant().compose(event).get_epsilon(delta)
    assert epsilon_of(event, delta) == pytest.approx(known, rel=1e-6)
    assert epsilon_of(event, delta) >= known


def test_improved_is_below_classical_and_default_orders_are_of_the_conversion():
    event = sampled(4.0, 0.05, 10_000)
    improved = epsilon_of(event, 1e-5, Accounting(orders=CLASSICAL_ORDERS))
    classical = epsilon_of(event, 1e-5, Accounting(conversion="classical"))
    assert improved < classical
    assert set(Accounting().renyi_orders) > set(DEFAULT)
    assert Accounting(conversion="classical").renyi_orders == tuple(range(2, 201))


def test_only_finite_divergences_count():
    divergences = np.array([0.5, math.inf])
    for conversion in conversions.CONVERSIONS:
        one_order, two_orders = (Accounting("rdp", conversion, o) for o in ([2.0], [2.0, 3.0]))
        one = epsilon_from(divergences[:1], 1e-5, one_order)
        assert epsilon_from(divergences, 1e-5, two_orders) == one


def test_a_delta_that_no_float_holds_gives_no_epsilon():
    for conversion in conversions.CONVERSIONS:
        accounting = Accounting(conversion=conversion, orders=[2.0])
        assert epsilon_from(np.array([0.5]), 0.0, accounting) == math.inf


@pytest.mark.parametrize("event", [gaussian(1.0), gaussian(1e5), sampled(1.0, 0.01, 1_000)])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 10.0])
def test_delta_is_dp_accountings(event, epsilon):
    known = rdp.RdpAccountant().compose(event).get_delta(epsilon)
    ours = delta_from(renyi_divergences(event, DEFAULT), DEFAULT, epsilon)
    assert ours == pytest.approx(known, rel=1e-6)


def test_delta_of_what_is_not_private_is_one():
    assert delta_from(np.array([math.inf]), (2.0,), 1.0) == 1.0


# --- PLD ---


def test_pld_is_the_librarys_and_below_rdp():
    event = composed(sampled(2.0, 1 / 300, 600), dp_accounting.LaplaceDpEvent(20.0))
    by_pld = epsilon_of(event, 1e-5, PLD)
    counts = {(2.0, 1 / 300): 600}
    others = [dp_accounting.LaplaceDpEvent(20.0)]
    expected = accountants.composed_epsilon(counts, others, 1e-5, "pld")
    assert by_pld == pytest.approx(expected)
    assert by_pld < 0.95 * epsilon_of(event, 1e-5)


@pytest.mark.parametrize(("delta", "asked"), [(1.1e-9, True), (0.9e-9, False)])
def test_pld_is_not_asked_for_a_delta_that_its_arithmetic_does_not_reach(monkeypatch, delta, asked):
    monkeypatch.setattr(accountants, "composed_epsilon", lambda *_: 0.125)
    found = epsilon_of(gaussian(1.0), delta, PLD)
    assert (found == 0.125) == asked
    assert asked or found == epsilon_of(gaussian(1.0), delta)


# --- arguments ---


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"accountant": "gdp"}, ValueError, "`accountant` must be one of 'rdp', 'pld'"),
        ({"conversion": "best"}, ValueError, "`conversion` must be one of 'improved', 'classical'"),
        ({"orders": ()}, ValueError, "`orders` must hold at least one order"),
        ({"orders": [2.0, 1.0]}, ValueError, "`orders` must be finite and greater than 1.01"),
        ({"orders": [math.inf]}, ValueError, "`orders` must be finite"),
        ({"orders": ["2"]}, TypeError, "`orders` must be a number"),
        ({"orders": 3}, TypeError, "`orders` must be a sequence of numbers"),
        ({"orders": "23"}, TypeError, "`orders` must be a sequence of numbers"),
    ],
)
def test_wrong_arguments_are_refused(keywords, error, message):
    with pytest.raises(error, match=message):
        Accounting(**keywords)


def test_orders_may_come_in_any_order_and_repeatedly():
    given = [8, 2.0, np.float64(8), np.int64(3)]
    assert Accounting(orders=given).renyi_orders == (2.0, 3.0, 8.0)
