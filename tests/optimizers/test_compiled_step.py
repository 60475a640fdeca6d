"""A `fit` that traces no step anew is looked at, too."""

import warnings

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue

N, DELTA = 32, 1e-4


def trained():
    model = catalogue.compiled(expected_batch_size=8.0)
    catalogue.fit(model)
    return model


def copy_of(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


@pytest.mark.in_turns
@pytest.mark.parametrize("monitored", [False, True])
def test_an_optimizer_that_the_step_does_not_use_counts_nothing_and_is_refused(monitored):
    model = trained()
    used, released = model.optimizer, model.optimizer.ledger.num_releases
    model.optimizer = copy_of(used)
    callbacks = [dp.PrivacyMonitor(N, DELTA, full_passes=False)] if monitored else []
    with pytest.raises(dp.NotPrivateError, match="was built with another optimizer"):
        catalogue.fit(model, callbacks=callbacks)
    assert model.optimizer.ledger.num_releases == released
    # A callback knows before training, the optimizer only when its `fit` ends.
    assert used.ledger.num_releases == released * (1 if monitored else 2)
    model.compile(copy_of(used), loss=catalogue.loss())
    catalogue.fit(model, callbacks=callbacks)
    assert model.optimizer.ledger.num_releases == used.ledger.num_releases + released


@pytest.mark.slow_on(2)
def test_an_optimizer_that_takes_the_place_of_one_without_noise_is_refused():
    """The step would go on without noise, and epsilon be 0."""
    model, fit = catalogue.mlp(), {"batch_size": 8, "verbose": 0}
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    model.fit(*catalogue.data(), **fit)
    model.optimizer = catalogue.make("DPSGD", expected_batch_size=8.0)
    model.fit(*catalogue.data(), epochs=2, initial_epoch=2, **fit)  # trains nothing
    with pytest.raises(dp.NotPrivateError, match="if the other is not private, there is no eps"):
        model.fit(*catalogue.data(), **fit)
    assert model.optimizer.ledger.num_releases == 0
    model.compile(model.optimizer, loss=catalogue.loss())
    model.fit(*catalogue.data(), **fit)
    assert model.optimizer.ledger.num_releases == 4


@pytest.mark.slow_on(2)
def test_batches_that_a_later_fit_leaves_out_are_told_when_it_ends():
    model = trained()
    batches = tf.data.Dataset.from_tensor_slices(catalogue.data()).batch(8, drop_remainder=True)
    model.fit(batches, verbose=0)
    with pytest.raises(dp.NotPrivateError, match="`filter` after its examples were batched"):
        model.fit(batches.filter(lambda x, y: tf.reduce_sum(x) > 0), verbose=0)


@pytest.mark.slow_on(2)
def test_what_another_model_released_on_shared_weights_is_told_when_a_later_fit_ends():
    first = trained()
    second = tf.keras.Sequential([*first.layers[:-1], tf.keras.layers.Dense(3)])
    second.compile(catalogue.make("DPSGD", expected_batch_size=8.0), loss=catalogue.loss())
    fit = {"batch_size": 8, "verbose": 0}
    with pytest.warns(UserWarning, match="These weights come from 4 private steps"):
        second.fit(*catalogue.data(16), epochs=4, **fit)
    with pytest.warns(UserWarning, match="These weights come from 8 private steps"):
        first.fit(*catalogue.data(), **fit)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "These weights come from")
        first.fit(*catalogue.data(), **fit)


@pytest.mark.in_turns
@pytest.mark.parametrize("by", ["checkpoint", "set_weights"])
def test_a_ledger_that_was_set_back_is_told_when_a_later_fit_ends(by, tmp_path):
    """A file that is saved then would not show what it lacks."""
    model = trained()
    optimizer = model.optimizer
    if by == "checkpoint":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        path = checkpoint.save(tmp_path / "c")
    values = [tf.identity(v).numpy() for v in optimizer.variables]
    catalogue.fit(model)
    checkpoint.restore(path) if by == "checkpoint" else optimizer.set_weights(values)
    for _ in range(2):
        with pytest.raises(dp.NotPrivateError, match="set back: it lacks 4 releases.*restore"):
            catalogue.fit(model)
    assert optimizer.ledger.num_releases == 12
    optimizer.ledger.restore([*optimizer.ledger.segments, (0.5, 8.0, 4)])
    catalogue.fit(model)
    assert optimizer.ledger.num_releases == 20


