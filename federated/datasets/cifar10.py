"""CIFAR-10, divided between clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
import tensorflow_federated as tff

from federated.datasets.clients import ClientBatches
from federated.datasets.folder import folder
from tf_adaptive_dp import checks

Arrays = tuple[np.ndarray, np.ndarray]

# Classes of the clients of the ADADP paper: cars and trucks, planes and ships, cats and dogs, birds
# and frogs, deer and horses.
PAPER_CLASSES = ((1, 9), (0, 8), (3, 5), (2, 6), (4, 7))

# The published statistics of the channels of CIFAR-10's training images.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def load_cifar10(data_dir: str | None = None) -> tuple[Arrays, Arrays]:
    """Loads images and classes of the training and the test set without downloading anything.

    Args:
      data_dir: the folder of tensorflow-datasets; `None` takes the environment's `TFDS_DATA_DIR`.

    Returns:
      (images, labels) for training and for testing: uint8 [N, 32, 32, 3] and int32 [N], with 50,000
      and 10,000 images (184 MB together).

    Raises:
      FileNotFoundError: if CIFAR-10 is not there.
    """
    how = "Prepare CIFAR-10 in it with `tfds build cifar10 --data_dir=FOLDER`."
    path = folder("data_dir", data_dir, "TFDS_DATA_DIR", how)
    try:
        # Asked first: where nothing was prepared, tfds.load looks for the data set on the network.
        if not any(path.glob("cifar10/*/dataset_info.json")):
            raise FileNotFoundError("it has no cifar10/*/dataset_info.json")
        splits = tfds.load(
            "cifar10", data_dir=str(path), split=["train", "test"], batch_size=-1, download=False
        )
    except (OSError, AssertionError, ValueError, tf.errors.OpError) as error:
        raise FileNotFoundError(
            f"`data_dir` or the environment's TFDS_DATA_DIR must name a folder that has CIFAR-10. "
            f"{how} Received: {str(path)!r}: {error}"
        ) from error
    train, test = ((s["image"].numpy(), s["label"].numpy().astype(np.int32)) for s in splits)
    return train, test


def paper_partition(labels: np.ndarray, randomness: float, seed: int) -> dict[str, np.ndarray]:
    """The five clients of the ADADP paper, "Federated learning experiments".

    With `randomness` 0 client_1 has cars and trucks, client_2 planes and ships, client_3 cats and
    dogs, client_4 birds and frogs, client_5 deer and horses. Otherwise each client gives up a
    random share of its images, and the pool is redistributed uniformly. Each client receives as
    many images as it gave, so it keeps its number (10,000 of CIFAR-10's training images).

    Args:
      labels: [N]; the class of each image.
      randomness: the share of images to redistribute, in [0, 1]; 1 is a uniform division.
      seed: the seed of the choice.

    Returns:
      The rows of each client's images.

    Raises:
      TypeError, ValueError: if `labels` are not classes, or an argument is out of range.

    >>> paper_partition(np.arange(10), randomness=0, seed=0)["client_1"].tolist()
    [1, 9]
    """
    labels = _classes(labels)
    checks.number("randomness", randomness, 0)
    if randomness > 1:
        raise ValueError(f"`randomness` must be at most 1. Received: randomness={randomness!r}")
    rng = np.random.default_rng(checks.integer("seed", seed, 0))
    if labels.max() > 9:
        raise ValueError(
            "`labels` must be CIFAR-10's classes, 0 to 9; `dirichlet_partition` takes others. "
            f"Received: a label {labels.max()}"
        )
    own = [rng.permutation(np.flatnonzero(np.isin(labels, pair))) for pair in PAPER_CLASSES]
    given = [round(randomness * len(rows)) for rows in own]
    pool = rng.permutation(np.concatenate([rows[:n] for rows, n in zip(own, given)]))
    dealt = np.split(pool, np.cumsum(given)[:-1])
    return {
        f"client_{k + 1}": np.sort(np.concatenate([rows[n:], new]))
        for k, (rows, n, new) in enumerate(zip(own, given, dealt))
    }


def dirichlet_partition(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int
) -> dict[str, np.ndarray]:
    """Clients with random class shares q ~ Dir(alpha · p), where p are the shares in all data.

    Every client draws q, and then its images class by class from q without replacement; classes
    that run out are removed from q. Each image belongs to one client, and the numbers of images of
    two clients differ by at most one. For the common notation Dir(a, ..., a) with C balanced
    classes, alpha is C · a.

    Args:
      labels: [N]; the class of each image, at least 0.
      num_clients: the number of clients, from 1 to N.
      alpha: greater than 0. Small values give each client about one class, large ones give all
        clients the same shares.
      seed: the seed of the choice.

    Returns:
      The rows of each client's images, for "client_1" and so on.

    Raises:
      TypeError, ValueError: if `labels` are not classes, or an argument is out of range.

    References:
      Hsu, Qi and Brown (2019), "Measuring the Effects of Non-Identical Data Distribution for
      Federated Visual Classification", arXiv:1909.06335.

    >>> clients = dirichlet_partition(np.arange(6) % 2, num_clients=4, alpha=1.0, seed=0)
    >>> {name: len(rows) for name, rows in clients.items()}
    {'client_1': 2, 'client_2': 2, 'client_3': 1, 'client_4': 1}
    """
    labels = _classes(labels)
    checks.integer("num_clients", num_clients, 1)
    checks.number("alpha", alpha, 0, strict=True)
    rng = np.random.default_rng(checks.integer("seed", seed, 0))
    if num_clients > len(labels):
        raise ValueError(
            f"`num_clients` must be at most {len(labels)}, the number of images, so that no client "
            f"is left without images; ask for fewer clients. Received: num_clients={num_clients}"
        )
    stock = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    left = np.array([len(rows) for rows in stock])
    prior = left / left.sum()
    sizes = [len(part) for part in np.array_split(labels, num_clients)]
    clients = {}
    # Who comes late gets what is left over, so the order is random, too.
    for k in rng.permutation(num_clients):
        taken = _draw_counts(rng, _dirichlet(rng, alpha * prior), left, sizes[k])
        rows = [r[n - t : n] for r, n, t in zip(stock, left, taken)]
        clients[k] = np.sort(np.concatenate(rows))
        left = left - taken
    return {f"client_{k + 1}": clients[k] for k in range(num_clients)}


def _dirichlet(rng: np.random.Generator, concentration: np.ndarray) -> np.ndarray:
    """One draw, by logarithms of gamma variables: numpy's own never ends for tiny parameters."""
    logs = np.log(rng.standard_gamma(concentration + 1))
    logs += np.log1p(-rng.random(len(concentration))) / concentration
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


def _draw_counts(
    rng: np.random.Generator, shares: np.ndarray, left: np.ndarray, number: int
) -> np.ndarray:
    """How many of each class: `number` draws without replacement; `left` has at least as many."""
    taken = np.zeros_like(left)
    while missing := number - taken.sum():
        open_shares = np.where(taken < left, shares, 0.0)
        if not open_shares.sum() > 0:  # all that q asks for is used up
            open_shares = (left - taken).astype(np.float64)
        taken += rng.multinomial(missing, open_shares / open_shares.sum())
        taken = np.minimum(taken, left)
    return taken


def _classes(labels: np.ndarray) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(
            "`labels` must be whole numbers of at least 0, one per image. Received: "
            f"{labels.dtype} of shape {labels.shape}: {labels!r:.80}"
        )
    return labels


def client_data(images: np.ndarray, labels: np.ndarray, partition: Mapping[str, Any]) -> Any:
    """Images as a federated data set, kept once, as they are (uint8).

    `create_tf_dataset_for_client` copies the images of that one client into its dataset. TFF takes
    no dataset of more than 100 MB, about 34,000 images. (`tff.simulation.datasets.TestClientData`
    copies all images when it is made, and again in each dataset that TFF traces.)

    Args:
      images: [N, ...], or something else that `np.asarray` makes an array of.
      labels: [N], likewise.
      partition: of each client the rows of its images.

    Returns:
      A `tff.simulation.datasets.ClientData` of examples (image, label).

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if lengths differ, or a client has no rows or rows that are not there.
    """
    images, labels = _rows("images", images), _rows("labels", labels)
    checks.instance("partition", partition, Mapping)
    if len(images) != len(labels):
        raise ValueError(
            f"`images` and `labels` must have the same length. Received: {len(images)} images, "
            f"{len(labels)} labels"
        )
    for name, given in partition.items():
        rows = np.asarray(given)
        is_list = rows.ndim == 1 and len(rows) and rows.dtype.kind in "iu"
        if not is_list or rows.min() < 0 or rows.max() >= len(images):
            raise ValueError(
                f"`partition` must give each client at least one row in [0, {len(images)}). "
                f"Received: {name!r}: {given!r:.80}"
            )
    names = list(checks.strings("partition", partition))
    if not names:
        raise ValueError("`partition` must have at least one client. Received: partition={}")

    def dataset(client_id: Any) -> tf.data.Dataset:
        if isinstance(client_id, str):
            rows = partition[client_id]
            return tf.data.Dataset.from_tensor_slices((images[rows], labels[rows]))
        # Traced, where the client is not known yet: all images become part of the graph.
        rows = tf.ragged.constant([list(partition[name]) for name in names], dtype=tf.int64)
        is_client = tf.equal(names, client_id)
        known = tf.debugging.Assert(tf.reduce_any(is_client), ["There is no client", client_id])
        with tf.control_dependencies([known]):  # `argmax` would find the first one
            mine = rows[tf.argmax(is_client)]
        return tf.data.Dataset.from_tensor_slices(
            (tf.gather(images, mine), tf.gather(labels, mine))
        )

    return tff.simulation.datasets.ClientData.from_clients_and_tf_fn(names, dataset)


def _rows(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if not array.ndim:
        raise TypeError(f"`{name}` must be an array, one row per image. Received: {name}={value!r}")
    return array


def normalized_images(batches: ClientBatches) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Makes batches of (image, label), float32 [B, 32, 32, 3] and int32 [B], while they are read.

    Channels are normalised to CIFAR-10's published mean and deviation.

    Args:
      batches: how a client reads its examples. For testing: `ClientBatches(500, shuffle_buffer=1)`.

    Returns:
      A function of a dataset of (image, label), for `client_data(...).preprocess`.

    Raises:
      TypeError: if `batches` is something else.
    """
    checks.instance("batches", batches, ClientBatches)

    def normalise(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        scaled = tf.cast(images, tf.float32) / 255
        return (scaled - tf.constant(_MEAN)) / tf.constant(_STD), tf.cast(labels, tf.int32)

    @tf.autograph.experimental.do_not_convert  # TFF traces it, which breaks dataclasses
    def preprocess(examples: tf.data.Dataset) -> tf.data.Dataset:
        return batches(examples).map(normalise)  # whole batches: faster than image by image

    return preprocess
