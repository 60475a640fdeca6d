"""The benchmark of building a step prints what its docstring says."""

import re
import sys

import pytest

from benchmarks.steps import build_time
from tf_adaptive_dp._keras.generation import GENERATION


@pytest.mark.slow
@pytest.mark.skipif(
    GENERATION == 3, reason="benchmarks run in the older stack and start the newer one themselves"
)
def test_a_small_run_prints_seconds_and_ratios(monkeypatch, capsys):
    small = ["--models", "mlp", "--batch", "unknown", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["build_time", *small])
    build_time.main()
    (row,) = re.findall(r"^mlp +unknown +(.*)$", capsys.readouterr().out, re.M)
    sgd_trace, sgd_first, trace, first, *clock, ratio, both = map(float, row.split())
    assert min(sgd_trace, sgd_first, trace, first, *clock) > 0
    assert abs(ratio - trace / sgd_trace) < 0.1 + 0.02 * ratio / sgd_trace
    assert 0 < both
