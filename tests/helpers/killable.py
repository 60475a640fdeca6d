"""A training that keeps its own record of what it released, in processes made to be killed.

As a program it reads jobs from its input, a line of JSON and a line to wait for each, and runs each
in a fork of itself: so TensorFlow is imported once. Nothing here may use TensorFlow's runtime
before the fork, since its threads would not be in the child.
"""

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

NUM_EXAMPLES, EPOCH, DELTA, KEY = 8, 10, 1e-3, bytes(range(32))


def append(path, text):
    """Writes a line that is in the file, whole, when this returns."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{text}\n".encode())
    os.close(file)


def record_releases(optimizer, path, line=str):
    """Notes a line on each noisy gradient, of its digest, before anything else sees it."""
    import tensorflow as tf

    release = optimizer._mechanism.release

    def note(values):
        append(path, line(hashlib.sha256(values.tobytes()).hexdigest()))
        return values

    def recorded(*args, **kwargs):
        noisy = release(*args, **kwargs)
        flat = tf.concat([tf.reshape(g, [-1]) for g in noisy], 0)
        with tf.control_dependencies([tf.numpy_function(note, [flat], tf.float32)]):
            return [tf.identity(g) for g in noisy]

    optimizer._mechanism.release = recorded


def train(folder, steps, log, seed=None, steps_per_execution=1, save_freq=5):
    """Trains, or goes on; all weights of the examples are 0, so what is released is the noise."""
    import numpy as np
    import tensorflow as tf

    import tf_adaptive_dp as dp
    from tf_adaptive_dp._keras.generation import GENERATION
    from tf_adaptive_dp.callbacks.backups import epoch_backup

    class Report(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if not hasattr(self, "told"):
                self.told = True
                released = self.model.optimizer.ledger.num_releases
                append(folder / "starts", json.dumps([released, monitor.epsilon()]))

    sampling = dp.PoissonSampling(0.5, NUM_EXAMPLES + 1, steps)
    optimizer = dp.ADADP(1.0, 1.0, expected_batch_size=NUM_EXAMPLES / 2, seed=seed)
    record_releases(optimizer, folder / "releases")
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(4)])
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
    # Keras 3 overwrites its backup, and a kill can leave that unreadable.
    if GENERATION == 3:
        backup = epoch_backup(folder / "backup")
    else:
        backup = tf.keras.callbacks.BackupAndRestore(
            folder / "backup", save_freq=save_freq, delete_checkpoint=False
        )
    monitor = dp.PrivacyMonitor(NUM_EXAMPLES, DELTA, sampling=sampling)
    callbacks, start = [backup, monitor, Report()], 0
    if log:
        release_log = dp.ReleaseLog(folder / "log", steps=steps)
        start = release_log.num_releases
        callbacks.insert(1, release_log)
    if start < steps:
        x = np.ones([NUM_EXAMPLES, 3], np.float32)
        data = (x, np.zeros([NUM_EXAMPLES, 4], np.float32), np.zeros(NUM_EXAMPLES, np.float32))
        batches = dp.poisson_batches(data, sampling, start_step=start, key=KEY)
        epochs = -(-steps // EPOCH)
        model.fit(batches, None, None, epochs, 0, callbacks, steps_per_epoch=EPOCH)
    else:
        monitor.set_model(model)
        backup.set_model(model)
        backup.on_train_begin()
        release_log.reconcile(optimizer)
    segments, updates = optimizer.ledger.segments, int(optimizer.iterations)
    append(folder / "end", json.dumps([segments, updates, monitor.epsilon()]))


def serve(run):
    """Reads jobs, one line of JSON each, and does each in a process of its own.

    The parent has imported everything and computed nothing, so a child is ready at once. It says
    the child's id, and after another line that nobody will use the id any more, how it ended.

    Args:
      run: does a job, in the child.
    """
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                job = json.loads(line)
                job["folder"] = Path(job["folder"])
                run(job)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(pid, flush=True)
        sys.stdin.readline()  # until then the id stays the child's, so it may be killed by it
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def on_one_thread(function):
    """A `run` for `serve`: calls the function, on one thread of TensorFlow's."""

    def run(job):
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        function(**job)

    return run


if __name__ == "__main__":
    import tf_adaptive_dp  # noqa: F401

    serve(on_one_thread(train))
