"""What is left of a training whenever its process is killed: the last epoch, whole."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.callbacks import backups as module
from tf_adaptive_dp.callbacks.backups import epoch_backup, save_weights

X, Y = np.ones([8, 3], np.float32), np.zeros([8, 2], np.float32)


class Killed(BaseException):
    """Nothing of ours catches it."""


def model(built=True):
    tf.keras.backend.clear_session()
    layers = [tf.keras.Input([3])] if built else []
    made = tf.keras.Sequential([*layers, tf.keras.layers.Dense(2)])
    optimizer = dp.DPAdam(1.0, 1.0, expected_batch_size=4.0, learning_rate=0.1)
    made.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))
    return made


class Epochs(tf.keras.callbacks.Callback):
    """Notes which epochs begin, and after which one the process ends."""

    def __init__(self, killed_after=None):
        super().__init__()
        self.begun, self._killed_after = [], killed_after

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self._killed_after:
            raise Killed


def train(folder, made, epochs=4, killed_after=None):
    seen = Epochs(killed_after)
    made.fit(X, Y, 4, epochs, 0, callbacks=[epoch_backup(folder), seen])
    return seen.begun


def state(made):
    return [np.array(v) for v in (*made.trainable_variables, *made.optimizer.variables)]


def restored(folder, built=True):
    made, callback = model(built), epoch_backup(folder)
    callback.set_model(made)
    callback.on_train_begin()
    return made


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("built", [True, False])
def test_a_training_goes_on_after_its_last_epoch(tmp_path, built):
    with pytest.raises(Killed):
        train(tmp_path / "backup", first := model(built), killed_after=1)
    second = model(built)
    assert train(tmp_path / "backup", second) == [2, 3]
    assert second.optimizer.ledger.segments == [(1.0, 4.0, 8)]
    assert int(second.optimizer.iterations) == 8 and int(first.optimizer.iterations) == 4
    # What is kept is the last epoch, also for a model without variables as yet.
    again = restored(tmp_path / "backup", built)
    again(X)
    again.optimizer.build(again.trainable_variables)
    if GENERATION == 3:
        for found, expected in zip(state(again), state(second), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert again.optimizer.ledger.segments == [(1.0, 4.0, 8)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["run [1]", "[", "a[b]/run"])
def test_a_directory_with_brackets_is_restored_from_or_refused_before_training(tmp_path, name):
    if GENERATION == 3:
        assert train(tmp_path / name, model(), epochs=1) == [0]
        assert train(tmp_path / name, model(), epochs=2) == [1]
    else:
        with pytest.raises(ValueError, match=r"Choose a directory without brackets.*\["):
            epoch_backup(tmp_path / name)


@pytest.mark.slow
@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 saves checkpoints, which TensorFlow replaces")
def test_a_kill_at_any_operation_leaves_a_whole_epoch(tmp_path, monkeypatch):
    made = model()
    train(tmp_path / "backup", made, epochs=1)
    operations = ("sync", "rename", "unlink", "weights", "half")
    for operation in operations:
        folder = tmp_path / operation
        shutil.copytree(tmp_path / "backup", folder)
        with monkeypatch.context() as patch:
            kill_at(patch, operation)
            with pytest.raises(Killed):
                train(folder, restored(folder), epochs=2)
        whole = restored(folder)
        finished = int(whole.optimizer.iterations) // 2
        assert finished == (2 if operation == "unlink" else 1)
        assert whole.optimizer.ledger.segments == [(1.0, 4.0, 2 * finished)]
        assert train(folder, model(), epochs=3) == list(range(finished, 3))
        assert [p.name for p in folder.glob("*.h5")] == ["3.weights.h5"]


def kill_at(patch, operation):
    def killed(*args, **kwargs):
        raise Killed

    if operation == "sync":
        patch.setattr(module.files, "sync", killed)
    elif operation == "weights":
        patch.setattr(module, "save_weights", killed)
    elif operation == "half":

        def half(model, path):
            save_weights(model, path)
            path.write_bytes(path.read_bytes()[:1000])
            raise Killed

        patch.setattr(module, "save_weights", half)
    else:
        real = getattr(module.Path, operation)
        patch.setattr(
            module.Path,
            operation,
            lambda path, *a, **k: (killed if path.suffix == ".h5" else real)(path, *a, **k),
        )
