"""Training that ends at any moment and goes on: nothing is lost, and nothing repeated."""

import json
import random
import time

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import with_noise_of_1 as compiled
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp._keras.generation import GENERATION


class Interrupt(tf.keras.callbacks.Callback):
    """Ends training as a kill would, after a number of batches."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def state(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name, saved", [("ADADP", 3), ("ADADP", 4), ("ADADP euler", 5), ("DPAdamWOSM", 6)]
)
def test_a_resumed_run_goes_on_from_the_checkpoint_exactly(tmp_path, name, saved):
    # Seeded noise: what follows is equal only if weights, slots, learning rate, the phase of ADADP
    # and the counter of the noise are.
    def run(*callbacks):
        model = compiled(name)
        catalogue.fit(model, 2, callbacks, same_batches=True)  # 4 steps an epoch
        return state(model)

    def whole(steps):
        model = compiled(name)
        x, y = catalogue.data()
        batches = np.tile(x[:8], [steps, 1]), np.tile(y[:8], steps)
        model.fit(*batches, 8, shuffle=False, verbose=0)
        model.optimizer.ledger.fewest_units = len(x)
        return state(model)

    backup = tf.keras.callbacks.BackupAndRestore
    with pytest.raises(KeyboardInterrupt):
        run(backup(tmp_path, save_freq=saved), Interrupt(saved))
    resumed = run(backup(tmp_path, save_freq=100))
    # Keras 3 begins the epoch of the checkpoint anew.
    left = 8 - saved if GENERATION == 2 else 8 - (saved - 1) // 4 * 4
    expected = whole(saved + left)
    assert len(resumed) == len(expected)
    for a, b in zip(resumed, expected):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow_on(3)
def test_a_run_that_lost_steps_goes_on_with_the_checkpoint_and_all_releases(tmp_path):
    def callbacks(log):
        backup = tf.keras.callbacks.BackupAndRestore(
            tmp_path / "backup", save_freq=3, delete_checkpoint=False
        )
        return [backup, log]

    model, log = compiled("ADADP"), dp.ReleaseLog(tmp_path / "log", steps=12)
    with pytest.raises(KeyboardInterrupt):
        # Four steps are made, three are saved, and a fifth is announced.
        catalogue.fit(model, 3, [*callbacks(log), Interrupt(4)])
    log.close()
    model, log = compiled("ADADP"), dp.ReleaseLog(tmp_path / "log", steps=12)
    assert log.num_releases == 5
    with pytest.warns(UserWarning, match="^2 releases"):
        catalogue.fit(model, 3, callbacks(log))
    assert int(model.optimizer.iterations) == 10
    assert model.optimizer.ledger.segments == log.segments == [(1.0, 8.0, 12)]


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def kill_and_finish(folder, kills, job, randomness):
    """Kills a training so often at random moments, then lets it finish.

    Returns:
      For each run that began to train: releases recorded before it, and what it reported.
      And the last run's report.
    """
    starts = []
    job = {"folder": str(folder), **job}
    with CrashInjector("killable") as injector:
        for kill in range(kills + 1):
            before, begun = len(lines(folder / "releases")), len(lines(folder / "starts"))

            def random_moment(before=before, starting=kill % 4 == 3):
                # While it starts; or between steps, in one of them or in a checkpoint.
                seconds = randomness.uniform(0, 1.2) if starting else 60
                steps = 10 if starting else randomness.randint(1, 10)
                end = time.monotonic() + seconds
                while len(lines(folder / "releases")) < before + steps and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(randomness.uniform(0, 0.005))

            code = injector.run(job, random_moment if kill < kills else None)
            assert code == (-9 if kill < kills else 0), f"run {kill} ended with {code}"
            for line in lines(folder / "starts")[begun:]:
                starts.append((before, *json.loads(line)))
    return starts, json.loads(lines(folder / "end")[-1])


def check_resumed_runs(folder, kills, steps, job):
    sampling_probability = 0.5
    starts, end = kill_and_finish(folder, kills, {"steps": steps, **job}, random.Random(kills))
    segments, updates, epsilon = end
    recorded = lines(folder / "releases")
    in_flight = job.get("steps_per_execution", 1)
    # Nothing is lost, and no more is added than was in flight.
    assert [s[:2] for s in segments] == [[1.0, 4.0]]
    assert len(recorded) <= segments[0][2] <= len(recorded) + kills * in_flight
    # No noise is repeated.
    assert len(set(recorded)) == len(recorded)
    # ε never shrinks.
    for before, released, reported in starts:
        assert released >= before
        least = dp.accounting.epsilon(1.0, sampling_probability, before, 1e-3) if before else 0.0
        assert reported >= least * (1 - 1e-9)
    assert [s[1:] for s in starts] == sorted(s[1:] for s in starts)
    assert epsilon >= dp.accounting.epsilon(1.0, sampling_probability, len(recorded), 1e-3) * (
        1 - 1e-9
    )
    # The run is as long as was asked for, lost releases included, and the log says the same.
    assert segments[0][2] == steps and 0 < updates <= steps
    assert [list(s) for s in dp.ReleaseLog(folder / "log").segments] == segments
    assert len(starts) > kills / 2 and len({s[0] for s in starts}) > kills / 3


@pytest.mark.slow
def test_a_training_that_is_killed_20_times_loses_and_repeats_nothing(tmp_path):
    check_resumed_runs(tmp_path, 20, 400, {"log": True})


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution, save_freq", [(1, 1), (4, 3), (5, "epoch")])
def test_trainings_of_any_kind_can_be_killed(tmp_path, steps_per_execution, save_freq):
    job = {"log": True, "steps_per_execution": steps_per_execution, "save_freq": save_freq}
    check_resumed_runs(tmp_path, 40, 2000, job)


@pytest.mark.slow
def test_without_the_log_and_with_a_seed_releases_are_lost_and_noise_is_repeated(tmp_path):
    # So the tests above can fail.
    job = {"steps": 50, "log": False, "seed": 7, "save_freq": 100}
    starts, (segments, _, _) = kill_and_finish(tmp_path, 2, job, random.Random(0))
    recorded = lines(tmp_path / "releases")
    assert segments[0][2] < len(recorded)
    assert len(set(recorded)) < len(recorded)
    assert any(released < before for before, released, _ in starts)
