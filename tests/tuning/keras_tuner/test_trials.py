"""Trials that are really trained: their allowance, their score, their callbacks, their end."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, tuned
from tf_adaptive_dp._keras import process_state
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.mechanism.draw_numbers import Seen
from tf_adaptive_dp.tuning import strategies
from tf_adaptive_dp.tuning.keras_tuner import search_plan as plans
from tf_adaptive_dp.tuning.keras_tuner import trial


@pytest.fixture(autouse=True)
def quick_prices(monkeypatch):
    """Each takes a second, and other tests look at them."""
    monkeypatch.setattr(plans.SearchPlan, "noise_multiplier", lambda plan: 1.5)
    monkeypatch.setattr(process_state, "NUMBERS", 1)
    for name in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
        monkeypatch.setattr(plans.SearchPlan, name, lambda plan, *args: 1.0)


def one(folder, **kwargs):
    """A search of one trial."""
    return tuned.tuner(folder, num_trials=1, **kwargs)


class At(tf.keras.callbacks.Callback):
    """Does something at the beginning of a batch, counted over all epochs."""

    def __init__(self, batch, action, hook="on_train_batch_begin"):
        super().__init__()
        self.left, self.action = batch, action
        setattr(self, hook, self._count)

    def _count(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            self.action(self.model)

    def __deepcopy__(self, memo):
        return self  # so that it counts over processes


def throw(error):
    def action(model):
        raise error

    return action


@pytest.mark.slow
def test_the_score_and_the_weights_are_those_of_the_last_epoch(tmp_path, monkeypatch):
    seen = []

    class Worsen(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel = self.model.trainable_variables[0]
            kernel.assign(np.array([[-9.0, 9.0], [0, 0], [0, 0]]) * (1 - 2 * epoch))
            seen.append(kernel.numpy())

        def __deepcopy__(self, memo):
            return self

    made = tuned.search(one(tmp_path), callbacks=[Worsen()])
    (model,) = made.get_best_models()
    np.testing.assert_array_equal(model.trainable_variables[0], seen[-1])
    (outcome,) = made._result.shown()
    x, y = tuned.data(16, seed=1)
    assert outcome["score"] == np.mean(model(x).numpy().argmax(1) == y) < 0.2


@pytest.mark.slow_on(2)
def test_a_score_is_released_once_and_noisy_scores_see_the_data_once(tmp_path, monkeypatch):
    released = []

    class Score(strategies.NoisyScore):
        def released(self, score):
            released.append(score)
            return score + 100

    looks = []
    real = tf.keras.Model.evaluate
    monkeypatch.setattr(
        tf.keras.Model, "evaluate", lambda *a, **k: looks.append(k["verbose"]) or real(*a, **k)
    )
    made = tuned.search(one(tmp_path, score=Score(1.0, 1 / 16)))
    assert len(released) == 1 and made._result.shown()[0]["score"] == released[0] + 100
    assert len(looks) == 2  # once before the search, to see that there is such a metric


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_the_worst(tmp_path, monkeypatch, value):
    monkeypatch.setattr(
        "tf_adaptive_dp.tuning.keras_tuner.arguments.FitArguments.scores",
        lambda data, model: {"val_accuracy": value},
    )
    with pytest.raises(RuntimeError, match="not finite. The budget is spent"):
        tuned.search(one(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_a_crash_is_no_end_and_is_not_repeated(tmp_path, monkeypatch, strategy):
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 2)
    crash = At(3, throw(ValueError("no memory")))
    crash._count = lambda batch, logs=None: At._count(crash, batch) if crash.left >= 0 else None
    crash.on_train_batch_begin = crash._count
    made = tuned.tuner(tmp_path, strategy=strategy, num_trials=2)
    tuned.search(made, callbacks=[crash])
    shown = made._result.shown()
    assert shown[0]["releases"] == 4 and shown[0]["error"] is None
    if strategy == "composition":
        # The fourth step was announced: it may have happened.
        assert "no memory" in shown[1]["error"] and shown[1]["releases"] == 4
    else:
        assert len(shown) == 1


@pytest.mark.slow
def test_what_ends_the_machine_is_no_crash(tmp_path):
    stop = At(3, throw(OSError("disk full")))
    made = one(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        tuned.search(made, callbacks=[stop])
    with pytest.warns(UserWarning, match="^2 releases"):
        tuned.search(made)
    assert made._result.shown()[0]["error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy, updates", [("composition", 2), ("repeat_and_select", 4)])
def test_an_interrupted_trial_goes_on(tmp_path, monkeypatch, strategy, updates):
    # Two epochs of two steps; the process ends as the fourth step begins, two after the backup.
    # Where every release counts, both are lost, and the trial is over with what was saved. Where
    # trials have to be alike, it makes them again.
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 1)
    steps = []

    def search(*callbacks):
        count = At(0, lambda model: steps.append(1), "on_train_batch_end")
        made = tuned.tuner(tmp_path, strategy=strategy, num_trials=1)
        return tuned.search(made, callbacks=[count, *callbacks])

    with pytest.raises(KeyboardInterrupt):
        search(At(3, throw(KeyboardInterrupt())))
    (model,) = search().get_best_models()
    assert int(model.optimizer.iterations) == updates and len(steps) == 3 + updates - 2
    assert model.optimizer.ledger.segments == [(1.5, 8.0, 4)]


@pytest.mark.slow
def test_lost_releases_are_paid_out_of_the_allowance(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tuned.search(one(tmp_path), epochs=3, callbacks=[At(3, throw(KeyboardInterrupt()))])
    # Backed up: two steps; lost: one that was made and one that was announced. Two are left.
    made = one(tmp_path)
    with pytest.warns(UserWarning, match="^2 releases"):
        tuned.search(made, epochs=3)
    assert made._result.shown()[0]["resumed"] == 1
    (model,) = made.get_best_models()
    assert int(model.optimizer.iterations) == 4
    assert model.optimizer.ledger.segments == [(1.5, 8.0, 6)]
    assert not list((tmp_path / "search").rglob("in_progress"))


def search_in_calls(folder, steps_per_epoch, epochs, *callbacks):
    """Searches with two steps in each call; the data never end."""

    def build(hp):
        return tuned.model(tuned.optimizer(), steps_per_execution=2)

    made = one(folder, build_model=build)
    made.search(
        tf.data.Dataset.from_tensor_slices(tuned.data()).batch(8).repeat(),
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        validation_data=tuned.data(16, seed=1),
        verbose=0,
        callbacks=list(callbacks),
    )
    return made


def check_calls(folder, steps_per_epoch, epochs, calls, lost, released):
    with pytest.raises(KeyboardInterrupt):
        search_in_calls(folder, steps_per_epoch, epochs, At(calls, throw(KeyboardInterrupt())))
    with pytest.warns(UserWarning, match=f"^{lost} releases"):
        (model,) = search_in_calls(folder, steps_per_epoch, epochs).get_best_models()
    assert model.optimizer.ledger.num_releases == released
    assert int(model.optimizer.iterations) == released - lost


# Saved: 4 of 8. Lost: 2 made and 2 announced; or 2 announced.
@pytest.mark.slow
@pytest.mark.parametrize("calls, lost", [(3, 4), (2, 2)])
def test_no_call_of_several_steps_goes_beyond_the_allowance(tmp_path, calls, lost):
    check_calls(tmp_path, 4, 2, calls, lost, 8)


# Saved: 3 of 9, made in calls of 2 and 1. Lost: 2 made and 1 announced; or 2 announced, and then
# after calls of 2 and 1 one is left, for which there is no call.
@pytest.mark.slow
@pytest.mark.skipif(GENERATION == 3, reason="the last call of Keras 3 would make 2 steps")
@pytest.mark.parametrize("calls, lost, released", [(3, 3, 9), (2, 2, 8)])
def test_a_call_that_makes_what_is_left_of_an_epoch(tmp_path, calls, lost, released):
    check_calls(tmp_path, 3, 3, calls, lost, released)


@pytest.mark.skipif(GENERATION == 2, reason="Keras 2 makes no more steps than are left")
def test_calls_that_would_make_epochs_longer_are_refused(tmp_path):
    with pytest.raises(dp.NotPrivateError, match="=2, with 3 steps per epoch"):
        search_in_calls(tmp_path, 3, 3)
    assert not tuned.folders(tmp_path)


def change_noise(model):
    model.optimizer.noise_multiplier = 0.5


@pytest.mark.slow
def test_nothing_may_change_the_noise_of_a_trial(tmp_path):
    made = one(tmp_path)
    with pytest.raises(dp.NotPrivateError, match=r"Received: noise.*\(0.5, 8.0\)"):
        tuned.search(made, callbacks=[At(1, change_noise)])
    journal = (tmp_path / "search" / "secret" / "journal").read_text().splitlines()
    assert len(journal) == 2  # the trial is in progress: corrected, it goes on


def record_a_release(model):
    model.optimizer.ledger.other_events += (dp_accounting.GaussianDpEvent(0.5),)


def test_a_trial_may_release_nothing_but_gradients(tmp_path):
    with pytest.raises(dp.NotPrivateError, match="something beside its gradients.*0.5"):
        tuned.search(one(tmp_path), callbacks=[At(1, record_a_release)])


@pytest.mark.slow
def test_a_model_that_releases_twice_in_a_step_is_found_at_once(tmp_path):
    class Twice(tf.keras.Sequential):
        def train_step(self, batch):
            super().train_step(batch)
            return super().train_step(batch)

    def build(hp):
        made = Twice([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        made.compile(tuned.optimizer(), loss, metrics=["accuracy"])
        return made

    # With "repeat_and_select" no log of releases is kept, and the budget finds it.
    for strategy, found in {
        "composition": "The releases differ from those announced",
        "repeat_and_select": "2 releases in a call that has 1 steps",
    }.items():
        with pytest.raises(dp.NotPrivateError, match=found):
            tuned.search(one(tmp_path / strategy, build_model=build, strategy=strategy))


@pytest.mark.slow
def test_batches_of_another_size_are_found_at_once(tmp_path):
    x, y = tuned.data()
    made = one(tmp_path)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()
    with pytest.raises(dp.NotPrivateError, match="batches of 16 rows, .* computed for 8"):
        made.search(data, steps_per_epoch=2, validation_data=tuned.data(16, seed=1), verbose=0)


@pytest.mark.slow
def test_poisson_batches(tmp_path):
    sampling = dp.PoissonSampling.for_batch_size(8, tuned.NUM_EXAMPLES, steps=4)
    x, y = tuned.data()
    made = one(tmp_path, sampling=sampling)
    made.search(
        dp.poisson_batches((x, y), sampling),
        epochs=2,
        steps_per_epoch=2,
        validation_data=tuned.data(16, seed=1),
        verbose=0,
    )
    assert made.get_best_models()[0].optimizer.ledger.segments == [(1.5, 8.0, 4)]


@pytest.mark.slow
def test_monitor_and_tensorboard_work_and_their_files_go_with_the_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 2)
    used = dp.PrivacyMonitor(tuned.NUM_EXAMPLES, tuned.DELTA, str(tmp_path / "monitor"))
    used.set_model(threading_lock())  # as after `fit`: what it holds cannot be copied
    board = tf.keras.callbacks.TensorBoard(str(tmp_path / "board"))
    made = tuned.tuner(tmp_path, strategy="repeat_and_select", num_trials=2)
    tuned.search(made, callbacks=[used, board])
    (folder,) = tuned.folders(tmp_path)
    files = sorted((tmp_path / "search" / folder / "tensorboard").rglob("events*"))
    assert len(files) == 3 and all(file.name.endswith(".honest") for file in files)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["search"]


def threading_lock():
    import threading

    return threading.Lock()


@pytest.mark.slow
def test_side_information_of_the_optimizer_is_a_callback_of_its_own_trial(tmp_path):
    public = tf.data.Dataset.from_tensor_slices(tuned.data(8, seed=2)).batch(4)

    def build(hp):
        information = dp.side_information.PublicGradients(
            public, rule="rmsprop", epsilon=1e-2, provenance="public"
        )
        return tuned.model(
            dp.AdaDPS(information, 1.0, 1.0, expected_batch_size=8.0, learning_rate=0.1)
        )

    made = tuned.search(one(tmp_path, build_model=build))
    assert "Side information:" in made.privacy_statement()


def test_batch_size_and_parts_of_a_trial_are_those_of_its_optimizer():
    model = tuned.model(tuned.optimizer(gradient_accumulation_steps=2))
    trial.check_optimizer(model)
    assert trial.batch_size_and_parts(model) == (8.0, 2)


def accumulated(**kwargs):
    return tuned.optimizer(gradient_accumulation_steps=2, expected_batch_size=16.0, **kwargs)


OPTIMIZERS = {
    "ADADP": lambda: dp.ADADP(1.0, 1.0, expected_batch_size=8.0),
    "DPAdamWOSM": lambda: dp.DPAdamWOSM(1.0, 1.0, expected_batch_size=8.0),
    "adaptive clipping": lambda: tuned.optimizer(clipping="adaptive"),
    "accumulation": accumulated,
}


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_release_what_was_planned(tmp_path, name):
    made = tuned.search(one(tmp_path, build_model=lambda hp: tuned.model(OPTIMIZERS[name]())))
    (model,) = made.get_best_models()
    expected = (1.5, 16.0, 2) if name == "accumulation" else (1.5, 8.0, 4)
    assert model.optimizer.ledger.segments == [expected]


# What follows calls the parts of a trial, so that no test of it has to train.


def planned(sampling="shuffled", batch_size=8.0, strategy=None, **schedule):
    """The plan of a search whose trials make 4 releases."""
    schedule = {"epochs": 2, "steps_per_epoch": 2, **schedule}
    return plans.SearchPlan(
        strategy or strategies.Composition(2),
        strategies.PublicScore(),
        plans.Budget(3.0, tuned.DELTA, "rdp"),
        plans.Batches(tuned.NUM_EXAMPLES, sampling, batch_size),
        plans.Schedule(**schedule),
    )


def budget_of(*released, plan=None, **optimizer):
    """The budget of a trial whose ledger holds these releases."""
    budget = trial.TrialBudget(plan or planned(), 1.0)
    budget.set_model(tuned.model(tuned.optimizer(**optimizer)))
    budget.model.optimizer.ledger.restore(list(released))
    return budget


@pytest.mark.parametrize("name, value", [("noise_multiplier", 0.5), ("expected_batch_size", 4.0)])
def test_no_step_begins_that_would_release_something_else(name, value):
    budget = budget_of((1.0, 8.0, 3))
    budget.on_train_batch_begin(0)
    setattr(budget.model.optimizer, name, value)
    with pytest.raises(dp.NotPrivateError, match="Nothing may change the noise or the batch size"):
        budget.on_train_batch_begin(1)


def test_no_step_begins_without_room_and_none_is_left_out():
    budget = budget_of((1.0, 8.0, 4))
    with pytest.raises(dp.BudgetExceededError, match="no room for another step.*4 releases of 4"):
        budget.on_train_batch_begin(0)
    budget.check_end()
    assert not budget.room(4) and budget.room(3)
    for released, message in {3: "ended early.*3 releases of 4", 5: "5 releases, 4 were"}.items():
        with pytest.raises(dp.NotPrivateError, match=message):
            budget_of((1.0, 8.0, released)).check_end()
    budget = budget_of((1.0, 8.0, 2))
    budget.on_train_batch_begin(0)
    budget.model.optimizer.ledger.restore([(1.0, 8.0, 3)])
    budget._rows_are_known, budget.model.stop_training = True, True
    with pytest.raises(dp.NotPrivateError, match="A trial ended early"):
        budget.on_train_batch_end(0)
    # Each part of a batch is a step; a call of several steps needs room for all of them.
    parts = budget_of(plan=planned(parts=2, steps_per_epoch=4))
    assert parts.room(3) and not parts.room(4)
    parts._steps_per_call = 4
    assert parts.room(2) and not parts.room(3) and parts.room(3, next_step=2)


def test_a_step_that_releases_twice_is_found_when_it_ends():
    budget = budget_of((1.0, 8.0, 1))
    budget.on_train_batch_begin(0)
    budget.model.optimizer.ledger.restore([(1.0, 8.0, 3)])
    with pytest.raises(dp.NotPrivateError, match="2 releases in a call that has 1 steps"):
        budget.on_train_batch_end(0)


@pytest.mark.parametrize(
    "found, match",
    [
        ([(1.0, 8.0, 1), (0.5, 8.0, 1)], "less noise or larger batches.*noise_multiplier=0.5"),
        ([(1.0, 16.0, 2)], "less noise or larger batches.*batch_size=16.0"),
        ([(1.0, 8.0, 2)], "something beside its gradients.*GaussianDpEvent.*0.5"),
    ],
)
def test_releases_that_were_not_planned_are_found_at_every_end(found, match):
    budget = budget_of((1.0, 8.0, 1))
    budget._rows_are_known = True
    budget.on_train_batch_begin(0)
    budget.model.optimizer.ledger.restore(found)
    if found[-1][:2] == (1.0, 8.0):
        record_a_release(budget.model)
    for end in (lambda: budget.on_train_batch_end(0), budget.require_planned):
        with pytest.raises(dp.NotPrivateError, match=match):
            end()


def test_statistics_that_a_trial_releases_are_found_at_every_end():
    layer, budget = dp.PrivateNormalization(20.0), trial.TrialBudget(planned(), 1.0)
    model = tf.keras.Sequential([tf.keras.Input([3]), layer, tf.keras.layers.Dense(2)])
    model.compile(tuned.optimizer(), "sparse_categorical_crossentropy")
    budget.set_model(model)
    budget.require_planned()
    layer.adapt(tuned.data(500)[0])
    with pytest.raises(dp.NotPrivateError, match="something beside its gradients.*Gaussian.*20.0"):
        budget.require_planned()


POISSON = dp.PoissonSampling.for_batch_size(8, tuned.NUM_EXAMPLES, steps=4)


def test_releases_that_contradict_the_sampling_are_found_at_every_end():
    budget = budget_of((1.0, 8.0, 1), plan=planned(POISSON))
    budget.require_planned()
    budget.model.optimizer._mechanism.seen.add_counts(Seen(numbered=40, marked=0))
    with pytest.raises(dp.NotPrivateError, match="40 of 40 batches reached the optimizer without"):
        budget.require_planned()


def test_several_replicas_are_refused_where_only_the_winner_is_released():
    with catalogue.mirrored().scope():
        model = tuned.model(tuned.optimizer())
    with pytest.raises(dp.NotPrivateError, match="on one replica.*run_eagerly=False, 2 replicas"):
        trial.prepare(model, planned(POISSON, strategy=strategies.RepeatAndSelect(3.0)), 1.0)


@pytest.mark.parametrize(
    "plan, rows, is_right",
    [
        (planned(), 8, True),
        (planned(), 16, False),
        (planned(batch_size=16.0, parts=2), 8, True),
        (planned(batch_size=16.0, parts=2), 16, False),
        (planned(POISSON), POISSON.rows_per_batch(1), True),
        (planned(POISSON), 8, False),
        (planned("poisson"), 11, True),  # a size that is random
    ],
)
def test_the_rows_of_a_batch_are_those_that_the_noise_was_computed_for(
    monkeypatch, plan, rows, is_right
):
    parts = {"gradient_accumulation_steps": 2} if plan.schedule.parts == 2 else {}
    budget = budget_of(plan=plan, expected_batch_size=plan.batches.batch_size, **parts)
    optimizer = budget.model.optimizer
    monkeypatch.setattr(type(optimizer), "rows_per_batch", property(lambda optimizer: rows))
    budget.on_train_batch_begin(0)
    if is_right:
        budget.on_train_batch_end(0)
    else:
        with pytest.raises(dp.NotPrivateError, match=f"batches of {rows} rows, but the noise"):
            budget.on_train_batch_end(0)


@pytest.mark.parametrize("strategy, counted", [("composition", 3), ("repeat_and_select", 1)])
def test_a_crash_counts_what_was_announced(tmp_path, monkeypatch, strategy, counted):
    """Where all trials are shown. Where nobody sees the losers, a trial has no log."""

    def crash(self, model, data, log):
        if log is not None:
            log.announce(model.optimizer, 3)
        model.optimizer.ledger.restore([(1.0, 8.0, 1)])
        raise ValueError("no memory")

    monkeypatch.setattr(trial.PrivateTrial, "_train", crash)
    of = {"composition": strategies.Composition(2), "repeat_and_select": None}[strategy]
    plan = planned(strategy=of or strategies.RepeatAndSelect(2))
    one = trial.PrivateTrial(plan, 1.0, tmp_path)
    outcome = one.run(tuned.model(tuned.optimizer()), None, None, str(tmp_path / "weights"))
    assert outcome["releases"] == counted and "no memory" in outcome["error"]


@pytest.mark.parametrize("error", [dp.NotPrivateError, dp.BudgetExceededError, OSError])
def test_what_the_next_process_must_know_is_no_crash(tmp_path, monkeypatch, error):
    def fail(*args):
        raise error("no room")

    monkeypatch.setattr(trial.PrivateTrial, "_train", fail)
    one = trial.PrivateTrial(planned(), 1.0, tmp_path)
    with pytest.raises(error, match="no room"):
        one.run(tuned.model(tuned.optimizer()), None, None, str(tmp_path / "weights"))
