"""The ε that `federated.train` shows: never too small, seldom computed, exact at the end."""

import math

import pytest

from federated.privacy import user_epsilon
from federated.privacy.client_sampling import EveryClient, FixedOrder, PoissonSampling
from federated.privacy.client_sampling import FixedSizeSampling as FixedSize
from federated.privacy.user_epsilon import UserLedger, epsilon_spent
from federated.privacy.user_level import UserLevelPrivacy
from federated.training.program import _PrivacyFigures, rounds_covered

DELTA, PLANNED = 1e-5, 150


def private(clients_per_round=100, noise_multiplier=1.0, **arguments):
    return UserLevelPrivacy(noise_multiplier, clients_per_round, 10_000, clip=1.0, **arguments)


@pytest.fixture
def computed(monkeypatch):
    """The numbers of rounds whose ε was computed."""
    found = []

    def counting(ledger, *args, **kwargs):
        found.append(ledger.num_releases)
        return epsilon_spent(ledger, *args, **kwargs)

    monkeypatch.setattr(user_epsilon, "epsilon_spent", counting)
    return found


def test_the_covered_rounds_are_few_never_fewer_and_at_most_three_or_an_eighth_more():
    for planned in (1, 7, 100, 5000):
        covered = [rounds_covered(n, planned) for n in range(planned + 1)]
        assert covered == sorted(covered) and covered[-1] == planned
        assert all(n <= c <= max(n * 9 / 8, n + 3) for n, c in enumerate(covered))
    assert len(set(covered)) < 80
    assert len(set(covered[1:33])) == 8  # where a round is short, ε is its dearest figure
    assert rounds_covered(120, 100) == 120


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "sampling, clients",
    [
        (PoissonSampling.for_batch_size(100, 10_000, steps=PLANNED), 100),
        (FixedSize(100, steps=PLANNED), 100),
        (EveryClient(), 10_000),
    ],
    ids=["poisson", "fixed size", "everyone"],
)
def test_epsilon_is_never_too_small_and_exact_at_the_end(sampling, clients, computed):
    ledger = UserLedger(private(clients, noise_multiplier=4.0))
    figures = _PrivacyFigures(ledger, DELTA, sampling, PLANNED)
    shown, before = [], 0.0
    for counted in range(PLANNED + 1):
        found = figures(ledger)
        assert found["privacy/rounds_counted"] == counted
        assert found["privacy/epsilon"] >= before
        before = found["privacy/epsilon"]
        if counted % 7 == 0 or counted == PLANNED:
            exact = epsilon_spent(ledger, DELTA, sampling=sampling)
            assert found["privacy/epsilon"] >= exact
            shown.append(found["privacy/epsilon_covers_rounds"] > counted)
        ledger.record_lost(1)
    assert found["privacy/epsilon"] == exact and any(shown)
    assert len(computed) < PLANNED / 3 and len(computed) == len(set(computed))


def test_a_kept_epsilon_is_of_the_same_releases(computed):
    sampling = PoissonSampling.for_batch_size(100, 10_000, steps=PLANNED)
    figures = _PrivacyFigures(UserLedger(private()), DELTA, sampling, PLANNED)
    for noise_multiplier in (1.0, 0.5, 1.0):
        ledger = UserLedger(private(noise_multiplier=noise_multiplier))
        ledger.record_lost(65)
        exact = epsilon_spent(ledger, DELTA, sampling=sampling)
        assert exact <= figures(ledger)["privacy/epsilon"] < 1.1 * exact
    assert computed == [72, 72, 72]


def test_a_run_that_continues_a_ledger_plans_for_its_rounds_too(computed):
    sampling = PoissonSampling.for_batch_size(100, 10_000, steps=PLANNED)
    ledger = UserLedger(private())
    ledger.record_lost(100)
    figures = _PrivacyFigures(ledger, DELTA, sampling, 3)
    ledger.record_lost(1)
    figures(ledger)
    assert computed == [103]


def test_banded_noise_is_not_looked_ahead_of(computed):
    banded = {"mechanism": "banded", "bands": 2, "min_separation": 4}
    ledger = UserLedger(private(**banded))
    sampling = FixedOrder(100, steps=PLANNED)
    ledger.record_lost(17)
    figures = _PrivacyFigures(UserLedger(ledger.privacy), DELTA, sampling, PLANNED)
    found = figures(ledger)
    assert computed == [17] and found["privacy/epsilon_covers_rounds"] == 17
    assert found["privacy/epsilon"] == epsilon_spent(ledger, DELTA, sampling=sampling)


def test_without_noise_it_says_so():
    ledger = UserLedger(private(noise_multiplier=0.0))
    sampling = PoissonSampling.for_batch_size(100, 10_000, steps=PLANNED)
    figures = _PrivacyFigures(ledger, DELTA, sampling, PLANNED)
    ledger.record_lost(1)
    found = figures(ledger)
    assert math.isinf(found["privacy/epsilon"]) and found["privacy/NOT_PRIVATE"] == 1.0
