"""Models and losses that mix examples are refused; those that only look like it are not."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import zoo
from tests.helpers.zoo import classifier, floats
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.errors import NotPrivateError

layers = tf.keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
MODES = ("eager", "graph", "graph of fixed size")


def norms(problem, mode):
    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    return zoo.in_mode(mode, step, problem.batch)(*problem.batch).numpy()


def dense(*hidden, shape=(5,)):
    return lambda: classifier(
        tf.keras.Sequential([layers.Dense(4), *hidden, layers.Flatten(), layers.Dense(3)]),
        floats(4, *shape),
    )


def first(layer, shape=(5,)):
    return lambda: classifier(
        tf.keras.Sequential([layer, layers.Flatten(), layers.Dense(3)]), floats(4, *shape)
    )


MIXING = {
    "BatchNormalization": dense(layers.BatchNormalization()),
    "BatchNormalization of sequences": dense(layers.BatchNormalization(), shape=(3, 2)),
    "BatchNormalization of images": dense(layers.BatchNormalization(), shape=(3, 3, 2)),
    "BatchNormalization of images without scale": dense(
        layers.BatchNormalization(scale=False, center=False), shape=(3, 3, 2)
    ),
    "BatchNormalization, first layer": first(layers.BatchNormalization()),
    "BatchNormalization of images, first layer": first(layers.BatchNormalization(), (3, 3, 2)),
    "mean": dense(layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0))),
    "mean that keeps the axis": dense(
        layers.Lambda(lambda x: x - tf.reduce_mean(x, 0, keepdims=True))
    ),
    "mean over axis -2": dense(layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=-2))),
    "sum": dense(layers.Lambda(lambda x: x * tf.reduce_sum(x, axis=0))),
    "sum over all axes": dense(layers.Lambda(lambda x: x - tf.reduce_mean(x))),
    "product": dense(layers.Lambda(lambda x: x * tf.reduce_prod(x, axis=0))),
    "maximum": dense(layers.Lambda(lambda x: x - tf.reduce_max(x, axis=0))),
    "deviation": dense(layers.Lambda(lambda x: x / tf.math.reduce_std(x, axis=0))),
    "l2_normalize": dense(layers.Lambda(lambda x: tf.nn.l2_normalize(x, axis=0))),
    "mean of the inputs": first(layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0))),
}


# What leaves no trace in the backward pass, which is all that eager execution shows.
UNSEEN = {"BatchNormalization, first layer", "maximum", "mean of the inputs"}
if GENERATION == 3:  # it has no fused operation, whose gradient would say so
    UNSEEN.add("BatchNormalization of images, first layer")


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_examples_are_refused(name, mode):
    if mode == "eager" and name in UNSEEN:
        with pytest.warns(UserWarning, match="only the backward pass can be searched"):
            norms(MIXING[name](), mode)
        return
    with pytest.raises(
        NotPrivateError, match="examples of a batch, so|[Ee]xamples in a batch"
    ) as error:
        norms(MIXING[name](), mode)
    # Eager execution does not show what reduces over the batch.
    is_normalization = mode == "eager" or name.startswith("BatchNormalization")
    told = "`tf.keras.layers.GroupNormalization` or `LayerNormalization`" in str(error.value)
    assert told == is_normalization


@pytest.mark.parametrize("shape", [(5,), (3, 2), (3, 3, 2)], ids=str)
def test_the_error_names_the_layer_where_the_graph_knows_it(shape):
    problem = dense(layers.BatchNormalization(name="my_norm"), shape=shape)()
    with pytest.raises(NotPrivateError, match="Received: .*my_norm"):
        norms(problem, "graph")


class WeightNormalized(layers.Layer):
    """A dense layer whose kernel has columns of a learned length."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=[shape[-1], 4])
        self.length = self.add_weight(name="length", shape=[4], initializer="ones")

    def call(self, x):
        return x @ (tf.nn.l2_normalize(self.kernel, axis=0) * self.length)


