"""The noise is Gaussian, of the right size, drawn once a release and never twice the same.

Tests of a distribution accept the standard deviation that was asked for and reject 2/3 and 3/2 of
it. A test of noise from the operating system's entropy fails by chance once in a million.
"""

import copy
import itertools
import multiprocessing
import os
import pathlib
import re

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gaussianity import (
    RARE,
    assert_gaussian,
    assert_independent,
    assert_uncorrelated,
    drawn,
)
from tf_adaptive_dp.mechanism import noise as noise_module
from tf_adaptive_dp.mechanism.noise import GaussianNoise, SecretStream

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")


def zeros(*shapes, batch_size=4):
    return [np.zeros([batch_size, *shape], "float32") for shape in shapes]


MECHANISMS = {
    "per example": ({}, 4, 1.0),
    "small clip": ({"l2_norm_clip": 0.01}, 4, 0.01),
    "large clip": ({"l2_norm_clip": 50.0, "noise_multiplier": 0.3}, 4, 15.0),
    "expected batch size": ({"expected_batch_size": 10}, 10, 1.0),
    "automatic clipping": ({"clipping": "automatic"}, 4, 1.0),
    "microbatches of one": ({"num_microbatches": 4}, 4, 1.0),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("arguments, divisor, stddev", MECHANISMS.values(), ids=MECHANISMS)
def test_a_release_has_noise_of_the_noise_multiplier_times_the_clip(
    arguments, divisor, stddev, mode
):
    mechanism = zoo.make_mechanism(**{"noise_multiplier": 1.0, **arguments})
    released = zoo.release(mechanism, *zeros((300, 100), (10_000,)), mode=mode)
    noise = divisor * np.concatenate([r.ravel() for r in released])
    assert_gaussian(noise, stddev)
    assert noise.std() == pytest.approx(stddev, rel=0.02)
    assert noise.mean() == pytest.approx(0.0, abs=0.03 * stddev)


def test_noise_does_not_grow_with_the_number_of_examples_in_a_microbatch():
    # 8 examples in 2 groups: two rows, whose clipped sum is divided by 8 / 4.
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, num_microbatches=2)
    released = mechanism.release(zoo.Rows(*zeros((20_000,), batch_size=2)), 8)
    assert_gaussian(2 * released[0].numpy(), 1.0)


def test_noise_is_added_to_the_gradients_not_put_in_their_place():
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, l2_norm_clip=1e6)
    (released,) = zoo.release(mechanism, 1e5 * np.ones([1, 20_000], "float32") / 200)
    assert_gaussian(released - 500.0, 1e6)
    mechanism.noise_multiplier = 0.0
    (released,) = zoo.release(mechanism, 1e5 * np.ones([1, 20_000], "float32") / 200)
    np.testing.assert_allclose(released, 500.0, rtol=1e-5)


@pytest.mark.parametrize("through", ["minimize", "compute_gradients"])
def test_the_noise_of_an_optimizer_has_the_size_asked_for(through):
    # With a learning rate of 1, plain SGD subtracts the released gradient from the weights.
    optimizer = dp.DPSGD(l2_norm_clip=0.5, noise_multiplier=1.3, learning_rate=1.0)
    w, b = tf.Variable(tf.zeros([200, 100])), tf.Variable(tf.zeros([100]))
    x = tf.zeros([8, 200])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x @ w, axis=1) + 0.0 * tf.reduce_sum(b + x[:, :100], axis=1)
    if through == "minimize":
        optimizer.minimize(loss, [w, b], tape)
        released = [-w.numpy(), -b.numpy()]
    else:
        released = [g.numpy() for g, _ in optimizer.compute_gradients(loss, [w, b], tape)]
    assert_gaussian(8 * np.concatenate([r.ravel() for r in released]), 0.5 * 1.3)


