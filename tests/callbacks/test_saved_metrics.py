"""Saved models hold no sums over training examples, as the state of metrics is."""

import io
import zipfile

import h5py
import numpy as np
import pytest

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION, keras

N, B = 64, 16


def raw_sums(path):
    """What a saved model holds of its metrics, except for zeros."""
    content = path.read_bytes()
    if path.suffix == ".keras":
        content = zipfile.ZipFile(path).read("model.weights.h5")
    found = {}

    def visit(name, item):
        if name.startswith("metrics") and hasattr(item, "shape") and np.any(item[()]):
            found[name] = item[()]

    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(visit)
    return found


def trained(make_callbacks, folder=None):
    x = np.random.default_rng(0).normal(size=[N, 4]).astype("float32")
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=B, learning_rate=0.1)
    model.compile(optimizer, "mse", metrics=["mae"])
    callbacks = make_callbacks()
    if folder is not None:
        callbacks += [keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras"))]
    history = model.fit(x, x[:, :1], batch_size=B, epochs=2, verbose=0, callbacks=callbacks)
    assert len(history.history["loss"]) == 2 and min(history.history["mae"]) > 0
    return model


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "callback",
    [
        lambda: [dp.PrivacyMonitor(N, 1e-4)],
        lambda: [dp.PrivacyBudget(epsilon=1e3, num_examples=N, delta=1e-4)],
    ],
    ids=["monitor", "budget"],
)
def test_a_saved_model_holds_no_sums_over_its_training_examples(callback, tmp_path):
    model = trained(callback, tmp_path)
    for name in ("model.keras", "model.weights.h5"):
        save = model.save if name.endswith(".keras") else model.save_weights
        save(str(tmp_path / name))
        assert not raw_sums(tmp_path / name)
    assert not raw_sums(tmp_path / "1.keras") and not raw_sums(tmp_path / "2.keras")


@pytest.mark.skipif(GENERATION == 3, reason="Keras 3 saves no metrics")
def test_without_them_keras_2_saves_such_sums(tmp_path):
    trained(list).save(tmp_path / "model.keras")
    assert raw_sums(tmp_path / "model.keras")
