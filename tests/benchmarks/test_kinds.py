"""The benchmark of kinds of models writes and prints what its docstring says."""

import json
import re
import sys

import pytest

from benchmarks import core
from benchmarks.steps import kinds, results, tables
from tf_adaptive_dp._keras.generation import GENERATION


def row(model, engine, milliseconds, run="1"):
    time = {"median_ms": milliseconds, "lower_ms": milliseconds, "upper_ms": milliseconds}
    problem = {"model": model, "batch_size": 32, "width": 1}
    return {"run": run, "engine": engine, "status": "ok", "others_load": 0.5, **problem, **time}


def test_the_table_compares_within_a_keras_and_counts_what_reaches_the_target():
    rows = [row("fnet", "keras_sgd", 4.0), row("fnet", "dpsgd", 10.0)]
    rows += [row("text_cnn", "keras_sgd", 2.0), row("text_cnn", "dpsgd", 4.0)]
    rows += [row("fnet", "keras3_sgd", 5.0, run="2"), row("fnet", "keras3_dpsgd", 6.0, run="2")]
    frame = results.frame({"runs": {}, "rows": rows})
    older, newer = tables.kinds_tables(frame).split("### Keras 3")
    assert "| text_cnn | 32 | 2.00 |" in older and "| fnet | 32 | 4.00 |" in older
    assert "| 4.00 to 4.00 | 2.00 |\n" in older and "| 10.0 to 10.0 | 2.50 |\n" in older
    assert "1 of 2 ratios are at most 2; the median is 2.25, the largest 2.50 (fnet)" in older
    assert "1 of 1 ratios are at most 2; the median is 1.20" in newer and "text_cnn" not in newer
    assert "Keras 3" not in tables.kinds_tables(frame[frame["run"] == "1"])


@pytest.mark.slow
def test_a_small_run_writes_json_and_a_table(tmp_path, monkeypatch, capsys):
    output = tmp_path / "kinds.json"
    small = ["--models", "collaborative_filtering,structured_data", "--batch_size", "5"]
    small += ["--rounds", "2", "--steps", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["kinds", *small])
    kinds.main()
    said = capsys.readouterr().out
    rows = json.loads(output.read_text())["rows"]
    assert [r["engine"] for r in rows] == 2 * list(tables.OF_GENERATION[GENERATION])
    for r in rows:
        assert r["steps"] == 2 and r["num_parameters"] > 0 and r["batch_size"] == 5
        assert 0 < r["lower_ms"] <= r["median_ms"] <= r["upper_ms"]
    for ordinary, private in (rows[:2], rows[2:]):
        ratio = core.number(private["median_ms"] / ordinary["median_ms"])
        assert re.search(rf"^\| {private['model']} \| 5 \|.* {ratio} \|$", said, re.M), said
    monkeypatch.setattr(sys, "argv", ["kinds", "--from_json", str(output)])
    kinds.main()
    assert capsys.readouterr().out == said
