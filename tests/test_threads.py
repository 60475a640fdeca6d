"""Threads that share an optimizer: every release is counted, and no noise comes twice."""

import pathlib
import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tf_adaptive_dp.mechanism.turns import Turns

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")

THREADS = 4


def all_at_once(*runs):
    """Calls each function in a thread of its own; what they return, or the first error."""
    results, start = [None] * len(runs), threading.Barrier(len(runs))

    def call(k):
        start.wait()
        try:
            results[k] = runs[k]()
        except BaseException as error:  # noqa: BLE001, raised below
            results[k] = error

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other for ever"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def in_parallel(step, times):
    """Calls a step in several threads of TensorFlow's; what it returned each time.

    The tests give TensorFlow one thread for operations, on which graphs of several Python threads
    run one after the other. A data set may have threads of its own.
    """
    options = tf.data.Options()
    options.threading.private_threadpool_size = THREADS
    calls = tf.data.Dataset.range(times).map(
        lambda _: step(), num_parallel_calls=THREADS, deterministic=False
    )
    return list(calls.with_options(options).as_numpy_iterator())


def releasing(mechanism, mode="graph", steps=1):
    """A function without arguments that releases noise alone: the data are zero."""

    def release(rows):
        return mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0]

    rows = np.zeros([2, 8], "float32")
    release = zoo.in_mode(mode, release, [rows])
    release(rows)
    return lambda: [release(rows).numpy() for _ in range(steps)]


def assert_all_differ(noises, releases):
    assert len(noises) == releases
    numbers = np.stack(noises).astype("float64")
    assert len(np.unique(numbers[:, 0])) > releases - 3  # 23 bits each: pairs of single numbers
    assert len(np.unique(numbers, axis=0)) == releases


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, kwargs, steps",
    [
        ("graph", {}, 500),
        ("xla", {}, 500),
        ("eager", {}, 25),
        ("graph", {"seed": 3}, 100),
        ("graph", {"secure_noise": True}, 50),
        ("graph", {"clipping": "adaptive", "expected_batch_size": 40}, 50),
    ],
)
def test_every_release_of_four_threads_is_counted_and_has_noise_of_its_own(mode, kwargs, steps):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, **kwargs)
    if mode == "eager":
        noises = sum(all_at_once(*[releasing(mechanism, mode, steps)] * THREADS), [])
    else:
        rows = tf.zeros([2, 8])
        release = zoo.in_mode(mode, lambda r: mechanism.release(zoo.Rows(r), 2)[0], [rows])
        release(rows)
        noises = in_parallel(lambda: release(tf.zeros([2, 8])), THREADS * steps)
    assert mechanism.ledger.num_releases == THREADS * steps + 1
    assert_all_differ(noises, THREADS * steps)
    assert int(mechanism.generator._counter) == (1 + mechanism._is_adaptive) * (THREADS * steps + 1)


def test_four_threads_train_one_model():
    w = tf.Variable(tf.zeros([8]))
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.0)
    x = tf.ones([2, 8])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        ((gradient, _),) = released = optimizer.compute_gradients(loss, [w], tape)
        optimizer.apply_gradients(released)
        return gradient

    step()
    runs = [lambda: [step().numpy() for _ in range(500)]] * THREADS
    assert_all_differ(sum(all_at_once(*runs), []), 2_000)
    assert optimizer.ledger.segments == [(1.0, 2.0, 2_001)]
    assert int(optimizer.iterations) == 2_001


@pytest.mark.slow
def test_functions_of_every_kind_take_turns_at_one_optimizer():
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)
    runs = [releasing(mechanism, mode, 20) for mode in ("graph", "graph", "eager")]
    in_loop = tf.function(
        lambda: tf.map_fn(
            lambda _: mechanism.release(zoo.Rows(tf.zeros([2, 8])), 2)[0], tf.range(10.0)
        )
    )
    in_loop()
    runs.append(lambda: [row for _ in range(2) for row in in_loop().numpy()])
    assert_all_differ(sum(all_at_once(*runs), []), 80)
    assert mechanism.ledger.num_releases == 80 + 3 + 10


