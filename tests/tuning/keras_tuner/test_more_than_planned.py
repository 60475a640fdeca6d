"""Trials that would release more than the search accounts for, or depend on each other."""

import contextlib

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.tuning.strategies import Composition, LiuTalwar, RepeatAndSelect

# What a search counts hardly depends on the version of Keras.
pytestmark = pytest.mark.slow_on(2)

X, Y = tuned.data(64)
SAMPLING = dp.PoissonSampling(0.25, max_batch_size=40, steps=4)
MORE = "must release what was planned and no more.*Received: "


def found_by(
    tmp_path, build=tuned.build, strategy=None, callbacks=(), change=None, sampling=SAMPLING
):
    """Searches on the batches of `SAMPLING`, after `change`, accounted for as `sampling`."""
    made = tuned.tuner(
        *(tmp_path, build),
        num_examples=64,
        sampling=sampling,
        strategy=strategy or Composition(2),
    )
    batches = dp.poisson_batches((X, Y), SAMPLING)
    made.search(
        batches if change is None else change(batches),
        epochs=1,
        validation_data=(X, Y),
        callbacks=list(callbacks),
        verbose=0,
    )
    return made


def with_16_examples(hp, **compile_with):
    """A model whose batches have the expected size of the sampling."""
    optimizer = tuned.optimizer(hp.Choice("rate", [0.1, 0.2]), expected_batch_size=16.0)
    return tuned.model(optimizer, **compile_with)


def with_step(step, **compile_with):
    """Makes `build_model` for models with 16 examples and this `train_step`."""

    class Own(tf.keras.Sequential):
        def train_step(self, batch):
            x, y, weights = batch
            loss = tf.reduce_mean(step(self, x, y, weights))
            if GENERATION == 2:
                self.compiled_metrics.update_state(y, self(x))
                return {"loss": loss}
            return {"loss": loss, **self.compute_metrics(x, y, self(x))}

    def build(hp):
        of = with_16_examples(hp)
        model = Own([tf.keras.Input(of.input_shape[1:]), *of.layers])
        model.compile(of.optimizer, of.loss, metrics=["accuracy"], **compile_with)
        return model

    return build


def unweighted_term(model, x, y, weights):
    """Padding has a gradient: a part of the loss is not multiplied by the weights."""
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = weights * tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss += 0.1 * tf.reduce_sum((logits - 1) ** 2, axis=1)
    model.optimizer.minimize(loss, model.trainable_variables, tape)
    return loss


class TrainsOn(tf.keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.train_on_batch(X[:16], Y[:16])


def test_batches_that_come_again_in_another_trial_are_refused(tmp_path):
    found_by(tmp_path / "fresh", with_16_examples)
    with pytest.raises(dp.NotPrivateError, match="it or an earlier trial had released"):
        found_by(tmp_path / "cached", with_16_examples, change=lambda d: d.cache())


def test_a_callback_that_trains_on_after_the_last_step_is_refused(tmp_path):
    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, with_16_examples, callbacks=[TrainsOn()])
    (path,) = tmp_path.glob("**/releases")
    with contextlib.closing(dp.ReleaseLog(path, steps=5)) as log:
        assert log.num_releases == 5
    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, with_16_examples)  # it went on, and called its epsilon proven


def test_a_trial_that_crashes_after_it_released_more_is_no_crash(tmp_path):
    class TrainsOnAndFails(TrainsOn):
        def on_train_end(self, logs=None):
            super().on_train_end(logs)
            raise RuntimeError("too late")

    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, with_16_examples, callbacks=[TrainsOnAndFails()])
    with pytest.raises(dp.NotPrivateError, match=MORE + "5 releases, 4 were planned"):
        found_by(tmp_path, with_16_examples)


