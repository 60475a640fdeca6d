"""Trials of a simulation program: what is not done twice, and what is written when."""

import contextlib
import csv
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from federated.simulation import trials
from tests.helpers import ROOT


def write_figures(folder, values, name="test/accuracy"):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "figures.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", name])
        writer.writerows(values.items())


def just_figures(settings, folder):
    write_figures(folder, {1: 0.0})
    return {}


def test_finished_trials_are_not_run_again_and_a_plan_may_go_on(tmp_path):
    ran = []

    def train(settings, folder):
        ran.append(settings)
        write_figures(folder, {1: 0.1, 2: "", 4: settings["rate"]})
        return {"epsilon": 1.5}

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
    assert found[2].final == {"epsilon": 1.5}
    again = trials.run_trials(plan, train, tmp_path)
    assert [t.settings for t in again] == [t.settings for t in found] and len(ran) == 3


def test_a_trial_that_was_interrupted_is_run_again_in_its_folder(tmp_path):
    folders = []

    def train(settings, folder):
        folders.append(folder)
        write_figures(folder, {1: 0.5})
        if len(folders) == 1:
            raise KeyboardInterrupt
        return {}

    settings = [{"method": "sgd", "rate": 0.1}]
    with pytest.raises(KeyboardInterrupt):
        trials.run_trials(lambda done: settings, train, tmp_path)
    (trial,) = trials.run_trials(lambda done: settings, train, tmp_path)
    assert folders[0] == folders[1] and trial.last("test/accuracy") == 0.5


def test_trials_that_differ_anywhere_have_folders_of_their_own(tmp_path):
    settings = [{"method": "sgd", "rate": 0.1, "seed": seed} for seed in range(2)]
    trials.run_trials(lambda done: settings, just_figures, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_states_are_deleted_once_a_trial_is_finished_and_what_says_its_privacy_is_kept(tmp_path):
    def train(settings, folder):
        states = folder / "secret" / "states"
        states.mkdir(parents=True)
        (states / "state_1").write_text("large")
        (folder / "secret" / "journal").write_text("begun 1")
        (folder / "privacy.txt").write_text("epsilon = 1")
        return just_figures(settings, folder)

    settings = [{"method": "sgd"}]
    trials.run_trials(lambda done: settings, train, tmp_path)
    assert not [*tmp_path.rglob("states")]
    assert len([*tmp_path.rglob("journal")]) == len([*tmp_path.rglob("privacy.txt")]) == 1
    # The program was ended after the trial was finished and before they were deleted.
    (states,) = (path.parent / "states" for path in tmp_path.rglob("journal"))
    states.mkdir()
    trials.run_trials(lambda done: settings, None, tmp_path)
    assert not states.exists()


def test_a_trial_whose_rounds_were_all_lost_is_finished_without_figures(tmp_path):
    def train(settings, folder):
        folder.mkdir()
        (folder / "figures.csv").write_text("round\n")
        return {"epsilon": 3.0}

    (trial,) = trials.run_trials(lambda done: [{"method": "sgd"}], train, tmp_path)
    assert math.isnan(trial.last("test/accuracy")) and trial.curve("test/accuracy") == ([], [])
    assert trial.final == {"epsilon": 3.0}


def test_results_are_one_compact_object_with_the_rounds_that_were_evaluated(tmp_path):
    figures = {
        "test/loss": [math.nan, 0.12345678987, math.nan, 2.0],
        "privacy/epsilon": [1, 2, 3, 4],
    }
    evaluated = trials.Trial({"rate": 0.5}, figures, {"epsilon": 4.25})
    never = trials.Trial({"rate": 1.0}, {"train/loss": [0.5, math.nan]}, {"epsilon": math.inf})
    lost = trials.Trial({"rate": 2.0}, {}, {})
    path = tmp_path / "results.json"
    trials.write_results(path, [evaluated, never, lost])
    assert path.read_text().count("\n") == 1 and ", " not in path.read_text()
    assert json.loads(path.read_text())["trials"] == [
        {
            "settings": {"rate": 0.5},
            "rounds": [2, 4],
            "figures": {"test/loss": [0.12345679, 2], "privacy/epsilon": [2, 4]},
            "final": {"epsilon": 4.25},
        },
        {
            "settings": {"rate": 1.0},
            "rounds": [1, 2],
            "figures": {"train/loss": [0.5, None]},
            "final": {"epsilon": math.inf},
        },
        {"settings": {"rate": 2.0}, "rounds": [], "figures": {}, "final": {}},
    ]


def test_a_trial_without_figures_is_never_the_best():
    assert trials.best([0.25, math.nan, 0.5], lambda x: x) == 0.5
    assert trials.best([math.nan, 0.25], lambda x: x) == 0.25
    assert math.isnan(trials.best([math.nan], lambda x: x))


def run_program(folder, plan, train, plot):
    trials.run_program(
        "shown",
        "description",
        "data",
        ["smoke"],
        plan,
        train,
        describe=lambda scale, data_dir: f"{scale} with 7 words",
        table=lambda done: f"{len(done)} trials",
        plot=plot,
        argv=["--output_dir", str(folder)],
    )
    return folder / "shown" / "smoke"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["cifar10_adaptive", "stackoverflow_dp"])
