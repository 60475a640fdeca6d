"""How federated rounds scale: with the clients, with ADADP, and over time.

No privacy claim: the data is random. Times are medians, and what is compared takes turns in one
run. Four parts, each a table:

- clients: seconds a round of TFF's `build_weighted_fed_avg` with SGD, against the number of
  clients. `plain` is the same arithmetic, client after client, from tensors in a `tf.function` of
  this process; `outside` is 1 - plain / TFF in CPU time of all processes, the share that is spent
  on other things than the clients' arithmetic: most of it prepares a client's graph and data set,
  which costs the same for one batch and for many.
- ratio: `build_adaptive_fed_avg` ÷ TFF's `build_weighted_fed_avg` with SGD on the same batches, so
  with as many gradients; for the network of the ADADP paper's CIFAR-10 experiment, in clients of 50
  batches (the paper has 1,000), and for the small model of the other parts.
- processes: this library's processes ÷ `build_weighted_fed_avg` with SGD, the small model.
- memory: resident size of this process and of the worker over rounds of `build_dp_fed_avg` with
  ADADP, with other clients, and other numbers of them, each time; medians of ten rounds, since it
  goes up and down with their number. A worker that has grown is replaced.

    python benchmarks/federated_scale.py
    python benchmarks/federated_scale.py --parts clients,ratio --clients 10,30 --rounds 5
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if not __package__:  # run as a program: find the package `benchmarks`, and nothing beside this file
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402

from benchmarks import machine, tables  # noqa: E402
from benchmarks.federated_rounds import (  # noqa: E402
    CLASSES,
    FEATURES,
    Images,
    Problem,
    Rounds,
    add_problem_args,
    resident_mib,
    spread,
    take_turns,
)
from benchmarks.measure import quartiles  # noqa: E402
from benchmarks.run import IDLE, names, say, sizes  # noqa: E402
from federated.runtime.contexts import local_context  # noqa: E402

RATIO_TARGET, MEMORY_TARGET, MEMORY_START = 1.15, 1.05, 50
MEMORY_WINDOW = 10  # rounds whose median is shown


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", type=names(PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--clients", type=sizes, default=[10, 30, 100, 300, 1000], help="numbers of clients")
    add("--round_clients", type=int, default=100, help="clients a round in the other parts (100)")
    add("--rounds", type=int, default=9, help="timed turns of each (9)")
    add("--memory_rounds", type=int, default=200, help="rounds of the part memory (200)")
    add_problem_args(parser)
    return parser.parse_args()


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
            cells = [spread(values) for values in (found["TFF"][0], found["plain"][0], outside)]
            lines.append([str(number), *cells[0], cells[1][0], *cells[2]])
            say(f"{number} clients: {cells[0][0]} s")
    head = ["clients", "s a round", "quartiles", "plain, s", "outside", "quartiles"]
    return tables.table(head, lines)


def ratio_part(args: argparse.Namespace) -> str:
    """ADADP's rounds against SGD's on the same batches."""
    problems = {
        "the paper's network": Images(2 * machine.describe()["cores"]),
        "the small model": Problem(args, args.round_clients),
    }
    lines, reached = [], []
    for title, problem in problems.items():
        with local_context() as context:
            both = {"SGD": Rounds(problem.sgd()), "ADADP": Rounds(problem.adadp())}
            steps = {n: lambda r=r, p=problem: r(p.clients) for n, r in both.items()}
            found = take_turns(steps, args.rounds, context)
        for name, (seconds, cpu) in found.items():
            ratios = [a / b for a, b in zip(seconds, found["SGD"][0])]
            cpu_ratios = [a / b for a, b in zip(cpu, found["SGD"][1])]
            cells = [*spread(seconds), *spread(ratios), spread(cpu_ratios)[0]]
            lines.append([title, name, *cells])
        reached.append(quartiles(ratios)[1] <= RATIO_TARGET)
        say(f"{title}: {quartiles(ratios)[1]:.2f}")
    head = ["model", "clients' optimizer", "s a round", "quartiles", "÷ SGD", "quartiles"]
    table = tables.table([*head, "÷ SGD, CPU"], lines)
    verdict = "reached" if reached[0] else "missed"
    return f"{table}\n\nTarget for the paper's network: at most {RATIO_TARGET}: {verdict}."


def processes_part(args: argparse.Namespace) -> str:
    """This library's processes against TFF's."""
    problem = Problem(args, args.round_clients)
    with local_context() as context:
        processes = {"TFF's FedAvg, SGD": problem.sgd(), "adaptive FedAvg, ADADP": problem.adadp()}
        for mechanism in ("gaussian", "tree"):
            for title, adaptive in (("SGD", False), ("ADADP", True)):
                name = f"DP-FedAvg, {mechanism}, {title}"
                processes[name] = problem.private(mechanism, adaptive)
        rounds = {name: Rounds(process) for name, process in processes.items()}
        steps = {name: lambda r=r: r(problem.clients) for name, r in rounds.items()}
        found = take_turns(steps, args.rounds, context)
    first = next(iter(found.values()))
    lines = []
    for name, (seconds, cpu) in found.items():
        ratios = [a / b for a, b in zip(seconds, first[0])]
        cpu_ratios = [a / b for a, b in zip(cpu, first[1])]
        lines.append([name, *spread(seconds), *spread(ratios), spread(cpu_ratios)[0]])
    head = ["process, clients' optimizer", "s a round", "quartiles", "÷ TFF's", "quartiles"]
    return tables.table([*head, "÷ TFF's, CPU"], lines)


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
                lines.append([str(number), *map(tables.number, [*found, last])])
                say(f"round {number}: {last:.0f} MiB")
    table = tables.table(["after round", "Python, MiB", "worker, MiB", "together"], lines)
    if at_start is None or args.memory_rounds <= MEMORY_START:
        return table
    growth = last / at_start
    words = (
        f"{growth:.3f} times as much as after round {MEMORY_START}, with {len(workers)} worker(s), "
        "one after the other"
    )
    verdict = "reached" if growth <= MEMORY_TARGET else "missed"
    return f"{table}\n\n{words}; target at most {MEMORY_TARGET}: {verdict}."


PARTS = {
    "clients": clients_part,
    "ratio": ratio_part,
    "processes": processes_part,
    "memory": memory_part,
}


def main() -> None:
    """Measures the parts and prints them."""
    args = parse_args()
    about = machine.describe()
    print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB")
    print(
        f"Clients of {args.examples} examples in batches of {args.batch_size}; a model of "
        f"{FEATURES}-{args.hidden}-{CLASSES}; {args.rounds} turns."
    )
    for name in args.parts:
        say(f"-- {name}")
        load = machine.OthersLoad()
        text = PARTS[name](args)
        others = load.measure()
        print(f"\n### {name}\n\n{text}\n\nOthers kept {others} cores busy.", flush=True)
        if others > IDLE:
            say(f"Others kept {others} cores busy: do not trust these figures.")


if __name__ == "__main__":
    main()
