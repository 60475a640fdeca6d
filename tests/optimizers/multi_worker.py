"""One worker of two: trains without noise, then takes steps of pure noise; writes what came out."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation runs

import catalogue  # noqa: E402
import numpy as np  # noqa: E402

import tf_adaptive_dp as dp  # noqa: E402

SIZE = 20_000


def train() -> tuple[list[np.ndarray], tuple]:
    with strategy.scope():
        model = catalogue.mlp()
        model.compile(catalogue.make("ADADP", noise_multiplier=0.0), loss=catalogue.loss())
    catalogue.fit(model)
    return model.get_weights(), model.optimizer.ledger.segments[0]


def noise() -> tuple[list[np.ndarray], tuple]:
    with strategy.scope():
        weights = tf.Variable(tf.zeros([SIZE]))
        optimizer = dp.DPSGD(2.0, 1.5, learning_rate=1.0)

    @tf.function
    def step():
        def of_replica():
            with tf.GradientTape() as tape:
                loss = tf.zeros([4]) * tf.reduce_sum(weights)
            optimizer.minimize(loss, [weights], tape)

        strategy.run(of_replica)

    found = []
    for _ in range(2):
        before = weights.numpy()
        step()
        found.append(weights.numpy() - before)
    return found, optimizer.ledger.segments[0]


if __name__ == "__main__":
    trained, trained_segment = train()
    noises, noise_segment = noise()
    np.savez(
        sys.argv[1],
        *trained,
        noises=noises,
        trained_segment=trained_segment,
        noise_segment=noise_segment,
    )
