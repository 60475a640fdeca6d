"""A run of a `PrivacyPlan`, in processes made to be killed; see `killable`."""

import json

from tests.helpers import killable

NUM_EXAMPLES, DELTA, EPOCHS = 40, 1e-3, 5


def train(folder):
    """Runs a plan, or resumes it; all examples have weight 0, so what is released is the noise."""
    import numpy as np
    import tensorflow as tf

    import tf_adaptive_dp as dp

    class Report(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if not hasattr(self, "told"):
                self.told = True
                released = self.model.optimizer.ledger.num_releases
                killable.append(folder / "starts", json.dumps([released, epoch]))

    plan = dp.PrivacyPlan(
        noise_multiplier=1.0,
        delta=DELTA,
        num_examples=NUM_EXAMPLES,
        batch_size=4,
        epochs=EPOCHS,
        accountant="rdp",
    )
    optimizer = plan.optimizer(dp.ADADP)
    killable.record_releases(optimizer, folder / "releases")
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    model.compile(optimizer, "mse")
    history = plan.fit(
        model,
        np.ones([NUM_EXAMPLES, 3], np.float32),
        np.zeros([NUM_EXAMPLES, 4], np.float32),
        np.zeros(NUM_EXAMPLES, np.float32),
        directory=folder / "run",
        callbacks=[Report()],
        verbose=0,
    )
    killable.append(
        folder / "end",
        json.dumps([optimizer.ledger.segments, history.epoch, history.history["epsilon"]]),
    )


if __name__ == "__main__":
    import tf_adaptive_dp  # noqa: F401

    killable.serve(killable.on_one_thread(train))
