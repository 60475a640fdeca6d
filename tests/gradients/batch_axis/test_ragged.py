"""Texts that become words, and categories that become counts: exact, and nothing that looks alike.

Both read numbers of the whole batch on the way: the largest category, the number of words, where
each example begins. These may only determine what is the same for all.
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp.gradients.api import per_example_gradients

layers = tf.keras.layers
B = 4
TEXTS = np.array([["The world!"], ["a b the the end"], [""], ["World; a world"]], object)
WORDS = ["the", "world", "b"]
STRINGS = np.array([["b", "a"], ["?", "b"], ["a", "a"], ["c", "b"]], object)
NUMBERS = np.array([[3, 5], [8, 3], [9, 5], [3, 3]])
REALS = np.array([[0.1, 0.9], [1.5, 0.1], [2.5, 3.0], [-1.0, 0.1]], "float32")
IDF = {"idf_weights": [0.1, 0.2, 0.3]}


def embedded(layer):
    """Follows a layer that returns indices by an embedding."""
    table = layers.Embedding(12, 3)
    return lambda x: tf.reduce_sum(table(layer(x)) * tf.constant([1.0, 2.0, 3.0]), axis=1)


def strings(**kwargs):
    return lambda: layers.StringLookup(vocabulary=["a", "b", "c"], **kwargs)


def numbers(**kwargs):
    return lambda: layers.IntegerLookup(vocabulary=[3, 5, 8], **kwargs)


def texts(**kwargs):
    return lambda: layers.TextVectorization(vocabulary=WORDS, **kwargs)


def bins(**kwargs):
    return lambda: layers.Discretization(bin_boundaries=[0.0, 1.0, 2.0], **kwargs)


def categories(mode):
    return lambda: layers.CategoryEncoding(num_tokens=10, output_mode=mode)


def crossed(**kwargs):
    """Crosses two columns of the input."""

    def make():
        layer = layers.HashedCrossing(7, **kwargs)
        return lambda x: layer((x[:, :1], x[:, 1:]))

    return make


# Layers with an input.
CASES = {
    "strings, crossed": (crossed(output_mode="one_hot"), STRINGS),
    "numbers, crossed": (crossed(output_mode="one_hot"), NUMBERS),
    "strings, crossed, indices": (lambda: embedded(crossed()()), STRINGS),
    "texts, counted": (texts(output_mode="count"), TEXTS),
    "numbers, one hot": (numbers(output_mode="one_hot"), NUMBERS[:, :1]),
    "texts, indices": (
        lambda: embedded(texts(output_sequence_length=3)()),
        TEXTS,
    ),
    "texts, pairs of words": (texts(output_mode="count", ngrams=2), TEXTS),
    "texts, indices of pairs": (
        lambda: embedded(texts(ngrams=2, output_sequence_length=4)()),
        TEXTS,
    ),
    "texts, several hot": (texts(output_mode="multi_hot"), TEXTS),
    "texts, weighed": (texts(output_mode="tf_idf", **IDF), TEXTS),
    "texts, neither lowered nor split": (
        texts(output_mode="multi_hot", standardize=None, split=None),
        np.array([["the", "b"], ["x", "the"], ["b", "b"], ["", "world"]], object),
    ),
    "strings, one hot": (strings(output_mode="one_hot"), STRINGS[:, :1]),
    "strings, several hot": (strings(output_mode="multi_hot"), STRINGS),
    "strings, counted": (strings(output_mode="count"), STRINGS),
    "strings, weighed": (strings(output_mode="tf_idf", **IDF), STRINGS),
    "strings, indices": (lambda: embedded(strings()()), STRINGS),
    "numbers, several hot": (numbers(output_mode="multi_hot"), NUMBERS),
    "numbers, counted": (numbers(output_mode="count"), NUMBERS),
    "numbers, weighed": (numbers(output_mode="tf_idf", **IDF), NUMBERS),
    "bins, one hot": (bins(output_mode="one_hot"), REALS[:, :1]),
    "bins, several hot": (bins(output_mode="multi_hot"), REALS),
    "bins, counted": (bins(output_mode="count"), REALS),
    "bins, indices": (lambda: embedded(bins()()), REALS),
    "categories, one hot": (categories("one_hot"), NUMBERS[:, :1]),
    "categories, several hot": (categories("multi_hot"), NUMBERS),
    "categories, counted": (categories("count"), NUMBERS),
}


def searched(losses, variables, x):
    """Squared norms and the sum of the library's gradients, in a step for batches of any size."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = losses(x)
        source = per_example_gradients(loss, variables, tape, "traced", expected_batch_size=7.0)
        if source.loss.counts_batch:
            raise dp.NotPrivateError("The loss depends on the size of the batch.")
        return source.squared_norms(), source.weighted_sum(tf.range(1.0, B + 1))

    return step.get_concrete_function(tf.TensorSpec([None, *x.shape[1:]], x.dtype))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CASES)
