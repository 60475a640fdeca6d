"""Mixing that does not show on the way from the data to the loss: state, gradients, sizes."""

from typing import Union

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.zoo import classifier, floats
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.gradients.api import per_example_gradients

layers = tf.keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")


def norms(problem):
    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    return zoo.in_mode("graph", step, problem.batch)(*problem.batch).numpy()


def with_layer(layer, shape=(5,)):
    return classifier(
        tf.keras.Sequential([layers.Dense(4), layer, layers.Flatten(), layers.Dense(3)]),
        floats(4, *shape),
    )


class Centred(layers.Layer):
    """Subtracts a moving average that it updates from the batch itself."""

    def __init__(self, how="assign_sub"):
        super().__init__()
        self.how = how

    def build(self, shape):
        self.average = self.add_weight(
            name="average", shape=[4], initializer="zeros", trainable=False
        )

    def call(self, x):
        mean = tf.reduce_mean(x, axis=0)
        if self.how == "assign":
            self.average.assign(mean)
        elif self.how == "assign_sub":
            self.average.assign_sub(0.1 * (self.average - mean))
        elif self.how == "scatter":
            native(self.average).scatter_nd_update([[0]], mean[:1])
        elif self.how == "steps":
            self.average.assign_add(tf.ones([4]))
        return x - self.average


@pytest.mark.parametrize("how", ["assign", "assign_sub", "scatter"])
def test_state_that_carries_data_between_examples_is_refused(how):
    with pytest.raises(dp.NotPrivateError, match="writes data of the batch into a variable"):
        norms(with_layer(Centred(how)))


class Counting(layers.Layer):
    """Keeps the number of rows that some values select, and scales by it."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def build(self, shape):
        self.number = self.add_weight(name="number", shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        chosen = tf.where(x[:, 0] > 0)
        if self.how == "shape":
            self.number.assign_add(tf.cast(tf.shape(chosen)[0], tf.float32))
        elif self.how == "size of a mask":
            kept = tf.exp(tf.boolean_mask(x, x[:, 0] > 0)) + 1.0
            self.number.assign_add(tf.cast(tf.size(kept), tf.float32))
        elif self.how == "reshaped":
            rows = tf.reshape(tf.ones([tf.shape(chosen)[0] * 2]), [2, -1])
            self.number.assign(tf.cast(tf.shape(rows)[1], tf.float32))
        elif self.how == "decision":
            many = tf.shape(chosen)[0] > 2
            self.number.assign(tf.cond(many, lambda: 1.0, lambda: 2.0))
        elif self.how == "batch":
            self.number.assign_add(tf.cast(tf.shape(tf.nn.relu(x))[0], tf.float32))
        return x * tf.cos(self.number)


@pytest.mark.parametrize("how", ["shape", "size of a mask", "reshaped", "decision"])
def test_state_that_counts_what_values_select_is_refused(how):
    with pytest.raises(dp.NotPrivateError, match="writes data of the batch into a variable"):
        norms(with_layer(Counting(how)))


def test_state_that_counts_the_rows_of_batches_is_accepted():
    assert (norms(with_layer(Counting("batch"))) > 0).all()


@pytest.mark.parametrize("mode", ["graph", "graph of fixed size"])
def test_where_their_number_is_random_it_may_not_reach_later_batches(mode):
    problem = with_layer(Counting("batch"))

    def step(*batch):
        with tf.GradientTape() as tape:
            loss = problem.losses(*batch)
        return per_example_gradients(
            loss, problem.variables, tape, expected_batch_size=4.0
        ).squared_norms()

    run = zoo.in_mode(mode, step, problem.batch)
    if mode == "graph":
        with pytest.raises(dp.NotPrivateError, match="or the size of the batch, which is random"):
            run(*problem.batch)
    else:  # a public number
        assert (run(*problem.batch).numpy() > 0).all()


def test_a_variable_whose_size_the_loss_reads_is_state():
    kernel = tf.Variable(floats(5))
    kept = tf.Variable(np.zeros([1], np.float32), shape=[None], trainable=False)

    def losses(x, y):
        kept.assign(tf.boolean_mask(x[:, 0], x[:, 0] > 0))
        return tf.linalg.matvec(x, kernel) * tf.cast(tf.size(kept), tf.float32) + y

    problem = zoo.Problem([kernel], losses, (floats(4, 5), floats(4)))
    with pytest.raises(dp.NotPrivateError):
        norms(problem)


class Penalized(layers.Layer):
    """Adds a loss that depends on no example of its own, but on what a batch wrote."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[shape[-1]], initializer="ones")
        self.kept = self.add_weight(
            name="kept", shape=[shape[-1]], initializer="zeros", trainable=False
        )

    def call(self, x):
        mean, factor = tf.reduce_mean(x, 0), tf.ones(())
        if self.how == "term":
            self.kept.assign(mean)
            self.add_loss(tf.reduce_sum(self.scale * self.kept))
        elif self.how == "factor":
            self.kept.assign_add(mean)
            self.add_loss(tf.reduce_max(self.kept) * tf.reduce_sum(self.scale))
        elif self.how == "Python":
            factor = tf.py_function(lambda m: float(m[0]), [mean], tf.float32)
            self.add_loss(tf.reduce_sum(self.scale * tf.ensure_shape(factor, [])))
        elif self.how == "constant":
            self.add_loss(0.1 * tf.reduce_sum((self.scale - self.kept) ** 2))
        return x * self.scale


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "how, options",
    [(how, {}) for how in ("term", "factor", "Python", "constant")]
    + [(how, {"jit_compile": True}) for how in ("term", "factor", "constant")],
)
def test_penalties_that_read_what_a_batch_wrote_are_refused(how, options):
    model = tf.keras.Sequential([tf.keras.Input([4]), Penalized(how), layers.Dense(1)])
    optimizer = dp.DPSGD(1e-3, 1e-3, expected_batch_size=8.0, learning_rate=1.0)
    model.compile(optimizer, loss="mse", **options)
    if how == "constant":
        model.fit(floats(8, 4), floats(8, 1), batch_size=8, verbose=0)
        assert optimizer.ledger.num_releases == 1
        return
    with pytest.raises(dp.NotPrivateError):
        model.fit(floats(8, 4), floats(8, 1), batch_size=8, verbose=0)
    assert optimizer.ledger.num_releases == 0


