"""The benchmark of steps with another unit or other noise prints what its docstring says."""

import re
import sys

import pytest

from benchmarks.steps import variants


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, variant",
    [("text", "users=2"), ("cnn", "bands=3"), ("mlp", "tree=4"), ("cnn", "normalized")],
)
def test_a_small_run_prints_the_ratios(monkeypatch, capsys, name, variant):
    small = ["--models", name, "--rows", "8", "--variants", variant]
    monkeypatch.setattr(sys, "argv", ["variants", *small, "--rounds", "2", "--steps", "1"])
    variants.main()
    said = capsys.readouterr().out
    number = r"[\d.]+"
    row = rf"^{name} +{variant} +{number} +{number} +{number} \({number} to {number}\)$"
    assert re.search(row, said, re.M)


@pytest.mark.slow
def test_the_memory_of_many_bands_shows(monkeypatch, capsys):
    small = ["--memory", "--models", "mlp", "--rows", "8", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["variants", *small, "--variants", "bands=200"])
    variants.main()
    said = capsys.readouterr().out
    # 199 noises of 269,322 numbers of 4 bytes are 204 MiB.
    more = re.search(r"^mlp +bands=200 +\d+ +\d+ +\+(\d+)$", said, re.M)
    assert more and 150 < int(more.group(1)) < 1_000


@pytest.mark.parametrize(
    "given, message",
    [
        (["rows=3"], "must be one of users=<number>, bands=<number>, tree=<number>, normalized"),
        (["normalized", "--models", "mlp", "text"], "numbers of words are not normalized"),
    ],
)
def test_an_unknown_variant_is_refused(monkeypatch, capsys, given, message):
    monkeypatch.setattr(sys, "argv", ["variants", "--variants", *given])
    with pytest.raises(SystemExit):
        variants.main()
    assert message in capsys.readouterr().err
