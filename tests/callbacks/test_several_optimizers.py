"""Callbacks that are told which optimizer counts, and what steers training without noise."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting.composition import epsilon

# Which optimizers a callback names hardly depends on the version of Keras.
pytestmark = pytest.mark.slow_on(2)

N, DELTA = 1_000, 1e-3
TIMES = 2  # steps of the critic in each step of `fit`


class Adversarial(keras.Model):
    """A GAN on vectors: the critic, which sees data, trains privately; the generator does not."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input([6]), keras.layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input([2]), keras.layers.Dense(6)])
        self.critic_optimizer = catalogue.make("DPSGD", expected_batch_size=8)
        self.generator_optimizer = keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.critic(x)

    def train_step(self, x):
        noise = tf.zeros([8, 2])
        for _ in range(TIMES):
            with tf.GradientTape() as tape:
                difference = self.critic(x) - self.critic(self.generator(noise))
                loss = tf.reduce_sum(difference, axis=1)
            self.critic_optimizer.minimize(loss, self.critic.trainable_variables, tape)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(noise)))
        variables = self.generator.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": loss}


def fit_adversarial(callbacks, epochs=1):
    model = Adversarial()
    model.compile()
    # Keras 3 builds an optimizer that it does not know in the first step, where it must not.
    model.generator_optimizer.build(model.generator.trainable_variables)
    x = catalogue.data()[0]
    made = callbacks(model.critic_optimizer)
    return model, model.fit(x, batch_size=8, epochs=epochs, verbose=0, callbacks=made).history


def numbers(optimizer, **more):
    return {"num_examples": N, "delta": DELTA, "optimizer": optimizer, "full_passes": False, **more}


def test_the_monitor_the_budget_and_the_log_take_one_of_several_optimizers(tmp_path):
    limit = epsilon(0.5, 8 / N, 6, DELTA) * (1 + 1e-9)
    made = []

    def callbacks(optimizer):
        made[:] = [
            dp.PrivacyMonitor(**numbers(optimizer)),
            dp.PrivacyBudget(limit, **numbers(optimizer, releases_per_step=TIMES)),
            dp.ReleaseLog(tmp_path / "log", optimizer=optimizer, releases_per_step=TIMES),
        ]
        return made

    model, history = fit_adversarial(callbacks)
    # Of four steps with two releases each, three fit.
    assert model.critic_optimizer.ledger.segments == [(0.5, 8.0, 6)]
    assert history["epsilon"][-1] == pytest.approx(epsilon(0.5, 8 / N, 6, DELTA))
    assert made[0].epsilon() == history["epsilon"][-1]
    assert made[1].releases_left() == 0
    assert made[2].num_releases == 6


def test_the_budget_notices_more_releases_than_it_was_told():
    with pytest.raises(ValueError, match="releases_per_step=1, and 2 releases in a call of 1 step"):
        fit_adversarial(lambda optimizer: [dp.PrivacyBudget(99.0, **numbers(optimizer))])


@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget, dp.ReleaseLog])
def test_an_optimizer_without_a_ledger_is_refused(kind, tmp_path):
    arguments = {
        dp.PrivacyMonitor: (N, DELTA),
        dp.PrivacyBudget: (1.0, DELTA, N),
        dp.ReleaseLog: (tmp_path / "log",),
    }
    with pytest.raises(TypeError, match="`optimizer` must be an optimizer of tf_adaptive_dp"):
        kind(*arguments[kind], optimizer=keras.optimizers.SGD())


STEERING = {
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss"),
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("accuracy"),
    "TerminateOnNaN": lambda: keras.callbacks.TerminateOnNaN(),
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(
        "unused.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
    ),
}
HARMLESS = {
    "val_loss": lambda: keras.callbacks.EarlyStopping("val_loss"),
    "epsilon": lambda: keras.callbacks.EarlyStopping("epsilon", mode="min"),
    "all weights": lambda: keras.callbacks.ModelCheckpoint(
        "unused.weights.h5", monitor="loss", save_weights_only=True
    ),
    "no metric": lambda: keras.callbacks.LambdaCallback(),
}


@pytest.fixture(scope="module")
def model():
    model = catalogue.mlp()
    model.compile(
        catalogue.make("DPSGD", expected_batch_size=8), loss=catalogue.loss(), metrics=["accuracy"]
    )
    return model


def warned_of(model, callbacks):
    """The warnings of a call of `fit` about what acts on training metrics."""
    x, y = catalogue.data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, 8, verbose=0, callbacks=callbacks, validation_data=(x[:8], y[:8]))
    return [str(w.message) for w in caught if "metrics of the training data" in str(w.message)]


def ours(log):
    numbers = {"delta": DELTA, "num_examples": 32}
    return [dp.PrivacyMonitor(**numbers), dp.PrivacyBudget(999.0, **numbers), dp.ReleaseLog(log)]


