"""The data of the simulation of tag prediction, and the ε that a trial ends with."""

import numpy as np
import pytest

from federated.datasets import stackoverflow
from federated.privacy import user_epsilon
from federated.privacy.client_sampling import PoissonSampling, ShuffledEpochs
from federated.simulation import stackoverflow_dp, tag_prediction, tag_trials
from federated.training.program import Trained
from tests.helpers.posts import write

POSTS = [
    *[("train", "a", "a qubit", "spin", "physics")] * 5,
    ("train", "a", "qubit", "", "unheard-of"),
    *[("train", user, "brew it hot", "a coffee", "brewing|taste") for user in "bc"],
    ("heldout", "d", "a qubit brew", "a", "taste|physics"),
    ("heldout", "e", "a brew", "", "taste|brewing"),
    *[("test", "a", "brew", "qubit", "brewing")] * 4,
    ("test", "a", "brew", "qubit", "unheard-of"),
]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write(tmp_path_factory.mktemp("posts"), POSTS)


def test_sizes_are_those_of_the_data_and_not_those_asked_for(data_dir, context):
    text = stackoverflow_dp.describe("small", data_dir)
    assert text == (
        "Data: 3 users with 8 posts, of which those with a known tag are trained on, 3 words and 3 "
        "tags, from counts of 2 users of the heldout split; 4 test posts."
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("most, read", [(3, 3), (5, 5), (256, 5)])
def test_posts_of_a_user_are_limited_and_those_of_the_test_are_not(data_dir, context, most, read):
    data = tag_prediction.load(data_dir, 10, 100, 10, most)
    assert sum(len(labels) for _, labels in data.batches("a")) == read
    assert sum(len(labels) for _, labels in data.batches("b")) == 1
    assert sum(len(labels) for _, labels in data.test) == 4


def test_a_user_is_no_larger_than_the_docstring_says():
    for settings in stackoverflow_dp.plan("paper", []):
        assert settings["max_posts"] * settings["words"] * np.float32().nbytes < 11e6
    assert f"first {tag_trials.MAX_POSTS} posts" in stackoverflow_dp.__doc__
    assert f"at most {tag_prediction.TEST_POSTS:,} test posts" in stackoverflow_dp.__doc__


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("most, kept", [(1, 6), (2, 3), (256, 2)])
def test_as_many_users_are_kept_in_memory_as_fit(data_dir, context, monkeypatch, most, kept):
    tag_prediction.load.cache_clear()
    limits = []
    monkeypatch.setattr(tag_prediction, "CACHE_BYTES", 6 * 4 * 3 * 1.01)  # six posts of 3 words
    monkeypatch.setattr(tag_prediction, "in_memory", lambda *args: limits.append(args[2]))
    tag_prediction.load(data_dir, 10, 100, 10, most)
    tag_prediction.load.cache_clear()
    assert limits == [kept]


def test_users_are_read_with_one_graph(data_dir, context, monkeypatch):
    traced = []
    made = stackoverflow._table
    monkeypatch.setattr(stackoverflow, "_table", lambda names: traced.append(0) or made(names))
    data = tag_prediction.load(data_dir, 10, 100, 10, 4)
    data.batches("a")
    before = len(traced)
    data.batches("b"), data.batches("c")
    assert before and len(traced) == before
    tag_prediction.load.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adadps", "ftrl"])
def test_a_trial_ends_with_the_epsilon_of_all_rounds_that_were_begun(
    data_dir, context, monkeypatch, tmp_path, method
):
    private = {"clients": None, "clients_per_round": 2, "sigma": 1.25, "tree_sigma": 7.5}
    monkeypatch.setitem(tag_trials.SETTINGS, "private", private)
    settings = next(
        s
        for s in stackoverflow_dp.plan("small", [])
        if (s["setting"], s["method"]) == ("private", method)
    )
    # What was planned holds, whatever the constants are by then.
    monkeypatch.setitem(tag_trials.SETTINGS, "private", {})
    ledgers = []

    def train(process, batches, sampler, num_rounds, folder, *, ledger, **arguments):
        ledger.record_lost(num_rounds)
        ledgers.append(ledger)
        return Trained(None, ledger, num_rounds - 1, num_rounds, sampler)

    monkeypatch.setattr(stackoverflow_dp.program, "train", train)
    final = stackoverflow_dp.train(settings, tmp_path, data_dir)
    (ledger,) = ledgers
    tree = method == "ftrl"
    assert ledger.privacy.noise_multiplier == (7.5 if tree else 1.25)
    assert ledger.privacy.clients_per_round == 2 and ledger.num_releases == 100
    sampling = ShuffledEpochs(2, 100) if tree else PoissonSampling.for_batch_size(2, 3, 100)
    epsilon = user_epsilon.epsilon_spent(ledger, 1 / 3, sampling=sampling)
    assert final == {"epsilon": pytest.approx(epsilon)} and epsilon > 0
