"""The ledger of rounds: what is counted is what was released."""

import collections
import dataclasses
import json
import random
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff

from federated.privacy.user_ledger import UserLedger, effective_noise_multiplier
from federated.privacy.user_level import UserLevelPrivacy
from tf_adaptive_dp.errors import NotPrivateError

FIXED = UserLevelPrivacy(1.1, 20, 60, clip=0.3)
ADAPTIVE = UserLevelPrivacy(0.7, 20, 60)
TREE = UserLevelPrivacy(1.1, 20, 60, clip=0.3, mechanism="tree")
BANDED = UserLevelPrivacy(1.1, 20, 60, clip=0.3, mechanism="banded", bands=2)
PUBLIC = SimpleNamespace(description="word counts", provenance="public")
EVENT = dp_accounting.ComposedDpEvent(
    [dp_accounting.GaussianDpEvent(30.0), dp_accounting.LaplaceDpEvent(50.0)]
)
RELEASED = SimpleNamespace(description="norms", provenance=EVENT)


pytestmark = pytest.mark.usefixtures("context")


def process_of(privacy):
    return privacy.aggregator().create(tff.types.to_type((np.float32, [3])))


def state(event, clients=20.0, **numerator):
    """An aggregator's state, as `record` sees it."""
    return SimpleNamespace(
        is_init_state=False,
        dp_event=event.to_named_tuple(),
        query_state=SimpleNamespace(
            denominator=clients, numerator_state=SimpleNamespace(**numerator)
        ),
    )


def gaussian(*noise_multipliers):
    events = [dp_accounting.GaussianDpEvent(np.float32(z)) for z in noise_multipliers]
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def tree_state(rounds, stddev=0.33, period=3):
    tree = {"rounds": rounds, "period": period, "clip": np.float32(0.3)}
    return state(dp_accounting.UnsupportedDpEvent(), stddev=np.float32(stddev), **tree)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("privacy", [FIXED, ADAPTIVE], ids=["fixed", "adaptive"])
def test_rounds_of_a_process_are_one_segment_with_the_stated_noise(privacy):
    process, ledger = process_of(privacy), UserLedger(privacy)
    current = process.initialize()
    with pytest.raises(ValueError, match="initialize"):
        ledger.record(current)
    for rounds in range(1, 9):
        clients = [np.ones(3, np.float32)] * (rounds % 3)
        current = process.next(current, clients).state
        ledger.record(current)
        assert ledger.segments == [(privacy.noise_multiplier, 20.0, rounds)]
        if rounds == 4:
            ledger.record_lost(0)
    ledger.record_lost(3)
    ledger.record(process.next(current, []).state)
    assert ledger.segments == [(privacy.noise_multiplier, 20.0, 12)]
    assert ledger.num_releases == 12
    assert ledger.other_events == () and ledger.trees == {}


def test_rounds_of_a_tree_process_are_trees_of_a_pass():
    process, ledger = process_of(TREE), UserLedger(TREE)
    current, seen = process.initialize(), []
    for _ in range(7):
        current = process.next(current, []).state
        ledger.record(current)
        seen.append(ledger.trees)
    assert seen == [{1: 1}, {2: 1}, {3: 1}, {1: 1, 3: 1}, {2: 1, 3: 1}, {3: 2}, {1: 1, 3: 2}]
    assert ledger.segments == [] and ledger.num_releases == 7


@pytest.mark.parametrize("z", np.random.default_rng(0).uniform(0.3, 20, 12))
def test_rounding_never_counts_more_noise_than_there_was_and_opens_no_segment_a_round(z):
    ledger = UserLedger(UserLevelPrivacy(z, 300, 600, clip=1.0))
    found = [float(np.float32(z) * (1 + k * 1e-7)) for k in range(-4, 5)]
    for value in found * 3:
        ledger.record(state(gaussian(value), clients=300.0))
        assert ledger.segments[-1].noise_multiplier <= max(np.float32(value), 0)
        assert ledger.segments[-1].noise_multiplier >= z * (1 - 2e-6)
    assert ledger.num_releases == 27
    assert len({segment.noise_multiplier for segment in ledger.segments}) <= 2


@pytest.mark.parametrize(
    "event, counted",
    [
        (gaussian(1.1 * 2 / 3), [(np.float32(1.1 * 2 / 3), 20.0, 1)]),
        (gaussian(1.0999), [(np.float32(1.0999), 20.0, 1)]),
        (gaussian(1.1, 11.0), [(pytest.approx((1.1**-2 + 11.0**-2) ** -0.5), 20.0, 1)]),
        (gaussian(0.0), [(0.0, 20.0, 1)]),
        (gaussian(1.1 * 3 / 2), [(1.1, 20.0, 1)]),
    ],
)
def test_another_noise_than_stated_is_counted_as_what_it_was_and_told(event, counted):
    ledger = UserLedger(FIXED)
    with pytest.raises(ValueError, match=r"did not release what `privacy` says.*noise multipl"):
        ledger.record(state(event))
    assert ledger.segments == counted


