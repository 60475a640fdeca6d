"""Tools for all federated data sets: choosing clients, and batches for local training."""

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

    The examples are shuffled, cut to `max_examples`, batched, and repeated for `epochs`; then the
    batches are cut to `max_batches`. An epoch may end with a smaller batch, so that no batch has an
    example twice (`tff.simulation.baselines.ClientSpec` allows that). Cutting bounds the work of a
    client. The guarantee for a user does not depend on this, but on clipping the whole update.

    Attributes:
      batch_size: the number of examples in a batch, at least 1.
      epochs: the number of passes over the examples in a round, at least 1.
      max_examples: the largest number of examples in an epoch, chosen at random; `None` for all.
      max_batches: the largest number of batches in a round; `None` for all.
      shuffle_buffer: the size of the shuffle buffer; 1 keeps the order.
      seed: the seed of the shuffling, for the same order in every round; `None` for a new order in
        each round.

    Raises:
      TypeError, ValueError: if an attribute is invalid.

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

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "shuffle_buffer"):
            checks.integer(name, getattr(self, name), 1)
        for name, minimum in (("max_examples", 1), ("max_batches", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum)

    @tf.autograph.experimental.do_not_convert  # `ClientData.preprocess` traces it
    def __call__(
        self,
        examples: tf.data.Dataset,
        choose: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None,
    ) -> tf.data.Dataset:
        """The batches of a client.

        Args:
          examples: the client's examples, unbatched.
          choose: a filter for the shuffled examples, applied before they are cut.
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
    """Chooses clients uniformly at random, for example the 400 of AdaDPS, section 6.2.

    Guarantee: the choice depends on the list of ids alone. Choosing the clients with the most
    examples would use private data that no ledger counts.

    Args:
      client_ids: the ids of all clients, in any order.
      num_clients: the number of clients to choose.
      seed: the seed of the choice.

    Returns:
      The sorted ids of the chosen clients.

    Raises:
      TypeError, ValueError: if an argument has the wrong type, or `num_clients` exceeds the number
        of clients.

    >>> random_clients(["d", "b", "a", "c"], 2, seed=1)
    ['b', 'c']
    """
    ordered = sorted(checks.strings("client_ids", client_ids))
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
    """Restricts data to some of the clients.

    Args:
      client_data: a `tff.simulation.datasets.ClientData`.
      client_ids: the clients to keep, at least one.

    Returns:
      A `tff.simulation.datasets.ClientData`. Only the structure of one client is read.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `client_ids` is empty or names a client that `client_data` does not have.
    """
    checks.instance("client_data", client_data, tff.simulation.datasets.ClientData)
    client_ids = checks.strings("client_ids", client_ids)
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
    """Caches local data that are slow to read or to prepare; each client is read once.

    Args:
      client_data: a `tff.simulation.datasets.ClientData` whose datasets are batches of any size,
        such as bags of words from `stackoverflow.bags_of_words`.
      batches: how a client reads its examples in a round.
      max_clients: the number of clients to keep in memory; the least recently used are dropped.

    Returns:
      A function from a client id to the batches of a round, for `federated.train`. It raises
      ValueError for the id of no client.

    Raises:
      TypeError, ValueError: if an argument has the wrong type, `max_clients` is below 1, or
        `client_data` has no batches.
    """
    checks.instance("batches", batches, ClientBatches)
    checks.integer("max_clients", max_clients, 1)
    spec = getattr(client_data, "element_type_structure", None)
    if spec is None or any(part.shape.rank == 0 for part in tf.nest.flatten(spec)):
        raise TypeError(
            "`client_data` must be a `tff.simulation.datasets.ClientData` of batches, such as "
            "`client_data.preprocess(lambda dataset: dataset.batch(500))`. Received: client_data "
            f"of type {type(client_data).__name__}, element_type_structure={spec!r}"
        )
    known = frozenset(client_data.client_ids)

    # One graph for all clients: tracing one for each would leak 2 MB per client.
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

    def of_client(client_id: str) -> tf.data.Dataset:
        if client_id not in known:  # of which a graph may make an empty data set
            raise ValueError(
                "`client_data` must have the clients whose data are asked for. Received: "
                f"{client_id!r}, which is none of its {len(known)} `client_ids`"
            )
        return batches(tf.data.Dataset.from_tensor_slices(examples(client_id)))

    return of_client
