"""Token frequencies and TF-IDF scores as preconditioners of the input layer."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp._keras.generation import GENERATION
from tf_adaptive_dp._keras.variables import path_of

PUBLIC = {"provenance": "public"}
DOCUMENTS = [[0, 2, 2], [2], [3, 0], []]
BAGS = np.array([[1, 0, 2, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])


def ragged(documents):
    return tf.ragged.constant(documents, dtype=tf.int64)


@pytest.mark.parametrize(
    "corpus, num_tokens",
    [
        (DOCUMENTS, 5),
        (ragged(DOCUMENTS), 5),
        (tf.data.Dataset.from_tensor_slices(ragged(DOCUMENTS)).batch(3), 5),
        (tf.data.Dataset.from_tensor_slices(ragged(DOCUMENTS)).map(lambda r: (r, 1)), 5),
        (BAGS, None),
        (BAGS.tolist(), None),
        (BAGS.astype("float32"), None),
        (tf.sparse.from_dense(BAGS), None),
        (tf.data.Dataset.from_tensor_slices((BAGS, np.arange(4))).batch(3), None),
        (tf.data.Dataset.from_tensor_slices(BAGS), None),
    ],
)
def test_a_corpus_is_counted_in_whatever_form_it_comes(corpus, num_tokens):
    found = dp.side_information.token_counts(corpus, num_tokens)
    np.testing.assert_array_equal(found.counts, [2, 0, 3, 1, 0])
    np.testing.assert_array_equal(found.document_counts, [2, 0, 2, 1, 0])
    assert found.num_documents == 4


def test_arrays_of_ids_are_sequences_of_one_length():
    found = dp.side_information.token_counts(np.array([[1, 1, 0], [2, 1, 0]]), num_tokens=4)
    assert found.counts.tolist() == [2, 3, 1, 0] and found.document_counts.tolist() == [2, 2, 1, 0]


@pytest.mark.parametrize(
    "corpus, num_tokens, error, match",
    [
        ([], None, ValueError, "at least one document"),
        ([[1, 5]], 5, ValueError, "whole numbers from 0 to 4.*5"),
        ([[-1, 0]], 5, ValueError, "whole numbers from 0 to 4.*-1"),
        ([[0.5]], 5, ValueError, "whole numbers from 0 to 4.*float64"),
        ([["a", "b"]], 5, TypeError, "Look up words in the vocabulary"),
        ([[1, 2], [1]], None, ValueError, "one length.*Pass `num_tokens`"),
        ([[1, -2]], None, ValueError, "at least 0.*-2"),
        ([[np.nan]], None, ValueError, "finite.*nan"),
        (np.zeros([2, 2, 2]), None, ValueError, r"documents with one axis.*\(2, 2, 2\)"),
        (np.zeros([3]), None, ValueError, r"documents with one axis.*\(3,\)"),
        (tf.data.Dataset.from_tensors([1]).repeat(), 5, ValueError, "must end"),
        ([[1]], 0, ValueError, "`num_tokens` must be at least 1"),
    ],
)
def test_bad_corpora_are_refused(corpus, num_tokens, error, match):
    with pytest.raises(error, match=match):
        dp.side_information.token_counts(corpus, num_tokens)


def test_frequencies_are_proportional_to_the_counts():
    counts = np.array([0, 9, 99, 999])
    found = dp.side_information.token_frequencies(counts, cap=500, floor=5, divisor=10, **PUBLIC)
    np.testing.assert_allclose(found.values, [0.5, 1, 10, 50])
    np.testing.assert_allclose(
        dp.side_information.token_frequencies(counts, **PUBLIC).values, counts + 1
    )
    np.testing.assert_allclose(
        dp.side_information.token_frequencies(counts[1:], offset=0, **PUBLIC).values, counts[1:]
    )


def test_the_multiplier_of_the_authors_is_a_floor():
    counts = np.array([1e6, 5e4, 300.0, 20.0, 0.0])
    found = dp.side_information.token_frequencies(
        counts, floor=1e6 / 1e4, divisor=1e6 / 100, offset=1e-9, **PUBLIC
    )
    expected = np.minimum(1e6 / (counts + 1e-9), 1e4) / 100
    np.testing.assert_allclose(1 / found.values, expected, rtol=1e-6)


def test_counts_of_a_corpus_are_taken_as_they_come():
    found = dp.side_information.token_frequencies(
        dp.side_information.token_counts(DOCUMENTS, num_tokens=5), **PUBLIC
    )
    np.testing.assert_allclose(found.values, [3, 1, 4, 2, 1])


def test_frequencies_of_a_vocabulary_are_in_its_order():
    counts = {"the": 100, "film": 7, "unused": 3}
    words = ["", "[UNK]", "film", "the"]
    found = dp.side_information.token_frequencies(counts, vocabulary=words, **PUBLIC)
    np.testing.assert_allclose(found.values, [1, 1, 8, 101])


def test_tf_idf_is_that_of_scikit_learn_without_norms():
    """TfidfTransformer(norm=None) on BAGS: idf = ln(5 / (1 + df)) + 1."""
    idf = np.log(5 / (1 + np.array([2, 0, 2, 1, 0]))) + 1
    mean = (BAGS * idf).mean(0)
    found = dp.side_information.tf_idf(
        dp.side_information.token_counts(BAGS), cap=1e3, divisor=0.5, **PUBLIC
    )
    expected = np.divide(0.5, mean, out=np.full(5, 1e3), where=mean > 0)
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)
    offset = dp.side_information.tf_idf(mean, offset=0.25, floor=0.9, **PUBLIC)
    np.testing.assert_allclose(offset.values, np.maximum(1 / (mean + 0.25), 0.9), rtol=1e-6)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (
            lambda: dp.side_information.token_frequencies([1, -1], **PUBLIC),
            ValueError,
            "at least 0.*token 1",
        ),
        (
            lambda: dp.side_information.token_frequencies([1, np.nan], **PUBLIC),
            ValueError,
            "finite.*nan for token",
        ),
        (
            lambda: dp.side_information.token_frequencies([1, np.inf], **PUBLIC),
            ValueError,
            "finite.*inf for token",
        ),
        (
            lambda: dp.side_information.token_frequencies([[1]], **PUBLIC),
            ValueError,
            r"vector \[V\].*\(1, 1\)",
        ),
        (
            lambda: dp.side_information.token_frequencies([], **PUBLIC),
            ValueError,
            r"vector \[V\].*\(0,\)",
        ),
        (
            lambda: dp.side_information.token_frequencies("abc", **PUBLIC),
            TypeError,
            "vector of numbers.*'abc'",
        ),
        (
            lambda: dp.side_information.token_frequencies([0, 1], offset=0, **PUBLIC),
            ValueError,
            "A = 0 for token 0",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], offset=-1, **PUBLIC),
            ValueError,
            "`offset`",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], divisor=0, **PUBLIC),
            ValueError,
            "`divisor`.*greater",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], cap=0, **PUBLIC),
            ValueError,
            "`cap`.*greater than 0",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], cap=-2, **PUBLIC),
            ValueError,
            "`cap`.*greater than 0",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], floor=0, **PUBLIC),
            ValueError,
            "`floor`.*greater",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], floor=3, cap=2, **PUBLIC),
            ValueError,
            "at most `cap`",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], divisor=1e300, **PUBLIC),
            ValueError,
            "A = 2e-300",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], variable=3, **PUBLIC),
            TypeError,
            "`variable`.*=3",
        ),
        (
            lambda: dp.side_information.token_frequencies({"a": 1}, **PUBLIC),
            ValueError,
            "`vocabulary` defines",
        ),
        (
            lambda: dp.side_information.token_frequencies([1], vocabulary=["a"], **PUBLIC),
            ValueError,
            "`vocabulary` defines",
        ),
        (
            lambda: dp.side_information.token_frequencies({"a": 1}, vocabulary=["b"], **PUBLIC),
            ValueError,
            "None of the words",
        ),
        (
            lambda: dp.side_information.token_frequencies(
                {"a": 1}, vocabulary=["a", "a"], **PUBLIC
            ),
            ValueError,
            r"each token once.*\['a'\]",
        ),
        (
            lambda: dp.side_information.tf_idf([0.5, 0.0], **PUBLIC),
            ValueError,
            r"pass `cap` .*scores\[1\] = 0",
        ),
        (
            lambda: dp.side_information.tf_idf([0.5, -1.0], **PUBLIC),
            ValueError,
            "at least 0.*token 1",
        ),
        (
            lambda: dp.side_information.tf_idf(
                dp.side_information.TokenCounts(np.ones(2), np.ones(3), 4), **PUBLIC
            ),
            ValueError,
            "`document_counts` must have one number per token",
        ),
        (
            lambda: dp.side_information.tf_idf(
                dp.side_information.TokenCounts(np.ones(2), 5 * np.ones(2), 4), **PUBLIC
            ),
            ValueError,
            "at most `num_documents`",
        ),
        (
            lambda: dp.side_information.token_frequencies([1]),
            dp.NotPrivateError,
            "`provenance` must say",
        ),
        (
            lambda: dp.side_information.tf_idf([1.0], provenance="private"),
            dp.NotPrivateError,
            "`provenance` must",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()


def bag_model(size=6, hidden=4):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.Input([size]),
            tf.keras.layers.Dense(hidden, name="words"),
            tf.keras.layers.Dense(3, name="logits"),
        ]
    )


def sequence_model(size=6):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.Input([5]),
            tf.keras.layers.Embedding(size, 4, name="table"),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(3, name="logits"),
        ]
    )


COUNTS = np.array([50, 3, 0, 7, 20, 1])


def optimizer(**kwargs):
    information = dp.side_information.token_frequencies(
        COUNTS, cap=30, divisor=4, **{**PUBLIC, **kwargs}
    )
    return dp.AdaDPS(information, 0.5, 0.0, learning_rate=1.0, seed=1)


def state_shapes(made):
    return [tuple(s.shape) for s in made.side_information_state[0]]


@pytest.mark.parametrize("make", [bag_model, sequence_model])
def test_the_first_variable_gets_one_number_a_row_and_no_other_is_touched(make):
    model, made = make(), optimizer()
    made.build(model.trainable_variables)
    scales, shift = made._preconditioning.scale_and_shift(made, model.trainable_variables)
    expected = (4 / np.minimum(COUNTS + 1, 30))[:, np.newaxis]
    np.testing.assert_allclose(scales[0], expected, rtol=1e-6)
    assert shift is None and all(float(s) == 1.0 and s.shape.rank == 0 for s in scales[1:])
    assert state_shapes(made) == [(6, 1)] + [()] * (len(model.trainable_variables) - 1)


def test_a_variable_can_be_chosen_by_name():
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(6, name="a")])
    model.add(tf.keras.layers.Dense(3, name="b"))
    for name in ("b/kernel", "b/kernel:0"):
        made = optimizer(variable=name)
        made.build(model.trainable_variables)
        assert state_shapes(made) == [(), (), (6, 1), ()]
    with pytest.raises(ValueError, match=r"Candidates: \S*a/bias \(6,\), \S*b/kernel \(6, 3\)\. "):
        optimizer().build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"Received: 'a/kernel', .*a/kernel \(2, 6\), \S*a/bias"):
        optimizer(variable="a/kernel").build(model.trainable_variables)
    with pytest.raises(ValueError, match="Received: 'c/kernel'"):
        optimizer(variable="c/kernel").build(model.trainable_variables)
    with pytest.raises(ValueError, match="Candidates: none. Received: the first of them"):
        optimizer().build(bag_model(5).trainable_variables[:1])


def inputs(make):
    generator = np.random.default_rng(5)
    if make is bag_model:
        return generator.poisson(0.7, [16, 6]).astype("float32"), generator.integers(0, 3, 16)
    return generator.integers(0, 6, [16, 5]), generator.integers(0, 3, 16)


def loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("make", [bag_model, sequence_model])
def test_training_is_that_of_the_wide_preconditioner(make):
    values = np.minimum(COUNTS + 1, 30)[:, np.newaxis] / 4
    # Keras 3 numbers the models in front.
    name = "/".join(path_of(make().trainable_variables[0]).split("/")[-2:])
    wide = dp.side_information.FixedPreconditioner(
        {name: np.broadcast_to(values, [6, 4])}, **PUBLIC
    )
    trained = []
    for made in (optimizer(), dp.AdaDPS(wide, 0.5, 0.0, learning_rate=1.0, seed=1), None):
        model = make()
        made = made or dp.DPSGD(0.5, 0.0, learning_rate=1.0, seed=1)
        model.compile(made, loss=loss())
        model.fit(*inputs(make), batch_size=8, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for a, b in zip(*trained[:2]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(trained[0], trained[2])) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix",
    [
        ".keras",
        ".h5",
        pytest.param(
            "",
            marks=pytest.mark.skipif(
                GENERATION == 3, reason="Keras 3 does not write the SavedModel format"
            ),
        ),
    ],
)
def test_it_is_saved_with_the_model(suffix, tmp_path):
    model, path = bag_model(), str(tmp_path / f"model{suffix}")
    model.compile(optimizer(variable="words/kernel"), loss=loss())
    model.fit(*inputs(bag_model), batch_size=8, verbose=0)
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    found, saved = loaded.optimizer.side_information, model.optimizer.side_information
    assert type(found) is type(saved) and found.get_config() == saved.get_config()
    assert found.description == "token frequencies" and found.variable == "words/kernel"
    for m in (model, loaded):
        m.fit(*inputs(bag_model), batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(loaded.get_weights(), model.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_replicas_share_the_small_state(tmp_path):
    from tests.helpers import catalogue

    with catalogue.mirrored().scope():
        model = bag_model()
        model.compile(optimizer(), loss=loss())
    x, y = inputs(bag_model)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    alone = bag_model()
    alone.compile(optimizer(), loss=loss())
    alone.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert state_shapes(model.optimizer) == state_shapes(alone.optimizer) == [(6, 1), (), (), ()]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    where = checkpoint.save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=alone, optimizer=alone.optimizer).restore(where).assert_consumed()
