"""Two processes of one machine under `MultiWorkerMirroredStrategy`."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import ROOT, catalogue
from tests.helpers.gaussianity import assert_gaussian, assert_independent


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("localhost", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each worker wrote."""
    folder = tmp_path_factory.mktemp("workers")
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task), "PYTHONPATH": str(ROOT)}
        with open(folder / f"{index}.log", "w") as log:
            command = [sys.executable, "-m", "tests.helpers.multi_worker", folder / f"{index}.npz"]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for index, process in enumerate(processes):
            assert process.wait(timeout=300) == 0, (folder / f"{index}.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [np.load(folder / f"{index}.npz") for index in range(2)]


@pytest.mark.slow
def test_the_step_is_that_of_a_single_device(workers):
    model = catalogue.mlp()
    model.compile(catalogue.make("ADADP", noise_multiplier=0.0), loss=catalogue.loss())
    catalogue.fit(model)
    for worker in workers:
        for k, weights in enumerate(model.get_weights()):
            np.testing.assert_allclose(worker[f"arr_{k}"], weights, rtol=1e-4, atol=1e-5)
        assert tuple(worker["trained_segment"]) == model.optimizer.ledger.segments[0]


@pytest.mark.slow
def test_the_noise_has_the_scale_that_was_asked_for(workers):
    one, other = workers
    np.testing.assert_array_equal(one["noises"], other["noises"])
    first, second = one["noises"]
    for noise in (first, second):
        assert_gaussian(noise, 1.5 * 2.0 / 8)
    assert_independent(first, second)


@pytest.mark.slow
def test_each_worker_counts_a_global_step_once(workers):
    for worker in workers:
        assert tuple(worker["noise_segment"]) == (1.5, 8.0, 2)
