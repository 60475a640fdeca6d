"""Workers end with whoever started them, rounds survive nothing silently, and errors are clear."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import grpc
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import executor_pb2

import tf_adaptive_dp
from federated.privacy.user_level import UserLevelPrivacy
from federated.runtime import connection, contexts, worker
from federated.training.processes import build_dp_fed_avg
from tests.helpers import ROOT
from tests.helpers.gaussianity import assert_gaussian, assert_independent

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}

# Prints its worker's process id, computes once, and then does what it is told.
SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what runs in the background
import numpy as np, tensorflow as tf, tensorflow_federated as tff
import federated
context = federated.local_context()
print(context.worker_pids[0], flush=True)

@tff.tensorflow.computation(np.int32)
def count(n):
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

print("counted to", count(10), flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError("as it was told")
if sys.argv[1] == "compute":
    print(count(2_000_000_000), flush=True)
"""


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def runs(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_worker(pid):
    return "worker_binary" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def start_two():
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(worker.WorkerProcess())
            stack.callback(started[-1].close)
        yield started


@pytest.fixture
def two_workers():
    """Two workers to be killed."""
    with start_two() as started:
        yield started


@pytest.fixture(scope="module")
def kept_workers():
    """Two workers to be left as they are."""
    with start_two() as started:
        yield started


@tff.tensorflow.computation(np.int32)
def count(n):
    """Counts to n one by one: a few seconds for a million."""
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def count_on_clients(numbers):
    return tff.federated_sum(tff.federated_map(count, numbers))


def model_of(units, initializer):
    """Makes the `model_fn` of a linear model of the clients' data."""

    def model_fn():
        model = tf.keras.Sequential(
            [tf.keras.Input([3]), tf.keras.layers.Dense(units, kernel_initializer=initializer)]
        )
        return tff.learning.models.from_keras_model(
            model,
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=(tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int32)),
        )

    return model_fn


@pytest.fixture(scope="module")
def process():
    sgd = tff.learning.optimizers.build_sgdm(0.1)
    return tff.learning.algorithms.build_weighted_fed_avg(model_of(2, "ones"), sgd)


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    return [
        tf.data.Dataset.from_tensor_slices(
            (rng.normal(size=[size, 3]).astype(np.float32), rng.integers(0, 2, size, np.int32))
        ).batch(2)
        for size in (2, 4, 6, 3, 5)
    ]


def weights(process, state):
    return np.concatenate([w.ravel() for w in process.get_model_weights(state).trainable])


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def secure_sum(numbers):
    return tff.federated_secure_sum_bitwidth(numbers, 4)


@tff.tensorflow.computation(np.int32)
def next_digit(n):
    with tf.control_dependencies([tf.debugging.assert_less(n, 9, message="no next digit")]):
        return n + 1


@pytest.mark.parametrize("workers", [1, 2])
def test_secure_sums_are_refused_with_what_to_do(kept_workers, workers):
    with contexts.remote_context([w.address for w in kept_workers[:workers]]):
        with pytest.raises(NotImplementedError, match="Leave out `secure_aggregator.*set_sync"):
            secure_sum([1, 2])


def test_a_computation_that_fails_says_why_in_one_line(context):
    with pytest.raises(RuntimeError, match=r"failed in the worker at .*\d: .*no next digit.*$"):
        next_digit(9)
    assert next_digit(8) == 9


# --- a local worker ends with Python, however that ends


