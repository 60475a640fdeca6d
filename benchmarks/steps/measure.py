"""Times several engines on one problem in turns, so that all see the same machine state."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Callable

from benchmarks.core import quartiles
from benchmarks.steps.client import Worker, WorkerError

SLOW_MS = 2_000.0  # a step that takes longer is measured only a few times
TURN_MS = 3_000.0  # the approximate longest turn of an engine that is not slow
HEAVY_MIB = 2_048.0  # a process that needs more leaves before others are measured
MIN_TURNS = 3


def steps_of_turn(estimate_ms: float, steps: int) -> int:
    """The number of timed steps in a turn: fewer than `steps` if they are slow."""
    return max(1, min(steps, int(TURN_MS / max(estimate_ms, 1e-3))))


class Measurement:
    """One engine's worker and its measurements so far.

    Args:
      worker: A worker that was just started.
      steps: The number of timed steps in a turn, unless they are slow.
    """

    def __init__(self, worker: Worker, steps: int):
        self.worker = worker
        self._ready = worker.answer()
        self._first_step_ms = self._run(1)[0]  # builds and compiles
        self.estimate_ms = self._run(1)[0]
        if not self.slow:
            self.estimate_ms = min(self._run(3))
        self._steps = steps_of_turn(self.estimate_ms, steps)
        self._milliseconds: list[float] = []
        self.peak_mib = self._memory()

    def _run(self, steps: int, untimed: int = 0) -> list[float]:
        return self.worker.ask("run", steps=steps, untimed=untimed)["milliseconds"]

    def _memory(self) -> float:
        return self.worker.ask("memory")["peak_mib"]

    @property
    def slow(self) -> bool:
        """Whether steps are too slow for more than a few."""
        return self.estimate_ms >= SLOW_MS

    @property
    def passes(self) -> bool:
        """Whether it takes all its turns at once and leaves, being slow or large."""
        return self.slow or self.peak_mib > HEAVY_MIB

    def take_turn(self) -> None:
        """Times a turn of steps, after an untimed step unless steps are slow."""
        self._milliseconds += self._run(self._steps, untimed=0 if self.slow else 1)
        self.peak_mib = self._memory()

    def row(self) -> dict:
        """The row of the results."""
        lower, median, upper = quartiles(self._milliseconds)
        return {
            "status": "ok",
            "num_parameters": self._ready["num_parameters"],
            "steps": len(self._milliseconds),
            "median_ms": median,
            "lower_ms": lower,
            "upper_ms": upper,
            "first_step_ms": self._first_step_ms,
            "memory_mib": self.peak_mib,
            "start_mib": self._ready["start_mib"],
            "versions": self._ready["versions"],
        }


class Session:
    """The workers of one problem, and the rows of finished ones.

    Args:
      say: Receives progress messages.
    """

    def __init__(self, say: Callable[[str], None]):
        self.rows: dict[str, dict] = {}
        self._staying: dict[str, Measurement] = {}
        self._say = say

    def add(self, engine: str, worker: Worker, rounds: int, steps: int) -> None:
        """Warms an engine up; one that does not stay takes its turns between those of others."""
        try:
            measurement = Measurement(worker, steps)
        except WorkerError as error:
            self.fail(engine, error, worker)
            return
        self._say(f"{engine}: {measurement.estimate_ms:.1f} ms, {measurement.peak_mib:.0f} MiB")
        if not measurement.passes:
            self._staying[engine] = measurement
            return
        turns = MIN_TURNS if measurement.slow else max(MIN_TURNS, rounds)
        while turns and engine not in self.rows:
            self.take_turns()
            self._take_turn(engine, measurement)
            turns -= 1
        if engine not in self.rows:
            self.rows[engine] = measurement.row()
        worker.close()

    def take_turns(self) -> None:
        """Takes one turn of each engine that stays."""
        for engine, measurement in list(self._staying.items()):
            self._take_turn(engine, measurement)

    def _take_turn(self, engine: str, measurement: Measurement) -> None:
        try:
            measurement.take_turn()
        except WorkerError as error:
            self._staying.pop(engine, None)
            self.fail(engine, error, measurement.worker)

    def fail(self, engine: str, error: WorkerError, worker: Worker | None = None) -> None:
        """Makes a row from an error."""
        self._say(f"{engine}: {error}")
        if worker is not None:
            if error.status != "not supported":
                self._say(worker.log())
            worker.close()
        self.rows[engine] = {"status": error.status, "reason": error.reason}

    def finish(self) -> None:
        """Makes rows from the engines that stayed."""
        for engine, measurement in self._staying.items():
            self.rows[engine] = measurement.row()


def measure(
    engines: Sequence[str],
    model: str,
    batch_size: int,
    width: int,
    *,
    rounds: int,
    steps: int,
    timeout: float,
    say: Callable[[str], None],
) -> list[dict]:
    """Measures engines on one problem.

    Engines are started one after another and then take turns of `steps` steps each; one computes at
    a time. An engine that is slow or needs much memory takes its turns right after its start,
    between turns of the engines that are already running, and leaves. A failed worker becomes a row
    with the reason.

    Args:
      engines: Names of `catalogue.ENGINES`.
      model: A name of `problems.PROBLEMS`.
      batch_size: B.
      width: The factor of the hidden sizes.
      rounds: The number of turns of each engine.
      steps: The number of timed steps in a turn.
      timeout: Seconds to wait for an answer of a worker.
      say: Receives progress messages.

    Returns:
      One row per engine, in the order of `engines`.
    """
    session = Session(say)
    with contextlib.ExitStack() as stack:
        for engine in engines:
            try:
                worker = Worker(engine, model, batch_size, width, timeout)
            except WorkerError as error:
                session.fail(engine, error)
                continue
            stack.callback(worker.close)
            session.add(engine, worker, rounds, steps)
        for _ in range(rounds):
            session.take_turns()
        session.finish()
    return [{"engine": engine, **session.rows[engine]} for engine in engines]
