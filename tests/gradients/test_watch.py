"""What a training step leaves in the weights that it does not train."""

import warnings

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats

layers = tf.keras.layers
BATCH = (floats(8, 3), floats(8, 2))


NAMES = ("sum", "flag", "calls", "rows", "norm", "copied")


class Keeps(layers.Layer):
    """Writes into weights that the loss does not read."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(3, 2))
        self.left = {
            name: self.add_weight(name=name, shape=(), initializer="zeros", trainable=False)
            for name in NAMES
        }
        self.mean = tf.keras.metrics.Mean()

    def call(self, x, training=None):
        kernel = tf.convert_to_tensor(self.kernel)
        outputs = x @ kernel
        if training:
            self.left["sum"].assign_add(tf.reduce_sum(outputs))
            largest = tf.reduce_max(x)
            tf.cond(largest > 0, lambda: self.add("flag", 1.0), lambda: self.add("flag", 0.0))
            self.add("calls", 1.0)
            self.add("rows", tf.cast(tf.shape(x)[0], tf.float32))
            self.left["norm"].assign(tf.norm(kernel))  # of what was released
            self.mean.update_state(outputs)
            self.left["copied"].assign(self.mean.result())
        return outputs

    def add(self, name, value):
        self.left[name].assign_add(value)
        return 0


def names_in(text):
    return {name for name in NAMES if name in text}


def said_by_fit(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*BATCH, batch_size=4, verbose=0)
    return [str(w.message) for w in caught if "writes data of its batches" in str(w.message)]


def test_statistics_of_batches_in_weights_that_the_loss_does_not_read_are_named():
    model = tf.keras.Sequential([tf.keras.Input([3]), Keeps(name="keeps")])
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1), "mse")
    (said,) = said_by_fit(model)
    written = said.partition("not trained: ")[2].partition(". They")[0]
    assert names_in(written) == {"sum", "flag", "copied"} and "keeps/sum" in written
    report = dp.validate(model, tuple(part[:4] for part in BATCH))
    found = [f for f in report.findings if f.kind == "statistics"]
    assert not report.ok and [f.where for f in found] == ["keeps"] * 3
    into = [f.what.partition(" into ")[2].partition(",")[0] for f in found]
    assert list(map(names_in, into)) == [{"sum"}, {"flag"}, {"copied"}]


@pytest.mark.slow_on(2)
def test_moving_averages_of_an_output_without_a_loss_are_named():
    inputs = tf.keras.Input([3])
    hidden = layers.Dense(2, name="trained")(inputs)
    normalized = layers.BatchNormalization(name="normalized")(hidden)
    model = tf.keras.Model(inputs, {"trained": hidden, "normalized": normalized})
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1), {"trained": "mse"})
    x, y = BATCH
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, {"trained": y, "normalized": y}, batch_size=4, verbose=0)
    said = {str(w.message) for w in caught if "writes data of its batches" in str(w.message)}
    assert len(said) == 1 and "normalized/moving_mean, normalized/moving_variance" in said.pop()


class Measures(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = tf.keras.metrics.Mean()

    def call(self, x):
        self.mean.update_state(x)
        return x


class Own(tf.keras.Model):
    """A model with metrics that it does not list, trained by a method of its own, too."""

    def __init__(self):
        super().__init__()
        frozen = layers.BatchNormalization(trainable=False)
        self.inner = tf.keras.Sequential(
            [tf.keras.Input([3]), frozen, Measures(), layers.Dropout(0.5), layers.Dense(2)]
        )
        self.tracker = tf.keras.metrics.Mean()

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=())
        super().build(shape)

    @property
    def metrics(self):
        return [metric for metric in super().metrics if metric is not self.tracker]

    def call(self, x, training=None):
        outputs = self.inner(x, training=training)
        self.tracker.update_state(outputs)
        return outputs * tf.convert_to_tensor(self.scale)

    def step_of_inner(self, optimizer, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(x, training=True) - y) ** 2, -1)
        optimizer.minimize(loss, self.inner.trainable_variables, tape)


def test_nothing_is_said_of_metrics_frozen_layers_and_models_that_are_not_built():
    model, optimizer = Own(), dp.DPSGD(1.0, 1.0, learning_rate=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The training step writes data")
        tf.function(model.step_of_inner)(optimizer, *map(tf.constant, BATCH))
    model = Own()
    model.build([None, 3])
    model.compile(dp.ADADP(1.0, 1.0), "mse")
    assert not said_by_fit(model)
