"""Trials that would release more than the search accounts for, or depend on each other."""

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp.tuning.strategies import Composition, RepeatAndSelect

X, Y = tuned.data(64)
SAMPLING = dp.PoissonSampling(0.25, max_batch_size=40, steps=4)
MORE = "must release what was planned and no more.*Received: "


def found_by(tmp_path, build=tuned.build, strategy=None, callbacks=(), cached=False):
    made = tuned.tuner(
        *(tmp_path, build),
        num_examples=64,
        sampling=SAMPLING,
        strategy=strategy or Composition(2),
    )
    batches = dp.poisson_batches((X, Y), SAMPLING)
    made.search(
        batches.cache() if cached else batches,
        epochs=1,
        validation_data=(X, Y),
        callbacks=list(callbacks),
        verbose=0,
    )
    return made


def with_16_examples(hp):
    """A model whose batches have the expected size of the sampling."""
    return tuned.model(tuned.optimizer(hp.Choice("rate", [0.1, 0.2]), expected_batch_size=16.0))


class TrainsOn(tf.keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.train_on_batch(X[:16], Y[:16])


def test_batches_that_come_again_in_another_trial_are_refused(tmp_path):
    found_by(tmp_path / "fresh", with_16_examples)
    with pytest.raises(dp.NotPrivateError, match="it or an earlier trial had released"):
        found_by(tmp_path / "cached", with_16_examples, cached=True)


def test_a_callback_that_trains_on_after_the_last_step_is_refused(tmp_path):
    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, with_16_examples, callbacks=[TrainsOn()])


def test_a_model_that_trains_twice_is_refused(tmp_path):
    class Twice(tf.keras.Sequential):
        def fit(self, *args, callbacks=(), **kwargs):
            history = super().fit(*args, callbacks=callbacks, **kwargs)
            self.train_on_batch(X[:16], Y[:16])
            return history

    def build(hp):
        of = with_16_examples(hp)
        model = Twice([tf.keras.Input(of.input_shape[1:]), *of.layers])
        model.compile(of.optimizer, of.loss, metrics=["accuracy"])
        return model

    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, build)


def test_a_second_private_optimizer_is_refused(tmp_path):
    def build(hp):
        model = with_16_examples(hp)
        model.second = tuned.optimizer()
        return model

    with pytest.raises(dp.NotPrivateError, match="only private one.*with another one, second"):
        found_by(tmp_path, build)


def test_layers_that_trials_share_are_refused_where_only_the_winner_is_released(tmp_path):
    shared = tf.keras.layers.Dense(2)

    def build(hp):
        of = with_16_examples(hp)
        model = tf.keras.Sequential([tf.keras.Input(of.input_shape[1:]), shared])
        model.compile(of.optimizer, of.loss, metrics=["accuracy"])
        return model

    found_by(tmp_path / "all", build)  # all trials together are accounted for, whatever they train
    with pytest.raises(dp.NotPrivateError, match="layers in `build_model`.*trained before"):
        found_by(tmp_path / "winner", build, RepeatAndSelect(3.0))
