"""Taking turns, with workers that only pretend to compute."""

import numpy as np
import pytest

from benchmarks import core
from benchmarks.steps import catalogue, client, measure


def test_a_missing_environment_becomes_a_reason(monkeypatch):
    family = catalogue.Family("nowhere", (), environment="nowhere")
    monkeypatch.setitem(catalogue.FAMILIES, "torch", family)
    (only,) = measure.measure(
        ["opacus"], "mlp", 4, 1, rounds=1, steps=1, timeout=1, say=lambda text: None
    )
    assert only["status"] == "failed" and "make bench-peers" in only["reason"]


class FakeWorker:
    """Answers at once; `script` says how long a step takes, how much memory, when it fails."""

    log_of_all: list = []

    def __init__(self, engine, *_):
        self.engine, self.closed = engine, False
        self.ms, self.mib, self.fails_at = SCRIPT[engine]
        self.runs = 0

    def answer(self):
        return {"num_parameters": 7, "start_mib": 1.0, "versions": {}}

    def ask(self, command, steps=0, untimed=0):
        assert not self.closed
        if command == "memory":
            return {"peak_mib": self.mib}
        self.runs += 1
        if self.runs == self.fails_at:
            raise client.WorkerError("failed", "on purpose")
        self.log_of_all.append((self.engine, steps))
        return {"milliseconds": [self.ms] * steps}

    def log(self):
        return "the log"

    def close(self):
        self.closed = True


SCRIPT = {
    "keras_sgd": (2.0, 100.0, None),
    "dpsgd": (3.0, 100.0, None),
    "opacus": (900.0, 100.0, None),
    "materialized": (50.0, 9000.0, None),
    "tfp_vectorized": (9000.0, 9000.0, None),
    "adadp": (3.0, 100.0, 4),
    "dpadam": (3.0, 100.0, 1),
}


def test_engines_take_turns_and_slow_or_heavy_ones_leave(monkeypatch):
    monkeypatch.setattr(measure, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log_of_all", log := [])
    said = []
    rows = measure.measure(
        list(SCRIPT), "mlp", 250, 1, rounds=4, steps=5, timeout=1, say=said.append
    )
    by_engine = {r["engine"]: r for r in rows}
    assert list(by_engine) == list(SCRIPT)
    assert by_engine["adadp"] == {"engine": "adadp", "status": "failed", "reason": "on purpose"}
    assert by_engine["dpadam"]["status"] == "failed"
    assert by_engine["tfp_vectorized"]["steps"] == 3  # slow: one step in each of three turns
    assert by_engine["materialized"]["steps"] == 4 * 5  # heavy: all its turns, then it leaves
    # Three turns beside the slow one, four beside the heavy one, four of its own.
    assert by_engine["keras_sgd"]["steps"] == (3 + 4 + 4) * 5
    assert by_engine["opacus"]["steps"] == (3 + 4 + 4) * 3  # fewer, since they take long
    slow = [k for k, (engine, _) in enumerate(log) if engine == "tfp_vectorized"]
    assert "dpsgd" in [engine for engine, _ in log[slow[-2] : slow[-1]]]  # between its turns
    assert "the log" in said


@pytest.mark.parametrize(
    "estimate, expected", [(1.0, 10), (299.0, 10), (1000.0, 3), (2500.0, 1), (1e6, 1)]
)
def test_long_steps_mean_short_turns(estimate, expected):
    assert measure.steps_of_turn(estimate, 10) == expected


def test_quartiles_are_those_of_numpy():
    values = list(np.random.default_rng(0).random(11))
    np.testing.assert_allclose(
        core.quartiles(values), np.quantile(values, [0.25, 0.5, 0.75]), atol=1e-4
    )
    assert core.quartiles([3.0]) == (3.0, 3.0, 3.0)
