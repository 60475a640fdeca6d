"""The probe finds mixing by itself, on whatever path, and raises no false alarm."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import mixing
from tests.helpers.zoo import floats
from tf_adaptive_dp.validation.probe import probe
from tf_adaptive_dp.validation.repeatable import unchanged

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
BATCH = (floats(6, 5), np.arange(6) % 3)


def probed(*hidden, seed=2, batch=BATCH, loss=LOSS, expected_batch_size=None):
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(4), *hidden, layers.Dense(3)])
    batch = tuple(tf.convert_to_tensor(part) for part in batch)

    def losses(batch, training):
        return loss(batch[1], model(batch[0], training=training))

    with unchanged(model):
        return probe(model, losses, batch, expected_batch_size)


def outside(function):
    """A function of arrays, run outside of TensorFlow's graph."""
    return lambda x: tf.ensure_shape(tf.numpy_function(function, [x], x.dtype), x.shape)


MIXING = {
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "mean": lambda x: x - tf.reduce_mean(x, 0),
    "a little of the mean": lambda x: x - 0.01 * tf.reduce_mean(x, 0),
    "numpy_function": outside(lambda x: x - x.mean(0)),
    "py_function": lambda x: tf.ensure_shape(
        tf.py_function(lambda x: x / tf.norm(x), [x], tf.float32), x.shape
    ),
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "cumsum from behind": lambda x: tf.cumsum(x, axis=0, reverse=True),
    "sort": lambda x: tf.sort(x, axis=0),
    "largest of the batch": lambda x: x / tf.reduce_max(tf.abs(x)),
    "neighbours": lambda x: x + tf.roll(x, 1, 0),
    "all pairs": lambda x: tf.matmul(tf.matmul(x, x, transpose_b=True), x),
}


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found(name):
    found = probed(layers.Lambda(MIXING[name])).findings
    assert [f.kind for f in found] == ["probe"] and "Replacing example" in found[0].what


@pytest.mark.parametrize("name", ["softmax", "numpy_function"])
def test_mixing_is_found_behind_dropout(name):
    found = probed(layers.Dropout(0.3), layers.Lambda(MIXING[name])).findings
    assert [f.kind for f in found] == ["probe"] and "training=True" in found[0].what


def test_mixing_in_training_only_is_found_behind_random_layers():
    found = probed(layers.GaussianNoise(0.1), layers.BatchNormalization()).findings
    assert [f.kind for f in found] == ["probe"] and "training=True" in found[0].what


def test_mixing_in_the_loss_is_found():
    def centred(y, z):
        values = LOSS(y, z)
        return values - tf.reduce_max(values)

    assert [f.kind for f in probed(loss=centred).findings] == ["probe"]


def test_what_depends_on_the_place_in_the_batch_is_found():
    places = layers.Lambda(
        lambda x: x * tf.range(1.0, 1.0 + tf.cast(tf.shape(x)[0], x.dtype))[:, None]
    )
    assert [f.kind for f in probed(places).findings][0] == "position"


def test_what_depends_on_the_size_of_the_batch_is_found():
    counts = layers.Lambda(lambda x: x / tf.cast(tf.shape(x)[0], x.dtype))
    found = probed(counts).findings
    assert [(f.kind, f.severity) for f in found] == [("batch size", "warning")]
    assert probed(counts, expected_batch_size=6.0).findings[0].severity == "error"


def test_memory_outside_of_the_model_is_found():
    calls = []

    def remember(x):
        calls.append(x.mean())
        return x + np.float32(sum(calls))

    found = probed(layers.Lambda(outside(remember))).findings
    assert [f.kind for f in found] == ["state"] and "shown again" in found[0].what


def test_memory_that_shows_only_after_other_batches_is_found():
    last = [np.zeros(4, "float32")]

    def remember(x):
        before, last[0] = last[0], x.mean(0)
        return x + before

    found = probed(layers.Lambda(outside(remember))).findings
    assert [f.kind for f in found] == ["state"]


# Their losses do not mix, or only with labels that no example of the batch has.
UNSEEN = (
    *("custom gradient", "custom gradient in a function", "Hinge, which looks"),
    "length of bincount",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in mixing.MIXING if not n.startswith(UNSEEN)])
def test_the_ways_to_mix_that_the_search_knows_are_found(name):
    batch = (floats(4, 4), np.array([0.4, -1.2, 0.7, -0.3], "float32"), np.array([1, 0, 3, 1]))
    tf.keras.utils.set_random_seed(2)
    model = tf.keras.Sequential([tf.keras.Input([4]), layers.Dense(4, activation="tanh")])
    initial = mixing.GLOBAL.numpy()

    def losses(batch, training):
        mixing.GLOBAL.assign(initial)
        h = mixing.MIXING[name](model(batch[0]), *batch[1])
        return tf.reduce_sum(h**2, axis=list(range(1, h.shape.rank))) if h.shape.rank > 1 else h

    parts = (tf.constant(batch[0]), tuple(map(tf.constant, batch[1:])))
    with unchanged(model):
        found = probe(model, losses, parts, None).findings
    assert found and found[0].severity == "error"


RANDOM = [layers.Dropout, layers.GaussianDropout, layers.AlphaDropout, layers.GaussianNoise]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(20))
def test_there_is_no_false_alarm(seed):
    hidden = [layers.Dense(64, "relu"), layers.LayerNormalization(), layers.Dense(4)]
    if seed % 2:
        hidden.insert(1, RANDOM[seed // 2 % 4](0.3))
    scale = 10.0 ** (seed % 5 - 2)
    batch = (scale * floats(5 + seed, 5, seed=seed), np.arange(5 + seed) % 3)
    seen = probed(*hidden, seed=seed, batch=batch)
    assert not seen.findings and "with training=True differ" not in seen.probed, seen


def test_there_is_no_false_alarm_for_losses_near_zero():
    batch = (floats(32, 5, seed=1), np.zeros(32, "int64"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def confident(y, z):
        return loss(y, z + tf.constant([20.0, 0.0, 0.0]))

    assert not probed(layers.Dense(512, "relu"), layers.Dense(4), batch=batch, loss=confident)[0]


def noisy(x):
    """Draws in training and in prediction, as a variational autoencoder does."""
    return x + tf.random.normal(tf.shape(x))


def test_there_is_no_false_alarm_for_models_that_are_random_in_prediction_too():
    found, text = probed(layers.Lambda(noisy))
    assert found == [] and "positions and sizes left out, since the model is random" in text


def test_mixing_is_found_in_models_that_are_random_in_prediction_too():
    found = probed(layers.Lambda(noisy), layers.Lambda(MIXING["softmax"])).findings
    assert [f.kind for f in found] == ["probe"]


def test_what_the_model_does_not_take_is_left_out_and_said():
    def ids(x):
        return tf.nn.embedding_lookup(tf.eye(4), tf.cast(x[:, 0], tf.int32))

    model = tf.keras.Sequential([tf.keras.Input([1]), layers.Lambda(ids), layers.Dense(3)])
    batch = (tf.constant([[3.0], [2.0], [1.0], [3.0]]), tf.constant([0, 1, 2, 0]))
    with unchanged(model):
        seen = probe(model, lambda b, training: LOSS(b[1], model(b[0])), batch, None)
    assert not seen.findings and "tripled left out (InvalidArgumentError)" in seen.probed
