"""Models compiled with an ordinary loss train privately, and the optimizer is the only change."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION

of_keras3 = pytest.mark.skipif(GENERATION != 3, reason="Keras 2 has no such losses, or no rule")
layers, losses = tf.keras.layers, tf.keras.losses
N = 6
X = floats(N, 5)
CLASSES = np.arange(N) % 3
WEIGHTS = np.array([1, 0, 2, 0.5, 0, 1], "float32")
PROBABILITIES = np.abs(floats(N, 3, seed=4)) + 0.1
PROBABILITIES /= PROBABILITIES.sum(axis=1, keepdims=True)

# name: (loss, labels)
LOSSES = {
    "by name": ("sparse_categorical_crossentropy", CLASSES),
    "SparseCategoricalCrossentropy": (losses.SparseCategoricalCrossentropy(), CLASSES),
    "summed": (losses.SparseCategoricalCrossentropy(reduction="sum"), CLASSES),
    "function": (lambda y, p: tf.reduce_sum((y - p) ** 2, axis=-1), PROBABILITIES),
    "BinaryCrossentropy": (losses.BinaryCrossentropy(), np.eye(3)[CLASSES]),
    "BinaryFocalCrossentropy": (losses.BinaryFocalCrossentropy(), np.eye(3)[CLASSES]),
    "CategoricalCrossentropy": (losses.CategoricalCrossentropy(), PROBABILITIES),
    "CategoricalFocalCrossentropy": (losses.CategoricalFocalCrossentropy(), PROBABILITIES),
    "CategoricalHinge": (losses.CategoricalHinge(), np.eye(3)[CLASSES]),
    "CosineSimilarity": (losses.CosineSimilarity(), PROBABILITIES),
    "Huber": (losses.Huber(), PROBABILITIES),
    "KLDivergence": (losses.KLDivergence(), PROBABILITIES),
    "LogCosh": (losses.LogCosh(), PROBABILITIES),
    "MeanAbsoluteError": (losses.MeanAbsoluteError(), PROBABILITIES),
    "MeanAbsolutePercentageError": (losses.MeanAbsolutePercentageError(), PROBABILITIES),
    "MeanSquaredError": (losses.MeanSquaredError(), PROBABILITIES),
    "MeanSquaredLogarithmicError": (losses.MeanSquaredLogarithmicError(), PROBABILITIES),
    "Poisson": (losses.Poisson(), PROBABILITIES),
}
if GENERATION == 3:
    LOSSES |= {
        "CategoricalGeneralizedCrossEntropy": (
            losses.CategoricalGeneralizedCrossEntropy(),
            CLASSES,
        ),
        "Dice of each example": (losses.Dice(axis=1), np.eye(3)[CLASSES]),
        "Tversky of each example": (losses.Tversky(axis=1), np.eye(3)[CLASSES]),
        "mean": (losses.MeanSquaredError(reduction="mean"), PROBABILITIES),
    }


def classifier(**kwargs):
    tf.keras.utils.set_random_seed(1)
    hidden = layers.Dense(4, "tanh", **kwargs)
    return tf.keras.Sequential([tf.keras.Input([5]), hidden, layers.Dense(3, "softmax")])


def after_a_step(model, optimizer, loss, x, y, weights=None, **kwargs):
    model.compile(optimizer, loss, **kwargs)
    model.fit(x, y, sample_weight=weights, batch_size=N, verbose=0)
    return model.get_weights()


def private(**kwargs):
    """Neither clips nor adds noise: what is left is whether the loss was taken apart rightly."""
    return dp.DPSGD(1e6, 0.0, learning_rate=1.0, **kwargs)


def plain(rate=1.0):
    return tf.keras.optimizers.SGD(rate)


def assert_same(ours, keras):
    for a, b in zip(ours, keras):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_without_clipping_and_noise_fit_is_that_of_sgd(name, weighted):
    loss, y = LOSSES[name]
    weights = WEIGHTS if weighted else None
    # What is released is divided by the batch size, even if the loss is a sum.
    rate = 1 / N if name == "summed" else 1.0
    expected = after_a_step(classifier(), plain(rate), loss, X, y, weights)
    assert_same(after_a_step(classifier(), private(), loss, X, y, weights), expected)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weights_weigh_each_example_before_it_is_clipped(one_hot):
    class_weight = {0: 0.25, 1: 1.0, 2: 2.0}
    loss, y = "sparse_categorical_crossentropy", CLASSES
    if one_hot:
        loss, y = "categorical_crossentropy", np.eye(3, dtype="float32")[CLASSES]

    def change(rows, clip, **weights):
        model = classifier()
        model.compile(dp.DPSGD(clip, 0.0, learning_rate=1.0), loss)
        before = model.get_weights()
        model.fit(X[rows], y[rows], batch_size=N, verbose=0, **weights)
        return [b - a for a, b in zip(before, model.get_weights())]

    def norm(gradients):
        return np.sqrt(sum(np.sum(np.square(g)) for g in gradients))

    weighted = [
        [class_weight[label] * g for g in change([row], 1e6)] for row, label in enumerate(CLASSES)
    ]
    norms = np.array([norm(g) for g in weighted])
    clip = float(np.median(norms))
    assert any(norms > 1.01 * clip) and any(norms < 0.99 * clip)
    expected = [sum(min(1, clip / n) * g for n, g in zip(norms, e)) / N for e in zip(*weighted)]
    assert_same(change(range(N), clip, class_weight=class_weight), expected)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", LOSSES)
def test_examples_are_clipped_alone(name):
    loss, y = LOSSES[name]

    def gradient(x, y, clip):
        model = classifier()
        before = model.get_weights()
        after = after_a_step(model, dp.DPSGD(clip, 0.0, learning_rate=1.0), loss, x, y)
        return [a - b for a, b in zip(before, after)]

    def norm(gradients):
        return np.sqrt(sum(np.sum(np.square(g)) for g in gradients))

    few = range(3)
    single = [gradient(X[i : i + 1], y[i : i + 1], 1e6) for i in few]
    clip = float(np.median([norm(g) for g in single]))
    shares = [min(1.0, clip / norm(g)) for g in single]
    expected = [sum(s * g for s, g in zip(shares, each)) / len(few) for each in zip(*single)]
    assert_same(gradient(X[:3], y[:3], clip), expected)


def test_regularizers_and_activity_are_part_of_the_loss():
    def model():
        return classifier(kernel_regularizer="l2", activity_regularizer="l2")

    loss = "sparse_categorical_crossentropy"
    expected = after_a_step(model(), plain(), loss, X, CLASSES)
    assert_same(after_a_step(model(), private(), loss, X, CLASSES), expected)


def two_outputs():
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input([5])
    h = layers.Dense(4, "tanh")(inputs)
    outputs = {"a": layers.Dense(3, "softmax", name="a")(h), "b": layers.Dense(1, name="b")(h)}
    return tf.keras.Model(inputs, outputs)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_have_losses_and_weights_of_their_own(weighted):
    y = {"a": CLASSES, "b": floats(N, 1)}
    loss = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    weights = {"a": WEIGHTS, "b": WEIGHTS[::-1].copy()} if weighted else None
    kwargs = {"loss_weights": {"a": 0.3, "b": 2.0}}
    expected = after_a_step(two_outputs(), plain(), loss, X, y, weights, **kwargs)
    assert_same(after_a_step(two_outputs(), private(), loss, X, y, weights, **kwargs), expected)


def sequences(**kwargs):
    tf.keras.utils.set_random_seed(1)
    embedding = layers.Embedding(7, 4, **kwargs)
    return tf.keras.Sequential([tf.keras.Input([3]), embedding, layers.Dense(3, "softmax")])


TOKENS = np.arange(3 * N).reshape(N, 3) % 7


# Keras 2 gives all tokens of an example its weight. Keras 3 wants an axis for the tokens.
OF_EXAMPLES = WEIGHTS if GENERATION == 2 else WEIGHTS[:, np.newaxis]


def masked_and_pooled():
    """An output for each token, of which those with number 0 are masked, and one for all."""
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input([3], dtype="int32")
    h = layers.Embedding(7, 4, mask_zero=True)(inputs)
    each = layers.TimeDistributed(layers.Dense(3, "softmax"), name="each")(h)
    pooled = layers.GlobalAveragePooling1D()(h)
    return tf.keras.Model(
        inputs, {"each": each, "all": layers.Dense(3, "softmax", name="all")(pooled)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LOSSES if isinstance(LOSSES[n][0], losses.Loss)])
def test_masked_and_weighted_outputs_are_clipped_example_by_example(name):
    found, labels = LOSSES[name]
    loss = type(found).from_config({**found.get_config(), "reduction": "sum"})
    y = {"all": labels, "each": np.stack([labels] * 3, axis=1)}
    weights = {"all": WEIGHTS[::-1] + 0.1, "each": OF_EXAMPLES + 0.1}
    rows = [slice(i, i + 1) for i in range(N)]

    def gradients(clip, parts):
        model = masked_and_pooled()
        optimizer = dp.DPSGD(clip, 0.0, expected_batch_size=1, learning_rate=1.0)
        model.compile(optimizer, {"all": loss, "each": loss}, loss_weights={"all": 0.5, "each": 2})
        before, made = model.get_weights(), []
        for part in parts:
            model.set_weights(before)
            of_part = ({k: v[part] for k, v in z.items()} for z in (y, weights))
            model.train_on_batch(TOKENS[part], *of_part)
            made.append([a - b for a, b in zip(before, model.get_weights())])
        return made

    single = gradients(1e6, rows)
    norms = [np.sqrt(sum(np.sum(np.square(g)) for g in each)) for each in single]
    clip = float(np.median(norms))
    shares = [min(1.0, clip / norm) for norm in norms]
    expected = [sum(s * g for s, g in zip(shares, each)) for each in zip(*single)]
    assert_same(gradients(clip, [slice(N)])[0], expected)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weights", [None, OF_EXAMPLES, np.abs(floats(N, 3))])
def test_losses_of_tokens_are_averaged_by_example(weights):
    args = "sparse_categorical_crossentropy", TOKENS, TOKENS % 3, weights
    expected = after_a_step(sequences(), plain(), *args)
    assert_same(after_a_step(sequences(), private(), *args), expected)


@of_keras3
def test_weights_of_examples_that_meet_the_tokens_of_others_are_refused():
    """Keras 3 aligns weights [3] with the tokens of losses [3, 3], and not with the examples."""
    args = "sparse_categorical_crossentropy", TOKENS[:3], TOKENS[:3] % 3, WEIGHTS[:3]
    after_a_step(sequences(), plain(), *args)
    with pytest.raises(
        dp.NotPrivateError, match="[Ee]xamples in a batch affect each other.*by broadcasting"
    ):
        after_a_step(sequences(), private(), *args)


def test_losses_that_outputs_of_one_number_broadcast_are_refused_with_a_fix():
    def focal(y, p):
        return (1 - p) ** 2 * losses.binary_crossentropy(y, p)  # [B, 1] * [B]

    model = tf.keras.Sequential([tf.keras.Input([5]), tf.keras.layers.Dense(1, "sigmoid")])
    with pytest.raises(dp.NotPrivateError, match=r"by broadcasting.*Drop the last axis"):
        after_a_step(model, private(), focal, X, np.float32(CLASSES == 0))


def test_a_mean_over_the_valid_tokens_of_the_batch_is_refused_with_a_fix():
    model = sequences(mask_zero=True)
    with pytest.raises(dp.NotPrivateError, match='count of its own.*reduction="none"'):
        after_a_step(model, private(), "sparse_categorical_crossentropy", TOKENS, TOKENS % 3)


@pytest.mark.parametrize("loss", [losses.Hinge(), losses.SquaredHinge()])
def test_hinge_losses_decide_by_the_batch_whether_labels_are_binary_and_are_refused(loss):
    with pytest.raises(dp.NotPrivateError, match="[Ee]xamples in a batch affect each other"):
        after_a_step(classifier(), private(), loss, X, np.eye(3)[CLASSES])


# The numerator or the denominator is found first.
QUOTIENT = "divides by numbers that depend on the examples|[Ee]xamples in a batch affect each other"
NOT_OF_EXAMPLES = {
    "Dice": QUOTIENT,
    "Tversky": QUOTIENT,
    "Circle": "[Ee]xamples in a batch affect each other",
}


@of_keras3
@pytest.mark.parametrize("name", NOT_OF_EXAMPLES)
def test_losses_of_whole_batches_are_refused(name):
    y = CLASSES if name == "Circle" else np.eye(3)[CLASSES]
    with pytest.raises(dp.NotPrivateError, match=NOT_OF_EXAMPLES[name]):
        after_a_step(classifier(), private(), getattr(losses, name)(), X, y)


@of_keras3
def test_a_mean_divided_by_the_sum_of_weights_is_refused():
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with pytest.raises(dp.NotPrivateError, match="divides by numbers that depend on the examples"):
        after_a_step(classifier(), private(), loss, X, PROBABILITIES, WEIGHTS)


@of_keras3
def test_ctc_is_refused():
    """TensorFlow computes it in a loop over time with a gradient that nothing tells apart."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input([4, 5]), layers.Dense(3)])
    labels = np.array([[1, 2], [2, 1], [1, 0], [2, 2], [1, 1], [2, 0]])
    with pytest.raises(
        dp.NotPrivateError, match="CTC loss is not supported, .*docs/troubleshooting.md has one"
    ):
        after_a_step(model, private(), losses.CTC(), floats(N, 4, 5), labels)


