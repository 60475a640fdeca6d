"""What was drawn comes as tensors of one shape, from arrays and from other sources."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers.sampled import drawn_ids, numbered, records, to_pair


def test_batches_are_padded_to_one_static_shape_with_a_mask():
    x, y = np.random.default_rng(0).normal(size=(30, 2, 3)).astype(np.float32), np.arange(1, 31)
    dataset = dp.poisson_batches((x, y), dp.PoissonSampling(0.1, 9, 200, seed=1))
    assert [s.shape for s in dataset.element_spec] == [(9, 2, 3), (9,), (9,)]
    assert [s.dtype for s in dataset.element_spec] == [tf.float32, tf.int64, tf.float32]
    sizes = set()
    for bx, by, weight in dataset.as_numpy_iterator():
        there = weight == 1
        sizes.add(there.sum())
        np.testing.assert_array_equal(bx[there], x[by[there] - 1])
        assert not weight[~there].any() and (bx[~there] == 1).all() and not by[~there].any()
    assert 0 in sizes and max(sizes) > 4


def test_sample_weights_of_the_user_multiply_the_mask():
    x, y = numbered()
    weights = np.linspace(0.5, 2, 30)
    dataset = dp.poisson_batches((x, y, weights), dp.PoissonSampling(0.3, 20, 20, seed=1))
    for _, by, bw in dataset.as_numpy_iterator():
        there = bw != 0
        np.testing.assert_allclose(bw[there], weights[by[there]])
        assert not bw[~there].any() and there.sum() < 20


def test_a_public_example_may_be_the_padding():
    x, y = numbered()
    padding = (np.float32([-5.0]), np.int64(77))
    sampling = dp.PoissonSampling(0.3, 20, 20, seed=1)
    for bx, by, bw in dp.poisson_batches((x, y), sampling, padding=padding).as_numpy_iterator():
        there = bw == 1
        assert (bx[~there] == -5).all() and (by[~there] == 77).all() and (bx[there] > 0).all()


class OneByOne:
    """Also like a list of examples."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index.__index__()]


class OfLists(OneByOne):
    def __getitem__(self, indices):
        if not isinstance(indices, list):
            raise TypeError("lists only")
        return [self.examples[i] for i in indices]


class Tfds(OneByOne):
    def __getitem__(self, index):
        raise AssertionError("slow")

    def __getitems__(self, indices):
        return [self.examples[i] for i in indices]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [list, OneByOne, OfLists, Tfds])
def test_random_access_sources(kind):
    sampling = dp.PoissonSampling(0.3, 20, 10, seed=1)
    dataset = dp.poisson_batches(kind(records()), sampling, preprocess=to_pair)
    expected = dp.poisson_batches(numbered(), sampling)
    assert drawn_ids(dataset) == drawn_ids(expected)
    for bx, by, bw in dataset.as_numpy_iterator():
        there = bw == 1
        np.testing.assert_allclose(
            bx[there], (by[there, None, None] + 1) / 255 * np.ones([1, 2, 2])
        )
        assert (bx[~there] == 1).all()


def test_nested_inputs_several_targets_and_strings():
    n = 12
    words = np.array([f"word {i}" * (i % 3 + 1) for i in range(n)])
    x = {"a": np.arange(n)[:, None], "b": (tf.range(n), words)}
    y = {"left": np.arange(n), "right": np.arange(n) * 2.0}
    sampling = dp.PoissonSampling(0.4, 8, 6, seed=3)
    dataset = dp.poisson_batches((x, y), sampling)
    assert dataset.element_spec[0]["b"][1] == tf.TensorSpec([8], tf.string)
    for bx, by, bw in dataset.as_numpy_iterator():
        there = bw == 1
        ids = by["left"][there]
        np.testing.assert_array_equal(bx["a"][there, 0], ids)
        np.testing.assert_array_equal(bx["b"][0][there], ids)
        np.testing.assert_array_equal(by["right"][there], 2 * ids)
        assert [w.decode() for w in bx["b"][1][there]] == [words[i] for i in ids]
        assert set(bx["b"][1][~there]) <= {b"[UNK]"}


def test_a_padding_of_texts_has_a_token_that_is_not_masked():
    layers = tf.keras.layers
    texts = np.array([["one two"], ["two"], ["one"]] * 4)
    words = layers.TextVectorization(vocabulary=["one", "two"], output_sequence_length=3)
    sampling = dp.PoissonSampling(0.4, 10, 2, seed=3)
    embedding = layers.Embedding(4, 2, mask_zero=True)
    for x, _, weight in dp.poisson_batches((texts, np.zeros(12)), sampling):
        assert np.any(weight.numpy() == 0)
        pooled = layers.GlobalAveragePooling1D()(embedding(words(x)))
        assert np.all(np.isfinite(pooled))


def test_rows_of_arrays_in_any_layout():
    x = np.asfortranarray(np.arange(60.0).reshape(30, 2))
    sampling = dp.PoissonSampling(0.3, 20, 5, seed=1)
    for bx, by, bw in dp.poisson_batches((x, np.arange(30)), sampling).as_numpy_iterator():
        there = bw == 1
        np.testing.assert_array_equal(bx[there], x[by[there]])


def test_fixed_and_shuffled_batches_have_no_padding():
    for make, sampling in [
        (dp.sampling.fixed_size_batches, dp.sampling.FixedSizeSampling(4, 5)),
        (dp.sampling.shuffled_batches, dp.sampling.ShuffledEpochs(4, 5)),
    ]:
        dataset = make(numbered(), sampling)
        assert [s.shape for s in dataset.element_spec] == [(4, 1), (4,)]
        for bx, by in dataset.as_numpy_iterator():
            np.testing.assert_array_equal(bx[:, 0], by + 1)
            assert len(set(by)) == 4
    x, y = numbered()
    (_, by, bw), *_ = dp.sampling.fixed_size_batches(
        (x, y, y * 0.5), dp.sampling.FixedSizeSampling(4, 1)
    )
    np.testing.assert_array_equal(bw, by.numpy() * 0.5)
