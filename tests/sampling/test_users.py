"""Users are drawn as the accountant believes, with a uniformly random part of their records."""

import itertools

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import stats

import tf_adaptive_dp as dp
from tests.helpers.sampled import KEY, fake_ledger
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases
from tf_adaptive_dp.auditing import bounds
from tf_adaptive_dp.sampling import draws, sampling_epsilon
from tf_adaptive_dp.sampling.users import UserRecords

# User u has u + 1 records, in mixed order.
NUM_USERS, K = 60, 3
IDS = np.random.default_rng(0).permutation(
    np.repeat(np.arange(NUM_USERS), np.arange(NUM_USERS) + 1)
)
RECORDS = UserRecords(IDS)


def sampling_of(q=0.2, most=NUM_USERS, steps=1, k=K, **kwargs):
    return dp.PoissonSampling(q, most, steps, examples_per_user=k, **kwargs)


def joined(q, steps):
    """[steps, users]: whose records were in which batch."""
    table = np.zeros((steps, NUM_USERS), bool)
    for step in range(steps):
        rows = RECORDS.place(sampling_of(q), step, KEY).reshape(-1)
        table[step, IDS[rows[rows < len(IDS)]]] = True
    return table


def accepts(observed, expected, variances):
    statistic = ((observed - expected) ** 2 / variances).sum()
    return stats.chi2.ppf(5e-7, len(observed)) < statistic < stats.chi2.ppf(1 - 5e-7, len(observed))


@pytest.mark.parametrize("q", [0.05, 0.3])
def test_each_user_joins_with_probability_q_however_many_records_there_are(q):
    steps = 2_000
    observed = joined(q, steps).sum(0)
    assert accepts(observed, steps * q, steps * q * (1 - q))
    for wrong in (2 / 3 * q, 3 / 2 * q):
        assert not accepts(observed, steps * wrong, steps * wrong * (1 - wrong))


@pytest.mark.slow
def test_users_join_independently_of_each_other():
    q, steps = 0.2, 4_000
    centred = (joined(q, steps) - q) / np.sqrt(q * (1 - q) * steps)
    z = (centred.T @ centred * np.sqrt(steps))[np.triu_indices(NUM_USERS, 1)]
    assert np.abs(z).max() < stats.norm.isf(1e-6 / NUM_USERS**2)


@pytest.mark.parametrize("count, most", [(6, 3), (5, 1), (4, 4), (5, 4)])
def test_all_subsets_of_a_users_records_are_equally_likely(count, most):
    records = UserRecords(np.repeat([7, 8], [count, 2]))
    subsets = dict.fromkeys(itertools.combinations(range(count), most), 0)
    steps, random = 6_000, np.random.default_rng(1)
    users = np.zeros(steps, int)
    for taken in records.take(users, most, random):
        subsets[tuple(sorted(taken))] += 1
    observed, expected = np.array(list(subsets.values())), steps / len(subsets)
    if len(subsets) == 1:
        assert observed[0] == steps
        return
    statistic = ((observed - expected) ** 2 / expected).sum()
    limit = stats.chi2.isf(1e-6, len(subsets) - 1)
    assert statistic < limit
    # The test would see a subset that comes 3/2 times as often as the others.
    tilted = np.where(np.arange(len(subsets)) == 0, 1.5, 1.0) * observed
    tilted *= steps / tilted.sum()
    assert ((tilted - expected) ** 2 / expected).sum() > limit