def test_a_program_without_data_ends_in_words(program, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            f"federated.simulation.{program}",
            "--data_dir",
            str(tmp_path / "no"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"--data_dir {tmp_path / 'no'}: `")
    for word in ("Traceback", "Exception ignored"):
        assert word not in done.stderr


@pytest.mark.parametrize("workers, message", [("a", "--workers a: `addr"), ("a:1", "none there\n")])
def test_a_program_without_workers_ends_in_words(tmp_path, monkeypatch, workers, message):
    def nobody(address, timeout):
        raise trials.WorkerLostError("none there")

    monkeypatch.setattr("federated.runtime.worker.answers", nobody)
    with pytest.raises(SystemExit, match=message):
        trials.run_program(
            "shown",
            "description",
            "data",
            ["smoke"],
            plan=None,
            train=None,
            describe=None,
            table=None,
            plot=None,
            argv=["--output_dir", str(tmp_path), "--workers", workers],
        )


@pytest.fixture
def no_worker(monkeypatch):
    monkeypatch.setattr(trials, "context", lambda workers: contextlib.nullcontext())


def test_table_and_results_are_there_after_each_trial(no_worker, tmp_path, capsys):
    written = []

    def train(settings, folder, data_dir):
        found = folder.parent / "shown.md"
        written.append(found.read_text() if found.exists() else None)
        return just_figures(settings, folder)

    def plot(finished):
        raise ImportError("no matplotlib")

    def plan(scale, done):
        return [{"rate": 1}, {"rate": 2}, {"rate": 3}]

    with pytest.raises(ImportError):
        run_program(tmp_path, plan, train, plot)
    text = "smoke with 7 words\n\n{} trials\n"
    assert written == [None, text.format(1), text.format(2)]
    folder = tmp_path / "shown" / "smoke"
    assert (folder / "shown.md").read_text() == text.format(3)
    assert len(json.loads((folder / "shown.json").read_text())["trials"]) == 3
    assert capsys.readouterr().out.startswith(f"smoke with 7 words\nWriting to {folder}\n[1/3]")


def test_a_program_that_goes_on_shows_what_it_had_from_the_first_new_trial_on(no_worker, tmp_path):
    shown = []

    def train(settings, folder, data_dir):
        if (folder.parent / "shown.md").exists():
            shown.append((folder.parent / "shown.md").read_text().split()[-2])
        return just_figures(settings, folder)

    rates = [3]

    def plan(scale, done):
        return [{"rate": rate} for rate in rates]

    figure = SimpleNamespace(savefig=lambda path, dpi: None)
    run_program(tmp_path, plan, train, lambda done: figure)
    rates[:] = [1, 2, 3]
    run_program(tmp_path, plan, train, lambda done: figure)
    assert shown == ["1", "2"]  # and not 1 again, without the trial that was there
