"""What keeps the examples of a batch apart is accepted, and its gradients are right."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import independent_models as apart
from tests.helpers import zoo
from tf_adaptive_dp._keras.generation import GENERATION

layers = tf.keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:No rule covers")
CASES = {name: shape for shape, makers in apart.LAYERS.items() for name in makers}
XFAIL = {"LocallyConnected1D by product": "SparseMatMul is not known"}
# Recurrent layers whose Jacobian takes its time.
SLOW = {
    "Bidirectional",
    "LSTM sequences",
    "ConvLSTM1D",
    "ConvLSTM2D",
    "GRU backwards",
    "LSTM time-major",
    "RNN of stacked cells",
}


def _marks(name):
    if GENERATION == 3 and name in apart.OF_KERAS_2:
        return [pytest.mark.skip(reason="Keras 3 has no such layer")]
    marks = [pytest.mark.xfail(reason=XFAIL[name])] if name in XFAIL else []
    return [*marks, pytest.mark.slow] if name in SLOW else marks


def _cases(names):
    return [pytest.param(n, marks=_marks(n)) for n in names]


@pytest.fixture(params=["graph", pytest.param("graph of fixed size", marks=pytest.mark.slow)])
def mode(request):
    """Whether the size of the batch is known while the step is traced."""
    return request.param


def check(problem, mode, compare=True):
    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    actual = zoo.in_mode(mode, step, problem.batch)(*problem.batch)
    assert actual.shape == [4]
    if compare:
        rows = zoo.batch_of_one_gradients(problem)
        expected = sum((r.reshape(len(r), -1) ** 2).sum(1) for r in rows)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7)


def network(hidden, x, before=True):
    """A dense layer, `hidden`, and three logits."""
    first = [layers.Dense(x.shape[-1], activation="tanh")] if before else []
    model = tf.keras.Sequential([*first, hidden, layers.Flatten(), layers.Dense(3)])
    return zoo.classifier(model, x)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", _cases(CASES))
def test_layers(name, mode):
    shape, random = CASES[name], name in apart.RANDOM
    hidden = apart.LAYERS[shape][name]()
    check(network(hidden, zoo.floats(4, *shape), before=not random), mode, compare=not random)


def test_the_same_block_of_each_example(mode):
    """`tf.image.random_crop` draws where the block begins on the batch axis, too: at 0."""

    def crop(x):
        return tf.ensure_shape(tf.image.random_crop(x, [tf.shape(x)[0], 2, 3]), [None, 2, 3])

    check(network(layers.Lambda(crop, output_shape=(2, 3)), zoo.floats(4, 4, 4)), mode, False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reduce", ["unsorted_segment_mean", "unsorted_segment_max", "segment_sum"])
def test_messages_between_the_nodes_of_each_graph(reduce, mode):
    """Graphs with the same edges, as in Keras's own example of a traffic forecast."""
    sources, targets = [2, 0, 1, 0], [0, 1, 1, 2]

    def pass_on(h):
        messages = tf.gather(tf.transpose(h, [1, 0, 2]), sources)
        number = [3] if reduce.startswith("unsorted") else []
        received = getattr(tf.math, reduce)(messages, targets, *number)
        return tf.ensure_shape(tf.transpose(received, [1, 0, 2]), [None, 3, 4])

    check(network(layers.Lambda(pass_on, output_shape=(3, 4)), zoo.floats(4, 3, 4)), mode)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", _cases(apart.PREPROCESSING))
def test_layers_of_integers(name, mode):
    x = np.random.default_rng(0).integers(0, 4, [4, 4])
    to_floats = layers.Lambda(lambda x: tf.cast(x, tf.float32))
    hidden = tf.keras.Sequential([apart.PREPROCESSING[name](), to_floats])
    check(network(hidden, x, before=False), mode)


@pytest.mark.in_turns
@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", _cases(apart.MERGES))
def test_layers_of_two_inputs(name, mode):
    inputs = tf.keras.Input([4, 4])
    pair = [layers.Dense(4, activation="tanh")(inputs), layers.Dense(4)(inputs)]
    outputs = layers.Dense(3)(layers.Flatten()(apart.MERGES[name]()(pair)))
    check(zoo.classifier(tf.keras.Model(inputs, outputs), zoo.floats(4, 4, 4)), mode)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", _cases(apart.LOSSES))
def test_losses(name, mode):
    kernel = tf.Variable(zoo.floats(4, 4, seed=2))

    def losses(x, y):
        outputs = tf.matmul(x, kernel)
        if name in ("Poisson", "KLDivergence", "MeanSquaredLogarithmicError"):
            outputs = tf.nn.softmax(outputs)
        return apart.LOSSES[name](y, outputs)

    check(
        zoo.Problem([kernel], losses, (zoo.floats(4, 4), np.eye(4, dtype="float32")[[1, 0, 3, 1]])),
        mode,
    )
