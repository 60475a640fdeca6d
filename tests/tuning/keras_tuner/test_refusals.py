"""What HonestTuner refuses before anything is drawn or trained."""

import inspect
import threading

import dp_accounting
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tests.helpers.label_counts import LabelCounts
from tf_adaptive_dp.accounting import BandedNoise
from tf_adaptive_dp.plan import PrivacyPlan
from tf_adaptive_dp.tuning import strategies
from tf_adaptive_dp.tuning.keras_tuner import arguments
from tf_adaptive_dp.tuning.keras_tuner.arguments import FitArguments

# What a search refuses hardly depends on the version of Keras.
pytestmark = pytest.mark.slow_on(2)

callbacks = tf.keras.callbacks


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """Nothing that is refused may be trained."""
    tuned.Fake(monkeypatch)


def with_information(provenance):
    fixed = dp.side_information.FixedPreconditioner(
        lambda v: np.ones(v.shape), provenance=provenance
    )
    return dp.AdaDPS(fixed, 1.0, 1.0, expected_batch_size=8.0, learning_rate=0.1)


def used():
    optimizer = tuned.optimizer()
    optimizer.ledger.restore([(1.0, 8.0, 3)])
    return optimizer


@pytest.mark.slow_after(7)
@pytest.mark.parametrize(
    "make, error, match",
    [
        (
            lambda: tf.keras.optimizers.SGD(),
            TypeError,
            "`build_model`.*optimizer of tf_adaptive_dp",
        ),
        (
            lambda: tuned.optimizer(expected_batch_size=None),
            dp.NotPrivateError,
            "pass `expected_batch_size`",
        ),
        (lambda: tuned.optimizer(num_microbatches=4), dp.NotPrivateError, "num_microbatches=4"),
        (lambda: tuned.optimizer(examples_per_user=4), dp.NotPrivateError, "examples_per_user=4"),
        (lambda: tuned.optimizer(seed=7), dp.NotPrivateError, "seed=7"),
        (
            lambda: dp.DPSGD(1.0, 1.0, expected_batch_size=8.0, noise=BandedNoise(2)),
            dp.NotPrivateError,
            "must draw independent noise",
        ),
        (used, dp.NotPrivateError, "3 releases in its ledger"),
        (
            lambda: with_information(dp_accounting.GaussianDpEvent(1.0)),
            dp.NotPrivateError,
            "released with privacy",
        ),
        (lambda: tuned.optimizer(expected_batch_size=16.0), ValueError, "expected_batch_size=16"),
        (
            lambda: tuned.optimizer(gradient_accumulation_steps=2, expected_batch_size=16.0),
            None,
            "",
        ),
    ],
)
def test_optimizers_that_would_be_counted_otherwise(tmp_path, monkeypatch, make, error, match):
    made = tuned.tuner(tmp_path, lambda hp: tuned.model(make()))
    if error is None:
        tuned.Fake(monkeypatch, 0.5)
        tuned.search(made)
        return
    with pytest.raises(error, match=match):
        tuned.search(made)
    assert not (tmp_path / "search" / "secret").exists()


def test_the_normalization_that_the_optimizer_of_a_plan_pays_for_is_named(tmp_path):
    plan = PrivacyPlan(
        noise_multiplier=1.0,
        delta=tuned.DELTA,
        num_examples=tuned.NUM_EXAMPLES,
        batch_size=tuned.BATCH,
        epochs=2,
        normalize_inputs=True,
    )
    made = tuned.tuner(
        tmp_path, lambda hp: tuned.model(plan.optimizer(dp.DPSGD, learning_rate=0.1))
    )
    match = "`PrivacyPlan` with `normalize_inputs=True` or .*create the optimizer without"
    with pytest.raises(dp.NotPrivateError, match=match):
        tuned.search(made)


PRICED_BY = {"batch": "expected_batch_size", "parts": "gradient_accumulation_steps", "seed": "seed"}


