"""What every federated data set needs: a choice of clients, and batches for local training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_adaptive_dp import checks


@dataclasses.dataclass(frozen=True)
class ClientBatches:
    """How a client reads its examples in one round.

    The examples are shuffled, cut to `max_examples`, batched, read `epochs` times, and the batches
    cut to `max_batches`. An epoch may end with a smaller batch, so that no batch has an example
    twice, which `tff.simulation.baselines.ClientSpec` allows. Cutting bounds the work of a client;
    the guarantee for a user does not rest on it but on the clipping of the whole update.

    Attributes:
      batch_size: examples in a batch, at least 1.
      epochs: passes over the examples in a round, at least 1.
      max_examples: examples in an epoch at most, a random choice of the client's; `None`: all.
      max_batches: batches in a round at most; `None`: all.
      shuffle_buffer: examples that are shuffled at a time; 1 keeps their order.
      seed: of the shuffling, the same order in every round; `None` for another order in each.

    Raises:
      TypeError, ValueError: for an attribute of the wrong type or out of its range.

    >>> batches = ClientBatches(batch_size=2, epochs=2, max_batches=3, shuffle_buffer=1)
    >>> [batch.tolist() for batch in batches(tf.data.Dataset.range(3)).as_numpy_iterator()]
    [[0, 1], [2], [0, 1]]
    """

    batch_size: int
    epochs: int = 1
    max_examples: int | None = None
    max_batches: int | None = None
    shuffle_buffer: int = 10_000
    seed: int | None = None

    def __post_init__(self):
        for name in ("batch_size", "epochs", "shuffle_buffer"):
            checks.integer(name, getattr(self, name), 1)
        for name, minimum in (("max_examples", 1), ("max_batches", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum)

    def __call__(
        self,
        examples: tf.data.Dataset,
        choose: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None,
    ) -> tf.data.Dataset:
        """The batches of a client.

        Args:
          examples: those of the client, unbatched.
          choose: applied to the shuffled examples before they are cut; it may leave some out.
        """
        if self.shuffle_buffer > 1:
            examples = examples.shuffle(self.shuffle_buffer, seed=self.seed)
        if choose is not None:
            examples = choose(examples)
        if self.max_examples is not None:
            examples = examples.take(self.max_examples)
        batches = examples.batch(self.batch_size)
        if self.epochs > 1:
            batches = batches.repeat(self.epochs)
        return batches if self.max_batches is None else batches.take(self.max_batches)


def random_clients(client_ids: Sequence[str], num_clients: int, seed: int) -> list[str]:
    """A uniformly random choice of clients, for example the 400 of AdaDPS, section 6.2.

    Guarantee: the choice depends on the list of ids alone. Choosing the clients with most examples
    would look at private data, which no ledger counts.

    Args:
      client_ids: of all clients; their order does not matter.
      num_clients: how many to choose.
      seed: of the choice.

    Returns:
      Their ids, sorted.

    Raises:
      TypeError, ValueError: for a wrong number, or more clients than there are.

    >>> random_clients(["d", "b", "a", "c"], 2, seed=1)
    ['b', 'c']
    """
    ordered = sorted(client_ids)
    checks.integer("num_clients", num_clients, 1)
    checks.integer("seed", seed, 0)
    if num_clients > len(ordered):
        raise ValueError(
            f"`num_clients` must be at most {len(ordered)}, the number of `client_ids`. Received: "
            f"num_clients={num_clients}"
        )
    rows = np.random.default_rng(seed).choice(len(ordered), num_clients, replace=False)
    return sorted(ordered[row] for row in rows)


def subset(client_data: Any, client_ids: Sequence[str]) -> Any:
    """The same data with some of the clients only.

    Args:
      client_data: a `tff.simulation.datasets.ClientData`.
      client_ids: which clients to keep, at least one.

    Returns:
      A `tff.simulation.datasets.ClientData`; nothing is read for it but one client's structure.

    Raises:
      ValueError: if `client_ids` is empty or names a client that `client_data` does not have.
    """
    unknown = sorted(set(client_ids) - set(client_data.client_ids))
    if unknown or not client_ids:
        raise ValueError(
            f"`client_ids` must name clients of `client_data`, which has "
            f"{len(client_data.client_ids)}. Received: {unknown[:5] or 'none at all'}"
        )
    return tff.simulation.datasets.ClientData.from_clients_and_tf_fn(
        list(client_ids), client_data.serializable_dataset_fn
    )


def in_memory(
    client_data: Any, batches: ClientBatches, max_clients: int = 2000
) -> Callable[[str], tf.data.Dataset]:
    """Local batches of data that take long to read or to prepare, each client's read once.

    Args:
      client_data: a `tff.simulation.datasets.ClientData` whose datasets are batches, of any size,
        such as posts that `stackoverflow.preprocess_fn` has made bags of words.
      batches: how a client reads its examples in a round.
      max_clients: how many clients are kept in memory; of others the latest ones replace them.

    Returns:
      A function from a client id to the batches of a round, such as `federated.train` takes.

    Raises:
      TypeError, ValueError: if `max_clients` is not a whole number of at least 1.
    """
    checks.integer("max_clients", max_clients, 1)
    spec = client_data.element_type_structure

    # One graph for all clients: to trace the preparation for each takes 2 MB that stay taken.
    @tf.function(input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    def read(client_id: tf.Tensor) -> Any:
        nothing = tf.nest.map_structure(lambda s: tf.zeros([0, *s.shape[1:]], s.dtype), spec)
        found = client_data.serializable_dataset_fn(client_id).unbatch().batch(1 << 40)
        return found.reduce(  # of one batch, or of none
            nothing,
            lambda *both: tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *both),
        )

    @functools.lru_cache(maxsize=max_clients)
    def examples(client_id: str) -> Any:
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), read(client_id))

    return lambda client_id: batches(tf.data.Dataset.from_tensor_slices(examples(client_id)))