def test_a_budget_that_is_exceeded_is_no_crash(tmp_path):
    class Exceeded(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise dp.BudgetExceededError("no room")

    with pytest.raises(dp.BudgetExceededError, match="no room"):
        found_by(tmp_path, with_16_examples, callbacks=[Exceeded()])


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


@pytest.mark.parametrize("where", ["attribute", "list", "mapping", "layer"])
def test_a_second_private_optimizer_is_refused(tmp_path, where):
    def build(hp):
        model, second = with_16_examples(hp), tuned.optimizer(0.125)
        holder = model.layers[-1] if where == "layer" else model
        holder.second = {"list": [second], "mapping": {"second": [second]}}.get(where, second)
        return model

    with pytest.raises(dp.NotPrivateError, match="only private one.*learning_rate=0.125"):
        found_by(tmp_path, build)


STRATEGIES = pytest.mark.parametrize("strategy", [Composition(1), RepeatAndSelect(1.5)])


@pytest.mark.slow_after(1)
@STRATEGIES
def test_batches_without_the_weights_that_mark_their_padding_are_refused(tmp_path, strategy):
    # By their marks, or because all rows of padding count as examples.
    match = "batches reached the optimizer without the|larger batches than planned"
    with pytest.raises(dp.NotPrivateError, match=match):
        found_by(
            tmp_path, with_16_examples, strategy, change=lambda d: d.map(lambda x, y, w: (x, y))
        )


@pytest.mark.slow_after(1)
@STRATEGIES
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_less_noise_than_planned_is_refused(tmp_path, strategy, steps_per_call):
    # XLA cannot raise an error in the step, which is recorded with half of the noise instead.
    compile_with = {"jit_compile": True, "steps_per_execution": steps_per_call}
    with pytest.raises(dp.NotPrivateError, match="with less noise or larger batches than planned"):
        found_by(tmp_path, with_step(unweighted_term, **compile_with), strategy)


@pytest.mark.slow_after(1)
@STRATEGIES
def test_larger_batches_than_planned_are_refused_though_no_step_follows(tmp_path, strategy):
    def larger(batches):
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(64)
        return rows.batch(60, drop_remainder=True).repeat(4)

    def build(hp):
        return with_16_examples(hp, steps_per_execution=4)

    with pytest.raises(dp.NotPrivateError, match="with less noise or larger batches than planned"):
        found_by(tmp_path, build, strategy, change=larger, sampling="poisson")


@pytest.mark.slow_after(1)
@STRATEGIES
def test_only_what_was_checked_is_called_proven(tmp_path, strategy):
    def weighted(model, x, y, weights):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = weights * tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        model.optimizer.minimize(loss, model.trainable_variables, tape)
        return loss

    def said(build, folder):
        return " ".join(found_by(folder, build, strategy).privacy_statement().split())

    compiled = said(with_step(weighted), tmp_path / "compiled")
    assert "proven upper bound" in compiled and "did not verify" not in compiled
    if not strategy.releases_all:
        return  # and refuses what does not show which batch it got, see below
    eager = said(with_step(weighted, run_eagerly=True), tmp_path / "eager")
    assert "proven" not in eager and "for 4 of the noisy gradients" in eager


def test_layers_that_trials_share_are_refused_where_only_the_winner_is_released(tmp_path):
    shared = {}

    def build(hp):
        of = with_16_examples(hp)
        model = tf.keras.Sequential([tf.keras.Input(of.input_shape[1:]), shared["layer"]])
        model.compile(of.optimizer, of.loss, metrics=["accuracy"])
        return model

    def refuse(folder):
        with pytest.raises(dp.NotPrivateError, match="are trained in `build_model`.*Nothing was"):
            found_by(tmp_path / folder, build, LiuTalwar(gamma=0.5))
        assert len(tuned.journal_lines(tmp_path / folder)) == 1  # no trial began

    shared["layer"] = tf.keras.layers.Dense(2)
    refuse("new")
    shared["layer"] = tf.keras.layers.Dense(2)
    found_by(tmp_path / "all", build)  # all trials together are accounted for, whatever they train
    refuse("trained")


@pytest.mark.parametrize("sampling", [SAMPLING, "poisson"])
def test_steps_that_show_no_batch_are_refused_where_only_the_winner_is_released(tmp_path, sampling):
    with pytest.raises(dp.NotPrivateError, match="in a compiled step.*run_eagerly=True, 1 rep"):
        found_by(
            *(tmp_path, lambda hp: with_16_examples(hp, run_eagerly=True), RepeatAndSelect(3.0)),
            sampling=sampling,
        )
    assert len(tuned.journal_lines(tmp_path)) == 1