def test_a_scalar_that_an_outer_function_computes_from_the_batch_may_not_scale_a_penalty():
    kernel = tf.Variable(floats(4))
    optimizer = dp.DPSGD(1.0, 1.0, expected_batch_size=8.0, learning_rate=1.0)

    @tf.function
    def inner(x, y, number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, kernel) - y) ** 2)
            loss += number * tf.reduce_sum(kernel)
        optimizer.minimize(loss, [kernel], tape)

    @tf.function
    def outer(x, y):
        inner(x, y, tf.reduce_mean(x))

    with pytest.raises(dp.NotPrivateError):
        outer(tf.constant(floats(8, 4)), tf.constant(floats(8)))
    assert optimizer.ledger.num_releases == 0


def test_state_that_does_not_come_from_the_data_is_accepted():
    assert (norms(with_layer(Centred("steps"))) > 0).all()


def test_a_recurrent_layer_that_keeps_its_state_is_refused():
    recurrent = layers.SimpleRNN(4, stateful=True)
    inputs = tf.keras.Input(batch_shape=[4, 3, 5])
    model = tf.keras.Model(inputs, layers.Dense(3)(recurrent(inputs)))
    x = floats(4, 3, 5)

    def losses(x, y):
        return zoo.cross_entropy(y, model(x, training=True))

    problem = zoo.Problem(model.trainable_variables, losses, (x, zoo.labels(4)))
    step = zoo.in_mode(
        "graph of fixed size", lambda *b: zoo.source(problem, *b).squared_norms(), problem.batch
    )
    with pytest.raises(dp.NotPrivateError, match="stateful=False"):
        step(*problem.batch)


@pytest.mark.slow_on(2)
def test_what_released_gradients_wrote_is_no_hidden_state():
    """Two steps in one graph: the second reads what the first released."""
    w = tf.Variable(tf.zeros([3]))
    optimizer = dp.DPSGD(1.0, 0.0, learning_rate=1.0)

    @tf.function
    def steps(x):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.square(tf.linalg.matvec(x, w) - 1.0)
            optimizer.minimize(loss, [w], tape)

    steps(tf.constant(floats(4, 3)))
    assert optimizer.ledger.num_releases == 2


