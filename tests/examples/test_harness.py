"""The harness of the experiments: plans asked again, results that are resumed, trials that fail."""

import dataclasses
import json
import time

import matplotlib.figure
import pytest

from examples.experiments.lib import harness, report
from examples.experiments.lib.harness import Experiment, Results, Trial, main, run_trials


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch):
    """Processes that do not load TensorFlow; `int` is a function that any process knows."""
    monkeypatch.setattr(harness, "_one_thread_each", int)


def square(settings, data_dir):
    """A trial: fails at -1, after the other trial beside it had time to begin."""
    if settings["x"] == -1:
        time.sleep(0.5)
        raise RuntimeError("no square today")
    time.sleep(settings.get("wait", 0))
    return {"square": settings["x"] ** 2, "data_dir": data_dir}


def experiment(plan, table=lambda trials: f"{len(trials)} trials", train=square):
    plot = lambda trials: matplotlib.figure.Figure()  # noqa: E731
    return Experiment("squares", "Squares.", plan, train, table, plot)


def of(*xs):
    return experiment(lambda scale, trials: [{"x": x} for x in xs])


def test_trials_run_with_their_settings_and_the_folder_of_data(tmp_path):
    results = Results(tmp_path / "r.json")
    run_trials(of(2, 3, 3), "smoke", results, "/data", jobs=2)
    found = sorted(
        (t.settings["x"], t.result["square"], t.result["data_dir"]) for t in results.trials
    )
    assert found == [(2, 4, "/data"), (3, 9, "/data")]  # equal settings are one trial
    assert all(t.seconds >= 0 for t in results.trials)


@pytest.mark.slow
def test_the_plan_is_asked_again_with_what_is_finished(tmp_path):
    asked = []

    def plan(scale, trials):
        asked.append((scale, len(trials)))
        wanted = [{"x": x} for x in (1, 2, 3)]
        if len(trials) >= 3:  # the best gets another run
            best = max(trials, key=lambda t: t.result["square"])
            wanted.append({"x": best.settings["x"], "seed": 1})
        return wanted

    results = Results(tmp_path / "r.json")
    run_trials(experiment(plan), "paper", results, None, jobs=2)
    assert asked == [("paper", 0), ("paper", 3), ("paper", 4)]
    assert results.trials[-1].settings == {"x": 3, "seed": 1}


def test_a_second_run_trains_only_what_is_missing(tmp_path):
    path = tmp_path / "r.json"
    kept = Trial({"x": 2}, {"square": "kept from the first run"}, 1.5)
    Results(path).add(kept)
    resumed = Results(path)
    assert resumed.trials == [kept]
    run_trials(of(2, 3), "smoke", resumed, None, jobs=1)
    assert Results(path).trials == resumed.trials
    assert [t.result["square"] for t in resumed.trials] == ["kept from the first run", 9]
    before = path.read_bytes()
    run_trials(of(2, 3), "smoke", Results(path), None, jobs=1)
    assert path.read_bytes() == before


def test_settings_are_known_again_whatever_their_order(tmp_path):
    results = Results(tmp_path / "r.json")
    results.add(Trial({"a": 1, "b": [1, 2]}, {}, 0.0))
    assert not results.missing([{"b": [1, 2], "a": 1}])
    assert results.missing([{"b": [2, 1], "a": 1}, {"b": [2, 1], "a": 1}]) == [
        {"b": [2, 1], "a": 1}
    ]


@pytest.mark.slow
def test_a_failing_trial_stops_with_its_error_and_keeps_the_finished_ones(tmp_path):
    path = tmp_path / "r.json"
    plan = [{"x": 5}, {"x": -1}, {"x": 6, "wait": 3}, *({"x": x} for x in range(10, 40))]
    with pytest.raises(RuntimeError, match="no square today"):
        run_trials(experiment(lambda *_: plan), "smoke", Results(path), None, jobs=2)
    kept = [t.settings["x"] for t in Results(path).trials]
    assert 5 in kept and 6 in kept  # 6 ran beside the one that failed, and longer
    assert -1 not in kept and 39 not in kept and len(kept) == len(set(kept))


@pytest.mark.parametrize("text", ["{", "[]", '{"trials": 3}', '{"trials": [{"x": 1}]}', "null"])
def test_a_file_that_holds_no_results_is_an_error_that_says_so(tmp_path, text):
    path = tmp_path / "results_smoke.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="results_smoke.json does not hold results .*Move it away"):
        Results(path)
    assert path.read_text() == text


def test_the_command_line_writes_results_and_plot_and_prints_the_table(tmp_path, capsys):
    main(of(2), tmp_path / "default", ["--output", str(tmp_path / "out"), "--jobs", "1"])
    assert json.loads((tmp_path / "out" / "results_smoke.json").read_text())["trials"]
    assert (tmp_path / "out" / "squares_smoke.png").stat().st_size > 0
    assert "1 trials" in capsys.readouterr().out
    assert not (tmp_path / "default").exists()


@pytest.mark.slow
def test_each_scale_has_its_own_results(tmp_path):
    scales = experiment(lambda scale, trials: [{"x": len(scale)}])
    for scale in ("smoke", "paper"):
        main(scales, tmp_path, ["--scale", scale, "--jobs", "1"])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [n for n in names if n.endswith("json")] == ["results_paper.json", "results_smoke.json"]
    assert not [n for n in names if n.endswith("part")]


def test_an_experiment_on_several_data_sets_keeps_one_file_for_each(tmp_path, capsys):
    both = {
        name: dataclasses.replace(of(x), name=f"squares_{name}") for name, x in [("a", 2), ("b", 3)]
    }
    with pytest.raises(SystemExit):
        main(both, tmp_path, [])
    assert "--dataset" in capsys.readouterr().err
    main(both, tmp_path, ["--dataset", "b", "--jobs", "1"])
    (trial,) = Results(tmp_path / "results_b_smoke.json").trials
    assert trial.settings == {"x": 3}
    assert {p.name for p in tmp_path.iterdir()} == {"results_b_smoke.json", "squares_b_smoke.png"}


def test_results_are_compact(tmp_path):
    results = Results(tmp_path / "r.json")
    results.add(Trial({"σ": 1.5}, {"accuracy": [0.5, 0.75]}, 0.1))
    line = '{"settings":{"σ":1.5},"result":{"accuracy":[0.5,0.75]},"seconds":0.1}'
    assert results.path.read_text(encoding="utf-8") == f'{{"trials":[\n{line}\n]}}\n'


def test_tables_have_one_form():
    rows = [["a", report.mean([0.25, 0.75])], ["b", report.mean([0.5], digits=2)]]
    assert report.table(["method", "accuracy"], rows).splitlines() == [
        "| method | accuracy |",
        "| --- | --- |",
        "| a | 0.5000 ± 0.3536 |",
        "| b | 0.50 |",
    ]
    assert report.deviation([0.25, 0.75], 2) == "0.35" and not report.deviation([0.5])
