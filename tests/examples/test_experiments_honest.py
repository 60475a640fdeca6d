"""The experiments of honest selection: what they compute, and all of them at smoke scale."""

import itertools
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp
from examples.experiments.honest_adadp import run as honest_adadp
from examples.experiments.honest_adam_defaults import run as honest_adam_defaults
from examples.experiments.honest_costs import run as honest_costs
from examples.experiments.honest_heat_map import run as honest_heat_map
from examples.experiments.honest_optimizers import run as honest_optimizers
from examples.experiments.lib import candidates
from examples.experiments.lib.harness import Trial
from tests.helpers.programs import run_experiment


def check_resumes(name, output):
    before = (output / "results_smoke.json").read_bytes()
    run_experiment(name, output)
    assert (output / "results_smoke.json").read_bytes() == before


needs_adult = pytest.mark.skipif(
    not os.environ.get("ADULT_CSV"), reason="needs UCI Adult: set ADULT_CSV to its file"
)
needs_mnist = pytest.mark.skipif(
    not (pathlib.Path(os.environ.get("TFDS_DATA_DIR") or "/nowhere") / "mnist").is_dir(),
    reason="needs MNIST: set TFDS_DATA_DIR to a tensorflow-datasets folder that has it",
)

# Reused models

X = np.random.default_rng(0).normal(size=[24, 3]).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
CASES = {
    "DPSGD": ("DPSGD", {}, {"learning_rate": 0.5}),
    "DPMomentum": ("DPSGD", {"momentum": 0.9}, {"learning_rate": 0.5}),
    "DPAdam": ("DPAdam", {"beta_1": 0.8}, {"learning_rate": 0.1}),
    "DPAdamWOSM": ("DPAdamWOSM", {}, {"learning_rate": 0.1}),
    "ADADP": ("ADADP", {}, {"learning_rate": 0.3}),
}


def make_model():
    return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])


def reusable(optimizer, fixed, noise_seed=7, **given):
    """All examples are in each batch, so that weights depend on arguments and noise alone."""
    given = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 24, **given}
    return candidates.CompiledOnce(
        make_model,
        getattr(tf_adaptive_dp, optimizer)(seed=noise_seed, **given, **fixed),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        (X, Y),
        tf_adaptive_dp.PoissonSampling(1.0, max_batch_size=25, steps=1000),
        steps_per_execution=2,
    )


