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


@pytest.mark.slow_on(3)
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


class TwoHeads(tf.keras.Model):
    """Trains one head privately, and another one, which no private loss reads, without noise.

    Args:
      data: whether the second head sees the examples, or public numbers.
    """

    def __init__(self, data=True):
        super().__init__()
        self.data = data
        self.heads = [tf.keras.Sequential([tf.keras.Input([3]), layers.Dense(2)]) for _ in range(2)]
        self.plain = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        self.plain.build(self.heads[1].trainable_variables)

    def call(self, x):
        return self.heads[0](x) + self.heads[1](x)

    def loss_of(self, head, x, y):
        return tf.reduce_mean((self.heads[head](x) - y) ** 2, -1)

    def step(self, optimizer, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(0, x, y)
        optimizer.minimize(loss, self.heads[0].trainable_variables, tape)
        with tf.GradientTape() as tape:
            # How many examples there are is no data.
            given = (x, y) if self.data else (tf.ones_like(x), tf.zeros_like(y))
            loss = tf.reduce_mean(self.loss_of(1, *given))
        trained = self.heads[1].trainable_variables
        self.plain.apply_gradients(zip(tape.gradient(loss, trained), trained))

    def train_step(self, data):
        x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        self.step(self.optimizer, x, y)
        return {"steps": tf.constant(1)}  # Keras 3 takes no empty logs


def said_of_unreleased(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if "changes trainable weights by" in str(w.message)]


def names_of(head):
    """The names that a warning or a finding gives to the weights of a head."""
    return {getattr(v, "path", v.name.split(":")[0]) for v in head.trainable_variables}


def test_weights_that_another_optimizer_trains_on_the_data_without_noise_are_named():
    model = TwoHeads()
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1))
    (said,) = said_of_unreleased(lambda: model.fit(*BATCH, batch_size=4, verbose=0))
    named = said.partition("gradients: ")[2].partition(". They")[0]
    assert set(named.split(", ")) == names_of(model.heads[1])
    report = dp.validate(model, tuple(part[:4] for part in BATCH))
    found = [f.what for f in report.findings if "by data of its batches" in f.what]
    assert not report.ok and len(found) == 2
    assert {what.split(" changes ")[1].split(" by ")[0] for what in found} == names_of(
        model.heads[1]
    )


def test_weights_trained_without_noise_are_named_in_a_loop_of_ones_own():
    model, optimizer = TwoHeads(), dp.DPSGD(1.0, 1.0, learning_rate=0.1)
    step = tf.function(model.step)
    (said,) = said_of_unreleased(lambda: step(optimizer, *map(tf.constant, BATCH)))
    assert all(name.rpartition("/")[2] in said for name in names_of(model.heads[1]))


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [dp.DPSGD, dp.DPAdam])
def test_nothing_is_said_of_weights_that_are_trained_on_releases_or_public_data(kind):
    model = TwoHeads(data=False)
    model.compile(kind(1.0, 1.0, learning_rate=0.1))
    assert not said_of_unreleased(lambda: model.fit(*BATCH, batch_size=4, verbose=0))
