"""Ratios, merging, targets and the report."""

import re

import numpy as np
import pytest

from benchmarks import core
from benchmarks.steps import catalogue, problems, report, results, tables
from tests.helpers import ROOT


def row(run, engine, ms, mib=100.0, model="mlp", batch_size=250, width=1):
    problem = {"model": model, "batch_size": batch_size, "width": width}
    time = {"median_ms": ms, "lower_ms": ms, "upper_ms": ms, "first_step_ms": 10 * ms}
    rest = {"memory_mib": mib, "start_mib": 50.0, "num_parameters": 1234, "versions": {"a": "1"}}
    rest["others_load"] = 0.0
    return {"run": run, "engine": engine, "status": "ok", **problem, **time, **rest}


def found(*rows):
    about = {"date": "2026-01-01", "machine": core.describe_machine()}
    about["settings"] = {"rounds": 1, "steps": 2}
    return {"runs": {r["run"]: about for r in rows}, "rows": list(rows)}


def test_ratios_stay_within_a_run():
    rows = [row("1", "keras_sgd", 2.0), row("1", "dpsgd", 6.0), row("2", "dpsgd", 9.0)]
    frame = results.frame(found(*rows, row("1", "dpsgd", 9.0, batch_size=50)))
    expected = [1.0, 3.0, np.nan, np.nan]
    np.testing.assert_array_equal(results.ratios(frame, "keras_sgd"), expected)
    memory = results.ratios(frame, "keras_sgd", "memory_mib")
    np.testing.assert_array_equal(memory, [1.0, 1.0, np.nan, np.nan])


def test_merging_replaces_groups_that_were_measured_again_and_keeps_others_whole(tmp_path):
    old = found(row("1", "keras_sgd", 2.0), row("1", "dpsgd", 6.0), row("1", "adadp", 7.0))
    part = found(row("2", "keras_sgd", 3.0), row("2", "opacus", 9.0))
    merged = results.merge(old, part)
    assert len(merged["rows"]) == 5 and list(merged["runs"]) == ["1", "2"]
    newest = results.latest(results.frame(merged)).set_index("engine")["run"].to_dict()
    assert newest == {"keras_sgd": "2", "dpsgd": "1", "adadp": "1", "opacus": "2"}
    again = found(*({**r, "run": "3"} for r in old["rows"]))
    merged = results.merge(merged, again)
    assert list(merged["runs"]) == ["2", "3"] and len(merged["rows"]) == 5
    results.write(merged, tmp_path / "r.json")
    assert results.read(tmp_path / "r.json") == merged
    assert results.read(tmp_path / "none.json")["rows"] == []


def interrupted():
    raise KeyboardInterrupt


def test_a_run_writes_each_group_and_keeps_earlier_results(tmp_path):
    path = tmp_path / "r.json"
    results.write(found(row("1", "keras_sgd", 2.0)), path)
    run = results.Run({"rounds": 1, "steps": 2}, path)
    measured = {"engine": "dpsgd", "status": "ok", "median_ms": 3.0}
    (first,) = run.measure("mlp", 250, 1, lambda: [measured])
    assert first["others_load"] >= 0.0 and first["median_ms"] == 3.0
    assert [r["engine"] for r in results.read(path)["rows"]] == ["keras_sgd", "dpsgd"]
    with pytest.raises(KeyboardInterrupt):
        run.measure("cnn", 100, 1, interrupted)
    run.measure("cnn", 100, 1, lambda: [measured])
    assert results.read(path) == run.results
    assert [r["model"] for r in run.results["rows"]] == ["mlp", "mlp", "cnn"]
    about = run.results["runs"][first["run"]]
    assert about["settings"] == {"rounds": 1, "steps": 2} and about["machine"]["cores"] >= 1
    without_file = results.Run({}, None)
    without_file.measure("mlp", 250, 1, lambda: [measured])
    assert len(without_file.results["rows"]) == 1


def test_targets_compare_within_the_newest_run_that_has_both():
    target = results.Target("tfp_vectorized", "dpsgd", "mlp", 250, must=80, aim=150, at_least=True)
    both = found(row("1", "tfp_vectorized", 1000.0), row("1", "dpsgd", 10.0))
    both = results.merge(both, found(row("2", "tfp_vectorized", 1000.0)))
    assert target.measured(results.frame(both)) == 100.0
    assert target.measured(results.frame(found(row("1", "dpsgd", 10.0)))) is None
    verdicts = [target.verdict(value) for value in (None, 79.0, 80.0, 150.0)]
    assert verdicts == ["not measured", "missed", "must", "aim"]
    at_most = results.Target("dpsgd", "keras_sgd", "mlp", 250, must=3.0, aim=1.8)
    assert [at_most.verdict(v) for v in (3.1, 3.0, 1.8)] == ["missed", "must", "aim"]


def test_every_target_names_what_exists():
    for target in results.TARGETS:
        assert {target.numerator, target.denominator} <= set(catalogue.ENGINES)
        assert problems.PROBLEMS[target.model].batch_size == target.batch_size


def test_engines_of_keras_3_alone_have_a_table():
    rows = found(row("1", "keras3_sgd", 2.0), row("1", "keras3_dpsgd", 3.0))
    table = tables.problem_table(tables.with_ratios(results.frame(rows)))
    assert "÷ keras3_sgd" in table
    assert "| `keras3_dpsgd` | 3.00 | 3.00 to 3.00 | 1.50 | 100 |" in table


def test_the_report_shows_ratios_reasons_targets_and_growth():
    failed = {**row("1", "opacus", 1.0), "status": "not supported", "reason": "no such layer"}
    text = report.make(
        found(
            *(row("1", "keras_sgd", 2.0), row("1", "dpsgd", 5.0, mib=130.0), failed),
            *(row("1", "dpsgd", 1.5, batch_size=50), row("1", "dpsgd", 20.0, width=4)),
        ),
        "results.json",
        "p.png",
    )
    assert "| `dpsgd` | 5.00 | 5.00 to 5.00 | 2.50 | 1.00 | 130 | 1.30 | 0.05 |" in text
    assert "| `opacus` | not supported: no such layer |" in text
    assert "| time: `dpsgd` ÷ `keras_sgd`, mlp B = 250 | ≤ 3 | ≤ 1.8 | 2.50 | must |" in text
    assert re.search(r"growth with the batch size\n\n\| ms, MiB \| B = 50 \| B = 250 \|", text)
    assert "| ms, MiB | width 1 (1,234 parameters) | width 4 (1,234 parameters) |" in text
    assert "| `dpsgd` | 5.00, 130 | 20.0, 100 |" in text
    assert "![Ratios to keras_sgd](p.png)" in text


def test_the_report_explains_only_the_engines_that_it_shows():
    note = "- `adadps_public` includes the gradient of a public batch"
    without = report.make(found(row("1", "dpsgd", 5.0)), "results.json", None)
    also = report.make(
        found(row("1", "dpsgd", 5.0), row("1", "adadps_public", 6.0)), "results.json", None
    )
    assert note not in without and note in also


def test_the_page_is_the_report_of_its_sources():
    source = ROOT / "benchmarks" / "steps" / "results.json"
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == report.make(results.read(source), source.name, "performance.png")


@pytest.mark.parametrize(
    "value, expected", [(None, ""), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_are_short(value, expected):
    assert core.number(value) == expected
