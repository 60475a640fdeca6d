"""ε of known runs, of composed ledgers, and how many releases a budget allows."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from types import SimpleNamespace

import dp_accounting
import pytest
import tensorflow as tf
from dp_accounting import pld, rdp
from scipy.stats import norm

from tests.helpers import tf_privacy
from tests.helpers.sampled import fake_ledger
from tf_adaptive_dp.accounting import accountants, composition
from tf_adaptive_dp.accounting.composition import (
    dp_event,
    epsilon,
    epsilon_spent,
    releases_left,
    repeated,
)
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment
from tf_adaptive_dp.sampling import sampling_epsilon

N, DELTA = 60_000, 1e-5


def subsampled(noise_multiplier, sampling_probability, steps):
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
        ),
        steps,
    )


def reference(event, accountant, delta=DELTA):
    fresh = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant]()
    return fresh.compose(event).get_epsilon(delta)


# --- epsilon ---------------------------------------------------------------------------------


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_probability", "steps"),
    [(2.0, 200 / N, 6_000), (1.1, 256 / N, 1_000), (4.0, 0.01, 1), (5.0, 1.0, 20)],
)
def test_epsilon_is_that_of_dp_accounting(
    accountant, noise_multiplier, sampling_probability, steps
):
    expected = reference(subsampled(noise_multiplier, sampling_probability, steps), accountant)
    ours = epsilon(noise_multiplier, sampling_probability, steps, DELTA, accountant)
    # PLD composes Gaussians without sampling in one go, hence with other rounding errors.
    assert ours == pytest.approx(expected, rel=1e-9 if sampling_probability < 1 else 1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_tf_privacy_accounts_reference(accountant):
    theirs = tf_privacy("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
    fresh = theirs.AccountantType[accountant.upper()].get_accountant()
    event = subsampled(2.0, 200 / N, 6_000)
    assert fresh.compose(event).get_epsilon(DELTA) == reference(event, accountant)


def test_epsilon_is_by_rdp_unless_told_otherwise():
    assert epsilon(2.0, 0.01, 100, DELTA) == epsilon(2.0, 0.01, 100, DELTA, "rdp")
    assert epsilon(2.0, 0.01, 100, DELTA) != epsilon(2.0, 0.01, 100, DELTA, "pld")


@pytest.mark.parametrize(
    ("noise_multiplier", "epochs", "published"),
    [
        (2, 20, 0.538),
        (2, 50, 0.879),
        (2, 100, 1.279),
        (4, 20, 0.240),
        (4, 50, 0.392),
        (4, 100, 0.569),
        (8, 100, 0.265),
    ],
)
def test_epsilon_of_published_mnist_runs(noise_multiplier, epochs, published):
    ours = epsilon(noise_multiplier, 200 / N, 300 * epochs, DELTA)
    assert ours == pytest.approx(published, abs=7e-4)


@pytest.mark.parametrize(("epochs", "published", "ours"), [(20, 0.111, 0.112), (50, 0.183, 0.186)])
def test_epsilon_of_published_mnist_runs_that_used_more_orders(epochs, published, ours):
    # dp_accounting's accountant knows no order between 64 and 127, where these have their optimum.
    dense = dp_accounting.rdp.RdpAccountant(range(2, 257))
    dense.compose(subsampled(8.0, 200 / N, 300 * epochs))
    assert round(dense.get_epsilon(DELTA), 3) == published
    assert round(epsilon(8.0, 200 / N, 300 * epochs, DELTA), 3) == ours


def delta_of_gaussian(s, eps):
    """δ(ε) = Φ(1/2s - εs) - exp(ε) Φ(-1/2s - εs) (Balle & Wang, 2018)."""
    return norm.cdf(0.5 / s - eps * s) - math.exp(eps) * norm.cdf(-0.5 / s - eps * s)


@pytest.mark.parametrize(("noise_multiplier", "steps"), [(5.0, 20), (1.0, 1), (20.0, 500)])
def test_epsilon_without_sampling_agrees_with_the_exact_gaussian(noise_multiplier, steps):
    s = noise_multiplier / math.sqrt(steps)

    def exact_delta(eps):
        return delta_of_gaussian(s, eps)

    by_pld = epsilon(noise_multiplier, 1, steps, DELTA, "pld")
    assert exact_delta(by_pld) <= DELTA * (1 + 1e-6)
    assert exact_delta(by_pld - 2e-3) > DELTA
    assert exact_delta(epsilon(noise_multiplier, 1, steps, DELTA, "rdp")) <= DELTA


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_probability", "steps"),
    [(2.0, 0.003, 6_000), (0.8, 0.01, 100), (30.0, 0.5, 100), (500.0, 0.01, 10_000)],
)
def test_pld_is_at_most_rdp(noise_multiplier, sampling_probability, steps):
    by_pld = epsilon(noise_multiplier, sampling_probability, steps, DELTA, "pld")
    assert 0 < by_pld <= epsilon(noise_multiplier, sampling_probability, steps, DELTA, "rdp")


def test_pld_promises_nothing_beyond_its_arithmetic():
    # dp_accounting's FFT says 3.65 for δ = 1e-14, where the truth is 3.77.
    for delta in (1e-9, 1e-11, 1e-14):
        by_pld = epsilon(200.0, 1, 10_000, delta, "pld")
        assert delta_of_gaussian(2.0, by_pld) <= delta * (1 + 1e-6), delta
        if delta < accountants.PLD_MIN_DELTA:
            assert by_pld == epsilon(200.0, 1, 10_000, delta)


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_probability", "steps"),
    [(0.1, 0.9, 3), (1.0, 1e-5, accountants.PLD_MAX_RELEASES + 1)],
)
def test_pld_leaves_to_rdp_what_would_exhaust_the_machine(
    noise_multiplier, sampling_probability, steps
):
    by_pld = epsilon(noise_multiplier, sampling_probability, steps, DELTA, "pld")
    assert by_pld == epsilon(noise_multiplier, sampling_probability, steps, DELTA, "rdp")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_falls_with_noise_and_delta_and_rises_with_steps_and_sampling(accountant):
    base = epsilon(2.0, 0.01, 1_000, DELTA, accountant)
    assert epsilon(2.02, 0.01, 1_000, DELTA, accountant) < base
    assert epsilon(2.0, 0.01, 1_000, 1.1e-5, accountant) < base
    assert epsilon(2.0, 0.0101, 1_000, DELTA, accountant) > base
    assert epsilon(2.0, 0.01, 1_010, DELTA, accountant) > base


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_nothing_released_costs_nothing_and_no_noise_costs_everything(accountant):
    assert epsilon(1.0, 0.01, 0, DELTA, accountant) == 0.0
    assert epsilon(0.0, 0.01, 0, DELTA, accountant) == 0.0
    assert epsilon(0.0, 0.01, 1, DELTA, accountant) == math.inf
    assert epsilon(0.0, 1.0, 1, DELTA, accountant) == math.inf
    assert epsilon(1e-200, 0.01, 1, DELTA, accountant) == math.inf


def test_much_noise_is_accounted_where_dp_accounting_fails():
    if importlib.metadata.version("dp-accounting") < "0.5":
        with pytest.raises(ValueError, match="Renyi divergence cannot be negative"):
            reference(subsampled(100.0, 1e-6, 10), "rdp")
    assert epsilon(100.0, 1e-6, 10, DELTA) == 0.0
    # No release is free, however much noise it has.
    assert 0 < epsilon(1e200, 0.01, 10**9, DELTA) < 0.01
    assert epsilon(1e6, 1e-3, 10**12, DELTA) > 0  # rounding makes some divergences negative


# --- ledgers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_segments_compose_as_in_dp_accounting(accountant):
    event = dp_accounting.ComposedDpEvent(
        [subsampled(2.0, 200 / N, 3_000), subsampled(1.5, 100 / N, 2_000)]
    )
    ledger = fake_ledger((2.0, 200, 3_000), (1.5, 100, 2_000))
    spent = epsilon_spent(ledger, N, DELTA, accountant=accountant)
    assert spent == pytest.approx(reference(event, accountant), rel=1e-9)
    assert spent > epsilon(2.0, 200 / N, 3_000, DELTA, accountant)
    assert spent > epsilon(1.5, 100 / N, 2_000, DELTA, accountant)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_split_segment_costs_what_it_costs_whole(accountant):
    whole = fake_ledger((2.0, 200, 6_000))
    split = fake_ledger((2.0, 200, 2_500), (2.0, 200, 3_500))
    apart = fake_ledger((2.0, 200, 2_500), (3.0, 200, 0), (2.0, 200, 3_500))
    spent = [epsilon_spent(x, N, DELTA, accountant=accountant) for x in (whole, split, apart)]
    assert spent == [epsilon(2.0, 200 / N, 6_000, DELTA, accountant)] * 3


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_other_events_are_composed_with_the_releases(accountant):
    other = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(8.0), 2)
    ledger = fake_ledger((2.0, 200, 6_000), other_events=(other, dp_accounting.NoOpDpEvent()))
    event = dp_accounting.ComposedDpEvent([subsampled(2.0, 200 / N, 6_000), other])
    spent = epsilon_spent(ledger, N, DELTA, accountant=accountant)
    assert spent == pytest.approx(reference(event, accountant), rel=1e-9)
    assert spent > 1.2 * epsilon(2.0, 200 / N, 6_000, DELTA, accountant)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_other_events_alone_count_and_a_nonprivate_one_is_infinite(accountant):
    gaussian = dp_accounting.GaussianDpEvent(8.0)
    alone = epsilon_spent(fake_ledger(other_events=(gaussian,)), N, DELTA, accountant=accountant)
    assert alone == pytest.approx(reference(gaussian, accountant), rel=1e-9)
    ruined = fake_ledger((2.0, 200, 1), other_events=(dp_accounting.NonPrivateDpEvent(),))
    assert epsilon_spent(ruined, N, DELTA, accountant=accountant) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_one_release_without_noise_makes_epsilon_infinite(accountant):
    ledger = fake_ledger((2.0, 200, 6_000), (0.0, 200, 1))
    assert epsilon_spent(ledger, N, DELTA, accountant=accountant) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_event_of_unknown_cost_is_infinite(accountant):
    broken = dp_accounting.GaussianDpEvent(math.nan)
    assert reference(broken, "rdp") == 0.0  # the trap
    ledger = fake_ledger((2.0, 200, 1), other_events=(broken,))
    assert epsilon_spent(ledger, N, DELTA, accountant=accountant) == math.inf


def test_an_unknown_event_is_an_error_and_never_free():
    ledger = fake_ledger((2.0, 200, 1), other_events=(dp_accounting.UnsupportedDpEvent(),))
    with pytest.raises(dp_accounting.UnsupportedEventError, match="Unsupported event"):
        epsilon_spent(ledger, N, DELTA)


def test_an_optimizer_stands_for_its_ledger():
    ledger = fake_ledger((2.0, 200, 6_000))
    optimizer = SimpleNamespace(ledger=ledger)
    assert epsilon_spent(optimizer, N, DELTA) == epsilon_spent(ledger, N, DELTA) > 0
    assert dp_event(optimizer, N) == dp_event(ledger, N)
    assert releases_left(optimizer, 2.0, 200, N, 1.0, DELTA) == releases_left(
        ledger, 2.0, 200, N, 1.0, DELTA
    )


def test_the_ledger_of_the_library_is_understood():
    ledger = Ledger(lambda shape, dtype, name: tf.Variable(tf.zeros(shape, dtype), name=name))
    assert epsilon_spent(ledger, N, DELTA) == 0.0
    for _ in range(3):
        ledger.record(1.1, 200.0)
    ledger.record(2.0, 200.0)
    event = dp_accounting.ComposedDpEvent(
        [subsampled(float(tf.constant(1.1)), 200 / N, 3), subsampled(2.0, 200 / N, 1)]
    )
    assert epsilon_spent(ledger, N, DELTA) == pytest.approx(reference(event, "rdp"), rel=1e-6)


def test_dp_event_lists_everything_in_order():
    gaussian = dp_accounting.GaussianDpEvent(8.0)
    ledger = fake_ledger((2.0, 200, 30), (1.5, N, 1), (1.0, 10, 0), other_events=(gaussian,))
    assert dp_event(ledger, N) == dp_accounting.ComposedDpEvent(
        [subsampled(2.0, 200 / N, 30), dp_accounting.GaussianDpEvent(1.5), gaussian]
    )
    assert dp_event(fake_ledger(), N) == dp_accounting.NoOpDpEvent()


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_dp_event_and_epsilon_spent_agree(accountant):
    ledger = fake_ledger((2.0, 200, 3_000), (1.5, 100, 2_000), (2.0, 200, 10))
    spent = epsilon_spent(ledger, N, DELTA, accountant=accountant)
    assert spent == pytest.approx(reference(dp_event(ledger, N), accountant), rel=1e-6)


# --- releases left ---------------------------------------------------------------------------

PARTLY_SPENT = [
    fake_ledger(),
    fake_ledger((2.0, 200, 1_000)),
    fake_ledger((1.5, 100, 1_000), (2.0, 200, 500), (3.0, 200, 10)),
    fake_ledger((2.0, 200, 1_000), other_events=(dp_accounting.GaussianDpEvent(20.0),)),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ledger", "accountant", "budgets"),
    [(ledger, "rdp", [0.5, 0.7, 1.3, 4.0]) for ledger in PARTLY_SPENT]
    + [(ledger, "pld", [0.5]) for ledger in PARTLY_SPENT[1:3]],
)
def test_releases_left_is_exact(ledger, accountant, budgets):
    for budget in budgets:
        left = releases_left(ledger, 2.0, 200, N, budget, DELTA, accountant=accountant)
        assert left > 0

        def spent_after(n):
            later = fake_ledger(*ledger.segments, (2.0, 200, n), other_events=ledger.other_events)
            return epsilon_spent(later, N, DELTA, accountant=accountant)

        assert spent_after(left) <= budget < spent_after(left + 1)  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["shuffled", pytest.param("fixed", marks=pytest.mark.slow)])
def test_a_full_ledger_is_priced_as_it_will_count(sampling):
    """It merges what comes into its last segment, with the worse parameters for all of them."""
    segments = [(2.0 + k, 200.0, 1) for k in range(Ledger.MAX_SEGMENTS - 1)] + [(20.0, 200.0, 2000)]
    merged = fake_ledger(*segments[:-1], (2.0, 200.0, 2001))
    budget = 0.9 * sampling_epsilon.epsilon_spent(sampling, merged, N, DELTA)
    ledger = fake_ledger(*segments)
    assert sampling_epsilon.epsilon_spent(sampling, ledger, N, DELTA) < budget
    arguments = (200.0, N, budget, DELTA)
    assert sampling_epsilon.releases_left(sampling, ledger, 2.0, *arguments) == 0
    assert sampling_epsilon.releases_left(sampling, ledger, 20.0, *arguments) > 0


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("accountant", "spent"),
    [("rdp", 0), ("rdp", 1), ("rdp", 400), ("rdp", 1_000), ("pld", 400), ("pld", 1_000)],
)
def test_a_budget_for_1000_releases_is_used_to_the_last(accountant, spent):
    budget = epsilon(2.0, 200 / N, 1_000, DELTA, accountant)
    ledger = fake_ledger((2.0, 200, spent))
    left = releases_left(ledger, 2.0, 200, N, budget, DELTA, accountant=accountant)
    assert left == 1_000 - spent


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_nothing_is_left_of_an_overspent_budget_or_without_noise(accountant):
    ledger = fake_ledger((2.0, 200, 6_000))
    spent = epsilon_spent(ledger, N, DELTA, accountant=accountant)
    kwargs = {"num_examples": N, "delta": DELTA, "accountant": accountant}
    assert releases_left(ledger, 2.0, 200, epsilon=0.9 * spent, **kwargs) == 0
    assert releases_left(ledger, 2.0, 200, epsilon=spent, **kwargs) == 0
    assert releases_left(ledger, 0.0, 200, epsilon=10.0, **kwargs) == 0


def test_pld_allows_releases_where_rdp_has_none_left():
    budget = epsilon(2.0, 200 / N, 6_100, DELTA, "pld")
    ledger = fake_ledger((2.0, 200, 6_000))
    assert releases_left(ledger, 2.0, 200, N, budget, DELTA) == 0
    assert releases_left(ledger, 2.0, 200, N, budget, DELTA, accountant="pld") == 100


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_search_stops_at_two_to_the_31(accountant):
    left = releases_left(fake_ledger(), 1e6, 1, N, 1.0, DELTA, accountant=accountant)
    assert left == 2**31


def test_the_search_computes_the_divergence_of_a_release_once():
    before = accountants._rdp_of_release.cache_info().misses
    releases_left(fake_ledger(), 2.345678, 200, N, 1.0, DELTA)
    assert accountants._rdp_of_release.cache_info().misses == before + 1


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"delta": 2}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=2"),
        ({"delta": 0.0}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=0.0"),
        ({"delta": 1.0}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=1.0"),
        ({"delta": math.nan}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=nan"),
        ({"delta": "1e-5"}, TypeError, "`delta` must be a number. Received: delta='1e-5'"),
        ({"noise_multiplier": -1}, ValueError, "`noise_multiplier` must be finite and at least 0"),
        ({"noise_multiplier": math.nan}, ValueError, "Received: noise_multiplier=nan"),
        ({"noise_multiplier": math.inf}, ValueError, "Received: noise_multiplier=inf"),
        ({"noise_multiplier": None}, TypeError, "`noise_multiplier` must be a number"),
        ({"sampling_probability": 0}, ValueError, r"`sampling_probability` must be in \(0, 1\]"),
        ({"sampling_probability": 1.01}, ValueError, "Received: sampling_probability=1.01"),
        ({"sampling_probability": math.nan}, ValueError, "Received: sampling_probability=nan"),
        ({"steps": -1}, ValueError, "`steps` must be at least 0. Received: steps=-1"),
        ({"steps": 1.5}, TypeError, "`steps` must be a whole number. Received: steps=1.5"),
        ({"accountant": "gdp"}, ValueError, "`accountant` must be one of 'rdp', 'pld'. Received"),
    ],
)
def test_epsilon_refuses(change, error, message):
    arguments = dict(noise_multiplier=1.0, sampling_probability=0.01, steps=10, delta=DELTA)
    with pytest.raises(error, match=message):
        epsilon(**{**arguments, **change})


@pytest.mark.parametrize(
    ("segment", "num_examples", "error", "message"),
    [
        ((1.0, 300.0, 1), 200, ValueError, "`batch_size` must be at most `num_examples`. Received"),
        ((1.0, 300.0, 1), 200, ValueError, "batch_size=300, num_examples=200"),
        ((1.0, 0.0, 1), 200, ValueError, "`batch_size` must be finite and greater than 0"),
        ((1.0, math.nan, 1), 200, ValueError, "Received: batch_size=nan"),
        ((math.nan, 20.0, 1), 200, ValueError, "Received: noise_multiplier=nan"),
        ((-1.0, 20.0, 1), 200, ValueError, "Received: noise_multiplier=-1.0"),
        ((1.0, 20.0, -1), 200, ValueError, "`num_releases` must be at least 0"),
        ((1.0, 20.0, 0.5), 200, TypeError, "`num_releases` must be a whole number"),
        ((1.0, 20.0, 1), 0, ValueError, "`num_examples` must be at least 1. Received"),
        ((1.0, 20.0, 1), 60e3, TypeError, "`num_examples` must be a whole number"),
    ],
)
def test_ledgers_are_checked(segment, num_examples, error, message):
    ledger = fake_ledger(segment)
    with pytest.raises(error, match=message):
        epsilon_spent(ledger, num_examples, DELTA)
    with pytest.raises(error, match=message):
        dp_event(ledger, num_examples)
    with pytest.raises(error, match=message):
        releases_left(ledger, 1.0, 1, num_examples, 1.0, DELTA)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epsilon": 0}, ValueError, "`epsilon` must be finite and greater than 0. Received"),
        ({"epsilon": math.nan}, ValueError, "Received: epsilon=nan"),
        ({"epsilon": math.inf}, ValueError, "Received: epsilon=inf"),
        ({"delta": 1}, ValueError, r"`delta` must be in \(0, 1\). Received: delta=1"),
        ({"noise_multiplier": -2}, ValueError, "Received: noise_multiplier=-2"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be finite and greater than 0"),
        ({"batch_size": 201}, ValueError, "`batch_size` must be at most `num_examples`"),
        ({"accountant": "zcdp"}, ValueError, "Received: accountant='zcdp'"),
        ({"ledger": 3}, TypeError, "`ledger` must be a ledger or an optimizer that has one"),
    ],
)
def test_releases_left_refuses(change, error, message):
    arguments = dict(
        ledger=fake_ledger(),
        noise_multiplier=1.0,
        batch_size=20,
        num_examples=200,
        epsilon=1.0,
        delta=DELTA,
    )
    with pytest.raises(error, match=message):
        releases_left(**{**arguments, **change})


def test_epsilon_spent_refuses_other_arguments():
    with pytest.raises(ValueError, match=r"`delta` must be in \(0, 1\). Received: delta=2"):
        epsilon_spent(fake_ledger(), N, 2)
    with pytest.raises(ValueError, match="Received: accountant='RDP'"):
        epsilon_spent(fake_ledger(), N, DELTA, accountant="RDP")
    with pytest.raises(TypeError, match="`ledger` must be a ledger or an optimizer .*Received"):
        epsilon_spent(tf.keras.optimizers.SGD(), N, DELTA)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"pass `model.optimizer`\. Received: ledger=<.*Sequential"):
        epsilon_spent(model, N, DELTA)


def passes_met(counts, per_pass):
    """Of how many passes each of several segments has releases; an example is in one of each."""
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    passes = [{r // per_pass for r in range(end - n, end)} for end, n in zip(ends, counts)]
    return [len(of_segment) for of_segment in passes]


def test_no_example_is_in_more_releases_of_a_segment_than_counted():
    """A last batch that is smaller may be left out of each pass, or not."""
    for num_examples, size in ((10, 3), (10, 5), (11, 5), (12, 3), (7, 4)):
        several = (itertools.product(range(1, 60 // k**2), repeat=k) for k in (2, 3))
        for counts in itertools.chain(*several):
            segments = [Segment(1.0 + k, float(size), n) for k, n in enumerate(counts)]
            found = composition.max_participations(segments, num_examples)
            for per_pass in {num_examples // size, -(-num_examples // size)}:
                met = passes_met(counts, per_pass)
                assert all(of >= m for of, m in zip(found, met)), (num_examples, size, counts)
    whole = [Segment(1.0, 5.0, 4), Segment(2.0, 5.0, 2), Segment(1.0, 5.0, 1)]
    assert composition.max_participations(whole, 10) == [2, 1, 1]
    assert composition.max_participations(whole[::-1], 10) == [1, 2, 3]


@pytest.mark.parametrize(("nearest", "counted"), [(9, 3), (10, 0), (11, 0)])
def test_a_batch_that_comes_back_before_the_pass_is_over_is_a_repetition(nearest, counted):
    segment, known = Segment(1.0, 10.0, 20), BatchChecks(20, repeated=3, nearest=nearest)
    assert repeated(segment, known, 100, in_epochs=True) == counted
    assert repeated(segment, known, 100, in_epochs=False) == 3


def test_all_releases_of_a_declared_size_count_with_the_largest_that_was_seen():
    one, declared = BatchChecks(checked=4), BatchChecks(checked=4, declared=8.0)
    segments = [(2.0, 8.0, 4), (2.0, 20.0, 4), (2.0, 6.0, 4), (2.0, 12.0, 4)]
    ledger = Releases(segments, checks=[one, declared, one, declared])
    with pytest.warns(UserWarning, match="expected batch size of 8, .* batches of 20 rows"):
        counted, _ = composition.read_ledger(ledger, 100)
    assert [segment.batch_size for segment in counted] == [20.0, 20.0, 6.0, 20.0]
