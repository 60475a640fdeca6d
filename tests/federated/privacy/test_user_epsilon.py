"""ε of rounds against dp_accounting, and what is claimed in words."""

import dataclasses
import json
import math
from types import SimpleNamespace

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from tensorflow_privacy.privacy.analysis import tree_aggregation_accountant

from federated.privacy.client_sampling import (
    ClientSampler,
    EveryClient,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledEpochs,
    described,
)
from federated.privacy.user_epsilon import UserLedger, epsilon_spent, privacy_statement
from federated.privacy.user_level import UserLevelPrivacy
from tf_adaptive_dp import accounting, statement

DELTA = 1e-4
GAUSSIAN = UserLevelPrivacy(1.3, 50, 2000, clip=1.0)
TREE = dataclasses.replace(GAUSSIAN, mechanism="tree")
RELEASED = SimpleNamespace(
    description="norms of a survey", provenance=dp_accounting.GaussianDpEvent(8.0)
)
GAUSSIAN_EVENT = dp_accounting.GaussianDpEvent
POISSON = PoissonSampling.for_batch_size(50, 2000, steps=300)
SHUFFLED = ShuffledEpochs(50, steps=300)


def ledger_of(privacy, rounds=300, side_information=None):
    ledger = UserLedger(privacy, side_information)
    if privacy.mechanism == "gaussian":
        ledger.record_lost(rounds)
        return ledger
    for number in range(1, rounds + 1):
        tree = SimpleNamespace(
            rounds=number,
            period=40,
            clip=1.0,
            stddev=privacy.noise_multiplier,
        )
        ledger.record(
            SimpleNamespace(
                is_init_state=False,
                dp_event=dp_accounting.UnsupportedDpEvent().to_named_tuple(),
                query_state=SimpleNamespace(denominator=50.0, numerator_state=tree),
            )
        )
    return ledger


def epsilon_of(event, accountant=rdp.RdpAccountant, delta=DELTA, **arguments):
    return accountant(**arguments).compose(event).get_epsilon(delta)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("clip", [1.0, "adaptive"])
def test_poisson_cohorts_cost_what_dp_accounting_says(accountant, clip):
    ledger = ledger_of(dataclasses.replace(GAUSSIAN, clip=clip))
    sampled = dp_accounting.PoissonSampledDpEvent(50 / 2000, GAUSSIAN_EVENT(1.3))
    kind = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant]
    expected = epsilon_of(dp_accounting.SelfComposedDpEvent(sampled, 300), kind)
    spent = epsilon_spent(ledger, DELTA, sampling=POISSON, accountant=accountant)
    assert spent == pytest.approx(expected, rel=1e-6)


def test_cohorts_that_are_cut_cost_part_of_delta():
    ledger = ledger_of(GAUSSIAN)
    cut = PoissonSampling(50 / 2000, max_batch_size=92, steps=300)
    free = epsilon_spent(ledger, DELTA, sampling=POISSON, accountant="rdp")
    spent = epsilon_spent(ledger, DELTA, sampling=cut, accountant="rdp")
    assert spent > free * 1.0001
    left = cut.delta_for_noise(spent, 2000, DELTA, 300)
    assert 0 < left < DELTA
    sampled = dp_accounting.PoissonSampledDpEvent(50 / 2000, GAUSSIAN_EVENT(1.3))
    event = dp_accounting.SelfComposedDpEvent(sampled, 300)
    assert spent == pytest.approx(epsilon_of(event, delta=left), rel=1e-6)


def test_a_large_epsilon_is_said_too_and_an_infinite_one_with_its_cause():
    privacy = UserLevelPrivacy(0.3, 20, 400, clip=1.0)
    ledger = UserLedger(privacy)
    ledger.record_lost(500)
    ids = [f"client {k}" for k in range(400)]
    sampling = ClientSampler.poisson(ids, privacy, num_rounds=500).sampling
    spent = epsilon_spent(ledger, 1 / 400, sampling=sampling, accountant="rdp")
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, GAUSSIAN_EVENT(0.3))
    event = dp_accounting.SelfComposedDpEvent(sampled, 500)
    assert spent == pytest.approx(epsilon_of(event, delta=1 / 400), rel=1e-6) and spent > 100
    text = " ".join(privacy_statement(ledger, 1 / 400, sampling=sampling).split())
    assert f"epsilon = {math.ceil(spent * 1e4) / 1e4:.4f}" in text and "subsampled" not in text
    capped = PoissonSampling(0.05, max_batch_size=64, steps=500)
    assert epsilon_spent(ledger, 1 / 400, sampling=capped) == math.inf
    text = " ".join(privacy_statement(ledger, 1 / 400, sampling=capped).split())
    assert "NOT PRIVATE" in text and "truncating cohorts to 64 users costs more than delta" in text
    assert "without noise" not in text
    assert "draw again with a larger `max_clients`" in text and "max_batch_size" not in text