@pytest.mark.parametrize(
    "name, values", [("batch", [8.0, 4.0]), ("parts", [1, 2]), ("seed", [None, 1])]
)
def test_one_candidate_of_another_price_stops_all_before_the_first(tmp_path, name, values):
    def build(hp):
        return tuned.model(tuned.optimizer(**{PRICED_BY[name]: values[hp.Int("which", 0, 1)]}))

    with pytest.raises(dp.NotPrivateError, match="All trials have to cost the same"):
        tuned.search(tuned.tuner(tmp_path, build))


def test_a_number_of_steps_per_call_that_keras_changes(tmp_path):
    def build(hp):
        made = tuned.build(hp)
        made.enable_tune_steps_per_execution = True
        return made

    with pytest.raises(dp.NotPrivateError, match="must run a fixed number of steps per call"):
        tuned.search(tuned.tuner(tmp_path, build))


def test_statistics_that_the_search_does_not_count(tmp_path):
    layer = dp.PrivateNormalization(20.0)
    layer.adapt(tuned.data(500)[0])

    def build(hp):
        made = tf.keras.Sequential([tf.keras.Input([3]), layer, tf.keras.layers.Dense(2)])
        made.compile(tuned.optimizer(), "sparse_categorical_crossentropy")
        return made

    with pytest.raises(dp.NotPrivateError, match="behind a `PrivateNormalization`.*=20.0"):
        tuned.search(tuned.tuner(tmp_path, build))


@pytest.mark.slow
def test_a_noise_that_one_optimizer_cannot_have_stops_all_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tf_adaptive_dp.tuning.keras_tuner.search_plan.SearchPlan.noise_multiplier",
        lambda plan: 1.5,
    )

    def build(hp, last=0.7):
        count = [5.0, last][hp.Int("which", 0, 1)]
        clipping = dp.AdaptiveClipping(count_noise_multiplier=count)
        return tuned.model(tuned.optimizer(clipping=clipping))

    for _ in range(2):
        with pytest.raises(dp.NotPrivateError, match="cannot have the noise.*count_noise_multi"):
            tuned.search(tuned.tuner(tmp_path, build))
        assert len(tuned.journal_lines(tmp_path)) == 1  # the draws: nothing was begun
    tuned.Fake(monkeypatch, 0.5, 0.5)
    tuned.search(tuned.tuner(tmp_path, lambda hp: build(hp, 0.8)))  # corrected, it goes on


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"epsilon": 0}, ValueError, "`epsilon`"),
        ({"delta": 1.0}, ValueError, "`delta`"),
        ({"num_examples": 0}, ValueError, "`num_examples`"),
        ({"accountant": "ma"}, ValueError, "`accountant`"),
        ({"score": strategies.PublicScore}, TypeError, "`score` must say"),
        ({"score": "public"}, TypeError, "`score` must say"),
        ({"strategy": "grid"}, ValueError, "`strategy` must be one of"),
        ({"strategy": "liu_talwar"}, ValueError, "`num_trials` is required"),
        ({"strategy": "repeat_and_select", "num_trials": 0.5}, ValueError, "at least 1"),
        ({"num_trials": 2.5}, TypeError, "whole number"),
        *(
            ({"sampling": wrong}, ValueError, "accounts for Poisson batches and for shuffled ones")
            for wrong in (
                "fixed",
                dp.sampling.FixedSizeSampling(10, steps=40),
                dp.sampling.FixedOrder(10, steps=40),
                dp.sampling.CyclicPoissonSampling(0.1, 2, 50, 40),
            )
        ),
        ({"sampling": dp.PoissonSampling(0.5, 9, 4, seed=1)}, ValueError, "With a seed"),
        (
            {"sampling": dp.PoissonSampling(0.5, 9, 4, examples_per_user=2)},
            ValueError,
            "does not draw users",
        ),
        ({"objective": "accuracy"}, dp.NotPrivateError, "begins with 'val_'"),
        ({"objective": None}, dp.NotPrivateError, "begins with 'val_'"),
        (
            {"objective": ["val_accuracy", keras_tuner.Objective("loss", "min")]},
            dp.NotPrivateError,
            "begins with 'val_'",
        ),
    ],
)
def test_arguments_of_the_tuner(tmp_path, arguments, error, match):
    with pytest.raises(error, match=match):
        tuned.tuner(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("max_trials", "the number of trials, or its mean, is `num_trials`"),
        ("seed", "operating system's entropy"),
        ("executions_per_trial", "let `num_trials` be larger"),
        ("max_retries_per_trial", "a trial that crashed is paid for"),
        ("max_consecutive_failed_trials", "no number of crashes"),
        ("tune_new_entries", "as `hyperparameters`"),
        ("allow_new_entries", "declare all hyperparameters in `build_model`"),
        ("distribution_strategy", "make it a part of `build_model`"),
        ("max_model_size", "out of the space"),
        ("optimizer", "compile the models"),
        ("hyperband_iterations", "see `strategy`"),
        ("oracle", "see `strategy`"),
    ],
)
def test_arguments_of_other_tuners_are_told_ours(tmp_path, name, match):
    with pytest.raises(TypeError, match=f"HonestTuner has no `{name}`: .*{match}.*{name}=3"):
        tuned.tuner(tmp_path, **{name: 3})
    assert not list(tmp_path.iterdir())


