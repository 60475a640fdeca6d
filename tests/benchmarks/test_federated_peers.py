"""The comparison of federated rounds with pfl: its sides compute the same, and are told apart."""

import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.federated import peers
from benchmarks.federated.random_clients import fingerprint, initial_weights, random_clients
from benchmarks.steps.client import WorkerError, WorkerProcess
from tests.helpers import HAS_TF_PRIVACY, ROOT


def test_every_side_is_given_the_same_clients_and_start():
    for once, again in ((random_clients(3, 2), random_clients(3, 2)),):
        np.testing.assert_array_equal(once[1][0], again[1][0])
        np.testing.assert_array_equal(once[1][1], again[1][1])
    assert not np.array_equal(*(x for x, _ in random_clients(3, 2)))
    kernel, bias, *_ = initial_weights(100)
    assert kernel.shape == (784, 100) and bias.shape == (100,)
    assert 0.9 < np.abs(kernel).max() / (6 / 884) ** 0.5 <= 1


def test_another_change_of_the_weights_is_noticed():
    change = [np.random.default_rng(0).standard_normal(shape) for shape in ((30, 20), (20,))]
    expected = fingerprint(change)
    rounded = [part * (1 + 1e-6) for part in change]
    peers.require_equal("rounded", fingerprint(rounded), expected)
    others = {
        "longer": [1.01 * part for part in change],
        "of the same norm": [part[::-1] for part in change],
        "with one entry changed": [change[0], change[1] + 0.5 * np.eye(20)[3]],
    }
    for name, other in others.items():
        with pytest.raises(RuntimeError, match=f"{name} computes another round"):
            peers.require_equal(name, fingerprint(other), expected)


def test_a_missing_environment_becomes_a_row():
    with pytest.raises(WorkerError, match="make bench-peers") as raised:
        WorkerProcess([str(ROOT / "nowhere" / "python")], {}, timeout=1)
    text = peers.table({"own_sgd": [2.0, 4.0]}, {"pfl_torch": raised.value.reason})
    assert "SGD | 3.00 | 2.50 to 3.50 | 1.00 |" in text
    assert "one process | its environment is missing" in text


def test_ratios_are_of_the_same_turn():
    text = peers.table({"own_sgd": [1.0, 4.0, 9.0], "pfl_torch": [2.0, 4.0, 3.0]}, {})
    assert "one process | 3.00 | 2.50 to 3.50 | 1.00 | 0.75 to 2.00 |" in text


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TF_PRIVACY, reason="our side runs in the older stack")
def test_the_sides_compute_the_same_and_become_a_table():
    if not peers.PFL.exists():
        pytest.skip("the environment of pfl is made by `make bench-peers`")
    small = ["--clients", "6", "--examples", "20", "--hidden", "8", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.federated.peers", *small],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for side in peers.sides().values():
        assert re.search(rf"^\| {re.escape(side.title)} \| [\d.]+ \|", done.stdout, re.M), done
    assert done.stdout.count("target at most 1") == 3, done.stdout
