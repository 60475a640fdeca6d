"""One worker of two: trains without noise, then takes steps of pure noise; writes what came out."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation runs

import numpy as np  # noqa: E402

from tests.helpers import catalogue  # noqa: E402
from tf_adaptive_dp._keras.generation import GENERATION  # noqa: E402


def train() -> tuple[list[np.ndarray], tuple]:
    with strategy.scope():
        model = catalogue.mlp()
        model.compile(catalogue.make("ADADP", noise_multiplier=0.0), loss=catalogue.loss())
        model.optimizer.build(model.trainable_variables)
    if GENERATION == 2:
        catalogue.fit(model)
    else:
        train_in_loop(model)
    return model.get_weights(), model.optimizer.ledger.segments[0]


def train_in_loop(model: tf.keras.Model) -> None:
    """Does what `catalogue.fit` does; `fit` of Keras 3 does not know this strategy."""
    batches = tf.data.Dataset.from_tensor_slices(catalogue.data()).batch(8)

    def of_replica(x, y):
        with tf.GradientTape() as tape:
            loss = catalogue.loss()(y, model(x, training=True))
        model.optimizer.minimize(loss, model.trainable_variables, tape)

    step = tf.function(lambda x, y: strategy.run(of_replica, (x, y)))
    for x, y in strategy.experimental_distribute_dataset(batches):
        step(x, y)


if __name__ == "__main__":
    trained, trained_segment = train()
    noises, optimizer = catalogue.steps_of_noise(
        strategy, 2, l2_norm_clip=2.0, noise_multiplier=1.5
    )
    np.savez(
        sys.argv[1],
        *trained,
        noises=noises,
        trained_segment=trained_segment,
        noise_segment=optimizer.ledger.segments[0],
    )
