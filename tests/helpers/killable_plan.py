"""A run of a `PrivacyPlan`, in processes made to be killed; see `killable`."""

import json

from tests.helpers import killable

NUM_EXAMPLES, DELTA, EPOCHS = 40, 1e-3, 5


class Pairs:
    """Examples (x, y) that are read one by one."""

    def __init__(self, x, y):
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x)

    def __getitem__(self, index):
        return self._x[index], self._y[index]


def record_values(optimizer, path):
    """Notes each noisy gradient with its number, before anything else sees it."""
    import tensorflow as tf

    release = optimizer._mechanism.release

    def recorded(*args, **kwargs):
        noisy = release(*args, **kwargs)
        flat = tf.concat([tf.reshape(g, [-1]) for g in noisy], 0)
        with tf.control_dependencies([flat]):
            number = optimizer.ledger.count() - 1

        def note(number, values):
            killable.append(path, json.dumps([int(number), values.tolist()]))
            return values

        with tf.control_dependencies([tf.numpy_function(note, [number, flat], tf.float32)]):
            return [tf.identity(g) for g in noisy]

    optimizer._mechanism.release = recorded


def train(folder, noise=None, examples_per_user=None):
    """Runs a plan, or resumes it; all examples have weight 0, so what is released is the noise.

    With `noise`, a strategy as `serialize` describes it, the releases are noted whole, with their
    numbers, and the keys are copied.
    With `examples_per_user`, k, each user has k + 1 examples; the numbers are then those of users.
    """
    import numpy as np
    import tensorflow as tf

    import tf_adaptive_dp as dp
    from tf_adaptive_dp.accounting.noise_strategies import get_strategy

    class Report(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if not hasattr(self, "told"):
                self.told = True
                released = self.model.optimizer.ledger.num_releases
                killable.append(folder / "starts", json.dumps([released, epoch]))
                keys = folder / "run" / "noise.key"
                if keys.exists():
                    killable.append(folder / "keys", keys.read_text().strip())

    units = {"num_examples": NUM_EXAMPLES}
    if examples_per_user is not None:
        user_ids = np.repeat(np.arange(NUM_EXAMPLES), examples_per_user + 1)
        units = {"user_ids": user_ids, "examples_per_user": examples_per_user}
    plan = dp.PrivacyPlan(
        noise_multiplier=1.0,
        delta=DELTA,
        **units,
        batch_size=4,
        epochs=EPOCHS,
        accountant="rdp",
        noise=get_strategy(noise),
    )
    if noise is None:
        optimizer = plan.optimizer(dp.ADADP)
        killable.record_releases(optimizer, folder / "releases")
    else:
        optimizer = plan.optimizer(dp.DPSGD, learning_rate=0.1)
        record_values(optimizer, folder / "releases")
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    model.compile(optimizer, "mse")
    history = plan.fit(
        model,
        np.ones([plan.num_examples, 3], np.float32),
        np.zeros([plan.num_examples, 4], np.float32),
        np.zeros(plan.num_examples, np.float32),
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
