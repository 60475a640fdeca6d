"""`PrivacyPlan`: one object says each number once, and the parts agree."""

import copy
import functools
import json
import pickle
import re
import shutil
import threading
import warnings
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.label_counts import LabelCounts
from tf_adaptive_dp._keras import tracebacks
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.accounting import BandedNoise, Releases, epsilon
from tf_adaptive_dp.callbacks import run_directory
from tf_adaptive_dp.errors import BudgetExceededError, NotPrivateError
from tf_adaptive_dp.gradients.absent_rows import PADDING_CONTRIBUTES
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.statement import LargeDeltaWarning
from tf_adaptive_dp.wording import format_epsilon

N, DELTA = 64, 1e-3
NUMBERS = {"delta": DELTA, "num_examples": N, "batch_size": 8, "epochs": 2, "accountant": "rdp"}
X, Y = catalogue.data(N)


@functools.cache
def for_epsilon_2(accountant="rdp"):
    return PrivacyPlan(2.0, **{**NUMBERS, "accountant": accountant})


def planned(**kwargs):
    return PrivacyPlan(**{**NUMBERS, "noise_multiplier": 1.0, **kwargs})


def model_of(plan, optimizer=dp.DPSGD, metrics=("accuracy",), **kwargs):
    model = catalogue.mlp()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if optimizer is dp.DPSGD:
        kwargs = {"learning_rate": 0.1, **kwargs}
    model.compile(plan.optimizer(optimizer, **kwargs), loss, metrics=list(metrics))
    return model


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_the_noise_is_the_least_that_meets_the_budget(accountant):
    plan = for_epsilon_2(accountant)
    assert plan.steps == 16 and plan.steps_per_epoch == 8

    def spent(noise_multiplier):
        return epsilon(noise_multiplier, 8 / N, 16, DELTA, accountant)

    assert spent(plan.noise_multiplier) <= 2.0 < spent(plan.noise_multiplier * 0.998)
    assert spent(plan.noise_multiplier * 2 / 3) > 3.0 and spent(plan.noise_multiplier * 3 / 2) < 1.4


@pytest.mark.slow
def test_pld_needs_less_noise_than_rdp():
    assert for_epsilon_2("pld").noise_multiplier < 0.97 * for_epsilon_2().noise_multiplier


def test_epsilon_of_a_noise_multiplier_is_that_of_the_accountant():
    assert planned().epsilon == pytest.approx(epsilon(1.0, 8 / N, 16, DELTA), rel=1e-6)
    assert planned(batch_size=7).steps_per_epoch == 9  # 9.14
    assert planned(batch_size=N).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("num_examples", "epochs", "noise", "batch_size", "steps"),
    [
        (60_000, 20, None, 1_024, 1_180),
        (60_000, 5, None, 429, 700),
        (1_000, 20, None, 29, 680),
        (10, 1, None, 1, 10),
        (500, 40, BandedNoise(32), 15, 1_320),
    ],
)
def test_the_usual_batches_are_large_and_leave_enough_steps(
    num_examples, epochs, noise, batch_size, steps
):
    plan = planned(
        num_examples=num_examples,
        epochs=epochs,
        batch_size=None,
        noise=noise,
        noise_multiplier=4.0,
    )
    assert (plan.batch_size, plan.steps) == (batch_size, steps)


def test_the_usual_batches_of_users_are_counted_in_users():
    ids = np.arange(600) // 6
    plan = planned(num_examples=None, user_ids=ids, examples_per_user=2, epochs=21, batch_size=None)
    assert (plan.batch_size, plan.steps) == (3, 693)


@pytest.mark.slow_on(2)
def test_other_events_are_paid_for():
    event = dp_accounting.GaussianDpEvent(3.0)
    plan = PrivacyPlan(3.0, **NUMBERS, other_events=[event])
    released = Releases([(plan.noise_multiplier, 8.0, 16)], (event,))
    assert plan.sampling.epsilon_spent(released, N, DELTA) <= 3.0
    assert plan.noise_multiplier > 1.02 * PrivacyPlan(3.0, **NUMBERS).noise_multiplier
    fixed = dp.side_information.FixedPreconditioner(catalogue.by_rank, provenance=event)
    plan.optimizer(dp.AdaDPS, side_information=fixed, learning_rate=0.1)
    with pytest.raises(ValueError, match="to the plan as `other_events`.*GaussianDpEvent"):
        planned().optimizer(dp.AdaDPS, side_information=fixed, learning_rate=0.1)


def test_what_the_plan_makes_agrees_with_it():
    plan = planned()
    optimizer = plan.optimizer(dp.ADADP, l2_norm_clip=0.5, tolerance=0.3)
    assert (optimizer.l2_norm_clip, optimizer.noise_multiplier) == (0.5, 1.0)
    assert optimizer.expected_batch_size == 8.0 and optimizer.ledger.num_releases == 0
    batches = plan.batches(X, Y)
    assert int(batches.cardinality()) == 16
    monitor, budget = plan.callbacks()
    assert monitor.sampling == budget.sampling == plan.sampling
    assert budget.steps == 16 and budget.epsilon == plan.epsilon


def test_a_number_by_position_is_no_clip_norm_since_optimizers_of_keras_take_the_rate_first():
    with pytest.raises(TypeError, match="positional"):
        planned().optimizer(dp.DPAdam, 1e-3)


def test_a_plan_tells_its_optimizer_that_it_normalizes_the_inputs():
    assert not planned().optimizer(dp.ADADP).normalized_inputs
    plan = planned(normalize_inputs=True)
    assert plan.optimizer(dp.ADADP).normalized_inputs
    assert plan.optimizer(dp.ADADP).num_steps == plan.steps
    assert plan.optimizer(dp.ADADP, num_steps=5).num_steps == 5
    assert not plan.optimizer(dp.ADADP, normalized_inputs=False).normalized_inputs
    assert not hasattr(plan.optimizer(dp.DPSGD, learning_rate=0.1), "normalized_inputs")


def test_a_plan_says_if_measuring_takes_more_than_a_quarter_of_its_steps():
    optimizer = planned(noise_multiplier=0.5).optimizer(dp.ADADP, l2_norm_clip="measured")
    assert optimizer.batches_to_measure == 4  # 2 + ⌊(25 · 0.5 / 8)² / 2⌋ is odd
    with pytest.warns(UserWarning, match="^6 of 16 steps will measure the norms of gradients"):
        planned().optimizer(dp.DPAdam, l2_norm_clip="measured")
    assert planned().optimizer(dp.ADADP).batches_to_measure == 0