@pytest.mark.parametrize("name", STEERING)
def test_a_callback_that_acts_on_a_training_metric_is_named_once_in_each_fit(
    name, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for k in range(2):
        monitor, budget, _ = ours(tmp_path / f"log{k}")
        (message,) = warned_of(model, [STEERING[name](), monitor, budget])
        assert f"Received: {name}(monitor=" in message


def test_all_of_them_are_named_and_the_harmless_are_not(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = keras.models.clone_model(model)
    model.compile(
        catalogue.make("DPSGD", expected_batch_size=8), loss=catalogue.loss(), metrics=["accuracy"]
    )
    mine = ours(tmp_path / "log")
    assert warned_of(model, [*mine, *(make() for make in HARMLESS.values())]) == []
    steering = [make() for make in STEERING.values()]
    (message,) = warned_of(model, [*mine, *steering])
    assert all(name in message for name in STEERING)
    assert np.isfinite(mine[0].epsilon())


@pytest.mark.parametrize("name", ["ADADP", "UntunedSGD"])
@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.ReduceLROnPlateau("val_loss"),
    ],
    ids=["scheduler", "plateau"],
)
def test_callbacks_that_would_overwrite_an_adapted_rate_are_refused(name, callback, tmp_path):
    model = catalogue.mlp()
    optimizer = getattr(dp, name)(
        noise_multiplier=1.0,
        expected_batch_size=8,
        **({"l2_norm_clip": 1.0} if name == "ADADP" else {}),
    )
    model.compile(optimizer, loss=catalogue.loss())
    monitor, budget, _ = ours(tmp_path / "log")
    kind = type(callback).__name__
    for mine in ([monitor], [budget], []):
        with pytest.raises(ValueError, match=f"{name} adapts its learning rate.*Received: {kind}"):
            model.fit(*catalogue.data(), 8, verbose=0, callbacks=[callback, *mine])
    assert not optimizer.ledger.num_releases


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["ADADP euler", "UntunedSGD"])
@pytest.mark.parametrize(
    "callback",
    [
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9),
    ],
    ids=["scheduler", "plateau"],
)
def test_they_are_refused_in_a_later_fit_too_which_traces_no_step(name, callback):
    model = catalogue.compiled(name)
    read = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_, **__: float(rate()))

    def rate():
        return tf.convert_to_tensor(model.optimizer.learning_rate)

    model.fit(*catalogue.data(), 8, verbose=0, callbacks=[read])
    before, later = rate(), []
    last = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: later.append(rate()))
    with pytest.raises(ValueError, match="adapts its learning rate, which the callback would"):
        model.fit(*catalogue.data(), 8, 3, verbose=0, callbacks=[last, callback()])
    assert rate() == (later or [before])[-1]
    model.optimizer.learning_rate = 0.25
    assert rate() == 0.25


def test_callbacks_may_set_the_rate_of_other_optimizers(model, tmp_path):
    model = keras.models.clone_model(model)
    model.compile(catalogue.make("DPSGD", expected_batch_size=8), loss=catalogue.loss())
    halved = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05)
    model.fit(*catalogue.data(), 8, verbose=0, callbacks=[halved, *ours(tmp_path / "log")])
    assert float(tf.convert_to_tensor(model.optimizer.learning_rate)) == pytest.approx(0.05)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("own_batches", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_two_optimizers_on_one_batch_are_noticed(recwarn, own_batches, inner):
    weights = [tf.Variable([1.0]), tf.Variable([1.0])]
    optimizers = [dp.DPSGD(1.0, 1.0, name=name) for name in ("encoder", "head")]

    def minimize(k, x):
        with tf.GradientTape() as tape:
            loss = x * weights[k]
        optimizers[k].minimize(loss, [weights[k]], tape)

    steps = [lambda x, k=k: minimize(k, x) for k in range(2)]
    if inner:
        steps = [tf.function(step) for step in steps]

    @tf.function
    def step(x, y):
        steps[0](x)
        steps[1](y if own_batches else x)

    step(tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0]))
    said = [str(w.message) for w in recwarn if "same batch" in str(w.message)]
    assert not said if own_batches else "'encoder' and 'head'" in said[0]


def test_two_optimizers_of_one_loss_are_noticed():
    weights = [tf.Variable([1.0]), tf.Variable([1.0])]
    optimizers = [dp.DPSGD(1.0, 1.0, name=name) for name in ("encoder", "head")]

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = x * weights[0] * weights[1]
        for optimizer, w in zip(optimizers, weights):
            optimizer.minimize(loss, [w], tape)

    with pytest.warns(UserWarning, match="same batch.*'encoder' and 'head'"):
        step(tf.constant([1.0, 2.0]))
