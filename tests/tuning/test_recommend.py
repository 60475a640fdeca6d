"""Which way of paying is recommended."""

import math

import dp_accounting
import numpy as np
import pytest

from tests.helpers.exact_selection import (
    poisson_law,
    stopped_geometric,
    truncated_negative_binomial,
)
from tf_adaptive_dp.tuning.budgets import recommend
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.search_epsilon import best_delta_2, composition_epsilon
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect

DELTA = 1e-5
TRIAL = dp_accounting.GaussianDpEvent(10.0)


def test_offers_are_the_strategies_and_the_cheapest_comes_first():
    found = recommend(TRIAL, 40, DELTA, mean_trials=40)
    assert found.chance is None
    assert {offer.strategy for offer in found.offers} == {
        Composition(40),
        LiuTalwar(1 / 40, best_delta_2(1 / 40, DELTA)),
        RepeatAndSelect(40),
        RepeatAndSelect(40, math.inf),
    }
    assert [o.strategy for o in found.besides] == [RepeatAndSelect(40, s) for s in (0.1, 0.0)]
    spent = [offer.epsilon for offer in found.offers]
    assert spent == sorted(spent) and found.best is found.offers[0]
    for offer in (*found.offers, *found.besides):
        assert offer.epsilon == offer.strategy.epsilon(TRIAL, DELTA)
        assert offer.noise_multiplier is None


@pytest.mark.parametrize("space_size", [1, 2, 10, 40, 1_000])
@pytest.mark.parametrize("chance", [0.3, 0.9, 0.999])
def test_offers_are_compared_at_an_equal_chance(space_size, chance):
    found = recommend(TRIAL, space_size, DELTA, chance=chance)
    assert found.chance == chance
    for offer in found.offers:
        strategy, label = offer.strategy, offer.label
        assert offer.chance >= chance
        if isinstance(strategy, Composition):
            assert strategy.num_trials == math.ceil(chance * space_size)
            continue
        mean = strategy.expected_trials
        assert offer.chance < 1.002 * chance or mean == 1, label
        fewer = max(1.0, 0.99 * mean)
        less = recommend(TRIAL, space_size, DELTA, mean_trials=fewer)
        (other,) = (o for o in less.offers if o.label == label)
        assert other.chance < chance or mean <= 1.01
    geometric = next(o for o in found.offers if o.label == "repeat and select, geometric")
    for offer in found.besides:
        assert offer.strategy.mean_trials == geometric.strategy.mean_trials
        assert offer.chance <= geometric.chance and offer.epsilon <= geometric.epsilon


def test_few_candidates_are_composed_and_many_selected():
    make_trial = dp_accounting.GaussianDpEvent
    few = recommend(make_trial, 2, DELTA, epsilon=1.0, mean_trials=20)
    assert few.best.strategy == Composition(2)
    assert recommend(make_trial, 2, DELTA, epsilon=1.0).best.strategy == Composition(2)
    many = recommend(make_trial, 400, DELTA, epsilon=1.0)
    assert many.best.label == "repeat and select, geometric" and many.best.chance >= 0.9


def test_with_a_budget_the_least_noise_comes_first():
    found = recommend(dp_accounting.GaussianDpEvent, 40, DELTA, epsilon=2.0)
    noise = [offer.noise_multiplier for offer in found.offers]
    assert noise == sorted(noise) and noise[0] < noise[-1]
    for offer in found.offers:
        trial = dp_accounting.GaussianDpEvent(offer.noise_multiplier)
        assert offer.epsilon == offer.strategy.epsilon(trial, DELTA) <= 2.0


@pytest.mark.parametrize(("space_size", "mean"), [(1, 1), (10, 10), (10, 25), (40, 3.5)])
def test_the_chance_that_the_best_candidate_is_tried(space_size, mean):
    found = recommend(TRIAL, space_size, 0.1, mean_trials=mean)
    gamma = 1 / mean
    laws = {
        "composition": None,
        "random stopping (Liu-Talwar)": stopped_geometric(
            gamma, math.ceil(-math.log(best_delta_2(gamma, 0.1)) / gamma)
        ),
        "repeat and select, geometric": stopped_geometric(gamma, 10_000),
        "repeat and select, Poisson": poisson_law(mean),
        "repeat and select, η = 0.1": stopped_geometric(gamma, 10_000),
        "repeat and select, logarithmic": stopped_geometric(gamma, 10_000),
    }
    if mean > 1:
        for label, shape in (("geometric", 1), ("η = 0.1", 0.1), ("logarithmic", 0)):
            laws[f"repeat and select, {label}"] = truncated_negative_binomial(mean, shape)
    for offer in (*found.offers, *found.besides):
        law = laws[offer.label]
        missed = 1 - 1 / space_size
        expected = 1 if law is None else 1 - law @ missed ** np.arange(len(law))
        assert offer.chance == pytest.approx(expected, abs=1e-9)