@pytest.mark.slow_on(3)
def test_the_entries_of_one_release_are_independent():
    # The sum over n independent entries has a variance of n; entries that share noise give more.
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, seed=1)
    step = tf.function(lambda: mechanism.release(zoo.Rows(*zeros((8, 8), (36,))), 1))
    sums = [sum(float(tf.reduce_sum(g)) for g in step()) for _ in range(2_000)]
    assert_gaussian(sums, 10.0)
    assert mechanism.ledger.num_releases == 2_000


def test_variables_of_one_release_are_independent():
    a, b, c = zoo.release(zoo.make_mechanism(noise_multiplier=1.0), *zeros(*[(5_000,)] * 3))
    assert_independent(a, b)
    assert_independent(b, c)
    assert_independent(a, c)


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_releases_are_independent(mode, seed):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, seed=seed)
    rows = zeros((5_000,))
    step = zoo.in_mode(mode, lambda r: mechanism.release(zoo.Rows(r), 4)[0], rows)
    first, second, third = (step(*rows).numpy() for _ in range(3))
    assert_independent(first, second)
    assert_independent(second, third)
    assert_independent(first, third)


def test_releases_in_a_loop_of_one_graph_are_independent():
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)

    @tf.function
    def steps():
        released = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            released = released.write(i, mechanism.release(zoo.Rows(*zeros((5_000,))), 4)[0])
        return released.stack()

    first, second, third = steps().numpy()
    assert_independent(first, second)
    assert_independent(second, third)
    assert mechanism.ledger.num_releases == 3


def draw(mechanism):
    return zoo.release(mechanism, *zeros((5_000,)))[0]


def test_mechanisms_are_independent():
    a, b = (zoo.make_mechanism(noise_multiplier=1.0) for _ in range(2))
    assert_independent(draw(a), draw(b))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_repeat_the_noise():
    stream = SecretStream()
    child = os.fork()
    if child == 0:
        try:
            stream.next()
        except dp.NotPrivateError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stream.next()[1] == 1


@pytest.mark.parametrize("releases_before", [0, 2])
def test_a_copy_draws_noise_of_its_own(releases_before):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0)
    for _ in range(releases_before):
        draw(mechanism)
    copied = copy.deepcopy(mechanism)
    assert_independent(draw(mechanism), draw(copied))
    assert mechanism.ledger.num_releases == copied.ledger.num_releases == releases_before + 1


def test_a_copy_leaves_the_original_where_it_was():
    original, untouched = (zoo.make_mechanism(noise_multiplier=1.0, seed=2) for _ in range(2))
    copied = copy.deepcopy(original)
    draw(copied)
    np.testing.assert_array_equal(draw(original), draw(untouched))


def test_a_restored_run_never_repeats_noise(tmp_path):
    def make():
        variables = {}

        def add_variable(shape, dtype=None, name=None):
            variables[name] = zoo.add_variable(shape, dtype, name)
            return variables[name]

        mechanism = zoo.make_mechanism(noise_multiplier=1.0, add_variable=add_variable)
        return mechanism, tf.train.Checkpoint(**variables)

    mechanism, checkpoint = make()
    before = draw(mechanism)
    path = checkpoint.save(tmp_path / "checkpoint")
    after = draw(mechanism)
    restored, checkpoint = make()
    checkpoint.restore(path).assert_consumed()
    assert restored.ledger.num_releases == 1
    again = draw(restored)
    assert_independent(before, again)
    assert_independent(after, again)


def test_a_seeded_run_goes_on_after_the_noise_it_has_used():
    run, restored = (GaussianNoise(zoo.add_variable, seed=3) for _ in range(2))
    first, second = (drawn(run, [[100]])[0].numpy() for _ in range(2))
    restored._counter.assign(1)
    (again,) = drawn(restored, [[100]])
    np.testing.assert_array_equal(again, second)
    assert not np.array_equal(again, first)


def test_the_same_seed_gives_the_same_noise_and_another_seed_another():
    a, b, c = (zoo.make_mechanism(noise_multiplier=1.0, seed=s) for s in (5, 5, 6))
    first = draw(a)
    np.testing.assert_array_equal(first, draw(b))
    assert_independent(first, draw(c))


