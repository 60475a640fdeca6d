"""The clip norm is found in the first batches, and costs what those batches cost."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.mechanism import histograms

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")


def mechanism_of(**kwargs):
    return zoo.make_mechanism(
        **{"l2_norm_clip": "measured", "expected_batch_size": 10, "seed": 3, **kwargs}
    )


def rows_with_norms(norms, size=2):
    rows = np.zeros([len(norms), size], "float32")
    rows[:, 0] = norms
    return rows


def release(mechanism, *rows):
    return [g.numpy() for g in mechanism.release(zoo.Rows(*rows), len(rows[0]))]


def counts_of(mechanism):
    return mechanism.histograms._counts.numpy()


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e9])
def test_it_is_a_tenth_of_the_upper_quartile_whatever_the_units(factor):
    mechanism = mechanism_of()
    norms = factor * 2 ** np.linspace(0, 4, 400)
    for measuring in (True, True, False):
        assert bool(mechanism.histograms.are_open()) == measuring
        release(mechanism, rows_with_norms(norms))
        assert bool(mechanism.is_measuring()) == measuring
    assert mechanism.clip_norm.value == pytest.approx(0.8 * factor, rel=0.05)
    assert float(mechanism.clip_norm.learned()) == mechanism.clip_norm.value


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("sigma", [2.0, 6.0])
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_noise_takes_more_batches_in_pairs_and_hardly_moves_it(sigma, clipping):
    mechanism = mechanism_of(noise_multiplier=sigma, expected_batch_size=50, clipping=clipping)
    rows, taken = rows_with_norms(2 ** np.linspace(1, 3, 50)), 0
    step = tf.function(lambda: mechanism.release(zoo.Rows(rows), 50))
    gradient_noise = float(mechanism.relative_noise()) * 50
    while mechanism.histograms.are_open():
        step()
        taken += 1
    of_noise = int((25 * gradient_noise / 50) ** 2 / 2)
    assert taken == 2 + of_noise + of_noise % 2
    assert 0.3 < mechanism.clip_norm.value < 1.2  # 0.57 without noise
    assert mechanism.ledger.segments == [(sigma, 50.0, taken)]


@pytest.mark.parametrize("num_variables", [1, 3])
@pytest.mark.parametrize("norm", [1e-15, 1.0, 1e15])
def test_one_example_moves_what_is_released_by_at_most_the_clip_norm(num_variables, norm):
    released = []
    for rows in ([norm, 1.0], [1.0]):
        mechanism = mechanism_of()
        mechanism.clip_norm.value = 0.7
        release(mechanism, *[rows_with_norms(rows)] * num_variables)
        released.append(0.7 * counts_of(mechanism))
    moved = released[0] - released[1]
    assert np.linalg.norm(moved) == pytest.approx(0.7, rel=1e-5)
    assert np.linalg.norm(moved) <= 0.7 and np.count_nonzero(moved) == 1


def test_gradients_and_histogram_are_never_in_one_release(monkeypatch):
    mechanism = mechanism_of()
    not_zero, add_to = [], mechanism.generator.add_to

    def noted(parts, *args):
        not_zero.append([bool(np.any(part)) for part in parts])
        return add_to(parts, *args)

    monkeypatch.setattr(mechanism.generator, "add_to", noted)
    for _ in range(4):
        release(mechanism, rows_with_norms([0.5, 0.25]))
    assert not_zero == [[False, True]] * 2 + [[True, False]] * 2


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_counts_and_gradients_have_the_noise_of_the_ledger(sigma):
    mechanism = mechanism_of(noise_multiplier=sigma)
    nothing = np.zeros([4, 2], "float32")
    before, noise = 0.0, []
    for _ in range(32):
        release(mechanism, nothing)
        noise.append(counts_of(mechanism) - before)
        before = counts_of(mechanism)
    assert_gaussian(np.concatenate(noise), sigma)
    mechanism.histograms._complete.assign(True)
    mechanism.clip_norm.value = 2.0
    (released,) = release(mechanism, np.zeros([4, 20_000], "float32"))
    assert_gaussian(released, sigma * 2.0 / 10)
    assert float(mechanism.noise_stddev()) == pytest.approx(sigma * 2.0 / 10)
    assert mechanism.ledger.segments == [(sigma, 10.0, 33)]


@pytest.mark.parametrize("sigma, batches", [(0.64, 2), (16.0, 22), (32.0, 80)])
def test_noise_rarely_moves_it_by_more_than_two_octaves(sigma, batches):
    rng, size, times = np.random.default_rng(0), 64, 2_000
    octaves = 1.5 * rng.standard_normal([times, batches * size])
    counts = np.stack([np.bincount(np.int64(o + 40), minlength=80) for o in octaves])
    noise = sigma * np.sqrt(batches)
    noisy = counts + noise * rng.standard_normal(counts.shape)
    form = histograms._Form.of_whole_gradients()._replace(num_norms=times)
    read = form.read(tf.constant(noisy), tf.constant(noise, tf.float64))
    norms = read.numpy()[:times]
    assert np.mean(norms == 0) < 0.03  # these go on measuring
    off = np.log2(norms[norms > 0]) - 1.5 * 0.6745
    assert abs(np.median(off)) < 0.5 and np.mean(np.abs(off) > 2) < 0.002


def test_without_gradients_it_stays_unknown():
    mechanism = mechanism_of()
    for rows in (np.zeros([4, 2]), np.full([4, 2], np.nan), np.full([4, 2], np.inf)):
        release(mechanism, np.float32(rows))
    assert bool(mechanism.is_measuring()) and mechanism.clip_norm.value == 1.0
    release(mechanism, rows_with_norms(np.full(20, 2.0)))
    # It is known after the first pair of batches with gradients.
    assert not bool(mechanism.histograms.are_open())
    assert 0.2 < mechanism.clip_norm.value < 0.4  # bins are that wide


def test_a_number_that_is_set_later_stays():
    mechanism = mechanism_of()
    for i in range(4):
        release(mechanism, rows_with_norms([0.5, 0.25]))
        if i == 2:
            mechanism.clip_norm.value = 3.0
    assert mechanism.clip_norm.value == 3.0


def test_parts_of_a_batch_are_one_release():
    mechanism = mechanism_of(gradient_accumulation_steps=2)
    for i in range(8):
        (found,) = release(mechanism, rows_with_norms([4.0, 4.0]))
        assert np.any(found) == (i in (5, 7))
    assert mechanism.ledger.num_releases == 4


def test_users_and_microbatches_count_as_one_gradient_each():
    for kwargs in ({"examples_per_user": 2}, {"num_microbatches": 5}):
        mechanism = mechanism_of(**kwargs)
        mechanism.release(zoo.Rows(rows_with_norms(np.full(5, 6.0))), 10)  # each of two rows
        assert counts_of(mechanism).sum() == pytest.approx(5, rel=1e-5)


def test_an_adaptive_one_starts_from_it():
    mechanism = mechanism_of(clipping="adaptive")
    for _ in range(3):
        release(mechanism, rows_with_norms(np.full(10, 1e6)))
    moved = mechanism.clip_norm.value / float(mechanism.clip_norm.learned())
    assert 0.5e5 < float(mechanism.clip_norm.learned()) < 2e5
    assert 1.0 < moved < 1.2


def test_it_is_refused_with_correlated_noise_and_misspelled():
    with pytest.raises(ValueError, match="measured clip norms.*Received: l2_norm_clip, noise="):
        mechanism_of(noise=BandedNoise(4))
    with pytest.raises(TypeError, match="must be a number. Received: l2_norm_clip='auto'"):
        mechanism_of(l2_norm_clip="auto")
    delayed = dp.side_information.DelayedPreconditioner()
    with pytest.raises(ValueError, match="will rescale later.*Received: l2_norm_clip='measured'"):
        dp.ADADP("measured", 1.0, side_information=delayed)


W = [0.3, -0.2]


def minimized(name, factor, num_steps, **kwargs):
    """An optimizer and the weights of a small regression after some steps, in some unit."""
    optimizer = catalogue.make(name, l2_norm_clip="measured", expected_batch_size=20, **kwargs)
    w = tf.Variable(W)
    x = np.random.default_rng(1).normal(size=[20, 2]).astype("float32")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = factor * tf.square(tf.linalg.matvec(x, w) - 1.0)
        optimizer.minimize(loss, [w], tape)

    path = []
    for _ in range(num_steps):
        step()
        path.append(w.numpy())
    return optimizer, np.array(path)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("name", ["ADADP", "DPAdam", "DPSGD", "DPAdamWOSM"])
def test_batches_that_measure_move_no_weights(name):
    optimizer, path = minimized(name, 1.0, 4, noise_multiplier=0.2)
    # (25·0.2/20)² / 2 = 0.03, so 2 batches.
    np.testing.assert_array_equal(path[:2], np.float32([W, W]))
    assert np.all(np.diff(path[1:], axis=0) != 0)
    assert optimizer.ledger.segments == [(0.2, 20.0, 4)]
    assert optimizer.l2_norm_clip != 1.0


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["ADADP", "UntunedSGD"])
def test_nor_does_a_penalty_move_them_and_fit_says_so(name):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [tf.keras.Input([2]), tf.keras.layers.Dense(1, kernel_regularizer="l2")]
    )
    arguments = {"l2_norm_clip": "measured"} if name == "ADADP" else {}
    optimizer = getattr(dp, name)(noise_multiplier=0.2, expected_batch_size=20, **arguments)
    model.compile(optimizer, loss="mse")
    before, x = model.get_weights(), np.ones([40, 2], "float32")
    needed = {"ADADP": 2, "UntunedSGD": 5}[name]
    with pytest.warns(UserWarning, match=f"No weights have changed: all .*need {needed}, and"):
        model.fit(x, x[:, 0], batch_size=20, verbose=0)
    assert optimizer.ledger.num_releases == 2
    for then, now in zip(before, model.get_weights()):
        np.testing.assert_array_equal(then, now)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "No weights have changed")
        model.fit(x, x[:, 0], batch_size=20, epochs=2, verbose=0)
    assert np.all(model.get_weights()[0] != before[0])


def test_weight_decay_and_the_learning_rate_wait_for_it():
    optimizer, path = minimized("ADADP", 1.0, 2, weight_decay=0.1, noise_multiplier=0.2)
    np.testing.assert_array_equal(path, np.float32([W, W]))
    assert float(optimizer.learning_rate) == pytest.approx(0.1) and optimizer.acceptance == 0


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_adadp_takes_the_same_steps_whatever_the_unit_of_the_loss(factor):
    of_one, expected = minimized("ADADP", 1.0, 20, noise_multiplier=0.0)
    other, path = minimized("ADADP", factor, 20, noise_multiplier=0.0)
    np.testing.assert_allclose(path, expected, rtol=1e-4)
    assert other.l2_norm_clip == pytest.approx(of_one.l2_norm_clip * factor, rel=1e-6)
    assert np.ptp(path, axis=0).min() > 0.05


def test_it_is_restored_with_the_optimizer(tmp_path):
    optimizer, _ = minimized("ADADP", 100.0, 3, noise_multiplier=0.2)
    saved = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
    config = optimizer.get_config()
    assert config["l2_norm_clip"] == "measured"
    other = type(optimizer).from_config(config)
    assert other.l2_norm_clip == 1.0
    other.build([tf.Variable(W)])
    tf.train.Checkpoint(optimizer=other).restore(saved).assert_existing_objects_matched()
    assert other.l2_norm_clip == optimizer.l2_norm_clip != 1.0
    assert not bool(other._mechanism.histograms.are_open())
