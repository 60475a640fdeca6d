"""A search that keeps its own record of what it tried and released, in processes to be killed.

As a program it reads jobs from its input, as `killable` does, and runs each in a fork of itself.
Nothing here may use TensorFlow's runtime before the fork.
"""

import gc
import json

from tests.helpers import killable

EPOCHS, STEPS = 4, 5


def search(folder, strategy, num_trials):
    """Searches, or goes on; draws that do happen are recorded."""
    import numpy as np
    import tensorflow as tf

    import tf_adaptive_dp as dp
    from tf_adaptive_dp._keras import process_state
    from tf_adaptive_dp.tuning import HonestTuner, strategies
    from tf_adaptive_dp.tuning.keras_tuner import oracle, search_plan, trial

    process_state.NUMBERS = 1
    # Takes seconds, and is not what this is about.
    search_plan.SearchPlan.noise_multiplier = lambda plan: 1.0
    for name in ("epsilon_spent", "epsilon_of_one", "epsilon_without_amplification"):
        setattr(search_plan.SearchPlan, name, lambda plan, *args: 1.0)
    strategies.RepeatAndSelect.draw_num_trials = lambda strategy: num_trials
    draws = oracle.HonestOracle.draws

    def recorded_draws(self, strategy):
        drawn = draws(self, strategy)
        killable.append(folder / "draws", json.dumps(drawn))
        return drawn

    oracle.HonestOracle.draws = recorded_draws
    run = trial.PrivateTrial.run

    def recorded_run(self, model, *args):
        name = self._folder.name
        killable.append(folder / "begun", json.dumps([name, float(model.optimizer.learning_rate)]))
        killable.record_releases(
            model.optimizer, folder / "releases", lambda digest: json.dumps([name, digest])
        )
        outcome = run(self, model, *args)
        segments, iterations = model.optimizer.ledger.segments, int(model.optimizer.iterations)
        killable.append(folder / "ended", json.dumps([name, outcome, segments, iterations]))
        return outcome

    trial.PrivateTrial.run = recorded_run

    def build(hp):
        optimizer = dp.DPSGD(
            1.0, 1.0, expected_batch_size=4.0, learning_rate=hp.Float("rate", 0.01, 0.02)
        )
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
        model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))
        return model

    data = (np.ones([20, 3], np.float32), np.zeros([20, 4], np.float32))
    tuner = HonestTuner(
        build,
        "val_loss",
        strategy=strategy,
        num_trials=num_trials,
        epsilon=1.0,
        delta=1e-3,
        num_examples=20,
        score=strategies.PublicScore(),
        directory=folder,
        project_name="search",
    )
    arguments = {} if strategy != "composition" else {"verbose": 0}
    tuner.search(*data, batch_size=4, epochs=EPOCHS, validation_data=data, **arguments)
    killable.append(folder / "end", json.dumps(tuner._result.shown()))


if __name__ == "__main__":
    import tf_adaptive_dp.tuning.keras_tuner.tuner  # noqa: F401

    gc.freeze()  # or each child would look through, and so copy, all of it before every model
    killable.serve(killable.on_one_thread(search))
