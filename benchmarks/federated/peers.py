"""Federated rounds with privacy in this library and in pfl, on the same clients, in turns.

No privacy claim: the data is random. Each side computes the same rounds: all clients train the
same network for one epoch of SGD, their updates are clipped, and the server adds Gaussian noise to
the sum. (`own_adadp` replaces the clients' SGD.) Each has processes of its own in its own
environment, with the clients' data in memory, and one side computes at a time. First each computes
a round without noise from the same weights, and the changes of the weights must agree.

    make bench-peers
    python -m benchmarks.federated.peers --clients 1000 --rounds 9
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import socket
import sys

import pandas as pd

from benchmarks import core
from benchmarks.core import median_and_quartiles, say
from benchmarks.federated.random_clients import CLASSES, FEATURES
from benchmarks.steps.catalogue import ROOT
from benchmarks.steps.client import WorkerError, WorkerProcess

PFL = ROOT / "benchmarks" / "peers" / "pfl" / ".venv" / "bin" / "python"
TOLERANCE = 1e-3  # by which changes of the weights may differ, as a share of their norm
TARGET = 1.0


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
      name: Of `peer_rounds.SIDES`.
      title: What the table calls it.
      processes: How many of them share the clients of a round; for pfl, which computes the clients
        of a process one after another.
    """

    name: str
    title: str
    processes: int = 1


def sides() -> dict[str, Side]:
    """The sides, by the name that `--sides` takes."""
    cores = core.describe_machine()["cores"]
    return {
        "own_sgd": Side("own_sgd", "`build_dp_fed_avg`, SGD"),
        "own_adadp": Side("own_adadp", "`build_dp_fed_avg`, ADADP"),
        "pfl_torch": Side("pfl_torch", "pfl, PyTorch, one process"),
        "pfl_torch_parallel": Side("pfl_torch", "pfl, PyTorch, a process per core", cores),
        "pfl_tensorflow": Side("pfl_tensorflow", "pfl, TensorFlow, one process"),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = core.parser(__doc__)
    add = arguments.add_argument
    known = sides()
    add("--sides", type=core.names(known), default=list(known), help=f"of {', '.join(known)}")
    add("--clients", type=int, default=1000, help="clients, all in each round (1000)")
    add("--examples", type=int, default=100, help="examples of a client (100)")
    add("--batch_size", type=int, default=10, help="of a client (10)")
    add("--hidden", type=int, default=100, help="units of the model's hidden layer (100)")
    add("--rounds", type=int, default=9, help="timed turns of each (9)")
    add("--timeout", type=float, default=600, help="seconds to wait for an answer")
    return arguments.parse_args()


class Workers:
    """The processes of one side, which begin each round together.

    Args:
      side: The side.
      args: The command line of this program.
      stack: Ends them when it is closed.
    """

    def __init__(self, side: Side, args: argparse.Namespace, stack: contextlib.ExitStack):
        python = str(PFL) if side.name.startswith("pfl") else sys.executable
        command = [python, "-m", "benchmarks.federated.peer_rounds", "--side", side.name]
        for name in ("clients", "examples", "batch_size", "hidden"):
            command += [f"--{name}", str(getattr(args, name))]
        self._workers = []
        address = f"localhost:{_free_port()}"
        for rank in range(side.processes):
            variables = {"TF_CPP_MIN_LOG_LEVEL": "3"}
            if side.processes > 1:  # as pfl's own documentation starts several processes
                addresses = ",".join([address] * side.processes)
                variables |= {"PFL_WORKER_RANK": str(rank), "PFL_WORKER_ADDRESSES": addresses}
            worker = WorkerProcess(command, variables, args.timeout)
            stack.callback(worker.close)
            self._workers.append(worker)
        for worker in self._workers:
            worker.answer()

    def ask(self, command: str) -> list[dict]:
        """Sends a command to all of them and returns their answers."""
        for worker in self._workers:
            worker.send(command)
        return [worker.answer() for worker in self._workers]

    def seconds(self) -> float:
        """Computes a round; returns how long the slowest process took."""
        return max(answer["seconds"] for answer in self.ask("run"))

    def fingerprint(self) -> list[float]:
        """What identifies the change of the weights in a round without noise."""
        return self.ask("check")[0]["fingerprint"]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def require_equal(name: str, found: list[float], expected: list[float]) -> None:
    """Raises if a side changed the weights otherwise than the first side did."""
    if not all(
        math.isclose(a, b, rel_tol=0, abs_tol=TOLERANCE * abs(expected[0]))
        for a, b in zip(found, expected)
    ):
        raise RuntimeError(
            f"{name} computes another round than the first side: without noise the norm of the "
            f"change and its products with random directions are {found} instead of {expected}."
        )


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times the sides in turns.

    Returns:
      The seconds of the rounds of each side, and the reason for each side that failed.
    """
    known = sides()
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, Workers] = {}
        expected = None
        for name in args.sides:
            try:
                workers = Workers(known[name], args, stack)
                first = workers.seconds()
                if known[name].name != "own_adadp":  # which trains differently
                    found = workers.fingerprint()
                    expected = expected or found
                    require_equal(name, found, expected)
            except WorkerError as error:
                failed[name] = error.reason
                say(f"{name}: {error}")
                continue
            say(f"{name}: {first:.1f} s for the first round")
            running[name] = workers
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(args.rounds):
            # Another side begins each turn: what a side has just done may slow the next one down.
            order = collections.deque(running)
            order.rotate(-turn)
            for name in order:
                seconds[name].append(running[name].seconds())
    return seconds, failed


def table(seconds: dict[str, list[float]], failed: dict[str, str]) -> str:
    """A table of the sides, with the ratios of each turn to the first side."""
    known = sides()
    lines = []
    base = next(iter(seconds.values()), [])
    for name, own in seconds.items():
        ratios = [b / a for a, b in zip(own, base)]
        cells = [*median_and_quartiles(own), *median_and_quartiles(ratios)]
        lines.append([known[name].title, *cells])
    lines += [[known[name].title, reason, "", "", ""] for name, reason in failed.items()]
    first = known[next(iter(seconds))].title if seconds else "the first side"
    head = ["side", "s per round", "quartiles", f"{first} ÷ this", "quartiles"]
    return core.markdown(pd.DataFrame(lines, columns=head))


def main() -> None:
    """Measures the sides and prints a table."""
    args = parse_args()
    about = core.describe_machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB")
    print(
        f"{args.clients} clients of {args.examples} examples in batches of {args.batch_size}; a "
        f"model of {FEATURES}-{args.hidden}-{CLASSES}; {args.rounds} turns."
    )
    load = core.OthersLoad()
    seconds, failed = measure(args)
    print(f"\n{table(seconds, failed)}\n")
    for name in seconds:
        if name.startswith("pfl") and "own_sgd" in seconds:
            ratios = [own / peer for own, peer in zip(seconds["own_sgd"], seconds[name])]
            ratio = core.quartiles(ratios)[1]
            verdict = "reached" if ratio <= TARGET else "missed"
            print(f"own_sgd ÷ {name}: {ratio:.2f}; target at most {TARGET:g}: {verdict}.")
    print(f"Others kept {load.measure()} cores busy.")


if __name__ == "__main__":
    main()