def test_cohorts_that_can_be_foreseen_are_named():
    foreseen = dataclasses.replace(POISSON, seed=7)
    text = " ".join(privacy_statement(ledger_of(GAUSSIAN), DELTA, sampling=foreseen).split())
    assert "NOT AMPLIFIED: the cohorts were drawn with seed 7" in text
    text = privacy_statement(ledger_of(GAUSSIAN), DELTA, sampling=POISSON)
    assert "NOT AMPLIFIED" not in text


def test_fixed_cohorts_cost_what_dp_accounting_says_for_replacing_a_user():
    ledger = ledger_of(GAUSSIAN)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(2000, 50, GAUSSIAN_EVENT(1.3 / 2))
    replace = dp_accounting.NeighboringRelation.REPLACE_ONE
    expected = epsilon_of(
        dp_accounting.SelfComposedDpEvent(sampled, 300), neighboring_relation=replace
    )
    spent = epsilon_spent(
        ledger, DELTA, sampling=FixedSizeSampling(50, steps=300), accountant="rdp"
    )
    assert spent == pytest.approx(expected, rel=1e-6)


def test_fixed_cohorts_never_cost_more_than_everybody_in_every_round():
    """With little noise the bound for sampling is above that without."""
    ledger = UserLedger(UserLevelPrivacy(0.3, 100, 966, clip=1.0))
    ledger.record_lost(100)
    replace = dp_accounting.NeighboringRelation.REPLACE_ONE
    event = dp_accounting.SelfComposedDpEvent(GAUSSIAN_EVENT(0.3 / 2), 100)
    expected = epsilon_of(event, delta=1 / 966, neighboring_relation=replace)
    spent = epsilon_spent(
        ledger, 1 / 966, sampling=FixedSizeSampling(100, steps=100), accountant="rdp"
    )
    assert spent == pytest.approx(expected, rel=1e-6)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(966, 100, GAUSSIAN_EVENT(0.3 / 2))
    event = dp_accounting.SelfComposedDpEvent(sampled, 100)
    assert epsilon_of(event, delta=1 / 966, neighboring_relation=replace) > 1.5 * spent


def test_every_client_in_every_round_is_the_plain_gaussian_mechanism():
    ledger = ledger_of(UserLevelPrivacy(20.0, 2000, 2000, clip=1.0))
    expected = epsilon_of(dp_accounting.SelfComposedDpEvent(GAUSSIAN_EVENT(20.0), 300))
    spent = epsilon_spent(ledger, DELTA, sampling=EveryClient(), accountant="rdp")
    assert spent == pytest.approx(expected, rel=1e-6)


