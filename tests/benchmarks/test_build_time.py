"""The benchmark of building a step runs as its head says."""

import re
import subprocess
import sys

from tests.helpers import ROOT

PROGRAM = ROOT / "benchmarks" / "build_time.py"


def test_a_small_run_prints_seconds_and_ratios():
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--models", "mlp", "--batch", "unknown", "--rounds", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = re.findall(r"^mlp +unknown +(.*)$", done.stdout, re.M)
    sgd_trace, sgd_first, trace, first, *clock, ratio, both = map(float, row.split())
    assert min(sgd_trace, sgd_first, trace, first, *clock) > 0
    assert abs(ratio - trace / sgd_trace) < 0.1 + 0.02 * ratio / sgd_trace
    assert 0 < both
