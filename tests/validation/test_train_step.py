"""`validate` searches a `train_step` of the model's own, and says so where it cannot."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION

layers = tf.keras.layers
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
BATCH = (floats(6, 5), np.arange(6) % 3)


class Own(tf.keras.Sequential):
    """A model with a step of its own: Keras's, and what `after` does."""

    after = staticmethod(lambda model, x, loss: None)
    releases = True

    def __init__(self, **attributes):
        super().__init__([tf.keras.Input([5]), layers.Dense(3)])
        vars(self).update(attributes)
        self.state = tf.Variable(tf.zeros([3]), trainable=False)
        self.mean = tf.keras.metrics.Mean()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, self.shifted(logits))
        if self.releases:
            self.optimizer.minimize(loss, self.trainable_variables, tape)
        else:
            gradients = tape.gradient(loss, self.trainable_variables)
            for gradient, variable in zip(gradients, self.trainable_variables):
                variable.assign_sub(gradient)
        self.after(self, logits, loss)
        return self.compute_metrics(x, y, logits, None)

    def shifted(self, logits):
        return logits - self.state


def weighs(model, logits, loss):
    model.mean.update_state(loss)
    model.state.assign_add(tf.fill([3], model.mean.result()))


def checked(model, optimizer=None, compiled=True):
    optimizer = optimizer or dp.DPSGD(1.0, 1.0)
    if compiled:
        model.compile(optimizer, LOSS, metrics=["accuracy"])
    return dp.validate(model, BATCH, loss=LOSS, optimizer=optimizer)


CARRIES = {
    "a centre": lambda model, logits, loss: model.state.assign(tf.reduce_mean(logits, 0)),
    "a metric": weighs,
    "a queue": lambda model, logits, loss: model.state.assign(
        tf.concat([logits[:1, 0], model.state[:-1]], 0)
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CARRIES)
def test_state_that_a_step_writes_after_minimize_is_found(name):
    seen = checked(Own(after=CARRIES[name]))
    found = [f for f in seen.findings if f.kind == "train_step"]
    assert not seen.ok and len(found) == 1 and "writes data of the batch" in found[0].what, seen


@pytest.mark.slow_on(2)
def test_a_step_that_is_right_is_accepted_and_nothing_is_changed():
    model = Own(after=lambda model, logits, loss: model.mean.update_state(loss))
    optimizer = dp.DPAdam(1.0, 1.0)
    num_variables, weights = len(optimizer.variables), model.get_weights()
    seen = checked(model, optimizer)
    assert seen.ok and not seen.findings, seen
    assert model.optimizer is optimizer and len(optimizer.variables) == num_variables
    assert optimizer.ledger.num_releases == 0
    for before, after in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(before, after)
    assert model.fit(*BATCH, verbose=0, batch_size=3) and optimizer.ledger.num_releases == 2


class Scales(Own):
    """The step of a custom loop for Keras 3, which scales its loss."""

    scales = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(self.compute_loss(x, y, logits))
            if self.scales:
                loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.compute_metrics(x, y, logits, None)


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 has no `scale_loss`")
def test_a_step_that_scales_its_loss_is_accepted_and_one_that_does_not_is_found():
    optimizer = dp.DPAdam(1.0, 1.0)
    model = Scales()
    weights = model.get_weights()
    seen = checked(model, optimizer)
    assert seen.ok and not seen.findings, seen
    assert optimizer.ledger.num_releases == 0 and not optimizer.built
    for before, after in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(before, after)
    assert model.fit(*BATCH, verbose=0, batch_size=3) and optimizer.ledger.num_releases == 2
    seen = checked(Scales(scales=False))
    assert not seen.ok and "clipped and noised by this library" in str(seen)


def test_what_mixes_in_the_step_itself_is_found():
    class Mixes(Own):
        def train_step(self, data):
            x, y = data
            return super().train_step((x - tf.reduce_mean(x, 0), y))

    seen = checked(Mixes())
    assert not seen.ok and "mixes the examples of a batch" in str(seen)


def test_a_step_without_a_release_is_found():
    seen = checked(Own(releases=False))
    assert not seen.ok and "releases no gradients" in str(seen)


@pytest.mark.slow
def test_a_step_that_cannot_be_searched_is_not_called_fit():
    assert "Call `model.compile`" in str(checked(Own(), compiled=False).errors)

    class Fails(Own):
        def train_step(self, data):
            raise KeyError("nothing")

    class Makes(Own):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    assert "does not compile: KeyError" in str(checked(Fails()).errors)
    assert "custom `make_train_function`" in str(checked(Makes()).errors)


class OwnSchedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


def fixed(provenance):
    return dp.side_information.FixedPreconditioner(lambda v: 0.5, provenance=provenance)


UNSAVED = {
    "function": lambda: dp.AdaDPS(fixed("public"), 1.0, 1.0),
    "provenance": lambda: dp.AdaDPS(fixed(dp_accounting.GaussianDpEvent(2.0)), 1.0, 1.0),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", UNSAVED)
def test_an_optimizer_that_keras_cannot_save_is_searched_and_stays_as_it_is(name):
    optimizer = UNSAVED[name]()
    before = dict(vars(optimizer)), optimizer.side_information, optimizer.ledger.other_events
    seen = checked(tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(3)]), optimizer)
    assert seen.ok, seen
    after = dict(vars(optimizer)), optimizer.side_information, optimizer.ledger.other_events
    assert after[1:] == before[1:]
    assert all(after[0][key] is value for key, value in before[0].items())


def test_an_optimizer_that_cannot_be_copied_is_a_finding():
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=OwnSchedule())  # which has no `get_config`
    seen = checked(tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(3)]), optimizer)
    assert not seen.ok and "It could not be copied" in str(seen.errors)


def test_a_batch_without_targets_is_a_finding():
    plain = tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(3)])
    plain.compile(dp.DPSGD(1.0, 1.0), LOSS)
    (found,) = dp.validate(plain, BATCH[0]).errors
    assert "has no targets" in found.what and found.fix == "Pass `(x, y)`."


def test_labels_that_are_strings_are_a_finding_with_its_own_fix():
    plain = tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(3)])
    plain.compile(dp.DPSGD(1.0, 1.0), LOSS)
    (found,) = dp.validate(plain, (BATCH[0], np.array(["cat", "dog"])[[0, 1, 0, 0, 1, 1]])).errors
    assert "Number them before training" in found.what and not found.fix


def test_labels_that_do_not_suit_the_loss_are_not_said_to_need_a_compiled_step():
    plain = tf.keras.Sequential([tf.keras.Input([5]), layers.Dense(3)])
    plain.compile(dp.DPSGD(1.0, 1.0), "mse")
    (found,) = dp.validate(plain, (BATCH[0], np.eye(6, 2))).errors
    assert "labels whose shape does not suit the loss" in found.fix