# 32 leaves have 6 levels of nodes, as many as 40.
@pytest.mark.parametrize("rounds", [1, 32, 39, 40, 41, 72, 300])
def test_trees_cost_what_dp_accounting_says(rounds):
    """40 rounds a pass: a tree each, the last one maybe unfinished."""
    ledger = ledger_of(TREE, rounds)
    steps = [40] * (rounds // 40) + ([rounds % 40] if rounds % 40 else [])
    trees = [dp_accounting.SingleEpochTreeAggregationDpEvent(1.3, n) for n in steps]
    blank = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    expected = epsilon_of(dp_accounting.ComposedDpEvent(trees), neighboring_relation=blank)
    spent = epsilon_spent(ledger, DELTA, sampling=SHUFFLED, accountant="rdp")
    assert spent == pytest.approx(expected, rel=1e-6)
    own = epsilon_of(dp_accounting.ComposedDpEvent(ledger.other_events), neighboring_relation=blank)
    assert spent == pytest.approx(own, rel=1e-6)
    orders = rdp.RdpAccountant().orders
    by_tf_privacy = tree_aggregation_accountant.compute_rdp_tree_restart(1.3, steps, orders)
    assert spent == pytest.approx(rdp.compute_epsilon(orders, by_tf_privacy, DELTA)[0], rel=1e-6)


def test_trees_are_one_gaussian_mechanism_for_the_tighter_accountant():
    ledger = ledger_of(TREE, 41)
    tight = epsilon_of(GAUSSIAN_EVENT(1.3 / math.sqrt(6 + 1)), pld.PLDAccountant)
    by_pld = epsilon_spent(ledger, DELTA, sampling=SHUFFLED, accountant="pld")
    assert by_pld == pytest.approx(tight, rel=1e-3)
    assert by_pld < epsilon_spent(ledger, DELTA, sampling=SHUFFLED, accountant="rdp")


def test_a_lost_round_costs_another_tree():
    whole, lost = ledger_of(TREE, 40), ledger_of(TREE, 40)
    lost.record_lost(1)
    trees = [dp_accounting.SingleEpochTreeAggregationDpEvent(1.3, n) for n in (40, 40)]
    blank = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    expected = epsilon_of(dp_accounting.ComposedDpEvent(trees), neighboring_relation=blank)
    spent = epsilon_spent(lost, DELTA, sampling=SHUFFLED, accountant="rdp")
    assert spent == pytest.approx(expected, rel=1e-6)
    assert spent > epsilon_spent(whole, DELTA, sampling=SHUFFLED, accountant="rdp")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sampling", [POISSON, SHUFFLED, FixedSizeSampling(50, steps=300)])
def test_epsilon_grows_with_every_round_and_falls_with_noise(sampling):
    few, many = ledger_of(GAUSSIAN, 100), ledger_of(GAUSSIAN, 101)
    assert epsilon_spent(few, DELTA, sampling=sampling) < epsilon_spent(
        many, DELTA, sampling=sampling
    )
    for factor, compare in ((2 / 3, float.__gt__), (3 / 2, float.__lt__)):
        other = ledger_of(dataclasses.replace(GAUSSIAN, noise_multiplier=1.3 * factor), 100)
        assert compare(
            epsilon_spent(other, DELTA, sampling=sampling),
            epsilon_spent(few, DELTA, sampling=sampling),
        )


def test_released_side_information_is_part_of_epsilon():
    sampled = dp_accounting.PoissonSampledDpEvent(50 / 2000, GAUSSIAN_EVENT(1.3))
    event = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(sampled, 300), GAUSSIAN_EVENT(8.0)]
    )
    ledger = ledger_of(GAUSSIAN, side_information=RELEASED)
    spent = epsilon_spent(ledger, DELTA, sampling=POISSON, accountant="rdp")
    assert spent == pytest.approx(epsilon_of(event), rel=1e-6)
    tree = epsilon_spent(ledger_of(TREE), DELTA, sampling=SHUFFLED, accountant="rdp")
    with_it = epsilon_spent(
        ledger_of(TREE, 300, RELEASED), DELTA, sampling=SHUFFLED, accountant="rdp"
    )
    assert with_it > tree * 1.0002


@pytest.mark.parametrize("privacy", [GAUSSIAN, TREE])
def test_no_noise_or_no_rounds(privacy):
    assert epsilon_spent(UserLedger(privacy), DELTA, sampling=SHUFFLED) == 0.0
    noiseless = ledger_of(dataclasses.replace(privacy, noise_multiplier=0.0))
    assert epsilon_spent(noiseless, DELTA, sampling=SHUFFLED) == math.inf
    assert "NOT PRIVATE" in privacy_statement(noiseless, DELTA, sampling=SHUFFLED)
    assert "Nothing was released" in privacy_statement(
        UserLedger(privacy), DELTA, sampling=SHUFFLED
    )
    unprotected = SimpleNamespace(description="norms", provenance=dp_accounting.NonPrivateDpEvent())
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        ledger = ledger_of(privacy, side_information=unprotected)
    assert epsilon_spent(ledger, DELTA, sampling=SHUFFLED) == math.inf


def test_a_sampling_that_does_not_fit_is_refused():
    ledger = ledger_of(GAUSSIAN)
    for other in (PoissonSampling(0.03, 100, steps=300), FixedSizeSampling(40, steps=300)):
        with pytest.raises(ValueError, match="stated for clients_per_round=50"):
            epsilon_spent(ledger, DELTA, sampling=other)
    with pytest.raises(ValueError, match="released 300 noisy"):
        epsilon_spent(ledger, DELTA, sampling=PoissonSampling.for_batch_size(50, 2000, steps=299))
    with pytest.raises(ValueError, match="use `ShuffledEpochs`"):
        epsilon_spent(ledger_of(TREE), DELTA, sampling=POISSON)
    with pytest.raises(ValueError, match="stated for clients_per_round=50"):
        epsilon_spent(ledger, DELTA, sampling=EveryClient())
    with pytest.raises(TypeError, match="`UserLedger`, such as `trained.ledger`.*SimpleNamespace$"):
        epsilon_spent(SimpleNamespace(segments=[], other_events=()), DELTA, sampling=POISSON)
    with pytest.raises(TypeError, match="such as `sampler.sampling` of a `ClientSampler`"):
        epsilon_spent(ledger, DELTA, sampling=SimpleNamespace())
    for wrong in (0.0, 1.0):
        for privacy, sampling in ((GAUSSIAN, POISSON), (TREE, SHUFFLED)):
            with pytest.raises(ValueError, match="`delta` must be in"):
                epsilon_spent(ledger_of(privacy), wrong, sampling=sampling)


