"""Banded noise over rounds: its covariance, what a client moves, its ε, and who may take part."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import optimize, stats

from federated.privacy import dp_queries
from federated.privacy.client_sampling import (
    ClientSampler,
    EveryClient,
    FixedOrder,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledEpochs,
    check_sampling,
)
from federated.privacy.dp_queries import MARGIN, BandedSum, GaussianSum
from federated.privacy.user_epsilon import epsilon_spent, privacy_statement
from federated.privacy.user_ledger import UserLedger
from federated.privacy.user_level import UserLevelPrivacy
from tests.federated.privacy.test_dp_queries import released
from tests.helpers.gaussianity import assert_gaussian, assert_uncorrelated, fits
from tests.helpers.strategies import noise_matrix, strategy_matrix, whitened
from tf_adaptive_dp.accounting import BandedNoise, Releases, noise_strategies

SIZE = 20_000
IDS = [f"client {k:02}" for k in range(60)]
PRIVACY = UserLevelPrivacy(1.5, 6, 60, clip=2.0, mechanism="banded", bands=4)
DELTA = 1e-4


def empty_rounds(query, rounds):
    return released(query, rounds, np.zeros(SIZE, np.float32))[0]


def follows(noises, strategy, stddev):
    """Whether noises, [rounds, size], have the covariance of a strategy and a scale."""
    z = whitened(strategy, noises)
    bound = 6 / math.sqrt(noises.shape[1])
    pairs = itertools.combinations(z, 2)
    return fits(z, stddev) and all(abs(np.corrcoef(a, b)[0, 1]) < bound for a, b in pairs)


@pytest.mark.parametrize("bands", [2, 4])
def test_the_noise_of_rounds_has_the_covariance_of_the_strategy(bands):
    strategy, stddev = BandedNoise(bands), 2.0 * 1.5
    w = empty_rounds(BandedSum(2.0, 1.5, bands, SIZE), 7)
    rows = noise_matrix(strategy, 7)
    for t in range(7):
        assert_gaussian(w[t], stddev * np.linalg.norm(rows[t]))
    for t in range(6):  # of round t and t + 1
        wanted = stddev**2 * rows[t] @ rows[t + 1]
        error = 6 * stddev**2 * np.linalg.norm(rows[t]) * np.linalg.norm(rows[t + 1])
        assert abs(np.mean(w[t] * w[t + 1]) - wanted) < error / math.sqrt(SIZE)
        assert wanted < -2 * error / math.sqrt(SIZE)  # so independent noise fails this
    assert follows(w, strategy, stddev)
    for wrong in (2 / 3, 3 / 2):
        assert not follows(w, strategy, stddev * wrong)


def test_independent_noise_and_other_bands_are_told_from_it():
    independent = empty_rounds(GaussianSum(2.0, 3.0), 7)
    first = 1 / BandedNoise(4).coefficients[0]
    assert not follows(independent * first, BandedNoise(4), 3.0)
    assert not follows(independent, BandedNoise(4), 3.0)
    assert not follows(empty_rounds(BandedSum(2.0, 1.5, 3, SIZE), 7), BandedNoise(4), 3.0)


def test_sums_over_rounds_have_the_noise_that_the_accounting_computes():
    sums = np.cumsum(empty_rounds(BandedSum(1.0, 1.0, 4, SIZE), 12), axis=0)
    for found, stddev in zip(sums, BandedNoise(4).sum_deviations(12)):
        assert_gaussian(found, stddev)


def test_a_round_that_is_run_again_takes_back_the_same_noise_and_adds_fresh_one():
    query, like = BandedSum(1.0, 1.0, 4, SIZE), np.zeros(SIZE, np.float32)
    noises, state = released(query, 5, like)
    np.testing.assert_array_equal(state.past, noises[:1:-1])  # those of the last three rounds
    (first,), _ = released(query, 1, like, state)
    (again,), _ = released(query, 1, like, state)
    first_c, *others = BandedNoise(4).coefficients
    assert_gaussian(first - again, math.sqrt(2) / first_c)
    for w in (first, again):
        z = first_c * w + others @ np.asarray(state.past)
        assert_gaussian(z, 1.0)
        for past in noises:
            assert_uncorrelated(z, past)
    fresh = [first_c * w + others @ np.asarray(state.past) for w in (first, again)]
    assert_uncorrelated(*fresh)


def inverse_covariance(monkeypatch, bands, rounds):
    """Of the noises that the query adds, where z has variance 1; the margin is left out."""
    drawn = iter(np.eye(rounds, dtype=np.float32))
    monkeypatch.setattr(dp_queries, "fresh_normal_numbers", lambda _: tf.constant(next(drawn)))
    query = BandedSum(1.0, 1.0 / MARGIN, bands, rounds)
    matrix = released(query, rounds, np.zeros(rounds, np.float32))[0].astype(float)
    return np.linalg.inv(matrix @ matrix.T)


def patterns(rounds, separation, most):
    for when in itertools.product([0, 1], repeat=rounds):
        there = np.flatnonzero(when)
        if len(there) <= most and np.diff(there).min(initial=separation) >= separation:
            yield when


@pytest.mark.parametrize(
    "bands, rounds, separation, most",
    [(2, 9, 2, None), (2, 9, 3, None), (3, 10, 3, 2), (3, 10, 4, None), (3, 2, 3, None)],
)
def test_what_a_client_moves_is_what_is_accounted(monkeypatch, bands, rounds, separation, most):
    """All releases g + w together are one Gaussian mechanism with the covariance of w.

    A client whose updates have norm 1 changes them by `when`: sensitivity √(whenᵀ Σ⁻¹ when).
    """
    banded = {"mechanism": "banded", "bands": bands, "max_participations": most}
    # Passes may be longer than the separation that is stated.
    banded["min_separation"] = separation
    privacy = UserLevelPrivacy(1.0, 1, separation + 1, clip=1.0, **banded)
    inverse = inverse_covariance(monkeypatch, bands, rounds)

    def largest(separation, most):
        ways = map(np.array, patterns(rounds, separation, most))
        return math.sqrt(max(when @ inverse @ when for when in ways))

    accounted, moved = privacy.sensitivity(rounds), largest(separation, most or rounds)
    assert moved <= accounted * (1 + 1e-5)
    assert moved > 0.99 * accounted
    # Clients that come too soon are not covered, so the test has the power to find them.
    assert largest(1, rounds) > 1.1 * accounted


@pytest.mark.parametrize("bands, separation, most", [(2, 2, 9), (3, 3, 9), (3, 5, 9), (4, 5, 2)])
def test_rows_in_a_row_cost_at_most_as_much_as_the_first_ones(bands, separation, most):
    """Rounds that are given up are rows from the middle of C; so are lost ones."""
    rounds = 12
    matrix = strategy_matrix(BandedNoise(bands), rounds)
    moved = [(matrix @ np.array(when)) ** 2 for when in patterns(rounds, separation, most)]
    for m in range(1, rounds + 1):
        windows = [r[t : t + m].sum() for r in moved for t in range(rounds - m + 1)]
        most_of_all = noise_strategies.sensitivity(BandedNoise(bands), m, separation, most) ** 2
        assert max(windows) == pytest.approx(most_of_all, rel=1e-9)


def banded_state(rounds, stddev=3.0, clip=2.0, bands=4, clients=6.0, coefficients=None):
    numerator = SimpleNamespace(
        rounds=rounds,
        clip=np.float32(clip),
        stddev=np.float32(stddev),
        coefficients=np.float32(coefficients or BandedNoise(bands).coefficients),
    )
    return SimpleNamespace(
        is_init_state=False,
        dp_event=dp_accounting.UnsupportedDpEvent().to_named_tuple(),
        query_state=SimpleNamespace(denominator=clients, numerator_state=numerator),
    )


def ledger_of(rounds, privacy=PRIVACY):
    ledger = UserLedger(privacy)
    stddev = privacy.noise_multiplier * float(privacy.clip)
    for number in range(1, rounds + 1):
        ledger.record(banded_state(number, stddev))
    return ledger


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("rounds", [1, 3, 10, 11, 95])
def test_epsilon_is_that_of_the_central_accounting(rounds, accountant):
    sampling = FixedOrder(6, steps=100)
    central = Releases([(1.5, 6.0, rounds)], noise=BandedNoise(4))
    expected = sampling.epsilon_spent(central, 60, DELTA, accountant=accountant)
    ledger = ledger_of(rounds)
    spent = epsilon_spent(ledger, DELTA, sampling=sampling, accountant=accountant)
    assert spent == pytest.approx(expected, rel=1e-12)
    for factor in (2 / 3, 3 / 2):
        other = dataclasses.replace(PRIVACY, noise_multiplier=1.5 * factor)
        wrong = epsilon_spent(ledger_of(rounds, other), DELTA, sampling=sampling)
        assert abs(wrong / expected - 1) > 0.2
    (event,) = ledger.other_events
    z = 1.5 / noise_strategies.sensitivity(BandedNoise(4), rounds, 10)
    assert event.noise_multiplier == pytest.approx(z, rel=1e-12)


def gaussian_epsilon(mu, delta):
    """ε of the Gaussian mechanism of sensitivity / noise μ (Balle and Wang, arXiv:1805.06530)."""

    def excess(epsilon):
        lower = stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + lower) - delta

    return optimize.brentq(excess, 0.0, 100.0) if excess(0.0) > 0 else 0.0


# A number is a round that goes on from the newest saved state, "lost" is one whose result was
# released and not saved, and ("back", t) restores the saved state after t rounds.
HISTORIES = {
    "undisturbed": ["round"] * 14,
    "lost at first": ["lost", "lost", *["round"] * 14],
    "begun anew": [*["round"] * 4, ("back", 0), *["round"] * 14],
    "lost": [*["round"] * 5, "lost", "lost", *["round"] * 3, "lost", *["round"] * 4],
    "restored": [*["round"] * 9, ("back", 3), *["round"] * 2, "lost", ("back", 1), *["round"] * 8],
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("bands, separation", [(2, 3), (3, 3), (3, 5), (4, 7)])
def test_epsilon_is_that_of_all_releases_together(monkeypatch, history, bands, separation):
    """From nothing but what the query adds: each z is a unit vector, so a release is a row of M.

    A client's updates move the releases by `when`, and M⁻¹ makes all of them one Gaussian
    mechanism, of sensitivity ‖M⁻¹ when‖. Lost rounds and abandoned ones are among them.
    """
    steps = HISTORIES[history]
    privacy = UserLevelPrivacy(1.5, 1, separation, clip=1.0, mechanism="banded", bands=bands)
    total = sum(step in ("round", "lost") for step in steps)
    drawn = iter(np.eye(total, dtype=np.float32))
    monkeypatch.setattr(dp_queries, "fresh_normal_numbers", lambda _: tf.constant(next(drawn)))
    query, like = BandedSum(1.0, 1.0 / MARGIN, bands, total), np.zeros(total, np.float32)
    ledger, saved, releases = UserLedger(privacy), [query.initial_global_state()], []
    for step in steps:
        if step[0] == "back":
            del saved[step[1] + 1 :]
            continue
        (row,), state = released(query, 1, like, saved[-1])
        releases.append((len(saved) - 1, row))  # its cohort is that of the round's number
        if step == "lost":
            ledger.record_lost(1)
        else:
            saved.append(state)
            ledger.record(banded_state(int(state.rounds), 1.5, 1.0, bands, clients=1.0))
    assert ledger.num_releases == total
    inverse = np.linalg.inv(np.array([row for _, row in releases], float))
    places = np.array([number % separation for number, _ in releases])
    moved = max(np.linalg.norm(inverse @ (places == client)) for client in range(separation))
    expected = gaussian_epsilon(moved / 1.5, DELTA)
    sampling = FixedOrder(1, steps=14)

    def spent(noise_multiplier, accountant="pld"):
        ledger.privacy = dataclasses.replace(privacy, noise_multiplier=noise_multiplier)
        return epsilon_spent(ledger, DELTA, sampling=sampling, accountant=accountant)

    for accountant in ("pld", "rdp"):
        assert expected * (1 - 1e-4) < spent(1.5, accountant)
    # The ledger does not know whose rounds were lost, so it takes those of one client for all.
    of_one_client = history not in ("lost", "restored")
    assert spent(1.5) < (1.001 if of_one_client else 1.4) * expected
    # This would find an ε that is too small, and one that is needlessly large.
    assert spent(1.5 * 3 / 2) < 0.8 * expected
    assert spent(1.5 * 2 / 3) > 1.25 * expected


def test_lost_rounds_and_rounds_that_are_run_again_are_rows_of_their_own():
    ledger = ledger_of(12)
    ledger.record_lost(2)
    assert ledger.sequences == {1: 2, 12: 1} and ledger.num_releases == 14
    first = BandedNoise(4).coefficients[0]
    whole = PRIVACY.sensitivity(12) ** 2
    assert ledger.banded_sensitivity**2 == pytest.approx(whole + 2 * first**2, rel=1e-12)
    ledger.record(banded_state(13))  # goes on from the state that is left
    assert ledger.sequences == {1: 2, 13: 1}
    ledger.record(banded_state(9))  # the state after 8 was resumed: rounds 9 to 13 were given up
    assert ledger.sequences == {1: 2, 5: 1, 9: 1}
    ledger.record(banded_state(1))  # a new run
    assert ledger.sequences == {1: 3, 5: 1, 9: 1}
    spent = [epsilon_spent(ledger, DELTA, sampling=FixedOrder(6, steps=100))]
    for number in range(2, 5):
        ledger.record(banded_state(number))
        ledger.record_lost(1)
        spent.append(epsilon_spent(ledger, DELTA, sampling=FixedOrder(6, steps=100)))
    assert spent == sorted(spent) and ledger.num_releases == 23


def test_runs_that_begin_anywhere_in_a_pass_have_rows_of_their_own():
    """Each run has an order of its own, and no client moves all rows by more than is counted."""
    ledger, moved = UserLedger(PRIVACY), np.zeros(len(IDS))
    for seed, length in enumerate((3, 14, 10, 25)):
        order = ClientSampler.fixed_order(IDS, PRIVACY, length, key=bytes([seed] * 32))
        joined = np.array([[c in order.cohort(t) for c in IDS] for t in range(length)], float)
        moved += np.square(strategy_matrix(PRIVACY.strategy, length) @ joined).sum(axis=0)
        for number in range(length):
            ledger.record(banded_state(number + 1))
    assert ledger.sequences == {3: 1, 10: 1, 14: 1, 25: 1}
    bound = ledger.banded_sensitivity**2
    assert 0.8 * bound < moved.max() <= bound * (1 + 1e-6)


def test_a_ledger_goes_through_json():
    ledger = ledger_of(12)
    ledger.record_lost(2)
    ledger.record(banded_state(9))
    plain = json.loads(json.dumps(ledger.to_dict()))
    again = UserLedger.from_dict(plain, PRIVACY)
    assert again.to_dict() == ledger.to_dict() and again.sequences == ledger.sequences
    assert again.num_releases == ledger.num_releases == 15
    again.record(banded_state(10))
    others = [
        UserLevelPrivacy(1.5, 6, 60, clip=2.0, mechanism=mechanism)
        for mechanism in ("gaussian", "tree")
    ]
    for other in others:
        with pytest.raises(ValueError, match="belongs to another mechanism"):
            UserLedger.from_dict(plain, other)
        with pytest.raises(ValueError, match="belongs to another mechanism"):
            UserLedger.from_dict(UserLedger(other).to_dict(), PRIVACY)
        assert "sequences" not in UserLedger(other).to_dict()  # older runs resume
    for change in (
        {"noise_multiplier": 1.5 * 2 / 3},
        {"noise_multiplier": 1.5 * 3 / 2},
        {"bands": 5},
        {"min_separation": 9},
        {"max_participations": 1},
    ):
        with pytest.raises(ValueError, match="`privacy` must be that of the ledger's rounds"):
            UserLedger.from_dict(plain, dataclasses.replace(PRIVACY, **change))
    other_clip = dataclasses.replace(PRIVACY, clip=1.0)  # which ε does not depend on
    assert UserLedger.from_dict(plain, other_clip).sequences == ledger.sequences


@pytest.mark.parametrize(
    "wrong",
    [
        banded_state(1, stddev=3.0 * 2 / 3),
        banded_state(1, stddev=3.0 * 3 / 2),
        banded_state(1, bands=3),
        banded_state(1, bands=5),
        banded_state(1, coefficients=[0.5] * 4),  # of norm 1, too
        banded_state(2),
        SimpleNamespace(
            is_init_state=False,
            dp_event=dp_accounting.GaussianDpEvent(1.5).to_named_tuple(),
            query_state=SimpleNamespace(denominator=6.0, numerator_state=()),
        ),
    ],
)
def test_a_release_that_is_not_as_stated_voids_epsilon(wrong):
    ledger = UserLedger(PRIVACY)
    with pytest.raises(ValueError, match="did not release what|record each round's state"):
        ledger.record(wrong)
    assert epsilon_spent(ledger, DELTA, sampling=FixedOrder(6, steps=100)) == math.inf


def test_without_noise_or_rounds():
    sampling = FixedOrder(6, steps=100)
    assert epsilon_spent(UserLedger(PRIVACY), DELTA, sampling=sampling) == 0.0
    noiseless = ledger_of(3, dataclasses.replace(PRIVACY, noise_multiplier=0.0))
    assert epsilon_spent(noiseless, DELTA, sampling=sampling) == math.inf
    assert "NOT PRIVATE" in privacy_statement(noiseless, DELTA, sampling=sampling)


def test_the_statement_says_what_was_released():
    ledger = ledger_of(25)
    ledger.record_lost(2)
    sampling = FixedOrder(6, steps=100)
    text = privacy_statement(ledger, DELTA, sampling=sampling)
    assert all(len(line) <= 80 for line in text.splitlines())
    text = " ".join(text.split())
    up = math.ceil(epsilon_spent(ledger, DELTA, sampling=sampling) * 1e4) / 1e4
    for part in (
        f"epsilon = {up:.4f} and delta = 0.0001 (PLD accounting, rounded up)",
        "one user's updates are replaced by zeros",
        "part of that of up to 3 earlier ones",
        "at most one of any 10 cohorts in a row, apart from repetitions of lost rounds, which",
        "1 sequence of 25 noisy averages of client updates, with noise of 4 bands, noise "
        "multiplier 1.5 and 6 of 60 users per cohort",
        f"moves it by at most {math.sqrt(3):.4g} times the clip",
        "2 sequences of 1 noisy average of client updates",
        "checkpoints are NOT protected: they contain noise that later rounds cancel",
    ):
        assert part in text
    assert "protected as well" not in text


@pytest.mark.parametrize("clients", [60, 59])
def test_passes_in_one_order_keep_the_rounds_of_a_client_apart(clients):
    privacy = UserLevelPrivacy(
        1.0, 6, clients, clip=1.0, mechanism="banded", bands=4, max_participations=5
    )
    separation = clients // 6
    assert privacy.min_separation == separation
    sampler = ClientSampler.fixed_order(IDS[:clients], privacy, 5 * separation)
    assert sampler.checked(privacy) is sampler
    rounds = {}
    for step in range(5 * separation):
        for client in sampler.cohort(step):
            rounds.setdefault(client, []).append(step)
    assert len(rounds) == 6 * separation
    assert all(np.diff(when).tolist() == [separation] * 4 for when in rounds.values())
    with pytest.raises(ValueError, match="up to 6 times, .* stated for max_participations=5.*`st"):
        ClientSampler.fixed_order(IDS[:clients], privacy, 5 * separation + 1)


def test_new_orders_break_the_separation_and_are_refused():
    shuffled = ShuffledEpochs(6, steps=100)
    sampler = ClientSampler(IDS, shuffled, bytes(32))
    nearest, times = sampler._returns()
    assert nearest < 4 and times == 10  # it is real: sooner than the bands end
    with pytest.raises(ValueError, match="draws a new order for each pass.*sampling=Shuffled"):
        sampler.checked(PRIVACY)
    others = [PoissonSampling(0.1, 60, 100), FixedSizeSampling(6, 100), EveryClient()]
    for other in (*others, shuffled):
        with pytest.raises(ValueError, match=r"at most once in any 10 .*`ClientSampler.fixed_ord"):
            check_sampling(PRIVACY, other)
        with pytest.raises(ValueError, match="at most once in any 10 rounds in a row"):
            epsilon_spent(ledger_of(1), DELTA, sampling=other)
    with pytest.raises(ValueError, match="back after 5 rounds.*min_separation=10"):
        check_sampling(PRIVACY, FixedOrder(12, steps=100))
    with pytest.raises(ValueError, match="holds 25 rounds in a row.*only 24 cohorts"):
        epsilon_spent(ledger_of(25), DELTA, sampling=FixedOrder(6, steps=24))


class NewOrders(FixedOrder):
    """What calls itself one order and is not."""

    def draw(self, num_examples, step, key):
        return ShuffledEpochs(self.batch_size, self.steps).draw(num_examples, step, key)


class Twice(FixedOrder):
    """Cohorts with the same client twice."""

    def draw(self, num_examples, step, key):
        return super().draw(num_examples, step, key)[[0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kind", [NewOrders, Twice])
def test_the_cohorts_themselves_are_checked(kind):
    sampler = ClientSampler(IDS, kind(6, steps=40), bytes(32))
    with pytest.raises(ValueError, match=r"a client comes back after \d.* rounds.*separation=10"):
        sampler.checked(PRIVACY)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"bands": None}, ValueError, "`bands` must be given .* from 2 to 10.*bands=None"),
        ({"bands": 1}, ValueError, "`bands` must be at least 2. Received: bands=1"),
        ({"bands": 2.0}, TypeError, "`bands` must be a whole number"),
        ({"bands": 11}, ValueError, "`bands` must be at most `min_separation`.*bands=11, min_s"),
        ({"min_separation": 3}, ValueError, "`bands` must be at most .*min_separation=3"),
        ({"min_separation": 11}, ValueError, "`min_separation` must be at most total_clients /"),
        ({"max_participations": 0}, ValueError, "`max_participations` must be at least 1"),
        ({"clip": "adaptive"}, ValueError, "what a round cancels was scaled .* as `clip`"),
        ({"clients_per_round": 5.5}, TypeError, "`clients_per_round` must be a whole number"),
        ({"mechanism": "tree"}, ValueError, "`bands` must be None .*mechanism='banded'.*'tree'"),
        ({"mechanism": "gaussian"}, ValueError, "`bands` must be None unless"),
        (
            {"mechanism": "gaussian", "bands": None, "max_participations": 2},
            ValueError,
            "`max_participations` must be None unless",
        ),
        (
            {"bands": 1025, "total_clients": 10**6, "clients_per_round": 1},
            ValueError,
            "`bands` must be at most 1024",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        UserLevelPrivacy(**{**dataclasses.asdict(PRIVACY), "min_separation": None, **change})


def test_it_is_plain():
    assert PRIVACY.min_separation == 10 and PRIVACY.strategy == BandedNoise(4)
    assert UserLevelPrivacy(**json.loads(json.dumps(dataclasses.asdict(PRIVACY)))) == PRIVACY
    with pytest.raises(ValueError, match="`mechanism` must be 'banded'"):
        UserLevelPrivacy(1.0, 6, 60, clip=1.0).sensitivity(3)


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("context")
def test_an_aggregator_in_tff_releases_it_and_its_ledger_agrees():
    process = PRIVACY.aggregator().create(tff.types.to_type((np.float32, [SIZE])))
    ledger, state, results = UserLedger(PRIVACY), process.initialize(), []
    for number in range(6):
        output = process.next(state, [])
        state = output.state
        results.append(output.result)
        ledger.record(state)
        assert ledger.sequences == {number + 1: 1}
    noises = 6 * np.stack(results)
    assert follows(noises, BandedNoise(4), 3.0)
    assert not follows(noises, BandedNoise(4), 2.0) and not follows(noises, BandedNoise(4), 4.5)
    past = np.asarray(state.query_state.numerator_state.past)
    np.testing.assert_allclose(past, noises[:2:-1], rtol=1e-4, atol=1e-4)
    ledger.record(process.next(state, []).state)
    again = process.next(state, [])
    ledger.record(again.state)
    assert ledger.sequences == {1: 1, 7: 1}
    assert float(state.query_state.numerator_state.stddev) == pytest.approx(3.0 * MARGIN, rel=1e-6)
