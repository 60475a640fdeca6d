"""The private means and deviations: what is released for them, and what they find."""

import math

import numpy as np
import pytest

from tests.helpers.gaussianity import assert_gaussian
from tests.helpers.normalized import N, adapted, columns
from tf_adaptive_dp.normalization import estimator

# Per release, as seven of them compose to one of 1.
SEVEN = math.sqrt(7)


@pytest.fixture
def no_deviation_is_clear():
    """The release between the rounds is made for features in which there is little noise, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator, "_CLEAR_VARIANCE", math.inf)
        yield


def record(monkeypatch, answers=None):
    """Records the sums; releases them with noise, or what is given instead."""
    sums, released, own = [], [], estimator._release

    def release(total, noise):
        sums.append(total.copy())
        released.append(own(total, noise) if answers is None else answers[len(sums) - 1])
        return released[-1]

    monkeypatch.setattr(estimator, "_release", release)
    return sums, released


@pytest.mark.usefixtures("usual_noise")
def test_it_finds_units_whatever_they_are():
    x = columns()
    layer = adapted(x)
    mean, stddev = layer.mean.numpy(), layer.stddev.numpy()
    # The rare flag is lost in the noise, so it is not scaled up.
    clear = [0, 1, 2, 4, 5]
    # The mean of the heavy tail is that of values clipped together with others.
    assert np.all(np.abs(mean - x.mean(0))[clear] < 0.5 * x.std(0)[clear])
    ratio = stddev / x.std(0)
    # In 400 draws of the noise they were between 0.6 and 1.1, but for one false alarm.
    assert np.all((0.5 < ratio[clear]) & (ratio[clear] < 1.3)), ratio
    assert ratio[3] > 0.3
    np.testing.assert_allclose(
        layer(x[:5]).numpy(), (x[:5].astype(np.float32) - mean) / stddev, rtol=1e-4, atol=1e-4
    )


def strokes(background=0.0, num_examples=N):
    """Pixels: strokes of size 1 to 3, in 2% to 60% of the examples; and one without strokes."""
    random = np.random.default_rng(8)
    frequencies = np.r_[np.geomspace(0.02, 0.6, 29), 0.0]
    is_there = random.random([num_examples, 30]) < frequencies
    return background + is_there * random.uniform(1, 3, size=[num_examples, 30])


@pytest.mark.usefixtures("usual_noise")
@pytest.mark.parametrize("background", [-0.42, -3.0, 20.0])
def test_a_value_that_nearly_all_examples_have_counts_as_absent(background):
    x = strokes(background)
    layer = adapted(x)
    ratio = layer.stddev.numpy()[:29] / x.std(0)[:29]
    frequent = slice(20, 29)  # in more than a fifth
    # As without the background, which is so without any care.
    usual = adapted(strokes()).stddev.numpy()[:29] / x.std(0)[:29]
    for values in (ratio, usual):
        assert np.all((0.7 < values[frequent]) & (values[frequent] < 1.4)), values
    # Rare strokes do not become huge, and the pixel without strokes remains small.
    assert ratio.min() > 0.3
    y = layer(x).numpy()
    assert np.abs(y[:, :29]).max() < 30 and np.abs(y[:, 29]).max() < 0.5


def test_the_value_that_nearly_all_examples_have_is_located(monkeypatch):
    """From values near the noisy mean, whatever the others are."""
    x = np.full([N, 2], 5.0)
    x[: N // 10, 0] = 1e3
    examples = estimator.Examples(x, -1, None)
    found = estimator._Statistics(
        np.array([5.2, 5.2]),
        *np.array([[5.0, 5.0], [0.1, 0.1]]),
        np.zeros(2, bool),
        np.array([True, False]),
        stddev_if_varying=np.array([2.0, 3.0]),
        smallest=0.1,
    )
    located = estimator._located(examples, 1e-6, found)
    np.testing.assert_allclose(located.mean, [5.0, 5.2], rtol=1e-6)
    # Nine tenths are near: the noise of the release, in widths, per near example.
    width = 4 * 0.1 + 5.2 / 16
    np.testing.assert_allclose(located.error, [1e-6 * width * math.sqrt(2) / (0.9 * N), 0.1], 1e-3)
    draws = [estimator._located(examples, 20.0, found).mean[0] for _ in range(400)]
    expected = 20.0 * width * math.sqrt(2) / (0.9 * N)
    # 400 draws: the deviation's own is 3.5%; that of the shares adds a little.
    assert np.std(draws) == pytest.approx(expected, rel=0.25)
    assert located.is_constant.tolist() == [True, False]
    np.testing.assert_array_equal(located.stddev, found.stddev)


@pytest.mark.parametrize(
    "share, noise, is_constant",
    [(0.9, 1e-6, True), (0.7, 1e-6, False), (0.7, 0.08, True), (0.4, 0.2, False)],
)
def test_what_many_examples_but_not_nearly_all_have_is_no_constant(
    monkeypatch, share, noise, is_constant
):
    """Unless the noise of the share explains what is missing; at most a half is never enough."""
    x = np.full([N, 1], 5.0)
    x[round(share * N) :] = 1e3
    examples = estimator.Examples(x, -1, None)
    found = estimator._Statistics(
        *np.array([[5.0], [5.0], [0.1]]),
        np.zeros(1, bool),
        np.ones(1, bool),
        stddev_if_varying=np.array([2.0]),
        smallest=0.1,
    )
    monkeypatch.setattr(estimator, "_release", lambda total, noise: total)
    located = estimator._located(examples, noise * N / math.sqrt(2), found)
    assert located.is_constant[0] == is_constant
    assert located.stddev[0] == (5.0 if is_constant else 2.0)
    if not is_constant:
        assert (located.mean[0], located.error[0]) == (5.0, 0.1)


def test_the_error_of_a_mean_does_not_pass_for_the_size_of_values(monkeypatch):
    """The mean of 5 is taken for 5.01: no value is divided by a hundredth."""
    x = np.full([N, 2], 5.0)
    x[: N // 20, 1] += 2.0
    found = estimator._Statistics(
        np.array([5.01, 5.01]),
        *np.array([[0.5, 0.5], [0.1, 0.1]]),
        np.zeros(2, bool),
        np.zeros(2, bool),
        stddev_if_varying=np.array([0.5, 0.5]),
        smallest=0.05,
    )
    monkeypatch.setattr(estimator, "_release", lambda total, noise: total)
    _, stddev = estimator._second_round(estimator.Examples(x, -1, None), 0.02 * N, found)
    assert np.all(stddev >= 0.1), stddev


def test_a_deviation_that_is_not_clear_is_at_most_the_size_of_the_values():
    units, variance, floor = np.full(4, 2.0), np.array([3.0, 6.0, 0.1, 0.1]), np.r_[0, 0, 0, 5.0]
    # Twice and five times the noise are the limits: 2 and 5.
    deviation = estimator._deviation(units, variance, 1.0, floor)
    np.testing.assert_allclose(deviation, [2.0, 2 * math.sqrt(6), 2.0, 5.0])
    deviation = estimator._deviation(units, variance, 0.1, floor)
    np.testing.assert_allclose(deviation, 2 * np.sqrt([3.0, 6.0, 0.2, 6.25]))


@pytest.mark.usefixtures("usual_noise")
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1e2, 1e4])
def test_the_scale_of_the_inputs_does_not_matter(factor):
    x = np.random.default_rng(1).normal([3.0, 0.0, -5.0], [1.0, 2.0, 0.5], [N, 3])
    usual, rescaled = adapted(x), adapted(factor * x)
    np.testing.assert_allclose(rescaled.stddev / factor, usual.stddev, rtol=0.25)
    distance = np.abs(rescaled.mean / factor - usual.mean) / usual.stddev
    assert np.all(distance < 0.1)


def test_the_noise_of_each_release_has_the_right_scale(monkeypatch):
    sums, released = record(monkeypatch)
    # Twice as many features as elsewhere, or the histograms of magnitudes are too few numbers.
    for _ in range(2):
        adapted(np.tile(columns(), 2), noise_multiplier=3.0)
    assert len(sums) == 14  # twice two rounds of three, and one between them
    noise = [(r - s).ravel() for r, s in zip(released, sums)]
    for number in (0, 1, 4, 5):
        # 1,024 numbers of one release alone fit 2/3 of their scale once in 700 times.
        both = np.concatenate([noise[number], noise[7 + number]])
        assert_gaussian(both, 3.0 * SEVEN)
    # The others are too few numbers for a test of each, and have the same noise.
    monkeypatch.undo()
    many = estimator._release(np.zeros([2, 3000]), 3.0 * SEVEN)
    assert_gaussian(many.ravel(), 3.0 * SEVEN)


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "shape, axis", [([60, 6], -1), ([60, 5, 4], -1), ([60, 3, 5], 1), ([60, 7], None)]
)
@pytest.mark.parametrize("of_users", [False, True])
@pytest.mark.usefixtures("no_deviation_is_clear", "usual_noise")
def test_neighbors_move_each_sum_by_at_most_one(monkeypatch, shape, axis, of_users):
    random = np.random.default_rng(2)
    x = 2 + random.normal(size=shape) * 10.0 ** random.integers(-6, 1, size=shape[-1])
    x[0] *= 10  # an outlier
    x[1] = 0
    ids = np.arange(60) // 3 if of_users else None
    sums, released = record(monkeypatch)
    adapted(x, 0.001, axis, ids)
    assert len(sums) == 7
    largest = np.zeros(7)
    for absent in range(20 if of_users else 60):
        keep = ids != absent if of_users else np.arange(60) != absent
        # Both data sets see the same answers, as differential privacy is about, and both divide by
        # the public size.
        monkeypatch.undo()
        others, _ = record(monkeypatch, released)
        size = 20 if of_users else 60
        examples = estimator.Examples(x[keep], axis, None if ids is None else ids[keep])
        examples.num_units = size
        estimator.released_statistics(examples, 0.001 * SEVEN)
        moved = [np.linalg.norm(a - b) for a, b in zip(sums, others)]
        largest = np.maximum(largest, moved)
    assert np.all(largest <= 1)
    # Nor is the bound loose, which would be noise for nothing.
    assert np.all(largest > 0.5)


def test_a_user_counts_once_however_many_examples_they_have(monkeypatch):
    x = np.random.default_rng(3).normal(size=[400, 3])
    ids = np.r_[np.zeros(300, int), 1 + np.arange(100)]
    sums, _ = record(monkeypatch)
    monkeypatch.setattr(estimator, "_CHUNK", 3 * 150)  # the examples are read in three parts
    layer = adapted(x, 0.01, user_ids=ids)
    examples = estimator.Examples(x, -1, ids)
    assert examples.num_units == 101
    weights = np.concatenate([w for _, w in examples.parts()])
    np.testing.assert_allclose(np.bincount(ids, weights), 1.0)
    assert layer.stddev.shape == (3,)
    assert sums[1].sum() == pytest.approx(101 * math.sqrt(2), rel=1e-3)


def test_several_axes_share_the_statistics_of_a_channel():
    random = np.random.default_rng(4)
    x = random.normal([0.0, 50.0], [1.0, 5.0], [N // 4, 6, 6, 2])
    layer = adapted(x)
    np.testing.assert_allclose(layer.stddev, [1.0, 5.0], rtol=0.35)
    np.testing.assert_allclose(layer.mean, [0.0, 50.0], atol=2.0)
    first = adapted(np.moveaxis(x, -1, 1), axis=1)
    np.testing.assert_allclose(first.stddev, [1.0, 5.0], rtol=0.35)
    assert first(np.moveaxis(x[:3], -1, 1)).shape == (3, 2, 6, 6)
    whole = adapted(x, axis=None)
    assert whole.mean.shape == (1,) and 20 < float(whole.stddev[0]) < 40


def test_values_that_are_not_finite_leave_their_example_out(monkeypatch):
    x = np.random.default_rng(5).normal(size=[N, 3])
    sums, _ = record(monkeypatch)
    adapted(x, 0.01)
    clean = [s.sum() for s in sums[:2]]
    for value in (np.nan, np.inf, 1e200):
        dirty = x.copy()
        dirty[: N // 2, 1] = value
        sums.clear()
        layer = adapted(dirty, 0.01)
        assert [s.sum() / c for s, c in zip(sums[:2], clean)] == pytest.approx([0.5, 0.5], abs=0.02)
        assert np.all(np.isfinite(layer.stddev)) and np.all(np.isfinite(layer.mean))
        near = [
            estimator._sum_within_window(
                estimator._InUnits(estimator.Examples(rows, -1, None), np.zeros(3), np.ones(3)),
                np.ones(3, bool),
            )
            for rows in (dirty, dirty[N // 2 :])
        ]
        np.testing.assert_allclose(*near)


@pytest.mark.usefixtures("usual_noise")
def test_a_feature_without_values_is_not_scaled_up():
    x = np.random.default_rng(7).normal(size=[N, 8])
    x[:, 3] = 0
    layer = adapted(x)
    # In 100 draws of the noise it was between 0.010 and 0.035.
    assert 0.005 < float(layer.stddev[3]) < 2 and abs(float(layer.mean[3])) < 0.5
