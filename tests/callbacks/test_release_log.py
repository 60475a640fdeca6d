"""ReleaseLog in `fit` and in other loops: what was lost is counted, in any order of callbacks."""

import itertools
import types

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.catalogue import with_noise_of_1 as compiled
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.accounting.releases import BatchChecks, Releases, Segment
from tf_adaptive_dp.durable import ledger_file as files
from tf_adaptive_dp.durable.ledger_file import SegmentFile

N, DELTA = 1_000, 1e-3


def opened(path):
    """What the file at a path says, as a later process reads it."""
    file = SegmentFile(path, fsync=False)
    file.close()
    return file.segments


def log_of(path, *segments):
    """A log that says so, as an earlier process left it."""
    file = SegmentFile(path, fsync=False)
    file.write([Segment(*segment) for segment in segments], None)
    file.close()
    return dp.ReleaseLog(path)


def only_an_optimizer(optimizer, steps_per_call=1):
    """What callbacks read of a compiled model, in both generations of Keras."""
    return types.SimpleNamespace(
        optimizer=optimizer,
        steps_per_execution=steps_per_call,
        _steps_per_execution=steps_per_call,
        stop_training=False,
        submodules=(),
        _flatten_layers=lambda **_: iter(()),
    )


def release(optimizer):
    """What a step enters in the ledger."""
    optimizer.ledger.record(*optimizer.next_release())


OLD = GENERATION == 2


class Watch(tf.keras.callbacks.Callback):
    """Reads log and ledger before each call of the training function."""

    def __init__(self, log):
        super().__init__()
        self.log, self.seen = log, []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append((self.model.optimizer.ledger.num_releases, self.log.num_releases))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "steps, seen",
    [
        (1, [(n, n + 1) for n in range(8)]),
        # Epochs of 4 steps. Only Keras 2 knows that the last call of an epoch makes fewer.
        (3, [(0, 3), (3, 4), (4, 7), (7, 8)] if OLD else [(0, 3), (3, 6), (4, 7), (7, 10)]),
        (8, [(0, 4), (4, 8)] if OLD else [(0, 8), (4, 12)]),
    ],
)
def test_the_log_counts_releases_before_they_happen(tmp_path, steps, seen):
    model = compiled(compile_with={"steps_per_execution": steps})
    log = dp.ReleaseLog(tmp_path / "log")
    watch = Watch(log)
    catalogue.fit(model, 2, [log, watch])
    assert watch.seen == seen
    log.close()
    assert opened(tmp_path / "log") == model.optimizer.ledger.segments == [(1.0, 8.0, 8)]