@pytest.mark.parametrize(
    "privacy, released",
    [
        (FIXED, state(dp_accounting.UnsupportedDpEvent())),
        (FIXED, state(dp_accounting.NonPrivateDpEvent())),
        (FIXED, state(gaussian(np.nan))),
        (FIXED, tree_state(1)),
        (TREE, state(gaussian(1.1))),
        (TREE, state(dp_accounting.UnsupportedDpEvent())),
        (TREE, tree_state(2)),
        (TREE, tree_state(1, stddev=0.33 * 2 / 3)),
        (TREE, tree_state(1, stddev=0.33 * 3 / 2)),
        (TREE, tree_state(1, period=4)),
    ],
)
def test_a_round_of_which_it_is_not_known_what_it_released_voids_epsilon(privacy, released):
    ledger = UserLedger(privacy)
    with pytest.raises(ValueError, match="did not release what|record each round's state"):
        ledger.record(released)
    assert ledger.other_events == (dp_accounting.NonPrivateDpEvent(),)
    assert ledger.num_releases == 1
    again = UserLedger.from_dict(ledger.to_dict(), privacy)
    assert again.other_events == ledger.other_events


STATED = [FIXED, ADAPTIVE, TREE, UserLevelPrivacy(0.0, 20, 60), BANDED]


@pytest.mark.parametrize("privacy", STATED, ids=["fixed", "adaptive", "tree", "zero", "banded"])
def test_the_noise_of_a_state_is_compared_before_a_round(privacy):
    start = process_of(privacy).initialize()
    UserLedger(privacy).check_noise(start)
    z = privacy.noise_multiplier
    mechanism = {"clip": 0.3, "mechanism": "tree" if privacy is not TREE else "gaussian"}
    for change in (
        {"noise_multiplier": z * 2 / 3 if z else 0.1},
        {"noise_multiplier": z * 3 / 2 if z else 0.2},
        {"noise_multiplier": z * (1 + 3e-5) if z else 1e-3},
        {"clients_per_round": 19},
        {"total_clients": 80} if privacy is TREE else {"clients_per_round": 15},
        {"bands": 3} if privacy is BANDED else mechanism,
    ):
        said = dataclasses.replace(privacy, **change)
        ledger = UserLedger(said)
        with pytest.raises(ValueError, match="did not release what `privacy` says. Build process"):
            ledger.check_noise(start)
        assert ledger.num_releases == 0  # nothing has been released


def test_the_noise_of_rounds_is_compared_as_that_of_the_beginning():
    process, ledger = process_of(ADAPTIVE), UserLedger(ADAPTIVE)
    current = process.initialize()
    for _ in range(20):  # in which the clip moves
        current = process.next(current, [np.ones(3, np.float32)] * 20).state
        ledger.check_noise(current)


def test_another_divisor_than_stated_is_told():
    ledger = UserLedger(FIXED)
    with pytest.raises(ValueError, match="sums divided by 30"):
        ledger.record(state(gaussian(1.1), clients=30.0))
    assert ledger.num_releases == 1


def test_the_state_of_a_learning_process_is_taken_and_other_things_are_not():
    ledger = UserLedger(FIXED)
    ledger.record(SimpleNamespace(aggregator=state(gaussian(1.2 * 1.1 / 1.2))))
    assert ledger.num_releases == 1
    with pytest.raises(TypeError, match="whose aggregator is made by `UserLevelPrivacy`"):
        ledger.record(SimpleNamespace(aggregator=()))
    with pytest.raises(TypeError, match="`privacy` must be a `UserLevelPrivacy`"):
        UserLedger(None)
    for wrong, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="`rounds` must be"):
            ledger.record_lost(wrong)


def test_a_tree_that_is_given_up_for_an_earlier_state_stays_counted():
    ledger = UserLedger(TREE)
    for rounds in (1, 2):
        ledger.record(tree_state(rounds))
    ledger.record(tree_state(2))  # again, from the state after one
    assert ledger.trees == {2: 2}
    ledger.record(tree_state(3))
    ledger.record(tree_state(4))
    assert ledger.trees == {1: 1, 2: 1, 3: 1}
    ledger.record(tree_state(2))
    assert ledger.trees == {1: 1, 2: 2, 3: 1}
    ledger.record(tree_state(3))
    assert ledger.trees == {1: 1, 2: 1, 3: 2}
    assert ledger.num_releases == 7