def test_each_example_is_encoded_alone(name):
    make, array = CASES[name]
    tf.keras.utils.set_random_seed(1)
    layer, head, x = make(), layers.Dense(1), tf.constant(array)

    def losses(x):
        encoded = tf.cast(layer(x), tf.float32)
        return tf.square(head(encoded)[:, 0] - 0.3)

    losses(x[:1])
    variables = [v.value if GENERATION == 3 else v for v in head.trainable_variables]
    norms, sums = searched(losses, variables, x)(x)
    alone = []
    for i in range(B):
        with tf.GradientTape() as tape:
            loss = losses(x[i : i + 1])[0]
        alone.append([g.numpy() for g in tape.gradient(loss, variables)])
    expected = [sum(np.sum(g**2) for g in each) for each in alone]
    np.testing.assert_allclose(norms, expected, rtol=1e-5, atol=1e-7)
    assert np.ptp(expected) > 1e-3
    for total, column in zip(sums, zip(*alone)):
        weighed = np.tensordot(np.arange(1.0, B + 1), np.stack(column), axes=1)
        np.testing.assert_allclose(total, weighed, rtol=1e-4, atol=1e-6)


def split(x):
    return tf.strings.split(tf.strings.lower(x[:, 0]))


def hashed(words):
    return tf.strings.to_hash_bucket_fast(words, 5)


def ids(x):
    """Ragged indices of words."""
    words = split(x)
    return words.with_values(hashed(words.values))


def dense(ragged, length=3, **kwargs):
    return tf.cast(ragged.to_tensor(shape=[None, length], **kwargs), tf.float32)


def counts(values, **kwargs):
    found = tf.math.bincount(values, axis=-1, dtype=tf.float32, **kwargs)
    found.set_shape([None, 5])  # as Keras's layers do
    return found


def moved(x):
    """The words of each example in the row of the next one."""
    found = ids(x)
    rows = tf.roll(found.value_rowids(), 1, 0)
    return tf.RaggedTensor.from_value_rowids(found.values, rows, found.nrows(), validate=False)


def of_others(x):
    """The words of some texts, distributed as those of other texts are."""
    return tf.RaggedTensor.from_row_splits(
        ids(tf.reverse(x, [1])[:, :1] + " a").values, ids(x).row_splits, validate=False
    )


def shifted(x):
    found = ids(x)
    splits = tf.concat([[0], tf.cumsum(found.row_lengths(), exclusive=True)], 0)
    return tf.RaggedTensor.from_row_splits(found.values, splits, validate=False)


def of_all_words(x):
    """Pairs of words across the borders of texts."""
    words = split(x).values
    pairs = tf.strings.join([words, tf.roll(words, 1, 0)])
    return split(x).with_values(hashed(pairs))


def cross(*columns):
    return tf.sparse.cross_hashed([*columns], 7)


def as_numbers(found, **kwargs):
    return tf.cast(tf.ensure_shape(tf.sparse.to_dense(found, **kwargs), [None, 1]), tf.float32)


def crossed_elsewhere(x):
    """Crossed features in the row of the next example."""
    found = cross(x, x)
    indices = tf.roll(found.indices, 1, 0)
    return as_numbers(
        tf.SparseTensor(indices, found.values, found.dense_shape), validate_indices=False
    )


