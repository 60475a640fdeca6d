"""The clip norm follows a quantile of the norms, and both releases together cost σ."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, tf_privacy, zoo
from tests.helpers.gaussianity import assert_gaussian

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
SIZE = 20_000


def mechanism_of(count_noise=None, learning_rate=0.2, target_quantile=0.5, **kwargs):
    clipping = dp.AdaptiveClipping(target_quantile, learning_rate, count_noise)
    return zoo.make_mechanism(clipping=clipping, **{"expected_batch_size": 10, **kwargs})


def rows_with_norms(norms, size=4):
    rows = np.zeros([len(norms), size], "float32")
    rows[:, 0] = norms
    return rows


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "quantile, batch, num_microbatches",
    [(0.1, 99, None), (0.5, 99, None), (0.9, 99, None), (0.1, 396, 99), (0.9, 396, 99)],
)
def test_the_clip_settles_at_the_quantile(quantile, batch, num_microbatches):
    mechanism = mechanism_of(
        target_quantile=quantile,
        l2_norm_clip=100.0,
        expected_batch_size=batch,
        num_microbatches=num_microbatches,
    )
    rows = tf.constant(rows_with_norms(np.arange(1.0, 100.0)))
    step = tf.function(lambda: mechanism.release(zoo.Rows(rows), batch))
    for _ in range(200):
        step()
    assert mechanism.clip_norm.value == pytest.approx(100 * quantile, rel=0.1)


def test_the_clip_moves_as_that_of_tf_privacy():
    query = tf_privacy().QuantileEstimatorQuery(
        initial_estimate=2.0,
        target_quantile=0.3,
        learning_rate=0.7,
        below_estimate_stddev=0.0,
        expected_num_records=10.0,
        geometric_update=True,
    )
    state = query.initial_global_state()
    mechanism = mechanism_of(None, 0.7, 0.3, l2_norm_clip=2.0, expected_batch_size=10)
    generator = np.random.default_rng(0)
    for _ in range(10):
        norms = np.exp(generator.normal(size=generator.integers(5, 15))).astype("float32")
        sample = query.initial_sample_state()
        parameters = query.derive_sample_params(state)
        for norm in norms:
            sample = query.accumulate_record(parameters, sample, tf.constant(norm))
        estimate, state, _ = query.get_noised_result(sample, state)
        mechanism.release(zoo.Rows(rows_with_norms(norms)), len(norms))
        assert mechanism.clip_norm.value == pytest.approx(float(estimate), rel=1e-5)


@pytest.mark.parametrize("sigma, count_noise", [(1.0, 0.6), (0.5, 2.0), (3.0, None)])
def test_the_noise_of_gradients_and_count_make_up_what_the_ledger_says(sigma, count_noise):
    mechanism = mechanism_of(count_noise, l2_norm_clip=2.0, noise_multiplier=sigma)
    count_noise = count_noise or max(10 / 20, sigma)
    (released,) = mechanism.release(zoo.Rows(np.zeros([4, SIZE])), 4)
    gradient_noise = (sigma**-2 - (2 * count_noise) ** -2) ** -0.5
    assert_gaussian(released, gradient_noise * 2.0 / 10)
    assert float(mechanism.noise_stddev()) == pytest.approx(gradient_noise * 2.0 / 10)
    assert mechanism.ledger.segments == [(sigma, 10.0, 1)]


def test_the_count_has_the_noise_that_was_asked_for():
    mechanism = mechanism_of(1.7, 0.01, noise_multiplier=1.0, expected_batch_size=50)
    rows = tf.constant(rows_with_norms([0.5] * 30 + [2.0] * 10))  # within C while C is near 1

    @tf.function
    def counts():
        found = tf.TensorArray(tf.float64, 3_000, element_shape=[])
        for i in tf.range(3_000):
            mechanism.clip_norm._clip.assign(1.0)
            mechanism.release(zoo.Rows(rows), 40)
            share = 0.5 - tf.math.log(mechanism.clip_norm._clip.read_value()) / 0.01
            found = found.write(i, (share - 0.5) * 50)
        return found.stack()

    assert_gaussian(counts().numpy() - (15.0 - 5.0), 1.7)


def test_padding_counts_neither_as_small_nor_as_large():
    clips = []
    for padding in (0, 5):
        mechanism = mechanism_of(l2_norm_clip=1.0)
        rows = rows_with_norms([0.5, 0.5, 3.0, 4.0] + [0.0, np.nan] * padding)
        mechanism.release(zoo.Rows(rows), len(rows))
        clips.append(mechanism.clip_norm.value)
    assert clips[0] == clips[1] == pytest.approx(1.0)  # two within, two not


@pytest.mark.parametrize("count, bound", [(1e6, 1e-12), (-1e6, 1e12)])
def test_the_clip_stays_where_float32_has_noise_for_it(count, bound):
    clipping = dp.AdaptiveClipping(learning_rate=1.0)
    assert float(clipping.next_clip(tf.constant(1.0), tf.constant(count), 10.0)) == bound


@pytest.mark.parametrize("change", [0.5, 3.0, np.nan])
def test_one_example_changes_the_count_by_one_half(change):
    clipping = dp.AdaptiveClipping()
    norms = tf.constant([0.5, 3.0, change]) ** 2
    without, with_it = (
        float(clipping.count(norms, tf.constant([True, True, there]), tf.constant(1.0)))
        for there in (False, True)
    )
    assert abs(with_it - without) == 0.5


def test_the_clip_is_saved_and_restored(tmp_path):
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", clipping="adaptive", l2_norm_clip=0.1)
    model.compile(optimizer, loss=catalogue.loss())
    catalogue.fit(model)
    assert optimizer.l2_norm_clip != 0.1
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras").optimizer
    assert loaded.l2_norm_clip == optimizer.l2_norm_clip
    assert loaded._mechanism.clipping == optimizer._mechanism.clipping
    fresh = catalogue.make("DPSGD", clipping="adaptive", l2_norm_clip=7.0)
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "c"))
    tf.train.Checkpoint(optimizer=fresh).restore(path).expect_partial()
    assert fresh.l2_norm_clip == optimizer.l2_norm_clip


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: dp.AdaptiveClipping(target_quantile=1.5), ValueError, "must be at most 1"),
        (lambda: dp.AdaptiveClipping(target_quantile=-1), ValueError, "at least 0"),
        (lambda: dp.AdaptiveClipping(learning_rate=0), ValueError, "greater than 0"),
        (lambda: dp.AdaptiveClipping(count_noise_multiplier="1"), TypeError, "must be a number"),
        (lambda: dp.AdaptiveClipping(count_noise_multiplier=0), ValueError, "greater than 0"),
        (
            lambda: mechanism_of(0.5, noise_multiplier=1.0),
            ValueError,
            "`count_noise_multiplier` must be above half of `noise_multiplier`",
        ),
    ],
)
def test_values_out_of_range_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_noise_that_the_count_cannot_bear_cannot_be_set_later():
    mechanism = mechanism_of(0.6, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="must be above half"):
        mechanism.noise_multiplier = 1.2
    assert mechanism.noise_multiplier == 1.0
