"""A run of real federated rounds with privacy, and what its record says; see `killable_rounds`."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_optimizers import build_adadp
from federated.privacy.client_sampling import ClientSampler, ShuffledEpochs
from federated.privacy.user_epsilon import epsilon_spent
from federated.privacy.user_level import UserLevelPrivacy
from federated.training import program
from federated.training.processes import build_dp_fed_avg
from federated.training.run import Run
from tests.helpers import killable_rounds

CLIENTS = [f"client {index}" for index in range(12)]
DELTA = 1e-3
STEPS = 400


def model_fn():
    model = tf.keras.Sequential(
        [tf.keras.Input([2]), tf.keras.layers.Dense(2, kernel_initializer="zeros")]
    )
    return tff.learning.models.from_keras_model(
        model,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=(tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)),
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )


def dataset(client):
    x = np.random.default_rng(CLIENTS.index(client)).normal(size=[4, 2]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, (x[:, 0] > 0).astype(np.int32))).batch(2)


def privacy(mechanism):
    if mechanism == "tree":
        return UserLevelPrivacy(1.0, 3, 12, clip=0.5, mechanism="tree")
    if mechanism == "banded":
        return UserLevelPrivacy(1.0, 3, 12, clip=0.5, mechanism="banded", bands=4)
    return UserLevelPrivacy(0.2, 3, 12)


def process(mechanism, client_metrics=True):
    kwargs = {"client_metrics": client_metrics}
    if mechanism == "banded":  # what a round adds to the model is what it released
        kwargs["server_optimizer"] = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    return build_dp_fed_avg(model_fn, build_adadp(), privacy(mechanism), **kwargs)


def sampler(mechanism, key=None):
    if mechanism == "tree":
        return ClientSampler(CLIENTS, ShuffledEpochs(3, STEPS), key)
    if mechanism == "banded":
        return ClientSampler.fixed_order(CLIENTS, privacy(mechanism), STEPS, key)
    return ClientSampler.poisson(CLIENTS, privacy(mechanism), STEPS, key)


def digest(model):
    return {f"weight {index}": float(w) for index, w in enumerate(np.ravel(model.trainable[0]))}


def report(folder, mechanism, made):
    """Notes what is saved, as the program finds it when it starts."""
    ledger = made.new_ledger()
    run = Run(made, sampler(mechanism), folder / "run", ledger, max_failures=0)
    epsilon = epsilon_spent(run.ledger, DELTA, sampling=run.sampler.sampling)
    model = digest(made.get_model_weights(run.state))
    noise = {}
    if mechanism == "banded":
        past = np.asarray(run.state.aggregator.query_state.numerator_state.past)
        noise["past"] = past[:, : len(model)].tolist()
    killable_rounds.append(
        folder,
        event="found",
        number=run.number,
        model=model,
        finished=run.finished,
        begun=run.journal.begun,
        counted=run.ledger.num_releases,
        epsilon=epsilon,
        **noise,
    )
    run.journal.close()


def train(folder, rounds, mechanism, made, release_managers=()):
    """Notes where each round begins and ends, and what is released."""
    asked = []

    def asked_for(client):
        asked.append(client)
        # Clients without examples send zeros, so only noise is released.
        return dataset(client).take(0) if mechanism == "banded" else dataset(client)

    class Recorded:
        initialize = staticmethod(made.initialize)
        get_model_weights = staticmethod(made.get_model_weights)
        new_ledger = staticmethod(made.new_ledger)

        @staticmethod
        def next(state, datasets):
            model = digest(made.get_model_weights(state))
            killable_rounds.append(folder, event="began", model=model, clients=list(asked))
            asked.clear()
            output = made.next(state, datasets)
            model = digest(made.get_model_weights(output.state))
            killable_rounds.append(folder, event="ended", model=model)
            return output

    return program.train(
        Recorded,
        asked_for,
        sampler(mechanism),
        rounds,
        folder / "run",
        delta=DELTA,
        evaluate=digest,
        release_managers=[killable_rounds.witness(folder), *release_managers],
    )
