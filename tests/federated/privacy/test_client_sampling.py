"""Cohorts: their law, their key, and their agreement with the stated privacy."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from federated.privacy.client_sampling import (
    ClientSampler,
    EveryClient,
    FixedOrder,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledEpochs,
    check_sampling,
)
from federated.privacy.user_level import UserLevelPrivacy
from tf_adaptive_dp.sampling import draws

IDS = [f"client {k:03}" for k in range(60)]
KEY = draws.new_key(seed=7)
GAUSSIAN = UserLevelPrivacy(1.0, 12, 60, clip=1.0)
TREE = UserLevelPrivacy(1.0, 12, 60, clip=1.0, mechanism="tree")
SAMPLINGS = [
    PoissonSampling(0.2, max_batch_size=30, steps=20),
    FixedSizeSampling(12, steps=20),
    ShuffledEpochs(12, steps=20),
    EveryClient(),
]


def fits(joined, probability):
    """Whether 0/1 numbers come with a probability."""
    test = scipy.stats.binomtest(int(np.sum(joined)), np.size(joined), probability)
    return test.pvalue > 1e-6


def test_poisson_cohorts_have_each_client_independently_with_probability_q():
    sampler = ClientSampler.poisson(IDS, GAUSSIAN, num_rounds=4000, key=KEY)
    joined = np.zeros([4000, 60], bool)
    for step in range(4000):
        joined[step, [IDS.index(c) for c in sampler.cohort(step)]] = True
    assert fits(joined, 0.2)
    assert not fits(joined, 0.2 * 2 / 3) and not fits(joined, 0.2 * 3 / 2)
    assert all(fits(joined[:, k], 0.2) for k in range(60))
    sizes = np.bincount(joined.sum(axis=1), minlength=61)[4:22]
    expected = 4000 * scipy.stats.binom.pmf(np.arange(61), 60, 0.2)[4:22]
    assert scipy.stats.chisquare(sizes, expected * sizes.sum() / expected.sum()).pvalue > 1e-6
    correlations = np.corrcoef(joined.T)[~np.eye(60, dtype=bool)]
    assert np.abs(correlations).max() < 6 / np.sqrt(4000)
    over_time = np.corrcoef(joined[:-1].ravel(), joined[1:].ravel())[0, 1]
    assert abs(over_time) < 6 / np.sqrt(joined.size)


def test_a_cohort_may_be_empty_and_is_cut_at_a_cap_only_if_there_is_one():
    few = ClientSampler(IDS, PoissonSampling(0.02, max_batch_size=2, steps=300), KEY)
    sizes = [len(few.cohort(step)) for step in range(300)]
    assert min(sizes) == 0 and max(sizes) == 2
    capped = ClientSampler.poisson(IDS, GAUSSIAN, num_rounds=300, key=KEY, max_clients=13)
    whole = ClientSampler.poisson(IDS, GAUSSIAN, num_rounds=300, key=KEY)
    assert capped.sampling == PoissonSampling(0.2, max_batch_size=13, steps=300)
    drawn = [len(whole.cohort(step)) for step in range(300)]
    assert [len(capped.cohort(step)) for step in range(300)] == np.minimum(drawn, 13).tolist()
    assert max(drawn) > 13 and whole.sampling.failure_probability(60) == 0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: s.label)
def test_cohorts_are_a_function_of_key_and_round_whatever_the_order_of_ids(sampling):
    sampler = ClientSampler(IDS, sampling, KEY)
    turned = ClientSampler(IDS[::-1], sampling, KEY)
    cohorts = [sampler.cohort(step) for step in range(20)]
    assert [turned.cohort(step) for step in reversed(range(20))] == cohorts[::-1]
    for cohort in cohorts:
        assert len(set(cohort)) == len(cohort) and set(cohort) <= set(IDS)
    other = [ClientSampler(IDS, sampling).cohort(step) for step in range(20)]
    if isinstance(sampling, EveryClient):
        assert cohorts == [IDS] * 20
    else:
        assert other != cohorts


def test_a_new_run_has_a_key_of_its_own_unless_one_was_passed():
    sampler = ClientSampler(IDS, PoissonSampling(0.2, 61, 20))
    keys = {sampler.key, sampler.for_new_run().key, sampler.for_new_run().key}
    assert len(keys) == 3
    passed = ClientSampler(IDS, PoissonSampling(0.2, 61, 20), KEY)
    assert passed.for_new_run().key == KEY


@pytest.mark.parametrize("kind", [ShuffledEpochs, FixedOrder])
def test_an_order_is_that_of_the_same_clients_and_key(kind):
    """By it alone a run may begin in the middle of the pass that an earlier one ended in."""

    def order(ids=IDS, key=KEY):
        return ClientSampler(ids, kind(12, steps=20), key).order

    assert order() == order(ids=IDS[::-1])
    assert len({order(), order(key=draws.new_key()), order(ids=[*IDS[1:], "another"])}) == 3
    assert ClientSampler(IDS, PoissonSampling(0.2, 61, 20), KEY).order is None


def test_each_client_comes_once_a_pass_in_step_with_the_trees():
    ids = IDS[:58]
    privacy = UserLevelPrivacy(1.0, 12, 58, clip=1.0, mechanism="tree")
    sampler = ClientSampler(ids, ShuffledEpochs(12, steps=40), KEY).checked(privacy)
    assert privacy.rounds_per_pass == 4
    for start in range(0, 40, 4):
        seen = [c for step in range(start, start + 4) for c in sampler.cohort(step)]
        assert len(seen) == 48 == len(set(seen))
    across = [c for step in range(3, 7) for c in sampler.cohort(step)]
    assert len(set(across)) < 48


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: s.label)
def test_a_sampling_has_to_give_the_stated_clients_per_round(sampling):
    privacy = UserLevelPrivacy(1.0, 60, 60, clip=1.0) if sampling.label == "every" else GAUSSIAN
    check_sampling(privacy, sampling)
    for size in (13, 12.001, 11.999, 8):
        with pytest.raises(ValueError, match="the privacy is stated for clients_per_round"):
            check_sampling(UserLevelPrivacy(1.0, size, 60, clip=1.0), sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=lambda s: s.label)
def test_the_tree_needs_passes(sampling):
    check_sampling(TREE, ShuffledEpochs(12, steps=20))
    with pytest.raises(ValueError, match="use `ShuffledEpochs`"):
        check_sampling(TREE, sampling)


def test_the_number_of_clients_has_to_be_the_stated_one():
    sampler = ClientSampler(IDS[1:], SAMPLINGS[0], KEY)
    with pytest.raises(ValueError, match="total_clients=60, 59 client ids"):
        sampler.checked(GAUSSIAN)
    with pytest.raises(ValueError, match="total_clients=60, 59 client ids"):
        ClientSampler.poisson(IDS[1:], GAUSSIAN, num_rounds=10)
    assert ClientSampler(IDS, SAMPLINGS[0], KEY).checked(GAUSSIAN).key == KEY


@pytest.mark.parametrize(
    "ids, key, error, message",
    [
        ("abc", None, TypeError, "`client_ids` must be a list of strings"),
        ([1, 2], None, TypeError, "`client_ids` must be a list of strings"),
        (SimpleNamespace(client_ids=["a"]), None, TypeError, "pass `client_data.client_ids`.*Simp"),
        ([], None, ValueError, "at least one, and all different"),
        (["a", "b", "a"], None, ValueError, "3 ids, 2 distinct"),
        (["a"] * 1, b"short", ValueError, "32 bytes.*Received: bytes of length 5"),
    ],
)
def test_ids_and_keys_are_checked(ids, key, error, message):
    with pytest.raises(error, match=message):
        ClientSampler(ids, EveryClient(), key)


def test_samplings_and_rounds_are_checked():
    with pytest.raises(TypeError, match="`sampling` must be a `PoissonSampling`"):
        ClientSampler(IDS, "poisson")
    with pytest.raises(ValueError, match="cannot be larger than the number of clients"):
        ClientSampler(IDS, FixedSizeSampling(61, steps=1))
    with pytest.raises(TypeError, match="`privacy` must be a `UserLevelPrivacy`"):
        check_sampling(None, EveryClient())
    with pytest.raises(TypeError, match="`sampling` must be a `PoissonSampling`"):
        check_sampling(GAUSSIAN, "shuffled")
    sampler = ClientSampler(IDS, SAMPLINGS[0], KEY)
    for wrong in (-1, 20):
        with pytest.raises(ValueError, match="`round_num` must be at least 0 and below 20"):
            sampler.cohort(wrong)
    for wrong in (1.0, True):
        with pytest.raises(TypeError, match="`round_num` must be a whole number"):
            sampler.cohort(wrong)


class Available(ClientSampler):
    """Cohorts of the first clients, whatever the sampling says."""

    def cohort(self, round_num):
        return list(self.client_ids[:6])


BANDED = UserLevelPrivacy(1.0, 6, 60, clip=1.0, mechanism="banded", bands=2, min_separation=3)


def test_cohorts_of_a_subclass_are_none_of_this_library():
    sampler = ClientSampler(IDS, ShuffledEpochs(12, steps=20), KEY)
    assert sampler.draws_as_described
    assert not Available(IDS, ShuffledEpochs(12, steps=20), KEY).draws_as_described
    sampler.cohort = lambda round_num: IDS[:12]
    assert not sampler.draws_as_described


def test_where_clients_must_come_seldom_only_cohorts_of_this_library_are_accepted():
    with pytest.raises(TypeError, match=r"`ClientSampler` .* as they are.*Received: Available\("):
        Available(IDS, ShuffledEpochs(12, steps=20), KEY).checked(TREE)
    with pytest.raises(ValueError, match="a client comes back after 1.0 rounds"):
        Available(IDS, FixedOrder(6, steps=20), KEY).checked(BANDED)

    class Same(ClientSampler):
        def cohort(self, round_num):
            return super().cohort(round_num)

    with pytest.raises(TypeError, match=r"mechanism='banded'.*Received: Same\("):
        Same(IDS, FixedOrder(6, steps=20), KEY).checked(BANDED)
    assert Available(IDS, PoissonSampling(0.2, 60, 20), KEY).checked(GAUSSIAN)