def dataset(change=lambda data: data):
    """64 examples in batches, after a change that comes before."""
    arrays = catalogue.data(64)
    return change(tf.data.Dataset.from_tensor_slices(arrays)).batch(8, drop_remainder=True)


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "data, settings, number",
    [
        (lambda: catalogue.data(64), {}, 64),
        (lambda: catalogue.data(64), {"validation_split": 0.5}, 32),
        (lambda: (dataset(lambda d: d.shuffle(64)).prefetch(1),), {}, 64),
        (lambda: (dataset(lambda d: d.take(16).shuffle(16)).repeat(2),), {}, 16),
        (lambda: (dataset(lambda d: d.shuffle(64).take(16)),), {}, None),  # others in each pass
        (lambda: (dataset(lambda d: d.filter(lambda *_: True)),), {}, None),
    ],
    ids=["arrays", "split", "shuffled", "part", "parts", "filtered"],
)
def test_epsilon_is_refused_for_more_examples_than_fit_drew_from(data, settings, number):
    model = catalogue.compiled(expected_batch_size=8.0, noise_multiplier=1.0)
    model.fit(*data(), batch_size=8 if len(data()) > 1 else None, verbose=0, **settings)
    assert model.optimizer.ledger.fewest_units == number
    if number is None:
        return
    with pytest.raises(ValueError, match=f"drawn from {number} examples"):
        dp.epsilon_spent(model.optimizer, number + 1, DELTA)
    assert dp.epsilon_spent(model.optimizer, number, DELTA) > 0
    # A later `fit` traces no step.
    model.fit(*catalogue.data(8), batch_size=8, verbose=0)
    assert model.optimizer.ledger.fewest_units == 8


@pytest.mark.slow_on(2)
def test_releases_that_are_taken_over_are_of_no_more_examples_than_they_were():
    model = catalogue.compiled(expected_batch_size=8.0, noise_multiplier=1.0)
    model.fit(*catalogue.data(16), batch_size=8, verbose=0)
    old = model.optimizer.ledger
    new = catalogue.make("DPAdam", expected_batch_size=8.0, noise_multiplier=1.0)
    new.ledger.restore(old.segments, old.checks)
    model.compile(new, loss=catalogue.loss())
    model.fit(*catalogue.data(64), batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="drawn from 16 examples"):
        dp.epsilon_spent(new, 64, DELTA)


@pytest.mark.slow_on(3)
def test_of_how_many_examples_releases_are_is_known_if_fit_is_interrupted():
    model = catalogue.compiled(expected_batch_size=8.0)
    interrupt = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(*catalogue.data(16), batch_size=8, callbacks=[interrupt], verbose=0)
    assert model.optimizer.ledger.fewest_units == 16


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("eagerly", catalogue.EAGERLY)
def test_callbacks_and_samplings_know_better_how_many_examples_there_are(eagerly):
    def fewest(*data, **kwargs):
        model = catalogue.compiled(expected_batch_size=8.0, compile_with={"run_eagerly": eagerly})
        model.fit(*data, verbose=0, **kwargs)
        return model.optimizer.ledger.fewest_units

    arrays = catalogue.data(64)
    monitor = dp.PrivacyMonitor(1_000, DELTA, full_passes=False)
    assert fewest(*arrays, batch_size=8, callbacks=[monitor]) == 1_000
    assert fewest(*arrays, batch_size=8) == 64
    sampling = dp.PoissonSampling.for_batch_size(8, 64, steps=3)
    assert fewest(dp.poisson_batches(arrays, sampling)) is None


@pytest.mark.slow_on(2)
def test_accumulated_batches_end_with_a_pass_without_a_callback_too():
    """An example at the end of one pass and the start of the next would move the sum by 2C."""

    def fit(data, **kwargs):
        kwargs = {"verbose": 0, "shuffle": False, **kwargs}
        model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
        model.fit(*data, **kwargs)
        return model.optimizer

    arrays = catalogue.data()
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(8, drop_remainder=True)
    for data, size in ((arrays, {"batch_size": 8}), ((batches,), {})):
        with pytest.raises(dp.NotPrivateError, match="4 batches in each pass, gradient_acc.*=3"):
            fit(data, epochs=2, **size)
        with pytest.warns(UserWarning, match="1 of 3 parts are held"):
            fit(data, **size)
    sampling = dp.PoissonSampling.for_batch_size(24, 32, steps=3)
    drawn = dp.poisson_batches(arrays, sampling, gradient_accumulation_steps=3)
    with pytest.warns(UserWarning, match="2 of 3 parts are held"):  # others are of another draw
        assert fit((drawn,), epochs=2, steps_per_epoch=4).ledger.num_releases == 2


