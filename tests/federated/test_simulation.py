"""The simulation programs: what they plan, what they do not do twice, and whole runs with data."""

import csv
import json
import math
import os

import pytest

from federated.simulation import cifar10_adaptive, stackoverflow_dp, trials


def write_figures(folder, values, name="test/accuracy"):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "figures.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", name])
        writer.writerows(values.items())


def test_finished_trials_are_not_run_again_and_a_plan_may_go_on(tmp_path):
    ran = []

    def train(settings, folder):
        ran.append(settings)
        write_figures(folder, {1: 0.1, 2: "", 4: settings["rate"]})

    def plan(done):
        grid = [{"method": "sgd", "rate": rate, "seed": 0} for rate in (0.5, 0.75)]
        finished = [trial for trial in done if trial.settings in grid]
        if len(finished) < 2:
            return grid
        best = max(finished, key=lambda trial: trial.last("test/accuracy"))
        return [*grid, {**best.settings, "seed": 1}]

    found = trials.run_trials(plan, train, tmp_path)
    assert [t.settings["seed"] for t in found] == [0, 0, 1] and len(ran) == 3
    assert ran[2]["rate"] == 0.75
    assert found[2].curve("test/accuracy") == ([1, 4], [0.1, 0.75])
    assert found[2].last("test/accuracy", 2) == pytest.approx(0.425)
    again = trials.run_trials(plan, train, tmp_path)
    assert [t.settings for t in again] == [t.settings for t in found] and len(ran) == 3


def test_a_trial_that_was_interrupted_is_run_again_in_its_folder(tmp_path):
    folders = []

    def train(settings, folder):
        folders.append(folder)
        write_figures(folder, {1: 0.5})
        if len(folders) == 1:
            raise KeyboardInterrupt

    settings = [{"method": "sgd", "rate": 0.1}]
    with pytest.raises(KeyboardInterrupt):
        trials.run_trials(lambda done: settings, train, tmp_path)
    (trial,) = trials.run_trials(lambda done: settings, train, tmp_path)
    assert folders[0] == folders[1] and trial.last("test/accuracy") == 0.5


def test_trials_that_differ_anywhere_have_folders_of_their_own(tmp_path):
    settings = [{"method": "sgd", "rate": 0.1, "seed": seed} for seed in range(2)]
    trials.run_trials(lambda done: settings, lambda s, f: write_figures(f, {1: 0.0}), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("program", [cifar10_adaptive, stackoverflow_dp])
def test_help_says_what_is_done_and_what_is_private(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("Privacy claim", "--scale {smoke,small,paper}", "| small |", "paper's figure"):
        assert word in text


def test_the_network_is_that_of_the_paper():
    model = cifar10_adaptive.network(0)
    flat = next(layer for layer in model.layers if layer.name.startswith("flatten"))
    assert flat.output_shape == (None, 1600) and model.output_shape == (None, 10)
    again, other = cifar10_adaptive.network(0), cifar10_adaptive.network(1)
    same = [(a.numpy() == b.numpy()).all() for a, b in zip(model.weights, again.weights)]
    assert all(same)
    assert not (model.weights[0].numpy() == other.weights[0].numpy()).all()


def cifar_trials():
    def accuracy(s):
        return {"adadp": 0.5, "adam": 0.1}.get(s["method"], 0.2 + s["rate"])

    return [
        trials.Trial(s, {"test/accuracy": [math.nan, accuracy(s)]})
        for s in cifar10_adaptive.plan("small")
    ]


def test_sgd_is_shown_with_its_best_rate_and_adadp_with_its_default():
    found = cifar10_adaptive.groups(cifar_trials())
    assert cifar10_adaptive.best_rate(found, 0.0, "sgd") == 0.1
    assert cifar10_adaptive.best_rate(found, 0.0, "adadp") == cifar10_adaptive.DEFAULT_RATE
    assert cifar10_adaptive.best_rate(found, 0.0, "adam") is None
    assert cifar10_adaptive.best_rate(found, 0.33, "adam") is not None
    assert "| 0% | SGD | **0.1** | 0.300 | 1 |" in cifar10_adaptive.table(cifar_trials())


def tag_trial(settings):
    score = settings["rate"] * settings["clip"]
    return trials.Trial(
        settings,
        {"test/accuracy": [score / 10, math.nan, score], "privacy/epsilon": [1.0, 1.5, 2.0]},
    )


def test_the_best_pair_of_each_method_gets_more_seeds():
    grid = stackoverflow_dp.plan("small", [])
    assert {s["seed"] for s in grid} == {0}
    wanted = stackoverflow_dp.plan("small", [*map(tag_trial, grid)])
    more = [s for s in wanted if s["seed"]]
    methods = sum(map(len, stackoverflow_dp.METHODS.values()))
    assert len(grid) == 4 * methods and len(more) == 2 * methods
    for settings in more:
        rivals = [
            s["rate"] * s["clip"]
            for s in grid
            if (s["method"], s["setting"]) == (settings["method"], settings["setting"])
        ]
        assert settings["rate"] * settings["clip"] == max(rivals)


def test_the_table_has_the_chosen_pair_the_mean_and_epsilon():
    grid = stackoverflow_dp.plan("small", [])
    wanted = stackoverflow_dp.plan("small", [*map(tag_trial, grid)])
    text = stackoverflow_dp.table([*map(tag_trial, wanted)])
    assert text.count("| 2.00 | 3 |") == sum(map(len, stackoverflow_dp.METHODS.values()))


@pytest.mark.parametrize(
    "module, made",
    [(cifar10_adaptive, cifar_trials), (stackoverflow_dp, lambda: None)],
    ids=["cifar10", "stackoverflow"],
)
def test_a_figure_is_drawn(module, made, tmp_path):
    pytest.importorskip("matplotlib")
    finished = made() or [*map(tag_trial, stackoverflow_dp.plan("small", []))]
    trials.save("table", module.plot(finished), finished, tmp_path, "shown")
    assert (tmp_path / "shown.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "shown.json").read_text())) == len(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, variable",
    [(cifar10_adaptive, "TFDS_DATA_DIR"), (stackoverflow_dp, "TFF_CACHE_DIR")],
    ids=["cifar10", "stackoverflow"],
)
def test_a_program_runs_at_smoke_scale_and_has_nothing_left_to_do(
    module, variable, tmp_path, capfd
):
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a folder with the data")
    module.main(["--scale", "smoke", "--output_dir", str(tmp_path)])
    first = capfd.readouterr().out
    assert "ε is infinite" in first or "Differential privacy with epsilon" in first
    module.main(["--scale", "smoke", "--output_dir", str(tmp_path)])
    assert "[1/" not in capfd.readouterr().out