def weights_after(compiled, seed, arguments, steps=6):
    compiled.begin(seed, arguments)
    compiled.train(steps)
    return np.concatenate([w.ravel() for w in compiled.model.get_weights()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "ADADP" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_reused_model_does_what_a_fresh_one_does(name):
    optimizer, fixed, rate = CASES[name]
    wanted = {"l2_norm_clip": 0.3, "noise_multiplier": 2.0, **rate}
    fresh = reusable(optimizer, fixed, **wanted)
    expected = weights_after(fresh, 1, {})
    reused = reusable(optimizer, fixed)
    other = weights_after(reused, 2, {"l2_norm_clip": 5.0, "learning_rate": 0.9}, steps=4)
    again = weights_after(reused, 1, wanted)
    np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(other - expected).max() > 0.01  # the test could fail
    made, first = reused.model.optimizer, fresh.model.optimizer
    assert made.ledger.segments == first.ledger.segments
    assert made.ledger.segments[0].num_releases == made.iterations.numpy() == 6
    assert float(made.learning_rate) == pytest.approx(float(first.learning_rate), rel=1e-4)


@pytest.mark.slow
def test_each_argument_reaches_the_compiled_step():
    compiled = reusable("DPSGD", {})
    given = {"l2_norm_clip": 0.3, "noise_multiplier": 1.0, "learning_rate": 0.5}
    one = weights_after(compiled, 1, given)
    for argument, value in given.items():
        two = weights_after(compiled, 1, {**given, argument: 2 * value})
        assert np.abs(one - two).max() > 1e-3, argument
        np.testing.assert_allclose(weights_after(compiled, 1, given), one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_without_a_seed_no_run_repeats_the_noise_of_another():
    compiled = reusable("DPSGD", {}, noise_seed=None)
    arguments = {"learning_rate": 0.5}
    runs = [weights_after(compiled, 1, arguments) for _ in range(3)]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(runs, 2))


def test_steps_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="`steps` must be a multiple of 2. Received: steps=3"):
        reusable("DPSGD", {}).train(3)


@pytest.mark.slow
def test_a_candidate_is_judged_as_often_as_asked(monkeypatch):
    monkeypatch.setattr(candidates, "load", lambda name, split: (X, Y))
    settings = {
        "data": "adult",
        "hidden_units": [],
        "num_train": 20,
        "batch_size": 5,
        "steps": 60,
        "judge_every": 20,
        "optimizer": "DPMomentum",
        "arguments": {"learning_rate": 0.5, "l2_norm_clip": 1.0, "momentum": 0.5},
        "noise_multiplier": 0.1,
        "seed": 0,
    }
    candidates._compiled.cache_clear()
    result = candidates.train(settings, None)
    optimizer = candidates._compiled(
        "adult", 20, (), "DPMomentum", (("momentum", 0.5),), 5, 10
    ).model.optimizer
    candidates._compiled.cache_clear()
    assert result["steps"] == [20, 40, 60] and len(result["accuracy"]) == 3
    assert result["num_examples"] == 20 and result["accuracy"][-1] > 0.8
    assert np.mean(result["halves"]) == pytest.approx(result["accuracy"][-1], abs=1e-4)
    assert optimizer.momentum == 0.5 and optimizer.iterations.numpy() == 60
    assert optimizer.ledger.segments == [(0.1, 5.0, 60)]


def test_adadp_begins_each_run_at_its_default_rate():
    rates = candidates.DEFAULT_RATES
    for name, rate in rates.items():
        made = getattr(tf_adaptive_dp, name)(l2_norm_clip=1.0, noise_multiplier=1.0)
        assert float(made.learning_rate) == pytest.approx(rate)


# Costs


@pytest.mark.parametrize(
    "name, adam, sgd, momentum", [("Adult", 1.91, 5.01, 5.23), ("MNIST", 1.14, 3.01, 3.14)]
)
def test_table_1_is_what_the_papers_accounting_gives(name, adam, sgd, momentum):
    settings = {
        "name": name,
        "num_examples": honest_costs.TABLE_1[name],
        "delta": 1e-6,
        "accounting": "classical",
        "candidates": [4, 40, 280],
    }
    result = honest_costs.train(settings, None)
    assert result["composition"][0] == pytest.approx(adam, abs=0.005)
    assert result["liu_talwar"][1] == pytest.approx(sgd, abs=0.005)
    assert result["liu_talwar"][2] == pytest.approx(momentum, abs=0.005)
    for other in (240, 320):  # so DPMomentum had seven times as many candidates as DPSGD
        found = honest_costs.train({**settings, "candidates": [other]}, None)["liu_talwar"][0]
        assert abs(found - momentum) > 0.005


def test_figure_1_at_its_smallest_size():
    (settings,) = [s for s in honest_costs.plan("smoke", []) if s["accounting"] == "classical"][:1]
    result = honest_costs.train(settings, None)
    assert result["liu_talwar"][0] == pytest.approx(33, abs=0.5)
    assert result["liu_talwar"][-1] == pytest.approx(39, abs=0.5)
    assert result["liu_talwar"][0] / result["composition"][0] == pytest.approx(4.8, abs=0.1)
    assert result["affordable"] == 13


@pytest.mark.slow
def test_costs_smoke(tmp_path):
    out, trials = run_experiment("honest_costs", tmp_path)
    assert "| MNIST, γ = 1/40 (DPSGD) | 3.01 | 3.00" in out and len(trials) == 4
    check_resumes("honest_costs", tmp_path)


# Heat map


def heat_map_trials(loss):
    values = [0.01, 0.1, 1.0]
    return [
        Trial(
            {"learning_rate": rate, "l2_norm_clips": values, "steps": 100, "run": k},
            {"loss": [loss(rate, clip) for clip in values]},
            0.0,
        )
        for rate in reversed(values)
        for k in range(2)
    ]


def test_heat_map_knows_rates_from_clip_norms():
    loss = lambda rate, clip: None if rate > clip else 10.0 ** (rate / clip)  # noqa: E731
    values, logs = honest_heat_map.heat(heat_map_trials(loss), 100)
    assert values == [0.01, 0.1, 1.0] and logs.shape == (3, 3)
    np.testing.assert_allclose(logs[0], [1, 0.1, 0.01])
    assert np.isinf(logs[2, 0]) and logs[2, 2] == 1


def test_heat_map_table_names_the_best_products():
    loss = lambda rate, clip: 1e-3 if np.isclose(rate * clip, 0.1) else 1e3  # noqa: E731
    trials = heat_map_trials(loss)
    row = honest_heat_map.table(trials).splitlines()[-1]
    assert "| 100 | 3.16 | 0.0767 | 0.1 (0.1 to 0.1) | 0.001 | 2 of 9 |" in row
    assert "off the grid" in row
    assert "| 0.1 to 1 | 0.1 to 1 |" in row
    assert len(honest_heat_map.plot(trials).axes) == 2


@pytest.mark.slow
def test_heat_map_smoke(tmp_path):
    _, trials = run_experiment("honest_heat_map", tmp_path)
    found = {t["settings"]["learning_rate"]: t["result"]["loss"] for t in trials}
    assert found[1e-4][0] == pytest.approx(2580, rel=0.02)  # nothing learned
    assert min(found[0.1][-2:]) < 10 < 1000 < found[0.1][0]
    check_resumes("honest_heat_map", tmp_path)


# Optimizers


def test_expected_maximum_is_that_of_all_choices():
    values = [0.3, 0.1, 0.7, 0.5, 0.5]
    for drawn in (1, 2, 4, 5):
        maxima = [max(chosen) for chosen in itertools.combinations(values, drawn)]
        assert honest_optimizers.expected_maximum(values, drawn) == pytest.approx(np.mean(maxima))
    assert honest_optimizers.expected_maximum(values, 9) == 0.7


def candidate_trial(optimizer, arguments, seed, accuracy, **settings):
    settings = {
        **{"data": "adult", "model": "LR", "noise_multiplier": 4.0, "steps": 100},
        **{"optimizer": optimizer, "arguments": arguments, "seed": seed, **settings},
    }
    result = {"accuracy": accuracy, "steps": [50, 100], "num_examples": 26_000}
    return Trial(settings, result, 0.0)


@pytest.mark.slow
def test_curves_are_means_over_seeds_of_each_candidate():
    trials = [
        candidate_trial("ADADP", {"l2_norm_clip": c}, seed, [0.1 * seed, c])
        for c in (0.1, 0.5, 1.0)
        for seed in range(3)
    ] + [candidate_trial("DPAdam", {"l2_norm_clip": 0.1}, 0, [0.7, 0.8])]
    found = honest_optimizers.curves(trials)["adult", "LR"]
    assert list(found) == ["DPAdam", "ADADP"]
    np.testing.assert_allclose(found["ADADP"], [[0.1, 0.1], [0.1, 0.5], [0.1, 1.0]])
    text = honest_optimizers.table(trials)
    assert "| adult LR | ADADP | 3 | 1.0000 | 0.5000 | 0.1000 | 1.0000 |" in text
    assert "| adult LR | DPAdam | 1 | 0.8000 |" in text
    assert len(honest_optimizers.plot(trials).axes[0].lines) == 4


def test_plans_have_all_candidates():
    small = honest_optimizers.plan("small", [])
    assert len(small) == (3 + 3 + 1 + 1) * (40 + 40 + 12)
    paper = honest_optimizers.plan("paper", [])
    assert len(paper) == 6 * 3 * (40 + 280 + 12)
    assert len(honest_adam_defaults.plan("paper", [])) == 6 * 3 * 180 * 3
    assert len(honest_adam_defaults.plan("small", [])) == 9 * 45


@needs_adult
@pytest.mark.slow
@pytest.mark.parametrize("name, trials", [("honest_optimizers", 14), ("honest_adam_defaults", 4)])
def test_adult_smoke(tmp_path, name, trials):
    out, found = run_experiment(name, tmp_path)
    assert len(found) == trials and "| adult LR |" in out
    assert all(0 <= a <= 1 for t in found for a in t["result"]["accuracy"])
    check_resumes(name, tmp_path)


# Adam's defaults


def test_the_rank_of_the_default_counts_what_is_better():
    def trial(rate, beta_1, beta_2, accuracy):
        arguments = {"learning_rate": rate, "beta_1": beta_1, "beta_2": beta_2, "l2_norm_clip": 0.5}
        return candidate_trial("DPAdam", arguments, 0, [accuracy])

    trials = [
        trial(0.001, 0.9, 0.999, 0.8),
        trial(0.001, 0.8, 0.8, 0.7),
        trial(0.5, 0.9, 0.999, 0.3),
        trial(0.01, 0.9, 0.8, 0.85),
    ]
    row = honest_adam_defaults.table(trials).splitlines()[-1]
    assert "| 0.8500 | (0.01, 0.9, 0.8) | 0.8000 | 2 of 4 |" in row
    assert "| 0.7500 (0.7000 to 0.8000) | 0.7500 (0.3000 to 0.8500) |" in row
    assert len(honest_adam_defaults.plot(trials).axes) == 1


# ADADP against private selection


def test_a_simulated_selection_has_the_law_of_the_algorithm():
    """The winner of K draws from a pool of three, K geometric but at most 3."""
    pool = np.asarray([[0.1, 0.9], [0.5, 0.4], [0.3, 0.6]])
    found = honest_adadp.simulated(pool, halvings=1, limit=3, runs=40_000)
    probabilities = {1: 0.5, 2: 0.25, 3: 0.25}
    # By the score of choosing the order is 0, 2, 1; P[all of K draws among the lowest j] = (j/3)^K.
    below = [sum(p * (j / 3) ** k for k, p in probabilities.items()) for j in range(4)]
    expected = float(np.dot(np.diff(below), [0.9, 0.6, 0.4]))
    assert found[:, 0].mean() == pytest.approx(expected, abs=0.005)
    assert found[:, 1].mean() == pytest.approx(1.75, abs=0.02)
    assert honest_adadp.simulated(pool, 9, None, runs=200)[:, 1].mean() > 300


@pytest.mark.slow
def test_both_ways_cost_what_adadp_costs():
    budget = honest_adadp.budget(60_000, 3000)
    noises = {way: honest_adadp.noise_for(way, 9, 60_000, 3000) for way in honest_adadp.WAYS}
    for way, noise in noises.items():
        trial = candidates.trial_event(60_000, honest_adadp.BATCH, noise, 3000)
        spent = honest_adadp.strategy(way, 9).epsilon(trial, honest_adadp.DELTA)
        assert 0.99 * budget < spent <= budget
    assert honest_adadp.NOISE < noises["repeat_and_select"] < noises["liu_talwar"]


@needs_mnist
@pytest.mark.slow
def test_adadp_smoke(tmp_path):
    out, trials = run_experiment("honest_adadp", tmp_path)
    assert "| ADADP | 0.6349, 0.0033, 1 | 2 |" in out and out.count("| liu talwar, γ") == 9
    assert [t["settings"]["way"] for t in trials].count("repeat_and_select") == 3
    check_resumes("honest_adadp", tmp_path)
