"""What the mechanism needs to know about replicas, and how it sums over them."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError


def num_replicas() -> int:
    """How many replicas take each step together; 1 without a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def refuse_unsupported_strategy() -> None:
    """Rejects strategies under which the noise or the ledger would be wrong.

    Raises:
      NotPrivateError: if the strategy is not a `MirroredStrategy` or a
        `MultiWorkerMirroredStrategy`, or the call is outside of `strategy.run`, or runs eagerly.
    """
    strategy = tf.distribute.get_strategy()
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    proven = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    if asynchronous or (num_replicas() > 1 and not isinstance(strategy, proven)):
        raise NotPrivateError(
            "Private training on several replicas needs a `MirroredStrategy` or a "
            "`MultiWorkerMirroredStrategy`, in which all replicas take each step together. "
            f"Received: {type(strategy).__name__} with {num_replicas()} replicas"
        )
    if num_replicas() > 1 and tf.distribute.in_cross_replica_context():
        raise NotPrivateError(
            "Private gradients are computed by each replica. Received: a call outside of "
            "`strategy.run`. Train with `fit`, or call `strategy.run(step, args=(batch,))` with "
            "batches of `strategy.experimental_distribute_dataset`."
        )
    if num_replicas() > 1 and tf.executing_eagerly():
        raise NotPrivateError(
            "On several replicas only a compiled step shows whether each replica has examples of "
            "its own. Received: an eager step. Call `strategy.run` inside a `tf.function`, or "
            "train without `run_eagerly`."
        )


def replica_id() -> tf.Tensor:
    """The number of this replica among those of all workers, uint32."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.uint32)


def total(value: tf.Tensor) -> tf.Tensor:
    """The sum of a value over all replicas; every replica gets the same."""
    if num_replicas() == 1:
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def share(stddev: tf.Tensor) -> tf.Tensor:
    """The standard deviation of each replica's noise, if their sum has this one."""
    return stddev * num_replicas() ** -0.5