def test_every_argument_of_keras_tuner_is_ours_or_told_ours(tmp_path):
    ours = set(inspect.signature(dp.tuning.HonestTuner).parameters)
    kinds = [keras_tuner.Tuner, keras_tuner.Oracle, keras_tuner.RandomSearch, keras_tuner.Hyperband]
    for kind in (*kinds, keras_tuner.BayesianOptimization, keras_tuner.GridSearch):
        for name in inspect.signature(kind).parameters:
            if name in ours | {"kwargs"}:
                continue
            with pytest.raises(TypeError, match=f"HonestTuner has no `{name}`"):
                tuned.tuner(tmp_path, **{name: 3})
    with pytest.raises(TypeError, match="unexpected keyword argument: trials=3"):
        tuned.tuner(tmp_path, trials=3)


def test_a_strategy_object_says_the_number_itself(tmp_path):
    from tf_adaptive_dp.tuning.strategies import LiuTalwar

    with pytest.raises(ValueError, match="leave out `num_trials`"):
        tuned.tuner(tmp_path, strategy=LiuTalwar(0.1), num_trials=3)


def test_a_whole_space_that_is_not_finite(tmp_path):
    with pytest.raises(ValueError, match="not finite"):
        tuned.tuner(tmp_path, lambda hp: tuned.model(tuned.optimizer(hp.Float("r", 0.1, 1.0))))


def test_a_hypermodel_that_trains_itself(tmp_path):
    class Own(keras_tuner.HyperModel):
        def build(self, hp):
            return tuned.build(hp)

        def fit(self, hp, model, *args, **kwargs):
            return model.fit(*args, **kwargs)

    with pytest.raises(ValueError, match="leave out the hypermodel's method `fit`"):
        tuned.tuner(tmp_path, Own())


def test_parallel_search(tmp_path, monkeypatch):
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    with pytest.raises(NotImplementedError, match="in parallel"):
        tuned.tuner(tmp_path)


def test_a_metric_that_the_models_do_not_have(tmp_path):
    objective = keras_tuner.Objective("val_auc", "max")
    with pytest.raises(
        ValueError, match=r"a metric of the.*val_auc.*\['val_accuracy', 'val_loss'\]"
    ):
        tuned.search(tuned.tuner(tmp_path, objective=objective))


