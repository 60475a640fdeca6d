"""Lower bounds on ε hold as often as they say, and are not far from the truth."""

import numpy as np
import pytest
from scipy import stats

import tf_adaptive_dp as dp
from tf_adaptive_dp.auditing import bounds
from tf_adaptive_dp.auditing.bounds import many_run_epsilon, one_run_epsilon

DELTA = 1e-5


# The bound from one run.


def known(num_canaries, guesses, correct):
    """Scores and inclusions such that of so many guesses so many are right."""
    included = np.arange(num_canaries) >= num_canaries // 2
    wrong = guesses - correct
    included[:wrong] = True  # the lowest scores
    assert wrong <= guesses // 2
    return np.arange(num_canaries), included


@pytest.mark.parametrize(
    "num_canaries, guesses, correct, delta, confidence, expected",
    [
        (100, 100, 100, 0.0, 0.95, 3.49297),
        (1000, 1000, 600, 0.0, 0.95, 0.29747),
        (1000, 100, 100, 1e-5, 0.95, 3.46538),
        (1000, 100, 95, 1e-3, 0.95, 0.59431),
        (5000, 500, 430, 1e-5, 0.99, 1.50174),
        (1000, 1000, 500, 1e-5, 0.95, 0.0),
    ],
)
def test_the_bound_is_that_of_the_authors_program(
    num_canaries, guesses, correct, delta, confidence, expected
):
    # `expected` is what the program of the paper's appendix D gives.
    report = one_run_epsilon(
        *known(num_canaries, guesses, correct), delta, confidence=confidence, num_guesses=guesses
    )
    assert report.epsilon_lower_bound == pytest.approx(expected, abs=2e-5)
    assert report[1:] == (delta, confidence, num_canaries, guesses, correct, 1)


def randomized_response(epsilon, seed, num_canaries=400):
    """The mechanism for which the theorem is tight: each coin told right with e^ε / (1 + e^ε)."""
    generator = np.random.default_rng(seed)
    included = generator.integers(2, size=num_canaries) == 1
    right = generator.random(num_canaries) < 1 / (1 + np.exp(-epsilon))
    return np.where(right, included, ~included) + 0.1 * generator.random(num_canaries), included


@pytest.mark.slow
@pytest.mark.parametrize("num_guesses", [100, (20, 100, 400)])
def test_the_bound_errs_as_seldom_as_it_says_and_is_not_far_from_the_truth(num_guesses):
    bounds = np.array(
        [
            one_run_epsilon(*randomized_response(1.0, seed), 0.0, num_guesses=num_guesses)[0]
            for seed in range(200)
        ]
    )
    assert (bounds > 1.0).sum() <= stats.binom.isf(1e-6, 200, 0.05)
    assert (bounds > 0.3).mean() > 0.9


def test_delta_explains_what_a_failure_of_that_probability_gives_away():
    generator = np.random.default_rng(2)
    included = generator.integers(2, size=500) == 1
    told = generator.random(500) < 0.02  # (0, 0.02)-DP
    scores = np.where(told, included * 2.0 - 1, 0.0)
    # Guess no more than was told: all are right.
    guesses = 2 * min(np.sum(scores > 0), np.sum(scores < 0))
    assert guesses >= 6
    assert one_run_epsilon(scores, included, 0.0, num_guesses=guesses)[0] > 0.3
    assert one_run_epsilon(scores, included, 0.02, num_guesses=guesses)[0] == 0.0


def test_a_small_delta_does_not_explain_many_right_guesses():
    assert one_run_epsilon(*known(500, 100, 100), 1e-3, num_guesses=100)[0] > 1


def test_each_attack_and_each_number_of_guesses_pays_for_the_others():
    scores, included = known(400, 100, 95)
    alone = one_run_epsilon(scores, included, DELTA, num_guesses=100)
    noise = np.random.default_rng(0).random([400, 4])
    among = one_run_epsilon(np.column_stack([scores, noise]), included, DELTA, num_guesses=100)
    corrected = one_run_epsilon(scores, included, DELTA, num_guesses=100, confidence=1 - 0.05 / 5)
    assert among.num_tests == 5 and among.num_correct == 95
    assert among[0] == pytest.approx(corrected[0], abs=1e-5)
    assert among[0] < alone[0]
    assert one_run_epsilon(scores, included, DELTA, num_guesses=[50, 100, 200]).num_tests == 3


