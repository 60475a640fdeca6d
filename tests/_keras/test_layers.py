"""What the seam says of layers and models, in both generations of Keras."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp._keras import layers, models
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.validation.repeatable import reset, unchanged

X = np.random.default_rng(0).normal(size=[4, 3]).astype("float32")
PREPROCESSING = {
    "Normalization": ({}, {"mean": 0.0, "variance": 1.0}, X),
    "Discretization": ({"num_bins": 3}, {"bin_boundaries": [0.0]}, X),
    "StringLookup": ({}, {"vocabulary": ["a"]}, np.array(["a", "b"])),
    "TextVectorization": ({}, {"vocabulary": ["a"]}, np.array(["a b", "c"])),
}


@pytest.mark.parametrize("name, cases", PREPROCESSING.items(), ids=PREPROCESSING)
def test_an_adapted_layer_is_known_from_one_with_given_values(name, cases):
    open_to_data, given, data = cases
    kind = getattr(keras.layers, name)
    layer = kind(**open_to_data)
    assert not layers.was_adapted(layer)
    layer.adapt(data)
    assert layers.was_adapted(layer)
    assert not layers.was_adapted(kind(**given))


def test_other_layers_are_not_adapted():
    assert not layers.was_adapted(keras.layers.Dense(2))
    built = keras.layers.Normalization()
    built.build([None, 2])
    assert not layers.was_adapted(built)


def test_a_generator_restarts_with_the_same_numbers():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dropout(0.5, seed=1)])
    (generator,) = (g for x in layers.inner_layers(model) for g in layers.random_generators(x))
    before = generator.seed

    def drawn(seed):
        keras.utils.set_random_seed(seed)
        generator.restart(seed)
        return np.array(model(np.ones([50, 3], "float32"), training=True))

    first = drawn(5)
    assert not np.array_equal(first, drawn(6))
    np.testing.assert_array_equal(first, drawn(5))
    generator.seed = before
    assert generator.seed == 1


@pytest.mark.skipif(GENERATION != 3, reason="Keras 2 draws such numbers from TensorFlow")
def test_all_generators_of_keras_3_restart_and_are_put_back():
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.other = (keras.random.SeedGenerator(k) for k in (1, 2))

        def call(self, x):
            return [x + keras.random.normal([9], seed=s) for s in (self.one, self.other, None)]

    inputs = keras.Input([9])
    model = keras.Model(inputs, Noise()(inputs))
    generators = [*layers.random_generators(model.layers[1]), *layers.global_generators()]
    assert len(generators) == 3

    def states():
        return [generator.state.numpy().tolist() for generator in generators]

    before, drawn = states(), []
    with unchanged(model):
        for seed in (5, 6, 5):
            reset(model, seed)
            drawn.append(np.array(model(np.zeros([1, 9], "float32"))))
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert np.all(drawn[0] != drawn[1])
    assert states() == before


def test_the_metrics_of_a_model_do_not_count_the_mean_loss():
    inputs = keras.Input([3])
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)])
    assert not layers.is_compiled(model)
    model.compile("sgd", ["mse", "mse"], loss_weights=[1.0, 2.0], steps_per_execution=3)
    assert layers.is_compiled(model)
    assert models.steps_per_call(model) == 3
    y = tf.ones([4, 2])
    first, second = (np.mean((np.array(out) - 1) ** 2) for out in model(X))
    mean = models.uncounted_loss_of_step(model, (X, (y, y)))
    assert float(mean) == pytest.approx(first + 2 * second, rel=1e-5)
    fresh = models.uncounted_loss_of_step(model, (X, (y, y)))  # the metrics exist by now
    assert float(fresh) == float(mean)
    counted = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert all(value == 0 for value in counted.values())
