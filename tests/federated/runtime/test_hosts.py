"""Rounds over hosts with a network of their own: network namespaces, joined by virtual cables."""

import os
import subprocess
import sys

import pytest

from benchmarks.federated import hosts
from tests.helpers import ROOT

SCRIPT = """
import threading, time, warnings
import numpy as np, tensorflow as tf, tensorflow_federated as tff
import federated
from benchmarks.federated import hosts

@tff.tensorflow.computation(np.int32)
def count(n):
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def count_on_clients(numbers):
    return tff.federated_sum(tff.federated_map(count, numbers))

def model_fn():
    model = tf.keras.Sequential(
        [tf.keras.Input([3]), tf.keras.layers.Dense(2, kernel_initializer="ones")])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int32))
    return tff.learning.models.from_keras_model(model, loss, spec)

rng = np.random.default_rng(0)
clients = [
    tf.data.Dataset.from_tensor_slices(
        (rng.normal(size=[size, 3]).astype(np.float32), rng.integers(0, 2, size, np.int32))
    ).batch(2)
    for size in (2, 4, 6, 3, 5)
]
process = federated.build_adaptive_fed_avg(model_fn)

def two_rounds(state):
    for _ in range(2):
        state = process.next(state, clients).state
    return state, np.concatenate([w.ravel() for w in process.get_model_weights(state).trainable])

hosts.start_loopback()
with federated.local_context():
    start = process.initialize()
    _, expected = two_rounds(start)

first, second = hosts.Host(1), hosts.Host(2, rate="1gbit")
try:
    addresses = [first.address, second.address]
    with federated.remote_context(addresses, timeout=3):
        state, got = two_rounds(start)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        began = time.monotonic()
        threading.Timer(2.0, second.unplug).start()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert count_on_clients([5, 20_000_000]) == 20_000_005  # many seconds
        assert second.address in str(said[-1].message)
        assert 2.0 < time.monotonic() - began
        print("lost", said[-1].message)
        try:
            federated.remote_context(addresses, timeout=1)
        except federated.WorkerLostError as error:
            assert error.addresses == (second.address,), error
            print("not there", error)
    second.plug()
    with federated.remote_context(addresses):
        two_rounds(state)
        print("goes on")
finally:
    first.close()
    second.close()
"""


# Slow: test_contexts.py checks the same with workers on this machine, and with a silent one.
@pytest.mark.slow
def test_rounds_over_hosts_equal_local_ones_and_one_that_is_cut_off_is_named():
    may = subprocess.run([*hosts.OWN_NETWORK, "true"], capture_output=True, check=False)
    if may.returncode:
        pytest.skip("this system gives no network namespaces")
    done = subprocess.run(
        [*hosts.OWN_NETWORK, sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split()[0] for line in done.stdout.splitlines()]
    assert said == ["lost", "not", "goes"], done.stdout
