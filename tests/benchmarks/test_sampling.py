"""The benchmark of drawing batches runs as its head says."""

import re
import subprocess
import sys

from tests.helpers import ROOT

PROGRAM = ROOT / "benchmarks" / "sampling.py"


def test_a_small_run_prints_the_share_of_drawing():
    small = ["--examples", "200", "--features", "4", "--batch_size", "8", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *small, "--steps", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in ("drawn", "repeated"):
        cpu, clock = re.search(rf"^{kind} +([\d.]+) +([\d.]+)$", done.stdout, re.M).groups()
        assert float(cpu) > 0 and float(clock) > 0
    assert re.search(r"CPU time: -?[\d.]+% \(-?[\d.]+% to -?[\d.]+%\)$", done.stdout, re.M)