@pytest.mark.parametrize(
    "before, lost, trees",
    [
        (0, 1, {1: 1}),
        (0, 2, {2: 2}),
        (1, 1, {1: 1, 2: 1}),
        (1, 2, {1: 1, 3: 2}),
        (2, 4, {2: 1, 3: 4}),
        (3, 1, {1: 1, 3: 1}),
        (4, 1, {1: 1, 2: 1, 3: 1}),
    ],
)
def test_each_lost_round_counts_as_a_tree_since_it_may_be_the_same_one_each_time(
    before, lost, trees
):
    ledger = UserLedger(TREE)
    for rounds in range(1, before + 1):
        ledger.record(tree_state(rounds))
    ledger.record_lost(lost, tree_state(before))
    assert ledger.trees == trees
    assert ledger.num_releases == before + lost
    ledger.record(tree_state(before + 1))  # goes on with the tree of the state that is left
    assert sum(ledger.trees.values()) == before // 3 + 1 + lost
    assert ledger.num_releases == before + lost + 1


def test_rounds_lost_from_an_unknown_state_may_have_ended_a_pass():
    ledger = UserLedger(TREE)
    for rounds in (1, 2, 3):
        ledger.record(tree_state(rounds))
    ledger.record_lost(2)
    assert ledger.trees == {3: 3}
    with pytest.raises(ValueError, match="did not release what `privacy` says"):
        ledger.record_lost(1, tree_state(1, period=4))
    with pytest.raises(TypeError, match="`state` must be that of a learning process"):
        ledger.record_lost(1, SimpleNamespace())
    assert ledger.num_releases == 5


