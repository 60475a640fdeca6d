"""The benchmark that includes drawing and padding: a small run of it."""

import re
import sys

import pytest

from benchmarks.steps import epochs


@pytest.mark.slow
def test_a_small_run_prints_the_rows_and_the_ratio(monkeypatch, capsys):
    monkeypatch.setattr(epochs, "NUM_EXAMPLES", 64)
    small = ["--models", "mlp", "--batch_sizes", "8", "--rounds", "2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["epochs", *small])
    epochs.main()
    said = capsys.readouterr().out
    number = r"[\d.]+"
    row = rf"^\| mlp \| 8 \| (\d+) \| {number} \| {number} \| {number} \({number} to {number}\) \|$"
    found = re.search(row, said, re.M)
    assert found and 8 < int(found.group(1)) <= 65