OVER_PASSES = {
    "arrays, some steps": (lambda d: d, {"batch_size": 8, "steps_per_epoch": 3, "epochs": 2}),
    "repeat": (lambda d: (batches_of(d).repeat(),), {"steps_per_epoch": 3, "epochs": 2}),
    "a part of a repetition": (lambda d: (batches_of(d).repeat().take(6),), {}),
    "several passes in an epoch": (lambda d: (batches_of(d).repeat(2).prefetch(1),), {}),
}


def batches_of(arrays):
    examples = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[1]))
    return examples.batch(8, drop_remainder=True)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", OVER_PASSES)
def test_accumulated_batches_end_with_a_pass_wherever_epochs_end(name):
    """An example was in two parts of one release, and moved the sum by 2C."""
    data, kwargs = OVER_PASSES[name]
    model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
    with pytest.raises(dp.NotPrivateError, match="4 batches in each pass, gradient_acc.*=3"):
        model.fit(*data(catalogue.data()), verbose=0, **kwargs)
    assert not model.optimizer.ledger.num_releases
    whole = data(catalogue.data(24))  # three batches in each pass
    model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
    model.fit(*whole, verbose=0, **kwargs)
    assert model.optimizer.ledger.num_releases == 2
    with pytest.raises(dp.NotPrivateError, match="4 batches in each pass"):  # traced before
        model.fit(*data(catalogue.data()), verbose=0, **kwargs)


def in_parts(arrays):
    sampling = dp.PoissonSampling.for_batch_size(24, len(arrays[1]), steps=2)
    return dp.poisson_batches(arrays, sampling, gradient_accumulation_steps=3)


def not_in_order(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def unchanged(*batch):
    return batch


REARRANGED = {
    "shuffled repetition": (
        "repeated, of type Shuffle",
        lambda a: batches_of(a).repeat(2).shuffle(6),
    ),
    "shuffled draws": ("drawn, of type Shuffle", lambda a: in_parts(a).map(unchanged).shuffle(6)),
    "the start of a draw left out": ("drawn, of type Skip", lambda a: in_parts(a).skip(1)),
    "every other part": ("drawn, of type Shard", lambda a: in_parts(a).shard(2, 0).prefetch(1)),
    "incomplete draws": ("drawn, of type Repeat", lambda a: in_parts(a).take(4).repeat(2)),
    "draws out of order": (
        "drawn, of type Map",
        lambda a: not_in_order(in_parts(a).map(unchanged)),
    ),
    "a map out of order": (
        "drawn, of type Map",
        lambda a: in_parts(a).map(unchanged, num_parallel_calls=2, deterministic=False),
    ),
    "two draws in turn": (
        "drawn, of type DirectedInterleave",
        lambda a: tf.data.Dataset.sample_from_datasets([in_parts(a), in_parts(a)]),
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("way", REARRANGED)
def test_parts_may_not_be_rearranged_after_they_were_drawn_or_repeated(way):
    """An example could be in parts of one release that belong to two draws, and move it by 2C."""
    why, rearranged = REARRANGED[way]
    model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
    with pytest.raises(dp.NotPrivateError, match=f"after they were {why}, and gradient_acc.*=3"):
        model.fit(rearranged(catalogue.data(24)), verbose=0)
    assert not model.optimizer.ledger.num_releases


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "keep",
    [
        lambda a: in_parts(a).map(unchanged, num_parallel_calls=2).cache().prefetch(1).take(6),
        lambda a: batches_of(a).shuffle(3).shard(1, 0).repeat(2).take(6),
        lambda a: not_in_order(batches_of(a)).repeat(2).prefetch(1),
        lambda a: in_parts(a).skip(3).repeat(2),
        lambda a: tf.data.Dataset.zip((in_parts(a), tf.data.Dataset.range(6))).map(lambda b, _: b),
    ],
)
def test_parts_may_come_in_order(keep):
    model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
    model.fit(keep(catalogue.data(24)), verbose=0)
    assert model.optimizer.ledger.num_releases == 2


def test_whole_draws_may_be_shuffled():
    sampling = dp.PoissonSampling.for_batch_size(24, 32, steps=2)
    model = catalogue.compiled(expected_batch_size=24.0)
    model.fit(dp.poisson_batches(catalogue.data(), sampling).shuffle(2), verbose=0)
    assert model.optimizer.ledger.num_releases == 2


@pytest.mark.slow_on(2)
def test_a_part_of_one_pass_may_be_accumulated():
    model = catalogue.compiled(gradient_accumulation_steps=3, expected_batch_size=24.0)
    model.fit(*catalogue.data(40), batch_size=8, steps_per_epoch=3, verbose=0)
    assert model.optimizer.ledger.num_releases == 1
