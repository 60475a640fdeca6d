"""Public examples that are not among the private ones."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp


def rows(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 3)).astype("float32")


def test_a_split_is_disjoint_by_index_and_by_content():
    x = np.repeat(np.arange(50), 4)
    y = np.arange(200)
    (public_x, public_y), (private_x, private_y), left_out = dp.side_information.split_public(
        (x, y), 0.05
    )
    assert len(public_x) == 10 and len(private_x) + left_out == 190 and left_out > 0
    assert not set(public_y) & set(private_y)
    assert not set(public_x) & set(private_x)
    np.testing.assert_array_equal(public_x, public_y // 4)
    np.testing.assert_array_equal(private_x, private_y // 4)
    # Every other example that equals no public one is kept.
    assert sorted(private_y) == [k for k in y if k // 4 not in public_x]
    dp.side_information.check_disjoint((public_x, public_y), (private_x, private_y))


def test_a_split_looks_at_each_private_example_alone():
    """One private row more or less is one row more or less, whatever the others are."""
    x = rows(40)
    x[7] = x[3]
    x[8:12] = x[12]
    for seed in range(20):
        public, private, left_out = dp.side_information.split_public(x, 0.1, seed=seed)
        known = {row.tobytes() for row in public}
        expected = [row for row in x if row.tobytes() not in known]  # with all equal ones
        np.testing.assert_array_equal(private, expected)
        assert left_out == len(x) - len(public) - len(private)


def test_the_seed_decides():
    x = rows(300)
    chosen = [dp.side_information.split_public(x, 0.1, seed=s).public for s in (0, 0, 1)]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert (chosen[0] != chosen[2]).any()


def test_a_split_keeps_nests():
    data = ({"a": rows(20), "b": np.arange(20)}, np.arange(20), np.ones(20))
    public, private, left_out = dp.side_information.split_public(data, 0.1)
    assert set(public[0]) == {"a", "b"} and len(public[1]) == 2 and left_out == 0
    assert private[0]["a"].shape == (18, 3) and private[2].shape == (18,)
    dp.side_information.check_disjoint(public, private)


@pytest.mark.parametrize(
    "data, kwargs, error, match",
    [
        (rows(9), {"share": 0.0}, ValueError, "`share`.*greater than 0"),
        (rows(9), {"share": 1.0}, ValueError, "`share` must be below 1"),
        (rows(9), {"share": "1%"}, TypeError, "`share` must be a number"),
        (rows(9), {"seed": -1}, ValueError, "`seed`"),
        (np.ones([9, 2]), {}, ValueError, "No private example is left.*8 others that equal"),
        (rows(1), {}, ValueError, "No private example is left"),
        ((rows(9), np.arange(8)), {}, ValueError, r"equally many.*\(8,\)"),
        (np.float32(3), {}, ValueError, "one example per row"),
    ],
)
def test_bad_splits_are_refused(data, kwargs, error, match):
    with pytest.raises(error, match=match):
        dp.side_information.split_public(data, **kwargs)


def batched(*arrays, size=4):
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(size)


X, Y = rows(30), np.arange(30)


@pytest.mark.parametrize("public", [lambda x, y: (x, y), lambda x, y: x, batched])
@pytest.mark.parametrize("private", [lambda x, y: (x, y), lambda x, y: (x, y, y), batched])
def test_arrays_and_datasets_are_compared_by_their_features(public, private):
    dp.side_information.check_disjoint(public(X[:10], Y[:10]), private(X[10:], Y[10:]))
    with pytest.raises(dp.NotPrivateError, match="^3 of 23 private examples.*split_public"):
        dp.side_information.check_disjoint(public(X[:10], Y[:10]), private(X[7:], Y[:23] + 99))


def test_a_private_example_that_comes_twice_counts_twice():
    twice = np.concatenate([X[20:], X[:1], X[:1]])
    with pytest.raises(dp.NotPrivateError, match="2 of 12"):
        dp.side_information.check_disjoint(X[:10], twice)


def test_one_changed_number_is_another_example():
    changed = X[:10].copy()
    changed[:, 1] = np.nextafter(changed[:, 1], np.float32(9))
    dp.side_information.check_disjoint(X[:10], changed)
    changed[4, 1] = X[4, 1]
    with pytest.raises(dp.NotPrivateError, match="1 of 10"):
        dp.side_information.check_disjoint(X[:10], changed)
    with pytest.raises(dp.NotPrivateError, match="1 of 1 "):
        dp.side_information.check_disjoint(np.array([[0.0, 1.0]]), np.array([[-0.0, 1.0]]))


def test_nests_are_compared_as_a_whole():
    a, b = X[:, :2], X[:, 2:]
    one = {"a": a[:10], "b": b[:10]}
    dp.side_information.check_disjoint(one, {"a": a[:10], "b": b[10:20]})
    with pytest.raises(dp.NotPrivateError, match="10 of 10"):
        dp.side_information.check_disjoint(one, batched({"b": b[:10], "a": a[:10]}))


def test_padding_does_not_hide_an_example():
    short, long = np.array([[5, 7], [8, 1]]), np.array([[8, 1, 0, 0], [8, 1, 0, 2]])
    with pytest.raises(dp.NotPrivateError, match="1 of 2"):
        dp.side_information.check_disjoint(short, long)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[8, 1], [3]])).batch(2)
    with pytest.raises(dp.NotPrivateError, match="1 of 2"):
        dp.side_information.check_disjoint(short.astype("int32"), ragged)


def test_padding_of_inner_axes_does_not_hide_an_example():
    public = tf.data.Dataset.from_tensors(tf.ragged.constant([[[1, 2], [3]], [[4], [5]]]))
    private = tf.data.Dataset.from_tensors(tf.ragged.constant([[[1, 2], [3]], [[4], [5, 6, 7]]]))
    for others in (private, np.array([[[1, 2, 0], [3, 0, 0]], [[8, 0, 0], [9, 0, 0]]], "int32")):
        with pytest.raises(dp.NotPrivateError, match="1 of 2"):
            dp.side_information.check_disjoint(public, others)
    images = np.arange(1, 9).reshape([1, 2, 4]) % 4
    with pytest.raises(dp.NotPrivateError, match="1 of 1"):
        dp.side_information.check_disjoint(images, images.reshape([1, 8]))
    # What follows the same entries in other places is another example.
    dp.side_information.check_disjoint(np.array([[[1, 2], [3, 4]]]), np.array([[[1, 2, 3, 0]]]))
    dp.side_information.check_disjoint(np.array([[[1, 2], [0, 3]]]), np.array([[[1, 2], [3, 0]]]))


@pytest.mark.parametrize(
    "public, private",
    [
        (np.array([[1, "a"]], object), np.array([[1.0, "a"], [np.nan, "b"]], object)),
        (np.array([[True, None]], object), np.array([[np.int64(1), -np.nan], [3, 4]], object)),
        (np.array([[np.nan, 1]]), np.array([[-np.nan, 1], [0, 1]])),
        (np.array([["2020-01-01"]], "M8[D]"), np.array([["2020-01-01"], ["NaT"]], "M8[D]")),
    ],
)
def test_equal_values_are_equal_whatever_their_bytes(public, private):
    dp.side_information.check_disjoint(public, private[1:])
    with pytest.raises(dp.NotPrivateError, match="1 of 2"):
        dp.side_information.check_disjoint(public, private)


def test_objects_that_are_neither_numbers_nor_texts_are_refused():
    bad = np.empty([2, 1], object)
    bad[:, 0] = [np.arange(3), np.arange(4)]
    with pytest.raises(TypeError, match="`public` must hold numbers or texts.*Received.*ndarray"):
        dp.side_information.check_disjoint(bad, bad)
    with pytest.raises(TypeError, match="`data` must hold numbers or texts"):
        dp.side_information.split_public(bad, 0.5)


def test_texts_are_compared():
    public = np.array(["a film", "b"])
    dp.side_information.check_disjoint(public, batched(np.array(["a fil", "m b"])))
    with pytest.raises(dp.NotPrivateError, match="1 of 2"):
        dp.side_information.check_disjoint(public, batched(np.array(["c", "a film"])))


def test_rows_of_weight_zero_are_absent():
    x = np.concatenate([X[:5], np.zeros([2, 3], "float32")])
    weights = np.array([1, 1, 1, 1, 1, 0, 0], "float32")
    padding = np.zeros([1, 3], "float32")
    dp.side_information.check_disjoint(padding, (x, x, weights))
    dp.side_information.check_disjoint((x, x, weights), batched(np.concatenate([X[9:], padding])))
    with pytest.raises(dp.NotPrivateError, match="2 of 7"):
        dp.side_information.check_disjoint(padding, (x, x, np.ones(7)))
    # An example that lacks a label for one of two outputs is there all the same.
    of_outputs = {"a": weights, "b": np.array([1, 1, 1, 1, 1, 1, 0], "float32")}
    with pytest.raises(dp.NotPrivateError, match="1 of 6"):
        dp.side_information.check_disjoint(padding, (x, {"a": x, "b": x}, of_outputs))


@pytest.mark.parametrize(
    "public, private, match",
    [
        (X, X.astype("float64"), "same structure and dtypes.*float32.*float64"),
        ({"a": X}, X, "same structure"),
        ({"a": X}, {"b": X}, "same structure.*'a'.*'b'"),
        (X, batched(X).repeat(), "`private` must end"),
        (batched(X).repeat(), X, "`public` must end"),
        (X, tf.data.Dataset.from_tensor_slices(Y.astype("float32")), "dataset of batches"),
        (X, X[:0], "`private` must hold at least one"),
        (X[:0], X, "`public` must hold at least one"),
        ({"a": X, "b": Y}, {"a": X, "b": Y[:3]}, "equally many"),
    ],
)
def test_data_that_cannot_be_compared_are_refused(public, private, match):
    with pytest.raises(ValueError, match=match):
        dp.side_information.check_disjoint(public, private)
