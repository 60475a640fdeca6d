"""What `fit` says of what ε does not cover, whether or not a callback of the library is there."""

import warnings

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.callbacks import epoch_backup

N, DELTA = 1_000, 1e-4
CALLBACKS = keras.callbacks


def said(callbacks, fits=1, model=None):
    """What is said beside Keras's own warnings."""
    model = model or catalogue.compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            catalogue.fit(model, 1, callbacks)
    return [(str(w.message), w.filename) for w in caught if "ε" in str(w.message)]


@pytest.fixture(params=["alone", "monitored"])
def more(request):
    monitored = request.param == "monitored"
    return [dp.PrivacyMonitor(N, DELTA, full_passes=False)] if monitored else []


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "callback, name",
    [
        (lambda: CALLBACKS.EarlyStopping("loss"), "EarlyStopping(monitor='loss')"),
        (lambda: CALLBACKS.TerminateOnNaN(), "TerminateOnNaN(monitor='loss')"),
        (lambda: CALLBACKS.ReduceLROnPlateau("loss"), "ReduceLROnPlateau(monitor='loss')"),
    ],
)
def test_callbacks_that_decide_by_training_metrics_are_told_once(callback, name, more):
    ((text, _),) = said([callback(), *more])
    assert text.startswith("Callbacks act on metrics of the training data") and name in text


@pytest.mark.in_turns
def test_adapted_layers_are_told_once(more):
    layer = keras.layers.Normalization(name="units")
    x, _ = catalogue.data()
    layer.adapt(x)
    model = keras.Sequential([keras.Input(x.shape[1:]), layer, keras.layers.Dense(3)])
    model.compile(catalogue.make("DPSGD"), loss=catalogue.loss())
    ((text, where),) = said(more, model=model)
    assert "Layers of the model were adapted to data: units" in text
    assert where == catalogue.__file__


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("backup", [CALLBACKS.BackupAndRestore, epoch_backup])
def test_a_backup_that_forgets_releases_is_told_unless_there_is_a_log(backup, more, tmp_path):
    ((text, _),) = said([backup(str(tmp_path / "backup")), *more])
    assert "forgets the releases since that backup" in text and "without a `ReleaseLog`" in text
    log = dp.callbacks.ReleaseLog(tmp_path / "log")
    model = catalogue.compiled(expected_batch_size=8)
    assert not said([backup(str(tmp_path / "other")), log, *more], model=model)
    log.close()


@pytest.mark.slow_on(3)
def test_a_step_that_validate_traces_meanwhile_takes_no_word_away():
    class Validates(CALLBACKS.Callback):
        def on_train_begin(self, logs=None):
            assert dp.validation.validate(self.model, catalogue.data()).ok

    ((text, _),) = said([Validates(), CALLBACKS.TerminateOnNaN()])
    assert text.startswith("Callbacks act on metrics of the training data")


@pytest.mark.slow_on(2)
def test_it_is_told_again_only_when_a_step_is_built_anew():
    model = catalogue.compiled()
    callback = [CALLBACKS.EarlyStopping("loss")]
    assert len(said(callback, fits=2, model=model)) == 1
    model.compile(model.optimizer, loss=catalogue.loss())
    assert len(said(callback, model=model)) == 1


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
def test_on_replicas_it_is_told_once_too(more):
    with catalogue.mirrored().scope():
        model = catalogue.compiled()
    ((text, _),) = said([CALLBACKS.EarlyStopping("loss"), *more], model=model)
    assert text.startswith("Callbacks act on metrics of the training data")


@pytest.mark.slow_on(2)
def test_of_what_needs_no_word_there_is_none(tmp_path):
    allowed = [
        CALLBACKS.EarlyStopping("val_loss"),
        CALLBACKS.ModelCheckpoint(str(tmp_path / "model.keras")),
        CALLBACKS.CSVLogger(str(tmp_path / "log.csv")),
    ]
    model = catalogue.compiled()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*ε")
        x, y = catalogue.data()
        model.fit(x, y, 8, verbose=0, validation_data=(x, y), callbacks=allowed)
        model.train_on_batch(x[:8], y[:8])
        model.compile("sgd", loss=catalogue.loss())
        model.fit(x, y, 8, verbose=0, callbacks=[CALLBACKS.TerminateOnNaN()])
    assert isinstance(model.optimizer, tf.keras.optimizers.SGD)
