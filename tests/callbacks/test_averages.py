"""Averages of the weights (`use_ema=True`) are post-processing: they change nothing else."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION

pytestmark = pytest.mark.skipif(GENERATION == 2, reason="Keras 2 has no SwapEMAWeights")
MOMENTUM = 0.5


class Weights(tf.keras.callbacks.Callback):
    """Notes the weights of the model after each step, and whenever it is evaluated."""

    def __init__(self):
        super().__init__()
        self.steps, self.evaluated = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self.model.get_weights())

    def on_test_begin(self, logs=None):
        self.evaluated.append(self.model.get_weights())


def trained(name, *callbacks, **kwargs):
    model = catalogue.mlp()
    arguments = {"use_ema": True, "ema_momentum": MOMENTUM, "expected_batch_size": 8.0, **kwargs}
    model.compile(catalogue.make(name, **arguments), loss=catalogue.loss())
    weights = Weights()
    catalogue.fit(model, 2, [*callbacks, weights], validation_data=catalogue.data())
    return model, weights


def averages(steps):
    found = [steps[0]]
    for weights in steps[1:]:
        pairs = zip(found[-1], weights)
        found.append([MOMENTUM * a + (1 - MOMENTUM) * w for a, w in pairs])
    return found


def assert_near(one, other):
    for a, b in zip(one, other):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["DPMomentum", "ADADP euler", "DPAdamWOSM", "AdaDPS fixed"])
def test_a_model_is_evaluated_with_its_average_and_trained_without(name):
    model, seen = trained(name, tf.keras.callbacks.SwapEMAWeights())
    average = averages(seen.steps)
    assert len(seen.steps) == 8 and len(seen.evaluated) == 2
    assert_near(seen.evaluated[0], average[3])
    assert_near(seen.evaluated[1], average[7])
    assert_near(model.get_weights(), average[7])  # as Keras leaves it
    # Adding and subtracting the average rounds the weights, and does nothing else.
    other, alone = trained(name)
    for weights, expected in zip(seen.steps, alone.steps):
        assert_near(weights, expected)
    assert model.optimizer.ledger.segments == other.optimizer.ledger.segments == [(0.5, 8.0, 8)]


def test_parts_of_a_batch_do_not_move_the_average():
    swap = tf.keras.callbacks.SwapEMAWeights()
    kwargs = {"gradient_accumulation_steps": 2, "expected_batch_size": 16.0}
    model, seen = trained("DPMomentum", swap, **kwargs)
    assert_near(model.get_weights(), averages(seen.steps[1::2])[-1])
    assert model.optimizer.ledger.segments == [(0.5, 16.0, 4)]


def test_averages_that_stay_until_the_next_epoch_are_what_is_saved(tmp_path):
    swap = tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    path = tmp_path / "{epoch}.weights.h5"
    saved = tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    monitor = dp.PrivacyMonitor(1_000, 1e-3, full_passes=False)
    model, seen = trained("DPAdam", swap, saved, monitor)
    average = averages(seen.steps)
    for epoch, weights in ((1, average[3]), (2, average[7])):
        model.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert_near(model.get_weights(), weights)
        assert model.optimizer.ledger.num_releases == 4 * epoch


def test_a_swap_without_averages_is_refused_by_keras():
    with pytest.raises(ValueError, match="use_ema=True"):
        trained("DPAdam", tf.keras.callbacks.SwapEMAWeights(), use_ema=False)
