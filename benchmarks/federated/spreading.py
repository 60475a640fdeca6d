"""A federated round in a local worker, over workers on this machine, and over several hosts.

No privacy claim: the data is random. The hosts are network namespaces of this machine, each at the
end of a cable. The clients' data travels, but the cores are shared: this measures the cost of
spreading a round, not the gain from more machines. Each of N workers computes cores / N clients at
a time, at least one. All take turns; times are medians. Needs Linux and iproute2:

    unshare --user --map-root-user --net python -m benchmarks.federated.spreading
"""

from __future__ import annotations

import argparse
import contextlib

import pandas as pd
import tensorflow_federated as tff

from benchmarks import core
from benchmarks.core import median_and_quartiles
from benchmarks.federated import hosts
from benchmarks.federated import rounds as timed
from federated.runtime.contexts import Runtime, local_context, remote_context
from federated.runtime.worker import WorkerProcess


def parse_args() -> argparse.Namespace:
    """The command line."""
    arguments = core.parser(__doc__)
    add = arguments.add_argument
    add("--workers", type=core.sizes, default=[2, 4], help="numbers of workers, and of hosts (2,4)")
    add("--rate", default="1gbit", help="rate of each host's cable, as tc writes it (1gbit)")
    add("--clients", type=int, default=100, help="clients per round (100)")
    add("--rounds", type=int, default=9, help="timed turns of each (9)")
    timed.add_problem_args(arguments)
    return arguments.parse_args()


def contexts(args: argparse.Namespace, opened: contextlib.ExitStack) -> dict[str, Runtime]:
    """All contexts to compute in; `opened` closes them."""
    found = {"local": opened.enter_context(local_context())}
    number_of_hosts = 0
    for number in args.workers:
        clients_at_a_time = max(1, core.describe_machine()["cores"] // number)
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
        ratios = median_and_quartiles([a / b for a, b in zip(seconds, local)])
        lines.append([name, *median_and_quartiles(seconds), *ratios])
    head = ["where", "s per round", "quartiles", "÷ local", "quartiles"]
    return core.markdown(pd.DataFrame(lines, columns=head))


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    hosts.start_loopback()
    about = core.describe_machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:g} GiB")
    print(
        f"{args.clients} clients of {args.examples} examples; cables of {args.rate} for each host."
    )
    load = core.OthersLoad()
    text = measure(args)
    others = load.measure()
    print(f"\n{text}\n\nOthers kept {others} cores busy.", flush=True)


if __name__ == "__main__":
    main()
