"""A `fit` that traces no step anew is looked at, too."""

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue

N, DELTA = 1_000, 1e-4


def trained():
    model = catalogue.compiled(expected_batch_size=8.0)
    catalogue.fit(model)
    return model


def copy_of(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


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


def test_batches_that_a_later_fit_leaves_out_are_told_when_it_ends():
    model = trained()
    batches = tf.data.Dataset.from_tensor_slices(catalogue.data()).batch(8, drop_remainder=True)
    model.fit(batches, verbose=0)
    with pytest.raises(dp.NotPrivateError, match="`filter` after its examples were batched"):
        model.fit(batches.filter(lambda x, y: tf.reduce_sum(x) > 0), verbose=0)


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
        with pytest.raises(dp.NotPrivateError, match="4 batches in each epoch, gradient_acc.*=3"):
            fit(data, epochs=2, **size)
        with pytest.warns(UserWarning, match="1 of 3 parts are held"):
            fit(data, **size)
    sampling = dp.PoissonSampling.for_batch_size(24, 32, steps=3)
    drawn = dp.poisson_batches(arrays, sampling, gradient_accumulation_steps=3)
    assert fit((drawn,), epochs=2, steps_per_epoch=4).ledger.num_releases == 2
