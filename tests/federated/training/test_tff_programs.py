"""TFF's own training program runs on our processes and in our workers."""

import asyncio

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp
from federated.privacy.user_level import UserLevelPrivacy
from federated.runtime import contexts
from federated.training.processes import build_adaptive_fed_avg, build_dp_fed_avg
from tests.federated.training.test_processes import SPEC, client_of, model_fn

PRIVACY = UserLevelPrivacy(0.5, 2, 4, clip=1.0)
TREE = UserLevelPrivacy(0.5, 2, 8, clip=1.0, mechanism="tree")
BANDED = UserLevelPrivacy(0.5, 2, 8, clip=1.0, mechanism="banded", bands=2)
BUILD = {
    "private": lambda: build_dp_fed_avg(model_fn, build_adadp(), PRIVACY),
    "tree": lambda: build_dp_fed_avg(model_fn, build_adadp(), TREE),
    "banded": lambda: build_dp_fed_avg(model_fn, build_adadp(), BANDED),
    "with metrics": lambda: build_dp_fed_avg(model_fn, build_adadp(), PRIVACY, client_metrics=True),
    "adaptive": lambda: build_adaptive_fed_avg(model_fn),
}


class Clients(tff.program.FederatedDataSource):
    """Clients by turns. A program copies and stores the iterator; TFF's own cannot be copied."""

    federated_type = tff.FederatedType(
        tff.SequenceType(tff.types.tensorflow_to_type(SPEC)), tff.CLIENTS
    )
    capabilities = ()

    def iterator(self):
        return Turns()


class Turns(tff.program.FederatedDataSourceIterator):
    federated_type = Clients.federated_type

    def __init__(self, taken=0):
        self.taken = taken

    @classmethod
    def from_bytes(cls, data):
        return cls(int(data))

    def to_bytes(self):
        return str(self.taken).encode()

    def select(self, k=None):
        self.taken += k
        return [client_of(number % 4) for number in range(self.taken - k, self.taken)]


def train(process, folder, rounds):
    metrics = tff.program.MemoryReleaseManager()
    models = tff.program.MemoryReleaseManager()
    asyncio.run(
        tff.learning.programs.train_model(
            train_process=process,
            train_data_source=Clients(),
            train_per_round_clients=2,
            train_total_rounds=rounds,
            program_state_manager=tff.program.FileProgramStateManager(folder),
            model_output_manager=models,
            train_metrics_manager=metrics,
            evaluation_manager=None,
            evaluation_periodicity=1,
        )
    )
    return metrics.values(), models.values()


@pytest.fixture
def runtime():
    before = tff.framework.get_context_stack().current
    with contexts.local_context() as made:
        made.for_programs()
        yield made
    tff.framework.set_default_context(before)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", BUILD)
def test_train_model_runs_and_resumes(runtime, tmp_path, name):
    process = BUILD[name]()
    assert isinstance(tff.framework.get_context_stack().current, tff.program.FederatedContext)
    pids = runtime.worker_pids
    metrics, models = train(process, str(tmp_path), 2)
    assert sorted(metrics) == [1, 2] and list(models) == ["training_checkpoint_round_2"]
    for released in metrics.values():
        told = released["client_work"], released["model_metrics"]
        assert bool(tf.nest.flatten(told)) == (name in ("with metrics", "adaptive"))
    metrics, models = train(process, str(tmp_path), 3)
    assert sorted(metrics) == [3]
    state = models["training_checkpoint_round_3"]
    weights = np.ravel(state.global_model_weights.trainable[0])
    assert np.isfinite(weights).all() and weights.any()
    assert runtime.worker_pids == pids  # our worker computed it
    if name == "private":
        ledger = process.new_ledger()
        ledger.record(state)
        assert ledger.num_releases == 1
    if name in ("tree", "banded"):  # their states are of all three rounds
        assert int(state.aggregator.query_state.numerator_state.rounds) == 3
    if name == "tree":
        assert [len(n) for n in state.aggregator.query_state.numerator_state.nodes] == [2, 2, 0]
