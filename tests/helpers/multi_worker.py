"""One worker of two: trains without noise, then takes steps of pure noise; writes what came out."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation runs

import numpy as np  # noqa: E402

from tests.helpers import catalogue  # noqa: E402


def train() -> tuple[list[np.ndarray], tuple]:
    with strategy.scope():
        model = catalogue.mlp()
        model.compile(catalogue.make("ADADP", noise_multiplier=0.0), loss=catalogue.loss())
    catalogue.fit(model)
    return model.get_weights(), model.optimizer.ledger.segments[0]


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
