"""ε of counted releases and other events, by RDP and by PLD, and what is kept between two calls."""

from __future__ import annotations

import logging

import dp_accounting
import pytest
from dp_accounting import pld

from tf_adaptive_dp.accounting import accountants
from tf_adaptive_dp.accounting.accountants import composed_epsilon, composed_pld
from tf_adaptive_dp.accounting.composition import epsilon


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "counts",
    [
        {(1.1, 0.05): 60},
        {(1.1, 0.05): 61},
        {(0.9, 1.0): 7},
        {(1.1, 0.05): 60, (2.0, 0.01): 5, (3.0, 1.0): 2},
    ],
)
def test_distributions_that_are_kept_give_what_the_accountant_gives(counts):
    accountant = composed_pld(counts, [])
    for delta in (1e-5, 1e-3):
        found = composed_epsilon(counts, (), delta, "pld")
        assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-12)
    more = composed_epsilon({**counts, (5.0, 0.02): 1}, (), 1e-5, "pld")
    assert more > composed_epsilon(counts, (), 1e-5, "pld")


def test_epsilon_of_events_that_cannot_be_hashed():
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(3.0)])
    found = composed_epsilon({(1.1, 0.05): 60}, (event,), 1e-5, "pld")
    one = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    accountant = pld.PLDAccountant().compose(one, 60).compose(event)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


COMPOSED = {
    "Gaussian": [dp_accounting.GaussianDpEvent(7.3)],
    "one subsampled": [dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(2))],
    "repeated": [dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(9.0), 3)],
    "a list": [
        dp_accounting.ComposedDpEvent(
            [
                dp_accounting.SelfComposedDpEvent(
                    dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0)), 2
                ),
                dp_accounting.GaussianDpEvent(5.0),
            ]
        ),
        dp_accounting.GaussianDpEvent(6.0),
    ],
    "Laplace": [dp_accounting.LaplaceDpEvent(3.0)],
    "nothing": [dp_accounting.NoOpDpEvent()],
    "sampled surely": [
        dp_accounting.PoissonSampledDpEvent(1.0, dp_accounting.GaussianDpEvent(9.0))
    ],
}


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", COMPOSED)
def test_events_and_releases_cost_to_the_last_digit_what_the_accountant_says(name):
    counts = {(1.1, 0.05): 60, (3.0, 1.0): 2}
    accountant = composed_pld(counts, COMPOSED[name])
    for _ in range(2):  # from the caches the second time
        for delta in (1e-5, 1e-3):
            found = composed_epsilon(counts, COMPOSED[name], delta, "pld")
            assert found == accountant.get_epsilon(delta)


def test_events_within_events_count_as_often_as_all_of_them_say():
    one = dp_accounting.GaussianDpEvent(5.0)
    thrice = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.1, one), 3)
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.ComposedDpEvent([one, thrice]), 2)
    assert accountants._as_releases([nested, one]) == [
        ((5.0, 1.0), 2),
        ((5.0, 0.1), 6),
        ((5.0, 1.0), 1),
    ]


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["Gaussian", "a list", "Laplace"])
def test_events_cost_no_second_composition(name, monkeypatch):
    counts, events = {(1.3, 0.05): 50}, COMPOSED[name]
    first = composed_epsilon(counts, events, 1e-5, "pld")

    def composes(*args):
        raise AssertionError("composed again")

    monkeypatch.setattr(accountants, "pld_of_releases", composes)
    monkeypatch.setattr(accountants, "composed_pld", composes)
    assert composed_epsilon(counts, list(events), 1e-5, "pld") == first


def test_an_event_whose_list_has_grown_costs_more():
    grown = dp_accounting.ComposedDpEvent([dp_accounting.LaplaceDpEvent(5.0)])
    before = composed_epsilon({(1.3, 0.05): 50}, [grown], 1e-5, "pld")
    grown.events.append(dp_accounting.LaplaceDpEvent(5.0))
    assert composed_epsilon({(1.3, 0.05): 50}, [grown], 1e-5, "pld") > before


def test_orders_that_do_not_converge_are_left_out_in_silence(caplog):
    absl = logging.getLogger("absl")
    absl.addHandler(caplog.handler)
    try:
        spent = epsilon(0.95, 0.1, 20, 1e-3)
        absl.warning("_compute_log_a_frac failed to converge after %d iterations", 1000)
        absl.warning("something else")
    finally:
        absl.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"something else"}
    assert spent == pytest.approx(3.02, abs=0.01)


@pytest.mark.parametrize("accountant", accountants.ACCOUNTANTS)
def test_laplace_noise_that_is_none_is_not_private_and_less_is_refused(accountant):
    counts, none = {(2.0, 0.01): 100}, dp_accounting.LaplaceDpEvent(0.0)
    assert composed_epsilon(counts, (none,), 1e-5, accountant) == float("inf")
    assert accountants.unprotected([none]) == [none]
    with pytest.raises(ValueError, match="must be at least 0|eps must be"):
        composed_epsilon(counts, (dp_accounting.LaplaceDpEvent(-1.0),), 1e-5, accountant)


@pytest.mark.parametrize("accountant", accountants.ACCOUNTANTS)
def test_an_event_that_would_pay_for_others_is_refused(accountant):
    one = dp_accounting.GaussianDpEvent(1.0)
    less = dp_accounting.ComposedDpEvent([one, dp_accounting.SelfComposedDpEvent(one, -3)])
    with pytest.raises(ValueError, match="noise and the counts of an event must be at least 0"):
        composed_epsilon({(1.0, 1.0): 2}, (less,), 1e-5, accountant)
