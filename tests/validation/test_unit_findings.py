"""`validate` warns of inputs and targets in raw units, and of nothing that only looks like them."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.validation.unit_findings import small_weight_findings, unit_findings

layers = tf.keras.layers
RANDOM = np.random.default_rng(0)
UNIT = RANDOM.normal(size=[8, 6]).astype("float32")
PRICES = (300_000 + 80_000 * UNIT[:, 0]).astype("float32")
ADULT = np.stack([UNIT[:, 0] + 40, 2e5 + 1e4 * UNIT[:, 1], UNIT[:, 2] + 10], 1).astype("float32")
PIXELS = RANDOM.integers(0, 256, [8, 6, 6, 3]).astype("float32")
IDS = RANDOM.integers(0, 5_000, [8, 12])
ONE_HOT = np.eye(6, dtype="float32")[np.arange(8) % 6]


def sequential(shape, *hidden, **kwargs):
    return tf.keras.Sequential([tf.keras.Input(shape, **kwargs), *hidden, layers.Dense(1)])


def divided():
    inputs = tf.keras.Input([6, 6, 3])
    return tf.keras.Model(inputs, layers.Dense(1)(layers.Flatten()(inputs / 255.0)))


def of_columns(*names, scale=None):
    """A model of named columns, of which `scale` divides the one that is called "income"."""
    inputs = {name: tf.keras.Input([1], name=name) for name in names}
    parts = dict(inputs)
    if scale is not None:
        parts["income"] = layers.Rescaling(1 / scale)(inputs["income"])
    joined = layers.Concatenate()(list(parts.values()))
    return tf.keras.Model(inputs, layers.Dense(1)(layers.Dense(4, name="first")(joined)))


def found(model, x, y=None, loss="mse"):
    y = UNIT[:, 0] if y is None else y
    batch = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    seen = unit_findings(model, loss, batch)
    assert all(f.kind == "units" and f.severity == "warning" for f in seen)
    return " ".join(f.what for f in seen)


@pytest.mark.parametrize("loss", ["mse", "MAE", tf.keras.losses.MeanSquaredError(), "huber"])
def test_targets_in_raw_units_are_warned_of(loss):
    model = sequential([6])
    assert "Targets have magnitudes up to" in found(model, UNIT, PRICES, loss)
    assert not found(model, UNIT, (PRICES - 300_000) / 80_000, loss)


@pytest.mark.parametrize(("scale", "offset", "warns"), [(8e4, 3e5, False), (1.0, 7.0, True)])
def test_a_last_layer_may_scale_the_predictions_instead(scale, offset, warns):
    model = tf.keras.Sequential(
        [tf.keras.Input([6]), layers.Dense(1), layers.Rescaling(scale, offset)]
    )
    assert ("Targets" in found(model, UNIT, PRICES)) == warns


def denormalization(y):
    layer = dp.PrivateNormalization(0.1, invert=True)
    layer.adapt(np.repeat(y[:, None], 1000, axis=0))
    return layer


def test_so_may_a_layer_that_found_their_units():
    model = tf.keras.Sequential([tf.keras.Input([6]), layers.Dense(1), denormalization(PRICES)])
    assert not found(model, UNIT, PRICES)
    assert "Targets have magnitudes up to" in found(model, UNIT, 1e4 * PRICES)


def test_targets_whose_gradients_overflow_are_warned_of():
    huge = 2e10 * UNIT[:, 0]
    model = tf.keras.Sequential([tf.keras.Input([6]), layers.Dense(1), denormalization(huge)])
    assert "exceed the range of float32" in found(model, UNIT, huge)


def test_targets_that_are_lost_in_the_noise_are_warned_of():
    """Whatever the last layer does, the loss is in their units."""
    tiny = 0.01 * UNIT[:, 0]
    for last in ([], [layers.Rescaling(0.01)], [denormalization(tiny)]):
        model = tf.keras.Sequential([tf.keras.Input([6]), layers.Dense(1), *last])
        assert "the loss shrinks with their units" in found(model, UNIT, tiny)
    assert not found(sequential([6]), UNIT, np.zeros(8))
    assert not found(sequential([6]), UNIT, tiny, "binary_crossentropy")
    for learns_units in (
        dp.ADADP(1.0, 1.0, clipping="adaptive"),
        dp.ADADP("measured", 1.0),
        dp.UntunedSGD(noise_multiplier=1.0),
    ):
        model.compile(learns_units, "mse")
        assert not found(model, UNIT, tiny)


def test_weights_that_clipping_undoes_are_warned_of():
    model, weights = sequential([6]), np.where(np.arange(len(UNIT)) % 4, 1.0, 8.0)

    def says(*more):
        batch = tuple(map(tf.convert_to_tensor, (UNIT, UNIT[:, 0], *more)))
        return [f.what for f in unit_findings(model, "mse", batch)]

    (what,) = says(weights)
    assert what.startswith("Sample or class weights go up to 8. ")
    assert not says(weights / 8) and not says()


def test_weights_that_are_lost_in_the_noise_are_warned_of():
    model = sequential([6])

    def says(*weights):
        return [f.what for f in small_weight_findings(model, tf.constant(weights))]

    (what,) = says(0.0, 0.01)
    assert what.startswith("Sample or class weights are at most 0.01. ")
    assert not says(0.01, 1.0) and not says(0.0, 0.0) and not small_weight_findings(model, None)
    model.compile(dp.ADADP("measured", 1.0), "mse")
    assert not says(0.0, 0.01)


def test_class_numbers_and_losses_of_other_kinds_are_no_units():
    model = sequential([6])
    classes = np.arange(8) * 100
    assert not found(model, UNIT, classes, "sparse_categorical_crossentropy")
    assert not found(model, UNIT, PRICES, "mean_absolute_percentage_error")
    assert not found(model, UNIT, PRICES, lambda y, z: tf.reduce_mean(z, axis=1))


RAW = {
    "columns of a table": (lambda: sequential([3]), ADULT, "Features differ"),
    "pixels": (lambda: sequential([6, 6, 3], layers.Conv2D(2, 3), layers.Flatten()), PIXELS, "up"),
    "flat pixels": (lambda: sequential([6, 6, 3], layers.Flatten()), PIXELS, "magnitudes up to"),
}
SCALED = {
    "units": (lambda: sequential([6]), UNIT),
    "one-hot": (lambda: sequential([6]), ONE_HOT),
    "rescaled": (
        lambda: sequential([6, 6, 3], layers.Rescaling(1 / 255), layers.Flatten()),
        PIXELS,
    ),
    "divided": (divided, PIXELS),
    "normalized": (lambda: sequential([3], layers.LayerNormalization()), ADULT),
    "privately": (lambda: sequential([3], dp.PrivateNormalization(1.0)), ADULT),
    "token ids": (lambda: sequential([12], layers.Embedding(5_000, 2), layers.Flatten()), IDS),
    "ids as floats": (
        lambda: sequential([12], layers.Embedding(5_000, 2), layers.Flatten()),
        IDS.astype("float32"),
    ),
    "rare features": (lambda: sequential([6]), ONE_HOT * np.float32([1e-4, 1, 1, 1, 1, 1e4])),
    "own layer": (lambda: sequential([3], layers.Lambda(lambda x: x / 1e5)), ADULT),
}


@pytest.mark.parametrize("name", RAW)
def test_inputs_in_raw_units_are_warned_of(name):
    make, x, says = RAW[name]
    assert says in found(make(), x)


@pytest.mark.parametrize("name", SCALED)
def test_inputs_that_are_scaled_or_no_quantities_are_not(name):
    make, x = SCALED[name]
    assert not found(make(), x)


TABLE = {"age": ADULT[:, 0], "income": ADULT[:, 1], "sex": ONE_HOT[:, 0]}


def test_columns_by_name_are_judged_where_they_are_read():
    model = of_columns("age", "income", "sex")
    assert "from 41 to 2.1e+05, and first gets them as they are" in found(model, TABLE)
    assert found(model, list(TABLE.values())) == found(model, TABLE)
    assert not found(of_columns("age", "income", "sex", scale=1e5), TABLE)
    assert not found(model, {**TABLE, "income": TABLE["income"] / 1e5})


def test_columns_that_are_no_numbers_are_not_judged():
    age = tf.keras.Input([1], name="age")
    place = tf.keras.Input([1], name="place", dtype="string")
    one_hot = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(place)
    model = tf.keras.Model(
        {"age": age, "place": place}, layers.Dense(1)(layers.Concatenate()([age, one_hot]))
    )
    x = {"age": ADULT[:, 0], "place": np.array(["a", "b"] * 4)}
    assert not found(model, x)
    assert "gets them as they are" in found(model, {**x, "age": 1e3 * x["age"]})


def test_a_model_need_not_be_built():
    model = tf.keras.Sequential([layers.Dense(1)])
    assert "Features differ" in found(model, ADULT)
    assert not found(tf.keras.Sequential([layers.LayerNormalization(), layers.Dense(1)]), ADULT)


def test_the_report_has_the_warning_and_is_ready():
    model = sequential([6])
    model.compile(dp.ADADP(1.0, 1.0), "mse")
    report = dp.validate(model, (UNIT, PRICES))
    assert report.ok and "docs/how-to/units.md" in str(report)
