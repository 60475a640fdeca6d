"""A linear problem whose hidden values a test mixes, and whether that mixes the examples."""

import numpy as np
import tensorflow as tf

from tests.helpers import mixing, zoo

MODES = ("graph", "graph of fixed size")
BATCH = (zoo.floats(4, 4), np.array([0.4, -1.2, 0.7, -0.3], "float32"), np.array([1, 0, 3, 1]))


def linear(mix):
    """A problem whose hidden values are mixed."""
    kernel = tf.Variable(zoo.floats(4, 4, seed=2))

    def losses(x, y, k):
        h = mix(tf.matmul(x, kernel), y, k)
        return tf.reduce_sum(h**2, axis=list(range(1, h.shape.rank))) if h.shape.rank > 1 else h

    return zoo.Problem([kernel], losses, BATCH)


def losses_and_gradients(problem, batch):
    """[B, ...], by plain TensorFlow on the whole batch."""
    mixing.GLOBAL.assign([-1.0, 0.0, 0.5, 1.0])
    batch = [tf.constant(a) for a in batch]
    with tf.GradientTape(persistent=True) as tape:
        losses = problem.losses(*batch)
        parts = [losses[i] for i in range(len(batch[0]))]
    gradients = [tape.gradient(p, problem.variables, unconnected_gradients="zero") for p in parts]
    return np.stack(
        [np.append(np.concatenate([np.ravel(g) for g in gs]), p) for p, gs in zip(parts, gradients)]
    )


def mixes(problem):
    """Whether losses or gradients of some examples depend on the values of the first or last."""
    before = losses_and_gradients(problem, problem.batch)
    for one in (0, 3):
        others = [a.copy() for a in problem.batch]
        for array, value in zip(others, (2.5, 1.7, 2)):
            array[one] = value
        after = losses_and_gradients(problem, others)
        if np.abs(np.delete(before - after, one, axis=0)).max() > 1e-4:
            return True
    return False


def search(problem, mode):
    """Has the library make a source, and run nothing."""

    def step(*batch):
        return zoo.source(problem, *batch).squared_norms()

    zoo.in_mode(mode, step, problem.batch).get_concrete_function()
