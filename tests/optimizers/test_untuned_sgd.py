"""UntunedSGD measures its units, and training does not depend on them."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.update_rules import unit_steps

N, SIZE = 600, 60
RNG = np.random.default_rng(5)
X = RNG.normal(size=[N, 12]).astype("float32")
Y = (X @ RNG.normal(size=12) + 0.3 * RNG.normal(size=N) > 0).astype("int64")


def trained(x, epochs=20, sigma=0.5, loss_factor=1.0, **kwargs):
    tf.keras.utils.set_random_seed(3)
    model = tf.keras.Sequential(
        [tf.keras.Input([12]), tf.keras.layers.Dense(2, kernel_initializer="zeros")]
    )
    optimizer = dp.UntunedSGD(noise_multiplier=sigma, seed=7, **kwargs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, loss_weights=loss_factor, metrics=["accuracy"])
    fit(model, x, epochs)
    return model


def fit(model, x, epochs):
    model.fit(x, Y[: len(x)], batch_size=SIZE, epochs=epochs, verbose=0, shuffle=False)


def accuracy(model, x):
    predicted = np.argmax(model.predict(x, verbose=0, batch_size=N), axis=1)
    return float(np.mean(predicted == Y))


@pytest.mark.slow
def test_it_learns():
    assert accuracy(trained(X), X) > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1e2, 1e4])
def test_the_unit_of_the_inputs_does_not_matter(factor):
    assert accuracy(trained(factor * X), factor * X) == pytest.approx(
        accuracy(trained(X), X), abs=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor, lost", [(1e-3, 0), (1e3, 0.024)])
def test_a_larger_unit_of_the_loss_costs_little(factor, lost):
    # The spread of the first losses, by which a larger unit is recognized, makes steps too small.
    assert accuracy(trained(X, loss_factor=factor), X) == pytest.approx(
        accuracy(trained(X), X) - lost, abs=0.01
    )


@pytest.mark.slow_on(2)
def test_nothing_moves_before_the_sizes_are_known_and_every_draw_is_counted():
    # (50·0.12/60)²·3/2 = 0.015, so 5 batches.
    model = trained(X, epochs=1, sigma=0.12)
    optimizer = model.optimizer
    assert int(optimizer._num_steps) == 5 and int(optimizer.iterations) == 10
    assert optimizer.ledger.segments == [(0.12, SIZE, 10)]
    model = trained(X[: 5 * SIZE], epochs=1, sigma=0.12)
    assert not model.get_weights()[0].any() and float(model.optimizer.learning_rate) == 0
    assert model.optimizer.gradient_norms is not None
    assert model.optimizer.ledger.segments == [(0.12, SIZE, 5)]


def test_a_step_follows_the_formulas():
    kernel, bias = tf.Variable(tf.ones([12, 1])), tf.Variable(tf.zeros([1]))
    optimizer = dp.UntunedSGD(noise_multiplier=0.0, kappa=0.2)
    x, y = tf.constant(X[:SIZE]), tf.constant(Y[:SIZE], tf.float32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            logits = tf.reshape(x @ kernel + bias, [-1])
            loss = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
        pairs = optimizer.compute_gradients(loss, [kernel, bias], tape)
        optimizer.apply_gradients(pairs)
        return [gradient for gradient, _ in pairs]

    for _ in range(5):
        step()
    sizes = optimizer._mechanism.histograms.sizes()
    scales = unit_steps.scales(sizes.norms, [2, 1]).numpy()
    residuals = tf.sigmoid(tf.reshape(x @ kernel + bias, [-1])) - y
    rows = scales[0] * x * residuals[:, tf.newaxis], scales[1] * residuals[:, tf.newaxis]
    norms = np.linalg.norm(np.concatenate(rows, axis=1), axis=1)
    assert np.quantile(norms, 0.75) == pytest.approx(10, rel=0.5)
    expected = [np.sum(r / np.maximum(norms, 1)[:, np.newaxis], axis=0) / SIZE for r in rows]
    before = [v.numpy() for v in (kernel, bias)]
    gradients = step()
    for g, e in zip(gradients, expected):
        np.testing.assert_allclose(np.ravel(g), e, rtol=1e-3, atol=1e-6)
    rate = float(unit_steps.unit_of_loss(sizes.loss, sizes.spread, 1.4))  # without noise
    assert float(optimizer.learning_rate) == pytest.approx(rate)
    for v, b, g, a in zip((kernel, bias), before, gradients, scales):
        np.testing.assert_allclose(v, b - rate * a * g.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_goes_on_from_where_it_was(tmp_path):
    whole = trained(X, epochs=6)
    half = trained(X, epochs=3)
    half.save(tmp_path / "half.keras")
    resumed = tf.keras.models.load_model(tmp_path / "half.keras")
    fit(resumed, X, 3)
    assert resumed.optimizer.gradient_norms == whole.optimizer.gradient_norms
    assert resumed.optimizer.ledger.segments == whole.optimizer.ledger.segments
    for a, b in zip(resumed.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_its_configuration_makes_it_again():
    optimizer = dp.UntunedSGD(noise_multiplier=0.5, kappa=0.2, expected_batch_size=60)
    again = dp.UntunedSGD.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert (again.kappa, again.noise_multiplier, again.l2_norm_clip) == (0.2, 0.5, 1.0)
    assert dp.UntunedSGD.from_config(dp.UntunedSGD(noise_multiplier=0.5).get_config()).kappa is None


@pytest.mark.parametrize(
    "argument", [{"l2_norm_clip": 1.0}, {"learning_rate": 0.1}, {"clipping": "flat"}]
)
def test_what_it_finds_by_itself_is_refused(argument):
    with pytest.raises(TypeError, match="finds .* by itself, or has none. Received: "):
        dp.UntunedSGD(noise_multiplier=0.5, **argument)
    with pytest.raises(ValueError, match="`kappa` must be"):
        dp.UntunedSGD(noise_multiplier=0.5, kappa=0)


@pytest.mark.slow
def test_a_plan_trains_with_it(tmp_path):
    plan = dp.PrivacyPlan(epsilon=8.0, delta=1e-4, num_examples=N, batch_size=SIZE, epochs=20)
    model = tf.keras.Sequential([tf.keras.Input([12]), tf.keras.layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.UntunedSGD), loss=loss)
    plan.fit(model, X, Y, directory=tmp_path, verbose=0)
    assert accuracy(model, X) > 0.8