@tf.custom_gradient
def normed(x):
    """The identity, whose gradient is scaled by its norm over the batch."""
    return tf.identity(x), lambda dy: dy / tf.norm(dy)


@tf.custom_gradient
def shuffled(x):
    """The identity, which gives an example's gradient to another one."""
    return tf.identity(x), lambda dy: tf.reverse(dy, [0])


@tf.custom_gradient
def bounded(x):
    """The identity with bounded gradients."""
    return tf.identity(x), lambda dy: tf.clip_by_value(dy, -0.1, 0.1)


@pytest.mark.parametrize("function", [normed, shuffled])
def test_custom_gradients_that_mix_are_refused(function):
    with pytest.raises(dp.NotPrivateError, match="custom gradient mixes the examples"):
        norms(with_layer(layers.Lambda(function)))


@tf.custom_gradient
def persistent(x):
    """The identity, whose gradient remains where none arrives."""
    return tf.identity(x), lambda dy: x


@tf.custom_gradient
def offset(x):
    """The identity, whose gradient is moved away from 0."""
    return tf.identity(x), lambda dy: tf.clip_by_value(dy + 0.1 * x, -0.1, 0.1)


@pytest.mark.parametrize("function", [persistent, offset])
def test_custom_gradients_that_remain_where_none_arrives_are_refused(function):
    # Padding would have them, and so would every row of a Jacobian, from all examples.
    with pytest.raises(dp.NotPrivateError, match="custom gradient mixes.*not known to be 0"):
        norms(with_layer(layers.Lambda(function)))


@tf.custom_gradient
def of_signs(x):
    """The identity, whose gradient keeps the signs alone."""
    return tf.identity(x), lambda dy: tf.sign(dy) * tf.maximum(-0.5, tf.tanh(dy))


@pytest.mark.in_turns
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("function", [bounded, of_signs, tf.nn.silu, tf.nn.gelu, tf.stop_gradient])
def test_custom_gradients_that_do_not_are_accepted_and_right(function):
    problem = with_layer(layers.Lambda(lambda x: function(x) + 0.1 * x))
    expected = sum(
        (r.reshape(len(r), -1) ** 2).sum(axis=1) for r in zoo.batch_of_one_gradients(problem)
    )
    np.testing.assert_allclose(norms(problem), expected, rtol=1e-5)


def multiplied(gradient):
    """Multiplies the data by a kernel, whose gradient is a function of dy, x and the kernel."""

    @tf.custom_gradient
    def function(x, w):
        return x @ w, lambda dy: (dy @ tf.transpose(w), gradient(dy, x, w))

    return function


# Gradients with respect to a variable of shape [4, 4].
OF_VARIABLES = {
    "product": lambda dy, x, w: tf.matmul(x, dy, transpose_a=True),
    "einsum of scaled": lambda dy, x, w: 0.5 * tf.einsum("bi,bj->ij", tf.tanh(x), dy * x) - 0.0,
    "sum": lambda dy, x, w: tf.reduce_sum(x[:, :, None] * dy[:, None], axis=0) / 3.0,
    "chosen": lambda dy, x, w: tf.matmul(
        x, tf.where(x > 0, dy, tf.zeros_like(dy)), transpose_a=True
    ),
}
MIXED_OF_VARIABLES = {
    "maximum": lambda dy, x, w: tf.reduce_max(x, axis=0) * tf.ones_like(w),
    "maximum of what arrives": lambda dy, x, w: tf.reduce_max(dy, axis=0) * tf.ones_like(w),
    "sum of data": lambda dy, x, w: tf.matmul(x, x, transpose_a=True),
    "more than a product": lambda dy, x, w: tf.matmul(x, dy + 1.0, transpose_a=True),
    "root of a sum": lambda dy, x, w: tf.sqrt(tf.abs(tf.matmul(x, dy, transpose_a=True))),
    "scaled by the batch": lambda dy, x, w: tf.matmul(x, dy, transpose_a=True) * tf.norm(x),
    "centred": lambda dy, x, w: tf.matmul(x - tf.reduce_mean(x, 0), dy, transpose_a=True),
    "of other examples": lambda dy, x, w: tf.matmul(x[::-1], dy, transpose_a=True),
    "pairs": lambda dy, x, w: tf.einsum("bi,cj->ij", x, dy),
}