# Each returns numbers [B, any]; they look like what is accepted.
LEAKS = {
    "crossed with other texts": lambda x: as_numbers(cross(x, tf.reverse(x, [0]))),
    "crossed with public texts of each row": lambda x: as_numbers(
        cross(x, tf.constant([["a"], ["b"], ["c"], ["d"]]))
    ),
    "crossed, in the next row": crossed_elsewhere,
    "places of crossed texts": lambda x: (
        tf.cast(cross(x, x).indices, tf.float32) * dense(ids(x), 2)
    ),
    "the number of crossed texts": lambda x: (
        dense(ids(x)) * tf.cast(cross(x, x).dense_shape[0], tf.float32)
    ),
    "crossed, filled up with another": lambda x: as_numbers(
        cross(x, x), default_value=cross(x, x).values[0]
    ),
    "crossed words": lambda x: as_numbers(cross(tf.concat([x, x], 1), x)),
    "padded to the longest text": lambda x: dense(ids(x), None),
    "counted up to the largest of the batch": lambda x: counts(ids(x), minlength=2, maxlength=5),
    "filled up with the largest of the batch": lambda x: dense(
        ids(x), default_value=tf.reduce_max(ids(x).values)
    ),
    "divided by the number of words": lambda x: (
        dense(ids(x)) / tf.cast(tf.size(ids(x).values), tf.float32)
    ),
    "divided by the largest number": lambda x: (
        dense(ids(x)) / tf.cast(tf.reduce_max(ids(x).values) + 1, tf.float32)
    ),
    "the longest text": lambda x: (
        dense(ids(x)) + tf.cast(tf.reduce_max(ids(x).row_lengths()), tf.float32)
    ),
    "the number of texts": lambda x: dense(ids(x)) * tf.cast(ids(x).nrows(), tf.float32),
    "words in the next row": lambda x: dense(moved(x)),
    "words counted in the next row": lambda x: counts(moved(x), minlength=5, maxlength=5),
    "words in the rows of other texts": lambda x: dense(of_others(x)),
    "rows that begin too early": lambda x: dense(shifted(x)),
    "words counted from where rows begin too early": lambda x: counts(
        shifted(x), minlength=5, maxlength=5
    ),
    "words in another order": lambda x: dense(ids(x).with_values(tf.reverse(ids(x).values, [0]))),
    "sums over all words": lambda x: dense(ids(x).with_values(tf.cumsum(ids(x).values))),
    "pairs across texts": lambda x: dense(of_all_words(x)),
    "words that occur once": lambda x: dense(ids(x).with_values(tf.unique(split(x).values).idx)),
    "places of words": lambda x: dense(
        ids(x).with_values(tf.range(tf.size(ids(x).values, out_type=tf.int64)))
    ),
    "places of texts": lambda x: dense(ids(x).with_values(ids(x).value_rowids())),
    "one hot up to the largest of the batch": lambda x: tf.reduce_sum(
        tf.one_hot(hashed(x[:, 0]), tf.cast(tf.reduce_max(hashed(x[:, 0])), tf.int32) + 1), 1
    )[:, tf.newaxis],
    "categories counted up to the largest": lambda x: counts(hashed(x), minlength=4, maxlength=5),
    "categories counted over the batch": lambda x: tf.math.bincount(
        tf.cast(hashed(x[:, 0]), tf.int32), minlength=5, maxlength=5, dtype=tf.float32
    ),
    "weights of all words": lambda x: counts(
        ids(x),
        weights=ids(x).with_values(tf.cumsum(tf.ones_like(ids(x).values, tf.float32))),
        minlength=5,
        maxlength=5,
    ),
}


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", LEAKS)
def test_what_looks_alike_and_leaks_is_refused(name):
    weight = tf.Variable(0.5)

    def losses(x):
        return tf.square(weight * tf.reduce_sum(LEAKS[name](x), axis=-1) - 1.0)

    with pytest.raises(dp.NotPrivateError):
        searched(losses, [weight], tf.constant(TEXTS))


def test_the_same_without_the_leak_is_accepted():
    weight = tf.Variable(0.5)
    for encode in (
        lambda x: as_numbers(cross(x, x)),
        lambda x: dense(ids(x)),
        lambda x: counts(ids(x), minlength=5, maxlength=5),
        lambda x: counts(ids(x), minlength=5, maxlength=5, binary_output=True),
        lambda x: counts(hashed(x), minlength=5, maxlength=5),
    ):

        def losses(x, encode=encode):
            return tf.square(weight * tf.reduce_sum(encode(x), axis=-1) - 1.0)

        norms, _ = searched(losses, [weight], tf.constant(TEXTS))(tf.constant(TEXTS))
        alone = [losses(tf.constant(TEXTS[i : i + 1])) for i in range(B)]
        assert norms.shape == [B] and len(alone) == B


def test_the_message_about_padding_says_what_to_do():
    what = r"longest of the batch.*output_sequence_length.*to_tensor\(shape="
    with pytest.raises(dp.NotPrivateError, match=what):
        weight = tf.Variable(0.5)
        searched(
            lambda x: weight * tf.reduce_sum(dense(ids(x), None), 1), [weight], tf.constant(TEXTS)
        )


def test_a_recurrent_layer_is_not_blamed_for_padding():
    vectorize = tf.keras.layers.TextVectorization(vocabulary=["a", "b"])
    inputs = tf.keras.Input([1], dtype="string")
    embedded = tf.keras.layers.Embedding(4, 3, mask_zero=True)(vectorize(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.GRU(1)(embedded))
    model.compile(dp.DPSGD(1.0, 1.0), "mse")
    text = tf.constant([["a b"], ["b"]])
    with pytest.raises(dp.NotPrivateError, match="text_vectorization.*output_sequence_length"):
        model.fit(text, tf.zeros([2, 1]), verbose=0)
