"""A planned run that is killed at any moment resumes with its ledger and its history."""

import contextlib
import json
import random
import shutil
import time
import warnings

import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import killable_plan as plan
from tests.helpers.crash_injection import CrashInjector
from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp.accounting import epsilon
from tf_adaptive_dp.callbacks.run_directory import Fingerprint, RunDirectory, RunHistory


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("examples_per_user", [None, 2])
def test_a_planned_run_may_be_killed_at_any_moment(tmp_path, examples_per_user):
    job = {"folder": str(tmp_path), "examples_per_user": examples_per_user}
    kills, moments = 8, random.Random(1)
    steps = plan.EPOCHS * plan.NUM_EXAMPLES // 4
    with CrashInjector("killable_plan") as injector:
        for kill in range(kills + 1):
            enough = len(lines(tmp_path / "releases")) + moments.randint(1, 6)

            def moment(enough=enough):
                end = time.monotonic() + 60
                while len(lines(tmp_path / "releases")) < enough and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(moments.uniform(0, 0.02))

            code = injector.run(job, moment if kill < kills else None)
            assert code == (-9 if kill < kills else 0), f"run {kill} ended with {code}"
    released = lines(tmp_path / "releases")
    assert len(set(released)) == len(released)  # no noise is repeated
    segments, epochs, spent = json.loads(lines(tmp_path / "end")[-1])
    assert segments == [[1.0, 4.0, steps]] and len(released) <= steps
    starts = [json.loads(line) for line in lines(tmp_path / "starts")]
    assert starts == sorted(starts) and len(starts) > kills / 2
    assert epochs == list(range(len(epochs))) and epochs[-1] <= plan.EPOCHS - 1
    assert spent == sorted(spent)
    last = epsilon(1.0, 4 / plan.NUM_EXAMPLES, steps, plan.DELTA)
    np.testing.assert_allclose(spent[-1], last, rtol=1e-6)
    # Once more: the run is finished, so nothing is released.
    with CrashInjector("killable_plan") as injector:
        assert injector.run(job) == 0
    assert lines(tmp_path / "releases") == released
    assert json.loads(lines(tmp_path / "end")[-1]) == [segments, epochs, spent]


def test_a_copied_directory_is_opened_with_a_warning(tmp_path):
    # Both it and the original would go on from here, and each would know only its own releases.
    RunDirectory(tmp_path / "run", {"epsilon": 1.0}, 10).close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for _ in range(2):
        with pytest.warns(UserWarning, match="The release log is a copy.*copy/releases.log"):
            RunDirectory(tmp_path / "copy", {"epsilon": 1.0}, 10).close()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="`directory` must be a directory.*file"):
            RunDirectory(path, {}, 10)


@pytest.mark.parametrize("name", ["report.html", "report.json"])
def test_a_folder_in_place_of_the_report_is_refused_before_anything_is_released(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"nothing but its run.*with a folder {name}"):
        RunDirectory(tmp_path, {"epsilon": 1.0}, 10)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_no_path_is_refused():
    with pytest.raises(TypeError, match="`directory` must be a path. Received: directory=b'run'"):
        RunDirectory(b"run", {}, 10)


def begun(path):
    """A run that has released something."""
    run = RunDirectory(path, {"epsilon": 1.0}, 10)
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4.0)
    run.log.announce(optimizer, 3)
    run.close()


def test_a_run_without_its_plan_is_not_continued(tmp_path):
    begun(tmp_path)
    RunDirectory(tmp_path, {"epsilon": 1.0}, 10).close()
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match="cannot continue without `plan.json`.*Put it back"):
        RunDirectory(tmp_path, {"epsilon": 2.0}, 10)
    assert not (tmp_path / "plan.json").exists()


def test_a_run_goes_on_with_the_data_and_the_values_that_it_began_with(tmp_path):
    def opened(data=b"data", epsilon=1.0):
        of = Fingerprint("user_ids", lambda salt: (salt + data).hex(), "other `user_ids`")
        return RunDirectory(tmp_path, {"epsilon": epsilon}, 10, fingerprint=of)

    run = opened()
    assert run.keep("normalization", [[np.ones(2), np.zeros([])]])[0][0].tolist() == [1, 1]
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4.0)
    run.log.announce(optimizer, 9)
    assert not run.is_finished
    optimizer.ledger.restore([(1.0, 4.0, 9)])
    run.log.announce(optimizer)
    run.close()
    with pytest.raises(ValueError, match="other `user_ids`"):
        opened(data=b"Data")
    with pytest.raises(ValueError, match="epsilon=2.0 instead of 1.0"):
        opened(epsilon=2.0)
    run = opened()
    assert run.is_finished
    (kept,) = run.keep("normalization", [[np.zeros(2), np.ones([])]])
    assert [np.array(v).tolist() for v in kept] == [[1, 1], 0]
    with pytest.raises(ValueError, match="without `other.json`: other values would be another"):
        run.keep("other", [[np.ones(2)]])
    run.close()
    (tmp_path / "user_ids_NOT_PRIVATE.json").unlink()
    with pytest.raises(ValueError, match="cannot continue without `user_ids_NOT_PRIVATE.json`"):
        opened()
    assert not (tmp_path / "user_ids_NOT_PRIVATE.json").exists()


