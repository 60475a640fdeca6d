"""What a search costs: the noise of its trials, and the statement."""

import dp_accounting
import pytest

from tests.helpers import tuned
from tf_adaptive_dp import PoissonSampling
from tf_adaptive_dp.tuning import strategies
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.keras_tuner import results
from tf_adaptive_dp.tuning.keras_tuner.search_plan import Batches, Budget, Schedule, SearchPlan
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect
from tf_adaptive_dp.wording import format_epsilon

PUBLIC = strategies.PublicScore()
STRATEGIES = [Composition(5), LiuTalwar(0.5), RepeatAndSelect(3)]


def plan(
    strategy=STRATEGIES[0],
    score=PUBLIC,
    accountant="rdp",
    sampling="poisson",
    num_examples=100,
    batch_size=100.0,  # all of them, whose price is known in closed form
    **schedule,
):
    return SearchPlan(
        strategy,
        score,
        Budget(3.0, 1e-5, accountant),
        Batches(num_examples, sampling, batch_size),
        Schedule(**{"epochs": 2, "steps_per_epoch": 3, **schedule}),
    )


def trial_event(noise_multiplier, q=1.0, releases=6, score=None):
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = event if q == 1 else dp_accounting.PoissonSampledDpEvent(q, event)
    builder = dp_accounting.DpEventBuilder()
    builder.compose(event, releases)
    if score is not None:
        builder.compose(score)
    return builder.build()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_the_noise_is_the_least_with_which_all_trials_are_within_the_budget(strategy):
    made = plan(strategy)
    noise = made.noise_multiplier()
    spent = strategy.epsilon(trial_event(noise), 1e-5)
    assert made.epsilon_spent(noise) == spent <= 3.0
    assert strategy.epsilon(trial_event(noise / 1.01), 1e-5) > 3.0


def test_sampling_epochs_and_parts_make_the_trial():
    made = plan(batch_size=10.0, epochs=3, steps_per_epoch=4, parts=2)
    assert made.schedule.releases == 6
    expected = Composition(5).epsilon(trial_event(2.0, 0.1), 1e-5)
    assert made.epsilon_spent(2.0) == pytest.approx(expected, rel=1e-12)


def test_a_noisy_score_is_paid_for_in_every_trial():
    score = strategies.NoisyScore(noise_multiplier=5.0, sensitivity=0.01)
    made = plan(score=score)
    expected = Composition(5).epsilon(trial_event(9.0, score=score.event), 1e-5)
    assert made.epsilon_spent(9.0) == expected > plan().epsilon_spent(9.0)
    assert made.noise_multiplier() > plan().noise_multiplier()


def test_truncated_batches_take_their_part_of_delta_in_all_trials():
    sampling = PoissonSampling(0.1, max_batch_size=30, steps=6)
    made = plan(sampling=sampling, batch_size=10.0)
    left = sampling.delta_for_noise(3.0, 100, 1e-5, releases=5 * 6)
    assert 0 < left < sampling.delta_for_noise(3.0, 100, 1e-5)
    assert made.epsilon_spent(2.0) == Composition(5).epsilon(trial_event(2.0, 0.1), left)
    with pytest.raises(ValueError, match="no `delta` is left"):
        plan(RepeatAndSelect(1000), sampling=sampling, batch_size=10.0)


@pytest.mark.parametrize(
    "changed, match",
    [
        ({"batch_size": 101.0}, "expected_batch_size=101, num_examples=100"),
        ({"parts": 2}, "3 steps, gradient_accumulation_steps=2"),
        ({"sampling": PoissonSampling(0.5, 90, 6)}, "sampling has 50.0 examples a batch"),
        ({"sampling": PoissonSampling(1.0, 101, 5)}, "released 6 noisy gradients"),
    ],
)
def test_what_does_not_go_together_is_refused(changed, match):
    with pytest.raises(ValueError, match=match):
        plan(**changed)


def statement_of(strategy=STRATEGIES[0], outcomes=(), noise=None, **kwargs):
    made = plan(strategy, **kwargs)
    noise = noise or made.noise_multiplier()
    return made, noise, " ".join(results.privacy_statement(made, noise, outcomes).split())


SHOWN = {
    "values": {"rate": 0.1},
    "score": 0.5,
    "error": None,
    "releases": 6,
    "unchecked": 0,
    "side_information": "Side information: Fixed, public.\n",
    "resumed": 0,
}


def test_the_statement_says_what_was_spent_and_how():
    made, noise, text = statement_of(RepeatAndSelect(3), [SHOWN])
    for part in (
        f"epsilon = {format_epsilon(made.epsilon_spent(noise))}",
        "delta = 1e-05",
        "adding or removing one example",
        "stated to have been drawn by Poisson sampling; if so, this epsilon is an upper bound",
        "budget was epsilon = 3",
        "secret random number of candidates (Papernot and Steinke 2022), 3 on average",
        f"at most 6 noisy gradients with noise multiplier {noise:g} and expected batch size 100",
        "public validation data",
        "the duration of the search are not protected",
        "Whether a candidate crashes must not depend on a single example",
        "chosen without access to the data",
        "Side information: Fixed, public.",
    ):
        assert part in text
    assert "{'rate'" not in text and "NOT PRIVATE" not in text


