"""Searches that are not honest: KerasTuner's own tuners, whose trials each have one ledger."""

import warnings

import keras_tuner
import pytest

import tf_adaptive_dp as dp
from tests.helpers import catalogue, tuned

DELTA = 1e-4


def build(parameters):
    model = catalogue.mlp()
    rate = parameters.Float("learning_rate", 0.01, 1.0)
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=rate, expected_batch_size=8)
    model.compile(optimizer, loss=catalogue.loss(), metrics=["accuracy"])
    return model


def search(directory, monitored, **kwargs):
    """Two trials, what they say of the search, and the number of examples."""
    tuner = keras_tuner.RandomSearch(
        build, "val_accuracy", max_trials=2, directory=directory, overwrite=True, **kwargs
    )
    data = catalogue.data()
    size = len(data[0])
    more = [dp.PrivacyMonitor(size, DELTA, full_passes=False)] if monitored else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner.search(*data, validation_data=data, batch_size=8, callbacks=more, verbose=0)
    said = [w for w in caught if "one trial of a KerasTuner search" in str(w.message)]
    return tuner, said, size


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("monitored", [False, True])
def test_a_trial_says_that_epsilon_does_not_cover_the_search(tmp_path, monitored):
    tuner, said, size = search(tmp_path, monitored)
    assert [w.filename for w in said] == [__file__] * 2  # one for each trial
    (model,) = tuner.get_best_models()
    assert model.optimizer.ledger.chosen_by_search
    text = dp.privacy_statement(model.optimizer, size, DELTA)
    assert text.startswith("NOT THE WHOLE COST")


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("monitored", [False, True])
def test_on_replicas_each_trial_says_so_too(tmp_path, monitored):
    tuner, said, _ = search(tmp_path, monitored, distribution_strategy=catalogue.mirrored())
    assert len(said) == 2
    (model,) = tuner.get_best_models()
    assert model.optimizer.ledger.chosen_by_search


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("strategy", ["composition", "repeat_and_select"])
def test_an_honest_search_needs_no_word(tmp_path, strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuned.search(tuned.tuner(tmp_path, strategy=strategy, num_trials=2))
    said = " ".join(str(w.message) for w in caught)
    assert "KerasTuner search" not in said and "forgets the releases" not in said
