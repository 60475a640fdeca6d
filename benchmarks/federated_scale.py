"""How federated rounds scale: with the clients, with ADADP, and over time.

No privacy claim: the data is random. Times are medians, and what is compared takes turns in one
run. Three parts, each a table:

- clients: seconds a round against the number of clients. `plain` is the same arithmetic, client
  after client, from tensors in a `tf.function` of this process; `outside` is 1 - plain / TFF in CPU
  time of all processes, the share that is spent on other things than the clients' arithmetic: most
  of it prepares a client's graph and data set, which costs the same for one batch and for many.
- ratio: `build_adaptive_fed_avg` ÷ TFF's `build_weighted_fed_avg` with SGD on the same batches, so
  with as many gradients; for the network of the ADADP paper's CIFAR-10 experiment, in clients of 50
  batches (the paper has 1,000), and for the small model of the other parts.
- memory: resident size of this process and of the worker over rounds with other clients, and other
  numbers of them, each time; medians of ten rounds, since it goes up and down with their number. A
  worker that has grown is replaced.

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
import time
from collections.abc import Sequence
from typing import Any, Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if not __package__:  # run as a program: find the package `benchmarks`, and nothing beside this file
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_federated as tff  # noqa: E402

from benchmarks import machine, tables  # noqa: E402
from benchmarks.measure import quartiles  # noqa: E402
from benchmarks.run import IDLE, names, say, sizes  # noqa: E402
from federated.runtime import local_context  # noqa: E402

FEATURES, CLASSES, RATE = 784, 10, 0.1
RATIO_TARGET, MEMORY_TARGET, MEMORY_START = 1.15, 1.05, 50
MEMORY_WINDOW = 10  # rounds whose median is shown
Step = Callable[[], Any]


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


def add_problem_args(parser: argparse.ArgumentParser) -> None:
    """What a `Problem` is made from."""
    add = parser.add_argument
    add("--examples", type=int, default=100, help="examples of a client (100)")
    add("--batch_size", type=int, default=10, help="of a client (10)")
    add("--hidden", type=int, default=100, help="units of the model's hidden layer (100)")


class Problem:
    """A model with one hidden layer, and clients with random examples."""

    def __init__(self, args: argparse.Namespace, num_clients: int):
        self._hidden = args.hidden
        self._make_clients(args.examples, args.batch_size, num_clients, [FEATURES])

    def _make_clients(
        self, examples: int, batch_size: int, num_clients: int, features: list[int]
    ) -> None:
        rng = np.random.default_rng(0)
        shape = [examples, *features]
        self.arrays = [
            (rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, examples, np.int32))
            for _ in range(num_clients)
        ]
        self._batch_size = batch_size
        self.clients = [
            tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size) for arrays in self.arrays
        ]
        self.spec = self.clients[0].element_spec

    def keras_model(self) -> tf.keras.Model:
        """The model."""
        hidden = tf.keras.layers.Dense(self._hidden, "relu")
        return tf.keras.Sequential(
            [tf.keras.Input([FEATURES]), hidden, tf.keras.layers.Dense(CLASSES)]
        )

    def model_fn(self) -> tff.learning.models.VariableModel:
        """The model, for TFF."""
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tff.learning.models.from_keras_model(self.keras_model(), loss, self.spec)

    def sgd(self) -> tff.learning.templates.LearningProcess:
        """TFF's federated averaging with SGD on the clients."""
        optimizer = tff.learning.optimizers.build_sgdm(RATE)
        return tff.learning.algorithms.build_weighted_fed_avg(self.model_fn, optimizer)

    def adadp(self) -> tff.learning.templates.LearningProcess:
        """Adaptive federated averaging."""
        from federated.processes import build_adaptive_fed_avg

        return build_adaptive_fed_avg(self.model_fn)

    def plain(self) -> Callable[[int], None]:
        """SGD on one client after the other, from tensors: their arithmetic and little else."""
        model = self.keras_model()
        loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        server = [tf.Variable(v) for v in model.trainable_variables]
        mean = [tf.Variable(tf.zeros_like(v)) for v in server]
        data = [tuple(map(tf.constant, arrays)) for arrays in self.arrays]
        size = self._batch_size

        @tf.function
        def train(x: tf.Tensor, y: tf.Tensor) -> None:
            for variable, value in zip(model.trainable_variables, server):
                variable.assign(value)
            for start in tf.range(0, tf.shape(y)[0], size):
                with tf.GradientTape() as tape:
                    loss = loss_fn(y[start : start + size], model(x[start : start + size]))
                gradients = tape.gradient(loss, model.trainable_variables)
                for variable, gradient in zip(model.trainable_variables, gradients):
                    variable.assign_sub(RATE * gradient)
            for total, variable, value in zip(mean, model.trainable_variables, server):
                total.assign_add(value - variable)

        def run(number: int) -> None:
            for x, y in data[:number]:
                train(x, y)
            for value, total in zip(server, mean):
                value.assign_sub(total / number)
                total.assign(tf.zeros_like(total))

        return run


class Images(Problem):
    """The network of `federated.simulation.cifar10_adaptive` on clients of 50 batches of 10."""

    def __init__(self, num_clients: int):
        self._make_clients(500, 10, num_clients, [32, 32, 3])

    def keras_model(self) -> tf.keras.Model:
        """The network."""
        from federated.simulation import cifar10_adaptive

        return cifar10_adaptive.network(0)


class Rounds:
    """Rounds of a process from its own last state."""

    def __init__(self, process: tff.learning.templates.LearningProcess):
        self._process = process
        self._state = process.initialize()

    def __call__(self, clients: Sequence[tf.data.Dataset]) -> None:
        self._state = self._process.next(self._state, list(clients)).state


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of this process and of workers."""
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident size of a process."""
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def take_turns(
    steps: dict[str, Step], rounds: int, pids: Sequence[int] = ()
) -> dict[str, tuple[list[float], list[float]]]:
    """Runs each once untimed, then all of them by turns.

    Returns:
      Seconds of the clock and of the CPU of each, in the order of its turns.
    """
    for step in steps.values():
        step()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            clock, cpu = time.perf_counter(), cpu_seconds(pids)
            step()
            found[name][0].append(time.perf_counter() - clock)
            found[name][1].append(cpu_seconds(pids) - cpu)
    return found


def spread(values: Sequence[float]) -> list[str]:
    """The median and the quartiles, as two cells."""
    lower, median, upper = quartiles(values)
    return [tables.number(median), f"{tables.number(lower)} to {tables.number(upper)}"]


def clients_part(args: argparse.Namespace) -> str:
    """Seconds a round against the number of clients."""
    problem = Problem(args, max(args.clients))
    lines = []
    with local_context() as context:
        rounds, plain = Rounds(problem.sgd()), problem.plain()
        for number in args.clients:
            clients = problem.clients[:number]
            steps = {"TFF": lambda c=clients: rounds(c), "plain": lambda n=number: plain(n)}
            found = take_turns(steps, args.rounds, context.worker_pids)
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
            found = take_turns(steps, args.rounds, context.worker_pids)
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


def memory_part(args: argparse.Namespace) -> str:
    """Resident sizes over many rounds."""
    problem = Problem(args, 2 * args.round_clients)
    draw = random.Random(0)
    lines, at_start, last = [], None, 0.0
    shown = {1, 10, MEMORY_START, *range(100, args.memory_rounds, 50), args.memory_rounds}
    sizes = collections.deque(maxlen=MEMORY_WINDOW)
    with local_context() as context:
        rounds = Rounds(problem.sgd())
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