def test_a_metric_with_several_numbers_is_no_objective(tmp_path):
    def build(hp):
        model = tuned.build(hp)
        model.compile(model.optimizer, model.loss, metrics=["accuracy", LabelCounts()])
        return model

    objective = keras_tuner.Objective("val_label_counts", "max")
    with pytest.raises(ValueError, match=r"one number.*\['val_accuracy', 'val_loss'\]"):
        tuned.search(tuned.tuner(tmp_path, build, objective=objective))


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"validation_data": None}, "pass `validation_data`"),
        ({"validation_split": 0.5}, "no `validation_split`"),
        ({"initial_epoch": 1}, "initial_epoch=1"),
        ({"epochs": 0}, "`epochs`"),
        ({"batch_size": 4}, "batch_size=4"),
        ({"shuffle": False}, "leave out `shuffle`. Received: shuffle=False"),
        ({"shuffle": "batch"}, "shuffle='batch'"),
    ],
)
def test_arguments_of_search(tmp_path, arguments, match):
    with pytest.raises(ValueError, match=match):
        tuned.search(tuned.tuner(tmp_path), **arguments)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"y": None}, ValueError, "`y` is missing.*y=None"),
        ({"y": [1] * 16}, TypeError, r"`y` must be an array.*Received: y=\[1, 1, "),
        ({"x": [[1.0, 2.0]] * 16}, TypeError, r"`x` must be an array.*Received: x=\[\[1.0, 2"),
        ({"y": np.ones(15)}, ValueError, "one row.*: `x` of 16 rows, `y` of 15 rows$"),
        ({"sample_weight": np.ones(3)}, ValueError, "`y` of 16 rows, `sample_weight` of 3 rows$"),
    ],
)
def test_data_on_which_every_candidate_would_crash(tmp_path, arguments, error, match):
    x, y = tuned.data()
    made = tuned.tuner(tmp_path)
    with pytest.raises(error, match=match):
        made.search(**{"x": x, "y": y, "batch_size": 8, "validation_data": (x, y), **arguments})
    assert not (tmp_path / "search" / "secret").exists()


def test_a_model_that_is_not_compiled(tmp_path):
    with pytest.raises(TypeError, match="must compile the model.*optimizer=None"):
        tuned.search(tuned.tuner(tmp_path, lambda hp: tf.keras.Sequential([tf.keras.Input([3])])))


def test_more_examples_than_there_are(tmp_path):
    with pytest.raises(ValueError, match="num_examples=17, and arrays of 16 rows"):
        tuned.search(tuned.tuner(tmp_path, num_examples=17))


@pytest.mark.parametrize(
    "num_examples, parts, accepted", [(23, 1, True), (24, 1, False), (19, 2, True), (20, 2, False)]
)
def test_more_examples_than_a_data_set_has(tmp_path, monkeypatch, num_examples, parts, accepted):
    """Two batches of eight, or four halves of them; the rest of a pass may have been dropped."""
    size = tuned.BATCH // parts
    batches = tf.data.Dataset.from_tensor_slices(tuned.data(num_examples))
    batches = batches.batch(size, drop_remainder=True).take(2 * parts)
    build = (
        tuned.build
        if parts == 1
        else lambda hp: tuned.model(
            tuned.optimizer(hp.Choice("learning_rate", [0.1]), gradient_accumulation_steps=parts)
        )
    )
    made = tuned.tuner(tmp_path, build, num_examples=num_examples)
    with_batches = {"epochs": 1, "validation_data": tuned.data(16, seed=1), "verbose": 0}
    if accepted:
        tuned.Fake(monkeypatch, 0.1, 0.2, 0.3)
        made.search(batches, **with_batches)
        return
    with pytest.raises(ValueError, match=f"num_examples={num_examples}, and a data set of"):
        made.search(batches, **with_batches)
    # Nobody knows how much of the data an epoch of fewer steps shows.
    tuned.Fake(monkeypatch, 0.1, 0.2, 0.3)
    made.search(batches, **{**with_batches, "steps_per_epoch": parts, "epochs": 2})


def test_batches_that_were_drawn_from_fewer_examples(tmp_path):
    sampling = dp.PoissonSampling.for_batch_size(tuned.BATCH, tuned.NUM_EXAMPLES, 2)
    drawn = dp.poisson_batches(tuned.data(), sampling).take(2)
    made = tuned.tuner(tmp_path, sampling=sampling, num_examples=2 * tuned.NUM_EXAMPLES)
    with pytest.raises(ValueError, match="drawn from: 16. Received: num_examples=32"):
        made.search(drawn, epochs=1, validation_data=tuned.data(16, seed=1))


def test_arrays_are_not_poisson_batches(tmp_path):
    with pytest.raises(ValueError, match="`fit` shuffles arrays"):
        tuned.search(tuned.tuner(tmp_path, sampling="poisson"))


def read(*args, releases_all=True, **kwargs):
    kwargs = {"validation_data": tuned.data(), **kwargs}
    return FitArguments.read(args, kwargs, releases_all=releases_all)