def test_what_was_lost_is_counted_before_any_step_and_if_none_follows(tmp_path):
    begun(tmp_path)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=4.0), loss="mse")
    run = RunDirectory(tmp_path, {"epsilon": 1.0}, 10)
    resume, *_ = run.callbacks([])
    resume.set_params({"epochs": 1, "steps": 2})
    resume.set_model(model)
    with pytest.warns(UserWarning, match="^3 releases"):
        resume.on_train_begin()
    assert model.optimizer.ledger.segments == [(1.0, 4.0, 3)]
    run.close()


@pytest.mark.parametrize("content", [None, b"", bytes(8192)], ids=["gone", "empty", "zeros"])
def test_a_run_without_its_log_is_not_continued(tmp_path, content):
    begun(tmp_path)
    log = tmp_path / "releases.log"
    log.unlink() if content is None else log.write_bytes(content)
    for _ in range(2):  # the first call must not leave a log that satisfies the second one
        with pytest.raises(ValueError, match="cannot continue without `releases.log`"):
            RunDirectory(tmp_path, {"epsilon": 1.0}, 10)


@pytest.mark.parametrize("left", ["backup", "optimizer.json", "history_NOT_PRIVATE.json"])
def test_what_is_left_of_a_run_is_not_taken_for_a_new_one(tmp_path, left):
    begun(tmp_path)
    (tmp_path / "backup").mkdir() if left == "backup" else (tmp_path / left).write_text("[]")
    for name in ("plan.json", "releases.log"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"cannot continue without `releases.log`.*{left}"):
        RunDirectory(tmp_path, {"epsilon": 1.0}, 10)
    assert [path.name for path in tmp_path.iterdir()] == [left]


def test_a_log_that_is_older_than_the_history_is_refused(tmp_path):
    begun(tmp_path)
    for released, is_newest in ((3, True), (4, False)):
        rows = [{"epoch": 0, "releases": released, "logs": {}, "figures": {}}]
        (tmp_path / "history_NOT_PRIVATE.json").write_text(json.dumps(rows))
        if is_newest:
            RunDirectory(tmp_path, {"epsilon": 1.0}, 10).close()
        else:
            with pytest.raises(ValueError, match="older than its history.*3 releases in.*, 4 in"):
                RunDirectory(tmp_path, {"epsilon": 1.0}, 10)


def test_a_run_that_adopts_earlier_releases_begins_with_its_plan(tmp_path):
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=4.0)
    optimizer.ledger.restore([(1.0, 4.0, 3)])
    log = dp.ReleaseLog(tmp_path / "releases.log")
    log.adopt(optimizer)
    log.close()
    RunDirectory(tmp_path, {"epsilon": 1.0}, 10).close()
    run = RunDirectory(tmp_path, {"epsilon": 1.0}, 10)
    run.log.announce(optimizer)
    run.close()
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match="cannot continue without `plan.json`"):
        RunDirectory(tmp_path, {"epsilon": 1.0}, 10)


@pytest.mark.parametrize("damaged", [b"", b'{"epsilon": 1', b"\xff"])
def test_damaged_files_are_named(tmp_path, damaged):
    begun(tmp_path)
    (tmp_path / "plan.json").write_bytes(damaged)
    with pytest.raises(ValueError, match=f"is damaged.*plan.json', of {len(damaged)} bytes"):
        RunDirectory(tmp_path, {"epsilon": 1.0}, 10)
    (tmp_path / "history").write_bytes(damaged)
    with pytest.raises(ValueError, match="Delete it to go on without the figures.*history'"):
        RunHistory(dict, tmp_path / "history")


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("units", [None, 3])
def test_a_run_of_another_model_is_refused(tmp_path, units):
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    for hidden in (4, units):
        layers = [] if hidden is None else [keras.layers.Dense(hidden)]
        model = keras.Sequential([keras.Input([2]), *layers, keras.layers.Dense(2)])
        made = dp.PrivacyPlan(
            noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=8, epochs=1
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(made.optimizer(dp.DPSGD, learning_rate=0.1), loss)
        if hidden == 4:
            made.fit(model, x, y, directory=tmp_path / "run", verbose=0)
            continue
        with pytest.raises(ValueError, match="^`directory` holds a run of another model") as error:
            made.fit(model, x, y, directory=tmp_path / "run", verbose=0)
        assert len(str(error.value)) < 500


KINDS = {
    "ADADP": (dp.ADADP, {}),
    "averages": (dp.ADADP, {"use_ema": True}),
    "discard": (dp.ADADP, {"discard": True}),
    "DPAdagrad": (dp.DPAdagrad, {"learning_rate": 0.1}),
    "DPMomentum": (dp.DPSGD, {"learning_rate": 0.1, "momentum": 0.9}),
}


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "first, second, received",
    [
        ("ADADP", "averages", "use_ema=True instead of False, a state of other shapes"),
        ("averages", "ADADP", "use_ema=False instead of True, a state of other shapes"),
        ("averages", "discard", "discard=True instead of False"),
        ("DPAdagrad", "DPMomentum", "class='DPSGD' instead of 'DPAdagrad'"),
    ],
)
def test_a_run_of_another_kind_of_optimizer_is_refused(tmp_path, first, second, received):
    """Also where the state of one would fit into the variables of the other."""
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    plan = dp.PrivacyPlan(noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=8, epochs=1)

    def run(kind):
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
        optimizer_class, arguments = KINDS[kind]
        optimizer = plan.optimizer(optimizer_class, **arguments)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        plan.fit(model, x, y, directory=tmp_path / "run", verbose=0)
        return model.get_weights()

    trained = run(first)
    with pytest.raises(ValueError, match=f"^`directory` holds a run of another.*{received}"):
        run(second)
    for a, b in zip(trained, run(first), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow_on(2)
def test_another_kind_of_optimizer_is_refused_before_the_model_is_built(tmp_path):
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    plan = dp.PrivacyPlan(noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=8, epochs=2)

    def run(optimizer_class, callbacks=(), inputs=(), **arguments):
        model = keras.Sequential([*inputs, keras.layers.Dense(2)])
        optimizer = plan.optimizer(optimizer_class, **arguments)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several models
            plan.fit(model, x, y, directory=tmp_path / "run", verbose=0, callbacks=callbacks)
        return model.optimizer.ledger.num_releases

    assert run(dp.DPAdamWOSM, [StopsAfter(2)]) == 2
    with pytest.raises(ValueError, match="class='DPSGD' instead of 'DPAdamWOSM'"):
        run(dp.DPSGD, learning_rate=0.1, momentum=0.9)
    assert run(dp.DPAdamWOSM, inputs=[keras.Input([2])]) == 4


def compiled_for(plan):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), loss)
    return model


