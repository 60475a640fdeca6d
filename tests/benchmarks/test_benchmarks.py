"""The benchmarks: one small run as a user would start it, and the functions around it."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import core
from benchmarks.steps import problems, protocol, run
from tests.helpers import ROOT
from tf_adaptive_dp._keras.generation import GENERATION


@pytest.mark.slow
@pytest.mark.skipif(
    GENERATION == 3, reason="benchmarks run in the older stack and start the newer one themselves"
)
def test_a_small_run_writes_table_json_report_and_plot(tmp_path):
    output, text = tmp_path / "results.json", tmp_path / "performance.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps.run", "--models", "bow"]
        + ["--engines", "keras_sgd,dpsgd", "--batch_sizes", "4", "--rounds", "1", "--steps", "2"]
        + ["--output", str(output), "--report", str(text)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [r["engine"] for r in rows] == ["keras_sgd", "dpsgd"]
    for r in rows:
        assert r["status"] == "ok" and r["steps"] == 2 and r["num_parameters"] == 160_034, r
        assert 0 < r["lower_ms"] <= r["median_ms"] <= r["upper_ms"] < r["first_step_ms"]
        assert 100 < r["start_mib"] < r["memory_mib"]
        assert 0 <= r["others_load"] <= core.describe_machine()["cores"] + 0.1
        assert set(r["versions"]) >= {"python", "tensorflow"}
    assert "| `dpsgd` |" in done.stdout
    assert "| `dpsgd` |" in text.read_text() and "(performance.png)" in text.read_text()
    assert (tmp_path / "performance.png").stat().st_size > 10_000


def test_stray_prints_do_not_reach_the_protocol():
    code = (
        "import os; from benchmarks.steps import protocol; answers = protocol.take_stdout();"
        "print('stray', flush=True); os.system('echo stray'); protocol.send(answers, good=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == '{"good": 1}\n' and done.stderr.count("stray") == 2


def test_the_end_of_stdin_ends_a_worker_in_the_middle_of_a_step():
    code = (
        "import sys, time; from benchmarks.steps import protocol\n"
        "for message in protocol.receive(sys.stdin): print('at work', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    process.stdin.write(b'{"command": "run"}\n')
    process.stdin.flush()
    assert process.stdout.readline() == b"at work\n"
    process.stdin.close()
    assert process.wait(timeout=10) == 1
    process.stdout.close()


def test_the_load_of_others_leaves_out_our_own(monkeypatch, capsys):
    # Seconds on the clock, of processor time of all, of our own.
    times = iter([(100.0, 50.0, 7.0), (110.0, 65.0, 17.0)])
    monkeypatch.setattr(core.OthersLoad, "_now", staticmethod(lambda: next(times)))
    assert core.OthersLoad().measure() == 0.5
    assert "0.5 cores busy: do not trust" in capsys.readouterr().err


def test_reasons_are_one_line_without_paths():
    try:
        raise ValueError("in user code:\n\n  File x\n  the cause is in /home/someone/lib/file.py")
    except ValueError as error:
        assert protocol.short_reason(error) == "ValueError: the cause is in .../file.py"
    assert protocol.short_reason(KeyError()) == "KeyError: "
    assert len(protocol.short_reason(ValueError("a" * 1000))) == 300


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_data_is_the_same_each_time(name):
    x, y = problems.make_data(name, 3)
    assert len(x) == len(y) == 3
    for first, second in zip((x, y), problems.make_data(name, 3)):
        np.testing.assert_array_equal(first, second)


def test_width_multiplies_the_hidden_sizes_of_the_mlp_alone():
    assert problems.PROBLEMS["mlp"].layer_sizes(2) == (784, 512, 512, 10)
    assert problems.PROBLEMS["logistic"].layer_sizes(2) == (10_000, 500)
    args = argparse.Namespace(models=["mlp", "bow"], widths=[1, 2], batch_sizes=None)
    assert list(run.grid(args)) == [("mlp", 250, 1), ("mlp", 250, 2), ("bow", 64, 1)]


def test_unknown_names_and_sizes_are_refused():
    assert core.names(("a", "b"))("all") == ["a", "b"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: c; there are a, b"):
        core.names(("a", "b"))("a,c")
    for wrong in ("0", "1,x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
            core.sizes(wrong)
    assert core.sizes("1,2") == [1, 2]


@pytest.mark.parametrize("peer", ["opacus", "jax_privacy"])
def test_locks_of_peers_pin_every_version_and_name_no_place(peer):
    lock = (ROOT / "benchmarks" / "peers" / peer / "lock.txt").read_text()
    lines = [line for line in lock.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "://" not in lock and "/opt/" not in lock
