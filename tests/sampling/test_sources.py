"""What data sets may do to examples before they are drawn or batched, and what ties them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp.sampling.sources import refuse_ties

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
