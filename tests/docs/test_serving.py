"""What docs/how-to/ledger.md says of processes that load a model without this library."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.docs.test_troubleshooting import FROM_LOADING
from tf_adaptive_dp._keras.generation import GENERATION

pytestmark = pytest.mark.skipif(GENERATION == 2, reason="the page is written for Keras 3")

SERVE = """
import sys
sys.modules["tf_adaptive_dp"] = None  # as if it were not installed

import keras
import numpy as np
import tensorflow as tf

x = np.load("x.npy")
np.save("loaded.npy", keras.models.load_model("plain.keras", compile=False)(x))
for name in ("plain", "normalized"):
    served = tf.saved_model.load(f"{name}_served")  # which keeps its variables
    np.save(f"{name}_served.npy", served.serve(x))
for name, arguments in (("plain", {}), ("normalized", {"compile": False})):
    try:
        keras.models.load_model(f"{name}.keras", **arguments)
    except TypeError as error:
        print(error)
    else:
        raise AssertionError(name)
"""


@pytest.mark.slow_after(1)
def test_a_process_without_the_library_predicts_as_the_page_says(tmp_path):
    x = np.random.default_rng(0).normal(size=[8, 4]).astype("float32")
    np.save(tmp_path / "x.npy", x)
    normalization = dp.PrivateNormalization(noise_multiplier=1.0)
    normalization.adapt(x)
    expected = {}
    for name, hidden in (("plain", []), ("normalized", [normalization])):
        layers = [tf.keras.Input([4]), *hidden, tf.keras.layers.Dense(2)]
        model = tf.keras.Sequential(layers)
        model.compile(dp.ADADP(1.0, 1.0), "mse")
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / f"{name}.keras")
        model.export(str(tmp_path / f"{name}_served"), verbose=False)
        expected[name] = model(x)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert FROM_LOADING in done.stdout
    np.testing.assert_allclose(np.load(tmp_path / "loaded.npy"), expected["plain"], atol=1e-5)
    for name, outputs in expected.items():
        served = np.load(tmp_path / f"{name}_served.npy")
        np.testing.assert_allclose(served, outputs, atol=1e-5)