class StopsAfter(keras.callbacks.Callback):
    """Stops training after so many releases, wherever that is in an epoch."""

    def __init__(self, releases):
        super().__init__()
        self.releases = releases

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.ledger.num_releases >= self.releases:
            self.model.stop_training = True


@pytest.mark.slow_on(2)
def test_a_run_that_was_stopped_within_epochs_makes_all_its_steps(tmp_path):
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    plan = dp.PrivacyPlan(noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=4, epochs=2)

    class Fails(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise OSError("no space left")

    weights = []
    runs = [([StopsAfter(1)], 1, [0]), ([StopsAfter(2), Fails()], 2, None)]
    runs += [([StopsAfter(5)], 5, [0]), ([], 8, [0, 1]), ([], 8, [0, 1])]
    for callbacks, released, epochs in runs:
        model = compiled_for(plan)
        kwargs = {"directory": tmp_path / "run", "verbose": 0, "callbacks": callbacks}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several models
            if epochs is None:
                with pytest.raises(OSError, match="no space left"):
                    plan.fit(model, x, y, validation_data=(x, y), **kwargs)
            else:
                assert plan.fit(model, x, y, **kwargs).epoch == epochs
        assert model.optimizer.ledger.segments == [(1.0, 4.0, released)]
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(weights[-2], weights[-1])  # restored from the end of the run


@pytest.mark.slow_on(2)
def test_what_a_callback_releases_after_the_end_of_a_run_is_written_down(tmp_path):
    """The next process stated epsilon without it."""
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    plan = dp.PrivacyPlan(noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=4, epochs=1)

    class TrainsOn(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.train_on_batch(x[:4], y[:4], np.ones(4))

    model = compiled_for(plan)
    with pytest.raises(ValueError, match="trained outside the plan"):
        how = {"directory": tmp_path / "run", "equal_rows": True, "verbose": 0}
        plan.fit(model, x, y, callbacks=[TrainsOn()], **how)
    with contextlib.closing(dp.ReleaseLog(tmp_path / "run" / "releases.log", steps=5)) as log:
        assert log.num_releases == 5 == model.optimizer.ledger.num_releases


@pytest.mark.slow_on(2)
def test_what_was_trained_elsewhere_is_not_replaced_by_the_run_of_a_directory(tmp_path):
    x, y = np.ones([16, 2], "float32"), np.zeros([16])
    plan = dp.PrivacyPlan(noise_multiplier=1.0, delta=1e-2, num_examples=16, batch_size=4, epochs=2)

    def trained(directory, releases):
        model = compiled_for(plan)
        fit(model, directory, StopsAfter(releases))
        return model

    def fit(model, directory, *callbacks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several models
            plan.fit(model, x, y, directory=directory, verbose=0, callbacks=callbacks)

    there = trained(tmp_path / "run", 4)
    # With more releases than the run, as many, and fewer, which the counts do not tell apart.
    for releases in (6, 4, 2):
        model = trained(None, releases)
        before = model.get_weights()
        with pytest.raises(ValueError, match="released gradients in this process|another run than"):
            fit(model, tmp_path / "run")
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.optimizer.ledger.num_releases == releases
    fit(there, tmp_path / "run")
    assert there.optimizer.ledger.num_releases == 8
