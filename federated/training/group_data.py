"""How the clients' data sets travel to a group, and how the group reads them.

A group of clients, see `grouped`, is sent the serialized data sets of its clients in one message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from federated.clients.client_work import Steps, iterate

MESSAGE = tff.TensorType(np.str_, [3])  # see `message`

# These call no functions and start no threads, and their cardinality is exact.
_IN_THREAD = frozenset(
    {
        "BatchDatasetV2",
        "ConcatenateDataset",
        "Const",
        "RangeDataset",
        "RepeatDataset",
        "ShuffleDatasetV3",
        "SkipDataset",
        "TakeDataset",
        "TensorDataset",
        "TensorSliceDataset",
        "_Retval",
    }
)


class SerializedClient(NamedTuple):
    """A client's data set on its way to a group.

    Attributes:
      graph: as TFF serializes it.
      in_thread: whether the thread that trains on the batches can also compute them. That takes
        less time, but where a data set calls a function, the thread might wait for a function that
        waits for a free thread.
    """

    graph: bytes
    in_thread: bool


def serialized_client(dataset: tf.data.Dataset) -> SerializedClient:
    """Serializes a client's data set.

    Raises:
      ValueError: see `require_no_shared_files`.

    >>> numbers = tf.data.Dataset.range(6).batch(2)
    >>> serialized_client(numbers).in_thread, serialized_client(numbers.map(abs)).in_thread
    (True, False)
    """
    graph = serialized_dataset(dataset)
    parsed = tf.compat.v1.GraphDef.FromString(graph)
    require_no_shared_files(parsed)
    in_thread = _IN_THREAD.issuperset(node.op for node in nodes_of(parsed))
    return SerializedClient(graph, in_thread=in_thread)


def serialized_dataset(dataset: tf.data.Dataset) -> bytes:
    """The graph of a data set, as TFF serializes it."""
    variant = tf.data.experimental.to_variant(dataset)
    return tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()


def nodes_of(graph: Any) -> list[Any]:
    """The nodes of a `GraphDef`, those of its functions included."""
    return [*graph.node, *(n for f in graph.library.function for n in f.node_def)]


def require_no_shared_files(graph: Any) -> None:
    """Raises if a client's data set keeps its batches in a file, where others would find them.

    All clients whose data sets name the same file read what the first of them wrote: the data of
    one client would come as often as there are clients, which no clip bounds.

    Args:
      graph: the `GraphDef` of the data set.

    Raises:
      ValueError: if the data set does so.
    """
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if not node.op.startswith(("CacheDataset", "SnapshotDataset")):
                continue
            source = by_name.get(node.input[1].partition(":")[0])
            value = source.attr["value"].tensor.string_val if source is not None else [b"?"]
            if any(value):
                raise ValueError(
                    "`client_data` must give data sets that keep nothing in files: clients whose "
                    "data sets name the same file, as after `client_data.preprocess`, all get the "
                    "data of the first of them, and no clip bounds what that one changes. Leave "
                    "out the file name, `.cache()`, and leave out `.snapshot`. Received: a data "
                    f"set with {node.op} in the file {value[0].decode()!r}"
                )


def groups_of(clients: Sequence[SerializedClient], number: int) -> list[list[SerializedClient]]:
    """Divides clients into groups of equal numbers and nearly equal sizes.

    >>> clients = [SerializedClient(graph, True) for graph in (b"a", b"abc", b"ab", b"abcd")]
    >>> [[client.graph for client in group] for group in groups_of(clients, 2)]
    [[b'abcd', b'ab'], [b'abc', b'a']]
    """
    by_size = sorted(clients, key=lambda client: len(client.graph), reverse=True)
    return [by_size[k::number] for k in range(number)]


def message(
    group: Sequence[SerializedClient], files: contextlib.ExitStack | None = None
) -> np.ndarray:
    """What a group is sent: its clients' data sets in a row, or a path to them; and a header.

    These are three strings in a vector, since the contexts of TFF's programs take the parts of a
    structure for those of a list of clients.

    TFF copies what it sends a dozen times. A worker on this machine reads it from a file instead,
    which lives in memory alone, and ends with this process at the latest.

    Args:
      group: its clients.
      files: if given, the data sets go to a file, which `files` closes.

    >>> clients = [SerializedClient(b"ab", True), SerializedClient(b"c", False)]
    >>> content, path, header = message(clients)
    >>> content, path, np.frombuffer(header, np.int64)  # the sizes, and whether in one thread
    (b'abc', b'', array([2, 1, 1, 0]))
    """
    graphs = [client.graph for client in group]
    header = np.array([(len(c.graph), c.in_thread) for c in group], np.int64).tobytes()
    if files is None:
        return np.array([b"".join(graphs), b"", header], np.object_)
    file = files.enter_context(open(os.memfd_create("clients"), "wb"))
    file.writelines(graphs)
    file.flush()
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}".encode()
    return np.array([b"", path, header], np.object_)


class ReceivedClients:
    """The clients in a `message`; made in the graph that trains them.

    Attributes:
      number: scalar; how many there are.

    Args:
      group: the message.
      batch_spec: of the clients' batches.
    """

    def __init__(self, group: tf.Tensor, batch_spec: Any):
        sent, path, header = tf.unstack(group)
        self._content = tf.cond(tf.equal(path, ""), lambda: sent, lambda: tf.io.read_file(path))
        header = tf.reshape(tf.io.decode_raw(header, tf.int64), [-1, 2])
        self._sizes, self._in_thread = header[:, 0], header[:, 1] > 0
        self._ends = tf.cumsum(self._sizes)
        self._batch_spec = batch_spec
        self.number = tf.size(self._sizes)

    def data(self, k: tf.Tensor) -> tuple[tf.data.Dataset, tf.Tensor]:
        """The data set of client `k`, and whether one thread can compute and train on it."""
        size = self._sizes[k]
        graph = tf.strings.substr(self._content, self._ends[k] - size, size)
        return _dataset(graph, self._batch_spec), self._in_thread[k]


def received_spec(batch_spec: Any) -> tuple[tf.data.DatasetSpec, tf.TensorSpec]:
    """The specification of `ReceivedClients.data`."""
    return tf.data.DatasetSpec(batch_spec), tf.TensorSpec([], tf.bool)


def iterate_received(data: tuple[tf.data.Dataset, tf.Tensor], start: tuple, steps: Steps) -> tuple:
    """Takes a step on each batch of `ReceivedClients.data`, see `iterate`."""
    dataset, in_thread = data
    return iterate(dataset, start, steps, tf.where(in_thread, dataset.cardinality(), 0))


def _dataset(serialized: tf.Tensor, batch_spec: Any) -> tf.data.Dataset:
    """A client's data set; preparing its pipeline must not take longer than running it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    variant = tf.raw_ops.DatasetFromGraph(graph_def=serialized)
    return tf.data.experimental.from_variant(variant, batch_spec).with_options(options)