@pytest.mark.slow_on(2)
def test_a_row_of_weight_zero_is_absent_from_terms_without_weights():
    def model():
        return classifier(activity_regularizer="l2")

    args = X, CLASSES, WEIGHTS
    optimizer = private(expected_batch_size=4)
    ours = after_a_step(model(), optimizer, "sparse_categorical_crossentropy", *args)
    kept = WEIGHTS != 0
    args = X[kept], CLASSES[kept], WEIGHTS[kept]
    without = private(expected_batch_size=4)
    assert_same(ours, after_a_step(model(), without, "sparse_categorical_crossentropy", *args))


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kwargs", [{"jit_compile": True}, {"steps_per_execution": 2}])
def test_modes_of_keras_train_alike(kwargs):
    def trained(**kwargs):
        model = classifier(kernel_regularizer="l2")
        model.compile(dp.DPSGD(0.1, 0.0), "sparse_categorical_crossentropy", **kwargs)
        model.fit(X, CLASSES, batch_size=3, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same(trained(**kwargs), trained())


@pytest.mark.slow_on(2)
def test_replicas_take_the_step_of_a_single_device():
    def trained(strategy):
        with strategy.scope():
            model = classifier(kernel_regularizer="l2", activity_regularizer="l2")
            model.compile(dp.DPSGD(0.1, 0.0, learning_rate=1.0), "sparse_categorical_crossentropy")
        model.fit(X, CLASSES, batch_size=N, verbose=0)
        return model.get_weights()

    one = trained(tf.distribute.get_strategy())
    assert_same(trained(catalogue.mirrored()), one)
