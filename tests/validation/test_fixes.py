"""A repaired model trains privately, its report is clean, with the other weights as before."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp._keras.layers import is_compiled
from tf_adaptive_dp.validation.fixes import group_normalization, repaired_model
from tf_adaptive_dp.validation.layer_findings import named_layers, takes_batch_statistics

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
Y = np.arange(6) % 3


def shaken(model, x):
    """Built, with weights that are no initial ones."""
    model(x)
    for k, variable in enumerate(model.trainable_variables):
        variable.assign_add(0.1 * floats(*variable.shape, seed=k))
    return model


def of_layers(hidden):
    def make(x):
        return tf.keras.Sequential([tf.keras.Input(x.shape[1:]), *hidden(), layers.Dense(3)])

    return make


def functional(x):
    inputs = tf.keras.Input(x.shape[1:])
    h = layers.Conv2D(8, 3, padding="same", name="conv")(inputs)
    h = layers.Activation("relu")(layers.BatchNormalization(epsilon=0.01, name="norm")(h))
    h = h + layers.Conv2D(8, 1, name="skip")(inputs)
    block = tf.keras.Sequential([layers.Conv2D(6, 3), layers.BatchNormalization()], name="block")
    return tf.keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(block(h))))


def functional_in_a_sequential(x):
    """Keras calls the normalization inside with a mask, and a group normalization takes none."""
    inputs = tf.keras.Input(x.shape[1:])
    h = layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs))
    base = tf.keras.Model(inputs, layers.GlobalMaxPooling2D()(h))
    return tf.keras.Sequential([tf.keras.Input(x.shape[1:]), base, layers.Dense(3)])


class Block(layers.Layer):
    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units)
        self.norms = [layers.BatchNormalization(), layers.BatchNormalization(trainable=False)]

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[self.units])

    def call(self, x, training=None):
        x = self.dense(x)
        for norm in self.norms:
            x = norm(x, training=training)
        return x * self.scale

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Subclassed(tf.keras.Model):
    def __init__(self, units=6):
        super().__init__()
        self.units = units
        self.block = Block(units)
        self.norm = layers.BatchNormalization()
        self.top = layers.Dense(3)

    def call(self, x, training=None):
        return self.top(self.norm(self.block(x, training=training), training=training))

    def get_config(self):
        return {"units": self.units}


MODELS = {
    "Sequential": (of_layers(lambda: [layers.Dense(6), layers.BatchNormalization()]), (5,)),
    "with dropout": (
        of_layers(lambda: [layers.Dropout(0.3), layers.Dense(6), layers.BatchNormalization()]),
        (5,),
    ),
    "channels first": (
        of_layers(
            lambda: (
                [layers.Reshape([4, 3, 3]), layers.BatchNormalization(axis=1)] + [layers.Flatten()]
            )
        ),
        (36,),
    ),
    "functional and nested": (functional, (6, 6, 2)),
    "functional in a Sequential": (functional_in_a_sequential, (6, 6, 2)),
    "in TimeDistributed": (
        of_layers(
            lambda: [layers.TimeDistributed(layers.BatchNormalization()), layers.GRU(4)],
        ),
        (4, 5),
    ),
    "a layer of its own": (of_layers(lambda: [Block(), layers.BatchNormalization()]), (5,)),
    "subclassed": (lambda x: Subclassed(units=7), (5,)),
    "without center and scale": (
        of_layers(lambda: [layers.Dense(6), layers.BatchNormalization(center=False, scale=False)]),
        (5,),
    ),
    "built when called": (
        lambda x: tf.keras.Sequential(
            [layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)]
        ),
        (5,),
    ),
}


def kept_weights(model):
    """Of all trainable variables, and of frozen layers."""
    moving = {
        id(v)
        for _, layer in named_layers(model)
        if isinstance(layer, layers.BatchNormalization) and layer.trainable
        for v in (layer.moving_mean, layer.moving_variance)
    }
    return sorted(
        [v.numpy().tobytes() for v in model.weights if id(v) not in moving],
    )


SLOW = {
    "built when called",
    "with dropout",
    "without center and scale",
    "in TimeDistributed",
    "channels first",
}


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS]
)
def test_a_repaired_model_trains_and_its_report_is_clean(name):
    make, shape = MODELS[name]
    x = floats(6, *shape)
    tf.keras.utils.set_random_seed(3)
    model = shaken(make(x), x)
    before = model.get_weights()
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=optimizer, fix=True)
    assert report.ok and not report.findings, report
    assert "batch statistics" in {f.kind for f in report.repaired}
    assert report.model is not model and kept_weights(report.model) == kept_weights(model)
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    # What each example gives must still depend on it.
    assert np.ptp(report.model(x).numpy(), axis=0).min() > 1e-3
    report.model.compile(optimizer, report.loss)
    report.model.fit(x, Y, batch_size=6, verbose=0)
    assert optimizer.ledger.num_releases == 1


@pytest.mark.slow
def test_a_state_is_forgotten():
    x = floats(6, 2, 5)
    inputs = tf.keras.Input(batch_shape=x.shape)
    both = layers.Bidirectional(layers.SimpleRNN(3, stateful=True, return_sequences=True))
    h = layers.SimpleRNN(4, stateful=True)(both(inputs))
    model = tf.keras.Model(inputs, layers.Dense(3)(h))
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    assert report.ok, report
    assert "Set stateful=False." in {f.fix for f in report.repaired}, report
    assert kept_weights(report.model) == kept_weights(model)
    np.testing.assert_array_equal(report.model(x), report.model(x))


@pytest.mark.parametrize(
    "shape, axis, groups",
    [
        ((8, 8, 48), -1, 16),
        ((64, 8, 8), 1, 32),
        ((8, 8, 7), -1, 1),
        ((64,), -1, 1),
        ((1, 1, 64), -1, 1),
        ((1,), -1, None),
    ],
)
def test_groups_hold_more_than_one_number(shape, axis, groups):
    inputs = tf.keras.Input(shape)
    layer = layers.BatchNormalization(axis=axis)
    layer(inputs)
    made = group_normalization(layer)
    assert (None if made is None else made.groups) == groups
    if made is not None:
        assert made.axis == axis % (len(shape) + 1)


class Needy(Subclassed):
    """Cannot be made from a configuration."""

    def __init__(self, something):
        super().__init__()
        self.something = something


def test_what_cannot_be_copied_stays_with_its_findings():
    x = floats(6, 5)
    model = shaken(Needy(object()), x)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    assert not report.ok and report.model is model and report.repaired == ()
    kinds = {f.kind for f in report.findings}
    assert {"batch statistics", "not repaired"} <= kinds
    assert "could not be copied" in str(report) and "GroupNormalization" in str(report)
    assert "`get_config` of `Needy`" in fix_of(report, "not repaired")


def fix_of(report, kind):
    (found,) = (f for f in report.findings if f.kind == kind)
    return found.fix


def test_the_hint_speaks_of_get_config_only_if_that_failed(monkeypatch):
    def fails(model, inputs):
        raise ValueError("Layers share weights.")

    x = floats(6, 5)
    model = shaken(of_layers(lambda: [layers.Dense(6), layers.BatchNormalization()])(x), x)
    module = importlib.import_module("tf_adaptive_dp.validation.validate")
    monkeypatch.setattr(module, "repaired_model", fails)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    assert "get_config" not in fix_of(report, "not repaired")


def test_shared_weights_are_not_torn_apart():
    x = floats(6, 5)
    shared = layers.Dense(5)
    inner = tf.keras.Sequential([shared, layers.BatchNormalization()])
    inputs = tf.keras.Input([5])
    model = shaken(tf.keras.Model(inputs, layers.Dense(3)(shared(inner(inputs)))), x)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    if GENERATION == 2:
        assert report.model is model and "share weights" in str(report)
    else:  # Keras 3 can copy them as shared
        assert report.ok and kept_weights(report.model) == kept_weights(model)
        assert report.model.layers[-2] is report.model.layers[-3].layers[0]


def freeze(model, name):
    model.get_layer(name).trainable = False


def freeze_all_but_the_first_inside(model, name):
    freeze(model, name)
    model.get_layer(name).layers[0].trainable = True


@pytest.mark.parametrize(
    "frozen, how",
    [
        ("dense", freeze),
        ("own", freeze),
        ("inner", freeze),
        ("inner", freeze_all_but_the_first_inside),
    ],
)
def test_what_is_frozen_stays_frozen(frozen, how):
    x = floats(6, 5)
    inner = tf.keras.Sequential(
        [tf.keras.Input([6]), layers.Dense(4), layers.BatchNormalization()], name="inner"
    )
    hidden = [layers.Dense(5, name="dense"), Block(name="own"), layers.BatchNormalization(), inner]
    model = shaken(of_layers(lambda: hidden)(x), x)
    how(model, frozen)
    copy = repaired_model(model, x)
    assert len(copy.trainable_variables) == len(model.trainable_variables)
    for old, new in zip(model.trainable_variables, copy.trainable_variables):
        np.testing.assert_array_equal(old.numpy(), new.numpy())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", [functional_in_a_sequential, lambda x: Subclassed()])
def test_what_was_trained_before_is_frozen_and_keeps_its_statistics(make):
    x = floats(6, *((6, 6, 2) if make is functional_in_a_sequential else (5,)))
    model = shaken(make(x), x)
    trained = [x for _, x in named_layers(model) if takes_batch_statistics(x)]
    for k, layer in enumerate(trained):
        layer.moving_mean.assign_add(floats(*layer.moving_mean.shape, seed=k))
    before = model(x, training=False).numpy()
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=optimizer, fix=True)
    assert report.ok, report
    assert len(report.repaired) == len(trained) and "Frozen" in report.repaired[0].fix
    np.testing.assert_allclose(report.model(x, training=True), before, rtol=1e-5)
    assert all(layer.trainable for layer in trained)
    names = [layer.name for layer in trained]
    copies = [x for _, x in named_layers(report.model) if x.name in names]
    assert copies and not any(layer.trainable for layer in copies)


@pytest.mark.parametrize(
    "shape, axis, why", [((1,), -1, "a single channel"), ((4, 3), [1, 2], "several axes")]
)
def test_a_layer_that_the_repair_left_is_no_reason_to_repair_again(shape, axis, why):
    if GENERATION == 3 and axis != -1:
        pytest.skip("Keras 3 normalizes one axis")
    x = floats(6, *shape)
    hidden = [layers.BatchNormalization(axis=axis, name="left"), layers.Flatten()]
    model = of_layers(lambda: hidden)(x)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    (found,) = (f for f in report.errors if f.where == "left")
    assert why in found.fix and "`fix=True` left it" in found.fix


@pytest.mark.slow_on(2)
def test_a_compiled_model_is_copied_uncompiled():
    x = floats(6, 5)
    model = shaken(of_layers(lambda: [layers.Dense(6), layers.BatchNormalization()])(x), x)
    optimizer = dp.DPSGD(1.0, 1.0)
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=optimizer, fix=True)
    assert report.ok and is_compiled(model) and not is_compiled(report.model)


@pytest.mark.slow_on(2)
def test_the_report_says_what_replaced_a_layer():
    x = floats(6, 6, 6, 2)
    inputs = tf.keras.Input(x.shape[1:])
    h = layers.BatchNormalization(name="norm")(layers.Conv2D(8, 3)(inputs))
    h = layers.Reshape([4, 32])(h)
    model = tf.keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling1D()(h)))
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=dp.DPSGD(1.0, 1.0), fix=True)
    assert str(report).endswith("Repaired:\n  norm: Replaced by GroupNormalization(groups=8).")
    assert str(report).startswith("The repaired copy, `report.model`, is ready")
    assert "Compile the copy" in str(report) and "the model that you passed is not" in str(report)


def test_other_findings_stay():
    x = floats(6, 5)
    hidden = [layers.Dense(4), layers.BatchNormalization(), layers.Softmax(axis=0, name="soft")]
    model = of_layers(lambda: hidden)(x)
    report = dp.validate(model, (x, Y), loss=LOSS, optimizer=tf.keras.optimizers.SGD(), fix=True)
    assert {f.where for f in report.errors} == {"soft", "optimizer"}
    assert {f.kind for f in report.repaired} == {"batch statistics"}
    assert str(report).startswith("The repaired copy, `report.model`, cannot be trained")
