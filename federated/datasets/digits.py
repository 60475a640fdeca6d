"""Scikit-learn's handwritten digits, divided between simulated clients: no download, no folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from federated.datasets.cifar10 import client_data, dirichlet_partition
from tf_adaptive_dp import checks

_HELD_OUT = 0.2  # of the images and of the clients


def load_digits(num_clients: int = 200, *, alpha: float = 10.0, seed: int = 0) -> tuple[Any, Any]:
    """Loads the 1,797 images of digits of scikit-learn as data of simulated clients.

    Each client has about as many images, and random shares of the classes (see
    `federated.datasets.dirichlet_partition`). Each image has mean 0 and variance 1, without
    statistics of the data set.

    Args:
      num_clients: the number of clients to train on, from 5 to 1,438.
      alpha: greater than 0. Small values give each client about one digit, large ones give all
        clients the same shares.
      seed: the seed of the division.

    Returns:
      Two `tff.simulation.datasets.ClientData` of examples, float32 [64] and int32: `num_clients`
      clients "client_1" and so on with 80% of the images, and a fifth as many others, "held_out_1"
      and so on, with the rest.

    Raises:
      TypeError, ValueError: if an argument is out of range.
      ImportError: if scikit-learn is not installed.

    >>> train, held_out = load_digits(num_clients=100)
    >>> len(train.client_ids), len(held_out.client_ids)
    (100, 20)
    >>> [spec.shape.as_list() for spec in train.element_type_structure]
    [[64], []]
    """
    from sklearn import datasets

    checks.integer("num_clients", num_clients, 5)
    images, labels = datasets.load_digits(return_X_y=True)
    images = images - images.mean(axis=1, keepdims=True)
    images = (images / images.std(axis=1, keepdims=True)).astype(np.float32)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(checks.integer("seed", seed, 0)).permutation(len(labels))
    parts = np.split(order, [round(len(labels) * (1 - _HELD_OUT))])
    made = []
    for rows, number, name in zip(
        parts, (num_clients, round(num_clients * _HELD_OUT)), ("client", "held_out")
    ):
        partition = {
            f"{name}_{k + 1}": mine
            for k, mine in enumerate(
                dirichlet_partition(labels[rows], number, alpha, seed).values()
            )
        }
        made.append(client_data(images[rows], labels[rows], partition))
    return made[0], made[1]