def test_the_seeds_of_tensorflow_do_not_reach_the_noise():
    noise = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(1)
        noise.append(draw(zoo.make_mechanism(noise_multiplier=1.0)))
    assert_independent(*noise)


def test_no_noise_for_a_noise_multiplier_of_zero():
    np.testing.assert_array_equal(draw(zoo.make_mechanism(noise_multiplier=0.0)), np.zeros(5_000))


def test_each_shape_gets_its_own_tensor_also_a_scalar_and_an_empty_one():
    shapes = [tf.constant(shape, tf.int32) for shape in ([2, 3], [], [0, 4], [5])]
    found = drawn(GaussianNoise(zoo.add_variable), shapes)
    assert [d.shape for d in found] == [[2, 3], [], [0, 4], [5]]
    assert {d.dtype for d in found} == {tf.float32}


def numbers(size, stddev=1.0, seed=None, release=1):
    """The numbers of one release, as a vector."""
    noise = GaussianNoise(zoo.add_variable, seed)
    noise._counter.assign(release - 1)
    return drawn(noise, [[size]], stddev)[0].numpy()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stddev", [1.0, 1e-6, 3e5])
def test_a_million_numbers_are_gaussian(stddev):
    assert_gaussian(numbers(1_000_000, stddev), stddev)


@pytest.mark.slow
def test_the_tails_are_gaussian_to_five_standard_deviations():
    bounds = np.arange(3.0, 5.5, 0.5)
    noise, releases, size = GaussianNoise(zoo.add_variable), 10, 10_000_000

    @tf.function(jit_compile=True)
    def count_beyond():
        distances = tf.abs(drawn(noise, [[size]])[0])
        return [tf.math.count_nonzero(distances > bound) for bound in bounds]

    beyond = np.sum([count_beyond() for _ in range(releases)], axis=0)
    expected = -np.diff([1.0, *(2 * scipy.special.ndtr(-bounds)), 0.0]) * releases * size

    def fits_tails(beyond):
        observed = -np.diff([releases * size, *beyond, 0])
        return scipy.stats.chisquare(observed, expected).pvalue > RARE

    assert fits_tails(beyond)
    # The test has power: it sees if nothing lies beyond 5, and tails that are a percent too wide.
    assert not fits_tails([*beyond[:-1], 0])
    assert not fits_tails(2 * scipy.special.ndtr(-bounds / 1.01) * releases * size)


