"""Trials that end before their time: what the data may not decide, and what is left of a crash."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import tuned
from tf_adaptive_dp.tuning import strategies
from tf_adaptive_dp.tuning.keras_tuner import search_plan as plans

STRATEGIES = ["composition", "repeat_and_select"]


@pytest.fixture(autouse=True)
def quick_prices(monkeypatch):
    """Each takes a second, and other tests look at them."""
    monkeypatch.setattr(plans.SearchPlan, "noise_multiplier", lambda plan: 1.5)
    for name in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
        monkeypatch.setattr(plans.SearchPlan, name, lambda plan, *args: 1.0)
    monkeypatch.setattr(strategies.RepeatAndSelect, "draw_num_trials", lambda strategy: 1)


class StopOnNaN(tf.keras.callbacks.Callback):
    """What TerminateOnNaN does: it ends training by a loss that is not private."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self._look)

    def _look(self, step, logs=None):
        if np.isnan(logs["loss"]):
            self.model.stop_training = True


def with_nan():
    x, y = tuned.data()
    x[:, 0] = np.nan  # one would do, but might come in the last batch of the epoch
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_example_may_end_a_trial(tmp_path, strategy, hook):
    arguments = {"strategy": strategy, "num_trials": 1}
    fit = {"batch_size": 8, "epochs": 3, "validation_data": tuned.data(16, seed=1)}
    if strategy == "composition":
        fit["verbose"] = 0
    made = tuned.tuner(tmp_path, **arguments)
    with pytest.raises(dp.NotPrivateError, match="A trial ended early.*releases of 6"):
        made.search(*with_nan(), callbacks=[StopOnNaN(hook)], **fit)
    assert len(tuned.journal_lines(tmp_path)) == 2  # the trial is in progress, without a result
    # Corrected, it goes on, and makes all its releases.
    made = tuned.tuner(tmp_path, **arguments)
    made.search(*with_nan(), **fit)
    (outcome,) = made._result.shown()
    assert outcome["releases"] == 6 and outcome["error"] is None
    (model,) = made.get_best_models()
    assert model.optimizer.ledger.segments == [(1.5, 8.0, 6)]


@pytest.mark.slow
def test_data_that_run_out_are_no_trial(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(tuned.data()).batch(8)
    unknown = data.filter(lambda x, y: True)  # how long it is cannot be seen
    made = tuned.tuner(tmp_path, num_trials=1)
    with pytest.raises(dp.NotPrivateError, match="A trial ended early.*2 releases of 4"):
        made.search(
            unknown, epochs=2, steps_per_epoch=2, validation_data=tuned.data(seed=1), verbose=0
        )


@pytest.mark.slow
def test_what_crashed_has_no_model_and_the_others_have(tmp_path):
    def build(hp):
        made = tuned.model(tuned.optimizer())
        if hp.Int("which", 0, 2) == 1:
            made.train_step = crash
        return made

    def crash(batch):
        raise ValueError("no memory")

    made = tuned.search(tuned.tuner(tmp_path, build))
    assert len(made.get_best_models(3)) == len(made.get_best_hyperparameters(3)) == 2
    assert len(made._result.shown()) == 3 and "'which': 1}: crashed" in made.privacy_statement()
    made.results_summary()