def test_functions_for_examples_refuse_rounds():
    """With the number of all users' examples, ε would be far too small."""
    ledger = ledger_of(GAUSSIAN)
    for ask in (
        lambda: accounting.epsilon_spent(ledger, 100_000, DELTA),
        lambda: accounting.epsilon_without_amplification(ledger, 100_000, DELTA),
        lambda: statement.privacy_statement(ledger, 100_000, DELTA, sampling="poisson"),
        lambda: POISSON.epsilon_spent(ledger, 2000, DELTA),
    ):
        with pytest.raises(ValueError, match="federated.epsilon_spent.ledger, delta, sampling"):
            ask()


@pytest.mark.parametrize(
    ("privacy", "sampling"),
    [
        (GAUSSIAN, POISSON),
        (GAUSSIAN, FixedSizeSampling(50, steps=300)),
        (UserLevelPrivacy(20.0, 2000, 2000, clip=1.0), EveryClient()),
        (GAUSSIAN, SHUFFLED),
        (TREE, SHUFFLED),
    ],
    ids=["poisson", "fixed", "every", "shuffled", "tree"],
)
def test_the_smaller_of_both_bounds_is_reported(privacy, sampling):
    ledger = ledger_of(privacy)

    def by(**accountant):
        return epsilon_spent(ledger, DELTA, sampling=sampling, **accountant)

    assert by() == min(by(accountant="rdp"), by(accountant="pld")) < by(accountant="rdp")
    assert "(PLD accounting, rounded up)" in said(ledger, sampling)
    assert "(RDP accounting, rounded up)" in said(ledger, sampling, accountant="rdp")


def test_what_pld_does_not_support_has_the_bound_of_rdp():
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(GAUSSIAN_EVENT(5.0), 2.0, 1.0)
    ledger = ledger_of(GAUSSIAN, side_information=SimpleNamespace(provenance=event))
    with pytest.raises(dp_accounting.UnsupportedEventError):
        epsilon_spent(ledger, DELTA, sampling=POISSON, accountant="pld")
    by_rdp = epsilon_spent(ledger, DELTA, sampling=POISSON, accountant="rdp")
    assert epsilon_spent(ledger, DELTA, sampling=POISSON) == by_rdp
    assert "(RDP accounting, rounded up)" in said(ledger, POISSON)
    with pytest.raises(ValueError, match="`accountant` must be one of .*'tightest'"):
        epsilon_spent(ledger, DELTA, sampling=POISSON, accountant="best")


def said(ledger, sampling, **arguments):
    text = privacy_statement(ledger, DELTA, sampling=sampling, **arguments)
    assert all(len(line) <= 80 for line in text.splitlines())
    return " ".join(text.split())


def test_the_statement_of_poisson_cohorts():
    ledger = ledger_of(GAUSSIAN)
    alone = said(ledger, POISSON)
    ledger.sampling, ledger.rounds_drawn = described(POISSON), 300  # as a run records it
    text = said(ledger, POISSON)
    up = math.ceil(epsilon_spent(ledger, DELTA, sampling=POISSON) * 1e4) / 1e4
    for part in (
        f"epsilon = {up:.4f} and delta = 0.0001 (PLD accounting, rounded up)",
        "Unit: one user. Adjacency: data sets that differ by adding or removing one user.",
        "were drawn by Poisson sampling, for which this epsilon is a proven upper bound.",
        "Each user joined each cohort independently with probability 0.025",
        "300 noisy averages of client updates with noise multiplier 1.3 and expected cohort size "
        "50 of 2000 users",
        "the weights of the server's model after every round",
        "The state of the process is protected as well. The key of the sampler and the clients' ",
        'without noise ("client_work"',
        "The server adds the noise",
    ):
        assert part in text
    for word in ("example", "batch", "gradient", "TF Privacy"):
        assert word not in text + alone
    assert "are stated to have been drawn by Poisson sampling; if so, this epsilon is" in alone
    assert "did not verify that the cohort was a fresh draw for 300 of the" in alone


