"""The federated rounds that the benchmarks time: models with random clients, run in turns."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import federated
from benchmarks.federated.random_clients import CLASSES, FEATURES, RATE, random_clients
from federated.runtime.contexts import Runtime
from federated.training.saved_states import SavedStates

Step = Callable[[], Any]


def add_problem_args(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a `Problem`."""
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
        self.arrays = random_clients(examples, num_clients, features)
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

    def averaged(
        self, adaptive: bool, clients_per_group: int | str = "auto"
    ) -> tff.learning.templates.LearningProcess:
        """This library's federated averaging without privacy, and SGD or ADADP on the clients."""
        client = None if adaptive else tff.learning.optimizers.build_sgdm(RATE)
        return federated.build_adaptive_fed_avg(
            self.model_fn, client, clients_per_group=clients_per_group
        )

    def adadp(self) -> tff.learning.templates.LearningProcess:
        """Adaptive federated averaging."""
        return self.averaged(adaptive=True)

    def private(
        self,
        mechanism: str,
        adaptive: bool,
        clients_per_group: int | str = "auto",
        stated: tuple[int, int] | None = None,
        noise_multiplier: float = 1.0,
    ) -> tff.learning.templates.LearningProcess:
        """Federated averaging with privacy of users, and SGD or ADADP on the clients.

        Args:
          mechanism: See `UserLevelPrivacy`.
          adaptive: Whether the clients use ADADP.
          clients_per_group: See `build_dp_fed_avg`.
          stated: The numbers of clients per round and in total; by default half of all, and all.
          noise_multiplier: See `UserLevelPrivacy`.
        """
        number = len(self.clients)
        per_round, total = stated or (number // 2, number)
        privacy = federated.UserLevelPrivacy(
            noise_multiplier, per_round, total, clip=1.0, mechanism=mechanism
        )
        sgd = tff.learning.optimizers.build_sgdm(RATE)
        client = federated.build_adadp() if adaptive else sgd
        return federated.build_dp_fed_avg(
            self.model_fn, client, privacy, clients_per_group=clients_per_group
        )

    def plain(self) -> Callable[[int], None]:
        """SGD on one client after another, from tensors: the arithmetic and little else."""
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


def before_the_highest_node(state: Any) -> Any:
    """A state of a process with the tree mechanism whose next round costs the most of all.

    That round finishes the node of the highest level, and cancels the noise of one node of each
    level below it.

    Args:
      state: The initial state, which tells the size of the model and the length of a tree.
    """
    size = sum(np.size(weights) for weights in state.global_model_weights.trainable)
    query = state.aggregator.query_state
    tree = query.numerator_state
    *below, highest = tree.nodes
    noises = (np.random.default_rng(k).standard_normal(size, np.float32) for k in range(len(below)))
    # Of bytes, like what TFF returns.
    nodes = [np.frombuffer(noise.tobytes(), np.float32) for noise in noises]
    tree = tree._replace(rounds=np.int64(2 ** len(below) - 1), nodes=(*nodes, highest))
    query = query._replace(numerator_state=tree)
    return state._replace(aggregator=state.aggregator._replace(query_state=query))


class SavedRounds:
    """Rounds of a process, each followed by saving the state as a run saves it.

    Args:
      process: The process.
      folder: Where the states are saved.
      context: The context that the rounds run in.
      start: The state that every round begins with; by default each begins with its predecessor's.

    Attributes:
      seconds: Of each round, but for those in which a worker was replaced.
      saving: Seconds to save the state after it.
      written: Bytes in the files that were new then.
      peaks: The largest resident size of this process and of the workers together, in MiB.
    """

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        folder: pathlib.Path,
        context: Runtime,
        start: Any = None,
    ):
        self._process, self._context, self._folder = process, context, folder
        self._states = SavedStates(folder)
        self._start, self._number = start, 0
        self._state = process.initialize() if start is None else start
        self.seconds: list[float] = []
        self.saving: list[float] = []
        self.written: list[int] = []
        self.peaks: list[float] = []

    def __call__(self, clients: Sequence[tf.data.Dataset]) -> None:
        workers = self._context.worker_pids
        for pid in (os.getpid(), *workers):
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak
        before_it = self._state if self._start is None else self._start
        times = [time.perf_counter()]
        self._state = self._process.next(before_it, list(clients)).state
        times.append(time.perf_counter())
        # As `take_turns` repeats this turn; see there.
        was_replaced = self._context.worker_pids != workers
        peak = math.nan if was_replaced else sum(map(peak_mib, (os.getpid(), *workers)))
        before = {path.name for path in self._folder.rglob("*")}
        self._number += 1
        times.append(time.perf_counter())
        self._states.save(self._number, self._state, {})
        times.append(time.perf_counter())
        if was_replaced:
            return
        new = [path for path in self._folder.rglob("*") if path.name not in before]
        self.written.append(sum(path.stat().st_size for path in new))
        self.seconds.append(times[1] - times[0])
        self.saving.append(times[3] - times[2])
        self.peaks.append(peak)


class Measured:
    """A process that adds up the time of its rounds.

    Attributes:
      seconds: Of all rounds so far.
    """

    def __init__(self, process: tff.learning.templates.LearningProcess):
        self._process = process
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def next(self, state: Any, clients: Sequence[tf.data.Dataset]) -> Any:
        """A round."""
        begun = time.perf_counter()
        output = self._process.next(state, clients)
        self.seconds += time.perf_counter() - begun
        return output


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


def peak_mib(pid: int) -> float:
    """The largest resident size of a process since it was told to forget the peak."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def take_turns(
    steps: dict[str, Step], rounds: int, context: Runtime | None = None
) -> dict[str, tuple[list[float], list[float]]]:
    """Runs each step once untimed, then all of them in turns.

    Args:
      steps: The steps by name.
      rounds: The number of turns of each.
      context: The context whose workers' CPU time counts. A turn in which a worker was replaced is
        repeated: its CPU time is unknown, and starting a worker is not part of the step.

    Returns:
      Elapsed seconds and CPU seconds of each step, in the order of its turns.
    """
    for step in steps.values():
        step()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            while (taken := _turn(step, context)) is None:
                pass
            for values, value in zip(found[name], taken):
                values.append(value)
    return found


def _turn(step: Step, context: Runtime | None) -> tuple[float, float] | None:
    pids = context.worker_pids if context else ()
    clock, cpu = time.perf_counter(), cpu_seconds(pids)
    step()
    seconds = time.perf_counter() - clock
    if context and context.worker_pids != pids:
        return None
    return seconds, cpu_seconds(pids) - cpu
