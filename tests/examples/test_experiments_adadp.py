"""The ADADP paper's experiments at smoke scale, and how the comparison chooses learning rates."""

import importlib.util
import json
import os
import pathlib

import numpy as np
import pytest

from examples.experiments.adadp_comparison import run as adadp_comparison
from examples.experiments.adadp_untuned import run as untuned
from examples.experiments.lib.harness import Trial
from examples.experiments.untuned import run as nothing_to_tune
from tests.helpers.programs import assert_stored_trials_are_those_of_the_plan, run_experiment


def data_with(name):
    data_dir = os.environ.get("TFDS_DATA_DIR")
    if not data_dir or not (pathlib.Path(data_dir) / name).is_dir():
        pytest.skip(f"needs {name}: set TFDS_DATA_DIR to a tensorflow-datasets folder that has it")
    layers = pathlib.Path(data_dir).resolve().parent / "cifar100_conv_layers.npz"
    if name == "cifar10" and not ("CIFAR100_CONV_LAYERS" in os.environ or layers.is_file()):
        pytest.skip("needs cifar100_conv_layers.npz: set CIFAR100_CONV_LAYERS to its path")
    return data_dir


def check_resumes(name, output, trials, *arguments, **dataset):
    """Started again it trains nothing; without its last trial it trains that one alone."""
    (path,) = output.glob("results_*.json")
    before = path.read_bytes()
    run_experiment(name, output, *arguments, **dataset)
    assert path.read_bytes() == before
    path.write_text(json.dumps({"trials": trials[:-1]}))
    _, again = run_experiment(name, output, *arguments, **dataset)
    assert again[:-1] == trials[:-1] and again[-1]["settings"] == trials[-1]["settings"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_probability") is None,
    reason="needs TensorFlow Probability, which the older stack has",
)
def test_mixture_learns_and_resumes(tmp_path):
    out, trials = run_experiment("adadp_mixture", tmp_path)
    assert "| ADADP |" in out and "| DP-SGD, learning rate 1 |" in out
    for trial in trials:
        result = trial["result"]
        assert result["epochs"] == [1, 2]
        assert 0 < result["epsilon"][0] < result["epsilon"][1]
        if trial["settings"]["optimizer"] == "DPSGD":
            assert result["log_likelihood"][1] > max(-4.2, result["log_likelihood"][0])
        else:  # ten adaptations, from 0.1
            fastest = trial["settings"]["arguments"].get("initial_factor", 2.0)
            assert 0.15 < result["learning_rate"][1] <= 0.1 * max(1.1, fastest) ** 10 * 1.001
    check_resumes("adadp_mixture", tmp_path, trials)


@pytest.mark.slow
def test_tolerances_are_compared_on_held_out_training_data(tmp_path):
    out, trials = run_experiment("adadp_tolerance", tmp_path)
    assert "| problem | parameters | default | 0.5 | 1 |" in out and "| 650 | 0.50 |" in out
    assert sorted(t["settings"]["tolerance"] for t in trials) == [0.5, 1.0]
    assert all(t["result"]["num_parameters"] == 650 for t in trials)


@pytest.mark.slow
def test_targets_in_raw_units_are_learned_behind_a_layer_that_finds_these(tmp_path):
    out, trials = run_experiment("loss_units", tmp_path)
    r2 = {t["settings"]["method"]: t["result"]["r2"][-1] for t in trials if "r2" in t["result"]}
    finding = [r2[method] for method in ("denormalized", "measured", "adaptive")]
    assert min(finding) > 0.5 > max(r2["adadp"], r2["dp_adam"])
    assert "| 1,000 z | r2 | " + " | ".join(f"{found:.4f}" for found in finding) in out
    others = {t["settings"]["method"] for t in trials if "r2" not in t["result"]}
    assert others == {"adadp", "measured", "adaptive"}
    assert all(2.9 < t["result"]["epsilon"][-1] <= 3.0 for t in trials)


@pytest.mark.slow
def test_the_search_for_the_rate_is_compared_on_held_out_training_data(tmp_path):
    out, trials = run_experiment("adadp_search", tmp_path)
    assert "| digits, / 16, σ = 2 | 256 | 2 | 1 |" in out
    found = {t["settings"]["initial_factor"]: t["result"]["learning_rate"][-1] for t in trials}
    assert found[1.0] == pytest.approx(0.1 * 1.1**4, rel=1e-3) and found[2.0] > 2 * found[1.0]


