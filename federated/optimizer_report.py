"""What the clients' optimizers report, as aggregates over clients."""

from __future__ import annotations

import collections
import math
from typing import Any

import tensorflow as tf

# Half decades from 1e-6 to 1e2; the first and the last bucket of the histogram are open.
LEARNING_RATE_EDGES = tuple(10.0 ** (k / 2) for k in range(-12, 5))


def contribution(report: Any, counts: tf.Tensor) -> collections.OrderedDict:
    """What one client adds to the sums over clients.

    A client adds nothing unless it judged a step, `counts` is true and its learning rate is finite
    and positive.

    Args:
      report: what `optimizer.report(state)` returned: `learning_rate`, `judged_steps` and
        `discarded_steps`, scalars.
      counts: whether the client's update counts, scalar.

    Returns:
      Tensors that are to be summed over clients.
    """
    rate = tf.cast(report["learning_rate"], tf.float32)
    counts = counts & (report["judged_steps"] > 0) & tf.math.is_finite(rate) & (rate > 0)
    log_rate = tf.math.log(tf.where(counts, tf.cast(rate, tf.float64), 1.0)) / math.log(10)
    bucket = tf.searchsorted(tf.constant(LEARNING_RATE_EDGES), rate[tf.newaxis], side="right")[0]

    def if_counts(value: tf.Tensor) -> tf.Tensor:
        return tf.where(counts, value, tf.zeros_like(value))

    return collections.OrderedDict(
        clients=tf.cast(counts, tf.int32),
        log_rate=log_rate,
        squared_log_rate=tf.square(log_rate),
        histogram=if_counts(tf.one_hot(bucket, len(LEARNING_RATE_EDGES) + 1, dtype=tf.int32)),
        judged_steps=if_counts(tf.cast(report["judged_steps"], tf.float64)),
        discarded_steps=if_counts(tf.cast(report["discarded_steps"], tf.float64)),
    )


def summary(sums: Any) -> collections.OrderedDict:
    """The measurements of a round, from the sums of `contribution` over its clients.

    Args:
      sums: of each entry of `contribution`.

    Returns:
      `clients`: how many judged a step; `log10_learning_rate_mean` and `_stddev` (of the
      population); `learning_rate_histogram`: clients by η, in the buckets between
      `LEARNING_RATE_EDGES`, lower edge included; `discarded_share`: of all judged steps. Without
      clients the counts are 0 and all else is NaN.
    """
    clients = tf.cast(sums["clients"], tf.float64)
    mean = sums["log_rate"] / clients
    variance = sums["squared_log_rate"] / clients - tf.square(mean)
    return collections.OrderedDict(
        clients=sums["clients"],
        log10_learning_rate_mean=tf.cast(mean, tf.float32),
        # Rounding may leave a variance below 0; NaN passes through.
        log10_learning_rate_stddev=tf.cast(tf.sqrt(tf.maximum(variance, 0.0)), tf.float32),
        learning_rate_histogram=sums["histogram"],
        discarded_share=tf.cast(sums["discarded_steps"] / sums["judged_steps"], tf.float32),
    )
