"""A federated round in a local worker, over workers on this machine, and over several hosts.

No privacy claim: the data is random. The hosts are network namespaces of this machine, each at the
end of a cable, so the clients' data travels and the cores are shared: what is measured is what
spreading costs, not what more machines bring. Each of N workers computes cores / N clients at a
time, at least one. All take turns; times are medians. Needs Linux and iproute2:

    unshare --user --map-root-user --net python benchmarks/federated_hosts.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if not __package__:  # run as a program: find the package `benchmarks`, and nothing beside this file
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import tensorflow_federated as tff  # noqa: E402

from benchmarks import federated_rounds as timed  # noqa: E402
from benchmarks import hosts, machine, tables  # noqa: E402
from benchmarks.run import IDLE, say, sizes  # noqa: E402
from federated.runtime.contexts import Runtime, local_context, remote_context  # noqa: E402
from federated.runtime.worker import WorkerProcess  # noqa: E402


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=sizes, default=[2, 4], help="numbers of workers, and of hosts (2,4)")
    add("--rate", default="1gbit", help="of each host's cable, as tc writes it (1gbit)")
    add("--clients", type=int, default=100, help="of a round (100)")
    add("--rounds", type=int, default=9, help="timed turns of each (9)")
    timed.add_problem_args(parser)
    return parser.parse_args()


def contexts(args: argparse.Namespace, opened: contextlib.ExitStack) -> dict[str, Runtime]:
    """All places to compute at, which end with `opened`."""
    found = {"local": opened.enter_context(local_context())}
    number_of_hosts = 0
    for number in args.workers:
        clients_at_a_time = max(1, machine.describe()["cores"] // number)
        on_hosts, here = [], []
        for _ in range(number):
            number_of_hosts += 1
            on_hosts.append(hosts.Host(number_of_hosts, clients_at_a_time, args.rate))
            opened.callback(on_hosts[-1].close)
            here.append(WorkerProcess(None, clients_at_a_time))
            opened.callback(here[-1].close)
        for name, workers in (("workers here", here), ("hosts", on_hosts)):
            addresses = [worker.address for worker in workers]
            found[f"{number} {name}"] = opened.enter_context(remote_context(addresses))
    return found


def measure(args: argparse.Namespace) -> str:
    """The table."""
    problem = timed.Problem(args, args.clients)
    process = problem.sgd()
    stack = tff.framework.get_context_stack()

    def step(context: Runtime) -> timed.Step:
        with stack.install(context):
            rounds = timed.Rounds(process)

        def run() -> None:
            with stack.install(context):
                rounds(problem.clients)

        return run

    with contextlib.ExitStack() as opened:
        steps = {name: step(context) for name, context in contexts(args, opened).items()}
        found = timed.take_turns(steps, args.rounds)
    local = found["local"][0]
    lines = []
    for name, (seconds, _) in found.items():
        ratios = timed.spread([a / b for a, b in zip(seconds, local)])
        lines.append([name, *timed.spread(seconds), *ratios])
    return tables.table(["where", "s a round", "quartiles", "÷ local", "quartiles"], lines)


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    hosts.start_loopback()
    about = machine.describe()
    print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB")
    print(
        f"{args.clients} clients of {args.examples} examples; cables of {args.rate} for each host."
    )
    load = machine.OthersLoad()
    text = measure(args)
    others = load.measure()
    print(f"\n{text}\n\nOthers kept {others} cores busy.", flush=True)
    if others > IDLE:
        say(f"Others kept {others} cores busy: do not trust these figures.")


if __name__ == "__main__":
    main()