def start_script(what):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.slow
def test_a_script_in_a_pipeline_returns_and_leaves_nothing(tmp_path):
    command = f"'{sys.executable}' script.py return 2>&1 | tee log"
    (tmp_path / "script.py").write_text(SCRIPT)
    shell = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=ENV, timeout=120)
    assert shell.returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert "counted to 10" in lines
    pid = next(int(line) for line in lines if line.isdigit())
    wait_until(lambda: not runs(pid))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("compute", signal.SIGKILL),
        pytest.param("compute", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("compute", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("raise", None, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_ended_leaves_nothing(what, number):
    with start_script(what) as script:
        pid = int(script.stdout.readline())
        assert is_worker(pid)
        assert script.stdout.readline() == "counted to 10\n"
        if number is not None:
            before = cpu_seconds(pid)
            wait_until(lambda: cpu_seconds(pid) > before + 0.2)  # it computes
            script.send_signal(number)
        assert script.wait(30) != 0
    wait_until(lambda: not runs(pid))


def test_a_context_ends_its_worker_and_brings_the_one_before_back():
    stack = tff.framework.get_context_stack()
    with contexts.local_context() as outer:
        with contexts.local_context(max_concurrency=1) as inner:
            assert stack.current is inner
            assert count(3) == 3
            pid = inner.worker_pids[0]
        assert stack.current is outer
        assert not runs(pid)
        assert count(4) == 4
        with pytest.raises(contexts.WorkerLostError, match="was closed"):
            inner.invoke(count, 3)
    assert stack.current is not outer


@pytest.mark.slow
def test_a_context_that_is_replaced_ends_with_its_worker():
    pid = contexts.local_context().worker_pids[0]
    with contexts.local_context():
        wait_until(lambda: not runs(pid))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ours", [None, "0"])
def test_the_worker_is_quiet_unless_the_environment_says_otherwise(monkeypatch, ours):
    if ours:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", ours)
    else:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    with contexts.local_context() as context:
        environment = (
            pathlib.Path(f"/proc/{context.worker_pids[0]}/environ").read_text().split("\0")
        )
    assert f"TF_CPP_MIN_LOG_LEVEL={ours or 2}" in environment


def test_what_the_worker_prints_is_not_lost(capfd):
    @tff.tensorflow.computation(np.int32)
    def at_most_5(n):
        with tf.control_dependencies([tf.debugging.Assert(n <= 5, ["more than five"])]):
            return tf.identity(n)

    with contexts.local_context() as context:
        with pytest.raises(Exception, match="more than five"):
            at_most_5(6)
        assert at_most_5(5) == 5  # that was no reason to lose the worker
        wait_until(lambda: "more than five" in context._processes[0].last_words)
    assert "more than five" in capfd.readouterr().err


@pytest.mark.slow
def test_a_local_worker_that_is_killed_is_named_with_its_status():
    with contexts.local_context() as context:
        os.kill(context.worker_pids[0], signal.SIGKILL)
        with pytest.raises(contexts.WorkerLostError, match="status -9.*lack of memory"):
            count(3)
    with contexts.local_context():
        assert count(3) == 3


# --- a worker that has grown


@pytest.fixture
def grows(monkeypatch):
    """Makes workers as large as it is told, which are replaced after two computations."""
    sizes = {"now": 100}
    monkeypatch.setattr(contexts, "_SETTLED_AFTER", 2)
    monkeypatch.setattr(contexts, "_MUCH", 0)
    monkeypatch.setattr(worker.WorkerProcess, "resident_size", property(lambda self: sizes["now"]))
    return sizes


def test_the_size_of_a_worker_is_that_of_its_process():
    started = worker.WorkerProcess()
    try:
        pages = pathlib.Path(f"/proc/{started.pid}/statm").read_text().split()[1]
        size = int(pages) * os.sysconf("SC_PAGE_SIZE")
        assert started.resident_size == pytest.approx(size, rel=0.1) and size > 10**7
    finally:
        started.close()
    assert started.resident_size == 0


@pytest.mark.slow
def test_a_worker_that_has_grown_is_replaced_and_rounds_go_on(process, clients, grows):
    with contexts.local_context() as context:
        state = process.initialize()
        first = context.worker_pids[0]
        ends = []
        for number, grows["now"] in enumerate([110, 110, 115, 116]):
            state = process.next(state, clients).state
            ends.append(weights(process, state))
            assert (context.worker_pids[0] == first) == (number < 3), number
        assert not runs(first) and runs(context.worker_pids[0])
        # It began anew: its first sizes are its normal ones.
        second = context.worker_pids[0]
        for grows["now"] in (200, 150, 200, 210):
            assert count(3) == 3
        assert context.worker_pids[0] == second
    assert not runs(second)
    with contexts.local_context():
        state = process.initialize()
        for expected in ends:
            state = process.next(state, clients).state
            np.testing.assert_allclose(weights(process, state), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(100, 149, 151), (2000, 2099, 2101)])  # MiB
def test_a_worker_is_replaced_for_five_percent_that_are_much(grows, monkeypatch, sizes):
    monkeypatch.setattr(contexts, "_MUCH", 50 * 2**20)
    with contexts.local_context() as context:
        pid = context.worker_pids[0]
        for mib in (*[sizes[0]] * 3, *sizes):
            assert context.worker_pids[0] == pid
            grows["now"] = mib * 2**20
            count(1)
        assert context.worker_pids[0] != pid


@pytest.mark.slow
def test_a_worker_is_not_replaced_while_it_computes(grows):
    with contexts.local_context() as context:
        for _ in range(3):
            count(3)
        pid = context.worker_pids[0]
        before = cpu_seconds(pid)
        results = []

        def compute(n):
            thread = threading.Thread(target=lambda: results.append(context.invoke(count, n)))
            thread.start()
            return thread

        threads = [compute(2_000_000)]
        wait_until(lambda: cpu_seconds(pid) > before + 0.2)
        grows["now"] = 1000
        threads.append(compute(4))
        wait_until(lambda: context._running == 2)
        for thread in threads:
            thread.join()
        assert results == [2_000_000, 4] and context.worker_pids[0] == pid
        assert count(5) == 5 and context.worker_pids[0] != pid


@pytest.mark.slow
def test_a_worker_stays_if_the_next_one_does_not_start(grows, monkeypatch):
    with contexts.local_context() as context:
        for _ in range(3):
            count(3)
        pid = context.worker_pids[0]
        monkeypatch.setattr(worker, "binary", lambda: "/bin/false")
        grows["now"] = 1000
        with pytest.raises(worker.WorkerStartError, match="ended at once"):
            count(3)
        monkeypatch.undo()
        assert count(3) == 3 and context.worker_pids[0] == pid


# --- rounds


@pytest.mark.slow
def test_rounds_over_two_workers_equal_local_ones(process, clients, kept_workers):
    with contexts.local_context():
        first = process.initialize()
        local = first
        for _ in range(2):
            local = process.next(local, clients).state
        local = weights(process, local)
    with contexts.remote_context([w.address for w in kept_workers]):
        remote = first
        before = [cpu_seconds(w.pid) for w in kept_workers]
        for _ in range(2):
            output = process.next(remote, clients)
            remote = output.state
        assert output.metrics["client_work"]["train"]["num_examples"] == 2 + 4 + 6 + 3 + 5
        np.testing.assert_allclose(weights(process, remote), local, rtol=1e-5)
        assert not np.allclose(local, weights(process, first), rtol=1e-3)
    assert all(cpu_seconds(w.pid) > b for w, b in zip(kept_workers, before))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_the_noise_of_a_round_over_two_workers_is_drawn_once(clients, kept_workers, mechanism):
    still = tff.learning.optimizers.build_sgdm(1e-9)  # so that all that moves is the noise
    privacy = UserLevelPrivacy(2.0, 5, 5, clip=0.5, mechanism=mechanism)
    with contexts.remote_context([w.address for w in kept_workers]):
        process = build_dp_fed_avg(model_of(1000, "zeros"), still, privacy)
        state = process.initialize()
        noise = [weights(process, process.next(state, clients).state) for _ in range(2)]
    for drawn in noise:
        assert_gaussian(drawn, 2.0 * 0.5 / 5)
    assert_independent(*noise)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_fewer_clients_than_workers(process, clients, kept_workers, number):
    with contexts.local_context():
        first = process.initialize()
        local = weights(process, process.next(first, clients[:number]).state)
        before = weights(process, first)
    with contexts.remote_context([w.address for w in kept_workers]):
        output = process.next(first, clients[:number])
        remote = weights(process, output.state)
    assert output.metrics["client_work"]["train"]["num_examples"] == 2 * number
    np.testing.assert_allclose(remote, local, rtol=1e-5)
    assert np.array_equal(remote, before) == (number == 0)


@pytest.mark.slow
def test_workers_compute_at_the_same_time(kept_workers):
    first, second = kept_workers
    with contexts.remote_context([w.address for w in kept_workers], timeout=20):
        assert count_on_clients([5, 6]) == 11
        before = cpu_seconds(second.pid)
        results = []
        os.kill(first.pid, signal.SIGSTOP)
        context = tff.framework.get_context_stack().current
        try:
            thread = threading.Thread(
                target=lambda: results.append(context.invoke(count_on_clients, [9, 500_000]))
            )
            thread.start()
            wait_until(lambda: cpu_seconds(second.pid) > before + 0.2)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        thread.join(20)
    assert results == [500_009]


@pytest.mark.slow
def test_messages_of_tens_of_megabytes_pass(kept_workers):
    values = np.arange(12_000_000, dtype=np.float32)

    @tff.tensorflow.computation(tff.TensorType(np.float32, values.shape))
    def negative(x):
        return -x

    with contexts.remote_context([kept_workers[0].address]):
        np.testing.assert_array_equal(negative(values), -values)


@pytest.mark.slow
def test_a_worker_that_computes_for_long_is_not_taken_for_dead(kept_workers):
    with contexts.remote_context([kept_workers[0].address], timeout=0.3):
        start = time.monotonic()
        n = 20_000
        while time.monotonic() - start < 1.5:  # until one takes several times the time-out
            n *= 2
            start = time.monotonic()
            assert count_on_clients([n]) == n


# --- lost workers


@pytest.mark.slow
def test_the_clients_of_a_killed_worker_run_again_on_the_other_one(process, clients, two_workers):
    addresses = [w.address for w in two_workers]
    kept, killed = two_workers
    with contexts.remote_context(addresses, timeout=5):
        assert count_on_clients([1, 2]) == 3
        before = cpu_seconds(killed.pid)

        def kill_when_it_computes():
            wait_until(lambda: cpu_seconds(killed.pid) > before + 0.2)
            killed.close()

        thread = threading.Thread(target=kill_when_it_computes)
        thread.start()
        with pytest.warns(UserWarning, match=f"Lost the worker at {killed.address}.*run again"):
            assert count_on_clients([5, 3_000_000]) == 3_000_005
        thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert count_on_clients([5, 6, 7]) == 18  # it is done without, silently
            assert count_on_clients([]) == 0
        kept.close()
        with pytest.raises(contexts.WorkerLostError, match="Start it again") as lost:
            count_on_clients([1, 2])
        assert sorted(lost.value.addresses) == sorted(addresses)


@pytest.mark.slow
def test_a_round_without_a_lost_worker_equals_a_local_one(process, clients, two_workers):
    with contexts.local_context():
        first = process.initialize()
        local = weights(process, process.next(first, clients).state)
    with contexts.remote_context([w.address for w in two_workers]):
        process.next(first, clients)
        two_workers[0].close()
        with pytest.warns(UserWarning, match="Lost the worker"):
            output = process.next(first, clients)
        assert output.metrics["client_work"]["train"]["num_examples"] == 20  # each client once
        np.testing.assert_allclose(weights(process, output.state), local, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_the_noise_is_drawn_once_when_clients_run_again(clients, two_workers, mechanism):
    still = tff.learning.optimizers.build_sgdm(1e-9)
    privacy = UserLevelPrivacy(2.0, 5, 5, clip=0.5, mechanism=mechanism)
    process = build_dp_fed_avg(model_of(1000, "zeros"), still, privacy)
    with contexts.remote_context([w.address for w in two_workers]):
        state = process.initialize()
        two_workers[1].close()
        with pytest.warns(UserWarning, match="Lost the worker"):
            output = process.next(state, clients)
        ledger = process.new_ledger()
        ledger.record(output.state)
        assert ledger.num_releases == 1
        assert_gaussian(weights(process, output.state), 2.0 * 0.5 / 5)


@pytest.mark.slow
def test_what_follows_the_aggregation_is_never_run_twice(two_workers):
    """The worker that is lost while it draws the noise might have released it."""

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def count_at_the_server(numbers):
        return tff.federated_map(count, tff.federated_sum(numbers))

    first, second = two_workers
    with contexts.remote_context([w.address for w in two_workers], timeout=5):
        assert count_at_the_server([1, 2]) == 3
        before = [cpu_seconds(w.pid) for w in two_workers]

        def kill_the_one_that_computes():
            wait_until(
                lambda: any(cpu_seconds(w.pid) > b + 0.4 for w, b in zip(two_workers, before))
            )
            busy = [w for w, b in zip(two_workers, before) if cpu_seconds(w.pid) > b + 0.4]
            killed.extend(busy)
            busy[0].close()

        killed = []
        thread = threading.Thread(target=kill_the_one_that_computes)
        thread.start()
        with pytest.raises(contexts.WorkerLostError) as lost:
            count_at_the_server([5, 1_000_000_000])
        thread.join()
        assert lost.value.addresses == (killed[0].address,)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert count_at_the_server([1, 2]) == 3  # the other one goes on


@pytest.mark.slow
def test_a_worker_restarted_between_rounds_is_lost(two_workers):
    restarted, other = two_workers
    with contexts.remote_context([w.address for w in two_workers]):
        assert count_on_clients([1, 2]) == 3
        restarted.close()
        again = worker.WorkerProcess(restarted.port)
        try:
            with pytest.warns(UserWarning, match=f"Lost the worker at {restarted.address}"):
                assert count_on_clients([1, 2]) == 3
            other.close()
            with pytest.raises(contexts.WorkerLostError) as lost:  # and it stays lost
                count_on_clients([1, 2])
            assert set(lost.value.addresses) == {restarted.address, other.address}
        finally:
            again.close()


@pytest.mark.slow
def test_a_silent_worker_is_lost_within_the_time_out(two_workers):
    silent = two_workers[1]
    with contexts.remote_context([w.address for w in two_workers], timeout=1):
        assert count_on_clients([1, 2]) == 3
        os.kill(silent.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.warns(UserWarning, match=f"{silent.address} .it does not answer"):
                assert count_on_clients([1, 2]) == 3
            assert time.monotonic() - start < 20
        finally:
            os.kill(silent.pid, signal.SIGCONT)


def test_a_worker_that_is_not_there_is_named_with_what_to_do(kept_workers):
    there, missing = kept_workers[0].address, f"127.0.0.1:{free_port()}"
    with pytest.raises(
        contexts.WorkerLostError, match="python -m federated.runtime.worker"
    ) as lost:
        contexts.remote_context([there, missing], timeout=1)
    assert lost.value.addresses == (missing,)
    assert there not in str(lost.value)


LOSING = """
import threading
import numpy as np, tensorflow as tf, tensorflow_federated as tff
import federated
from federated.runtime import worker

@tff.tensorflow.computation(np.int32)
def count(n):
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def count_on_clients(numbers):
    return tff.federated_sum(tff.federated_map(count, numbers))

workers = [worker.WorkerProcess() for _ in range(2)]
with federated.remote_context([w.address for w in workers], timeout=5):
    assert count_on_clients([1, 2]) == 3
    threading.Timer(1, workers[1].close).start()
    threading.Timer(1.1, workers[0].close).start()
    count_on_clients([2_000_000_000] * 2)  # both are computing when they are lost
"""


@pytest.mark.slow
def test_what_is_read_last_of_lost_workers_is_what_to_do():
    done = subprocess.run(
        [sys.executable, "-c", LOSING],
        **{"cwd": ROOT, "env": ENV, "capture_output": True, "text": True, "timeout": 120},
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "WorkerLostError: Lost in the middle" in last and "Start it again" in last
    assert "Channel closed" not in done.stderr and "never retrieved" not in done.stderr


def test_only_what_follows_from_a_loss_is_left_out_of_the_log(caplog):
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(connection._without_late_losses)
    share = loop.create_task(asyncio.sleep(60))
    loop.run_until_complete(asyncio.sleep(0))
    del share  # as when Python ends while another worker still computes
    loop.stop()
    loop.run_forever()
    loop.close()
    gc.collect()
    late = {"message": "Task exception was never retrieved"}
    loop.call_exception_handler({**late, "exception": connection.WorkerLostError("late")})
    assert not caplog.records
    loop.call_exception_handler({**late, "exception": ValueError("another")})
    assert "another" in caplog.text


# --- what is no worker, or another one


def test_a_server_that_is_no_worker_is_refused(kept_workers):
    before = tff.framework.get_context_stack().current
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(
            contexts.WorkerMismatchError,
            match=f"answers at {address} is not a TFF worker.*Start one with",
        ) as refused:
            contexts.remote_context([kept_workers[0].address, address], timeout=5)
    finally:
        server.stop(None).wait()
    assert refused.value.addresses == (address,)
    assert tff.framework.get_context_stack().current is before


def test_a_server_that_speaks_another_protocol_does_not_answer():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(contexts.WorkerLostError, match=f"No worker answers at {address}"):
            contexts.remote_context([address], timeout=0.5)


def test_a_worker_says_its_versions(kept_workers):
    addresses = [w.address for w in kept_workers]
    with contexts.remote_context(addresses) as context:
        assert context.versions == dict.fromkeys(addresses, worker.versions())
    versions = worker.versions()
    assert versions["tensorflow-federated"] == "0.87.0"
    assert versions["tensorflow"] == tf.__version__
    assert versions["python"] == sys.version.split()[0]
    assert versions["tf_adaptive_dp"] == tf_adaptive_dp.__version__


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("said", ["0.86.0", None])
def test_a_worker_of_another_tff_is_refused(monkeypatch, said):
    with monkeypatch.context() as patch:
        if said is None:  # TFF's worker, started by hand
            patch.setattr(worker, "VERSIONS_VARIABLE", "ANOTHER_NAME")
        else:
            other = {**worker.versions(), "tensorflow-federated": said}
            patch.setattr(worker, "versions", lambda: other)
        started = worker.WorkerProcess()
    connection._said_versions.cache_clear()
    try:
        if said is None:
            with contexts.remote_context([started.address]) as context:
                assert context.versions == {started.address: {}}
            return
        with pytest.raises(
            contexts.WorkerMismatchError,
            match=f"{started.address} has another version of TFF: .*0.86.0.*Here: .*0.87.0",
        ) as refused:
            contexts.remote_context([started.address])
        assert refused.value.addresses == (started.address,)
    finally:
        started.close()


def test_versions_that_do_not_compute_may_differ():
    ours = worker.versions()
    connection.check_versions("a:1", {**ours, "python": "3.9.1", "tf_adaptive_dp": "7"}, ours)
    connection.check_versions("a:1", {}, ours)
    with pytest.raises(contexts.WorkerMismatchError, match="tensorflow-federated 0.88.0"):
        connection.check_versions("a:1", {**ours, "tensorflow-federated": "0.88.0"}, ours)


@pytest.mark.slow
def test_a_context_that_is_closed_while_it_computes_says_so(kept_workers):
    context = contexts.remote_context([kept_workers[0].address])
    threading.Timer(0.5, context.close).start()
    with pytest.raises(contexts.WorkerLostError, match="closed during the computation"):
        context.invoke(count, 2_000_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contexts.local_context(0), "`max_concurrency` must be at least 1"),
        (lambda: contexts.local_context(timeout=0), "`timeout` must be finite and greater than 0"),
        (lambda: contexts.remote_context([]), "`addresses` must be a list"),
        (lambda: contexts.remote_context("ada:8000"), "`addresses` must be a list"),
        (lambda: contexts.remote_context(["ada"]), "must be like .* Received: 'ada'"),
        (lambda: contexts.remote_context(["ada:0"]), "must be like"),
        (lambda: contexts.remote_context(["http://ada:80"]), "must be like"),
        (lambda: contexts.remote_context(["::1:80"]), "must be like"),
        (lambda: contexts.remote_context(["a:1", "a:1"]), "must name each worker once"),
        (
            lambda: contexts.remote_context(["a:1"], timeout=-1),
            "`timeout` must be finite and greater than 0",
        ),
        (lambda: worker.WorkerProcess(70_000), "`port` must be from 1 to 65535"),
    ],
)
def test_bad_arguments(call, message):
    before = tff.framework.get_context_stack().current
    with pytest.raises(ValueError, match=message):
        call()
    assert tff.framework.get_context_stack().current is before


class ExecutorsOnly:
    """A stub of a worker that has executors and nothing else."""

    def __init__(self):
        self.opened, self.closed = [], []

    def get_executor(self, request):
        number = request.cardinalities[0].cardinality
        self.opened.append(number)
        executor = executor_pb2.ExecutorId(id=str(number))
        return executor_pb2.GetExecutorResponse(executor=executor)

    def dispose_executor(self, request):
        self.closed.append(int(request.executor.id))


def test_a_worker_keeps_executors_for_few_numbers_of_clients():
    stub = ExecutorsOnly()
    executors = connection._Executors(stub, 4)
    for number in [0, 1, 2, 3, 0, 4, 5, 0]:
        executors.create_executor({tff.CLIENTS: number})
    assert stub.opened == list(range(6))
    assert stub.closed == [1, 2]
    executors.close()
    assert sorted(stub.closed) == list(range(6))


# --- python -m federated.runtime.worker


def start_worker(*args, **options):
    command = [sys.executable, "-m", "federated.runtime.worker", *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, **options
    )


def ready(process):
    line = process.stdout.readline()
    assert "ready on port" in line
    return int(line.split("process ")[1].split(")")[0])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_serves_a_round_and_ends_on_a_signal(number):
    port = free_port()
    with start_worker("--port", port) as program:
        pid = ready(program)
        assert is_worker(pid)
        with contexts.remote_context([f"localhost:{port}"]):
            assert count_on_clients([1, 2, 3]) == 6
        program.send_signal(number)
        assert program.wait(20) == 0
    assert not runs(pid)


def test_the_program_refuses_a_port_that_is_taken(kept_workers):
    port = kept_workers[0].port
    with start_worker("--port", port, stderr=subprocess.PIPE) as program:
        assert program.wait(60) == 1
        assert f"Received: port={port}" in program.stderr.read()
    assert runs(kept_workers[0].pid)


def test_the_worker_ends_when_the_program_is_killed():
    with start_worker("--port", free_port()) as program:
        pid = ready(program)
        program.kill()
    wait_until(lambda: not runs(pid))


@pytest.mark.parametrize("detached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_program_ends_with_who_started_it_unless_it_is_detached(detached):
    arguments = ["--port", str(free_port()), *["--detached"] * detached]
    code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid); p.wait()"
    command = [sys.executable, "-u", "-c", code, sys.executable, "-m", "federated.runtime.worker"]
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE
    ) as parent:
        program = int(parent.stdout.readline())
        pid = ready(parent)
        parent.kill()
        if detached:
            time.sleep(2)
            assert runs(program) and runs(pid)
            os.kill(program, signal.SIGTERM)
        wait_until(lambda: not runs(program) and not runs(pid))


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(monkeypatch, tmp_path):
    script = tmp_path / "worker_binary"
    script.write_text("#!/bin/sh\necho no library of that name\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(worker, "binary", lambda: str(script))
    with pytest.raises(worker.WorkerStartError, match="status 3. It said: no library"):
        worker.WorkerProcess()
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(worker.WorkerStartError, match="did not answer within 1 seconds"):
        worker.WorkerProcess(timeout=1)
