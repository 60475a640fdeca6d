"""One side of `peers.py`: makes a federated round and times it on command.

No privacy claim: the data is random. `peers.py` starts it in the environment of its side; see
`benchmarks/steps/protocol.py` for the commands. `check` computes a round without noise from given
weights, so that the sides can be compared.

    python -m benchmarks.federated.peer_rounds --side own_sgd --clients 1000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import Any, Callable

import numpy as np

from benchmarks.federated.random_clients import (
    CLASSES,
    FEATURES,
    RATE,
    fingerprint,
    initial_weights,
    random_clients,
)
from benchmarks.steps import protocol

CLIP = 1.0
Round = Callable[[], None]
# Makes a round for a noise multiplier, and a function that returns the present weights.
Make = Callable[[float], "tuple[Round, Callable[[], list[np.ndarray]]]"]


def own_rounds(args: argparse.Namespace, adaptive: bool) -> Make:
    """Rounds of `federated.build_dp_fed_avg`."""
    import tensorflow_federated as tff

    from benchmarks.federated.rounds import Problem

    problem = Problem(args, args.clients)

    def make(noise_multiplier: float) -> tuple[Round, Callable[[], list[np.ndarray]]]:
        everybody = (args.clients, args.clients)
        process = problem.private("gaussian", adaptive, "auto", everybody, noise_multiplier)
        weights = tff.learning.models.ModelWeights(initial_weights(args.hidden), [])
        state = process.set_model_weights(process.initialize(), weights)

        def step() -> None:
            nonlocal state
            state = process.next(state, problem.clients).state

        def weights_now() -> list[np.ndarray]:
            return list(process.get_model_weights(state).trainable)

        return step, weights_now

    return make


def _pfl_rounds(args: argparse.Namespace, noise_multiplier: float, model: Any, data: dict) -> Round:
    """Rounds of pfl's federated averaging with its Gaussian mechanism, clients weighted alike."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    np.random.seed(0)  # the same cohorts and noise in all processes of a side
    cohort = get_user_sampler("minimize_reuse", list(data))
    clients = FederatedDataset(data.__getitem__, cohort)
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, noise_multiplier))
    backend = SimulatedBackend(clients, clients, [WeightByUser(), mechanism])
    algorithm, rounds = FederatedAveraging(), 0
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=RATE, local_batch_size=args.batch_size
    )

    def step() -> None:
        nonlocal rounds
        rounds += 1
        until = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=sys.maxsize,
            train_cohort_size=args.clients,
            val_cohort_size=None,
        )
        algorithm.run(until, backend, model, training, send_metrics_to_platform=False)

    return step


def pfl_torch_rounds(args: argparse.Namespace) -> Make:
    """pfl with PyTorch; the clients' tensors are in memory."""
    import torch
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)  # faster here than two threads, which wait for each other

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            hidden = torch.nn.Linear(FEATURES, args.hidden)
            self.layers = torch.nn.Sequential(
                hidden, torch.nn.ReLU(), torch.nn.Linear(args.hidden, CLASSES)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
            del x, y
            return {}

    data = {
        str(k): PyTorchTensorDataset((torch.from_numpy(x), torch.from_numpy(y).long()), str(k))
        for k, (x, y) in enumerate(random_clients(args.examples, args.clients))
    }

    def make(noise_multiplier: float) -> tuple[Round, Callable[[], list[np.ndarray]]]:
        network = Network()
        with torch.no_grad():  # a kernel of PyTorch is [outputs, inputs]
            for parameter, value in zip(network.parameters(), initial_weights(args.hidden)):
                parameter.copy_(torch.from_numpy(value.T))
        server = torch.optim.SGD(network.parameters(), 1.0)
        model = PyTorchModel(network, torch.optim.SGD, server)
        step = _pfl_rounds(args, noise_multiplier, model, data)
        return step, lambda: [p.detach().numpy().T.copy() for p in network.parameters()]

    return make


def pfl_tensorflow_rounds(args: argparse.Namespace) -> Make:
    """pfl with TensorFlow; the clients' tensors are in memory."""
    # pfl tells variables apart by their names, which Keras 3 gives to several: with it a layer
    # would be left out of the average.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    from pfl.data.tensorflow import TFTensorDataset
    from pfl.model.tensorflow import TFModel

    data = {
        str(k): TFTensorDataset(tf.constant(x), tf.constant(y), str(k))
        for k, (x, y) in enumerate(random_clients(args.examples, args.clients))
    }

    def make(noise_multiplier: float) -> tuple[Round, Callable[[], list[np.ndarray]]]:
        keras = tf.keras
        hidden = keras.layers.Dense(args.hidden, "relu")
        model = keras.Sequential([keras.Input([FEATURES]), hidden, keras.layers.Dense(CLASSES)])
        model.set_weights(initial_weights(args.hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss)
        server = TFModel(model, {}, keras.optimizers.SGD(1.0))
        return _pfl_rounds(args, noise_multiplier, server, data), model.get_weights

    return make


SIDES: dict[str, Callable[[argparse.Namespace], Make]] = {
    "own_sgd": lambda args: own_rounds(args, adaptive=False),
    "own_adadp": lambda args: own_rounds(args, adaptive=True),
    "pfl_torch": pfl_torch_rounds,
    "pfl_tensorflow": pfl_tensorflow_rounds,
}


def _context(side: str) -> contextlib.AbstractContextManager:
    if side.startswith("pfl"):
        return contextlib.nullcontext()
    from federated.runtime.contexts import local_context

    return local_context()


def serve(args: argparse.Namespace, answers: Any) -> None:
    """Makes the round and answers commands until it is told to quit."""
    commands = protocol.receive(sys.stdin)
    with _context(args.side):
        make = SIDES[args.side](args)
        step, _ = make(1.0)
        protocol.send(answers, ready=True)
        for message in commands:
            if message["command"] == "run":
                begun = time.perf_counter()
                step()
                protocol.send(answers, seconds=time.perf_counter() - begun)
            elif message["command"] == "check":
                once, weights_now = make(0.0)
                before = weights_now()
                once()
                change = [a - b for a, b in zip(weights_now(), before)]
                protocol.send(answers, fingerprint=fingerprint(change))
            else:
                raise ValueError(f"Unknown command. Received: {message}")


def main() -> None:
    """Serves, and reports errors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", choices=list(SIDES), required=True)
    for name in ("clients", "examples", "batch_size", "hidden"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    answers = protocol.take_stdout()
    with protocol.reported_errors(answers):
        serve(args, answers)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # frameworks may hang in their own cleanup