def with_kernel(function):
    """A problem whose kernel has a custom gradient."""
    w = tf.Variable(floats(4, 4, seed=2))

    def losses(x):
        return tf.reduce_sum(tf.tanh(function(x, w)), axis=1)

    return zoo.Problem([w], losses, (floats(5, 4),))


@pytest.mark.in_turns
@pytest.mark.parametrize("name", OF_VARIABLES)
def test_custom_gradients_of_variables_that_sum_over_examples_are_right(name):
    problem = with_kernel(multiplied(OF_VARIABLES[name]))
    (rows,) = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms(problem), (rows**2).sum(axis=(1, 2)), rtol=1e-5)


def test_a_learned_slope_of_silu_is_accepted_and_right():
    slope = tf.Variable(0.7)

    def losses(x):
        return tf.reduce_sum(tf.nn.silu(x, slope), axis=1)

    problem = zoo.Problem([slope], losses, (floats(5, 4),))
    (rows,) = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms(problem), rows**2, rtol=1e-5)


@pytest.mark.parametrize("name", MIXED_OF_VARIABLES)
def test_custom_gradients_of_variables_that_mix_are_refused(name):
    with pytest.raises(dp.NotPrivateError, match="custom gradient mixes.*with respect to a var"):
        norms(with_kernel(multiplied(MIXED_OF_VARIABLES[name])))


SETS = {
    "sparse": lambda x: tf.sparse.from_dense(x),
    "ragged": lambda x: tf.RaggedTensor.from_tensor(x),
}


@pytest.mark.parametrize("kind", SETS)
def test_values_of_sparse_and_ragged_arguments_are_no_examples(kind):
    """A row of several values would be clipped as several examples."""
    w = tf.Variable(1.0)

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((w * rows.values - 1.0) ** 2)
        return zoo.per_example_gradients(loss, [w], tape).squared_norms()

    with pytest.raises(dp.NotPrivateError, match=r"is sparse or ragged. .*to_tensor\(shape="):
        step(SETS[kind](tf.constant(floats(4, 6))))


class Rows(tf.experimental.ExtensionType):
    values: Union[tf.SparseTensor, tf.RaggedTensor]
    labels: tf.Tensor


class Pair(tf.experimental.ExtensionType):
    rows: Rows


@pytest.mark.parametrize("kind", SETS)
def test_values_of_sparse_and_ragged_fields_are_no_examples(kind):
    w = tf.Variable(1.0)

    @tf.function
    def step(pair):
        with tf.GradientTape() as tape:
            loss = (w * pair.rows.values.values - 1.0) ** 2
        return zoo.per_example_gradients(loss, [w], tape).squared_norms()

    with pytest.raises(dp.NotPrivateError, match="is sparse or ragged"):
        step(Pair(Rows(SETS[kind](tf.constant(floats(4, 6))), tf.zeros([4]))))


def optimizer_of_one_weight():
    """An optimizer, and a function that takes one of its steps with an entry per value."""
    w, optimizer = tf.Variable(1.0), dp.DPSGD(1.0, 1.0)

    def minimize(values):
        with tf.GradientTape() as tape:
            loss = (w * values - 1.0) ** 2
        optimizer.minimize(loss, [w], tape)

    return optimizer, minimize


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("passed", [False, True], ids=["read", "passed"])
def test_values_of_fields_in_a_data_set_are_no_examples(kind, passed):
    optimizer, minimize = optimizer_of_one_weight()

    @tf.function(autograph=False)
    def step(iterator):
        values = next(iterator).values.values
        (tf.function(minimize, autograph=False) if passed else minimize)(values)

    rows = Rows(SETS[kind](tf.constant(floats(4, 6))), tf.zeros([4]))
    with pytest.raises(dp.NotPrivateError, match="is sparse or ragged"):
        step(iter(tf.data.Dataset.from_tensors(rows)))
    assert optimizer.ledger.num_releases == 0


def test_other_fields_hold_the_examples():
    w = tf.Variable(1.0)

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = (w * rows.labels - 1.0) ** 2
        return zoo.per_example_gradients(loss, [w], tape).squared_norms()

    labels = tf.constant(floats(4))
    norms = step(Rows(SETS["ragged"](tf.constant(floats(4, 6))), labels))
    np.testing.assert_allclose(norms, (2 * (labels - 1) * labels) ** 2, rtol=1e-5)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "captured"])
