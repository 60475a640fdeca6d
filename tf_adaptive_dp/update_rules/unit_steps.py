"""Scales and step sizes in units that come from the model and its data.

Let U_k be the upper quartile of the norms of the examples' gradients for variable k, at the start.
Gradients are multiplied by a_k before they are clipped, and steps are multiplied by it again:

    a_k = 10·w_k / (U_k·√(Σ w²)),    θ_k ← θ_k − η·a_k·p_k

with p the noisy mean of gradients that were clipped to C = 1, a tenth of what is usual. The result
depends neither on the units of the inputs nor on how a function is distributed over the weights of
its layers. Kernels have w = 1. Biases and other vectors have w = 1/10, since they move all examples
alike, and their noise does, too.

The noise of p has the standard deviation s = σ/L. The steps

    η_t = min(κ / (10·s·√(t + 10)), 1) · u,    κ = min(1.4 / D^1.25, max(50/√d, .35))

let the noise of t steps change the loss of an example by about κ·u·√(ln t). Models whose data pass
D kernels bear less noise than linear ones, since each kernel multiplies the noise of the others. So
do models with many parameters d, in which examples share less of what is learned. The figures were
chosen on held-out training data, for D = 1 to 4; deeper models get the κ of D = 4.

The unit u of the loss is one nat for a model whose first predictions are unsure, as the usual
initial weights make them. It is larger if they are far from each other, since then only changes of
that size matter: κ·u is at least .6 times the distance between the quartiles of the first losses.
Where losses are small numbers by nature, u is 3/2 of their median instead of one.

The rule is our own; these are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

_TYPICAL_NORM = 10.0  # in units of C
_WEIGHT_OF_VECTORS = 0.1
_OF_SPREAD, _OF_MEDIAN = 0.6, 1.5
_DELAY = 10.0
_KAPPA_OF_LINEAR, _POWER_OF_DEPTH, _DEEPEST = 1.4, 1.25, 4
_KAPPA_OF_WIDE, _KAPPA_PER_ROOT = 0.35, 50.0


def scales(norms: tf.Tensor, ranks: Sequence[int]) -> tf.Tensor:
    """a_k; ones until the norms are known.

    Args:
      norms: [K], float64, U_k; 0 where the gradients did not stand out from the noise. They count
        as if they were as large as the largest of another variable.
      ranks: the number of axes of each variable.

    Returns:
      [K], float64.

    >>> norms = tf.constant([4.0, 0.5, 0.0], tf.float64)
    >>> [round(float(a), 3) for a in scales(norms, [2, 1, 2])]
    [1.763, 1.411, 1.763]
    """
    weights = [1.0 if rank > 1 else _WEIGHT_OF_VECTORS for rank in ranks]
    total = sum(w * w for w in weights) ** 0.5
    wanted = tf.constant([_TYPICAL_NORM * w / total for w in weights], tf.float64)
    norms = tf.where(norms > 0, norms, tf.reduce_max(norms))
    return tf.where(norms > 0, wanted / norms, tf.ones_like(wanted))


def default_kappa(shapes: Sequence[Sequence[int]]) -> float:
    """κ = min(1.4 / D^1.25, max(50/√d, .35)), for D kernels, of which at most four count.

    Args:
      shapes: those of the variables, with d entries in all. Kernels have two axes or more.

    >>> linear, wide = [[64, 10], [10]], [[10_000, 2], [2]]
    >>> mlp = [[784, 256], [256], [256, 256], [256], [256, 10], [10]]
    >>> [round(default_kappa(shapes), 2) for shapes in (linear, wide, mlp)]
    [1.4, 0.35, 0.35]
    """
    num_parameters = sum(math.prod(shape) for shape in shapes)
    depth = min(max(sum(len(shape) > 1 for shape in shapes), 1), _DEEPEST)
    of_width = max(_KAPPA_PER_ROOT / math.sqrt(max(num_parameters, 1)), _KAPPA_OF_WIDE)
    return min(_KAPPA_OF_LINEAR / depth**_POWER_OF_DEPTH, of_width)


def unit_of_loss(median: tf.Tensor, spread: tf.Tensor, kappa: float) -> tf.Tensor:
    """u, in the units of the loss; 1 until the losses are known.

    Args:
      median: scalar, float64, of the first losses.
      spread: scalar, float64, the distance between their quartiles.
      kappa: `default_kappa` of the model.

    Returns:
      Scalar, float64.

    >>> of_losses = tf.constant([(2.3, 0.4), (2.3, 4.0), (0.02, 0.01)], tf.float64)
    >>> [round(float(unit_of_loss(median, spread, 0.35)), 3) for median, spread in of_losses]
    [1.0, 6.857, 0.03]
    """
    one = tf.ones_like(median)
    typical = tf.minimum(one, _OF_MEDIAN * tf.abs(median))
    unit = tf.maximum(typical, _OF_SPREAD / kappa * spread)
    return tf.where(unit > 0, unit, one)


def step_size(num_steps: tf.Tensor, noise: tf.Tensor, unit: tf.Tensor, kappa: float) -> tf.Tensor:
    """η_t.

    Args:
      num_steps: t, this step included.
      noise: s = σ/L.
      unit: u.
      kappa: κ.

    Returns:
      Scalar, float64.

    >>> unit, noise = (tf.constant(x, tf.float64) for x in (1.0, 0.01))
    >>> [round(float(step_size(tf.constant(t), noise, unit, 0.35)), 3) for t in (1, 15, 990)]
    [1.0, 0.7, 0.111]
    """
    decay = tf.sqrt(tf.cast(num_steps, tf.float64) + _DELAY)
    largest = tf.ones_like(decay)
    return tf.minimum(kappa / (_TYPICAL_NORM * noise * decay), largest) * unit
