"""The benchmark that includes drawing and padding: a small run of it."""

import re
import sys

import pytest

from benchmarks.steps import epochs


@pytest.mark.slow
def test_a_small_run_prints_the_rows_and_the_ratio(monkeypatch, capsys):
    small = ["--models", "mlp", "--batch_sizes", "64", "--rounds", "2", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["epochs", *small])
    epochs.main()
    said = capsys.readouterr().out
    number = r"[\d.]+"
    times = rf"{number} \| {number} \| {number} \({number} to {number}\)"
    found = re.search(rf"^\| mlp \| 64 \| (\d+) \| (\d+) \| {times} \|$", said, re.M)
    assert found and 64 + 12 <= int(found.group(1)) < int(found.group(2)) <= 129