@pytest.mark.slow
def test_averages_are_compared_with_the_last_weights_of_the_same_run(tmp_path):
    out, (trial,) = run_experiment("adadp_averages", tmp_path)
    name = "| digits, / 16, σ = 2, batches of 32, 2 epochs | 1 |"
    averaged, last = (trial["result"][f"accuracy{end}"][-1] for end in ("", "_unaveraged"))
    assert f"{name} {last:.4f} | {averaged:.4f} | {averaged - last:+.4f} |" in out
    assert trial["result"]["loss"] != trial["result"]["loss_unaveraged"]


@pytest.mark.slow
def test_batch_sizes_and_epochs_are_compared_at_the_same_epsilon(tmp_path):
    out, trials = run_experiment("batch_and_epochs", tmp_path)
    assert "digits, / 16, ε = 3" in out and "| batches of | 2 epochs |" in out
    small, large = (trial["result"] for trial in trials)
    assert all(t["epsilon"][-1] == pytest.approx(3, abs=0.03) for t in (small, large))
    assert large["noise_multiplier"] > small["noise_multiplier"]
    # 2 epochs in batches of 32 are 72 steps, and 9 in batches of 256.
    assert f"`recommend` puts 32 and 2 first ({small['accuracy'][-1]:.3f})" in out


@pytest.mark.slow
def test_insensitivity_shows_learning_rates_that_come_together(tmp_path):
    data = ("--data_dir", data_with("mnist"))
    out, trials = run_experiment("adadp_insensitivity", tmp_path, *data)
    assert "| η₀ | η after 1 epoch |" in out and "| 0.0001 |" in out and "| 10 |" in out
    starts = [t["settings"]["arguments"]["learning_rate"] for t in trials]
    ends = {s: t["result"]["learning_rate"][-1] for s, t in zip(starts, trials)}
    assert 1e-2 < ends[1e-4] <= 1e-4 * 2**15 and 1 > ends[10.0] >= 10 * 0.5**15
    assert max(ends.values()) < 2 * min(ends.values())


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_comparison_tunes_the_others_and_resumes(tmp_path, dataset):
    data = ("--data_dir", data_with(dataset))
    name = "adadp_comparison"
    out, trials = run_experiment(name, tmp_path, *data, dataset=dataset)
    assert "ADADP, constant tolerance 1 |" in out and "DP-Adam, rate" in out
    of_sgd = [t["settings"] for t in trials if t["settings"]["optimizer"] == "DPSGD"]
    assert [s["noise_multiplier"] for s in of_sgd].count(2.0) == 2  # the grid
    assert [s["noise_multiplier"] for s in of_sgd].count(4.0) == 1  # the best of it
    for trial in trials:
        result = trial["result"]
        assert len(result["accuracy"]) == len(result["epsilon"]) == 2
        assert 0 <= min(result["accuracy"]) and 0 < result["epsilon"][0] < result["epsilon"][1]
    check_resumes(name, tmp_path, trials, *data, dataset=dataset)


@pytest.mark.slow
def test_untuned_compares_all_methods(tmp_path):
    if not os.environ.get("ADULT_CSV"):
        pytest.skip("needs UCI Adult: set ADULT_CSV to its file")
    out, trials = run_experiment("adadp_untuned", tmp_path)
    assert {t["settings"]["method"] for t in trials} == set(untuned.TITLES)
    assert all(f"| {title} |" in out for title in untuned.TITLES.values())
    assert all(t["result"]["accuracy"][-1] > 0.7 for t in trials)


@pytest.mark.slow
def test_nothing_to_tune_compares_all_methods(tmp_path):
    out, trials = run_experiment("untuned", tmp_path)
    assert {t["settings"]["method"] for t in trials} == set(nothing_to_tune.TITLES) - {"adadps"}
    assert "of 1 cells" in out


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_the_stored_trials_are_those_of_the_plan(dataset):
    table = assert_stored_trials_are_those_of_the_plan(adadp_comparison, dataset)
    assert "| ADADP |" in table


