"""No number that a winner leaves tells how many candidates there were, nor when it was tried."""

import random
import re

import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp._keras import process_state
from tf_adaptive_dp._keras.layers import random_generators
from tf_adaptive_dp.tuning.keras_tuner import results
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments
from tf_adaptive_dp.tuning.keras_tuner.oracle import HonestOracle
from tf_adaptive_dp.tuning.keras_tuner.search_plan import SearchPlan

WINNER, LOSER = {"learning_rate": 0.1}, {"learning_rate": 1.0}


@pytest.fixture
def forced(monkeypatch):
    """A search of real trials of which the one at a position wins, and with next to no noise."""
    monkeypatch.setattr(SearchPlan, "noise_multiplier", lambda plan: 1e-6)
    for name in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
        monkeypatch.setattr(SearchPlan, name, lambda plan, *args: 1.0)

    def search(folder, position, number, build=tuned.build, **arguments):
        draws = [WINNER if k == position else LOSER for k in range(number)]
        scores = iter([0.0, *(0.75 if k == position else 0.25 for k in range(number))])
        monkeypatch.setattr(HonestOracle, "draws", lambda oracle, strategy: draws)
        monkeypatch.setattr(
            FitArguments,
            "scores",
            lambda data, model: {"val_accuracy": next(scores)},
        )
        strategy = {"strategy": "repeat_and_select", "num_trials": 2}
        return tuned.search(tuned.tuner(folder, build, **strategy), **arguments)

    return search


def zeros(hp, *more):
    """A model of which all weights begin at zero, but those of layers that are added."""
    rate = hp.Choice("learning_rate", [0.01, 0.1, 1.0])
    first = tf.keras.layers.Dense(2, kernel_initializer="zeros")
    made = tf.keras.Sequential([tf.keras.Input([3]), first, *more])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    made.compile(tuned.optimizer(rate, expected_batch_size=16.0), loss, metrics=["accuracy"])
    return made


def frozen(hp):
    """A model of which one weight is random and stays as it is."""
    return zeros(hp, tf.keras.layers.Dense(2, trainable=False))


