"""The benchmarks of federated rounds run, small, and print what their heads promise."""

import re
import subprocess
import sys

import pytest

from benchmarks.federated import hosts
from tests.helpers import ROOT

pytestmark = pytest.mark.slow


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_scale_prints_a_table_for_each_part():
    small = ["--clients", "2,3", "--round_clients", "3", "--rounds", "1", "--memory_rounds", "52"]
    said = run(sys.executable, "-m", "benchmarks.federated.scale", *small)
    for row in (
        r"\| 2 \|",
        r"\| 3 \|",
        r"SGD, one by one \|",
        r"gaussian, ADADP, in groups \|",
        r"s per round beside it",
        "network .* ADADP",
        "small model .* ADADP",
        "tree, ADADP",
        r"\| 52 \|",
    ):
        assert re.search(row, said), said
    assert re.search(r"[01]\.\d{3} times as much as after round 50", said), said


def test_hosts_prints_what_spreading_costs():
    if subprocess.run([*hosts.OWN_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no network namespaces")
    small = ["--workers", "2", "--clients", "2", "--rounds", "1"]
    said = run(*hosts.OWN_NETWORK, sys.executable, "-m", "benchmarks.federated.spreading", *small)
    for where in ("local", "2 workers here", "2 hosts"):
        assert re.search(rf"^\| {where} \| [\d.]+ \|", said, re.M), said
