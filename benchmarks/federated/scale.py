"""How federated rounds scale: with the number of clients, with ADADP, and over time.

No privacy claim: the data is random. Times are medians, and the steps that a table compares take
turns in one run. Seven parts, each a table:

- clients: seconds per round of TFF's `build_weighted_fed_avg` with SGD, against the number of
  clients. `plain` is the same arithmetic, client after client, from tensors in a `tf.function` of
  this process. `outside` is 1 - plain / TFF in CPU time of all processes, the share that is not
  the clients' arithmetic. Most of it prepares a client's graph and data set, which costs the same
  for one batch and for many.
- groups: a round of many small clients, in TFF's `build_weighted_fed_avg` and in this library's
  processes, whose clients are computed one by one or in groups.
- train: what `federated.train` adds to its rounds: the journal, the state on the disk, ε, figures
  for TensorBoard and a CSV file.
- ratio: `build_adaptive_fed_avg` with ADADP ÷ the same with SGD on the same batches, so with the
  same number of gradients; for the network of the ADADP paper's CIFAR-10 experiment, in clients of
  50 batches (the paper has 1,000), and for the small model of the other parts.
- processes: this library's processes ÷ `build_weighted_fed_avg` with SGD, for the small model.
- tree: rounds of `build_dp_fed_avg` with the tree mechanism ÷ with the Gaussian one, for a model of
  five million parameters, few clients of ten examples, and trees of 3,424 rounds; the largest
  resident size of this process and of the worker together during a round; and what a saved state
  writes to the disk. Then the same for the most expensive round of a tree, which finishes the node
  of the highest level, again and again from the same state.
- memory: resident size of this process and of the worker over rounds of `build_dp_fed_avg` with
  ADADP, with other clients, and another number of them, each time. These are medians of ten rounds,
  since the size goes up and down with the number of clients. A worker that has grown is replaced.

    python -m benchmarks.federated.scale
    python -m benchmarks.federated.scale --parts clients,ratio --clients 10,30 --rounds 5
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import federated
from benchmarks import core
from benchmarks.core import median_and_quartiles, quartiles, say
from benchmarks.federated.random_clients import CLASSES, FEATURES
from benchmarks.federated.rounds import (
    Images,
    Measured,
    Problem,
    Rounds,
    SavedRounds,
    add_problem_args,
    before_the_highest_node,
    resident_mib,
    take_turns,
)
from federated.runtime.contexts import local_context

RATIO_TARGET, MEMORY_TARGET, MEMORY_START = 1.15, 1.05, 50
MEMORY_WINDOW = 10  # rounds whose median is shown
TREE_HIDDEN, TREE_CLIENTS = 6289, 4  # five million parameters


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = core.parser(__doc__)
    add = arguments.add_argument
    add("--parts", type=core.names(PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--clients", type=core.sizes, default=[10, 30, 100, 300, 1000], help="numbers of clients")
    add("--round_clients", type=int, default=100, help="clients per round in the other parts (100)")
    add("--rounds", type=int, default=9, help="timed turns of each (9)")
    add("--memory_rounds", type=int, default=200, help="rounds of the part memory (200)")
    add_problem_args(arguments)
    return arguments.parse_args()


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return core.markdown(pd.DataFrame(lines, columns=head))


def _compared(found: dict[str, tuple[list[float], list[float]]], to: str) -> dict[str, list[str]]:
    """Cells for each step: its seconds, and its ratios to one of them, the last one of CPU time."""
    seconds, cpu = found[to]
    cells = {}
    for name, (own_seconds, own_cpu) in found.items():
        ratios = [a / b for a, b in zip(own_seconds, seconds)]
        cpu_ratios = [a / b for a, b in zip(own_cpu, cpu)]
        cells[name] = [
            *median_and_quartiles(own_seconds),
            *median_and_quartiles(ratios),
            median_and_quartiles(cpu_ratios)[0],
        ]
    return cells


def clients_part(args: argparse.Namespace) -> str:
    """Seconds a round against the number of clients."""
    problem = Problem(args, max(args.clients))
    lines = []
    with local_context() as context:
        rounds, plain = Rounds(problem.sgd()), problem.plain()
        for number in args.clients:
            clients = problem.clients[:number]
            steps = {"TFF": lambda c=clients: rounds(c), "plain": lambda n=number: plain(n)}
            found = take_turns(steps, args.rounds, context)
            outside = [1 - p / t for t, p in zip(found["TFF"][1], found["plain"][1])]
            seconds, of_plain, share = map(
                median_and_quartiles, (found["TFF"][0], found["plain"][0], outside)
            )
            lines.append([str(number), *seconds, of_plain[0], *share])
            say(f"{number} clients: {seconds[0]} s")
    head = ["clients", "s per round", "quartiles", "plain, s", "outside", "quartiles"]
    return _table(head, lines)


def groups_part(args: argparse.Namespace) -> str:
    """A round of many small clients."""
    problem = Problem(args, max(args.clients))
    tffs = "TFF's FedAvg, SGD"
    with local_context() as context:
        processes = {
            tffs: problem.sgd(),
            "averaging, SGD, one by one": problem.averaged(False, 1),
            "averaging, SGD, in groups": problem.averaged(False),
            "averaging, ADADP, in groups": problem.averaged(True),
            "DP-FedAvg, gaussian, SGD, in groups": problem.private("gaussian", False),
            "DP-FedAvg, gaussian, ADADP, in groups": problem.private("gaussian", True),
        }
        rounds = {name: Rounds(process) for name, process in processes.items()}
        steps = {name: lambda r=r: r(problem.clients) for name, r in rounds.items()}
        plain = problem.plain()
        steps["the same arithmetic alone, SGD"] = lambda: plain(len(problem.clients))
        found = take_turns(steps, min(args.rounds, 5), context)
    lines = [[name, *cells] for name, cells in _compared(found, tffs).items()]
    head = ["process, clients' optimizer", "s per round", "quartiles", "÷ TFF's", "quartiles"]
    words = []
    for kind in ("averaging", "DP-FedAvg, gaussian"):
        sgd, adadp = (found[f"{kind}, {name}, in groups"] for name in ("SGD", "ADADP"))
        ratio, cpu = (
            median_and_quartiles([a / b for a, b in zip(adadp[k], sgd[k])]) for k in (0, 1)
        )
        words.append(
            f"{kind}: ADADP ÷ SGD {ratio[0]} ({ratio[1]}), in CPU time {cpu[0]} ({cpu[1]})."
        )
    return "\n\n".join([_table([*head, "÷ TFF's, CPU"], lines), *words])


def train_part(args: argparse.Namespace) -> str:
    """What `federated.train` costs beside its rounds."""
    problem = Problem(args, 20)
    names = [str(number) for number in range(20)]
    own = []
    with local_context():
        process = Measured(problem.private("gaussian", adaptive=True))
        sampler = federated.ClientSampler.poisson(names, process.privacy, 10_000)
        with tempfile.TemporaryDirectory() as folder:

            def train(rounds: int) -> float:
                begun, before = time.perf_counter(), process.seconds
                federated.train(
                    *(process, lambda name: problem.clients[int(name)], sampler, rounds, folder),
                    delta=1e-5,
                    release_managers=federated.monitors(folder),
                )
                return time.perf_counter() - begun - (process.seconds - before)

            train(2)
            for turn in range(1, args.rounds + 1):
                start = train(2 + 10 * (turn - 1))  # resumes and finds nothing to do
                own.append((train(2 + 10 * turn) - start) / 10)
    return _table(["s per round beside it", "quartiles"], [median_and_quartiles(own)])


def ratio_part(args: argparse.Namespace) -> str:
    """ADADP's rounds against SGD's on the same batches."""
    problems = {
        "the paper's network": Images(2 * core.describe_machine()["cores"]),
        "the small model": Problem(args, args.round_clients),
    }
    lines, ratios = [], []
    for title, problem in problems.items():
        with local_context() as context:
            both = {"SGD": Rounds(problem.averaged(False)), "ADADP": Rounds(problem.averaged(True))}
            steps = {n: lambda r=r, p=problem: r(p.clients) for n, r in both.items()}
            found = take_turns(steps, args.rounds, context)
        lines += [[title, name, *cells] for name, cells in _compared(found, "SGD").items()]
        ratios.append(quartiles([a / b for a, b in zip(found["ADADP"][0], found["SGD"][0])])[1])
        say(f"{title}: {ratios[-1]:.2f}")
    head = ["model", "clients' optimizer", "s per round", "quartiles", "÷ SGD", "quartiles"]
    verdict = "reached" if ratios[0] <= RATIO_TARGET else "missed"
    return (
        f"{_table([*head, '÷ SGD, CPU'], lines)}\n\n"
        f"Target for the paper's network: at most {RATIO_TARGET}: {verdict}."
    )


def processes_part(args: argparse.Namespace) -> str:
    """This library's processes against TFF's."""
    problem = Problem(args, args.round_clients)
    plain = "TFF's FedAvg, SGD"
    with local_context() as context:
        processes = {plain: problem.sgd(), "adaptive FedAvg, ADADP": problem.adadp()}
        for mechanism in ("gaussian", "tree"):
            for title, adaptive in (("SGD", False), ("ADADP", True)):
                name = f"DP-FedAvg, {mechanism}, {title}"
                processes[name] = problem.private(mechanism, adaptive)
        rounds = {name: Rounds(process) for name, process in processes.items()}
        steps = {name: lambda r=r: r(problem.clients) for name, r in rounds.items()}
        found = take_turns(steps, args.rounds, context)
    lines = [[name, *cells] for name, cells in _compared(found, plain).items()]
    head = ["process, clients' optimizer", "s per round", "quartiles", "÷ TFF's", "quartiles"]
    return _table([*head, "÷ TFF's, CPU"], lines)


def tree_part(args: argparse.Namespace) -> str:
    """Rounds of both mechanisms for a large model."""
    small = argparse.Namespace(examples=10, batch_size=10, hidden=TREE_HIDDEN)
    problem = Problem(small, TREE_CLIENTS)
    lines = []

    def compare(made: dict[str, SavedRounds], turns: int) -> None:
        steps = {name: lambda r=r: r(problem.clients) for name, r in made.items()}
        take_turns(steps, turns, context)
        base = next(iter(made.values()))
        for name, rounds in made.items():
            # The first round of each is `take_turns`' untimed one.
            seconds, of_base = rounds.seconds[1:], base.seconds[1:]
            cells = [
                *median_and_quartiles(seconds),
                core.number(np.median(seconds) / np.median(of_base)),
                core.number(np.mean(seconds) / np.mean(of_base)),
                core.number(max(rounds.peaks[1:])),
                core.number(np.mean(rounds.written[1:]) / 1e6),
                core.number(np.median(rounds.saving[1:])),
            ]
            lines.append([name, *cells])
            say(f"{name}: {cells}")

    with local_context() as context, tempfile.TemporaryDirectory() as folder:
        processes = {
            name: problem.private(name, False, stated=(100, 342_477))
            for name in ("gaussian", "tree")
        }

        def rounds(mechanism: str, place: str, start: Any = None) -> SavedRounds:
            return SavedRounds(processes[mechanism], Path(folder) / place, context, start)

        # A tree's rounds differ: every other one finishes one node alone.
        both = {name: rounds(name, name) for name in processes}
        compare(both, max(args.rounds, 16))
        start = before_the_highest_node(processes["tree"].initialize())
        level = len(start.aggregator.query_state.numerator_state.nodes) - 1
        highest = {
            "gaussian, again": rounds("gaussian", "again"),
            f"tree, level {level}": rounds("tree", "highest", start),
        }
        compare(highest, max(args.rounds, 4))
    head = [
        *("mechanism", "s per round", "quartiles", "÷ gaussian, medians", "means"),
        *("peak, MiB", "written per round, MB", "s to save"),
    ]
    return _table(head, lines)


def memory_part(args: argparse.Namespace) -> str:
    """Resident sizes over many rounds."""
    problem = Problem(args, 2 * args.round_clients)
    draw = random.Random(0)
    lines, at_start, last = [], None, 0.0
    shown = {1, 10, MEMORY_START, *range(100, args.memory_rounds, 50), args.memory_rounds}
    sizes = collections.deque(maxlen=MEMORY_WINDOW)
    with local_context() as context:
        rounds = Rounds(problem.private("gaussian", adaptive=True))
        workers = set()
        for number in range(1, args.memory_rounds + 1):
            rounds([client for client in problem.clients if draw.random() < 0.5])
            workers.update(context.worker_pids)
            sizes.append([resident_mib(pid) for pid in (os.getpid(), *context.worker_pids)])
            if number in shown:
                found = np.median(sizes, axis=0)
                last = float(found.sum())
                at_start = last if number == MEMORY_START else at_start
                lines.append([str(number), *map(core.number, [*found, last])])
                say(f"round {number}: {last:.0f} MiB")
    table = _table(["after round", "Python, MiB", "worker, MiB", "together"], lines)
    if at_start is None or args.memory_rounds <= MEMORY_START:
        return table
    growth = last / at_start
    words = (
        f"{growth:.3f} times as much as after round {MEMORY_START}, with {len(workers)} worker(s) "
        "in succession"
    )
    verdict = "reached" if growth <= MEMORY_TARGET else "missed"
    return f"{table}\n\n{words}; target at most {MEMORY_TARGET}: {verdict}."


PARTS = {
    "clients": clients_part,
    "groups": groups_part,
    "train": train_part,
    "ratio": ratio_part,
    "processes": processes_part,
    "tree": tree_part,
    "memory": memory_part,
}


def main() -> None:
    """Measures the parts and prints them."""
    args = parse_args()
    about = core.describe_machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB")
    print(
        f"Clients of {args.examples} examples in batches of {args.batch_size}; a model of "
        f"{FEATURES}-{args.hidden}-{CLASSES}; {args.rounds} turns."
    )
    for name in args.parts:
        say(f"-- {name}")
        load = core.OthersLoad()
        text = PARTS[name](args)
        others = load.measure()
        print(f"\n### {name}\n\n{text}\n\nOthers kept {others} cores busy.", flush=True)


if __name__ == "__main__":
    main()