def test_a_number_of_steps_that_changes_at_any_time_is_refused(tmp_path):
    model = compiled(compile_with={"steps_per_execution": "auto"})
    model.enable_tune_steps_per_execution = True
    with pytest.raises(ValueError, match="enable_tune_steps_per_execution=True.*Pass a number"):
        catalogue.fit(model, 1, [dp.ReleaseLog(tmp_path / "log")])
    with pytest.raises(ValueError, match="enable_tune_steps_per_execution=True.*Pass a number"):
        catalogue.fit(model, 1, [dp.PrivacyBudget(9.0, 1e-5, 100)])
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.parametrize("steps, announced", [(1, 1), (8, 2), (9, 3)])
def test_accumulated_gradients_are_one_release(steps, announced, tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled(gradient_accumulation_steps=4)
    log.set_model(only_an_optimizer(model.optimizer, steps))
    log.on_train_batch_begin(0)
    assert log.num_releases == announced
    budget = dp.PrivacyBudget(9.0, DELTA, N)
    budget.set_model(log.model)
    assert budget._releases_per_call(model.optimizer) == announced  # what it leaves room for


@pytest.mark.slow
def test_a_log_of_accumulated_batches_agrees_with_the_ledger(tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled(gradient_accumulation_steps=3)
    for _ in range(2):  # 4 parts each
        catalogue.fit(model, 1, [log])
    assert log.segments == model.optimizer.ledger.segments
    assert log.num_releases == 2 and model.optimizer.unfinished_parts == 2


def test_no_step_is_made_that_cannot_be_announced(tmp_path, monkeypatch):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled()
    catalogue.fit(model, 1, [log])
    with monkeypatch.context() as full_disk:
        full_disk.setattr(files.os, "pwrite", lambda file, record, offset: len(record) - 1)
        with pytest.raises(OSError, match="Only 8191 of 8192 bytes"):
            catalogue.fit(model, 1, [log])
    assert model.optimizer.ledger.num_releases == 4
    with pytest.raises(ValueError, match="`expected_batch_size`"):
        catalogue.fit(compiled(expected_batch_size=None), 1, [dp.ReleaseLog(tmp_path / "other")])


def test_releases_of_a_loop_of_ones_own_are_announced(tmp_path):
    log, optimizer = dp.ReleaseLog(tmp_path / "log"), compiled().optimizer
    for _ in range(3):
        log.announce(optimizer, num_releases=2)
        release(optimizer)
    assert log.segments == [(1.0, 8.0, 4)] and optimizer.ledger.num_releases == 3
    release(optimizer)
    release(optimizer)
    with pytest.raises(ValueError, match="call `announce` before each step"):
        log.announce(optimizer)
    assert log.segments == optimizer.ledger.segments == [(1.0, 8.0, 5)]
    with pytest.raises(ValueError, match="`num_releases` must be at least 1"):
        log.announce(optimizer, num_releases=0)


def test_the_log_needs_a_private_optimizer(tmp_path):
    with pytest.raises(TypeError, match="optimizer of tf_adaptive_dp"):
        dp.ReleaseLog(tmp_path / "log").reconcile(tf.keras.optimizers.SGD())


@pytest.mark.slow_on(2)
def test_training_stops_when_the_run_has_its_releases(tmp_path):
    model, log = compiled(), dp.ReleaseLog(tmp_path / "log", steps=6)
    catalogue.fit(model, 5, [log])
    assert model.optimizer.ledger.num_releases == 6
    with pytest.raises(dp.BudgetExceededError, match="all its releases.*steps=6"):
        catalogue.fit(model, 1, [log])
    assert model.optimizer.ledger.num_releases == log.num_releases == 6


def test_a_resumed_run_ends_when_all_steps_are_used_up(tmp_path):
    # The batches left fill one epoch exactly, and Keras would begin them anew in each.
    (x, y), sampling = catalogue.data(), dp.PoissonSampling(0.25, 33, steps=20)
    model, log = compiled(), log_of(tmp_path / "log", (1.0, 8.0, 10))
    log.steps = sampling.steps
    batches = dp.poisson_batches((x, y), sampling, start_step=log.num_releases)
    with pytest.warns(UserWarning, match="10 releases"):
        model.fit(batches, epochs=3, steps_per_epoch=10, verbose=0, callbacks=[log])
    assert int(model.optimizer.iterations) == 10
    assert model.optimizer.ledger.segments == log.segments == [(1.0, 8.0, 20)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_lost_releases_are_counted_in_any_order_of_callbacks(tmp_path, order):
    # Ledgers alone: of the model, in the backup (5 releases), in the log (9, with less noise).
    optimizer = compiled().optimizer
    saved = compiled().optimizer
    saved.ledger.restore([(1.0, 8.0, 5)])
    log = log_of(tmp_path / "log", (1.0, 8.0, 6), (0.7, 8.0, 3))
    spent = [Segment(1.0, 8.0, 6), Segment(0.7, 8.0, 3)]
    in_the_end = Releases([*spent, (1.0, 8.0, 4)])
    limit = dp.epsilon_spent(in_the_end, N, DELTA) * (1 + 1e-9)
    budget = dp.PrivacyBudget(limit, DELTA, N, full_passes=False)
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)

    class Backup(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.optimizer.ledger.restore(saved.ledger.segments)

    callbacks = [[Backup(), log, monitor, budget][i] for i in order]
    model = only_an_optimizer(optimizer)
    everything = tf.keras.callbacks.CallbackList(callbacks)
    everything.set_model(model)
    with pytest.warns(UserWarning, match="releases were not in the checkpoint"):
        everything.on_train_begin()
        everything.on_epoch_begin(0)
    assert optimizer.ledger.segments == spent
    for _ in range(9):
        everything.on_train_batch_begin(0)
        release(optimizer)
        everything.on_train_batch_end(0)
        if model.stop_training:
            break
    everything.on_epoch_end(0, {})
    everything.on_train_end()
    assert optimizer.ledger.segments == log.segments == [*spent, (1.0, 8.0, 4)]
    assert monitor.epsilon() == pytest.approx(limit)


def test_a_warning_says_how_many_releases_were_lost(tmp_path):
    log, optimizer = log_of(tmp_path / "log", (1.0, 8.0, 12)), compiled().optimizer
    optimizer.ledger.restore([(1.0, 8.0, 5)], [BatchChecks(5, 2, 1)])
    with pytest.warns(UserWarning, match="^7 releases were not in the checkpoint"):
        log.reconcile(optimizer)
    assert optimizer.ledger.segments == [(1.0, 8.0, 12)]
    assert optimizer.ledger.checks == [BatchChecks(5, 2, 1)]  # repetitions stay known


@pytest.mark.slow_after(2)
@pytest.mark.slow_on(2)
@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_a_run_without_a_checkpoint_keeps_the_number_of_its_examples(tmp_path, kind, last):
    def counted(num_examples):
        more = {"epsilon": 1e4} if kind is dp.PrivacyBudget else {}
        return kind(num_examples=num_examples, delta=DELTA, full_passes=False, **more)

    class Killed(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == last:
                raise KeyboardInterrupt

    log = dp.ReleaseLog(tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        catalogue.fit(compiled(), 1, [log, counted(N), Killed()])
    log.close()
    model, log = compiled(), dp.ReleaseLog(tmp_path / "log")
    with pytest.warns(UserWarning, match=f"{last + 1} releases were not in the checkpoint"):
        with pytest.raises(ValueError, match="drawn from 1000 examples.*num_examples=5000"):
            catalogue.fit(model, 1, [log, counted(5 * N)])
    ledger = model.optimizer.ledger
    assert (ledger.num_releases, ledger.fewest_units) == (last + 1, N)
    catalogue.fit(model, 1, [log, counted(N // 2)])
    assert ledger.fewest_units == N // 2
    log.close()
    assert dp.ReleaseLog(tmp_path / "log")._file.fewest_units == N // 2


def test_a_log_does_not_make_an_optimizer_forget_what_it_released_elsewhere(tmp_path):
    log, optimizer = log_of(tmp_path / "log", (1.0, 8.0, 12)), compiled().optimizer
    release(optimizer)
    with pytest.raises(ValueError, match="do not belong to the run of the log.*recorded 1 rel"):
        log.reconcile(optimizer)
    # It set out with the log, went on without it, and was set back.
    path = tmp_path / "other"
    log, optimizer = dp.ReleaseLog(path), compiled().optimizer
    log.announce(optimizer, num_releases=2)
    for _ in range(2):
        release(optimizer)
    log.reconcile(optimizer)
    state = [tf.identity(v) for v in optimizer.variables]
    log.close()
    for _ in range(3):
        release(optimizer)
    for variable, value in zip(optimizer.variables, state):
        variable.assign(value)
    log = dp.ReleaseLog(path)
    for call in (log.reconcile, log.announce):
        with pytest.raises(ValueError, match="was set back: it lacks 3 releases"):
            call(optimizer)
    optimizer.ledger._counts.assign(0 * optimizer.ledger._counts)  # as from an earlier epoch
    with pytest.raises(ValueError, match="was set back: it lacks 5 releases"):
        log.reconcile(optimizer)


def test_noise_may_change_between_runs(tmp_path):
    log, optimizer = log_of(tmp_path / "log", (1.0, 8.0, 5)), compiled(noise_multiplier=2.0)
    optimizer = optimizer.optimizer
    optimizer.ledger.restore([(1.0, 8.0, 3)])
    with pytest.warns(UserWarning, match="2 releases"):
        log.announce(optimizer)
    release(optimizer)
    log.reconcile(optimizer)
    assert log.segments == optimizer.ledger.segments == [(1.0, 8.0, 5), (2.0, 8.0, 1)]


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("saved", [5, 63, 64, 65, 70])
def test_lost_segments_beyond_the_last_are_counted_at_their_worst(tmp_path, saved):
    log, optimizer = dp.ReleaseLog(tmp_path / "log"), compiled().optimizer
    checkpoint = None
    for k in range(70):
        optimizer.noise_multiplier = 100.0 - k
        optimizer.expected_batch_size = 8.0 + k
        log.announce(optimizer)
        release(optimizer)
        if k + 1 == saved:
            checkpoint = optimizer.ledger.segments
    after = optimizer.ledger.segments
    assert log.segments == after and len(after) == 64 and after[-1] == (31.0, 77.0, 7)
    log.close()
    resumed = compiled().optimizer
    resumed.ledger.restore(checkpoint)
    log = dp.ReleaseLog(tmp_path / "log")
    if saved < 70:
        with pytest.warns(UserWarning, match=f"^{70 - saved} releases"):
            log.reconcile(resumed)
    log.announce(resumed)
    release(resumed)
    log.reconcile(resumed)
    # The optimizer's own noise and batch size are better than the worst.
    assert resumed.ledger.segments == [*after[:-1], (1.0, 77.0, 8)]


@pytest.mark.parametrize(
    "logged, ledger",
    [
        ([], [(1.0, 8.0, 4)]),
        ([(1.0, 8.0, 3)], [(1.0, 8.0, 4)]),
        ([(1.1, 8.0, 9)], [(1.0, 8.0, 4)]),
        ([(1.0, 9.0, 9)], [(1.0, 8.0, 4)]),
        ([(1.0, 8.0, 9)], [(1.0, 8.0, 4), (2.0, 8.0, 1)]),
    ],
)
def test_the_log_of_another_run_is_refused_and_nothing_changed(tmp_path, logged, ledger):
    log, model = log_of(tmp_path / "log", *logged), compiled()
    model.optimizer.ledger.restore(ledger)
    attempts = [
        lambda: log.require_run_of(model.optimizer),  # before a backup replaces its weights
        lambda: catalogue.fit(model, 1, [log]),
        lambda: log.announce(model.optimizer),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="belongs to another run.*`adopt"):
            attempt()
        assert model.optimizer.ledger.segments == ledger and log.segments == logged


def test_what_was_released_unannounced_is_admitted_for_the_optimizer_of_the_log_alone(tmp_path):
    def private():
        return dp.DPSGD(1.0, 1.0, learning_rate=0.1, expected_batch_size=8)

    own, other, log = private(), private(), dp.ReleaseLog(tmp_path / "log")
    for _ in range(3):  # more than the log says, with the same noise and batches
        release(other)
    log.announce(own)
    log.admit(other)
    assert log.num_releases == 1
    for _ in range(2):
        release(own)
    log.admit(own)
    assert log.segments == [(1.0, 8.0, 2)]
    log.announce(own, 4)  # whose releases may be lost
    log.admit(own)
    assert log.num_releases == 6
    own.ledger.restore([])
    own.noise_multiplier = 2.0
    release(own)  # after which its ledger does not hold what the log says
    log.admit(own)
    assert log.segments == [(1.0, 8.0, 6)]


def test_a_new_log_adopts_a_model_if_it_is_told_to(tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled()
    catalogue.fit(model, 1)
    log.adopt(model.optimizer)
    assert log.num_releases == 4 and not log.has_begun
    catalogue.fit(model, 1, [log])
    assert log.segments == [(1.0, 8.0, 8)] and log.has_begun
    with pytest.raises(ValueError, match="Only a new log.*8 releases"):
        log.adopt(model.optimizer)


class LessNoise(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.noise_multiplier = 0.5


@pytest.mark.slow_on(2)
def test_noise_that_changes_after_the_announcement_is_an_error_and_logged(tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled()
    with pytest.raises(ValueError, match="differ from those announced.*before ReleaseLog"):
        catalogue.fit(model, 1, [log, LessNoise()])
    assert log.segments == model.optimizer.ledger.segments == [(0.5, 8.0, 1)]
    catalogue.fit(model, 1, [LessNoise(), log])
    assert log.segments == [(0.5, 8.0, 5)]


@pytest.mark.slow_on(2)
def test_batches_that_are_larger_than_declared_are_named(tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled()
    x, y = catalogue.data(64)
    with pytest.warns(UserWarning, match="more examples than the expected batch size of 8"):
        with pytest.raises(ValueError, match="Pass the true `expected_batch_size`.*of 64 rows"):
            model.fit(x, y, batch_size=64, verbose=0, callbacks=[log])
    assert log.segments == model.optimizer.ledger.segments == [(1.0, 64.0, 1)]


@pytest.mark.slow_on(2)
def test_a_ledger_that_is_turned_back_during_training_is_corrected(tmp_path):
    log, model = dp.ReleaseLog(tmp_path / "log"), compiled()
    catalogue.fit(model, 1, [log])
    model.optimizer.ledger.restore([])
    with pytest.warns(UserWarning, match="4 releases"):
        catalogue.fit(model, 1, [log])
    assert model.optimizer.ledger.segments == log.segments == [(1.0, 8.0, 8)]


@pytest.mark.slow_on(2)
def test_steps_that_are_taken_back_one_by_one_are_counted(tmp_path):
    class TakesBack(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.kept = self.model.optimizer.ledger.segments

        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.ledger.restore(self.kept)

    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", noise_multiplier=1.0, expected_batch_size=8.0)
    model.compile(optimizer, loss=catalogue.loss())
    model.optimizer.build(model.trainable_variables)
    log = dp.ReleaseLog(tmp_path / "log")
    with pytest.warns(UserWarning, match="not in the checkpoint"):
        catalogue.fit(model, 2, [log, TakesBack()])
    log.close()
    assert log.num_releases == model.optimizer.ledger.num_releases == 8