def of_events(path):
    """What a log of TensorBoard says, without its dates."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    said = []
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(record)
        event.wall_time = 0
        for value in event.summary.value:
            dated = "per_second" in value.tag or value.tag == "_hparams_/session_start_info"
            said.append((value.tag, np.zeros(0) if dated else tf.make_ndarray(value.tensor)))
            value.ClearField("tensor")
            plugin = value.metadata.plugin_data
            if dated and plugin.plugin_name == "hparams":
                data = plugin_data_pb2.HParamsPluginData.FromString(plugin.content)
                data.session_start_info.start_time_secs = 0
                plugin.content = data.SerializeToString()
        said.append((event.SerializeToString(), np.zeros(0)))
    return said


def left(folder):
    """All that a search left in its project, but the dates and the names that are random."""
    found = {}
    root = folder / "search"
    (trial,) = (name.removeprefix("trial_") for name in tuned.folders(folder))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root)).replace(trial, "ID")
        name = re.sub(r"[0-9a-f]{16}\.honest", "honest", name)
        if "tfevents" in name:
            found[name, path.stat().st_size] = of_events(path)
        elif path.suffix in (".h5", ".index"):
            found[name, path.stat().st_size] = tuned.contents(path)
        elif ".data-" in name:
            found[name, path.stat().st_size] = []
        else:
            found[name, path.stat().st_size] = [(path.read_bytes(), np.zeros(0))]
    text = repr([[what for what, _ in said] for said in found.values()])
    text = text.replace(trial, "ID").replace(str(folder), "FOLDER")
    return list(found), text, [numbers for said in found.values() for _, numbers in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    "searches",
    [
        [(0, 1), (1, 2)],
        pytest.param([(0, 3), (1, 3), (2, 3)], marks=pytest.mark.slow),
    ],
    ids=["two positions", "each of three"],
)
def test_where_the_winner_was_tried_changes_dates_alone(tmp_path, monkeypatch, forced, searches):
    monkeypatch.setattr(process_state, "NUMBERS", 1)  # of what comes after a search
    everything = {"histogram_freq": 1, "write_images": True, "update_freq": 1}
    everything |= {"embeddings_freq": 1, "profile_batch": 1, "write_steps_per_second": True}
    searched = []
    for position, number in searches:
        folder = tmp_path / f"{position}{number}"
        board = tf.keras.callbacks.TensorBoard(str(tmp_path / "board"), **everything)
        monitor = dp.PrivacyMonitor(tuned.NUM_EXAMPLES, tuned.DELTA, str(tmp_path / "monitor"))
        forced(folder, position, number, zeros, callbacks=[board, monitor], batch_size=16, epochs=1)
        searched.append(left(folder))
    names, text, numbers = searched[0]
    assert len(names) > 8 and "dense/kernel" in text and "epoch_loss" in text
    for other_names, other_text, other_numbers in searched[1:]:
        assert other_names == names and other_text == text
        for found, expected in zip(other_numbers, numbers, strict=True):
            if found.dtype.kind == "f":
                np.testing.assert_allclose(found, expected, atol=1e-3)
            else:
                np.testing.assert_array_equal(found, expected)


@pytest.mark.slow_on(2)
def test_random_layers_that_models_share_do_not_tell_how_many_there_were(
    tmp_path, monkeypatch, forced
):
    monkeypatch.setattr(process_state, "NUMBERS", 1)
    drawn = []
    for position, number in ((0, 1), (1, 3)):
        shared = [tf.keras.layers.RandomFlip("horizontal")]

        def build(hp, shared=shared):
            return zeros(hp, tf.keras.layers.Reshape([1, 2, 1]), *shared, tf.keras.layers.Flatten())

        build(keras_tuner.HyperParameters())  # makes the generator
        (generator,) = random_generators(shared[0])
        before = generator.state.numpy()
        folder = tmp_path / str(position)
        made = forced(folder, position, number, build, batch_size=16, epochs=2)
        np.testing.assert_array_equal(generator.state.numpy(), before)
        made.get_best_models()
        drawn.append(generator.state.numpy() - before)
    np.testing.assert_array_equal(*drawn)


def draw_of_each_generator():
    return [
        random.random(),
        np.random.random(),
        float(tf.random.uniform([])),
        tf.keras.initializers.GlorotUniform()([2, 2]).numpy().tolist(),
    ]


@pytest.mark.slow
def test_a_known_seed_does_not_tell_when_the_winner_was_tried(tmp_path, monkeypatch):
    kernels, afterwards = [], []
    for position, number in ((0, 1), (0, 1), (1, 3)):
        scores = [0.75 if k == position else 0.25 for k in range(number)]
        tuned.Fake(monkeypatch, *scores, draws=[WINNER] * number)
        monkeypatch.setattr(process_state, "NUMBERS", 2**15)
        tf.keras.utils.set_random_seed(7)
        before = ops.uid()
        made = tuned.tuner(
            tmp_path / str(len(kernels)), frozen, strategy="repeat_and_select", num_trials=2
        )
        tuned.search(made, batch_size=16)
        # What a process does next does not tell either.
        afterwards.append(((ops.uid() - before) % 2**15, draw_of_each_generator()))
        kernels.append(made.get_best_models()[0].layers[-1].kernel.numpy())
    assert not np.allclose(kernels[0], kernels[1])
    # The first search of a process may load something for the first time.
    assert afterwards[0][1] == afterwards[1][1] and afterwards[1] == afterwards[2]


def test_without_a_seed_there_is_none_afterwards(monkeypatch):
    monkeypatch.setattr(process_state, "NUMBERS", 1)
    tf.random.set_seed(None)
    with process_state.hidden(expected_trials=3.0):
        pass
    first, second = (tf.random.uniform([]).numpy() for _ in range(2))
    assert first != second


def test_tensorflows_counter_moves_on_by_a_public_step(monkeypatch):
    monkeypatch.setattr(process_state, "NUMBERS", 100)
    for expected_trials, used, step in ((3, 7, 100), (3, 80, 100), (3, 150, 200), (9.5, 150, 200)):
        first = ops.uid()
        with pytest.raises(KeyboardInterrupt), process_state.hidden(expected_trials):
            for _ in range(used):
                ops.uid()
            raise KeyboardInterrupt
        assert ops.uid() - first == step + 1


def test_the_first_error_is_told_without_numbers():
    def crashed(*errors):
        return [{"score": None, "error": error, "releases": 4} for error in errors]

    errors = ["no memory [Op:__inference_train_function_1085]", "late"]
    alone = results.failure(crashed(*errors), is_all=False)
    assert "no memory [Op:__inference_train_function]" in alone and "late" not in alone
    assert alone == results.failure(crashed(errors[0].replace("1085", "9")), is_all=False)
    assert results.failure(crashed(*errors), is_all=True).endswith(
        "last error, which may reveal something about the data, was:\nlate"
    )