@pytest.mark.slow
def test_optimizers_do_not_wait_for_each_other():
    mechanisms = [zoo.make_mechanism(noise_multiplier=1.0) for _ in range(3)]
    runs = [releasing(mechanism, steps=40) for mechanism in mechanisms]
    runs.append(releasing(mechanisms[0], "xla", 40))
    noises = sum(all_at_once(*runs), [])
    assert_all_differ(noises, 160)
    assert sum(m.ledger.num_releases for m in mechanisms) == 160 + 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_parts_of_batches_from_several_threads_are_all_added_up(mode):
    mechanism = zoo.make_mechanism(gradient_accumulation_steps=3, expected_batch_size=1)
    rows = np.full([2, 4], 0.25, "float32")  # of norm 1/2

    def release(rows):
        return mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0]

    release = zoo.in_mode(mode, release, [rows])
    released = np.stack(in_parallel(lambda: release(tf.constant(rows)), 120))
    assert mechanism.ledger.num_releases == 40
    # Each part is in one release, and each release has three.
    np.testing.assert_allclose(np.sort(released[:, 0]), [0.0] * 80 + [1.5] * 40, rtol=1e-6)
    assert mechanism.accumulator.num_parts == 0


def test_no_two_changes_run_at_the_same_time():
    turns, total = Turns(), tf.Variable(0.0)

    def slow_addition():
        before = total.read_value()
        with tf.control_dependencies([before]):
            (one,) = tf.while_loop(lambda x: x < 1.0, lambda x: x + 0.5**10, [0.0])
        return [tf.convert_to_tensor(total.assign(before + one))]

    in_parallel(lambda: turns.take(slow_addition), 12)
    assert total.numpy() == 12.0


def test_noise_is_that_of_the_clip_norm_that_the_gradients_were_clipped_to():
    # A clip norm that is set while a release is computed must not reach half of it.
    mechanism = zoo.make_mechanism(noise_multiplier=1e-3, expected_batch_size=1)

    class Interrupted(zoo.Rows):
        def _sum_of(self, k, weights):
            mechanism.clip_norm._clip.assign(1e-3)
            return super()._sum_of(k, weights)

    (released,) = mechanism.release(Interrupted(np.full([1, 400], 1.0, "float32")), 1)
    assert np.std(released) == pytest.approx(1e-3, rel=0.3)
    assert np.linalg.norm(released) == pytest.approx(1.0, rel=1e-2)


def test_a_failing_step_leaves_the_turn_to_the_next():
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)
    run = releasing(mechanism, steps=20)

    @tf.function
    def fails(rows):
        released = mechanism.release(zoo.Rows(rows), 2)[0]
        with tf.control_dependencies([released]):
            tf.debugging.Assert(tf.reduce_sum(rows) < 0, [rows])
        return released

    def failing():
        for _ in range(20):
            with pytest.raises(tf.errors.InvalidArgumentError):
                fails(tf.ones([2, 8]))
        return []

    def of_another_size():
        release = tf.function(lambda rows: mechanism.release(zoo.Rows(rows), tf.shape(rows)[0])[0])
        for _ in range(20):
            with pytest.raises(tf.errors.InvalidArgumentError, match="vary in size"):
                release(tf.ones([3, 8]))
        return []

    noises = sum(all_at_once(run, failing, of_another_size, run), [])
    assert_all_differ(noises, 40)
    # Those that failed after their release are counted, those that failed before are not.
    assert mechanism.ledger.num_releases == 1 + 60


@pytest.mark.slow
def test_steps_are_traced_by_several_threads():
    w = tf.Variable(tf.zeros([8]))
    optimizer = dp.DPAdam(1.0, 1.0, expected_batch_size=2)

    def run():
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.linalg.matvec(x, w)
            optimizer.minimize(loss, [w], tape)

        for _ in range(10):
            step(tf.ones([2, 8]))

    all_at_once(*[run] * 4)
    assert optimizer.ledger.segments == [(1.0, 2.0, 40)]
    assert len(optimizer.variables) == len(set(map(id, optimizer.variables)))


def test_turns_end_with_their_optimizer():
    def threads():
        return len(list(pathlib.Path("/proc/self/task").iterdir()))

    def release():
        mechanism = zoo.make_mechanism()
        zoo.release(mechanism, np.ones([2, 3]))
        return mechanism

    release()  # TensorFlow starts threads of its own with the first one
    tf.keras.backend.clear_session()
    before, held = threads(), [release() for _ in range(8)]
    assert threads() >= before + 6  # of other threads one or two may end meanwhile
    del held
    tf.keras.backend.clear_session()
    assert threads() < before + 4