@pytest.mark.parametrize("says_state", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_all_noise_on_a_user_is_counted_whatever_state_a_round_begins_with(seed, says_state):
    # Each round draws the noise of the nodes that it finishes, all of which a user at one of their
    # leaves moves by 1. A user is at one leaf of each pass.
    period, choose = 11, random.Random(seed)
    ledger = UserLedger(dataclasses.replace(TREE, total_clients=20 * period))
    assert ledger.privacy.rounds_per_pass == period
    drawn, newest, favorite = collections.Counter(), 0, choose.randint(0, period - 1)
    for number in range(60):
        goes_on = number < period or choose.random() < 0.1
        others = [favorite, favorite, choose.randint(0, newest)]
        begun = newest if goes_on else min(choose.choice(others), newest)
        leaf = begun % period + 1
        for level in range(4):
            if leaf % 2**level == 0:
                drawn.update((begun // period, x) for x in range(leaf - 2**level, leaf))
        if number >= period and choose.random() < 0.9:
            ledger.record_lost(1, tree_state(begun, period=period) if says_state else None)
        else:
            ledger.record(tree_state(begun + 1, period=period))
            newest = begun + 1
    passes = {number for number, _ in drawn}
    most = sum(max(n for (of, _), n in drawn.items() if of == number) for number in passes)
    counted = sum(count * steps.bit_length() for steps, count in ledger.trees.items())
    assert most <= counted


def full_ledgers():
    fixed = UserLedger(FIXED, PUBLIC)
    fixed.record(state(gaussian(1.1)))
    fixed.record_lost(2)
    released = UserLedger(ADAPTIVE, RELEASED)
    released.record_lost(5)
    tree = UserLedger(TREE, RELEASED)
    for rounds in (1, 2, 3, 4, 4, 5):
        tree.record(tree_state(rounds))
    tree.record_lost(2)
    return [UserLedger(FIXED), fixed, released, UserLedger(TREE), tree]


@pytest.mark.parametrize("number", range(5))
def test_a_ledger_goes_through_json_and_goes_on_alike(number):
    ledger = full_ledgers()[number]
    plain = ledger.to_dict()
    again = UserLedger.from_dict(json.loads(json.dumps(plain)), ledger.privacy)
    assert again.to_dict() == plain
    for one in (ledger, again):
        if one.is_tree:
            one.record(tree_state(one.to_dict()["behind"] + 1))
        else:
            one.record(state(gaussian(one.privacy.noise_multiplier * (1 + 1e-6))))
        one.record_lost(1)
    assert again.to_dict() == ledger.to_dict() != plain
    assert again.segments == ledger.segments
    assert again.other_events == ledger.other_events
    assert again.num_releases == ledger.num_releases
    assert again.side_information == ledger.side_information


def test_a_ledger_of_the_other_mechanism_or_of_nonsense_is_refused():
    *_, fixed, _, _, tree = full_ledgers()
    with pytest.raises(ValueError, match="belongs to another mechanism"):
        UserLedger.from_dict(fixed.to_dict(), TREE)
    with pytest.raises(ValueError, match="belongs to another mechanism"):
        UserLedger.from_dict(tree.to_dict(), FIXED)
    with pytest.raises(ValueError, match="otherwise their ε would be wrong"):
        UserLedger.from_dict(tree.to_dict(), dataclasses.replace(TREE, noise_multiplier=2.2))
    with pytest.raises(ValueError, match="`rounds` must be at least 1"):
        UserLedger.from_dict({**fixed.to_dict(), "segments": [[1.0, 20.0, -4]]}, FIXED)
    with pytest.raises(ValueError, match="no such event"):
        wrong = {**fixed.to_dict(), "side_information": ["x", {"event": "attr", "fields": {}}, ""]}
        UserLedger.from_dict(wrong, FIXED)


def test_side_information_is_carried_with_its_event():
    assert UserLedger(FIXED, PUBLIC).other_events == ()
    assert UserLedger(FIXED, RELEASED).other_events == (EVENT,)
    assert UserLedger(TREE, RELEASED).other_events == (EVENT,)
    assert UserLedger(FIXED, RELEASED).side_information.description == "norms"
    made_of_two = dp_accounting.ComposedDpEvent((EVENT, EVENT))  # a tuple, which JSON does not have
    ledger = UserLedger(FIXED, SimpleNamespace(description="x", provenance=made_of_two))
    again = UserLedger.from_dict(json.loads(json.dumps(ledger.to_dict())), FIXED)
    assert again.side_information == ledger.side_information
    with pytest.raises(NotPrivateError, match="`provenance` must say"):
        UserLedger(FIXED, SimpleNamespace(description="x", provenance=None))


def test_gaussian_mechanisms_side_by_side_are_one():
    """Against the Rényi divergences of the composition, which are those of one mechanism."""
    event = gaussian(1.25, 4.0, 3.0)
    one = dp_accounting.GaussianDpEvent(effective_noise_multiplier(event))
    by_rdp = [dp_accounting.rdp.RdpAccountant().compose(e).get_epsilon(1e-5) for e in (event, one)]
    assert by_rdp[0] == pytest.approx(by_rdp[1], rel=1e-9)
    assert effective_noise_multiplier(gaussian(2.0, 0.0)) == 0.0
    assert np.isnan(effective_noise_multiplier(dp_accounting.LaplaceDpEvent(1.0)))
    assert np.isnan(effective_noise_multiplier(dp_accounting.ComposedDpEvent([])))


@pytest.mark.parametrize("privacy", [FIXED, TREE, BANDED], ids=lambda p: p.mechanism)
def test_a_ledger_is_for_the_clients_that_its_rounds_drew_from(privacy):
    """With more clients, the rounds of before would seem to have drawn a smaller share of them."""
    ledger = UserLedger(privacy)
    ledger.record_lost(2)
    plain = json.loads(json.dumps(ledger.to_dict()))
    others = [{"total_clients": 6000}]
    if privacy.mechanism != "gaussian":  # its segments have the size of their cohorts
        others.append({"clients_per_round": 10})
    for changes in others:
        if privacy.mechanism == "banded":
            changes = {**changes, "min_separation": 2}
        other = dataclasses.replace(privacy, **changes)
        if privacy.mechanism == "banded":
            plain["noise"]["min_separation"] = 2
        with pytest.raises(ValueError, match="the number of clients of the ledger's rounds"):
            UserLedger.from_dict(plain, other)


def test_a_ledger_of_an_earlier_version_is_refused_only_if_it_cannot_be_right():
    ledger = UserLedger(FIXED)
    ledger.record_lost(2)
    plain = {k: v for k, v in ledger.to_dict().items() if k != "total_clients"}
    assert UserLedger.from_dict(plain, FIXED).segments == ledger.segments
    fewer = dataclasses.replace(FIXED, total_clients=15, clients_per_round=5)
    with pytest.raises(ValueError, match="the rounds had .*'clients_per_round': 20.0"):
        UserLedger.from_dict(plain, fewer)


def test_gradients_of_clients_in_a_state_are_not_private():
    """Mime's `client_work` has momentum of them; that of others has numbers such as rates."""
    weights = SimpleNamespace(trainable=[np.zeros([3, 2]), np.zeros([2])])
    ledger = UserLedger(FIXED)
    for kept, is_private in (([0.1, np.zeros([3, 2])], False), ([np.float32(0.1)], True)):
        whole = SimpleNamespace(
            client_work=kept,
            global_model_weights=weights,
            aggregator=state(gaussian(1.1)),
        )
        if is_private:
            ledger.record(whole)
            assert ledger.other_events == ()
            continue
        other = UserLedger(FIXED)
        with pytest.raises(NotPrivateError, match="keeps gradients of the clients"):
            other.check_noise(whole)
        with pytest.raises(NotPrivateError, match="as Mime does, so no ε holds"):
            other.record(whole)
        assert other.other_events == (dp_accounting.NonPrivateDpEvent(),)
