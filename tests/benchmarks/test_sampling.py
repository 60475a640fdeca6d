"""The benchmark of drawing batches prints what its docstring says."""

import re
import sys

from benchmarks.steps import sampling


def test_a_small_run_prints_the_share_of_drawing(monkeypatch, capsys):
    small = ["--examples", "200", "--features", "4", "--batch_size", "8", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["sampling", *small, "--steps", "2"])
    sampling.main()
    said = capsys.readouterr().out
    for kind in ("drawn", "repeated"):
        cpu, clock = re.search(rf"^{kind} +([\d.]+) +([\d.]+)$", said, re.M).groups()
        assert float(cpu) > 0 and float(clock) > 0
    assert re.search(r"CPU time: -?[\d.]+% \(-?[\d.]+% to -?[\d.]+%\)$", said, re.M)
