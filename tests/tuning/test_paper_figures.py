"""The numbers that "The Role of Adaptive Optimizers for Honest Private Hyperparameter Selection"
prints, in its accounting, and where they cannot be had.
"""

import dp_accounting
import pytest

from tf_adaptive_dp.tuning.budgets import num_trials_for_budget
from tf_adaptive_dp.tuning.conversion import Accounting
from tf_adaptive_dp.tuning.search_epsilon import composition_epsilon, liu_talwar_epsilon

CLASSICAL = Accounting(conversion="classical")


def trial(num_examples):
    """Its setting: σ = 4, lots of 250, 10,000 of them."""
    release = dp_accounting.PoissonSampledDpEvent(
        250 / num_examples, dp_accounting.GaussianDpEvent(4.0)
    )
    return dp_accounting.SelfComposedDpEvent(release, 10_000)


@pytest.mark.parametrize(
    ("num_examples", "gamma", "printed"),
    [(5_000, 1, "33"), (5_000, 1e-3, "39"), (950_000, 1, "0.49"), (950_000, 1e-3, "0.69")],
)
def test_figure_1_random_stopping(num_examples, gamma, printed):
    found = liu_talwar_epsilon(trial(num_examples), gamma, 1e-5, accounting=CLASSICAL)
    assert f"{found:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    ("last_order", "agrees"), [(198, False), (199, False), (200, True), (201, False)]
)
def test_the_orders_of_the_paper_are_those_up_to_200(last_order, agrees):
    accounting = Accounting(conversion="classical", orders=range(2, last_order + 1))
    found = [
        liu_talwar_epsilon(trial(950_000), gamma, 1e-5, accounting=accounting)
        for gamma in (1, 1e-3)
    ]
    assert ([f"{x:.2f}" for x in found] == ["0.49", "0.69"]) == agrees


# Printed: 4.8 and 14; 175 at 100,000, which belongs to larger data.
@pytest.mark.parametrize(
    ("num_examples", "blowup", "candidates"), [(5_000, 4.737, 13), (100_000, 4.963, 23)]
)
def test_figure_1_blowup_and_candidates(num_examples, blowup, candidates):
    lowest = liu_talwar_epsilon(trial(num_examples), 1.0, 1e-5, accounting=CLASSICAL)
    alone = composition_epsilon(trial(num_examples), 1, 1e-5, accounting=CLASSICAL)
    assert lowest / alone == pytest.approx(blowup, rel=1e-3)
    found = num_trials_for_budget(trial(num_examples), lowest, 1e-5, accounting=CLASSICAL)
    assert found == candidates


# Adult: 80% of 45,222 records.
@pytest.mark.parametrize(
    ("num_examples", "composed", "sgd", "momentum"),
    [(60_000, "1.14", "3.01", "3.14"), (36_177, "1.91", "5.01", "5.23")],
    ids=["mnist", "adult"],
)
def test_table_1(num_examples, composed, sgd, momentum):
    event, delta = trial(num_examples), 1e-6
    assert f"{composition_epsilon(event, 4, delta, accounting=CLASSICAL):.2f}" == composed
    # 40 candidates, and 7 times as many
    assert f"{liu_talwar_epsilon(event, 1 / 40, delta, accounting=CLASSICAL):.2f}" == sgd
    assert f"{liu_talwar_epsilon(event, 1 / 280, delta, accounting=CLASSICAL):.2f}" == momentum
