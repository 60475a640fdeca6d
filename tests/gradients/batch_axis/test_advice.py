"""A user sees one sentence, with the layer, the operation and the one fix that fits."""

import re
import traceback

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.gradients.batch_axis import advice

FIXES = {getattr(advice, name) for name in dir(advice) if isinstance(getattr(advice, name), str)}


class Mixes(tf.keras.layers.Layer):
    """A layer that applies a function to a batch."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def branch(h):
    return tf.cond(tf.reduce_sum(h) > 0, lambda: h, lambda: 2 * h)


def as_often_as_there_are_values(h):
    values = tf.unique(tf.reshape(h, [-1]))[0]
    return tf.while_loop(lambda i, _: i < tf.size(values), lambda i, h: (i + 1, 0.9 * h), [0, h])[1]


CASES = {
    "statistics of the batch": (lambda h: h / tf.nn.moments(h, 0)[1], "GroupNormalization"),
    "mean": (lambda h: h - tf.reduce_mean(h, 0), "out of the reduction"),
    "mean of a vector": (
        lambda h: h * tf.reduce_mean(tf.reduce_sum(h, -1)),
        "Return one loss per example",
    ),
    "product": (lambda h: tf.matmul(h @ tf.transpose(h), h), "Multiply within each example"),
    # As `tf.tensordot(users, movies, 2)` in Keras's own example of a recommender.
    "product with a sum": (
        lambda h: h @ tf.matmul(h, h, transpose_a=True),
        "Multiply within each example",
    ),
    "softmax": (lambda h: tf.nn.softmax(h, 0), "out of the reduction|another axis"),
    "order": (lambda h: tf.gather(h, [1, 0, 3, 2, 5, 4, 7, 6]), "Keep all examples"),
    "concatenation": (
        lambda h: tf.concat([h, h], 0)[: tf.shape(h)[0]],
        "Keep all examples|Concatenate along another",
    ),
    "generated examples": (
        lambda h: tf.concat([tf.random.normal([8, 5]), h], 0)[8:],
        "call the model on each of the two batches and add the losses",
    ),
    "decision": (branch, "tf.where"),
    "unknown operation": (
        lambda h: h * tf.cast(tf.size(tf.unique(tf.reshape(h, [-1]))[0]), h.dtype),
        "dataset.map",
    ),
    "unknown operation before a loop": (as_often_as_there_are_values, "dataset.map"),
}


def refusal(layer):
    """The error of `fit`, and the lines that Python would show."""
    inputs = tf.keras.Input([6])
    hidden = layer(tf.keras.layers.Dense(5, name="hidden")(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(hidden))
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8), loss=catalogue.loss())
    with pytest.raises(dp.NotPrivateError) as error:
        catalogue.fit(model)
    return error.value, traceback.format_exception(
        type(error.value), error.value, error.value.__traceback__
    )


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", CASES)
def test_the_message_has_the_layer_and_the_one_fix_that_fits(name):
    function, fix = CASES[name]
    error, _ = refusal(Mixes(function, name="the_culprit"))
    message = str(error)
    assert message.startswith("Examples in a batch affect each other")
    assert re.search(r"\) in layer '[\w/]+/the_culprit', which ", message)
    (found,) = [text for text in FIXES if text in message]
    assert re.search(fix, found)
    assert message.endswith(found)


@pytest.mark.in_turns
@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_hinge_losses_of_keras_have_a_loss_to_take_their_place(loss):
    model = tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8), loss=loss)
    x, y = tf.ones([8, 6]), tf.where(tf.range(8) > 3, 1.0, -1.0)[:, None]
    with pytest.raises(dp.NotPrivateError, match="look at all labels of a batch") as error:
        model.fit(x, y, batch_size=8, verbose=0)
    assert str(error.value).endswith(advice._HINGE)
    own = lambda y, z: tf.reduce_mean(tf.maximum(1.0 - y * z, 0.0), axis=-1)  # noqa: E731
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8), loss=own)
    model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 has no such layers")
@pytest.mark.parametrize("kind", ["RandAugment", "MixUp", "RandomElasticTransform"])
def test_layers_that_augment_several_images_are_sent_to_the_data_set(kind):
    images, labels = tf.random.uniform([4, 6, 6, 3]), tf.range(4)
    augment = getattr(tf.keras.layers, kind)(name="the_culprit")
    layers = [augment, tf.keras.layers.Flatten(), tf.keras.layers.Dense(4)]
    model = tf.keras.Sequential([tf.keras.Input([6, 6, 3]), *layers])
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=4), loss=catalogue.loss())
    with pytest.raises(dp.NotPrivateError, match="the_culprit', which .* in the data set") as error:
        model.fit(images, labels, batch_size=4, verbose=0)
    assert str(error.value).endswith(advice._PREPROCESS)


def test_a_loss_is_not_called_a_layer():
    def compares(labels, logits):
        return tf.square(logits[:, 0] - tf.reduce_mean(logits[:, 0]))

    model = tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(3)])
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8), loss=compares)
    with pytest.raises(dp.NotPrivateError, match="at '.*compares', which") as error:
        catalogue.fit(model)
    assert "in layer" not in str(error.value)


def test_batch_normalization_has_a_fix_of_one_line():
    error, _ = refusal(tf.keras.layers.BatchNormalization(name="the_culprit"))
    assert "`tf_adaptive_dp.validate(model, batch, fix=True)`" in str(error)
    assert re.search(r"in layer '[\w/]+/the_culprit'", str(error))


def test_the_sentence_is_not_buried_under_lines_of_the_library():
    error, lines = refusal(tf.keras.layers.BatchNormalization(name="the_culprit"))
    assert "\n" not in str(error) and "in user code" not in str(error)
    assert lines[-1].startswith("tf_adaptive_dp.errors.NotPrivateError: Examples in a batch")
    own = [line for line in lines if "tf_adaptive_dp/" in line]
    assert len(own) == 1 and "tracebacks.py" in own[0]


def test_the_frames_are_there_for_those_who_want_them():
    settings = keras.config if GENERATION == 3 else tf.debugging
    settings.disable_traceback_filtering()
    try:
        _, lines = refusal(tf.keras.layers.BatchNormalization())
    finally:
        settings.enable_traceback_filtering()
    assert any("batch_axis/analysis.py" in line for line in lines)
