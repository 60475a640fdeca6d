"""The benchmark of steps that protect users prints what its docstring says."""

import re
import sys

import pytest

from benchmarks.steps import users


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "cnn"])
def test_a_small_run_prints_the_ratios(monkeypatch, capsys, name):
    small = ["--models", name, "--rows", "8", "--examples_per_user", "2"]
    monkeypatch.setattr(sys, "argv", ["users", *small, "--rounds", "2", "--steps", "1"])
    users.main()
    said = capsys.readouterr().out
    number = r"[\d.]+"
    row = rf"^{name} +2 +{number} +{number} +{number} \({number} to {number}\)$"
    assert re.search(row, said, re.M)
