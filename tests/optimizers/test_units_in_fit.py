"""`fit` without a plan warns of data in raw units, once, and is silent where nothing is wrong."""

import warnings

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION

RANDOM = np.random.default_rng(0)
UNIT = RANDOM.normal(size=[40, 6]).astype("float32")
LABELS = (UNIT[:, 0] > 0).astype("float32")
PIXELS, PRICES = 255 * np.abs(UNIT), 300_000 + 80_000 * UNIT[:, 0]


def warned(x=UNIT, y=LABELS, model=None, epochs=1, **kwargs):
    model = model or tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 1.0), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.fit(x, y, batch_size=10, epochs=epochs, verbose=0, **kwargs)
    mine = [w for w in caught if "magnitude" in str(w.message) or "class weights" in str(w.message)]
    assert all(w.filename == __file__ or "keras" in w.filename for w in mine)
    return " ".join(str(w.message) for w in mine)


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "data, what",
    [
        ({"x": PIXELS}, "Inputs have magnitudes up to"),
        ({"y": PRICES, "epochs": 2}, "Targets have magnitudes up to"),
        ({"sample_weight": np.full([40], 8.0)}, "Sample or class weights go up to 8. "),
        ({"class_weight": {0: 1.0, 1: 5.0}}, "Sample or class weights go up to 5. "),
        ({"class_weight": {0: 0.0002, 1: 0.01}}, "Sample or class weights are at most 0.01. "),
        ({"x": tf.constant(PIXELS)}, "Inputs have magnitudes up to"),
    ],
)
def test_raw_units_are_told_once(data, what):
    assert warned(**data).count(what) == 1


def of_dataset(*parts, change=lambda dataset: dataset):
    batches = tf.data.Dataset.from_tensor_slices(parts).shuffle(40).batch(10)
    model = tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 1.0), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.fit(change(batches), epochs=2, verbose=0)
    return " ".join(str(w.message) for w in caught)


@pytest.mark.slow_on(3)
def test_data_sets_of_arrays_are_looked_at_like_arrays():
    weights = np.full([40], 0.01, "float32")
    text = of_dataset(UNIT, LABELS, weights, change=lambda d: d.cache().prefetch(2))
    assert text.count("Sample or class weights are at most 0.01. ") == 1
    assert of_dataset(PIXELS, LABELS).count("Inputs have magnitudes up to") == 1
    rare = np.where(np.arange(40) == 5, 1.0, 0.01).astype("float32")
    assert "weights" not in of_dataset(UNIT, LABELS, rare)
    scaled = of_dataset(PIXELS, LABELS, change=lambda d: d.map(lambda x, y: (x / 255, y)))
    assert "magnitudes" not in scaled


@pytest.mark.slow_on(2)
def test_data_in_order_and_data_that_cannot_be_seen_are_not_mentioned():
    scaled = tf.keras.Sequential(
        [tf.keras.Input([6]), tf.keras.layers.Rescaling(1 / 255), tf.keras.layers.Dense(1)]
    )
    assert not warned()
    assert not warned(sample_weight=np.where(np.arange(40) == 5, 1.0, 0.01))  # a rare class
    assert not warned(PIXELS, model=scaled)
    pairs = tf.data.Dataset.from_tensor_slices((PIXELS, LABELS))
    batches = pairs.map(lambda x, y: (x, y)).batch(10)
    model = tf.keras.Sequential([tf.keras.Input([6]), tf.keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 1.0), "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*magnitudes")
        model.fit(batches, verbose=0)
        model.fit((part for part in [(PIXELS[:10], LABELS[:10])]), verbose=0)


@pytest.mark.parametrize(
    "sparse", [tf.sparse.from_dense, scipy.sparse.csr_matrix, tf.RaggedTensor.from_tensor]
)
def test_data_that_are_not_dense_keep_the_error_that_says_so(sparse):
    with pytest.raises(dp.NotPrivateError, match="sparse or ragged"):
        warned(sparse(PIXELS))


def test_strings_and_nested_inputs_train():
    words = {"word": np.array(["a", "b"], dtype=object)[np.arange(40) % 2][:, None], "x": PIXELS}
    if GENERATION == 3:
        words["word"] = tf.constant(words["word"])  # Keras 3 takes no arrays of strings
    inputs = {
        "word": tf.keras.Input([1], dtype="string", name="word"),
        "x": tf.keras.Input([6], name="x"),
    }
    ids = tf.keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(inputs["word"])
    joined = tf.keras.layers.Concatenate()([ids, inputs["x"]])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(joined))
    assert "Inputs have magnitudes up to" in warned(words, LABELS, model)