def test_steps_are_counted_as_fit_counts_them():
    x, y = tuned.data(20)
    assert read(x, y, 8).steps_per_epoch == 3 and read(x, y).batch_size == 32
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    assert read(data).steps_per_epoch == 3 and read(data).batch_size is None
    assert read(data.repeat(), steps_per_epoch=5, epochs=4).epochs == 4
    with pytest.raises(ValueError, match="pass `steps_per_epoch`"):
        read(data.repeat())
    for once in (iter(data), (batch for batch in data)):
        with pytest.raises(ValueError, match="can be read once only"):
            read(once, steps_per_epoch=2)
    with pytest.raises(TypeError, match="unexpected keyword"):
        read(x, y, epoch=3)


def test_a_data_set_has_to_last_for_all_epochs():
    x, y = tuned.data(24)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for steps, epochs in ((3, 2), (1, 3)):  # Keras reads it in each epoch, or through all of them
        assert read(data, steps_per_epoch=steps, epochs=epochs).steps_per_epoch == steps
    with pytest.raises(ValueError, match="3 batches, epochs=2, steps_per_epoch=2"):
        read(data, steps_per_epoch=2, epochs=2)


def test_only_arrays_read_to_their_end_are_known_to_have_each_example_once():
    x, y = tuned.data(20)
    assert read(x, y, 8).epoch_is_pass and read(x, y, 8, steps_per_epoch=3).epoch_is_pass
    assert not read(x, y, 8, steps_per_epoch=2).epoch_is_pass
    assert not read(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)).epoch_is_pass


def test_batches_that_come_again_in_another_process():
    sampling = dp.PoissonSampling(0.5, 16, 4)
    seeded = dp.PoissonSampling(0.5, 16, 4, seed=1)
    assert read(dp.poisson_batches(tuned.data(), sampling)).steps_per_epoch == 4
    for made in (
        dp.poisson_batches(tuned.data(), sampling, key=bytes(32)),
        dp.poisson_batches(tuned.data(), seeded),
    ):
        with pytest.raises(ValueError, match="`key` or a seed come back"):
            read(made)


def test_fit_prints_nothing_of_candidates_that_may_lose():
    x, y = tuned.data()
    assert read(x, y, releases_all=False).arguments["verbose"] == 0
    with pytest.raises(ValueError, match="leave `verbose` out"):
        read(x, y, releases_all=False, verbose=2)
    assert read(x, y, verbose=2).arguments["verbose"] == 2


def check(*given, releases_all=True):
    arguments.check_callbacks(
        given, releases_all=releases_all, num_examples=16, sampling="shuffled"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: dp.ReleaseLog(folder / "log"),
        lambda folder: dp.PrivacyBudget(1.0, 1e-5, 16),
        lambda folder: callbacks.BackupAndRestore(str(folder)),
        lambda folder: callbacks.EarlyStopping("val_loss"),
        lambda folder: callbacks.ReduceLROnPlateau("val_loss"),
        lambda folder: callbacks.TerminateOnNaN(),
        lambda folder: dp.PrivacyMonitor(15, 1e-5),
        lambda folder: dp.PrivacyMonitor(16, 1e-5, sampling="poisson"),
    ],
)
def test_callbacks_that_would_not_do_what_they_promise(tmp_path, make):
    with pytest.raises(ValueError, match="Received"):
        check(make(tmp_path))


def test_a_callback_that_cannot_be_copied():
    callback = callbacks.LambdaCallback()
    check(callback)
    callback.held = threading.Lock()
    with pytest.raises(ValueError, match="must be possible to copy.*cannot pickle"):
        check(callback)


def test_callbacks_that_keep_losers():
    keepers = [callbacks.CSVLogger("log.csv"), callbacks.ModelCheckpoint("w.keras")]
    if hasattr(callbacks, "OrbaxCheckpoint"):  # whose own packages it needs to be made
        keepers.append(object.__new__(callbacks.OrbaxCheckpoint))
    for callback in keepers:
        if type(callback).__name__ != "OrbaxCheckpoint":
            check(callback)
        with pytest.raises(ValueError, match="candidates that lost"):
            check(callback, releases_all=False)
    check(callbacks.TensorBoard("logs"), dp.PrivacyMonitor(16, 1e-5), releases_all=False)