def test_records_are_taken_anew_in_each_step():
    place = [RECORDS.place(sampling_of(1.0, 64), step, KEY) for step in range(2)]
    of_last = [set(rows[(rows < len(IDS))]) & set(np.flatnonzero(IDS == 59)) for rows in place]
    assert all(len(some) == K for some in of_last) and of_last[0] != of_last[1]


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_a_user_are_neighbours_in_one_part(parts):
    sampling = sampling_of(0.4, 50)
    rows = RECORDS.place(sampling, 0, KEY, parts)
    assert rows.shape == (parts, sampling.rows_per_batch(parts)) == (parts, -(-50 // parts) * K)
    seen = []
    for place in rows.reshape(-1, K):
        present = place[place < len(IDS)]
        if not len(present):
            continue
        (user,) = set(IDS[present])  # records of one user only
        assert len(set(present)) == len(present) == min(K, user + 1)
        assert (place[: len(present)] < len(IDS)).all()
        seen.append(user)
    assert len(seen) == len(set(seen)) > 10
    assert set(seen) == set(sampling.draw(NUM_USERS, 0, KEY))


def test_places_of_users_are_uniform_and_padding_has_random_signs():
    steps, most = 3_000, 20
    sampling = sampling_of(0.2, most)
    records = UserRecords(np.arange(8))  # one record each
    counts, marks = np.zeros(most), []
    for step in range(steps):
        rows = records.place(sampling, step, KEY).reshape(most, K)
        counts += rows[:, 0] < 8
        marks.append((rows[rows >= 8] - 8).mean())
    expected = counts.sum() / most
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, most - 1)
    assert abs(np.mean(marks) - 0.5) < 0.005


def test_padding_among_the_rows_of_a_user_has_random_signs_too():
    """Equal signs would show how many records a user has, and hide that a batch is one of ours."""
    sampling, marks = sampling_of(0.4, 50), []
    for step in range(400):
        places = RECORDS.place(sampling, step, KEY).reshape(-1, K)
        places = places[(places < len(IDS)).any(axis=1)]
        marks += (places[places >= len(IDS)] - len(IDS)).tolist()
    assert set(marks) == {0, 1} and len(marks) > 500
    assert abs(np.mean(marks) - 0.5) < 5 * 0.5 / np.sqrt(len(marks))


def batch(user_reduction, *weights):
    data = np.arange(len(IDS), dtype=np.float32)[:, None], IDS
    sampling = sampling_of(0.5, 48, user_reduction=user_reduction)
    batches = dp.poisson_batches((*data, *weights), sampling, user_ids=IDS, key=KEY)
    return next(batches.as_numpy_iterator())


def test_weights_make_a_mean_over_each_users_own_records():
    x, y, weights = batch("mean")
    assert x.shape == (48 * K, 1)
    sums = weights.reshape(-1, K).sum(1)
    assert set(np.round(sums, 5)) == {0.0, 1.0} and 20 < sums.sum() < 40
    for user, share in zip(y, weights):
        assert share in (0, np.float32(1 / min(K, user + 1)))
    zeros = weights[weights == 0]
    assert 0.2 < np.signbit(zeros).mean() < 0.8
    assert set(batch("sum")[2]) == {0.0, 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_own_weights_are_multiplied(dtype):
    own = np.where(IDS % 2, 2, 4).astype(dtype)
    _, y, weights = batch("mean", own)
    _, _, plain = batch("mean")
    np.testing.assert_allclose(weights, plain * np.where(y % 2, 2, 4), rtol=1e-6)
    assert np.signbit(weights[weights == 0]).any()
    np.testing.assert_allclose(batch("sum", own)[2], (plain > 0) * np.where(y % 2, 2.0, 4.0))


def test_the_draws_are_a_function_of_key_and_step():
    first, again = (RECORDS.place(sampling_of(), 4, KEY) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    other = RECORDS.place(sampling_of(), 4, draws.new_key(3))
    assert (first != other).any() and (first != RECORDS.place(sampling_of(), 5, KEY)).any()


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_epsilon_is_that_of_dp_accounting_for_the_users(accountant):
    n, steps, sigma, delta = 500, 200, 1.1, 1e-4
    sampling = dp.PoissonSampling.for_batch_size(50, n, steps, examples_per_user=8)
    ledger = Releases([(sigma, 50.0, steps)], examples_per_user=8)
    theirs = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant]()
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(sigma))
    theirs.compose(sampled, steps)
    spent = sampling.epsilon_spent(ledger, n, delta, accountant=accountant)
    assert spent == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)
    assert spent > 2 * sampling.epsilon_spent(
        Releases([(3 / 2 * sigma, 50.0, steps // 4)], examples_per_user=8), n, delta
    )
    plain = dp.PoissonSampling.for_batch_size(50, n, steps)
    assert plain.max_batch_size == sampling.max_batch_size and sampling.rows == 8 * plain.rows
    alike = fake_ledger((sigma, 50.0, steps))
    assert spent == plain.epsilon_spent(alike, n, delta, accountant=accountant)


def test_a_ledger_of_users_needs_a_sampling_of_users():
    users = Releases([(1.0, 10.0, 1)], examples_per_user=2)
    examples = fake_ledger((1.0, 10.0, 1))
    of_users = dp.PoissonSampling(0.1, 50, 5, examples_per_user=2)
    message = "The optimizer and the sampling must have the same unit"
    cases = [(examples, of_users), (users, dp.PoissonSampling(0.1, 50, 5))]
    cases += [(users, label) for label in ("poisson", "fixed", "shuffled")]
    cases += [(users, dp.PoissonSampling(0.1, 50, 5, examples_per_user=3))]
    cases += [(users, dp.sampling.FixedSizeSampling(10, 5))]
    for ledger, sampling in cases:
        with pytest.raises(ValueError, match=message):
            sampling_epsilon.epsilon_spent(sampling, ledger, 100, 1e-3)
        with pytest.raises(ValueError, match=message):
            dp.privacy_statement(ledger, 100, 1e-3, sampling=sampling)


def test_functions_that_do_not_know_the_unit_refuse_ledgers_of_users():
    users = Releases([(1.0, 10.0, 1)], examples_per_user=2)
    accounting = dp.accounting
    calls = [
        lambda: accounting.epsilon_spent(users, 100, 1e-3),
        lambda: accounting.epsilon_without_amplification(users, 100, 1e-3),
        lambda: accounting.dp_event(users, 100),
        lambda: accounting.releases_left(users, 1.0, 10.0, 100, 5.0, 1e-3),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="depends on the number of users"):
            call()


def test_the_event_of_users_costs_what_their_ledger_does():
    sampling = dp.PoissonSampling(0.1, max_batch_size=100, steps=30, examples_per_user=2)
    users = Releases([(1.0, 10.0, 30)], examples_per_user=2)
    event = sampling.dp_event(users, 100)
    poisson = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    assert event == dp_accounting.SelfComposedDpEvent(poisson, 30)
    later = Releases([], other_events=(event,))
    assert dp.accounting.epsilon_spent(later, 100, 1e-3) == pytest.approx(
        sampling.epsilon_spent(users, 100, 1e-3)
    )
    with pytest.raises(ValueError, match="The optimizer released with batch size 10"):
        sampling.dp_event(users, 200)


@pytest.mark.parametrize(
    "more",
    [
        {"other_events": (dp_accounting.GaussianDpEvent(2.0),)},
        {"checks": [BatchChecks(checked=30, repeated=10, nearest=3)]},
    ],
    ids=["other events", "repeated batches"],
)
def test_what_else_a_ledger_of_users_holds_costs_as_much_as_for_examples(more):
    def spent(k, **more):
        sampling = dp.PoissonSampling(0.1, max_batch_size=101, steps=30, examples_per_user=k)
        ledger = Releases([(1.0, 10.0, 30)], examples_per_user=k, **more)
        event = Releases([], other_events=(sampling.dp_event(ledger, 100),))
        cost = sampling.epsilon_spent(ledger, 100, 1e-3)
        assert cost == pytest.approx(dp.accounting.epsilon_spent(event, 100, 1e-3))
        return cost

    assert spent(2, **more) == spent(None, **more) > 1.1 * spent(2)


BAD_IDS = {
    "none": ([], ValueError, "one entry for each example"),
    "one number": (3, ValueError, "one entry for each example"),
    "floats": ([1.0, 2.0], TypeError, "whole numbers or strings.*float64"),
    "NaN": ([1.0, np.nan], TypeError, r"unknown \(NaN\)"),
    "None": (["a", None], TypeError, "ids of types NoneType, str"),
    "NaN among strings": (["a", np.nan], TypeError, "unknown|types float, str"),
    "empty": (["a", ""], ValueError, "an empty id"),
    "bools": ([True, False], TypeError, "whole numbers or strings"),
    "mixed": (np.array(["a", 1], object), TypeError, "ids of types int, str"),
    "two columns": ([[1, 2], [3, 4]], ValueError, "one user.*Drop such records"),
    "lists": ([[1], [3, 4]], ValueError, "one user.*Drop such records"),
    "a list among ids": (np.array([1, [2, 3]], object), ValueError, "one user.*Drop such records"),
    "masked": (np.ma.masked_equal([1, 2, 9, 9], 9), ValueError, "no masked.*2 masked values of 4"),
    "masked strings": (
        *(np.ma.masked_array(["a", "?"], mask=[False, True]), ValueError),
        "`user_ids` must have no masked values",
    ),
    "masked objects": (
        *(np.ma.masked_array(np.array(["a", "?"], object), mask=[False, True]), ValueError),
        "`user_ids` must have no masked values",
    ),
    "too large": ([2**63, 1], ValueError, "pass all ids as strings.*64 bits"),
    "far too large": ([1, -(2**70)], ValueError, "pass all ids as strings.*71 bits"),
    "an end that NumPy cuts off": (["a\0", "a"], ValueError, "must not end with a character"),
    "a bytes end": ([b"a\0", b"a"], ValueError, "must not end with a character"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids_are_refused(case):
    ids, error, message = BAD_IDS[case]
    with pytest.raises(error, match=message):
        UserRecords(ids)


def test_ids_come_as_users_have_them():
    for ids in (["b", "a", "b"], [b"b", b"a", b"b"], (2, 1, 2), np.array([2, 1, 2], object)):
        records = UserRecords(ids)
        assert (records.num_users, records.num_records) == (2, 3)
    assert UserRecords(np.array([-5, 2**63 - 1])).num_users == 2
    assert UserRecords([-(2**63), 2**63 - 1, 2**63 - 2]).num_users == 3
    assert UserRecords(np.array([2**64 - 1, 2**64 - 2], np.uint64)).num_users == 2
    assert UserRecords(np.ma.masked_array([4, 4, 1])).num_users == 2
    pandas = pytest.importorskip("pandas")
    assert UserRecords(pandas.Series(["x", "y", "x"])).num_users == 2
    assert UserRecords(pandas.Series([4, 4, 1])).num_users == 2
    with pytest.raises(TypeError, match="drop them"):
        UserRecords(pandas.Series(["x", None]))


def test_masks_are_not_forgotten_in_data_either():
    masked = np.ma.masked_equal(np.arange(4.0, dtype="float32")[:, None], 2)
    plan = dp.PrivacyPlan(
        noise_multiplier=2.0, delta=1e-3, num_examples=4, batch_size=2, epochs=1, accountant="rdp"
    )
    for call in (
        lambda: dp.poisson_batches((masked, np.zeros(4)), dp.PoissonSampling(0.5, 4, 1)),
        lambda: plan.batches(masked, np.zeros(4)),
        lambda: plan.batches({"a": masked}, np.zeros(4)),
        lambda: plan.batches(np.zeros([4, 1]), np.zeros(4), masked[:, 0]),
        lambda: dp.PrivateNormalization(1.0).adapt(masked),
        lambda: dp.side_information.token_counts(masked),
        lambda: dp.side_information.token_frequencies(masked[:, 0], provenance="public"),
        lambda: bounds.one_run_epsilon(masked[:, 0], np.array([True, False] * 2), 0.0),
    ):
        with pytest.raises(ValueError, match="must have no masked values"):
            call()


def test_batches_need_ids_if_and_only_if_users_are_drawn():
    data = np.zeros([4, 1], np.float32), np.zeros(4)
    of_users, plain = sampling_of(0.5, 4), dp.PoissonSampling(0.5, 4, 1)
    with pytest.raises(ValueError, match="pass `user_ids` with it.*Received: no `user_ids`"):
        dp.poisson_batches(data, of_users)
    with pytest.raises(ValueError, match="and with no other. Received: `user_ids`"):
        dp.poisson_batches(data, plain, user_ids=[1, 1, 2, 2])
    with pytest.raises(ValueError, match="3 ids for 4 examples"):
        dp.poisson_batches(data, of_users, user_ids=[1, 1, 2])
    for k, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="`examples_per_user`"):
            sampling_of(k=k)
    with pytest.raises(ValueError, match="`user_reduction` must be one of 'mean', 'sum'"):
        sampling_of(user_reduction="max")


def test_a_fingerprint_tells_assignments_apart():
    salt = bytes(16)
    of = {name: UserRecords(ids).fingerprint(salt) for name, ids in {
        "numbers": [1, 2, 1], "strings": ["a", "b", "a"], "others": [1, 2, 2],
    }.items()}  # fmt: skip
    assert of["numbers"] == of["strings"] != of["others"]
    assert UserRecords([1, 2, 1]).fingerprint(bytes(15) + b"1") != of["numbers"]