def test_values_that_an_inner_function_receives_are_no_examples(kind, passed):
    optimizer, minimize = optimizer_of_one_weight()

    @tf.function(autograph=False)
    def step(rows):
        if passed:
            tf.function(minimize, autograph=False)(rows.values)
        else:
            tf.function(lambda: minimize(rows.values), autograph=False)()

    with pytest.raises(dp.NotPrivateError, match="is sparse or ragged"):
        step(SETS[kind](tf.constant(floats(4, 6))))
    assert optimizer.ledger.num_releases == 0


@pytest.mark.parametrize("kind", SETS)
def test_sparse_and_ragged_batches_are_refused(kind):
    """In a data set they are one tensor without axes, in which nothing tells the examples apart."""
    inputs = tf.keras.Input([6 if kind == "sparse" else None], **{kind: True})
    dense = tf.sparse.to_dense if kind == "sparse" else lambda x: x.to_tensor(shape=[None, 6])

    def centred(x):
        x = tf.reshape(dense(x), [-1, 6])
        return x - tf.reduce_mean(x, 0)

    x = layers.Lambda(centred, output_shape=(6,))(inputs)
    model = tf.keras.Model(inputs, layers.Dense(3)(x))
    model.compile(dp.DPSGD(1.0, 1.0), tf.keras.losses.MeanSquaredError(reduction="none"))
    x, y = tf.constant(floats(8, 6)), tf.constant(floats(8, 3))
    data = tf.data.Dataset.from_tensor_slices((SETS[kind](x), y)).batch(4)
    with pytest.raises(dp.NotPrivateError, match="is sparse or ragged"):
        model.fit(data, verbose=0)
    assert model.optimizer.ledger.num_releases == 0


def test_a_number_that_the_data_set_made_of_the_batch_is_refused():
    data = tf.data.Dataset.from_tensor_slices(floats(8, 3)).batch(4)
    data = data.map(lambda x: (x, tf.reduce_mean(x)))
    w = tf.Variable(tf.ones([3]))
    optimizer = dp.DPSGD(1.0, 0.0)

    @tf.function
    def step(iterator, center):
        x, mean = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x - (mean if center is None else center), w)
        optimizer.minimize(loss, [w], tape)

    with pytest.raises(dp.NotPrivateError, match="Examples in a batch affect each other"):
        step(iter(data), None)
    step(iter(data), tf.constant(0.5))  # a number that is passed is a setting


COUNTING = {
    "divided by the batch size": lambda x, loss: loss / tf.cast(tf.shape(x)[0], tf.float32),
    "by the size of the data": lambda x, loss: loss / tf.cast(tf.size(x), tf.float32),
    "by a sum of ones": lambda x, loss: loss / tf.reduce_sum(tf.ones_like(loss)),
    "by one less": lambda x, loss: loss / tf.cast(tf.shape(x)[0] - 1, tf.float32),
}
NOT_COUNTING = {
    "plain": lambda x, loss: loss,
    "divided by a sum over another axis": lambda x, loss: (
        loss / tf.reduce_sum(tf.ones_like(x), axis=1)
    ),
    "divided by the width": lambda x, loss: loss / tf.cast(tf.shape(x)[1], tf.float32),
}


def counting_step(scaled, batch_size, **arguments):
    w = tf.Variable(tf.ones([3]))
    optimizer = dp.DPSGD(1.0, 0.0, **arguments)

    @tf.function(input_signature=[tf.TensorSpec([batch_size, 3])])
    def step(x):
        with tf.GradientTape() as tape:
            loss = scaled(x, tf.linalg.matvec(x, w))
        optimizer.minimize(loss, [w], tape)

    step(tf.constant(floats(4, 3)))


@pytest.mark.in_turns
@pytest.mark.parametrize("name", COUNTING)
def test_a_loss_that_counts_a_batch_of_random_size_is_refused(name):
    with pytest.raises(dp.NotPrivateError, match="depends on the number of examples"):
        counting_step(COUNTING[name], None, expected_batch_size=4)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", COUNTING)
def test_a_loss_may_count_batches_of_one_size(name):
    counting_step(COUNTING[name], None)
    counting_step(COUNTING[name], 4, expected_batch_size=4)


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", NOT_COUNTING)
def test_a_loss_that_does_not_count_is_accepted(name):
    counting_step(NOT_COUNTING[name], None, expected_batch_size=4)
