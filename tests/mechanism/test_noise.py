"""The noise is Gaussian, of the right size, drawn once a release and never twice the same.

Tests of a distribution accept the standard deviation that was asked for and reject 2/3 and 3/2 of
it. A test of noise from the operating system's entropy fails by chance once in a million.
"""

import copy

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf
import zoo

import tf_adaptive_dp as dp
from tf_adaptive_dp.mechanism.noise import GaussianNoise

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
RARE = 1e-6


def fits(sample, stddev):
    normalized = np.ravel(sample) / stddev
    return scipy.stats.kstest(normalized, scipy.special.ndtr).pvalue > RARE


def assert_gaussian(sample, stddev):
    assert fits(sample, stddev)
    assert not fits(sample, stddev * 2 / 3)
    assert not fits(sample, stddev * 3 / 2)


def assert_independent(a, b):
    """Neither correlated nor parts of one stream, shifted."""
    a, b = np.ravel(a), np.ravel(b)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))
    assert len(np.intersect1d(a, b)) < 0.01 * len(a)


def zeros(*shapes, batch_size=4):
    return [np.zeros([batch_size, *shape], "float32") for shape in shapes]


MECHANISMS = {
    "per example": ({}, 4, 1.0),
    "small clip": ({"l2_norm_clip": 0.01}, 4, 0.01),
    "large clip": ({"l2_norm_clip": 50.0, "noise_multiplier": 0.3}, 4, 15.0),
    "expected batch size": ({"expected_batch_size": 10}, 10, 1.0),
    "automatic clipping": ({"clipping_method": "automatic"}, 4, 1.0),
    "microbatches of one": ({"num_microbatches": 4}, 4, 1.0),
}


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
    # With a learning rate of -1, plain SGD adds the released gradient to the weights.
    optimizer = dp.DPSGD(l2_norm_clip=0.5, noise_multiplier=1.3, learning_rate=-1.0)
    w, b = tf.Variable(tf.zeros([200, 100])), tf.Variable(tf.zeros([100]))
    x = tf.zeros([8, 200])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x @ w, axis=1) + 0.0 * tf.reduce_sum(b + x[:, :100], axis=1)
    if through == "minimize":
        optimizer.minimize(loss, [w, b], tape)
        released = [w.numpy(), b.numpy()]
    else:
        released = [g.numpy() for g, _ in optimizer.compute_gradients(loss, [w, b], tape)]
    assert_gaussian(8 * np.concatenate([r.ravel() for r in released]), 0.5 * 1.3)


def test_the_entries_of_one_release_are_independent():
    # The sum over n independent entries has a variance of n; entries that share noise give more.
    mechanism = zoo.make_mechanism(noise_multiplier=1.0, seed=1)
    step = tf.function(lambda: mechanism.release(zoo.Rows(*zeros((8, 8), (36,))), 1))
    sums = [sum(float(tf.reduce_sum(g)) for g in step()) for _ in range(1_500)]
    assert_gaussian(sums, 10.0)
    assert mechanism.ledger.num_releases == 1_500


def test_variables_of_one_release_are_independent():
    a, b, c = zoo.release(zoo.make_mechanism(noise_multiplier=1.0), *zeros(*[(5_000,)] * 3))
    assert_independent(a, b)
    assert_independent(b, c)
    assert_independent(a, c)


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
    first, second = (run.draw([[100]], 1.0)[0].numpy() for _ in range(2))
    restored._counter.assign(1)
    (again,) = restored.draw([[100]], 1.0)
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
    drawn = GaussianNoise(zoo.add_variable).draw(shapes, 1.0)
    assert [d.shape for d in drawn] == [[2, 3], [], [0, 4], [5]]
    assert {d.dtype for d in drawn} == {tf.float32}