class ClassToken(layers.Layer):
    """Puts a learned vector before each sequence."""

    def build(self, shape):
        self.token = self.add_weight(name="token", shape=[1, 1, shape[-1]])

    def call(self, x):
        return tf.concat([tf.tile(self.token, [tf.shape(x)[0], 1, 1]), x], axis=1)


class Temperature(layers.Layer):
    """Multiplies all by one learned number."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=[])

    def call(self, x):
        return x * self.factor


# The batch has 4 examples, and so many other axes have length 4.
APART = {
    "LayerNormalization": dense(layers.LayerNormalization(), shape=(4,)),
    "LayerNormalization of sequences": dense(layers.LayerNormalization(), shape=(4, 4)),
    "LayerNormalization of images": dense(layers.LayerNormalization(), shape=(4, 4, 4)),
    "GroupNormalization": dense(layers.GroupNormalization(4), shape=(4,)),
    "GroupNormalization of images": dense(layers.GroupNormalization(4), shape=(4, 4, 4)),
    "InstanceNormalization": dense(layers.GroupNormalization(-1), shape=(4, 4, 4)),
    "UnitNormalization": dense(layers.UnitNormalization(), shape=(4,)),
    "frozen BatchNormalization": dense(layers.BatchNormalization(trainable=False), shape=(4,)),
    "frozen BatchNormalization of images": dense(
        layers.BatchNormalization(trainable=False), shape=(4, 4, 4)
    ),
    "weight normalisation": first(WeightNormalized(), (5,)),
    "weight normalisation, as many rows as examples": first(WeightNormalized(), (4,)),
    "one learned factor": dense(layers.Dense(3), Temperature()),
    "class token": dense(ClassToken(), shape=(4, 4)),
    "mean over time": dense(layers.Lambda(lambda x: tf.reduce_mean(x, axis=1)), shape=(4, 4)),
    "centred in time": dense(
        layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=1, keepdims=True)), shape=(4, 4)
    ),
    "softmax over time": dense(layers.Softmax(axis=1), shape=(4, 4)),
    "maximum over time": dense(layers.GlobalMaxPooling1D(), shape=(4, 4)),
    "sum over the last axes": dense(
        layers.Lambda(lambda x: tf.reduce_sum(x, [2, 3])), shape=[4] * 3
    ),
    "time first, summed": dense(
        layers.Lambda(lambda x: tf.reduce_sum(tf.transpose(x, [1, 0, 2]), axis=0)), shape=(3, 4)
    ),
    "reshape and tensordot": dense(
        layers.Reshape([2, 8]),
        layers.Dense(4),
        layers.Lambda(lambda x: tf.tensordot(x, tf.ones([4, 4]), axes=1)),
        shape=(4, 4),
    ),
    "global average of an image": dense(layers.GlobalAveragePooling2D(), shape=(4, 4, 4)),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", APART)
def test_models_that_keep_examples_apart_are_accepted_and_right(name, mode):
    problem = APART[name]()
    if (name, mode) == ("weight normalisation, as many rows as examples", "eager"):
        # On the safe side: without a forward graph the kernel's rows could be the batch.
        with pytest.raises(NotPrivateError, match="reduces over the batch axis"):
            norms(problem, mode)
        return
    rows = zoo.batch_of_one_gradients(problem)
    expected = sum((r.reshape(len(r), -1) ** 2).sum(axis=1) for r in rows)
    np.testing.assert_allclose(norms(problem, mode), expected, rtol=1e-5)


SHARED = {
    "a penalty": lambda loss, w: loss + 0.1 * tf.reduce_sum(w**2),
    "a penalty first": lambda loss, w: 0.1 * tf.reduce_sum(w**2) + loss,
    "l2_loss": lambda loss, w: loss + tf.nn.l2_loss(w),
    "a penalty that is subtracted": lambda loss, w: loss - tf.reduce_sum(tf.math.log(w**2)),
    "a penalty of shape [1]": lambda loss, w: loss + tf.reshape(tf.reduce_sum(w**2), [1]),
    "a penalty and a constant": lambda loss, w: (loss + tf.nn.l2_loss(w)) + 1.0,
    "a penalty, then scaled": lambda loss, w: 3.0 * (loss + tf.nn.l2_loss(w)) / 2.0,
    "two penalties": lambda loss, w: loss + tf.nn.l2_loss(w) - (0.5 - 2.0 * tf.norm(w)),
    "a learned number": lambda loss, w: loss * tf.exp(-w[0, 0]) + w[0, 0],
    "one that is told apart": lambda loss, w: (
        lambda number: loss * tf.exp(-number) + tf.identity(number)
    )(w[0, 0]),
}
NOT_APART = {
    "the mean of the losses": (
        lambda loss, w: loss - tf.reduce_mean(loss),
        "[Ee]xamples in a batch affect each other.* reduces over the batch axis|shared",
    ),
    "a penalty, spread over the batch": (
        lambda loss, w: loss + tf.fill([4], tf.nn.l2_loss(w)),
        "One term of the loss does not depend on the data but is added to every example's loss.*"
        r"of shape \(4,\). Add it to the loss vector as one number",
    ),
    "a penalty that a variable scales": (
        lambda loss, w: (loss + tf.nn.l2_loss(w)) * tf.exp(w[0, 0]),
        "multiplied by a variable.* Add the term to the loss after",
    ),
    "a penalty that scales the loss": (
        lambda loss, w: (lambda number: loss * tf.exp(-number) + number)(w[0, 0]),
        r"also used elsewhere in the loss, by Neg.* Add `tf.identity\(term\)` to the loss",
    ),
}
linear = functools.cache(first(layers.Dense(3)))


def with_term(term):
    problem = linear()
    kernel = problem.variables[0]

    def losses(x, y):
        return term(problem.losses(x, y), kernel)

    return problem._replace(losses=losses)


@pytest.mark.parametrize("name", SHARED)
def test_terms_that_all_examples_share_are_refused_in_eager_execution(name):
    with pytest.raises(NotPrivateError, match="term that all examples share") as error:
        norms(with_term(SHARED[name]), "eager")
    assert "use the optimizer's `weight_decay` instead" in str(error.value)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    "method, size", [("traced", None), ("materialized", None), ("materialized", 1)]
)
@pytest.mark.parametrize("name", SHARED)
def test_terms_that_all_examples_share_are_kept_out_of_the_gradients_and_given_apart(
    name, method, size
):
    problem = with_term(SHARED[name])
    problem = problem._replace(batch=[a[:size] for a in problem.batch])

    def step(x, y):
        source = zoo.source(problem, x, y, method=method)
        return source.squared_norms(), source.penalty_gradients[0]

    mode = "graph of fixed size" if size else "graph"
    actual, penalty = zoo.in_mode(mode, step, problem.batch)(*problem.batch)
    x, y = map(tf.constant, problem.batch)
    kernel = problem.variables[0]
    with tf.GradientTape(persistent=True) as tape:
        zero = SHARED[name](tf.zeros([1]), kernel)[0]
        own = SHARED[name](linear().losses(x, y), kernel) - zero
        own = [own[i] for i in range(len(x))]
    np.testing.assert_allclose(penalty, tape.gradient(zero, kernel), rtol=1e-5, atol=1e-7)
    expected = [
        sum(np.sum(g.numpy() ** 2) for g in tape.gradient(loss, problem.variables)) for loss in own
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("name", NOT_APART)
def test_terms_that_cannot_be_taken_apart_are_refused(name):
    term, message = NOT_APART[name]
    with pytest.raises(NotPrivateError, match=message):
        norms(with_term(term), "graph")


OWN = {
    "a constant": lambda loss, w: loss + 0.5,
    "a constant of shape [1]": lambda loss, w: loss + tf.constant([0.5]),
    "a sum of losses": lambda loss, w: tf.add_n([loss, loss]) / 2.0,
    "a penalty without gradient": lambda loss, w: loss + tf.stop_gradient(1.0),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("term", OWN.values(), ids=OWN)
def test_terms_of_the_loss_that_change_no_gradient_are_accepted(term, mode):
    plain = norms(with_term(lambda loss, w: loss), mode)
    np.testing.assert_allclose(norms(with_term(term), mode), plain, rtol=1e-6)


# Losses of one number z = ⟨x, w⟩ + b an example: b is in each, but it is no penalty.
LINEAR = {
    "squares": lambda y, z, b: (z - y) ** 2,
    "logistic regression": lambda y, z, b: tf.nn.sigmoid_cross_entropy_with_logits(y, z),
    "Poisson regression": lambda y, z, b: tf.nn.log_poisson_loss(y, z),
    "hinge": lambda y, z, b: tf.nn.relu(1.0 - (2 * y - 1) * z),
    "a penalty below sample weights": lambda y, z, b: ((z - y) ** 2 + b**2) * y,
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_bias_that_all_examples_share_is_no_penalty(name, mode):
    w, b = tf.Variable(floats(3)), tf.Variable(0.5)

    def losses(x, y):
        return LINEAR[name](y, tf.linalg.matvec(x, w) + b, b)

    batch = (floats(4, 3), np.array([0.0, 1.0, 1.0, 0.0], "float32"))
    problem = zoo.Problem([w, b], losses, batch)
    rows = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(
        norms(problem, mode), (rows[0] ** 2).sum(1) + rows[1] ** 2, rtol=1e-5
    )


@pytest.mark.parametrize(
    "hide", [tf.stop_gradient, lambda w: tf.cast(tf.reduce_sum(w, 0) > 0, tf.float32) + 0.0 * w]
)
@pytest.mark.filterwarnings("ignore:No rule covers")
def test_a_variable_that_is_read_where_no_gradient_reaches_it(hide):
    w = tf.Variable(floats(3, 2))

    def losses(x):
        return tf.reduce_sum((x @ w) @ tf.transpose(hide(w)) * x, axis=1)

    problem = zoo.Problem([w], losses, (floats(4, 3),))
    (rows,) = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms(problem, "graph"), (rows**2).sum((1, 2)), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:No rule covers", "ignore:Under `jit_compile=True`")
def test_a_jacobian_that_xla_cannot_take_is_refused_with_what_to_do():
    w = tf.Variable(floats(2, 3))

    def losses(x):
        return tf.reduce_sum((x @ tf.repeat(w, [1, 3], axis=0)) ** 2, axis=1)

    problem = zoo.Problem([w], losses, (floats(5, 4),))
    (rows,) = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms(problem, "graph"), (rows**2).sum((1, 2)), rtol=1e-5)
    with pytest.raises(ValueError, match="XLA cannot take their Jacobian.*`jit_compile=False`"):
        norms(problem, "xla")


@pytest.mark.filterwarnings("error:No rule covers")
def test_a_variable_of_which_several_tensors_are_computed_some_without_a_gradient(monkeypatch):
    w, passes = tf.Variable(floats(3, 4)), []
    vectorized = tf.vectorized_map
    monkeypatch.setattr(tf, "vectorized_map", lambda *a: passes.append(a) or vectorized(*a))

    def losses(x):
        a, b = tf.split(w, 2, axis=1)
        hidden = tf.sin(x @ a) + x @ (b * b) + x @ tf.stop_gradient(2.0 * b)
        return tf.reduce_sum(hidden * (x[:, :2] @ tf.exp(a)[:2]), axis=1)

    problem = zoo.Problem([w], losses, (floats(4, 3),))
    (rows,) = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms(problem, "graph"), (rows**2).sum((1, 2)), rtol=1e-5)
    assert len(passes) == 1  # for all of them: each takes long to build