def test_neighbours_are_independent():
    z = numbers(2_000_001)
    for lag in [1, 2, 3, 4, 8, 128, len(z) // 2]:
        assert_uncorrelated(z[:-lag], z[lag:])
    # Numbers that are drawn together.
    assert_uncorrelated(z[0:-1:2], z[1::2])


def test_numbers_that_are_drawn_together_point_everywhere_alike_at_every_distance():
    x, y = numbers(4_000_000).reshape([-1, 2]).T.astype("float64")
    sector = np.floor((np.arctan2(y, x) / np.pi + 1) * 32).clip(0, 63)
    ring = np.floor(np.exp(-(x**2 + y**2) / 2) * 16)
    counts = np.bincount((16 * sector + ring).astype(int), minlength=64 * 16)
    assert scipy.stats.chisquare(counts).pvalue > RARE


# Of the authors of the generator (Random123), key and counter in words of 32 bits.
THREEFRY = {
    "zeros": ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    "ones": ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
    "pi": ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
}


@pytest.mark.parametrize("key, counter, expected", THREEFRY.values(), ids=THREEFRY)
def test_the_generator_gives_the_published_words(key, counter, expected):
    block, release = (tf.constant([word], tf.uint32) for word in counter)
    words = noise_module._threefry(tf.constant(key, tf.uint32), block, release[0])
    assert tuple(int(word[0]) for word in words) == expected


@pytest.mark.parametrize("seed, release", [(0, 1), (2**63 - 1, 3), (5 * 2**40 + 7, 2**31 + 5)])
def test_noise_is_the_transform_of_the_words_of_key_release_and_position(seed, release):
    # XLA has the generator too; there the words of 64 bits count up from `counter`.
    @tf.function(jit_compile=True)
    def xla_words():
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[100_000],
            key=tf.constant([seed], tf.uint64),
            counter=tf.constant([release * 2**32, 0], tf.uint64),
            alg=tf.random.Algorithm.THREEFRY.value,
            dtype=tf.uint64,
        )

    words = xla_words().numpy()
    radius = np.sqrt(-2 * np.log(((words & 0xFFFFFFFF) + 0.5) / 2**32))
    quarter, angle = (words >> 32) & 3, (words >> 32).astype("int32") >> 2
    x = (angle + 0.5) / 2**29 * np.pi / 4
    along, across = np.where(quarter & 2, -1, 1) * radius * np.cos(x), radius * np.sin(x)
    swap = (quarter & 1).astype(bool)
    expected = np.stack([np.where(swap, across, along), np.where(swap, along, across)], axis=1)
    actual = numbers(200_000, 1.0, seed, release).reshape([-1, 2])
    # Near the middle, where u is near 1, float32 sees a coarse u.
    np.testing.assert_allclose(actual, expected, atol=4e-4, rtol=0)
    assert np.mean(np.abs(actual - expected)) < 2e-7


def test_the_largest_and_the_smallest_radius_have_a_size():
    corners = [0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1]
    a, b = (tf.constant(w, tf.uint32) for w in zip(*itertools.product([0, 2**32 - 1], corners)))
    x, y = (z.numpy() for z in noise_module._box_muller(a, b))
    largest, smallest = np.hypot(x, y).reshape([2, -1])
    ends = np.array([98, 98, 98, 98, 64, 98, 64])  # twice the bits of 1 / u
    np.testing.assert_allclose(largest, np.sqrt(ends * np.log(2)), rtol=1e-5)
    np.testing.assert_allclose(smallest, np.sqrt(2 * 2.0**-24), rtol=1e-3)
    assert np.all(x != 0) and np.all(y != 0)


def test_the_tail_goes_on_where_32_bits_end():
    """It ended at 6.76 σ: in 100 steps of a million numbers outcomes of 1.8e-5 were impossible."""
    last = np.arange(2**16, dtype=np.uint32)
    b = tf.constant(last << 2)
    tail = np.hypot(*(z.numpy().astype("float64") for z in noise_module._box_muller(0 * b, b)))
    np.testing.assert_allclose(np.exp(-(tail**2) / 2), (last + 0.5) * 2.0**-48, rtol=2e-5)
    one = tf.constant(1, tf.uint32)
    assert np.hypot(*(z.numpy() for z in noise_module._box_muller(one, one))) < tail.min()
    # What a shift of length s leaves outside of the disc that pairs lie in, with its √(d/2) / σ.
    radius = tail.max()
    assert radius == pytest.approx(8.242, abs=1e-3)
    impossible = radius * np.exp(-(radius**2) / 2) / np.pi / np.sqrt(2)
    assert impossible == pytest.approx(3.3e-15, rel=0.02)


def test_releases_of_one_number_are_gaussian_and_independent():
    noise = GaussianNoise(zoo.add_variable)

    @tf.function
    def steps():
        found = tf.TensorArray(tf.float32, 10_000, element_shape=[])
        for i in tf.range(10_000):
            found = found.write(i, drawn(noise, [tf.constant([], tf.int32)], 2.0)[0])
        return found.stack()

    z = steps().numpy()
    assert_gaussian(z, 2.0)
    assert_uncorrelated(z[:-1], z[1:])
    assert int(noise._counter) == 10_000


