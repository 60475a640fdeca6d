"""The experiment on correlated noise: what it compares, how it chooses, and its smoke scale."""

import pathlib

import numpy as np
import pytest

from examples.experiments.correlated_noise import run
from examples.experiments.lib import harness
from examples.experiments.lib.datasets import images
from tests.helpers.programs import run_experiment
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.accounting.noise_strategies import serialize


def played(parts, accuracy):
    """All trials of a plan, with invented accuracies."""
    trials = []
    while True:
        known = [t.settings for t in trials]
        new = [s for p in parts for s in p.plan(trials) if s not in known]
        if not new:
            return trials
        for settings in new:
            noise = BandedNoise(8) if settings["method"].endswith("best") else None
            result = {
                "accuracy": [accuracy(settings)],
                "epsilon": [settings["epsilon"]],
                "noise_multiplier": 1.2 if noise else 0.8,
                "noise": serialize(noise) if noise else None,
                "error": 0.6 if noise else 0.8,
            }
            trials.append(harness.Trial(settings, result, 0.0))


def by_rate(settings):
    """The held-out part prefers other rates than the test data."""
    if settings["method"].startswith("adadp"):
        return 0.8
    best = {"independent": 0.3, "best": 1.0}[settings["method"]]
    if settings["judged_on"] == "test":
        best = 0.1
    return 0.9 - 0.05 * abs(np.log10(settings["learning_rate"] / best)) + 0.01 * settings["seed"]


def test_rates_are_chosen_on_the_held_out_part_and_only_the_best_meets_the_test_data():
    (part, *_) = run.parts("small")
    trials = played([part], by_rate)
    tested = [t.settings for t in trials if t.settings["judged_on"] == "test"]
    found = {(s["method"], s.get("learning_rate"), s["seed"]) for s in tested}
    own = [("adadp_independent", None), ("adadp_best", None)]
    chosen = [("independent", 0.3), ("best", 1.0), *own]
    assert found == {(method, rate, seed) for method, rate in chosen for seed in range(3)}
    grid = [t.settings for t in trials if t.settings["judged_on"] == "held_out"]
    assert {s["method"] for s in grid} == {"independent", "best"}
    for method in ("independent", "best"):  # the same candidates
        rates = [s["learning_rate"] for s in grid if s["method"] == method]
        assert rates == [0.1, 0.3, 1.0, 3.0, 10.0]


def test_the_table_shows_noise_rate_mean_and_spread():
    part = run.parts("small")[0]
    trials = played([part], by_rate)
    lines = run.table([part], trials, run.TITLES).splitlines()
    mean = 0.91 - 0.05 * np.log10(3)
    assert lines[2].endswith(
        f"| DP-SGD, tuned, independent noise | 1 | 0.800 | 1.00 | 0.3 | {mean:.4f} ± 0.0100 | 3 |"
    )
    assert 'tuned, noise="best" | 8 | 1.200 | 0.75 | 1 | 0.8600 ± 0.0100 | 3 |' in lines[3]
    assert 'ADADP, noise="best" | 8 | 1.200 | 0.75 | its own | 0.8000 ± 0.0000 | 3 |' in lines[5]
    raw = [p for p in run.parts("small") if "inputs" in p.common]
    (axis,) = run.plot([part, *raw], trials, run.TITLES).axes
    assert len(axis.lines) == 2 * 2 + 2


def test_no_example_is_both_trained_on_and_judged():
    data = run.load("digits", None)
    assert [len(y) for _, y in data.values()] == [1137, 300, 360]
    x = np.concatenate([data["train"][0], data["held_out"][0]]) * 16
    np.testing.assert_array_equal(x, images.digits("train")[0])


def test_the_stored_trials_are_those_of_the_plan():
    results = harness.Results(pathlib.Path(run.__file__).parent / "results_small.json")
    assert results.trials and not results.missing(run.EXPERIMENT.plan("small", results.trials))
    for trial in results.trials:
        assert 0 < trial.result["epsilon"][-1] <= trial.settings["epsilon"]
    methods = [method for part in run.parts("small") for method in part.candidates]
    shown = run.EXPERIMENT.table(results.trials)
    assert shown.count('noise="best"') == sum(method.endswith("best") for method in methods)


def test_raw_units_are_those_of_the_files():
    x, _ = run.load_raw("digits")["train"]
    assert x.max() == 16


@pytest.mark.slow
def test_the_experiment_runs(tmp_path):
    out, trials = run_experiment("correlated_noise", tmp_path, "--jobs", 1)
    assert len(trials) == 2 * (2 + 1) + 2 + 2
    for noise in ("ADADP, independent noise | 1 |", "normalized, independent noise | 1 |"):
        assert noise in out
    for trial in trials:
        assert 7.9 < trial["result"]["epsilon"][-1] <= 8.0 and trial["result"]["accuracy"][-1] > 0.5
    noises = {t["settings"]["method"]: t["result"]["noise"] for t in trials}
    assert noises["independent"] is None and noises["best"]["bands"] >= 2
    assert noises["adadp_independent"] is None and noises["adadp_best"] == noises["best"]
    assert noises["normalized_independent"] is None and noises["normalized_best"]["bands"] >= 2