def test_the_statement_of_other_strategies():
    assert (
        "with probability 0.5, and it ended after at most 93 candidates"
        in statement_of(LiuTalwar(0.5))[2]
    )
    text = statement_of(outcomes=[SHOWN, {**SHOWN, "error": "x", "score": None}])[2]
    assert "composition of 5 candidates" in text and "{'rate': 0.1}: crashed, 6 releases" in text
    assert "keep them secret" not in text


def test_a_free_score_is_marked():
    assert (
        "NOT PRIVATE for the validation data"
        in statement_of(score=strategies.UnprotectedScore())[2]
    )


def test_shuffled_batches_have_two_epsilons_each_of_the_whole_search():
    made, noise, text = statement_of(
        sampling="shuffled", batch_size=25.0, epochs=2, steps_per_epoch=4, noise=5.0
    )
    # In four batches an epoch an example is once in each of two epochs.
    bound = Composition(5).epsilon(trial_event(noise, releases=2), 1e-5)
    assert made.epsilon_without_amplification(noise) == bound
    assert f"epsilon = {format_epsilon(bound)}" in text and "a customary approximation" in text
    # A pass that was not finished may have had the example as well.
    bound = Composition(5).epsilon(trial_event(noise, releases=4), 1e-5)
    outcomes = [SHOWN, {**SHOWN, "resumed": 2}]
    text = " ".join(results.privacy_statement(made, noise, outcomes).split())
    assert f"epsilon = {format_epsilon(bound)}" in text


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: s.name)
def test_of_a_winner_every_epoch_may_have_begun_a_pass(strategy):
    # Each of four epochs is half a pass, of a pass of its own if the search was interrupted in
    # each. Nothing tells whether it was.
    arguments = {"sampling": "shuffled", "num_examples": 1000, "epochs": 4, "steps_per_epoch": 5}
    made, noise, text = statement_of(strategy, [SHOWN], noise=4.0, **arguments)
    bound = strategy.epsilon(trial_event(noise, releases=4), 1e-5)
    assert made.epsilon_without_amplification(noise) == bound
    assert f"epsilon = {format_epsilon(bound)}" in text
    # Passes of 10 batches, or of 11 and the last one smaller: in 11 an example may come twice,
    # unless an epoch is a pass.
    arguments |= {"num_examples": 1050, "steps_per_epoch": 11}
    for is_pass, times in ((False, 8), (True, 4)):
        made = plan(strategy, epoch_is_pass=is_pass, **arguments)
        bound = strategy.epsilon(trial_event(noise, releases=times), 1e-5)
        assert made.epsilon_without_amplification(noise) == bound


@pytest.mark.slow
def test_the_tuner_sets_the_noise(tmp_path, monkeypatch):
    for name in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
        monkeypatch.setattr(SearchPlan, name, lambda made, *args: 1.0)
    seen = {}
    monkeypatch.setattr(
        SearchPlan, "noise_multiplier", lambda made: seen.setdefault("plan", made) and 7.0
    )
    made = tuned.search(tuned.tuner(tmp_path, num_trials=1))
    assert seen["plan"].budget.epsilon == 10.0 and seen["plan"].schedule.releases == 4
    assert (seen["plan"].batches.batch_size, seen["plan"].batches.num_examples) == (8.0, 16)
    (model,) = made.get_best_models()
    assert model.optimizer.ledger.segments == [(7.0, 8.0, 4)]
    assert model.optimizer.noise_multiplier == 7.0


@pytest.mark.slow
def test_pld_reaches_a_search_that_shows_the_winner_alone():
    score = strategies.NoisyScore(noise_multiplier=20.0, sensitivity=0.01)
    by_rdp, by_pld = (plan(STRATEGIES[2], score=score, accountant=a) for a in ("rdp", "pld"))
    event = trial_event(9.0, score=score.event)
    spent = STRATEGIES[2].epsilon(event, 1e-5, accounting=Accounting("pld"))
    assert by_pld.epsilon_spent(9.0) == spent < 0.8 * by_rdp.epsilon_spent(9.0)
    assert plan(STRATEGIES[2], accountant="pld").epsilon_spent(9.0) < spent
    winner = {"values": {}, "score": 0.5, "releases": 6, "error": None}
    winner |= {"resumed": 0, "unchecked": 0}
    text = results.privacy_statement(by_pld, 9.0, [{**winner, "side_information": ""}])
    text = " ".join(text.split())
    assert "PLD accounting" in text and "Koskela, Redberg and Wang 2024" in text
    assert f"epsilon = {format_epsilon(spent)}" in text
