"""The clients of the benchmarks and a start for their model: NumPy arrays, the same on each side.

Nothing here imports TensorFlow: peers' environments may have another one, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEATURES, CLASSES, RATE = 784, 10, 0.1


def random_clients(
    examples: int, num_clients: int, features: Sequence[int] = (FEATURES,)
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Features and labels of each client, drawn at random."""
    rng = np.random.default_rng(0)
    shape = [examples, *features]
    return [
        (rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, examples, np.int32))
        for _ in range(num_clients)
    ]


def initial_weights(hidden: int) -> list[np.ndarray]:
    """Glorot's uniform start of a network with one hidden layer: kernel, bias, kernel, bias."""
    rng = np.random.default_rng(1)
    found = []
    for inputs, outputs in ((FEATURES, hidden), (hidden, CLASSES)):
        limit = (6 / (inputs + outputs)) ** 0.5
        found.append(rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32))
        found.append(np.zeros(outputs, np.float32))
    return found


def fingerprint(change: Sequence[np.ndarray]) -> list[float]:
    """The norm of a change of the weights, and its products with four random directions."""
    vector = np.concatenate([np.ravel(part) for part in change]).astype(np.float64)
    directions = np.random.default_rng(2).standard_normal((4, vector.size))
    return [float(np.linalg.norm(vector)), *map(float, directions @ vector)]
