"""The list of optimizers: a new one is tested by being added here."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION

# For `run_eagerly`.
WITHOUT_TAPE = pytest.mark.skipif(
    GENERATION == 3, reason="An eager step of Keras 3 shows its tape to no optimizer"
)
EAGERLY = [False, pytest.param(True, marks=WITHOUT_TAPE)]

PUBLIC = tf.data.Dataset.from_tensor_slices(
    (np.random.default_rng(7).normal(size=(8, 6)).astype("float32"), np.arange(8) % 3)
).batch(4)


def _with_fixed(optimizer_class, **own):
    def make(**kwargs):
        fixed = dp.side_information.FixedPreconditioner(by_rank, provenance="public")
        return optimizer_class(side_information=fixed, **own, **kwargs)

    return make


def _with_public(optimizer_class, rule, **own):
    def make(**kwargs):
        public = dp.side_information.PublicGradients(
            PUBLIC, rule=rule, epsilon=1e-2, provenance="public"
        )
        return optimizer_class(side_information=public, **{"learning_rate": 0.01, **own}, **kwargs)

    return make


@tf.keras.utils.register_keras_serializable("tests")
def by_rank(variable):
    """A preconditioner that differs between kernels and biases."""
    return np.full(variable.shape, 0.5 if len(variable.shape) > 1 else 2.0)


@tf.keras.utils.register_keras_serializable("tests")
class Measured(dp.UntunedSGD):
    """As it is after its first batches, of which it needs more than these tests have."""

    def create_slots(self, variables):
        super().create_slots(variables)
        histograms = self._mechanism.histograms
        with tf.init_scope():
            histograms._sizes.assign([2.0] * len(variables) + [1.0, 0.5])
            histograms._complete.assign(True)


OPTIMIZERS = {
    "DPSGD": lambda **k: dp.DPSGD(learning_rate=0.1, **k),
    "DPMomentum": lambda **k: dp.DPSGD(learning_rate=0.1, momentum=0.9, **k),
    "DPAdam": lambda **k: dp.DPAdam(learning_rate=0.01, **k),
    "DPAdamW": lambda **k: dp.DPAdamW(learning_rate=0.01, weight_decay=0.01, **k),
    "DPRMSprop": lambda **k: dp.DPRMSprop(learning_rate=0.01, **k),
    "DPAdagrad": lambda **k: dp.DPAdagrad(learning_rate=0.1, **k),
    "ADADP": lambda **k: dp.ADADP(**k),
    "ADADP euler": lambda **k: dp.ADADP(keep="euler", discard=True, tolerance=0.05, **k),
    "ADADP frozen": lambda **k: dp.ADADP(freeze_learning_rate_after=3, weight_decay=0.01, **k),
    "UntunedSGD": lambda l2_norm_clip, **k: Measured(**k),
    "DPAdamWOSM": lambda **k: dp.DPAdamWOSM(learning_rate=0.01, **k),
    "AdaDPS fixed": _with_fixed(dp.AdaDPS, learning_rate=0.1),
    "AdaDPS rmsprop": _with_public(dp.AdaDPS, "rmsprop"),
    "AdaDPS adam": _with_public(dp.AdaDPS, "adam"),
    "AdaDPS adagrad": _with_public(dp.AdaDPS, "adagrad"),
    "DPAdamWOSM fixed": _with_fixed(dp.DPAdamWOSM, learning_rate=0.01),
    "ADADP public": _with_public(dp.ADADP, "rmsprop", tolerance=0.05),
    "DPRPub": _with_public(dp.optimizers.baselines.DPRPub, "rmsprop"),
    "DPAdamPub": _with_public(dp.optimizers.baselines.DPAdamPub, "rmsprop"),
    "PDADPMD": _with_public(
        dp.optimizers.baselines.PDADPMD, "gradient", mixing=dp.optimizers.baselines.CosineMixing(12)
    ),
}

# One of each way to update, for what does not depend on the details.
KINDS = ["DPMomentum", "DPAdam", "ADADP euler", "AdaDPS fixed", "AdaDPS adam"]


def make(name, **kwargs):
    """The optimizer of that name, private to a degree unless said otherwise."""
    return OPTIMIZERS[name](**{"l2_norm_clip": 1.0, "noise_multiplier": 0.5, "seed": 1, **kwargs})


def callbacks_of(optimizer):
    """The callbacks that `fit` needs for it."""
    information = getattr(optimizer, "side_information", None)
    return [information] if isinstance(information, tf.keras.callbacks.Callback) else []


@functools.cache
def mirrored():
    """One strategy for all tests: those of one process share the names of their collectives."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


# Weights of `steps_of_noise`.
SIZE = 20_000


def steps_of_noise(strategy, num_steps, **kwargs):
    """What each step of DPSGD moves weights by that have no gradient, 4 examples a replica."""
    with strategy.scope():
        weights = tf.Variable(tf.zeros([SIZE]))
        optimizer = dp.DPSGD(learning_rate=1.0, **kwargs)

    @tf.function
    def step(batch):
        def of_replica(batch):
            with tf.GradientTape() as tape:
                loss = batch * tf.reduce_sum(weights)
            optimizer.minimize(loss, [weights], tape)

        strategy.run(of_replica, (batch,))

    batch = strategy.experimental_distribute_values_from_function(lambda context: tf.zeros([4]))
    found, before = [], np.zeros(SIZE)
    for _ in range(num_steps):
        step(batch)
        found.append(weights.numpy() - before)
        before = weights.numpy()
        for copy in weights.values:
            np.testing.assert_array_equal(copy.numpy(), before)
    return found, optimizer


def data(num_examples=32):
    """A small classification problem."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(num_examples, 6)).astype("float32")
    return x, (x @ generator.normal(size=(6, 3))).argmax(1)


def loss():
    """The loss vector that DP training needs."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def mlp():
    """A small network with the same weights each time."""
    tf.keras.utils.set_random_seed(5)
    return tf.keras.Sequential(
        [
            tf.keras.Input([6]),
            tf.keras.layers.Dense(5, activation="tanh", name="hidden"),
            tf.keras.layers.Dense(3, name="logits"),
        ],
        name="mlp",
    )


def compiled(name="DPSGD", compile_with=(), **kwargs):
    """The network with the optimizer of that name, compiled."""
    model = mlp()
    model.compile(make(name, **kwargs), loss=loss(), **dict(compile_with))
    return model


def with_noise_of_1(name="DPSGD", compile_with=(), **kwargs):
    """`compiled` with a noise multiplier of 1 and batches of 8, as callbacks expect them."""
    kwargs = {"noise_multiplier": 1.0, "expected_batch_size": 8.0, **kwargs}
    return compiled(name, compile_with, **kwargs)


def assert_same_weights(actual, expected, rtol=1e-4, atol=1e-5):
    """Compares two models weight by weight."""
    for a, b in zip(actual.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def fit(model, epochs=1, callbacks=(), same_batches=False, **kwargs):
    """Trains on `data` in batches of 8, unshuffled: 4 steps an epoch."""
    x, y = data()
    if same_batches:
        x, y = np.tile(x[:8], [4, 1]), np.tile(y[:8], 4)
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(
        x,
        y,
        epochs=epochs,
        callbacks=[*callbacks_of(model.optimizer), *callbacks],
        **arguments,
    )