def test_equal_scores_tell_nothing():
    included = np.random.default_rng(2).integers(2, size=400) == 1
    assert one_run_epsilon(np.zeros(400), included, DELTA)[0] == 0.0


@pytest.mark.parametrize(
    "arguments, kwargs, match",
    [
        ((np.zeros(3), np.ones(4, bool), DELTA), {}, "one row for each of the 4 canaries"),
        ((np.zeros(4), np.ones(4), DELTA), {}, "`included` must be one bool"),
        ((np.full(4, np.nan), np.ones(4, bool), DELTA), {}, "Received: 4 NaN"),
        ((np.zeros(4), np.ones(4, bool), 1.0), {}, "`delta` must be below 1"),
        ((np.zeros(4), np.ones(4, bool), DELTA), {"confidence": 1.5}, "`confidence`"),
        ((np.zeros(4), np.ones(4, bool), DELTA), {"num_guesses": 5}, "from 1 to .* 4"),
        ((np.zeros(4), np.ones(4, bool), DELTA), {"num_guesses": []}, "`num_guesses`"),
    ],
)
def test_bad_arguments_of_the_one_run_bound_are_named(arguments, kwargs, match):
    with pytest.raises(ValueError, match=match):
        one_run_epsilon(*arguments, **kwargs)


# The bound from many runs.


def gaussian_runs(sensitivity, seed, num_runs=4000):
    generator = np.random.default_rng(seed)
    return generator.normal(sensitivity, 1, num_runs), generator.normal(0, 1, num_runs)


@pytest.mark.slow
def test_many_runs_err_as_seldom_as_they_say():
    # δ = 0.1 and few runs: the bound comes close to the truth, so that errors would show.
    truth = dp.accounting.epsilon(1.0, 1.0, 1, 0.1, accountant="pld")
    reports = [many_run_epsilon(*gaussian_runs(1.0, s, 1000), 0.1) for s in range(300)]
    bounds = np.array([report.epsilon_lower_bound for report in reports])
    assert (bounds > truth).sum() <= stats.binom.isf(1e-6, 300, 0.05)
    assert np.median(bounds) > 0.5 * truth


@pytest.mark.slow
def test_many_runs_without_a_difference_prove_nothing_however_many_thresholds_are_tried():
    # Each threshold cuts off half as many runs as the last, so that they err one by one. A bound
    # from the runs that the threshold was chosen on errs with 19 of these seeds.
    bounds = []
    for seed in range(300):
        generator = np.random.default_rng(seed)
        scores = [np.floor(-np.log2(generator.random(n))) for n in (2_000, 100_000)]
        bounds.append(many_run_epsilon(*scores, 0.0).epsilon_lower_bound)
    assert np.count_nonzero(bounds) < 10


@pytest.mark.parametrize("telling", [1.0, -1.0])
def test_high_scores_can_speak_for_the_canary_or_low_ones_against_it(telling):
    # A fifth of the runs of one kind is told from the others, by one tail of the scores alone.
    runs = np.where(np.random.default_rng(3).random(2000) < 0.2, telling, 0.0), np.zeros(2000)
    report = many_run_epsilon(*(runs if telling > 0 else runs[::-1]), 0.0)
    assert report.epsilon_lower_bound > 3
    assert report.num_with == report.num_without == 1000
    assert report.true_rate == pytest.approx(0.2, abs=0.05) and report.false_rate == 0.0


@pytest.mark.parametrize("scores", [[1.0], [[1.0, 2.0]], [1.0, np.nan]])
def test_bad_scores_of_many_runs_are_named(scores):
    with pytest.raises(ValueError, match="`scores_without` must be two or more numbers"):
        many_run_epsilon([1.0, 2.0], scores, DELTA)


def test_the_search_for_the_bound_ends_below_it():
    assert bounds._largest_refuted(lambda epsilon: epsilon / 10, 0.5) == pytest.approx(5, abs=2e-6)
    assert bounds._largest_refuted(lambda epsilon: epsilon / 10, 0.5) <= 5
