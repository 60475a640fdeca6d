"""Secure noise: Gaussian, from the operating system, and on a grid that tells nothing."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gaussianity import assert_gaussian, assert_independent
from tf_adaptive_dp.mechanism import secure_noise
from tf_adaptive_dp.mechanism.noise import GaussianNoise
from tf_adaptive_dp.mechanism.secure_noise import SecureNoise

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
SIZE = 20_000


def mechanism_of(**kwargs):
    return zoo.make_mechanism(secure_noise=True, **{"noise_multiplier": 1.5, **kwargs})


@pytest.mark.in_turns
@pytest.mark.slow_after(5)
@pytest.mark.parametrize("mode", ["eager", "graph", "graph of fixed size"])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 300.0])
def test_the_noise_has_the_scale_that_was_asked_for(mode, clip):
    mechanism = mechanism_of(l2_norm_clip=clip)
    rows = [np.zeros([4, *shape]) for shape in [(100, 150), (5_000,)]]
    released = np.concatenate([r.ravel() for r in zoo.release(mechanism, *rows, mode=mode)])
    assert_gaussian(released, 1.5 * clip / 4)
    assert mechanism.ledger.segments == [(1.5, 4.0, 1)]


def test_no_two_releases_share_noise():
    mechanism = mechanism_of()
    step = tf.function(lambda: mechanism.release(zoo.Rows(np.zeros([4, SIZE])), 4)[0])
    first, second = step().numpy(), step().numpy()
    assert_independent(first, second)
    assert_independent(first[: SIZE // 2], first[SIZE // 2 :])
    (other,) = mechanism_of().release(zoo.Rows(np.zeros([4, SIZE])), 4)
    assert_independent(first, other.numpy())


def test_all_bits_come_from_the_operating_system(monkeypatch):
    asked = []

    def urandom(size):
        asked.append(size)
        return bytes(size)

    monkeypatch.setattr(secure_noise.os, "urandom", urandom)
    (first,), (second,) = (
        mechanism_of().release(zoo.Rows(np.zeros([4, 101])), 4) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert asked == [16 * 51] * 2
    assert 8.6 < np.abs(first).max() / (1.5 / 4) < 8.67  # where all bits are 0 is the largest


def steps_of_the_grid(values, sensitivity, size):
    grid = 2.0 ** np.floor(np.log2(sensitivity * 2.0**-26 / np.sqrt(size)))
    return np.asarray(values, "float64") / grid


@pytest.mark.parametrize("value", [0.0, 1 / 3, 1e-9, -0.7123])
def test_results_lie_on_a_grid_whatever_the_data_are(value):
    sums = [tf.fill([SIZE], np.float32(value))]
    noise = SecureNoise(zoo.add_variable)
    (secure,) = noise.add_to(sums, tf.constant(1.0, tf.float64), tf.constant(1.0, tf.float64))
    steps = steps_of_the_grid(secure, 1.0, SIZE)
    assert np.all(steps == np.rint(steps))


def test_without_it_the_last_bits_tell_what_the_sum_was():
    # The attack that the grid prevents: near zero, 1/3 plus float32 noise is a multiple of the last
    # bit of 1/3, while 0 plus the same noise has bits below it.
    share_of_multiples = []
    for value in (0.0, 1 / 3):
        noise = GaussianNoise(zoo.add_variable, seed=1)
        (plain,) = noise.add_to([tf.fill([SIZE], np.float32(value))], tf.constant(1.0), 1.0)
        small = plain.numpy()[np.abs(plain.numpy()) < 0.1]
        steps = small.astype("float64") / np.spacing(np.float32(1 / 3))
        share_of_multiples.append(np.mean(steps == np.rint(steps)))
    assert share_of_multiples[0] < 0.5 and share_of_multiples[1] > 0.6


def test_rounding_to_the_grid_does_not_show_in_the_sum(monkeypatch):
    monkeypatch.setattr(secure_noise, "_normal_numbers", lambda size: np.zeros(size))
    rows = np.random.default_rng(0).normal(size=[4, SIZE])
    (exact,) = zoo.release(zoo.make_mechanism(), rows)
    (rounded,) = zoo.release(mechanism_of(), rows)
    np.testing.assert_allclose(rounded, exact, rtol=0, atol=2.0**-26 / np.sqrt(SIZE))


def test_a_single_number_and_an_adaptive_count_work():
    mechanism = mechanism_of(clipping=dp.AdaptiveClipping(), expected_batch_size=100)
    (released,) = zoo.release(mechanism, np.zeros([4, 1]))
    assert released.shape == (1,) and np.isfinite(released).all()
    assert mechanism.clip_norm.value != 1.0


def test_more_noise_than_the_grid_can_hold_is_refused():
    mechanism = mechanism_of(noise_multiplier=1e12)
    step = tf.function(lambda: mechanism.release(zoo.Rows(np.zeros([4, SIZE])), 4)[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="No grid .* can hold this much noise"):
        step()


def test_a_seed_is_refused():
    with pytest.raises(ValueError, match="takes no `seed`. Received: secure_noise=True, seed=3"):
        dp.DPSGD(1.0, 1.0, secure_noise=True, seed=3)


def test_xla_is_refused():
    w = tf.Variable([1.0])
    optimizer = dp.DPSGD(1.0, 1.0, secure_noise=True)

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.constant([1.0, 2.0]) * w
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(dp.NotPrivateError, match="XLA cannot call the operating system"):
        step()
    assert optimizer.ledger.num_releases == 0


def test_an_optimizer_is_saved_with_it():
    config = dp.DPSGD(1.0, 1.0, secure_noise=True).get_config()
    assert isinstance(dp.DPSGD.from_config(config)._mechanism.generator, SecureNoise)


def test_the_noise_covers_what_rounding_adds_to_the_sensitivity():
    # One number of bound 1 has a grid of 2⁻²⁶, by which the noise is larger: a step of it is left.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_noise, "_normal_numbers", np.ones)
        assert secure_noise._release(np.float32([-1.0]), 1.0, 1.0) == 2.0**-26


@pytest.mark.parametrize("multiplier", [0.0, 1.0, 1e4, 1e9])
def test_the_grid_is_coarser_where_there_is_more_noise(multiplier):
    size = 999
    released = secure_noise.on_grid(np.full([size, 3], 1 / 3), multiplier, sensitivity=1.0)
    largest = max(multiplier * math.sqrt(3 * size) * 8.66, 1.0)
    fineness = min(26, 51 - math.ceil(math.log2(largest)))
    grid = 2.0 ** math.floor(math.log2(2.0**-fineness / math.sqrt(3 * size)))
    np.testing.assert_array_equal(released / grid, np.rint(released / grid))
    if multiplier:
        assert_gaussian((released - 1 / 3).ravel(), multiplier)
        assert np.any(released / (2 * grid) != np.rint(released / (2 * grid)))


def test_what_exceeds_the_integers_is_cut_off():
    # A conversion that overflows would make neighbors differ by as much as integers can.
    large, larger = (secure_noise.on_grid(np.array([x]), 0.0, 1.0) for x in (1e30, 2e30))
    assert large == larger == 2.0**62 * 2.0**-26