def test_keywords_reach_the_accounting():
    classical = recommend(TRIAL, 5, DELTA, accounting=Accounting(conversion="classical"))
    coarse = recommend(TRIAL, 5, DELTA, accounting=Accounting(orders=(2, 4)))
    by_pld = recommend(TRIAL, 5, DELTA, accounting=Accounting("pld"))
    plain = recommend(TRIAL, 5, DELTA)
    by_name = [{o.label: o.epsilon for o in r.offers} for r in (plain, classical, coarse, by_pld)]
    for label, epsilon in by_name[0].items():
        assert epsilon < by_name[1][label] < by_name[2][label]
        assert (by_name[3][label] < epsilon) == (label != "random stopping (Liu-Talwar)")


def test_the_table():
    lines = str(recommend(TRIAL, 4, DELTA)).splitlines()
    assert lines[0] == "4 candidates, the best one tried with 90% chance, δ = 1e-05"
    assert str(recommend(TRIAL, 4, DELTA, mean_trials=4)).startswith("4 candidates, δ = 1e-05\n")
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|") == 8
    spent = composition_epsilon(TRIAL, 4, DELTA)
    assert f"| composition | 4 | 4 | all trials | 100% | as given | {spent:.4g} |" in lines
    assert sum("the winner" in line for line in lines) == 5
    assert sum("no bound" in line for line in lines) == 4
    assert lines[-1].startswith("The last 2 are not comparable") and "logarithmic" in lines[-3]
    with_budget = str(recommend(dp_accounting.GaussianDpEvent, 4, DELTA, epsilon=1.0))
    assert "as given" not in with_budget


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_the_plot(epsilon):
    trial = TRIAL if epsilon is None else dp_accounting.GaussianDpEvent
    found = recommend(trial, 4, DELTA, epsilon=epsilon)
    (axes,) = found.plot().axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [o.epsilon if epsilon is None else o.noise_multiplier for o in found.offers]
    assert ("noise multiplier" in axes.get_xlabel()) == (epsilon is not None)


def costly(part):
    """Trials of which a part costs whatever the noise is."""
    score = dp_accounting.GaussianDpEvent(part)
    return lambda sigma: dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(sigma), score]
    )


def test_ways_that_cannot_meet_the_budget_come_last():
    found = recommend(costly(10.0), 40, DELTA, epsilon=2.0)
    assert found.best.label == "repeat and select, geometric"
    assert [o.noise_multiplier is None for o in found.offers] == sorted(
        o.noise_multiplier is None for o in found.offers
    )
    assert found.offers[-1].noise_multiplier is None and found.offers[-1].epsilon == math.inf
    assert "| none | inf |" in str(found)
    assert len(found.plot().axes[0].patches) < 4


def test_a_budget_that_no_way_meets_is_an_error():
    with pytest.raises(ValueError, match="No noise multiplier .* meets the budget.*space_size=40"):
        recommend(costly(1.0), 40, DELTA, epsilon=0.5)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((TRIAL, 0, DELTA), {}, ValueError, "`space_size` must be at least 1"),
        ((TRIAL, 4, 0.0), {}, ValueError, "`delta` must be in"),
        ((TRIAL, 4, DELTA), {"mean_trials": 0.5}, ValueError, "`mean_trials` must be"),
        ((TRIAL, 4, DELTA), {"chance": 1.0}, ValueError, "`chance` must be in"),
        ((TRIAL, 4, DELTA), {"epsilon": 1.0}, TypeError, "`trial` must be a function"),
        ((dp_accounting.GaussianDpEvent, 4, DELTA), {}, TypeError, "`trial` must be a `dp_acc"),
        ((dp_accounting.GaussianDpEvent, 4, DELTA), {"epsilon": 0}, ValueError, "`epsilon` must"),
    ],
)
def test_wrong_arguments_are_refused(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        recommend(*arguments, **keywords)
