"""Mixed precision: norms, sums and noise in float32, and loss scaling undone before clipping."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import KINDS, compiled
from tests.helpers.gaussianity import assert_gaussian
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.api import per_example_gradients
from tf_adaptive_dp.optimizers.loss_scaling import LossScaling

POLICIES = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(params=POLICIES)
def policy(request):
    tf.keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def float16():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_trains_and_is_not_wrapped(name, policy):
    model = compiled(name)
    optimizer = model.optimizer
    catalogue.fit(model)
    assert type(model.optimizer) is type(optimizer) and optimizer.ledger.num_releases == 4
    assert all(v.dtype == tf.float32 for v in model.trainable_variables)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e3])
def test_a_step_is_that_of_float32(policy, clip):
    mixed = compiled(l2_norm_clip=clip, noise_multiplier=0.0)
    start = mixed.get_weights()
    tf.keras.mixed_precision.set_global_policy("float32")
    exact = compiled(l2_norm_clip=clip, noise_multiplier=0.0)
    for model in (mixed, exact):
        catalogue.fit(model, steps_per_epoch=1)
    moved = [
        np.concatenate([np.ravel(a - b) for a, b in zip(m.get_weights(), start)])
        for m in (mixed, exact)
    ]
    assert np.linalg.norm(moved[0] - moved[1]) < 0.03 * np.linalg.norm(moved[1])


def source_of(loss_scale, method="auto", size=1e-5):
    """Gradients of a float16 layer of entries near `size`², which float16 loses below 6e-8."""
    layer = tf.keras.layers.Dense(3, dtype=tf.keras.mixed_precision.Policy("mixed_float16"))
    x, s = tf.fill([4, 5], size), tf.constant([1.0, 2.0, 3.0, 4.0]) * size
    layer.build([None, 5])

    @tf.function
    def norms():
        with tf.GradientTape() as tape:
            loss = tf.cast(tf.reduce_sum(layer(x), axis=1) * tf.cast(s, tf.float16), tf.float32)
        variables = layer.trainable_variables
        source = per_example_gradients(loss, variables, tape, method, loss_scale=loss_scale)
        return source.squared_norms(), source.weighted_sum(tf.ones([4]))[0]

    return [t.numpy() for t in norms()], s.numpy()


@pytest.mark.parametrize("method", ["traced", "materialized"])
def test_gradients_that_vanish_in_float16_survive_with_loss_scaling(method):
    (norms, total), s = source_of(1024.0, method, size=1e-4)
    expected = 15 * (1e-4 * s) ** 2 + 3 * s**2
    np.testing.assert_allclose(norms, expected, rtol=0.02)
    np.testing.assert_allclose(total, np.full([5, 3], 1e-4 * s.sum()), rtol=0.05)
    if method == "materialized":  # traced products are in float32 in any case
        (_, total), _ = source_of(1.0, method, size=1e-4)
        assert np.abs(total - 1e-4 * s.sum()).max() > 0.15 * 1e-4 * s.sum()


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["DPSGD", "AdaDPS adam"])
@pytest.mark.parametrize("gradients", ["traced", "materialized"])
def test_the_scale_is_undone_exactly_before_clipping(name, gradients):
    plain, scaled = (
        compiled(name, gradients=gradients, l2_norm_clip=0.3, loss_scale=scale)
        for scale in (1.0, 4096.0)
    )
    for model in (plain, scaled):
        catalogue.fit(model)
    for a, b in zip(plain.get_weights(), scaled.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_noise_is_not_scaled(float16):
    layer = tf.keras.layers.Dense(20_000, use_bias=False)
    layer.build([None, 1])
    optimizer = dp.DPSGD(2.0, 1.5, learning_rate=1.0)
    before = layer.kernel.numpy()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.cast(tf.reduce_sum(layer(tf.zeros([4, 1])), 1), tf.float32)
        optimizer.minimize(loss, layer.trainable_variables, tape)

    step()
    assert_gaussian(layer.kernel.numpy() - before, 1.5 * 2.0 / 4)


@pytest.mark.slow
def test_an_example_that_overflows_counts_as_zero_and_the_others_stay(float16):
    x, y = catalogue.data(8)
    clean, spoilt = (compiled(noise_multiplier=0.0, expected_batch_size=8) for _ in range(2))
    clean.fit(x, y, sample_weight=np.arange(8) != 3, batch_size=8, verbose=0)
    weights = np.ones(8)
    weights[3] = 1e5  # times 1024 is beyond float16
    spoilt.fit(x, y, sample_weight=weights, batch_size=8, verbose=0)
    for a, b in zip(clean.get_weights(), spoilt.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert spoilt.optimizer.statistics.summary().num_non_finite == 1


def test_variables_of_a_mixed_policy_get_a_scale_by_default(float16):
    for policy, scale in [("mixed_float16", 1024.0), ("float32", 1.0)]:
        layer = tf.keras.layers.Dense(3, dtype=tf.keras.mixed_precision.Policy(policy))
        layer.build([None, 5])

        def scales(layer=layer):
            loss = tf.reduce_sum(layer(tf.ones([2, 5])), axis=1)
            variables = layer.trainable_variables
            return [LossScaling(own).scale_for(loss, variables) for own in (None, 8.0)]

        # They are numbers, and known while tracing.
        assert [float(s) for s in tf.function(scales)()] == [scale, 8.0]
        if GENERATION == 2:  # the variables tell; with Keras 3, only a graph does
            assert scales() == [scale, 8.0]


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 marks the variables of a mixed policy")
def test_without_a_graph_the_global_policy_gives_the_scale(float16):
    layer = tf.keras.layers.Dense(3)
    layer.build([None, 5])
    loss = tf.reduce_sum(layer(tf.ones([2, 5])), axis=1)
    assert LossScaling(None).scale_for(loss, layer.trainable_variables) == 1024.0
    tf.keras.mixed_precision.set_global_policy("float32")
    assert LossScaling(None).scale_for(loss, layer.trainable_variables) == 1.0


def test_an_optimizer_is_a_loss_scale_optimizer_of_its_own_kind():
    optimizer = catalogue.make("DPSGD", loss_scale=8.0)
    assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    if GENERATION == 2:
        loss, gradients = tf.constant([1.0]), [tf.constant([2.0])]
        assert optimizer.get_scaled_loss(loss) is loss
        assert optimizer.get_unscaled_gradients(gradients) == gradients
        assert float(optimizer.loss_scale) == 8.0
        assert optimizer.inner_optimizer is optimizer and not optimizer.dynamic
    assert optimizer.initial_scale == 8.0
    assert dp.DPSGD.from_config(optimizer.get_config()).initial_scale == 8.0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_saved_model_goes_on(float16, suffix, tmp_path):
    model = compiled("DPAdam")
    catalogue.fit(model)
    model.save(tmp_path / f"m{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"m{suffix}")
    assert type(loaded.optimizer) is dp.DPAdam
    assert loaded.optimizer.ledger.segments == model.optimizer.ledger.segments
    catalogue.fit(loaded)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (3.0, ValueError, "`loss_scale` must be a power of two"),
        (0, ValueError, "`loss_scale` must be finite and greater than 0"),
        (2.0**-60, ValueError, r"from 1 to 2\*\*24. Received: loss_scale=8.67"),
        (2.0**64, ValueError, r"from 1 to 2\*\*24"),
        ("dynamic", TypeError, "`loss_scale` must be a number"),
    ],
)
def test_a_loss_scale_that_cannot_be_undone_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        dp.DPSGD(1.0, 1.0, loss_scale=value)


@pytest.mark.in_turns
@pytest.mark.parametrize("scale", [1.0, 2.0**24])
@pytest.mark.parametrize("clip", [1e-9, 1.0])
def test_gradients_are_clipped_with_the_smallest_and_the_largest_scale(scale, clip):
    # Squares of scaled gradients that vanish or overflow would leave gradients unclipped.
    w = tf.Variable(tf.zeros([3]))
    optimizer = dp.DPSGD(clip, 0.0, loss_scale=scale, learning_rate=1.0)
    for size in (1e-6, 1.0, 1e9):
        w.assign(tf.zeros([3]))
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(tf.fill([1, 3], size), w)
        optimizer.minimize(loss, [w], tape)
        assert np.linalg.norm(w) == pytest.approx(min(clip, size * 3**0.5), rel=1e-4)
