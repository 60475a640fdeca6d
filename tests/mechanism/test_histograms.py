"""Histograms are released in place of gradients, with the same sensitivity and noise."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp.mechanism.histograms import Histograms

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
RNG = np.random.default_rng(4)


def mechanism_of(num_variables, **kwargs):
    mechanism = zoo.make_mechanism(**{"expected_batch_size": 10, **kwargs})
    mechanism.histograms = Histograms(num_variables, zoo.add_variable)
    return mechanism


def release(mechanism, rows, losses):
    places = range(len(rows))
    return mechanism.release(zoo.Rows(*rows, losses=losses), len(losses), places=places)


def counts_of(mechanism):
    return mechanism.histograms._counts.numpy()


def rows_with_norms(norms):
    """Rows of two numbers with these norms."""
    angles = RNG.uniform(0, 2 * np.pi, len(norms))
    return np.float32(norms)[:, np.newaxis] * np.float32([np.cos(angles), np.sin(angles)]).T


def test_a_variable_that_is_listed_twice_is_refused():
    # Its two copies would share a place, whose counts would move by more.
    w = tf.Variable([1.0])
    optimizer = dp.UntunedSGD(noise_multiplier=0.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = x * w
        optimizer.minimize(loss, [w, w], tape)

    with pytest.raises(ValueError, match="each variable once. Received more than once: "):
        step(tf.constant([1.0, 2.0]))
    assert optimizer.ledger.num_releases == 0


@pytest.mark.parametrize("num_variables", [1, 5])
@pytest.mark.parametrize("norm", [1e-30, 1e-3, 1.0, 1e18])
@pytest.mark.parametrize("loss", [-3e30, 0.0, 1e-9, 2.0])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(num_variables, norm, loss):
    histograms = Histograms(num_variables, zoo.add_variable)
    norms = [tf.constant([norm**2, 1.0]) for _ in range(num_variables)]
    both, other = (
        histograms.sum(
            tf.constant(True),
            [n[i:] for n in norms],
            range(num_variables),
            tf.constant([loss, 1.0])[i:],
            tf.constant(0.7, tf.float64),
        ).numpy()
        for i in (0, 1)
    )
    moved = np.linalg.norm(both - other)
    counted = num_variables * (np.float32(norm) ** 2 > 0) + 1
    assert moved <= 0.7
    if norm > 1e-20:
        assert moved == pytest.approx(0.7, rel=1e-5)
        assert np.count_nonzero(both - other) == counted


@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_the_noise_of_the_counts_is_that_of_gradients(sigma):
    mechanism = mechanism_of(49, l2_norm_clip=2.0, noise_multiplier=sigma)
    rows = [np.zeros([4, 2], "float32")] * 49
    release(mechanism, rows, np.ones(4))
    assert_gaussian(counts_of(mechanism), sigma * np.sqrt(50))
    assert mechanism.ledger.segments == [(sigma, 10.0, 1)]


def test_gradients_are_released_only_after_the_histograms():
    mechanism = mechanism_of(1, noise_multiplier=0.0)
    rows = [rows_with_norms([0.5, 0.25])]
    sums, not_zero, add_to = [], [], mechanism.generator.add_to

    def noted(parts, *args):
        not_zero.append([bool(np.any(part)) for part in parts])
        return add_to(parts, *args)

    mechanism.generator.add_to = noted
    for i in range(8):
        assert bool(mechanism.histograms.are_open()) == (i < 5)
        sums.append(release(mechanism, rows, [1.0, 2.0])[0].numpy())
        assert bool(mechanism.histograms.released()) == (i < 5)
        assert counts_of(mechanism).sum() == pytest.approx(4 * min(i + 1, 5), rel=1e-5)
    # One example would move two parts by more than the clip norm.
    assert not_zero == [[False, True]] * 5 + [[True, False]] * 3
    assert not np.any(sums[:5])
    for found in sums[5:]:
        np.testing.assert_allclose(found, rows[0].sum(0) / 10, rtol=1e-6)
    assert mechanism.ledger.num_releases == 8


def test_gradients_after_the_histograms_have_the_noise_of_the_ledger():
    mechanism = mechanism_of(1, l2_norm_clip=2.0, noise_multiplier=3.0)
    mechanism.histograms._complete.assign(True)
    (released,) = release(mechanism, [np.zeros([4, 20_000], "float32")], np.ones(4))
    assert_gaussian(released, 3.0 * 2.0 / 10)
    assert not counts_of(mechanism).any()


def test_rows_without_a_finite_gradient_and_loss_are_not_counted():
    mechanism = mechanism_of(2, noise_multiplier=0.0)
    first = rows_with_norms([0.0, np.nan, np.inf, 1.0, 1.0, 1.0])
    second = rows_with_norms([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    release(mechanism, [first, second], [1.0, 1.0, 1.0, 1.0, np.nan, 1.0])
    # Of two examples, one has no gradient for the second variable.
    np.testing.assert_allclose(counts_of(mechanism).sum(axis=1), [2, 1, 2], rtol=1e-5)


def test_shifted_padding_is_not_counted():
    mechanism = mechanism_of(1, noise_multiplier=0.0)
    source = zoo.Rows(rows_with_norms([0.0, 0.0, 1.0]), losses=[1.0, 1.0, 1.0])
    ones, shift = [tf.ones([])], [tf.constant([3.0, 4.0])]
    mechanism.release(source, 3, ones, shift, places=[0])
    np.testing.assert_allclose(counts_of(mechanism).sum(axis=1), [1, 1], rtol=1e-5)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("sigma", [0.0, 4.0])
@pytest.mark.parametrize("width", [0.05, 1.0])
@pytest.mark.parametrize("median", [1e-6, 1.0, 1e5])
def test_sizes_are_found_whatever_the_units(sigma, width, median):
    size = 200
    tolerance = 0.4 if sigma else 0.2
    mechanism = mechanism_of(2, noise_multiplier=sigma, expected_batch_size=size, seed=3)
    rng = np.random.default_rng(6)

    @tf.function
    def step(first, second, losses):
        return release(mechanism, [first, second], losses)

    draws = 0
    while mechanism.histograms.are_open():
        norms = np.exp(width * rng.standard_normal([2, size])) * [[median], [100 * median]]
        losses = -median + 3 * median * rng.random(size)
        step(*map(rows_with_norms, norms), np.float32(losses))
        draws += 1
    assert draws == 5 + int((50 * sigma / size) ** 2 * 3 / 2)
    norms, loss, spread = (x.numpy() for x in mechanism.histograms.sizes())
    quartile = np.exp(0.6745 * width)
    np.testing.assert_allclose(norms, [quartile * median, 100 * quartile * median], rtol=tolerance)
    assert loss == pytest.approx(0.5 * median, abs=tolerance * median)
    assert spread == pytest.approx(1.5 * median, rel=tolerance)


@pytest.mark.slow_on(2)
def test_noise_is_hardly_ever_taken_for_gradients():
    # A scale that is far off leaves a variable where it is. One in 1,000 was when 4.5 standard
    # deviations were enough everywhere.
    rows, clip, sigma, num_batches, peak = 20_000, tf.constant(1.0, tf.float64), 1.0, 5, 100
    histograms = Histograms(rows, zoo.add_variable)
    rng = np.random.default_rng(2)
    examples = np.zeros([rows + 1, 320])
    around = np.arange(-6, 7)
    share = np.exp(-0.5 * (around / 2) ** 2)
    in_a_window = sigma * np.sqrt(8 * num_batches * (rows + 1))
    # They stand out as clearly as those of the run on digits that failed.
    examples[:, peak + around] = 14 * in_a_window * share / share.sum()
    for _ in range(num_batches):
        noisy = sigma * rng.standard_normal(examples.shape, "float32")
        noisy += examples / num_batches / np.sqrt(rows + 1)
        histograms.add(noisy, clip, *(tf.constant(x, tf.float64) for x in (sigma, 1e9)))
    assert not bool(histograms.are_open())
    octaves = np.log2(histograms.sizes().norms.numpy()) - (peak + 1.35 + 0.5 - 160) / 4
    assert np.mean(np.abs(octaves) < 0.5) > 0.99
    assert np.sum(np.abs(octaves) > 2) <= 2


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_examples_that_are_fitted_by_chance_do_not_count_for_the_norm(sigma):
    mechanism = mechanism_of(1, noise_multiplier=sigma, expected_batch_size=100, seed=3)
    rows = [rows_with_norms(np.r_[np.full(80, 1e-9), np.full(20, 30.0)])]
    while mechanism.histograms.are_open():
        release(mechanism, rows, np.ones(100))
    assert float(mechanism.histograms.sizes().norms[0]) == pytest.approx(30, rel=0.2)


def test_they_stay_open_until_something_stands_out():
    # Of other seeds one in some 300 has noise in one of 313 windows that stands out.
    mechanism = mechanism_of(1, noise_multiplier=0.1, seed=1)
    for _ in range(12):
        release(mechanism, [np.zeros([4, 2], "float32")], np.ones(4))
    assert bool(mechanism.histograms.are_open())
    for _ in range(3):
        release(mechanism, [rows_with_norms(np.full(10, 2.0))], np.ones(10))
    assert not bool(mechanism.histograms.are_open())


def test_parts_of_a_batch_are_one_release():
    mechanism = mechanism_of(1, noise_multiplier=0.0, gradient_accumulation_steps=2)
    rows, losses = [rows_with_norms([0.5, 0.25])], [1.0, 2.0]
    for i in range(14):
        found = release(mechanism, rows, losses)[0].numpy()
        assert np.any(found) == (i in (11, 13))
    assert counts_of(mechanism).sum() == pytest.approx(5 * 2 * 4, rel=1e-5)
    assert mechanism.ledger.num_releases == 7


def test_opened_again_they_measure_norms_anew_within_bounds_and_keep_the_losses():
    mechanism = mechanism_of(3, noise_multiplier=0.0)
    histograms = mechanism.histograms

    def measure(norms, losses):
        for _ in range(5):
            assert bool(histograms.are_open())
            release(mechanism, [rows_with_norms([n] * 40) for n in norms], losses)
        assert not bool(histograms.are_open())
        return histograms.sizes()

    first = measure([1.0, 1.0, 1.0], np.linspace(1, 2, 40))
    ratios = tf.constant([[2.0, 0.1, 1.0], [4.0, 10.0, 1.0]], tf.float64)
    histograms.open_again(tf.constant(False), ratios)
    assert not bool(histograms.are_open())
    histograms.open_again(tf.constant(True), ratios)
    unknown = histograms.sizes()
    assert not unknown.norms.numpy().any() and float(unknown.loss) == float(first.loss)
    again = measure([8.0, 3.0, 0.01], np.full(40, 1e-3))
    expected = first.norms.numpy() * [4.0, 3.0, 1.0]  # beyond its bound, within, and fixed
    np.testing.assert_allclose(again.norms, expected, rtol=0.2)
    np.testing.assert_allclose(again.norms.numpy()[[0, 2]], expected[[0, 2]], rtol=1e-6)
    assert float(again.loss) == float(first.loss) and float(again.spread) == float(first.spread)


def test_norms_that_no_longer_stand_out_stay_what_they_were():
    mechanism = mechanism_of(1, noise_multiplier=0.0)
    for _ in range(5):
        release(mechanism, [rows_with_norms([2.0] * 40)], np.ones(40))
    before = mechanism.histograms.sizes().norms.numpy()
    mechanism.histograms.open_again(tf.constant(True), tf.ones([2, 1], tf.float64))
    for _ in range(5):
        release(mechanism, [np.zeros([40, 2], "float32")], np.ones(40))
    assert mechanism.histograms.sizes().norms.numpy() == pytest.approx(before)
    assert not bool(mechanism.histograms.are_open())
