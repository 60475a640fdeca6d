"""The unit is a user: what is released equals a loop over users, and one user moves it by C."""

import dataclasses
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo
from tests.helpers.sampled import KEY
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.gradients.api import per_example_gradients, user_sums

layers = keras.layers
NUM_USERS, K, L = 7, 3, 4.0
IDS = np.repeat(np.arange(NUM_USERS), [1, 2, 3, 4, 5, 3, 2])
N = len(IDS)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
Y = np.random.default_rng(1).integers(3, size=N)


@dataclasses.dataclass
class Kind:
    """A model with data."""

    x: np.ndarray
    layers: Callable[[], list[Any]]


IMAGES = zoo.floats(N, 6, 6, 2)
WORDS = np.random.default_rng(2).integers(5, size=[N, 4])
KINDS = {
    "dense": Kind(zoo.floats(N, 4), lambda: [layers.Dense(5, "tanh")]),
    "convolution": Kind(IMAGES, lambda: [layers.Conv2D(3, 3, activation="tanh"), layers.Flatten()]),
    "embedding": Kind(WORDS, lambda: [layers.Embedding(5, 3), layers.GlobalAveragePooling1D()]),
    "LSTM": Kind(zoo.floats(N, 5, 2), lambda: [layers.LSTM(3)]),
}


def model_of(kind, optimizer, **kwargs):
    keras.utils.set_random_seed(3)
    x = KINDS[kind].x
    model = keras.Sequential(
        [keras.Input(x.shape[1:], dtype=x.dtype.name), *KINDS[kind].layers(), layers.Dense(3)]
    )
    model.compile(optimizer, CROSS_ENTROPY(from_logits=True), **kwargs)
    return model


def batches_of(kind, user_reduction="mean", parts=1, users=None, most=20):
    chosen = slice(None) if users is None else np.isin(IDS, users)
    sampling = dp.PoissonSampling(1.0, most, 1, None, K, user_reduction)
    return dp.poisson_batches(
        *((KINDS[kind].x[chosen], Y[chosen]), sampling),
        **{"user_ids": IDS[chosen], "key": KEY, "gradient_accumulation_steps": parts},
    )


def gradients_of_users(model, batches, user_reduction):
    """The gradient of each user, from a batch that holds nothing but that user's records."""
    loss, found = CROSS_ENTROPY(from_logits=True, reduction="none"), []
    variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
    for x, y, weights in batches.as_numpy_iterator():
        for place in range(0, len(y), K):
            rows = place + np.flatnonzero(weights[place : place + K])
            if not len(rows):
                continue
            with tf.GradientTape() as tape:
                losses = loss(y[rows], model(x[rows], training=True))
                reduce = tf.reduce_mean if user_reduction == "mean" else tf.reduce_sum
                loss_of_user = reduce(losses)
            gradients = tape.gradient(loss_of_user, variables)
            found.append([tf.convert_to_tensor(g).numpy().astype("float64") for g in gradients])
    return found


def norm(gradients):
    return np.sqrt(sum((g**2).sum() for g in gradients))


def flat(gradients, clip):
    return [min(1, clip / norm(gradients)) * g for g in gradients]


def automatic(gradients, clip):
    return [clip / (norm(gradients) + 0.01) * g for g in gradients]


def per_layer(gradients, clip):
    """Of layers with a kernel and a bias each."""
    pairs = list(zip(gradients[::2], gradients[1::2]))
    return [g for pair in pairs for g in flat(pair, clip / np.sqrt(len(pairs)))]


