"""Inputs in raw units, layers that normalize them, and plans that pay for that."""

import numpy as np

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.normalization import PrivateNormalization
from tf_adaptive_dp.plan import PrivacyPlan

N = 4000


def columns(num_examples=N, seed=0):
    """Years, longitudes, a heavy tail, rare flags, tiny numbers, and huge ones that are often 0."""
    random = np.random.default_rng(seed)
    normal = random.normal(size=[num_examples, 4])
    some, few = random.random([2, num_examples])
    return np.stack(
        [
            2000 + 10 * normal[:, 0],
            -122 + 0.3 * normal[:, 1],
            np.exp(normal[:, 2] + 8),
            (few < 0.05).astype(float),
            1e-6 * normal[:, 3],
            1e6 * (some < 0.3),
        ],
        axis=1,
    )


def adapted(x, noise_multiplier=4.0, axis=-1, user_ids=None):
    layer = PrivateNormalization(noise_multiplier, axis)
    layer.adapt(x, user_ids)
    return layer


def of_layer(layer):
    return keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(2)])


def planned(**kwargs):
    numbers = {"epsilon": 3.0, "delta": 1e-4, "num_examples": N, "batch_size": 200, "epochs": 2}
    if "noise_multiplier" in kwargs:
        del numbers["epsilon"]
    return PrivacyPlan(**{**numbers, "accountant": "rdp", "normalize_inputs": True, **kwargs})


def model_of(plan, layer):
    model = keras.Sequential([keras.Input([6]), layer, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.ADADP), loss, metrics=["accuracy"])
    return model


def data():
    x = columns()
    return x, (x[:, 4] + 1e-7 * (x[:, 0] - 2000) > 0).astype(np.int32)


def model_of_layers(plan, layers, **kwargs):
    model = keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer_class": dp.DPSGD, "learning_rate": 0.1, **kwargs}
    model.compile(plan.optimizer(**arguments), loss)
    return model
