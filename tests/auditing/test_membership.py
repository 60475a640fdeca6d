"""Membership inference with TF Privacy's attacks, where they are installed."""

import importlib.util
import sys

import numpy as np
import pytest
import tensorflow as tf

from tf_adaptive_dp.auditing.membership import membership_inference


def members():
    generator = np.random.default_rng(4)
    x = generator.normal(size=[400, 40]).astype(np.float32)
    y = generator.integers(10, size=400)
    tf.keras.utils.set_random_seed(4)
    model = tf.keras.Sequential([tf.keras.Input([40]), tf.keras.layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(tf.keras.optimizers.Adam(0.1), loss=loss)
    return model, loss, (x[:50], y[:50]), (x[200:], y[200:])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_privacy") is None, reason="needs TF Privacy's attacks"
)
def test_membership_inference_tells_what_was_memorized():
    model, loss, train, test = members()
    (before,) = membership_inference(model, loss, train, test).single_attack_results
    model.fit(*train, batch_size=50, epochs=100, verbose=0)
    after = membership_inference(model, loss, train, test, attacks=["threshold", "lr"])
    assert before.get_auc() < 0.65
    assert [result.get_auc() > 0.8 for result in after.single_attack_results] == [True, True]
    with pytest.raises(ValueError, match="one number for each example"):
        membership_inference(model, lambda y, z: tf.reduce_mean(loss(y, z)), train, test)


def test_membership_inference_says_how_to_install_what_it_needs(monkeypatch):
    package = "tensorflow_privacy.privacy.privacy_tests.membership_inference_attack"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pip install --no-deps tensorflow-empirical-privacy"):
        membership_inference(*members())
    with pytest.raises(ValueError, match="`attacks` must be one of 'threshold'"):
        membership_inference(*members(), attacks=["guess"])
