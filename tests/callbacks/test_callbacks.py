"""PrivacyMonitor and PrivacyBudget in `fit`."""

import glob
import types
import warnings

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.accounting.composition import epsilon, epsilon_spent
from tf_adaptive_dp.callbacks.common import NumExamplesCheck

N, DELTA = 1_000, 1e-3


def train(name="DPSGD", callbacks=(), epochs=2, model=None, compile_with=(), **kwargs):
    if model is None:
        model = catalogue.mlp()
        optimizer = catalogue.make(name, **{"noise_multiplier": 1.0, **kwargs})
        model.compile(optimizer, loss=catalogue.loss(), **dict(compile_with))
    return model, catalogue.fit(model, epochs, callbacks).history


@pytest.mark.slow_on(2)
def test_the_monitor_reports_the_accountants_epsilon_each_epoch():
    _, history = train(callbacks=[dp.PrivacyMonitor(N, DELTA, full_passes=False)])
    expected = [epsilon(1.0, 8 / N, steps, DELTA) for steps in (4, 8)]
    np.testing.assert_allclose(history["epsilon"], expected, rtol=1e-9)
    assert history["delta"] == [DELTA, DELTA]
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.1])


@pytest.mark.slow_on(2)
def test_an_adadp_iteration_of_two_minibatches_costs_two_releases():
    model, history = train("ADADP", [dp.PrivacyMonitor(N, DELTA, full_passes=False)], epochs=1)
    assert model.optimizer.ledger.num_releases == 4
    assert history["epsilon"][-1] == pytest.approx(epsilon(1.0, 8 / N, 4, DELTA))
    assert history["learning_rate"][-1] == pytest.approx(float(model.optimizer.learning_rate))
    assert history["learning_rate"][-1] != pytest.approx(0.1)