@pytest.mark.parametrize("sizes", [[1], [5], [16], [3, 2, 17], [32, 1, 8], [0, 1, 0, 7], [0]])
def test_variables_have_parts_of_their_own_of_one_stream(sizes):
    found = drawn(GaussianNoise(zoo.add_variable, seed=4), [[size] for size in sizes])
    assert [len(d) for d in found] == sizes
    stream, start = numbers(200, seed=4), 0
    for part, size in zip(found, sizes):
        np.testing.assert_array_equal(part, stream[start : start + size])
        start += -(-size // 16) * 16


def drawn_in(mode):
    noise = GaussianNoise(zoo.add_variable, seed=9)

    def draw(x):
        return drawn(noise, [tf.shape(x), [101]], 0.7)

    draw = zoo.in_mode(mode.removeprefix("op by op, "), draw, [np.zeros([99, 3])])
    tf.config.run_functions_eagerly(mode.startswith("op by op"))
    try:
        return [np.concatenate([np.ravel(z) for z in draw(np.zeros([99, 3]))]) for _ in range(3)]
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.in_turns
@pytest.mark.parametrize("mode", ["graph", "graph of fixed size", "xla", "op by op, eager"])
def test_a_seed_gives_the_same_noise_in_every_mode(mode):
    for actual, expected in zip(drawn_in(mode), drawn_in("eager")):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("other", [2, 2**31, 2**32 + 1, 2**62 + 1])
def test_every_bit_of_the_seed_counts(other):
    assert_independent(numbers(5_000, seed=1), numbers(5_000, seed=other))


@pytest.mark.parametrize("other", [2, 2**16 + 1, 2**31 + 1, 2**32, 2**32 + 1, 2**54 + 1])
def test_every_bit_of_the_number_of_a_release_counts(other):
    assert_independent(numbers(5_000, seed=1), numbers(5_000, seed=1, release=other))


def test_every_run_of_2_to_the_32_releases_has_a_key_of_its_own():
    key, release = tf.constant(5, tf.int64), tf.constant(3 * 2**32 + 7, tf.int64)
    block = tf.constant([2**31 + 3], tf.uint32)  # beyond those of replicas, in release 0
    words = noise_module._threefry(tf.bitcast(key, tf.uint32), block, tf.constant(0, tf.uint32))
    derived = tf.bitcast(tf.concat(words, axis=0), tf.int64)
    expected = noise_module.normal_numbers(1000, derived, tf.constant(7, tf.int64))
    compiled = noise_module.normal_numbers(1000, key, release)
    np.testing.assert_array_equal(compiled, expected)
    pairs = noise_module._normal_pairs.python_function(tf.constant(1000), key, release)
    np.testing.assert_allclose(tf.bitcast(pairs, tf.float32).numpy().ravel(), expected, atol=1e-5)


def test_the_key_has_64_bits_of_entropy():
    keys = [int(GaussianNoise(zoo.add_variable)._stream.next()[0]) % 2**64 for _ in range(100)]
    for quarter in range(0, 64, 16):
        words = {key >> quarter & 0xFFFF for key in keys}
        assert len(words) > 90  # of 100 words of 16 bits, hardly any turns up twice
    assert int(SecretStream().next()[1]) == 1  # the words of 0 are keys


def ancestors(operation):
    seen, found = set(), [operation]
    while found:
        operation = found.pop()
        if operation not in seen:
            seen.add(operation)
            found += [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
    return seen


def test_noise_waits_for_nothing_in_the_graph():
    # So it is drawn beside the forward pass, on a core that is idle. What is released does wait,
    # for the sums, and until noise and release are counted.
    mechanism, found = zoo.make_mechanism(noise_multiplier=1.0), []

    @tf.function
    def step(x):
        rows = tf.linalg.matmul(x, x)
        check = tf.debugging.Assert(tf.reduce_sum(rows) > 0, [rows])
        with tf.control_dependencies([check]):
            rows = tf.identity(rows)
        found.append(mechanism.release(zoo.Rows(rows), 5)[0].op)

    graph = step.get_concrete_function(tf.TensorSpec([5, 5])).graph
    (draw,) = (op for op in graph.get_operations() if "PartitionedCall" in op.type)
    types = {op.type for op in ancestors(draw)}
    assert "RngReadAndSkip" in types  # of its key and number
    assert not types & {"MatMul", "Sum", "Assert", "If", "AssignVariableOp", "AssignAddVariableOp"}
    types = [op.type for op in ancestors(found[0])]
    assert {"MatMul", "If", "AssignAddVariableOp"} <= set(types)
    assert types.count("AssignVariableOp") >= 2  # the ledger's


def test_the_ledger_waits_for_all_checks_and_what_is_released_for_the_ledger():
    mechanism = zoo.make_mechanism(expected_batch_size=4.0, noise_multiplier=1.0)
    released = []

    @tf.function
    def step(rows, padding):
        released.extend(mechanism.release(zoo.Rows(rows), 4, padding=padding))

    graph = step.get_concrete_function(tf.zeros([4, 3]), tf.zeros([4], tf.bool)).graph
    counts = graph.capture(mechanism.ledger._counts.handle)
    operations = graph.get_operations()
    (counted,) = (
        op for op in operations if op.type == "AssignAddVariableOp" and op.inputs[0] is counts
    )
    checks = {op for op in operations if op.type == "Assert"}
    assert len(checks) == 4 and checks <= ancestors(counted)
    assert counted in ancestors(released[0].op)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_that_fails_uses_no_noise_up(mode):
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, seed=2)
    step = zoo.in_mode(
        mode, lambda r: mechanism.release(zoo.Rows(r), tf.shape(r)[0]), [np.ones([2, 9], "float32")]
    )
    rows = np.zeros([2, 9], "float32")
    first = step(rows)[0].numpy()
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(np.zeros([3, 9], "float32"))
    assert int(mechanism.generator._counter) == mechanism.ledger.num_releases == 1
    second = step(rows)[0].numpy()
    np.testing.assert_allclose(2 * first, numbers(9, seed=2, release=1), rtol=1e-5)
    np.testing.assert_allclose(2 * second, numbers(9, seed=2, release=2), rtol=1e-5)


@pytest.mark.in_turns
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_checkpoint_that_is_restored_into_the_same_object_repeats_no_noise(mode, tmp_path):
    # The difference of two releases with the same noise is that of the data.
    w = tf.Variable(tf.zeros([20_000]))
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.zeros([4]) * tf.reduce_sum(w)
        optimizer.minimize(loss, [w], tape)
        return tf.identity(w)

    step = tf.function(step) if mode == "graph" else step
    start = step()
    checkpoint = tf.train.Checkpoint(w=w, optimizer=optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    first = step() - start
    checkpoint.read(path).assert_consumed()
    optimizer.ledger.restore(optimizer.ledger.segments)  # a ledger that was set back has no ε
    assert_independent(first.numpy(), (step() - start).numpy())


def memory_mib(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.M).group(1)) / 1024


def peak_in_tables(rows, with_noise):
    """By how much a step on a table exceeds what there was before, in sizes of the table."""
    table, noise = tf.Variable(tf.zeros([rows, 64])), GaussianNoise(zoo.add_variable)

    @tf.function
    def step(total):
        one = tf.constant(1.0, tf.float64)
        noisy = noise.add_to([total], one, one)[0] if with_noise else total + 1.0
        table.assign_sub(0.1 * noisy)

    total = tf.zeros([rows, 64])
    step.get_concrete_function(total)
    before = memory_mib("VmRSS")
    step(total)
    return (memory_mib("VmHWM") - before) / (rows * 64 * 4 / 2**20)


@pytest.mark.slow
def test_the_noise_of_a_large_table_takes_less_memory_than_two_tables():
    found = []
    for with_noise in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(peak_in_tables, (1_000_000, with_noise)))
    plain, private = found
    assert 0.9 < plain < private < 2.0 and private - plain < 1.0, found
