"""The step of `fit` is traced once, since a private step takes longer to trace than others."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue

X, Y = catalogue.data(32)


class Counting(tf.keras.Sequential):
    """Counts the traces of its step."""

    traces = 0

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def compiled(optimizer, **kwargs):
    model = Counting([tf.keras.Input(X.shape[1:]), tf.keras.layers.Dense(4)])
    model.compile(optimizer, catalogue.loss(), **kwargs)
    return model


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "metrics", [{}, {"metrics": ["accuracy"]}, {"weighted_metrics": ["accuracy"]}]
)
def test_metrics_given_by_name_do_not_cause_a_second_trace(metrics, jit_compile):
    model = compiled(dp.ADADP(1.0, 1.0), jit_compile=jit_compile, **metrics)
    weights = np.ones(len(X), "float32")
    history = model.fit(X, Y, sample_weight=weights, batch_size=8, epochs=2, verbose=0).history
    assert model.traces == 1
    assert model.optimizer.ledger.num_releases == 8
    for name in (name for names in metrics.values() for name in names):
        assert np.isfinite(history[name]).all()


@pytest.mark.slow_on(3)
def test_nor_do_those_of_a_plan():
    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, num_examples=32, batch_size=8, epochs=2, accountant="rdp"
    )
    model = compiled(plan.optimizer(dp.ADADP), metrics=["accuracy"])
    history = plan.fit(model, X, Y, validation_data=(X, Y), verbose=0).history
    assert model.traces == 1
    assert {"accuracy", "val_accuracy"} <= set(history)


class CountingOutputs(tf.keras.Model):
    """Counts the traces of its step."""

    traces = 0

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


@pytest.mark.in_turns
@pytest.mark.parametrize("by_name", [False, True])
def test_nor_do_the_means_of_the_losses_of_several_outputs(by_name):
    inputs = tf.keras.Input(X.shape[1:])
    outputs = {name: tf.keras.layers.Dense(4, name=name)(inputs) for name in "ab"}
    model = CountingOutputs(inputs, outputs if by_name else list(outputs.values()))
    losses, y = dict.fromkeys("ab", catalogue.loss()), dict.fromkeys("ab", Y)
    if not by_name:
        losses, y = list(losses.values()), list(y.values())
    model.compile(dp.ADADP(1.0, 1.0), losses)
    monitor = dp.PrivacyMonitor(len(X), 1e-3, sampling="shuffled", accountant="rdp")
    history = model.fit(X, y, batch_size=8, epochs=2, verbose=0, callbacks=[monitor]).history
    assert model.traces == 1
    np.testing.assert_allclose(history["loss"], np.add(history["a_loss"], history["b_loss"]), 1e-5)


@pytest.mark.slow_on(2)
def test_nor_do_the_weights_of_a_model_that_is_not_built():
    traces = []

    def loss(y, outputs):
        traces.append(outputs)
        return catalogue.loss()(y, outputs)

    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, num_examples=32, batch_size=8, epochs=2, accountant="rdp"
    )
    model = tf.keras.Sequential([tf.keras.layers.Dense(5, "relu"), tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.ADADP), loss)
    plan.fit(model, X, Y, verbose=0)
    assert len(traces) == 1 and model.optimizer.ledger.num_releases == plan.steps


@pytest.mark.slow_on(3)
def test_metrics_count_as_they_do_without_privacy():
    values = []
    for optimizer in (dp.DPSGD(1.0, 1.0, learning_rate=0.0), tf.keras.optimizers.SGD(0.0)):
        tf.keras.utils.set_random_seed(0)
        model = compiled(optimizer, metrics=["accuracy"])
        values.append(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["accuracy"])
    np.testing.assert_allclose(*values)