def scale(**changes):
    how = {
        "epochs": 4,
        "noise_multipliers": (2.0, 4.0),
        "seeds": 3,
        "other_seeds": 2,
        "grids": {"DPAdam": range(-8, -5), "DPSGD": range(-3, 0)},
        "open_ended": True,
        "num_train": 1000,
        "num_test": 100,
        "hidden_units": (4,),
        **changes,
    }
    return adadp_comparison.Scale(**how)


def played(how, accuracy):
    """All trials of a plan, with invented accuracies."""
    trials = []
    while True:
        known = [t.settings for t in trials]
        new = [s for s in adadp_comparison.plan(how, trials) if s not in known]
        if not new:
            return trials
        for settings in new:
            if settings not in [t.settings for t in trials]:
                scores = [0.1, accuracy(settings)]
                result = {"accuracy": scores, "epochs": [1, 2], "epsilon": [0.5, 0.7]}
                trials.append(Trial(settings, result, 0.0))


def peak(adam, sgd):
    """Accuracy that falls with the distance from the best log10 of the rate at each σ."""

    def accuracy(settings):
        rate = settings["arguments"].get("learning_rate")
        if rate is None:
            return 0.8
        best = {"DPAdam": adam, "DPSGD": sgd}[settings["optimizer"]][settings["noise_multiplier"]]
        return 0.9 - 0.05 * abs(np.log10(rate) - best)

    return accuracy


def rates(trials, optimizer, sigma):
    """{rate: number of seeds}."""
    found = {}
    for trial in trials:
        s = trial.settings
        if s["optimizer"] == optimizer and s["noise_multiplier"] == sigma:
            rate = s["arguments"].get("learning_rate")
            found[rate] = found.get(rate, 0) + 1
    return found


def test_best_rates_get_their_seeds_and_dp_sgd_keeps_that_of_the_first_sigma():
    accuracy = peak({2.0: -3.6, 4.0: -3.4}, {2.0: -1.0, 4.0: -0.5})
    trials = played(scale(), accuracy)
    assert rates(trials, "DPAdam", 2.0) == {1e-4: 2, 3.16e-4: 3, 1e-3: 1}
    assert rates(trials, "DPAdam", 4.0) == {1e-4: 1, 3.16e-4: 3, 1e-3: 2}
    assert rates(trials, "DPSGD", 2.0) == {0.0316: 1, 0.1: 3, 0.316: 1}
    assert rates(trials, "DPSGD", 4.0) == {0.1: 3}  # though 0.316 would be better there
    assert rates(trials, "ADADP", 4.0) == {None: 3 + 2 + 2 + 2}


def test_a_grid_grows_until_its_best_rate_is_inside():
    accuracy = peak({2.0: -4.6, 4.0: -2.4}, {2.0: 0.1, 4.0: 0})
    trials = played(scale(), accuracy)
    assert set(rates(trials, "DPAdam", 2.0)) == {1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3}
    assert set(rates(trials, "DPAdam", 4.0)) == {1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2}
    assert rates(trials, "DPSGD", 2.0)[1.0] == 3 and 3.16 in rates(trials, "DPSGD", 2.0)
    assert rates(trials, "DPSGD", 4.0) == {1.0: 3}
    closed = played(scale(open_ended=False), accuracy)
    assert set(rates(closed, "DPAdam", 2.0)) == {1e-4, 3.16e-4, 1e-3}


def test_table_and_figure_show_the_chosen_rates_with_mean_and_spread():
    accuracy = peak({2.0: -3.6, 4.0: -3.4}, {2.0: -1.0, 4.0: -0.5})
    trials = played(scale(), lambda s: accuracy(s) + 0.01 * s["seed"])
    shown = adadp_comparison.shown(trials, 4.0)
    adam = [n for n in shown if "Adam" in n]
    assert adam == ["DP-Adam, rate 0.000316", "DP-Adam, rate 0.001, second best"]
    assert len(shown["DP-SGD, rate 0.1"]) == 3 and len(shown["ADADP"]) == 3
    assert "| 2 | 0.700 | ADADP | 0.8100 ± 0.0100 | 3 |" in adadp_comparison.table(trials)
    figure = adadp_comparison.plot(trials)
    assert len(figure.axes) == 4 and len(figure.axes[0].lines) == len(shown)