class TurnsBack(tf.keras.callbacks.Callback):
    """Sets the optimizer's state to that from before the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        optimizer = self.model.optimizer
        optimizer.build(self.model.trainable_variables)
        self.kept = [tf.identity(v) for v in optimizer.variables]

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            for variable, value in zip(self.model.optimizer.variables, self.kept):
                variable.assign(value)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", ["monitor", "budget"])
def test_a_ledger_that_goes_back_during_training_is_refused_or_restored(tmp_path, kind):
    def callback():
        if kind == "monitor":
            return dp.PrivacyMonitor(N, DELTA, full_passes=False)
        return dp.PrivacyBudget(100.0, DELTA, N, full_passes=False)

    size = {"expected_batch_size": 8.0}
    for epochs in (2, 3) if kind == "monitor" else (3,):
        with pytest.raises(dp.NotPrivateError, match="set back.*a `ReleaseLog` before other"):
            train(callbacks=[callback(), TurnsBack()], epochs=epochs, **size)
    log = dp.ReleaseLog(tmp_path / "log")
    with pytest.warns(UserWarning, match="not in the checkpoint"):
        model, _ = train(callbacks=[log, callback(), TurnsBack()], epochs=3, **size)
    log.close()
    assert model.optimizer.ledger.num_releases == 12


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("seed", [None, 1])
def test_noise_with_a_seed_is_marked_as_not_private(seed):
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)
    _, history = train(callbacks=[monitor], epochs=1, seed=seed)
    assert history.get("NOT_PRIVATE") == (None if seed is None else [1.0])


@pytest.mark.slow
def test_the_monitor_can_account_with_pld():
    _, history = train(
        callbacks=[dp.PrivacyMonitor(N, DELTA, accountant="pld", full_passes=False)], epochs=1
    )
    assert history["epsilon"][-1] == pytest.approx(epsilon(1.0, 8 / N, 4, DELTA, "pld"))


def test_epsilon_shows_in_the_progress_line(capsys):
    model, _ = train(epochs=1)
    x, y = catalogue.data()
    model.fit(
        x, y, 8, 1, verbose=2, callbacks=[dp.PrivacyMonitor(len(x), DELTA, full_passes=False)]
    )
    assert "epsilon: " in capsys.readouterr().out


def test_tensorboard_gets_the_figures_under_tags_that_say_what_is_private(tmp_path):
    raw = "raw_gradients_NOT_PRIVATE"
    monitor = dp.PrivacyMonitor(N, DELTA, tmp_path / "logs", full_passes=False)
    budget = dp.PrivacyBudget(99.0, DELTA, N, batch_size=8, full_passes=False)
    train("ADADP", [monitor, budget], seed=None)
    (path,) = glob.glob(str(tmp_path / "logs" / "*"))
    values, described = {}, set()
    for record in tf.data.TFRecordDataset(path):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            plugin = value.metadata.plugin_data.plugin_name
            if plugin == "scalars":
                values.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
            else:
                described.add(plugin)
    assert set(values) == {
        "privacy/epsilon",
        "privacy/epsilon_budget",
        "privacy/learning_rate",
        "privacy/noise_to_signal",
        "privacy/share_clipped_NOT_PRIVATE",
        "step_size/error",
        "step_size/acceptance",
        *(f"{raw}/{name}" for name in ("clipped_share", "non_finite_examples")),
        *(f"{raw}/gradient_norm_quantile_{q}" for q in (0.1, 0.5, 0.9)),
    }
    assert values["privacy/epsilon"] == pytest.approx(
        [epsilon(1.0, 8 / N, steps, DELTA) for steps in (4, 8)]
    )
    assert 0 < values[f"{raw}/clipped_share"][0] <= 1
    assert values[f"{raw}/clipped_share"] == values["privacy/share_clipped_NOT_PRIVATE"]
    assert values["step_size/error"][0] > 0
    assert values["privacy/epsilon_budget"] == [99.0, 99.0]
    # σ√d / L, of (6 + 1)·5 + (5 + 1)·3 parameters
    assert values["privacy/noise_to_signal"] == pytest.approx([np.sqrt(53) / 8] * 2)
    # TensorBoard sorts groups by name and opens the first.
    assert min(values) == "privacy/epsilon"
    assert described == {"custom_scalars", "hparams"}


@pytest.mark.slow_on(2)
def test_the_monitor_warns_of_batches_larger_than_the_expected_size():
    with pytest.warns(UserWarning, match="8.0 examples on average.*`expected_batch_size`=2"):
        train(
            callbacks=[dp.PrivacyMonitor(N, DELTA, full_passes=False)],
            epochs=4,
            expected_batch_size=2.0,
        )


def test_means_that_no_draw_has_are_warned_of_and_are_an_error_where_padding_is_known():
    optimizer = catalogue.make("DPSGD", noise_multiplier=1.0, expected_batch_size=20.0)
    optimizer.ledger.restore([(1.0, 20.0, 10)])

    def of_epoch(num_examples, sampling):
        monitor = dp.PrivacyMonitor(1000, DELTA, sampling=sampling, optimizer=optimizer)
        monitor._released = 0
        monitor._compare_mean_size(num_examples)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_epoch(284, "shuffled")
        of_epoch(369, dp.PoissonSampling(0.02, 60, 10))
    with pytest.warns(UserWarning, match="held 28.5 examples on average"):
        of_epoch(285, "shuffled")
    with pytest.raises(dp.NotPrivateError, match="held 37.0 examples on average"):
        of_epoch(370, dp.PoissonSampling(0.02, 60, 10))


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_monitor_warns_of_batches_that_come_back_before_all_others(recwarn, swapped):
    # As `fit` swaps the batches of a `PyDataset`, where it is not told to leave them.
    x, y = catalogue.data(256)
    order = [*range(4), *([3, 2, 1, 0] if swapped else range(4))]
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    batches = [next(iter(batches.skip(k))) for k in order]
    whole = tf.data.Dataset.from_tensor_slices(tuple(map(tf.stack, zip(*batches))))
    model = catalogue.mlp()
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1), loss=catalogue.loss())
    monitor = dp.PrivacyMonitor(256, 1e-3)
    model.fit(whole, epochs=2, steps_per_epoch=4, callbacks=[monitor], verbose=0)
    assert any("reused before every batch" in str(w.message) for w in recwarn) == swapped


SHUFFLES = {
    "arrays, seeded": GENERATION == 2,  # Keras 3 then repeats the order of the first epoch
    "data set": True,
    "no": False,
}


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_data_that_are_not_shuffled_are_not_said_to_be(recwarn, shuffle):
    tf.keras.utils.set_random_seed(1)
    given = catalogue.data(128)
    if shuffle != "arrays, seeded":
        data = tf.data.Dataset.from_tensor_slices(given)
        given = [(data.shuffle(128) if SHUFFLES[shuffle] else data).batch(32)]
    monitor = dp.PrivacyMonitor(128, DELTA)
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", expected_batch_size=32.0), loss=catalogue.loss())
    size = 32 if len(given) == 2 else None
    model.fit(*given, batch_size=size, epochs=3, callbacks=[monitor], verbose=0)
    found = [w for w in recwarn if "came again in a later epoch" in str(w.message)]
    said = " ".join(monitor.statement().split())
    repeats = not SHUFFLES[shuffle]
    assert len(found) == repeats == ("not even an approximation here: 8 of the" in said)
    assert ("customary approximation" in said) != repeats


def test_the_monitor_counts_no_examples_of_training_without_it(recwarn):
    model, _ = train(epochs=4, expected_batch_size=8.0)
    train(callbacks=[dp.PrivacyMonitor(32, DELTA, full_passes=False)], model=model, epochs=1)
    assert not [w for w in recwarn if "on average" in str(w.message)]


def counted(kind, num_examples):
    """A callback that computes ε for a number of examples which nothing compares with the data."""
    budget = {"epsilon": 1e4} if kind is dp.PrivacyBudget else {}
    return kind(num_examples=num_examples, delta=DELTA, full_passes=False, **budget)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_data_that_grew_are_refused(kind):
    model, _ = train(callbacks=[counted(kind, N)], epochs=1, expected_batch_size=8.0)
    train(callbacks=[counted(kind, N)], model=model, epochs=1)
    optimizer = model.optimizer
    again = type(optimizer).from_config(optimizer.get_config())
    loaded = catalogue.make("DPSGD", expected_batch_size=8.0)
    loaded.build(model.trainable_variables)
    for variable, value in zip(loaded.variables, optimizer.variables):
        variable.assign(value)
    grown = "drawn from 1000 examples.*num_examples=5000"
    for ledger in (optimizer, again, loaded, loaded.ledger):
        assert epsilon_spent(ledger, N, DELTA) > 0
        with pytest.raises(ValueError, match=grown):
            epsilon_spent(ledger, 5 * N, DELTA)
        with pytest.raises(ValueError, match=grown):
            dp.privacy_statement(ledger, 5 * N, DELTA, sampling="poisson")
    for other in (dp.PrivacyMonitor, dp.PrivacyBudget):
        with pytest.raises(ValueError, match=grown):
            train(callbacks=[counted(other, 5 * N)], model=model, epochs=1)
    assert optimizer.ledger.num_releases == 8
    # The bound of the message covers the examples of the first part.
    mixed = dp_accounting.rdp.RdpAccountant()
    for num_examples, releases in ((N, 8), (5 * N, 4)):
        released = dp_accounting.GaussianDpEvent(1.0)
        sampled = dp_accounting.PoissonSampledDpEvent(8 / num_examples, released)
        mixed.compose(sampled, releases)
    optimizer.ledger.fewest_units = 5 * N  # as if the first number had been wrong
    train(callbacks=[counted(kind, 5 * N)], model=model, epochs=1)
    too_small = epsilon_spent(optimizer, 5 * N, DELTA)
    assert too_small < mixed.get_epsilon(DELTA) < epsilon_spent(optimizer, N, DELTA)


def test_a_refused_call_and_a_question_note_no_number():
    model, _ = train(callbacks=[counted(dp.PrivacyMonitor, N)], epochs=1, expected_batch_size=8.0)
    ledger = model.optimizer.ledger
    dp.PrivacyMonitor(N // 2, DELTA, optimizer=model.optimizer).epsilon()
    epsilon_spent(model.optimizer, N // 2, DELTA)
    with pytest.raises(dp.BudgetExceededError):
        train(callbacks=[dp.PrivacyBudget(1e-3, DELTA, N // 2, full_passes=False)], model=model)
    assert ledger.fewest_units == N
    budget = dp.PrivacyBudget(1e4, DELTA, N // 2, optimizer=model.optimizer)
    assert budget.releases_left() and ledger.fewest_units == N // 2  # in a loop of one's own


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_a_number_is_kept_although_an_earlier_state_is_loaded(kind):
    class Loads(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            for variable, value in zip(self.model.optimizer.variables, state):
                variable.assign(value)

    model, _ = train(callbacks=[counted(kind, N)], epochs=1, expected_batch_size=8.0)
    ledger, state = model.optimizer.ledger, [np.array(v) for v in model.optimizer.variables]
    train(callbacks=[counted(kind, N // 2), Loads()], model=model, epochs=1)  # as from a backup
    assert (ledger.num_releases, ledger.fewest_units) == (8, N // 2)
    Loads.on_train_begin(types.SimpleNamespace(model=model))
    assert ledger.fewest_units == N
    ledger.restore([(1.0, 8.0, 8)])  # as a `ReleaseLog` does
    with pytest.raises(ValueError, match="drawn from 500"):
        train(callbacks=[counted(kind, N)], model=model, epochs=1)


def test_an_epoch_without_releases_and_one_of_other_batches_are_no_contradiction():
    optimizer = catalogue.make("DPSGD", expected_batch_size=8.0)
    check = NumExamplesCheck(32, "shuffled", True)
    check.begin(optimizer, None)
    check.begin_epoch(optimizer)
    check.end_epoch(optimizer, was_stopped=False)  # as of a critic that rests
    check.begin_epoch(optimizer)
    optimizer.ledger.restore([(1.0, 8.0, 4)])
    optimizer.expected_batch_size = 16  # of the next epoch
    check.end_epoch(optimizer, was_stopped=False)


@pytest.mark.slow_after(2)
@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
@pytest.mark.parametrize("length_is_known", [True, False])
def test_a_later_fit_is_compared_with_the_number_of_examples(kind, length_is_known):
    def fit(rows, model):
        data = tf.data.Dataset.from_tensor_slices(tuple(a[:rows] for a in catalogue.data()))
        data = data.batch(8)
        if not length_is_known:
            data = data.filter(lambda *batch: True)
        budget = {"epsilon": 1e4} if kind is dp.PrivacyBudget else {}
        with warnings.catch_warnings():  # Keras on an end that it did not know
            warnings.simplefilter("ignore")
            model.fit(data, callbacks=[kind(num_examples=32, delta=DELTA, **budget)], verbose=0)

    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", expected_batch_size=8.0), loss=catalogue.loss())
    fit(32, model)
    fit(32, model)
    with pytest.raises(ValueError, match="2 batches.*these are 16 examples.*=32"):
        fit(16, model)
    assert model.optimizer.ledger.num_releases == (8 if length_is_known else 10)


def test_a_statement_about_more_examples_than_were_drawn_from_is_refused():
    sampling = dp.sampling.FixedSizeSampling(8, 3)
    x, y = catalogue.data()
    next(iter(dp.sampling.fixed_size_batches((x, y), sampling)))
    optimizer = catalogue.make("DPSGD", noise_multiplier=1.0, expected_batch_size=8.0)
    with pytest.raises(ValueError, match=f"drawn from: {len(x)}. Received: num_examples=50000"):
        dp.privacy_statement(optimizer, 50_000, DELTA, sampling=sampling)


@pytest.mark.slow_on(2)
def test_the_monitor_states_the_guarantee_in_words():
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)
    train(callbacks=[monitor])
    text = " ".join(monitor.statement().split())
    assert "add" in text and "shuffl" in text and "one example" in text


def test_the_monitor_needs_a_private_optimizer():
    model = catalogue.mlp()
    model.compile("sgd", loss=catalogue.loss())
    with pytest.raises(TypeError, match="optimizer of tf_adaptive_dp"):
        catalogue.fit(model, callbacks=[dp.PrivacyMonitor(N, DELTA, full_passes=False)])


@pytest.mark.slow_on(2)
def test_the_monitor_counts_side_information_that_was_released_privately():
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(5.0)
    fixed = dp.side_information.FixedPreconditioner(lambda v: 1.0, provenance=event)
    model = catalogue.mlp()
    model.compile(dp.AdaDPS(fixed, 1.0, 1.0), loss=catalogue.loss())
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)
    catalogue.fit(model, callbacks=[monitor])
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(8 / N, dp_accounting.GaussianDpEvent(1.0)), 4
    )
    accountant.compose(event)
    assert monitor.epsilon() == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("compile_with, step", [({"steps_per_execution": 2}, 2), ({}, 1)])
@pytest.mark.parametrize("name", ["DPSGD", "ADADP"])
def test_the_budget_stops_before_the_step_that_would_overspend(name, compile_with, step):
    budget = epsilon(1.0, 8 / N, 6, DELTA) * (1 + 1e-9)
    callbacks = [dp.PrivacyBudget(budget, DELTA, N, batch_size=8, full_passes=False)]
    model, _ = train(name, callbacks, epochs=5, compile_with=compile_with)
    assert model.optimizer.ledger.num_releases == 6
    with pytest.raises(dp.BudgetExceededError, match="6 releases"):
        train(callbacks=callbacks, model=model)
    assert model.optimizer.ledger.num_releases == 6

    just_below = [
        dp.PrivacyBudget(
            epsilon(1.0, 8 / N, 6, DELTA) * 0.999, DELTA, N, batch_size=8, full_passes=False
        )
    ]
    model, _ = train(name, just_below, epochs=5, compile_with=compile_with)
    assert model.optimizer.ledger.num_releases == (5 if step == 1 else 4)


# With a smaller last batch, the optimizer finds its size in `fit`.
@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [32, 36])
def test_a_batch_size_that_is_not_that_of_fit_is_refused(rows):
    budget = dp.PrivacyBudget(99.0, DELTA, N, batch_size=8, full_passes=False)
    model, (x, y) = catalogue.mlp(), catalogue.data(rows)
    model.compile(catalogue.make("DPSGD", noise_multiplier=1.0), loss=catalogue.loss())
    with pytest.raises(ValueError, match="must be that of `fit`, which is 16.*batch_size=8"):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[budget])
    assert model.optimizer.ledger.num_releases == 1


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("room, verbose, says", [(6, 2, True), (6, 0, False), (99, 2, False)])
def test_the_budget_says_that_it_stopped(capsys, room, verbose, says):
    limit = epsilon(1.0, 8 / N, room, DELTA) * (1 + 1e-9)
    budget = dp.PrivacyBudget(limit, DELTA, N, batch_size=8, full_passes=False)
    model, (x, y) = catalogue.mlp(), catalogue.data(32)
    model.compile(catalogue.make("DPSGD", noise_multiplier=1.0), loss=catalogue.loss())
    model.fit(x, y, batch_size=8, epochs=3, verbose=verbose, callbacks=[budget])
    stopped = (
        f"training stopped in epoch 2 of 3, because another step would exceed epsilon = {limit:g}"
    )
    assert (stopped in capsys.readouterr().out) == says


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_the_budget_counts_the_parts_of_accumulated_batches_as_one(steps_per_execution):
    budget = dp.PrivacyBudget(
        epsilon(1.0, 8 / N, 3, DELTA) * (1 + 1e-9), DELTA, N, batch_size=8, full_passes=False
    )
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", noise_multiplier=1.0, gradient_accumulation_steps=2)
    model.compile(optimizer, loss=catalogue.loss(), steps_per_execution=steps_per_execution)
    x, y = catalogue.data(96)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[budget])
    assert optimizer.ledger.segments == [(1.0, 8.0, 3)]


class LessNoise(tf.keras.callbacks.Callback):
    def __init__(self, noise_multiplier):
        super().__init__()
        self.noise_multiplier = noise_multiplier

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.noise_multiplier = self.noise_multiplier


@pytest.mark.slow
def test_the_budget_follows_a_change_of_noise():
    limit = 2.0
    monitor = dp.PrivacyMonitor(N, DELTA, full_passes=False)
    budget = dp.PrivacyBudget(limit, DELTA, N, batch_size=8, full_passes=False)
    model, _ = train(callbacks=[budget, monitor, LessNoise(0.6)], epochs=40)
    assert monitor.epsilon() <= limit
    noise_multiplier, size, releases = model.optimizer.ledger.segments[-1]
    model.optimizer.ledger.record(noise_multiplier, size)
    assert monitor.epsilon() > limit
    assert noise_multiplier == 0.6 and releases > 1


@pytest.mark.slow_on(2)
def test_a_step_that_became_too_dear_is_refused():
    budget = dp.PrivacyBudget(1.0, DELTA, N, batch_size=8, full_passes=False)
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", noise_multiplier=1.0), loss=catalogue.loss())
    with pytest.raises(dp.BudgetExceededError):
        train(callbacks=[budget, LessNoise(0.1)], model=model, epochs=3)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 4)]


class At(tf.keras.callbacks.Callback):
    """Does something to the model when Keras calls a hook."""

    def __init__(self, hook, action):
        super().__init__()
        setattr(self, hook, lambda *of_keras, **named: action(self.model))


def record_statistics(model):
    """As one does who has released a noisy statistic of the data."""
    model.optimizer.ledger.other_events += (dp_accounting.GaussianDpEvent(1.0),)


@pytest.mark.slow_on(2)
def test_the_budget_pays_for_what_else_is_released_meanwhile():
    numbers = dict(delta=DELTA, num_examples=N, full_passes=False)
    monitor = dp.PrivacyMonitor(**numbers)
    budget = dp.PrivacyBudget(epsilon(1.0, 8 / N, 99, DELTA), batch_size=8, **numbers)
    with pytest.raises(dp.BudgetExceededError, match="with 4 releases"):
        train(callbacks=[budget, monitor, At("on_epoch_end", record_statistics)])
    assert budget.releases_left() == 0 and monitor.epsilon() > budget.epsilon


@pytest.mark.parametrize("changed", ["epsilon", "delta", "num_examples"])
def test_the_budget_forgets_a_price_when_its_numbers_change(changed):
    optimizer = catalogue.make("DPSGD", noise_multiplier=1.0, expected_batch_size=8.0)
    numbers = {"epsilon": 1.0, "delta": DELTA, "num_examples": N}
    budget = dp.PrivacyBudget(**numbers, optimizer=optimizer)
    before = budget.releases_left()
    fewer = numbers[changed] // 2 if changed == "num_examples" else numbers[changed] / 2
    setattr(budget, changed, fewer)
    new = dp.PrivacyBudget(**{**numbers, changed: fewer}, optimizer=optimizer)
    assert budget.releases_left() == new.releases_left() < before


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
def test_statistics_that_are_released_after_training_began_are_not_left_out(kind, hook):
    x, y = catalogue.data()
    layer = dp.PrivateNormalization(1.0)
    model = tf.keras.Sequential([tf.keras.Input(x.shape[1:]), layer, catalogue.mlp()])
    model.compile(catalogue.make("DPSGD", noise_multiplier=1.0), loss=catalogue.loss())
    adapt = At(hook, lambda model: layer.adapt(x))
    numbers = dict(delta=DELTA, num_examples=N, full_passes=False)
    if kind is dp.PrivacyBudget:
        numbers |= dict(epsilon=99.0, batch_size=8)
    with pytest.raises(dp.NotPrivateError, match="whose release is not in the optimizer's ledger"):
        catalogue.fit(model, callbacks=[kind(**numbers), adapt])
    # The monitor learns of it at the end of the epoch at the latest.
    assert model.optimizer.ledger.num_releases in ([0] if kind is dp.PrivacyBudget else [0, 4])


@pytest.mark.slow
def test_the_first_step_needs_a_batch_size_to_be_priced():
    with pytest.raises(ValueError, match="expected_batch_size"):
        train(callbacks=[dp.PrivacyBudget(1.0, DELTA, N, full_passes=False)])
    train(callbacks=[dp.PrivacyBudget(10.0, DELTA, N, full_passes=False)], expected_batch_size=8.0)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: dp.PrivacyMonitor(0, DELTA), "`num_examples`"),
        (lambda: dp.PrivacyMonitor(N, 1.5), "`delta`"),
        (lambda: dp.PrivacyMonitor(N, DELTA, sampling="random"), "`sampling`"),
        (
            lambda: dp.PrivacyMonitor(N, DELTA, accountant="magic"),
            "`accountant`",
        ),
        (lambda: dp.PrivacyBudget(0.0, DELTA, N), "`epsilon`"),
        (lambda: dp.PrivacyBudget(1.0, 0.0, N), "`delta`"),
        (lambda: dp.PrivacyBudget(1.0, DELTA, N, batch_size=-1), "`batch_size`"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_the_monitor_warns_of_a_large_delta(recwarn):
    dp.PrivacyMonitor(N, 1 / N)
    assert not recwarn
    with pytest.warns(UserWarning, match="`delta`.*publishing whole examples") as found:
        dp.PrivacyMonitor(N, 1.01 / N)
    assert [w.filename for w in found] == [__file__]


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
@pytest.mark.parametrize("expected_batch_size, released", [(8.0, 0), (None, 4)])
def test_a_number_of_examples_that_fit_does_not_feed_is_refused(
    kind, expected_batch_size, released
):
    model = catalogue.mlp()
    optimizer = catalogue.make("DPSGD", expected_batch_size=expected_batch_size)
    model.compile(optimizer, loss=catalogue.loss())
    size = {"batch_size": 8} if kind is dp.PrivacyBudget else {}
    numbers = {"num_examples": 60_000, "delta": DELTA, **size}
    if kind is dp.PrivacyBudget:
        numbers["epsilon"] = 99.0
    with pytest.raises(ValueError, match="4 batches.*these are 32 examples.*=60000"):
        catalogue.fit(model, callbacks=[kind(**numbers)])
    assert model.optimizer.ledger.num_releases == released


@pytest.mark.parametrize("num_examples, fits", [(24, False), (25, True), (39, True), (40, False)])
def test_the_last_batch_of_a_pass_may_be_smaller_or_dropped(num_examples, fits):
    check = NumExamplesCheck(num_examples, "shuffled", True)
    optimizer = catalogue.make("DPSGD", expected_batch_size=8.0)
    if fits:
        check.begin(optimizer, 4)
    else:
        with pytest.raises(ValueError, match=f"num_examples={num_examples}"):
            check.begin(optimizer, 4)
    NumExamplesCheck(num_examples, "shuffled", False).begin(optimizer, 4)
    NumExamplesCheck(num_examples, "poisson", True).begin(optimizer, 4)


@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_a_sampling_that_drew_from_other_data_is_refused(kind):
    sampling = dp.sampling.FixedSizeSampling(8, steps=9)
    batches = dp.sampling.fixed_size_batches(catalogue.data(), sampling)
    model = catalogue.mlp()
    model.compile(catalogue.make("DPSGD", expected_batch_size=8.0), loss=catalogue.loss())
    numbers = {"num_examples": 1_000, "delta": DELTA, "sampling": sampling}
    if kind is dp.PrivacyBudget:
        numbers["epsilon"] = 99.0
    with pytest.raises(ValueError, match="drawn from: 32. Received: num_examples=1000"):
        model.fit(batches, steps_per_epoch=4, verbose=0, callbacks=[kind(**numbers)])
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kind", [dp.PrivacyMonitor, dp.PrivacyBudget])
def test_a_sampling_that_drew_nothing_is_not_taken_for_one_whose_batches_look_alike(kind):
    # 63 rows: no batches of other tests in this process look the same, and each shows its draw,
    # which one of 31 rows does not in 0.7% of the draws (`padding.is_ours`).
    drawn = dp.sampling.PoissonSampling(8 / 32, steps=4, max_batch_size=63)
    other = dp.sampling.PoissonSampling(8 / 320, steps=4, max_batch_size=63)
    batches = dp.poisson_batches(catalogue.data(), drawn)
    model = catalogue.mlp()
    model.compile(
        catalogue.make("DPSGD", expected_batch_size=8.0, noise_multiplier=4.0),
        loss=catalogue.loss(),
    )
    numbers = {"delta": DELTA} | ({} if kind is dp.PrivacyMonitor else {"epsilon": 999.0})
    wrong = kind(num_examples=320, sampling=other, **numbers)
    with pytest.raises(ValueError, match="must be the object .*look the same, from 32 examples"):
        model.fit(batches, steps_per_epoch=4, verbose=0, callbacks=[wrong])
    assert model.optimizer.ledger.num_releases == 0
    again = dp.sampling.PoissonSampling(8 / 32, steps=9, max_batch_size=63)
    right = kind(num_examples=32, sampling=again, **numbers)  # equal but for the number of steps
    model.fit(batches, steps_per_epoch=4, verbose=0, callbacks=[right])
    with pytest.raises(ValueError, match="drawn from 32 examples"):
        dp.privacy_statement(model.optimizer, 320, 1e-4, sampling=other)
    model.optimizer.ledger.fewest_units = None  # as if it had trained without the callback
    states = [
        dp.privacy_statement(model.optimizer, n, 1e-4, sampling=s)
        for n, s in ((32, again), (320, other))
    ]
    assert ["if so" in " ".join(s.split()) for s in states] == [False, True]


@pytest.mark.slow_on(3)
def test_metrics_that_count_the_padding_of_poisson_batches_are_named():
    sampling = dp.PoissonSampling(8 / 32, steps=12, max_batch_size=30)

    def fit(**metrics):
        model = catalogue.mlp()
        optimizer = catalogue.make("DPSGD", expected_batch_size=8.0, noise_multiplier=4.0)
        model.compile(optimizer, loss=catalogue.loss(), **metrics)
        for part in range(2):  # the metrics are made in the first call
            batches = dp.poisson_batches(catalogue.data(), sampling, start_step=4 * part)
            monitor = dp.PrivacyMonitor(32, DELTA, sampling=sampling)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.fit(batches, steps_per_epoch=4, verbose=0, callbacks=[monitor])
            yield [str(w.message) for w in caught if "count the padding" in str(w.message)]

    for named in fit(
        metrics=["accuracy", tf.keras.metrics.SparseTopKCategoricalAccuracy(2, "top")]
    ):
        assert len(named) == 1 and "metrics=['accuracy', 'top']" in named[0]
    assert list(fit(weighted_metrics=["accuracy"])) == [[], []]


@pytest.mark.slow_on(2)
def test_a_plan_which_leaves_padding_out_does_not_warn_of_it():
    model, numbers = catalogue.mlp(), {"delta": DELTA, "num_examples": 32, "batch_size": 8}
    for epochs in (1, 2):
        plan = dp.PrivacyPlan(noise_multiplier=4.0, epochs=epochs, accountant="rdp", **numbers)
        if epochs == 1:
            model.compile(plan.optimizer(dp.ADADP), catalogue.loss(), metrics=["accuracy"])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Metrics that are compiled")
            plan.fit(model, *catalogue.data(), verbose=0)


@pytest.mark.slow_on(2)
def test_the_budget_can_end_after_a_number_of_steps():
    budget = dp.PrivacyBudget(99.0, DELTA, 32, batch_size=8, steps=5)
    model, _ = train(callbacks=[budget])
    assert model.optimizer.ledger.num_releases == 5
    with pytest.raises(dp.BudgetExceededError, match="steps=5, with 5 releases"):
        train(callbacks=[budget], model=model)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: dp.PrivacyMonitor(64, DELTA),
        lambda: dp.PrivacyBudget(100.0, DELTA, 64),
    ],
    ids=["monitor", "budget"],
)
def test_a_batch_size_that_differs_from_the_expected_one_is_named(callback):
    x, y = catalogue.data(64)
    model = catalogue.mlp()
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=16, learning_rate=0.1), catalogue.loss())
    match = "`expected_batch_size=16`.*are 8 in a batch.*pass it `batch_size=16`"
    with pytest.raises(ValueError, match=match):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback()])


@pytest.mark.slow_on(2)
def test_training_a_model_that_a_search_chose_is_warned_of_once(recwarn):
    numbers = dict(delta=DELTA, num_examples=N, full_passes=False)
    callbacks = [dp.PrivacyMonitor(**numbers), dp.PrivacyBudget(9.0, batch_size=8, **numbers)]
    model, history = train(callbacks=callbacks)
    assert not [w for w in recwarn if "A search of hyperparameters" in str(w.message)]
    assert "WITHOUT_SEARCH" not in history
    model.optimizer.ledger.chosen_by_search = True
    for _ in range(2):
        with pytest.warns(UserWarning, match="ledger.chosen_by_search = False") as warned:
            _, history = train(model=model, callbacks=callbacks, epochs=1)
        assert history["WITHOUT_SEARCH"] == [1.0]
        assert len([w for w in warned if "A search of hyperpar" in str(w.message)]) == 1