def trained(model, batches, parts=1):
    """Minus the change of the weights in one step, for a learning rate of 1."""
    before = model.get_weights()
    model.fit(batches, steps_per_epoch=parts, shuffle=False, verbose=0)
    return [a - b for a, b in zip(before, model.get_weights())]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "kind, clipping, user_reduction, parts, clip",
    [
        ("dense", flat, "mean", 1, 1e3),  # a mean that is clipped may equal a sum that is
        ("embedding", flat, "sum", 1, 0.5),
        ("dense", per_layer, "mean", 2, 0.3),
        ("convolution", flat, "mean", 1, 1.0),
        ("LSTM", flat, "mean", 1, 0.3),
        ("convolution", automatic, "mean", 2, 1.0),
        ("LSTM", flat, "sum", 2, 0.3),
        ("dense", flat, "mean", 1, 0.5),
        ("convolution", per_layer, "sum", 1, 0.3),
    ],
)
def test_a_step_is_the_sum_of_the_clipped_gradients_of_users(
    kind, clipping, user_reduction, parts, clip
):
    optimizer = dp.DPSGD(
        *(clip, 0.0),
        expected_batch_size=L,
        learning_rate=1.0,
        clipping=clipping.__name__,
        gradients="traced",
        gradient_accumulation_steps=parts,
        examples_per_user=K,
    )
    model = model_of(kind, optimizer)
    # Only the first iterator of a data set has the draws of the key.
    alike, batches = (batches_of(kind, user_reduction, parts) for _ in range(2))
    each = gradients_of_users(model, alike, user_reduction)
    assert len(each) == NUM_USERS
    if clip < 1:
        assert sum(norm(g) > clip for g in each) > 2  # so that clipping matters
    expected = [sum(column) / L for column in zip(*(clipping(g, clip) for g in each))]
    for actual, of_loop in zip(trained(model, batches, parts), expected):
        np.testing.assert_allclose(actual, of_loop, rtol=1e-4, atol=2e-6)
    assert optimizer.ledger.segments == [(0.0, L, 1)]
    assert optimizer.ledger.examples_per_user == K
    assert optimizer.rows_per_batch == -(-20 // parts) * K


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("user_reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["dense", "LSTM"])
def test_removing_a_user_moves_the_sum_by_c_at_most(kind, user_reduction):
    # What is taken of users with more than K records is random, so only one of them takes part.
    clip, others, pair = 0.1, [u for u in range(NUM_USERS) if u not in (3, 4)], []
    for users in (others, [*others, 4]):
        optimizer = dp.DPSGD(
            *(clip, 0.0), expected_batch_size=1.0, learning_rate=1.0, examples_per_user=K
        )
        model, batches = model_of(kind, optimizer), batches_of(kind, user_reduction, users=users)
        assert min(map(norm, gradients_of_users(model, batches, user_reduction))) > clip
        pair.append(trained(model, batches))
    moved = norm([a - b for a, b in zip(*pair)])
    assert moved == pytest.approx(clip, rel=1e-4)


def step_of(optimizer, x, w, weights, jit=False):
    @tf.function(jit_compile=jit)
    def step():
        with tf.GradientTape() as tape:
            losses = tf.linalg.matvec(x, w) * weights
        return optimizer.compute_gradients(losses, [w], tape)[0][0]

    return step()


@pytest.mark.parametrize("jit", [False, True])
def test_empty_places_and_nan_users_contribute_exactly_nothing(jit):
    optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1.0, examples_per_user=2)
    w = tf.Variable([1.0, 1.0])
    x = tf.constant([[3.0, 4.0], [3.0, 4.0], [9.0, 9.0], [9.0, 9.0], [np.nan, 1.0], [0.3, 0.0]])
    weights = tf.constant([0.5, 0.5, 0.0, -0.0, 1.0, 1.0])
    released = step_of(optimizer, x, w, weights, jit)
    np.testing.assert_allclose(released, [0.6, 0.8], rtol=1e-6)
    assert optimizer.statistics.summary().num_examples == 1
    assert optimizer.statistics.summary().num_non_finite == 1


def test_records_that_cancel_make_no_gradient():
    optimizer = dp.DPSGD(1.0, 0.0, expected_batch_size=1.0, examples_per_user=2)
    x = tf.constant([[3.0, 4.0], [-3.0, -4.0], [0.3, 0.0], [0.0, 0.4]])
    released = step_of(optimizer, x, tf.Variable([1.0, 1.0]), tf.ones([4]))
    np.testing.assert_allclose(released, [0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize("sigma", [1.5])
def test_noise_is_that_of_the_sensitivity_c_and_the_ledger_says_so(sigma):
    clip, size = 2.0, 20_000
    optimizer = dp.DPSGD(clip, sigma, expected_batch_size=4.0, examples_per_user=3, seed=1)
    released = step_of(optimizer, tf.zeros([6, size]), tf.Variable(tf.zeros(size)), tf.ones([6]))
    observed, expected = np.std(released), sigma * clip / 4.0
    assert abs(observed / expected - 1) < 0.03
    for wrong in (2 / 3, 3 / 2):
        assert abs(observed / (wrong * expected) - 1) > 0.2
    assert optimizer.ledger.segments == [(sigma, 4.0, 1)]  # and not half, as for microbatches
    assert optimizer.next_release() == (sigma, 4.0)


N_DRAWN = 200


def drawn(steps=3, k=2, **kwargs):
    random = np.random.default_rng(0)
    x, y = random.normal(size=[2 * N_DRAWN, 2]).astype(np.float32), random.normal(size=2 * N_DRAWN)
    sampling = dp.PoissonSampling(0.2, 80, 1_000, examples_per_user=k)
    ids = np.arange(2 * N_DRAWN) // 2
    return dp.poisson_batches((x, y), sampling, user_ids=ids, **kwargs).take(steps)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("k", [3, 2])
def test_padding_that_contributes_is_refused_or_counted(jit, k):
    optimizer = dp.DPSGD(1.0, 4.0, expected_batch_size=40.0, examples_per_user=k)
    kernel = tf.Variable([0.5, -0.3])

    def steps(loss, batches):
        @tf.function(jit_compile=jit)
        def step(x, y, w):
            with tf.GradientTape() as tape:
                losses = loss((tf.linalg.matvec(x, kernel) + kernel[0] - tf.cast(y, tf.float32)), w)
            optimizer.compute_gradients(losses, [kernel], tape)

        for batch in batches:
            step(*batch)

    steps(lambda error, w: error**2 * w, drawn(k=k))
    assert optimizer.ledger.segments == [(4.0, 40.0, 3)]
    (known,) = optimizer.ledger.checks
    assert (known.checked, known.repeated) == (3, 0)
    if jit:
        steps(lambda error, w: error**2, drawn(k=k))
        assert optimizer.ledger.segments[-1] == (2.0, 40.0, 3)
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
        steps(lambda error, w: error**2, drawn(k=k))
    assert optimizer.ledger.num_releases == 3


class Penalized(layers.Layer):
    """Adds a term that Keras does not weight."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.reduce_sum(x**2, axis=-1)))
        return x


@pytest.mark.slow
def test_terms_without_weights_are_added_up_and_announced():
    optimizer = dp.DPSGD(1.0, 4.0, expected_batch_size=40.0, examples_per_user=3, learning_rate=0.1)
    inputs = keras.Input([2])
    model = keras.Model(inputs, layers.Dense(1)(Penalized()(layers.Dense(2)(inputs))))
    model.compile(optimizer, "mse")
    with pytest.warns(UserWarning, match="Terms of the loss have no sample weights"):
        model.fit(drawn(2, k=3), steps_per_epoch=2, shuffle=False, verbose=0)
    # Empty places contribute nothing by these terms either: the step would have failed.
    assert optimizer.ledger.segments == [(4.0, 40.0, 2)]


@pytest.mark.slow
def test_a_repeated_draw_of_users_is_noticed():
    optimizer = dp.DPSGD(1.0, 4.0, expected_batch_size=40.0, examples_per_user=2, learning_rate=0.1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([2]), layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(drawn(2).cache().repeat(2), steps_per_epoch=4, shuffle=False, verbose=0)
    (known,) = optimizer.ledger.checks
    assert (known.checked, known.repeated, known.nearest) == (4, 2, 2)


def test_the_unit_survives_saving():
    optimizer = dp.DPAdam(1.0, 2.0, expected_batch_size=4.0, examples_per_user=5)
    again = dp.DPAdam.from_config(optimizer.get_config())
    assert again.examples_per_user == again.ledger.examples_per_user == 5
    assert dp.DPAdam(1.0, 2.0).ledger.examples_per_user is None


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.OPTIMIZERS)
def test_every_optimizer_takes_users(name):
    optimizer = catalogue.make(name, expected_batch_size=4.0, examples_per_user=K)
    model = catalogue.mlp()
    model.compile(optimizer, CROSS_ENTROPY(from_logits=True))
    x, y = catalogue.data(N)
    sampling = dp.PoissonSampling(1.0, 20, 2, examples_per_user=K)
    batches = dp.poisson_batches((x, y), sampling, user_ids=IDS)
    model.fit(batches, shuffle=False, callbacks=catalogue.callbacks_of(optimizer), verbose=0)
    assert optimizer.ledger.num_releases == 2 and optimizer.ledger.examples_per_user == K


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="`examples_per_user` must be at least 1.*=0"):
        dp.DPSGD(1.0, 1.0, examples_per_user=0)
    with pytest.raises(TypeError, match="`examples_per_user` must be a whole number"):
        dp.DPSGD(1.0, 1.0, examples_per_user=2.0)
    with pytest.raises(ValueError, match="`num_microbatches` cannot be combined"):
        dp.DPSGD(1.0, 1.0, 2, examples_per_user=2)
    with pytest.raises(ValueError, match="`examples_per_user` must divide the batch.*4 .*6 rows"):
        user_sums(tf.zeros([6]), 4)
    w = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = w * tf.ones([4])
    with pytest.raises(ValueError, match="must divide the batch"):
        per_example_gradients(loss, [w], tape, examples_per_user=3)