def test_the_statement_of_shuffled_cohorts_has_two_epsilons():
    ledger = ledger_of(GAUSSIAN)
    text = said(ledger, SHUFFLED)
    approximation = epsilon_spent(ledger, DELTA, sampling=SHUFFLED)
    releases = accounting.Releases(ledger.segments)
    bound = accounting.epsilon_without_amplification(releases, 2000, DELTA, accountant="pld")
    assert bound > approximation
    for value in (approximation, bound):
        assert f"epsilon = {math.ceil(value * 1e4) / 1e4:.4f}" in text
    assert "a customary approximation, not a proven bound" in text
    assert "if each user was in at most one cohort per epoch" in text


def test_the_statement_of_trees_says_that_the_state_is_secret():
    text = said(ledger_of(TREE, 100), SHUFFLED, accountant="pld")
    for part in (
        "(PLD accounting, rounded up)",
        "data sets in which one user's updates are replaced by zeros",
        "if each user was in at most one cohort per pass",
        "1 tree of 20 noisy averages",
        "2 trees of 40 noisy averages of client updates, with noise multiplier 1.3 at each node",
        "checkpoints are NOT protected: they contain the noise of the tree",
    ):
        assert part in text
    assert "protected as well" not in text


@pytest.mark.parametrize("ask", [epsilon_spent, privacy_statement])
def test_no_epsilon_for_cohorts_that_were_drawn_in_another_way(ask):
    ledger = ledger_of(GAUSSIAN)
    ledger.sampling = described(POISSON)
    ask(ledger, DELTA, sampling=dataclasses.replace(POISSON, steps=900))
    cut = dataclasses.replace(POISSON, max_batch_size=51)
    for other in (cut, SHUFFLED, FixedSizeSampling(50, steps=300)):
        with pytest.raises(ValueError, match=r"drawn in another way: .*by PoissonSampling\("):
            ask(ledger, DELTA, sampling=other)


def test_rounds_before_a_run_remain_unverified_after_it():
    ledger = ledger_of(GAUSSIAN, 50)
    ledger.sampling = described(POISSON)
    ledger.record_lost(1)
    ledger.rounds_drawn = 1  # as a run records it
    again = UserLedger.from_dict(json.loads(json.dumps(ledger.to_dict())), GAUSSIAN)
    for one in (ledger, again):
        text = said(one, POISSON)
        assert "did not verify that the cohort was a fresh draw for 50 of the" in text
        assert "proven" not in text
    ledger.rounds_drawn = 51
    assert "drawn" not in ledger.to_dict()  # as those of runs always were
    assert UserLedger.from_dict(ledger.to_dict(), GAUSSIAN).rounds_drawn == 51
    assert "proven upper bound" in said(ledger, POISSON)


def test_what_runs_and_ledgers_say_of_their_sampling_does_not_change():
    # As the first of them were saved.
    sampling = "PoissonSampling(sampling_probability=0.025, max_batch_size=100, seed=None)"
    assert described(PoissonSampling(0.025, 100, steps=300)) == sampling
    ledger = ledger_of(UserLevelPrivacy(20.0, 50, 2000, clip=1.0))
    ledger.sampling = sampling
    epsilon_spent(ledger, DELTA, sampling=PoissonSampling(0.025, 100, steps=300))
    assert "examples_per_user=2" in described(PoissonSampling(0.5, 9, 9, examples_per_user=2))
    with pytest.raises(ValueError, match="leave out `examples_per_user`"):
        epsilon_spent(ledger, DELTA, sampling=PoissonSampling(0.025, 100, 300, None, 2))


def test_the_statements_of_other_cohorts_of_side_information_and_of_a_large_delta():
    fixed = said(ledger_of(GAUSSIAN), FixedSizeSampling(50, steps=300))
    assert "data sets in which one user replaces another" in fixed
    every = said(ledger_of(UserLevelPrivacy(20.0, 2000, 2000, clip=1.0)), EveryClient())
    assert "Every user was in the cohort of every round" in every
    informed = said(ledger_of(GAUSSIAN, side_information=RELEASED), POISSON)
    assert "Side information: norms of a survey, released by GaussianDpEvent" in informed
    assert "in addition to the averages, and included in epsilon: one release of the" in informed
    public = SimpleNamespace(description="word counts", provenance="public")
    assert "Side information: word counts, public." in said(
        ledger_of(TREE, side_information=public), SHUFFLED
    )
    large = privacy_statement(ledger_of(GAUSSIAN), 1e-3, sampling=POISSON)
    assert "Warning: delta exceeds 1 / (number of users)" in large
