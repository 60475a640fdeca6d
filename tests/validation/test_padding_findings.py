"""`validate` notices a loss that ignores sample weights, as the first step of a plan does."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION

# What a model does with weights of zero hardly depends on the version of Keras.
pytestmark = pytest.mark.slow_on(2)

layers = tf.keras.layers
N = 200
X, Y = floats(N, 5), np.arange(N) % 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Keras 2 adds a vector of a layer to a vector of losses only.
BESIDE_VECTORS = tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, **({"reduction": "none"} if GENERATION == 2 else {})
)


class Own(tf.keras.Model):
    """Has a `compute_loss` of its own, which may forget the sample weights."""

    weighs = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss(y, y_pred, sample_weight if self.weighs else None)


class Weighs(Own):
    weighs = True


def own(kind):
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input([5])
    return kind(inputs, layers.Dense(3)(inputs))


def plan(**kwargs):
    settings = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}
    return dp.PrivacyPlan(num_examples=N, batch_size=50, epochs=1, **settings, **kwargs)


def findings(model, optimizer, batch=(X[:8], Y[:8]), loss=LOSS):
    model.compile(optimizer, loss)
    return [f for f in dp.validate(model, batch).findings if f.kind == "padding"]


def test_a_loss_without_weights_is_an_error_for_the_optimizer_of_a_plan():
    of_plan = plan()
    model = own(Own)
    (found,) = findings(model, of_plan.optimizer(dp.ADADP))
    assert found.severity == "error" and "`compute_loss`" in found.fix
    with pytest.raises(tf.errors.InvalidArgumentError, match="Padding contributes to the loss"):
        of_plan.fit(model, X, Y, verbose=0)


def test_it_is_a_warning_where_batches_may_have_no_padding():
    (found,) = findings(own(Own), dp.DPSGD(1.0, 1.0, expected_batch_size=8.0))
    assert found.severity == "warning"
    assert not findings(own(Own), dp.DPSGD(1.0, 1.0))


def test_weights_of_the_batch_itself_count():
    weights = np.linspace(1, 2, 8).astype("float32")
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=8.0)
    assert findings(own(Own), optimizer, (X[:8], Y[:8], weights))
    assert not findings(own(Weighs), optimizer, (X[:8], Y[:8], weights))


class FailsWithWeights(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if sample_weight is not None:
            raise ValueError("no weights here")
        return super().compute_loss(x, y, y_pred)


def test_a_loss_that_takes_no_weights_is_not_taken_for_one_that_weighs():
    (found,) = findings(own(FailsWithWeights), dp.DPSGD(1.0, 1.0, expected_batch_size=8.0))
    assert found.severity == "warning" and "is not known" in found.what
    assert found.what.endswith("ValueError: no weights here")


class AddsVector(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2, axis=1))
        return x


def two_outputs():
    inputs = tf.keras.Input([5])
    outputs = [layers.Dense(1, name="one")(inputs), layers.Dense(3, name="two")(inputs)]
    return tf.keras.Model(inputs, outputs)


def sequential(shape, *hidden):
    return tf.keras.Sequential([tf.keras.Input(shape), *hidden])


# Model, loss, x, y.
CLEAN = {
    "two outputs": (two_outputs, ["mse", LOSS], X, [Y.astype("float32"), Y]),
    "a plain loss": (lambda: sequential([5], layers.Dense(3)), LOSS, X, Y),
    "dropout": (lambda: sequential([5], layers.Dropout(0.5), layers.Dense(3)), LOSS, X, Y),
    "compute_loss with weights": (lambda: own(Weighs), LOSS, X, Y),
    "losses that a layer adds": (
        lambda: sequential([5], layers.Dense(4), AddsVector(), layers.Dense(3)),
        *(BESIDE_VECTORS, X, Y),
    ),
    "losses of tokens": (
        *(lambda: sequential([4], layers.Embedding(7, 3), layers.Dense(3)), LOSS),
        *(np.arange(N * 4).reshape(N, 4) % 7, np.arange(N * 4).reshape(N, 4) % 3),
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CLEAN)
def test_losses_that_keras_weighs_have_no_finding(name):
    make, loss, x, y = CLEAN[name]
    batch = tf.nest.map_structure(lambda part: part[:8], (x, y))
    of_plan, model = plan(), make()
    assert not findings(model, of_plan.optimizer(dp.DPSGD, learning_rate=0.1), batch, loss)
    of_plan.fit(model, x, y, verbose=0)
    assert model.optimizer.ledger.num_releases == of_plan.steps


def test_the_rows_of_a_user_are_padding_together():
    users = plan(user_ids=np.arange(N) // 2, examples_per_user=2)
    (found,) = findings(own(Own), users.optimizer(dp.ADADP))
    assert found.severity == "error"
    assert not findings(own(Weighs), users.optimizer(dp.ADADP))
