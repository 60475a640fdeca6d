"""What data sets may do to examples before they are drawn or batched, and what ties them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.datasets import batches_of_a_pass, has_random_order, rearranges_parts
from tf_adaptive_dp._keras.tied_examples import copies_in_batches, gives_copies, takes_apart
from tf_adaptive_dp.sampling.sources import (
    is_draw,
    open_source,
    refuse_ties,
    with_class_weights,
)

Dataset = tf.data.Dataset
X, Y = catalogue.data()


def single():
    return Dataset.from_tensor_slices((X, Y))


def in_other_rows(x):
    return tf.random.shuffle(tf.range(tf.shape(x)[0]))


def own_rows(x):
    return tf.range(tf.shape(x)[0])


def large(x):
    return x[:, 0] > 0.0


def partitioned(x, y):
    """Rows are changed by kind, and put back where they were."""
    kinds = tf.cast(large(x), tf.int32)
    places = tf.dynamic_partition(own_rows(x), kinds, 2)
    small, others = tf.dynamic_partition(x, kinds, 2)
    return tf.dynamic_stitch(places, [small, 2.0 * others]), y


def one_hot_by_scatter(x, y):
    places = tf.stack([own_rows(x), tf.cast(y, tf.int32)], axis=1)
    return tf.tensor_scatter_nd_update(tf.zeros_like(x), places, tf.ones_like(x[:, 0])), y


MIXING = {
    "dynamic_stitch": lambda x, y: (tf.dynamic_stitch([in_other_rows(x)], [x]), y),
    "parallel stitch by label": lambda x, y: (
        tf.raw_ops.ParallelDynamicStitch(indices=[tf.cast(y, tf.int32)], data=[x]),
        y,
    ),
    "scatter_nd": lambda x, y: (tf.scatter_nd(in_other_rows(x)[:, None], x, tf.shape(x)), y),
    "scatter_nd by public places": lambda x, y: (
        tf.scatter_nd([[1], [0], [3], [2]], x, [4, 6]),
        y,
    ),
    "sums of classes": lambda x, y: (tf.gather(tf.scatter_nd(y[:, None], x, [3, 6]), y), y),
    "counts of classes": lambda x, y: (
        x,
        tf.gather(tf.tensor_scatter_nd_add(tf.zeros([3]), y[:, None], tf.ones([4])), y),
    ),
    "tensor_scatter_nd_add": lambda x, y: (
        tf.tensor_scatter_nd_add(x, in_other_rows(x)[:, None], x),
        y,
    ),
    "unique": lambda x, y: (x, tf.unique(y)[1]),
    "unique_with_counts": lambda x, y: (x, tf.gather(*tf.unique_with_counts(y)[2:0:-1])),
    "histogram": lambda x, y: (
        x,
        y + tf.cast(tf.histogram_fixed_width(x[:, 0], [0.0, 1.0], 1), y.dtype),
    ),
    "mean of some": lambda x, y: (x - tf.reduce_mean(tf.boolean_mask(x, large(x)), 0), y),
    "mean of a kind": lambda x, y: (
        x - tf.reduce_mean(tf.dynamic_partition(x, tf.cast(y, tf.int32), 3)[0], axis=0),
        y,
    ),
    "joined texts": lambda x, y: (x, tf.strings.reduce_join(tf.strings.as_string(y)) + "."),
}

ALONE = {
    "dynamic_stitch": lambda x, y: (tf.dynamic_stitch([own_rows(x)], [x]), y),
    "scatter_nd": lambda x, y: (tf.scatter_nd(own_rows(x)[:, None], x, tf.shape(x)), y),
    "scatter_nd by public places": lambda x, y: (
        tf.scatter_nd(np.arange(4)[:, None], x, [4, 6]),
        y,
    ),
    "partition": partitioned,
    "one-hot by scatter": one_hot_by_scatter,
    "a public value": lambda x, y: (tf.tensor_scatter_nd_update(x, [[0]], tf.zeros([1, 6])), y),
    "some rows": lambda x, y: (tf.boolean_mask(x, large(x)), tf.boolean_mask(y, large(x))),
    "mean of some entries": lambda x, y: (
        tf.map_fn(lambda e: tf.reduce_mean(tf.boolean_mask(e, e > 0.0)), x),
        y,
    ),
    "joined texts": lambda x, y: (tf.strings.reduce_join(tf.strings.as_string(x), axis=1), y),
}


def batches():
    return single().batch(4, drop_remainder=True)


@pytest.mark.parametrize("way", MIXING)
def test_a_map_of_batches_may_not_move_rows_or_count_them(way):
    with pytest.raises(dp.NotPrivateError, match="`map` of batches"):
        refuse_ties(batches().map(MIXING[way]), batched=True)


@pytest.mark.parametrize("way", ALONE)
def test_a_map_of_batches_may_do_the_same_to_each_row_alone(way):
    refuse_ties(batches().map(ALONE[way]), batched=True)


def of_unknown_shape(x, y):
    return tf.numpy_function(lambda x: x, [x], x.dtype), y


def test_a_map_of_batches_of_unknown_shape_may_not_mix_them_either():
    unknown = batches().map(of_unknown_shape)
    refuse_ties(unknown.map(lambda x, y: (x / 2.0 + 1.0, y)), batched=True)
    mixed = unknown.map(lambda x, y: (x / 2.0 - tf.reduce_mean(tf.cast(x, x.dtype) / 2.0, 0), y))
    with pytest.raises(dp.NotPrivateError, match="reduces over the batch axis"):
        refuse_ties(mixed, batched=True)


# --- state --------------------------------------------------------------------------------------


def running_mean():
    mean = tf.Variable(tf.zeros([6]))
    return single().map(lambda x, y: (x - mean.assign(0.9 * mean + 0.1 * x), y))


def written_and_read():
    largest = tf.Variable(0.0)

    def write(x, y):
        with tf.control_dependencies([largest.assign(tf.maximum(largest, x[0]))]):
            return tf.identity(x), y

    return single().map(write).map(lambda x, y: (x / largest, y))


def scalar_labels():
    last = tf.Variable(0, dtype=Y.dtype)
    return single().map(lambda x, y: (x, last.assign(y) + y))


def counts_in_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def count(x, y):
        y = tf.cast(y, tf.int64)
        seen = table.lookup(y)
        with tf.control_dependencies([table.insert(y[None], seen[None] + 1)]):
            return x, tf.identity(seen)

    return single().map(count)


def filtered_by_state():
    seen = tf.Variable(0.0)

    def write(x, y):
        with tf.control_dependencies([seen.assign_add(x[0])]):
            return tf.identity(x), y

    return single().map(write).filter(lambda x, y: seen < 1.0)


def in_an_inner_function():
    mean = tf.Variable(tf.zeros([6]))

    def shifted(x, y):
        return x - mean.assign(x), y

    return Dataset.range(1).flat_map(lambda _: single().map(shifted))


STATE = (running_mean, written_and_read, scalar_labels, counts_in_a_table, filtered_by_state)
STATE += (in_an_inner_function,)


@pytest.mark.parametrize("make", STATE, ids=lambda f: f.__name__)
def test_a_map_may_not_carry_what_an_example_holds_to_others(make):
    """Clipping bounds what an example adds itself; a running mean changes all that come later."""
    for data, batched in ((make(), False), (make().batch(4), True)):
        with pytest.raises(dp.NotPrivateError, match="write what examples hold into a variable"):
            refuse_ties(data, batched)


def test_a_map_may_use_state_that_no_example_changes():
    count, total = tf.Variable(0), tf.Variable(0.0)
    generator = tf.random.Generator.from_seed(1)
    words = tf.keras.layers.StringLookup(vocabulary=["0", "1"])
    noise = tf.keras.layers.GaussianNoise(0.1)
    public = tf.constant([1.0] * 6)

    def logged(x, y):
        with tf.control_dependencies([total.assign_add(x[0])]):  # read after training, perhaps
            return tf.identity(x), y

    maps = (
        lambda x, y: (x + tf.cast(count.assign_add(1), tf.float32) * public, y),
        lambda x, y: (x + generator.normal([6]), y),
        lambda x, y: (x, words(tf.strings.as_string(y))),
        lambda x, y: (noise(x[None], training=True)[0], y),
        logged,
        lambda x, y: (tf.numpy_function(lambda x: x, [x], x.dtype), y),
    )
    data = single()
    for change in maps:
        data = data.map(change)
    refuse_ties(data, batched=False)
    of_shards = Dataset.range(3).interleave(
        lambda i: single().shard(3, i).shuffle(9, seed=i).cache().repeat(1)
    )
    refuse_ties(of_shards, batched=False)


# --- functions that make data sets ----------------------------------------------------------------


def each(data):
    """A data set whose function makes the whole of `data`."""
    return Dataset.range(1).interleave(lambda _: data)


def many_lengths():
    return single().map(lambda x, y: (x[: y + 1], y))


TIED = {
    "take_while": lambda: each(single().take_while(lambda x, y: x[0] < 9.0)),
    "take_while of constants": lambda: Dataset.range(1).flat_map(
        lambda _: Dataset.from_tensor_slices((X, Y)).take_while(lambda x, y: x[0] < 9.0)
    ),
    "padded_batch": lambda: each(many_lengths().padded_batch(4)),
    "padded_batch of windows": lambda: many_lengths().group_by_window(
        lambda x, y: tf.constant(0, tf.int64), lambda _, window: window.padded_batch(4), 4
    ),
    "group_by_reducer": lambda: single().apply(
        tf.data.experimental.group_by_reducer(
            lambda x, y: tf.cast(y, tf.int64),
            tf.data.experimental.Reducer(
                lambda _: tf.zeros([6]), lambda total, e: total + e[0], lambda total: total
            ),
        )
    ),
    "map": lambda: each(single().batch(4).map(lambda x, y: (x - tf.reduce_mean(x, 0), y))),
    "map before interleave": lambda: (
        single()
        .batch(4)
        .map(lambda x, y: (x - tf.reduce_mean(x, 0), y))
        .interleave(lambda *e: Dataset.from_tensor_slices(e))
        .batch(4)
    ),
}


def large_sum(x, y):
    return tf.reduce_sum(x) > 0.0


CHOSEN_TOGETHER = {
    "filter": lambda: batches().filter(large_sum).unbatch(),
    "filter by one row": lambda: batches().filter(lambda x, y: x[0, 0] > 0.0).prefetch(1).unbatch(),
    "filter within a function": lambda: each(batches().filter(large_sum).unbatch()),
    "filter before interleave": lambda: (
        batches().filter(large_sum).interleave(lambda *e: Dataset.from_tensor_slices(e))
    ),
    "ignore_errors": lambda: batches().apply(ignore_errors).unbatch(),
}
CHOSEN_ALONE = {
    "filter": lambda: single().filter(large_sum),
    "filter by size": lambda: (
        single().batch(5).filter(lambda x, y: tf.shape(x)[0] == 5).map(lambda *e: e).unbatch()
    ),
    "filter of examples with many rows": lambda: single().batch(4).filter(large_sum),
    "filter of rows": lambda: single().flat_map(
        lambda x, y: Dataset.from_tensors((x, y)).filter(large_sum)
    ),
    "filter after unbatch": lambda: batches().unbatch().filter(large_sum),
}


def ignore_errors(data):
    if hasattr(data, "ignore_errors"):
        return data.ignore_errors()
    return tf.data.experimental.ignore_errors()(data)


@pytest.mark.parametrize("way", CHOSEN_TOGETHER)
def test_an_example_may_not_decide_whether_others_are_used(way):
    """In batches that are taken apart, the filter drops examples for what another one holds."""
    with pytest.raises(dp.NotPrivateError, match=f"`{way.split(' ')[0]}` of batches that are"):
        refuse_ties(CHOSEN_TOGETHER[way](), batched=False)
    with pytest.raises(dp.NotPrivateError, match=f"`{way.split(' ')[0]}` of batches that are"):
        refuse_ties(CHOSEN_TOGETHER[way]().batch(8), batched=True)


@pytest.mark.parametrize("way", CHOSEN_ALONE)
def test_an_example_may_decide_whether_it_is_used_itself(way):
    refuse_ties(CHOSEN_ALONE[way](), batched=False)
    refuse_ties(CHOSEN_ALONE[way]().batch(8), batched=True)


@pytest.mark.parametrize("way", TIED)
def test_functions_that_make_data_sets_may_not_tie_examples_either(way):
    with pytest.raises(dp.NotPrivateError, match=f"`{way.split(' ')[0]}`"):
        refuse_ties(TIED[way](), batched=True)


def test_parts_of_one_example_may_be_tied_to_each_other():
    """Clipping bounds them if they come into one row; else each is an example of its own."""

    def rows(x, y):
        entries = Dataset.from_tensor_slices(x).take_while(lambda entry: entry < 9.0)
        return entries.padded_batch(6, padded_shapes=[]).map(lambda entries: (entries, y))

    refuse_ties(single().flat_map(rows).batch(4), batched=True)
    windows = single().window(4, drop_remainder=True)
    refuse_ties(windows.flat_map(lambda x, y: Dataset.zip((x.batch(4), y.batch(4)))), batched=True)


def generated(_):
    spec = tf.TensorSpec([6]), tf.TensorSpec([], Y.dtype)
    return Dataset.from_generator(lambda: zip(X, Y), output_signature=spec)


COPYING = {
    "repeat": lambda: single().flat_map(lambda *e: Dataset.from_tensors(e).repeat(3)),
    "repeat by class": lambda: single().flat_map(
        lambda x, y: Dataset.from_tensors((x, y)).repeat(tf.cast(y, tf.int64) + 1)
    ),
    "interleave": lambda: Dataset.range(3).interleave(lambda _: single()),
    "interleave of who knows how many": lambda: (
        Dataset.range(3).filter(lambda i: i > 0).interleave(lambda _: single())
    ),
    "flat_map": lambda: Dataset.range(2).flat_map(
        lambda i: single().map(lambda x, y: (x + tf.cast(i, tf.float32), y))
    ),
    "interleave of some": lambda: Dataset.range(3).interleave(
        lambda i: single().shuffle(32, seed=i).take(8)
    ),
    "flat_map of any": lambda: Dataset.range(9).flat_map(
        lambda _: single().skip(tf.cast(any_index(), tf.int64)).take(1)
    ),
    "flat_map of arrays": lambda: Dataset.range(2).flat_map(
        lambda _: Dataset.from_tensor_slices((X, Y)).shuffle(9)
    ),
}
ONCE = {
    "shards": lambda: Dataset.range(3).interleave(lambda i: single().shard(3, i)),
    "blocks": lambda: Dataset.range(4).flat_map(lambda i: single().skip(8 * i).take(8)),
    "one element": lambda: Dataset.range(1).flat_map(lambda _: single()),
    "generators": lambda: Dataset.range(2).interleave(generated),
    "crops": lambda: single().flat_map(
        lambda x, y: Dataset.from_tensor_slices((tf.stack([x, x[::-1]]), tf.stack([y, y])))
    ),
}


def any_index(size=()):
    return tf.random.uniform(size, maxval=len(X), dtype=tf.int32)


def rows_of(indices):
    return tf.gather(X, indices), tf.gather(Y, indices)


def seeded(i):
    seed = tf.stack([i, 0])
    return tf.random.stateless_uniform([], seed, maxval=len(X), dtype=tf.int32)


def rows_from(start, number=1):
    return tf.slice(X, [start, 0], [number, 6]), tf.slice(Y, [start], [number])


def block(x):
    start = any_index() % 28
    return x[start : start + 4, :-1], x[start : start + 4, 1:]


def tf_x():
    return tf.constant(X)


def picked_from(x, times):
    return [x[any_index()] for _ in range(times)]


HELD = tf.Variable(X, trainable=False)
DRAWING = {
    "of each example": lambda: Dataset.range(32).map(lambda _: rows_of(any_index())).batch(4),
    "by a seed": lambda: Dataset.range(32).map(lambda i: rows_of(seeded(i))).batch(4),
    "by the slice": lambda: (
        Dataset.range(32).map(lambda _: (tf.constant(X)[any_index()], 0)).batch(4)
    ),
    "out of a variable": lambda: (
        Dataset.range(32).map(lambda _: (tf.gather(HELD, any_index()), 0)).batch(4)
    ),
    "out of a variable, of batches": lambda: Dataset.range(9).map(
        lambda _: tf.gather_nd(HELD, any_index([4, 1]))
    ),
    "of batches": lambda: Dataset.range(9).map(lambda _: rows_of(any_index([4]))),
    "by logits": lambda: Dataset.range(9).map(
        lambda _: rows_of(tf.random.categorical(tf.zeros([1, 32]), 4)[0])
    ),
    "by a slice": lambda: Dataset.range(32).map(lambda _: rows_from(any_index())).batch(4),
    "by a range of rows": lambda: (
        Dataset.range(9).map(lambda _: tf_x()[any_index() :][:1]).batch(4)
    ),
    "by overlapping blocks": lambda: (
        Dataset.range(9).map(lambda _: rows_from(any_index(), 4)).unbatch().batch(8)
    ),
    "in an order for each": lambda: (
        Dataset.range(32).map(lambda _: rows_of(tf.random.shuffle(tf.range(32))[0])).batch(4)
    ),
    "one by one": lambda: Dataset.range(9).map(lambda _: tf.stack(picked_from(tf_x(), 4))),
    "by random elements": lambda: (
        Dataset.random(seed=1).map(lambda r: rows_of(r % 32)).take(32).batch(4)
    ),
    "within flat_map": lambda: Dataset.range(9).flat_map(
        lambda _: Dataset.from_tensor_slices(rows_of(any_index([8]))).batch(4)
    ),
}
DRAWING_ONCE = {
    "shuffled places": lambda: Dataset.range(32).shuffle(32).map(rows_of).batch(4),
    "a random table of public numbers": lambda: (
        Dataset.range(32)
        .map(lambda i: (tf.gather(X, i) + tf.gather([0.0, 1.0], any_index() % 2), Y[0]))
        .batch(4)
    ),
    "random augmentation": lambda: (
        single().map(lambda x, y: (x * tf.gather([0.9, 1.1], any_index() % 2), y)).batch(4)
    ),
    "subsets of a fixed size": lambda: Dataset.range(9).map(
        lambda _: rows_of(tf.random.shuffle(tf.range(32))[:4])
    ),
    "the largest of random numbers": lambda: Dataset.range(9).map(
        lambda _: rows_of(tf.math.top_k(tf.random.uniform([32]), 4)[1])
    ),
    "a random mask": lambda: Dataset.range(9).map(
        lambda _: rows_of(tf.where(tf.random.uniform([32]) < 0.2)[:, 0])
    ),
    "a block": lambda: Dataset.range(9).map(lambda _: rows_from(any_index() % 28, 4)),
    "a block without its first column": lambda: Dataset.range(9).map(lambda _: block(tf_x())),
    "crops": lambda: single().map(lambda x, y: (tf.slice(x, [any_index() % 3], [3]), y)).batch(4),
    "columns": lambda: Dataset.range(9).map(lambda _: tf.slice(X, [0, any_index() % 3], [32, 3])),
    "one shuffled pass": lambda: (
        Dataset.range(1).map(lambda _: rows_of(tf.random.shuffle(tf.range(32)))).unbatch().batch(4)
    ),
    "one of several batches": lambda: Dataset.range(9).map(
        lambda _: tf.gather(tf.reshape(X, [8, 4, 6]), any_index() % 8)
    ),
}


@pytest.mark.parametrize("way", DRAWING)
def test_a_batch_may_not_be_drawn_by_indices_that_come_again(way):
    """With replacement, an example is in a batch several times."""
    assert copies_in_batches(DRAWING[way]()) == ["random indices"]


@pytest.mark.parametrize("way", DRAWING_ONCE)
def test_batches_may_be_drawn_by_indices_that_differ(way):
    assert not copies_in_batches(DRAWING_ONCE[way]())


COUNTING = {
    "i % n": lambda: Dataset.range(64).map(lambda i: rows_of(i % 32)).shuffle(64).batch(8),
    "i % n of shuffled numbers": lambda: (
        Dataset.range(64).shuffle(64).map(lambda i: (tf_x()[i % 32], Y[0])).batch(8)
    ),
    "i // n": lambda: Dataset.range(64).map(lambda i: rows_of(tf.cast(i, tf.int32) // 2)).batch(8),
    "clipped": lambda: Dataset.range(34).map(lambda i: rows_of(tf.minimum(i, 31))).batch(8),
    "from a later one": lambda: (
        Dataset.range(4, 38).map(lambda i: rows_of(i % 32)).shuffle(9).batch(4)
    ),
}
COUNTING_ONCE = {
    "each number": lambda: Dataset.range(32).shuffle(32).map(lambda i: rows_of(i % 32)).batch(8),
    "passes": lambda: Dataset.range(96).map(lambda i: rows_of(i % 32)).batch(8),
    "batches over two passes": lambda: Dataset.range(64).map(lambda i: rows_of(i % 32)).batch(5),
    "clipped beyond": lambda: Dataset.range(32).map(lambda i: rows_of(tf.minimum(i, 31))).batch(8),
    "rows of rows": lambda: (
        Dataset.range(64).map(lambda i: tf.reshape(X, [32, 2, 3])[i // 2, i % 2]).batch(8)
    ),
    "beside each example": lambda: (
        Dataset.zip((single(), Dataset.range(32).map(lambda i: i % 4)))
        .map(lambda example, _: example)
        .batch(4)
    ),
    "beside the number": lambda: Dataset.range(32).map(lambda i: (*rows_of(i), i % 2)).batch(4),
    "within flat_map": lambda: (
        Dataset.range(4)
        .flat_map(lambda i: Dataset.range(8 * i, 8 * i + 8).map(lambda j: rows_of(j % 32)))
        .batch(4)
    ),
    "only the others": lambda: Dataset.range(32).filter(lambda i: i % 4 > 0).map(rows_of).batch(4),
}


@pytest.mark.parametrize("way", COUNTING)
def test_numbers_that_stand_for_the_same_example_may_not_meet_in_a_batch(way):
    data = COUNTING[way]()
    assert copies_in_batches(data) == ["equal indices"]
    model = catalogue.compiled("DPSGD", expected_batch_size=8)
    with pytest.raises(dp.NotPrivateError, match="makes the same of several numbers"):
        model.fit(data, verbose=0)
    assert not model.optimizer.ledger.num_releases


@pytest.mark.parametrize("way", COUNTING_ONCE)
def test_numbers_may_stand_for_an_example_each(way):
    assert not copies_in_batches(COUNTING_ONCE[way]())


def test_numbers_that_stand_for_the_same_example_may_not_be_drawn():
    def data(length):
        return Dataset.range(length).map(lambda i: rows_of(i % 32))

    sampling = dp.PoissonSampling(0.1, 20, steps=4)
    with pytest.raises(ValueError, match="must give each example once"):
        dp.poisson_batches(data(64), sampling)
    dp.poisson_batches(data(32), sampling)
    beside = Dataset.range(32).map(lambda i: tf.cast(i % 4, tf.float32))
    weighted = Dataset.zip((single(), beside)).map(lambda example, weight: (*example, weight))
    dp.poisson_batches(weighted, sampling)


@pytest.mark.parametrize("way", COPYING)
def test_functions_that_make_data_sets_may_not_copy_examples(way):
    data = COPYING[way]()
    assert copies_in_batches(data.batch(4)) == [way.split(" ")[0]]
    assert gives_copies(data)
    with pytest.raises(ValueError, match="must give each example once"):
        dp.poisson_batches(data, dp.PoissonSampling(0.1, 20, steps=4))


@pytest.mark.parametrize("method", ["concatenate", "sample_from_datasets"])
def test_data_sets_that_are_joined_may_not_be_made_of_equal_arrays(method):
    def joined(x):
        one, other = (Dataset.from_tensor_slices(arrays) for arrays in ((X, Y), (x, Y.copy())))
        if method == "concatenate":
            return one.concatenate(other.map(lambda x, y: (-x, y)))
        return Dataset.sample_from_datasets([one, other.shuffle(9)])

    assert copies_in_batches(joined(X.copy()).batch(4)) == [method]
    assert gives_copies(joined(X.copy()))
    assert not copies_in_batches(joined(X + 1).batch(4)) and not gives_copies(joined(X + 1))


@pytest.mark.parametrize("way", ONCE)
def test_functions_may_make_data_sets_of_parts(way):
    data = ONCE[way]()
    assert not copies_in_batches(data.batch(4))
    assert not gives_copies(data)


def test_passes_of_batches_that_a_function_makes_are_no_copies_in_a_batch():
    data = Dataset.range(3).flat_map(lambda _: single().shuffle(9).batch(4))
    assert not copies_in_batches(data)
    assert batches_of_a_pass(data) is None


def test_batches_that_are_divided_anew_may_not_span_two_passes():
    of_32 = single().shuffle(9)
    assert copies_in_batches(of_32.batch(5).repeat(2).rebatch(6)) == ["repeat"]
    assert not copies_in_batches(of_32.batch(5).repeat(2).rebatch(8))
    for batched in (of_32.batch(8), of_32.batch(5, drop_remainder=True)):
        assert not copies_in_batches(batched.rebatch(2).repeat())
        assert not copies_in_batches(batched.repeat().rebatch([1, 1]))
    assert copies_in_batches(of_32.batch(5, drop_remainder=True).repeat().rebatch(4)) == ["repeat"]


def test_passes_that_batches_divide_may_not_be_shuffled_together():
    assert not copies_in_batches(single().shuffle(9).repeat(2).map(lambda *e: e).batch(8))
    assert copies_in_batches(single().repeat(2).shuffle(9).batch(8)) == ["repeat"]


def test_the_order_within_functions_may_be_random():
    """By their places, users would be given the examples of others."""
    assert has_random_order(each(single().shuffle(9)))
    assert not has_random_order(each(single()))
    sampling = dp.PoissonSampling(0.5, 10, steps=4, examples_per_user=2)
    users = np.arange(len(X)) // 4
    with pytest.raises(ValueError, match="must come in a known order"):
        dp.poisson_batches(each(single().shuffle(9)), sampling, user_ids=users)


def drawn(**kwargs):
    return dp.poisson_batches((X, Y), dp.PoissonSampling(0.1, 20, steps=4), **kwargs)


def test_parts_of_draws_may_not_be_rearranged_by_functions():
    parts = drawn(gradient_accumulation_steps=2)
    assert rearranges_parts(parts, 2, is_draw) is None
    assert rearranges_parts(parts.skip(2), 2, is_draw) is None
    assert rearranges_parts(parts.skip(1), 2, is_draw) == "Skip"
    interleaved = Dataset.range(2).interleave(lambda _: parts.map(lambda *e: e), cycle_length=2)
    assert rearranges_parts(interleaved, 2, is_draw) is not None


@pytest.mark.parametrize("method", ["batch", "rebatch"])
def test_draws_may_not_be_joined(method):
    """A batch of two draws may hold an example twice, which the ledger does not show."""
    joined = {
        "batch": lambda data: data.prefetch(1).unbatch().batch(40),
        "rebatch": lambda data: each(data.map(lambda *e: e)).rebatch(40),
    }
    model = catalogue.compiled("DPSGD", expected_batch_size=3)
    with pytest.raises(dp.NotPrivateError, match=f"`{method}` after its batches were drawn"):
        model.fit(joined[method](drawn()), verbose=0)
    assert not model.optimizer.ledger.num_releases


def test_draws_are_taken_apart_by_some_methods():
    assert takes_apart(drawn().unbatch().map(lambda *e: e), is_draw) == "unbatch"
    assert takes_apart(drawn().window(2), is_draw) == "window"
    mapped = tf.data.experimental.map_and_batch(lambda *e: e, 2)
    assert takes_apart(drawn().apply(mapped), is_draw) == "map_and_batch"
    assert takes_apart(drawn().map(lambda *e: e).prefetch(1).take(2), is_draw) is None
    assert takes_apart(single().batch(4).unbatch().batch(3).rebatch(2), is_draw) is None


CLASSES = np.array([2, 0, 1, 5, 0, 2])
HALVES = np.full(len(CLASSES), 0.5, "float32")
TOKENS = np.arange(12, dtype="float32").reshape([-1, 2])


class OneByOne:
    """A source that is read by index."""

    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return len(CLASSES)

    def __getitem__(self, index):
        return tuple(part[index] for part in self.parts)


LABELS = {
    "numbers": (CLASSES,),
    "floats in a column": (CLASSES[:, None].astype("float32"),),
    "one-hot": (np.eye(6)[CLASSES],),
    "smoothed": (0.9 * np.eye(6, dtype="float32")[CLASSES] + 0.1 / 6,),
    "booleans": (np.eye(6, dtype=bool)[CLASSES],),
    "with weights": (CLASSES, HALVES),
    "with weights of tokens": (CLASSES, TOKENS),
}


@pytest.mark.parametrize("source", [lambda *parts: parts, OneByOne], ids=["arrays", "by index"])
@pytest.mark.parametrize("name", LABELS)
def test_class_weights_multiply_the_weights_of_examples(name, source):
    labels, *weights = LABELS[name]
    x = np.arange(len(CLASSES))
    weighted = with_class_weights(
        open_source(source(x, labels, *weights), None), {0: 0.25, np.int64(2): 3, 5: 0.0, -1: 7.0}
    )
    rows = [np.zeros([len(x), *shape], dtype) for shape, dtype in weighted.parts]
    weighted.fill(x, rows)
    expected = np.array([3, 0.25, 1, 0, 0.25, 3], "float32")  # a class without a weight has 1
    if weights:
        expected = weights[0] * expected.reshape([-1, *[1] * (weights[0].ndim - 1)])
    assert rows[2].dtype == "float32" and len(rows) == 3
    for actual, wanted in zip(rows, (x, labels, expected)):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    ("labels", "weights", "error", "message"),
    [
        (CLASSES, "balanced", TypeError, "`class_weight` must be a dict .*='balanced'"),
        (CLASSES, {"0": 1.0}, TypeError, "keys of `class_weight` must be whole .*: '0' in"),
        (CLASSES, {0: None}, TypeError, r"`class_weight\[0\]` must be a number"),
        (CLASSES, {1: -0.5}, ValueError, r"`class_weight\[1\]` must be finite and at least 0"),
        (np.stack([CLASSES] * 2, 1), {0: 0.5}, ValueError, "one class .*some have a sum above 1"),
        (np.ones([6, 2, 3]), {0: 0.5}, ValueError, r"one class .*: labels of shape \(2, 3\)"),
        (CLASSES.astype(str), {0: 0.5}, ValueError, "one class .*dtype object"),
        ({"a": CLASSES}, {0: 0.5}, ValueError, "single output.*`sample_weight`"),
    ],
)
def test_labels_and_weights_that_name_no_class_are_refused(labels, weights, error, message):
    with pytest.raises(error, match=message):
        with_class_weights(open_source((np.arange(6), labels), None), weights)


def test_class_weights_need_targets():
    with pytest.raises(ValueError, match="`class_weight` needs targets"):
        with_class_weights(open_source((X,), None), {0: 0.5})
