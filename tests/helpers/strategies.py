"""Noise strategies as dense matrices, made from their definitions, not from the library's code."""

import numpy as np

from tf_adaptive_dp.accounting import TreeNoise


def tree_nodes(strategy, steps):
    """(first step, last step, level) of all nodes that are whole after some steps, as they end."""
    found = []
    for t in range(steps):
        leaf, level = t % strategy.steps_per_tree, 0
        found.append((t, t, 0))
        while (leaf + 1) % 2 ** (level + 1) == 0:
            level += 1
            found.append((t - 2**level + 1, t, level))
    return found


def strategy_matrix(strategy, steps):
    """C: [numbers of z, steps]."""
    if isinstance(strategy, TreeNoise):
        columns = np.arange(steps)
        return np.array(
            [(columns >= a) & (columns <= b) for a, b, _ in tree_nodes(strategy, steps)]
        )
    matrix = np.zeros([steps, steps])
    for k, c in enumerate(strategy.coefficients[:steps]):
        matrix += c * np.eye(steps, k=-k)
    return matrix


def sum_decoder(strategy, steps):
    """B: [steps, numbers of z], B z is the noise in the sums of all steps so far.

    In a tree, such a sum consists of whole nodes. The noise of each is that of the least squares
    estimate, by the pseudo-inverse, from all nodes below it.
    """
    matrix = strategy_matrix(strategy, steps).astype(float)
    if not isinstance(strategy, TreeNoise):
        return np.tri(steps) @ np.linalg.inv(matrix)
    decoder = np.zeros([steps, len(matrix)])
    nodes = tree_nodes(strategy, steps)
    for t in range(steps):
        first = 0
        while first <= t:
            # The largest node that begins here and ends by t, within its tree.
            ends = [b for a, b, _ in nodes if a == first and b <= t]
            inside = [i for i, (a, b, _) in enumerate(nodes) if a >= first and b <= max(ends)]
            below = matrix[np.ix_(inside, range(first, max(ends) + 1))]
            decoder[t, inside] += np.linalg.pinv(below).sum(axis=0)
            first = max(ends) + 1
    return decoder


def noise_matrix(strategy, steps):
    """[steps, numbers of z]: w = M z."""
    return np.diff(sum_decoder(strategy, steps), axis=0, prepend=0)


def whitened(strategy, noises):
    """Independent standard noise, if `noises`, [steps, size], have the covariance of a strategy."""
    factor = noise_matrix(strategy, len(noises))
    root = np.linalg.cholesky(factor @ factor.T)
    return np.linalg.solve(root, noises.astype("float64"))