BAD = {
    "neither": ({"noise_multiplier": None}, ValueError, "either `epsilon` or `noise_multiplier`"),
    "both": ({"epsilon": 1.0}, ValueError, "either `epsilon` or `noise_multiplier`"),
    "delta": ({"delta": 0}, ValueError, "`delta`"),
    "delta in words": ({"delta": "1e-5"}, TypeError, "`delta` must be a number.*'1e-5'"),
    "examples": ({"num_examples": 0}, ValueError, "`num_examples`"),
    "batch": ({"batch_size": 100}, ValueError, "`batch_size` must be at most `num_examples`"),
    "epochs": ({"epochs": 1.5}, TypeError, "`epochs`"),
    "noise": ({"noise_multiplier": 0.0}, ValueError, "`noise_multiplier`"),
    "no privacy": ({"noise_multiplier": 1e-9}, ValueError, "finite epsilon"),
    "accountant": ({"accountant": "magic"}, ValueError, "`accountant`"),
    "no budget": (
        {"epsilon": 1e-12, "noise_multiplier": None, "delta": 1e-300},
        ValueError,
        "No noise multiplier meets the budget",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_numbers_are_refused(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        planned(**arguments)


@pytest.mark.parametrize("delta, warns", [(1 / N, False), (1.01 / N, True)])
def test_a_large_delta_is_warned_of_once_before_training(recwarn, delta, warns):
    plan = planned(delta=delta)
    found = [w for w in recwarn if "publishing whole examples" in str(w.message)]
    assert [w.filename for w in found] == [__file__] * warns
    assert [w.category for w in found] == [LargeDeltaWarning] * warns
    plan.callbacks()
    assert len(recwarn) == len(found)


def test_a_large_delta_for_users_names_users():
    users = {"num_examples": None, "user_ids": np.arange(N) // 2, "examples_per_user": 2}
    with pytest.warns(UserWarning, match="all data of some users.*num_users=32"):
        planned(delta=1.5 / N * 2, batch_size=4, **users)


def fit_with(*data, trainable=True, **arguments):
    plan = planned()
    model = tf.keras.Sequential([tf.keras.Input(X.shape[1:]), tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    model.trainable = trainable
    plan.fit(model, *data, verbose=0, **arguments)


class OfKeras(keras.utils.Sequence):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[:8], Y[:8]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def rows_one_by_one():
    yield from zip(X, Y)


REFUSED = {
    "class weights in a list": (
        lambda: fit_with(X, Y, class_weight=[0.5, 1.0]),
        TypeError,
        r"`class_weight` must be a dict .*`dict\(enumerate\(weights\)\)`.*=\[0.5, 1.0\]",
    ),
    "class weights of several outputs": (
        lambda: fit_with(X, {"a": Y, "b": Y}, class_weight={0: 0.5}),
        ValueError,
        "`class_weight` is only supported for models with a single output.*`sample_weight`",
    ),
    "validation_split": (
        lambda: fit_with(X, Y, validation_split=0.2),
        TypeError,
        "`validation_split`.*pass `validation_data`.*0.2",
    ),
    "batches": (
        lambda: fit_with(dataset().batch(8)),
        ValueError,
        "must give single examples: leave `.batch.*Received: 8 examples",
    ),
    "batches with a smaller last one": (
        lambda: fit_with(dataset().batch(10)),
        ValueError,
        r"leave `.batch.*Received: elements of shape \(10, .*, and a last one of \(4, ",
    ),
    "examples of different shapes": (
        lambda: fit_with(dataset().map(lambda x, y: (x[: y + 1], y))),
        ValueError,
        r"pad or crop them.*Received: shape \(\d,\) after \(\d,\)",
    ),
    "a generator": (
        lambda: fit_with(row for row in zip(X, Y)),
        TypeError,
        "`x` must be a tuple .*`tf.data.Dataset.from_generator`. Received: generator",
    ),
    "a function that makes a generator": (
        lambda: fit_with(rows_one_by_one),
        TypeError,
        "`tf.data.Dataset.from_generator`. Received: function",
    ),
    "a ragged tensor": (
        lambda: fit_with(tf.ragged.constant([[1.0]] * N), Y),
        TypeError,
        r"`x` must hold dense .* Pad a ragged .*`to_tensor\(\)`.*a RaggedTensor of shape ",
    ),
    "a list of different rows": (
        lambda: fit_with([[1.0, 2.0], [3.0]], Y[:2]),
        ValueError,
        "`x` must have rows of one shape: pad or crop.*Received: a list whose rows differ",
    ),
    "rows in a list": (
        lambda: fit_with(list(X), Y),
        ValueError,
        "A list of arrays stands for several inputs.*`numpy.stack`. Received: `x` of 6 rows",
    ),
    "times": (
        lambda: fit_with({"when": np.full(N, np.datetime64("2024-05-01")), "x": X}, Y),
        TypeError,
        r"`x` must be arrays of numbers .*count from a public date.*Received: .*datetime64\[D\]",
    ),
    "a structured array": (
        lambda: fit_with(np.zeros(N, [("age", "f4"), ("sex", "i4")]), Y),
        TypeError,
        r"`x` must be .*`\{n: x\[n\] for n in x.dtype.names\}`.*with the columns age, sex",
    ),
    "examples in dicts": (
        lambda: fit_with(dataset().map(lambda x, y: {"image": x, "label": y})),
        TypeError,
        "one example, .*`as_supervised=True`. Received: dict with the keys image, label",
    ),
    "missing strings": (
        lambda: fit_with(np.array(["a", None] * (N // 2), dtype=object), Y),
        TypeError,
        r"`x` must be .* Fill in missing .*fillna\(''\).*Received: None in place of a string",
    ),
    "a sparse tensor in a dict": (
        lambda: fit_with({"a": X, "b": tf.sparse.from_dense(X)}, Y),
        TypeError,
        r"`x` must hold dense .*`tf.sparse.to_dense`. Received: a SparseTensor of shape ",
    ),
    "a sparse matrix": (
        lambda: fit_with(scipy.sparse.csr_matrix(X), Y),
        TypeError,
        r"`x` must hold dense .*`toarray\(\)`. Received: a csr_matrix of shape ",
    ),
    "too few": (lambda: fit_with(X[1:], Y[1:]), ValueError, "trained on. Received: 63 examples"),
    "batches of Keras": (
        lambda: fit_with(OfKeras()),
        TypeError,
        r"`keras.utils.(PyDataset|Sequence)` gives batches.*Received: OfKeras",
    ),
    "frozen": (
        lambda: fit_with(X, Y, trainable=False),
        ValueError,
        "The model has no trainable variables",
    ),
    "lengths": (
        lambda: fit_with(X, Y[:-3]),
        ValueError,
        "one row for each example. Received: `x` of 64 rows, `y` of 61 rows",
    ),
    "a number": (lambda: fit_with(3, Y), TypeError, "`x` must be an array .*Received: x=array.3"),
    "weights of one output": (
        lambda: fit_with(X, {"a": Y, "b": Y}, {"b": np.ones(N)}),
        ValueError,
        r"`sample_weight`.*weights for \['b'\], and targets for \['a', 'b'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fit_cannot_take_is_refused_with_what_to_pass(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_optimizers_that_are_not_the_plans_are_refused():
    plan, model = planned(), catalogue.mlp()
    with pytest.raises(TypeError, match="`optimizer_class`.*make_dp_optimizer_class.*None"):
        plan.optimizer(None)
    with pytest.raises(TypeError, match="set by the plan: pass it to .*: noise_multiplier=2.0"):
        plan.optimizer(dp.ADADP, noise_multiplier=2.0)
    with pytest.raises(TypeError, match="`expected_batch_size` is set by .*as `batch_size`.*=16"):
        plan.optimizer(dp.ADADP, expected_batch_size=16)
    with pytest.raises(TypeError, match="a class, not an instance: pass `ADADP`.*: .*=<ADADP"):
        plan.optimizer(dp.ADADP(1.0, 1.0))
    wrapped = tf.keras.mixed_precision.LossScaleOptimizer(plan.optimizer(dp.ADADP))
    with pytest.raises(dp.NotPrivateError, match="A LossScaleOptimizer around.*optimizer itself"):
        model.compile(wrapped, "mse")
        plan.fit(model, X, Y)
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="compiled with an optimizer of tf_adaptive_dp"):
        plan.fit(model, X, Y)
    for wrong in ({"noise_multiplier": 0.9}, {"expected_batch_size": 9.0}):
        arguments = {"noise_multiplier": 1.0, "expected_batch_size": 8.0, **wrong}
        model.compile(dp.DPSGD(1.0, **arguments), "mse")
        with pytest.raises(ValueError, match="noise and the batch size of the plan.*instead of"):
            plan.fit(model, X, Y)
    with pytest.raises(dp.NotPrivateError, match="must draw secret noise.*seed=7"):
        plan.optimizer(dp.DPSGD, seed=7)
    model.compile(dp.DPSGD(1.0, 1.0, expected_batch_size=8.0, seed=0), "mse")
    with pytest.raises(dp.NotPrivateError, match="must draw secret noise.*seed=0"):
        plan.fit(model, X, Y)
    with pytest.raises(TypeError, match="`batch_size` is set by .*change it in .*batch_size=8"):
        plan.fit(model_of(plan), X, Y, batch_size=8)
    with pytest.raises(TypeError, match="`epochs` and `shuffle` are set by the plan. .* here. Rec"):
        plan.fit(model_of(plan), X, Y, epochs=8, shuffle=True)
    with pytest.raises(ValueError, match="has trained no model yet"):
        plan.statement()


ADAM = tf.keras.optimizers.Adam


@pytest.mark.parametrize(
    "given, private",
    [
        ("adam", "tf_adaptive_dp.DPAdam"),
        (ADAM, "tf_adaptive_dp.DPAdam"),
        (ADAM(), "tf_adaptive_dp.DPAdam"),
        ("ADADP", "tf_adaptive_dp.ADADP"),
        ("Nadam", "tf_adaptive_dp.make_dp_optimizer_class(tf.keras.optimizers.Nadam)"),
    ],
)
def test_an_optimizer_of_keras_is_refused_with_the_private_class_to_pass(given, private):
    with pytest.raises(TypeError) as error:
        planned().optimizer(given)
    assert f"here `{private}`; pass its other arguments" in str(error.value)
    assert f"Received: optimizer_class={given!r}" in str(error.value)
    assert planned().optimizer(eval(private, {"tf_adaptive_dp": dp, "tf": tf})).ledger


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_sizes": 64}, r"`batch_sizes` must be a list .*`\[64\]`. Received: batch_sizes=64"),
        ({"epochs": 2}, r"`epochs` must be a list .*Received: epochs=2"),
        ({"batch_sizes": [0]}, "`batch_sizes` must be at least 1. Received: batch_sizes=0"),
        ({"batch_sizes": []}, r"`batch_sizes` and `epochs` must not be empty.*batch_sizes=\[\]"),
        ({"epochs": iter(())}, r"must not be empty.*epochs=\[\]"),
    ],
)
def test_recommend_says_what_it_takes(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        planned().recommend(**arguments)


@pytest.mark.parametrize("events", [3, "public", [2.0], dp_accounting.GaussianDpEvent(2.0)])
def test_other_events_must_be_a_list(events):
    with pytest.raises(TypeError, match="`other_events` must be a list of .*Received: other_ev"):
        planned(other_events=events)


class StopsAfterAnEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.slow_on(2)
def test_a_run_that_a_callback_stopped_says_that_it_will_go_on(tmp_path, capsys):
    plan, said = planned(), "after 8 of 16 steps.*another call of `fit` continues"
    model = model_of(plan)
    for kwargs, says in ({"verbose": 0}, False), ({"verbose": 2}, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several models
            folder = tmp_path / str(says)
            plan.fit(
                model_of(plan), X, Y, directory=folder, callbacks=StopsAfterAnEpoch(), **kwargs
            )
        assert bool(re.search(said, capsys.readouterr().out, re.S)) == says
    plan.fit(model, X, Y, directory=folder, verbose=2)
    assert model.optimizer.ledger.num_releases == 16
    assert not re.search(said, capsys.readouterr().out, re.S)


@pytest.mark.slow_on(2)
def test_callbacks_come_as_keras_takes_them():
    seen = []
    one = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(True))
    plan = planned(epochs=1)
    for given in (one, (one,)):  # other tests give a list, or none
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several models
            plan.fit(model_of(plan), X, Y, callbacks=given, verbose=0)
    assert len(seen) == 2


@pytest.mark.slow_on(2)
def test_a_run_spends_what_was_planned_and_no_more():
    plan = planned()
    model = model_of(plan)
    history = plan.fit(model, X, Y, validation_data=(X, Y), verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 16)]
    assert history.epoch == [0, 1] and len(history.history["val_accuracy"]) == 2
    assert history.history["epsilon"][-1] == pytest.approx(plan.epsilon)
    text = " ".join(plan.statement(max_examples_per_user=1).split())
    assert "drawn by Poisson sampling" in text and "with probability 0.125" in text
    assert "Each person contributed at most one example" in text
    with pytest.raises(dp.BudgetExceededError, match="budget is used up.*Keep the model as it is"):
        plan.fit(model, X, Y, verbose=0)
    model.fit(X, Y, 8, verbose=0)
    with pytest.raises(ValueError, match=r"outside the plan.*`privacy_statement\(.*24 releases"):
        plan.statement()
    with pytest.warns(UserWarning, match="already trained another model") as caught:
        with pytest.raises(ValueError, match="single examples"):
            plan.fit(model_of(plan), dataset().batch(8), verbose=0)
        assert not [w for w in caught if "already trained" in str(w.message)]  # nothing is trained
        for _ in range(2):
            plan.fit(model_of(plan), X, Y, verbose=0)
    assert len([w for w in caught if "already trained" in str(w.message)]) == 1


@pytest.mark.slow_on(2)
def test_models_that_one_plan_trains_at_once_are_warned_of():
    plan = planned()
    models = [model_of(plan) for _ in range(2)]
    both_train = threading.Barrier(2, timeout=60)

    def train(model):
        wait = tf.keras.callbacks.LambdaCallback(on_train_begin=lambda logs: both_train.wait())
        plan.fit(model, X, Y, callbacks=[wait], verbose=0)

    with pytest.warns(UserWarning, match="already trained another model") as caught:
        threads = [threading.Thread(target=train, args=[model]) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [model.optimizer.ledger.num_releases for model in models] == [16, 16]
    assert len([w for w in caught if "already trained" in str(w.message)]) == 1


@pytest.mark.slow_on(2)
def test_a_model_that_resumes_the_run_of_another_one_is_no_second_model(tmp_path):
    """As if the cell of a notebook was stopped and run again; not if the run's files are gone."""
    plan, second = planned(), "already trained another model"
    with pytest.raises(KeyboardInterrupt):
        plan.fit(
            model_of(plan), X, Y, directory=tmp_path / "run", callbacks=Interrupt(3), verbose=0
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", second)
        plan.fit(model_of(plan), X, Y, directory=f"{tmp_path}/./run", verbose=0)
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match=second):
        plan.fit(model_of(plan), X, Y, directory=tmp_path / "run", verbose=0)


class Fails(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise OSError("no space left")


@pytest.mark.slow_after(1)
@pytest.mark.slow_on(2)
@pytest.mark.parametrize(
    "wrong",
    [
        {"validation_data": (X, Y + 99)},
        {"validation_data": (X[:, :1], Y)},
        {"callbacks": [Fails()]},
    ],
    ids=["label", "features", "callback"],
)
def test_what_fails_after_the_steps_of_an_epoch_does_not_lose_it(tmp_path, wrong):
    def fit(**arguments):
        plan = planned()
        model = model_of(plan)
        plan.fit(model, X, Y, directory=tmp_path / "run", verbose=0, **arguments)
        return model

    with pytest.raises(Exception, match="."):
        fit(**wrong)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*were not in the checkpoint")
        model = fit(validation_data=(X, Y))
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 16)]
    assert int(model.optimizer.iterations) == 16


@pytest.mark.slow_on(2)
def test_a_finished_run_without_an_epoch_is_no_success(tmp_path):
    def fit():
        plan = planned()
        plan.fit(model_of(plan), X, Y, directory=tmp_path / "run", verbose=0)

    fit()
    shutil.rmtree(tmp_path / "run" / "backup")
    with pytest.raises(RuntimeError, match="no epoch of it was saved.*directory="):
        fit()


def test_a_directory_that_cannot_keep_epochs_is_refused_before_any_step(tmp_path):
    plan = planned()
    model = model_of(plan)
    (tmp_path / "backup").write_text("")
    with pytest.raises(ValueError, match="with a file of this name"):
        plan.fit(model, X, Y, directory=tmp_path, verbose=0)
    if GENERATION == 3:
        (tmp_path / "backup").unlink()
        swap = tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        with pytest.raises(ValueError, match="would go on from the averages"):
            plan.fit(model, X, Y, directory=tmp_path, callbacks=[swap], verbose=0)
    assert not model.optimizer.ledger.num_releases


class AddsToLogs(tf.keras.callbacks.Callback):
    """Adds values that are no numbers, and one that NumPy has no type for."""

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"half": tf.constant(0.5, tf.bfloat16), "text": "a", "bytes": b"b", "none": None}
        logs |= {"ragged": [[1], [2, 3]], "complex": 1j, "set": {1}, "tensor": tf.constant("c")}


@pytest.mark.slow_on(2)
def test_odd_values_in_the_logs_are_kept_as_text(tmp_path):
    plan = planned(epochs=1)
    model = model_of(plan)
    plan.fit(model, X, Y, directory=tmp_path, callbacks=[AddsToLogs()], verbose=0)
    logs = json.loads((tmp_path / "history_NOT_PRIVATE.json").read_text())[0]["logs"]
    assert logs["half"] == 0.5 and logs["text"] == "a" and logs["complex"] == "1j"
    assert logs["ragged"] == "[[1], [2, 3]]"


@pytest.mark.slow_on(2)
def test_metrics_with_several_numbers_are_kept_as_lists(tmp_path):
    def fit():
        plan = planned()
        model = model_of(plan, metrics=["accuracy", LabelCounts()])
        data = {"validation_data": (X, Y), "directory": tmp_path / "run", "verbose": 0}
        return plan, plan.fit(model, X, Y, **data).history

    _, history = fit()
    expected = [int(np.sum(Y == label)) for label in (0, 1)]
    assert len(history["label_counts"]) == 2 and history["val_label_counts"][-1] == expected
    plan, again = fit()  # restored from the disk
    assert again == history
    plan.report(tmp_path / "report.html")
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["test_metric"] == "val_accuracy"
    assert facts["history_NOT_PRIVATE"][-1]["logs"]["val_label_counts"] == expected
    with pytest.raises(ValueError, match="is one number.*there are .*val_accuracy"):
        plan.report(tmp_path / "report.html", test_metric="val_label_counts")


@pytest.mark.slow_after(1)
@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kept", [False, True], ids=["in_memory", "in_a_directory"])
def test_a_plan_with_the_same_noise_and_more_epochs_trains_longer(kept, tmp_path):
    # Of batches of 8, one in a hundred has so few examples that nothing tells it from others.
    numbers = {**NUMBERS, "batch_size": 13}
    first = PrivacyPlan(2.0, **numbers)
    model = model_of(first)
    first.fit(model, X, Y, directory=tmp_path / "first" if kept else None, verbose=0)
    with pytest.raises(dp.BudgetExceededError, match=r"exactly its `epochs`\..*longer") as e:
        first.fit(model, X, Y, verbose=0)
    sigma = first.noise_multiplier
    shown = f"with `noise_multiplier={sigma}` in place of `epsilon`, `batch_size=13` and more"
    assert shown in str(e.value)
    with pytest.raises(ValueError, match="keep its optimizer.*place of `epsilon`, `batch_size=13`"):
        PrivacyPlan(4.0, **numbers).fit(model, X, Y, verbose=0)
    noise_multiplier = first.noise_multiplier
    longer = PrivacyPlan(**{**numbers, "noise_multiplier": noise_multiplier, "epochs": 5})
    if kept:
        log = dp.ReleaseLog(tmp_path / "longer" / "releases.log", steps=longer.steps)
        log.adopt(model.optimizer)
        log.close()
    history = longer.fit(model, X, Y, directory=tmp_path / "longer" if kept else None, verbose=0)
    assert model.optimizer.ledger.segments == [(noise_multiplier, 13.0, 25)]
    assert history.epoch == [2, 3, 4]  # as Keras shows and counts them
    says = "`batch_size=13` and `epochs` above 5.*25 releases, and a .* 10 st"
    with pytest.raises(BudgetExceededError, match=says):
        first.fit(model, X, Y, verbose=0)
    # The first batches had less room, and cost more; it did not take the last step away.
    assert first.sampling.max_batch_size < longer.sampling.max_batch_size
    assert longer.epsilon < history.history["epsilon"][-1] <= longer.epsilon * 1.00001
    assert longer.epsilon == pytest.approx(
        epsilon(noise_multiplier, 13 / N, 25, DELTA, "rdp"), 1e-3
    )
    assert longer.epsilon > 2.5 and format_epsilon(longer.epsilon) in longer.statement()
    assert "proven upper bound" in longer.statement()
    model.optimizer.ledger.chosen_by_search = True
    assert "proven" not in longer.statement() and "NOT THE WHOLE COST" in longer.statement()
    with pytest.raises(ValueError, match="keep its opt.*leaves out the search.*HonestTuner"):
        PrivacyPlan(4.0, **numbers).fit(model, X, Y, verbose=0)


@pytest.mark.slow_on(2)
def test_a_longer_plan_is_told_which_numbers_the_run_in_the_directory_has(tmp_path):
    numbers = {name: NUMBERS[name] for name in ("delta", "num_examples", "accountant")}
    first = PrivacyPlan(3.0, epochs=70, **numbers)
    run_directory.RunDirectory(tmp_path, first._settings(), first.steps).close()

    def told(**given):
        plan = PrivacyPlan(**numbers, **given)
        with pytest.raises(ValueError) as error:
            run_directory.RunDirectory(tmp_path, plan._settings(), plan.steps)
        return re.sub(" Received: .*", "", str(error.value))

    size, sigma = first.batch_size, first.noise_multiplier
    longer = told(epsilon=3.0, epochs=200)  # with batches of another size
    assert f"of the original run: `batch_size={size}`, `epochs=70`. To train its model" in longer
    assert f"with `noise_multiplier={sigma}` in place of `epsilon`, `batch_size={size}`" in longer
    other = told(epsilon=4.0, batch_size=size, epochs=70)
    assert other.endswith("of the original run: `epsilon=3.0`.")


def test_a_budget_without_a_plan_may_grow():
    model = catalogue.mlp()
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1), "mse")
    budget = dp.PrivacyBudget(0.1, DELTA, N, batch_size=8)
    with pytest.raises(dp.BudgetExceededError, match="as it is, or allow a larger `epsilon`. Rec"):
        model.fit(X, X[:, :3], batch_size=8, callbacks=[budget], verbose=0)
    budget = dp.PrivacyBudget(1.0, DELTA, N)
    with pytest.raises(ValueError, match="cost of the first step depends on the batch size"):
        model.fit(X, X[:, :3], batch_size=8, callbacks=[budget], verbose=0)


@pytest.mark.slow
def test_layers_may_be_thawed_after_some_epochs_of_a_plan():
    plan = planned()
    model = catalogue.mlp()
    model.layers[0].trainable = False
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    first = plan.optimizer(dp.ADADP)
    model.compile(first, loss)
    plan.fit(model, X, Y, callbacks=[StopsAfterAnEpoch()], verbose=0)
    frozen = model.layers[0].get_weights()
    model.layers[0].trainable = True
    model.compile(type(first).from_config(first.get_config()), loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*already trained|.*does not include")
        plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 16)]
    assert "16 noisy gradients" in plan.statement()
    assert not all(map(np.array_equal, model.layers[0].get_weights(), frozen))


def thawed(model):
    """Recompiled with a copy of its optimizer, as for the second of two phases."""
    first = model.optimizer
    model.layers[0].trainable = True
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(type(first).from_config(first.get_config()), loss)
    return model


@pytest.mark.slow_on(2)
def test_a_phase_that_was_trained_outside_of_the_plan_is_no_part_of_its_statement():
    """The statement was that of the first phase, and called proven."""
    plan = planned()
    model = model_of(plan)
    model.layers[0].trainable = False
    plan.fit(model, X, Y, callbacks=[StopsAfterAnEpoch()], verbose=0)
    thawed(model)
    assert "8 noisy gradients" in plan.statement()  # nothing was trained since
    model.fit(X, Y, batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="trained outside the plan.*16 releases instead of 8"):
        plan.statement()


@pytest.mark.slow_on(2)
def test_training_without_noise_after_the_plan_is_warned_of(recwarn):
    plan = planned()
    model = model_of(plan)
    plan.fit(model, X, Y, verbose=0)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.evaluate(X, Y, verbose=0)
    recwarn.clear()
    plan.statement()
    assert not recwarn.list
    model.fit(X, Y, verbose=0)
    with pytest.warns(UserWarning, match="adds no noise.*SGD after DPSGD"):
        plan.statement()


@pytest.mark.slow_on(2)
@pytest.mark.filterwarnings("ignore:.*made by a plan")
def test_a_plan_does_not_take_batches_of_others_for_its_draws_in_a_second_phase():
    """A copy of the optimizer did not know how the batches before it were drawn."""
    plan = planned(epochs=3)
    model = model_of(plan)
    model.layers[0].trainable = False
    plan.fit(model, X, Y, callbacks=[StopsAfterAnEpoch()], verbose=0)
    model.fit(X, Y, batch_size=8, verbose=0)
    thawed(model)
    with pytest.raises(NotPrivateError, match="8 of .* batches reached the optimizer without"):
        plan.fit(model, X, Y, verbose=0)
    with pytest.raises(NotPrivateError, match="without the sample weights"):
        plan.statement()


@pytest.mark.slow_on(2)
def test_a_second_phase_does_not_go_on_after_batches_without_room_for_padding():
    plan = planned()
    model = model_of(plan)
    model.layers[0].trainable = False
    model.fit(X, Y, sample_weight=np.ones(N), batch_size=8, verbose=0)
    thawed(model)
    with pytest.raises(BudgetExceededError, match="epsilon=infinity"):
        plan.fit(model, X, Y, verbose=0)


@pytest.mark.slow_on(2)
def test_less_room_in_earlier_batches_may_cost_a_longer_plan_a_hundredth_and_no_more():
    plan, of_epsilon = planned(), for_epsilon_2()

    def limit(plan, rows):
        return plan.limit_for(SimpleNamespace(rows_per_batch=rows, parts_per_batch=1))

    assert limit(plan, plan.sampling.rows) == plan.epsilon
    assert plan.epsilon < limit(plan, 23) < 1.01 * plan.epsilon
    assert limit(plan, 22) == plan.epsilon  # with which it stops at once
    assert limit(of_epsilon, 24) == 2.0  # which was promised


@pytest.mark.slow_on(2)
def test_a_copy_knows_the_room_of_the_batches_before_it():
    """The first phase had less room, and so more truncation, than epsilon was told."""
    plan = planned()
    model = model_of(plan)
    plan.fit(model, X, Y, verbose=0)
    longer = planned(epochs=40)
    assert longer.sampling.rows > plan.sampling.rows
    thawed(model)
    longer.fit(model, X, Y, callbacks=[StopsAfterAnEpoch()], verbose=0)
    drawn = longer.sampling.as_drawn(model.optimizer)
    assert drawn.max_batch_size == plan.sampling.max_batch_size


def test_metrics_leave_padding_out():
    # The model predicts class 1, which all examples have and padding, of class 0, has not.
    plan = planned(epochs=1)
    model = model_of(plan, learning_rate=0.0)
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    model.layers[-1].bias.assign([0.0, 1.0, 0.0])
    history = plan.fit(model, X, np.ones(N, int), validation_data=(X, 1 + Y // 2), verbose=0)
    assert history.history["accuracy"] == [1.0]
    assert history.history["val_accuracy"] == [pytest.approx(np.mean(1 + Y // 2 == 1))]


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_metrics_leave_padding_out_whenever_they_were_made(evaluated, outputs):
    # As above; the weights of examples are 2, which only `weighted_metrics` may see.
    plan = planned(epochs=1)
    inputs = tf.keras.Input([6])
    bias = tf.keras.initializers.Constant([0.0, 1.0, 0.0])
    made = [
        tf.keras.layers.Dense(3, kernel_initializer="zeros", bias_initializer=bias, name=f"out{i}")
        for i in range(outputs)
    ]
    model = tf.keras.Model(inputs, [layer(inputs) for layer in made])
    counted = [[tf.keras.metrics.SparseCategoricalAccuracy("right")] for _ in made]
    summed = [[WeightSum(name="sum")] for _ in made]
    if outputs == 1:
        model, counted, summed = tf.keras.Model(inputs, made[0](inputs)), counted[0], summed[0]
    losses = [tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in made]
    model.compile(
        plan.optimizer(dp.DPSGD, learning_rate=0.0),
        losses if outputs > 1 else losses[0],
        metrics=counted,
        weighted_metrics=summed,
    )
    y = [np.ones(N, int)] * outputs if outputs > 1 else np.ones(N, int)
    if evaluated:
        model.evaluate(X, y, verbose=0)
    history = plan.fit(model, X, y, np.full(N, 2.0), verbose=0).history
    right = [values for name, values in history.items() if name.endswith("right")]
    sums = [values for name, values in history.items() if name.endswith("sum")]
    assert right == [[1.0]] * outputs and len(sums) == outputs
    assert all(total[0] % 2 == 0 and total[0] > 0 for total in sums)


def test_class_weights_leave_a_class_out():
    """A class of weight 0 counts as little as padding, in the loss and in weighted metrics."""
    plan = planned(epochs=1)
    model, labels = catalogue.mlp(), np.arange(N) % 2
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        plan.optimizer(dp.DPSGD, learning_rate=0.1),
        loss,
        weighted_metrics=[tf.keras.metrics.MeanMetricWrapper(as_numbers, name="label")],
    )
    history = plan.fit(model, X, labels, class_weight={0: 0.0}, verbose=0).history
    assert history["label"] == [1.0]


@pytest.mark.in_turns
@pytest.mark.parametrize(("of_examples", "of_class"), [(3.0, 1.0), (1.0, 3.0)])
def test_weights_above_1_are_warned_of_whether_of_examples_or_of_classes(of_examples, of_class):
    plan, labels = planned(epochs=1), np.zeros(N, int)
    model = catalogue.mlp()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), loss)
    weights = np.full(N, of_examples, np.float32)
    with pytest.warns(UserWarning, match="weights go up to 3"):
        plan.fit(model, X, labels, weights, class_weight={0: of_class, 1: 1.0}, verbose=0)


def as_numbers(y_true, y_pred):
    return tf.reshape(tf.cast(y_true, tf.float32), [-1])


class WeightSum(tf.keras.metrics.Sum):
    """The sum of all weights."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = tf.zeros([]) if sample_weight is None else tf.reduce_sum(sample_weight)
        return super().update_state(weight)


def share_of_ones(y_true, y_pred):
    """A scalar, which no weight per example fits."""
    return tf.reduce_mean(tf.cast(tf.reshape(y_true, [-1]) == 1, tf.float32))


class ShareOfOnes(tf.keras.metrics.Mean):
    """Takes no weights."""

    def update_state(self, y_true, y_pred):
        return super().update_state(share_of_ones(y_true, y_pred))


def test_metrics_that_take_no_weight_per_example_leave_padding_out():
    plan = planned(epochs=1)
    metrics = [share_of_ones, ShareOfOnes(name="takes_none")]
    history = plan.fit(model_of(plan, metrics=metrics), X, np.ones(N, int), verbose=0)
    assert history.history["share_of_ones"] == [1.0] == history.history["takes_none"]


@pytest.mark.in_turns
@pytest.mark.parametrize("jit_compile", [False, True])
def test_images_may_have_the_metric_of_segmentation(jit_compile):
    plan = planned(epochs=1)
    model = tf.keras.Sequential(
        [tf.keras.Input([2, 2, 3]), tf.keras.layers.Dense(2, bias_initializer="ones")]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = tf.keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou")
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
    model.compile(optimizer, loss, metrics=[metric], jit_compile=jit_compile)
    x, y = np.zeros([N, 2, 2, 3], "float32"), np.zeros([N, 2, 2], int)
    if jit_compile:
        with pytest.raises(ValueError, match="Under XLA a metric must take one .*'iou'"):
            plan.fit(model, x, y, verbose=0)
        return
    history = plan.fit(model, x, y, verbose=0)
    assert history.history["iou"] == [pytest.approx(1.0)]


class Interrupt(tf.keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def of_tokens(outputs):
    """A model whose outputs have several predictions per example, one for each token."""
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input([5], dtype="int32")
    hidden = tf.keras.layers.Embedding(7, 4)(inputs)
    each = tf.keras.layers.Dense(7, "softmax", name="each")(hidden)
    pooled = tf.keras.layers.GlobalAveragePooling1D()(hidden)
    of_all = tf.keras.layers.Dense(3, "softmax", name="of_all")(pooled)
    two = {"each": each, "of_all": of_all}
    return tf.keras.Model(inputs, {"one": each, "two": two, "list": [of_all, each]}[outputs])


TOKENS = np.arange(5 * N).reshape(N, 5) % 7
CROSS_ENTROPY = "sparse_categorical_crossentropy"


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("outputs", ["one", "two"])
@pytest.mark.parametrize(
    "weights",
    [None, np.ones(N, "float32"), np.ones([N, 5], "float32")],
    ids=["no weights", "weights", "of tokens"],
)
def test_losses_of_tokens_need_no_weights_of_their_own(outputs, weights):
    """Poisson batches mark padding by one weight per example, whatever axes the losses have."""
    plan, model = planned(batch_size=24, epochs=3), of_tokens(outputs)
    y = {"one": TOKENS, "two": {"each": TOKENS, "of_all": TOKENS[:, 0] % 3}}[outputs]
    if outputs == "two" and weights is not None:
        weights = {"each": weights, "of_all": np.ones(N, "float32")}
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    before = model.evaluate(TOKENS, y, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*more examples")
        history = plan.fit(model, TOKENS, y, weights, verbose=0).history
    assert optimizer.ledger.segments == [(1.0, 24.0, 9)]
    # Keras divides by the rows of a batch, of which 24 are examples on average.
    share = 24 / plan.sampling.places_for(24)
    np.testing.assert_allclose(np.mean(history["loss"]), share * np.ravel(before)[0], rtol=0.3)
    # The zeros of the weights have kept their signs, by which draws are told apart.
    assert "batches were drawn by Poisson sampling" in " ".join(plan.statement().split())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("y", "loss"),
    [
        ({"each": TOKENS, "of_all": TOKENS[:, 0] % 3}, CROSS_ENTROPY),
        (
            {"each": TOKENS, "of_all": TOKENS[:, 0] % 3},
            dict.fromkeys(("each", "of_all"), CROSS_ENTROPY),
        ),
        ([TOKENS[:, 0] % 3, TOKENS], [CROSS_ENTROPY, CROSS_ENTROPY]),
        (TOKENS, [None, CROSS_ENTROPY]),
    ],
    ids=["named targets", "named losses", "lists", "loss of one output"],
)
def test_losses_of_tokens_belong_to_any_of_the_outputs(y, loss):
    """A model whose outputs form a list pairs them with targets by name or by place."""
    if GENERATION == 2 and not isinstance(y, (dict, list)):
        pytest.skip("Keras 2 gives a single target to each output")
    plan, model = planned(batch_size=24, epochs=1), of_tokens("list")
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
    model.compile(optimizer, loss)
    before = model.evaluate(TOKENS, y, verbose=0)
    history = plan.fit(model, TOKENS, y, verbose=0).history
    assert optimizer.ledger.segments == [(1.0, 24.0, 3)]
    share = 24 / plan.sampling.places_for(24)
    np.testing.assert_allclose(history["loss"], share * np.ravel(before)[0], rtol=0.3)
    assert "batches were drawn by Poisson sampling" in " ".join(plan.statement().split())


def own_mean(y, predicted):
    return tf.reduce_mean(tf.square(y - predicted), axis=[1, 2, 3])


@pytest.mark.in_turns
@pytest.mark.parametrize("outputs", ["one", "two"])
def test_losses_of_images_may_have_no_other_axes(outputs):
    """A loss [B] of outputs [B, H, W, C] gets the weights [B] as they are."""
    images = np.random.default_rng(0).normal(size=[N, 4, 4, 1]).astype("float32")
    plan, inputs = planned(batch_size=24, epochs=1), tf.keras.Input([4, 4, 1])
    image = tf.keras.layers.Conv2D(1, 3, padding="same", name="image")(inputs)
    lines = tf.keras.layers.Dense(4, name="lines")(tf.keras.layers.Reshape([4, 4])(inputs))
    model = tf.keras.Model(inputs, {"one": image, "two": {"image": image, "lines": lines}}[outputs])
    y, loss = {
        "one": (images, own_mean),
        "two": (
            {"image": images, "lines": images[..., 0]},
            {"image": own_mean, "lines": "mse"},
        ),
    }[outputs]
    optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.0)
    model.compile(optimizer, loss)
    plan.fit(model, images, y, verbose=0)
    assert optimizer.ledger.segments == [(1.0, 24.0, 3)]


class OwnStep(tf.keras.Model):
    """Autoencoders are often written like this: the step computes all of the loss."""

    def __init__(self):
        super().__init__()
        self.part = tf.keras.layers.Conv2D(1, 3, padding="same")

    def train_step(self, data):
        x, _, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            losses = own_mean(x, self.part(x)) * weights
        self.optimizer.minimize(losses, self.trainable_variables, tape)
        return {"losses": tf.reduce_mean(losses)}


class OwnStepAndCall(OwnStep):
    def call(self, x):
        return self.part(x)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", [OwnStep, OwnStepAndCall])
def test_a_step_of_its_own_gets_a_weight_per_example(kind):
    images = np.random.default_rng(0).normal(size=[N, 4, 4, 1]).astype("float32")
    plan, model = planned(batch_size=24, epochs=1), kind()
    model.compile(plan.optimizer(dp.ADADP))
    plan.fit(model, images, images, verbose=0)
    assert model.optimizer.ledger.num_releases == plan.steps


class Reproducing(tf.keras.Model):
    """An autoencoder that needs no targets."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = tf.keras.layers.Dense(3), tf.keras.layers.Dense(X.shape[1])

    def call(self, x):
        return self.decoder(self.encoder(x))


class WithAddedLoss(Reproducing):
    def call(self, x):
        outputs = super().call(x)
        self.add_loss(tf.reduce_mean((outputs - x) ** 2))
        return outputs


class WithOwnLoss(Reproducing):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        losses = tf.reduce_mean((y_pred - x) ** 2, axis=1)
        if sample_weight is not None:  # as in validation
            losses *= sample_weight
        return tf.reduce_mean(losses)


class WithOwnStep(Reproducing):
    """As Keras's own examples have it."""

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - x) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


class WithoutParts(Reproducing):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data, training=True) - data) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


def reproduces(kind, *, seen=X, jit_compile=False, **arguments):
    plan, model = planned(batch_size=32), kind()
    model.compile(plan.optimizer(dp.ADADP), jit_compile=jit_compile)
    history = plan.fit(model, seen, verbose=0, **arguments).history
    assert model.optimizer.ledger.segments == [(1.0, 32.0, plan.steps)]
    assert "epsilon" in plan.statement()
    return history


@pytest.mark.in_turns
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", [WithAddedLoss, WithOwnLoss, WithOwnStep])
def test_models_that_need_no_targets_get_none(kind, jit_compile):
    reproduces(kind, jit_compile=jit_compile)


@pytest.mark.slow_on(2)
@pytest.mark.parametrize(
    "seen", [tf.data.Dataset.from_tensor_slices(X), tf.data.Dataset.from_tensor_slices((X,))]
)
def test_data_sets_may_have_no_targets(seen):
    reproduces(WithAddedLoss, seen=seen)


class Comparing(tf.keras.Model):
    """Brings the representations of two inputs together."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(2)

    def call(self, x):
        one, other = x
        distances = (self.dense(one) - self.dense(other)) ** 2
        self.add_loss(tf.reduce_mean(tf.reduce_sum(distances, axis=1)))
        return distances


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("several", [list, tuple])
def test_several_inputs_without_targets_are_inputs(several):
    reproduces(Comparing, seen=several([X, X + 1]))


def test_validation_data_may_have_no_targets():
    assert "val_loss" in reproduces(WithOwnLoss, validation_data=(X,)) or GENERATION == 2


def test_models_that_need_targets_say_so():
    plan, model = planned(), Reproducing()
    model.compile(plan.optimizer(dp.ADADP), "mse")
    for seen in (X, (X, X), tf.data.Dataset.from_tensor_slices(X)):
        with pytest.raises(ValueError, match="`y` is missing, but .* a loss.*pass them as `y` too"):
            plan.fit(model, seen, verbose=0)


def test_a_step_that_takes_a_batch_for_its_inputs_is_told_its_parts():
    with pytest.raises(ValueError, match="batches of three parts.*y is `None` if there are no"):
        reproduces(WithoutParts)


@pytest.mark.slow_on(2)
def test_padding_is_left_out_where_a_step_without_targets_ignores_weights():
    weights = np.where(np.arange(N) % 4, np.float32(0), np.float32(2))
    data = tf.data.Dataset.from_tensors((X, weights)).map(lambda x, w: (x, None, w))
    changed = []
    for seen in (data, X[weights > 0]):
        tf.keras.utils.set_random_seed(0)
        model = WithAddedLoss()
        model(X)
        before = [v.numpy() for v in map(native, model.trainable_variables)]
        optimizer = dp.DPSGD(1e3, 0.0, learning_rate=1.0, expected_batch_size=float(N // 4))
        model.compile(optimizer)
        model.fit(seen, batch_size=N, epochs=1, verbose=0, shuffle=False)
        after = [v.numpy() for v in map(native, model.trainable_variables)]
        changed.append([a - b for a, b in zip(after, before)])
    for with_padding, without in zip(*changed):
        np.testing.assert_allclose(with_padding, without, rtol=1e-4, atol=1e-6)
        assert np.any(without)


@pytest.mark.slow_on(2)
@pytest.mark.filterwarnings("ignore:.*releases were not in the checkpoint")
@pytest.mark.filterwarnings("ignore:Nothing was trained")
def test_a_run_resumes_and_is_restored_when_it_is_finished(tmp_path, capsys):
    def run(*callbacks, verbose=0, **kwargs):
        plan = planned(epochs=3, **kwargs)
        model = model_of(plan, dp.ADADP)
        arguments = {"callbacks": callbacks, "directory": tmp_path / "run", "verbose": verbose}
        return plan, model, plan.fit(model, X, Y, validation_data=(X, Y), **arguments)

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt(11))  # in the second epoch
    _, trained, history = run()
    assert trained.optimizer.ledger.segments == [(1.0, 8.0, 24)]
    assert history.epoch == [0, 1, 2]
    assert history.history["epsilon"] == sorted(history.history["epsilon"])
    assert history.history["epsilon"][0] == pytest.approx(epsilon(1.0, 1 / 8, 8, DELTA))
    plan, restored, again = run()
    assert again.history == history.history
    for a, b in zip(trained.get_weights(), restored.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert restored.optimizer.ledger.segments == [(1.0, 8.0, 24)]
    assert "24 noisy gradients" in plan.statement()
    assert "Nothing was trained" not in capsys.readouterr().out
    run(verbose=2)
    assert re.search("Nothing was trained: the run in '.*run' is finished", capsys.readouterr().out)
    # What was computed from raw gradients and losses is in files, or below keys, that say so.
    names = {path.name for path in (tmp_path / "run").glob("*.json")}
    for name in names - {"history_NOT_PRIVATE.json"}:
        text = (tmp_path / "run" / name).read_text()
        shown = {n: v for n, v in json.loads(text).items() if "NOT_PRIVATE" not in n}
        assert "clipped_share" not in json.dumps(shown) and '"loss"' not in json.dumps(shown)
    assert '"loss"' in (tmp_path / "run" / "history_NOT_PRIVATE.json").read_text()
    assert {"report.html", "report.md", "report.json", "logs"} < {
        path.name for path in (tmp_path / "run").iterdir()
    }
    with pytest.raises(ValueError, match="another plan.*noise_multiplier=2.0 instead of 1.0"):
        run(noise_multiplier=2.0)
    taken = run_directory.RunDirectory(tmp_path / "run", {}, 24)
    with pytest.raises(RuntimeError, match="in use"):
        run()
    taken.close()


class Steps(tf.keras.callbacks.Callback):
    """Notes the weights after each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*releases were not in the checkpoint")
def test_averages_of_the_weights_outlive_a_kill_and_a_finished_run(tmp_path):
    def run(*callbacks):
        plan, model = planned(epochs=3), catalogue.mlp()
        model.compile(plan.optimizer(dp.ADADP, use_ema=True, ema_momentum=0.8), catalogue.loss())
        plan.fit(model, X, Y, directory=tmp_path / "run", callbacks=callbacks, verbose=0)
        return model.get_weights()

    before, after = Steps(), Steps()
    with pytest.raises(KeyboardInterrupt):
        run(before, Interrupt(11))
    found = run(after)
    # The last epoch that was finished, of eight steps, and what follows it. Keras 2 averages from
    # the initial weights on, and Keras 3 from those after the first step.
    steps = before.weights[:8] + after.weights
    average, *rest = steps if GENERATION == 3 else [catalogue.mlp().get_weights(), *steps]
    for weights in rest:
        average = [0.8 * a + 0.2 * w for a, w in zip(average, weights)]
    for weights in (found, run()):
        for a, b in zip(average, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("calls, parts", [(3, 1), (16, 1), (2, 3), (12, 2)])
def test_calls_that_would_leave_out_the_last_steps_are_refused(tmp_path, calls, parts):
    plan = planned()  # an epoch has eight steps
    model = catalogue.mlp()
    optimizer = plan.optimizer(dp.DPSGD, gradient_accumulation_steps=parts)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, steps_per_execution=calls)
    with pytest.raises(ValueError, match=f"`steps_per_execution`.*Received: .*={calls}, "):
        plan.fit(model, X, Y, directory=tmp_path / "run", verbose=0)
    assert not optimizer.ledger.num_releases and not list(tmp_path.iterdir())


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("calls, parts", [(4, 2), (4, 1), (2, 4)])
def test_runs_with_several_steps_a_call_are_finished(tmp_path, calls, parts):
    def run(calls, *callbacks):
        plan = planned()
        model = catalogue.mlp()
        optimizer = plan.optimizer(dp.DPSGD, gradient_accumulation_steps=parts, learning_rate=0.1)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=calls)
        plan.fit(model, X, Y, directory=tmp_path / "run", callbacks=callbacks, verbose=0)
        return model

    with pytest.raises(KeyboardInterrupt):
        run(calls, Interrupt(3 if calls == 4 else 18))
    with pytest.raises(ValueError, match=f"steps_per_execution=1 instead of {calls}"):
        run(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were not in the checkpoint")
        model = run(calls)
    assert model.optimizer.ledger.num_releases == 16
    for a, b in zip(model.get_weights(), run(calls).get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def rows_of(batches, part):
    """The distinct rows that are drawn, by what they hold."""
    drawn = []
    for batch in batches.take(16).as_numpy_iterator():
        present = batch[2] > 0
        drawn.append(part(batch)[present])
    return np.concatenate(drawn)


def test_data_come_as_users_have_them():
    pandas = pytest.importorskip("pandas")
    plan = planned(num_examples=6, batch_size=3, epochs=8)
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    frame = pandas.DataFrame(x, columns=["a", "b"])
    mixed = frame.assign(c=["u", "v"] * 3)
    truths = pandas.get_dummies(mixed).astype({"c_u": bool, "c_v": bool})
    gaps = frame.convert_dtypes().astype({"b": "Int64"}).assign(c=pandas.array([1, None] * 3))
    kinds = {
        "arrays": ((x, y), lambda b: b[0][:, 0]),
        "frame": ((frame, pandas.Series(y)), lambda b: b[0][:, 0]),
        "numbers and truths": ((truths, list(y)), lambda b: b[0][:, 0]),
        "missing numbers": ((gaps, pandas.Series(y, dtype="Int64")), lambda b: b[0][:, 0]),
        "columns": ((dict(mixed), y), lambda b: b[0]["a"]),
        "list": (([x, y], y), lambda b: b[0][0][:, 0]),
        "dataset": ((tf.data.Dataset.from_tensor_slices((x, y)),), lambda b: b[0][:, 0]),
        "source": ((tuple((x[i], y[i]) for i in range(6)),), lambda b: b[0][:, 0]),
        "list of examples": (([(x[i], y[i]) for i in range(6)],), lambda b: b[0][:, 0]),
    }
    for name, (data, part) in kinds.items():
        assert set(rows_of(plan.batches(*data), part)) == set(x[:, 0]), name
    with pytest.raises(ValueError, match="`num_examples`.*5 examples, num_examples=6"):
        plan.batches(x[:5], y[:5])
    for alone in (x, tf.data.Dataset.from_tensor_slices(x), (x,)):
        batches = list(plan.batches(alone))
        assert all(y is None and len(rows) == len(weights) for rows, y, weights in batches)
        drawn = [row[0] for rows, _, weights in batches for row in rows.numpy()[weights != 0]]
        assert set(drawn) <= set(x[:, 0]), type(alone)
    with pytest.raises(ValueError, match="`sample_weight` needs `y`"):
        plan.batches(x, None, y)
    with pytest.raises(TypeError, match="dict of its columns"):
        plan.batches(mixed, y)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    with pytest.raises(ValueError, match="repeats forever"):
        plan.batches(dataset.repeat())
    with pytest.raises(ValueError, match="single examples: leave .*a last one of"):
        plan.batches(dataset.batch(4))
    with pytest.raises(TypeError, match="Each element.*dict"):
        plan.batches(dataset.map(lambda x, y: {"x": x}))


@pytest.mark.slow_on(3)
def test_statistics_that_keras_adapted_are_warned_of(recwarn):
    plan = planned(epochs=1)
    layer = tf.keras.layers.Normalization(name="units")
    layer.adapt(X)
    inner = tf.keras.Sequential([layer], name="inner")
    model = tf.keras.Sequential([tf.keras.Input(X.shape[1:]), inner, tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    plan.fit(model, X, Y, verbose=0)
    model.compile(dp.DPSGD(1.0, 1.0, learning_rate=0.1), catalogue.loss())
    model.fit(X, Y, 8, callbacks=[dp.PrivacyMonitor(N, DELTA)], verbose=0)
    found = [w for w in recwarn if "adapted to data" in str(w.message)]
    assert len(found) == 2
    for warned in found:
        message = str(warned.message)
        assert message.startswith("Layers of the model were adapted to data: inner/units (Normal")
        assert "`plan.normalization(x)`" in message and warned.filename == __file__


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("units", ["pixels", "prices", "usual"])
def test_inputs_and_targets_in_raw_units_are_warned_of(units):
    plan = planned(epochs=1)
    made = tf.keras.Sequential([tf.keras.Input(X.shape[1:]), tf.keras.layers.Dense(1)])
    made.compile(plan.optimizer(dp.ADADP), "mse")
    pixels = np.random.default_rng(0).integers(1, 256, X.shape).astype("uint8")
    x, scale = (pixels, 1.0) if units == "pixels" else (X, 1e5 if units == "prices" else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.fit(made, x, scale * X[:, 0], verbose=0)
    about = [w for w in caught if "units" in str(w.message)]
    says = {"pixels": ["Inputs have magnitudes up to 2"], "prices": ["Targets have"], "usual": []}
    assert len(about) == len(says[units])
    for warned, text in zip(about, says[units]):
        assert text in str(warned.message) and warned.filename == __file__


def test_prices_and_small_weights_are_warned_of_before_a_model_is_built():
    plan = planned(epochs=1)
    made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    made.compile(plan.optimizer(dp.ADADP), "mse")
    small = np.full([len(X)], 0.01)
    with (
        pytest.warns(UserWarning, match="Targets have magnitudes up to"),
        pytest.warns(UserWarning, match="Sample or class weights are at most 0.01. "),
    ):
        plan.fit(made, X, 1e5 * X[:, 0], small, verbose=0)


@pytest.mark.slow_on(2)
def test_missing_values_are_warned_of_before_a_step():
    plan = planned(epochs=1)
    x = X.copy()
    x[3, 0] = np.nan
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.fit(model_of(plan), x, Y, verbose=0, callbacks=[Interrupt(1)])
    (found,) = [w for w in caught if "missing values" in str(w.message)]
    assert found.filename == __file__


@pytest.mark.slow_on(2)
def test_a_finished_run_is_never_restored_without_a_word(tmp_path):
    plan = planned(epochs=1)
    plan.fit(model_of(plan), X, Y, verbose=0, directory=tmp_path)
    with pytest.warns(UserWarning, match="Nothing was trained.*finished") as caught:
        plan.fit(model_of(plan), X, Y, verbose=0, directory=tmp_path)
    (found,) = [w for w in caught if "Nothing was trained" in str(w.message)]
    assert found.filename == __file__


def test_weights_that_are_not_finite_are_refused_before_a_step():
    """Every gradient was NaN and counted as zero, and a whole run spent its ε on noise."""
    plan = planned(epochs=1)
    layer = tf.keras.layers.Normalization(name="units")
    with_gap = np.array(X)
    with_gap[0] = np.nan
    layer.adapt(with_gap)
    model = tf.keras.Sequential([tf.keras.Input(X.shape[1:]), layer, tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    with pytest.raises(ValueError, match="weights must be finite.*missing values.*'.*units'"):
        plan.fit(model, X, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("padding", ["zeros", "that has no finite gradient"])
@pytest.mark.parametrize("gaps", [0, 5])
def test_missing_values_are_warned_of_once_and_padding_is_none(recwarn, gaps, padding):
    plan = planned()
    inputs = tf.keras.Input(X.shape[1:])
    reciprocal = 1.0 / inputs if padding != "zeros" else inputs
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(4)(reciprocal))
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    x = np.where(np.abs(X) < 0.1, 0.1, X).astype("float32")
    x[:gaps] = np.nan
    plan.fit(model, x, Y, verbose=0)
    said = [str(w.message) for w in recwarn if "NaN or infinite" in str(w.message)]
    about = ["values", "gradients"]  # before the first epoch and after it
    assert [re.match(r"Some examples ha(ve|d) (\w+)", s)[2] for s in said] == about * bool(gaps)


def test_padding_without_any_token_is_not_taken_for_an_example(recwarn):
    """A mean over the tokens of each text is 0 / 0 for padding."""

    def mean_over_tokens(y, logits):
        valid = tf.cast(y > 0, tf.float32)
        each = tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return tf.reduce_sum(valid * each, axis=1) / tf.reduce_sum(valid, axis=1)

    # Batches with enough padding to show that they are ours; smaller ones may not.
    plan = planned(num_examples=512, batch_size=64, epochs=1)
    x = np.ones([512, 3], np.int32)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Embedding(4, 2)])
    model.add(tf.keras.layers.Dense(4))
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), mean_over_tokens)
    plan.fit(model, x, x, verbose=0)
    assert not [w for w in recwarn if "NaN or infinite" in str(w.message)]


def test_all_adapted_layers_make_one_warning_and_their_parts_are_not_named(recwarn):
    plan = planned(epochs=1)
    layers = tf.keras.layers
    normal, text = layers.Normalization(), layers.TextVectorization(output_sequence_length=2)
    normal.adapt(X)
    text.adapt(["a b", "c"])
    words = np.array([["a b"]] * len(X))
    inputs = {"x": tf.keras.Input(X.shape[1:], name="x")}
    inputs["text"] = tf.keras.Input([1], dtype="string", name="text")
    embedded = layers.Flatten()(layers.Embedding(9, 2)(text(inputs["text"])))
    both = layers.Concatenate()([layers.Flatten()(normal(inputs["x"])), embedded])
    model = tf.keras.Model(inputs, layers.Dense(4)(both))
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    plan.fit(model, {"x": X, "text": words}, Y, verbose=0)
    (found,) = [w for w in recwarn if "adapted to data" in str(w.message)]
    message = str(found.message)
    assert f"{text.name} (TextVectorization)" in message and f"{normal.name} (Norm" in message
    assert "lookup" not in message and "`vocabulary`" in message and "`mean`" in message


WORDS = np.resize(np.array(["a", "b", "unknown"]), [N, 1])


@pytest.mark.parametrize("kind", ["strings", "objects", "series"])
def test_validation_data_may_hold_strings_as_training_data_do(kind):
    words = WORDS.astype(object) if kind == "objects" else WORDS
    if kind == "series":
        words = pytest.importorskip("pandas").Series(WORDS[:, 0])
    inputs = {"x": tf.keras.Input([1], name="x"), "word": tf.keras.Input([1], dtype="string")}
    encoded = tf.keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    both = tf.keras.layers.Concatenate()([inputs["x"], encoded(inputs["word"])])
    model, plan = tf.keras.Model(inputs, tf.keras.layers.Dense(4)(both)), planned(epochs=1)
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    x = {"x": X[:, :1], "word": words}
    history = plan.fit(model, x, Y, validation_data=(x, Y), verbose=0).history
    assert np.isfinite(history["val_loss"]).all()


@pytest.mark.slow_on(2)
def test_the_normalization_of_a_plan_is_not_warned_of(recwarn):
    plan = planned(epochs=1, normalize_inputs=True)
    layers = [tf.keras.Input(X.shape[1:]), plan.normalization(X), tf.keras.layers.Dense(4)]
    model = tf.keras.Sequential(layers)
    model.compile(plan.optimizer(dp.ADADP), catalogue.loss())
    plan.fit(model, X, Y, verbose=0)
    assert not [w for w in recwarn if "adapt" in str(w.message)]


@pytest.mark.slow_on(2)
def test_copies_and_pickles_of_a_plan_are_plans():
    plan = planned()
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert repr(copied) == repr(plan)
        model = model_of(copied)
        copied.fit(model, X, Y, verbose=0)
        assert model.optimizer.ledger.num_releases == plan.steps


@pytest.mark.slow_on(2)
def test_a_pickled_plan_that_has_trained_gives_its_statement(tmp_path):
    plan = planned()
    model = model_of(plan)
    plan.fit(model, X, Y, directory=tmp_path / "run", verbose=0)
    copied = pickle.loads(pickle.dumps(plan))
    assert copied.statement() == plan.statement()
    copied.report(tmp_path / "report.html")
    of_both = [tmp_path / "report.json", tmp_path / "run" / "report.json"]
    copy_of_report, report = (json.loads(path.read_text()) for path in of_both)
    assert copy_of_report["history_NOT_PRIVATE"] == report["history_NOT_PRIVATE"] != []
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), catalogue.loss())
    with pytest.raises(ValueError, match="has trained no model yet"):
        copy.deepcopy(plan).statement()


def test_a_plan_keeps_no_example():
    plan = planned(normalize_inputs=True, noise_multiplier=4.0)
    x = X.astype("float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it finds nothing in so few
        plan.normalization(x)
        plan.normalization(x.astype("float64"))
    assert not any(row.tobytes() in pickle.dumps(plan) for row in x)


def test_a_plan_describes_itself_before_training():
    text = planned(epochs=4).describe()
    assert "noise multiplier 1\n32 steps: 4 epochs of 8 Poisson batches" in text
    room = planned(epochs=4).sampling.max_batch_size
    assert f"average 8 examples, with room for {room} examples, since their sizes are" in text
    last = f"4: {np.ceil(epsilon(1.0, 1 / 8, 32, DELTA) * 1e4) / 1e4:.4f}"
    assert text.endswith(last)
    text = planned(batch_size=N).describe()
    assert "2 steps: 2 epochs of 1 Poisson batch\nBatches average 64 examples," in text
    text = planned(epochs=1, batch_size=1).describe()
    assert "64 steps: 1 epoch of 64 Poisson batches\nBatches average 1 example," in text


@pytest.mark.slow_on(2)
def test_a_budget_that_cannot_be_spent_is_described():
    plan = PrivacyPlan(1e5, **NUMBERS)
    assert plan.epsilon == 1e5
    spent = f"the run spends {format_epsilon(plan._epsilon_after(plan.steps))} of it"
    assert spent in plan.describe()
    assert "of it" not in for_epsilon_2().describe()


@pytest.mark.slow_on(2)
def test_larger_batches_have_a_better_signal_at_the_same_epsilon():
    num_examples = 5_600  # which makes 700 steps of 2 epochs in batches of 16
    plan = planned(noise_multiplier=None, epsilon=2.0, num_examples=num_examples)
    offers = plan.recommend(batch_sizes=[4, 8, 16], epochs=[2, 4])
    ratios = [np.sqrt(o.steps) * o.batch_size / o.noise_multiplier for o in offers]
    assert [o.signal_to_noise for o in offers] == pytest.approx(sorted(ratios, reverse=True), 5e-4)
    assert all(len(str(number)) <= 7 for offer in offers for number in offer), offers
    for offer in offers:
        q = offer.batch_size / num_examples
        assert epsilon(offer.noise_multiplier, q, offer.steps, DELTA) <= 2.0
        assert epsilon(0.998 * offer.noise_multiplier, q, offer.steps, DELTA) > 2.0
    by_size = [o.batch_size for o in offers if o.epochs == 2]
    assert by_size == [16, 8, 4]


@pytest.mark.slow_on(2)
def test_too_few_steps_are_not_recommended_however_little_noise_they_have():
    plan = planned(noise_multiplier=None, epsilon=2.0, num_examples=2_800)
    offers = plan.recommend(batch_sizes=[4, 8, 16, 350], epochs=[2])
    steps = [(o.batch_size, o.steps) for o in offers]
    assert steps == [(8, 700), (4, 1_400), (16, 350), (350, 16)]
    assert offers[-1].signal_to_noise > offers[0].signal_to_noise


@pytest.mark.slow
def test_recommendations_around_the_plan_come_by_themselves():
    offers = for_epsilon_2().recommend()
    assert {offer.batch_size for offer in offers} == {4, 8, 16, 32, N}
    assert {offer.epochs for offer in offers} == {1, 2, 4} and len(offers) == 15


@pytest.mark.slow
def test_accumulated_batches_count_once(tmp_path):
    plan = planned()
    model = model_of(plan, gradient_accumulation_steps=2)
    history = plan.fit(model, X, Y, directory=tmp_path, verbose=0)
    assert model.optimizer.ledger.segments == [(1.0, 8.0, 16)]
    assert history.epoch == [0, 1]


@pytest.mark.slow_on(2)
def test_training_outside_of_the_plan_is_noticed_at_the_first_step():
    """900 steps went by in silence, and `statement` then advised to train again."""
    plan = planned()
    model = model_of(plan)
    with pytest.warns(
        UserWarning, match=r"made by a plan.*Train with `plan.fit\(model, x, y\)`"
    ) as w:
        model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert len([one for one in w if "made by a plan" in str(one.message)]) == 1
    outside = "trained outside the plan.*`HonestTuner`.*Otherwise.*none of them by the plan"
    with pytest.raises(ValueError, match=outside):
        plan.statement()


class OldStep(tf.keras.Model):
    """Unpacks batches as those of arrays without weights, which those of a plan are not."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss(y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


class FailsOtherwise(OldStep):
    def train_step(self, data):
        raise ValueError("something else")


@pytest.mark.parametrize(
    "kind, says",
    [
        (OldStep, r"must take batches of three parts.*Received: .*too many values to unpack"),
        (FailsOtherwise, "^(?!.*three parts).*something else"),
    ],
)
def test_a_step_that_cannot_unpack_a_batch_is_told_its_parts(kind, says):
    inputs = tf.keras.Input(X.shape[1:])
    model = kind(inputs, tf.keras.layers.Dense(3)(inputs))
    plan = planned()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), loss)
    with pytest.raises(ValueError) as failed:
        plan.fit(model, X, Y, verbose=0)
    assert re.search(says, str(failed.value), re.S)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.in_turns
@pytest.mark.parametrize("num_oov_indices", [0, 1])
@pytest.mark.parametrize(
    "lookup, words", [("StringLookup", ["red", "blue"]), ("IntegerLookup", [5, 6])]
)
def test_a_model_that_looks_up_inputs_trains_on_padding(lookup, words, num_oov_indices):
    x = np.array(words)[np.arange(len(X)) % 2]
    inputs = tf.keras.Input([1], dtype="string" if lookup == "StringLookup" else "int64")
    layer = getattr(tf.keras.layers, lookup)(
        vocabulary=words, num_oov_indices=num_oov_indices, output_mode="one_hot"
    )
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(layer(inputs)))
    plan = planned()
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), catalogue.loss())
    plan.fit(model, x, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == plan.steps


@pytest.mark.slow_on(2)
def test_padding_holds_words_that_all_lookups_of_an_input_know():
    """By the names of inputs, and of a model inside; one input has two vocabularies."""
    layers = tf.keras.layers

    def lookup(words, kind="StringLookup"):
        layer = getattr(layers, kind)
        return layer(vocabulary=words, num_oov_indices=0, output_mode="multi_hot")

    inside = tf.keras.Sequential([tf.keras.Input([1], dtype="string"), lookup(["no", "yes"])])
    inputs = {
        "a": tf.keras.Input([2], dtype="string", name="a"),
        "number": tf.keras.Input([1], dtype="int64", name="number"),
        "z": tf.keras.Input([1], dtype="string", name="z"),
    }
    parts = [lookup(["x", "red", "blue"])(inputs["a"]), lookup(["blue", "red"])(inputs["a"])]
    parts += [inside(inputs["z"]), lookup([7, 9], "IntegerLookup")(inputs["number"])]
    outputs = layers.Dense(3)(layers.Concatenate()(parts))
    model = tf.keras.Model({name: inputs[name] for name in ("z", "a", "number")}, outputs)
    half = np.arange(len(X)) % 2
    x = {
        "z": np.array(["no", "yes"])[half][:, None],
        "a": np.array(["red", "blue"])[np.stack([half, 1 - half], 1)],
        "number": np.array([9, 7])[half][:, None],
    }
    plan = planned()
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), catalogue.loss())
    plan.fit(model, x, Y, verbose=0)
    assert model.optimizer.ledger.num_releases == plan.steps


@pytest.mark.slow_on(2)
def test_a_model_that_does_not_accept_padding_is_told_what_it_holds():
    class Colors(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.ids = tf.keras.layers.StringLookup(
                vocabulary=["red", "blue"], num_oov_indices=0, output_mode="one_hot"
            )

        def call(self, x):
            return self.ids(x)

    inputs = tf.keras.Input([1], dtype="string")
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(Colors()(inputs)))
    plan = planned()
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), catalogue.loss())
    with pytest.raises(ValueError, match="must accept padding.*`num_oov_indices=1`.*Received"):
        plan.fit(model, np.array(["red", "blue"])[np.arange(len(X)) % 2][:, None], Y, verbose=0)
    assert model.optimizer.ledger.num_releases == 0


@pytest.mark.in_turns
@pytest.mark.parametrize("filtered", [True, False])
def test_padding_that_contributes_is_said_without_tensorflows_way_to_it(filtered, monkeypatch):
    class IgnoresWeights(tf.keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
            return tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, y_pred, True))

    monkeypatch.setattr(tracebacks, "is_filtering", lambda: filtered)
    # Of fewer examples, one batch in a hundred has too few rows to be recognized.
    x, y = np.tile(X, [16, 1])[:512], np.tile(Y, 16)[:512]
    plan = planned(num_examples=512, batch_size=64, epochs=1)
    model = IgnoresWeights([tf.keras.Input(X.shape[1:]), tf.keras.layers.Dense(4)])
    model.compile(plan.optimizer(dp.DPSGD, learning_rate=0.1), catalogue.loss())
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        plan.fit(model, x, y, verbose=0)
    assert PADDING_CONTRIBUTES in error.value.message
    assert (error.value.message == PADDING_CONTRIBUTES) == filtered
    assert model.optimizer.ledger.num_releases == 0
